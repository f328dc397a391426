"""Items that users have through pairs that a filter removed are not recommended, and nothing is learned from them."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

from drm_triton import DRM, Dataset
from drm_triton.errors import HeldOutWarning
from drm_triton.export import export
from drm_triton.models import EASE, load
from drm_triton.ranking.evaluate import membership
from drm_triton.recommender import Recommender

MODELS: dict[str, Callable[[], Recommender[Any]]] = {
    "drm": lambda: DRM(factors=4, epochs=2),
    "ease": lambda: EASE(regularization=10.0),
}


@pytest.fixture(scope="module")
def frame() -> pl.DataFrame:
    """Return 30 users with 12 of 20 items each, a third of them rated low."""
    rng = np.random.default_rng(0)
    rows = [(f"u{u}", int(i), int(rng.integers(1, 7))) for u in range(30) for i in rng.permutation(20)[:12]]
    return pl.DataFrame(rows, ["user", "item", "rating"], orient="row")


@pytest.fixture(scope="module")
def data(frame: pl.DataFrame) -> Dataset:
    data = Dataset.from_frame(frame, min_rating=3)
    assert data.dropped.nnz > 50
    return data


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, data: Dataset) -> Recommender[Any]:
    return MODELS[request.param]().fit(data)


def offered(model: Recommender[Any], frame: pl.DataFrame, **options: Any) -> int:
    """Return how many of the recommendations the users have in the file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HeldOutWarning)
        best = model.recommend(k=20, **options)
    return len(best.join(frame, on=["user", "item"], how="semi"))


def test_what_a_filter_removed_is_not_recommended(model: Recommender[Any], frame: pl.DataFrame, tmp_path: Path) -> None:
    model.save(tmp_path / "model")
    for one in (model, load(tmp_path / "model"), model.refit()):
        assert offered(one, frame) == 0
        assert offered(one, frame, exclude_seen=False) > 0


def test_nothing_is_learned_from_it(data: Dataset, model: Recommender[Any], frame: pl.DataFrame) -> None:
    good = Dataset.from_frame(frame.filter(pl.col("rating") >= 3))
    without = type(model)(model.config).fit(good)
    assert all(torch.equal(without.tensors[name], tensor) for name, tensor in model.tensors.items())
    assert model.evaluate(data, min_train=1).means == without.evaluate(good, min_train=1).means


def test_an_update_still_knows_it(frame: pl.DataFrame) -> None:
    model = DRM(factors=4, epochs=2).fit(Dataset.from_frame(frame, min_rating=3, ratios=(1, 0, 0)))
    model.partial_fit(pl.DataFrame({"user": ["u0", "new"], "item": [99, 0], "rating": [5, 5]}))
    assert offered(model, frame) == 0


def test_users_of_whom_only_dropped_items_are_known_get_other_items(frame: pl.DataFrame) -> None:
    # All ratings of u0 are low. Attributes bring the user back: with one that others have too, as a cold user.
    low = frame.with_columns(rating=pl.when(pl.col("user") == "u0").then(1).otherwise("rating"))
    data = Dataset.from_frame(low, min_rating=3, ratios=(1, 0, 0))
    users = pl.DataFrame({"user": [f"u{u}" for u in range(30)], "town": ["here", "there"] * 15})
    model = DRM(factors=4, epochs=2).fit(data.with_attributes(users=users))
    assert model.recommend(["u0"], k=1)["cold"].all()
    assert offered(model, frame) == 0
    unknown = DRM(factors=4, epochs=2).fit(data.with_attributes(users=users.head(1).drop("town")))
    assert unknown.recommend(["u0"], unknown="popular", k=1)["score"].null_count() == 1
    assert offered(unknown, frame, users=["u0"], unknown="popular") == 0
    assert offered(unknown, frame, users=["u0"], unknown="popular", exclude_seen=False) > 0


def test_users_who_have_left_are_not_offered_their_items(frame: pl.DataFrame, tmp_path: Path) -> None:
    # All ratings of u0 are low, so the data set has no such user.
    low = frame.with_columns(rating=pl.when(pl.col("user") == "u0").then(1).otherwise("rating"))
    Dataset.from_frame(low, min_rating=3).save(tmp_path / "data")
    model = DRM(factors=4, epochs=2).fit(Dataset.load(tmp_path / "data"))
    model.save(tmp_path / "model")
    for one in (model, load(tmp_path / "model"), model.refit()):
        options: dict[str, Any] = {"users": ["new", "u0"], "unknown": "popular"}
        assert offered(one, frame, **options) == 0
        assert offered(one, frame, without={"u0": [0]}, **options) == 0
        assert offered(one, frame, exclude_seen=False, **options) == 12
        assert len(one.recommend(["new", "u0"], unknown="popular", k=20)) == 20 + 8


def test_an_update_of_a_loaded_model_knows_what_had_left(frame: pl.DataFrame, tmp_path: Path) -> None:
    data = Dataset.from_frame(frame.filter(pl.col("item") != 7), min_rating=3, ratios=(1, 0, 0))
    left = data.with_dropped(pl.DataFrame({"user": ["u0", "u1", "gone"], "item": [7, 7, 3]}))
    DRM(factors=4, epochs=1).fit(left).save(tmp_path / "model")
    model = DRM.load(tmp_path / "model")
    model.partial_fit(pl.DataFrame({"user": ["u2", "gone"], "item": [7, 4], "rating": [5, 5]}))
    best = model.recommend(["u0", "u1", "gone", "u3"], k=20)
    assert best.filter(pl.col("item") == 7)["user"].to_list() == ["gone", "u3"]
    assert 3 not in best.filter(pl.col("user") == "gone")["item"]


def test_it_is_exported(model: Recommender[Any], data: Dataset, tmp_path: Path) -> None:
    export(model, tmp_path / "npz", "npz")
    stored = np.load(tmp_path / "npz/owned.npz")
    assert np.array_equal(stored["items"], data.owned.indices)
    assert len(stored["items"]) == data.n_interactions + data.dropped.nnz


def test_evaluation_ranks_dropped_items_like_others(data: Dataset) -> None:
    # Published protocols exclude the items of the training alone.
    model = DRM(factors=4, epochs=2).fit(data)
    seen, _ = model.held_out(data)
    ranked = model.ranker()(np.arange(data.n_users), seen, 10)
    assert membership(ranked, data.dropped).any()
