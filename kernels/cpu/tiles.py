"""Tiles of lists that share their negatives: what `gradients`, `terms` and `update` process together.

A group of lists is divided into tiles of about equal size. A tile never contains lists of two groups, so its lists have
one row of shared negatives.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from drm_triton.kernels.batches import SharedNegatives
from drm_triton.kernels.checks import BOOL, INT32
from drm_triton.kernels.cpu.runtime.arrays import view
from drm_triton.kernels.cpu.runtime.jit import inline


class Tiles(NamedTuple):
    """Groups of lists and their division into tiles, for compiled functions."""

    size: int  # lists in a group
    tile: int  # lists in a tile
    tiles_per_group: int
    n_lists: int

    @property
    def n_tiles(self) -> int:
        """Number of tiles, including empty ones of a last group that is short."""
        return -(-self.n_lists // self.size) * self.tiles_per_group


class Groups(NamedTuple):
    """`SharedNegatives` and their division into tiles, for compiled functions."""

    tiles: Tiles
    items: NDArray[np.int32]  # [G, eta] shared negatives
    replaced: NDArray[np.bool_]  # [B, eta]


def divide(size: int, n_lists: int, most: int) -> Tiles:
    """Divide groups of lists into tiles of at most `most` lists."""
    # The tile follows from the size of a group alone: a process that has a short last group divides it as others do.
    tile = -(-size // -(-size // most))
    size = max(1, min(size, n_lists))
    return Tiles(size, tile, -(-size // tile), n_lists)


def groups_of(function: str, shared: SharedNegatives, most: int) -> Groups:
    """Divide lists that share negatives into tiles of at most `most`; errors name the operation `function`."""
    return Groups(
        divide(shared.size, len(shared.replaced), most),
        view(function, "the items of shared", shared.items, (None, None), INT32),
        view(function, "replaced of shared", shared.replaced, (None, None), BOOL),
    )


@inline
def tile_bounds(tile, tiles):
    """Return the group of a tile, its first list and the end of its lists. In Python, also of an array of tiles."""
    group = tile // tiles.tiles_per_group
    start = group * tiles.size + tile % tiles.tiles_per_group * tiles.tile
    stop = np.minimum(np.minimum(start + tiles.tile, (group + 1) * tiles.size), tiles.n_lists)
    return group, start, np.maximum(start, stop)
