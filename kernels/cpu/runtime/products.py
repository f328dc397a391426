"""Products of small matrices, whose sums stay in vector registers, and transposition. Arrays are float32."""

from llvmlite import ir
from numba import types

from drm_triton.kernels.cpu.runtime.jit import inline, intrinsic, prefetch_row
from drm_triton.kernels.cpu.runtime.numba_private import nothing
from drm_triton.kernels.cpu.runtime.simd import AVX512, FUSED, LANES, ROWS, WIDTH, VectorBuilder

WIDE = 2 if AVX512 else 1  # vectors of columns in a register tile of ROWS rows
# Items, in fours, in a register tile of scores of WIDTH lists: loads do not limit its multiply-adds.
ITEMS, VECTORS = (8 if AVX512 else 4), WIDTH // LANES
AHEAD = 64  # items between the prefetch of a row and its use


def _multiply_tile(vectors: int, add: bool):
    """Return an intrinsic for ROWS rows and `vectors` vectors of columns of a product, which may be added to C.

    Row i of A begins at a_start + i * a_row, with a_step between its elements; the columns of B and C begin at
    b_start and c_start, with `width` elements in a row.
    """

    @intrinsic
    def tile(context, A, a_start, a_row, a_step, B, b_start, width, depth, C, c_start):
        names = ("A", "a_start", "a_row", "a_step", "B", "b_start", "width", "depth", "C", "c_start")

        def build(context, builder, signature, args):
            at = VectorBuilder(context, builder, signature, args, names)
            rows = [builder.add(at["a_start"], builder.mul(at["a_row"], at.i64(i))) for i in range(ROWS)]

            def places(start, row):
                begin = builder.add(start, builder.mul(row, at["width"]))
                return [builder.add(begin, at.i64(v * at.lanes)) for v in range(vectors)]

            def step(k, sums):
                columns = [at.load("B", place, at.vector) for place in places(at["b_start"], k)]
                offset, totals = builder.mul(k, at["a_step"]), []
                for i, row in enumerate(rows):
                    a = at.splat(at.load("A", builder.add(row, offset)))
                    for b, total in zip(columns, sums[i * vectors : (i + 1) * vectors], strict=True):
                        totals.append(builder.fadd(total, builder.fmul(a, b, flags=FUSED), flags=FUSED))
                return totals

            of_C = [place for i in range(ROWS) for place in places(at["c_start"], at.i64(i))]
            starts = [at.load("C", place, at.vector) if add else at.zero for place in of_C]
            for place, total in zip(of_C, at.loop(at["depth"], 1, starts, step), strict=True):
                at.store(total, "C", place)
            return nothing(context)

        i64 = types.int64
        return types.none(A, i64, i64, i64, B, i64, i64, i64, C, i64), build

    return tile


def _product(add: bool):
    """Return a function that computes a product in tiles."""
    wide_tile, tile = _multiply_tile(WIDE, add), _multiply_tile(1, add)

    @inline
    def product(A, a_row, a_step, B, depth, C):
        height, width = C.shape
        wide = width // (WIDE * LANES) * (WIDE * LANES)
        for i in range(0, height, ROWS):
            for j in range(0, wide, WIDE * LANES):
                wide_tile(A, i * a_row, a_row, a_step, B, j, width, depth, C, i * width + j)
            for j in range(wide, width, LANES):
                tile(A, i * a_row, a_row, a_step, B, j, width, depth, C, i * width + j)

    return product


# multiply(A, a_row, a_step, B, depth, C) computes
#
#     C[i, j] = sum_k A_ik B[k, j] over k < depth, at least one,
#
# with A_ik at position i * a_row + k * a_step of A. C has a multiple of ROWS rows. B and C have the same number of
# columns, a multiple of LANES. All are C-contiguous. multiply_add adds the product to C.
multiply, multiply_add = _product(add=False), _product(add=True)


def _score_tile(l2: bool, by_item: bool):
    """Return an intrinsic for the scores of ITEMS items and WIDTH lists.

    The items are items[first] .. , none after items[last]. Lists t .. are columns of `columns`, which has `width`, and
    rows of `scores`, or its columns if `by_item`. The rows of `scores` have `stride` elements.
    """

    @intrinsic
    def tile(context, V, items, first, last, columns, t, width, depth, scores, stride):
        names = ("V", "items", "first", "last", "columns", "t", "width", "depth", "scores", "stride")

        def build(context, builder, signature, args):
            at = VectorBuilder(context, builder, signature, args, names)
            rows = []
            for i in range(ITEMS):
                j = builder.add(at["first"], at.i64(i))
                j = builder.select(builder.icmp_signed("<", j, at["last"]), j, at["last"])
                item = at.load("items", j, ir.IntType(32))
                rows.append(builder.mul(builder.sext(item, at.i64), at["depth"]))

            def step(k, sums):
                start = builder.add(at["t"], builder.mul(k, at["width"]))
                starts = [builder.add(start, at.i64(v * at.lanes)) for v in range(VECTORS)]
                lists = [at.load("columns", offset, at.vector) for offset in starts]
                totals = []
                for i, row in enumerate(rows):
                    item = at.splat(at.load("V", builder.add(row, k)))
                    for x, total in zip(lists, sums[i * VECTORS : (i + 1) * VECTORS], strict=True):
                        if l2:
                            difference = builder.fsub(item, x)
                            square = builder.fmul(difference, difference, flags=FUSED)
                            totals.append(builder.fsub(total, square, flags=FUSED))
                        else:
                            totals.append(builder.fadd(total, builder.fmul(item, x, flags=FUSED), flags=FUSED))
                return totals

            sums = at.loop(at["depth"], 1, ITEMS * VECTORS * [at.zero], step)
            for v in range(VECTORS):
                of_items = sums[v::VECTORS]
                if by_item:
                    begin = builder.add(at["t"], at.i64(v * at.lanes))
                    for i, of_item in enumerate(of_items):
                        row = builder.mul(builder.add(at["first"], at.i64(i)), at["stride"])
                        at.store(of_item, "scores", builder.add(row, begin))
                    continue
                for four in range(0, ITEMS, 4):
                    first = builder.add(at["first"], at.i64(four))
                    for i, of_list in enumerate(_transposed(at, of_items[four : four + 4])):
                        position = builder.add(at["t"], at.i64(v * at.lanes + i))
                        at.store(of_list, "scores", builder.add(builder.mul(position, at["stride"]), first))
            return nothing(context)

        i64 = types.int64
        return types.none(V, items, i64, i64, columns, i64, i64, i64, scores, i64), build

    return tile


