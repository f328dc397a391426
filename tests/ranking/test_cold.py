"""Cold items and users: vectors predicted from attributes, in all results, flagged; and items without attributes."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import scipy.sparse
import torch

from drm_triton import DRM, Dataset
from drm_triton.data.prepare.synthetic import Shape, generate
from drm_triton.errors import InputError
from drm_triton.export import export
from drm_triton.models import BPR, EASE, IALS
from drm_triton.models import load as load_model
from drm_triton.ranking.cold import regress, with_cold_rows
from drm_triton.serving.app import create_app
from drm_triton.serving.engine import Engine, TopKRequest, search_batch
from tests.conftest import call
from tests.serving.test_app import Client

GENRES = ("jazz", "rock", "folk")
COLD = [f"new {genre}" for genre in GENRES]


def interactions() -> pl.DataFrame:
    """Users of three kinds, who have seven in ten of the twenty items of their genre, and few others."""
    rng = np.random.default_rng(0)
    chance = np.where(np.arange(60)[:, None] % 3 == np.arange(60) % 3, 0.7, 0.05)
    users, items = np.nonzero(rng.random(chance.shape) < chance)
    return pl.DataFrame({"user": [f"u{u}" for u in users], "item": [f"i{i}" for i in items]})


def attributed(users: bool = False) -> Dataset:
    """The interactions with genres of the items, and with new items, of which one has no genre."""
    ids = [f"i{i}" for i in range(60)] + COLD + ["unheard of"]
    items = pl.DataFrame({"item": ids, "genre": [GENRES[i % 3] for i in range(60)] + [*GENRES, None]})
    people = {"user": [f"u{u}" for u in range(60)] + ["zoe"], "likes": [GENRES[u % 3] for u in range(60)] + ["rock"]}
    data = Dataset.from_frame(interactions(), ratios=(1, 0, 0))
    return data.with_attributes(items, pl.DataFrame(people) if users else None)


def test_the_regression_is_ridge_and_its_error_is_that_of_leaving_one_row_out() -> None:
    rng = np.random.default_rng(1)
    X, n = scipy.sparse.random(40, 7, 0.4, "csr", rng=rng), 40
    Y, weights = rng.normal(size=(n, 3)), rng.random(n) + 0.5
    weights /= weights.mean()
    found = regress(X, Y, weights)

    def solve(rows: np.ndarray) -> np.ndarray:
        """Return [B; b] by least squares with extra rows for the penalty."""
        root = np.sqrt(weights[rows])[:, None]
        left = np.vstack([root * np.column_stack([X.toarray()[rows], np.ones(len(rows))]), np.zeros((7, 8))])
        left[len(rows) :, :7] = np.sqrt(found.ridge) * np.eye(7)
        solution: np.ndarray = np.linalg.lstsq(left, np.vstack([root * Y[rows], np.zeros((7, 3))]), rcond=None)[0]
        return solution

    np.testing.assert_allclose(np.vstack([found.B, found.b]), solve(np.arange(n)), atol=1e-9)
    np.testing.assert_allclose(found(X[:5]), X.toarray()[:5] @ found.B + found.b, atol=1e-12)
    errors = []
    for row in range(n):
        without = solve(np.delete(np.arange(n), row))
        errors.append(np.square(Y[row] - X.toarray()[row] @ without[:7] - without[7]).sum())
    np.testing.assert_allclose(found.variance, np.average(errors, weights=weights), rtol=1e-9)


def test_the_ridge_is_large_if_features_say_nothing_and_small_if_they_say_all() -> None:
    rng = np.random.default_rng(2)
    X = scipy.sparse.csr_matrix(np.eye(10)[rng.integers(0, 10, 300)])
    exact = X @ rng.normal(size=(10, 4))
    assert regress(X, exact).ridge == 0.01
    assert regress(X, rng.normal(size=(300, 4))).ridge > 100 * regress(X, exact + rng.normal(size=(300, 4)) / 3).ridge


@pytest.mark.usefixtures("threads")
def test_predicted_vectors_have_the_same_bits_for_any_number_of_threads() -> None:
    rng = np.random.default_rng(3)
    X, Y = scipy.sparse.random(3000, 200, 0.05, "csr", rng=rng), rng.normal(size=(3000, 16))
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        found.append(regress(X, Y)(X))
    np.testing.assert_array_equal(*found)


MODELS: list[Any] = [
    partial(DRM, factors=8, epochs=10),
    partial(DRM, factors=8, epochs=10, objective="hinge+drm", score="l2", share=1),
    partial(IALS, factors=8, epochs=5),
    partial(BPR, factors=8, epochs=30),
]


@pytest.mark.parametrize("make", MODELS, ids=["cosine", "l2", "als", "bias"])
def test_new_items_are_ranked_by_their_genre(make: Any, tmp_path: Path) -> None:
    data = attributed()
    model = make().fit(data)
    assert data.item_ids.filter(model.cold_items).to_list() == sorted(COLD)
    frame = model.recommend(only=[*COLD, "unheard of"])
    assert frame["user"].n_unique() == 60
    for user, items in frame.group_by("user"):
        genre = GENRES[int(str(user[0])[1:]) % 3]
        assert items["item"][0] == f"new {genre}"
        assert items["item"].to_list()[3:] == ["unheard of"]  # nothing is known about it, so it is last
        assert items["cold"].to_list() == [True, True, True, False]
    # among all items, known ones are not crowded out
    top = model.recommend(k=10)
    assert top["cold"].mean() < 0.15
    assert "unheard of" not in set(model.recommend(k=35)["item"])
    # everything that uses vectors uses the predicted ones, also after loading
    model.save(tmp_path / "model")
    again = load_model(tmp_path / "model")
    assert again.recommend(k=20).equals(model.recommend(k=20))
    similar = again.similar_items(["new rock"], k=5)
    assert all(int(item[1:]) % 3 == 1 for item in similar["similar"])
    assert not similar["cold"].any()  # it is about the items that were found
    best = frame.group_by("user").first().sort("user")
    np.testing.assert_allclose(model.score(best["user"], best["item"]), best["score"], rtol=1e-5, atol=1e-6)
    export(again, tmp_path / "npz")
    exported = np.load(tmp_path / "npz" / "factors.npz")
    np.testing.assert_array_equal(exported["item_factors"], model.item_factors.numpy())
    # the learned rows are untouched
    np.testing.assert_array_equal(
        model.item_factors.numpy()[~model.cold_items], model.factors(model.tensors)[1].numpy()[~model.cold_items]
    )


@pytest.mark.parametrize("score", ["dot", "cosine"])
def test_a_number_beyond_all_others_gives_no_absurd_score(score: str) -> None:
    """A new item is usually newer than all others. Its score is that of the newest, not an extrapolation."""
    years = [1950 + i % 20 for i in range(60)]
    ids = [f"i{i}" for i in range(60)] + ["newest", "later", "mistyped"]
    items = pl.DataFrame({"item": ids, "genre": [GENRES[i % 3] for i in range(60)] + ["rock"] * 3,
                          "year": [*years, 1969, 2025, 971]})  # fmt: skip
    data = Dataset.from_frame(interactions(), ratios=(1, 0, 0)).with_attributes(items)
    model = DRM(score=score, factors=8, epochs=5).fit(data)
    cold = model.recommend(users=["u1"], k=63).filter(pl.col("item").is_in(["newest", "later", "mistyped"]))
    scores = dict(cold.select("item", "score").iter_rows())
    assert scores["later"] == pytest.approx(scores["newest"], abs=1e-6)
    assert abs(scores["mistyped"]) <= 1


def test_a_run_and_the_service_have_the_cold_items(no_curves: None, tmp_path: Path) -> None:
    data = attributed()
    model = DRM(factors=8, epochs=2, eval_every=0).fit(data, run=tmp_path / "run")
    expected = DRM(factors=8, epochs=2, eval_every=0).fit(data).recommend(["u0"], k=70)
    assert DRM.load(tmp_path / "run").recommend(["u0"], k=70).equals(expected)
    engine = Engine(model)
    request = TopKRequest(engine.user_queries[0], np.array([60], dtype=np.int32), 64)
    (found,) = search_batch(model.index(), [request])
    assert sorted(found.codes) == [code for code in range(64) if code != 60]
    assert found.codes[-1] == 63  # unheard of
    code, out, _ = call("recommend", tmp_path / "run", "--user", "u0", "--k", "70")
    assert code == 0
    assert sum(line.endswith("(cold)") for line in out.splitlines()) == 3
    code, _, _ = call("recommend", tmp_path / "run", "--user", "u0", "--k", "70", "--out", tmp_path / "out.jsonl")
    assert code == 0
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert {row["item"] for row in rows if row["cold"]} == set(COLD)


def test_the_distance_to_a_predicted_vector_includes_its_variance() -> None:
    """With l2 scores, points near the centre would be near to everyone, and cold items ahead of all others."""
    rng = np.random.default_rng(4)
    data = attributed()
    U, V = (torch.nn.functional.normalize(torch.from_numpy(rng.normal(size=(n, 16)))) for n in data.train.shape)
    U[:, 15] = 0  # a direction that users do not use
    U, V = U.float(), V.float()
    V[:60] += 0.4 * V[60:63].repeat(20, 1)  # items of a genre have something in common
    plain, shifted = (with_cold_rows(U, V, data, score) for score in ("dot", "l2"))
    cold = shifted.cold_items
    genre = np.arange(60) % 3
    variance = torch.stack([(V[:60][genre == g] - plain.items[60 + g]).square().sum(1).mean() for g in range(3)])
    added = (U[:, None] - shifted.items[cold]).square().sum(2) - (U[:, None] - plain.items[cold]).square().sum(2)
    # the component of the prediction in this direction is replaced: users do not see it
    np.testing.assert_allclose(added, added[:1].expand_as(added), atol=1e-5)
    np.testing.assert_allclose(added.mean(), variance.mean(), rtol=0.15)


def test_new_users_are_served_by_their_attributes(tmp_path: Path) -> None:
    data = attributed(users=True)
    model = DRM(factors=8, epochs=10).fit(data)
    assert data.user_ids.filter(model.cold_users).to_list() == ["zoe"]
    frame = model.recommend(["zoe", "u0"], k=5)
    assert all(int(item[1:]) % 3 == 1 for item in frame.filter(user="zoe")["item"])
    assert frame["cold"].to_list() == [True] * 5 + [item in COLD for item in frame["item"][5:]]
    assert "zoe" in set(model.recommend(k=1)["user"])
    assert model.score(["zoe"], [frame["item"][0]])[0] == pytest.approx(frame["score"][0], abs=1e-6)
    # a new user who is described by items is not the cold user of the same name
    new = model.recommend_from({"zoe": ["i0", "i3"]}, k=5)
    assert new["cold"].to_list() == [item in COLD for item in new["item"]]
    assert model.recommend(["nobody", "zoe"], k=2, unknown="popular")["cold"].to_list() == [False, False, True, True]
    held_out = Dataset(data.train, data.valid, one_item(data, "zoe"), data.users, data.items)
    folded = DRM(factors=8, epochs=10).fit(held_out)
    assert not folded.cold_users.any()  # her item says more than her attributes


def one_item(data: Dataset, user: str) -> Any:
    """Return a part of a data set where one user has the first item."""
    from drm_triton.data.csr import CSR

    return CSR.from_pairs(data.encode_users([user]).astype(np.int64), np.zeros(1, np.int32), data.train.shape)


@pytest.mark.parametrize("make", [*MODELS[:1], EASE], ids=["DRM", "EASE"])
def test_without_attributes_items_without_interactions_come_last(make: Any) -> None:
    ids = sorted({*interactions()["item"], "a new one"})
    data = Dataset.from_frame(interactions(), ratios=(1, 0, 0)).with_attributes(pl.DataFrame({"id": ids}))
    model = make().fit(data)
    frame = model.recommend(k=61)
    assert "cold" not in frame.columns
    last = frame.group_by("user", maintain_order=True).last()
    assert set(last["item"]) == {"a new one"}
    assert (frame["item"] == "a new one").sum() == 60  # nothing else was left
    assert model.recommend(["u0"], only=["a new one"])["item"].to_list() == ["a new one"]
    assert "a new one" not in set(model.similar_items(["i0"], k=59)["similar"])
    with pytest.raises(InputError, match="'a new one': no interactions in the training data"):
        model.similar_items(["a new one"])


def test_item_models_say_that_they_cannot_recommend_new_items() -> None:
    with pytest.warns(UserWarning, match="ease has weights between items, so it cannot recommend the 4 items without"):
        model = EASE().fit(attributed())
    assert not model.cold_items.any()
    assert "cold" not in model.recommend(k=3).columns


def test_attributes_that_say_nothing_predict_nothing() -> None:
    data = Dataset.from_frame(interactions(), ratios=(1, 0, 0))
    table = pl.DataFrame({"id": ["x1", "x2"], "genre": ["jazz", "jazz"]})  # none of the items with interactions has one
    model = DRM(factors=4, epochs=1).fit(data.with_attributes(table))
    assert not model.cold_items.any()
    assert not set(model.recommend(k=40)["item"]) & {"x1", "x2"}


def test_a_liked_item_of_which_nothing_is_known_says_nothing_about_a_user() -> None:
    users, items = generate(Shape(users=60, items=40, interactions=700), 0)
    data = Dataset.from_frame(pl.DataFrame({"user": users, "item": items}), ratios=(1, 0, 0))
    data = data.with_attributes(pl.DataFrame({"item": [99]}))
    model = DRM(factors=4, epochs=2).fit(data)
    with pytest.raises(InputError, match=r'99: no interactions in the training data.*`unknown="skip"`'):
        model.recommend_from({"ann": [99, 3]})
    with pytest.warns(UserWarning, match="skipped 1 of 2 item ids"):
        found = model.recommend_from({"ann": [99, 3]}, unknown="skip")
    assert found.equals(model.recommend_from({"ann": [3]}))
    client = Client(create_app(model))
    assert client("POST", "/recommendations", json={"liked": [99]}).status_code == 404
    answer = client("POST", "/recommendations", json={"liked": [99, 3], "unknown": "popular"}).json()
    assert answer["unknown"] == [99]
    assert [row["item"] for row in answer["items"]] == found["item"].to_list()
