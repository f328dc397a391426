"""Tiles of lists that share their negatives: what `gradients` and `update` process together.

A group of lists is divided into tiles of about equal size. A tile never contains lists of two groups, so its lists have
one row of shared negatives. Of long lists, most coefficients (gradients to scores) are 0. Those that are not are sorted
by negative, so that the row of a negative is read, or its sum written, once for all lists of the tile.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from drm_triton.kernels.checks import BOOL, INT32
from drm_triton.kernels.cpu.runtime.arrays import view
from drm_triton.kernels.cpu.runtime.bits import find_not_zero
from drm_triton.kernels.cpu.runtime.jit import allocating, inline
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
    size = max(1, min(shared.size, len(shared.replaced)))
    tiles_per_group = -(-size // most)
    return Groups(
        size,
        -(-size // tiles_per_group),
        tiles_per_group,
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


class NonzeroTerms(NamedTuple):
    """The coefficients of a tile that are not 0: first list by list, then by shared negative."""

    positions: NDArray[np.int64]  # [eta], of one list
    negatives: NDArray[np.int32]  # [most]
    list_in_tile: NDArray[np.int32]  # [2, most]
    coefficients: NDArray[np.float32]  # [2, most]
    starts: NDArray[np.int64]  # [eta + 2]; the terms of negative j end up at starts[j] .. starts[j + 1] - 1


@allocating
def nonzero_terms(eta, most):
    """Allocate buffers for up to `most` coefficients."""
    return NonzeroTerms(
        np.empty(eta, np.int64),
        np.empty(most, np.int32),
        np.empty((2, most), np.int32),
        np.empty((2, most), np.float32),
        np.zeros(eta + 2, np.int64),
    )


@inline
def add_nonzero(t, coefficients, replaced, number, terms):
    """Add the coefficients [eta] of list t of the tile to the `number` terms so far; return their new number."""
    for i in range(find_not_zero(coefficients, replaced, terms.positions)):
        j = terms.positions[i]
        terms.negatives[number], terms.list_in_tile[0, number] = j, t
        terms.coefficients[0, number] = coefficients[j]
        terms.starts[j + 2] += 1
        number += 1
    return number


@inline
def sort_nonzero(number, terms):
    """Sort the terms by negative; those of one negative stay in the order of the lists. `starts` was 0 before them."""
    starts = terms.starts
    for j in range(1, starts.size - 2):
        starts[j + 1] += starts[j]
    for e in range(number):
        j = terms.negatives[e] + 1
        place = starts[j]
        terms.list_in_tile[1, place], terms.coefficients[1, place] = terms.list_in_tile[0, e], terms.coefficients[0, e]
        starts[j] = place + 1
