"""Files of attributes: types of text, missing values, decimal marks, dates and bad rows, as in raw interactions."""

import gzip
from datetime import date, datetime
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from drm_triton.data.prepare.attributes import AttributeFile, read_attributes
from drm_triton.data.prepare.raw import FileFormat
from drm_triton.errors import InputError


def read(tmp_path: Path, content: str | bytes, name: str = "items.csv", **fields: Any) -> AttributeFile:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_attributes(path, "item", FileFormat(**fields))


def column(tmp_path: Path, values: list[str], **fields: Any) -> pl.Series:
    """Return a column of attributes that is written with these values."""
    rows = "".join(f'{k},"{value}"\n' for k, value in enumerate(values))
    return read(tmp_path, f"item,x\n{rows}", **fields).frame["x"]


APRIL, MAY = date(2024, 4, 2), date(2024, 5, 13)
TYPES = {
    "whole numbers": (["3", " 4 ", "-5"], pl.Int64, [3, 4, -5]),
    "decimal numbers": (["3", "4.5"], pl.Float64, [3.0, 4.5]),
    "decimal commas": (["3,5", "4"], pl.Float64, [3.5, 4.0]),
    "groups": (["1.234,5", "2"], pl.Float64, [1234.5, 2.0]),
    "truth values": (["True", "false"], pl.Boolean, [True, False]),
    "dates": (["2024-04-02", "2024-05-13"], pl.Date, [APRIL, MAY]),
    "dots": (["02.04.2024", "13.05.2024"], pl.Date, [APRIL, MAY]),
    "day first": (["02/04/2024", "13/05/2024"], pl.Date, [APRIL, MAY]),
    "month first": (["04/02/2024", "05/13/2024"], pl.Date, [APRIL, MAY]),
    "names of months": (["02-Apr-2024", "13-May-2024"], pl.Date, [APRIL, MAY]),
    "times": (["02.04.2024", "13.05.2024 20:49"], pl.Datetime, [datetime(2024, 4, 2), datetime(2024, 5, 13, 20, 49)]),
    "offsets": (["2024-04-02T20:00:00+02:00"], pl.Datetime, [datetime(2024, 4, 2, 18)]),
    "text": (["Drama", " Comedy "], pl.String, ["Drama", "Comedy"]),
    "text that begins like a date": (["02/04/2024", "soon"], pl.String, ["02/04/2024", "soon"]),
    "text that begins like a number": (["1,234", "many"], pl.String, ["1,234", "many"]),
}


@pytest.mark.parametrize("missing", [None, "", "NA", "N/A", "null", "NaN", "None", "\\N"])
@pytest.mark.parametrize("case", TYPES)
def test_types_follow_from_the_values(tmp_path: Path, case: str, missing: str | None) -> None:
    values, dtype, expected = TYPES[case]
    found = column(tmp_path, values if missing is None else [missing, *values, missing])
    assert found.dtype == dtype
    assert found.drop_nulls().to_list() == expected
    assert found.null_count() == (0 if missing is None else 2)


def test_a_column_of_missing_values_is_text(tmp_path: Path) -> None:
    found = column(tmp_path, ["NA", ""])
    assert (found.dtype, found.to_list()) == (pl.String, [None, None])


def test_values_that_can_be_read_in_two_ways_are_refused(tmp_path: Path) -> None:
    dates = ["02/04/2024", "05/06/2024"]
    message = "column 'x': the dates, as in 02/04/2024, may begin with day or month: give `date_format` day-first or"
    with pytest.raises(InputError, match=message):
        column(tmp_path, dates)
    assert column(tmp_path, dates, date_format="day-first").to_list() == [APRIL, date(2024, 6, 5)]
    assert column(tmp_path, dates, date_format="month-first").to_list() == [date(2024, 2, 4), date(2024, 5, 6)]
    assert column(tmp_path, dates, date_format="%m/%d/%Y").to_list() == [date(2024, 2, 4), date(2024, 5, 6)]
    with pytest.raises(InputError, match="column 'x': the commas, as in 1,234, may be decimal marks or group digits"):
        column(tmp_path, ["1,234", "NA"])
    assert column(tmp_path, ["1,234"], decimal="comma").to_list() == [1.234]
    assert column(tmp_path, ["1,234"], decimal="point").to_list() == [1234.0]


