"""What hinge and DRM need to know of WIDTH long lists at once, one list in each lane of a few vector registers.

`find_extremes` finds the pair of the hinge. `find_active` finds the active items of each list, those that take part in
its relaxed top K, as `active` does for one list; docs/objective.md has the proof of the bound. D(theta) is convex, so a
step of Newton's method from any theta leads below the theta that is sought:

1. s_K is the largest score, known from the pass for the hinge, or the last of a row of the K largest, into which only
   the few scores above it are inserted.
2. Newton's method on one of SAMPLE parts of the scores, which counts SAMPLE times, leads close to theta.
3. A step with all scores leads below theta, unless rounding interferes.
4. Items with a score above it are gathered. D is computed again from these; if it is too small, all items are active.

Cost of a list: about three passes over its scores, and a few operations for each active item.
"""

import math
from typing import NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numpy.typing import NDArray

from drm_triton.kernels.cpu.active import AIM, SAMPLE, SAMPLE_MIN
from drm_triton.kernels.cpu.columns import pad_columns
from drm_triton.kernels.cpu.runtime.bits import BITS, ones
from drm_triton.kernels.cpu.runtime.jit import allocating, inline, intrinsic
from drm_triton.kernels.cpu.runtime.rows import RowBuilder, any_above, insert_row, lane_mask, row_operation
from drm_triton.kernels.cpu.runtime.simd import WIDTH, padded
from drm_triton.kernels.protocol import FLOAT32_MARGIN

f32 = np.float32
LOWEST, EPS = f32(np.finfo(np.float32).min), np.finfo(np.float32).eps
NEWTON_STEPS = 5  # on the sample
TOGETHER = 8  # items that are gathered without a branch, which would often be mispredicted
MASK = np.uint32 if WIDTH == 32 else np.uint16  # one bit for each list


class Extremes(NamedTuple):
    """What `find_extremes` finds in WIDTH lists. L is WIDTH."""

    values: NDArray[np.float32]  # [5, L]: smallest positive, largest negative, violations, sum of |s|, largest score
    positions: NDArray[np.int32]  # [2, L] of the smallest positive, and of the largest negative


class ActiveBuffers(NamedTuple):
    """Buffers of `find_active`."""

    largest: NDArray[np.float32]  # [K, L] largest scores, in descending order
    kth: NDArray[np.float32]  # [L]
    theta: NDArray[np.float32]  # [L]
    sums: NDArray[np.float32]  # [3, L], see `_sum_excess`
    masks: NDArray[np.unsignedinteger]  # [padded n], in which lanes a score is at least theta
    words: NDArray[np.int64]  # [L], the bits of each list in `masks`
    size: NDArray[np.int64]  # [L]


@allocating
def active_buffers(n, ranks):
    """Allocate the buffers for n scores and `ranks` ranks."""
    return ActiveBuffers(
        np.empty((ranks, WIDTH), np.float32),
        np.empty(WIDTH, np.float32),
        np.empty(WIDTH, np.float32),
        np.empty((3, WIDTH), np.float32),
        np.empty(padded(n, BITS), MASK),
        np.empty(WIDTH, np.int64),
        np.empty(WIDTH, np.int64),
    )


@row_operation("s", "values", "positions", "n", "row_rho", "margin")
def find_extremes(at):
    """Write the `Extremes` of lists of n items, the first rho of which are positives. Ties go to the lower position.

    A negative violates the margin if its score is at least the smallest positive's minus the margin.
    """
    builder, rho = at.builder, at["row_rho"]
    first = ir.Constant(at.integers, [0] * at.lanes)
    one, integer = at.constant(1), at.integers.element

    def better(relation, i, best, position):
        score = at.read("s", i)
        improves = builder.fcmp_ordered(relation, score, best)
        row = at.splat(builder.trunc(i, integer))
        return score, builder.select(improves, score, best), builder.select(improves, row, position)

    def larger(a, b):
        return builder.select(builder.fcmp_ordered(">", a, b), a, b)

    def positive(i, carried):
        total, lowest, position, top = carried
        score, lowest, position = better("<", i, lowest, position)
        return [builder.fadd(total, at.absolute(score)), lowest, position, larger(score, top)]

    start = at.read("s", at.i64(0))
    total, lowest, at_lowest, top = at.loop(rho, 1, [at.zero, start, first, start], positive)
    limit = builder.fsub(lowest, at.splat(at["margin"]))

    def negative(i, carried):
        total, highest, position, violations = carried
        score, highest, position = better(">", builder.add(i, rho), highest, position)
        violates = builder.fcmp_ordered(">=", score, limit)
        violations = builder.fadd(violations, builder.select(violates, one, at.zero))
        return [builder.fadd(total, at.absolute(score)), highest, position, violations]

    start = [total, at.read("s", rho), at.splat(builder.trunc(rho, integer)), at.zero]
    total, highest, at_highest, violations = at.loop(builder.sub(at["n"], rho), 1, start, negative)
    for row, value in enumerate((lowest, highest, violations, total, larger(highest, top))):
        at.write(value, "values", at.i64(row))
    at.write(at_lowest, "positions", at.i64(0))
    at.write(at_highest, "positions", at.i64(1))


