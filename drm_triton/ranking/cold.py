"""Cold items and users: those without interactions get vectors that are predicted from their attributes.

A ridge regression maps the features of the items with interactions to their vectors,

    minimise over b, B:  sum_i ||v_i - b - x_i B||^2 + ridge ||B||^2,

and x B + b is the vector of a cold item with features x. All items count the same, however many interactions they have.
The ridge has the least error when each item is predicted from the others (leave-one-out), which needs no random folds.

A cold item is ranked by the score that is to be expected of it. With the scores `dot` and `cosine` this is
u . (x B + b): the vector keeps its length, which is below that of learned vectors, as features explain them only in
part. With `l2`, the expected squared distance is that to x B + b plus the variance of the vectors around their
predictions. So the predicted vectors get a component of that variance in the direction where users have the least.
docs/cold-items.md has the measurements behind these choices.
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
from drm_triton.data.dataset import Dataset
from drm_triton.data.features import features
from drm_triton.kernels.devices import to_device
from drm_triton.kernels.torch_threads import one_torch_thread
from drm_triton.names import Score
from drm_triton.training.initialize import inner_products

RIDGES = tuple(10.0 ** (half / 2) for half in range(-4, 9))  # features have length 1
LEAVE_ONE_OUT = 8192  # rows that choose the ridge, evenly spread: more do not change the choice

Mask = NDArray[np.bool_]


class LinearMap(NamedTuple):
    """The map x -> b + x B from features to vectors."""

    B: NDArray[np.float64]  # [F, d]
    b: NDArray[np.float64]  # [d]
    ridge: float
    variance: float  # mean squared distance of a vector from its prediction by the other rows

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
            """Return the mean squared error of the sample if each row is predicted without its own vector.

            It is the residual divided by 1 - h, where h is the weight of the row's own vector in its prediction.
            """
            residual = Y[sample] - y_mean - _product(Z / (squares + ridge), projected)
            h = w[sample] * ((Z * Z / (squares + ridge)).sum(1) + 1 / n)
            return float(np.average(np.square(residual).sum(1) / np.maximum(1 - h, 1e-9) ** 2, weights=w[sample]))

        ridge = min(RIDGES, key=left_out_error)
        B = _product(Q / (squares + ridge), projected)
        return LinearMap(B, y_mean - _product(x_mean, B)[0], ridge, left_out_error(ridge))


def _product(left: NDArray[np.float64], right: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return a product of matrices, by torch, whose number of threads is set to one here."""
    product: NDArray[np.float64] = (torch.from_numpy(left) @ torch.from_numpy(right)).numpy()
    return product


class Vectors(NamedTuple):
    """The vectors that rank, and which of them are predicted."""

    users: Tensor  # float32 [M, d]
    items: Tensor  # float32 [N, d]
    cold_users: Mask  # bool [M]
    cold_items: Mask  # bool [N]


def with_cold_rows(U: Tensor, V: Tensor, data: Dataset, score: Score) -> Vectors:
    """Predict the vectors of the users and items without training interactions from their attributes, if they have any.

    Parameters
    ----------
    U, V : float32 [M, d] and [N, d], learned vectors; they are not changed
    data : data set of the model
    score : score of the vectors
    """
    trained_users, trained_items = data.train.degrees() > 0, data.popularity > 0
    # A user with held-out interactions only is folded in when needed.
    users, cold_users, _ = _predicted(U, data.users, trained_users, data.liked.degrees() == 0)
    items, cold_items, variance = _predicted(V, data.items, trained_items, ~trained_items)
    if score == "l2" and cold_items.any():
        rows = to_device(torch.from_numpy(np.flatnonzero(cold_items)), V.device)
        direction = _least_direction(U[to_device(torch.from_numpy(np.flatnonzero(trained_users)), U.device)])
        component = (items[rows] * direction).sum(1, keepdim=True)
        items[rows] += (variance**0.5 - component) * direction
    return Vectors(users, items, cold_users, cold_items)


def _predicted(factors: Tensor, table: pl.DataFrame, trained: Mask, without: Mask) -> tuple[Tensor, Mask, float]:
    """Predict the rows `without` interactions that have features from the trained ones.

    Returns the factors, the mask of the predicted rows, and the variance of the prediction.
    """
    nothing = np.zeros(len(trained), dtype=bool)
    if not without.any() or not attributes(table):
        return factors, nothing, 0.0
    X = features(table, trained)
    known = X.getnnz(1) > 0
    examples, cold = np.flatnonzero(trained & known), without & known
    if len(examples) < 2 or not cold.any():
        return factors, nothing, 0.0
    found = regress(X[examples], factors.cpu().numpy()[examples].astype(np.float64))
    vectors = torch.from_numpy(found(X[cold]).astype(np.float32))
    rows = torch.from_numpy(np.flatnonzero(cold))
    device = factors.device
    return factors.index_copy(0, to_device(rows, device), to_device(vectors, device)), cold, found.variance


def _least_direction(U: Tensor) -> Tensor:
    """Return the direction [d] in which users U [m, d] have the least squares, away from their mean."""
    with one_torch_thread():
        direction: Tensor = torch.linalg.eigh(inner_products(U).cpu())[1][:, 0].to(U.device, U.dtype)
        return -direction if (U * direction).double().sum() > 0 else direction


def flag_cold(frame: pl.DataFrame, cold: dict[str, pl.Series]) -> pl.DataFrame:
    """Add a column `cold`, true in rows with a cold id, if there are any cold ids.

    Parameters
    ----------
    frame : recommendations or similar items
    cold : ids of cold users and items, by the column of the frame that may hold them

    Examples
    --------
    >>> frame = pl.DataFrame({"user": ["ann", "ann"], "item": ["x", "new"]})
    >>> flag_cold(frame, {"item": pl.Series(["new"])})["cold"].to_list()
    [False, True]
    """
    if not any(len(ids) for ids in cold.values()):
        return frame
    found = [pl.col(name).is_in(ids.cast(frame[name].dtype).implode()) for name, ids in cold.items()]
    return frame.with_columns(cold=pl.any_horizontal(found))
