"""`evaluate` from the command line."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import polars.testing
import pytest

from drm_triton import Dataset
from tests.conftest import call


def test_evaluate_prints_a_table_beside_popularity(run: Path) -> None:
    code, out, _ = call("evaluate", run, "--on", "test")
    assert code == 0
    assert "popularity" in out
    for name in ("ndcg@10", "map@10", "recall@50", "precision@10", "hit@10", "mrr@10", "coverage@50"):
        assert name in out


def test_evaluate_json_per_user_and_by_activity(run: Path, stored: Path, tmp_path: Path) -> None:
    file = tmp_path / "users.parquet"
    code, out, _ = call("evaluate", run, "--on", "valid", "--k", "5,20", "--json", "--per-user", file, "--by-activity")
    assert code == 0
    means = json.loads(out)
    assert {"ndcg@5", "map@5", "map_k@5", "recall@20", "popularity"} <= means.keys()
    assert call("evaluate", run, "--on", "valid", "--json", "--k", "5,20", "--per-user", file, "--overwrite")[0] == 0
    per_user = pl.read_parquet(file)
    groups = means["by_activity"]
    assert len(groups) > 1
    assert sum(group["users"] for group in groups) == means["users"]
    for group in groups:
        members = per_user.filter(pl.col("n_train").is_between(group["min_train"], group["max_train"]))
        assert len(members) == group["users"]
        assert group.keys() == {"users", "min_train", "max_train", *(name for name in per_user.columns if "@" in name)}
        assert all(group[name] == pytest.approx(members[name].mean()) for name in group if "@" in name)
    assert per_user["user"].str.starts_with("u").all()
    assert means["ndcg@5"] == pytest.approx(per_user["ndcg@5"].mean())
    assert (run / "activity-valid.png").read_bytes().startswith(b"\x89PNG")
    assert "by_activity" not in json.loads(call("evaluate", run, "--on", "valid", "--json")[1])
    code, out, _ = call("evaluate", run, "--on", "valid", "--by-activity")
    assert "mean ndcg@10 by training interactions" in out


def test_the_name_of_the_file_per_user_gives_its_format(run: Path, tmp_path: Path) -> None:
    frames = []
    readers: dict[str, Callable[[Path], pl.DataFrame]] = {
        "parquet": pl.read_parquet,
        "csv": pl.read_csv,
        "json": pl.read_json,
        "jsonl": pl.read_ndjson,
    }
    for suffix, read in readers.items():
        code, _, errors = call("evaluate", run, "--per-user", tmp_path / f"users.{suffix}", "-q")
        assert code == 0, errors
        frames.append(read(tmp_path / f"users.{suffix}"))
    for frame in frames[1:]:
        pl.testing.assert_frame_equal(frame, frames[0], check_dtypes=False)
    for name in ("users", "users.txt"):
        code, _, errors = call("evaluate", tmp_path / "no run", "--per-user", tmp_path / name)  # before the work
        assert code == 2
        assert "--per-user" in errors
        assert "end with one of .parquet, .csv, .json, .jsonl" in errors


def test_data_that_changed_without_a_trace_is_not_measured(
    stored: Path, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a failing disk: size and times of the files say nothing, so `evaluate` and `info` read all of it."""
    place = shutil.copytree(stored, tmp_path / "data")
    monkeypatch.setattr("drm_triton.data.verify.is_known", lambda path, current: True)
    assert call("evaluate", run, "-d", place)[0] == call("info", place)[0] == 0
    file = place / "test.indices.npy"
    content = file.read_bytes()
    file.write_bytes(content[:-40] + bytes(40))
    for command in (["evaluate", run, "-d", place], ["info", place], ["train", "--resume", run, "-d", place, "-q"]):
        code, out, errors = call(*command)
        assert (code, out, errors.count("\n")) == (2, "", 1), errors
        assert "is damaged" in errors


