"""The weights of interactions in training: how much the loss of a list counts.

A data set may have a weight for each interaction, for example the number of plays (`prepare --weight`). Training
transforms these numbers as `interaction_weights` says and scales them to mean 1 over the interactions that it fits, so
that learning rate and lambda keep their meaning. The loss of a list is multiplied by the mean weight of its positives.
"""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from drm_triton.config import TrainConfig
from drm_triton.data.csr import CSR
from drm_triton.errors import InputError

# Constants of BM25 as in the library implicit. In texts, where few words occur often, k1 is about 1.2.
BM25_K1 = 100.0
BM25_B = 0.8


def require_weights(interactions: CSR, transform: str) -> None:
    """Raise if a transform is given, but the interactions have no weights."""
    if transform != "off" and interactions.weights is None:
        raise InputError(
            f"`interaction_weights` {transform} needs weights, which the data set does not have: prepare it with "
            "`drm-triton prepare ... --weight COLUMN` or Dataset.from_frame(..., weight=COLUMN)"
        )


def training_weights(config: TrainConfig, fit: CSR, device: torch.device) -> Tensor | None:
    """Return the weights of the interactions in training: float32 [nnz], with mean 1; None if they are off.

    With `interaction_weight_cap`, weights above that multiple of their mean are reduced to it, and the result is scaled
    to mean 1 again.
    """
    require_weights(fit, config.interaction_weights)
    if config.interaction_weights == "off":
        return None
    weights = _scaled(TRANSFORMS[config.interaction_weights](fit))
    if config.interaction_weight_cap is not None:
        weights = _scaled(np.minimum(weights, config.interaction_weight_cap))
    # In float64 until here, so that equal weights become exactly 1.
    return torch.from_numpy(weights.astype(np.float32)).to(device)


def raw(fit: CSR) -> NDArray[np.float64]:
    """Return the weights as they are: float64 [nnz]."""
    assert fit.weights is not None
    return fit.weights.astype(np.float64)


def log(fit: CSR) -> NDArray[np.float64]:
    """Return log(1 + weight): float64 [nnz]."""
    return np.log1p(raw(fit))


def bm25(fit: CSR) -> NDArray[np.float64]:
    """Return the weights of BM25, with users as documents and items as words: float64 [nnz].

    The weight w of user u and item i becomes idf_i (k1 + 1) w / (k1 (1 - b + b length_u / mean length) + w). The length
    of a user is the sum of the user's weights, and idf_i = log(1 + (M - n_i + 1/2) / (n_i + 1/2)) with M users, n_i of
    whom have item i. So large weights saturate, users with large weights count less, and rare items count more.
    """
    w, n = raw(fit), fit.popularity()
    user = np.repeat(np.arange(fit.shape[0]), fit.degrees())
    length = np.bincount(user, w, fit.shape[0])
    relative = length / length[length > 0].mean()
    idf = np.log1p((fit.shape[0] - n + 0.5) / (n + 0.5))
    saturated: NDArray[np.float64] = (BM25_K1 + 1) * w / (BM25_K1 * (1 - BM25_B + BM25_B * relative[user]) + w)
    return idf[fit.indices] * saturated


TRANSFORMS: dict[str, Callable[[CSR], NDArray[np.float64]]] = {"raw": raw, "log": log, "bm25": bm25}


def _scaled(weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return weights with mean 1."""
    mean = float(weights.sum()) / max(len(weights), 1)
    return weights / mean
