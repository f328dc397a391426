"""Products with a matrix [n, WIDTH] that is mostly 0: row j belongs to an item, column t to a list.

The items are taken BITS at a time, list by list. What the lists share, the rows of these items and the sums for them,
then stays in the first-level cache, and what belongs to one list stays in registers.
"""

from llvmlite import ir
from numba import types

from drm_triton.kernels.cpu.runtime.bits import BITS
from drm_triton.kernels.cpu.runtime.jit import inline, intrinsic
from drm_triton.kernels.cpu.runtime.numba_private import nothing
from drm_triton.kernels.cpu.runtime.simd import FUSED, LANES, WIDTH, VectorBuilder


@intrinsic
def not_zero(context, g, start):
    """Return which of WIDTH numbers from `start` on are not 0, as the bits of an integer. NaN is not 0."""

    def build(context, builder, signature, args):
        at = VectorBuilder(context, builder, signature, args, ("g", "start"), lanes=WIDTH)
        bits = builder.fcmp_unordered("!=", at.load("g", at["start"], at.vector), at.zero)
        return builder.zext(builder.bitcast(bits, ir.IntType(WIDTH)), at.i64)

    return types.int64(g, types.int64), build


def _entries(vectors: int):
    """Return an intrinsic for some entries of list t, and `vectors` vectors of columns from c on.

    For each bit i of `word`, one or more, with g_i = g[start + i WIDTH + t] and j = first + i, it adds g_i V[ids[j]] to
    row t of `user_grad`, and g_i times row t of `users` to row j of `sums`.
    """

    @intrinsic
    def tile(context, g, start, word, t, V, d, ids, first, users, user_grad, width, sums, c):
        names = ("g", "start", "word", "t", "V", "d", "ids", "first", "users", "user_grad", "width", "sums", "c")

        def build(context, builder, signature, args):
            at = VectorBuilder(context, builder, signature, args, names)

            def places(row, size):
                begin = builder.add(builder.mul(row, size), at["c"])
                return [builder.add(begin, at.i64(v * at.lanes)) for v in range(vectors)]

            def fused(a, b, c):
                return builder.fadd(builder.fmul(a, b, flags=FUSED), c, flags=FUSED)

            of_list, start = places(at["t"], at["width"]), builder.add(at["start"], at["t"])
            user = [at.load("users", place, at.vector) for place in of_list]

            def step(_, carried):
                word, *totals = carried
                i = builder.cttz(word, ir.Constant(ir.IntType(1), 1))
                factor = at.splat(at.load("g", builder.add(start, builder.mul(i, at.i64(WIDTH)))))
                j = builder.add(at["first"], i)
                row = builder.sext(at.load("ids", j, ir.IntType(32)), at.i64)
                for place, u in zip(places(j, at["d"]), user, strict=True):
                    at.store(fused(factor, u, at.load("sums", place, at.vector)), "sums", place)
                rows = [at.load("V", place, at.vector) for place in places(row, at["d"])]
                totals = [fused(factor, v, total) for v, total in zip(rows, totals, strict=True)]
                return [builder.and_(word, builder.sub(word, at.i64(1))), *totals]

            totals = [at.load("user_grad", place, at.vector) for place in of_list]
            _, *totals = at.loop(builder.ctpop(at["word"]), 1, [at["word"], *totals], step)
            for place, total in zip(of_list, totals, strict=True):
                at.store(total, "user_grad", place)
            return nothing(context)

        i64 = types.int64
        return types.none(g, i64, i64, i64, V, i64, ids, i64, users, user_grad, i64, sums, i64), build

    return tile


_four, _one = _entries(4), _entries(1)


@inline
def add_entries(g, start, word, t, V, ids, first, users, user_grad, sums):
    """Add the products with some entries of list t to row t of `user_grad` and to rows of `sums`.

    For each bit i of `word`, one or more, the entry g[start + i WIDTH + t] belongs to row ids[first + i] of V, to row t
    of `users`, and to row first + i of `sums`. g is flat. V and `sums` have d columns, the others at least as many.
    """
    d, width = V.shape[1], users.shape[1]
    four, one = d // (4 * LANES) * (4 * LANES), d // LANES * LANES
    for c in range(0, four, 4 * LANES):
        _four(g, start, word, t, V, d, ids, first, users, user_grad, width, sums, c)
    for c in range(four, one, LANES):
        _one(g, start, word, t, V, d, ids, first, users, user_grad, width, sums, c)
    for i in range(BITS if one < d else 0):
        if (word >> i) & 1:
            entry, v = g[start + i * WIDTH + t], V[ids[first + i]]
            for c in range(one, d):
                user_grad[t, c] += entry * v[c]
                sums[first + i, c] += entry * users[t, c]
