"""SRRMF: the case of four users, the objective by its definition, invariants."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from drm_triton import Dataset
from drm_triton.data.csr import CSR
from drm_triton.kernels.cpu.runtime.threads import set_threads
from drm_triton.models import SRRMF
from drm_triton.models import srrmf as module
from drm_triton.models.srrmf import item_step, items_of, user_step
from tests.models.test_als import CASE, U, V, by_item, random_interactions

LAM, RHO = 0.3, 0.2


def objective(U: Tensor, V: Tensor, rows: CSR, lam: float, rho: float = 0.0) -> Tensor:
    """Return the objective pair by pair, by its definition."""
    total = rho * (U.square().sum() + V.square().sum())
    for user, s in enumerate(U @ V.T):
        has = torch.zeros(len(V), dtype=torch.bool)
        has[torch.from_numpy(rows.row(user)).long()] = True
        pairs = 1 - s[has][:, None] + s[~has]
        others = s[~has][:, None] - s[~has]
        total = total + pairs.square().sum() + lam / 2 * others.square().sum()
    return total


def normal(*shape: int, seed: int = 1) -> Tensor:
    return 0.3 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_users_of_the_case() -> None:
    assert objective(U.double(), V.double(), CASE, LAM).item() == pytest.approx(24.583203125)
    users, loss = user_step(items_of(V.double()), CASE, LAM, 0.0)
    expected = [[-0.915482, -0.948392], [0.672853, 0.635824], [-0.256211, -0.749224], [0.610961, 1.275831]]
    np.testing.assert_allclose(users, expected, atol=1e-6)
    assert objective(users, V.double(), CASE, LAM).item() == pytest.approx(10.6088197)
    assert loss == pytest.approx(10.6088197)


def test_items_of_the_case() -> None:
    items = item_step(U.double(), V.double(), CASE, by_item(CASE), LAM, 0.0)
    expected = [[1.139906, 0.279177], [-1.380948, -2.109114], [-0.141828, -1.275732], [-1.041114, 0.372082]]
    np.testing.assert_allclose(items, [*expected, [1.424428, 0.688228]], atol=1e-6)
    losses = [objective(U.double(), torch.cat([items[:i], V[i:].double()]), CASE, LAM).item() for i in range(1, 6)]
    assert losses == pytest.approx([20.1909959, 15.0826830, 10.7058097, 9.8899405, 8.0508906])


@pytest.mark.parametrize("d", [3, 16, 37])
def test_the_gradient_after_the_user_step_is_zero(d: int) -> None:
    rows, items = random_interactions(20, 60, 0.3), normal(60, d)
    users, loss = user_step(items_of(items), rows, LAM, RHO)
    assert (users[:2] == 0).all()  # one has no items, the other one all of them
    users.requires_grad_()
    expected = objective(users, items, rows, LAM, RHO)
    expected.backward()
    np.testing.assert_allclose(users.grad, 0, atol=1e-9)
    assert loss + RHO * items.square().sum().item() == pytest.approx(expected.item(), rel=1e-10)


@pytest.mark.parametrize("lam", [0.05, 1.0])
def test_each_item_solves_its_proximal_problem(lam: float) -> None:
    """The objective, and the distance to the old item in the scores of the users who do not have it."""
    rows, users, old = random_interactions(20, 15, 0.3), normal(20, 4), normal(15, 4, seed=2)
    new = item_step(users, old, rows, by_item(rows), lam, RHO)
    X = torch.from_numpy(rows.to_scipy(np.float64).toarray())
    last = objective(users, old, rows, lam, RHO).item()
    for item in range(15):
        v = new[item].clone().requires_grad_()
        items = torch.cat([new[:item], v[None], old[item + 1 :]])
        loss = objective(users, items, rows, lam, RHO)
        distance = (lam * (1 - X[:, item]) * (users @ (v - old[item])).square()).sum()
        (loss + distance).backward()
        np.testing.assert_allclose(v.grad, 0, atol=1e-9)
        assert loss.item() <= last + 1e-9
        last = loss.item()


def test_the_item_step_does_not_depend_on_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, users, items = random_interactions(20, 15, 0.3), normal(20, 4), normal(15, 4, seed=2)
    whole = item_step(users, items, rows, by_item(rows), LAM, RHO)
    monkeypatch.setattr(module, "BLOCK_BYTES", 4 * 8 * 16 * 32)
    monkeypatch.setattr(module, "ROWS_PER_TASK", 3)
    assert torch.equal(item_step(users, items, rows, by_item(rows), LAM, RHO), whole)


def test_the_loss_falls_in_every_epoch_and_is_the_objective() -> None:
    rows, model = random_interactions(40, 30, 0.2), SRRMF(factors=5, confidence=4.0, regularization=0.5)
    tensors, last = model.start(rows), np.inf
    for number in range(5):
        loss = model.epoch(tensors, rows, number, lambda done, total: None)["loss"]
        expected = objective(tensors["user_factors"], tensors["item_factors"], rows, 0.25, 0.5).item()
        assert loss == pytest.approx(expected, rel=1e-10)
        assert loss < last
        last = loss


def test_same_bits_whatever_the_threads(threads: None) -> None:
    rows, model, results = random_interactions(200, 90), SRRMF(factors=20), []
    for number in (1, 2):
        set_threads(number)
        torch.set_num_threads(number)
        tensors: dict[str, Any] = model.start(rows)
        for epoch in range(2):
            model.epoch(tensors, rows, epoch, lambda done, total: None)
        results.append(tensors)
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_new_users_are_fitted_as_users_are_and_have_the_same_bits_in_any_batch() -> None:
    rows = random_interactions(40, 60, 0.2)
    model = SRRMF(factors=6).fit(Dataset.from_csr(rows.to_scipy(), n_items=60))
    together = model.fold_in_items(rows)
    np.testing.assert_allclose(together, model.user_factors, rtol=1e-4, atol=1e-5)
    alone = torch.cat([model.fold_in_items(rows.take(np.array([user]))) for user in range(40)])
    assert torch.equal(alone, together)


@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (1, 4)])
def test_users_with_all_items_have_no_pairs(shape: tuple[int, int]) -> None:
    rows = CSR.from_pairs(*np.nonzero(np.ones(shape)), shape)
    model = SRRMF(factors=3)
    tensors = model.start(rows)
    assert model.epoch(tensors, rows, 0, lambda done, total: None)["loss"] == pytest.approx(0, abs=1e-20)
    assert (tensors["user_factors"] == 0).all()
