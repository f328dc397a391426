"""Alternating least squares: the case of four users, invariants, equal forms and other libraries."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from drm_triton import Dataset
from drm_triton.data.csr import CSR
from drm_triton.kernels.cpu.runtime.threads import set_threads
from drm_triton.models import IALS, WMF
from drm_triton.models.als import ALSModel, Cells, Weights, block_step, half_step, rotate
from drm_triton.training.initialize import inner_products

# A case of four users and five items, with factors of length 2.
CASE = CSR.from_pairs(np.array([0, 0, 0, 1, 1, 2, 2, 3, 3, 3]), np.array([0, 1, 3, 1, 2, 0, 4, 2, 3, 4]), (4, 5))
U = torch.tensor([[-0.5, 0.25], [0, -0.5], [0.5, 0], [-0.25, 0.5]])
V = torch.tensor([[-0.75, -0.25], [0.5, -0.75], [0, 0.5], [-0.5, 0], [0.75, -0.5]])

WEIGHTS = Weights(every=0.2, observed=1.5, target=2.0)


def random_interactions(n_users: int, n_items: int, density: float = 0.1, seed: int = 0) -> CSR:
    """Return random interactions. User 0 has no items, user 1 all of them, and item 0 has only that user."""
    chosen = np.random.default_rng(seed).random((n_users, n_items)) < density
    chosen[:, 0], chosen[0], chosen[1] = False, False, True
    users, items = np.nonzero(chosen)
    return CSR.from_pairs(users, items, (n_users, n_items))


def full(n_users: int, n_items: int) -> CSR:
    """Return all interactions."""
    users, items = np.nonzero(np.ones((n_users, n_items)))
    return CSR.from_pairs(users, items, (n_users, n_items))


def normal(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def by_item(rows: CSR) -> CSR:
    return CSR.from_any(rows.to_scipy().T.tocsr(), rows.shape[0])


def cells_of(rows: CSR, ridge: Tensor) -> Cells:
    return Cells(*rows.tensors("cpu"), ridge)


def objective(U: Tensor, V: Tensor, rows: CSR, weights: Weights, ridges: tuple[Tensor, Tensor]) -> Tensor:
    """Return the objective by its definition, in float64."""
    s, X = U.double() @ V.double().T, torch.from_numpy(rows.to_scipy(np.float64).toarray())
    observed = X * (weights.observed * s.square() - 2 * weights.target * s + weights.target)
    norms = sum(ridge.double() @ table.double().square().sum(1) for ridge, table in zip(ridges, (U, V), strict=True))
    return weights.every * s.square().sum() + observed.sum() + norms


def objective_of(model: ALSModel[Any], tensors: dict[str, Tensor], fit: CSR) -> float:
    U, V = model.factors(tensors)
    ridges = (model.ridge(fit.degrees(), fit.shape[1]), model.ridge(fit.popularity(), fit.shape[0]))
    return objective(U, V, fit, model.weights, tuple(map(torch.from_numpy, ridges))).item()


def fitted(model: ALSModel[Any], fit: CSR, epochs: int, **tensors: Tensor) -> dict[str, Tensor]:
    """Run some epochs, from given factors if there are any."""
    state = {**model.start(fit), **tensors}
    for number in range(epochs):
        model.epoch(state, fit, number, lambda done, total: None)
    return state


# -- the case ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_wmf_of_the_case(backend: str) -> None:
    model = WMF(factors=2, confidence=10.0, regularization=0.03, backend=backend)
    assert objective_of(model, {"user_factors": U, "item_factors": V}, CASE) == pytest.approx(108.14359375)
    state = fitted(model, CASE, 1, user_factors=U, item_factors=V)
    expected = [[-1.033213, -1.817807], [1.850264, 0.565151], [-0.404922, -2.119994], [0.40155, 0.279594]]
    np.testing.assert_allclose(state["user_factors"], expected, atol=2e-6)
    assert objective_of(model, {**state, "item_factors": V}, CASE) == pytest.approx(49.4130649, rel=1e-6)
    expected = [[-0.010331, -0.498413], [0.760747, -0.869432], [0.621543, -0.038175], [0.654094, -0.766673]]
    np.testing.assert_allclose(state["item_factors"], [*expected, [1.029006, -0.63592]], atol=2e-6)
    assert objective_of(model, state, CASE) == pytest.approx(30.5049243, rel=1e-6)


@pytest.mark.parametrize("block", [1, 2])
def test_ials_of_the_case(block: int) -> None:
    model = IALS(factors=2, unobserved_weight=0.1, regularization=0.01, block=2)
    assert objective_of(model, {"user_factors": U, "item_factors": V}, CASE) == pytest.approx(11.01365625)
    liked = IALS(factors=2, unobserved_weight=0.1, regularization=0.01, block=block)
    liked._tensors, liked._interactions = {"user_factors": U, "item_factors": V}, Dataset.from_csr(CASE.to_scipy())
    users = liked.fold_in_items(CASE)  # exact, whatever the block
    expected = [[-0.900638, -1.57868], [1.598911, 0.462664], [-0.344143, -1.853077], [0.345888, 0.230369]]
    np.testing.assert_allclose(users, expected, atol=2e-6)
    assert objective_of(model, {"user_factors": users, "item_factors": V}, CASE) == pytest.approx(5.6517719, rel=1e-6)


def test_ials_without_a_growing_ridge_is_wmf() -> None:
    a, rows = 0.25, random_interactions(40, 30)
    ials = IALS(factors=5, unobserved_weight=a, regularization=0.3, ridge_power=0.0)
    wmf = WMF(factors=5, confidence=1 + 1 / a, regularization=0.3 * (1 + a) / a)
    start = normal(30, 5)
    one = fitted(ials, rows, 2, item_factors=start)
    other = fitted(wmf, rows, 2, item_factors=start * (1 + a) ** 0.5)
    for name in ("user_factors", "item_factors"):
        np.testing.assert_allclose(one[name] * (1 + a) ** 0.5, other[name], rtol=1e-4, atol=1e-5)


# -- half steps --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("d", [2, 16, 40, 77])  # rows longer and shorter than d, several tiles, and a chunk of cells
def test_the_gradient_after_a_half_step_is_zero(d: int, backend: str) -> None:
    rows, items, ridge = random_interactions(30, 150), normal(150, d) * 0.3, torch.rand(30) + 0.1
    users, gain = half_step(rotate(items, inner_products(items)), d, cells_of(rows, ridge), WEIGHTS, backend)
    assert users.shape == (30, d)
    assert (users[0] == 0).all()
    users = users.double().requires_grad_()
    ridges = (ridge, torch.zeros(150))
    loss = objective(users, items, rows, WEIGHTS, ridges)
    loss.backward()
    scale = 2 * WEIGHTS.target * items.abs().sum(0).max()
    assert users.grad is not None
    assert users.grad.abs().max() < 2e-6 * scale
    before = objective(torch.zeros_like(users), items, rows, WEIGHTS, ridges)
    assert gain == pytest.approx((before - loss).item(), rel=1e-5)


def test_the_reference_is_exact_in_float64() -> None:
    rows, items, ridge = random_interactions(30, 150), normal(150, 20, dtype=torch.float64), torch.rand(30).double()
    users, _ = half_step(rotate(items, inner_products(items)), 20, cells_of(rows, ridge), WEIGHTS, "reference")
    users.requires_grad_()
    objective(users, items, rows, WEIGHTS, (ridge, torch.zeros(150))).backward()
    np.testing.assert_allclose(users.grad, 0, atol=1e-10)


def test_the_reference_does_not_depend_on_the_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, items, ridge = random_interactions(30, 50), normal(50, 6, dtype=torch.float64), torch.rand(30).double()
    arguments = rotate(items, inner_products(items)), 6, cells_of(rows, ridge), WEIGHTS, "reference"
    whole, _ = half_step(*arguments)
    monkeypatch.setattr("drm_triton.kernels.least_squares.LIST_ENTRIES", 1)
    np.testing.assert_allclose(half_step(*arguments)[0], whole, atol=1e-12)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_without_ridge_and_with_fewer_items_than_factors(backend: str) -> None:
    rows, items = random_interactions(20, 6, 0.5), normal(6, 10)
    cells = cells_of(rows, torch.zeros(20))
    users, _ = half_step(rotate(items, inner_products(items)), 10, cells, WEIGHTS, backend)
    # Of all best users, these are in the span of the items: with as many factors as items, every score is the best one.
    X = torch.from_numpy(rows.to_scipy().toarray())
    best = X * WEIGHTS.target / (WEIGHTS.every + WEIGHTS.observed)
    np.testing.assert_allclose(users @ items.T, best, atol=1e-4)


def test_a_confidence_of_one() -> None:
    rows, model = random_interactions(30, 40), WMF(factors=6, confidence=1.0, regularization=0.1)
    tensors = fitted(model, rows, 1, item_factors=normal(40, 6))
    items = normal(40, 6).double()
    right = torch.from_numpy(rows.to_scipy(np.float64).toarray()) @ items
    users = torch.linalg.solve(items.T @ items + 0.1 * torch.eye(6), right.T).T
    np.testing.assert_allclose(tensors["user_factors"], users, atol=1e-5)


# -- blocks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("size", [1, 7, 20])
def test_block_steps(size: int, backend: str) -> None:
    """The gradient to the block is zero, the other columns stay, and the objective falls by what is returned."""
    rows, ridge = random_interactions(30, 150), torch.rand(30) + 0.1
    users, items, block = normal(30, 20) * 0.2, normal(150, 20, seed=2) * 0.2, slice(20 - size, 20)
    ridges = (ridge, torch.zeros(150))
    before, others = objective(users, items, rows, WEIGHTS, ridges), users[:, : 20 - size].clone()
    pairs = torch.from_numpy(rows.to_scipy().toarray().nonzero()[0]), rows.tensors("cpu")[1].long()
    residual = WEIGHTS.target - WEIGHTS.observed * (users[pairs[0]] * items[pairs[1]]).sum(1)
    gain = block_step(users, items, block, cells_of(rows, ridge), residual, WEIGHTS, backend)
    assert torch.equal(users[:, : 20 - size], others)
    expected = WEIGHTS.target - WEIGHTS.observed * (users[pairs[0]] * items[pairs[1]]).sum(1)
    np.testing.assert_allclose(residual, expected, atol=1e-5)
    users = users.double().requires_grad_()
    loss = objective(users, items, rows, WEIGHTS, ridges)
    loss.backward()
    assert users.grad is not None
    assert users.grad[:, block].abs().max() < 1e-5 * 2 * WEIGHTS.target * items.abs().sum(0).max()
    assert gain == pytest.approx((before - loss).item(), rel=1e-4)
    if size == 20:
        exact, _ = half_step(rotate(items, inner_products(items)), 20, cells_of(rows, ridge), WEIGHTS, backend)
        np.testing.assert_allclose(users.detach(), exact, atol=1e-5)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("block", [1, 3, 8])
def test_the_loss_falls_in_every_epoch_and_is_the_objective(block: int, backend: str) -> None:
    rows = random_interactions(50, 70)
    model = IALS(factors=8, unobserved_weight=0.2, regularization=0.05, block=block, backend=backend)
    tensors, last = model.start(rows), np.inf
    for number in range(4):
        loss = model.epoch(tensors, rows, number, lambda done, total: None)["loss"]
        assert loss == pytest.approx(objective_of(model, tensors, rows), rel=1e-5)
        assert loss < last
        last = loss


# -- whole models ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [WMF(factors=33), IALS(factors=33, block=20)], ids=["exact", "blocks"])
def test_same_bits_whatever_the_threads(model: ALSModel[Any], threads: None) -> None:
    rows, results = random_interactions(200, 90), []
    for number in (1, 2):
        set_threads(number)
        torch.set_num_threads(number)
        results.append(fitted(model, rows, 2))
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_new_users_have_the_same_bits_in_any_batch() -> None:
    rows = random_interactions(60, 200, 0.2)
    model = IALS(factors=24, block=8).fit(Dataset.from_csr(rows.to_scipy(), n_items=200))
    together = model.fold_in_items(rows)
    alone = torch.cat([model.fold_in_items(rows.take(np.array([user]))) for user in range(60)])
    assert torch.equal(alone, together)
    assert (together[0] == 0).all()


@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (1, 4)])
def test_tiny_sets(shape: tuple[int, int]) -> None:
    rows = full(*shape)
    for model in (WMF(factors=3), IALS(factors=3, block=2)):
        tensors = fitted(model, rows, 3)
        s = tensors["user_factors"] @ tensors["item_factors"].T
        assert torch.isfinite(s).all()
        assert (s > 0.5).all()


# -- other libraries ---------------------------------------------------------------------------------------------------


def test_wmf_is_that_of_implicit() -> None:
    als = pytest.importorskip("implicit.cpu.als")
    rows = random_interactions(60, 80, 0.2)
    model = WMF(factors=12, confidence=7.0, regularization=0.5)
    other = als.AlternatingLeastSquares(
        factors=12, alpha=7.0, regularization=0.5, iterations=3, use_cg=False, num_threads=1
    )
    other.item_factors, other.user_factors = normal(80, 12).numpy() * 0.1, normal(60, 12, seed=2).numpy() * 0.1
    mine = fitted(model, rows, 3, item_factors=normal(80, 12) * 0.1)
    other.fit(rows.to_scipy(), show_progress=False)
    np.testing.assert_allclose(mine["user_factors"], other.user_factors, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(mine["item_factors"], other.item_factors, rtol=1e-3, atol=1e-4)


def test_ials_has_the_fixed_point_of_irspack() -> None:
    irspack = pytest.importorskip("irspack")
    rows = random_interactions(60, 80, 0.2)
    a, regularization = 0.2, 0.03
    other = irspack.IALSRecommender(
        rows.to_scipy(np.float64), n_components=6, alpha0=a, reg=regularization, nu=1.0, loss_type="IALSPP",
        solver_type="CHOLESKY", train_epochs=200, n_threads=1,
    ).learn()  # fmt: skip
    model = IALS(factors=6, unobserved_weight=a, regularization=regularization)
    tensors = {name: torch.from_numpy(np.ascontiguousarray(factors, dtype=np.float32)) for name, factors in (
        ("user_factors", other.get_user_embedding()), ("item_factors", other.get_item_embedding()),
    )}  # fmt: skip
    again = fitted(model, rows, 1, **tensors)
    s, expected = (pair["user_factors"] @ pair["item_factors"].T for pair in (again, tensors))
    np.testing.assert_allclose(s, expected, atol=1e-5)