def test_evaluate_beyond_accuracy(run: Path) -> None:
    names = ("novelty", "diversity", "avg_popularity", "tail_share", "user_coverage", "gini", "entropy")
    code, out, _ = call("evaluate", run, "--beyond-accuracy")
    assert code == 0
    assert all(f"{name}@{k}" in out for name in names for k in (10, 50))
    found = json.loads(call("evaluate", run, "--beyond-accuracy", "--json")[1])
    assert all(f"{name}@{k}" in place for name in names for k in (10, 50) for place in (found, found["popularity"]))
    assert found["popularity"]["tail_share@10"] < found["tail_share@10"]
    assert found["popularity"]["avg_popularity@10"] > found["avg_popularity@10"]
    assert not any(name.startswith("novelty") for name in json.loads(call("evaluate", run, "--json")[1]))


def test_a_public_split_has_its_own_protocol_and_leaderboard(stored: Path, run: Path, tmp_path: Path) -> None:
    data = Dataset.load(stored)
    data.meta["public_split"] = "amazon-cds-m1"
    data.save(tmp_path / "public")

    def means(*arguments: object) -> dict[str, Any]:
        code, out, errors = call("evaluate", run, "--json", *arguments)
        assert code == 0, errors
        found: dict[str, Any] = json.loads(out)
        return found

    public = ["-d", tmp_path / "public"]
    found = means(*public)
    assert {"ndcg@10", "ndcg@20", "ndcg@50"} <= found.keys()
    assert found == {**means("--min-train", 1, "--k", "10,20,50"), "published": found["published"]}
    assert found["published"][-1]["model"] == "SimpleX"
    assert "published" not in means(*public, "--on", "valid")
    explicit = means(*public, "--min-train", 15, "--k", 10)
    assert explicit.items() >= means("--min-train", 15, "--k", 10).items()
    assert explicit["users"] < found["users"]
    code, out, _ = call("evaluate", run, *public)
    assert code == 0
    assert "this model" in out
    assert "SimpleX" in out
    assert "SimpleX" not in call("evaluate", run, *public, "--k", 10)[1]  # there is nothing to compare
    assert "SimpleX" not in call("evaluate", run)[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{data}"], "there is no model"),
        (["{run}", "--on", "train"], "--on must be valid or test"),
        (["{run}", "--min-train", "-1"], "--min-train must be at least 0, got -1"),
        (["{run}", "--k", "0"], "--k must be cut-offs from 1 to 1000"),
        (["{run}", "--k", "٣"], "--k must be cut-offs from 1 to 1000"),
        (["{run}", "--k", "1_0"], "--k must be cut-offs from 1 to 1000"),
        (["{run}", "--k", "ten"], "--k must be cut-offs from 1 to 1000"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments: list[str], message: str, stored: Path, run: Path) -> None:
    code, _, errors = call("evaluate", *(a.format(data=stored, run=run) for a in arguments))
    assert code == 2
    assert errors.startswith("error: ")
    assert message in errors
    assert errors.count("\n") == 1
    assert "Traceback" not in errors


def test_where_the_metrics_of_users_go_is_checked_before_ranking(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drm_triton.model.DRM.load", lambda path: pytest.fail("came as far as the model"))
    code, _, errors = call("evaluate", run, "--per-user", tmp_path)
    assert code == 2
    assert f"cannot write {tmp_path}: it is a directory; give another --per-user" in errors
    (tmp_path / "users.parquet").write_text("old")
    code, _, errors = call("evaluate", run, "--per-user", tmp_path / "users.parquet")
    assert code == 2
    assert "users.parquet already exists; give another, or use --overwrite to replace it" in errors
    assert (tmp_path / "users.parquet").read_text() == "old"


def test_a_model_is_not_measured_on_what_it_has_seen(stored: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    call("train", "-d", stored, "--run", path, "--factors", 4, "--epochs", 1, "--fit-on", "train+valid")
    code, _, errors = call("evaluate", path, "--on", "valid")
    assert code == 2
    assert "the model was fitted on train+valid, so it cannot be measured on valid" in errors
    assert call("evaluate", path, "--on", "test")[0] == 0
