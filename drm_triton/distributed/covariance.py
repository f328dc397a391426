"""The gradient of the covariance regularisation to the rows that a rank holds (see `training.covariance`).

The mean and the covariance are sums over all rows. They are added up leaf by leaf (see `rows.Division`), and a leaf is
never divided among ranks. So the rounding is the same with any number of them.
"""

from __future__ import annotations

from collections.abc import Callable

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
        [table[leaf] for leaf in division.leaves(world.rank)] for table, division in zip(tables, divisions, strict=True)
    ]

    def total(function: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the sum of a function of the leaves: those of the users in their order, then those of the items."""
        users, items = (world.ordered_sum([function(leaf) for leaf in own], function(tables[0][:0])) for own in leaves)
        return users + items

    with one_torch_thread():
        mean = total(lambda leaf: leaf.sum(0)) / n_rows
        C = total(lambda leaf: (leaf - mean).T @ (leaf - mean)) / n_rows
        dC = gradient_of_covariance(C, n_rows, config.cov_form)
        dU, dV = (
            torch.cat([table[:0], *((leaf - mean) @ dC * (2 * weight / n_rows) for leaf in own)])
            for table, own in zip(tables, leaves, strict=True)
        )
    return dU, dV
