"""Each real data set is prepared by one command, with the counts that its provenance states."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.io
from typer.testing import CliRunner

from drm_triton import Dataset
from drm_triton.cli import app
from drm_triton.data.prepare.build import BuildOptions
from drm_triton.data.prepare.pipeline import prepare
from drm_triton.data.prepare.sources import find_source
from drm_triton.names import SplitName
from tests.data.conftest import titles

Counted = tuple[int, int, int, dict[str, Any]]  # users, items, interactions, all statistics
Counts = Callable[..., Counted]


@pytest.fixture
def counts(shared_data: Callable[[str], Path], tmp_path: Path) -> Counts:
    def run(name: str, source: str, raw: list[str], *options: str) -> Counted:
        folder = shared_data(name)
        files = [argument for file in raw for argument in ("--raw", str(folder / file))]
        command = ["prepare", source, *files, "--out", str(tmp_path / "out"), "--json", "--quiet", *options]
        result = CliRunner().invoke(app, command, catch_exceptions=False)
        facts = json.loads(result.stdout)
        return facts["users"], facts["items"], facts["interactions"], facts

    return run


def test_amazon_hin(counts: Counts) -> None:
    *found, _ = counts("amazon-hin", "table", ["user_item.dat"], "--columns", "user,item,rating,timestamp")
    assert found == [6_170, 2_753, 195_791]


def test_ciao(counts: Counts) -> None:
    *found, facts = counts("ciao", "ciao", ["ciao_rating_with_timestamp.mat"], "--min-rating", "0")
    assert found == [7_375, 105_114, 282_650]
    assert facts["steps"][0]["interactions"] == 284_086
    with pytest.warns(UserWarning, match="34 of 284,086 rows .* have a rating of 0 or less and are left out"):
        *_, facts = counts("ciao", "ciao", ["ciao_rating_with_timestamp.mat"], "--overwrite")
    assert facts["steps"][1] == {"step": "rating > 0", "interactions": 284_052, "users": 7_375, "items": 105_096}


def test_citeulike_a(counts: Counts) -> None:
    *found, _ = counts("citeulike-a", "lists", ["users.dat"], "--leading", "count")
    assert found == [5_551, 16_980, 204_986]


def test_epinions(counts: Counts) -> None:
    *found, facts = counts("epinions", "epinion", ["epinions_rating_with_timestamp.mat"])
    assert found == [21_391, 59_214, 631_109]
    assert facts["steps"][0] == {"step": "read", "interactions": 922_267, "users": 22_164, "items": 296_277}
    assert facts["published"]["users"] == 21_300


def test_epinions_without_the_papers_filter(counts: Counts) -> None:
    *found, _ = counts("epinions", "epinion", ["."], "--min-user", "2", "--min-item", "1")
    assert found[2] > 631_109


@pytest.mark.parametrize("split", ["time", "leave-last"])
def test_epinions_in_any_order_of_rows(shared_data: Callable[[str], Path], tmp_path: Path, split: SplitName) -> None:
    matrix = scipy.io.loadmat(shared_data("epinions") / "epinions_rating_with_timestamp.mat")["rating"]
    sums = set()
    for seed in range(2):
        scipy.io.savemat(tmp_path / "rating.mat", {"rating": np.random.default_rng(seed).permutation(matrix)})
        out = tmp_path / f"out{seed}"
        sums.add(
            prepare(find_source("epinion"), [tmp_path / "rating.mat"], out, options=BuildOptions(split=split)).checksum
        )
    assert len(sums) == 1


def test_lastfm(counts: Counts, shared_data: Callable[[str], Path], tmp_path: Path) -> None:
    artists = str(shared_data("lastfm-hetrec") / "artists.dat")
    *found, facts = counts("lastfm-hetrec", "table", ["user_artists.dat"], "--titles", artists)
    assert found == [1_892, 17_632, 92_834]
    assert facts["columns"] == {
        "user": {"column": "userID", "first": "2", "least": 2, "most": 2100},
        "item": {"column": "artistID", "first": "51", "least": 1, "most": 18745},
        "rating": {"column": "weight", "first": "13883", "least": 1, "most": 352_698},
    }
    assert facts["notes"] == ["'weight' looks like weights: `weight` weight makes them count in training"]

    data = Dataset.load(tmp_path / "out")
    assert titles(data)[int(data.encode_items([51])[0])] == "Duran Duran"
    assert None not in titles(data)


def test_ml_100k(counts: Counts, tmp_path: Path) -> None:
    *_, interactions, facts = counts("ml-100k", "ml-100k", ["."])
    assert interactions == 55_375
    assert facts["steps"][0] == {"step": "read", "interactions": 100_000, "users": 943, "items": 1_682}

    data = Dataset.load(tmp_path / "out")
    assert titles(data)[int(data.encode_items([1])[0])] == "Toy Story (1995)"
    assert "Misérables, Les (1995)" in titles(data)  # Latin-1 in the file


def test_ml_100k_every_rating(counts: Counts) -> None:
    *found, _ = counts("ml-100k", "ml-100k", ["u.data"], "--min-rating", "0")
    assert found == [943, 1_682, 100_000]


def test_ml_1m(counts: Counts) -> None:
    *found, _ = counts("ml-1m", "lists", ["train.txt", "test.txt"], "--leading", "user")
    assert found == [6_040, 3_706, 1_000_209]


@pytest.mark.parametrize(
    ("name", "users", "items", "train", "test"),
    [("ml-1m-m1", 6_022, 3_043, 796_244, 99_455), ("amazon-cds-m1", 43_169, 35_648, 604_475, 172_951)],
)
def test_public_splits(counts: Counts, name: str, users: int, items: int, train: int, test: int) -> None:
    *found, facts = counts(name, name, ["."])
    assert found == [users, items, train + test]
    assert (facts["train"], facts["valid"], facts["test"]) == (train, 0, test)
    assert facts["public_split"] == name


def test_ml_1m_in_the_given_parts(shared_data: Callable[[str], Path], tmp_path: Path) -> None:
    folder = shared_data("ml-1m")
    parts = ["--train", f"{folder}/train.txt", "--test", f"{folder}/test.txt"]
    command = ["prepare", "lists", *parts, "--out", str(tmp_path / "out"), "--json", "--quiet"]
    result = CliRunner().invoke(app, command, catch_exceptions=False)
    facts = json.loads(result.stdout)
    assert (facts["users"], facts["items"], facts["train"], facts["test"]) == (6_040, 3_706, 800_167, 200_042)


def test_movietweetings(counts: Counts, tmp_path: Path) -> None:
    *found, _ = counts(
        "movietweetings-100k",
        "table",
        ["ratings.dat"],
        "--columns",
        "user,item,rating,timestamp",
        "--split",
        "leave-last",
        "--min-rating",
        "0",
    )
    assert found == [16_554, 10_506, 100_000]

    assert "0104257" in Dataset.load(tmp_path / "out").item_ids.to_list()
