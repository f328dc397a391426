"""The models that bench.quality implements itself: hand-checked values, invariants and equal forms."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from drm_triton.bench import rivals
from drm_triton.data.csr import CSR
from drm_triton.models.ease import ease_weights
from drm_triton.models.rp3beta import rp3beta_weights

# A case of four users and five items, with factors of length 2.
CASE = CSR.from_pairs(np.array([0, 0, 0, 1, 1, 2, 2, 3, 3, 3]), np.array([0, 1, 3, 1, 2, 0, 4, 2, 3, 4]), (4, 5))
U = torch.tensor([[-0.5, 0.25], [0, -0.5], [0.5, 0], [-0.25, 0.5]], dtype=torch.float64)
V = torch.tensor([[-0.75, -0.25], [0.5, -0.75], [0, 0.5], [-0.5, 0], [0.75, -0.5]], dtype=torch.float64)


def random_interactions(n_users: int, n_items: int, density: float = 0.1) -> CSR:
    rows, columns = np.nonzero(np.random.default_rng(0).random((n_users, n_items)) < density)
    return CSR.from_pairs(rows, columns, (n_users, n_items))


def dense(train: CSR) -> Any:
    return train.to_scipy(np.float64).toarray()


def test_ease_and_rp3beta_are_those_of_the_library() -> None:
    train = random_interactions(60, 40)
    ease = rivals.ease(train, 0, 1, lam=5.0).scores(train)
    assert (ease == ease_weights(train, 5.0).scores(train)).all()
    rp3beta = rivals.rp3beta(train, 0, 1, alpha=0.7, beta=0.4, k=5, normalize=True).scores(train)
    np.testing.assert_allclose(rp3beta, dense(train) @ rp3beta_weights(train, 0.7, 0.4, 5, True).toarray(), atol=1e-6)


def ials_loss(U: Tensor, V: Tensor, train: CSR, alpha0: float, lam: float) -> Tensor:
    s, X = U @ V.T, torch.from_numpy(dense(train))
    user_ridge, item_ridge = (X.sum(axis) + alpha0 * X.shape[axis] for axis in (1, 0))
    ridge = (user_ridge @ U.square()).sum() + (item_ridge @ V.square()).sum()
    return (X * (s - 1) ** 2).sum() + alpha0 * s.square().sum() + lam * ridge


def test_ials_half_step_of_the_case() -> None:
    assert ials_loss(U, V, CASE, 0.1, 0.01).item() == pytest.approx(11.01365625)
    users = rivals.ials_half_step(V, CASE, 0.1, 0.01)
    expected = [[-0.900638, -1.57868], [1.598911, 0.462664], [-0.344143, -1.853077], [0.345888, 0.230369]]
    np.testing.assert_allclose(users, expected, atol=1e-6)
    assert ials_loss(users, V, CASE, 0.1, 0.01).item() == pytest.approx(5.6517719)


@pytest.mark.parametrize("d", [2, 6, 40])  # longer and shorter than most lists, and longer than all
def test_ials_half_step_minimises_the_loss(d: int) -> None:
    train = random_interactions(50, 70)
    items = torch.randn(70, d, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    users = rivals.ials_half_step(items, train, 0.2, 0.05).requires_grad_()
    ials_loss(users, items, train, 0.2, 0.05).backward()
    np.testing.assert_allclose(users.grad, 0, atol=1e-9)


def test_ials_half_step_does_not_depend_on_the_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    train = random_interactions(50, 70)
    items = torch.randn(70, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    whole = rivals.ials_half_step(items, train, 0.2, 0.05)
    monkeypatch.setattr(rivals, "LIST_ENTRIES", 1)
    np.testing.assert_allclose(rivals.ials_half_step(items, train, 0.2, 0.05), whole, atol=1e-12)


def test_ials_lowers_the_loss_with_each_epoch_and_repeats() -> None:
    train = random_interactions(50, 70)
    factors = [rivals.ials(train, 0, 1, factors=8, alpha0=0.2, lam=0.05, epochs=epochs) for epochs in (1, 2, 3, 3)]
    losses = [ials_loss(U.double(), V.double(), train, 0.2, 0.05).item() for U, V in factors]
    assert losses[0] > losses[1] > losses[2] == losses[3]