def _transposed(at, rows):
    """Return the columns of 4 vectors, each a vector of 4 numbers."""

    def shuffled(a, b, order):
        lanes = [start + i % 4 + (at.lanes if i >= 4 else 0) for start in range(0, at.lanes, 4) for i in order]
        return at.builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(ir.IntType(32), at.lanes), lanes))

    # Within each four lanes, so that no value crosses from one half of a register to the other.
    low, high = (0, 4, 1, 5), (2, 6, 3, 7)
    low01, low23 = shuffled(rows[0], rows[1], low), shuffled(rows[2], rows[3], low)
    high01, high23 = shuffled(rows[0], rows[1], high), shuffled(rows[2], rows[3], high)
    first, second = (0, 1, 4, 5), (2, 3, 6, 7)
    quads = [shuffled(low01, low23, first), shuffled(low01, low23, second)]
    quads += [shuffled(high01, high23, first), shuffled(high01, high23, second)]
    columns = []
    for start in range(0, at.lanes, 4):
        order = ir.Constant(ir.VectorType(ir.IntType(32), 4), [start + i for i in range(4)])
        columns += [at.builder.shuffle_vector(quad, quad, order) for quad in quads]
    return columns


def _scores(by_item: bool):
    """Return a function that computes all scores in tiles."""
    dot_tile, distance_tile = _score_tile(False, by_item), _score_tile(True, by_item)

    @inline
    def score(V, items, following, columns, l2, scores, stride):
        n, (d, lists) = items.size, columns.shape
        ahead = min(AHEAD, n)
        for j in range(0, n, ITEMS):
            for p in range(j + ahead, min(j + ITEMS, n) + ahead):
                prefetch_row(V, items[p] if p < n else following[p - n])
            for t in range(0, lists, WIDTH):
                if l2:
                    distance_tile(V, items, j, n - 1, columns, t, lists, d, scores, stride)
                else:
                    dot_tile(V, items, j, n - 1, columns, t, lists, d, scores, stride)

    return score


# score_lists(V, items, following, columns, l2, scores, stride) computes
#
#     scores[t * stride + j] = u_t . v_j, or -||u_t - v_j||^2 under l2,
#
# for the rows v_j of V [*, d] in `items`. The vectors u_t are the columns of `columns` [d, lists], lists a multiple of
# WIDTH. `scores` is flat, and has space for as many lists and for the number of items rounded up to a multiple of
# ITEMS. The rows of `following`, the next items to score, are prefetched. score_columns does the same with
# scores[j * stride + t].
score_lists, score_columns = _scores(by_item=False), _scores(by_item=True)


@intrinsic
def _transpose_square(context, rows, start, d, columns, to, width):
    """Transpose LANES x LANES numbers: element c of row i goes to row c of `columns`, element i."""
    names = ("rows", "start", "d", "columns", "to", "width")

    def build(context, builder, signature, args):
        at = VectorBuilder(context, builder, signature, args, names)
        square = [
            at.load("rows", builder.add(at["start"], builder.mul(at.i64(i), at["d"])), at.vector) for i in range(LANES)
        ]
        index = ir.VectorType(ir.IntType(32), LANES)
        step = 1
        while step < LANES:  # swaps blocks of `step` x `step` numbers across the diagonal
            upper = [i if not i & step else i - step + LANES for i in range(LANES)]
            lower = [i + step if not i & step else i + LANES for i in range(LANES)]
            for i in range(LANES):
                if not i & step:
                    a, b = square[i], square[i + step]
                    square[i] = builder.shuffle_vector(a, b, ir.Constant(index, upper))
                    square[i + step] = builder.shuffle_vector(a, b, ir.Constant(index, lower))
            step *= 2
        for c, column in enumerate(square):
            at.store(column, "columns", builder.add(at["to"], builder.mul(at.i64(c), at["width"])))
        return nothing(context)

    i64 = types.int64
    return types.none(rows, i64, i64, columns, i64, i64), build


@inline
def transpose(rows, columns):
    """columns[c, t] = rows[t, c]. `rows` has a multiple of LANES rows, and no fewer columns than `columns` has rows."""
    lists, d = rows.shape
    depth, width = columns.shape
    for c in range(0, depth // LANES * LANES, LANES):
        for t in range(0, lists, LANES):
            _transpose_square(rows, t * d + c, d, columns, c * width + t, width)
    for c in range(depth // LANES * LANES, depth):
        for t in range(lists):
            columns[c, t] = rows[t, c]
