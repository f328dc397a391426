"""The recipe of the README on real files: nobody is offered what they have, and nobody is left out."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from drm_triton import Dataset
from tests.conftest import call

FILES: dict[str, tuple[list[object], str]] = {  # how the file is read, and the text between its fields
    "lastfm-hetrec/user_artists.dat": ([], "\t"),
    "movietweetings-100k/ratings.dat": (
        ["--separator", "::", "--columns", "user,item,rating,timestamp", "--min-rating", 7],
        "::",
    ),
    "amazon-hin/user_item.dat": (["--columns", "user,item,rating,timestamp"], "\t"),
}
QUICK = ["--factors", 8, "--epochs", 2, "--pool", 1024]  # the recipe has no options; this is about what is offered


@pytest.mark.parametrize("file", FILES)
def test_the_recipe_offers_everybody_something_and_nobody_what_they_have(
    file: str, shared_data: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, name = file.split("/")
    options, separator = FILES[file]
    lines = (shared_data(folder) / name).read_text("utf-8").splitlines()
    # Every row of the file, also those that a filter removes: the user has the item.
    has = pl.DataFrame([line.split(separator)[:2] for line in lines], ["user", "item"], orient="row")
    monkeypatch.chdir(tmp_path)
    for arguments in (
        ["prepare", "table", "--raw", shared_data(folder) / name, *options, "--out", "data/set"],
        ["train", "--dataset", "data/set", "--run", "runs/set", *QUICK],
        ["evaluate", "runs/set"],
        ["refit", "runs/set"],
    ):
        code, _, errors = call(*arguments)
        assert code == 0, errors
    data = Dataset.load("data/set")
    for run in ("runs/set", "runs/set-final"):
        code, _, errors = call("recommend", run, "--all", "--k", 10, "--out", "top.parquet", "--overwrite")
        assert code == 0, errors
        assert ("drm-triton refit" in errors) == (run == "runs/set")
        frame = pl.read_parquet("top.parquet")
        assert frame["user"].n_unique() == data.n_users
        assert len(frame) == 10 * data.n_users  # no user of these files has nearly all items
        assert np.array_equal(data.encode_users(frame["user"]), np.repeat(np.arange(data.n_users), 10))
        offered = frame.select(pl.col("user", "item").cast(pl.String))
        assert len(offered.join(has, on=["user", "item"], how="semi")) == 0
