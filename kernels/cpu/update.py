"""`update_rows`: one Adagrad step and projection for each row that appears in a batch of gradient terms.

The gradient of a row is a sum. With sampled negatives, groups of lists share them by default: the terms of a tile of
lists that belong to one shared negative are summed first, all negatives at once, as a product of small matrices

    sums  [eta, lists] x [lists, d]

and become one summand. With eta = 45 and groups of 32 lists, 2.4 summands per list remain to be sorted instead of 46.
The terms of positives, and of negatives that a list has in place of shared ones, are one summand each. If the losses
are hinge and DRM, `terms` has summed those of shared negatives already.

Summands are then grouped by row with a radix sort on (row, summand), whose memory depends on their number alone, not on
the table: all threads distribute them to buckets by the high bits of the row, then one thread per bucket sorts by the
low bits and updates the rows. The summands of a row are added in their order, so the bits of the result depend neither
on the number of threads nor on the buckets.

Measured on one thread with AVX2 (rho = 1, eta = 45, d = 64, 2048 lists in groups of 32): the update takes 1.9 ms with
shared negatives summed first and 3.6 ms without. Distributing 98,304 rows to buckets takes 0.4 ms, where a stable
argsort of NumPy takes 3.1 ms.

Cost: per summand 2 d operations and d floats read; per row about 8 d operations and 4 d floats read or written.
"""

import math
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numpy.typing import NDArray
from torch import Tensor

from drm_triton.kernels.checks import INT32, check_update
from drm_triton.kernels.cpu.rounding import round_rows
from drm_triton.kernels.cpu.runtime import threads
from drm_triton.kernels.cpu.runtime.arrays import FLOAT32, view
from drm_triton.kernels.cpu.runtime.bits import find_true
from drm_triton.kernels.cpu.runtime.jit import CACHE_LINE, inline, intrinsic, kernel, prefetch_address, prefetch_row
from drm_triton.kernels.cpu.runtime.numba_private import nothing
from drm_triton.kernels.cpu.runtime.products import multiply
from drm_triton.kernels.cpu.runtime.simd import LANES, ROWS, VectorBuilder, padded
from drm_triton.kernels.cpu.softsort import all_finite
from drm_triton.kernels.cpu.tiles import Groups, groups_of, tile_bounds
from drm_triton.kernels.protocol import ADAGRAD_EPS, GradientTerms, Rounding
from drm_triton.names import Score

f32 = np.float32
ADAGRAD_EPS_F32 = f32(ADAGRAD_EPS)  # a Python float would make the step float64
MAX_BUCKET_BITS = 11  # each bucket is a write stream: more than the second-level TLB has entries would be slow
# Summands between the prefetch of a row and its update. Prefetching hides the latency of a table that is larger than
# the cache: updates of such a table were a third faster with it.
PREFETCH_DISTANCE = 24
TILE = 256  # lists whose terms of one shared negative become one summand; their vectors fit the second-level cache
TASK = 1 << 14  # terms of shared negatives that a thread sums at least: fewer take less time than to start it
UPDATE_TASK = 1 << 11  # summands and dense rows of which a thread updates the rows at least
CHUNK = 1 << 14  # summands that a thread distributes to buckets at least, for the same reason
SUMMAND_MASK = np.int64(0xFFFFFFFF)  # low half of a sort key


class Terms(NamedTuple):
    """`GradientTerms` as arrays."""

    rows: NDArray[np.int32]  # [B, m]
    coefficients: NDArray[np.float32]  # [B, m]
    vectors: NDArray[np.float32]  # [*, d]
    sources: NDArray[np.int32]  # [B]


class Summands(NamedTuple):
    """What is added to rows. Summand e adds weights[e] * x_e, and under l2 subtracts totals[e] times the row.

    x_e is row origin[e] of `vectors`, followed by `sums`. The step multiplies the l2 gradient by 2.
    """

    rows: NDArray[np.int32]  # [E]
    weights: NDArray[np.float32]  # [E]
    totals: NDArray[np.float32]  # [E], sums of the coefficients in each summand
    origin: NDArray[np.int32]  # [E]
    vectors: NDArray[np.float32]  # [*, d]
    sums: NDArray[np.float32]  # [S, d] sums of the terms of shared negatives


# ---------------------------------------------------------------------------------------------------------------
# Lists that share negatives: from terms to summands


