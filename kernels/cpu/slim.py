"""SLIM: a non-negative elastic net for each item, by coordinate descent over the Gram matrix.

Column j of the weights minimises 1/2 ||x_j - X w||^2 + l2/2 ||w||^2 + l1 ||w||_1 with w >= 0 and w_j = 0. With
G = X^T X and g_i = G_ij - sum_k G_ik w_k, the best value of one coordinate is max(0, g_i + G_ii w_i - l1) / (G_ii + l2).

Only items with G_ij > l1 can have a weight: G and w have no negative entries, so that g_i <= G_ij. Sweeps over these
candidates alternate with sweeps over the support, the coordinates that are not 0. The latter use a dense copy of the
support's part of G. A change of a coordinate costs a pass over a row of G in the former, and over a row of the copy in
the latter. The candidates are visited by falling G_ij, which sets fewer coordinates that later become 0 again.
"""

from functools import partial
from typing import NamedTuple

import numpy as np
import scipy.sparse
from numpy.typing import NDArray

from drm_triton.kernels.cpu.gram import limit_of_largest, matrix
from drm_triton.kernels.cpu.runtime import threads
from drm_triton.kernels.cpu.runtime.jit import inline, kernel

TOLERANCE = 1e-6  # a sweep that changes no weight by more is the last one
MAX_SWEEPS = 10_000  # over the support, between two sweeps over all candidates; and of these
COLUMNS_PER_TASK = 16


class Gram(NamedTuple):
    """X^T X by rows: entries of row i are values[indptr[i] : indptr[i + 1]], in ascending columns."""

    indptr: NDArray[np.int64]  # [N + 1]
    columns: NDArray[np.int32]
    values: NDArray[np.float32]
    diagonal: NDArray[np.float64]  # [N]


@inline
def change_of(g, w, G_ii, l1, l2):
    """Return the change that takes a coordinate to its best value."""
    return max(0.0, g + G_ii * w - l1) / (G_ii + l2) - w


@inline
def subtract_row(gram, item, change, place, g):
    """g -= change * (row of G), where place says which entry of g belongs to a column."""
    for p in range(gram.indptr[item], gram.indptr[item + 1]):
        g[place[gram.columns[p]]] -= change * gram.values[p]


@inline
def copy_support(gram, items, support, place, rank, Q):
    """Write the part of G of the support to Q [size, size + 1]. Entries of other items go to its last column."""
    size = support.size
    for r in range(size):
        rank[support[r]] = r
    for r in range(size):
        item = items[support[r]]
        Q[r] = 0
        for p in range(gram.indptr[item], gram.indptr[item + 1]):
            Q[r, rank[place[gram.columns[p]]]] = gram.values[p]
    for r in range(size):
        rank[support[r]] = -1


@inline
def sweep_support(Q, l1, l2, v, h):
    """Sweep over the support until no weight changes any more: v and h are its w and g."""
    for _ in range(MAX_SWEEPS):
        largest = 0.0
        for r in range(v.size):
            change = change_of(h[r], v[r], Q[r, r], l1, l2)
            if abs(change) > TOLERANCE:
                v[r] += change
                row = Q[r]
                for s in range(v.size):
                    h[s] -= change * row[s]
                largest = max(largest, abs(change))
        if largest == 0:
            return


@kernel
def slim_columns(start, stop, gram, l1, l2, neighbors):
    """Return columns start .. stop - 1 of the weights: lengths, items and values."""
    N = gram.diagonal.size
    lengths = np.zeros(stop - start, np.int64)
    items_out, values_out, total = np.empty(1024, np.int32), np.empty(1024, np.float32), 0
    items, closeness, counts = np.empty(N, np.int64), np.empty(N), np.empty(N)
    w, g, place = np.empty(N), np.empty(N + 1), np.full(N, N, np.int64)  # g[N] stands for items that do not count
    support, rank = np.empty(N, np.int64), np.full(N + 1, -1, np.int64)  # -1 is the last column of the copy
    for j in range(start, stop):
        row, end = gram.indptr[j], gram.indptr[j + 1]
        limit, ties = -np.inf, N
        if neighbors < N:  # the nearest items by cosine; the norm of item j is the same for all
            n = 0
            for p in range(row, end):
                if gram.columns[p] != j:
                    closeness[n] = gram.values[p] / np.sqrt(gram.diagonal[gram.columns[p]])
                    n += 1
            limit, ties = limit_of_largest(closeness[:n], neighbors)
        n, a = 0, 0
        for p in range(row, end):
            i = gram.columns[p]
            if i == j:
                continue
            near = True
            if neighbors < N:
                equal = closeness[n] == limit
                near = closeness[n] > limit or (equal and ties > 0)
                ties -= equal
                n += 1
            if near and gram.values[p] > l1:
                items[a], counts[a] = i, gram.values[p]
                a += 1
        order = np.argsort(-counts[:a], kind="mergesort")
        found = items[:a][order]
        for p in range(a):
            g[p], w[p], place[found[p]] = counts[order[p]], 0.0, p
        for _ in range(MAX_SWEEPS):
            size, largest = 0, 0.0
            for p in range(a):
                i = found[p]
                change = change_of(g[p], w[p], gram.diagonal[i], l1, l2)
                if abs(change) > TOLERANCE:
                    w[p] += change
                    subtract_row(gram, i, change, place, g)
                    largest = max(largest, abs(change))
                if w[p] > 0:
                    support[size] = p
                    size += 1
            if largest == 0:
                break
            Q, v, h = np.empty((size, size + 1)), np.empty(size), np.empty(size)
            copy_support(gram, found, support[:size], place, rank, Q)
            for r in range(size):
                v[r], h[r] = w[support[r]], g[support[r]]
            sweep_support(Q, l1, l2, v, h)
            for r in range(size):
                p = support[r]
                if v[r] != w[p]:
                    subtract_row(gram, found[p], v[r] - w[p], place, g)
                    w[p] = v[r]
        for p in range(a):
            place[found[p]] = N
            if w[p] > 0:
                if total == items_out.size:
                    items_out = np.concatenate((items_out, items_out))
                    values_out = np.concatenate((values_out, values_out))
                items_out[total], values_out[total] = found[p], w[p]
                total += 1
                lengths[j - start] += 1
    return lengths, items_out[:total].copy(), values_out[:total].copy()


def slim_weights(G: scipy.sparse.csr_matrix, l1: float, l2: float, neighbors: int | None) -> scipy.sparse.csr_matrix:
    """Return the weights of SLIM: float32 [N, N], a user's scores are X_u W.

    Parameters
    ----------
    G : float32 [N, N], X^T X with sorted columns
    l1, l2 : weights of the penalties
    neighbors : only this many items, the nearest by cosine, can have a weight in a column; None for all
    """
    N = G.shape[0]
    gram = Gram(G.indptr.astype(np.int64), G.indices, G.data, G.diagonal().astype(np.float64))
    blocks = dict[int, tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.float32]]]()

    def columns(start: int) -> None:
        stop = min(start + COLUMNS_PER_TASK, N)
        blocks[start] = slim_columns(start, stop, gram, float(l1), float(l2), N if neighbors is None else neighbors)

    starts = range(0, N, COLUMNS_PER_TASK)
    threads.run(partial(columns, start) for start in starts)
    lengths, items, values = (np.concatenate([blocks[start][part] for start in starts]) for part in range(3))
    W = matrix(lengths, items, values, (N, N)).T.tocsr()
    W.sort_indices()
    return W
