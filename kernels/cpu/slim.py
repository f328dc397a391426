"""SLIM: a non-negative elastic net for each item, by coordinate descent over the Gram matrix.

Column j of the weights minimises 1/2 ||x_j - X w||^2 + l2/2 ||w||^2 + l1 ||w||_1 with w >= 0 and w_j = 0. Let G = X^T X
and g_i = G_ij - sum_k G_ik w_k. The best value of one coordinate is max(0, g_i + G_ii w_i - l1) / (G_ii + l2).

Only items with G_ij > l1 can have a weight: G and w have no negative entries, so that g_i <= G_ij. Sweeps over these
candidates alternate with sweeps over the support, the coordinates that are not 0. A row of G is read when its
coordinate changes for the first time. Its entries of candidates are kept, and the support's part of these once more.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import scipy.sparse
from numpy.typing import NDArray

from drm_triton.kernels.cpu.gram import limit_of_largest, matrix
from drm_triton.kernels.cpu.runtime import threads
from drm_triton.kernels.cpu.runtime.jit import allocating, inline, kernel

TOLERANCE = 1e-5  # the solution is found when no coordinate is farther than this from its best value
MAX_SWEEPS = 10_000  # over the candidates, and over the support after each of them
COLUMNS_PER_TASK = 16
TASKS_PER_REPORT = 64


class Gram(NamedTuple):
    """X^T X by rows: the entries of row i are values[indptr[i] : indptr[i + 1]], in ascending columns."""

    indptr: NDArray[np.int64]  # [N + 1]
    columns: NDArray[np.int32]
    values: NDArray[np.float32]
    diagonal: NDArray[np.float64]  # [N]


class Penalty(NamedTuple):
    """The penalties, and the tolerance."""

    l1: float
    l2: float
    tolerance: float


@allocating
def doubled(array):
    """Return an array of twice the size with the same first half."""
    return np.concatenate((array, array))


@inline
def best_value(g, w, G_ii, penalty):
    """Return the best value of a coordinate that is w, and whether it has to change."""
    best = max(0.0, g + G_ii * w - penalty.l1) / (G_ii + penalty.l2)
    return best, abs(best - w) > penalty.tolerance or (best == 0 and w > 0)


@inline
def find_candidates(gram, j, l1, nearest, closeness, items, g):
    """Write the candidates of column j to `items` and their G_ij to `g`; return their number.

    They are among the items with at least the closeness of nearest[0], and of those with equal closeness among the
    first nearest[1]. The closeness of all items of row j but j itself is given if nearest[0] is finite.
    """
    limit, ties = nearest
    a, n = 0, 0
    for p in range(gram.indptr[j], gram.indptr[j + 1]):
        i = gram.columns[p]
        if i == j:
            continue
        near = True
        if limit > -np.inf:
            equal = closeness[n] == limit
            near = closeness[n] > limit or (equal and ties > 0)
            ties -= equal
            n += 1
        if near and gram.values[p] > l1:
            items[a], g[a] = i, gram.values[p]
            a += 1
    return a


@inline
def read_row(gram, item, place, row):
    """Write the entries of a row of G to row[place]. Columns that are no candidates have place 0."""
    row[:] = 0
    for p in range(gram.indptr[item], gram.indptr[item + 1]):
        row[place[gram.columns[p]]] = gram.values[p]


@inline
def subtract(change, row, g):
    """Change g as a change of the coordinate of this row does."""
    for p in range(g.size):
        g[p] -= change * row[p]


@inline
def sweep_support(Q, penalty, v, h):
    """Sweep over the support until no coordinate changes: v and h are its w and g, and Q is its part of G."""
    for _ in range(MAX_SWEEPS):
        done = True
        for r in range(v.size):
            best, changes = best_value(h[r], v[r], Q[r, r], penalty)
            if changes:
                subtract(best - v[r], Q[r], h)
                v[r] = best
                done = False
        if done:
            return


@kernel
def slim_columns(start, stop, gram, neighbors, penalty):
    """Return columns start .. stop - 1 of the weights: lengths, items and values."""
    N = gram.diagonal.size
    lengths, found, values, total = np.zeros(stop - start, np.int64), np.empty(64, np.int32), np.empty(64), 0
    rows = np.empty(1024, np.float32)  # rows of G, of the candidates' entries behind one that is not used
    place, items, closeness = np.zeros(N, np.int64), np.empty(N, np.int64), np.empty(N)
    w, g, row_of, support = np.empty(N), np.empty(N), np.empty(N, np.int64), np.empty(N, np.int64)
    for j in range(start, stop):
        nearest = (-np.inf, 0)
        if neighbors < N:  # by cosine; the norm of item j is the same for all
            n = 0
            for p in range(gram.indptr[j], gram.indptr[j + 1]):
                if gram.columns[p] != j:
                    closeness[n] = gram.values[p] / np.sqrt(gram.diagonal[gram.columns[p]])
                    n += 1
            nearest = limit_of_largest(closeness[:n], neighbors)
        a, n_rows = find_candidates(gram, j, penalty.l1, nearest, closeness, items, g), 0
        for p in range(a):
            w[p], row_of[p], place[items[p]] = 0.0, -1, p + 1
        for _ in range(MAX_SWEEPS):
            size, done = 0, True
            for p in range(a):
                best, changes = best_value(g[p], w[p], gram.diagonal[items[p]], penalty)
                if changes:
                    if row_of[p] < 0:
                        while (n_rows + 1) * (a + 1) > rows.size:
                            rows = doubled(rows)
                        row_of[p] = n_rows * (a + 1)
                        n_rows += 1
                        read_row(gram, items[p], place, rows[row_of[p] : row_of[p] + a + 1])
                    subtract(best - w[p], rows[row_of[p] + 1 : row_of[p] + a + 1], g[:a])
                    w[p] = best
                    done = False
                if w[p] > 0:
                    support[size] = p
                    size += 1
            if done:
                break
            Q, v, h = np.empty((size, size)), np.empty(size), np.empty(size)
            for r in range(size):
                v[r], h[r] = w[support[r]], g[support[r]]
                row = rows[row_of[support[r]] + 1 :]
                for s in range(size):
                    Q[r, s] = row[support[s]]
            sweep_support(Q, penalty, v, h)
            for r in range(size):
                p = support[r]
                if v[r] != w[p]:
                    subtract(v[r] - w[p], rows[row_of[p] + 1 : row_of[p] + a + 1], g[:a])
                    w[p] = v[r]
        for p in range(a):
            place[items[p]] = 0
            if w[p] > 0:
                if total == found.size:
                    found, values = doubled(found), doubled(values)
                found[total], values[total] = items[p], w[p]
                total += 1
                lengths[j - start] += 1
    return lengths, found[:total].copy(), values[:total].copy()


def slim_weights(
    G: scipy.sparse.csr_matrix,
    l1: float,
    l2: float,
    neighbors: int | None = None,
    tolerance: float = TOLERANCE,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> scipy.sparse.csr_matrix:
    """Return the weights of SLIM, W float64 [N, N]. A user's scores are X_u W.

    Parameters
    ----------
    G : float32 [N, N], X^T X with ascending columns
    l1, l2 : weights of the penalties
    neighbors : only this many items, the nearest by cosine, can have a weight in a column; None for all
    tolerance : largest distance of a coordinate from its best value, given the others
    progress : called with the number of columns that are done and of all
    """
    N = G.shape[0]
    gram = Gram(G.indptr.astype(np.int64), G.indices, G.data, G.diagonal().astype(np.float64))
    penalty = Penalty(float(l1), float(l2), tolerance)
    blocks = dict[int, tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.float64]]]()

    def columns(start: int) -> None:
        stop = min(start + COLUMNS_PER_TASK, N)
        blocks[start] = slim_columns(start, stop, gram, N if neighbors is None else neighbors, penalty)

    starts = range(0, N, COLUMNS_PER_TASK)
    for first in range(0, len(starts), TASKS_PER_REPORT):
        threads.run(partial(columns, start) for start in starts[first : first + TASKS_PER_REPORT])
        progress(min((first + TASKS_PER_REPORT) * COLUMNS_PER_TASK, N), N)
    lengths, items, values = (np.concatenate([blocks[start][part] for start in starts]) for part in range(3))
    W = matrix(lengths, items, values, (N, N)).T.tocsr()
    W.sort_indices()
    return W
