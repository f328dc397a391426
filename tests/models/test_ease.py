"""EASE: the case, the optimum, both forms, another library, memory."""

import numpy as np
import pytest
import torch

from drm_triton import Dataset
from drm_triton.data.csr import CSR
from drm_triton.errors import InputError
from drm_triton.kernels.cpu import inverse
from drm_triton.kernels.cpu.runtime.threads import set_threads
from drm_triton.models import EASE
from drm_triton.models.ease import by_users, ease_weights, weights_by_items, weights_by_users
from drm_triton.ranking.item_index import ItemWeights
from drm_triton.training import preflight
from tests.models.items import CASE, dense, random_interactions


def full(weights: ItemWeights, n_items: int) -> np.ndarray:
    """Return all weights as one matrix."""
    total = np.zeros((n_items, n_items))
    if weights.sparse is not None:
        total += weights.sparse.toarray()
    if weights.dense is not None:
        total += weights.dense.numpy()
    if weights.low_rank is not None:
        total += (weights.low_rank[0] @ weights.low_rank[1].T).numpy()
    return total


FORMS = (weights_by_items, weights_by_users)


@pytest.mark.parametrize("form", FORMS)
def test_weights_of_the_case(form: "type") -> None:
    B = full(form(CASE, 0.5, torch.float64), 5)
    np.testing.assert_allclose(B[0], [0, 0.526316, -0.491228, 0.222222, 0.526316], atol=1e-6)
    np.testing.assert_allclose(B[3], [0.175439, 0.175439, 0.175439, 0, 0.175439], atol=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_the_residual_is_diagonal(form: "type") -> None:
    train = random_interactions(700, 600)
    G, B = dense(train).T @ dense(train), full(form(train, 3.0, torch.float64), 600)
    residual = (G + 3 * np.eye(len(G))) @ B - G
    np.testing.assert_allclose(residual - np.diag(residual.diagonal()), 0, atol=1e-9)
    np.testing.assert_allclose(B.diagonal(), 0, atol=1e-12)


@pytest.mark.parametrize(("n_users", "n_items"), [(600, 90), (90, 600)])
def test_scores_are_those_of_the_formula(n_users: int, n_items: int) -> None:
    train = random_interactions(n_users, n_items)
    P = np.linalg.inv(dense(train).T @ dense(train) + 5 * np.eye(n_items))
    B = np.eye(n_items) - P / P.diagonal()
    scores = ease_weights(train, 5.0).scores(train)
    np.testing.assert_allclose(scores, dense(train) @ B, atol=1e-4)


def test_a_new_user_has_the_same_scores_in_both_forms() -> None:
    train, new = random_interactions(90, 600), random_interactions(20, 600)
    first, second = (form(train, 5.0).scores(new) for form in FORMS)
    assert by_users(*train.shape)
    np.testing.assert_allclose(first, second, atol=1e-5)


def test_the_same_as_irspack() -> None:
    recommenders = pytest.importorskip("irspack.recommenders")
    train = random_interactions(300, 80)
    other = recommenders.DenseSLIMRecommender(train.to_scipy(np.float64), reg=20.0).learn()
    np.testing.assert_allclose(full(ease_weights(train, 20.0), 80), other.W, atol=1e-5)


@pytest.mark.parametrize("n", [1, 7, 40, 301])  # the last one is cut in halves by LEAF, too
def test_inverse_by_halves(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if n < 300:
        monkeypatch.setattr(inverse, "LEAF", 4)
        monkeypatch.setattr(inverse, "LOWER", 7)
    X = torch.randn(n, 2 * n, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    A, reports = X @ X.T, []
    found = A.tril()  # only the lower half counts
    inverse.invert(found.numpy(), lambda done, total: reports.append((done, total)))
    np.testing.assert_allclose(found @ A, torch.eye(n), atol=1e-9)
    assert torch.equal(found, found.T)
    assert reports == sorted(reports)
    assert n < 7 or len(set(reports)) > 1


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("form", FORMS)
def test_threads_do_not_change_the_bits(form: "type") -> None:
    train, found = random_interactions(400, 700), []
    for threads in (1, 2):
        set_threads(threads)
        torch.set_num_threads(threads)
        found.append(form(train, 10.0).tensors())
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.parametrize("form", FORMS)
def test_a_singular_matrix_is_refused(form: "type") -> None:
    train = CSR.from_pairs(np.repeat(np.arange(4), 3), np.tile(np.arange(3), 4), (4, 3))
    with pytest.raises(InputError, match="singular to rounding with `regularization` 1e-09; choose a larger one"):
        form(train, 1e-9)


@pytest.mark.parametrize(("n_users", "n_items", "needed"), [(4, 5, 140), (2, 5, 144)])
def test_memory_is_checked_first(n_users: int, n_items: int, needed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = EASE()
    assert sum(model.memory(n_users, n_items, 0, 0).values()) == needed
    monkeypatch.setattr(preflight, "memory", lambda: {"free": needed})
    data = Dataset.from_csr(dense_pairs(n_users, n_items))
    with pytest.raises(InputError, match=f"ease needs .* of memory for {n_users} users and {n_items} items"):
        model.fit(data)


def dense_pairs(n_users: int, n_items: int) -> tuple[list[int], list[int]]:
    """Return the interactions of users who have all items, as row pointers and columns."""
    return [n_items * u for u in range(n_users + 1)], list(range(n_items)) * n_users