@row_operation("s", "theta", "kth", "sums", "n")
def _sum_excess(at):
    """Write sum_j (s_j - theta) over the first n rows with theta < s_j < s_K, their number, and that of s_j >= s_K."""
    builder, theta, kth, one = at.builder, at.read("theta", at.i64(0)), at.read("kth", at.i64(0)), at.constant(1)

    def count(condition, number):
        return builder.fadd(number, builder.select(condition, one, at.zero))

    def step(i, carried):
        total, number, top = carried
        score = at.read("s", i)
        at_top = builder.fcmp_ordered(">=", score, kth)
        inside = builder.and_(builder.fcmp_ordered(">", score, theta), builder.fcmp_ordered("<", score, kth))
        total = builder.fadd(total, builder.select(inside, builder.fsub(score, theta), at.zero))
        return [total, count(inside, number), count(at_top, top)]

    for row, value in enumerate(at.loop(at["n"], 1, 3 * [at.zero], step)):
        at.write(value, "sums", at.i64(row))


@row_operation("s", "theta", "masks", "row")
def _mark(at):
    """Write to `masks` in which lanes each of BITS rows from `row` on is at least theta."""
    theta = at.read("theta", at.i64(0))

    def step(i, carried):
        place = at.builder.add(at["row"], i)
        mask = lane_mask(at, at.builder.fcmp_ordered(">=", at.read("s", place), theta))
        at.builder.store(mask, at.pointer("masks", place, mask.type))
        return []

    at.loop(at.i64(BITS), 1, [], step)


@intrinsic
def word_of_lane(context, masks, row, lane):
    """Return the bits of one lane in BITS masks from `row` on."""

    def build(context, builder, signature, args):
        integer = ir.IntType(WIDTH)
        at = RowBuilder(context, builder, signature, args, ("masks", "row", "lane"), integer)
        many = ir.VectorType(integer, BITS)
        values = builder.load(at.pointer("masks", at["row"], many))
        values.align = 1
        bit = builder.shl(integer(1), builder.trunc(at["lane"], integer))
        wanted = builder.insert_element(ir.Constant(many, ir.Undefined), bit, ir.IntType(32)(0))
        zeros = ir.Constant(ir.VectorType(ir.IntType(32), BITS), [0] * BITS)
        wanted = builder.shuffle_vector(wanted, wanted, zeros)
        zero = ir.Constant(many, [0] * BITS)
        return builder.bitcast(builder.icmp_unsigned("!=", builder.and_(values, wanted), zero), at.i64)

    return types.int64(masks, types.int64, types.int64), build


@intrinsic
def _take(context, s, first, word, lane, numbers, order, i):
    """Copy numbers of a lane of s to `numbers`, and their rows to `order`, TOGETHER of them from row i on.

    The rows of s are `first` plus each bit of `word`. Returns the rest of the word. If it has too few bits, what is
    copied after them has no meaning.
    """

    def build(context, builder, signature, args):
        names = ("s", "first", "word", "lane", "numbers", "order", "i")
        at = RowBuilder(context, builder, signature, args, names)
        begin, target = (builder.add(at.place(at[row]), at["lane"]) for row in ("first", "i"))
        word, last_bit = at["word"], at.i64(1 << (BITS - 1))
        for k in range(TOGETHER):
            bit = builder.cttz(builder.or_(word, last_bit), ir.Constant(ir.IntType(1), 1))
            place = builder.add(target, at.i64(k * at.lanes))
            at.store(at.load("s", builder.add(begin, at.place(bit))), "numbers", place)
            at.store(builder.trunc(builder.add(at["first"], bit), ir.IntType(32)), "order", place)
            word = builder.and_(word, builder.sub(word, at.i64(1)))
        return word

    i64 = types.int64
    return types.int64(s, i64, i64, i64, numbers, order, i64), build


