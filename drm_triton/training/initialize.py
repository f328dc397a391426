"""Initial factors: small normal values, or a truncated SVD of the interactions (spectral).

Both are bit-identical for any number of threads: they use NumPy's Philox stream, sums in a fixed order, and dense
algebra on one thread.
"""

import numpy as np
import scipy.sparse
import torch
from torch import Tensor

from drm_triton.config import TrainConfig
from drm_triton.data.dataset import CSR
from drm_triton.kernels.torch_threads import one_torch_thread

NORMAL_SCALE = 0.1  # typical norm of a row: far inside the unit ball
SPECTRAL_NORM = 0.9  # norm of spectral rows: just inside the unit ball
OVERSAMPLING = 16  # extra columns of the subspace (Halko, Martinsson and Tropp, 2011)
POWER_ITERATIONS = 4  # refinements of the subspace
BLOCK_ROWS = 8192  # rows of a table multiplied at a time


def initial_factors(config: TrainConfig, train: CSR) -> tuple[Tensor, Tensor, float]:
    """Return U [M, d], V [N, d] (float32, on the CPU) and the initial value of Adagrad's state."""
    if config.init == "spectral":
        U, V = spectral(train, config.factors, config.seed)
        return U, V, 1.0  # the first step is lr * gradient, not lr * sign(gradient): these rows are good already
    rng = np.random.Generator(np.random.Philox(config.seed))
    U, V = (torch.from_numpy(rng.standard_normal((n, config.factors), dtype=np.float32)) for n in train.shape)
    for X in (U, V):
        X *= NORMAL_SCALE / config.factors**0.5
    return U, V, 0.0


def spectral(train: CSR, d: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return the leading singular vectors of the degree-normalised interactions, with rows scaled to one norm.

    With degrees D_u and D_i, A = D_u^-1/2 R D_i^-1/2 = P S Q^T. The rows of U = P S^1/2 and V = Q S^1/2 are scaled to
    norm 0.9. Rows without interactions are zero. If d exceeds the rank, the remaining columns are zero.

    Memory: R and at most two tables of factors. A is not formed, and tables are orthonormalised in place through the
    small matrix of their inner products.
    """
    R = train.to_scipy()
    user_weight = _inverse_sqrt(np.diff(R.indptr))
    item_weight = _inverse_sqrt(train.popularity())
    rank = min(d + OVERSAMPLING, *R.shape)
    rng = np.random.Generator(np.random.Philox(seed))
    Y = torch.from_numpy(rng.standard_normal((R.shape[1], rank), dtype=np.float32))
    with one_torch_thread():
        for _ in range(POWER_ITERATIONS):
            X = _product(R, user_weight, item_weight, Y)
            del Y  # before the next table is allocated
            _orthonormalise(X)
            Y = _product(R.T, item_weight, user_weight, X)
            del X
            _orthonormalise(Y)
        B = _product(R, user_weight, item_weight, Y)  # A is approximately B Y^T, with B = P S W^T
        Y /= item_weight[:, None]
        squares, W = torch.linalg.eigh(_inner_products(B))
        S, W = squares.flip(0).clamp(min=0).sqrt(), W.flip(1)  # largest first
        root = S.sqrt()
        # Columns beyond the rank contain only rounding errors.
        inverse = torch.where(S.div(S[0]) > 1e-5, 1 / root, 0)
        _times(B, W * inverse)
        _times(Y, W * torch.where(inverse > 0, root, 0))
    return _on_sphere(B, d), _on_sphere(Y, d)


def _inverse_sqrt(degree: np.ndarray) -> Tensor:
    return torch.from_numpy(1 / np.sqrt(np.maximum(degree, 1), dtype=np.float32))


def _product(R: scipy.sparse.spmatrix, left: Tensor, right: Tensor, Y: Tensor) -> Tensor:
    """Return diag(left) R diag(right) Y. Y becomes diag(right) Y."""
    Y *= right[:, None]
    X = torch.from_numpy(R @ Y.numpy())
    X *= left[:, None]
    return X


def _inner_products(X: Tensor) -> Tensor:
    """Return X^T X in float64: [r, r]."""
    total = torch.zeros(X.shape[1], X.shape[1], dtype=torch.float64)
    for block in X.split(BLOCK_ROWS):
        total += block.T.double() @ block.double()
    return total


def _times(X: Tensor, W: Tensor) -> None:
    """Multiply a table by a small matrix from the right, in place."""
    W = W.to(X.dtype)
    for block in X.split(BLOCK_ROWS):
        block.copy_(block @ W)


def _orthonormalise(X: Tensor) -> None:
    """Replace the columns by an orthonormal basis of their span, in place. Surplus columns become 0."""
    for _ in range(2):  # the second pass corrects the rounding errors of the first
        squares, W = torch.linalg.eigh(_inner_products(X))
        _times(X, W * torch.where(squares > 1e-10 * squares[-1], squares.clamp(min=1e-300).rsqrt(), 0))


def _on_sphere(X: Tensor, d: int) -> Tensor:
    """Return the first d columns, padded with zeros, with rows scaled to one norm. Zero rows stay zero."""
    X = torch.nn.functional.pad(X[:, :d], (0, max(0, d - X.shape[1])))
    return X.mul_(SPECTRAL_NORM / X.norm(dim=1, keepdim=True).clamp(min=1e-30))
