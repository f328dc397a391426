"""The command `prepare`: results, messages, exit codes, and no incomplete output."""

import gzip
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from datetime import date
from pathlib import Path

import polars as pl
import pytest

from drm_triton import Dataset
from tests.conftest import HANG, call, environment, run_python

Run = Callable[..., tuple[int, str, str]]

GOOD = "user,item,rating,timestamp\n" + "".join(
    f"{u},{i},{(u + i) % 5 + 1},{u * i}\n" for u in range(20) for i in range(10)
)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a function that runs a command in an empty directory, and returns exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DRM_DATA", raising=False)
    return call


def fails(run: Run, *arguments: object) -> str:
    """Run a command that must fail because of its input, leave nothing behind, and print one paragraph; return it.

    A command to type may follow the paragraph.
    """
    before = sorted(p.name for p in Path.cwd().iterdir())
    code, out, err = run(*arguments)
    assert code == 2, err
    assert out == ""
    assert err.startswith("error: ")
    assert err.replace("\n  drm-triton ", " ").count("\n") == 1
    assert "Traceback" not in err
    assert sorted(p.name for p in Path.cwd().iterdir()) == before
    return err


def test_prepare_a_table(run: Run) -> None:
    Path("ratings.csv").write_text(GOOD)
    code, out, err = run("prepare", "table", "--raw", "ratings.csv", "--out", "d", "--min-rating", 3)
    assert code == 0
    assert "interactions" in out
    assert "read: 200 rows" in err


@pytest.mark.parametrize(
    ("rows", "columns"),
    [
        ("1::1193::5::978300760\n1::661::3::978302109\n", "user,item,rating,timestamp"),
        ("ann;x;2024-04-02;4,5;blue\nbob;y;2024-04-03;3,5;red\n", "user,item,timestamp,rating"),
        ("1::1::1\n1::2::3\n", "user,item,rating"),  # a header would repeat a name
        ("1\t10\n2\t11\n", "user,item"),
    ],
)
def test_a_file_without_a_header_gets_a_command_that_works(run: Run, rows: str, columns: str) -> None:
    Path("my ratings.dat").write_text(rows)
    code, _, error = run("prepare", "table", "--raw", "my ratings.dat", "--out", "d", "-q")
    assert code == 2
    assert f"here perhaps --columns {columns}. The whole command:\n" in error
    program, *command = shlex.split(error.splitlines()[1])
    assert (program, command[-2:]) == ("drm-triton", ["--columns", columns])
    assert run(*command)[0] == 0
    assert Dataset.load("d").n_interactions == 2


def test_json_prints_one_object(run: Run) -> None:
    Path("r.csv").write_text(GOOD)
    code, out, _ = run("prepare", "table", "--raw", "r.csv", "--out", "d", "--json")
    assert code == 0
    assert json.loads(out)["interactions"] == 200


def test_every_option_is_recorded(run: Run) -> None:
    Path("r.csv").write_text(GOOD)
    options = ["--split", "per-user", "--ratios", "8/1/1", "--seed", "5", "--min-user", "2", "--user", "user"]
    run("prepare", "table", "--raw", "r.csv", "--out", "d", *options)
    meta = json.loads(Path("d/meta.json").read_text())
    assert meta["options"] == {
        "min_rating": None, "min_user": 2, "min_item": 1, "split": "per-user", "ratios": [8.0, 1.0, 1.0], "seed": 5,
    }  # fmt: skip
    assert meta["reading"] == {"user": "user"}
    assert meta["files"][0]["file"] == "r.csv"
    assert len(meta["files"][0]["sha256"]) == 64
    assert meta["version"] == 1


def test_weights(run: Run) -> None:
    Path("r.csv").write_text(
        "user,item,plays\n" + "".join(f"{u},{i}, {u + i + 1} \n" for u in range(9) for i in range(9))
    )
    code, out, _ = run("prepare", "table", "--raw", "r.csv", "--out", "d", "--weight", "plays")
    assert code == 0
    assert "weights from 1 to 17, mean 9 (column plays)" in out
    meta = json.loads(Path("d/meta.json").read_text())
    assert meta["weights"] == {"column": "plays", "least": 1.0, "most": 17.0, "mean": 9.0}
    assert meta["version"] == 1
    assert json.loads(run("info", "d", "--json")[1])["weights"] == meta["weights"]
    data = Dataset.load("d")
    assert data.train.weights is not None
    assert data.train.weights[0] == data.train.indices[0] + 1
    Path("r.txt").write_text("".join(f"{u};{i};{u + i + 1}\n" for u in range(9) for i in range(9)))
    assert run("prepare", "table", "--raw", "r.txt", "--out", "e", "--columns", "user,item,weight")[0] == 0
    assert Dataset.load("e").checksum == data.checksum


