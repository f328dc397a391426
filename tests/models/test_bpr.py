"""BPR: the step, the draws, and the library implicit."""

from collections import Counter
from itertools import product

import numpy as np
import pytest
import torch

from drm_triton.kernels.cpu.pairs import Tables, bpr_task
from drm_triton.models import BPR
from tests.models.clusters import clusters, tables, task, welch

LR, REG = np.float32(0.1), np.float32(0.01)
BIAS = [0.0, 0.1, -0.1, 0.0, 0.0]
LIKED = [[1], [2], [], []]


def step(values: Tables, user: int, positive: int, negative: int, fixed: bool = False) -> float:
    """Take one step on a triple; return its loss without the ridge."""
    result = np.zeros(2)
    bpr_task(task([(user, positive)], [negative], LIKED), values, LR, REG, 1, fixed, result)
    assert result[1] == 1
    return float(result[0])


def test_a_step_has_the_known_values() -> None:
    values = tables(BIAS, states=False)
    ridge = 0.01 / 2 * sum(float((x**2).sum()) for x in (values.U[0], values.V[1:3], values.b))
    assert step(values, 0, 1, 2) + ridge == pytest.approx(0.8977088, abs=1e-6)
    np.testing.assert_allclose(values.U[0], [-0.470018, 0.176044], atol=1e-6)
    np.testing.assert_allclose(values.V[1:3], [[0.470018, -0.734509], [0.029482, 0.484759]], atol=1e-6)
    np.testing.assert_allclose(values.b[1:3], [0.158865, -0.158865], atol=1e-6)
    untouched, before = [0, 3, 4], tables(BIAS, states=False)
    assert np.array_equal(values.V[untouched], before.V[untouched])
    assert np.array_equal(values.U[1:], before.U[1:])


def test_a_step_is_the_gradient_of_the_loss() -> None:
    values = tables(BIAS, states=False)
    u, v_i, v_j, b_i, b_j = (
        torch.tensor(x, dtype=torch.float64, requires_grad=True)
        for x in (values.U[0], values.V[1], values.V[2], values.b[1], values.b[2])
    )
    squares = sum(x.square().sum() for x in (u, v_i, v_j, b_i, b_j))
    loss = torch.nn.functional.softplus(u @ (v_j - v_i) + b_j - b_i) + 0.01 / 2 * squares
    loss.backward()
    step(values, 0, 1, 2)
    for x, new in ((u, values.U[0]), (v_i, values.V[1]), (v_j, values.V[2]), (b_i, values.b[1]), (b_j, values.b[2])):
        assert x.grad is not None
        np.testing.assert_allclose(new, (x - 0.1 * x.grad).detach(), atol=1e-7)


def test_fixed_items_do_not_change() -> None:
    values, before = tables(BIAS, states=False), tables(BIAS, states=False)
    step(values, 0, 1, 2, fixed=True)
    assert np.array_equal(values.V, before.V)
    assert np.array_equal(values.b, before.b)
    np.testing.assert_allclose(values.U[0], [-0.470018, 0.176044], atol=1e-6)


def test_large_scores_do_not_overflow() -> None:
    for scale, loss in ((1e4, 0.0), (-1e4, 1e4)):
        values = tables([0.0, scale, 0.0, 0.0, 0.0], states=False)
        assert step(values, 0, 1, 2) == pytest.approx(loss, rel=1e-3)
        assert all(np.isfinite(table).all() for table in values)


def test_draws_of_the_users_own_items_are_left_out() -> None:
    values, result = tables(BIAS, states=False), np.zeros(2)
    bpr_task(task([(0, 1), (0, 3)], [1, 3], [[1, 3], [], [], []]), values, LR, REG, 100, False, result)
    assert result.tolist() == [0, 0]
    assert all(np.array_equal(a, b) for a, b in zip(values, tables(BIAS, states=False), strict=True))


def test_draws_are_uniform() -> None:
    # A tiny step leaves a mark on the rows that were drawn, and nearly nothing else: counts are read from the biases.
    n, candidates = 60_000, [2, 3, 3, 4]
    values, result, lr = tables([0.0] * 5, states=False), np.zeros(2), np.float32(1e-7)
    values.U[:], values.V[:] = 0, 0
    bpr_task(task([(0, 0), (1, 1)], candidates, [[0], [1], [], []]), values, lr, np.float32(0), n // 2, False, result)
    counts = values.b / (lr / 2)
    expected = np.array([n / 2, n / 2, -n / 4, -n / 2, -n / 4])
    assert result[1] == n
    assert (np.abs(counts - expected) < 5 * np.sqrt(n) / 2).all()
    assert not np.array_equal(counts.round(), expected)  # drawn, not dealt out


def test_steps_are_those_of_implicit() -> None:
    implicit = pytest.importorskip("implicit.cpu.bpr")
    sparse = pytest.importorskip("scipy.sparse")
    possible = {}  # result by the triples of the epoch's two draws; a draw may also be left out
    for count in range(3):
        for triples in product([(0, 1, 2), (1, 2, 1)], repeat=count):
            values = tables(BIAS, states=False)
            for triple in triples:
                step(values, *triple)
            possible[triples] = values
    found = Counter[object]()
    X = sparse.csr_matrix((np.ones(2, np.float32), ([0, 1], [1, 2])), shape=(4, 5))
    for seed in range(60):
        model = implicit.BayesianPersonalizedRanking(
            factors=2, learning_rate=0.1, regularization=0.01, iterations=1, num_threads=1, random_state=seed
        )
        start = tables(BIAS, states=False)
        model.user_factors = np.column_stack([start.U, np.ones(4, np.float32)])
        model.item_factors = np.column_stack([start.V, start.b])
        model.fit(X, show_progress=False)
        equal = [
            triples
            for triples, values in possible.items()
            if np.allclose(model.user_factors[:, :2], values.U, atol=1e-6)
            and np.allclose(model.item_factors, np.column_stack([values.V, values.b]), atol=1e-6)
        ]
        assert len(equal) == 1
        found[equal[0]] += 1
    assert len(found) == len(possible)


def test_quality_is_that_of_implicit() -> None:
    implicit = pytest.importorskip("implicit.cpu.bpr")
    data = clusters()
    ours, theirs = [], []
    for seed in range(5):
        model = BPR(factors=16, lr=0.1, epochs=15, negative_sampling="popularity", seed=seed).fit(data)
        ours.append(model.evaluate(data.test).means["ndcg@10"])
        other = implicit.BayesianPersonalizedRanking(
            factors=16, learning_rate=0.1, regularization=0.01, iterations=15, num_threads=1, random_state=seed
        )
        other.fit(data.train.to_scipy(), show_progress=False)
        model._tensors = {
            "user_factors": torch.from_numpy(other.user_factors[:, :-1]),
            "item_factors": torch.from_numpy(other.item_factors[:, :-1]),
            "item_bias": torch.from_numpy(other.item_factors[:, -1]),
        }
        theirs.append(model.evaluate(data.test).means["ndcg@10"])
    assert abs(welch(ours, theirs)) < 4
    assert min(ours) > 0.8 * 0.21  # a ranking by the groups of users and items reaches 0.21


def test_the_initial_values_are_those_of_the_method() -> None:
    fit = clusters().train
    tensors = BPR(factors=10).start(fit)
    used = torch.from_numpy(fit.popularity() > 0)
    for tensor in (tensors["user_factors"], tensors["item_factors"][used], tensors["item_bias"][used]):
        assert 0.049 < float(tensor.abs().max()) <= 0.05
        assert abs(float(tensor.mean())) < 0.01
