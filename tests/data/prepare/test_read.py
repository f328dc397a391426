"""Ids, ratings and times."""

from pathlib import Path
from typing import Any

import polars as pl
import pytest

from drm_triton.data.prepare.pipeline import prepare
from drm_triton.data.prepare.sources import find_source
from drm_triton.errors import InputError
from tests.data.conftest import MakeTable, ids


def test_an_id_that_would_change_late_in_the_file(table: MakeTable) -> None:
    rows = "".join(f"{k},{k}\n" for k in range(3000))
    users, items = ids(table(f"user,item\n{rows}0012,5\n"))
    assert "0012" in users
    assert "12" in users
    assert items == list(range(3000))  # the other column stays whole numbers


def test_typed_ids(table: MakeTable, tmp_path: Path) -> None:
    def through_parquet(**columns: Any) -> tuple[list[Any], list[Any]]:
        pl.DataFrame(columns).write_parquet(tmp_path / "t.parquet")
        return ids(table((tmp_path / "t.parquet").read_bytes(), "t.parquet"))

    assert through_parquet(user=["1", "2"], item=[1.0, 2.0]) == (["1", "2"], [1, 2])
    assert through_parquet(user=[True, False], item=[1, 2]) == (["false", "true"], [1, 2])
    assert through_parquet(user=pl.Series([2**64 - 1, 2], dtype=pl.UInt64), item=[1, 2])[0] == [
        "18446744073709551615",
        "2",
    ]
    assert through_parquet(user=pl.Series(["b", "a"], dtype=pl.Categorical), item=[1, 2])[0] == ["a", "b"]


def test_ids_of_other_types_in_other_files_are_the_same_ids(tmp_path: Path) -> None:
    def both(**other: Any) -> tuple[list[Any], list[Any]]:
        pl.DataFrame({"user": [1, 2], "item": [2, 3]}).write_parquet(tmp_path / "a.parquet")
        pl.DataFrame({"user": [1], "item": [2]} | other).write_parquet(tmp_path / "b.parquet")
        source, raw = find_source("table"), [tmp_path / "a.parquet", tmp_path / "b.parquet"]
        return ids(prepare(source, raw, tmp_path / "out", overwrite=True))

    assert both(item=[2.0]) == ([1, 2], [2, 3])
    assert both(item=["2"]) == ([1, 2], ["2", "3"])
    with pytest.raises(InputError, match=r"row 1 of .*b\.parquet has no usable item id \(2\.5\)"):
        both(item=[2.5])
    with pytest.raises(InputError, match="no usable item id"):
        both(item=[2.0**53])  # 2^53 + 1 would be the same float


@pytest.mark.parametrize(
    "times",
    [
        ("5", "30", "7"),
        ("5.5", "30", "7"),
        ("2020-01-01", "2021-01-01 10:00:00", "2020-12-31T23:59:59.5Z"),
        ("2021-01-01T01:00:00+02:00", "2021-01-01T00:30:00+00:00", "2021-01-01 00:15:00.000001+0000"),
        ("2021-01-01 05:00-01", "2021-01-01 06:30 UTC", "2021-01-01T06:15Z"),
    ],
)
def test_times_as_text(table: MakeTable, times: tuple[str, ...]) -> None:
    rows = "".join(f"1,{k},{time}\n" for k, time in enumerate(times))
    data = table(f"user,item,timestamp\n{rows}", split="leave-last")
    assert data.test.row(0).tolist() == [1]
    assert data.valid.row(0).tolist() == [2]


def test_rating_is_used_only_if_needed(table: MakeTable) -> None:
    content = "user,item,rating\n1,2,5\n1,3,\n1,4,1\n"
    assert table(content).n_items == 3  # a missing rating does not matter
    with pytest.raises(InputError, match=r"row 2 of .* rating that is missing"):
        table(content, min_rating=2)
    assert ids(table("user,item,rating\n1,2,5\n1,4,1\n", min_rating=2))[1] == [2]


def test_several_ratings_are_ambiguous_only_if_needed(table: MakeTable) -> None:
    content = "user,item,rating,score\n1,2,5,x\n"
    assert table(content).n_items == 1
    with pytest.raises(InputError, match="`rating`"):
        table(content, min_rating=1)
    assert table(content, min_rating=1, rating="rating").n_items == 1
