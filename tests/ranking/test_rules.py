"""Rules of lists: at most so many items of a category, and diversity, compared with loops over the whole ranking."""

from functools import partial
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from drm_triton.data.csr import CSR
from drm_triton.errors import InputError
from drm_triton.kernels import get_backend
from drm_triton.ranking import rules as rules_module
from drm_triton.ranking.known_first import known_first
from drm_triton.ranking.limits import Limits
from drm_triton.ranking.popular import PopularIndex
from drm_triton.ranking.rules import RuledIndex, Rules
from drm_triton.ranking.topk import TopKIndex

N, D = 40, 6


def factors(seed: int, n: int = N) -> torch.Tensor:
    """Return vectors in few directions, so that items are similar and some scores are equal."""
    random = np.random.default_rng(seed)
    centres = random.normal(size=(5, D))
    vectors = centres[random.integers(0, 5, n)] + 0.3 * random.normal(size=(n, D)).round(1)
    return torch.from_numpy(vectors.astype(np.float32))


def excluded_items(seed: int, m: int, share: float) -> CSR:
    return CSR.from_mask(np.random.default_rng(seed).random((m, N)) < share)


tables = st.fixed_dictionaries(
    {
        "brand": st.lists(st.none() | st.sampled_from("abc"), min_size=N, max_size=N),
        "tags": st.lists(st.none() | st.lists(st.sampled_from("uvwxyz"), max_size=3), min_size=N, max_size=N),
        "year": st.lists(st.none() | st.integers(2000, 2003), min_size=N, max_size=N),
    }
).map(lambda columns: pl.DataFrame(columns, {"brand": pl.String, "tags": pl.List(pl.String), "year": pl.Int64}))
limited = st.dictionaries(st.sampled_from(["brand", "tags", "year"]), st.integers(1, 4))


def values_of(table: pl.DataFrame, name: str, item: int) -> set[Any]:
    value = table[name][item]
    return set() if value is None else set(value) if isinstance(value, pl.Series) else {value}


def may_join(chosen: list[int], item: int, table: pl.DataFrame, at_most: dict[str, int]) -> bool:
    """Return whether a list has room for an item, by counting."""
    return all(
        sum(value in values_of(table, name, other) for other in chosen) < most
        for name, most in at_most.items()
        for value in values_of(table, name, item)
    )


def unpadded(row: NDArray[np.int32]) -> list[int]:
    return [int(item) for item in row if item >= 0]


@settings(max_examples=60)
@given(tables, limited, st.integers(0, 9), st.integers(1, 12), st.floats(0, 1), st.booleans())
def test_at_most_is_the_greedy_walk_down_the_whole_ranking(
    table: pl.DataFrame, at_most: dict[str, int], seed: int, k: int, share: float, some: bool
) -> None:
    candidates = np.arange(0, N, 3) if some else None
    index = TopKIndex(get_backend("cpu"), factors(seed), "dot", candidates)
    queries = factors(seed + 100, 5)
    excluded = excluded_items(seed, 5, share)
    ruled = RuledIndex(index, Limits.of(table, list(at_most.items())))
    items, scores = ruled.search(queries, min(k, len(index)), excluded)
    ranking, ranked_scores = index.search(queries, len(index), excluded)
    for row in range(5):
        expected: list[int] = []
        places = []
        for place, item in enumerate(unpadded(ranking[row])):
            if len(expected) < items.shape[1] and may_join(expected, item, table, at_most):
                expected.append(item)
                places.append(place)
        assert unpadded(items[row]) == expected
        np.testing.assert_array_equal(scores[row, : len(expected)], ranked_scores[row, places])
        assert (items[row, len(expected) :] == -1).all()
        assert (scores[row, len(expected) :] == -np.inf).all()


