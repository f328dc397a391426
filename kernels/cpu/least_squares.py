"""`solve_rows` on the CPU, see `drm_triton.kernels.least_squares`: one row at a time, in register tiles.

A row is computed in the same way whatever the other rows are, and whichever thread does it.
"""

from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from drm_triton.kernels.cpu.runtime import threads
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
from drm_triton.kernels.least_squares import NEGLIGIBLE, Systems

CHUNK = 64  # cells of a long row that are gathered at the same time: they stay in the first level of the cache
TASKS = 64  # parts of about the same cost that threads share
CELLS_PER_TASK = 1 << 16  # scores that a thread computes at once
f32 = np.float32


class SystemArrays(NamedTuple):
    """`Systems` and their results, for compiled functions."""

    indptr: NDArray[np.int64]
    indices: NDArray[np.int32]
    residual: NDArray[np.float32]
    table: NDArray[np.float32]
    diagonal: NDArray[np.float32]
    ridge: NDArray[np.float32]
    weight: float
    basis: NDArray[np.float32]
    linear: NDArray[np.float32]  # [0, width] if there is none
    solution: NDArray[np.float32]  # [M, width]
    gain: NDArray[np.float32]  # [M]


class Buffers(NamedTuple):
    """Memory for one row, and for the results of ROWS rows."""

    W: NDArray[np.float32]  # [cells, width + LANES]; with a power of two as stride, few cache lines would be used
    scale: NDArray[np.float32]  # [width], D_u^-1/2
    h: NDArray[np.float32]  # [width]
    b: NDArray[np.float32]  # [width], W^T e + h
    y: NDArray[np.float32]  # [width]
    K: NDArray[np.float32]  # flat
    inverse: NDArray[np.float32]  # [width]
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
    """Y = x."""
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
def solve_row(u, systems, buffers, x):
    """Solve the system of row u into x."""
    width, scale, weight = systems.diagonal.size, buffers.scale, f32(systems.weight)
    linear = systems.linear.shape[0] > 0
    largest = f32(0)
    for k in range(width):
        largest = max(largest, systems.diagonal[k])
    least = f32(NEGLIGIBLE) * (largest + systems.ridge[u])
    for k in range(width):
        D = systems.diagonal[k] + systems.ridge[u]
        scale[k] = f32(1) / np.sqrt(D) if least < D else f32(0)
    if linear:
        for k in range(width):
            buffers.h[k] = scale[k] * systems.linear[u, k]
    copy(buffers.h, buffers.b)
    indices = systems.indices[systems.indptr[u] : systems.indptr[u + 1]]
    e = systems.residual[systems.indptr[u] : systems.indptr[u + 1]]
    n = indices.size
    if n == 0:
        copy(buffers.h, x)
    elif n < width:
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
def solve_range(start, stop, systems):
    """Solve the systems of rows start .. stop - 1."""
    table = systems.table
    width = table.shape[1]
    longest = 0
    for u in range(start, stop):
        longest = max(longest, systems.indptr[u + 1] - systems.indptr[u])
    cells = padded(min(longest, max(width, CHUNK)), 4)
    buffers = Buffers(
        aligned(cells, width + LANES, table),
        aligned(1, width, table)[0],
        aligned(1, width, table)[0],
        aligned(1, width, table)[0],
        aligned(1, width, table)[0],
        aligned(1, width * (width + LANES), table)[0],
        aligned(1, width, table)[0],
        aligned(1, ROWS * ROWS, table)[0],
        aligned(ROWS, width, table),
        aligned(ROWS, width, table),
    )
    for first in range(start, stop, ROWS):
        last = min(first + ROWS, stop)
        for u in range(first, last):
            solve_row(u, systems, buffers, buffers.x[u - first])
        buffers.rotated[:] = f32(0)
        add_product(buffers.x, systems.basis, buffers.rotated)
        for u in range(first, last):
            copy(buffers.rotated[u - first], systems.solution[u])


@kernel
def score_range(start, stop, indptr, indices, U, V, scores):
    """Scores = u . v of each cell of rows start .. stop - 1."""
    for u in range(start, stop):
        for cell in range(indptr[u], indptr[u + 1]):
            total = f32(0)
            for k in range(U.shape[1]):
                total += U[u, k] * V[indices[cell], k]
            scores[cell] = total


def solve_rows(systems: Systems) -> tuple[Tensor, Tensor]:
    """Solve all systems, which are float32; see `drm_triton.kernels.least_squares.solve_rows`."""
    n_rows, width = len(systems.ridge), systems.table.shape[1]
    solution, gain = torch.empty(n_rows, width), torch.empty(n_rows)
    linear = torch.empty(0, width) if systems.linear is None else systems.linear
    tensors = systems._replace(linear=linear)
    arrays = [value.numpy() if isinstance(value, Tensor) else value for value in tensors]
    n = np.diff(arrays[0]).astype(np.float64)
    unknowns = np.minimum(n, width)
    # Relative to the multiply-adds of the Gram matrix, those of the rest are slower.
    cost = n * unknowns * width / 2 + unknowns**3 / 2 + 2 * width**2 + 4 * n * width + 20_000
    threads.run(
        partial(solve_range, start, stop, SystemArrays(*arrays, solution.numpy(), gain.numpy()))
        for start, stop in _shares(cost, TASKS)
    )
    return solution, gain


def cell_scores(indptr: Tensor, indices: Tensor, U: Tensor, V: Tensor) -> Tensor:
    """Return the score u . v of each cell, [nnz]."""
    scores = torch.empty(len(indices))
    arrays = [tensor.numpy() for tensor in (indptr, indices, U, V, scores)]
    shares = _shares(1.0 + np.diff(arrays[0]), 1 + len(indices) // CELLS_PER_TASK)
    threads.run(partial(score_range, start, stop, *arrays) for start, stop in shares)
    return scores


def _shares(cost: NDArray[np.float64], parts: int) -> list[tuple[int, int]]:
    """Split rows into ranges of about the same cost."""
    total = np.concatenate([[0], np.cumsum(cost)])
    bounds = np.searchsorted(total, np.linspace(0, total[-1], parts + 1))
    return [(int(start), int(stop)) for start, stop in pairwise(bounds) if stop > start]
