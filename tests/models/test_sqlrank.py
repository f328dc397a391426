"""SQL-Rank: queues, the loss and gradient of lists, epochs, new users."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from drm_triton import Dataset
from drm_triton.data.csr import CSR
from drm_triton.errors import DrmError, InputError
from drm_triton.kernels.cpu.runtime.threads import set_threads
from drm_triton.kernels.cpu.sqlrank import Lists, add_item_gradients, queue_lists, step_users
from drm_triton.models import SQLRank
from drm_triton.models import sqlrank as module

# Four users and five items, in numbers that floats hold exactly.
U = np.array([[-0.5, 0.25], [0, -0.5], [0.5, 0], [-0.25, 0.5]])
V = np.array([[-0.75, -0.25], [0.5, -0.75], [0, 0.5], [-0.5, 0], [0.75, -0.5]])
QUEUES = [[0, 1, 3, 2, 4], [1, 2, 0, 3], [0, 4, 1, 2], [2, 3, 4, 0, 1]]


def lists_of(queues: list[list[int]]) -> Lists:
    first = np.concatenate([[0], np.cumsum([len(queue) for queue in queues])])
    return Lists(first, np.array(list(itertools.chain(*queues)), np.int32))


def matrix(rows: list[list[int]], n_items: int) -> CSR:
    users = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
    return CSR.from_pairs(users, np.array(list(itertools.chain(*rows)), np.int64), (len(rows), n_items))


def interactions(n_users: int = 40, n_items: int = 60) -> CSR:
    """Return random interactions; the first users have no item, one, all but one, and all."""
    rng = np.random.default_rng(3)
    sizes = [0, 1, n_items - 1, n_items, *rng.integers(2, n_items // 3, n_users - 4)]
    return matrix([sorted(rng.choice(n_items, size, replace=False).tolist()) for size in sizes], n_items)


def queued(fit: CSR, ratio: int, epoch: int = 0, seed: int = 0) -> list[list[int]]:
    lists = queue_lists(fit, ratio, seed, epoch, np.arange(fit.shape[0], dtype=np.uint64))
    return [part.tolist() for part in np.split(lists.items, lists.first[1:-1])]


def objective(U: Tensor, V: Tensor, queues: list[list[int]], ridge: float) -> Tensor:
    """Return the objective by its definition: the negative logarithm of the probability of each position in turn."""
    total = ridge / 2 * (U.square().sum() + V.square().sum())
    for user, queue in enumerate(queues):
        m = torch.sigmoid(V[queue] @ U[user])
        for t in range(len(queue)):
            total = total - torch.log(m[t].exp() / m[t:].exp().sum())
    return total


def gradients(
    U: NDArray[Any], V: NDArray[Any], queues: list[list[int]], ridge: float
) -> tuple[float, NDArray[Any], NDArray[Any]]:
    """Return the objective and its gradients, as the kernels compute them."""
    lists, moved, still, dV = lists_of(queues), U.copy(), U.copy(), ridge * V
    losses, _ = step_users(moved, V, lists, 1.0, ridge)
    _, coefficients = step_users(still, V, lists, 0.0, ridge)
    assert np.array_equal(still, U)
    add_item_gradients(U, lists, coefficients, dV)
    return float(losses.sum() + ridge / 2 * (np.square(U).sum() + np.square(V).sum())), U - moved, dV


def test_values_of_the_shared_case() -> None:
    loss, dU, dV = gradients(U, V, QUEUES, 0.5)
    assert loss == pytest.approx(16.5628997, abs=5e-8)
    expected = [[0.04739, 0.185492], [-0.242755, -0.180246], [0.335049, 0.202995], [-0.036088, -0.048634]]
    np.testing.assert_allclose(dU, expected, atol=5e-7)
    np.testing.assert_allclose(dV[0], [-0.396391, -0.140002], atol=5e-7)


@pytest.mark.parametrize(("dtype", "rtol"), [(np.float64, 1e-12), (np.float32, 2e-5)])
def test_gradients_are_those_of_autograd(dtype: Any, rtol: float) -> None:
    rng, fit = np.random.default_rng(5), interactions(15)
    factors = [rng.normal(size=(n, 7)).astype(dtype) for n in fit.shape]
    queues = queued(fit, 2)
    loss, dU, dV = gradients(factors[0], factors[1], queues, 0.3)
    x, y = (torch.from_numpy(table).double().requires_grad_() for table in factors)
    expected = objective(x, y, queues, 0.3)
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=rtol)
    for got, table in ((dU, x), (dV, y)):
        assert table.grad is not None
        np.testing.assert_allclose(got, table.grad, rtol=rtol, atol=rtol * float(table.grad.abs().max()))


def test_gradients_are_finite_differences() -> None:
    _, dU, dV = gradients(U, V, QUEUES, 0.5)
    h = 1e-5
    for gradient, name in ((dU, "U"), (dV, "V")):
        for place in np.ndindex(gradient.shape):
            values = []
            for step in (h, -h):
                tables = {"U": U.copy(), "V": V.copy()}
                tables[name][place] += step
                values.append(gradients(tables["U"], tables["V"], QUEUES, 0.5)[0])
            assert (values[0] - values[1]) / (2 * h) == pytest.approx(gradient[place], abs=1e-8)


def test_the_probabilities_of_all_orders_add_up_to_one() -> None:
    total = 0.0
    for order in itertools.permutations(range(5)):
        losses, _ = step_users(U[:1].copy(), V, lists_of([list(order)]), 0.0, 0.0)
        total += math.exp(-losses[0])
    assert total == pytest.approx(1, abs=1e-12)


def test_large_scores_are_finite() -> None:
    loss, dU, dV = gradients(1e4 * U.astype(np.float32), 1e4 * V.astype(np.float32), QUEUES, 0.0)
    assert math.isfinite(loss)
    assert np.isfinite(dU).all()
    assert np.isfinite(dV).all()


def test_queues() -> None:
    fit, ratio = interactions(), 2
    for user, queue in enumerate(queued(fit, ratio)):
        own = fit.row(user).tolist()
        assert sorted(queue[: len(own)]) == own
        others = queue[len(own) :]
        assert len(others) == min(ratio * len(own), fit.shape[1] - len(own))
        assert len(set(queue)) == len(queue)
        assert all(0 <= item < fit.shape[1] for item in queue)
    assert queued(fit, ratio) == queued(fit, ratio)
    assert queued(fit, ratio) != queued(fit, ratio, epoch=1)
    assert queued(fit, ratio) != queued(fit, ratio, seed=1)


def test_orders_and_draws_are_uniform() -> None:
    fit = matrix([[1, 3, 4]] * 6000, 8)
    queues = queued(fit, 1)
    orders = [tuple(queue[:3]) for queue in queues]
    draws = [tuple(queue[3:]) for queue in queues]
    for seen, possible in (
        (orders, itertools.permutations([1, 3, 4])),
        (draws, itertools.permutations([0, 2, 5, 6, 7], 3)),
    ):
        cells = list(possible)
        expected = len(seen) / len(cells)
        chi_square = sum((seen.count(cell) - expected) ** 2 / expected for cell in cells)
        # The statistic has mean f and standard deviation sqrt(2 f), with f = cells - 1 degrees of freedom.
        assert chi_square < len(cells) - 1 + 4 * math.sqrt(2 * (len(cells) - 1))


def test_an_epoch_steps_users_then_items() -> None:
    fit, model = interactions(15), SQLRank(factors=6, lr=0.05, lr_decay=0.5, regularization=0.4, ratio=2)
    tensors = model.start(fit)
    x, y = (tensors[name].double().requires_grad_() for name in ("user_factors", "item_factors"))
    for epoch in range(2):
        queues, lr = queued(fit, 2, epoch), 0.05 * 0.5**epoch
        expected = objective(x, y, queues, 0.4)
        x = (x - lr * torch.autograd.grad(expected, x)[0]).detach().requires_grad_()
        (gradient,) = torch.autograd.grad(objective(x, y, queues, 0.4), y)
        y = (y - lr * gradient).detach().requires_grad_()
        measured = model.epoch(tensors, fit, epoch, lambda done, total: None)
        assert measured["loss"] == pytest.approx(expected.item() / 14, rel=1e-5)  # one user has no item
    torch.testing.assert_close(tensors["user_factors"].double(), x.detach(), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(tensors["item_factors"].double(), y.detach(), rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("threads")
def test_bits_depend_neither_on_threads_nor_on_blocks_of_users(monkeypatch: pytest.MonkeyPatch) -> None:
    fit, results = interactions(200), []
    for threads, entries in ((1, 1 << 20), (2, 1 << 20), (2, 100)):
        set_threads(threads)
        monkeypatch.setattr(module, "ENTRIES", entries)
        model = SQLRank(factors=40, lr=0.05)
        tensors = model.start(fit)
        losses = [model.epoch(tensors, fit, epoch, lambda done, total: None)["loss"] for epoch in range(3)]
        results.append((tensors, losses[-1]))
    for tensors, loss in results[1:]:
        assert loss == pytest.approx(results[0][1], rel=1e-12)
        for name, table in tensors.items():
            assert torch.equal(table, results[0][0][name])


def test_small_steps_on_the_same_queues_lower_the_objective() -> None:
    fit, model = interactions(), SQLRank(factors=8, lr=0.005, regularization=0.1)
    tensors = model.start(fit)
    losses = [model.epoch(tensors, fit, 0, lambda done, total: None)["loss"] for _ in range(30)]
    assert all(later < earlier for earlier, later in itertools.pairwise(losses))


def test_the_vectors_of_new_users_depend_only_on_their_items() -> None:
    fit = interactions()
    model = SQLRank(factors=8, epochs=5).fit(Dataset.from_csr((fit.indptr, fit.indices), n_items=fit.shape[1]))
    together = model.fold_in_items(fit)
    assert torch.equal(together[0], torch.zeros(8))
    for user in (1, 3, 20):
        assert torch.equal(model.fold_in_items(fit.take(np.array([user])))[0], together[user])


def test_new_users_get_the_items_of_users_like_them() -> None:
    rng = np.random.default_rng(0)
    rows = [sorted((10 * (user % 2) + rng.choice(10, 6, replace=False)).tolist()) for user in range(40)]
    fit = matrix(rows, 20)
    # With two factors and few negatives, it cannot learn by heart which items of a group a user does not have.
    model = SQLRank(factors=2, ratio=2).fit(Dataset.from_csr((fit.indptr, fit.indices), n_items=20))
    found = model.recommend_from([[0, 1, 2], [17, 18, 19]], k=7)["item"].to_list()
    assert sorted(found[:7]) == list(range(3, 10))
    assert sorted(found[7:]) == list(range(10, 17))


@pytest.mark.parametrize("rows", [[[0], [0]], [[], [0]], [[0, 1], [0, 1]], [[1], []]])
def test_tiny_data(rows: list[list[int]]) -> None:
    n_items = max(max(row, default=0) for row in rows) + 1
    data = Dataset.from_csr((matrix(rows, n_items).indptr, matrix(rows, n_items).indices), n_items=n_items)
    model = SQLRank(factors=2, epochs=2).fit(data)
    assert torch.isfinite(model.user_factors).all()
    assert torch.isfinite(model.item_factors).all()


def test_factors_that_would_grow_are_refused() -> None:
    with pytest.raises(InputError, match=r"`lr` times `regularization` must be below 2, got 0.5 \* 4"):
        SQLRank(lr=0.5, regularization=4)


def test_divergence_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    fit = interactions()
    data = Dataset.from_csr((fit.indptr, fit.indices), n_items=fit.shape[1])
    monkeypatch.setattr(module, "INITIAL_SCALE", 1.0)  # gradients are then large enough to overflow
    with pytest.raises(DrmError, match=r"sqlrank diverged in epoch 1: .* a lower `lr`"):
        SQLRank(lr=3e38, regularization=0, epochs=3).fit(data)
