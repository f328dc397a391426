"""The models that bench.quality implements itself: hand-checked values, invariants and equal forms."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from drm_triton.bench import rivals
from drm_triton.data.csr import CSR
from drm_triton.errors import InputError

# A case of four users and five items.
CASE = CSR.from_pairs(np.array([0, 0, 0, 1, 1, 2, 2, 3, 3, 3]), np.array([0, 1, 3, 1, 2, 0, 4, 2, 3, 4]), (4, 5))


def random_interactions(n_users: int, n_items: int, density: float = 0.1) -> CSR:
    rows, columns = np.nonzero(np.random.default_rng(0).random((n_users, n_items)) < density)
    return CSR.from_pairs(rows, columns, (n_users, n_items))


def dense(train: CSR) -> Any:
    return train.to_scipy(np.float64).toarray()


def test_ease_weights_of_the_case() -> None:
    B = rivals.ease_weights(CASE.to_scipy(np.float64), 0.5)
    np.testing.assert_allclose(B[0], [0, 0.526316, -0.491228, 0.222222, 0.526316], atol=1e-6)
    np.testing.assert_allclose(B[3], [0.175439, 0.175439, 0.175439, 0, 0.175439], atol=1e-6)


def test_ease_residual_is_diagonal() -> None:
    train = random_interactions(700, 600)
    G, B = dense(train).T @ dense(train), rivals.ease_weights(train.to_scipy(np.float64), 3.0)
    residual = (G + 3 * np.eye(len(G))) @ B - G
    np.testing.assert_allclose(residual - np.diag(residual.diagonal()), 0, atol=1e-9)
    assert (B.diagonal() == 0).all()


@pytest.mark.parametrize(("n_users", "n_items"), [(600, 90), (90, 600)])
def test_ease_scores_are_the_same_from_the_smaller_matrix(n_users: int, n_items: int) -> None:
    train = random_interactions(n_users, n_items)
    B = rivals.ease_weights(train.to_scipy(np.float64), 5.0)
    users = np.array([3, 0, 77])
    scores = rivals.ease(train, 0, 1, lam=5.0)(users)
    np.testing.assert_allclose(scores, dense(train)[users] @ B, atol=1e-4)


def test_ease_refuses_what_does_not_fit_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rivals, "memory", lambda: {"free": 50})
    with pytest.raises(InputError, match=r"4 x 4, .* memory are free\. Keep fewer users or items"):
        rivals.ease(CASE, 0, 1, lam=1.0)


def test_rp3beta_weights_of_the_case() -> None:
    W = rivals.rp3beta_weights(CASE.to_scipy(np.float64), alpha=1.0, beta=0.5, k=5, normalize=True).toarray()
    np.testing.assert_allclose(W[0], [0, 0.285714, 0, 0.285714, 0.428571], atol=1e-6)


@pytest.mark.parametrize("normalize", [False, True])
def test_rp3beta_weights_are_those_of_the_dense_formula(normalize: bool) -> None:
    train, alpha, beta, k = random_interactions(60, 40), 0.7, 0.4, 5
    X = dense(train)
    W = (X / X.sum(0)).T ** alpha @ (X / X.sum(1)[:, None]) ** alpha / X.sum(0) ** beta
    np.fill_diagonal(W, 0)
    W[np.arange(40)[:, None], np.argsort(-W, 1, kind="stable")[:, k:]] = 0
    if normalize:
        W /= W.sum(1)[:, None]
    W[np.argsort(-W, 0, kind="stable")[k:], np.arange(40)] = 0
    np.testing.assert_allclose(
        rivals.rp3beta_weights(train.to_scipy(np.float64), alpha, beta, k, normalize).toarray(), W, atol=1e-12
    )
    scores = rivals.rp3beta(train, 0, 1, alpha, beta, k, normalize)(np.array([7, 2]))
    np.testing.assert_allclose(scores, X[[7, 2]] @ W, atol=1e-12)


def test_rp3beta_accepts_users_and_items_without_interactions() -> None:
    train = CSR.from_pairs(np.array([0, 0]), np.array([0, 2]), (2, 4))
    W = rivals.rp3beta_weights(train.to_scipy(np.float64), 1.0, 0.5, 3, True).toarray()
    assert W[0, 2] == W[2, 0] == 1
    assert W.sum() == 2


def ials_loss(U: Tensor, V: Tensor, train: CSR, alpha0: float, lam: float) -> Tensor:
    s, X = U @ V.T, torch.from_numpy(dense(train))
    user_ridge, item_ridge = (X.sum(axis) + alpha0 * X.shape[axis] for axis in (1, 0))
    ridge = (user_ridge @ U.square()).sum() + (item_ridge @ V.square()).sum()
    return (X * (s - 1) ** 2).sum() + alpha0 * s.square().sum() + lam * ridge


def test_ials_lowers_the_loss_with_each_epoch_and_repeats() -> None:
    train = random_interactions(50, 70)
    factors = [rivals.ials(train, 0, 1, factors=8, alpha0=0.2, lam=0.05, epochs=epochs) for epochs in (1, 2, 3, 3)]
    losses = [ials_loss(U.double(), V.double(), train, 0.2, 0.05).item() for U, V in factors]
    assert losses[0] > losses[1] > losses[2] == losses[3]


def test_score_ranker_excludes_seen_items_and_gives_ties_to_the_lower_index() -> None:
    scores = np.array([[0.0, -0.0, 1.0, -2.0, 0.0], [3.0, 3.0, 3.0, -np.inf, -1.0]])
    seen = CSR.from_pairs(np.array([0, 1]), np.array([2, 0]), (2, 5))
    rank = rivals.score_ranker(lambda users: scores[users])
    assert rank(np.array([0, 1]), seen, 4).tolist() == [[0, 1, 4, 3], [1, 2, 4, -1]]
    assert rank(np.array([1]), seen.take(np.array([1])), 7).tolist() == [[1, 2, 4, -1, -1, -1, -1]]


def test_score_ranker_is_a_stable_sort(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rivals, "ROWS", 7)
    scores = np.random.default_rng(0).integers(-3, 4, (20, 30)).astype(np.float32)
    users = np.arange(20)[::-1].copy()
    ranked = rivals.score_ranker(lambda users: scores[users])(users, CSR.empty((20, 30)), 10)
    assert (ranked == np.argsort(-scores[users], 1, kind="stable")[:, :10]).all()
