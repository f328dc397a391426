"""The DRM loss and its gradient for WIDTH lists at once, one list in each lane of a few vector registers.

Entry [i, t] of an array belongs to list t. The items of each list are sorted by descending score, so that the sums over
pairs of `softsort` become running sums down the columns:

    R_i = sum_{l < i} (s_l - s_i),
    ds_i = sum_k (1 - 2k) dz_ki + G_i (low + high) + sum_{l < low} G_l + sum_{l < high} G_l,

where rows low .. high - 1 have the score s_i. Lists may have different numbers of items. The rows after the last item
of a list have the score -inf and take no part.

Cost of a list of n items, in operations on one lane: n log2(n)^2 / 4 comparisons of the sort with 4 loads and 4 stores
each, and about 30 n K + 20 n for the relaxed rows, of which 22 n K are for exp. Comparing all pairs, as `softsort`
does, takes 8 n^2.
"""

from typing import NamedTuple

import numpy as np
from llvmlite import ir
from numpy.typing import NDArray

from drm_triton.kernels.cpu.runtime.jit import allocating, inline
from drm_triton.kernels.cpu.runtime.rows import row_operation
from drm_triton.kernels.cpu.runtime.simd import WIDTH
from drm_triton.kernels.cpu.runtime.sort import SortBuffers, sort_buffers, sort_columns
from drm_triton.kernels.cpu.softsort import EXP_POLYNOMIAL, KEPT, LN2_HIGH, LN2_LOW, LOG2E, SMALLEST

f32 = np.float32


class Columns(NamedTuple):
    """WIDTH lists of up to n items, and buffers for them. L is WIDTH."""

    size: NDArray[np.float32]  # [L], number of items of each list
    s: NDArray[np.float32]  # [n, L] scores, -inf after the last item
    order: NDArray[np.int32]  # [n, L] positions in the list; those below rho are positives
    w: NDArray[np.float32]  # [K, L] rank weights
    R: NDArray[np.float32]  # [n, L]
    P: NDArray[np.float32]  # [min(K, KEPT) + 1, n, L], P_k times totals[k - 1] for the ranks kept, and one more
    totals: NDArray[np.float32]  # [K, L]
    q: NDArray[np.float32]  # [n, L] Q, then dL/dQ
    G: NDArray[np.float32]  # [n, L] sum_k dz_k
    above: NDArray[np.float32]  # [n, L] sum of G down to a row
    ds: NDArray[np.float32]  # [n, L] gradient to the scores
    of_lists: NDArray[np.float32]  # [3, L] numbers of each list: the loss, and two buffers
    sorting: SortBuffers


@allocating
def column_buffers(n, ranks):
    """Allocate WIDTH lists of up to n items."""
    rows = np.empty((6, n, WIDTH), np.float32)
    return Columns(
        np.zeros(WIDTH, np.float32),
        rows[5],
        np.zeros((n, WIDTH), np.int32),
        np.zeros((ranks, WIDTH), np.float32),
        rows[0],
        np.empty((min(ranks, KEPT) + 1, n, WIDTH), np.float32),
        np.zeros((ranks, WIDTH), np.float32),
        rows[1],
        rows[2],
        rows[3],
        rows[4],
        np.zeros((3, WIDTH), np.float32),
        sort_buffers(n),
    )


def exp(at, x):
    """Return exp(x) for x <= 0, as `softsort.exp` does, and 0 for NaN."""
    builder, integers = at.builder, at.integers
    k = builder.fptosi(at.fused(x, at.constant(LOG2E), at.constant(-0.5)), integers)  # any number if x is too small
    steps = builder.sitofp(k, at.vector)
    r = at.fused(steps, at.constant(-LN2_LOW), at.fused(steps, at.constant(-LN2_HIGH), x))
    p = at.constant(EXP_POLYNOMIAL[0])
    for coefficient in EXP_POLYNOMIAL[1:]:
        p = at.fused(p, r, at.constant(coefficient))
    p = builder.fadd(at.fused(p, builder.fmul(r, r), r), at.constant(1))
    bits = builder.shl(builder.add(k, ir.Constant(integers, [127] * at.lanes)), ir.Constant(integers, [23] * at.lanes))
    value = builder.fmul(p, builder.bitcast(bits, at.vector))
    return builder.select(builder.fcmp_ordered(">=", x, at.constant(SMALLEST)), value, at.zero)


