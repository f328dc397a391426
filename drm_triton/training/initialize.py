"""Initial factors: small normal values, or a truncated SVD of the interactions (spectral).

Both are bit-identical for any number of threads: they use NumPy's Philox stream and sums in a fixed order. Tables are
multiplied in blocks of BLOCK_ROWS rows. On a CPU, threads share the blocks, and one thread computes the product of a
block: BLAS would add in another order on several.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import numpy as np
import scipy.sparse
import torch
from torch import Tensor

from drm_triton.config import TrainConfig
from drm_triton.data.dataset import CSR
from drm_triton.kernels.cpu.runtime import threads
from drm_triton.kernels.torch_threads import one_torch_thread

NORMAL_SCALE = 0.1  # typical norm of a row: far inside the unit ball
SPECTRAL_NORM = 0.9  # norm of spectral rows: just inside the unit ball
OVERSAMPLING = 16  # extra columns of the subspace (Halko, Martinsson and Tropp, 2011)
POWER_ITERATIONS = 4  # refinements of the subspace: enough for the start of a training
MORE_ITERATIONS = 16  # where the singular vectors are the result
BLOCK_ROWS = 8192  # rows of a table multiplied at a time
BLOCKS_AT_ONCE = 32  # blocks whose inner products are held before they are added up
CPU = torch.device("cpu")


def initial_factors(config: TrainConfig, train: CSR, device: torch.device = CPU) -> tuple[Tensor, Tensor, float]:
    """Return U [M, d], V [N, d] (float32, on the device) and the initial value of Adagrad's state."""
    if config.init == "spectral":
        U, V = spectral(train, config.factors, config.seed, device)
        return U, V, 1.0  # the first step is lr * gradient, not lr * sign(gradient): these rows are good already
    U, V = normal_rows(config, train.shape, (slice(None), slice(None)))
    return U.to(device), V.to(device), 0.0


def normal_rows(config: TrainConfig, shape: tuple[int, int], rows: tuple[slice, slice]) -> tuple[Tensor, Tensor]:
    """Return some rows of U and some of V, of small normal values. `shape` has the numbers of rows of the tables."""
    rng, d = np.random.Generator(np.random.Philox(config.seed)), config.factors
    tables = []
    for n, wanted in zip(shape, rows, strict=True):
        own = range(n)[wanted]
        table = torch.empty(len(own), d)
        for start in range(0, n, BLOCK_ROWS):  # all rows are drawn, but few of the others are held
            block = torch.from_numpy(rng.standard_normal((min(BLOCK_ROWS, n - start), d), dtype=np.float32))
            first, last = max(own.start, start), min(own.stop, start + len(block))
            if first < last:
                table[first - own.start : last - own.start] = block[first - start : last - start]
        tables.append(table.mul_(NORMAL_SCALE / d**0.5))
    return tables[0], tables[1]


def spectral(train: CSR, d: int, seed: int, device: torch.device = CPU) -> tuple[Tensor, Tensor]:
    """Return the leading singular vectors of the degree-normalised interactions, with rows scaled to one norm.

    With degrees D_u and D_i, A = D_u^-1/2 R D_i^-1/2 = P S Q^T. The rows of U = P S^1/2 and V = Q S^1/2 are scaled to
    norm 0.9. Rows without interactions are zero. If d exceeds the rank, the remaining columns are zero.

    Memory: R by rows and by columns, and at most two tables of factors. A is not formed, and tables are
    orthonormalised in place through the small matrix of their inner products.
    """
    with one_torch_thread():
        B, Y, S, W = _subspace(train, d, seed, device, POWER_ITERATIONS)
        of_users, of_items = halves(S, W)
        times(B, of_users)
        times(Y, of_items)
    return on_sphere(B, d), on_sphere(Y, d)


def halves(S: Tensor, W: Tensor) -> tuple[Tensor, Tensor]:
    """Return the matrices that turn B into P S^1/2 and Y into Q S^1/2, see `_subspace`."""
    root = S.sqrt()
    inverse = torch.where(within_rank(S), 1 / root, 0)
    return W * inverse, W * torch.where(inverse > 0, root, 0)


def right_singular_vectors(train: CSR, d: int, seed: int, device: torch.device = CPU) -> Tensor:
    """Return the d leading right singular vectors Q of A, see `spectral`, or as many as its rank: float32 [N, d]."""
    with one_torch_thread():
        _, Y, S, W = _subspace(train, d, seed, device, MORE_ITERATIONS)
        times(Y, W)
    return Y[:, : min(d, int(within_rank(S).sum()))].contiguous()


