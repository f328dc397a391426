"""Cold items and users: those without interactions get vectors that are predicted from their attributes.

A ridge regression maps the features of the items with interactions to their vectors,

    minimise over b, B:  sum_i ||v_i - b - x_i B||^2 + ridge ||B||^2,

and x B + b is the vector of a cold item with features x. All items count the same, however many interactions they have.
The ridge has the least error when each item is predicted from the others (leave-one-out), which needs no random folds.

A predicted vector keeps its length, which is below that of learned vectors, as features explain them only in part. With
the scores `dot` and `cosine`, u . (x B + b) is then the score that is to be expected, and cold items compete with the
others at that. docs/cold-items.md has the measurements behind these choices.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import polars as pl
import scipy.sparse
import torch
from numpy.typing import NDArray
from torch import Tensor

from drm_triton.data.attributes import attributes
from drm_triton.data.features import features
from drm_triton.kernels.devices import to_device
from drm_triton.kernels.torch_threads import one_torch_thread

RIDGES = tuple(10.0 ** (half / 2) for half in range(-4, 9))  # features have length 1
LEAVE_ONE_OUT = 8192  # rows that choose the ridge, evenly spread: more do not change the choice

Mask = NDArray[np.bool_]


class LinearMap(NamedTuple):
    """The map x -> b + x B from features to vectors."""

    B: NDArray[np.float64]  # [F, d]
    b: NDArray[np.float64]  # [d]
    ridge: float

    def __call__(self, X: scipy.sparse.csr_matrix) -> NDArray[np.float64]:
        """Return the vectors of rows with features X [n, F]: [n, d]."""
        vectors: NDArray[np.float64] = self.b + X.astype(np.float64) @ self.B
        return vectors


def regress(
    X: scipy.sparse.csr_matrix, Y: NDArray[np.float64], weights: NDArray[np.float64] | None = None
) -> LinearMap:
    """Fit the map from features X [n, F] to vectors Y [n, d], n > 1. The same bits for any number of threads.

    `weights` [n] are those of the rows in the sum of squares. By default they are equal.

    Examples
    --------
    >>> X = scipy.sparse.csr_matrix(np.repeat(np.eye(2), 50, 0))
    >>> Y = X @ np.array([[1.0, 0.0], [0.0, 3.0]])
    >>> regress(X, Y)(X[[0, 99]]).round(2)
    array([[1., 0.],
           [0., 3.]])
    """
    n, X = X.shape[0], X.astype(np.float64)
    w = np.ones(n) if weights is None else weights / weights.mean()
    weighted = scipy.sparse.diags(w) @ X
    x_mean, y_mean = (weighted.T @ np.ones(n) / n)[None], (w[:, None] * Y).mean(0)
    gram = (X.T @ weighted).toarray() - n * x_mean.T * x_mean
    cross = weighted.T @ Y - n * x_mean.T * y_mean
    with one_torch_thread():
        squares, Q = (part.numpy() for part in torch.linalg.eigh(torch.from_numpy(gram)))
        squares, projected = squares.clip(0), _product(Q.T, cross)
        sample = np.unique(np.linspace(0, n - 1, min(n, LEAVE_ONE_OUT)).astype(np.int64))
        Z = X[sample] @ Q - _product(x_mean, Q)

        def left_out_error(ridge: float) -> float:
            """Return the squared error of the sample if each row is predicted without its own vector.

            It is the residual divided by 1 - h, where h is the weight of the row's own vector in its prediction.
            """
            residual = Y[sample] - y_mean - _product(Z / (squares + ridge), projected)
            h = w[sample] * ((Z * Z / (squares + ridge)).sum(1) + 1 / n)
            return float((w[sample] * np.square(residual).sum(1) / np.maximum(1 - h, 1e-9) ** 2).sum())

        ridge = min(RIDGES, key=left_out_error)
        B = _product(Q / (squares + ridge), projected)
        return LinearMap(B, y_mean - _product(x_mean, B)[0], ridge)


def _product(left: NDArray[np.float64], right: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return a product of matrices, by torch, whose number of threads is set to one here."""
    product: NDArray[np.float64] = (torch.from_numpy(left) @ torch.from_numpy(right)).numpy()
    return product


def with_cold_rows(factors: Tensor, table: pl.DataFrame, trained: Mask) -> tuple[Tensor, Mask]:
    """Predict the vectors of rows without interactions from their attributes.

    Parameters
    ----------
    factors : float32 [n, d], learned vectors
    table : table of items or users of a data set, by code
    trained : bool [n], the rows with interactions in the training data

    Returns
    -------
    factors : float32 [n, d], a copy if rows are predicted
    cold : bool [n], the predicted rows: those that are not trained, but have features
    """
    nothing = np.zeros(len(trained), dtype=bool)
    if trained.all() or not attributes(table):
        return factors, nothing
    X = features(table)
    known = X.getnnz(1) > 0
    examples, cold = np.flatnonzero(trained & known), np.flatnonzero(~trained & known)
    if len(examples) < 2 or len(cold) == 0:
        return factors, nothing
    vectors = regress(X[examples], factors.cpu().numpy()[examples].astype(np.float64))(X[cold])
    rows = to_device(torch.from_numpy(cold), factors.device)
    nothing[cold] = True
    return factors.index_copy(0, rows, to_device(torch.from_numpy(vectors.astype(np.float32)), factors.device)), nothing
