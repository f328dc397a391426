"""WARP: the step, the search for a violator, and the library LightFM."""

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from drm_triton.kernels.cpu.pairs import Tables, warp_task
from drm_triton.models import WARP
from tests.models.clusters import U, V, clusters, tables, task, welch

LR = np.float32(0.05)
LIKED = [[0, 1, 3, 4], [], [], []]
AT_FIRST, AT_SECOND, LATER = "s = 1", "s = 2", "s >= 3"


def step(values: Tables, seed: int, fixed: bool = False, max_sampled: int = 10) -> None:
    """Train on user 0 and item 1, whose only negative is item 2."""
    options = WARP(lr=0.05, max_sampled=max_sampled).kernel_options(5)
    warp_task(task([(0, 1)], [0, 1, 2, 3, 4], LIKED, seed), values, *options, 1, fixed, np.zeros(2))


def outcome(u: Any, v: Any, b: Any) -> str:
    """Return the case that the rows of user 0 and of items 1 and 2, and their biases, show."""
    if np.allclose(u, [-0.482671, 0.206678], atol=1e-6):
        np.testing.assert_allclose(v, [[0.482671, -0.741336], [0.017329, 0.491336]], atol=1e-6)
        np.testing.assert_allclose(b, [0.034657, -0.034657], atol=1e-6)
        return AT_SECOND
    if np.allclose(u, [-0.465343, 0.163357], atol=1e-6):
        np.testing.assert_allclose(v, [[0.465343, -0.732671], [0.034657, 0.482671]], atol=1e-6)
        np.testing.assert_allclose(b, [0.069315, -0.069315], atol=1e-6)
        return AT_FIRST
    np.testing.assert_allclose(u, U[0], atol=1e-6)
    np.testing.assert_allclose(v, V[1:3], atol=1e-6)
    np.testing.assert_allclose(b, 0, atol=1e-6)
    return LATER


def test_steps_have_the_known_values() -> None:
    found, n = Counter[str](), 500
    for seed in range(n):
        values = tables([0.0] * 5, states=True)
        step(values, seed)
        case = outcome(values.U[0], values.V[1:3], values.b[1:3])
        found[case] += 1
        if case == AT_SECOND:
            np.testing.assert_allclose(values.U_state[0], [1.120113, 1.750708], atol=1e-6)
            gradients = math.log(2) * U[0]
            np.testing.assert_allclose(values.V_state[1:3], 1 + np.tile(gradients**2, (2, 1)), atol=1e-6)
            np.testing.assert_allclose(values.b_state, 1 + math.log(2) ** 2 * np.array([0, 1, 1, 0, 0]), atol=1e-6)
    # The only negative is one of five items.
    for case, share in ((AT_FIRST, 0.2), (AT_SECOND, 0.16)):
        assert abs(found[case] - share * n) < 4 * math.sqrt(share * (1 - share) * n)


def test_the_state_is_used_before_the_new_square_is_added() -> None:
    values = tables([0.0] * 5, states=True)
    values.U_state[0] = 4
    seed = next(seed for seed in range(40) if _found_at(seed) == AT_FIRST)
    step(values, seed)
    gradient = math.log(4) * (V[2] - V[1])
    np.testing.assert_allclose(values.U[0], U[0] - 0.05 * gradient / 2, atol=1e-6)
    np.testing.assert_allclose(values.U_state[0], 4 + gradient**2, atol=1e-5)


def _found_at(seed: int) -> str:
    values = tables([0.0] * 5, states=True)
    step(values, seed)
    return outcome(values.U[0], values.V[1:3], values.b[1:3])


def test_the_search_ends_after_max_sampled_draws() -> None:
    for seed in range(40):
        values = tables([0.0] * 5, states=True)
        step(values, seed, max_sampled=1)
        case = outcome(values.U[0], values.V[1:3], values.b[1:3])
        assert case == (AT_FIRST if _found_at(seed) == AT_FIRST else LATER)


