"""The gradients of items and users from a matrix of gradients to scores that is mostly 0: two products at once.

Entry g_jt belongs to item j and list t, which is one of WIDTH. The items are taken in the order of how many lists have
a gradient to them. A processor then seldom mispredicts for how many lists it has to repeat the inner loop, in which the
sum of an item stays in registers, and the gradients of the users in the first-level cache.
"""

from typing import NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numpy.typing import NDArray

from drm_triton.kernels.cpu.runtime.bits import ones
from drm_triton.kernels.cpu.runtime.jit import allocating, inline, intrinsic, prefetch_row
from drm_triton.kernels.cpu.runtime.numba_private import nothing
from drm_triton.kernels.cpu.runtime.simd import FUSED, LANES, WIDTH, VectorBuilder

ITEMS_AHEAD = 4  # items between the prefetch of their rows and their use


class ExchangeBuffers(NamedTuple):
    """Buffers of `exchange_rows`, for n items."""

    words: NDArray[np.int64]  # [n], bits of the lists that have a gradient
    order: NDArray[np.int64]  # [n] items, by the number of these lists
    counts: NDArray[np.int64]  # [WIDTH + 2]


@allocating
def exchange_buffers(n):
    """Allocate buffers for n items."""
    return ExchangeBuffers(np.empty(n, np.int64), np.empty(n, np.int64), np.empty(WIDTH + 2, np.int64))


@intrinsic
def not_zero(context, g, start):
    """Return which of WIDTH numbers from `start` on are not 0, as the bits of an integer. NaN is not 0."""

    def build(context, builder, signature, args):
        at = VectorBuilder(context, builder, signature, args, ("g", "start"), lanes=WIDTH)
        bits = builder.fcmp_unordered("!=", at.load("g", at["start"], at.vector), at.zero)
        return builder.zext(builder.bitcast(bits, ir.IntType(WIDTH)), at.i64)

    return types.int64(g, types.int64), build


def _exchange_tile(vectors: int):
    """Return an intrinsic for one item and `vectors` vectors of columns, from column `c` on.

    g[start + t] is the gradient of list t, for each bit t of `word`, one or more.
    """

    @intrinsic
    def tile(context, V, item, sums, j, d, g, start, word, users, user_grad, width, c):
        names = ("V", "item", "sums", "row", "d", "g", "start", "word", "users", "user_grad", "width", "c")

        def build(context, builder, signature, args):
            at = VectorBuilder(context, builder, signature, args, names)

            def places(row, size):
                begin = builder.add(builder.mul(row, size), at["c"])
                return [builder.add(begin, at.i64(v * at.lanes)) for v in range(vectors)]

            def sum_of(total, factor, x):
                return builder.fadd(total, builder.fmul(factor, x, flags=FUSED), flags=FUSED)

            item = [at.load("V", place, at.vector) for place in places(at["item"], at["d"])]
            of_item = places(at["row"], at["d"])

            def step(_, carried):
                word, *totals = carried
                t = builder.cttz(word, ir.Constant(ir.IntType(1), 1))
                factor, of_user = at.splat(at.load("g", builder.add(at["start"], t))), places(t, at["width"])
                for place, x in zip(of_user, item, strict=True):
                    at.store(sum_of(at.load("user_grad", place, at.vector), factor, x), "user_grad", place)
                users = [at.load("users", place, at.vector) for place in of_user]
                totals = [sum_of(total, factor, x) for total, x in zip(totals, users, strict=True)]
                return [builder.and_(word, builder.sub(word, at.i64(1))), *totals]

            totals = [at.load("sums", place, at.vector) for place in of_item]
            _, *totals = at.loop(builder.ctpop(at["word"]), 1, [at["word"], *totals], step)
            for place, total in zip(of_item, totals, strict=True):
                at.store(total, "sums", place)
            return nothing(context)

        i64 = types.int64
        return types.none(V, i64, sums, i64, i64, g, i64, i64, users, user_grad, i64, i64), build

    return tile


_exchange_four, _exchange_one = _exchange_tile(4), _exchange_tile(1)


@inline
def sort_items(n, g, buffers):
    """Sort the items that have a gradient by the number of lists; return how many items these are."""
    words, order, counts = buffers
    counts[:] = 0
    for j in range(n):
        words[j] = not_zero(g, j * WIDTH)
        counts[ones(words[j]) + 1] += 1
    without = counts[1]
    counts[1] = 0
    for count in range(1, WIDTH + 1):
        counts[count + 1] += counts[count]
    for j in range(n):
        count = ones(words[j])
        if count > 0:
            order[counts[count]] = j
            counts[count] += 1
    return n - without


@inline
def exchange_rows(V, items, sums, g, users, user_grad, used, buffers):
    """Add g_jt v_j to row t of `user_grad`, and g_jt u_t to row j of `sums`, wherever g_jt is not 0.

    g is flat, with WIDTH entries for each item. v_j is row items[j] of V, and u_t row t of `users`. V and `sums` have d
    columns, `users` and `user_grad` at least as many. used[j] becomes items[j] if any g_jt is not 0.
    """
    d, width, n = V.shape[1], users.shape[1], sort_items(items.size, g, buffers)
    four, one = d // (4 * LANES) * (4 * LANES), d // LANES * LANES
    for i in range(n):
        j, ahead = buffers.order[i], buffers.order[min(i + ITEMS_AHEAD, n - 1)]
        prefetch_row(V, items[ahead])
        prefetch_row(sums, ahead)
        item, start, word = np.int64(items[j]), j * WIDTH, buffers.words[j]
        used[j] = items[j]
        for c in range(0, four, 4 * LANES):
            _exchange_four(V, item, sums, j, d, g, start, word, users, user_grad, width, c)
        for c in range(four, one, LANES):
            _exchange_one(V, item, sums, j, d, g, start, word, users, user_grad, width, c)
        for c in range(one, d):
            for t in range(WIDTH):
                if (word >> t) & 1:
                    user_grad[t, c] += g[start + t] * V[item, c]
                    sums[j, c] += g[start + t] * users[t, c]
