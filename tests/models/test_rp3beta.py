"""RP3beta: the case, the formula, another library, edge cases."""

import numpy as np
import pytest

from drm_triton.data.csr import CSR
from drm_triton.kernels.cpu.runtime.threads import set_threads
from drm_triton.models.rp3beta import rp3beta_weights
from tests.models.items import CASE, dense, keep_largest, random_interactions


@pytest.mark.parametrize("neighbors", [None, 5])
def test_weights_of_the_case(neighbors: int | None) -> None:
    W = rp3beta_weights(CASE, 1.0, 0.5, neighbors, True).toarray()
    np.testing.assert_allclose(W[0], [0, 0.285714, 0, 0.285714, 0.428571], atol=1e-6)


def formula(train: CSR, alpha: float, beta: float) -> np.ndarray:
    """Return the weights before any is left out."""
    X = dense(train)
    n_u, n_i = np.maximum(X.sum(1), 1), np.maximum(X.sum(0), 1)
    W: np.ndarray = (X / n_i).T ** alpha @ (X / n_u[:, None]) ** alpha / n_i**beta
    np.fill_diagonal(W, 0)
    return W


@pytest.mark.parametrize("normalize_rows", [False, True])
def test_weights_are_those_of_the_formula(normalize_rows: bool) -> None:
    train = random_interactions(60, 40)
    W = keep_largest(formula(train, 0.7, 0.4), 5)
    if normalize_rows:
        W /= np.maximum(W.sum(1), 1e-300)[:, None]
    before = (W > 0).sum()
    W = keep_largest(W.T, 5).T
    assert (W > 0).sum() < before  # the columns' largest are fewer than the rows'
    found = rp3beta_weights(train, 0.7, 0.4, 5, normalize_rows)
    np.testing.assert_allclose(found.toarray(), W, rtol=1e-6)
    assert found.dtype == np.float32


def test_the_same_as_irspack() -> None:
    recommenders = pytest.importorskip("irspack.recommenders")
    train = random_interactions(60, 40)  # its alpha is an exponent of X itself, so that it has to be 1 here
    other = recommenders.RP3betaRecommender(train.to_scipy(np.float64), alpha=1, beta=0.3, top_k=None).learn()
    expected = other.W.toarray()
    np.fill_diagonal(expected, 0)  # irspack leaves the diagonal in
    np.testing.assert_allclose(rp3beta_weights(train, 1.0, 0.3, None, False).toarray(), expected, rtol=1e-5)


def test_users_and_items_without_interactions() -> None:
    train = CSR.from_pairs(np.array([0, 0]), np.array([0, 2]), (2, 4))
    W = rp3beta_weights(train, 1.0, 0.5, 3, True).toarray()
    assert W[0, 2] == W[2, 0] == 1
    assert W.sum() == 2


@pytest.mark.usefixtures("threads")
def test_threads_do_not_change_the_bits() -> None:
    train, found = random_interactions(300, 500), []
    for threads in (1, 2):
        set_threads(threads)
        found.append(rp3beta_weights(train, 0.6, 0.4, 20, True))
    assert (found[0] != found[1]).nnz == 0
