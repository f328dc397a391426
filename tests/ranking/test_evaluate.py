"""Evaluation through the top-K kernel, against a plain ranking of the dense score matrix."""

import itertools

import numpy as np
import polars as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drm_triton.data.dataset import CSR
from drm_triton.errors import InputError
from drm_triton.kernels import get_backend
from drm_triton.names import Score
from drm_triton.ranking.evaluate import (
    average,
    by_activity,
    evaluate,
    evaluate_users,
    factor_ranker,
    membership,
    popularity_ranker,
)
from drm_triton.ranking.metrics import ranking_metrics

CPU = get_backend("cpu")


def random_split(seed: int, users: int = 40, items: int = 60) -> tuple[CSR, CSR]:
    rng = np.random.default_rng(seed)
    part = rng.choice(3, size=(users, items), p=[0.7, 0.2, 0.1])
    (seen_users, seen_items), (held_out_users, held_out_items) = np.nonzero(part == 1), np.nonzero(part == 2)
    shape = (users, items)
    return CSR.from_pairs(seen_users, seen_items, shape), CSR.from_pairs(held_out_users, held_out_items, shape)


def random_factors(seed: int, users: int = 40, items: int = 60, d: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(users, d, generator=generator), torch.randn(items, d, generator=generator)


def test_an_evaluation_prints_short() -> None:
    result = evaluate(popularity_ranker(random_split(0)[0]), *random_split(0), (3,), 1)
    assert repr(result).startswith(f"Evaluation(users={len(result.per_user)}, left_out=")
    assert f"ndcg@3={result.means['ndcg@3']:.4f}" in repr(result)
    assert len(repr(result)) < 300


@pytest.mark.parametrize("score", ["dot", "l2"])
def test_equals_a_plain_ranking_of_all_items(score: Score) -> None:
    seen, held_out = random_split(0)
    U, V = random_factors(0)
    result = evaluate(factor_ranker(CPU, U, V, score), seen, held_out, (3, 10))
    scores = U.double() @ V.double().T if score == "dot" else -torch.cdist(U.double(), V.double()).square()
    rows = []
    for u in range(len(U)):
        T, train = set(held_out.row(u)), set(seen.row(u))
        if T and len(train) >= 5:
            order = [i for i in torch.argsort(-scores[u], stable=True).tolist() if i not in train][:10]
            hits = np.array([[i in T for i in order]])
            rows.append([ranking_metrics(hits, np.array([len(T)]), k) for k in (3, 10)])
    assert len(result.per_user) == len(rows)
    for position, k in enumerate((3, 10)):
        for name in rows[0][position]:
            expected = float(np.mean([row[position][name] for row in rows]))
            assert result.means[f"{name}@{k}"] == pytest.approx(expected, rel=1e-12)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(["dot", "l2"]), st.integers(1, 60))
def test_seen_items_never_appear(seed: int, score: Score, k: int) -> None:
    seen, _ = random_split(seed)
    U, V = random_factors(seed)
    V[::3] = V[0]  # ties
    items = factor_ranker(CPU, U, V, score)(np.arange(40), seen, k)
    assert not membership(items, seen).any()
    for u in range(40):
        found = items[u][items[u] >= 0]
        assert len(set(found)) == len(found) == min(k, 60 - len(seen.row(u)))


def test_users_without_held_out_items_or_with_little_training_are_left_out() -> None:
    seen = CSR.from_pairs(np.repeat([0, 1, 2], [5, 4, 5]), np.r_[0:5, 0:4, 0:5], (3, 10))
    held_out = CSR.from_pairs(np.array([0, 1]), np.array([7, 7]), (3, 10))
    result = evaluate(popularity_ranker(seen), seen, held_out, (10,))
    assert result.per_user["user"].to_list() == [0]
    assert len(evaluate(popularity_ranker(seen), seen, held_out, (10,), min_train=0).per_user) == 2
    with pytest.raises(
        InputError, match=r"no user has both .* prepare the data with a split that holds out some items"
    ):
        evaluate(popularity_ranker(seen), seen, CSR.empty((3, 10)), (10,))
    with pytest.raises(
        InputError, match=r"no user has both .* 2 with fewer than 6 training items\); lower `min_train`"
    ):
        evaluate(popularity_ranker(seen), seen, held_out, (10,), min_train=6)
    with pytest.raises(InputError, match="cut-offs `ks` must be at least 1"):
        evaluate(popularity_ranker(seen), seen, held_out, (0,))


@pytest.mark.parametrize("shards", [2, 3, 7, 211, 300])  # the last: more shards than users
def test_any_number_of_shards_gives_the_same_bits(shards: int) -> None:
    seen, held_out = random_split(4, users=211)
    U, V = random_factors(4, users=211)
    rank, options = factor_ranker(CPU, U, V, "dot", seen), {"ks": (3, 10, 47), "beyond_accuracy": True}
    whole = evaluate(rank, seen, held_out, min_train=10, **options)
    bounds = np.arange(shards + 1) * 211 // shards
    ranges = [range(start, stop) for start, stop in itertools.pairwise(bounds)]
    parts = [evaluate_users(rank, seen, held_out, users, min_train=10, **options) for users in ranges]
    joined = average(parts)
    assert joined.means == whole.means
    assert joined.per_user.equals(whole.per_user)
    assert joined.left_out == whole.left_out != {}


def test_a_shard_reads_the_rows_of_its_users_only() -> None:
    seen, held_out = random_split(5)
    U, V = random_factors(5)
    rank = factor_ranker(CPU, U, V, "dot")
    expected = evaluate_users(rank, seen, held_out, range(10, 20))

    def damaged_elsewhere(matrix: CSR) -> CSR:
        indices = np.full_like(matrix.indices, 10**9)
        own = slice(matrix.indptr[10], matrix.indptr[20])
        indices[own] = matrix.indices[own]
        return CSR(matrix.indptr, indices, matrix.shape)

    found = evaluate_users(rank, damaged_elsewhere(seen), damaged_elsewhere(held_out), range(10, 20))
    assert found.per_user.equals(expected.per_user)
    assert found.per_user["user"].is_between(10, 19).all()


def test_popularity_ranks_by_count_and_skips_the_seen() -> None:
    train = CSR.from_pairs(np.array([0, 0, 1, 1, 2]), np.array([1, 2, 2, 3, 2]), (3, 5))
    items = popularity_ranker(train)(np.arange(3), train, 4)
    assert items.tolist() == [[3, 0, 4, -1], [1, 0, 4, -1], [1, 3, 0, 4]]


def test_activity_groups_hold_every_user_once() -> None:
    seen, held_out = random_split(3, users=200)
    result = evaluate(popularity_ranker(seen), seen, held_out, (10,))
    groups = by_activity(result, "ndcg@10", groups=4)
    assert groups["users"].sum() == len(result.per_user)
    assert (groups["max_train"].to_numpy()[:-1] < groups["min_train"].to_numpy()[1:]).all()
    mean = np.average(groups["ndcg@10"].to_numpy(), weights=groups["users"].to_numpy())
    assert mean == pytest.approx(result.means["ndcg@10"])
    with pytest.raises(InputError, match=r"`metric` must be one of .*, got 'auc@10'"):
        by_activity(result, "auc@10")
    assert groups.schema["users"].is_integer()
    assert isinstance(groups, pl.DataFrame)
