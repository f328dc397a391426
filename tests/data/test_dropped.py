"""Pairs that a filter removed: the user has the item, so it is not recommended, but nothing is learned from it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import scipy.sparse

from drm_triton import Dataset
from drm_triton.data.csr import CSR
from drm_triton.data.unite import united
from drm_triton.errors import InputError

ALL = {"ratios": (1, 0, 0)}
RATED = pl.DataFrame(
    {
        "user": ["ann", "ann", "ann", "ann", "bob", "bob", "cy"],
        "item": ["x", "y", "y", "z", "x", "z", "y"],
        "rating": [5, 1, 5, 2, 5, 4, 5],
    }
)


def pairs(matrix: CSR, data: Dataset) -> list[tuple[Any, Any]]:
    users = np.repeat(np.arange(matrix.shape[0]), matrix.degrees())
    return list(zip(data.user_ids[users], data.item_ids[matrix.indices], strict=True))


def test_low_ratings_are_known_but_not_learned_from() -> None:
    data = Dataset.from_frame(RATED, min_rating=3, **ALL)
    assert pairs(data.dropped, data) == [("ann", "z")]  # (ann, y) has a good rating too
    assert pairs(data.liked, data) == [("ann", "x"), ("ann", "y"), ("bob", "x"), ("bob", "z"), ("cy", "y")]
    assert data.n_interactions == data.train.nnz == 5
    assert data.owned.row(0).tolist() == [0, 1, 2]
    assert repr(data) == "Dataset(users=3, items=3, train=5, valid=0, test=0, dropped=1)"


def test_the_split_and_the_checksum_do_not_depend_on_what_was_dropped() -> None:
    filtered = Dataset.from_frame(RATED, min_rating=3, split="per-user")
    without = Dataset.from_frame(RATED.filter(pl.col("rating") >= 3), split="per-user")
    assert filtered.checksum == without.checksum
    assert (filtered.dropped.nnz, without.dropped.nnz) == (1, 0)


@pytest.mark.filterwarnings("ignore:1 of 4 rows")
@pytest.mark.parametrize(
    ("rows", "options"),
    [
        ({"rating": [5, 0, 3, 1]}, {}),
        ({"event": ["buy", "view", "buy", "buy"]}, {"event_weight": {"buy": 1}}),
        ({"rating": ["5", "bad", "4", "3"]}, {"skip_bad_rows": True, "min_rating": 1}),
    ],
)
def test_every_filter_of_rows_is_known(rows: dict[str, list[Any]], options: dict[str, Any]) -> None:
    frame = pl.DataFrame({"user": ["ann", "ann", "bob", "bob"], "item": ["x", "y", "x", "y"], **rows})
    data = Dataset.from_frame(frame, **options, **ALL)
    assert pairs(data.dropped, data) == [("ann", "y")]


def test_a_matrix_keeps_its_negative_entries_as_dropped() -> None:
    matrix = scipy.sparse.csr_matrix(np.array([[1, -1, 0], [0, 2, -3]]))
    with pytest.warns(UserWarning, match="not recommended either"):
        data = Dataset.of(matrix)
    assert pairs(data.dropped, data) == [(0, 1), (1, 2)]
    assert data.owned.degrees().tolist() == [2, 2]


def test_items_and_users_that_attributes_bring_back_are_known() -> None:
    # The filters remove item rare and user dora. Their attributes add them again, as cold ones.
    frame = pl.DataFrame(
        {"user": ["ann", "ann", "ann", "bob", "bob", "dora"], "item": ["x", "y", "rare", "x", "y", "x"]}
    )
    data = Dataset.from_frame(frame, min_user=2, min_item=2, **ALL)
    assert (data.n_users, data.n_items, data.dropped.nnz) == (2, 2, 0)
    described = data.with_attributes(
        pl.DataFrame({"item": ["rare", "x"], "genre": ["jazz", "rock"]}),
        pl.DataFrame({"user": ["dora"], "age": [30]}),
    )
    assert pairs(described.dropped, described) == [("ann", "rare"), ("dora", "x")]
    assert described.liked.degrees().tolist() == [2, 2, 0]


def test_an_update_knows_the_dropped_pairs_of_both() -> None:
    old = Dataset.from_frame(RATED, min_rating=3, **ALL)
    new = Dataset.from_frame(
        pl.DataFrame({"user": ["ann", "bob", "eve"], "item": ["z", "y", "w"], "rating": [5, 1, 4]}), min_rating=3, **ALL
    )
    both = united(old, new)
    assert pairs(both.dropped, both) == [("bob", "y")]  # ann likes z now
    assert ("ann", "z") in pairs(both.train, both)


# -- files -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    Dataset.from_frame(RATED, min_rating=3, **ALL).save(tmp_path / "data")
    return tmp_path / "data"


def change_meta(folder: Path, **changes: Any) -> None:
    meta = json.loads((folder / "meta.json").read_text())
    kept = {name: value for name, value in (meta | changes).items() if value != "gone"}
    (folder / "meta.json").write_text(json.dumps(kept))


def test_dropped_pairs_are_stored(stored: Path) -> None:
    data = Dataset.load(stored)
    assert pairs(data.dropped, data) == [("ann", "z")]
    assert data.meta["dropped"]["pairs"] == 1
    data.verify()
    data.with_attributes(pl.DataFrame({"item": ["x"], "genre": ["jazz"]})).verify()


@pytest.mark.parametrize("entry", ["gone", None])
def test_a_store_without_dropped_pairs_loads(entry: str | None, stored: Path) -> None:
    for file in stored.glob("dropped.*"):
        file.unlink()
    change_meta(stored, dropped=entry)
    data = Dataset.load(stored)
    assert (data.dropped.nnz, data.owned.nnz) == (0, 5)


def test_nothing_is_stored_if_nothing_was_dropped(tmp_path: Path) -> None:
    Dataset.from_frame(RATED, **ALL).save(tmp_path / "data")
    assert not list((tmp_path / "data").glob("dropped.*"))
    assert "dropped" not in json.loads((tmp_path / "data/meta.json").read_text())


@pytest.mark.parametrize(
    ("item", "problem"),
    [
        (1, "an interaction is in more than one of train, valid, test, dropped"),  # ann likes y
        (3, r"dropped has items outside 0\.\.2"),
        (-1, r"dropped has items outside 0\.\.2"),
    ],
)
def test_damage_is_found(item: int, problem: str, stored: Path) -> None:
    np.save(stored / "dropped.indices.npy", np.array([item], "<i4"))
    with pytest.raises(InputError, match=problem):
        Dataset.load(stored)


def test_another_user_of_a_dropped_pair_is_found(stored: Path) -> None:
    np.save(stored / "dropped.indptr.npy", np.array([0, 0, 0, 1], "<i8"))  # cy, not ann
    with pytest.raises(InputError, match=r"the dropped pairs \(dropped\.\*\) do not have the checksum"):
        Dataset.load(stored)


@pytest.mark.parametrize("entry", [{}, {"pairs": -1}, {"pairs": "1"}, {"pairs": True}, [1], 1])
def test_a_damaged_entry_is_refused(entry: Any, stored: Path) -> None:
    change_meta(stored, dropped=entry)
    with pytest.raises(InputError, match=r"meta\.json (has no number of dropped pairs|is damaged)"):
        Dataset.load(stored)


def test_missing_arrays_are_named(stored: Path) -> None:
    (stored / "dropped.indices.npy").unlink()
    with pytest.raises(InputError, match=r"dropped\.indices\.npy is missing or damaged"):
        Dataset.load(stored)


# -- pairs of users and items that have left the data set --------------------------------------------------------------

RARE = pl.DataFrame({"user": ["ann", "ann", "ann", "bob", "bob", "dora"], "item": ["x", "y", "rare", "x", "y", "x"]})
LEFT = [("ann", "rare"), ("dora", "x")]
ELSEWHERE = "dropped_elsewhere"


@pytest.fixture
def core(tmp_path: Path) -> Path:
    """Return a store without the item rare and the user dora."""
    Dataset.from_frame(RARE, min_user=2, min_item=2, **ALL).save(tmp_path / "core")
    return tmp_path / "core"


def test_pairs_that_have_left_are_stored_by_id(core: Path) -> None:
    Dataset.load(core)
    data = Dataset.load(core)
    assert data._dropped_elsewhere is None  # not read before it is needed
    assert data.dropped_elsewhere is not None
    assert data.dropped_elsewhere.rows() == LEFT
    assert data.meta[ELSEWHERE]["pairs"] == 2
    users, items = data.removed_users
    assert (users.to_list(), items.row(0).tolist()) == (["dora"], [0])
    data.verify()
    data.save(core, overwrite=True)
    again = Dataset.load(core, mapped=False)
    (core / f"{ELSEWHERE}.parquet").unlink()
    assert again.dropped_elsewhere is not None
    assert again.dropped_elsewhere.rows() == LEFT


def test_what_comes_back_to_a_loaded_data_set_is_known(core: Path) -> None:
    data = Dataset.load(core)
    described = data.with_attributes(pl.DataFrame({"item": ["rare"]}), pl.DataFrame({"user": ["dora"]}))
    both = united(data, Dataset.from_frame(pl.DataFrame({"user": ["dora", "eve"], "item": ["y", "rare"]}), **ALL))
    for one in (described, both):
        assert pairs(one.dropped, one) == LEFT
        assert one.dropped_elsewhere is None


def test_an_old_store_without_them_loads(core: Path) -> None:
    (core / f"{ELSEWHERE}.parquet").unlink()
    change_meta(core, **{ELSEWHERE: "gone"})
    data = Dataset.load(core)
    assert data.dropped_elsewhere is None
    assert data.removed_users[1].shape == (0, 2)


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ({"user": ["ann", "eve"], "item": ["rare", "x"]}, "do not have the checksum"),
        ({"user": ["ann"], "item": ["rare"]}, "1 dropped pairs of other users and items, not 2"),
        ({"user": [1, 2], "item": ["rare", "x"]}, "are not pairs of ids"),
        ({"user": ["ann", None], "item": ["rare", "x"]}, "are not pairs of ids"),
        ({"id": ["ann", "dora"]}, "are not pairs of ids"),
        (None, "is missing or damaged"),
    ],
)
def test_damage_of_pairs_that_have_left_is_found(rows: dict[str, list[Any]] | None, problem: str, core: Path) -> None:
    file = core / f"{ELSEWHERE}.parquet"
    file.unlink() if rows is None else pl.DataFrame(rows).write_parquet(file)
    with pytest.raises(InputError, match=problem):
        Dataset.load(core)


@pytest.mark.parametrize("entry", [{}, {"pairs": -1}, [1]])
def test_a_damaged_entry_of_pairs_that_have_left_is_refused(entry: Any, core: Path) -> None:
    change_meta(core, **{ELSEWHERE: entry})
    with pytest.raises(InputError, match=r"meta\.json (has no number of dropped pairs|is damaged)"):
        Dataset.load(core)
