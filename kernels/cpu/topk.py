"""The k best items of each query, scores and selection in one sweep: no score leaves the registers unless it is good.

A panel of items, packed so that its columns fill vector registers, meets a few queries at a time: d fused
multiply-adds per score, then one comparison with the query's threshold, its k-th best score so far. Only scores above
it are looked at one by one: about k ln(N / k) of N. Memory beyond the packed items (N d floats) is a heap of k keys for
each query at work.

`l2` is a product too: 2 u.v - |v|^2 is one dimension more, and - |u|^2 is added at the end.
"""

from dataclasses import dataclass

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray
from torch import Tensor

from drm_triton.errors import InputError
from drm_triton.kernels.cpu import threads
from drm_triton.kernels.cpu.arrays import FLOAT32, view
from drm_triton.kernels.cpu.jit import inline, kernel
from drm_triton.kernels.cpu.vectors import AVX512, FUSED, LANES, VectorBuilder
from drm_triton.kernels.interface import INT32, INT64, Score, check_choice, check_top_k, largest_norm

# Queries x vectors of accumulators that fill the register file: 24 of 32 registers with AVX-512, 12 of 16 without.
QUERIES, VECTORS = (8, 3) if AVX512 else (4, 3)
WIDTH = LANES * VECTORS  # items of a panel
BLOCK = 8 * QUERIES  # queries that share a panel while it is in the first-level cache

EMPTY = np.int64(-(2**63))  # a key below that of every score
ITEM_MASK = np.int64(0x7FFFFFFF)


@intrinsic
def score_panel(context, queries, row, depth, panels, panel, thresholds, tile, hits):
    """Scores of QUERIES queries against one panel: bit j of hits[q] tells whether item j is above q's threshold.

    queries : [*, depth], from `row`; panels : [*, depth, WIDTH]; thresholds, hits : [QUERIES]; tile : [QUERIES, WIDTH],
    which takes the scores. All arrays flat. Returns whether there is any hit.
    """

    def build(context, builder, signature, args):
        at = VectorBuilder(context, builder, signature, args)
        i64, depth = at.i64, args[2]
        first = builder.mul(args[1], depth)
        rows = [builder.add(first, builder.mul(depth, i64(q))) for q in range(QUERIES)]
        base = builder.mul(builder.mul(args[4], depth), i64(WIDTH))

        def step(k, sums):
            column = builder.add(base, builder.mul(k, i64(WIDTH)))
            items = [at.load(3, builder.add(column, i64(v * LANES)), at.vector) for v in range(VECTORS)]
            totals = []
            for q in range(QUERIES):
                query = at.splat(at.load(0, builder.add(rows[q], k)))
                for v, item in enumerate(items):
                    product = builder.fmul(query, item, flags=FUSED)
                    totals.append(builder.fadd(sums[q * VECTORS + v], product, flags=FUSED))
            return totals

        totals = at.loop(depth, 1, QUERIES * VECTORS * [at.zero], step)
        anything = i64(0)
        for q in range(QUERIES):
            threshold = at.splat(at.load(5, i64(q)))
            found = i64(0)
            for v in range(VECTORS):
                total = totals[q * VECTORS + v]
                above = builder.bitcast(builder.fcmp_ordered(">", total, threshold), ir.IntType(LANES))
                found = builder.or_(found, builder.shl(builder.zext(above, i64), i64(v * LANES)))
                at.store(total, 6, i64(q * WIDTH + v * LANES))
            builder.store(found, at.element(7, i64(q), i64))
            anything = builder.or_(anything, found)
        return builder.icmp_unsigned("!=", anything, i64(0))

    array = types.Array(types.float32, 1, "C")
    words = types.Array(types.int64, 1, "C")
    return types.boolean(array, types.int64, types.int64, array, types.int64, array, array, words), build


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


@intrinsic
def float_of(context, value):
    """Reinterpret an int32 as a float32."""

    def build(context, builder, signature, args):
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), build


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
    return float_of(np.int32(bits ^ ((bits >> 63) & ITEM_MASK)))


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
def offer(hits, scores, first_item, threshold, seen, cursor, heap):
    """Put the scores that `hits` marks into the heap, unless seen; return the new threshold and cursor into seen."""
    while hits != 0:
        j = trailing_zeros(hits)
        hits &= hits - 1
        item = first_item + j
        if scores[j] > threshold:  # which may have risen since
            while cursor < seen.size and seen[cursor] < item:
                cursor += 1
            if cursor == seen.size or seen[cursor] != item:
                heap[0] = key_of(scores[j], item)
                sift_down(heap, heap.size)
                threshold = score_of(heap[0]) if heap[0] != EMPTY else np.float32(-np.inf)
    return threshold, cursor


