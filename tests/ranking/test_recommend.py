"""Recommendations and similarity as frames: which items, in which order, and ids that the model does not know."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import coo_matrix

from drm_triton import DRM, Dataset
from drm_triton.errors import InputError
from drm_triton.kernels import get_backend
from drm_triton.models import EASE
from drm_triton.ranking.topk import TopKIndex
from tests.ranking.conftest import LikedItems

N_ITEMS = 90


def scores_of(model: DRM, vectors: torch.Tensor) -> torch.Tensor:
    """Compute all scores by plain torch: [m, N]."""
    if model.config.score_in_force == "dot":
        return vectors @ model.item_factors.T
    return -torch.cdist(vectors.double(), model.item_factors.double()).square().float()


# -- recommend ---------------------------------------------------------------------------------------------------------


def test_the_best_unseen_items_in_order(model: DRM) -> None:
    data = model.interactions
    frame = model.recommend(k=5)
    assert frame.columns == ["user", "rank", "item", "score"]
    scores = scores_of(model, model.user_factors)
    for user, seen in enumerate(np.split(data.train.indices, data.train.indptr[1:-1])):
        scores[user, seen.astype(np.int64)] = -torch.inf
    best = scores.topk(5)
    for user, group in zip(data.user_ids, frame.partition_by("user", maintain_order=True), strict=True):
        row = int(data.encode_users([user])[0])
        assert group["rank"].to_list() == [1, 2, 3, 4, 5]
        assert group["user"].unique().to_list() == [user]
        np.testing.assert_allclose(group["score"], best.values[row], rtol=1e-4, atol=1e-5)
        ours = scores[row, torch.from_numpy(data.encode_items(group["item"])).long()]
        np.testing.assert_allclose(ours, best.values[row], rtol=1e-4, atol=1e-5)


ids = st.lists(st.integers(0, N_ITEMS - 1).map(lambda i: 10 * i), unique=True)


@settings(max_examples=40, deadline=None)
@given(
    score=st.sampled_from(["dot", "l2"]),
    only=st.none() | ids,
    without=st.none() | ids,
    seen=st.booleans(),
    k=st.integers(1, 100),
)
def test_only_without_and_seen_hold(
    score: str,
    only: list[int] | None,
    without: list[int] | None,
    seen: bool,
    k: int,
    models: dict[str, DRM],
    liked_items: LikedItems,
) -> None:
    model = models[score]
    data = model.interactions
    known = set(data.item_ids)
    allowed = (known if only is None else known & set(only)) - set(without or [])
    arguments: dict[str, Any] = {"k": k, "exclude_seen": not seen, "only": only, "without": without}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if not allowed:
            with pytest.raises(InputError, match=r"`only`|no items are left"):
                model.recommend(["u1"], **arguments)
            return
        frame = model.recommend(["u1", "u2"], **arguments)
        everything = model.recommend(["u1", "u2"], k=len(known), exclude_seen=not seen)
    for user in ("u1", "u2"):
        expected = allowed if seen else allowed - set(liked_items(model, user))
        ours = frame.filter(user=user)
        assert len(ours) == min(k, len(expected))
        # restricting the items leaves the order of those that remain
        order = everything.filter(pl.col("user") == user, pl.col("item").is_in(list(expected)))
        assert ours["item"].to_list() == order["item"].head(k).to_list()
        np.testing.assert_array_equal(ours["score"], order["score"].head(k))


def test_no_users_give_an_empty_frame_with_the_same_schema(model: DRM) -> None:
    assert model.recommend([]).schema == model.recommend(["u1"]).schema
    assert len(model.recommend([])) == 0


def test_blocks_add_up_to_the_whole(model: DRM, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = model.recommend(k=3)
    monkeypatch.setattr("drm_triton.ranking.recommend.QUERIES_PER_BLOCK", 7)
    blocks = list(model.recommend_blocks(k=3))
    assert len(blocks) == -(-model.interactions.n_users // 7)
    assert pl.concat(blocks).equals(whole)


def test_unknown_users(model: DRM) -> None:
    users = ["u1", "nobody", "u2", "u 3"]
    with pytest.raises(InputError, match=r"unknown user ids: 'nobody', 'u 3'.*`unknown=\"skip\"`"):
        model.recommend(users)
    with pytest.warns(UserWarning, match="skipped 2 of 4 user ids"):
        frame = model.recommend(users, k=2, unknown="skip")
    assert frame.equals(model.recommend(["u1", "u2"], k=2))
    frame = model.recommend(users, k=2, unknown="popular")
    assert frame["user"].unique(maintain_order=True).to_list() == users
    assert frame.filter(pl.col("user").is_in(["u1", "u2"])).equals(model.recommend(["u1", "u2"], k=2))
    train = model.interactions.train
    count = np.bincount(train.indices, minlength=train.shape[1])
    most = model.interactions.item_ids[np.argsort(-count, kind="stable")[:2]].to_list()
    for user in ("nobody", "u 3"):
        ours = frame.filter(user=user)
        assert ours["item"].to_list() == most
        assert ours["score"].null_count() == 2
    allowed = model.interactions.item_ids[:3]
    frame = model.recommend(["nobody"], only=allowed, without=allowed[:1], unknown="popular")
    assert set(frame["item"]) == set(allowed[1:])


@pytest.mark.parametrize("kind", [DRM, EASE])
def test_what_a_user_has_is_never_recommended_whatever_part_it_is_in(kind: Any, tmp_path: Path) -> None:
    parts = [([0, 1, 0], [0, 2, 3]), ([0, 1, 1], [1, 3, 4]), ([0, 2], [2, 0])]  # user 2 has held-out items only
    matrices = [coo_matrix((np.ones(len(u)), (u, i)), (3, 9)).tocsr() for u, i in parts]
    train, valid, test = matrices
    data = Dataset.from_csr(train, valid, test, user_ids=["ann", "bob", "cy"])
    options = {"factors": 4, "epochs": 2} if kind is DRM else {}
    model = kind(**options).fit(data)
    for fitted in (model, kind(**options).fit(data, run=tmp_path / "run"), kind.load(tmp_path / "run")):
        frame = fitted.recommend(k=9)
        for code, user in enumerate(data.user_ids):
            owned = {int(i) for part in matrices for i in part[code].indices}
            assert set(frame.filter(user=user)["item"]) == set(range(9)) - owned
    # a user with held-out items only is folded in from them
    expected = model.recommend_from({"cy": [0]}, k=9)
    assert model.recommend(["cy"], k=9).equals(expected)
    mixed = model.recommend(["ann", "cy"], k=9)
    assert mixed.filter(user="cy").equals(expected)
    # after a training on everything, nothing is held out
    final = kind(**options, fit_on="all").fit(data)
    assert final.interactions.train.nnz == final.interactions.owned.nnz == data.n_interactions


def test_users_without_interactions_are_unknown() -> None:
    lists = [[0, 1, 2], [], [1, 2, 3], [], [0, 3]]  # of users 10, 11, ...
    indptr = np.cumsum([0, *map(len, lists)])
    data = Dataset.from_csr((indptr, np.concatenate(lists).astype(np.int64)), user_ids=[10, 11, 12, 13, 14])
    model = DRM(factors=2, epochs=1).fit(data)
    with pytest.raises(InputError, match=r"user 11 has no interactions in the data set.*`unknown=\"skip\"`"):
        model.recommend([10, 11])
    with pytest.raises(InputError, match="unknown user id: 9"):
        model.recommend([9, 11])
    with pytest.warns(UserWarning, match="skipped 2 of 3 users: users 11, 13 have no interactions"):
        assert set(model.recommend([10, 11, 13], unknown="skip")["user"]) == {10}
    with pytest.warns(UserWarning, match="skipped 2 of 5 users") as caught:
        assert model.recommend(k=1)["user"].to_list() == [10, 12, 14]
    assert len(caught) == 1
    frame = model.recommend([11, 10, 9], k=1, unknown="popular")
    assert frame["user"].to_list() == [11, 10, 9]
    assert frame["score"].is_null().to_list() == [True, False, True]
    assert model.recommend(k=1, unknown="popular")["user"].to_list() == [10, 11, 12, 13, 14]
    with pytest.raises(InputError, match="user 13 has no interactions in the training data"):
        model.similar_users([10, 13])
    alike = model.similar_users([14, 10], k=9)
    assert alike["user"].to_list() == [14, 14, 10, 10]
    assert set(alike.filter(user=14)["similar"]) == {10, 12}
    assert set(alike.filter(user=10)["similar"]) == {12, 14}
    U = torch.nn.functional.normalize(model.user_factors)
    for user, _, other, value in alike.rows():
        assert value == pytest.approx(float(U[user - 10] @ U[other - 10]), abs=1e-6)


def test_unknown_users_beside_integer_ids() -> None:
    frame = pl.DataFrame({"user": [1, 1, 2], "item": [5, 6, 5]})
    model = DRM(factors=2, epochs=1).fit(Dataset.from_frame(frame, ratios=(1, 0, 0)))
    assert model.recommend(["2", 9], unknown="popular")["user"].to_list() == [2, 9, 9]
    assert model.recommend([2, "x"], unknown="popular")["user"].to_list() == ["2", "x", "x"]
    assert model.recommend([2.0], k=1)["item"].to_list() == [6]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"k": 0}, "`k` must be an integer of at least 1, got 0"),
        ({"k": 2.5}, r"`k` must be an integer of at least 1, got 2\.5"),
        ({"users": "u1"}, r"user ids must be a list, got the single value 'u1'; write \['u1'\]"),
        ({"users": [["u1"]]}, "must be whole numbers or text"),
        ({"only": []}, "`only` is empty"),
        ({"only": ["no such"]}, "`only`: unknown item id: 'no such'"),
        ({"only": [0], "without": [0]}, "no items are left to recommend"),
        ({"unknown": "ignore"}, "`unknown` must be one of error, skip, popular, got 'ignore'"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str, models: dict[str, DRM]) -> None:
    with pytest.raises(InputError, match=message):
        models["dot"].recommend(**arguments)


def test_unknown_items_in_options_warn(model: DRM) -> None:
    with pytest.warns(UserWarning, match="`without`: the model does not know 1 of the 2 items: 7"):
        model.recommend(["u1"], without=[0, 7])


def test_recommendations_from_histories(model: DRM, liked_items: LikedItems) -> None:
    history = liked_items(model, "u4")
    frame = model.recommend_from({"zoe": history, "yan": history[:3]}, k=6)
    assert frame["user"].to_list() == ["zoe"] * 6 + ["yan"] * 6
    assert not set(frame.filter(user="zoe")["item"]) & set(history)
    assert not set(frame.filter(user="yan")["item"]) & set(history[:3])
    index = TopKIndex(get_backend(), model.item_factors, model.config.score_in_force)
    items, _ = index.search(model.fold_in([history]), N_ITEMS)
    order = [i for i in model.interactions.item_ids[items[0]] if i not in history]
    assert frame.filter(user="zoe")["item"].to_list() == order[:6]
    by_number = model.recommend_from([history, [str(item) for item in history[:3]]], k=6)
    assert by_number.drop("user").equals(frame.drop("user"))
    assert by_number["user"].unique(maintain_order=True).to_list() == [0, 1]


def test_histories_with_unknown_items(model: DRM, liked_items: LikedItems) -> None:
    lists = {"a": [liked_items(model, "u1")[0], 7], "b": [7], "c": []}
    with pytest.raises(InputError, match="unknown item id: 7"):
        model.recommend_from(lists)
    with pytest.raises(InputError, match="the history of user 'c' is empty"):
        model.recommend_from({"c": []})
    with pytest.warns(UserWarning, match="skipped 2 of 3 ") as caught:
        frame = model.recommend_from(lists, k=2, unknown="skip")
    assert frame["user"].unique().to_list() == ["a"]
    assert "skipped 2 of 3 item ids" in str(caught[0].message)
    assert "skipped 2 of 3 users" in str(caught[1].message)
    with pytest.warns(UserWarning, match="skipped 2 of 3 item ids"):
        frame = model.recommend_from(lists, k=2, unknown="popular")
    assert frame["user"].unique(maintain_order=True).to_list() == ["a", "b", "c"]
    assert frame["score"].is_null().to_list() == [False] * 2 + [True] * 4
    with pytest.raises(InputError, match="list of lists"):
        model.fold_in("abc")
    with pytest.raises(
        InputError, match=r"a list of item ids for each user, .* value 10; .* write \[\[10, \.\.\.\]\] or"
    ):
        model.fold_in([10, 20])  # type: ignore[list-item]


# -- similar -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["item", "user"])
def test_similar_is_cosine_or_distance_and_never_itself(model: DRM, kind: str) -> None:
    data = model.interactions
    known, table = (data.item_ids, model.item_factors) if kind == "item" else (data.user_ids, model.user_factors)
    queried = known[[3, 0, 17]]
    frame = (model.similar_items if kind == "item" else model.similar_users)(queried, k=4)
    assert frame.columns == [kind, "rank", "similar", "score"]
    assert (frame[kind] != frame["similar"]).all()
    vectors = table.double()
    if model.config.score_in_force == "dot":
        vectors = torch.nn.functional.normalize(vectors)
        scores = vectors @ vectors.T
    else:
        scores = -torch.cdist(vectors, vectors).square()
    scores.fill_diagonal_(-torch.inf)
    best = scores[[3, 0, 17]].topk(4).values
    np.testing.assert_allclose(frame["score"].to_numpy().reshape(3, 4), best, rtol=1e-4, atol=1e-5)
    every = (model.similar_items if kind == "item" else model.similar_users)(queried[:1], k=10**9)
    assert len(every) == len(known) - 1


def test_similar_to_something_unknown(models: dict[str, DRM]) -> None:
    with pytest.raises(InputError, match="unknown item id: 7"):
        models["dot"].similar_items([7])
    with pytest.raises(InputError, match=r"unknown user id: 'u1x'.*the nearest are .*'u1'"):
        models["dot"].similar_users(["u1x"])
