"""The popularity prior: what the number of interactions of an item adds to its score for every user.

With the score s_ui and the temperature T, softmax models the probability of an item as proportional to exp(s_ui / T).
With the prior T a log n_i, it is proportional to n_i^a exp(s_ui / T), n_i the number of the item's interactions. The
prior is fixed: the vectors learn what popularity does not explain.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from drm_triton.config import TrainConfig
from drm_triton.kernels.devices import to_device
from drm_triton.kernels.precision import widened
from drm_triton.ranking.topk import with_bias


def popularity_prior(config: TrainConfig, popularity: NDArray[np.int64]) -> Tensor | None:
    """Return the prior of each item, float32 [N] on the CPU, or None if there is none.

    An item without interactions counts as one with a single interaction.

    Parameters
    ----------
    popularity : number of training interactions of each item [N]

    Examples
    --------
    >>> popularity_prior(TrainConfig(popularity=0.5, temperature=0.2), np.array([1, 2, 0]))
    tensor([0.0000, 0.0693, 0.0000])
    """
    if config.popularity == 0:
        return None
    weight = config.popularity * config.temperature_for(len(popularity))
    return torch.from_numpy((weight * np.log(np.maximum(popularity, 1))).astype(np.float32))


def ranking_factors(U: Tensor, V: Tensor, config: TrainConfig, popularity: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
    """Return the factors whose product ranks: those of users U [M, d] and items V [N, d], and the prior as a column."""
    prior = popularity_prior(config, popularity)
    return (U, V) if prior is None else with_bias(widened(U), widened(V), to_device(prior, V.device))
