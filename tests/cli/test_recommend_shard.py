"""`recommend --all --shard i/n`: parts that together are `recommend --all`, and what a restart does with them."""

import os
import time
from pathlib import Path

import polars as pl
import pytest

from drm_triton import DRM
from tests.conftest import call


@pytest.fixture(scope="module")
def run(saved_model: Path) -> Path:
    return saved_model


@pytest.mark.parametrize("count", [1, 2, 3, 7, 300])  # there are 200 users
def test_the_parts_are_the_whole(run: Path, tmp_path: Path, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drm_triton.recommender.parts.ROW_GROUP", 64)
    whole, top = tmp_path / "whole.parquet", tmp_path / "top"
    assert call("recommend", run, "--all", "--k", 3, "--out", whole)[0] == 0
    for index in range(count):
        if count <= 7 or index in (0, 1, 299):
            code, out, errors = call("recommend", run, "--all", "-k", 3, "--shard", f"{index}/{count}", "--out", top)
            assert (code, out) == (0, "")
            assert errors.startswith("recommend: ")
            assert "warning" not in errors
    expected = pl.read_parquet(whole)
    if count <= 7:
        assert pl.read_parquet(top / "*.parquet").equals(expected)
        assert len(os.listdir(top)) == count  # nothing else is left there
    else:
        parts = {name: pl.read_parquet(top / name) for name in os.listdir(top)}
        assert {name: len(part) for name, part in parts.items()} == {
            "part-00000-of-00300.parquet": 0,
            "part-00001-of-00300.parquet": 3,
            "part-00299-of-00300.parquet": 3,
        }
        assert {tuple(part.schema.items()) for part in parts.values()} == {tuple(expected.schema.items())}


def test_a_restart_skips_what_is_whole(run: Path, tmp_path: Path) -> None:
    command = ["recommend", run, "--all", "--shard", "1/2", "--out", tmp_path]
    part = tmp_path / "part-00001-of-00002.parquet"
    assert call(*command)[0] == 0
    content, before = part.read_bytes(), part.stat().st_mtime_ns
    for again in (command, [*command, "--overwrite"]):
        code, _, errors = call(*again)
        assert code == 0
        assert f"{part} is whole, nothing to do" in errors
        assert part.stat().st_mtime_ns == before
    part.write_bytes(content[: len(content) // 2])  # cut off, as by a copy that was stopped
    assert call(*command)[0] == 0
    assert part.read_bytes() == content


def test_a_part_of_other_options_or_of_another_model_is_refused(run: Path, tmp_path: Path) -> None:
    command = ["recommend", run, "--all", "--shard", "0/2", "--out", tmp_path / "top"]
    part = tmp_path / "top" / "part-00000-of-00002.parquet"
    assert call(*command, "--k", 3)[0] == 0
    content = part.read_bytes()
    code, _, errors = call(*command, "--k", 4)
    assert code == 2
    assert f"{part} was made with other values of k; give another --out, or use --overwrite" in errors
    other = tmp_path / "other"
    model = DRM.load(run)
    DRM(factors=8, epochs=1).fit(model.interactions).save(other)
    code, _, errors = call("recommend", other, *command[2:], "--k", 3)
    assert code == 2
    assert f"{part} was made with another model; give another --out" in errors
    assert part.read_bytes() == content
    assert call(*command, "--k", 4, "--overwrite")[0] == 0
    assert pl.read_parquet(part)["rank"].max() == 4
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    pl.DataFrame({"a": [1]}).write_parquet(foreign / part.name)
    code, _, errors = call("recommend", run, "--all", "--shard", "0/2", "--out", foreign)
    assert code == 2
    assert "is not a part that `recommend` wrote; give another --out" in errors


def test_the_files_of_rules_are_part_of_the_options(run: Path, tmp_path: Path) -> None:
    items = tmp_path / "only.txt"
    items.write_text("1\n2\n")
    command = ["recommend", run, "--all", "--shard", "0/2", "--only", items, "--out", tmp_path / "top"]
    assert call(*command)[0] == 0
    assert "is whole" in call(*command)[2]
    items.write_text("1\n3\n")
    code, _, errors = call(*command)
    assert code == 2
    assert "was made with other values of only" in errors


def test_one_number_of_shards_in_a_directory(run: Path, tmp_path: Path) -> None:
    assert call("recommend", run, "--all", "--shard", "0/2", "--out", tmp_path)[0] == 0
    code, _, errors = call("recommend", run, "--all", "--shard", "0/3", "--out", tmp_path)
    assert code == 2
    assert "has parts of another number of shards, such as part-00000-of-00002.parquet" in errors


def test_frames_of_a_killed_job_are_removed(run: Path, tmp_path: Path) -> None:
    old, new = (tmp_path / f".part-00000-of-00002.parquet.{name}.partial.x.frames" for name in ("0a1b2c3d", "4e5f6a7b"))
    for left in (old, new):
        left.mkdir()
        (left / "0.parquet").touch()
    os.utime(old, (time.time() - 7200,) * 2)
    assert call("recommend", run, "--all", "--shard", "0/2", "--out", tmp_path)[0] == 0
    assert not old.exists()
    assert new.exists()  # it may be that of a living process


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--all", "--shard", "2/2", "--out", "top"], "shards are numbered from 0, so n = 2 has 0/2 .. 1/2"),
        (["--all", "--shard", "1", "--out", "top"], "--shard must be i/n, for example 0/16"),
        (["--all", "--shard", "0/0", "--out", "top"], "n must be at least 1"),
        (["--all", "--shard", "0/2"], "--shard needs --out, the directory for the parts"),
        (["--user", "u1", "--shard", "0/2", "--out", "top"], "give --all, or leave out --shard"),
        (["--all", "--shard", "0/2", "--out", "top", "--format", "csv"], "leave out --format csv"),
        (["--all", "--shard", "0/2", "--out", "file"], "is a file: with --shard, give a directory"),
    ],
)
def test_bad_use(run: Path, options: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    code, _, errors = call("recommend", run, *options)
    assert code == 2
    assert message in errors
    assert not (tmp_path / "top").exists()
