"""`info` from the command line."""

import json
from pathlib import Path

import polars as pl
import pytest

from drm_triton import Dataset
from tests.conftest import call


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    """Prepare 20 users with 10 items each, of which the threshold keeps 6."""
    rows = [(user, item, (user + item) % 5 + 1) for user in range(20) for item in range(10)]
    frame = pl.DataFrame(rows, schema=["user", "item", "rating"], orient="row")
    Dataset.from_frame(frame, min_rating=3).save(tmp_path / "d")
    return tmp_path / "d"


def test_json_holds_the_counts(prepared: Path) -> None:
    code, out, err = call("info", prepared, "--json")
    facts = json.loads(out)
    assert (code, err) == (0, "")
    assert facts["interactions"] == facts["train"] + facts["valid"] + facts["test"] == 120
    assert (facts["users"], facts["items"]) == (20, 10)


def test_text_describes_filters_and_split(prepared: Path) -> None:
    code, out, _ = call("info", prepared)
    assert code == 0
    assert "split random 70/10/20, seed 0" in out
    assert "rating >= 3" in out


def test_the_dropped_pairs_add_up_to_what_the_filters_removed(tmp_path: Path) -> None:
    rows = [(user, item, 1 if item == user else 5) for user in range(5) for item in range(5)] + [(9, 0, 1), (0, 9, 1)]
    frame = pl.DataFrame(rows, schema=["user", "item", "rating"], orient="row")
    Dataset.from_frame(frame, min_rating=3).save(tmp_path / "d")
    lines = [" ".join(line.split()) for line in call("info", tmp_path / "d")[1].splitlines()]
    assert "dropped by filters 5 never recommended, not learned from" in lines
    assert "dropped elsewhere 2 their user or item left the data set too" in lines
    assert "rating >= 3 20 7 5 5" in lines
    facts = json.loads(call("info", tmp_path / "d", "--json")[1])
    assert (facts["dropped"], facts["dropped_elsewhere"]) == (5, 2)


def test_a_public_split_is_printed_with_its_leaderboard(prepared: Path) -> None:
    data = Dataset.load(prepared)
    assert json.loads(call("info", prepared, "--json")[1])["leaderboard"] == []
    data.meta["public_split"] = "ml-1m-m1"
    data.save(prepared.with_name("public"))
    code, out, _ = call("info", prepared.with_name("public"))
    assert code == 0
    assert "SimpleX                         0.2802    0.2670  BARS" in out
    facts = json.loads(call("info", prepared.with_name("public"), "--json")[1])
    assert {"model": "UltraGCN", "recall@20": 0.2787, "ndcg@20": 0.2642}.items() <= facts["leaderboard"][-2].items()


def test_a_missing_data_set(tmp_path: Path) -> None:
    code, out, err = call("info", tmp_path / "nowhere")
    assert (code, out) == (2, "")
    assert err.startswith("error: no data set at")