class SumBuffers(NamedTuple):
    """Buffers for the terms of a tile that belong to shared negatives."""

    coefficients: NDArray[np.float32]  # [tile, padded eta], 0 where a list has no such term
    vectors: NDArray[np.float32]  # [tile, padded d]
    product: NDArray[np.float32]  # [padded eta, padded d]
    totals: NDArray[np.float32]  # [eta], sums of the coefficients
    used: NDArray[np.bool_]  # [eta], whether any list has such a term
    positions: NDArray[np.int64]  # [eta], of the terms of one list that are not summed


@inline
def count_replaced(replaced):
    """Return the number of shared negatives that a list replaced."""
    count = 0
    for j in range(replaced.size):
        count += replaced[j]
    return count


@inline
def find_used(start, stop, separate, groups, finite, used):
    """Mark the shared negatives that are summed for at least one of lists start .. stop - 1; return their number.

    `separate` is the number of terms that are not summed. If a negative is summed for no list, there is one per list.
    """
    if separate < stop - start:
        used[:] = True
        return used.size
    used[:] = False
    for b in range(start, stop):
        if finite[b]:
            for j in range(used.size):
                used[j] |= not groups.replaced[b, j]
    count = 0
    for j in range(used.size):
        count += used[j]
    return count


@kernel
def count_summands(start, stop, terms, groups, finite, counts, used_counts):
    """Write the number of summands of tiles start .. stop - 1 to `counts`, of these sums of terms to `used_counts`.

    finite [B] says whether all of a list's vector is. A list with another vector has a summand for each term: in the
    product, 0 * inf would spoil rows for which the list has no term.
    """
    eta = groups.items.shape[1]
    used = np.empty(eta, np.bool_)
    for tile in range(start, stop):
        _, begin, end = tile_bounds(tile, groups.tiles)
        positives, separate = (end - begin) * (terms.rows.shape[1] - eta), 0
        for b in range(begin, end):
            finite[b] = all_finite(terms.vectors[terms.sources[b]])
            separate += count_replaced(groups.replaced[b]) if finite[b] else eta
        used_counts[tile] = find_used(begin, end, separate, groups, finite, used)
        counts[tile] = positives + separate + used_counts[tile]


@inline
def fill_separate(start, stop, position, terms, groups, finite, buffers, summands):
    """Write the summands of lists start .. stop - 1 that are not sums of terms, and copy the vectors of the lists.

    Returns the position after these summands, and the number of negatives among them.
    """
    eta, separate = groups.items.shape[1], 0
    positives = terms.rows.shape[1] - eta
    for b in range(start, stop):
        source, rows, coefficients = terms.sources[b], terms.rows[b], terms.coefficients[b]
        replaced, x, vector = groups.replaced[b], terms.vectors[source], buffers.vectors[b - start]
        for j in range(positives):
            summands.rows[position], summands.origin[position] = rows[j], source
            summands.weights[position] = summands.totals[position] = coefficients[j]
            position += 1
        for c in range(x.size):
            vector[c] = x[c]
        if not finite[b]:
            vector[:] = f32(0)
        count = find_true(replaced, buffers.positions) if finite[b] else eta
        for i in range(count):
            j = buffers.positions[i] if finite[b] else i
            summands.rows[position], summands.origin[position] = rows[positives + j], source
            summands.weights[position] = summands.totals[position] = coefficients[positives + j]
            position += 1
        separate += count
    return position, separate


@inline
def sum_products(start, stop, separate, terms, groups, finite, buffers):
    """Compute the sums of all shared negatives as a product, their totals, and which of them are used."""
    totals, eta = buffers.totals, groups.items.shape[1]
    positives = terms.rows.shape[1] - eta
    totals[:] = f32(0)
    for b in range(start, stop):
        in_sums, coefficients, replaced = buffers.coefficients[b - start], terms.coefficients[b], groups.replaced[b]
        for j in range(eta):
            in_sums[j] = coefficients[positives + j]
        if not finite[b]:
            in_sums[:eta] = f32(0)
        elif count_replaced(replaced) > 0:
            for j in range(eta):
                if replaced[j]:
                    in_sums[j] = f32(0)
        for j in range(eta):
            totals[j] += in_sums[j]
    multiply(buffers.coefficients, 1, buffers.coefficients.shape[1], buffers.vectors, stop - start, buffers.product)
    find_used(start, stop, separate, groups, finite, buffers.used)