@row_operation("scores", "s", "order", "n")
def copy_scores(at):
    """Copy the first n rows of scores to s. Their items are at positions 0 .. n - 1 of the lists."""
    integer = at.integers.element

    def step(i, carried):
        at.write(at.read("scores", i), "s", i)
        at.write(at.splat(at.builder.trunc(i, integer)), "order", i)
        return []

    at.loop(at["n"], 1, [], step)


@row_operation("size", "s", "order", "n", "row_end")
def pad_columns(at):
    """Fill the lanes from their last item to row n with the score -inf, and the position `end` of no positive."""
    builder, size = at.builder, at.read("size", at.i64(0))
    absent, end = at.constant("-inf"), at.splat(builder.trunc(at["row_end"], at.integers.element))

    def step(i, carried):
        exists = builder.fcmp_ordered("<", at.number(i), size)
        at.write(builder.select(exists, at.read("s", i), absent), "s", i)
        at.write(builder.select(exists, at.read("order", i, at.integers), end), "order", i)
        return []

    at.loop(at["n"], 1, [], step)


@row_operation("s", "R", "n")
def _sum_above(at):
    """R_i = sum_{l < i} (s_l - s_i), inf after the last item. All terms are positive, so nothing cancels."""

    def step(i, carried):
        total, upper = carried
        score = at.read("s", i)
        total = at.fused(at.number(i), at.builder.fsub(upper, score), total)
        at.write(total, "R", i)
        return [total, score]

    at.loop(at["n"], 1, [at.zero, at.read("s", at.i64(0))], step)


@row_operation("s", "R", "P", "totals", "n", "row_slot", "row_rank", "c", "scale")
def _relaxed_row(at):
    """P_k for k = rank + 1, times the total that is written to totals; 0 after the last item.

    With c = 2k - 1 and scale = -1 / tau. P_k is largest at row k, from which the exponents are counted: differences of
    scores do not overflow where c s / tau would. After the last item, R - R_k is inf and s - s_k is -inf, so that the
    exponent is NaN, of which `exp` makes 0.
    """
    builder, rank = at.builder, at["row_rank"]
    c, scale, first = at.splat(at["c"]), at.splat(at["scale"]), builder.mul(at["row_slot"], at["n"])
    top, R_top = at.read("s", rank), at.read("R", rank)

    def step(i, carried):
        rise, gap = builder.fsub(at.read("R", i), R_top), builder.fsub(at.read("s", i), top)
        exponent = builder.fmul(scale, at.fused(c, gap, builder.fadd(rise, rise)))
        exponent = builder.select(builder.fcmp_ordered(">", exponent, at.zero), at.zero, exponent)  # rounding
        value = exp(at, exponent)
        at.write(value, "P", builder.add(first, i))
        return [builder.fadd(carried[0], value)]

    at.write(at.loop(at["n"], 1, [at.zero], step)[0], "totals", rank)


@row_operation("P", "factor", "q", "n", "row_slot")
def _add_row(at):
    """Add factor P to q."""
    factor, first = at.read("factor", at.i64(0)), at.builder.mul(at["row_slot"], at["n"])

    def step(i, carried):
        at.write(at.fused(factor, at.read("P", at.builder.add(first, i)), at.read("q", i)), "q", i)
        return []

    at.loop(at["n"], 1, [], step)


@row_operation("q", "order", "of_lists", "n", "rho", "scale")
def _residuals(at):
    """Replace Q by scale (Q - y); write ||y - Q||^2. Q is 0 for the positives of a list that are not among its rows."""
    builder = at.builder
    scale, rho, one = at.splat(at["scale"]), at.splat(at["rho"]), at.constant(1)

    def step(i, carried):
        square, absent = carried
        position = builder.sitofp(at.read("order", i, at.integers), at.vector)
        y = builder.select(builder.fcmp_ordered("<", position, rho), one, at.zero)
        residual = builder.fsub(at.read("q", i), y)
        at.write(builder.fmul(scale, residual), "q", i)
        return [at.fused(residual, residual, square), builder.fsub(absent, y)]

    square, absent = at.loop(at["n"], 1, [at.zero, rho], step)
    at.write(builder.fadd(square, absent), "of_lists", at.i64(0))


@row_operation("P", "q", "of_lists", "n", "row_slot")
def _mean(at):
    """Write sum_i P_i q_i to row 1 of `of_lists`."""
    first = at.builder.mul(at["row_slot"], at["n"])

    def step(i, carried):
        return [at.fused(at.read("P", at.builder.add(first, i)), at.read("q", i), carried[0])]

    at.write(at.loop(at["n"], 1, [at.zero], step)[0], "of_lists", at.i64(1))


