"""Small symmetric systems K x = b in compiled functions: Gram matrices, the Cholesky factor, the solution.

K [m, columns + LANES] is C-contiguous. m is a multiple of ROWS, and `columns` is m rounded up to a multiple of LANES.
Only the upper half of K is used; b is in the column of the number `columns`. Numbers below the diagonal and in the
other further columns must be finite. Products run in register tiles, as in `simd`.
"""

import numpy as np
from llvmlite import ir
from numba import types

from drm_triton.kernels.cpu.runtime.jit import allocating, inline, intrinsic
from drm_triton.kernels.cpu.runtime.numba_private import llvm_function, nothing
from drm_triton.kernels.cpu.runtime.simd import AVX512, FUSED, LANES, ROWS, VectorBuilder

# Rows of the tiles that are several vectors wide. With r rows and v vectors, r + v loads are for r v multiply-adds, so
# that loads do not limit them.
TALL, LOW = (12, 4) if AVX512 else (6, 4)  # of a Gram matrix: most of the registers, and rows that are left
HALF = ROWS if AVX512 else ROWS // 2  # of a row of blocks of the Cholesky factor, three vectors wide
INNER = 4 if AVX512 else 2  # rows of one factor in a tile of inner products; the other factor has 4
WIDE = 4  # vectors that a sum of rows computes at once
ALIGNMENT = 64  # bytes of a cache line


@inline
def lanes(x):
    """Return how many numbers of the type of array x are in a vector."""
    return LANES * 4 // x.itemsize


