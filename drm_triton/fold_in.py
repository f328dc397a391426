"""Fold-in: the vector of a person who was not in the training data, from the items the person liked.

The item factors stay as they are, and the vector is fitted by the objective of training: lists of the person's items
against sampled others, Adagrad, projection onto the unit ball. It starts in the direction of the mean of the liked
items' factors, so a few steps do, each on the mean gradient of one epoch of the person's lists.

A vector depends on the history alone, to the bit: neither on who else is folded in beside it, nor on the order of the
items, nor on the number of threads. So each person's lists are drawn as if there were nobody else, and only the
arithmetic is shared, in which the kernels treat every list and every row by itself.
"""

from collections.abc import Sequence
from types import ModuleType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from drm_triton.config import TrainConfig
from drm_triton.data.csr import CSR
from drm_triton.evaluate import csr_tensors
from drm_triton.initialize import SPECTRAL_NORM
from drm_triton.kernels.interface import ListPlan
from drm_triton.trainer import objective_of

# Chosen by bench/fold_in.py.
STEPS = 8
LR = 0.2  # of the first step; it falls to 0 as in training
MAX_LISTS = 128  # of a person in one step: a sample of a long history points the same way
TOGETHER = 128  # persons fitted at once: bounds the memory for their lists


def fold_in(V: Tensor, histories: CSR, config: TrainConfig, ops: ModuleType) -> Tensor:
    """Fit the vectors of new persons to fixed item factors.

    Parameters
    ----------
    V : float32 [N, d] item factors
    histories : CSR [B, N]; a person without items gets the zero vector
    config : that of the training
    ops : a backend of `drm_triton.kernels`

    Returns
    -------
    float32 [B, d]
    """
    U = mean_direction(V, histories)
    for start in range(0, len(U), TOGETHER):
        stop = min(start + TOGETHER, len(U))
        _fit(U[start:stop], V, [histories.row(person) for person in range(start, stop)], config, ops)
    return U


def mean_direction(V: Tensor, histories: CSR) -> Tensor:
    """Direction of the mean of each person's item factors, as long as the spectral start of training: [B, d]."""
    indptr, indices = csr_tensors(histories, V.device)
    total = torch.nn.functional.embedding_bag(indices, V, indptr, mode="sum", include_last_offset=True)
    return SPECTRAL_NORM * total / total.norm(dim=1, keepdim=True).clamp(min=1e-30)


def _fit(U: Tensor, V: Tensor, rows: Sequence[NDArray[np.int32]], config: TrainConfig, ops: ModuleType) -> None:
    """Fit the vectors U [B, d] to the items of each person, in place."""
    drawn = [_lists(row, len(V), config, ops, V.device) for row in rows]
    items = torch.cat(drawn, dim=1)
    if items.shape[1] == 0:
        return
    counts = torch.tensor([lists.shape[1] for lists in drawn], device=V.device)
    users = torch.arange(len(U), dtype=torch.int32, device=V.device).repeat_interleave(counts)
    mean = (1 / counts).repeat_interleave(counts)
    batch = torch.arange(len(users), dtype=torch.int32, device=V.device)
    # As after a spectral start: the direction is trusted, and the first step is in proportion to the gradient.
    state = torch.ones_like(U)
    objective = objective_of(config)
    for step in range(STEPS):
        gradient = ops.list_gradients(U, V, users, items[step], objective).user_grad
        ops.update_rows(U, state, users, mean, gradient, batch, LR * (1 - step / STEPS), "dot")


def _lists(row: NDArray[np.int32], n_items: int, config: TrainConfig, ops: ModuleType, device: torch.device) -> Tensor:
    """Items of a person's lists, int32 [STEPS, lists, n]: an epoch of them for each step, or a sample of one.

    The plan has the person once for each step, so that one call draws them all.
    """
    h, n = len(row), config.rho + config.eta_in_force
    if not 0 < h < n_items:  # nothing to prefer, or nothing to prefer it to
        return torch.empty(STEPS, 0, n, dtype=torch.int32, device=device)
    indptr = torch.arange(0, STEPS * h + 1, h, device=device)
    indices = torch.from_numpy(np.tile(row, STEPS)).to(device)
    plan = ListPlan(indptr, indices, n_items, config.rho, config.eta_in_force, config.seed)
    copies, items = ops.sample_lists(plan, 0, 0, plan.n_lists)
    return items[copies.argsort(stable=True)].view(STEPS, -1, n)[:, :MAX_LISTS]
