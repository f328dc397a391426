"""Strong simple models to compare with: EASE, RP3beta and iALS.

They have the signature of the models in `peers`: fit(train, seed, threads, **options). The item-item models EASE and
RP3beta return a function that scores all items; they have no randomness. iALS returns factors.

X is the binary matrix of interactions [M, N], n_u and n_i are the numbers of interactions of user u and of item i.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.sparse
import torch
from numpy.typing import NDArray
from scipy.linalg import lapack
from torch import Tensor

from drm_triton.bench.peers import Factors
from drm_triton.data.csr import CSR
from drm_triton.errors import InputError
from drm_triton.machine import memory
from drm_triton.models import IALS
from drm_triton.ranking.evaluate import Ranker

Scores = Callable[[NDArray[np.int64]], NDArray[Any]]
"""Function users [m] -> scores of all items [m, N]."""

ROWS = 512  # rows of an [M, N] or [N, N] matrix that are dense at the same time


def ease(train: CSR, seed: int, threads: int, lam: float) -> Scores:
    """Fit EASE (Steck 2019): min_B ||X - X B||^2 + lam ||B||^2 with diag B = 0. A user's scores are X_u B.

    With P = (X^T X + lam I)^-1, the solution is B = I - P / diag P (by columns). If there are fewer users than items,
    the smaller matrix K = (X X^T + lam I)^-1 is inverted instead: X P = K X and lam P = I - X^T K X.
    """
    X = train.to_scipy()
    if X.shape[1] <= X.shape[0]:
        B = ease_weights(X, lam)
        return lambda users: X[users] @ B
    K = _ridge_inverse(X, lam)
    fitted = np.zeros(X.shape[1])  # diag X^T K X
    for start in range(0, len(K), ROWS):
        fitted += X[start : start + ROWS].multiply(K[start : start + ROWS] @ X).sum(0).A1
    diagonal = ((1 - fitted) / lam).astype(X.dtype)
    return lambda users: X[users].toarray() - K[users] @ X / diagonal


def ease_weights(X: scipy.sparse.csr_matrix, lam: float) -> NDArray[Any]:
    """Return the item-item weights B of EASE: [N, N], of the type of X."""
    B = _ridge_inverse(X.T.tocsr(), lam)
    B /= -B.diagonal().copy()
    np.fill_diagonal(B, 0)
    return B


def _ridge_inverse(A: scipy.sparse.csr_matrix, lam: float) -> NDArray[Any]:
    """Return (A A^T + lam I)^-1 for A [n, m]: [n, n]. It needs the memory of one such matrix."""
    n, free = A.shape[0], memory()["free"]
    needed = n * n * A.dtype.itemsize
    if free is not None and needed > 0.8 * free:
        raise InputError(
            f"EASE inverts a matrix of {n:,} x {n:,}, which takes {needed / 2**30:.1f} GiB; only {free / 2**30:.1f} "
            "GiB of memory are free. Keep fewer users or items, or use RP3beta"
        )
    gram = np.empty((n, n), A.dtype)
    for start in range(0, n, ROWS):  # the sparse product may be as large as the dense one
        gram[start : start + ROWS] = (A[start : start + ROWS] @ A.T).toarray()
    gram[np.diag_indices(n)] += lam
    factorise, invert = lapack.get_lapack_funcs(("potrf", "potri"), (gram,))
    # The transpose has the column order of LAPACK, which then works in place. Its upper half is our lower half.
    factor, info = factorise(gram.T, lower=False, overwrite_a=True, clean=False)
    if info:
        raise InputError(f"EASE: the Gram matrix is singular to rounding with `lam` {lam}; choose a larger one")
    inverse: NDArray[Any] = invert(factor, lower=False, overwrite_c=True)[0].T
    for start in range(0, n, ROWS):
        end = min(start + ROWS, n)
        corner = np.tril(inverse[start:end, start:end])
        inverse[start:end, start:end] = corner + np.tril(corner, -1).T
        inverse[start:end, end:] = inverse[end:, start:end].T
    return inverse


def rp3beta(train: CSR, seed: int, threads: int, alpha: float, beta: float, k: int, normalize: bool) -> Scores:
    """Fit RP3beta (Paudel et al. 2017): random walks item, user, item, with less weight on popular items."""
    X = train.to_scipy(np.float64)
    W = rp3beta_weights(X, alpha, beta, k, normalize)
    return lambda users: (X[users] @ W).toarray()


def rp3beta_weights(
    X: scipy.sparse.csr_matrix, alpha: float, beta: float, k: int, normalize: bool
) -> scipy.sparse.csr_matrix:
    """Return the item-item weights of RP3beta: sparse [N, N].

    W_ij = sum_u (X_ui / n_i)^alpha (X_uj / n_u)^alpha / n_j^beta without its diagonal. The k largest weights of each
    row remain; they are divided by their sum if `normalize`. Then the k largest weights of each column remain.
    """
    n_u, n_i = (np.asarray(X.sum(axis)).ravel() for axis in (1, 0))
    to_user = scipy.sparse.diags_array(_power(n_i, -alpha)) @ X.T.tocsr()
    to_item = scipy.sparse.diags_array(_power(n_u, -alpha)) @ X @ scipy.sparse.diags_array(_power(n_i, -beta))
    blocks = []
    for start in range(0, X.shape[1], ROWS):
        block = (to_user[start : start + ROWS] @ to_item).tocoo()
        others = block.col != block.row + start
        entries = (block.data[others], (block.row[others], block.col[others]))
        blocks.append(_largest(scipy.sparse.csr_matrix(entries, shape=block.shape), k))
    W = scipy.sparse.vstack(blocks, "csr")
    if normalize:
        W = scipy.sparse.diags_array(_power(np.asarray(W.sum(1)).ravel(), -1.0)) @ W
    return _largest(W.T.tocsr(), k).T.tocsr()


def _power(n: NDArray[Any], exponent: float) -> NDArray[np.float64]:
    """Return n ** exponent, and 0 for rows or columns without interactions."""
    return np.where(n > 0, np.where(n > 0, n, 1.0) ** exponent, 0.0)


def _largest(W: scipy.sparse.csr_matrix, k: int) -> scipy.sparse.csr_matrix:
    """Return W with the k largest entries of each row. Ties go to the lower column."""
    W.sort_indices()
    kept = np.ones(W.nnz, dtype=bool)
    for start, end in zip(W.indptr[:-1], W.indptr[1:], strict=True):
        if end - start > k:
            kept[start + np.argsort(-W.data[start:end], kind="stable")[k:]] = False
    indptr = np.concatenate([[0], np.cumsum(kept)])[W.indptr]
    return scipy.sparse.csr_matrix((W.data[kept], W.indices[kept], indptr), shape=W.shape)


def ials(train: CSR, seed: int, threads: int, factors: int, alpha0: float, lam: float, epochs: int = 16) -> Factors:
    """Fit iALS by exact alternating steps; see `drm_triton.models.IALS`."""
    model = IALS(
        factors=factors, unobserved_weight=alpha0, regularization=lam, block=factors, seed=seed, threads=threads
    )
    tensors = model.start(train)
    for epoch in range(epochs):
        model.epoch(tensors, train, epoch, lambda done, total: None)
    return model.factors(tensors)


def score_ranker(scores: Scores) -> Ranker:
    """Return a ranker by a function that scores all items. Ties go to the lower item index."""

    def rank(users: NDArray[np.int64], seen: CSR, k: int) -> NDArray[np.int32]:
        blocks = []
        for start in range(0, len(users), ROWS):
            block = scores(users[start : start + ROWS]).astype(np.float32, order="C")
            excluded = seen.take(np.arange(start, start + len(block)))
            block[np.repeat(np.arange(len(block)), excluded.degrees()), excluded.indices] = -np.inf
            blocks.append(_top(torch.from_numpy(block), k))
        return np.concatenate(blocks)

    return rank


def _top(scores: Tensor, k: int) -> NDArray[np.int32]:
    """Return the k best items of each row [m, N], best first, ties to the lower index; -1 in place of -inf."""
    n_items = scores.shape[1]
    bits = (scores + 0.0).view(torch.int32)  # -0.0 + 0.0 is 0.0
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()  # integers in the order of the floats
    keys = (ordered << 32) + torch.arange(n_items - 1, -1, -1)
    items = keys.topk(min(k, n_items), 1).indices
    items[scores.gather(1, items) == -torch.inf] = -1
    padded = torch.nn.functional.pad(items, (0, max(0, k - n_items)), value=-1)
    return padded.to(torch.int32).numpy()
