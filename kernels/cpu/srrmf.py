"""The systems of SRRMF, in float64; `drm_triton.models.srrmf` has the formulas.

Users are independent of each other. So are the matrices of items, but their vectors are not: they are computed one
after the other, from the factors of their matrices.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from drm_triton.kernels.cpu.runtime.jit import inline, kernel
from drm_triton.kernels.cpu.runtime.simd import LANES, ROWS
from drm_triton.kernels.cpu.runtime.symmetric import (
    add_gram,
    add_rows,
    aligned,
    factorise,
    inner_product,
    solve_factorised,
    substitute,
)

CHUNK = 32  # rows of a Gram matrix that are gathered at the same time


class Rows(NamedTuple):
    """Interactions by rows, and the factors of their columns."""

    indptr: NDArray[np.int64]  # [M + 1]
    indices: NDArray[np.int32]  # [nnz]
    table: NDArray[np.float64]  # [N, width]; columns from d on are 0
    d: int


class Common(NamedTuple):
    """What the systems of all users, or of all items, have in common."""

    gram: NDArray[np.float64]  # [width, width]
    total: NDArray[np.float64]  # [width]: of users, the sum of all items
    lam: float
    rho: float


class ItemState(NamedTuple):
    """What the vectors of all items depend on, kept up to date while they change."""

    V: NDArray[np.float64]  # [N, width]
    scores: NDArray[np.float64]  # [M], r_u: sum of the scores of the user's items
    z: NDArray[np.float64]  # [width], U^T r
    total: NDArray[np.float64]  # [width], the sum of all items


@inline
def gram_of_row(rows, u, weights, W, scaled, K):
    """K = sum over the cells of row u of weight * w w^T, on and above the diagonal; w is a row of the table.

    Without weights, all are 1. The further columns of K become 0.
    """
    K[:] = 0.0
    width = rows.table.shape[1]
    for start in range(rows.indptr[u], rows.indptr[u + 1], CHUNK):
        n = min(CHUNK, rows.indptr[u + 1] - start)
        for j in range(n):
            column = rows.indices[start + j]
            weight = weights[column] if weights.size > 0 else 1.0
            for k in range(width):
                W[j, k] = rows.table[column, k]
                scaled[j, k] = weight * rows.table[column, k]
        add_gram(scaled, W, n, K)


@kernel
def fit_users(start, stop, rows, common, solution, losses):
    """Fit users start .. stop - 1, and write their part of the objective: the pair term and their ridge."""
    table, N, width, lam = rows.table, rows.table.shape[0], rows.table.shape[1], common.lam
    W, scaled = aligned(CHUNK, width + LANES, table), aligned(CHUNK, width + LANES, table)
    K, inverse = aligned(width, width + LANES, table), aligned(1, width, table)[0]
    triangle, x, own = aligned(1, ROWS * ROWS, table)[0], aligned(1, width, table)[0], aligned(1, width, table)[0]
    for u in range(start, stop):
        n = rows.indptr[u + 1] - rows.indptr[u]
        if n == 0 or n == N:  # there are no pairs
            solution[u] = 0.0
            losses[u] = 0.0
            continue
        gram_of_row(rows, u, own[:0], W, scaled, K)
        own[:] = 0.0
        for cell in range(rows.indptr[u], rows.indptr[u + 1]):
            for k in range(width):
                own[k] += table[rows.indices[cell], k]
        of_all, of_own = n + lam * (N - n), N - 2 * n - lam * (N - n)
        for i in range(width):
            own_i, rest_i = own[i], common.total[i] - own[i]
            for j in range(i, width):
                own_j, rest_j = own[j], common.total[j] - own[j]
                K[i, j] = of_all * common.gram[i, j] + of_own * K[i, j]
                K[i, j] -= own_i * rest_j + rest_i * own_j + lam * rest_i * rest_j
            K[i, i] += common.rho if i < rows.d else 1.0
            K[i, width] = N * own_i - n * common.total[i]
        for i in range(width):
            own[i] = K[i, width]  # the factorisation overwrites it
        factorise(K, inverse, triangle)
        solve_factorised(K, inverse, x)
        losses[u] = n * (N - n) - inner_product(own, x)
        for k in range(width):
            solution[u, k] = x[k]


@kernel
def factorise_items(start, stop, first, rows, common, weights, factors, inverses):
    """Factorise the matrices of items start .. stop - 1 into factors[item - first] and inverses[item - first]."""
    table, width = rows.table, rows.table.shape[1]
    W, scaled = aligned(CHUNK, width + LANES, table), aligned(CHUNK, width + LANES, table)
    triangle = aligned(1, ROWS * ROWS, table)[0]
    for item in range(start, stop):
        K = factors[item - first]
        gram_of_row(rows, item, weights, W, scaled, K)
        for i in range(width):
            for j in range(i, width):
                K[i, j] += common.gram[i, j]
            K[i, i] += common.rho if i < rows.d else 1.0
        factorise(K, inverses[item - first], triangle)


@kernel
def fit_items(start, stop, rows, common, gram, factors, inverses, state):
    """Fit items start .. stop - 1 one after the other. `gram` is U^T U, and common.total is U^T n."""
    U, width, lam, N = rows.table, rows.table.shape[1], common.lam, state.V.shape[0]
    right, y, x = aligned(1, width, U)[0], aligned(1, width, U)[0], aligned(1, width, U)[0]
    product = aligned(1, width, U)[0]
    for item in range(start, stop):
        K, inverse = factors[item - start], inverses[item - start]
        product[:] = 0.0
        add_rows(state.total, gram, width, product)
        for k in range(width):
            right[k] = (1 - lam) * state.z[k] + lam * product[k] - common.total[k]
        for cell in range(rows.indptr[item], rows.indptr[item + 1]):
            u = rows.indices[cell]
            score = inner_product(U[u], state.total)
            weight = N + (1 - lam) * score - (2 - lam) * state.scores[u]
            for k in range(width):
                right[k] += weight * U[u, k]
        substitute(K, inverse, right, y)
        for i in range(width):
            K[i, width] = y[i]
        solve_factorised(K, inverse, x)
        for k in range(width):
            old = state.V[item, k]
            state.V[item, k] = x[k]
            x[k] -= old
            state.total[k] += x[k]
        for cell in range(rows.indptr[item], rows.indptr[item + 1]):
            u = rows.indices[cell]
            change = inner_product(U[u], x)
            state.scores[u] += change
            for k in range(width):
                state.z[k] += change * U[u, k]
