"""Names and files that broke other programs, or this one: patterns, bytes that are no text, damage, excess."""

import io
import os
import random
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import polars as pl
import pytest

from drm_triton import Dataset
from drm_triton.data.prepare.pipeline import prepare
from drm_triton.data.prepare.sources import find_source
from drm_triton.errors import InputError
from tests.conftest import call
from tests.data.conftest import MakeTable, ids

TABLE = find_source("table")
NEEDS_BYTES = pytest.mark.skipif(sys.platform != "linux", reason="names are any bytes only on Linux")


@pytest.mark.parametrize("odd", ["exp[1]", "exp?", "exp*", "[e]xp1"])
def test_a_stored_data_set_is_never_another_one(tmp_path: Path, odd: str) -> None:
    """A sibling whose name matches the pattern has the same sizes and other ids."""
    for name, item in ((odd, "mine"), ("exp1", "other")):
        frame = pl.DataFrame({"user": ["a", "b"], "item": [item, item]})
        Dataset.from_frame(frame, ratios=(1, 0, 0)).save(tmp_path / name)
    data = Dataset.load(tmp_path / odd)
    assert data.item_ids.to_list() == ["mine"]
    (tmp_path / odd / "items.parquet").unlink()
    with pytest.raises(InputError, match=r"items\.parquet is missing or damaged"):
        Dataset.load(tmp_path / odd)


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl", "a.json", "a.parquet", "a.zip"])
def test_a_raw_file_is_never_another_one(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    contents = {}
    for number in (1, 9):
        frame, buffer = pl.DataFrame({"user": [number], "item": [number]}), io.BytesIO()
        frame.write_parquet(buffer)
        contents[number] = {
            "a.csv": b"user,item\n%d,%d\n" % (number, number),
            "a.jsonl": b'{"user":%d,"item":%d}\n' % (number, number),
            "a.json": b'[{"user":%d,"item":%d}]' % (number, number),
            "a.parquet": buffer.getvalue(),
        }
    for place in ("d[1]", "d1", "tmp[1]", "tmp1"):
        (tmp_path / place).mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp[1]"))
    if name == "a.zip":
        archive_path = tmp_path / "d[1]" / name
        with zipfile.ZipFile(archive_path, "w") as archive:
            archive.writestr("m[1].jsonl", contents[1]["a.jsonl"])
        data = prepare(TABLE, [archive_path], tmp_path / "out")
    else:
        (tmp_path / "d[1]" / name).write_bytes(contents[1][name])
        (tmp_path / "d1" / name).write_bytes(contents[9][name])
        data = prepare(TABLE, [tmp_path / "d[1]" / name], tmp_path / "out")
    assert ids(data) == ([1], [1])


@NEEDS_BYTES
@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_names_that_are_not_utf8(tmp_path: Path, suffix: str) -> None:
    raw, out = (tmp_path / os.fsdecode(name) for name in (b"caf\xe9" + suffix.encode(), b"out\xff"))
    raw.write_text("user,item\n1,2\n" if suffix == ".csv" else '{"user":1,"item":2}\n')
    code, _, err = call("prepare", "table", "--raw", raw, "--out", out, "-q")
    assert (code, err) == (0, "")
    data = Dataset.load(out)
    assert ids(data) == ([1], [2])
    assert data.meta["files"][0]["file"] == f"caf\\xe9{suffix}"
    assert call("info", out)[0] == 0


@NEEDS_BYTES
def test_a_run_whose_name_is_not_utf8(tmp_path: Path) -> None:
    """The title of its curves has the name."""
    data, run = (tmp_path / os.fsdecode(name) for name in (b"data\xff", b"run\xff9"))
    Dataset.from_csr(([0, 2, 3], [0, 1, 1]), n_items=3).save(data)
    code, _, err = call("train", data, "--model", "popularity", "--run", run, "-q")
    assert code == 0, err
    assert (run / "curves.png").exists()
    assert call("train", "--resume", run, "-q")[0] == 0


@NEEDS_BYTES
@pytest.mark.parametrize("option", ["--user", "--separator", "--encoding", "--columns", "--titles", "--rating"])
def test_arguments_that_are_not_utf8(tmp_path: Path, option: str) -> None:
    (tmp_path / "a.csv").write_text("user,item\n1,2\n")
    arguments = ["prepare", "table", "--raw", tmp_path / "a.csv", "--out", tmp_path / "out", "-q"]
    code, _, err = call(*arguments, option, os.fsdecode(b"\xff"))
    assert code == 2
    assert err.startswith("error: ")
    assert "unexpected" not in err


def damaged_parquet(kind: type[BaseException]) -> Iterator[bytes]:
    """Yield Parquet files with three wrong bytes that make Polars raise `kind`."""
    buffer = io.BytesIO()
    pl.DataFrame({"user": range(1000), "item": [str(k) for k in range(1000)]}).write_parquet(buffer)
    for seed in range(1000):
        draw, content = random.Random(seed), bytearray(buffer.getvalue())
        for _ in range(3):
            content[draw.randrange(len(content))] = draw.randrange(256)
        try:
            pl.scan_parquet(io.BytesIO(bytes(content))).collect()
        except kind:
            yield bytes(content)
        except pl.exceptions.PolarsError:
            pass


def test_panics_of_polars_are_errors_of_the_file(tmp_path: Path) -> None:
    content = next(damaged_parquet(pl.exceptions.PanicException), None)
    if content is None:
        pytest.skip("this version of Polars survives all of this damage")
    (tmp_path / "a.parquet").write_bytes(content)
    code, out, err = call("prepare", "table", "--raw", tmp_path / "a.parquet", "--out", tmp_path / "out", "-q")
    assert (code, out) == (2, "")
    assert "a.parquet" in err
    assert "damaged" in err


def test_panics_elsewhere_are_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def panic(path: Path) -> Path:
        raise pl.exceptions.PanicException("index out of bounds")

    monkeypatch.setattr("drm_triton.data.find_dataset", panic)
    code, _, err = call("info", tmp_path)
    assert code == 1
    assert err == "error: PanicException: index out of bounds (unexpected; --debug shows the traceback)\n"


def zipped(path: Path, flags: int = 0, method: int = 0) -> Path:
    """Write a zip file whose member claims to be encrypted or compressed by another method."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.csv", "user,item\n1,2\n")
    content = bytearray(path.read_bytes())
    for signature, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        place = content.index(signature) + offset
        content[place : place + 4] = flags.to_bytes(2, "little") + method.to_bytes(2, "little")
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("flags", "method", "words"),
    [(1, 0, ["a.zip:a.csv", "encrypted", "unpack it first"]), (0, 9, ["a.zip:a.csv", "Deflate64", "unpack it first"])],
)
def test_zip_files_that_cannot_be_opened(tmp_path: Path, flags: int, method: int, words: list[str]) -> None:
    raw = zipped(tmp_path / "a.zip", flags, method)
    code, _, err = call("prepare", "table", "--raw", raw, "--out", tmp_path / "out", "-q")
    assert code == 2
    assert all(word in err for word in words)


@pytest.mark.parametrize("rows", [1, 1500])
def test_json_that_is_nested_too_deeply(table: MakeTable, rows: int) -> None:
    deep = '{"user":1,"item":3,"x":' + "[" * 100_000 + "]" * 100_000 + "}\n"
    with pytest.raises(InputError, match=rf"line {rows + 1:,}: its JSON is nested too deeply"):
        table('{"user":1,"item":2}\n' * rows + deep, "a.jsonl")
    with pytest.raises(InputError, match="its JSON is nested too deeply"):
        table("[" * 100_000 + "]" * 100_000, "a.json")


def test_very_many_columns(table: MakeTable) -> None:
    """Comparing each name with each other would take minutes."""
    names = [f"c{k}" for k in range(100_000)]
    assert ids(table(f"user,item,{','.join(names)}\n1,2{',0' * len(names)}\n")) == ([1], [2])
    with pytest.raises(InputError, match="its columns are 'c0', 'c1'") as error:
        table(f"{','.join(names)}\n0{',0' * (len(names) - 1)}\n")
    assert len(str(error.value)) < 1000


def test_very_many_members_of_a_zip_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory is not listed for each member, and only the members that are needed are unpacked."""
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        for number in range(50):
            archive.writestr(f"{number}.csv", f"user,item\n{number},1\n")
        archive.writestr("ratings.csv", "userId,movieId,rating\n1,2,5\n")
    listed, opened = [], []
    listing, unzip = Path.iterdir, zipfile.ZipFile.open
    monkeypatch.setattr(Path, "iterdir", lambda path: (listed.append(path), listing(path))[1])
    monkeypatch.setattr(zipfile.ZipFile, "open", lambda *given: (opened.append(given[1]), unzip(*given))[1])
    assert ids(prepare(find_source("ml-20m"), [tmp_path / "a.zip"], tmp_path / "films")) == ([1], [2])
    assert [member.filename for member in opened] == ["ratings.csv"]
    opened.clear()
    (tmp_path / "b.zip").write_bytes((tmp_path / "a.zip").read_bytes())
    monkeypatch.setattr("drm_triton.data.prepare.read._GROUP", 7)  # files are read in groups
    data = prepare(TABLE, [tmp_path / "b.zip"], tmp_path / "all")
    assert (data.n_users, data.n_interactions) == (50, 51)
    assert [file["file"] for file in data.meta["files"]] == ["b.zip"]  # hashed once, not for each member
    assert len(opened) == 51
    assert not [path for path in listed if "drm-triton-" in str(path)]
