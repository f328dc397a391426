"""Loops whose sums stay in vector registers: sums over pairs or a range, ranks, extremes.

Numba compiles plain loops to code that stores these sums in each iteration, so they are built as LLVM IR. Arrays are
padded to whole vectors. Float64, which is used for checks and not for speed, has half as many numbers in a vector.
"""

from llvmlite import ir
from numba import types

from drm_triton.kernels.cpu.runtime.jit import inline, intrinsic
from drm_triton.kernels.cpu.runtime.numba_private import array_shape, data_pointer, nothing, target_features

FEATURES = target_features()
AVX512 = "avx512f" in FEATURES
LANES = 16 if AVX512 else 8  # float32 numbers in a vector register
ROWS = 8  # rows of a register tile: each vector that is loaded takes part in this many multiply-adds
WIDTH = 2 * LANES  # numbers in two vector registers: operations on one need not wait for those on the other
UNROLL = 4  # independent sums: a single one would wait for each addition to finish
FUSED = ("contract",)


class VectorBuilder:
    """Builds loads, stores and loops over vectors of one type: `element`, or that of the intrinsic's first array.

    Vectors fill a register unless `lanes` says how many numbers they have. Arguments of the intrinsic are addressed by
    name; `names` lists them in order. Offsets are in elements.
    """

    def __init__(self, context, builder, signature, args, names, element=None, lanes=None) -> None:
        self.context, self.builder = context, builder
        self.args = dict(zip(names, args, strict=True))
        self.types = dict(zip(names, signature.args, strict=True))
        double = element is None and signature.args[0].dtype == types.float64
        self.i64, self.element = ir.IntType(64), element or (ir.DoubleType() if double else ir.FloatType())
        self.lanes = lanes or (LANES // 2 if double else LANES)
        self.vector = ir.VectorType(self.element, self.lanes)
        self.zero = ir.Constant(self.vector, [0] * self.lanes)

    def __getitem__(self, name):
        """Value of a scalar argument."""
        return self.args[name]

    def pointer(self, array, offset, kind=None):
        """Pointer of type `kind`, by default `element`, to an element of an array."""
        data = data_pointer(self.context, self.builder, self.types[array], self.args[array])
        return self.builder.bitcast(self.builder.gep(data, [offset]), (kind or self.element).as_pointer())

    def size(self, array, axis):
        """Length of an array along an axis."""
        shape = array_shape(self.context, self.builder, self.types[array], self.args[array])
        return self.builder.extract_value(shape, axis)

    def load(self, array, offset, kind=None):
        """Load the element at `offset`, or the vector that begins there if `kind` is a vector type."""
        value = self.builder.load(self.pointer(array, offset, kind))
        value.align = 4
        return value

    def store(self, vector, array, offset):
        """Store a vector."""
        self.builder.store(vector, self.pointer(array, offset, vector.type), align=4)

    def splat(self, value):
        """Return a vector of equal elements."""
        undefined = ir.Constant(ir.VectorType(value.type, self.lanes), ir.Undefined)
        lane = self.builder.insert_element(undefined, value, ir.Constant(ir.IntType(32), 0))
        zeros = ir.Constant(ir.VectorType(ir.IntType(32), self.lanes), [0] * self.lanes)
        return self.builder.shuffle_vector(lane, undefined, zeros)

    def loop(self, stop, step, starts, body):
        """Loop over range(0, stop, step), at least once.

        body(index, vectors) returns the vectors of the next iteration; those of the first are `starts`. Returns the
        last ones.
        """
        builder = self.builder
        entry, loop, done = builder.block, builder.append_basic_block("loop"), builder.append_basic_block("done")
        builder.branch(loop)
        builder.position_at_end(loop)
        index, vectors = builder.phi(self.i64), [builder.phi(start.type) for start in starts]
        results, following = body(index, vectors), builder.add(index, self.i64(step))
        index.add_incoming(self.i64(0), entry)
        index.add_incoming(following, loop)
        for vector, start, result in zip(vectors, starts, results, strict=True):
            vector.add_incoming(start, entry)
            vector.add_incoming(result, loop)
        builder.cbranch(builder.icmp_signed("<", following, stop), loop, done)
        builder.position_at_end(done)
        return results

    def sum_rows(self, count, starts, entry):
        """Return `starts` plus the sum of weight * row over `count` entries, one or more.

        entry(i) returns the weight, and a pointer to the row, of which as many vectors are added as there are `starts`.
        """
        builder = self.builder

        def step(i, totals):
            weight, row = entry(i)
            weight, results = self.splat(weight), []
            for v, total in enumerate(totals):
                place = builder.bitcast(builder.gep(row, [self.i64(v * self.lanes)]), self.vector.as_pointer())
                x = builder.load(place)
                x.align = 4
                results.append(builder.fadd(total, builder.fmul(weight, x, flags=FUSED), flags=FUSED))
            return results

        return self.loop(count, 1, starts, step)


@inline
def padded(size, multiple):
    """Round size up to a multiple."""
    return (size + multiple - 1) // multiple * multiple


# ---------------------------------------------------------------------------------------------------------------
# Smallest and largest number


def _extreme(relation: str, choose):
    """Return a function for the smallest or largest number; `choose` does for two what `relation` says."""

    @intrinsic
    def of_vectors(context, x, n):
        def build(context, builder, signature, args):
            at = VectorBuilder(context, builder, signature, args, ("x", "n"))
            last = builder.sub(at["n"], at.i64(at.lanes))  # start of the last vector, which may overlap another

            def better(a, b):
                return builder.select(builder.fcmp_ordered(relation, a, b), a, b)

            def step(index, bests):
                results = []
                for i, best in enumerate(bests):
                    begin = builder.add(index, at.i64(i * at.lanes))
                    begin = builder.select(builder.icmp_signed("<", begin, last), begin, last)
                    results.append(better(at.load("x", begin, at.vector), best))
                return results

            start = at.load("x", at.i64(0), at.vector)
            best, *others = at.loop(at["n"], UNROLL * at.lanes, UNROLL * [start], step)
            for other in others:
                best = better(best, other)
            half = at.lanes // 2
            while half > 0:
                swapped = ir.Constant(ir.VectorType(ir.IntType(32), at.lanes), [i ^ half for i in range(at.lanes)])
                best = better(best, builder.shuffle_vector(best, best, swapped))
                half //= 2
            return builder.extract_element(best, ir.Constant(ir.IntType(32), 0))

        return x.dtype(x, types.int64), build

    @inline
    def extreme(x):
        if x.size >= LANES:
            return of_vectors(x, x.size)
        value = x[0]
        for j in range(x.size):
            value = choose(value, x[j])
        return value

    return extreme


smallest, largest = _extreme("<", min), _extreme(">", max)  # of an array without NaN that is not empty


# ---------------------------------------------------------------------------------------------------------------
# Numbers in a range


@intrinsic
def _between_vectors(context, x, n, low, high):
    """Return what `between` does, for the first n entries; n is a positive multiple of UNROLL * LANES."""

    def build(context, builder, signature, args):
        at = VectorBuilder(context, builder, signature, args, ("x", "n", "low", "high"))
        low, high = at.splat(at["low"]), at.splat(at["high"])
        one = ir.Constant(at.vector, [1] * at.lanes)

        def step(index, sums):
            results = []
            for i, (total, number) in enumerate(zip(sums[::2], sums[1::2], strict=True)):
                value = at.load("x", builder.add(index, at.i64(i * at.lanes)), at.vector)
                above, below = builder.fcmp_ordered(">", value, low), builder.fcmp_ordered("<", value, high)
                inside = builder.and_(above, below)
                results.append(builder.fadd(total, builder.select(inside, builder.fsub(value, low), at.zero)))
                results.append(builder.fadd(number, builder.select(inside, one, at.zero)))
            return results

        sums = at.loop(at["n"], UNROLL * at.lanes, 2 * UNROLL * [at.zero], step)
        totals = []
        for parts in (sums[::2], sums[1::2]):
            vector = parts[0]
            for part in parts[1:]:
                vector = builder.fadd(vector, part)
            half = at.lanes // 2
            while half > 0:
                swapped = ir.Constant(ir.VectorType(ir.IntType(32), at.lanes), [i ^ half for i in range(at.lanes)])
                vector = builder.fadd(vector, builder.shuffle_vector(vector, vector, swapped))
                half //= 2
            totals.append(builder.extract_element(vector, ir.Constant(ir.IntType(32), 0)))
        return context.make_tuple(builder, signature.return_type, totals)

    return types.UniTuple(x.dtype, 2)(x, types.int64, x.dtype, x.dtype), build


@inline
def between(x, low, high):
    """Return the sum of x_j - low over the numbers x_j between low and high, and how many these are."""
    total, number = x.dtype.type(0), x.dtype.type(0)
    whole = x.size // (UNROLL * LANES) * (UNROLL * LANES)
    if whole > 0:
        total, number = _between_vectors(x, whole, low, high)
    for j in range(whole, x.size):
        if low < x[j] < high:
            total += x[j] - low
            number += x.dtype.type(1)
    return total, number


# ---------------------------------------------------------------------------------------------------------------
# Sums over all pairs of a list


@intrinsic
def _above_tile(context, s, R, n, start):
    """R_j = sum_l max(0, s_l - s_j) over l < n, for the vector of j that begins at `start`."""

    def build(context, builder, signature, args):
        at = VectorBuilder(context, builder, signature, args, ("s", "R", "n", "start"))
        x = at.load("s", at["start"], at.vector)

        def step(index, sums):
            totals = []
            for i, total in enumerate(sums):
                gap = builder.fsub(at.splat(at.load("s", builder.add(index, at.i64(i)))), x)
                above = builder.select(builder.fcmp_ordered(">", gap, at.zero), gap, at.zero)
                totals.append(builder.fadd(total, above))
            return totals

        a, b, c, d = at.loop(at["n"], UNROLL, UNROLL * [at.zero], step)
        at.store(builder.fadd(builder.fadd(a, b), builder.fadd(c, d)), "R", at["start"])
        return nothing(context)

    return types.none(s, R, types.int64, types.int64), build


@intrinsic
def _pairs_tile(context, s, G, ds, n, start):
    """ds_j += sum_l ([s_l >= s_j] + [s_l > s_j]) (G_j + G_l) over l < n, for the vector of j that begins at `start`."""

    def build(context, builder, signature, args):
        at = VectorBuilder(context, builder, signature, args, ("s", "G", "ds", "n", "start"))
        x, g = at.load("s", at["start"], at.vector), at.load("G", at["start"], at.vector)

        def step(index, sums):
            totals = []
            for i, total in enumerate(sums):
                position = builder.add(index, at.i64(i))
                other = at.splat(at.load("s", position))
                both = builder.fadd(g, at.splat(at.load("G", position)))
                for relation in (">=", ">"):
                    counts = builder.fcmp_ordered(relation, other, x)
                    total = builder.select(counts, builder.fadd(total, both), total)
                totals.append(total)
            return totals

        a, b, c, d = at.loop(at["n"], UNROLL, UNROLL * [at.zero], step)
        total = builder.fadd(builder.fadd(a, b), builder.fadd(c, d))
        at.store(builder.fadd(at.load("ds", at["start"], at.vector), total), "ds", at["start"])
        return nothing(context)

    return types.none(s, G, ds, types.int64, types.int64), build


def _rank_tile(vectors: int):
    """Return an intrinsic for the ranks of `vectors` vectors of numbers, from `start` on."""

    @intrinsic
    def tile(context, s, rank, n, start):
        def build(context, builder, signature, args):
            at = VectorBuilder(context, builder, signature, args, ("s", "rank", "n", "start"))
            integers = ir.VectorType(at.i64, at.lanes)
            of_element = ir.VectorType(ir.IntType(64 if at.lanes == LANES // 2 else 32), at.lanes)
            begins = [builder.add(at["start"], at.i64(v * at.lanes)) for v in range(vectors)]
            columns = [at.load("s", begin, at.vector) for begin in begins]

            def step(i, totals):
                other, results = at.splat(at.load("s", i)), []
                for x, total in zip(columns, totals, strict=True):
                    above = builder.sext(builder.fcmp_ordered(">", other, x), of_element)  # true is -1
                    results.append(builder.sub(total, above))
                return results

            totals = at.loop(at["n"], 1, vectors * [ir.Constant(of_element, [0] * at.lanes)], step)
            for begin, total in zip(begins, totals, strict=True):
                wide = total if of_element == integers else builder.sext(total, integers)
                builder.store(wide, at.pointer("rank", begin, integers), align=8)
            return nothing(context)

        return types.none(s, rank, types.int64, types.int64), build

    return tile


_rank_four, _rank_one = _rank_tile(4), _rank_tile(1)


@inline
def sum_above(s, n, R):
    """R_j = sum_l max(0, s_l - s_j). s and R are padded; the padding of s is below the other entries."""
    for start in range(0, s.size, 64 // s.itemsize if AVX512 else 32 // s.itemsize):
        _above_tile(s, R, n, start)


@inline
def sum_pairs(s, n, G, ds):
    """ds_j += sum_l ([s_l >= s_j] + [s_l > s_j]) (G_j + G_l). All are padded; the padding of s is below the others."""
    for start in range(0, s.size, 64 // s.itemsize if AVX512 else 32 // s.itemsize):
        _pairs_tile(s, G, ds, n, start)


@inline
def rank_entries(s, n, rank):
    """rank_j = the number of i < n with s_i > s_j. Equal numbers have equal ranks. s and rank, int64, are padded."""
    lanes = 64 // s.itemsize if AVX512 else 32 // s.itemsize
    fours = s.size // (4 * lanes) * (4 * lanes)
    for start in range(0, fours, 4 * lanes):
        _rank_four(s, rank, n, start)
    for start in range(fours, s.size, lanes):
        _rank_one(s, rank, n, start)
