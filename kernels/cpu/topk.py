"""`top_k`: the k best items of each query in one pass over the items.

A panel of items meets a few queries at a time (`filter`): d multiply-adds per score, then one comparison with the
query's threshold, its k-th best score so far. Only items above it are scored exactly and offered to a heap. Memory
beyond the packed items is a heap of k keys for each query in progress.

A first pass over one panel in SAMPLE_STRIDE gives a threshold that about 3 k of all items pass. If fewer than k pass in
the end, the query is repeated without it. Its gain depends on the order of the items: on one thread with AVX2 (2048
queries, 28,800 items, d = 64, random factors) `top_k` took 148 ms with it and 144 ms without at k = 50, 128 and 108 ms
at k = 10.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numpy.typing import NDArray
from torch import Tensor

from drm_triton.kernels.checks import INT32, INT64, check_items, check_top_k
from drm_triton.kernels.cpu.filter import QUERIES, QUERY_BLOCK, WIDTH, ItemLayout, filter_panel, pack, pack_queries
from drm_triton.kernels.cpu.runtime import threads
from drm_triton.kernels.cpu.runtime.arrays import FLOAT32, view
from drm_triton.kernels.cpu.runtime.bits import trailing_zeros
from drm_triton.kernels.cpu.runtime.jit import inline, intrinsic, kernel, prefetch_row
from drm_triton.kernels.cpu.softsort import float_from_bits
from drm_triton.kernels.protocol import PackedItems, SeenItems
from drm_triton.names import Score

f32 = np.float32
SAMPLE_STRIDE = 16  # the first pass looks at one panel in this many
EMPTY = np.int64(-(2**63))  # a key below that of every score
ITEM_MASK = np.int64(0x7FFFFFFF)


class SeenRows(NamedTuple):
    """Items to leave out. Those of query q are indices[indptr[q] : indptr[q + 1]], ascending."""

    indptr: NDArray[np.int64]  # [m + 1]
    indices: NDArray[np.int32]


class Ranking(NamedTuple):
    """Results, best first."""

    items: NDArray[np.int32]  # [m, k]
    scores: NDArray[np.float32]  # [m, k]


class QueryBlockBuffers(NamedTuple):
    """Buffers for a block of queries."""

    heaps: NDArray[np.int64]  # [QUERY_BLOCK, k] keys
    thresholds: NDArray[np.float32]  # [QUERY_BLOCK]
    limits: NDArray[np.float32]  # [QUERY_BLOCK], threshold minus slack, for estimates
    cursor: NDArray[np.int64]  # [QUERY_BLOCK], position in the seen items of the query
    hits: NDArray[np.int64]  # [QUERIES], of `filter_panel`


@intrinsic
def bits_of(context, value):
    """Reinterpret a float32 as an int32."""

    def build(context, builder, signature, args):
        return builder.bitcast(args[0], ir.IntType(32))

    return types.int32(types.float32), build


@inline
def key_of(score, item):
    """Return an integer that orders by score, and for equal scores by the lower item."""
    bits = np.int64(bits_of(score))
    bits = 0 if bits == -(2**31) else bits  # -0 equals 0
    return ((bits ^ ((bits >> 63) & ITEM_MASK)) << 32) | (ITEM_MASK - item)


@inline
def score_of(key):
    """Return the score in a key."""
    bits = key >> 32
    return float_from_bits(np.int32(bits ^ ((bits >> 63) & ITEM_MASK)))


@inline
def sift_down(heap, size):
    """Restore a heap of keys, smallest at the root, after its root has changed."""
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
    """Score the items whose bit is set in `hits` and put those above the threshold into the heap, unless seen.

    Returns the new threshold and the new cursor into `seen`.
    """
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
def sweep(first_query, size, step, queries, items, seen, k, buffers):
    """Fill heaps[q, :k] with the best items above thresholds[q], which rise, of every step-th panel."""
    heaps, thresholds, limits, cursor = buffers.heaps, buffers.thresholds, buffers.limits, buffers.cursor
    hits = buffers.hits
    depth = queries.words.size // queries.rows.shape[0]
    heaps[:, :k] = EMPTY
    cursor[:] = 0
    for q in range(thresholds.size):
        limits[q] = thresholds[q] - queries.slack[first_query + q]
    for panel in range(0, items.bias.size // WIDTH, step):
        following = (panel + step) * WIDTH
        for item in range(following, min(following + WIDTH, items.rows.shape[0])):
            prefetch_row(items.rows, item)
        for group in range(0, size, QUERIES):
            some = limits[group : group + QUERIES]
            if not filter_panel(
                queries.words, first_query + group, depth, items.panels, panel, items.bias, items.scale, items.offset,
                queries.scale, some, hits,
            ):  # fmt: skip
                continue
            for i in range(QUERIES):
                if hits[i] != 0:
                    q = group + i
                    row = first_query + q
                    thresholds[q], cursor[q] = offer(
                        hits[i], panel * WIDTH, items, queries.rows[row], thresholds[q],
                        seen.indices[seen.indptr[row] : seen.indptr[row + 1]], cursor[q], heaps[q, :k],
                    )  # fmt: skip
                    limits[q] = thresholds[q] - queries.slack[row]


@inline
def rank_block(first_query, queries, items, sampled, seen, buffers, ranking):
    """Find the best items of the block of queries that begins with `first_query`."""
    heaps, thresholds = buffers.heaps, buffers.thresholds
    m, k = ranking.items.shape
    size = min(QUERY_BLOCK, m - first_query)
    for q in range(QUERY_BLOCK):  # the padding of the last block accepts no item
        thresholds[q] = -np.inf if q < size else np.inf
    if sampled > 0:
        sweep(first_query, size, SAMPLE_STRIDE, queries, items, seen, sampled, buffers)
        for q in range(size):
            lower = thresholds[q] - abs(thresholds[q]) * f32(1e-6) - f32(1e-30)  # lets ties with the last one pass
            thresholds[q] = lower if heaps[q, 0] != EMPTY else f32(-np.inf)
    sweep(first_query, size, 1, queries, items, seen, k, buffers)
    again = False
    for q in range(size):
        short = heaps[q, 0] == EMPTY and thresholds[q] > -np.inf  # the sample was better than all items are
        thresholds[q] = -np.inf if short else np.inf
        again = again or short
        if not short:
            take_out(heaps[q], ranking.items[first_query + q], ranking.scores[first_query + q])
    if again:
        sweep(first_query, size, 1, queries, items, seen, k, buffers)
        for q in range(size):
            if thresholds[q] < np.inf:
                take_out(heaps[q], ranking.items[first_query + q], ranking.scores[first_query + q])


@inline
def take_out(heap, items, scores):
    """Empty a heap of keys into items and scores, best first."""
    for place in range(heap.size - 1, -1, -1):  # the worst is taken out first
        key = heap[0]
        items[place] = -1 if key == EMPTY else ITEM_MASK - (key & ITEM_MASK)
        scores[place] = -np.inf if key == EMPTY else score_of(key)
        heap[0] = heap[place]
        sift_down(heap, place)


@kernel
def rank_blocks(start, stop, queries, items, sampled, seen, ranking):
    """Find the best items of the queries of blocks start .. stop - 1."""
    buffers = QueryBlockBuffers(
        np.empty((QUERY_BLOCK, ranking.items.shape[1]), np.int64),
        np.empty(QUERY_BLOCK, np.float32),
        np.empty(QUERY_BLOCK, np.float32),
        np.empty(QUERY_BLOCK, np.int64),
        np.empty(QUERIES, np.int64),
    )
    for block in range(start, stop):
        rank_block(block * QUERY_BLOCK, queries, items, sampled, seen, buffers, ranking)


def pack_items(V: Tensor, score: Score) -> PackedItems:
    """Prepare items for `top_k`.

    Parameters
    ----------
    V : float32 [N, d], finite
    """
    values = view("pack_items", "V", V, (None, None), FLOAT32)
    return PackedItems(V, score, check_items(V, score), pack(values, score))


def sample_size(k: int, n_items: int) -> int:
    """Return how many of the best sampled items define the first threshold, or 0 for no first pass.

    The number leaves a margin of three standard deviations, so that at least k of all items almost always pass.
    """
    expected = k / SAMPLE_STRIDE
    size = math.ceil(expected + 3 * math.sqrt(expected) + 1)
    return size if size <= k and n_items // SAMPLE_STRIDE > 4 * size else 0


def top_k(queries: Tensor, items: PackedItems, k: int, seen: SeenItems | None = None) -> tuple[Tensor, Tensor]:
    """Find the k best items of each query, best first. Ties go to the lower item index.

    Parameters
    ----------
    queries : float32 [m, d]
    seen : (indptr int64 [m + 1], indices int32 ascending within a row), the items to leave out. Row i is
        indices[indptr[i] : indptr[i + 1]], so a slice of a larger indptr can be passed as it is.

    Returns
    -------
    items : int32 [m, k]
    scores : float32 [m, k]
        Where fewer than k items remain, the item is -1 and the score -inf.
    """
    name = "top_k"
    rows = view(name, "queries", queries, (None, None), FLOAT32)
    check_top_k(queries, items, k, seen)
    layout = items.layout
    assert isinstance(layout, ItemLayout)
    m = len(queries)
    if seen is None:
        seen_rows = SeenRows(np.zeros(m + 1, np.int64), np.zeros(0, np.int32))
    else:
        seen_rows = SeenRows(
            view(name, "the indptr of seen", seen[0], (m + 1,), INT64),
            view(name, "the indices of seen", seen[1], (None,), INT32),
        )
    best, scores = torch.empty(m, k, dtype=torch.int32), torch.empty(m, k)
    threads.split(
        rank_blocks, -(-m // QUERY_BLOCK), 1,
        pack_queries(rows, layout), layout, sample_size(k, len(items.V)), seen_rows,
        Ranking(best.numpy(), scores.numpy()),
    )  # fmt: skip
    if items.score == "l2":
        scores -= torch.from_numpy(np.einsum("ij,ij->i", rows, rows))[:, None]
    return best, scores