@allocating
def aligned(rows, columns, x):
    """Return zeros [rows, columns] of the type of x that begin with a cache line, as vectors must not cross two."""
    extra = ALIGNMENT // x.itemsize
    memory = np.zeros(rows * columns + extra, x.dtype)
    start = (-(memory.ctypes.data // x.itemsize)) % extra
    return memory[start : start + rows * columns].reshape(rows, columns)


# ---------------------------------------------------------------------------------------------------------------
# Products


def _product_tile(rows: int, vectors: int, subtract: bool):
    """Return an intrinsic for C += A B, or C -= A B, in a tile of `rows` rows and `vectors` vectors of columns.

    A_ik is at a_start + i * a_row + k * a_step of A, B_kj at b_start + k * b_row + j, C_ij at c_start + i * c_row + j.
    k runs over range(depth), which is not empty.
    """

    @intrinsic
    def tile(context, A, a_start, a_row, a_step, B, b_start, b_row, depth, C, c_start, c_row):
        names = ("A", "a_start", "a_row", "a_step", "B", "b_start", "b_row", "depth", "C", "c_start", "c_row")

        def build(context, builder, signature, args):
            at = VectorBuilder(context, builder, signature, args, names)

            def starts(start, row):
                return [builder.add(at[start], builder.mul(at[row], at.i64(i))) for i in range(rows)]

            steps = [at.i64(v * at.lanes) for v in range(vectors)]
            places = [builder.add(start, step) for start in starts("c_start", "c_row") for step in steps]
            of_a = starts("a_start", "a_row")
            combine = builder.fsub if subtract else builder.fadd

            def accumulate(k, sums):
                row, offset, totals = builder.mul(k, at["b_row"]), builder.mul(k, at["a_step"]), []
                b = [at.load("B", builder.add(at["b_start"], builder.add(row, step)), at.vector) for step in steps]
                for i, start in enumerate(of_a):
                    a = at.splat(at.load("A", builder.add(start, offset)))
                    for v in range(vectors):
                        product = builder.fmul(a, b[v], flags=FUSED)
                        totals.append(combine(sums[i * vectors + v], product, flags=FUSED))
                return totals

            sums = at.loop(at["depth"], 1, [at.load("C", place, at.vector) for place in places], accumulate)
            for total, place in zip(sums, places, strict=True):
                at.store(total, "C", place)
            return nothing(context)

        i64 = types.int64
        return types.none(A, i64, i64, i64, B, i64, i64, i64, C, i64, i64), build

    return tile


_add_tile, _subtract_tile = _product_tile(ROWS, 1, False), _product_tile(ROWS, 1, True)
_tall_tile, _low_tile = _product_tile(TALL, 2, False), _product_tile(LOW, 2, False)
_tall_narrow_tile, _low_narrow_tile = _product_tile(TALL, 1, False), _product_tile(LOW, 1, False)
_subtract_wide_tile = _product_tile(HALF, 3, True)
_add_row, _add_wide_row = _product_tile(1, 1, False), _product_tile(1, WIDE, False)


@inline
def add_product(A, B, C):
    """C += A B for A [m, k], B [k, n], C [m, n]; m is a multiple of ROWS, and n of LANES."""
    (m, n), depth = C.shape, A.shape[1]
    for j in range(0, n, lanes(C)):
        for i in range(0, m, ROWS):
            _add_tile(A, i * depth, depth, 1, B, j, n, depth, C, i * n + j, n)


@inline
def add_rows(y, W, n, z):
    """Z += sum_{i < n} y_i W_i; n is positive. z has a multiple of LANES elements, and W at least as many columns."""
    vector, stride = lanes(z), W.shape[1]
    wide = z.size // (WIDE * vector) * (WIDE * vector)
    for j in range(0, wide, WIDE * vector):
        _add_wide_row(y, 0, 0, 1, W, j, stride, n, z, j, 0)
    for j in range(wide, z.size, vector):
        _add_row(y, 0, 0, 1, W, j, stride, n, z, j, 0)


@inline
def add_gram(A, B, n, K):
    """K += sum_{i < n} A_i B_i^T on and above the diagonal, for rows A_i and B_i as long as those of K; n is positive.

    K has as many rows as columns. Tiles that the diagonal crosses are computed whole. The further columns of B hold 0.
    """
    m, width, vector, stride = K.shape[0], K.shape[1], lanes(K), A.shape[1]
    i = 0
    while i < m:
        tall = (m - i) % TALL == 0
        begin = i // vector * vector
        if (m - begin) // vector % 2 == 1:  # a pair of vectors would begin or end with one in vain
            if tall:
                _tall_narrow_tile(A, i, 1, stride, B, begin, stride, n, K, i * width + begin, width)
            else:
                _low_narrow_tile(A, i, 1, stride, B, begin, stride, n, K, i * width + begin, width)
            begin += vector
        for j in range(begin, m, 2 * vector):
            if tall:
                _tall_tile(A, i, 1, stride, B, j, stride, n, K, i * width + j, width)
            else:
                _low_tile(A, i, 1, stride, B, j, stride, n, K, i * width + j, width)
        i += TALL if tall else LOW


@intrinsic
def _inner_tile(context, W, first, second, depth, stride, K, start, width):
    """K_ij = W_i . W_j for INNER rows i of W from `first` on, and 4 rows j from `second` on, of length depth.

    K_ij of the first i and j is at `start`.
    """
    names = ("W", "first", "second", "depth", "stride", "K", "start", "width")

    def build(context, builder, signature, args):
        at = VectorBuilder(context, builder, signature, args, names)

        def begin(row, i):
            return builder.mul(builder.add(at[row], at.i64(i)), at["stride"])

        left, right = [begin("first", i) for i in range(INNER)], [begin("second", j) for j in range(4)]

        def step(k, sums):
            x = [at.load("W", builder.add(place, k), at.vector) for place in left]
            y = [at.load("W", builder.add(place, k), at.vector) for place in right]
            products = [builder.fmul(a, b, flags=FUSED) for a in x for b in y]
            return [builder.fadd(total, product, flags=FUSED) for total, product in zip(sums, products, strict=True)]

        sums = at.loop(at["depth"], at.lanes, 4 * INNER * [at.zero], step)
        for i in range(INNER):
            place = builder.add(at["start"], builder.mul(at["width"], at.i64(i)))
            at.store(_four_sums(at, sums[4 * i : 4 * i + 4]), "K", place)
        return nothing(context)

    i64 = types.int64
    return types.none(W, i64, i64, i64, i64, K, i64, i64), build


def _shuffled(at, a, b, order):
    return at.builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(ir.IntType(32), len(order)), order))


def _pairs(at, a, b):
    """Return the sums of neighbouring elements, first of a, then of b."""
    n = a.type.count
    even, odd = list(range(0, 2 * n, 2)), list(range(1, 2 * n, 2))
    return at.builder.fadd(_shuffled(at, a, b, even), _shuffled(at, a, b, odd))


