"""Metrics beyond accuracy: the example of docs/metrics.md by hand, and plain loops over lists."""

import math
from itertools import combinations

import numpy as np
import pytest

from drm_triton import DRM
from drm_triton.data.csr import CSR
from drm_triton.ranking.beyond_accuracy import entropy, exposure_metrics, gini, list_metrics
from drm_triton.ranking.evaluate import evaluate, measurable, popularity_ranker

# Four users have items {0, 1}, {0, 1}, {0, 2} and {0, 3}; item 4 has no user.
TRAIN = CSR.from_pairs(np.repeat(np.arange(4), 2), np.array([0, 1, 0, 1, 0, 2, 0, 3]), (4, 5))
LISTS = np.array([[0, 1], [1, 2], [3, 4]], dtype=np.int32)


def test_lists_by_hand() -> None:
    found = list_metrics(LISTS, TRAIN, [2])
    expected = {
        "novelty@2": [(0 + 1) / 2, (1 + 2) / 2, (2 + 2) / 2],  # item 4 counts as if it had one user
        "diversity@2": [1 - 2 / math.sqrt(4 * 2), 1, 1],
        "avg_popularity@2": [(4 + 2) / 2, (2 + 1) / 2, (1 + 0) / 2],
        "tail_share@2": [1 / 2, 1, 1],  # the head is item 0
        "user_coverage@2": [1, 1, 1],
    }
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name] == pytest.approx(values, rel=1e-15), name


def test_exposure_by_hand() -> None:
    found = exposure_metrics({1: np.array([1, 1, 0, 1, 0]), 2: np.array([1, 2, 1, 1, 1])})  # counts in LISTS
    assert found["gini@2"] == pytest.approx((-4 - 2 + 0 + 2 + 4 * 2) / (5 * 6), rel=1e-15)
    assert found["entropy@2"] == pytest.approx(4 / 6 * math.log2(6) + 2 / 6 * math.log2(3), rel=1e-15)
    assert found["entropy@1"] == pytest.approx(math.log2(3), rel=1e-15)


def test_short_and_empty_lists() -> None:
    short = np.array([[1, -1, -1], [-1, -1, -1], [0, 1, -1]], dtype=np.int32)
    found = list_metrics(short, TRAIN, [1, 3])
    assert found["user_coverage@1"].tolist() == [1, 0, 1]
    assert found["user_coverage@3"].tolist() == [0, 0, 0]
    assert found["novelty@3"].tolist() == [1, 0, 0.5]
    assert found["avg_popularity@3"].tolist() == [2, 0, 3]
    assert found["tail_share@3"].tolist() == [1, 0, 0.5]
    assert found["diversity@3"] == pytest.approx([0, 0, 1 - 2 / math.sqrt(8)])
    assert found["diversity@1"].tolist() == [0, 0, 0]
    assert exposure_metrics({3: np.zeros(5, dtype=np.int64)}) == {"gini@3": 0.0, "entropy@3": 0.0}


@pytest.mark.parametrize("n", [1, 2, 7])
def test_bounds_of_gini_and_entropy(n: int) -> None:
    equal, single = np.full(n, 3), np.eye(1, n, dtype=np.int64)[0]
    assert gini(equal) == 0
    assert entropy(equal) == pytest.approx(math.log2(n))
    assert gini(single) == pytest.approx(1 - 1 / n)
    assert entropy(single) == 0
    counts = np.random.default_rng(n).integers(0, 9, n) + 1
    by_pairs = np.abs(counts[:, None] - counts).sum() / (2 * n * counts.sum())  # the other usual form
    assert gini(counts) == pytest.approx(by_pairs, abs=1e-15)


def random_data(seed: int) -> tuple[CSR, CSR]:
    part = np.random.default_rng(seed).choice(3, size=(50, 33), p=[0.7, 0.2, 0.1])
    (users, items), (held_out_users, held_out_items) = np.nonzero(part == 1), np.nonzero(part == 2)
    return CSR.from_pairs(users, items, (50, 33)), CSR.from_pairs(held_out_users, held_out_items, (50, 33))


def test_an_evaluation_equals_plain_loops() -> None:
    seen, held_out = random_data(0)
    rank = popularity_ranker(seen)
    plain = evaluate(rank, seen, held_out, (3, 8))
    result = evaluate(rank, seen, held_out, (3, 8), beyond_accuracy=True)
    assert plain.means.items() <= result.means.items()
    assert set(result.means) - set(plain.means) == {
        f"{name}@{k}"
        for name in (
            "novelty", "diversity", "avg_popularity", "tail_share", "user_coverage", "gini", "entropy"
        )
        for k in (3, 8)
    }  # fmt: skip
    X = seen.to_scipy(np.float64).toarray()
    n = X.sum(0)
    head = sorted(range(33), key=lambda item: (-n[item], item))[:7]  # a fifth of 33, rounded up
    users = measurable(seen, held_out)
    top = rank(users, seen.take(users), 8)
    for k in (3, 8):
        for row, items in enumerate(top[:, :k].tolist()):
            cosines = [X[:, i] @ X[:, j] / math.sqrt(n[i] * n[j]) for i, j in combinations(items, 2)]
            expected = {
                "novelty": np.mean([-math.log2(n[i] / 50) for i in items]),
                "diversity": 1 - np.mean(cosines),
                "avg_popularity": np.mean(n[items]),
                "tail_share": np.mean([i not in head for i in items]),
                "user_coverage": 1,
            }
            for name, value in expected.items():
                assert result.per_user[f"{name}@{k}"][row] == pytest.approx(value, rel=1e-12), name
        for name in expected:
            assert result.means[f"{name}@{k}"] == pytest.approx(result.per_user[f"{name}@{k}"].mean())


def test_lists_of_several_blocks_of_users_are_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, held_out = random_data(1)
    whole = evaluate(popularity_ranker(seen), seen, held_out, (5,), beyond_accuracy=True)
    monkeypatch.setattr("drm_triton.ranking.evaluate.QUERIES_PER_BLOCK", 7)
    blocks = evaluate(popularity_ranker(seen), seen, held_out, (5,), beyond_accuracy=True)
    assert blocks.means == whole.means
    assert blocks.per_user.equals(whole.per_user)


def test_a_model_is_measured_beyond_accuracy(models: dict[str, DRM]) -> None:
    model = models["dot"]
    held_out = CSR.from_pairs(np.arange(120), np.arange(120) % 90, (120, 90))
    found = model.evaluate(held_out, ks=(10,), min_train=1, beyond_accuracy=True).means
    assert 0 < found["diversity@10"] < 1
    assert found["user_coverage@10"] == 1
    items = model.interactions.encode_items(model.recommend(k=10)["item"])
    assert found["avg_popularity@10"] == pytest.approx(model.interactions.train.popularity()[items].mean())
    assert "diversity@10" not in model.evaluate(held_out, ks=(10,), min_train=1).means
