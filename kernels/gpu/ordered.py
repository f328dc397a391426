"""Floats as integers of the same order: what sorts or bisects integers then does so with floats."""

import triton
import triton.language as tl


@triton.jit
def _flip(bits):
    """Negate the order of negative numbers, whose bits ascend as they descend. It is its own inverse."""
    WIDTH: tl.constexpr = bits.dtype.primitive_bitwidth
    return bits ^ ((bits >> (WIDTH - 1)) & (2 ** (WIDTH - 1) - 1))


@triton.jit
def ordered(x):
    """Return integers in the order of the floats x, as wide as they are. -0.0 comes just before 0.0."""
    integer: tl.constexpr = tl.int64 if x.dtype == tl.float64 else tl.int32
    return _flip(x.to(integer, bitcast=True))


@triton.jit
def float_of(integer):
    """Return the float of which `ordered` made an integer."""
    real: tl.constexpr = tl.float64 if integer.dtype == tl.int64 else tl.float32
    return _flip(integer).to(real, bitcast=True)
