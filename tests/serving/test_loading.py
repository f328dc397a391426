"""The model of a service is in memory: files that change under it change no answer."""

from pathlib import Path
from typing import Any

import polars as pl
import pytest

from drm_triton import DRM, Dataset
from drm_triton.data.prepare.synthetic import Shape, generate
from drm_triton.errors import InputError
from drm_triton.models import EASE, ItemKNN, load
from drm_triton.recommender import Recommender
from drm_triton.serving import loading
from drm_triton.serving.loading import load_in_memory
from tests.conftest import run_python


def saved(path: Path, model: Recommender[Any], seed: int = 0) -> Path:
    users, items = generate(Shape(users=50, items=40, interactions=600), seed)
    frame = pl.DataFrame({"user": [f"u{u}" for u in users], "item": [f"i{i}" for i in items]})
    model.fit(Dataset.from_frame(frame, ratios=(1, 0, 0))).save(path)
    return path


def answers(model: Recommender[Any]) -> list[pl.DataFrame]:
    return [model.recommend(k=5), model.recommend_from([["i1", "i2"]], k=5), model.similar_items(["i3"], k=5)]


@pytest.mark.parametrize("kind", [lambda: DRM(factors=4, epochs=1), EASE, ItemKNN])
def test_files_that_are_overwritten_change_nothing(tmp_path: Path, kind: Any) -> None:
    path = saved(tmp_path / "model", kind())
    want = answers(load_in_memory(path))
    model = load_in_memory(path)
    for file in path.rglob("*"):
        if file.is_file():
            with file.open("r+b") as handle:  # the same inode, as `cp` and `rsync --inplace` write
                handle.write(b"\0" * file.stat().st_size)
    assert all(got.equals(frame) for got, frame in zip(answers(model), want, strict=True))


TRUNCATE = """
import os, sys
from pathlib import Path
from drm_triton.data import store
from drm_triton.errors import InputError
from drm_triton.serving.loading import load_in_memory
from tests.conftest import run_python
from drm_triton.training.tensor_file import TensorFile

place, which = Path(sys.argv[1]), sys.argv[2]

def truncated_first(function):
    def call(*arguments, **options):
        for file in place.rglob(which):
            os.truncate(file, 0)
        return function(*arguments, **options)
    return call

TensorFile.read = truncated_first(TensorFile.read)  # when a model file has been opened
store.CSR = truncated_first(store.CSR)  # when arrays have been opened
try:
    load_in_memory(place)
except InputError as error:
    print(error)
"""


@pytest.mark.parametrize("which", ["model.safetensors", "*.npy", "*.parquet"])
def test_a_file_that_is_truncated_while_it_is_read_is_an_error(tmp_path: Path, which: str) -> None:
    """The system ends a process that reads a mapped file beyond its end (SIGBUS)."""
    path = saved(tmp_path / "model", EASE())
    done = run_python("-c", TRUNCATE, path, which)
    assert done.returncode == 0, done
    assert which.strip("*") in done.stdout


def test_a_model_that_is_replaced_while_it_is_read_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(tmp_path / "model", DRM(factors=4, epochs=1))
    new = answers(load_in_memory(saved(tmp_path / "new", DRM(factors=4, epochs=1, seed=1))))
    readings: list[Recommender[Any]] = []

    def replace_after_reading(place: Path, mapped: bool, verify: bool) -> Recommender[Any]:
        model = load(place, mapped, verify)
        if not readings:
            path.rename(tmp_path / "old")
            (tmp_path / "new").rename(path)
        readings.append(model)
        return model

    monkeypatch.setattr(loading, "load", replace_after_reading)
    model = load_in_memory(path)
    assert len(readings) == 2
    assert all(got.equals(frame) for got, frame in zip(answers(model), new, strict=True))


def test_a_model_that_never_rests_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path / "model", DRM(factors=4, epochs=1))

    def touch_after_reading(place: Path, mapped: bool, verify: bool) -> Recommender[Any]:
        model = load(place, mapped, verify)
        (path / f"file {len(list(path.iterdir()))}").touch()
        return model

    monkeypatch.setattr(loading, "load", touch_after_reading)
    with pytest.raises(InputError, match="changes while it is read"):
        load_in_memory(path)