@kernel
def rank_blocks(start, stop, queries, depth, panels, N, indptr, indices, items, scores):
    """Best items of the queries of blocks start .. stop - 1."""
    m, k = items.shape
    heaps = np.empty((BLOCK, k), np.int64)
    thresholds = np.empty((BLOCK // QUERIES, QUERIES), np.float32)
    cursor = np.empty(BLOCK, np.int64)
    tile, hits = np.empty(QUERIES * WIDTH, np.float32), np.empty(QUERIES, np.int64)
    for block in range(start, stop):
        first = block * BLOCK
        size = min(BLOCK, m - first)
        heaps[:] = EMPTY
        cursor[:] = 0
        for q in range(BLOCK):  # rows that pad the last block want nothing
            thresholds[q // QUERIES, q % QUERIES] = -np.inf if q < size else np.inf
        for panel in range((N + WIDTH - 1) // WIDTH):
            real = (1 << min(WIDTH, N - panel * WIDTH)) - 1  # bits of the items that are not filling
            for group in range((size + QUERIES - 1) // QUERIES):
                row = first + group * QUERIES
                if not score_panel(queries, row, depth, panels, panel, thresholds[group], tile, hits):
                    continue
                for q in range(QUERIES):
                    if hits[q] != 0:
                        at = group * QUERIES + q
                        thresholds[group, q], cursor[at] = offer(
                            hits[q] & real, tile[q * WIDTH :], panel * WIDTH, thresholds[group, q],
                            indices[indptr[row + q] : indptr[row + q + 1]], cursor[at], heaps[at],
                        )  # fmt: skip
        for q in range(size):
            heap = heaps[q]
            for place in range(k - 1, -1, -1):  # the worst leaves first
                key = heap[0]
                items[first + q, place] = -1 if key == EMPTY else ITEM_MASK - (key & ITEM_MASK)
                scores[first + q, place] = -np.inf if key == EMPTY else score_of(key)
                heap[0] = heap[place]
                sift_down(heap, place)


@dataclass(frozen=True)
class PackedItems:
    """Items in the order in which the sweep reads them."""

    V: Tensor  # [N, d], what was packed
    score: Score
    norm: float  # of the longest row
    panels: NDArray[np.float32]  # [*, depth, WIDTH], flat; the last panel filled up with zeros


def pack_items(V: Tensor, score: Score) -> PackedItems:
    """Items that `top_k` takes in place of V, made once for many calls. Later changes of V do not reach them."""
    return _pack("pack_items", V, score)


def _pack(function: str, V: Tensor, score: Score) -> PackedItems:
    check_choice(function, "score", score, Score)
    view(function, "V", V, (None, None), FLOAT32)
    if V.shape[1] == 0:
        raise InputError(f"{function}: V must have at least one column, got {list(V.shape)}")
    norm = largest_norm(function, "V", V)
    N, d = V.shape
    depth = d + (score == "l2")
    panels = torch.zeros(-(-N // WIDTH), depth, WIDTH)
    full = N // WIDTH * WIDTH  # those in full panels; the last one may be filled up with zeros
    items = V.detach()
    for rows, target in ((items[:full], panels[: full // WIDTH]), (items[full:], panels[full // WIDTH :])):
        columns = rows.view(len(target), -1, d).transpose(1, 2) if len(rows) else rows.new_zeros(0, d, 0)
        target[: len(columns), :d, : columns.shape[2]] = columns
        if score == "l2":
            target[: len(columns), :d] *= 2
            target[: len(columns), d, : columns.shape[2]] = -columns.square().sum(1)
    return PackedItems(V, score, norm, panels.view(-1).numpy())


def top_k(
    queries: Tensor, V: Tensor | PackedItems, k: int, score: Score, seen: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
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
    view(name, "queries", queries, (None, None), FLOAT32)
    if queries.shape[1] == 0:
        raise InputError(f"{name}: queries must have at least one column, got {list(queries.shape)}")
    packed = V if isinstance(V, PackedItems) else _pack(name, V, score)
    if packed.score != score:
        raise InputError(f"{name}: the items were packed for the score {packed.score}, got {score}")
    check_top_k(queries, packed.V, k, score, seen, packed.norm)
    (m, d), N = queries.shape, len(packed.V)
    if seen is None:
        indptr, indices = np.zeros(m + 1, np.int64), np.zeros(0, np.int32)
    else:
        indptr = view(name, "the indptr of seen", seen[0], (m + 1,), INT64)
        indices = view(name, "the indices of seen", seen[1], (None,), INT32)
    items, scores = torch.empty(m, k, dtype=torch.int32), torch.empty(m, k)
    depth = d + (score == "l2")
    blocks = -(-m // BLOCK)
    rows = torch.ones(blocks * BLOCK, depth)  # the further dimension of l2 is 1
    rows[:m, :d] = queries.detach()
    threads.split(
        rank_blocks, blocks, 1,
        rows.view(-1).numpy(), depth, packed.panels, N, indptr, indices, items.numpy(), scores.numpy(),
    )  # fmt: skip
    if score == "l2":
        scores -= queries.detach().square().sum(1, keepdim=True)
    return items, scores
