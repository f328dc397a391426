"""Keyed pseudo-random permutations, those of the reference to the bit, of many lists at once in vector registers.

A round of the Feistel network takes 32-bit numbers alone: columns and rows of its grid fit into them. A vector register
has twice as many of them as of 64-bit numbers. Numba computes with 64 bits; `u32` around each result lets LLVM compute
with 32.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from drm_triton.kernels.cpu.runtime.bits import leading_zeros
from drm_triton.kernels.cpu.runtime.jit import allocating, inline
from drm_triton.kernels.streams import FEISTEL_ROUNDS

# Every operand is unsigned: Numba turns uint64 with a signed integer into float64.
u32, u64 = np.uint32, np.uint64
S13, S16, S32 = u64(13), u64(16), u64(32)
MIX0, MIX1 = u64(0x85EBCA6B), u64(0xC2B2AE35)
ONE, ZERO = u64(1), u64(0)


class PermutationBuffers(NamedTuple):
    """Buffers for up to a fixed number of lists."""

    image: NDArray[np.uint64]  # argument of the permutation, then its value
    size: NDArray[np.uint64]  # of the permuted range
    h: NDArray[np.uint32]  # log2 of the columns of the grid
    grid_rows: NDArray[np.uint32]
    column: NDArray[np.uint32]
    row: NDArray[np.uint32]
    outside: NDArray[np.int64]  # [lists + 1] lists whose image is not below `size`
    keys: NDArray[np.uint32]  # [4, lists]; flat as long as the number of lists is open


@allocating
def permutation_buffers(lists):
    """Allocate the buffers for up to this number of lists."""
    wide, narrow = np.empty((2, lists), np.uint64), np.empty((4, lists), np.uint32)
    outside, keys = np.empty(lists + 1, np.int64), np.empty(4 * lists, np.uint32)
    return PermutationBuffers(wide[0], wide[1], narrow[0], narrow[1], narrow[2], narrow[3], outside, keys)


@inline
def first_permutations(buffers, lists):
    """Return the part of the buffers for this number of lists."""
    return PermutationBuffers(
        buffers.image[:lists],
        buffers.size[:lists],
        buffers.h[:lists],
        buffers.grid_rows[:lists],
        buffers.column[:lists],
        buffers.row[:lists],
        buffers.outside,
        buffers.keys[: 4 * lists].reshape(4, lists),  # contiguous, for vector loads
    )


@inline
def mix(x, key):
    """Hash 32-bit x under a 32-bit key."""
    x = u32(x ^ key)
    x = u32(u32(x ^ (x >> S16)) * MIX0)
    x = u32(u32(x ^ (x >> S13)) * MIX1)
    return u32(x ^ (x >> S16))


@inline
def apply_round(buffers, b, i):
    """Apply round i of the Feistel network of list b, on a grid of 2^h columns and `rows` rows."""
    even, step = 2 * (i % 2), u32(i)
    key0, key1 = u32(buffers.keys[even, b] + step), u32(buffers.keys[even + 1, b] + step)
    h, rows, column, row = buffers.h[b], buffers.grid_rows[b], buffers.column[b], buffers.row[b]
    # The upper h bits of the hash; a single shift by 32 - h would be undefined for h = 0.
    column = u32((column + (mix(row, key0) >> ONE >> (u64(31) - h))) & ((ONE << h) - ONE))
    row = u32(row + u32((mix(column, key1) * u64(rows)) >> S32))
    buffers.column[b] = column
    buffers.row[b] = min(row, u32(row - rows))  # modulo rows: an unsigned number below 0 is the larger one


@inline
def set_image(buffers, b, outside):
    """Set the image of list b from row and column. Append b to those whose image is not below size; return how many."""
    buffers.image[b] = (u64(buffers.row[b]) << u64(buffers.h[b])) | u64(buffers.column[b])
    buffers.outside[outside] = b
    return outside + np.int64(buffers.image[b] >= buffers.size[b])


@inline
def permute(buffers):
    """Replace image[b] by its image under the permutation of 0 .. size[b] - 1 with keys[:, b]."""
    image, size = buffers.image, buffers.size
    lists = image.size
    for b in range(lists):
        h = (u64(64) - leading_zeros(size[b] - ONE)) >> ONE
        last_column = (ONE << h) - ONE
        buffers.h[b], buffers.grid_rows[b] = h, (size[b] + last_column) >> h
        buffers.column[b], buffers.row[b] = image[b] & last_column, image[b] >> h
    for i in range(FEISTEL_ROUNDS):
        for b in range(lists):  # the inner loop, so that it runs in vector registers
            apply_round(buffers, b, i)
    outside = np.int64(0)
    for b in range(lists):
        outside = set_image(buffers, b, outside)
    # The few images that are not below size are permuted again, all of them together: they do not depend on each other.
    while outside > 0:
        for i in range(FEISTEL_ROUNDS):
            for k in range(outside):
                apply_round(buffers, buffers.outside[k], i)
        again, outside = outside, np.int64(0)
        for k in range(again):
            outside = set_image(buffers, buffers.outside[k], outside)
