"""Each real data set prepares with one command, with the counts that its provenance states."""

import json

import numpy as np
import pytest
import scipy.io
from typer.testing import CliRunner

from drm_triton.cli import app
from drm_triton.data.prepare.build import Options
from drm_triton.data.prepare.prepare import prepare
from drm_triton.data.prepare.sources import find_source


@pytest.fixture
def counts(shared_data, tmp_path):
    def run(name, source, raw, *options):
        folder = shared_data(name)
        files = [argument for file in raw for argument in ("--raw", str(folder / file))]
        command = ["prepare", source, *files, "--out", str(tmp_path / "out"), "--json", "--quiet", *options]
        result = CliRunner().invoke(app, command, catch_exceptions=False)
        facts = json.loads(result.stdout)
        return facts["users"], facts["items"], facts["interactions"], facts

    return run


def test_amazon_hin(counts):
    *found, _ = counts("amazon-hin", "table", ["user_item.dat"], "--columns", "user,item,rating,timestamp")
    assert found == [6_170, 2_753, 195_791]


def test_ciao(counts):
    *found, facts = counts("ciao", "ciao", ["ciao_rating_with_timestamp.mat"])
    assert found == [7_375, 105_114, 282_650]
    assert facts["steps"][0]["interactions"] == 284_086


def test_citeulike_a(counts):
    *found, _ = counts("citeulike-a", "lists", ["users.dat"], "--leading", "count")
    assert found == [5_551, 16_980, 204_986]


def test_epinions(counts):
    *found, facts = counts("epinions", "epinion", ["epinions_rating_with_timestamp.mat"])
    assert found == [21_391, 59_214, 631_109]
    assert facts["steps"][0] == {"step": "read", "interactions": 922_267, "users": 22_164, "items": 296_277}
    assert facts["published"]["users"] == 21_300


def test_epinions_without_the_papers_filter(counts):
    *found, _ = counts("epinions", "epinion", ["."], "--min-user", "2", "--min-item", "1")
    assert found[2] > 631_109


@pytest.mark.parametrize("split", ["time", "leave-last"])
def test_epinions_in_any_order_of_rows(shared_data, tmp_path, split):
    matrix = scipy.io.loadmat(shared_data("epinions") / "epinions_rating_with_timestamp.mat")["rating"]
    sums = set()
    for seed in range(2):
        scipy.io.savemat(tmp_path / "rating.mat", {"rating": np.random.default_rng(seed).permutation(matrix)})
        out = tmp_path / f"out{seed}"
        sums.add(prepare(find_source("epinion"), [tmp_path / "rating.mat"], out, options=Options(split=split)).checksum)
    assert len(sums) == 1


def test_lastfm(counts, shared_data, tmp_path):
    artists = str(shared_data("lastfm-hetrec") / "artists.dat")
    *found, _ = counts("lastfm-hetrec", "table", ["user_artists.dat"], "--titles", artists)
    assert found == [1_892, 17_632, 92_834]

    from drm_triton import Dataset

    data = Dataset.load(tmp_path / "out")
    assert data.item_titles[int(data.encode_items([51])[0])] == "Duran Duran"
    assert data.item_titles.null_count() == 0


def test_ml_100k(counts, tmp_path):
    *_, interactions, facts = counts("ml-100k", "ml-100k", ["."])
    assert interactions == 55_375
    assert facts["steps"][0] == {"step": "read", "interactions": 100_000, "users": 943, "items": 1_682}

    from drm_triton import Dataset

    data = Dataset.load(tmp_path / "out")
    assert data.item_titles[int(data.encode_items([1])[0])] == "Toy Story (1995)"
    assert "Misérables, Les (1995)" in data.item_titles.to_list()  # Latin-1 in the file


def test_ml_100k_every_rating(counts):
    *found, _ = counts("ml-100k", "ml-100k", ["u.data"], "--min-rating", "0")
    assert found == [943, 1_682, 100_000]


def test_ml_1m(counts):
    *found, _ = counts("ml-1m", "lists", ["train.txt", "test.txt"], "--leading", "user")
    assert found == [6_040, 3_706, 1_000_209]


def test_movietweetings(counts, tmp_path):
    *found, _ = counts(
        "movietweetings-100k",
        "table",
        ["ratings.dat"],
        "--columns",
        "user,item,rating,timestamp",
        "--split",
        "leave-last",
    )
    assert found == [16_554, 10_506, 100_000]

    from drm_triton import Dataset

    assert "0104257" in Dataset.load(tmp_path / "out").item_ids.to_list()