@row_operation("P", "q", "of_lists", "G", "ds", "n", "row_slot", "c")
def _add_gradient(at):
    """With dz = factor P (q - mean): G += dz, ds += c dz. Rows 1 and 2 of `of_lists` are mean and factor."""
    builder, first, c = at.builder, at.builder.mul(at["row_slot"], at["n"]), at.splat(at["c"])
    mean, factor = at.read("of_lists", at.i64(1)), at.read("of_lists", at.i64(2))

    def step(i, carried):
        difference = builder.fsub(at.read("q", i), mean)
        dz = builder.fmul(builder.fmul(factor, at.read("P", builder.add(first, i))), difference)
        at.write(builder.fadd(at.read("G", i), dz), "G", i)
        at.write(at.fused(c, dz, at.read("ds", i)), "ds", i)
        return []

    at.loop(at["n"], 1, [], step)


@row_operation("s", "G", "above", "ds", "n")
def _add_pairs_down(at):
    """above_i = sum_{l <= i} G_l, and ds_i += G_i low + sum_{l < low} G_l."""
    builder = at.builder

    def step(i, carried):
        upper, total, low, before = carried
        score, g = at.read("s", i), at.read("G", i)
        tie = builder.fcmp_ordered("==", score, upper)
        low, before = builder.select(tie, low, at.number(i)), builder.select(tie, before, total)
        total = builder.fadd(total, g)
        at.write(total, "above", i)
        at.write(at.fused(g, low, builder.fadd(at.read("ds", i), before)), "ds", i)
        return [score, total, low, before]

    at.loop(at["n"], 1, [at.read("s", at.i64(0)), at.zero, at.zero, at.zero], step)


@row_operation("s", "G", "above", "ds", "n")
def _add_pairs_up(at):
    """ds_i += G_i high + sum_{l < high} G_l, from the last row to the first."""
    builder, last = at.builder, at.builder.sub(at["n"], at.i64(1))

    def step(number, carried):
        lower, high, through = carried
        i = builder.sub(last, number)
        score, g = at.read("s", i), at.read("G", i)
        tie = builder.fcmp_ordered("==", score, lower)
        high = builder.select(tie, high, at.number(builder.add(i, at.i64(1))))
        through = builder.select(tie, through, at.read("above", i))
        at.write(at.fused(g, high, builder.fadd(at.read("ds", i), through)), "ds", i)
        return [score, high, through]

    start = [at.read("s", last), at.number(at["n"]), at.read("above", last)]
    at.loop(at["n"], 1, start, step)


@inline
def drm_of_columns(columns, n, rho, lam, tau):
    """Compute lam ||y - Q||^2 and its gradient for WIDTH lists of up to n items, at least one.

    `size`, `s`, `order` and `w` say what the lists are; they have `rho` positives each. ||y - Q||^2 is written to the
    first row of `of_lists`, and the gradient to `ds`, in the order of `order`.
    """
    size, s, order, w, R, P, totals, q, G, above, ds, of_lists, sorting = columns
    kept, factor = P.shape[0] - 1, of_lists[2]
    sort_columns(size, s, order, sorting)
    _sum_above(s, R, n)
    q[:n] = f32(0)
    for rank in range(w.shape[0]):
        slot = min(rank, kept)
        _relaxed_row(s, R, P, totals, n, slot, rank, f32(2 * rank + 1), f32(-1 / tau))
        for t in range(WIDTH):
            factor[t] = w[rank, t] / totals[rank, t] if w[rank, t] != 0 else f32(0)
        _add_row(P, factor, q, n, slot)
    _residuals(q, order, of_lists, n, f32(rho), f32(2) * lam)
    G[:n] = f32(0)
    ds[:n] = f32(0)
    for rank in range(w.shape[0]):
        slot = min(rank, kept)
        if slot == kept:
            _relaxed_row(s, R, P, totals, n, slot, rank, f32(2 * rank + 1), f32(-1 / tau))
        _mean(P, q, of_lists, n, slot)
        for t in range(WIDTH):
            counts = w[rank, t] != 0
            of_lists[1, t] = of_lists[1, t] / totals[rank, t] if counts else f32(0)
            factor[t] = f32(w[rank, t] / tau) / totals[rank, t] if counts else f32(0)
        _add_gradient(P, q, of_lists, G, ds, n, slot, f32(-(2 * rank + 1)))
    _add_pairs_down(s, G, above, ds, n)
    _add_pairs_up(s, G, above, ds, n)
