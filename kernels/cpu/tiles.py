"""Tiles of lists that share their negatives: what `gradients`, `terms` and `update` process together.

A group of lists is divided into tiles of about equal size. A tile never contains lists of two groups, so its lists have
one row of shared negatives.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from drm_triton.kernels.checks import BOOL, INT32
from drm_triton.kernels.cpu.runtime.arrays import view
from drm_triton.kernels.cpu.runtime.bits import find_true
from drm_triton.kernels.cpu.runtime.jit import inline
from drm_triton.kernels.protocol import SharedNegatives


class Groups(NamedTuple):
    """`SharedNegatives` and their division into tiles, for compiled functions."""

    size: int  # lists in a group
    tile: int  # lists in a tile
    tiles_per_group: int
    items: NDArray[np.int32]  # [G, eta] shared negatives
    replaced: NDArray[np.bool_]  # [B, eta]

    @property
    def n_tiles(self) -> int:
        """Number of tiles, including empty ones of a last group that is short."""
        return len(self.items) * self.tiles_per_group


def divide(function: str, shared: SharedNegatives, most: int) -> Groups:
    """Divide groups into tiles of at most `most` lists; `function` names the operation in error messages."""
    # The tile follows from the size of a group alone: a process that has a short last group divides it as others do.
    tile = -(-shared.size // -(-shared.size // most))
    size = max(1, min(shared.size, len(shared.replaced)))
    return Groups(
        size,
        tile,
        -(-size // tile),
        view(function, "the items of shared", shared.items, (None, None), INT32),
        view(function, "replaced of shared", shared.replaced, (None, None), BOOL),
    )


@inline
def tile_bounds(tile, groups):
    """Return the group of a tile, its first list and the end of its lists."""
    group = tile // groups.tiles_per_group
    start = group * groups.size + tile % groups.tiles_per_group * groups.tile
    stop = min(start + groups.tile, (group + 1) * groups.size, groups.replaced.shape[0])
    return group, start, max(start, stop)


@inline
def find_replaced(begin, end, groups, positions, own):
    """Write which negatives lists begin .. end - 1 have in place of shared ones.

    positions[own[t] : own[t + 1]] are t * eta + j for the negatives j of list begin + t.
    """
    eta = groups.items.shape[1]
    count, i = find_true(groups.replaced[begin:end].reshape(-1), positions), 0
    for t in range(end - begin):
        own[t] = i
        while i < count and positions[i] < (t + 1) * eta:
            i += 1
    own[end - begin] = count