def _halves(at, a):
    """Return the sums of neighbouring elements of a: a vector of half the length."""
    n = a.type.count
    even, odd = list(range(0, n, 2)), list(range(1, n, 2))
    return at.builder.fadd(_shuffled(at, a, a, even), _shuffled(at, a, a, odd))


def _four_sums(at, vectors):
    """Return the sums of the elements of four vectors, as a vector of four."""
    a, b, c, d = vectors
    total = _pairs(at, _pairs(at, a, b), _pairs(at, c, d))
    while total.type.count > 4:
        total = _halves(at, total)
    return total


@inline
def inner_products(W, n, depth, K):
    """K_ij = W_i . W_j on and above the diagonal, for the first n rows of W and `depth` columns, a multiple of LANES.

    Rows and columns up to the next multiple of 4 are computed too.
    """
    width = K.shape[1]
    for i in range(0, n, INNER):
        for j in range(i // 4 * 4, n, 4):
            _inner_tile(W, i, j, depth, W.shape[1], K, i * width + j, width)


@intrinsic
def _dot(context, x, x_start, y, y_start, n):
    """Return the inner product of n elements, a positive multiple of the lanes."""

    def build(context, builder, signature, args):
        at = VectorBuilder(context, builder, signature, args, ("x", "x_start", "y", "y_start", "n"))

        def step(k, sums):
            x = at.load("x", builder.add(at["x_start"], k), at.vector)
            y = at.load("y", builder.add(at["y_start"], k), at.vector)
            return [builder.fadd(sums[0], builder.fmul(x, y, flags=FUSED), flags=FUSED)]

        (total,) = at.loop(at["n"], at.lanes, [at.zero], step)
        while total.type.count > 1:
            total = _halves(at, total)
        return builder.extract_element(total, ir.Constant(ir.IntType(32), 0))

    i64 = types.int64
    return x.dtype(x, i64, y, i64, i64), build


@intrinsic
def _four_dots(context, A, a_start, a_row, x, x_start, n, y, y_start):
    """Write the inner products of four rows of A with x to y. All have n elements, a positive multiple of the lanes."""

    def build(context, builder, signature, args):
        names = ("A", "a_start", "a_row", "x", "x_start", "n", "y", "y_start")
        at = VectorBuilder(context, builder, signature, args, names)
        rows = [builder.add(at["a_start"], builder.mul(at["a_row"], at.i64(i))) for i in range(4)]

        def step(k, sums):
            x = at.load("x", builder.add(at["x_start"], k), at.vector)
            a = [at.load("A", builder.add(row, k), at.vector) for row in rows]
            products = [builder.fmul(one, x, flags=FUSED) for one in a]
            return [builder.fadd(total, product, flags=FUSED) for total, product in zip(sums, products, strict=True)]

        at.store(_four_sums(at, at.loop(at["n"], at.lanes, 4 * [at.zero], step)), "y", at["y_start"])
        return nothing(context)

    i64 = types.int64
    return types.none(A, i64, i64, x, i64, i64, y, i64), build


@inline
def inner_product(x, y):
    """Return x . y for the elements of y, a multiple of LANES; x has at least as many."""
    return _dot(x, 0, y, 0, y.size)


# ---------------------------------------------------------------------------------------------------------------
# Cholesky


@intrinsic
def _factorise_triangle(context, K, start, width, R, inverse, first):
    """Factorise the ROWS x ROWS block of K that begins at `start`, R^T R; inverse[first ..] becomes 1 / diag R.

    The upper half of R is written, by rows of ROWS numbers.
    """
    names = ("K", "start", "width", "R", "inverse", "first")

    def build(context, builder, signature, args):
        at = VectorBuilder(context, builder, signature, args, names)
        one = ir.Constant(at.element, 1)
        kind = ir.FunctionType(at.element, [at.element])
        sqrt = llvm_function(builder, kind, "llvm.sqrt.f64" if at.element == ir.DoubleType() else "llvm.sqrt.f32")
        pairs = [(i, j) for i in range(ROWS) for j in range(i, ROWS)]
        places = {(i, j): builder.add(builder.mul(at["width"], at.i64(i)), at.i64(j)) for i, j in pairs}
        r = {pair: at.load("K", builder.add(at["start"], places[pair])) for pair in pairs}
        for i in range(ROWS):
            scale = builder.fdiv(one, builder.call(sqrt, [r[i, i]]))
            at.store(scale, "inverse", builder.add(at["first"], at.i64(i)))
            for j in range(i, ROWS):
                r[i, j] = builder.fmul(r[i, j], scale)
                at.store(r[i, j], "R", at.i64(ROWS * i + j))
            for k in range(i + 1, ROWS):
                for j in range(k, ROWS):
                    r[k, j] = builder.fsub(r[k, j], builder.fmul(r[i, k], r[i, j], flags=FUSED), flags=FUSED)
        return nothing(context)

    i64 = types.int64
    return types.none(K, i64, i64, R, inverse, i64), build


@intrinsic
def _solve_tile(context, K, start, width, R, inverse, first):
    """Multiply ROWS rows of K by R^-T from the left, in the vector of columns that begins at `start`.

    R and `inverse` are the results of `_factorise_triangle`.
    """
    names = ("K", "start", "width", "R", "inverse", "first")

    def build(context, builder, signature, args):
        at = VectorBuilder(context, builder, signature, args, names)
        places = [builder.add(at["start"], builder.mul(at["width"], at.i64(i))) for i in range(ROWS)]
        rows = [at.load("K", place, at.vector) for place in places]
        for i in range(ROWS):
            scale = at.load("inverse", builder.add(at["first"], at.i64(i)))
            rows[i] = builder.fmul(rows[i], at.splat(scale))
            for j in range(i + 1, ROWS):
                r = at.splat(at.load("R", at.i64(ROWS * i + j)))
                rows[j] = builder.fsub(rows[j], builder.fmul(r, rows[i], flags=FUSED), flags=FUSED)
        for row, place in zip(rows, places, strict=True):
            at.store(row, "K", place)
        return nothing(context)

    i64 = types.int64
    return types.none(K, i64, i64, R, inverse, i64), build


@inline
def factorise(K, inverse, triangle):
    """Replace K by its Cholesky factor R, K = R^T R, and b by R^-T b. `inverse` [m] becomes 1 / diag R.

    If K is not positive definite, the result contains NaN or infinity. `triangle` is a buffer of ROWS^2 numbers.
    """
    m, width, vector = inverse.size, K.shape[1], lanes(K)
    for first in range(0, m, ROWS):
        begin = first // vector * vector
        if first > 0:
            rest = begin + (width - begin) // (3 * vector) * (3 * vector)
            for j in range(begin, rest, 3 * vector):
                for i in range(first, first + ROWS, HALF):
                    _subtract_wide_tile(K, i, 1, width, K, j, width, first, K, i * width + j, width)
            for j in range(rest, width, vector):
                _subtract_tile(K, first, 1, width, K, j, width, first, K, first * width + j, width)
        _factorise_triangle(K, first * width + first, width, triangle, inverse, first)
        for j in range(begin, width, vector):
            _solve_tile(K, first * width + j, width, triangle, inverse, first)


@inline
def solve_factorised(K, inverse, x):
    """Solve R x = y after `factorise`, with y in the place of b. x has `columns` elements."""
    width, vector, columns = K.shape[1], lanes(K), K.shape[1] - LANES
    for j in range(columns):
        x[j] = 0
    for i in range(inverse.size - 4, -1, -4):
        # x is still 0 up to i + 3, so that what is below the diagonal of K adds nothing.
        begin = i // vector * vector
        _four_dots(K, i * width + begin, width, x, begin, columns - begin, x, i)
        for j in range(i + 3, i - 1, -1):
            total = K[j, columns] - x[j]
            for k in range(j + 1, i + 4):
                total -= K[j, k] * x[k]
            x[j] = total * inverse[j]


@inline
def substitute(K, inverse, b, y):
    """Y = R^-T b after `factorise`, for a b that was not known then. b and y have `columns` elements; b is destroyed.

    The solution x is then that of `solve_factorised` with y in the place of b.
    """
    vector, columns = lanes(K), K.shape[1] - LANES
    for i in range(inverse.size):
        y[i] = b[i] * inverse[i]
        for j in range(i // vector * vector, columns):
            b[j] -= y[i] * K[i, j]
