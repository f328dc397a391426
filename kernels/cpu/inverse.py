"""The inverse of a positive definite matrix in place, with the same bits for any number of threads.

The matrix is cut in halves. With the lower left block A21, T = A21 A11^-1 and S = A22 - T A21^T, the inverse is

    P11 = A11^-1 + T^T S^-1 T,    P21 = -S^-1 T,    P22 = S^-1,

and A11 and S are inverted in the same way. That takes n^3 operations, as a Cholesky inverse, most of them in large
products. Each product is cut into tiles of a fixed size, and BLAS computes each of them on one thread. Of a symmetric
product only the lower half is computed. LAPACK divides the work among threads in ways that round differently.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import get_lapack_funcs
from threadpoolctl import threadpool_limits

from drm_triton.kernels.cpu.runtime import threads
from drm_triton.kernels.cpu.runtime.jit import kernel

LEAF = 256  # rows of a matrix that LAPACK inverts at once; for fewer, calls and small products take longer
TILE = 512  # rows of a product that a thread computes at once, at most
PARTS = 4  # tiles of a product, at least
LOWER = 128  # rows of the tiles on the diagonal of a lower half, at most; their upper halves are in vain
TASKS = 16  # tiles between two reports of progress
REFLECTED = 32  # rows and columns that are transposed at once: they stay in the first level of the cache

Matrix = NDArray[np.floating]


@dataclass(frozen=True)
class Product:
    """A task: C = A B with the sign 0, C += A B with 1, C -= A B with -1."""

    A: Matrix
    B: Matrix
    C: Matrix
    sign: int = 0

    def __call__(self) -> None:
        """Compute it."""
        if self.sign == 0:
            np.matmul(self.A, self.B, out=self.C)
        else:
            (np.add if self.sign > 0 else np.subtract)(self.C, self.A @ self.B, out=self.C)

    @property
    def multiply_adds(self) -> int:
        """Number of multiplications and additions."""
        return int(self.A.size * self.B.shape[1])


def invert(A: Matrix, progress: Callable[[int, int], None] | None = None) -> None:
    """Replace a positive definite matrix [n, n], C-contiguous, by its inverse. Only its lower half counts.

    The numbers above the diagonal must be finite. `progress` is called with (done, 100), in percent of the operations.
    Besides A, each thread needs TILE rows.

    Raises
    ------
    numpy.linalg.LinAlgError
        The matrix is not positive definite to rounding.
    """
    done, total = 0, len(A) ** 3 // 2

    def run(products: Iterable[Product]) -> None:
        nonlocal done
        waiting = iter(products)
        while group := list(islice(waiting, TASKS)):
            threads.run(group)
            done += sum(product.multiply_adds for product in group)
            if progress is not None:
                progress(min(100, 100 * done // total), 100)

    with threadpool_limits(1, "blas"):
        _invert(A, 0, len(A), run)


def _invert(A: Matrix, first: int, last: int, run: Callable[[Iterable[Product]], None]) -> None:
    """Invert the block of rows and columns first .. last - 1."""
    n = last - first
    if n <= LEAF:
        _invert_leaf(A[first:last, first:last])
        threads.split(_reflect, -(-n // REFLECTED), 1, A, first, last, last)
        return
    h = -(-n // 2 // LEAF) * LEAF if n > 2 * LEAF else n // 2
    above, below = slice(first, first + h), slice(first + h, last)
    A11, A12, A21, A22 = A[above, above], A[above, below], A[below, above], A[below, below]
    _invert(A, above.start, above.stop, run)
    run(Product(A11[rows], A21.T, A12[rows]) for rows in _tiles(h))  # T^T
    run(Product(A21[rows], A12[:, columns], A22[rows, columns], -1) for rows, columns in _lower(n - h))  # S
    _invert(A, below.start, below.stop, run)
    run(Product(A22[rows], A12.T, A21[rows]) for rows in _tiles(n - h))  # S^-1 T
    run(Product(A12[rows], A21[:, columns], A11[rows, columns], 1) for rows, columns in _lower(h))
    threads.split(_reflect, -(-n // REFLECTED), 1, A, first, above.stop, last)


def _invert_leaf(A: Matrix) -> None:
    """Replace the lower half of a small matrix by that of its inverse."""
    factorise, invert = get_lapack_funcs(("potrf", "potri"), (A,))
    block = A.T.copy(order="F")  # the upper half of what Fortran sees
    for step, option in ((factorise, "overwrite_a"), (invert, "overwrite_c")):
        block, failed = step(block, lower=False, **{option: True})
        if failed:
            raise np.linalg.LinAlgError("the matrix is not positive definite to rounding")
    A[:] = block.T


def _tiles(n: int) -> Iterator[slice]:
    """Yield tiles of n rows, from the last one on: it is the longest one of a lower half."""
    size = min(TILE, -(-n // PARTS))
    return (slice(start, min(start + size, n)) for start in range((n - 1) // size * size, -1, -size))


def _lower(n: int) -> Iterator[tuple[slice, slice]]:
    """Yield rows and columns of tiles that cover the lower half of a matrix [n, n]."""
    for rows in _tiles(n):
        if rows.start > 0:
            yield rows, slice(rows.start)
        yield from _triangle(rows)


def _triangle(rows: slice) -> Iterator[tuple[slice, slice]]:
    """Yield rows and columns of tiles that cover the lower half of a square on the diagonal."""
    if rows.stop - rows.start <= LOWER:
        yield rows, rows
        return
    middle = (rows.start + rows.stop) // 2
    above, below = slice(rows.start, middle), slice(middle, rows.stop)
    yield below, above
    yield from _triangle(above)
    yield from _triangle(below)


@kernel
def _reflect(start, stop, A, first, middle, last):
    """Write P12, P21 and the upper half of P11, in strips start .. stop - 1 of REFLECTED rows.

    Given are S^-1 T in the place of P21, and the lower half of P11. P22 is complete.
    """
    for top in range(first + start * REFLECTED, min(first + stop * REFLECTED, last), REFLECTED):
        bottom = min(top + REFLECTED, last)
        for i in range(max(top, middle), bottom):
            A[i, first:middle] *= -1
        for left in range(first, min(bottom, middle), REFLECTED):
            for j in range(left, min(left + REFLECTED, middle)):
                for i in range(max(top, j + 1), bottom):  # loads, not stores, jump from row to row
                    A[j, i] = A[i, j]