@settings(max_examples=60)
@given(tables, limited, st.integers(0, 9), st.integers(1, 6), st.floats(0.01, 0.99), st.floats(0, 0.5))
def test_each_item_has_the_highest_marginal_relevance(
    table: pl.DataFrame, at_most: dict[str, int], seed: int, k: int, diversity: float, share: float
) -> None:
    V, queries = factors(seed), factors(seed + 100, 4)
    index = TopKIndex(get_backend("cpu"), V, "dot")
    excluded = excluded_items(seed, 4, share)
    ruled = RuledIndex(index, Limits.of(table, list(at_most.items())), diversity, V.numpy())
    items, scores = ruled.search(queries, k, excluded)
    ranking, ranked_scores = index.search(queries, N, excluded)
    directions = torch.nn.functional.normalize(V.double()).numpy()
    for row in range(4):
        score = dict(zip(ranking[row].tolist(), ranked_scores[row].tolist(), strict=True))
        chosen: list[int] = []
        pool: list[int] = []
        for item, its_score in zip(unpadded(items[row]), scores[row], strict=False):
            assert its_score == score[item]
            left = [i for i in pool if i not in chosen and may_join(chosen, i, table, at_most)]
            if not left:  # the next pool: the best items that are allowed
                left = [i for i in unpadded(ranking[row]) if i not in chosen and may_join(chosen, i, table, at_most)]
                pool = left = left[: min(10 * k, N)]
            low, high = min(score[i] for i in pool), max(score[i] for i in pool)
            value = {
                i: (1 - diversity) * (score[i] - low) / (high - low or 1)
                - diversity * max((float(directions[i] @ directions[j]) for j in chosen), default=0.0)
                for i in left
            }
            assert item in value
            assert value[item] >= max(value.values()) - 1e-5
            chosen.append(item)
        allowed = [i for i in unpadded(ranking[row]) if i not in chosen and may_join(chosen, i, table, at_most)]
        assert len(chosen) == k or not allowed


def test_full_categories_end_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    candidates = np.flatnonzero(np.arange(N) % 4 < 3)  # the fourth category and the null are not among them
    table = pl.DataFrame({"brand": [None if i == 3 else "abcd"[i % 4] for i in range(N)], "tags": [["x"]] * N})
    index = TopKIndex(get_backend("cpu"), factors(0), "dot", candidates)
    ruled = RuledIndex(index, Limits.of(table, [("tags", 9), ("brand", 1)], candidates))
    searched: list[int] = []
    search = index.search

    def counted(queries: Any, k: int, excluded: CSR | None) -> Any:
        searched.append(len(queries))
        return search(queries, k, excluded)

    monkeypatch.setattr(index, "search", counted)
    items, _ = ruled.search(factors(1, 6), 10)
    assert [sorted(item % 4 for item in unpadded(row)) for row in items] == [[0, 1, 2]] * 6
    assert searched == [6]


