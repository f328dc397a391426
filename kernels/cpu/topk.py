"""The k best items of each query in one sweep: most items are dismissed by an estimate that never leaves the registers.

A panel of items meets a few queries at a time (`panels`): d multiply-adds per score, on bytes where the processor has
them, then one comparison with the query's threshold, its k-th best score so far. Only items above it are scored exactly
and looked at one by one. A first sweep over a part of the items gives a threshold that about three times k of all items
pass; should fewer than k have passed in the end, the query is done again without it. Memory beyond the packed items
is a heap of k keys for each query at work.

`l2` is a product too: 2 u.v - |v|^2, and - |u|^2 is added at the end.
"""

import math

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor

from drm_triton.kernels.checks import INT32, INT64, check_items, check_top_k
from drm_triton.kernels.cpu.panels import BLOCK, QUERIES, WIDTH, Items, filter_panel, pack, pack_queries
from drm_triton.kernels.cpu.runtime import threads
from drm_triton.kernels.cpu.runtime.arrays import FLOAT32, view
from drm_triton.kernels.cpu.runtime.jit import inline, kernel, prefetch_row
from drm_triton.kernels.cpu.softsort import float_from_bits
from drm_triton.kernels.protocol import PackedItems, SeenItems
from drm_triton.names import Score

f32 = np.float32
STRIDE = 16  # one panel in so many is looked at first
EMPTY = np.int64(-(2**63))  # a key below that of every score
ITEM_MASK = np.int64(0x7FFFFFFF)


@intrinsic
def bits_of(context, value):
    """Reinterpret a float32 as an int32."""

    def build(context, builder, signature, args):
        return builder.bitcast(args[0], ir.IntType(32))

    return types.int32(types.float32), build


@intrinsic
def trailing_zeros(context, word):
    """Number of zero bits below the lowest one of an int64."""

    def build(context, builder, signature, args):
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 0))

    return types.int64(types.int64), build


@inline
def key_of(score, item):
    """An integer that orders as (score, then the lower item) does."""
    bits = np.int64(bits_of(score))
    bits = 0 if bits == -(2**31) else bits  # -0 equals 0
    return ((bits ^ ((bits >> 63) & ITEM_MASK)) << 32) | (ITEM_MASK - item)


@inline
def score_of(key):
    """Score in a key."""
    bits = key >> 32
    return float_from_bits(np.int32(bits ^ ((bits >> 63) & ITEM_MASK)))


@inline
def sift_down(heap, size):
    """Restore a heap of keys, the smallest first, whose first one has changed."""
    root, key = 0, heap[0]
    child = 1
    while child < size:
        if child + 1 < size:
            child += heap[child + 1] < heap[child]
        if key <= heap[child]:
            break
        heap[root] = heap[child]
        root, child = child, 2 * child + 1
    heap[root] = key


@inline
def offer(hits, first_item, items, query, threshold, seen, cursor, heap):
    """Put the items that `hits` marks into the heap, unless seen; return the new threshold and cursor into seen."""
    while hits != 0:
        item = first_item + trailing_zeros(hits)
        hits &= hits - 1
        row, score = items.rows[item], f32(0)
        for c in range(query.size):
            score += row[c] * query[c]
        score += items.bias[item]
        if score > threshold:
            while cursor < seen.size and seen[cursor] < item:
                cursor += 1
            if cursor == seen.size or seen[cursor] != item:
                heap[0] = key_of(score, item)
                sift_down(heap, heap.size)
                threshold = score_of(heap[0]) if heap[0] != EMPTY else threshold
    return threshold, cursor


