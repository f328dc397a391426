"""Numbers of bfloat16: read as float32, and written with random rounding. All by integer operations, on every GPU.

`reference.round_bfloat16` has the readable version of the rounding.
"""

import triton
import triton.language as tl

from drm_triton.kernels import streams
from drm_triton.kernels.gpu.sampling import words_in_order

ROUNDING_BLOCK = tl.constexpr(streams.ROUNDING_BLOCK)
GROUP = tl.constexpr(8)  # factors that take their bits from one Philox block


@triton.jit
def widened(x):
    """Return numbers of a table in the type in which they are computed: bfloat16 as float32, others as they are."""
    if x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return x


@triton.jit
def rounding_bits(seed, step, table, row, BLOCK_D: tl.constexpr):
    """Return the 16 uniform bits of each factor of rows, BLOCK_D a multiple of GROUP: uint32 [rows, BLOCK_D]."""
    group = tl.arange(0, BLOCK_D // GROUP)[None, :] + tl.zeros_like(row)[:, None]
    ident = row[:, None].to(tl.int64) + tl.zeros_like(group).to(tl.int64)
    words = words_in_order(seed, step, table, ident, group.to(tl.uint32) + ROUNDING_BLOCK)
    return tl.interleave(words & 0xFFFF, words >> 16)


@triton.jit
def rounded(x, random, dtype: tl.constexpr):
    """Round to numbers of bfloat16 with 16 random bits each, and return them in the type of a table."""
    bits = x.to(tl.float32).to(tl.uint32, bitcast=True)
    size = bits & 0x7FFFFFFF
    bits = tl.where(size < 0x7F7F0000, bits + random, bits)  # numbers that would carry to infinity are cut off
    bits = tl.where(size > 0x7F800000, bits | 0x400000, bits)  # NaN stays NaN
    if dtype == tl.bfloat16:
        return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return (bits & 0xFFFF0000).to(tl.float32, bitcast=True).to(dtype)
