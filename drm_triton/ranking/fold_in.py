"""Fold-in: the vector of a new user, who is not in the training data, from the items the user liked.

The item factors stay fixed. The vector is fitted with the training objective: lists of the user's items and sampled
negatives, Adagrad steps, projection onto the unit ball. It starts in the direction of the mean of the liked items'
factors, so a few steps are enough. Each step uses the mean gradient of one epoch of the user's lists.

A vector depends only on the history, to the bit: not on other users folded in with it, on the order of the items, or on
the number of threads. For that, each user's lists are sampled as if the user were alone. Users share only the calls of
the kernels, which process every list and every row independently.
"""

import zlib
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from drm_triton.config import TrainConfig
from drm_triton.data.csr import CSR
from drm_triton.kernels.protocol import Backend, GradientTerms, ListBatch, ListPlan, summed
from drm_triton.training.initialize import SPECTRAL_NORM
from drm_triton.training.step import objective_of

# Twice the steps, or half or twice the learning rate, do not improve the ranking; bench/fold_in.py measures it.
STEPS = 8
LR = 0.2  # learning rate of the first step; it falls to 0 as in training
MAX_LISTS = 128  # lists of a user per step: a sample of a long history gives about the same gradient
USERS_PER_BATCH = 512  # users fitted at once: bounds the memory of their lists


def fold_in(V: Tensor, histories: CSR, config: TrainConfig, backend: Backend) -> Tensor:
    """Fit the vectors of new users to fixed item factors.

    Parameters
    ----------
    V : float32 [N, d] item factors
    histories : CSR [B, N] items of each user; a user without items gets the zero vector
    config : configuration of the training
    backend : backend of `drm_triton.kernels`

    Returns
    -------
    float32 [B, d]
    """
    U = mean_direction(V, histories)
    for start in range(0, len(U), USERS_PER_BATCH):
        stop = min(start + USERS_PER_BATCH, len(U))
        _fit(U[start:stop], V, [histories.row(user) for user in range(start, stop)], config, backend)
    return U


def mean_direction(V: Tensor, histories: CSR) -> Tensor:
    """Return the mean of each user's item factors, scaled to the length of spectral initialisation: [B, d]."""
    indptr, indices = histories.tensors(V.device)
    total = torch.nn.functional.embedding_bag(indices, V, indptr, mode="sum", include_last_offset=True)
    lengths: Tensor = total.norm(dim=1, keepdim=True).clamp(min=1e-30)
    return SPECTRAL_NORM * total / lengths


def _fit(U: Tensor, V: Tensor, rows: Sequence[NDArray[np.int32]], config: TrainConfig, backend: Backend) -> None:
    """Fit the vectors U [B, d] to the items of each user, in place."""
    # A user without items has no positives, and a user with all items no negatives.
    plans = {user: _plan(row, V, config) for user, row in enumerate(rows) if 0 < len(row) < len(V)}
    if not plans:
        return
    lists_per_user = [min(plan.n_lists, MAX_LISTS) for plan in plans.values()]
    counts = torch.tensor(lists_per_user, device=V.device)
    users = torch.tensor(list(plans), dtype=torch.int32, device=V.device).repeat_interleave(counts)
    mean_weights = (1 / counts).repeat_interleave(counts)
    # As after spectral initialisation, Adagrad starts at 1: the first step is then proportional to the gradient, and
    # does not overwrite the initial direction.
    state = torch.ones_like(U)
    objective = objective_of(config, len(V))
    for step in range(STEPS):
        items = [
            backend.sample_lists(plan, step, 0, n_lists).items
            for plan, n_lists in zip(plans.values(), lists_per_user, strict=True)
        ]
        gradients = backend.list_gradients(U, V, ListBatch(users, torch.cat(items)), objective).user_grad
        terms = GradientTerms.of_rows(users, gradients, mean_weights)
        backend.update_rows(U, state, terms, LR * (1 - step / STEPS), summed(config.score_in_force))


def _plan(row: NDArray[np.int32], V: Tensor, config: TrainConfig) -> ListPlan:
    """Return the plan of a user's lists, with this user alone and a seed derived from the items.

    With the same seed for all users, all would get the same few negatives, and the error of that sample would not
    average out over users.
    """
    seed = config.seed ^ zlib.crc32(row.astype("<i4").tobytes())
    indptr = torch.tensor([0, len(row)], device=V.device)
    return ListPlan(indptr, torch.tensor(row, device=V.device), len(V), config.rho, config.eta_in_force, seed)