@inline
def fill_tile(tile, position, sum_position, terms, groups, finite, buffers, summands):
    """Write the summands of a tile, the first one at `position` and the first sum at `sum_position`."""
    group, start, stop = tile_bounds(tile, groups.tiles)
    n_vectors, d = terms.vectors.shape
    position, separate = fill_separate(start, stop, position, terms, groups, finite, buffers, summands)
    sum_products(start, stop, separate, terms, groups, finite, buffers)
    for j in range(groups.items.shape[1]):
        if buffers.used[j]:
            total = summands.sums[sum_position]
            for c in range(d):
                total[c] = buffers.product[j, c]
            summands.rows[position], summands.origin[position] = groups.items[group, j], n_vectors + sum_position
            summands.weights[position], summands.totals[position] = f32(1), buffers.totals[j]
            position += 1
            sum_position += 1


@kernel
def fill_summands(start, stop, terms, groups, finite, positions, sum_positions, summands):
    """Write the summands of tiles start .. stop - 1, those of a tile from its entry in `positions`."""
    eta, d = groups.items.shape[1], terms.vectors.shape[1]
    height, width = padded(eta, ROWS), padded(d, LANES)
    buffers = SumBuffers(
        np.zeros((groups.tiles.tile, height), np.float32),
        np.zeros((groups.tiles.tile, width), np.float32),
        np.empty((height, width), np.float32),
        np.empty(eta, np.float32),
        np.empty(eta, np.bool_),
        np.empty(eta, np.int64),
    )
    for tile in range(start, stop):
        if positions[tile] < positions[tile + 1]:
            fill_tile(tile, positions[tile], sum_positions[tile], terms, groups, finite, buffers, summands)


