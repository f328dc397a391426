"""Rounding of rows to numbers of bfloat16, at random: `reference.round_bfloat16` has the readable version.

The tables stay float32: the lower half of each number becomes 0. Rounding is a pass of its own over the rows that took
a step, so that a training without it neither compiles nor runs any of this.

Cost of a row: d / 8 Philox blocks, and d floats read and written.
"""

import numpy as np
from numpy.typing import NDArray

from drm_triton.kernels.cpu.runtime import threads
from drm_triton.kernels.cpu.runtime.jit import inline, kernel
from drm_triton.kernels.cpu.sampling import MASK32, S16, philox
from drm_triton.kernels.protocol import Rounding
from drm_triton.kernels.streams import ROUNDING_BLOCK

u32, u64 = np.uint32, np.uint64
FIRST_BLOCK, LOWER, UPPER = u64(ROUNDING_BLOCK), u64(0xFFFF), u32(0xFFFF0000)
SIZE, LARGEST, INFINITY, QUIET = u32(0x7FFFFFFF), u32(0x7F7F0000), u32(0x7F800000), u32(0x400000)
GRAIN = 64  # rows of a task, at least


@inline
def round_bits(bits, random):
    """Round the bits of a float32 with the lower 16 random bits."""
    size = bits & SIZE
    if size < LARGEST:
        return u32(bits + u32(random & LOWER)) & UPPER
    return u32(bits | QUIET if size > INFINITY else bits) & UPPER


@kernel
def round_range(start, stop, rows, first_row, seed, word1, table):
    """Round rows[start : stop] of a table, the bits of floats [R, d]. word1 is 4 * step + the number of the table.

    `first_row` is the number of row 0 in the whole table.
    """
    d = table.shape[1]
    for i in range(start, stop):
        row, ident = table[rows[i]], u64(first_row + rows[i])
        for begin in range(0, d, 8):
            words = philox(seed, word1, ident, FIRST_BLOCK + u64(begin // 8))
            for c in range(begin, min(begin + 8, d)):
                word = words[(c - begin) // 2]
                row[c] = round_bits(row[c], word >> S16 if c % 2 else word)


def round_rows(table: NDArray[np.float32], rows: NDArray[np.int32], rounding: Rounding) -> None:
    """Round rows [T] of a table [R, d], in place. No row may occur twice: threads share them."""
    word1 = u64(4 * int(rounding.step) + rounding.table) & MASK32
    threads.split(round_range, len(rows), GRAIN, rows, rounding.first_row, u64(rounding.seed), word1, table.view(u32))
