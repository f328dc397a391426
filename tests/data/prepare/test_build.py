"""From raw interactions to a data set."""

from datetime import datetime, timedelta, timezone
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drm_triton import Dataset
from drm_triton.data.prepare.codes import core
from drm_triton.errors import InputError
from drm_triton.names import SplitName

IDS = st.one_of(
    st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=8, unique=True),
    st.lists(st.text(min_size=1, max_size=5), min_size=1, max_size=8, unique=True),
)
SPLIT = st.sampled_from(["random", "per-user", "leave-last", "time", "users"])


@st.composite
def tables(draw: st.DrawFn) -> pl.DataFrame:
    users, items = draw(IDS), draw(IDS)
    rows = draw(
        st.lists(
            st.tuples(st.sampled_from(users), st.sampled_from(items), st.integers(1, 5), st.integers(0, 9)),
            min_size=1,
            max_size=50,
        )
    )
    return pl.DataFrame(rows, schema=["user", "item", "rating", "timestamp"], orient="row", strict=False)


def pairs(data: Dataset, name: str) -> set[tuple[Any, Any]]:
    matrix = getattr(data, name)
    users = np.repeat(np.arange(data.n_users), matrix.degrees())
    return set(zip(data.user_ids.gather(users), data.item_ids.gather(matrix.indices), strict=True))


@settings(max_examples=60, deadline=None)
@given(tables(), SPLIT, st.integers(0, 3))
def test_splits_are_disjoint_and_complete(frame: pl.DataFrame, split: SplitName, seed: int) -> None:
    data = Dataset.from_frame(frame, split=split, seed=seed)
    train, valid, test = (pairs(data, name) for name in ("train", "valid", "test"))
    assert not train & valid
    assert not train & test
    assert not valid & test
    assert train | valid | test == set(frame.select("user", "item").rows())
    assert data.n_interactions == len(train | valid | test)


@settings(max_examples=60, deadline=None)
@given(tables(), SPLIT, st.randoms(use_true_random=False))
def test_the_order_of_rows_does_not_matter(frame: pl.DataFrame, split: SplitName, random: Random) -> None:
    order = list(range(len(frame)))
    random.shuffle(order)
    assert Dataset.from_frame(frame, split=split).checksum == Dataset.from_frame(frame[order], split=split).checksum


@settings(max_examples=60, deadline=None)
@given(tables(), st.integers(1, 3), st.integers(1, 3))
def test_k_core_is_the_largest_fixed_point(frame: pl.DataFrame, min_user: int, min_item: int) -> None:
    left = set(frame.select("user", "item").rows())
    while True:  # one interaction at a time, the slow way
        bad = next(
            (
                (u, i)
                for u, i in left
                if sum(u == a for a, _ in left) < min_user or sum(i == b for _, b in left) < min_item
            ),
            None,
        )
        if bad is None:
            break
        left.remove(bad)
    if not left:
        with pytest.raises(InputError, match="removes all interactions"):
            Dataset.from_frame(frame, min_user=min_user, min_item=min_item)
        return
    data = Dataset.from_frame(frame, min_user=min_user, min_item=min_item)
    assert set.union(*(pairs(data, name) for name in ("train", "valid", "test"))) == left


@settings(max_examples=40, deadline=None)
@given(tables())
def test_ids_round_trip(frame: pl.DataFrame) -> None:
    data = Dataset.from_frame(frame)
    assert data.user_ids.to_list() == sorted(set(frame["user"].to_list()), key=_bytewise)
    assert (data.encode_users(data.user_ids) == np.arange(data.n_users)).all()
    assert (data.encode_items(data.item_ids.to_list()) == np.arange(data.n_items)).all()


def _bytewise(value: int | str) -> int | bytes:
    return value.encode() if isinstance(value, str) else value


