"""The inverse of a positive definite matrix in place, with the same bits for any number of threads.

LAPACK divides the work among threads in ways that round differently. Here the matrix is cut into tiles of a fixed size,
and one thread computes each product of tiles.
"""

from functools import partial

import torch
from torch import Tensor

from drm_triton.kernels.cpu.runtime import threads
from drm_triton.kernels.torch_threads import one_torch_thread

TILE = 256  # rows and columns


def invert(A: Tensor) -> None:
    """Replace a positive definite matrix [n, n] by its inverse. Only its lower half is read.

    With A = L L^T, the steps are L, then L^-1, then L^-T L^-1. They need two further rows of tiles.

    Raises
    ------
    torch.linalg.LinAlgError
        The matrix is not positive definite to rounding.
    """
    tiles = [slice(start, min(start + TILE, len(A))) for start in range(0, len(A), TILE)]
    with one_torch_thread():
        for k, tile in enumerate(tiles):
            _factorise(A, tile, tiles[k + 1 :])
        for k, tile in enumerate(tiles):
            _invert_row(A, tile, tiles[:k])
        for k, tile in enumerate(tiles):
            _square_row(A, tile, tiles[: k + 1])
        threads.run(partial(_mirror, A, tile) for tile in tiles)


def _factorise(A: Tensor, k: slice, below: list[slice]) -> None:
    """Make column k of L from those before it. In place of L_kk, its inverse is stored."""
    done = A[k, : k.start]
    factor = torch.linalg.cholesky(A[k, k])
    identity = torch.eye(len(factor), dtype=A.dtype)
    A[k, k] = inverse = torch.linalg.solve_triangular(factor, identity, upper=False)

    def row(i: slice) -> None:
        A[i, k] = torch.addmm(A[i, k], A[i, : k.start], done.T, alpha=-1) @ inverse.T
        A[i, i] -= A[i, k] @ A[i, k].T  # so that A_ii is complete when its turn comes

    threads.run(partial(row, i) for i in below)


def _invert_row(A: Tensor, k: slice, left: list[slice]) -> None:
    """Make row k of L^-1 from row k of L and the rows of L^-1 above it."""
    row, inverse = A[k, : k.start].clone(), A[k, k]

    def column(j: slice) -> None:
        A[k, j] = inverse @ (row[:, j.start :] @ A[j.start : k.start, j]).neg_()

    threads.run(partial(column, j) for j in left)


def _square_row(A: Tensor, k: slice, left: list[slice]) -> None:
    """Make row k of L^-T L^-1 from the rows of L^-1 from k on."""
    column_k = A[k.start :, k].T.contiguous()

    def column(j: slice) -> None:
        A[k, j] = column_k @ A[k.start :, j]

    threads.run(partial(column, j) for j in left)


def _mirror(A: Tensor, k: slice) -> None:
    """Write the lower half of column k of tiles to the upper half."""
    A[k, k.stop :] = A[k.stop :, k].T
    A[k, k] = A[k, k].tril() + A[k, k].tril(-1).T
