"""From a source to a stored data set."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from drm_triton import Dataset, atomic
from drm_triton.data.prepare import pipeline
from drm_triton.data.prepare.build import BuildOptions, build
from drm_triton.data.prepare.raw import FileFormat
from drm_triton.data.prepare.sources import find_source
from drm_triton.data.prepare.synthetic import Shape
from drm_triton.errors import InputError
from tests.data.conftest import ids, titles

SHAPE = Shape(30, 20, 120)


@pytest.fixture(autouse=True)
def data_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use an empty directory of data sets."""
    monkeypatch.setenv("DRM_DATA", str(tmp_path / "data"))
    return tmp_path / "data"


def test_without_raw_the_files_come_from_the_directory_of_the_source(tmp_path: Path, data_dir: Path) -> None:
    source = find_source("ml-100k")
    with pytest.raises(InputError, match=r"get it from https:.*; put ml-100k.zip into .*; or use `download`"):
        pipeline.prepare(source, None, tmp_path / "out")
    folder = data_dir / "raw" / "ml-100k"
    folder.mkdir(parents=True)
    (folder / "u.data").write_text("1\t10\t5\t100\n2\t20\t4\t100\n")
    assert ids(pipeline.prepare(source, None, tmp_path / "out")) == ([1, 2], [10, 20])


def test_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = replace(find_source("table"), url="http://example.invalid/a.csv")
    (tmp_path / "a.csv").write_text("user,item\n1,2\n")
    monkeypatch.setattr(pipeline, "fetch_source", lambda *_: tmp_path / "a.csv")
    assert ids(pipeline.prepare(source, None, tmp_path / "out", download=True)) == ([1], [2])
    with pytest.raises(InputError, match="leave out `raw`"):
        pipeline.prepare(source, [tmp_path / "a.csv"], tmp_path / "out2", download=True)


def test_a_field_that_the_source_does_not_use_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="source melon does not use `separator`: leave it out, or use source table"):
        pipeline.prepare(find_source("melon"), ["train.json"], tmp_path / "out", FileFormat(separator=","))


def test_generated_data(tmp_path: Path) -> None:
    data = pipeline.prepare_synthetic(SHAPE, tmp_path / "out", BuildOptions(seed=3))
    assert (data.n_users, data.n_items, data.n_interactions) == (30, 20, 120)
    assert data.meta["source"] == "synthetic"
    assert data.meta["synthetic"] == {"users": 30, "items": 20, "interactions": 120}


def test_generated_melon_files_are_kept_and_have_titles(tmp_path: Path, data_dir: Path) -> None:
    data = pipeline.prepare_synthetic_melon(SHAPE, tmp_path / "out", BuildOptions(seed=3))
    assert sorted(os.listdir(data_dir / "raw" / "melon-synthetic")) == ["song_meta.json", "train.json"]
    assert (data.n_users, data.n_items, data.n_interactions) == (30, 20, 120)
    assert data.meta["source"] == "melon"
    assert data.meta["synthetic"]["users"] == 30
    assert None not in titles(data)


@pytest.mark.parametrize(
    "call",
    [
        lambda out: pipeline.prepare(find_source("melon"), None, out),
        lambda out: pipeline.prepare_synthetic(SHAPE, out),
        lambda out: pipeline.prepare_synthetic_melon(SHAPE, out),
    ],
)
def test_the_output_is_checked_before_any_work(call: Callable[[Path], Dataset], tmp_path: Path, data_dir: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(InputError, match=r"already exists; give another, or use `overwrite`"):
        call(tmp_path / "out")
    assert not data_dir.exists()


def test_the_output_is_checked_early_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.csv").write_text("user,item\n1,2\n")
    events: list[str] = []
    check = atomic.check_directory

    def counted_check(*arguments: object) -> Path:
        events.append("check")
        return check(*arguments)  # type: ignore[arg-type]

    def counted_build(*arguments: object) -> Dataset:
        events.append("build")
        return build(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(atomic, "check_directory", counted_check)
    monkeypatch.setattr(pipeline, "build", counted_build)
    pipeline.prepare(find_source("table"), [tmp_path / "a.csv"], tmp_path / "out")
    assert events == ["check", "build", "check", "check"]  # before the work, before the write, before the rename