@settings(max_examples=25, deadline=None)
@given(frame=tables())
def test_a_store_written_and_read_is_equal(tmp_path_factory: pytest.TempPathFactory, frame: pl.DataFrame) -> None:
    path = tmp_path_factory.mktemp("store") / "data"
    data = Dataset.from_frame(frame)
    data.save(path)
    again = Dataset.load(path)
    for name in ("train", "valid", "test"):
        ours, theirs = getattr(data, name), getattr(again, name)
        assert ours.shape == theirs.shape
        assert (ours.indptr == theirs.indptr).all()
        assert (ours.indices == theirs.indices).all()
    assert again.user_ids.equals(data.user_ids)
    assert again.item_ids.equals(data.item_ids)
    assert again.checksum == data.checksum


def test_threshold_then_latest_of_repeats() -> None:
    frame = pl.DataFrame(
        {"user": [1, 1, 1, 1], "item": [5, 6, 5, 7], "rating": [4, 2, 5, 4], "timestamp": [10, 20, 40, 30]}
    )
    data = Dataset.from_frame(frame, min_rating=4, split="leave-last")
    # item 6 falls to the threshold, and item 5 counts by its later time, so it comes after item 7
    assert data.item_ids.to_list() == [5, 7]
    assert pairs(data, "test") == {(1, 5)}
    steps = [(s["interactions"], s["items"]) for s in data.meta["steps"]]
    assert steps == [(4, 3), (3, 2), (2, 2)]


def weights(data: Dataset) -> dict[tuple[Any, Any], float]:
    """Return the weight of each pair of ids, of all three parts."""
    found: dict[tuple[Any, Any], float] = {}
    for matrix in (data.train, data.valid, data.test):
        assert matrix.weights is not None
        users = np.repeat(np.arange(data.n_users), matrix.degrees())
        ids = zip(data.user_ids.gather(users), data.item_ids.gather(matrix.indices), strict=True)
        found.update(zip(ids, matrix.weights.tolist(), strict=True))
    return found


@settings(max_examples=60, deadline=None)
@given(tables(), SPLIT, st.integers(1, 2), st.randoms(use_true_random=False))
def test_weights_are_sums_over_repeated_rows_in_any_order(
    frame: pl.DataFrame, split: SplitName, min_user: int, random: Random
) -> None:
    frame = frame.with_columns(plays=pl.Series([random.uniform(1e-3, 1e3) for _ in range(len(frame))]))
    try:
        plain = Dataset.from_frame(frame, split=split, min_user=min_user)
    except InputError:
        return  # no user has so many items
    data = Dataset.from_frame(frame, split=split, min_user=min_user, weight="plays")
    order = list(range(len(frame)))
    random.shuffle(order)
    assert data.checksum == Dataset.from_frame(frame[order], split=split, min_user=min_user, weight="plays").checksum
    for name in ("train", "valid", "test"):
        assert pairs(data, name) == pairs(plain, name)
    sums: dict[tuple[Any, Any], float] = {}
    for user, item, plays in frame.select("user", "item", "plays").rows():
        sums[user, item] = sums.get((user, item), 0) + plays
    assert weights(data) == pytest.approx({pair: sums[pair] for pair in weights(data)}, rel=1e-6)


def test_one_column_can_be_rating_and_weight() -> None:
    frame = pl.DataFrame({"user": [1, 1, 2, 2], "item": [5, 6, 5, 6], "plays": [4, 0, 2, 7]})
    with pytest.raises(InputError, match=r"row 2 of the frame has a weight that is not a number .* `min_rating`$"):
        Dataset.from_frame(frame, weight="plays")
    data = Dataset.from_frame(frame, rating="plays", weight="plays", min_rating=1)
    assert weights(data) == {(1, 5): 4, (2, 5): 2, (2, 6): 7}
    assert data.meta["weights"] == {"column": "plays"}


def test_weights_do_not_change_a_data_set_without_them() -> None:
    frame = pl.DataFrame({"user": [1, 1, 2], "item": [5, 6, 5], "weight": [1.0, 2.0, 3.0]})
    assert not Dataset.from_frame(frame).weighted  # a column of that name is not enough
    assert Dataset.from_frame(frame).checksum == Dataset.from_frame(frame.drop("weight")).checksum


def test_core_needs_iterating() -> None:
    # a path u0-i0-u1-i1-u2: removing its ends uncovers new ends, until nothing is left
    users, items = np.array([0, 1, 1, 2]), np.array([0, 0, 1, 1])
    assert not core(users, items, 2, 2).any()
    assert core(users, items, 1, 2).all()


