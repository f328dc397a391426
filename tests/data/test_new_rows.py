"""New rows are filtered as those of the training: what a filter removes is known, and not learned from."""

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import scipy.sparse

from drm_triton import DRM, Dataset
from drm_triton.data.new_rows import filters_of, new_rows
from drm_triton.errors import InputError

ALL = {"ratios": (1, 0, 0)}
RATED = pl.DataFrame(
    {
        "user": ["ann", "ann", "bob", "bob", "cy", "cy"],
        "item": ["x", "y", "x", "z", "y", "z"],
        "rating": [5, 4, 5, 4, 5, 1],
    }
)
CASES: dict[str, tuple[dict[str, Any], str, list[Any]]] = {
    "ratings": ({"min_rating": 4}, "rating", [1, 3, 5]),
    "named ratings": ({"min_rating": 4, "rating": "liking"}, "liking", [1, 3, 5]),
    "usual name": ({"min_rating": 4, "rating": "liking"}, "rating", [1, 3, 5]),
    "events": ({"event_weight": {"buy": 5, "gift": 1}}, "event", ["view", "view", "buy"]),
}


def trained(options: dict[str, Any]) -> DRM:
    first = RATED.rename({"rating": options.get("rating", "rating")})
    if "event_weight" in options:
        first = RATED.drop("rating").with_columns(event=pl.Series(["buy", "buy", "buy", "gift", "buy", "view"]))
    return DRM(factors=2, epochs=2).fit(Dataset.from_frame(first, **options, **ALL))


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_filters_of_the_training_hold_for_new_rows(case: str, stored: bool, tmp_path: Path) -> None:
    options, column, values = CASES[case]
    model = trained(options)
    if stored:
        model.save(tmp_path / "model")
        model = DRM.load(tmp_path / "model")
    for user in ("dora", "eve"):  # an update of an update still knows them
        model.partial_fit(pl.DataFrame({"user": [user] * 3, "item": ["x", "y", "z"], column: values}))
        data = model.interactions
        code = data.encode_users([user])[0]
        assert data.item_ids[data.train.row(code)].to_list() == ["z"]
        assert data.item_ids[data.dropped.row(code)].to_list() == ["x", "y"]


@pytest.mark.filterwarnings("ignore:2 of 2 rows")
@pytest.mark.parametrize(("options", "rating"), [({"min_rating": 4}, 1), ({}, 0)])
def test_rows_that_are_all_removed_are_known(options: dict[str, Any], rating: int) -> None:
    model = trained(options)
    before = model.interactions.n_interactions
    model.partial_fit(pl.DataFrame({"user": ["ann", "dora"], "item": ["z", "x"], "rating": [rating] * 2}))
    assert model.interactions.n_interactions == before
    assert "z" not in model.recommend(["ann"])["item"]
    assert set(model.recommend(["dora"], unknown="popular")["item"]) == {"y", "z"}


def test_a_removed_row_of_a_pair_that_the_model_has_changes_nothing() -> None:
    model = trained(CASES["events"][0])
    model.partial_fit(pl.DataFrame({"user": ["ann"], "item": ["x"], "event": ["view"]}))
    assert model.interactions.item_ids[model.interactions.train.row(0)].to_list() == ["x", "y"]


def test_filters_of_files_are_those_of_frames() -> None:
    frame = Dataset.from_frame(RATED, user="user", min_rating=4, min_user=1)
    assert filters_of(frame.meta) == {"user": "user", "min_rating": 4.0}
    prepared = {"options": {"min_rating": None, "seed": 0}, "reading": {"event_weight": {"buy": 5}, "separator": ";"}}
    assert filters_of(prepared) == {"event_weight": {"buy": 5}}
    assert filters_of({"source": "csr", "options": None}) == {}


def test_what_cannot_be_filtered_is_refused() -> None:
    pairs = pl.DataFrame({"user": ["dora"], "item": ["x"]})
    with pytest.raises(InputError, match=r"`min_rating` 4 needs a rating .* those of the training hold for new rows"):
        new_rows(pairs, {"min_rating": 4})
    with pytest.raises(InputError, match="recognised as the events"):
        new_rows(pairs.lazy(), {"event_weight": {"buy": 5}})
    with pytest.raises(InputError, match="which a matrix does not have; give a frame with ratings"):
        new_rows(scipy.sparse.csr_matrix(np.eye(2)), {"min_rating": 4})
    with pytest.raises(InputError, match=r"no new interactions: the frame has no rows$"):
        new_rows(RATED.clear(), {})
    assert new_rows(Dataset.of(pairs), {"min_rating": 4}).n_interactions == 1
