"""Products with a matrix [n, WIDTH] that is mostly 0: row j belongs to an item, column t to a list.

Each sum of rows stays in registers while its terms are added: that of an item over the lists that have an entry, and
that of a list over its items. Each product takes the entries in its own order.
"""

from llvmlite import ir
from numba import types

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


def _item_tile(vectors: int):
    """Return an intrinsic that adds the rows of lists to row j of `sums`, in `vectors` vectors of columns from c on.

    g[start + t] is the entry of list t, for each bit t of `word`, one or more.
    """

    @intrinsic
    def tile(context, sums, j, d, g, start, word, users, width, c):
        names = ("sums", "row", "d", "g", "start", "word", "users", "width", "c")

        def build(context, builder, signature, args):
            at = VectorBuilder(context, builder, signature, args, names)

            def places(row, size):
                begin = builder.add(builder.mul(row, size), at["c"])
                return [builder.add(begin, at.i64(v * at.lanes)) for v in range(vectors)]

            def step(_, carried):
                word, *totals = carried
                t, results = builder.cttz(word, ir.Constant(ir.IntType(1), 1)), []
                factor = at.splat(at.load("g", builder.add(at["start"], t)))
                for place, total in zip(places(t, at["width"]), totals, strict=True):
                    user = at.load("users", place, at.vector)
                    results.append(builder.fadd(total, builder.fmul(factor, user, flags=FUSED), flags=FUSED))
                return [builder.and_(word, builder.sub(word, at.i64(1))), *results]

            of_item = places(at["row"], at["d"])
            totals = [at.load("sums", place, at.vector) for place in of_item]
            _, *totals = at.loop(builder.ctpop(at["word"]), 1, [at["word"], *totals], step)
            for place, total in zip(of_item, totals, strict=True):
                at.store(total, "sums", place)
            return nothing(context)

        i64 = types.int64
        return types.none(sums, i64, i64, g, i64, i64, users, i64, i64), build

    return tile


def _list_tile(vectors: int):
    """Return an intrinsic for row b of `out`, the sum of the rows of list t, in `vectors` vectors of columns from c on.

    Entry i < count of the list, column t of g, belongs to row ids[order[i, t]] of V.
    """

    @intrinsic
    def tile(context, out, b, g, order, t, count, V, d, ids, c):
        names = ("out", "b", "g", "order", "t", "count", "V", "d", "ids", "c")

        def build(context, builder, signature, args):
            at = VectorBuilder(context, builder, signature, args, names)
            i32, V = ir.IntType(32), at.pointer("V", at["c"])

            def entry(i):
                place = builder.add(builder.mul(i, at.i64(WIDTH)), at["t"])
                position = builder.sext(at.load("order", place, i32), at.i64)
                row = builder.sext(at.load("ids", position, i32), at.i64)
                return at.load("g", place), builder.gep(V, [builder.mul(row, at["d"])])

            begin = builder.add(builder.mul(at["b"], at["d"]), at["c"])
            for v, total in enumerate(at.sum_rows(at["count"], vectors * [at.zero], entry)):
                at.store(total, "out", builder.add(begin, at.i64(v * at.lanes)))
            return nothing(context)

        i64 = types.int64
        return types.none(out, i64, g, order, i64, i64, V, i64, ids, i64), build

    return tile


_item_four, _item_one = _item_tile(4), _item_tile(1)
_list_four, _list_one = _list_tile(4), _list_tile(1)


@inline
def add_to_item(j, g, start, word, users, sums):
    """Add g[start + t] times row t of `users` to row j of `sums` for each bit t of `word`, one or more.

    g is flat. `sums` has d columns, `users` at least as many.
    """
    d, width = sums.shape[1], users.shape[1]
    four, one = d // (4 * LANES) * (4 * LANES), d // LANES * LANES
    for c in range(0, four, 4 * LANES):
        _item_four(sums, j, d, g, start, word, users, width, c)
    for c in range(four, one, LANES):
        _item_one(sums, j, d, g, start, word, users, width, c)
    for c in range(one, d):
        for t in range(WIDTH):
            if (word >> t) & 1:
                sums[j, c] += g[start + t] * users[t, c]


@inline
def sum_list(t, count, g, order, V, ids, b, out):
    """Write sum_i g[i, t] V[ids[order[i, t]]] over i < count, one or more, to row b of `out`."""
    d = V.shape[1]
    four, one = d // (4 * LANES) * (4 * LANES), d // LANES * LANES
    for c in range(0, four, 4 * LANES):
        _list_four(out, b, g, order, t, count, V, d, ids, c)
    for c in range(four, one, LANES):
        _list_one(out, b, g, order, t, count, V, d, ids, c)
    for c in range(one, d):
        out[b, c] = g[0, t] * V[ids[order[0, t]], c]
        for i in range(1, count):
            out[b, c] += g[i, t] * V[ids[order[i, t]], c]