def test_same_content_has_the_same_checksum_whatever_the_id_width() -> None:
    narrow = pl.DataFrame({"user": [1, 2], "item": [3, 4]}, schema={"user": pl.Int8, "item": pl.UInt16})
    wide = narrow.cast(pl.Int64)
    assert Dataset.from_frame(narrow).checksum == Dataset.from_frame(wide).checksum
    assert Dataset.from_frame(narrow).checksum != Dataset.from_frame(narrow.cast(pl.String)).checksum


def test_pandas_and_lazy_frames() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pl.DataFrame({"userId": ["a", "b", "a"], "movieId": [1, 2, 3], "rating": [1.0, 5.0, 4.0]})
    expected = Dataset.from_frame(frame).checksum
    assert Dataset.from_frame(frame.lazy()).checksum == expected
    assert Dataset.from_frame(pandas.DataFrame(frame.to_dict(as_series=False))).checksum == expected
    missing = pandas.DataFrame({"user": [1, None], "item": [1, 2]})
    with pytest.raises(InputError, match="row 2 of the frame has no usable user id"):
        Dataset.from_frame(missing)
    when = pandas.DataFrame({"user": [1, 1], "item": [1, 2], "date": pandas.to_datetime(["2021-01-01", "2020-01-01"])})
    assert pairs(Dataset.from_frame(when, split="leave-last"), "test") == {(1, 1)}


def test_times_with_a_zone() -> None:
    late, early = (
        datetime(2021, 1, 1, 1, tzinfo=timezone.utc),
        datetime(2021, 1, 1, 2, tzinfo=timezone(timedelta(hours=2))),
    )
    columns = {"user": [1, 1], "item": [1, 2], "date": [late, early]}
    frame = pl.DataFrame(columns, schema_overrides={"date": pl.Datetime("us", "Asia/Tokyo")})
    assert pairs(Dataset.from_frame(frame, split="leave-last"), "test") == {(1, 1)}
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(columns | {"date": pandas.to_datetime([late, early], utc=True)})
    assert pairs(Dataset.from_frame(frame, split="leave-last"), "test") == {(1, 1)}


@pytest.mark.parametrize(
    ("columns", "arguments", "message"),
    [
        ({"1": [1], "2": [2]}, {}, "name one as `user`$"),
        ({"user": [1], "item": [2]}, {"split": "time"}, "name one as `timestamp`, or"),
        ({"user": [1], "item": [2]}, {"min_rating": 2}, "leave out `min_rating`"),
        ({"user": [1], "item": [2]}, {"min_user": 2}, "lower `min_rating`, `min_user` or `min_item`"),
        ({"user": [1], "item": [2], "date": ["soon"]}, {"split": "time"}, "another column as `timestamp`"),
    ],
)
def test_advice_to_a_caller_names_arguments(
    columns: dict[str, list[Any]], arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message) as caught:
        Dataset.from_frame(pl.DataFrame(columns), **arguments)
    assert "--" not in str(caught.value)


def test_options_of_other_types(tmp_path: Path) -> None:
    frame = pl.DataFrame({"user": [1, 1, 2], "item": [1, 2, 3]})
    numpy_options: dict[str, Any] = {"seed": np.int64(3), "min_user": np.int32(1), "ratios": (np.float32(1), 1, 1)}
    data = Dataset.from_frame(frame, **numpy_options)
    data.save(tmp_path / "d")
    assert Dataset.load(tmp_path / "d").meta["options"]["seed"] == 3
    for wrong in (
        {"seed": None},
        {"seed": 1.5},
        {"min_user": "2"},
        {"min_rating": "4"},
        {"ratios": "70/10/20"},
        {"ratios": ("7", "1", "2")},
    ):
        with pytest.raises(InputError, match=f"`{next(iter(wrong))}`"):
            Dataset.from_frame(frame, **wrong)


def test_what_is_not_a_frame_is_refused() -> None:
    with pytest.raises(InputError, match="not list"):
        Dataset.from_frame([1, 2])
