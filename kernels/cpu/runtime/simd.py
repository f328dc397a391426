"""What stays in vector registers, as no loop in Numba can be made to: small products of matrices, pairs, and extremes.

Arrays are padded to whole vectors. Float64, for checks and not for speed, has half as many numbers in a vector.
"""

from llvmlite import ir
from numba import config, types
from numba.core.codegen import get_host_cpu_features
from numba.extending import intrinsic

from drm_triton.kernels.cpu.runtime.jit import inline


def _features() -> set[str]:
    """Extensions of the processor that Numba compiles for, as far as they are known."""
    name, features = config.CPU_NAME, config.CPU_FEATURES  # type: ignore[attr-defined]
    if features is None:  # those of a processor that is not this one are not known
        features = get_host_cpu_features() if name in (None, "host") else ""
    return {feature[1:] for feature in features.split(",") if feature.startswith("+")}


FEATURES = _features()
AVX512 = "avx512f" in FEATURES
LANES = 16 if AVX512 else 8  # float32 numbers in a vector register
ROWS = 8  # of a tile: one vector load serves so many multiply-adds
UNROLL = 4  # sums side by side: one alone would wait for each addition to end
FUSED = ("contract",)


class VectorBuilder:
    """Loads, stores and broadcasts of vectors of one kind, that of an intrinsic's first array unless told otherwise."""

    def __init__(self, context, builder, signature, args, kind=None) -> None:
        self.context, self.builder, self.signature, self.args = context, builder, signature, args
        double = kind is None and signature.args[0].dtype == types.float64
        self.i64, self.kind = ir.IntType(64), kind or (ir.DoubleType() if double else ir.FloatType())
        self.lanes = LANES // 2 if double else LANES
        self.vector = ir.VectorType(self.kind, self.lanes)
        self.zero = ir.Constant(self.vector, [0] * self.lanes)

    def element(self, argument, offset, kind=None):
        """Pointer to an element of the array that is argument number `argument`."""
        array = self.context.make_array(self.signature.args[argument])(self.context, self.builder, self.args[argument])
        return self.builder.bitcast(self.builder.gep(array.data, [offset]), (kind or self.kind).as_pointer())

    def load(self, argument, offset, kind=None):
        """An element, or the vector that starts there."""
        value = self.builder.load(self.element(argument, offset, kind))
        value.align = 4
        return value

    def store(self, vector, argument, offset):
        """Write a vector."""
        self.builder.store(vector, self.element(argument, offset, self.vector), align=4)

    def splat(self, value):
        """A vector of equal elements."""
        undefined = ir.Constant(ir.VectorType(value.type, self.lanes), ir.Undefined)
        lane = self.builder.insert_element(undefined, value, ir.Constant(ir.IntType(32), 0))
        zeros = ir.Constant(ir.VectorType(ir.IntType(32), self.lanes), [0] * self.lanes)
        return self.builder.shuffle_vector(lane, undefined, zeros)

    def loop(self, stop, step, starts, body):
        """Loop over range(0, stop, step), at least once; body(index, vectors) gives the next vectors, from `starts`."""
        builder = self.builder
        entry, loop, done = builder.block, builder.append_basic_block("loop"), builder.append_basic_block("done")
        builder.branch(loop)
        builder.position_at_end(loop)
        index, vectors = builder.phi(self.i64), [builder.phi(self.vector) for _ in starts]
        results, following = body(index, vectors), builder.add(index, self.i64(step))
        index.add_incoming(self.i64(0), entry)
        index.add_incoming(following, loop)
        for vector, start, result in zip(vectors, starts, results, strict=True):
            vector.add_incoming(start, entry)
            vector.add_incoming(result, loop)
        builder.cbranch(builder.icmp_signed("<", following, stop), loop, done)
        builder.position_at_end(done)
        return results


def _tile(l2: bool):
    @intrinsic
    def tile(context, A, first, by_row, by_depth, B, column, width, depth, C, corner):
        def build(context, builder, signature, args):
            at = VectorBuilder(context, builder, signature, args)
            _, first, by_row, by_depth, _, column, width, depth, _, corner = args
            rows = [builder.add(first, builder.mul(by_row, at.i64(i))) for i in range(ROWS)]

            def step(k, sums):
                b = at.load(4, builder.add(column, builder.mul(k, width)), at.vector)
                offset, totals = builder.mul(k, by_depth), []
                for row, total in zip(rows, sums, strict=True):
                    a = at.splat(at.load(0, builder.add(row, offset)))
                    if l2:
                        difference = builder.fsub(a, b)
                        square = builder.fmul(difference, difference, flags=FUSED)
                        totals.append(builder.fsub(total, square, flags=FUSED))
                    else:
                        totals.append(builder.fadd(total, builder.fmul(a, b, flags=FUSED), flags=FUSED))
                return totals

            for i, total in enumerate(at.loop(depth, 1, ROWS * [at.zero], step)):
                at.store(total, 8, builder.add(corner, builder.mul(width, at.i64(i))))
            return context.get_dummy_value()

        i64 = types.int64
        return types.none(A, i64, i64, i64, B, i64, i64, i64, C, i64), build

    return tile


_multiply_tile, _distance_tile = _tile(l2=False), _tile(l2=True)