def test_what_was_taken_for_what_is_printed(run: Run) -> None:
    rows = "".join(f"x,u{k % 9},{k % 7 + 1},{k * 1000},02.04.2024 20:{k:02},view\n" for k in range(60))
    Path("r.csv").write_text(f"Kunde,userID,artistID,weight,order_date,event\n{rows}u,u1,,5,,\n")
    command = ["prepare", "table", "--raw", "r.csv", "--out", "d", "-q", "--min-user", 5, "--min-item", 3]
    code, out, err = run(*command, "--skip-bad-rows")
    assert code == 0
    assert "user      ← userID      first u0\n" in out
    assert "item      ← artistID    1 … 7; first 1\n" in out
    assert "rating    ← weight      0 … 59,000; first 0; all above 0 count alike\n" in out
    assert "timestamp ← order_date  first 02.04.2024 20:00; not used\n" in out
    assert "ignored: Kunde, event\n" in out
    assert "note: 'weight' looks like weights: --weight weight makes them count in training\n" in out
    assert "--event-weight with" in out
    assert "rating > 0 59 1 9 7" in [" ".join(line.split()) for line in out.splitlines()]
    assert "at least 5 items per user and 3 users per item" in out
    assert "skipped before: 1 row; the first: data row 61 of r.csv has no usable item id\n" in out
    assert "warning: 1 of 60 rows of r.csv have a rating of 0 or less" in err
    assert "--min-rating 0 keeps them, and --rating '' ignores all ratings" in err
    assert "warning: 1 of 61 rows cannot be used" in err
    assert max(map(len, out.splitlines())) <= 80
    assert run("info", "d")[1] == out
    facts = json.loads(run("info", "d", "--json")[1])
    assert facts["columns"]["item"] == {"column": "artistID", "first": "1", "least": 1, "most": 7}
    assert facts["ignored_columns"] == ["Kunde", "event"]
    assert facts["skipped"]["rows"] == 1


def test_titles_are_counted(run: Run) -> None:
    Path("r.csv").write_text(GOOD)
    Path("names.csv").write_text("genre,movieId,name\n" + "".join(f"x,{i},film {i}\n" for i in range(3, 12)))
    command = ["prepare", "table", "--raw", "r.csv", "--out", "d", "-q"]
    code, out, _ = run(*command, "--titles", "names.csv")
    assert code == 0
    lines = " ".join(out.split())
    assert "titles: 7 of 10 items have one, 3 have none (names.csv: item ← movieId, title ← name)" in lines
    assert max(map(len, out.splitlines())) <= 80
    assert run("info", "d")[1] == out
    described = {"found": 7, "missing": 3, "file": "names.csv", "item": "movieId", "title": "name"}
    assert json.loads(run("info", "d", "--json")[1])["titles"] == described
    assert "titles" not in run(*command, "--overwrite")[1]


def test_one_is_not_a_plural(run: Run) -> None:
    Path("r.csv").write_text("user,item\n1,2\n1,3\n")
    code, out, err = run("prepare", "table", "--raw", "r.csv", "--out", "d", "--min-user", 2)
    assert code == 0
    assert "at least 2 items per user and 1 user per item" in out
    assert "filter: 2 interactions, 1 user, 2 items" in err


def test_a_file_of_titles_without_a_header(run: Run) -> None:
    Path("r.csv").write_text(GOOD)
    rows = "".join(f"{i}|film {i}|01-Jan-1995||{'|'.join('0' * 9)}\n" for i in range(1, 12))
    Path("u.item").write_text(rows)
    command = ["prepare", "table", "--raw", "r.csv", "--out", "d", "-q", "--titles", "u.item"]
    error = fails(run, *command)
    assert "its columns are '1', 'film 1', '01-Jan-1995', '', '0' and 8 more; the first row looks like data" in error
    assert "put a line before it that names all 13 columns, item and title among them" in error
    Path("u.item").write_text("|".join(["item", "title", *"cdefghijklm"]) + "\n" + rows)
    assert run(*command)[0] == 0


def test_ratings_that_are_missing_or_infinite(run: Run) -> None:
    Path("r.csv").write_text("user,item,rating\n1,2,5\n1,3,NA\n2,3,NaN\n")
    command = ["prepare", "table", "--raw", "r.csv", "-q", "--out"]
    code, out, _ = run(*command, "d")
    assert code == 0
    assert "note: 2 of 3 rows have no rating and count as positives\n" in out
    Path("r.csv").write_text("user,item,rating\n1,2,5\n1,3,inf\n")
    error = fails(run, *command, "e")
    assert "data row 2 of r.csv has a rating that is missing, infinite or not a number ('inf')" in " ".join(
        error.split()
    )
    assert "--skip-bad-rows" in error