@inline
def find_kth(s, n, top, buffers):
    """Write the K-th largest score of each list, of n items; `top` [L] are the largest."""
    largest, kth = buffers.largest, buffers.kth
    last = largest.shape[0] - 1
    if last == 0:
        for t in range(WIDTH):
            kth[t] = top[t]
        return
    largest[:] = f32(-np.inf)
    for row in range(n):
        if any_above(s, row, largest, last):
            insert_row(s, largest, last + 1, row)
    for t in range(WIDTH):
        kth[t] = largest[last, t]


@inline
def newton_step(s, n, ranks, copies, target, buffers):
    """Take a step of Newton's method towards D(theta) = target. Only the first n rows count, each `copies` times."""
    theta, kth, sums = buffers.theta, buffers.kth, buffers.sums
    _sum_excess(s, theta, kth, sums, n)
    for t in range(WIDTH):
        ties = np.float64(max(f32(0), sums[2, t] - f32(ranks))) if copies == 1 else 0.0
        reached = (1 + 2 * ties) * np.float64(kth[t] - theta[t]) + 2 * copies * np.float64(sums[0, t])
        slope = 1 + 2 * ties + 2 * copies * np.float64(sums[1, t])
        # It aims above the target, which rounding could miss otherwise.
        theta[t] = f32(theta[t] + (reached - (1 + AIM) * target) / slope)


@inline
def reaches(t, ranks, target, buffers):
    """Return whether D(theta) of list t is at least the target, from the sums over the items above theta."""
    kth, theta, sums = buffers.kth[t], buffers.theta[t], buffers.sums
    ties = np.float64(sums[2, t] - f32(ranks))
    return (1 + 2 * ties) * np.float64(kth - theta) + 2 * np.float64(sums[0, t]) >= target


@inline
def find_theta(s, n, top, target, buffers):
    """Write to `theta` scores below those of all items that take part, and above those of most others."""
    ranks, theta, kth = buffers.largest.shape[0], buffers.theta, buffers.kth
    find_kth(s, n, top, buffers)
    for t in range(WIDTH):
        theta[t] = f32(kth[t] - target)
    sample = n // SAMPLE if n >= SAMPLE_MIN else n
    for _ in range(NEWTON_STEPS if sample < n else 1):
        newton_step(s, sample, ranks, n / sample, target, buffers)
    for _ in range(2):
        newton_step(s, n, ranks, 1.0, target, buffers)


@inline
def gather_active(s, n, buffers, columns):
    """Copy the items with at least the score theta to `columns`; return the number of its rows.

    The number of rows of s is a multiple of BITS, and those from n on are -inf. `columns` has n + TOGETHER rows.
    """
    size, rows = buffers.size, 0
    size[:] = 0
    for first in range(0, n, BITS):
        _mark(s, buffers.theta, buffers.masks, first)
        for t in range(WIDTH):
            buffers.words[t] = word_of_lane(buffers.masks, first, t)
        for t in range(WIDTH):
            word, end = buffers.words[t], size[t] + ones(buffers.words[t])
            for i in range(size[t], end, TOGETHER):
                word = _take(s, first, word, t, columns.s, columns.order, i)
            size[t] = end
    for t in range(WIDTH):
        columns.size[t] = size[t]
        rows = max(rows, size[t])
    if rows > 0:
        pad_columns(columns.size, columns.s, columns.order, rows, n)
    return rows


@inline
def find_active(s, n, top, taken, tau, buffers, columns):
    """Copy the active items of the lists that are `taken` [L] to `columns`; return the number of its rows.

    s : scores of n items, more than K, and -inf up to a multiple of BITS rows
    top : [L], the largest score of each list
    """
    ranks, theta = buffers.largest.shape[0], buffers.theta
    target = (FLOAT32_MARGIN + math.log(n)) * tau * (1 + (n + 8) * EPS)  # the last factor is for the rounding of D
    if n > ranks:
        find_theta(s, n, top, target, buffers)
    for t in range(WIDTH):
        if not taken[t]:
            theta[t] = np.nan  # below no score, not even +inf of a user from before in a lane without a list
        elif n <= ranks or not LOWEST < theta[t] <= buffers.kth[t]:  # it is NaN, infinite or above s_K by rounding only
            theta[t] = LOWEST
    rows = gather_active(s, n, buffers, columns)
    if n <= ranks or rows == 0:
        return rows
    _sum_excess(columns.s, theta, buffers.kth, buffers.sums, rows)
    missed = False
    for t in range(WIDTH):
        if taken[t] and theta[t] > LOWEST and not reaches(t, ranks, target, buffers):
            theta[t], missed = LOWEST, True
    return gather_active(s, n, buffers, columns) if missed else rows
