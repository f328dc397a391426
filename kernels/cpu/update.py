"""Adagrad and projection, one step for each row named in a batch, its gradient summed in a fixed order.

The E entries are grouped by row with a radix sort on (row, entry) whose memory depends on E alone, never on the table:
first all threads part them into buckets by the high bits of the row, then each bucket is sorted by the low bits and its
rows are updated by one thread. Entries of a row are summed in the order they came, so the bits of the result depend
neither on the number of threads nor on the buckets.

Per entry 2 d operations and d floats read; per row about 8 d operations and 4 d floats read or written.
"""

from functools import partial
from itertools import pairwise

import numpy as np
from torch import Tensor

from drm_triton.kernels.checks import INT32, check_update
from drm_triton.kernels.cpu.runtime import threads
from drm_triton.kernels.cpu.runtime.arrays import FLOAT32, view
from drm_triton.kernels.cpu.runtime.jit import inline, kernel, prefetch_row
from drm_triton.kernels.cpu.shared import Entries, lists_in_tile, sum_shared
from drm_triton.kernels.protocol import ADAGRAD_EPS, GradientTerms
from drm_triton.names import Score

f32 = np.float32
EPS = f32(ADAGRAD_EPS)
MAX_BUCKET_BITS = 11  # one write stream per bucket: more of them than the second-level TLB holds would crawl
AHEAD = 8  # entries: a row is asked for this long before its turn, which hides the latency of a large table
ENTRY = np.int64(0xFFFFFFFF)


@kernel
def count_buckets(rows, shift, counts):
    """counts[bucket] = number of rows in it."""
    counts[:] = 0
    for e in range(rows.size):
        counts[rows[e] >> shift] += 1


@kernel
def fill_buckets(rows, start, shift, position, keys):
    """Write (row, entry) as one integer to its bucket; position[bucket] is where the next one goes."""
    for e in range(rows.size):
        bucket = rows[e] >> shift
        keys[position[bucket]] = (np.int64(rows[e]) << 32) | (start + e)
        position[bucket] += 1


@inline
def sort_bucket(keys, spare, bits, counts):
    """Sort keys by the low `bits` bits of the row, keeping the order of equal rows; True if they end up in spare."""
    passes = (bits + 7) // 8
    shift = 32
    for i in range(passes):
        digit = (bits + passes - 1 - i) // passes
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


@inline
def sum_entries(keys, entries, grad):
    """Sum into grad the coef * x of the entries of one row; return the sum of their pulls."""
    coef, pull, at, X, sums, d = entries.coef, entries.pull, entries.at, entries.X, entries.sums, grad.size
    grad[:] = f32(0)
    total = f32(0)
    full = keys.size & ~3
    for e in range(0, full, 4):
        e0, e1, e2, e3 = keys[e] & ENTRY, keys[e + 1] & ENTRY, keys[e + 2] & ENTRY, keys[e + 3] & ENTRY
        c0, c1, c2, c3 = coef[e0], coef[e1], coef[e2], coef[e3]
        x0 = sums[at[e0]] if at[e0] >= 0 else X[~at[e0]]
        x1 = sums[at[e1]] if at[e1] >= 0 else X[~at[e1]]
        x2 = sums[at[e2]] if at[e2] >= 0 else X[~at[e2]]
        x3 = sums[at[e3]] if at[e3] >= 0 else X[~at[e3]]
        total += (pull[e0] + pull[e1]) + (pull[e2] + pull[e3])
        for c in range(d):
            grad[c] += (c0 * x0[c] + c1 * x1[c]) + (c2 * x2[c] + c3 * x3[c])
    for e in range(full, keys.size):
        e0 = keys[e] & ENTRY
        c0, x0 = coef[e0], sums[at[e0]] if at[e0] >= 0 else X[~at[e0]]
        total += pull[e0]
        for c in range(d):
            grad[c] += c0 * x0[c]
    return total


@inline
def step_row(row, state, grad, lr):
    """One Adagrad step and projection onto the unit ball."""
    norm = f32(0)
    for c in range(row.size):
        state[c] += grad[c] * grad[c]
        row[c] -= lr * grad[c] / (np.sqrt(state[c]) + EPS)
        norm += row[c] * row[c]
    if norm > f32(1):
        scale = f32(1) / np.sqrt(norm)
        for c in range(row.size):
            row[c] *= scale


@inline
def step_rows(start, stop, table, state, dense, lr):
    """Step rows start .. stop - 1 along their dense gradient."""
    for index in range(start, stop):
        step_row(table[index], state[index], dense[index], lr)