def test_bad_rows_are_not_counted_as_dropped_by_filters(run: Run) -> None:
    Path("r.csv").write_text(GOOD + "1,9,bad,0\n1,3,bad,0\n")
    Path("bad.csv").write_text("user,item,rating\n1,1,5\n1,2,bad\n2,2,4\n")
    options = ["--min-rating", 3, "--skip-bad-rows", "-q"]
    for file, filtered in (("r.csv", True), ("bad.csv", False)):
        code, out, _ = run("prepare", "table", "--raw", file, "--out", file[:-4], *options)
        assert code == 0
        assert ("dropped by filters" in out) == filtered
        assert ("in bad rows only                   1  never recommended" in out) != filtered


def test_a_column_of_weights_is_printed(run: Run) -> None:
    Path("r.csv").write_text("userID,artistID,weight\n1,2,352698\n1,3,1\n")
    code, out, _ = run("prepare", "table", "--raw", "r.csv", "--out", "d", "--weight", "weight", "-q")
    assert code == 0
    assert "weight    ← weight    1 … 352,698; first 352698\n" in out
    assert "rating" not in out
    assert "note" not in out


def test_events_have_weights(run: Run) -> None:
    Path("r.csv").write_text("user,item,action\n1,2,view\n1,2,buy\n1,3,view\n2,2,scroll\n")
    command = ["prepare", "table", "--raw", "r.csv", "-q"]
    code, out, _ = run(*command, "--out", "d", "--event-weight", "view=1, buy=5")
    assert code == 0
    assert "weights from 1 to 6, mean 3.5 (column action)" in out
    assert "events view, buy 3 1 1 2" in [" ".join(line.split()) for line in out.splitlines()]
    assert "rows of each event: view 2, buy 1, scroll 1\n" in out
    for wrong in ("view", "view=x", "=1", "view=1,view=2", "view=nan", ""):
        assert "view=1,buy=5" in fails(run, *command, "--out", "e", "--event-weight", wrong)


def test_dates_and_decimal_commas(run: Run) -> None:
    Path("r.csv").write_text("user;item;rating;date\n1;2;4,5;02/04/2024\n1;3;3,5;01/05/2024\n")
    command = ["prepare", "table", "--raw", "r.csv", "-q", "--split", "time"]
    err = fails(run, *command, "--out", "d")
    assert "give --date-format day-first or month-first" in err
    assert "'%d/%m/%Y %H:%M'" in err
    code, out, _ = run(*command, "--out", "d", "--date-format", "day-first", "--min-rating", 4)
    assert code == 0
    assert "rating    ← rating  3.5 … 4.5; first 4,5\n" in out
    assert "timestamp ← date    2024-04-02 00:00:00 … 2024-05-01 00:00:00; first 02/04/2024\n" in out
    Path("r.csv").write_text("user;item;rating\n1;2;1,234\n")
    assert "give --decimal comma or --decimal point" in fails(
        run, "prepare", "table", "--raw", "r.csv", "--out", "e", "-q"
    )


def test_files_that_are_already_split(run: Run) -> None:
    Path("train.txt").write_text("".join(f"{u} {u} {u + 1} {u + 2}\n" for u in range(20)))
    Path("test.txt").write_text("".join(f"{u} {u + 3}\n" for u in range(20)))
    parts = ["--train", "train.txt", "--test", "test.txt"]
    code, out, err = run("prepare", "lists", *parts, "--out", "d")
    assert code == 0, err
    assert "\nsplit predefined\n" in out
    code, out, _ = run("prepare", "lists", *parts, "--out", "e", "--valid-ratio", "0.1", "--seed", 7, "--json")
    facts = json.loads(out)
    assert (facts["train"], facts["valid"], facts["test"]) == (54, 6, 20)
    assert facts["options"] == {"split": "predefined", "valid_ratio": 0.1, "seed": 7}
    assert "split predefined, 0.1 of train drawn for validation, seed 7" in run("info", "e")[1]
    Path("valid.txt").write_text("0 9\n")
    code, out, _ = run("prepare", "lists", *parts, "--valid", "valid.txt", "--out", "f", "--json")
    assert json.loads(out)["valid"] == 1


