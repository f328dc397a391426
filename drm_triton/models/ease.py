"""EASE: a linear autoencoder with a closed form."""

import numpy as np
import scipy.sparse
import torch
from torch import Tensor

from drm_triton.data.csr import CSR
from drm_triton.errors import InputError
from drm_triton.kernels.cpu.dense_gram import bitmap_bytes, lower_gram
from drm_triton.kernels.cpu.gram import transposed
from drm_triton.kernels.cpu.inverse import invert
from drm_triton.models.base import ItemModel, Progress
from drm_triton.models.configs import EASEConfig
from drm_triton.ranking.item_index import ItemWeights


class EASE(ItemModel[EASEConfig]):
    """EASE (Steck, 2019): min_B ||X - X B||^2 + regularization ||B||^2 with diag B = 0. A user's scores are X_u B.

    With P = (X^T X + regularization I)^-1, the solution is B = I - P / diag P, by columns. It takes the time of the
    inverse of an N x N matrix, and its memory: 4 N^2 bytes for N items.

    With fewer than N / 2 users, the inverse K of X X^T + regularization I takes its place, and B is never formed. From
    regularization P = I - X^T K X follows B = (X^T K) (X / c) - diag(f / c), with f = diag(X^T K X) and c = 1 - f.
    """

    Config = EASEConfig

    def memory(self, n_users: int, n_items: int, nnz: int, pairs: int) -> dict[str, int]:
        """Return the bytes of the weights, and of the inverse in the form for few users."""
        if by_users(n_users, n_items):
            bits = bitmap_bytes(n_items, n_users)
            return {"inverse": 4 * n_users**2, "users of items as bits": bits, "weights": 8 * n_users * n_items}
        return {"weights": 4 * n_items**2, "items of users as bits": bitmap_bytes(n_users, n_items)}

    def fit_weights(self, fit: CSR, progress: Progress) -> ItemWeights:
        """Return B."""
        return ease_weights(fit, self.config.regularization, progress=progress)


def ease_weights(fit: CSR, regularization: float, progress: Progress | None = None) -> ItemWeights:
    """Return B in the form that takes less memory."""
    form = weights_by_users if by_users(*fit.shape) else weights_by_items
    return form(fit, regularization, progress=progress)


def by_users(n_users: int, n_items: int) -> bool:
    """Return whether the form for few users has the smaller weights."""
    return 2 * n_users < n_items


def weights_by_items(
    fit: CSR, regularization: float, dtype: torch.dtype = torch.float32, progress: Progress | None = None
) -> ItemWeights:
    """Return B as a dense matrix."""
    B = _ridge_inverse(fit, regularization, dtype, progress)
    B /= -B.diagonal().clone()
    return ItemWeights(dense=B.fill_diagonal_(0))


def weights_by_users(
    fit: CSR, regularization: float, dtype: torch.dtype = torch.float32, progress: Progress | None = None
) -> ItemWeights:
    """Return B as a matrix of the rank of the number of users, and a diagonal one."""
    by_item = transposed(fit)
    X = by_item.to_scipy(dtype=np.float64 if dtype == torch.float64 else np.float32)  # [N, M]
    left = X @ _ridge_inverse(by_item, regularization, dtype, progress).numpy()
    items = np.repeat(np.arange(fit.shape[1]), by_item.degrees())
    f = np.bincount(items, left[items, by_item.indices], minlength=fit.shape[1])
    if (f >= 1).any():
        raise _singular(regularization)
    right = (scipy.sparse.diags_array((1 / (1 - f)).astype(X.dtype)) @ X).toarray()
    diagonal = scipy.sparse.diags_array((-f / (1 - f)).astype(X.dtype), format="csr")
    return ItemWeights(sparse=diagonal, low_rank=(torch.from_numpy(left), torch.from_numpy(right)))


def _ridge_inverse(
    interactions: CSR, regularization: float, dtype: torch.dtype, progress: Progress | None = None
) -> Tensor:
    """Return (X^T X + regularization I)^-1: [N, N]. It needs the memory of one such matrix."""
    n = interactions.shape[1]
    inverse = torch.from_numpy(np.zeros((n, n), np.float64 if dtype == torch.float64 else np.float32))
    lower_gram(interactions, inverse.numpy())
    inverse.diagonal().add_(regularization)
    try:
        invert(inverse.numpy(), progress)
    except np.linalg.LinAlgError:
        raise _singular(regularization) from None
    return inverse


def _singular(regularization: float) -> InputError:
    return InputError(
        f"ease: the Gram matrix is singular to rounding with `regularization` {regularization:g}; choose a larger one"
    )