def test_draws_after_the_fourth_are_uniform_too() -> None:
    # One violator among 8 items, found in at most 12 draws: the number of the draw is geometric.
    n_items, n, levels = 8, 20_000, np.arange(13, dtype=np.float32)
    b = np.full(n_items, -2, np.float32)
    b[0], b[5] = 0, 1
    found = Counter[int]()
    one = task([(0, 0)], list(range(n_items)), [[0], [], [], []])
    for seed in range(n):
        values = Tables(
            np.zeros((1, 1), np.float32), np.zeros((n_items, 1), np.float32), b.copy(),
            np.ones((1, 1), np.float32), np.ones((n_items, 1), np.float32), np.ones(n_items, np.float32),
        )  # fmt: skip
        result = np.zeros(2)
        warp_task(one._replace(seed=np.uint64(seed)), values, LR, levels, 1, True, result)
        found[round(result[0] / 2)] += 1  # level * excess, and the excess over the margin is 2
    expected = {s: n * (7 / 8) ** (s - 1) / 8 for s in range(1, 13)} | {0: n * (7 / 8) ** 12}
    assert sum((found[s] - want) ** 2 / want for s, want in expected.items()) < 32.9  # chi-square, 12, p = 0.001


def test_items_within_the_margin_of_the_score_are_no_violators() -> None:
    # s_uj = s_ui - 1 exactly: not above.
    values = tables([0.0, 2.5, 0.0, 0.0, 0.0], states=True)
    values.U[0] = 0
    values.b[2] = 1.5
    for seed in range(20):
        step(values, seed)
    assert values.b[1:3].tolist() == [2.5, 1.5]


def test_fixed_items_do_not_change() -> None:
    values, before = tables([0.0] * 5, states=True), tables([0.0] * 5, states=True)
    for seed in range(20):
        step(values, seed, fixed=True)
    assert not np.array_equal(values.U[0], before.U[0])
    for a, b in ((values.V, before.V), (values.b, before.b), (values.V_state, before.V_state)):
        assert np.array_equal(a, b)


def test_levels_are_those_of_the_method() -> None:
    _, levels = WARP(max_sampled=6).kernel_options(5)
    np.testing.assert_allclose(levels, [0, math.log(4), math.log(2), 0, 0, 0, 0], rtol=1e-6)
    assert WARP().kernel_options(10**6)[1][1] == 10


def test_steps_are_those_of_lightfm() -> None:
    lightfm, sparse = pytest.importorskip("lightfm"), pytest.importorskip("scipy.sparse")
    rows, items = [0] * 4, LIKED[0]
    X = sparse.coo_matrix((np.ones(4, np.float32), (rows, items)), shape=(4, 5))
    weights = np.where(np.array(items) == 1, 1, 1e-30).astype(np.float32)  # train on item 1 alone
    W = sparse.coo_matrix((weights, (rows, items)), shape=(4, 5))
    found = set()
    for seed in range(40):
        model = lightfm.LightFM(loss="warp", no_components=2, learning_rate=0.05, max_sampled=10, random_state=seed)
        model._initialize(2, 5, 4)
        model.user_embeddings[:], model.item_embeddings[:] = U, V
        model.fit_partial(X, sample_weight=W, num_threads=1)
        found.add(outcome(model.user_embeddings[0], model.item_embeddings[1:3], model.item_biases[1:3]))
    assert found == {AT_FIRST, AT_SECOND, LATER} == {_found_at(seed) for seed in range(40)}


def test_quality_is_that_of_lightfm() -> None:
    lightfm = pytest.importorskip("lightfm")
    data = clusters()
    ours, theirs = [], []
    for seed in range(5):
        model = WARP(factors=16, epochs=6, seed=seed).fit(data)
        ours.append(model.evaluate(data.test).means["ndcg@10"])
        other = lightfm.LightFM(loss="warp", no_components=16, learning_rate=0.05, max_sampled=10, random_state=seed)
        other.fit(data.train.to_scipy().tocoo(), epochs=6, num_threads=1)
        model._tensors = {
            "user_factors": torch.from_numpy(other.user_embeddings),
            "item_factors": torch.from_numpy(other.item_embeddings),
            "item_bias": torch.from_numpy(other.item_biases),
        }
        theirs.append(model.evaluate(data.test).means["ndcg@10"])
    assert abs(welch(ours, theirs)) < 4
    assert min(ours) > 0.8 * 0.21  # a ranking by the groups of users and items reaches 0.21