def test_tables_that_are_already_split(run: Run) -> None:
    Path("a.csv").write_text("who,what\nann,x\nbob,y\n")
    Path("b.csv").write_text("who,what\nann,y\n")
    code, out, err = run(
        "prepare", "table", "--train", "a.csv", "--test", "b.csv", "--user", "who", "--item", "what", "--out", "d",
        "--json",
    )  # fmt: skip
    assert code == 0, err
    facts = json.loads(out)
    assert (facts["train"], facts["valid"], facts["test"]) == (2, 0, 1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("lists --train a.txt", "--test is missing"),
        ("lists --test b.txt", "--train is missing"),
        ("lists --valid b.txt", "--train is missing"),
        ("lists --train a.txt --test nowhere.txt", "there is no file nowhere.txt: check --test"),
        ("lists --train a.txt --test a.txt", "--train and --test are the same file"),
        ("lists --train a.txt --test overlap.txt", "1 of 2 interactions of --test are in --train too"),
        ("lists --train a.txt --test b.txt --raw a.txt", "leave out --raw"),
        ("lists --train a.txt --test b.txt --min-user 2", "already split are kept as they are: leave out --min-user"),
        ("lists --train a.txt --test b.txt --min-item 2", "leave out --min-item"),
        ("table --train a.txt --test b.txt --min-rating 2", "leave out --min-rating"),
        ("lists --train a.txt --test b.txt --ratios 70/10/20", "leave out --ratios"),
        ("lists --train a.txt --test b.txt --split random", "leave out --split"),
        ("lists --train a.txt --test b.txt --valid-ratio 1", "--valid-ratio must be at least 0 and below 1"),
        ("lists --train a.txt --test b.txt --valid a2.txt --valid-ratio 0.5", "leave out --valid-ratio"),
        ("lists --raw a.txt --split leave-last --ratios 80/10/10", "two interactions of each user: leave out --ratios"),
        ("lists --raw a.txt --valid-ratio 0.1", "--valid-ratio is for files that are already split"),
        ("melon --train a.txt --test b.txt", "source melon does not use --train and --test"),
        ("synthetic --train a.txt --test b.txt", "leave out --t"),
        ("ml-1m-m1 --raw . --min-user 2", "leave out --min-user"),
        ("ml-1m-m1 --raw a.txt", "give the folder that contains train.txt and test.txt as --raw"),
        ("ml-1m-m1 --train a.txt --test b.txt", "source ml-1m-m1 does not use --train and --test"),
    ],
)
def test_bad_parts(run: Run, arguments: str, words: str) -> None:
    for name, content in {"a": "0 1\n1 2 7\n", "a2": "1 8\n", "b": "0 2\n", "overlap": "0 1 2\n"}.items():
        Path(f"{name}.txt").write_text(content)
    assert words in fails(run, "prepare", *arguments.split(), "--out", "out", "--quiet")


def test_sources_without_columns_have_no_weights(run: Run) -> None:
    Path("users.dat").write_text("1 2 3\n2 3 4\n")
    err = fails(run, "prepare", "lists", "--raw", "users.dat", "--out", "d", "--weight", "n", "-q")
    assert "source lists does not use --weight" in err