@pytest.mark.parametrize("diversity", [0.0, 0.4])
def test_a_list_does_not_depend_on_the_other_lists_of_a_search(
    diversity: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = np.random.default_rng(0)
    V, queries = (torch.from_numpy(random.normal(size=(n, 64)).astype(np.float32)) for n in (N, 30))
    limits = Limits.of(pl.DataFrame({"brand": random.integers(0, 12, N)}), [("brand", 1)])
    excluded = excluded_items(0, 30, 0.2)
    index = TopKIndex(get_backend("cpu"), V, "dot")
    ruled = RuledIndex(index, limits, diversity, V.numpy() if diversity else None)
    items, scores = ruled.search(queries, 8, excluded)
    for row in range(30):
        one, its_scores = ruled.search(queries[row : row + 1], 8, excluded.take(np.array([row])))
        np.testing.assert_array_equal(one[0], items[row])
        np.testing.assert_array_equal(its_scores[0], scores[row])
    monkeypatch.setattr(rules_module, "WORKSPACE", 7 * 16 * 64)
    monkeypatch.setattr(rules_module, "MASK", 3 * N)
    np.testing.assert_array_equal(ruled.search(queries, 8, excluded)[0], items)


def test_items_of_which_nothing_is_known_are_not_relevant() -> None:
    V = torch.eye(6)
    V[3:] *= 5  # higher scores than those of known items
    known = np.array([True] * 3 + [False] * 3)
    index = known_first(partial(TopKIndex, get_backend("cpu"), V, "dot"), known)
    none = Limits.of(pl.DataFrame({"id": range(6)}), [])
    items, _ = RuledIndex(index, none, 0.1, V.numpy()).search(torch.tensor([[3.0, 2, 1, 4, 4, 4]]), 4)
    assert items[0, :3].tolist() == [0, 1, 2]


def test_more_diversity_makes_lists_more_diverse() -> None:
    V, queries = factors(3), factors(4, 20)
    directions = torch.nn.functional.normalize(V)
    cosines = (directions @ directions.T).numpy()
    index, none = TopKIndex(get_backend("cpu"), V, "dot"), Limits.of(pl.DataFrame({"id": range(N)}), [])
    means = []
    for diversity in (0.0, 0.3, 0.7):
        ruled = RuledIndex(index, none, diversity, V.numpy() if diversity else None)
        items, _ = ruled.search(queries, 4)
        means.append(np.mean([cosines[np.ix_(row, row)].mean() for row in items]))
    assert means[0] > means[1] > means[2]


@settings(max_examples=40)
@given(tables, limited, st.integers(0, 9), st.integers(1, 12))
def test_popular_items_obey_the_rules(table: pl.DataFrame, at_most: dict[str, int], seed: int, k: int) -> None:
    train = CSR.from_mask(np.random.default_rng(seed).random((20, N)) < 0.3)
    excluded = excluded_items(seed, 2, 0.3)
    ruled = RuledIndex(PopularIndex(train.popularity()), Limits.of(table, list(at_most.items())))
    items, _ = ruled.search(ruled.stack([None, None]), k, excluded)
    for row in range(2):
        expected: list[int] = []
        for item in sorted(set(range(N)) - set(excluded.row(row).tolist()), key=lambda i: (-train.popularity()[i], i)):
            if len(expected) < k and may_join(expected, item, table, at_most):
                expected.append(item)
        assert unpadded(items[row]) == expected
    plain = PopularIndex(train.popularity(), np.array([1, 5, 9])).search(np.zeros(1), 5)[0]
    assert set(plain[0, :3]) == {1, 5, 9}
    assert (plain[0, 3:] == -1).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"at_most": {"genre": 0}}, "the number for genre must be an integer from 1 to 2147483647, got 0"),
        ({"at_most": {"genre": 2**64}}, "the number for genre must be an integer from 1 to 2147483647, got"),
        ({"at_most": {"genre": True}}, "got True"),
        ({"at_most": {"genre": 1.5}}, "got 1.5"),
        ({"at_most": ["genre"]}, "`at_most` must map attributes to numbers"),
        ({"diversity": 1.0}, "`diversity` must be a number from 0 to below 1, got 1.0"),
        ({"diversity": -0.1}, "got -0.1"),
        ({"diversity": float("nan")}, "got nan"),
        ({"diversity": "much"}, "got 'much'"),
        ({"where": 3}, "`where`"),
    ],
)
def test_bad_rules_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Rules.of(**arguments)


def test_limits_need_a_known_attribute_with_categories() -> None:
    table = pl.DataFrame({"id": [1], "price": [0.5]})
    with pytest.raises(InputError, match="`at_most`: the items have no attribute 'genre'; their columns are id"):
        Limits.of(table, [("genre", 1)])
    with pytest.raises(InputError, match="price has decimal numbers, which are no categories"):
        Limits.of(table, [("price", 1)])


def test_rules_of_text_can_be_kept_in_a_dictionary() -> None:
    assert {Rules.of("a<1", {"b": 2}, 0.5): 1}[Rules.of(["a<1"], {"b": 2}, 0.5)] == 1
