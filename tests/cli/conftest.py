"""A stored data set, a run and a saved model that tests of several commands use."""

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from drm_triton import DRM, Dataset
from drm_triton.data.prepare.synthetic import Shape, generate
from tests.conftest import call


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    users, items = generate(Shape(users=200, items=150, interactions=4000), 0)
    frame = pl.DataFrame({"user": [f"u{u}" for u in users], "item": [f"song {i}" for i in items]})
    path = tmp_path_factory.mktemp("data") / "songs"
    Dataset.from_frame(frame).save(path)
    return path


@pytest.fixture(scope="module")
def run(stored: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "songs"
    code, _, errors = call("train", "-d", stored, "--run", path, "--factors", 8, "--epochs", 2)
    assert code == 0, errors
    return path


@pytest.fixture(scope="module")
def saved_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a model of 200 users (u0, u1, ...) whose items are integers with titles."""
    users, items = generate(Shape(users=200, items=150, interactions=4000), 0)
    frame = pl.DataFrame({"user": [f"u{u}" for u in users], "item": items})
    data = Dataset.from_frame(frame, ratios=(1, 0, 0))
    titled = data.items.with_columns(title=pl.format("Song No. {}", "id"))
    data = Dataset(data.train, data.valid, data.test, data.users, titled)
    path = tmp_path_factory.mktemp("models") / "songs"
    DRM(factors=8, epochs=3).fit(data).save(path)
    return path


def rows(*arguments: object) -> list[dict[str, Any]]:
    """Return what a command prints with --format json."""
    code, out, errors = call(*arguments, "--format", "json")
    assert code == 0, errors
    result: list[dict[str, Any]] = json.loads(out)
    return result
