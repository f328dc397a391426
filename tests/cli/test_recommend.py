"""`recommend` from the command line, and what it has in common with `similar`."""

import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from drm_triton import DRM
from tests.cli.conftest import rows
from tests.conftest import call

READERS: dict[str, Callable[[Path], pl.DataFrame]] = {
    "csv": pl.read_csv,
    "jsonl": pl.read_ndjson,
    "json": pl.read_json,
    "parquet": pl.read_parquet,
}


@pytest.fixture(scope="module")
def run(saved_model: Path) -> Path:
    return saved_model


@pytest.fixture(scope="module")
def model(run: Path) -> DRM:
    return DRM.load(run)


@pytest.mark.parametrize("form", ["csv", "jsonl", "json", "parquet"])
@pytest.mark.parametrize("block", [4096, 7])
def test_all_users_in_every_format(
    run: Path, model: DRM, tmp_path: Path, form: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drm_triton.ranking.recommend.QUERIES_PER_BLOCK", block)
    file = tmp_path / f"top.{form}"
    code, out, errors = call("recommend", run, "--all", "--k", 3, "--out", file)
    assert (code, out) == (0, "")
    assert errors.startswith("recommend: 600 items for 200 users (")
    assert call("recommend", run, "--all", "--k", 3, "--out", file, "--quiet", "--overwrite") == (0, "", "")
    frame = READERS[form](file)
    expected = model.recommend(k=3)
    assert frame.columns == ["user", "rank", "item", "score", "title"]
    assert frame.select("user", "rank", "item").rows() == expected.select("user", "rank", "item").rows()
    np.testing.assert_array_equal(frame["score"].cast(pl.Float32), expected["score"])
    assert frame["title"].to_list() == [f"Song No. {item}" for item in expected["item"]]
    assert os.listdir(tmp_path) == [file.name]
    (tmp_path / "other").touch()
    assert file.stat().st_mode == (tmp_path / "other").stat().st_mode


@pytest.mark.parametrize("form", ["csv", "jsonl", "json"])
def test_stdout_equals_the_file(run: Path, tmp_path: Path, form: str) -> None:
    arguments = ["recommend", run, "--user", "u3", "--format", form]
    _, out, _ = call(*arguments)
    assert call(*arguments, "--out", tmp_path / "file")[0] == 0
    assert (tmp_path / "file").read_bytes().decode() == out


def test_a_readable_table(run: Path) -> None:
    code, out, _ = call("recommend", run, "--user", "u1", "--user", "u7", "--k", 2)
    assert code == 0
    lines = out.splitlines()
    assert lines[0] == "user u1"
    assert lines[1].split()[0] == "1"
    assert "Song No. " in lines[1]
    assert lines[3:5] == ["", "user u7"]


def test_options_reach_the_model(run: Path, model: DRM, tmp_path: Path) -> None:
    seen = model.interactions.item_ids[model.interactions.train.row(0)].to_list()
    user = model.interactions.user_ids[0]
    some = model.interactions.item_ids[:40].to_list()
    only, without, users = tmp_path / "only.txt", tmp_path / "without.txt", tmp_path / "users.txt"
    only.write_text("\ufeff" + "\r\n".join(map(str, some)))
    without.write_text("".join(f" {item} \n\n" for item in some[:10]))
    users.write_text(f"{user}\nu2\n")
    found = {row["item"] for row in rows("recommend", run, "--user", user, "-k", 999, "--only", only)}
    assert found == set(some) - set(seen)
    found = {row["item"] for row in rows("recommend", run, "-u", user, "-k", 999, "--only", only, "--without", without)}
    assert found == set(some[10:]) - set(seen)
    found = {row["item"] for row in rows("recommend", run, "-u", user, "-k", 999, "--include-seen", "--only", only)}
    assert found == set(some)
    assert [row["user"] for row in rows("recommend", run, "--users", users, "-k", 1)] == [user, "u2"]


@pytest.fixture(scope="module")
def with_attributes(model: DRM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save the model with attributes of its items."""
    ids = model.interactions.item_ids
    attributes = pl.DataFrame({"id": ids, "price": ids % 20, "genre": [("rock", "jazz", "folk")[i % 3] for i in ids]})
    path = tmp_path_factory.mktemp("attributes") / "songs"
    copy = DRM(factors=8)
    copy._tensors, copy._fitted_config = model.tensors, model.fitted_config
    copy._interactions = model.interactions.with_attributes(attributes)
    copy.save(path)
    return path


def test_rules_reach_the_model(with_attributes: Path, tmp_path: Path) -> None:
    model = DRM.load(with_attributes)
    asked = ["recommend", with_attributes, "-u", "u1", "-u", "u2", "-k", 5]
    options = ["--where", "price<=12", "--where", "genre=rock|jazz", "--at-most", "genre=3", "--diversity", 0.4]
    found = rows(*asked, *options)
    rules: dict[str, Any] = {"where": ["price<=12", "genre!=folk"], "at_most": {"genre": 3}, "diversity": 0.4}
    expected = model.recommend(["u1", "u2"], 5, **rules)
    assert [(row["user"], row["item"]) for row in found] == expected.select("user", "item").rows()
    assert found != rows(*asked)
    best = {user: model.recommend([user], 1)["item"].to_list() for user in ("u1", "u2")}
    table = tmp_path / "had.csv"
    table.write_text(f"user,item\nu1,{best['u1'][0]}\nu2,{best['u2'][0]}\n")
    found = rows(*asked, "--without", table)
    expected = model.recommend(["u1", "u2"], 6).filter(pl.col("rank") > 1)
    assert [(row["user"], row["item"]) for row in found] == expected.select("user", "item").rows()
    assert [(r["user"], r["item"]) for r in rows(*asked, "--only", table)] == [(u, best[u][0]) for u in ("u1", "u2")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--where", "colour=red"], "--where: the items have no attribute 'colour'; their columns are id (a number)"),
        (["--where", "price<cheap"], "--where: 'cheap' is no value to compare price with, which is a number"),
        (["--at-most", "genre"], "--at-most: 'genre' is not an attribute and a number; write for example genre=2"),
        (["--at-most", "genre=-1"], "--at-most: 'genre=-1' is not an attribute and a number"),
        (["--at-most", "genre=0"], "--at-most: the number for genre must be an integer from 1 to 2147483647, got 0"),
        (["--at-most", "colour=1"], "--at-most: the items have no attribute 'colour'"),
        (["--diversity", "1"], "--diversity must be a number from 0 to below 1, got 1.0"),
    ],
)
def test_bad_rules(with_attributes: Path, arguments: list[str], message: str) -> None:
    code, out, errors = call("recommend", with_attributes, "-u", "u1", *arguments)
    assert (code, out) == (2, "")
    assert errors.startswith(f"error: {message}")
    assert errors.count("\n") == 1


@pytest.mark.parametrize("form", ["table", "json", "csv"])
def test_no_recommendations_warn(run: Path, model: DRM, tmp_path: Path, form: str) -> None:
    user, only = model.interactions.user_ids[0], tmp_path / "only.txt"
    seen = model.interactions.item_ids[model.interactions.train.row(0)].to_list()
    only.write_text("\n".join(map(str, seen)))
    command = ["recommend", run, "--user", user, "--only", only, "--format", form]
    code, out, errors = call(*command)
    assert (code, errors.count("\n")) == (0, 1)
    assert errors.startswith("warning: there is nothing to recommend: ")
    assert {"table": "", "json": "[]\n", "csv": "user,rank,item,score,title\n"}[form] == out
    assert call(*command, "--include-seen")[2] == ""


def test_liked_items_of_a_new_user(run: Path, model: DRM) -> None:
    liked = model.interactions.item_ids[[5, 60, 99]].to_list()
    expected = model.recommend_from({"you": liked}, k=4)
    for arguments in (["--liked", ",".join(map(str, liked))], [x for item in liked for x in ("--liked", item)]):
        found = rows("recommend", run, *arguments, "-k", 4)
        assert [(row["user"], row["item"]) for row in found] == expected.select("user", "item").rows()


@pytest.mark.parametrize("form", ["csv", "tsv", "parquet", "txt", "blanks.txt", "commas"])
def test_histories_from_a_file(run: Path, model: DRM, tmp_path: Path, form: str) -> None:
    ids = model.interactions.item_ids
    codes = {"zoe": [1, 2, 30], "yan": [77], "xi": [8, 9]}
    histories: dict[Any, list[int]] = {user: ids[of_user].to_list() for user, of_user in codes.items()}
    pairs = [(user, item) for user, items in histories.items() for item in items]
    table = pl.DataFrame(pairs, schema=["userId", "movie_id"], orient="row")
    file = tmp_path / f"history.{form}"
    if form == "parquet":
        table.write_parquet(file)
    elif form in ("csv", "tsv"):
        table.write_csv(file, separator="," if form == "csv" else "\t")
    else:
        separator = {"txt": "\t", "blanks.txt": "  ", "commas": ", "}[form]
        file.write_text("".join(separator.join(map(str, items)) + "\n" for items in histories.values()))
        histories = dict(enumerate(histories.values(), start=1))
    found = rows("recommend", run, "--history", file, "-k", 3)
    expected = model.recommend_from(histories, k=3)
    assert [(row["user"], row["item"]) for row in found] == expected.select("user", "item").rows()


def test_unknown_ids(run: Path, tmp_path: Path) -> None:
    code, out, errors = call("recommend", run, "-u", "u1", "-u", "x", "--unknown", "skip", "--format", "csv")
    assert code == 0
    assert errors == "warning: skipped 1 of 2 user ids that the model does not know: 'x'\n"
    assert pl.read_csv(io.StringIO(out))["user"].unique().to_list() == ["u1"]
    code, out, errors = call("recommend", run, "-u", "x", "--unknown", "popular", "-k", 2)
    assert (code, errors) == (0, "")
    assert out.splitlines()[1].split()[1] == "popular"
    assert [row["score"] for row in rows("recommend", run, "-u", "x", "--unknown", "popular", "-k", 2)] == [None, None]
    (tmp_path / "h.csv").write_text("user,item\na,5\na,nope\nb,nope\n")
    code, out, errors = call("recommend", run, "--history", tmp_path / "h.csv", "--unknown", "skip", "--format", "csv")
    assert pl.read_csv(io.StringIO(out))["user"].unique().to_list() == ["a"]
    assert "skipped 2 of 3 item ids" in errors
    assert "skipped 1 of 2 users" in errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["recommend"], "give exactly one of --user, --users, --all"),
        (["recommend", "--all", "--user", "u1"], "give exactly one of --user, --users, --all"),
        (
            ["recommend", "--liked", "5", "--history", "{dir}/table.csv"],
            "give exactly one of --user, --users, --all",
        ),
        (["recommend", "--user", "nobody"], "unknown user id: 'nobody'"),
        (["recommend", "--user", "nobody"], "use --unknown skip to skip such users, or --unknown popular to"),
        (["recommend", "--user", "u1x"], "the nearest are 'u1"),
        (["recommend", "--liked", "5,9999"], "unknown item id: '9999'"),
        (["recommend", "--liked", "no. 17"], "the nearest are 17 ('Song No. 17')"),
        (["recommend", "--liked", " , "], "is empty: give at least one item"),
        (["recommend", "--all", "--k", 0], "--k must be an integer of at least 1, got 0"),
        (["recommend", "--all", "--format", "parquet"], "--format parquet needs --out"),
        (["recommend", "--all", "--out", "{dir}/no/such.csv"], "no is not a writable directory; give another --out"),
        (["recommend", "--all", "--out", "{dir}"], "it is a directory; give another --out, or leave it out to print"),
        (["recommend", "--users", "{dir}/missing"], "missing cannot be read (No such file or directory)"),
        (["recommend", "--users", "{dir}"], "cannot be read (Is a directory)"),
        (["recommend", "--users", "{dir}/empty"], "empty is empty: give a file with one id per line"),
        (["recommend", "--users", "{dir}/binary"], "is not UTF-8 text"),
        (["recommend", "--all", "--only", "{dir}/nul"], "contains NUL bytes, so it is not text"),
        (["recommend", "--all", "--only", "{dir}/table.csv"], "--only has no known items for any of these users: 'u0'"),
        (["recommend", "--history", "{dir}/empty"], "is empty: give a table with columns user and item"),
        (["recommend", "--history", "{dir}/binary"], "is not UTF-8 text"),
        (["recommend", "--history", "{dir}/binary.parquet"], "not a Parquet file despite its name"),
        (["recommend", "--history", "{dir}/cut.parquet"], "cannot be read as a table"),
        (["recommend", "--history", "{dir}/other.csv"], "its columns are ['a', 'b']"),
        (["recommend", "--history", "{dir}/gap.csv"], "data row 2 has no user or no item"),
        (["recommend", "--history", "{dir}/header.csv"], "has a header but no rows"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    run: Path, tmp_path: Path, arguments: list[object], message: str
) -> None:
    (tmp_path / "table.csv").write_text("user,item\na,5\n")
    (tmp_path / "empty").write_text(" \n\n")
    (tmp_path / "nul").write_bytes(b"5\0\n")
    for name in ("binary", "binary.parquet"):
        (tmp_path / name).write_bytes(bytes(range(256)))
    (tmp_path / "cut.parquet").write_bytes(b"PAR1" + bytes(range(256)))
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    (tmp_path / "gap.csv").write_text("user,item\na,5\nb,\n")
    (tmp_path / "header.csv").write_text("user,item\n")
    before = sorted(os.listdir(tmp_path))
    command, *options = (str(argument).format(dir=tmp_path) for argument in arguments)
    code, out, errors = call(command, run, *options)
    assert (code, out) == (2, "")
    assert errors.startswith("error: ")
    assert message in errors
    assert errors.count("\n") == 1
    assert sorted(os.listdir(tmp_path)) == before


@pytest.mark.parametrize("command", ["recommend", "similar"])
def test_an_existing_file_is_replaced_only_with_overwrite(run: Path, tmp_path: Path, command: str) -> None:
    file = tmp_path / "top.parquet"
    file.write_text("old")
    words = [command, run, "--user", "u1", "--out", file]
    code, out, errors = call(*words)
    assert (code, out) == (2, "")
    assert errors == f"error: --out {file} already exists; give another, or use --overwrite to replace it\n"
    assert file.read_text() == "old"
    assert call(*words, "--overwrite")[0] == 0
    assert len(pl.read_parquet(file)) == 10


def test_a_failure_half_way_leaves_the_old_file(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> object:
        yield pl.DataFrame({"user": ["u1"], "rank": [1], "item": [5], "score": [0.5]})
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(DRM, "recommend_blocks", fail)
    for form in ("csv", "jsonl", "parquet"):
        file = tmp_path / f"top.{form}"
        file.write_text("old")
        code, _, errors = call("recommend", run, "--all", "--out", file, "--overwrite")
        assert code == 1
        assert "no space left" in errors
        assert file.read_text() == "old"
    assert len(os.listdir(tmp_path)) == 3


@pytest.mark.skipif(sys.platform == "win32", reason="no pipes in the file system")
def test_a_pipe_is_not_replaced_and_a_link_is_followed(run: Path, tmp_path: Path) -> None:
    pipe, to_pipe = tmp_path / "pipe.csv", tmp_path / "to_pipe.csv"
    os.mkfifo(pipe)
    to_pipe.symlink_to(pipe)
    for options in (["recommend", run, "--user", "u1"], ["similar", run, "--user", "u1"]):
        for out in (pipe, to_pipe):
            code, _, errors = call(*options, "--out", out)
            assert code == 2
            assert "leave it out to print" in errors
    assert pipe.is_fifo()
    assert to_pipe.is_symlink()
    for number, text in enumerate(("old", None)):  # a link to a file, and one to a file that is yet to be
        target, link = tmp_path / f"target{number}.csv", tmp_path / f"link{number}.csv"
        if text is not None:
            target.write_text(text)
        link.symlink_to(target)
        assert call("recommend", run, "--user", "u1", "--out", link, *(["--overwrite"] if text else []))[0] == 0
        assert link.is_symlink()
        assert target.read_text().startswith("user,rank,item,score")


@pytest.mark.skipif(sys.platform == "win32", reason="no head")
def test_a_closed_pipe_is_silent(run: Path) -> None:
    command = f"{sys.executable} -m drm_triton recommend {run} --all --k 100 --format csv | head -1"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True)
    assert done.stdout == "user,rank,item,score,title\n"
    assert done.stderr == "starting ...\n"  # and no error


def test_help_has_examples() -> None:
    for command in ("recommend", "similar"):
        code, out, _ = call(command, "--help")
        assert code == 0
        assert f"drm-triton {command} runs/" in out
