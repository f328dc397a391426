"""SLIM: the case, optimality, other solvers, options and edge cases."""

import warnings

import numpy as np
import pytest
import scipy.sparse

from drm_triton import Dataset
from drm_triton.data.csr import CSR
from drm_triton.errors import InputError
from drm_triton.kernels.cpu.gram import Similarity, similarities
from drm_triton.kernels.cpu.runtime.threads import set_threads
from drm_triton.kernels.cpu.slim import TOLERANCE, slim_weights
from drm_triton.models import GFCF, SLIM, cooccurrence
from drm_triton.training import preflight
from tests.models.items import CASE, dense, keep_largest, random_interactions


def gram(train: CSR) -> scipy.sparse.csr_matrix:
    return similarities(train, Similarity.of(train), diagonal=True, dtype=np.float32)


def test_weights_of_the_case() -> None:
    W = slim_weights(gram(CASE), 0.1, 0.5, tolerance=1e-9).toarray()
    expected = [
        [0, 0.317647, 0, 0.2, 0.317647],
        [0.317647, 0, 0.317647, 0.2, 0],
        [0, 0.317647, 0, 0.2, 0.317647],
        [0.105882, 0.105882, 0.105882, 0, 0.105882],
        [0.317647, 0, 0.317647, 0.2, 0],
    ]
    np.testing.assert_allclose(W, expected, atol=1e-6)
    residual = dense(CASE) - dense(CASE) @ W
    objective = (residual**2).sum() / 2 + 0.25 * (W**2).sum() + 0.1 * W.sum()
    assert objective == pytest.approx(3.3058824)


@pytest.mark.parametrize(("l1", "l2"), [(0.0, 0.0), (0.1, 0.5), (1.0, 20.0), (4.0, 0.0)])
def test_weights_satisfy_the_conditions_of_the_optimum(l1: float, l2: float) -> None:
    train = random_interactions(200, 90)
    G = dense(train).T @ dense(train)
    W = slim_weights(gram(train), l1, l2).toarray()
    assert (W >= 0).all()
    assert (W.diagonal() == 0).all()
    assert (W > 0).any()
    slope = G - G @ W - l1 - l2 * W
    slope[np.diag_indices(90)] = 0
    bound = TOLERANCE * (G.diagonal() + l2)[:, None] + 1e-9
    assert (slope <= bound).all()
    assert (slope[W > 0] >= -np.broadcast_to(bound, W.shape)[W > 0]).all()


def test_the_same_as_scikit_learn() -> None:
    linear_model = pytest.importorskip("sklearn.linear_model")
    train, l1, l2 = random_interactions(80, 30, 0.2), 0.7, 2.0
    W = slim_weights(gram(train), l1, l2, tolerance=1e-10).toarray()
    for j in range(30):
        X = dense(train)
        target = X[:, j].copy()
        X[:, j] = 0
        net = linear_model.ElasticNet(
            alpha=(l1 + l2) / 80,
            l1_ratio=l1 / (l1 + l2),
            positive=True,
            fit_intercept=False,
            tol=1e-12,
            max_iter=10_000,
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the tolerance is below its rounding
            net.fit(X, target)
        np.testing.assert_allclose(W[:, j], net.coef_, atol=1e-7)


def test_the_same_as_irspack() -> None:
    recommenders = pytest.importorskip("irspack.recommenders")
    train, l1, l2 = random_interactions(80, 30, 0.2), 0.7, 2.0
    other = recommenders.SLIMRecommender(
        train.to_scipy(np.float64), alpha=(l1 + l2) / 80, l1_ratio=l1 / (l1 + l2), n_iter=1000, tol=1e-8
    )
    expected = other.learn().W
    np.testing.assert_allclose(slim_weights(gram(train), l1, l2).toarray(), expected.toarray(), atol=1e-4)


def test_neighbors_are_the_nearest_by_cosine() -> None:
    train, l1, l2 = random_interactions(200, 60), 0.2, 1.0
    G = dense(train).T @ dense(train)
    norm = np.sqrt(np.maximum(G.diagonal(), 1))
    cosine = G / norm[:, None] / norm
    np.fill_diagonal(cosine, 0)
    near = keep_largest(cosine, 5) > 0  # of item j in row j
    W = slim_weights(gram(train), l1, l2, neighbors=5, tolerance=1e-10).toarray()
    assert (W[~near.T] == 0).all()
    slope = G - G @ W - l1 - l2 * W
    assert slope[near.T].max() < 1e-6
    np.testing.assert_allclose(slope[W > 0], 0, atol=1e-6)


def test_all_neighbors_are_the_default() -> None:
    G = gram(random_interactions(50, 40))
    assert (slim_weights(G, 0.1, 1.0, neighbors=39) != slim_weights(G, 0.1, 1.0)).nnz == 0


def test_items_that_share_few_users_have_no_weight() -> None:
    assert slim_weights(gram(CASE), 1.0, 0.5).nnz == 0


def test_equal_items_without_l2() -> None:
    train = CSR.from_pairs(np.array([0, 0, 0, 1, 1, 1]), np.array([0, 1, 2, 0, 1, 2]), (2, 4))
    W = slim_weights(gram(train), 0.5, 0.0).toarray()
    np.testing.assert_allclose(W[:3, :3].sum(0), 0.75)  # any shares of (2 - l1) / 2 are best
    assert W[3].sum() == W[:, 3].sum() == 0


def test_progress_ends_with_all_columns() -> None:
    calls = list[tuple[int, int]]()
    slim_weights(gram(random_interactions(30, 1100)), 0.5, 1.0, progress=lambda *counts: calls.append(counts))
    assert calls == [(1024, 1100), (1100, 1100)]


@pytest.mark.usefixtures("threads")
def test_threads_do_not_change_the_bits() -> None:
    G, found = gram(random_interactions(300, 200)), []
    for threads in (1, 2):
        set_threads(threads)
        found.append(slim_weights(G, 0.1, 1.0))
    assert (found[0] != found[1]).nnz == 0


def test_memory_is_checked_before_the_matrix_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "memory", lambda: {"free": 50})
    with pytest.raises(InputError, match=r"slim needs .* of memory for 4 users and 5 items, but only .* are free"):
        SLIM().fit(Dataset.from_csr(CASE.to_scipy()))


def test_the_stated_memory_suffices_for_uneven_users() -> None:
    users = np.concatenate([np.zeros(20, int), np.arange(1, 20)])
    train = CSR.from_pairs(users, np.concatenate([np.arange(20), np.zeros(19, int)]), (20, 20))
    data = Dataset.from_csr(train.to_scipy())
    G = cooccurrence.cooccurrences(train, Similarity.of(train))
    for model in (SLIM(), GFCF(low_pass_weight=0.0)):
        stated = model.memory_estimate(data)
        assert sum(stated.values()) - stated["interactions"] >= cooccurrence.BYTES * G.nnz
