"""The entries of an array that meet a condition, 64 at a time as the bits of a word."""

from llvmlite import ir
from numba import types

from drm_triton.kernels.cpu.runtime.jit import inline, intrinsic
from drm_triton.kernels.cpu.runtime.simd import VectorBuilder

BITS = 64  # entries in a word


@intrinsic
def leading_zeros(context, word):
    """Count the zero bits above the highest one of a uint64."""

    def build(context, builder, signature, args):
        return builder.ctlz(args[0], ir.Constant(ir.IntType(1), 0))

    return types.uint64(types.uint64), build


@intrinsic
def trailing_zeros(context, word):
    """Count the zero bits below the lowest one of an int64."""

    def build(context, builder, signature, args):
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 0))

    return types.int64(types.int64), build


@intrinsic
def ones(context, word):
    """Count the bits of an int64 that are 1."""

    def build(context, builder, signature, args):
        return builder.ctpop(args[0])

    return types.int64(types.int64), build


def _word(at, compare):
    """Return the word of entries x[start] .. x[start + BITS - 1]; compare(vector) is the condition."""
    word = at.i64(0)
    for i in range(0, BITS, at.lanes):
        mask = compare(at.load("x", at.builder.add(at["start"], at.i64(i)), at.vector))
        bits = at.builder.zext(at.builder.bitcast(mask, ir.IntType(at.lanes)), at.i64)
        word = at.builder.or_(word, at.builder.shl(bits, at.i64(i)))
    return word


@intrinsic
def at_least(context, x, start, limit):
    """Return which of BITS numbers from `start` on are at least `limit`."""

    def build(context, builder, signature, args):
        at = VectorBuilder(context, builder, signature, args, ("x", "start", "limit"))
        limit = at.splat(at["limit"])
        return _word(at, lambda value: builder.fcmp_ordered(">=", value, limit))

    return types.int64(x, types.int64, x.dtype), build


@intrinsic
def true(context, x, start):
    """Return which of BITS booleans from `start` on are true."""

    def build(context, builder, signature, args):
        byte = ir.IntType(8)
        at = VectorBuilder(context, builder, signature, args, ("x", "start"), byte)
        many = ir.VectorType(byte, BITS)
        values = builder.load(at.pointer("x", at["start"], many))
        values.align = 1
        mask = builder.icmp_unsigned("!=", values, ir.Constant(many, [0] * BITS))
        return builder.bitcast(mask, at.i64)

    return types.int64(x, types.int64), build


@inline
def count_at_least(x, limit):
    """Return how many numbers are at least `limit`."""
    whole, count = x.size // BITS * BITS, 0
    for start in range(0, whole, BITS):
        count += ones(at_least(x, start, limit))
    for j in range(whole, x.size):
        count += x[j] >= limit
    return count


@inline
def first_at_least(x, limit):
    """Return the first position of a number that is at least `limit`. There must be one."""
    start = 0
    while start + BITS <= x.size:
        word = at_least(x, start, limit)
        if word != 0:
            return start + trailing_zeros(word)
        start += BITS
    while x[start] < limit:
        start += 1
    return start


@inline
def write_ones(word, start, positions, count):
    """Write `start` + i for each bit i of a word that is 1 to positions[count] and after; return the new count."""
    while word != 0:
        positions[count] = start + trailing_zeros(word)
        count += 1
        word &= word - 1
    return count


@inline
def find_at_least(x, limit, positions):
    """Write the positions of the numbers that are at least `limit` to `positions`; return their number."""
    whole, count = x.size // BITS * BITS, 0
    for start in range(0, whole, BITS):
        count = write_ones(at_least(x, start, limit), start, positions, count)
    for j in range(whole, x.size):
        positions[count] = j
        count += x[j] >= limit
    return count


@inline
def find_true(x, positions):
    """Write the positions of the booleans that are true to `positions`; return their number."""
    whole, count = x.size // BITS * BITS, 0
    for start in range(0, whole, BITS):
        count = write_ones(true(x, start), start, positions, count)
    for j in range(whole, x.size):
        if x[j]:
            positions[count] = j
            count += 1
    return count
