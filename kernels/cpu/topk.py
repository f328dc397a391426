"""The k best items of each query: blocks of scores by matrix product, and a running selection above a threshold."""

import math

import numpy as np
import torch
from torch import Tensor

from drm_triton.errors import InputError
from drm_triton.kernels.cpu.arrays import FLOAT32, INT32, INT64, check_index, view
from drm_triton.kernels.cpu.jit import inline, kernel
from drm_triton.kernels.interface import Score, check_choice

f32 = np.float32
LOWEST = f32(-np.inf)
QUERY_BLOCK, ITEM_BLOCK = 128, 2048  # a tile of 1 MB stays in the second-level cache


@inline
def worse(score_a, item_a, score_b, item_b):
    """Whether a ranks after b."""
    return score_a < score_b or (score_a == score_b and item_a > item_b)


@inline
def sift_down(scores, items, root, size):
    """Restore a heap whose root is the worst entry."""
    while True:
        child = 2 * root + 1
        if child >= size:
            return
        if child + 1 < size and worse(scores[child + 1], items[child + 1], scores[child], items[child]):
            child += 1
        if not worse(scores[child], items[child], scores[root], items[root]):
            return
        scores[child], scores[root] = scores[root], scores[child]
        items[child], items[root] = items[root], items[child]
        root = child


@kernel
def select(tile, first_item, indptr, indices, cursor, heap_scores, heap_items):
    """Merge a tile of scores of items first_item .. into the queries' heaps; seen items are struck out first."""
    width = tile.shape[1]
    for q in range(tile.shape[0]):
        row, scores, items = tile[q], heap_scores[q], heap_items[q]
        k = scores.size
        while cursor[q] < indptr[q + 1] and indices[cursor[q]] < first_item + width:
            row[indices[cursor[q]] - first_item] = LOWEST
            cursor[q] += 1
        threshold = scores[0]
        for j in range(width):
            if row[j] > threshold:
                scores[0], items[0] = row[j], first_item + j
                sift_down(scores, items, 0, k)
                threshold = scores[0]


@kernel
def sort_heaps(heap_scores, heap_items):
    """Best first; empty places are item -1."""
    for q in range(heap_scores.shape[0]):
        scores, items = heap_scores[q], heap_items[q]
        for size in range(scores.size - 1, 0, -1):
            scores[0], scores[size] = scores[size], scores[0]
            items[0], items[size] = items[size], items[0]
            sift_down(scores, items, 0, size)


def top_k(
    queries: Tensor, V: Tensor, k: int, score: Score, seen: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """The k best items of each query row, best first, ties to the lower item index.

    Parameters
    ----------
    queries : float32 [m, d]; V : float32 [N, d], finite
    seen : (indptr int64 [m + 1], indices int32 ascending within a row): items of each query row that are left out;
        row i of the mask is indices[indptr[i] : indptr[i + 1]], so a slice of a larger indptr serves as it is.

    Returns
    -------
    items : int32 [m, k], scores : [m, k]; where fewer than k items remain, item -1 with score -inf.
    """
    name = "top_k"
    check_choice(name, "score", score, Score)
    view(name, "queries", queries, (None, None), FLOAT32)
    view(name, "V", V, (None, queries.shape[1]), FLOAT32)
    if k < 1:
        raise InputError(f"{name}: k must be at least 1, got {k}")
    for label, factors in (("queries", queries), ("V", V)):
        if not math.isfinite(factors.sum().item()) and not factors.isfinite().all():
            raise InputError(f"{name}: {label} holds values that are not finite (NaN or infinity)")
    m, N = len(queries), len(V)
    if seen is None:
        indptr, indices = np.zeros(m + 1, np.int64), np.zeros(0, np.int32)
    else:
        indptr = view(name, "the indptr of seen", seen[0], (m + 1,), INT64)
        indices = view(name, "the indices of seen", seen[1], (None,), INT32)
        check_index(name, "seen items", indices[indptr[0] : indptr[-1]], N)
    items, scores = torch.full((m, k), 2**31 - 1, dtype=torch.int32), torch.full((m, k), -math.inf)
    cursor = indptr[:-1].copy()
    factors = V if score == "dot" else 2 * V
    norms = None if score == "dot" else V.square().sum(1)
    for q in range(0, m, QUERY_BLOCK):
        block = queries[q : q + QUERY_BLOCK]
        rows = slice(q, q + len(block))
        for i in range(0, N, ITEM_BLOCK):
            tile = block @ factors[i : i + ITEM_BLOCK].T
            if norms is not None:
                tile -= norms[i : i + ITEM_BLOCK]
            select(
                tile.numpy(),
                i,
                indptr[q : q + len(block) + 1],
                indices,
                cursor[rows],
                scores.numpy()[rows],
                items.numpy()[rows],
            )
        sort_heaps(scores.numpy()[rows], items.numpy()[rows])
    items[scores == -math.inf] = -1
    if score == "l2":
        scores -= queries.square().sum(1, keepdim=True)
    return items, scores