@inline
def update_bucket(bucket, keys, spare, bits, counts, table, state, entries, dense, lr, l2, grad):
    """Sort the keys of a bucket and update their rows; counts and grad are scratch."""
    ordered = spare if sort_bucket(keys, spare, bits, counts) else keys
    first, next_row = 0, bucket << bits
    while first < ordered.size:
        index = ordered[first] >> 32
        if dense.size > 0:
            step_rows(next_row, index, table, state, dense, lr)
            next_row = index + 1
        last = first + 1
        while last < ordered.size and ordered[last] >> 32 == index:
            last += 1
        for e in range(first + AHEAD, min(last + AHEAD, ordered.size)):
            if ordered[e] >> 32 != ordered[e - 1] >> 32:
                prefetch_row(table, ordered[e] >> 32)
                prefetch_row(state, ordered[e] >> 32)
        row = table[index]
        total = sum_entries(ordered[first:last], entries, grad)
        if l2:
            for c in range(row.size):
                grad[c] = f32(2) * (grad[c] - total * row[c])
        if dense.size > 0:
            for c in range(row.size):
                grad[c] += dense[index, c]
        step_row(row, state[index], grad, lr)
        first = last
    if dense.size > 0:
        step_rows(next_row, min((bucket + 1) << bits, table.shape[0]), table, state, dense, lr)


@kernel
def update_buckets(start, stop, bounds, bits, keys, spare, table, state, entries, dense, lr, l2):
    """Sort buckets start .. stop - 1 and update their rows."""
    counts = np.empty(257, np.int64)
    grad = np.empty(table.shape[1], np.float32)
    for bucket in range(start, stop):
        low, high = bounds[bucket], bounds[bucket + 1]
        update_bucket(
            bucket, keys[low:high], spare[low:high], bits, counts, table, state, entries, dense, lr, l2, grad
        )  # fmt: skip


def update_rows(
    table: Tensor, state: Tensor, terms: GradientTerms, lr: float, score: Score, dense: Tensor | None = None
) -> None:
    """One Adagrad step and projection onto the unit ball for each row of `table` named in `rows`, in place.

    Entry e (of E) adds coef[e] * x to the gradient of row rows[e] under `dot` and 2 coef[e] * (x - row) under `l2`,
    where x = X[source[e // (E / len(source))]]: entries come in equal groups, one per source row.

    Parameters
    ----------
    table, state : float32 [R, d] factors and Adagrad's sum of squares
    rows : int32 [E]; coef : float32 [E]; X : float32 [*, d]; source : int32 [B], B dividing E
    """
    name = "update_rows"
    check_update(table, state, terms, lr, score, dense)
    factors = view(name, "table", table, (None, None), FLOAT32)
    squares = view(name, "state", state, (None, None), FLOAT32)
    row_ids = view(name, "rows", terms.rows, (None, None), INT32)
    factor = view(name, "coefficients", terms.coefficients, (None, None), FLOAT32)
    inputs = view(name, "vectors", terms.vectors, (None, None), FLOAT32)
    origin = view(name, "sources", terms.sources, (None,), INT32)
    every_row = (
        np.empty((0, table.shape[1]), f32) if dense is None else view(name, "dense", dense, (None, None), FLOAT32)
    )
    if row_ids.size == 0 and dense is None:
        return
    B, m = row_ids.shape
    share = 1 if terms.shared is None else min(lists_in_tile(terms.shared.size), B)
    if share > 1:
        entries = sum_shared(row_ids, factor, inputs, origin, share)
    else:
        none = np.empty((0, table.shape[1]), f32)
        entries = Entries(row_ids.ravel(), factor.ravel(), factor.ravel(), np.repeat(~origin, m), inputs, none)

    E, bits = len(entries.rows), max(1, (len(table) - 1).bit_length())
    bucket_bits = min(bits, MAX_BUCKET_BITS, max(0, E.bit_length() - 7))  # about a hundred entries in each, or more
    shift, n_buckets = bits - bucket_bits, 1 << bucket_bits
    chunks = max(1, min(threads.n_threads(), E >> 14))
    edges = [E * i // chunks for i in range(chunks + 1)]
    spans = [entries.rows[a:b] for a, b in pairwise(edges)]
    counts = np.empty((chunks, n_buckets), np.int64)
    threads.run(partial(count_buckets, span, shift, count) for span, count in zip(spans, counts, strict=True))
    # Within a bucket, chunks follow each other: the order of entries survives.
    position = np.ascontiguousarray(counts.T.cumsum().reshape(n_buckets, chunks).T - counts)
    bounds = np.append(position[0], E)
    keys, spare = np.empty(E, np.int64), np.empty(E, np.int64)
    threads.run(partial(fill_buckets, spans[i], edges[i], shift, position[i], keys) for i in range(chunks))
    # Parts of equal numbers of entries, not of buckets: some rows are far more popular than others.
    parts = max(1, min(8 * threads.n_threads(), E >> 9)) if threads.n_threads() > 1 else 1
    cuts = np.searchsorted(bounds, np.arange(parts + 1) * E // parts)
    cuts[0], cuts[-1] = 0, n_buckets
    threads.run(
        partial(
            update_buckets,
            a,
            b,
            bounds,
            shift,
            keys,
            spare,
            factors,
            squares,
            entries,
            every_row,
            f32(lr),
            score == "l2",
        )
        for a, b in pairwise(cuts.tolist())
    )