def test_options_of_the_interactions_do_not_spoil_clear_columns(tmp_path: Path) -> None:
    given = {"date_format": "month-first", "decimal": "comma"}
    for case in ("dates", "day first", "names of months", "decimal numbers", "whole numbers", "text"):
        values, dtype, expected = TYPES[case]
        found = column(tmp_path, values, **given)
        assert (found.dtype, found.to_list()) == (dtype, expected)


BAD = {
    "a.csv": ("id,x\n1,5\n1,5,6\n,7\n\n3,9\n", r"line 3: .* more fields .*`skip_bad_rows`", "line 3 of"),
    "b.csv": ("id,x\n1,5\n,7\n\n1,5,6\n3,9\n", r"line 5: .* more fields", "data row 2 of .* has no usable item id"),
    "c.csv": ("id,x\n1,5\n\n,7\n3,9\n", r"data row 3 of .* no usable item id: .*`skip_bad_rows`", "data row 3 of"),
    "d.jsonl": ('{"id":1,"x":5}\n{"id":[1],"x":5}\n[]\n{"id":3,"x":9}\n', r"line 2: .*`skip_bad_rows`", "line 2 of"),
    "e.jsonl": ('{"id":1,"x":5}\n{"x":6}\n{"id":3,"x":9}\n', r"row 2 of .* no usable item id", "row 2 of"),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("packed", [False, True])
def test_bad_rows(tmp_path: Path, name: str, packed: bool) -> None:
    text, problem, first = BAD[name]
    content, name = (gzip.compress(text.encode()), f"{name}.gz") if packed else (text.encode(), name)
    with pytest.raises(InputError, match=problem):
        read(tmp_path, content, name)
    with pytest.warns(UserWarning, match=f"rows cannot be used and are left out; the first: {first}"):
        found = read(tmp_path, content, name, skip_bad_rows=True)
    assert [int(k) for k in found.frame["id"]] == [1, 3]
    assert found.frame["x"].to_list() == [5, 9]
    assert found.skipped is not None
    assert found.skipped["rows"] == (1 if name[0] in "ce" else 2)


def test_ids_that_are_spelled_like_missing_ones(tmp_path: Path) -> None:
    content = "item,x\na,1\nNA,2\n"
    with pytest.warns(UserWarning, match="item id 'NA', which is taken for the id of one item"):
        assert read(tmp_path, content).frame["id"].to_list() == ["a", "NA"]
    with pytest.warns(UserWarning, match="1 of 2 rows cannot be used"):
        assert read(tmp_path, content, skip_bad_rows=True).frame["id"].to_list() == ["a"]


def test_ids_and_titles_stay_as_they_are(tmp_path: Path) -> None:
    found = read(tmp_path, "item|title|added\n007|1984|01-Jan-1995\n 8 |None|NA\n", "u.item").frame
    assert found.rows() == [("007", "1984", date(1995, 1, 1)), ("8", "None", None)]
    assert read(tmp_path, "item\na\nb\n").frame.rows() == [("a",), ("b",)]


def test_ids_that_are_no_values(tmp_path: Path) -> None:
    pl.DataFrame({"item": [[1], [2]]}).write_parquet(tmp_path / "a.parquet")
    with pytest.raises(InputError, match="item ids of type List"):
        read_attributes(tmp_path / "a.parquet", "item")


def test_other_encodings(tmp_path: Path) -> None:
    content = "item,x\na,caf\u00e9\n".encode("latin-1")
    with pytest.raises(InputError, match="give its encoding"):
        read(tmp_path, content)
    assert read(tmp_path, content, encoding="latin-1").frame["x"].to_list() == ["caf\u00e9"]
