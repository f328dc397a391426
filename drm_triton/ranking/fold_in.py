"""Fold-in: the vector of a person who was not in the training data, from the items the person liked.

The item factors stay as they are, and the vector is fitted by the objective of training: lists of the person's items
against sampled others, Adagrad, projection onto the unit ball. It starts in the direction of the mean of the liked
items' factors, so a few steps do, each on the mean gradient of one epoch of the person's lists.

A vector depends on the history alone, to the bit: neither on who else is folded in beside it, nor on the order of the
items, nor on the number of threads. So each person's lists are drawn as if there were nobody else, and only the
arithmetic is shared, in which the kernels treat every list and every row by itself.
"""

import zlib
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from drm_triton.config import TrainConfig
from drm_triton.data.csr import CSR
from drm_triton.kernels.protocol import Backend, GradientTerms, ListBatch, ListPlan
from drm_triton.training.initialize import SPECTRAL_NORM
from drm_triton.training.step import objective_of

# Twice the steps, or half or twice the rate, rank no better; bench/fold_in.py measures what these give.
STEPS = 8
LR = 0.2  # of the first step; it falls to 0 as in training
MAX_LISTS = 128  # of a person in one step: a sample of a long history points the same way
TOGETHER = 512  # persons fitted at once: bounds the memory for their lists


def fold_in(V: Tensor, histories: CSR, config: TrainConfig, backend: Backend) -> Tensor:
    """Fit the vectors of new persons to fixed item factors.

    Parameters
    ----------
    V : float32 [N, d] item factors
    histories : CSR [B, N]; a person without items gets the zero vector
    config : that of the training

    Returns
    -------
    float32 [B, d]
    """
    U = mean_direction(V, histories)
    for start in range(0, len(U), TOGETHER):
        stop = min(start + TOGETHER, len(U))
        _fit(U[start:stop], V, [histories.row(person) for person in range(start, stop)], config, backend)
    return U


def mean_direction(V: Tensor, histories: CSR) -> Tensor:
    """Direction of the mean of each person's item factors, as long as the spectral start of training: [B, d]."""
    indptr, indices = histories.tensors(V.device)
    total = torch.nn.functional.embedding_bag(indices, V, indptr, mode="sum", include_last_offset=True)
    return SPECTRAL_NORM * total / total.norm(dim=1, keepdim=True).clamp(min=1e-30)


def _fit(U: Tensor, V: Tensor, rows: Sequence[NDArray[np.int32]], config: TrainConfig, backend: Backend) -> None:
    """Fit the vectors U [B, d] to the items of each person, in place."""
    plans = {person: _plan(row, V, config) for person, row in enumerate(rows) if 0 < len(row) < len(V)}
    if not plans:  # nothing to prefer, or nothing to prefer it to
        return
    lists = [min(plan.n_lists, MAX_LISTS) for plan in plans.values()]
    counts = torch.tensor(lists, device=V.device)
    users = torch.tensor(list(plans), dtype=torch.int32, device=V.device).repeat_interleave(counts)
    mean = (1 / counts).repeat_interleave(counts)
    # As after a spectral start: the direction is trusted, and the first step is in proportion to the gradient.
    state = torch.ones_like(U)
    objective = objective_of(config)
    for step in range(STEPS):
        drawn = [backend.sample_lists(plan, step, 0, n).items for plan, n in zip(plans.values(), lists, strict=True)]
        gradient = backend.list_gradients(U, V, ListBatch(users, torch.cat(drawn)), objective).user_grad
        backend.update_rows(U, state, GradientTerms.of_users(users, gradient, mean), LR * (1 - step / STEPS), "dot")


def _plan(row: NDArray[np.int32], V: Tensor, config: TrainConfig) -> ListPlan:
    """Lists of a person who is the only user, under a seed that the items decide.

    With one seed for everybody, all would meet the same few negatives, and the luck of that draw would not average out.
    """
    seed = config.seed ^ zlib.crc32(row.astype("<i4").tobytes())
    indptr = torch.tensor([0, len(row)], device=V.device)
    return ListPlan(indptr, torch.tensor(row, device=V.device), len(V), config.rho, config.eta_in_force, seed)