def sum_shared(terms: Terms, groups: Groups) -> Summands:
    """Sum the terms of each shared negative over the lists of a tile; the other terms become a summand each."""
    n_tiles, d = groups.tiles.n_tiles, terms.vectors.shape[1]
    finite = np.empty(len(terms.rows), np.bool_)
    counts, used_counts = np.empty(n_tiles, np.int64), np.empty(n_tiles, np.int64)
    grain = -(-TASK // max(1, groups.tiles.tile * groups.items.shape[1]))
    threads.split(count_summands, n_tiles, grain, terms, groups, finite, counts, used_counts)
    positions, sum_positions = (np.concatenate([[0], x.cumsum()]) for x in (counts, used_counts))
    E = int(positions[-1])
    summands = Summands(
        rows=np.empty(E, np.int32),
        weights=np.empty(E, f32),
        totals=np.empty(E, f32),
        origin=np.empty(E, np.int32),
        vectors=terms.vectors,
        sums=np.empty((int(sum_positions[-1]), d), f32),
    )
    threads.split(fill_summands, n_tiles, grain, terms, groups, finite, positions, sum_positions, summands)
    return summands


# ---------------------------------------------------------------------------------------------------------------
# Sorting summands by row


class Buckets(NamedTuple):
    """Sort keys row << 32 | summand, in buckets of rows with equal high bits."""

    bounds: NDArray[np.int64]  # [buckets + 1]; bucket i is keys[bounds[i] : bounds[i + 1]]
    low_bits: int  # bits of the row that are equal for no two rows of a bucket
    keys: NDArray[np.int64]  # [E]
    spare: NDArray[np.int64]  # [E]


@kernel
def count_buckets(rows, origin, n_rows, n_vectors, low_bits, counts):
    """Write the number of rows in each bucket to `counts`; -1 to the first if a row or a vector does not exist."""
    counts[:] = 0
    valid = True
    for e in range(rows.size):
        valid &= (0 <= rows[e] < n_rows) & (0 <= origin[e] < n_vectors)
        counts[(rows[e] >> low_bits) & (counts.size - 1)] += 1
    if not valid:
        counts[0] = -1


@kernel
def fill_buckets(rows, start, low_bits, position, keys):
    """Write the keys of summands start .. to their buckets; position[bucket] is where the next one goes."""
    for e in range(rows.size):
        bucket = rows[e] >> low_bits
        keys[position[bucket]] = (np.int64(rows[e]) << 32) | (start + e)
        position[bucket] += 1


def distribute(summands: Summands, n_rows: int, low_bits: int, n_buckets: int) -> Buckets | None:
    """Distribute summands to buckets by the high bits of their rows, on all threads; None if one is invalid."""
    rows, origin, n_vectors = summands.rows, summands.origin, len(summands.vectors) + len(summands.sums)
    E = len(rows)
    chunks = max(1, min(threads.n_threads(), E // CHUNK))
    edges = [E * i // chunks for i in range(chunks + 1)]
    spans = [slice(start, stop) for start, stop in pairwise(edges)]
    counts = np.empty((chunks, n_buckets), np.int64)
    threads.run(
        partial(count_buckets, rows[span], origin[span], n_rows, n_vectors, low_bits, count)
        for span, count in zip(spans, counts, strict=True)
    )
    if counts.min() < 0:
        return None
    # Within a bucket, chunks follow each other, which keeps the order of the summands.
    position = np.ascontiguousarray(counts.T.cumsum().reshape(n_buckets, chunks).T - counts)
    bounds = np.append(position[0], E)
    keys = np.empty(E, np.int64)
    threads.run(
        partial(fill_buckets, rows[span], span.start, low_bits, place, keys)
        for span, place in zip(spans, position, strict=True)
    )
    return Buckets(bounds, low_bits, keys, np.empty(E, np.int64))


@inline
def sort_bucket(keys, spare, low_bits, counts):
    """Sort keys by the low bits of the row, keeping the order of equal rows; return whether the result is in spare."""
    passes = (low_bits + 7) // 8
    shift = 32
    for i in range(passes):
        digit = (low_bits + passes - 1 - i) // passes
        mask = (1 << digit) - 1
        counts[: mask + 2] = 0
        for e in range(keys.size):
            counts[((keys[e] >> shift) & mask) + 1] += 1
        for value in range(mask):
            counts[value + 1] += counts[value]
        for e in range(keys.size):
            value = (keys[e] >> shift) & mask
            spare[counts[value]] = keys[e]
            counts[value] += 1
        keys, spare = spare, keys
        shift += digit
    return passes % 2 == 1


# ---------------------------------------------------------------------------------------------------------------
# Updating rows


class Target(NamedTuple):
    """What is updated, and how."""

    table: NDArray[np.float32]  # [R, d]
    state: NDArray[np.float32]  # [R, d]
    dense: NDArray[np.float32]  # [R, d] gradient of all rows, or [0, d]
    lr: np.float32
    l2: bool
    sphere: bool  # rows have length 1, under the score `cosine`


def _vector_pointer(at, row, c):
    """Return the pointer to column c of a row of `vectors`, followed by `sums`.

    There is no branch, which would often be mispredicted.
    """
    builder, n_vectors, d = at.builder, at.size("vectors", 0), at.size("vectors", 1)
    tables = at.pointer("vectors", c), at.pointer("sums", builder.sub(c, builder.mul(n_vectors, d)))
    table = builder.select(builder.icmp_signed("<", row, n_vectors), *tables)
    return builder.gep(table, [builder.mul(row, d)])


def _sum_tile(width: int):
    """Return an intrinsic for `width` vectors of columns of a sum, from column c on.

    The summands are those of keys[start] .. keys[start + count - 1], one or more. The sum stays in registers.
    """

    @intrinsic
    def tile(context, grad, keys, start, count, weights, origin, vectors, sums, c):
        names = ("grad", "keys", "start", "count", "weights", "origin", "vectors", "sums", "c")

        def build(context, builder, signature, args):
            at = VectorBuilder(context, builder, signature, args, names)

            def entry(i):
                key = at.load("keys", builder.add(at["start"], i), at.i64)
                summand = builder.and_(key, at.i64(SUMMAND_MASK))
                row = builder.sext(at.load("origin", summand, ir.IntType(32)), at.i64)
                return at.load("weights", summand), _vector_pointer(at, row, at["c"])

            totals = at.sum_rows(at["count"], width * [at.zero], entry)
            for v, total in enumerate(totals):
                at.store(total, "grad", builder.add(at["c"], at.i64(v * at.lanes)))
            return nothing(context)

        i64 = types.int64
        return types.none(grad, keys, i64, i64, weights, origin, vectors, sums, i64), build

    return tile


_sum_four, _sum_one = _sum_tile(4), _sum_tile(1)


@inline
def sum_summands(keys, start, stop, summands, grad):
    """Write the sum of weights * x over the summands of one row, those of keys[start] .. keys[stop - 1], to grad."""
    _, weights, _, origin, vectors, sums = summands
    (n_vectors, d), count = vectors.shape, stop - start
    four, one = d // (4 * LANES) * (4 * LANES), d // LANES * LANES
    for c in range(0, four, 4 * LANES):
        _sum_four(grad, keys, start, count, weights, origin, vectors, sums, c)
    for c in range(four, one, LANES):
        _sum_one(grad, keys, start, count, weights, origin, vectors, sums, c)
    for c in range(one, d):
        grad[c] = f32(0)
        for i in range(start, stop):
            e = keys[i] & SUMMAND_MASK
            row = origin[e]
            grad[c] += weights[e] * (vectors[row, c] if row < n_vectors else sums[row - n_vectors, c])


@inline
def subtract_totals(keys, start, stop, totals, row, grad):
    """Replace a gradient under dot by that under l2."""
    total = f32(0)
    for i in range(start, stop):
        total += totals[keys[i] & SUMMAND_MASK]
    for c in range(row.size):
        grad[c] = f32(2) * (grad[c] - total * row[c])


@intrinsic
def _prefetch_vector(context, vectors, sums, row):
    """Prefetch a row of `vectors`, followed by `sums`."""

    def build(context, builder, signature, args):
        at = VectorBuilder(context, builder, signature, args, ("vectors", "sums", "row"))
        first = _vector_pointer(at, at["row"], at.i64(0))

        def step(c, _):
            prefetch_address(builder, builder.gep(first, [c]))
            return []

        at.loop(at.size("vectors", 1), CACHE_LINE, [], step)
        return nothing(context)

    return types.none(vectors, sums, types.int64), build


@inline
def prefetch_summands(keys, start, stop, summands, target):
    """Prefetch what the summands of keys[start] .. keys[stop - 1] need."""
    for i in range(start, stop):
        row = keys[i] >> 32
        _prefetch_vector(summands.vectors, summands.sums, np.int64(summands.origin[keys[i] & SUMMAND_MASK]))
        prefetch_row(target.table, row)
        prefetch_row(target.state, row)


@inline
def step_row(row, state, grad, lr, sphere):
    """Take one Adagrad step and project onto the unit ball, or onto the unit sphere along its tangent."""
    norm = f32(0)
    if sphere:
        radial = f32(0)
        for c in range(row.size):
            radial += grad[c] * row[c]
        for c in range(row.size):
            grad[c] -= radial * row[c]
    for c in range(row.size):
        state[c] += grad[c] * grad[c]
        row[c] -= lr * grad[c] / (np.sqrt(state[c]) + ADAGRAD_EPS_F32)
        norm += row[c] * row[c]
    if norm > f32(1) or (sphere and norm > f32(0)):
        scale = f32(1) / np.sqrt(norm)
        for c in range(row.size):
            row[c] *= scale


@inline
def step_dense_rows(start, stop, target, grad):
    """Step rows start .. stop - 1, which have no summands, along their dense gradient. `grad` is a buffer."""
    for index in range(start, stop):
        for c in range(grad.size):
            grad[c] = target.dense[index, c]
        step_row(target.table[index], target.state[index], grad, target.lr, target.sphere)


@inline
def update_bucket(bucket, buckets, summands, target, counts, grad):
    """Sort the keys of a bucket and update its rows. `counts` and `grad` are buffers."""
    table, low_bits, with_dense = target.table, buckets.low_bits, target.dense.size > 0
    low, high = buckets.bounds[bucket], buckets.bounds[bucket + 1]
    keys, spare = buckets.keys[low:high], buckets.spare[low:high]
    ordered = spare if sort_bucket(keys, spare, low_bits, counts) else keys
    start, next_row = 0, bucket << low_bits
    prefetch_summands(ordered, 0, min(PREFETCH_DISTANCE, ordered.size), summands, target)
    while start < ordered.size:
        index = ordered[start] >> 32
        if with_dense:
            step_dense_rows(next_row, index, target, grad)
            next_row = index + 1
        stop = start + 1
        while stop < ordered.size and ordered[stop] >> 32 == index:
            stop += 1
        ahead = min(start + PREFETCH_DISTANCE, ordered.size)
        prefetch_summands(ordered, ahead, min(stop + PREFETCH_DISTANCE, ordered.size), summands, target)
        row = table[index]
        sum_summands(ordered, start, stop, summands, grad)
        if target.l2:
            subtract_totals(ordered, start, stop, summands.totals, row, grad)
        if with_dense:
            for c in range(row.size):
                grad[c] += target.dense[index, c]
        step_row(row, target.state[index], grad, target.lr, target.sphere)
        start = stop
    if with_dense:
        step_dense_rows(next_row, min((bucket + 1) << low_bits, table.shape[0]), target, grad)


@kernel
def update_buckets(start, stop, buckets, summands, target):
    """Sort buckets start .. stop - 1 and update their rows."""
    counts = np.empty(257, np.int64)
    grad = np.empty(target.table.shape[1], np.float32)
    for bucket in range(start, stop):
        update_bucket(bucket, buckets, summands, target, counts, grad)


def summands_of(function: str, terms: GradientTerms) -> Summands:
    """Return the summands of some terms. An error names the function that was called."""
    arrays = Terms(
        view(function, "rows", terms.rows, (None, None), INT32),
        view(function, "coefficients", terms.coefficients, (None, None), FLOAT32),
        view(function, "vectors", terms.vectors, (None, None), FLOAT32),
        view(function, "sources", terms.sources, (None,), INT32),
    )
    if terms.shared is not None:
        return sum_shared(arrays, groups_of(function, terms.shared, TILE))
    m = arrays.rows.shape[1]
    coefficients, origin = arrays.coefficients.ravel(), arrays.sources if m == 1 else np.repeat(arrays.sources, m)
    totals = coefficients
    if terms.totals is not None:
        totals = view(function, "totals", terms.totals, terms.rows.shape, FLOAT32).ravel()
    sums = np.empty((0, arrays.vectors.shape[1]), f32)
    if terms.sums is not None:
        sums = view(function, "sums", terms.sums, (None, None), FLOAT32)
    return Summands(arrays.rows.ravel(), coefficients, totals, origin, arrays.vectors, sums)


def merge_shared(terms: GradientTerms) -> GradientTerms:
    """Return the terms without `shared`: those of a shared negative are summed over the lists of a tile."""
    if terms.totals is not None:
        return terms.joined()
    summands = summands_of("merge_shared", terms)
    rows, weights, totals = (torch.from_numpy(x)[:, None] for x in (summands.rows, summands.weights, summands.totals))
    sums = torch.from_numpy(summands.sums)
    return GradientTerms(rows, weights, terms.vectors, torch.from_numpy(summands.origin), None, totals, sums).joined()


def update_rows(
    table: Tensor,
    state: Tensor,
    terms: GradientTerms,
    lr: float | Tensor,
    score: Score,
    dense: Tensor | None = None,
    rounding: Rounding | None = None,
) -> None:
    """Take one Adagrad step and project onto the unit ball, in place.

    Without `dense`, the rows that appear in `terms` take the step. With `dense`, a gradient that is added to that of
    the terms, every row does.

    Parameters
    ----------
    table, state : float32 [R, d] factors and Adagrad's sums of squared gradients
    terms : rows int32 [B, m], coefficients float32 [B, m], vectors float32 [*, d], sources int32 [B]
    dense : float32 [R, d]
    rounding : round the rows that took the step to numbers of bfloat16, which float32 holds
    """
    name = "update_rows"
    check_update(table, state, terms, lr, score, dense, rounding, values=terms.shared is not None)
    R, d = table.shape
    target = Target(
        view(name, "table", table, (None, None), FLOAT32),
        view(name, "state", state, (None, None), FLOAT32),
        np.empty((0, d), f32) if dense is None else view(name, "dense", dense, (None, None), FLOAT32),
        f32(float(lr)),
        score == "l2",
        score == "cosine",
    )
    dense_rows = 0 if dense is None else R
    if terms.rows.numel() + dense_rows == 0:
        return
    summands = summands_of(name, terms)

    E, row_bits = len(summands.rows), max(1, (R - 1).bit_length())
    work = E + dense_rows
    bucket_bits = min(row_bits, MAX_BUCKET_BITS, max(0, work.bit_length() - 9))  # buckets of 256 summands or more
    low_bits, n_buckets = row_bits - bucket_bits, 1 << bucket_bits
    buckets = distribute(summands, R, low_bits, n_buckets)
    if buckets is None:
        check_update(table, state, terms, lr, score, dense, rounding)  # says what is invalid
    if buckets is None or math.isnan(lr):
        return
    # Tasks of equal work, not of equal numbers of buckets: some rows are far more popular than others. Between shorter
    # ones, a thread that wakes up finds the interpreter in use again.
    tasks = 1 if threads.n_threads() == 1 else max(1, min(8 * threads.n_threads(), work // UPDATE_TASK))
    done = buckets.bounds + np.minimum(np.arange(n_buckets + 1) << low_bits, dense_rows)
    cuts = np.searchsorted(done, np.arange(tasks + 1) * work // tasks)
    cuts[0], cuts[-1] = 0, n_buckets
    threads.run(
        partial(update_buckets, start, stop, buckets, summands, target) for start, stop in pairwise(cuts.tolist())
    )
    if rounding is not None:
        round_rows(target.table, np.unique(summands.rows) if dense is None else np.arange(R, dtype=np.int32), rounding)
