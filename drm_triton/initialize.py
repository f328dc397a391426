"""Initial factors: small normal, or spectral from a truncated SVD of the interactions.

Both are the same, to the bit, for any number of threads: NumPy's Philox stream, sums in a fixed order, and dense
algebra on one thread.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import scipy.sparse
import torch
from torch import Tensor

from drm_triton.config import TrainConfig
from drm_triton.data.dataset import CSR

NORMAL_SCALE = 0.1  # standard deviation of a row's length: far inside the unit ball
SPECTRAL_NORM = 0.9  # length of spectral rows: just inside the unit ball
OVERSAMPLING = 16  # extra columns of the subspace, and
POWER_ITERATIONS = 4  # its refinements: Halko, Martinsson and Tropp (2011)


def initial_factors(config: TrainConfig, train: CSR) -> tuple[Tensor, Tensor, float]:
    """U [M, d], V [N, d] (float32, on the CPU) and the starting value of Adagrad's state."""
    if config.init == "spectral":
        U, V = spectral(train, config.factors, config.seed)
        return U, V, 1.0  # trusted rows move with care: the first step is lr * gradient, not lr * sign(gradient)
    rng = np.random.Generator(np.random.Philox(config.seed))
    M, N = train.shape
    values = rng.standard_normal((M + N, config.factors), dtype=np.float32)
    factors = torch.from_numpy(values * np.float32(NORMAL_SCALE / config.factors**0.5))
    return factors[:M].clone(), factors[M:].clone(), 0.0


def spectral(train: CSR, d: int, seed: int) -> tuple[Tensor, Tensor]:
    """Leading singular vectors of the degree-normalised interactions, rows scaled to one length.

    With D_u, D_i the degrees, A = D_u^-1/2 R D_i^-1/2 = P S Q^T; U = P S^1/2 and V = Q S^1/2 row by row on the sphere
    of radius 0.9. Rows without interactions start at zero. Where d exceeds the rank, the rest of a row is zero.
    """
    R = train.to_scipy().astype(np.float32)
    user_degree, item_degree = np.diff(R.indptr), np.bincount(R.indices, minlength=R.shape[1])
    A = scipy.sparse.diags(_inverse_sqrt(user_degree)) @ R @ scipy.sparse.diags(_inverse_sqrt(item_degree))
    A = A.tocsr().astype(np.float32)
    At = A.T.tocsr()
    rank = min(d + OVERSAMPLING, *A.shape)
    rng = np.random.Generator(np.random.Philox(seed))
    Y = torch.from_numpy(rng.standard_normal((A.shape[1], rank), dtype=np.float32))
    with one_thread():
        for _ in range(POWER_ITERATIONS):
            Y = _orthonormal(_product(At, _orthonormal(_product(A, Y))))
        B = _product(A, Y)  # A is about B Y^T
        P, S, W = torch.linalg.svd(B, full_matrices=False)
        Q = Y @ W.T
    root = S.clamp(min=0).sqrt()
    return _on_sphere(P * root, d), _on_sphere(Q * root, d)


def _inverse_sqrt(degree: np.ndarray) -> np.ndarray:
    return 1 / np.sqrt(np.maximum(degree, 1))


def _product(A: scipy.sparse.csr_matrix, Y: Tensor) -> Tensor:
    return torch.from_numpy(A @ Y.numpy())


def _orthonormal(Y: Tensor) -> Tensor:
    return torch.linalg.qr(Y).Q


def _on_sphere(X: Tensor, d: int) -> Tensor:
    X = torch.nn.functional.pad(X[:, :d], (0, max(0, d - X.shape[1])))
    norm = X.norm(dim=1, keepdim=True)
    return torch.where(norm > 0, SPECTRAL_NORM * X / norm.clamp(min=1e-30), 0).contiguous()


@contextmanager
def one_thread() -> Iterator[None]:
    """Keep torch on one thread: the order of its sums depends on their number."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
