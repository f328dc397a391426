"""The gradient of the covariance regularisation to the rows that a rank holds (see `training.covariance`).

The mean and the covariance are sums over all rows. They are added up leaf by leaf (see `rows.Division`), and a leaf is
never divided among ranks. So the rounding is the same with any number of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from drm_triton.config import TrainConfig
from drm_triton.distributed.rows import Division
from drm_triton.distributed.world import World
from drm_triton.kernels.precision import widened
from drm_triton.kernels.torch_threads import one_torch_thread
from drm_triton.training.covariance import gradient_of_covariance
from drm_triton.training.state import State


def shard_gradients(
    world: World, state: State, divisions: tuple[Division, Division], config: TrainConfig
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients to the rows of U and V of this rank, or None if there is none in this step."""
    if config.cov == 0 or state.step % config.cov_every:
        return None, None
    weight = config.cov * config.cov_every  # one gradient stands for those of the steps between
    n_rows = sum(division.n_rows for division in divisions)
    tables = (widened(state.U), widened(state.V))
    leaves = [
        table[leaf] for table, division in zip(tables, divisions, strict=True) for leaf in division.leaves(world.rank)
    ]
    zero = tables[0][:0]
    with one_torch_thread():
        mean = world.ordered_sum([leaf.sum(0) for leaf in leaves], zero.sum(0)) / n_rows
        centred = [leaf - mean for leaf in leaves]
        C = world.ordered_sum([leaf.T @ leaf for leaf in centred], zero.T @ zero) / n_rows
        dC = gradient_of_covariance(C, n_rows, config.cov_form)
        gradients = [leaf @ dC * (2 * weight / n_rows) for leaf in centred]
    own = len(divisions[0].leaves(world.rank))
    dU, dV = (
        torch.cat([table[:0], *part]) for table, part in zip(tables, (gradients[:own], gradients[own:]), strict=True)
    )
    return dU, dV
