"""Attributes of items and users: reading, types, joining, storing, and items without interactions."""

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from drm_triton import DRM, Dataset
from drm_triton.data.attributes import attributes
from drm_triton.data.prepare.attributes import read_attributes
from drm_triton.errors import InputError

TABLE = {"item": ["b", "a", "new"], "genre": ["Drama|Crime", "Comedy", None], "price": [1.5, 2.0, 3.0]}


def small() -> Dataset:
    frame = pl.DataFrame({"user": ["ann", "ann", "bob", "bob"], "item": ["a", "b", "b", "c"]})
    return Dataset.from_frame(frame, ratios=(1, 0, 0))


@pytest.mark.parametrize("form", ["csv", "tsv", "parquet", "jsonl"])
def test_files_of_every_format_give_the_same_table(form: str, tmp_path: Path) -> None:
    path, frame = tmp_path / f"items.{form}", pl.DataFrame(TABLE)
    if form in ("csv", "tsv"):
        frame.write_csv(path, separator="," if form == "csv" else "\t")
    else:
        (frame.write_parquet if form == "parquet" else frame.write_ndjson)(path)
    found = read_attributes(path, "item").frame
    assert found["id"].to_list() == TABLE["item"]
    assert found["genre"].to_list() == [["Drama", "Crime"], ["Comedy"], None]
    assert found["price"].to_list() == TABLE["price"]


def test_a_data_set_keeps_attributes_and_adds_items_without_interactions(tmp_path: Path) -> None:
    data, pandas = small(), pytest.importorskip("pandas")
    found = data.with_attributes(items=pl.DataFrame(TABLE), users=pandas.DataFrame({"user": ["bob"], "age": [30]}))
    assert found.item_ids.to_list() == ["a", "b", "c", "new"]
    assert attributes(found.items) == ["genre", "price"]
    assert found.items["price"].to_list() == [2.0, 1.5, None, 3.0]
    assert found.users.rows() == [("ann", None), ("bob", 30)]
    assert found.train.shape == (2, 4)
    np.testing.assert_array_equal(found.train.indices, data.train.indices)
    found.save(tmp_path / "data")
    again = Dataset.load(tmp_path / "data")
    assert again.items.equals(found.items)
    assert again.checksum == found.checksum != data.checksum
    model = DRM(factors=2, epochs=1).fit(again)
    model.save(tmp_path / "model")
    assert DRM.load(tmp_path / "model").interactions.items.equals(found.items)


def test_titles_of_the_table_replace_those_of_the_data_set() -> None:
    titled = small().with_attributes(pl.DataFrame({"id": ["a"], "title": ["A"]}))
    assert titled.item_titles is not None
    assert titled.item_titles.to_list() == ["A", None, None]
    assert titled.with_attributes(pl.DataFrame({"id": ["b"], "title": ["B"]})).items["title"].to_list()[1] == "B"


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"genre": ["x"]}, "no column could contain the ids of the items"),
        ({"item": ["a"], "movie": ["b"]}, "several columns could contain the ids"),
        ({"item": ["a", "a"], "x": [1, 2]}, "item 'a' has several rows"),
        ({"item": ["a", None], "x": [1, 2]}, "row 2 has no id"),
        ({"item": ["a"], "x": [float("nan")]}, "column 'x' has values that are not finite"),
        ({"item": ["a"], "x": [{"y": 1}]}, "column 'x' has type Struct"),
    ],
)
def test_bad_tables(table: dict[str, list[Any]], message: str) -> None:
    with pytest.raises(InputError, match=message):
        small().with_attributes(pl.DataFrame(table, strict=False))


def test_ids_are_not_changed_to_fit() -> None:
    data = Dataset.from_csr(([0, 1], [0]))
    assert data.with_attributes(pl.DataFrame({"item": [0.0, 7.0]})).item_ids.to_list() == [0, 7]
    for odd in ("007", 1.5):
        with pytest.raises(InputError, match=f"item {odd!r} cannot be an id"):
            data.with_attributes(pl.DataFrame({"item": [odd]}))


def test_ids_of_another_kind(tmp_path: Path) -> None:
    data = Dataset.from_csr(([0, 1], [0]))
    with pytest.raises(InputError, match="item 'x' cannot be an id of this data, whose item ids are integers"):
        data.with_attributes(pl.DataFrame({"item": ["x"]}))
    (tmp_path / "bad.parquet").write_text("no")
    for name, message in (
        ("bad.parquet", "damaged, or not a Parquet file"),
        ("absent.csv", "there is no file .* check `items`"),
    ):
        with pytest.raises(InputError, match=message):
            read_attributes(tmp_path / name, "item")
