"""Tiles of lists that a program takes together: lists of one group, which share their negatives.

Lists with their own negatives only are one group that shares nothing.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from drm_triton.kernels.batches import SharedNegatives

# Lists in a tile. Groups have 32 lists by default. Two tiles of each keep more of a GPU busy than one.
BLOCK_LISTS = 16


class Groups(NamedTuple):
    """The groups of a batch, for launches."""

    n_tiles: int
    sizes: dict[str, int]  # arguments of `tile_of_lists`, and how many negatives are shared
    tensors: tuple[Tensor, Tensor]  # `SharedNegatives.items` and `.replaced`, contiguous; not read if nothing is shared


def groups_of(items: Tensor, shared: SharedNegatives | None) -> Groups:
    """Divide the lists of a batch, items [B, n] with B > 0, into tiles of up to BLOCK_LISTS lists of a group."""
    B = len(items)
    if shared is None or shared.size == 1:
        eta, size, n_groups, tensors = 0, B, 1, (items, items)
    else:
        (n_groups, eta), size = shared.items.shape, min(shared.size, B)
        tensors = shared.items.contiguous(), shared.replaced.contiguous()
    tiles_of_group = triton.cdiv(size, BLOCK_LISTS)
    sizes = {"B": B, "eta": eta, "group_size": size, "tiles_of_group": tiles_of_group}
    return Groups(n_groups * tiles_of_group, sizes, tensors)


@triton.jit
def tile_of_lists(tile, B, group_size, tiles_of_group, BLOCK_LISTS: tl.constexpr):
    """Return the group of a tile, the numbers of its lists, int64 [BLOCK_LISTS], and which of these exist."""
    group = tile // tiles_of_group
    begin = group * group_size + (tile % tiles_of_group) * BLOCK_LISTS
    end = tl.minimum((group + 1) * group_size, B)
    lists = begin + tl.arange(0, BLOCK_LISTS)
    return group, lists, lists < end


@triton.jit
def kept_shared(replaced_ptr, lists, exists, col, n, eta):
    """Return which entries of lists, in columns col [columns], are shared negatives: [lists, columns]."""
    negative = col - (n - eta)
    inside = exists[:, None] & ((negative >= 0) & (col < n))[None, :]
    return tl.load(replaced_ptr + lists[:, None] * eta + negative[None, :], mask=inside, other=1) == 0