def test_default_places(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("data/raw/ml-20m").mkdir(parents=True)
    Path("data/raw/ml-20m/ratings.csv").write_text(GOOD.replace("user,item", "userId,movieId"))
    assert run("prepare", "ml-20m", "-q")[0] == 0
    assert run("info", "ml-20m")[0] == 0
    monkeypatch.setenv("DRM_DATA", "elsewhere")
    assert "elsewhere" in fails(run, "prepare", "ml-20m")


def test_list(run: Run) -> None:
    code, out, _ = run("prepare", "--list")
    assert code == 0
    assert max(len(line) for line in out.splitlines() if "://" not in line) <= 80
    for name in ("melon", "sketchfab", "epinion", "ml-20m", "ml-100k", "table", "lists", "synthetic"):
        assert f"\n{name}" in f"\n{out}"
    assert len(json.loads(run("prepare", "--list", "--json")[1])["sources"]) >= 12


def test_melon_without_data_says_how_to_get_it(run: Run) -> None:
    err = fails(run, "prepare", "melon")
    assert "arena.kakao.com" in err
    assert str(Path("data/raw/melon")) in err
    assert "--synthetic" in err


def test_melon_synthetic(run: Run) -> None:
    code, out, _ = run("prepare", "melon", "--synthetic", "--scale", "0.005", "--json")
    assert code == 0
    facts = json.loads(out)
    assert (facts["users"], facts["items"], facts["interactions"]) == (520, 406, 20_500)
    assert facts["published"] is None  # generated data is not to be measured by the paper's
    playlists = json.loads(Path("data/raw/melon-synthetic/train.json").read_text("utf-8"))
    assert len(playlists) == 520
    assert "(synthetic)" in run("info", "melon")[1]


def test_synthetic(run: Run) -> None:
    size = ["--users", "50", "--items", "40", "--interactions", "600"]
    code, out, _ = run("prepare", "synthetic", *size, "--json")
    assert code == 0
    facts = json.loads(out)
    assert (facts["users"], facts["items"], facts["interactions"]) == (50, 40, 600)
    assert "choose between" in fails(run, "prepare", "synthetic", "--users", 10, "--items", 10, "--out", "e")


BAD = {
    "missing file": (None, [], ["there is no file", "bad.csv"]),
    "empty file": (b"", [], ["bad.csv is empty"]),
    "blank file": (b"\n\n", [], ["bad.csv is empty"]),
    "header only": (b"user,item\n", [], ["no interactions"]),
    "missing column": (b"who,what\na,b\n", [], ["'who', 'what'", "--user"]),
    "no item column": (b"user,what\na,b\n", [], ["as the items", "--item"]),
    "ambiguous column": (b"user,movie_id,track_id\n1,2,3\n", [], ["'movie_id', 'track_id'", "--item"]),
    "repeated column": (b"user,item,item\n1,2,3\n", [], ["several columns named 'item'"]),
    "unknown column": (b"user,item\n1,2\n", ["--user", "person"], ["no column 'person'", "'user', 'item'"]),
    "no header": (b"1,2,5\n3,4,5\n", [], ["--columns"]),
    "header and --columns": (b"user,item\n1,2\n", ["--columns", "user,item"], ["begins with a header", "--columns"]),
    "too many --columns": (b"1,2\n", ["--columns", "user,item,rating"], ["names 3 columns", "has 2"]),
    "--columns without item": (b"1,2\n", ["--columns", "user,what"], ["must name user and item"]),
    "truncated gzip": (gzip.compress(os.urandom(5000).hex().encode() + GOOD.encode())[:-100], [], ["truncated"]),
    "wrong encoding": ("user,item\n1,a\n2,café\n".encode("latin-1"), [], ["line 3", "--encoding latin-1"]),
    "UTF-16": ("user,item\n1,2\n".encode("utf-16"), [], ["--encoding utf-16"]),
    "unknown encoding": (b"user,item\n1,2\n", ["--encoding", "klingon"], ["klingon"]),
    "null user": (b"user,item\n1,2\n,3\n", [], ["row 2", "user id"]),
    "null item": (b"user,item,rating\n1,2,1\n2,,1\n", [], ["row 2", "item id"]),
    "rating not a number": (b"user,item,rating\n1,2,5\n1,3,good\n", [], ["row 2", "'good'", "not a number"]),
    "rating NaN": (b"user,item,rating\n1,2,NaN\n", ["--min-rating", "1"], ["row 1", "not a number"]),
    "needed rating is absent": (b"user,item\n1,2\n", ["--min-rating", "4"], ["needs a rating", "--rating"]),
    "needed time is absent": (b"user,item\n1,2\n", ["--split", "time"], ["needs a timestamp", "--timestamp"]),
    "time unreadable": (b"user,item,date\n1,2,5\n1,3,soon\n", ["--split", "time"], ["row 2", "'soon'"]),
    "all filtered by rating": (b"user,item,rating\n1,2,1\n", ["--min-rating", "4"], ["rating >= 4", "1 interaction,"]),
    "all filtered by k-core": (b"user,item\n1,2\n", ["--min-user", "5"], ["at least 5", "--min-user"]),
    "too many fields": (b"user,item\n1,2\n1,2,3\n", [], ["line 3", "more fields"]),
    "too few fields": (b"user,item\n1,2\n1\n", [], ["row 2", "item id"]),
    "weight zero": (b"user,item,n\n1,2,1\n1,3,0\n", ["--weight", "n"], ["row 2", "('0')", "1e-20", "--min-rating"]),
    "weight negative": (b"user,item,n\n1,2,-1\n", ["--weight", "n"], ["row 1", "weight", "another column as --weight"]),
    "weight infinite": (b"user,item,n\n1,2,inf\n", ["--weight", "n"], ["row 1", "'inf'"]),
    "weight missing": (b"user,item,n\n1,2,1\n1,3,\n", ["--weight", "n"], ["row 2", "not a number"]),
    "weight not a number": (b"user,item,n\n1,2,often\n", ["--weight", "n"], ["row 1", "'often'"]),
    "no such weight": (b"user,item,n\n1,2,1\n", ["--weight", "m"], ["no column 'm', given as --weight"]),
    "open quote": (b'user,item\n1,"2\n3,4\n', [], ["quotation marks"]),
    "bad ratios": (b"user,item\n1,2\n", ["--ratios", "70/30"], ["70/10/20"]),
    "negative count": (b"user,item\n1,2\n", ["--min-item=-1"], ["--min-item"]),
    "one column": (b"user\n1\n", [], ["recognised as the items"]),
    "no separator": (b"user~item\n1~2\n", [], ["--separator"]),
    "titles without titles": (b"user,item\n1,2\n", ["--titles", "bad.csv"], ["titles"]),
    "carriage returns alone": (b"user,item\r1,2\r3,4\r", [], ["carriage return alone", "tr "]),
    "a quoted field over the limit": (b'user,item,x\n1,2,"' + b"x" * 200_000 + b'"\n', [], ["128 KB"]),
    "NUL": (b"user,item\n1,\x002\n", [], ["NUL bytes", "utf-16-le"]),
    "UTF-16 without mark": ("user,item\n1,2\n".encode("utf-16-le"), [], ["NUL bytes", "utf-16-le"]),
    "impossible separator": (b"user,item\n1,2\n", ["--separator", '"'], ["--separator", "cannot be used"]),
    "time nan": (b"user,item,date\n1,2,5.5\n1,3,nan\n", ["--split", "time"], ["row 2", "'nan'"]),
    "no such titles": (b"user,item\n1,2\n", ["--titles", "none.csv"], ["none.csv", "check --titles"]),
    "null user without header": (b"1,2\n,3\n", ["--columns", "user,item"], ["row 2 of bad.csv has", "user id"]),
    "blank user": (b"user,item\n1,2\n  ,3\n", [], ["row 2", "user id"]),
    "name too long": (b"user,item\n1,2\n", ["--out", "x" * 300], ["cannot write", "too long"]),
    "raw too long": (b"user,item\n1,2\n", ["--raw", "x" * 300], ["cannot read", "too long", "--raw"]),
    "titles too long": (b"user,item\n1,2\n", ["--titles", "x" * 300], ["too long", "--titles"]),
    "nothing to train on": (b"user,item\n1,2\n", ["--ratios", "1/1/8"], ["train on", "--ratios", "--split"]),
    "7z": (b"7z\xbc\xaf\x27\x1c", [], ["7z", "unpack"]),
    "damaged zip": (b"PK\x03\x04junk", [], ["damaged"]),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input(run: Run, case: str) -> None:
    content, options, words = BAD[case]
    if content is not None:
        Path("bad.csv").write_bytes(content)
    err = fails(run, "prepare", "table", "--raw", "bad.csv", "--out", "out", "--quiet", *options)
    for word in words:
        assert word in err


@pytest.mark.parametrize(
    ("source", "name", "content", "words"),
    [
        ("melon", "train.json", '[{"id": 1, "songs": [1, 2', ["train.json", "cut short"]),
        ("table", "a.jsonl", '{"user": 1, "item": 2}\n{"user": 1, "it', ["line 2", "cut short"]),
        ("table", "a.json", '[{"user": 1, "item": 2}, {"us', ["a.json", "cut short"]),
        ("table", "b.jsonl", '{"user": 1, "item": 2}\n' * 2000 + '{"user": [3], "item": 2}', ["line 2,001", "kind"]),
        ("table", "c.jsonl", '{"user": 1, "item": 2}\n' * 2000 + '{"user": 3, "item": true}', ["line 2,001", "kind"]),
        ("melon", "train.json", '[{"id": 1, "songs": [1]}, {"id": 2, "songs": [1, 5.5]}]', ["playlist 2 of", "5.5"]),
        ("melon --min-rating 3", "train.json", '[{"id": 1, "songs": [1]}]', ["does not have: leave out --min-rating"]),
        ("lists --separator comma", "users.dat", "a,1\nb,2,,3\n", ["line 2 of", "item id"]),
        ("epinion", "a.mat", "not matlab", ["a.mat"]),
        ("ml-1m", "ratings.dat", "1::2::x::4\n", ["row 1", "'x'"]),
        ("lists", "users.dat", "\n\n", ["no interactions"]),
        ("table --columns user,item", "a.jsonl", '{"user": 1, "item": 2}', ["names its own columns"]),
        ("table", "a.parquet", "PAR1 and no more", ["a.parquet", "damaged"]),
    ],
)
def test_bad_files_of_other_kinds(run: Run, source: str, name: str, content: str, words: list[str]) -> None:
    Path(name).write_text(content)
    err = fails(run, "prepare", *source.split(), "--raw", name, "--out", "out", "--quiet")
    for word in words:
        assert word in err


def test_usage_errors(run: Run) -> None:
    Path("good.csv").write_text(GOOD)
    assert "did you mean 'melon'" in fails(run, "prepare", "mellon")
    assert "--list" in fails(run, "prepare")
    assert "is a directory" in fails(run, "prepare", "table", "--raw", ".", "--out", "out")
    assert "--raw" in fails(run, "prepare", "table")
    assert "imitates melon only" in fails(run, "prepare", "ml-1m", "--synthetic")
    assert "leave out --raw" in fails(run, "prepare", "synthetic", "--raw", "good.csv")
    assert "no public address" in fails(run, "prepare", "sketchfab", "--download")
    assert "does not use --leading" in fails(
        run, "prepare", "table", "--raw", "good.csv", "--leading", "user", "--out", "out"
    )
    assert "does not use --titles" in fails(
        run, "prepare", "lists", "--raw", "good.csv", "--titles", "x", "--out", "out"
    )
    assert "--scale" in fails(run, "prepare", "table", "--raw", "good.csv", "--scale", "2")
    assert "--users must be a table of attributes" in fails(run, "prepare", "melon", "--users", "5")
    assert "leave out --download" in fails(run, "prepare", "synthetic", "--download")
    assert run("prepare", "table", "--splitt", "x")[0] == 2


def test_existing_output(run: Run) -> None:
    Path("good.csv").write_text(GOOD)
    command = ["prepare", "table", "--raw", "good.csv", "--out", "d", "--quiet"]
    assert run(*command)[0] == 0
    assert "--overwrite" in fails(run, *command)
    assert run(*command, "--overwrite", "--seed", 1)[0] == 0
    assert Dataset.load("d").meta["options"]["seed"] == 1
    Path("good.csv").write_text("user,item\n1,\n")
    fails(run, *command, "--overwrite")
    assert Dataset.load("d").n_interactions == 200  # the old one is untouched by a failure


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write anywhere")
def test_output_not_writable(run: Run) -> None:
    Path("good.csv").write_text(GOOD)
    Path("locked").mkdir(mode=0o500)
    assert "not a writable directory" in fails(run, "prepare", "table", "--raw", "good.csv", "--out", "locked/d")


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may enter anywhere")
def test_directories_that_may_not_be_entered(run: Run) -> None:
    Path("good.csv").write_text(GOOD)
    Path("locked").mkdir(mode=0o000)
    assert "ermission denied" in fails(run, "prepare", "table", "--raw", "good.csv", "--out", "locked/a/b")
    assert "ermission denied" in fails(run, "prepare", "table", "--raw", "locked/a.csv", "--out", "d")
    assert "ermission denied" in fails(run, "prepare", "ml-1m", "--raw", "locked", "--out", "d")
    assert "ermission denied" in fails(run, "info", "locked/d")


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs a place where even root may not write")
def test_output_where_nobody_may_write(run: Run) -> None:
    Path("good.csv").write_text(GOOD)
    err = fails(run, "prepare", "table", "--raw", "good.csv", "--out", "/proc/drm/d", "--quiet")
    assert "cannot write /proc/drm/d" in err
    assert "another directory" in err


def test_output_below_a_file(run: Run) -> None:
    Path("good.csv").write_text(GOOD)
    assert "not a writable directory" in fails(
        run, "prepare", "table", "--raw", "good.csv", "--out", "good.csv/d", "-q"
    )


FULL = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # so that a write over the limit fails as on a full disk
resource.setrlimit(resource.RLIMIT_FSIZE, (600, 600))
sys.argv = ["drm-triton", *sys.argv[1:]]
from drm_triton.cli import main
main()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs file size limits")
def test_disk_full(tmp_path: Path) -> None:
    (tmp_path / "good.csv").write_text(GOOD)
    command = ["prepare", "table", "--raw", "good.csv", "--out", "d", "--quiet"]
    first = run_python("-m", "drm_triton", *command, cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    before = Dataset.load(tmp_path / "d").checksum
    full = run_python("-c", FULL, *command, "--overwrite", "--seed", "9", cwd=tmp_path)
    assert full.returncode == 2, full.stderr
    assert "cannot write" in full.stderr
    assert "free some space" in full.stderr
    assert full.stderr.count("\n") == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["d", "good.csv"]
    assert Dataset.load(tmp_path / "d").checksum == before


SLOW = """
import sys, time
from drm_triton.data import store
save = store.write_array
def slow(*args):
    save(*args)
    print("writing", flush=True)
    time.sleep(3600)
store.write_array = slow
sys.argv = ["drm-triton", "prepare", "table", "--raw", "good.csv", "--out", "d", "-q"]
from drm_triton.cli import main
main()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs signals")
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_request_to_end_leaves_nothing(tmp_path: Path, name: str) -> None:
    if signal.getsignal(getattr(signal, name)) == signal.SIG_IGN:
        pytest.skip(f"{name} is ignored here, as under nohup, and so it is in the child")
    (tmp_path / "good.csv").write_text(GOOD)
    command = [sys.executable, "-c", SLOW]
    child = subprocess.Popen(command, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"writing\n"
    assert any(p.name.endswith(".partial") for p in tmp_path.iterdir())
    child.send_signal(getattr(signal, name))
    _, err = child.communicate(timeout=HANG)
    assert child.returncode == 128 + getattr(signal, name)
    assert b"Traceback" not in err
    assert [p.name for p in tmp_path.iterdir()] == ["good.csv"]


@pytest.mark.parametrize("threads", ["1", "4"])
def test_threads_do_not_matter(tmp_path: Path, threads: str) -> None:
    (tmp_path / "good.csv").write_text(GOOD)
    command = ["-m", "drm_triton", "prepare", "table", "--raw", "good.csv", "--out", "d", "--json"]
    result = run_python(*command, cwd=tmp_path, POLARS_MAX_THREADS=threads)
    expected = Dataset.from_frame(pl.read_csv(tmp_path / "good.csv")).checksum
    assert json.loads(result.stdout)["checksum"] == expected


def test_attributes_are_read_like_interactions(run: Run) -> None:
    Path("r.csv").write_text("user,item\nann,a\nann,b\n")
    Path("it.csv").write_text("item,added,price\na,02/04/2024,3.5\nb,05/06/2024,NA\n,05/06/2024,1\nb,05/06/2024,1,x\n")
    command = ["prepare", "table", "--raw", "r.csv", "--items", "it.csv", "-q", "--out", "d"]
    assert "cannot read it.csv, line 5: a row has more fields" in fails(run, *command)
    error = fails(run, *command, "--skip-bad-rows")
    assert (
        "column 'added': the dates, as in 02/04/2024, may begin with day or month: give --date-format day-first"
        in error
    )
    code, out, err = run(*command, "--skip-bad-rows", "--date-format", "month-first")
    assert code == 0
    assert "warning: 2 of 4 rows cannot be used and are left out; the first: data row 3 of it.csv has no usable" in err
    assert "attributes of items: added (a date such as 2020-01-31); price (a number)\n" in out
    assert "  skipped before: 2 rows; the first: data row 3 of it.csv has no usable item id\n" in out
    assert run("info", "d")[1] == out
    assert Dataset.load("d").items["added"].to_list() == [date(2024, 2, 4), date(2024, 5, 6)]
    Path("lists.txt").write_text("1 10 11\n2 10\n")
    Path("it.csv").write_text("item,added\n10,02/04/2024\n")
    command = ["prepare", "lists", "--raw", "lists.txt", "--date-format", "day-first", "-q", "--out", "e"]
    assert "source lists does not use --date-format" in fails(run, *command)
    assert run(*command, "--items", "it.csv")[0] == 0
    assert Dataset.load("e").items["added"].to_list() == [date(2024, 4, 2), None]


def test_attributes_of_items_and_users(tmp_path: Path) -> None:
    (tmp_path / "r.csv").write_text("user,item\nann,a\nann,b\nbob,b\nbob,c\n")
    (tmp_path / "items.csv").write_text("item,genre,price\na,Drama|Crime,3\nb,Comedy,4\nnew,Drama,5\n")
    (tmp_path / "users.csv").write_text("user,age\nbob,30\n")
    out = tmp_path / "set"
    tables = ["--items", tmp_path / "items.csv", "--users", tmp_path / "users.csv"]
    code, printed, errors = call("prepare", "table", "--raw", tmp_path / "r.csv", *tables, "--out", out, "-q")
    assert code == 0, errors
    assert "attributes of items: genre (tags); price (a number)" in printed
    assert "3 rows in items.csv; 1 item without interactions added" in printed
    data = Dataset.load(out)
    assert data.items["genre"].to_list() == [["Drama", "Crime"], ["Comedy"], None, ["Drama"]]
    assert data.users["age"].to_list() == [None, 30]
    for arguments, message in (
        (["table", "--raw", tmp_path / "r.csv", "--items", tmp_path / "absent.csv"], "there is no file"),
        (["synthetic", "--items", tmp_path / "items.csv"], "--items must be a number for source synthetic"),
        (["melon", "--synthetic", "--items", tmp_path / "items.csv"], "--items cannot describe generated data"),
    ):
        code, _, errors = call("prepare", *arguments, "--out", tmp_path / "other")
        assert code == 2
        assert message in " ".join(errors.split())
        assert not (tmp_path / "other").exists()