@inline
def multiply(A, by_row, by_depth, B, depth, C):
    """C[i, j] = sum_k A_ik B[k, j] over k < depth, at least one, with A_ik at position i * by_row + k * by_depth of A.

    C has a multiple of ROWS rows, B and C one same multiple of LANES columns; all float32 and C-contiguous.
    """
    width = C.shape[1]
    for j in range(0, width, LANES):
        for i in range(0, C.shape[0], ROWS):
            _multiply_tile(A, i * by_row, by_row, by_depth, B, j, width, depth, C, i * width + j)


@inline
def negative_distances(A, depth, B, C):
    """C[i, j] = -sum_k (A[i, k] - B[k, j])^2 over k < depth; shapes as for `multiply`."""
    width = C.shape[1]
    for j in range(0, width, LANES):
        for i in range(0, C.shape[0], ROWS):
            _distance_tile(A, i * A.shape[1], A.shape[1], 1, B, j, width, depth, C, i * width + j)


@inline
def padded(size, to):
    """The least multiple of `to` that is not below size."""
    return (size + to - 1) // to * to


def _extreme(relation: str):
    @intrinsic
    def extreme(context, x, n):
        def build(context, builder, signature, args):
            at = VectorBuilder(context, builder, signature, args)
            last = builder.sub(args[1], at.i64(at.lanes))  # where the last vector begins; it may overlap the one before

            def better(a, b):
                return builder.select(builder.fcmp_ordered(relation, a, b), a, b)

            def step(index, best):
                begin = builder.select(builder.icmp_signed("<", index, last), index, last)
                return [better(at.load(0, begin, at.vector), best[0])]

            (best,) = at.loop(args[1], at.lanes, [at.load(0, at.i64(0), at.vector)], step)
            half = at.lanes // 2
            while half > 0:
                swapped = ir.Constant(ir.VectorType(ir.IntType(32), at.lanes), [i ^ half for i in range(at.lanes)])
                best = better(best, builder.shuffle_vector(best, best, swapped))
                half //= 2
            return builder.extract_element(best, ir.Constant(ir.IntType(32), 0))

        return x.dtype(x, types.int64), build

    return extreme


_largest, _least = _extreme(">"), _extreme("<")


@inline
def largest(x):
    """Largest of the numbers x, none of them NaN."""
    if x.size >= LANES:
        return _largest(x, x.size)
    value = x[0]
    for j in range(x.size):
        value = max(value, x[j])
    return value


@inline
def least(x):
    """Smallest of the numbers x, none of them NaN."""
    if x.size >= LANES:
        return _least(x, x.size)
    value = x[0]
    for j in range(x.size):
        value = min(value, x[j])
    return value


@intrinsic
def _above_tile(context, s, R, n, first):
    """R_j = sum_l max(0, s_l - s_j) over l < n, for the vector of j that begins at `first`."""

    def build(context, builder, signature, args):
        at = VectorBuilder(context, builder, signature, args)
        _, _, n, first = args
        x = at.load(0, first, at.vector)

        def step(index, sums):
            totals = []
            for i, total in enumerate(sums):
                gap = builder.fsub(at.splat(at.load(0, builder.add(index, at.i64(i)))), x)
                above = builder.select(builder.fcmp_ordered(">", gap, at.zero), gap, at.zero)
                totals.append(builder.fadd(total, above))
            return totals

        a, b, c, d = at.loop(n, UNROLL, UNROLL * [at.zero], step)
        at.store(builder.fadd(builder.fadd(a, b), builder.fadd(c, d)), 1, first)
        return context.get_dummy_value()

    return types.none(s, R, types.int64, types.int64), build


@intrinsic
def _pairs_tile(context, s, G, ds, n, first):
    """ds_j += sum_l ([s_l >= s_j] + [s_l > s_j]) (G_j + G_l) over l < n, for the vector of j that begins at `first`."""

    def build(context, builder, signature, args):
        at = VectorBuilder(context, builder, signature, args)
        _, _, _, n, first = args
        x, g = at.load(0, first, at.vector), at.load(1, first, at.vector)

        def step(index, sums):
            totals = []
            for i, total in enumerate(sums):
                position = builder.add(index, at.i64(i))
                other = at.splat(at.load(0, position))
                both = builder.fadd(g, at.splat(at.load(1, position)))
                for relation in (">=", ">"):
                    counts = builder.fcmp_ordered(relation, other, x)
                    total = builder.select(counts, builder.fadd(total, both), total)
                totals.append(total)
            return totals

        a, b, c, d = at.loop(n, UNROLL, UNROLL * [at.zero], step)
        total = builder.fadd(builder.fadd(a, b), builder.fadd(c, d))
        at.store(builder.fadd(at.load(2, first, at.vector), total), 2, first)
        return context.get_dummy_value()

    return types.none(s, G, ds, types.int64, types.int64), build


@inline
def sum_above(s, n, R):
    """R_j = sum_l max(0, s_l - s_j); s and R padded, entries of s from n on below the others."""
    for first in range(0, s.size, 64 // s.itemsize if AVX512 else 32 // s.itemsize):
        _above_tile(s, R, n, first)


@inline
def sum_pairs(s, n, G, ds):
    """ds_j += sum_l ([s_l >= s_j] + [s_l > s_j]) (G_j + G_l); all padded, entries of s from n on below the others."""
    for first in range(0, s.size, 64 // s.itemsize if AVX512 else 32 // s.itemsize):
        _pairs_tile(s, G, ds, n, first)
