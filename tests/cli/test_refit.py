"""`refit` from the command line, and what says that a model is not the final one."""

import json
import warnings
from pathlib import Path

import polars as pl
import pytest

from drm_triton import DRM, Dataset
from drm_triton.cli.output import note_if_held_out
from drm_triton.lock import Lock
from tests.conftest import call


def test_refit_writes_a_run_trained_on_everything(run: Path, stored: Path, tmp_path: Path) -> None:
    code, out, errors = call("refit", run, "--out", tmp_path / "final", "--json")
    assert (code, errors) == (0, "")
    assert json.loads(out)["run"] == str(tmp_path / "final")
    final, data = DRM.load(tmp_path / "final"), Dataset.load(stored)
    assert final.interactions.train.nnz == data.n_interactions
    assert final.config.fit_on == "all"
    code, _, errors = call("refit", tmp_path / "final")
    assert code == 2
    assert "has learned from all interactions already" in errors
    code, _, errors = call("evaluate", tmp_path / "final")
    assert code == 2
    assert "was fitted on all, so it cannot be measured on test" in errors


def test_the_default_place_is_beside_the_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("refit", run, "-q")[0] == 0
    assert (run.parent / "songs-final" / "best" / "model.safetensors").exists()
    code, _, errors = call("refit", run, "-q")
    assert code == 2
    assert "songs-final already contains a run" in errors
    assert errors.splitlines()[-1] == f"  drm-triton train --resume {run.parent / 'songs-final'}"
    code, _, errors = call("refit", run, "-q", "--out", run, "--overwrite")
    assert code == 2
    assert "is the run itself" in errors


def test_a_final_run_at_work_is_not_overwritten(run: Path, tmp_path: Path) -> None:
    line = ("refit", run, "--out", tmp_path / "final", "-q", "--overwrite")
    assert call(*line)[0] == 0
    with Lock(tmp_path / "final", "run"):
        code, _, errors = call(*line)
    assert code == 2
    assert "another process works on this directory" in errors
    assert call(*line)[0] == 0


def test_a_run_with_held_out_interactions_says_so_once_and_offers_nothing_owned(
    run: Path, stored: Path, tmp_path: Path
) -> None:
    code, _, errors = call("recommend", run, "--all", "--out", tmp_path / "top.parquet")
    assert code == 0
    assert errors.count("note:") == 1
    assert f"{run} has learned from 70% of the interactions" in errors
    assert f"  drm-triton refit {run}" in errors.splitlines()
    data, frame = Dataset.load(stored), pl.read_parquet(tmp_path / "top.parquet")
    assert set(frame["user"]) == set(data.user_ids)
    for user, group in frame.group_by("user"):
        owned = data.item_ids[data.owned.row(int(data.encode_users(user)[0]))]
        assert not set(group["item"]) & set(owned)
    assert "note:" in call("export", run, tmp_path / "out")[2]


def test_the_note_fits_the_terminal(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    with warnings.catch_warnings():
        note_if_held_out(DRM.load(run), Path("runs/lastfm"))
    *prose, command = capsys.readouterr().err.splitlines()
    assert command == "  drm-triton refit runs/lastfm"
    assert max(map(len, prose)) <= 80