def _subspace(
    train: CSR, d: int, seed: int, device: torch.device, iterations: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return B [M, r], Y [N, r], S [r] and W [r, r] with A = B Y^T = P S Q^T, P S = B W and Q = Y W, approximately."""
    R = train.to_scipy(np.bool_)
    by_user, by_item = rows_of(R, device), rows_of(R.T.tocsr(), device)
    user_weight, item_weight = inverse_sqrt(train.degrees(), device), inverse_sqrt(train.popularity(), device)
    rank = min(d + OVERSAMPLING, *R.shape)
    rng = np.random.Generator(np.random.Philox(seed))
    Y = torch.from_numpy(rng.standard_normal((R.shape[1], rank), dtype=np.float32)).to(device)
    for _ in range(iterations):
        X = _product(by_user, user_weight, item_weight, Y)
        del Y  # before the next table is allocated
        _orthonormalise(X)
        Y = _product(by_item, item_weight, user_weight, X)
        del X
        _orthonormalise(Y)
    B = _product(by_user, user_weight, item_weight, Y)
    Y /= item_weight[:, None]
    squares, W = _eigenvectors(B)
    return B, Y, squares.flip(0).clamp(min=0).sqrt(), W.flip(1)  # largest first


def within_rank(S: Tensor) -> Tensor:
    """Return which singular values, largest first, are not rounding errors."""
    return S.div(S[0]) > 1e-5


class Rows(NamedTuple):
    """A matrix of zeros and ones by rows: those of row i are in columns indices[indptr[i] : indptr[i + 1]]."""

    indptr: Tensor  # [n + 1]
    indices: Tensor  # [nnz], of the same type as indptr; `embedding_bag` would copy both otherwise
    begin: list[int]  # indptr of the first row of each block, on the host


def rows_of(matrix: scipy.sparse.csr_matrix, device: torch.device) -> Rows:
    """Return a matrix in the form that `row_sums` takes."""
    indptr, indices = CSR(matrix.indptr, matrix.indices, matrix.shape).tensors("cpu")  # they may be read-only
    begin = [*indptr[:-1:BLOCK_ROWS].tolist(), len(indices)]
    return Rows(indptr.to(device), indices.to(indptr.dtype).to(device), begin)


def inverse_sqrt(degree: np.ndarray, device: torch.device) -> Tensor:
    """Return degree^-1/2 of rows, 1 for rows without interactions: float32."""
    return torch.from_numpy(1 / np.sqrt(np.maximum(degree, 1), dtype=np.float32)).to(device)


def for_blocks(function: Callable[[slice], object], starts: Iterable[int], X: Tensor) -> None:
    """Call a function with the blocks of rows of X that begin at `starts`. On a CPU, all threads share the blocks."""
    tasks = [partial(function, slice(start, min(start + BLOCK_ROWS, len(X)))) for start in starts]
    if X.device.type == "cpu":
        threads.run(tasks)
    else:  # a task only launches kernels
        for task in tasks:
            task()


def _product(R: Rows, left: Tensor, right: Tensor, Y: Tensor) -> Tensor:
    """Return diag(left) R diag(right) Y. Y becomes diag(right) Y."""
    Y *= right[:, None]
    return row_sums(R, left, Y)


def row_sums(R: Rows, left: Tensor, Y: Tensor) -> Tensor:
    """Return diag(left) R Y."""
    X = Y.new_empty(len(left), Y.shape[1])

    def of_rows(rows: slice) -> None:
        block = rows.start // BLOCK_ROWS
        offsets = R.indptr[rows.start : rows.stop + 1] - R.begin[block]
        columns = R.indices[R.begin[block] : R.begin[block + 1]]
        sums = torch.nn.functional.embedding_bag(columns, Y, offsets, mode="sum", include_last_offset=True)
        torch.mul(sums, left[rows, None], out=X[rows])

    for_blocks(of_rows, range(0, len(X), BLOCK_ROWS), X)
    return X


def inner_products(X: Tensor, Y: Tensor | None = None) -> Tensor:
    """Return X^T Y in float64, by default X^T X: [r, r]. The blocks are added up in their order."""
    Y = X if Y is None else Y
    total = X.new_zeros(X.shape[1], Y.shape[1], dtype=torch.float64)
    for first in range(0, len(X), BLOCKS_AT_ONCE * BLOCK_ROWS):
        starts = range(first, min(first + BLOCKS_AT_ONCE * BLOCK_ROWS, len(X)), BLOCK_ROWS)
        products = dict[int, Tensor]()

        def of_rows(rows: slice, products: dict[int, Tensor] = products) -> None:
            left = X[rows].double()
            products[rows.start] = left.T @ (left if Y is X else Y[rows].double())

        for_blocks(of_rows, starts, X)
        for start in starts:
            total += products[start]
    return total


def _eigenvectors(X: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues, ascending, and eigenvectors of X^T X. A matrix this small is faster on the CPU."""
    squares, W = torch.linalg.eigh(inner_products(X).cpu())
    return squares.to(X.device), W.to(X.device)


def times(X: Tensor, W: Tensor) -> None:
    """Multiply a table by a small matrix from the right, in place."""
    W = W.to(X.dtype)
    for_blocks(lambda rows: X[rows].copy_(X[rows] @ W), range(0, len(X), BLOCK_ROWS), X)


def _orthonormalise(X: Tensor) -> None:
    """Replace the columns by an orthonormal basis of their span, in place. Surplus columns become 0."""
    for _ in range(2):  # the second pass corrects the rounding errors of the first
        times(X, whitening(*_eigenvectors(X)))


def whitening(squares: Tensor, W: Tensor) -> Tensor:
    """Return the matrix that makes the columns of X orthonormal, from eigenvalues and eigenvectors of X^T X."""
    return W * torch.where(squares > 1e-10 * squares[-1], squares.clamp(min=1e-300).rsqrt(), 0)


def on_sphere(X: Tensor, d: int) -> Tensor:
    """Return the first d columns, padded with zeros, with rows scaled to one norm. Zero rows stay zero."""
    X = torch.nn.functional.pad(X[:, :d], (0, max(0, d - X.shape[1])))
    return X.mul_(SPECTRAL_NORM / X.norm(dim=1, keepdim=True).clamp(min=1e-30))
