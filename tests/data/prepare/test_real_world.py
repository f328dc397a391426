"""Files as people have them: decimal commas, dates of many forms, events, missing values and bad rows."""

import gzip
import json
import warnings
from pathlib import Path
from typing import Any

import pandas as pd
import polars as pl
import pytest

from drm_triton import Dataset
from drm_triton.data.prepare.build import BuildOptions
from drm_triton.data.prepare.pipeline import prepare
from drm_triton.data.prepare.raw import FileFormat
from drm_triton.data.prepare.sources import find_source
from drm_triton.errors import InputError
from tests.data.conftest import MakeTable, ids


def kept(data: Dataset) -> list[Any]:
    """Return the items, which the tests number by row."""
    return data.item_ids.to_list()


# -- ratings -----------------------------------------------------------------------------------------------------------


def test_ratings_of_zero_or_less_are_no_positives(table: MakeTable) -> None:
    content = "user,item,rating\n1,10,5\n1,11,0\n1,12,-1\n1,13,\n1,14,0.5\n"
    with pytest.warns(UserWarning, match=r"2 of 5 rows .* rating of 0 or less and are left out.*`min_rating` -1 keeps"):
        data = table(content)
    assert kept(data) == [10, 13, 14]
    assert data.meta["steps"][1] == {"step": "rating > 0", "interactions": 3, "users": 1, "items": 3}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kept(table(content.replace("1,13,\n", ""), min_rating=-1)) == [10, 11, 12, 14]
        assert kept(table(content, rating="")) == [10, 11, 12, 13, 14]
        assert "rating > 0" not in str(table("user,item,rating\n1,10,5\n").meta["steps"])


@pytest.mark.parametrize("word", ["", "NA", "NaN"])
def test_missing_ratings_are_positives_that_are_counted(table: MakeTable, word: str) -> None:
    data = table(f"user,item,rating\n1,10,5\n1,11,{word}\n2,12,{word}\n")
    assert kept(data) == [10, 11, 12]
    assert data.meta["notes"] == ["2 of 3 rows have no rating and count as positives"]
    assert table("user,item,rating\n1,10,5\n").meta["notes"] == []


@pytest.mark.parametrize("word", ["inf", "-inf", "Infinity"])
@pytest.mark.parametrize("min_rating", [None, 1])
def test_infinite_ratings_are_refused(table: MakeTable, word: str, min_rating: float | None) -> None:
    content = f"user,item,rating\n1,10,5\n1,11,{word}\n"
    with pytest.raises(InputError, match=r"data row 2 .* infinite or not a number \('.*'\): correct or remove"):
        table(content, min_rating=min_rating)
    with pytest.warns(UserWarning, match="1 of 2 rows cannot be used"):
        data = table(content, min_rating=min_rating, skip_bad_rows=True)
    assert kept(data) == [10]
    assert data.dropped_elsewhere is not None
    assert data.dropped_elsewhere.rows() == [(1, 11)]
    with pytest.raises(InputError, match=r"row 2 of the frame .* infinite or not a number"):
        Dataset.from_frame(pl.DataFrame({"user": [1, 1], "item": [1, 2], "rating": [5.0, float(word)]}))


def test_ratings_of_a_frame() -> None:
    frame = pd.DataFrame({"user": [1, 1, 2, 2], "item": [1, 2, 1, 2], "rating": [5, 0, float("nan"), -2]})
    with pytest.warns(UserWarning, match="2 of 4 rows of the frame"):
        assert Dataset.from_frame(frame).n_interactions == 2
    with pytest.warns(UserWarning, match="1 of 2 rows"):
        assert Dataset.from_frame(pl.DataFrame({"user": [1, 1], "item": [1, 2], "rating": [True, False]})).n_items == 1


def test_only_ratings_of_zero(table: MakeTable) -> None:
    advice = pytest.raises(InputError, match=r"'rating > 0' removes all .* give `min_rating`")
    with pytest.warns(UserWarning, match="1 of 1 rows"), advice:
        table("user,item,rating\n1,2,0\n")


