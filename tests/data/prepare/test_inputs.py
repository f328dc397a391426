"""Files found by name, glob, directory and inside zip files."""

import zipfile
from pathlib import Path

import polars as pl

from drm_triton.data.prepare.pipeline import prepare
from drm_triton.data.prepare.sources import find_source
from tests.data.conftest import MakeTable, ids


def test_zstd(table: MakeTable, tmp_path: Path) -> None:
    # Polars writes Parquet, not CSV, with zstd; a stored (uncompressed) frame is valid zstd and needs no library.
    payload = b"user,item\n1,2\n"
    frame = (
        b"\x28\xb5\x2f\xfd" + bytes([0x20, len(payload)]) + ((len(payload) << 3) | 1).to_bytes(3, "little") + payload
    )
    assert ids(table(frame, "a.csv.zst")) == ([1], [2])


def test_zip_with_several_members(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("a.csv", "user,item\n1,2\n")
        archive.writestr("sub/b.csv", "item,user\n4,3\n")
        archive.writestr("readme.md", "hello")
    data = prepare(find_source("table"), [tmp_path / "a.zip"], tmp_path / "out")
    assert ids(data) == ([1, 3], [2, 4])


def test_zip_in_capitals_with_a_file_about_it(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("A/RATINGS.CSV", "user,item,rating\n1,2,5\n")
        archive.writestr("A/README.txt", "Thank you for your interest")
    for name in ("table", "ml-20m"):
        assert ids(prepare(find_source(name), [tmp_path / "a.zip"], tmp_path / name)) == ([1], [2])
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "Ratings.csv").write_text("user,item,rating\n1,2,5\n")
    assert ids(prepare(find_source("ml-20m"), [tmp_path / "folder"], tmp_path / "out")) == ([1], [2])


def test_glob_and_several_files(tmp_path: Path) -> None:
    (tmp_path / "a1.csv").write_text("user,item\n1,2\n")
    (tmp_path / "a2.csv").write_text("item,user\n9,1\n")
    pl.DataFrame({"user": ["x"], "item": ["y"]}).write_parquet(tmp_path / "b.parquet")
    source = find_source("table")
    assert ids(prepare(source, [tmp_path / "a*.csv"], tmp_path / "out")) == ([1], [2, 9])
    mixed = prepare(source, [tmp_path / "a1.csv", tmp_path / "b.parquet"], tmp_path / "out2")
    assert ids(mixed) == (["1", "x"], ["2", "y"])
    assert [f["file"] for f in mixed.meta["files"]] == ["a1.csv", "b.parquet"]


def test_a_name_with_glob_characters(tmp_path: Path) -> None:
    (tmp_path / "we[i]rd.csv").write_text("user,item\n1,2\n")
    assert ids(prepare(find_source("table"), [tmp_path / "we[i]rd.csv"], tmp_path / "out")) == ([1], [2])