@inline
def sweep(first, size, step, queries, items, indptr, indices, k, heaps, thresholds, limits, cursor, hits):
    """Fill heaps[q, :k] with the best above thresholds[q], which rise, of every step-th panel; limits, ...: scratch."""
    depth = queries.words.size // queries.rows.shape[0]
    heaps[:, :k] = EMPTY
    cursor[:] = 0
    for q in range(thresholds.size):
        limits[q] = thresholds[q] - queries.slack[first + q]
    for panel in range(0, items.bias.size // WIDTH, step):
        following = (panel + step) * WIDTH
        for item in range(following, min(following + WIDTH, items.rows.shape[0])):
            prefetch_row(items.rows, item)
        for group in range(0, size, QUERIES):
            some = limits[group : group + QUERIES]
            if not filter_panel(
                queries.words, first + group, depth, items.panels, panel, items.bias, items.scale, items.offset,
                queries.scale, some, hits,
            ):  # fmt: skip
                continue
            for i in range(QUERIES):
                if hits[i] != 0:
                    q = group + i
                    row = first + q
                    thresholds[q], cursor[q] = offer(
                        hits[i], panel * WIDTH, items, queries.rows[row], thresholds[q],
                        indices[indptr[row] : indptr[row + 1]], cursor[q], heaps[q, :k],
                    )  # fmt: skip
                    limits[q] = thresholds[q] - queries.slack[row]


@inline
def rank_block(first, queries, items, sampled, indptr, indices, heaps, thresholds, limits, cursor, hits, best, scores):
    """Best items of the queries of the block that begins with `first`."""
    m, k = best.shape
    size = min(BLOCK, m - first)
    for q in range(BLOCK):  # rows that fill up the last block want nothing
        thresholds[q] = -np.inf if q < size else np.inf
    if sampled > 0:
        sweep(
            first, size, STRIDE, queries, items, indptr, indices, sampled, heaps, thresholds, limits, cursor, hits
        )  # fmt: skip
        for q in range(size):
            lower = thresholds[q] - abs(thresholds[q]) * f32(1e-6) - f32(1e-30)  # ties with the last one count
            thresholds[q] = lower if heaps[q, 0] != EMPTY else f32(-np.inf)
    sweep(first, size, 1, queries, items, indptr, indices, k, heaps, thresholds, limits, cursor, hits)
    again = False
    for q in range(size):
        short = heaps[q, 0] == EMPTY and thresholds[q] > -np.inf  # the sample was better than the whole
        thresholds[q] = -np.inf if short else np.inf
        again = again or short
        if not short:
            take_out(heaps[q], best[first + q], scores[first + q])
    if again:
        sweep(first, size, 1, queries, items, indptr, indices, k, heaps, thresholds, limits, cursor, hits)
        for q in range(size):
            if thresholds[q] < np.inf:
                take_out(heaps[q], best[first + q], scores[first + q])


@inline
def take_out(heap, items, scores):
    """Empty a heap of keys into items and scores, best first."""
    for place in range(heap.size - 1, -1, -1):  # the worst leaves first
        key = heap[0]
        items[place] = -1 if key == EMPTY else ITEM_MASK - (key & ITEM_MASK)
        scores[place] = -np.inf if key == EMPTY else score_of(key)
        heap[0] = heap[place]
        sift_down(heap, place)


@kernel
def rank_blocks(start, stop, queries, items, sampled, indptr, indices, best, scores):
    """Best items of the queries of blocks start .. stop - 1."""
    heaps = np.empty((BLOCK, best.shape[1]), np.int64)
    thresholds, limits = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
    cursor, hits = np.empty(BLOCK, np.int64), np.empty(QUERIES, np.int64)
    for block in range(start, stop):
        rank_block(
            block * BLOCK, queries, items, sampled, indptr, indices, heaps, thresholds, limits, cursor, hits, best,
            scores,
        )  # fmt: skip


def pack_items(V: Tensor, score: Score) -> PackedItems:
    """Prepare items for `top_k`."""
    values = view("pack_items", "V", V, (None, None), FLOAT32)
    return PackedItems(V, score, check_items(V, score), pack(values, score))


def sample_size(k: int, n_items: int) -> int:
    """How many best of the sample give a threshold that at least k of all items pass, almost surely; 0: take none."""
    expected = k / STRIDE
    size = math.ceil(expected + 3 * math.sqrt(expected) + 1)
    return size if size <= k and n_items // STRIDE > 4 * size else 0


def top_k(queries: Tensor, items: PackedItems, k: int, seen: SeenItems | None = None) -> tuple[Tensor, Tensor]:
    """The k best items of each query row, best first, ties to the lower item index.

    Parameters
    ----------
    queries : float32 [m, d]; V : float32 [N, d], finite, or what `pack_items` made of it
    seen : (indptr int64 [m + 1], indices int32 ascending within a row): items of each query row that are left out;
        row i of the mask is indices[indptr[i] : indptr[i + 1]], so a slice of a larger indptr serves as it is.

    Returns
    -------
    items : int32 [m, k], scores : [m, k]; where fewer than k items remain, item -1 with score -inf.
    """
    name = "top_k"
    rows = view(name, "queries", queries, (None, None), FLOAT32)
    check_top_k(queries, items, k, seen)
    layout = items.layout
    assert isinstance(layout, Items)
    m = len(queries)
    if seen is None:
        indptr, indices = np.zeros(m + 1, np.int64), np.zeros(0, np.int32)
    else:
        indptr = view(name, "the indptr of seen", seen[0], (m + 1,), INT64)
        indices = view(name, "the indices of seen", seen[1], (None,), INT32)
    best, scores = torch.empty(m, k, dtype=torch.int32), torch.empty(m, k)
    threads.split(
        rank_blocks, -(-m // BLOCK), 1,
        pack_queries(rows, layout), layout, sample_size(k, len(items.V)), indptr, indices,
        best.numpy(), scores.numpy(),
    )  # fmt: skip
    if items.score == "l2":
        scores -= torch.from_numpy(np.einsum("ij,ij->i", rows, rows))[:, None]
    return best, scores
