"""`solve_rows`: ridge regressions on rows of one table, a system for each user (or item), each solved exactly.

A row u has n cells, with rows w_j of the table V and residuals e_j, and the linear term g. It solves

    (diag(D_u) + c sum_j w_j w_j^T) x = sum_j e_j w_j + g,    D_u = E + L_u.

With the rows W_j = D_u^-1/2 w_j, h = D_u^-1/2 g and x = D_u^-1/2 z, this is (I + c W^T W) z = W^T e + h. If n < d, the
smaller system (I + c W W^T) y = e - c W h gives z = h + W^T y. Both matrices have no eigenvalue below 1, so that the
Cholesky factor exists and rounding errors stay small.

Cost: n d^2 + d^3 / 3 multiply-adds, or n^2 d + n^3 / 3 if n < d, and d^2 to leave the basis in which V^T V is diagonal.
A row is computed in the same way whatever the other rows are.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from drm_triton.kernels.cpu.runtime.jit import inline, kernel
from drm_triton.kernels.cpu.runtime.simd import LANES, ROWS, padded
from drm_triton.kernels.cpu.runtime.symmetric import (
    add_gram,
    add_product,
    add_rows,
    aligned,
    factorise,
    inner_product,
    inner_products,
    solve_factorised,
)

CHUNK = 64  # cells of a long row that are gathered at the same time: they stay in the first level of the cache
NEGLIGIBLE = np.float32(1e-10)  # times the largest entry of D_u: smaller ones are rounding errors of zero
f32 = np.float32


class Systems(NamedTuple):
    """The systems of all rows. The width is d, rounded up to a multiple of LANES; further columns are 0."""

    indptr: NDArray[np.int64]  # [M + 1]
    indices: NDArray[np.int32]  # [nnz], rows of the table
    residual: NDArray[np.float32]  # [nnz], e; with a linear term, it becomes e - c w_j . x
    table: NDArray[np.float32]  # [N, width]
    diagonal: NDArray[np.float32]  # [width], E
    ridge: NDArray[np.float32]  # [M], L
    weight: float  # c
    linear: NDArray[np.float32]  # [M, width], g; or [0, width] for g = 0
    basis: NDArray[np.float32]  # [width, width]; the results are x times this
    solution: NDArray[np.float32]  # [M, d], out
    gain: NDArray[np.float32]  # [M], out: x . (right-hand side), by which the quadratic form falls


class Buffers(NamedTuple):
    """Memory for one row, and for the results of ROWS rows."""

    W: NDArray[np.float32]  # [cells, width + LANES]; with a power of two as stride, few cache lines would be used
    scale: NDArray[np.float32]  # [width], D_u^-1/2
    h: NDArray[np.float32]  # [width]
    b: NDArray[np.float32]  # [width], W^T e + h
    y: NDArray[np.float32]  # [most unknowns]
    K: NDArray[np.float32]  # flat
    inverse: NDArray[np.float32]  # [most unknowns]
    triangle: NDArray[np.float32]  # [ROWS^2]
    x: NDArray[np.float32]  # [ROWS, width]
    rotated: NDArray[np.float32]  # [ROWS, width]


@inline
def gather(table, indices, scale, W):
    """W_j = scale * table[indices[j]] for all j, and 0 in the following rows up to a multiple of 4."""
    n, width = indices.size, scale.size
    for j in range(n):
        row = table[indices[j]]
        for k in range(width):
            W[j, k] = scale[k] * row[k]
    W[n : padded(n, 4), :width] = f32(0)


@inline
def copy(x, y):
    """y = x."""
    for k in range(x.size):
        y[k] = x[k]


@inline
def solve(K, b, weight, buffers, x):
    """Solve (I + weight K) x = b, where the upper half of K is given. x is as long as the unknowns with padding."""
    m, columns = K.shape[0], K.shape[1] - LANES
    for i in range(m):
        for j in range(i // LANES * LANES, columns):
            K[i, j] *= weight
        K[i, i] += f32(1)
        K[i, columns] = b[i]
    inverse = buffers.inverse[:m]
    factorise(K, inverse, buffers.triangle)
    solve_factorised(K, inverse, x)


@inline
def solve_short(indices, e, weight, table, buffers, linear, z):
    """Solve a row with fewer cells than columns: z = h + W^T (I + c W W^T)^-1 (e - c W h)."""
    n, W = indices.size, buffers.W
    gather(table, indices, buffers.scale, W)
    m, width = padded(n, ROWS), padded(n, LANES) + LANES
    K = buffers.K[: m * width].reshape(m, width)
    K[:] = f32(0)
    inner_products(W, n, z.size, K)
    y = buffers.y[: width - LANES]
    for j in range(y.size):
        y[j] = e[j] if j < n else f32(0)
    if linear:
        for j in range(n):
            y[j] -= weight * inner_product(W[j], buffers.h)
    solve(K, y, weight, buffers, y)
    copy(buffers.h, z)
    add_rows(y, W, n, z)
    add_rows(e, W, n, buffers.b)


@inline
def solve_long(indices, e, weight, table, buffers, z):
    """Solve a row with at least as many cells as columns: z = (I + c W^T W)^-1 (W^T e + h)."""
    m, width = z.size, z.size + LANES
    K = buffers.K[: m * width].reshape(m, width)
    K[:] = f32(0)
    for start in range(0, indices.size, CHUNK):
        chunk = indices[start : start + CHUNK]
        gather(table, chunk, buffers.scale, buffers.W)
        add_gram(buffers.W, buffers.W, chunk.size, K)
        add_rows(e[start : start + CHUNK], buffers.W, chunk.size, buffers.b)
    solve(K, buffers.b, weight, buffers, z)


@inline
def solve_row(u, systems, d, buffers, x):
    """Solve the system of row u into x."""
    width, scale, weight = systems.diagonal.size, buffers.scale, f32(systems.weight)
    linear = systems.linear.shape[0] > 0
    largest = f32(0)
    for k in range(d):
        largest = max(largest, systems.diagonal[k])
    least = NEGLIGIBLE * (largest + systems.ridge[u])
    for k in range(width):
        D = systems.diagonal[k] + systems.ridge[u]
        scale[k] = f32(1) / np.sqrt(D) if D > least else f32(0)
    if linear:
        for k in range(width):
            buffers.h[k] = scale[k] * systems.linear[u, k]
    copy(buffers.h, buffers.b)
    indices = systems.indices[systems.indptr[u] : systems.indptr[u + 1]]
    e = systems.residual[systems.indptr[u] : systems.indptr[u + 1]]
    n = indices.size
    if n == 0:
        copy(buffers.h, x)
    elif n < d:
        solve_short(indices, e, weight, systems.table, buffers, linear, x)
    else:
        solve_long(indices, e, weight, systems.table, buffers, x)
    systems.gain[u] = inner_product(buffers.b, x)
    for k in range(width):
        x[k] *= scale[k]
    if linear:
        for j in range(n):
            e[j] -= weight * inner_product(systems.table[indices[j]], x)


@kernel
def solve_rows(start, stop, systems):
    """Solve the systems of rows start .. stop - 1."""
    table = systems.table
    d, width = systems.solution.shape[1], table.shape[1]
    longest = 0
    for u in range(start, stop):
        longest = max(longest, systems.indptr[u + 1] - systems.indptr[u])
    cells = padded(min(longest, max(d, CHUNK)), 4)
    most = max(padded(min(longest, d), LANES), width)
    buffers = Buffers(
        aligned(cells, width + LANES, table),
        aligned(1, width, table)[0],
        aligned(1, width, table)[0],
        aligned(1, width, table)[0],
        aligned(1, most, table)[0],
        aligned(1, most * (most + LANES), table)[0],
        aligned(1, most, table)[0],
        aligned(1, ROWS * ROWS, table)[0],
        aligned(ROWS, width, table),
        aligned(ROWS, width, table),
    )
    for first in range(start, stop, ROWS):
        last = min(first + ROWS, stop)
        for u in range(first, last):
            solve_row(u, systems, d, buffers, buffers.x[u - first])
        buffers.rotated[:] = f32(0)
        add_product(buffers.x, systems.basis, buffers.rotated)
        for u in range(first, last):
            for k in range(d):
                systems.solution[u, k] = buffers.rotated[u - first, k]