def test_ratings_of_parts(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("user,item,rating\n1,10,5\n1,11,0\n2,10,1\n")
    (tmp_path / "b.csv").write_text("user,item,rating\n1,12,-5\n2,12,1\n")
    parts = {"train": tmp_path / "a.csv", "test": tmp_path / "b.csv"}
    with pytest.warns(UserWarning, match="2 of 5 rows"):
        data = prepare(find_source("table"), None, tmp_path / "out", parts=parts)  # type: ignore[arg-type]
    assert (data.train.nnz, data.test.nnz) == (2, 1)


def test_a_column_of_weights_is_not_a_rating_too(table: MakeTable) -> None:
    with pytest.raises(InputError, match=r"data row 2 of .* has a weight that is not a number"):
        table("user,item,plays\n1,2,3\n1,3,0\n", weight="plays")


# -- what was taken for what -------------------------------------------------------------------------------------------


def test_columns_are_recorded(table: MakeTable) -> None:
    data = table("when,userID,artist,plays,count,x\n2024-04-02,b,7,3,4,5\n2024-04-01,a,8,2.5,4,5\n")
    assert data.meta["columns"] == {
        "user": {"column": "userID", "first": "b"},
        "item": {"column": "artist", "first": "7", "least": 7, "most": 8},
        "rating": {"column": "plays", "first": "3", "least": 2.5, "most": 3.0},
        "timestamp": {"column": "when", "first": "2024-04-02", "used": False},
    }
    assert data.meta["ignored_columns"] == ["count", "x"]
    assert data.meta["notes"] == [
        "'plays' looks like weights: `weight` plays makes them count in training",
        "'count' looks like weights: `weight` count makes them count in training",
    ]
    data = table("when,user,item\n2024-04-02,1,7\n2024-04-01 10:00,1,8\n2024-04-03,1,9\n", split="leave-last")
    assert data.meta["columns"]["timestamp"] == {
        "column": "when", "first": "2024-04-02", "least": "2024-04-01 10:00:00", "most": "2024-04-03 00:00:00",
    }  # fmt: skip
    assert json.loads(Path(str(data.path), "meta.json").read_text("utf-8"))["columns"] == data.meta["columns"]


def test_columns_by_position_and_of_a_frame(table: MakeTable) -> None:
    columns = table("1,2,x,5\n", columns=("user", "item", "-", "rating")).meta["columns"]
    assert [entry["column"] for entry in columns.values()] == ["column 1", "column 2", "column 4"]
    frame = pl.DataFrame({"user_id": [3, 4], "track": ["x", "y"], "plays": [1.5, 9], "mood": ["a", "b"]})
    meta = Dataset.from_frame(frame, weight="plays", ratios=(1, 0, 0)).meta
    assert meta["columns"]["user"] == {"column": "user_id", "first": 3, "least": 3, "most": 4}
    assert meta["columns"]["weight"] == {"column": "plays", "first": "1.5", "least": 1.5, "most": 9.0}
    assert meta["ignored_columns"] == ["mood"]


def test_advice_about_ratings_and_several_candidates(table: MakeTable) -> None:
    assert table("user,item,Book-Rating\n1,2,5\n").meta["notes"] == [
        "'Book-Rating' looks like ratings: `rating` Book-Rating uses them"
    ]
    notes = table("user,item,rating,score\n1,2,5,x\n").meta["notes"]
    assert notes == ["no rating is used, because several columns may contain it: 'rating', 'score'"]


# -- numbers and dates -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mark", [None, "comma"])
def test_decimal_commas(table: MakeTable, mark: str | None) -> None:
    content = "user;item;rating\n1;10;4,5\n1;11;3\n1;12; 2,75 \n1;13;1.234,5\n1;14;0,5\n"
    assert kept(table(content, min_rating=3.5, decimal=mark)) == [10, 13]
    weights = table("user;item;n\n1;10;4,5\n1;11;3\n", weight="n", decimal=mark).meta["weights"]
    assert (weights["least"], weights["most"]) == (3.0, 4.5)


def test_commas_that_group_digits(table: MakeTable) -> None:
    content = "user;item;rating\n1;10;1,234\n1;11;3,500\n"
    with pytest.raises(InputError, match='may be decimal marks or group digits: give `decimal="comma"`'):
        table(content, min_rating=2)
    assert kept(table(content, min_rating=2, decimal="comma")) == [11]
    assert kept(table(content, min_rating=2, decimal="point")) == [10, 11]
    assert kept(table(content + "1;12;1,234.5\n1;13;1.5\n", min_rating=2)) == [10, 11, 12]
    with pytest.raises(InputError, match=r"data row 2 of .* \('4\.5'\)"):
        table("user;item;rating\n1;10;4,5\n1;11;4.5\n", min_rating=1)
    with pytest.raises(InputError, match="unknown `decimal` 'dot'"):
        table(content, decimal="dot")


DATES = {
    "dots": ["02.04.2024 20:49", "3.4.2024 00:01", "02.04.2024 20:50:30"],
    "slashes, day first": ["02/04/2024", "13/04/2024", "03/04/2024"],
    "slashes, month first": ["04/02/2024 8:05 AM", "04/13/2024 7:00 PM", "04/13/2024 6:59:59 AM"],
    "dashes": ["02-04-2024, 20:49", "14-04-2024, 20:49", "13-04-2024 20:49:01"],
    "year first": ["2024/04/02", "2024/04/03 10:00", "2024-04-02 23:00:00"],
    "names": ["2 Apr 2024", "April 4, 2024", "03-Apr-2024 10:00"],
    "ISO": ["2024-04-02T20:49:00Z", "2024-04-03", "2024-04-02 22:49+01:00"],
}


@pytest.mark.parametrize("case", DATES)
def test_dates(table: MakeTable, case: str) -> None:
    """Of the three, the first is the earliest and the second the latest."""
    rows = "".join(f'1,{k},"{date}"\n' for k, date in enumerate(DATES[case]))
    data = table(f"user,item,order_date\n{rows}", split="leave-last")
    assert (data.test.row(0).tolist(), data.valid.row(0).tolist()) == ([1], [2])


def test_dates_that_are_not_clear(table: MakeTable) -> None:
    content = "user,item,date\n1,0,02/04/2024\n1,1,01/05/2024\n1,2,03/03/2024\n"
    with pytest.raises(InputError, match="as in 02/04/2024, may begin with day or month: give `date_format` day-"):
        table(content, split="leave-last")
    for form, last in (("day-first", 1), ("month-first", 2), ("%d/%m/%Y", 1), ("%m/%d/%Y", 2)):
        assert table(content, split="leave-last", date_format=form).test.row(0).tolist() == [last]
    assert table(content).n_items == 3  # the random split does not need the times
    with pytest.raises(InputError, match="a day in some rows and a month in others"):
        table(content + "1,4,13/04/2024\n1,5,04/13/2024\n", split="time")
    with pytest.raises(InputError, match=r"data row 1 .* check `date_format` '%Y'"):
        table(content, split="time", date_format="%Y")
    with pytest.raises(InputError, match="`date_format` 'soon' must be day-first or month-first"):
        table(content, split="time", date_format="soon")
    with pytest.raises(InputError, match=r"data row 2 of .*\('2024-04-05'\).*give `date_format`"):
        table("user,item,date\n1,0,02.04.2024\n1,1,2024-04-05\n", split="time")


def test_usual_names_count_only_if_there_is_no_better_one(table: MakeTable) -> None:
    assert table("user,item,Order Date\n1,2,5\n").meta["columns"]["timestamp"]["column"] == "Order Date"
    assert table("user,item,order_date,time\n1,2,5,6\n").meta["columns"]["timestamp"]["column"] == "time"
    assert "timestamp" not in table("user,item,order_date,purchase_date\n1,2,5,6\n").meta["columns"]


# -- missing values and bad rows ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["NA", "", "N/A", "null", "NaN", "None", "#N/A", "\\N"])
def test_missing_values_in_columns_that_are_not_used(table: MakeTable, word: str) -> None:
    content = f"user,item,rating,date,price\n1,10,5,{word},{word}\n1,11,{word},1,{word}\n"
    assert kept(table(content)) == [10, 11]
    with pytest.raises(InputError, match=r"data row 2 .* missing, infinite or not a number.*`skip_bad_rows`"):
        table(content, min_rating=1)
    with pytest.warns(UserWarning, match=r"1 of 2 rows cannot be used and are left out; the first: data row 2 of"):
        assert kept(table(content, min_rating=1, skip_bad_rows=True)) == [10]


def test_ids_that_are_spelled_like_missing_ones(table: MakeTable) -> None:
    content = "user,item\n1,10\nNA,11\n2,12\n"
    with pytest.warns(UserWarning, match="the user id 'NA', which is taken for the id of one user.*`skip_bad_rows`"):
        assert ids(table(content))[0] == ["1", "2", "NA"]
    with pytest.warns(UserWarning, match="1 of 3 rows cannot be used"):
        assert ids(table(content, skip_bad_rows=True)) == ([1, 2], [10, 12])


BAD = {
    "a.csv": "user,item,note\n1,10,x\n1,11,x,y\n,12,x\n1,13,x\n1,14,\"x\n1,15,x\n2,16,\"two\nlines\"\n",
    "a.tsv": "user\titem\n1\t10\n1\t11\t5\n\t12\n1\t13\n1\n1\t15\n2\t16\n",
    "a.jsonl": '{"user":1,"item":10}\n{"user":1,"it\n{"item":12}\n{"user":1,"item":13}\n[3]\n'
    '{"user":1,"item":15}\n{"user":2,"item":16}\n',
    "b.jsonl": '{"user":1,"item":10}\n{"user":1,"item":[11]}\n{"user":null,"item":12}\n{"user":1,"item":13}\n'
    '{"user":{},"item":14}\n{"user":1,"item":15}\n{"user":2,"item":16}\n',
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("packed", [False, True])
def test_bad_rows_are_skipped_and_counted(table: MakeTable, name: str, packed: bool) -> None:
    content = BAD[name].encode()
    if packed:
        content, name = gzip.compress(content), f"{name}.gz"
    with pytest.raises(InputError, match=r"line [23]: .*`skip_bad_rows`"):
        table(content, name)
    with pytest.warns(UserWarning, match=r"3 of [67] rows cannot be used and are left out; the first: line [23] of"):
        data = table(content, name, skip_bad_rows=True)
    assert ids(data) == ([1, 2], [10, 13, 15, 16])
    assert data.meta["skipped"]["rows"] == 3
    assert data.meta["reading"] == {"skip_bad_rows": True}


FIRST_BAD = [
    # values of several columns; the user is read first
    ("a.csv", "user,item,rating\n1,10,5\n1,11,bad\n,12,5\n2,13,4\n", r"data row 2 .* rating .*\('bad'\)"),
    # a value above and below lines that cannot be read, after blank lines and a field of two lines
    ("b.csv", '\n\nuser,item,rating\n1,"1\n0",5\n\n1,11,bad\n1,1,1,1\n2,13,4\n', r"data row 3 .* rating"),
    ("c.csv", '\n\nuser,item,rating\n1,"1\n0",5\n\n1,1,1,1\n1,11,bad\n2,13,4\n', "line 7 .* cannot be read"),
    ("d.csv", "1,10,5\n1,11,bad\n1,1,1,1\n2,13,4\n", r"row 2 .* rating"),
    ("e.csv", "1,10,5\n1,1,1,1\n1,11,bad\n2,13,4\n", "line 2 .* cannot be read"),
    (
        "f.jsonl",
        '{"user":1,"item":10,"rating":5}\n\n{"user":1,"item":11}\n{"user"\n{"user":2,"item":13,"rating":4}\n',
        "row 2 .* rating",
    ),
    (
        "g.jsonl",
        '{"user":1,"item":10,"rating":5}\n\n{"user"\n{"user":1,"item":11}\n{"user":2,"item":13,"rating":4}\n',
        "line 3 .* cannot be read",
    ),
]


@pytest.mark.parametrize(("name", "content", "first"), FIRST_BAD)
def test_the_first_bad_row_is_named(table: MakeTable, name: str, content: str, first: str) -> None:
    columns = {"columns": ("user", "item", "rating")} if name in ("d.csv", "e.csv") else {}
    with pytest.warns(UserWarning, match=f"2 of [45] rows .* the first: {first}"):
        data = table(content, name, min_rating=1, skip_bad_rows=True, **columns)
    assert data.n_interactions == 2


def test_the_first_bad_row_of_several_files_is_named(tmp_path: Path) -> None:
    files = [tmp_path / f"{name}.csv" for name in "ab"]
    for file, rows in zip(files, ("1,10,5\n1,11,bad\n", "1,12,4\n1,1,1,1\n2,13,5\n"), strict=True):
        file.write_text(f"user,item,rating\n{rows}")
    for raw, first in ((files, r"data row 2 of \S+a.csv"), (files[::-1], r"line 3 of \S+b.csv")):
        with pytest.warns(UserWarning, match=f"2 of 5 rows .* the first: {first}"):
            prepare(
                find_source("table"),
                raw,
                tmp_path / "out",
                FileFormat(skip_bad_rows=True),
                BuildOptions(min_rating=1),
                overwrite=True,
            )


def test_pairs_of_lines_that_cannot_be_read_are_not_known(table: MakeTable) -> None:
    content = "user,item,rating\n1,10,5\n1,11,5,extra,field\n2,11,5\n2,10,bad\n"
    with pytest.warns(UserWarning, match="user and item are unknown in 1 line, so they may be recommended"):
        data = table(content, min_rating=1, skip_bad_rows=True)
    assert data.meta["skipped"]["rows"] == 2
    assert (data.meta["skipped"]["lines"], data.meta["skipped"]["pairs"]) == (1, 1)
    assert data.dropped.row(0).tolist() == []
    assert data.dropped.row(1).tolist() == [0]


def test_pairs_of_bad_rows_are_counted_apart(table: MakeTable) -> None:
    rows = "1,10,5\n1,11,bad\n1,12,1\n1,13,bad\n1,13,1\n2,11,5\n2,12,4\n2,13,4\n2,14,bad\n"
    with pytest.warns(UserWarning, match="3 of 9 rows cannot be used"):
        data = table(f"user,item,rating\n{rows}", min_rating=3, skip_bad_rows=True)
    assert data.dropped.nnz == 3
    assert data.meta["skipped"]["pairs"] == 1  # (1, 13) has a low rating too, and item 14 has left
    assert data.dropped_elsewhere is not None
    assert data.dropped_elsewhere.rows() == [(2, 14)]


def test_lines_in_another_encoding_are_skipped(table: MakeTable) -> None:
    content = "user,item\n1,café\n2,b\n".encode("latin-1")
    with pytest.warns(UserWarning, match=r"1 of 2 rows .* line 2 of"):
        assert ids(table(content, skip_bad_rows=True)) == ([2], ["b"])


def test_nothing_to_skip_gives_the_same_data(table: MakeTable) -> None:
    content = "user,item\n" + "".join(f"{k % 7},{k}\n" for k in range(50))
    before = table(content).checksum
    assert table(content, skip_bad_rows=True).checksum == before
    frame = pl.DataFrame({"user": [1, None], "item": [1, 2]})
    with pytest.warns(UserWarning, match="1 of 2 rows"):
        assert Dataset.from_frame(frame, skip_bad_rows=True).n_interactions == 1


# -- events ------------------------------------------------------------------------------------------------------------

EVENTS = "visitorid,event,itemid\n1,view,10\n1,view,10\n1,buy,10\n1,cart,11\n2, buy ,12\n2,,13\n"


def test_events(table: MakeTable) -> None:
    data = table(EVENTS, event_weight={"view": 1, "buy": 5.5})
    assert kept(data) == [10, 12]
    assert data.meta["weights"] == {"column": "event", "least": 5.5, "most": 7.5, "mean": 6.5}
    assert data.meta["events"] == {"buy": 2, "view": 2, "": 1, "cart": 1}
    assert data.meta["steps"][1] == {"step": "events view, buy", "interactions": 4, "users": 2, "items": 2}
    assert data.meta["reading"] == {"event_weight": {"view": 1, "buy": 5.5}}
    assert "`event_weight`" in table(EVENTS).meta["notes"][0]
    assert table(EVENTS).n_items == 4
    frame = pl.DataFrame({"user": [1, 1, 2], "item": [1, 2, 2], "what": [0, 1, 1]})
    weighted = Dataset.from_frame(frame, event="what", event_weight={"1": 3}, ratios=(1, 0, 0))
    assert weighted.train.weights is not None
    assert weighted.train.weights.tolist() == [3, 3]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"event_weight": {"view": 1, "sale": 2}}, r"names 'sale', but no row has this event; the events are buy \(2"),
        ({"event_weight": {"view": 0}}, "to leave out these events, do not name them"),
        ({"event_weight": {}}, "names no event"),
        ({"event": "event"}, "`event` needs `event_weight`"),
        ({"event_weight": {"view": 1}, "weight": "itemid"}, "leave out one of them"),
        ({"event_weight": {"view": 1}, "event": "what"}, "no column 'what', given as `event`"),
    ],
)
def test_bad_events(table: MakeTable, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        table(EVENTS, **fields)
    with pytest.raises(InputError, match="recognised as the events: name one as `event`"):
        table("user,item\n1,2\n", event_weight={"view": 1})
