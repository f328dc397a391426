"""`tune` from the command line: what it prints, how it ends, and that a kill loses no more than a trial."""

import json
import os
import shlex
import signal
from pathlib import Path
from typing import Any

import pytest

from drm_triton import Dataset
from drm_triton.config import TrainConfig
from drm_triton.lock import Lock
from drm_triton.training.tune import Study, tune
from tests.conftest import call, run_python


def trials(study: Path) -> list[dict[str, Any]]:
    """Recorded trials without what differs from run to run."""
    file = study / "trials.jsonl"
    found = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [{name: value for name, value in record.items() if name != "seconds"} for record in found]


def test_progress_on_stderr_and_a_table_whose_command_works(stored: Path, tmp_path: Path) -> None:
    study = tmp_path / "study"
    options = ["--trials", 3, "--factors", 4, "--epochs", 2, "--seed", 1, "--metric", "recall@50"]
    code, out, errors = call("tune", "-d", stored, "--study", study, *options)
    assert code == 0, errors
    assert "3 trials (0 finished), to maximise valid/recall@50 over" in errors
    assert "  lr: 0.1, 0.2, 0.4\n" in errors
    progress = [line.split(":")[0] for line in errors.splitlines() if line.startswith("trial ")]
    assert progress == ["trial 0 (1/3)", "trial 1 (2/3)", "trial 2 (3/3)"]
    table = [line.split() for line in out.splitlines()]
    searched = TrainConfig().search_space().keys() - {"factors", "epochs"}
    titles = ["trial", "valid/recall@50", "best", "seconds", *sorted(searched)]
    assert [row[0] for row in table[: len(titles)]] == titles
    values = [float(value) for value in table[1][1:]]
    assert values == sorted(values, reverse=True)
    assert set(table[0][1:]) == {"0", "1", "2"}
    shown = [line for line in (out + errors).splitlines() if str(tmp_path) not in line]
    assert max(map(len, shown)) <= 80

    command = shlex.split(out.splitlines()[-1])
    assert command[:2] == ["drm-triton", "train"]
    code, out, errors = call(*command[1:], "--run", tmp_path / "run")
    assert code == 0, errors
    assert 'fit_on = "train+valid"' in (tmp_path / "run" / "config.toml").read_text()

    code, out, errors = call("tune", "-d", stored, "--study", study, *options, "--json")
    assert (code, errors) == (0, "")
    result = json.loads(out)
    assert (result["trials"], result["failed"], result["finished"], result["interrupted"]) == (3, 0, True, False)
    assert result["best"]["valid/recall@50"] == max(record["valid/recall@50"] for record in trials(study))


def test_overwrite_discards_the_trials(stored: Path, tmp_path: Path) -> None:
    line = ["tune", stored, "--out", tmp_path / "study", "--trials", 1, "--factors", 4, "--quiet"]
    assert call(*line, "--epochs", 1)[0] == 0
    code, _, errors = call(*line, "--epochs", 2)
    assert code == 2, "another study"
    assert "--out" in errors
    assert call(*line, "--epochs", 2, "--overwrite")[0] == 0
    assert "epochs = 2" in (tmp_path / "study" / "best.toml").read_text()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    code, _, errors = call("tune", stored, "--out", tmp_path / "mine", "--overwrite")
    assert code == 2
    assert "was not made by this program" in errors
    assert (tmp_path / "mine" / "file").exists()


def test_a_study_at_work_is_not_overwritten(stored: Path, tmp_path: Path) -> None:
    line = ["tune", stored, "--out", tmp_path / "study", "--trials", 1, "--factors", 4, "--epochs", 1, "--quiet"]
    assert call(*line)[0] == 0
    with Lock(tmp_path / "study", "study"):
        code, _, errors = call(*line, "--overwrite")
    assert code == 2
    assert "another process works on this directory" in errors
    assert len(trials(tmp_path / "study")) == 1


def test_help_shows_what_stands_in_brackets() -> None:
    assert "[studies/<dataset>]" in call("tune", "--help")[1]
    assert "[all cores]" in call("train", "--help")[1]


def test_files_fix_options_and_give_the_space(stored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("base.toml").write_text('objective = "drm"\nfactors = 4\nepochs = 1\nlambda = 2\ninit = "normal"\n')
    Path("space.toml").write_text("rho = [1, 2]\nlam = [3, 4]\n")
    files = ["--config", "base.toml", "--space", "space.toml"]
    code, _, errors = call("tune", "-d", stored, *files, "--epochs", 2, "--quiet")
    assert (code, errors) == (0, "")
    study = tmp_path / "studies" / "songs"
    assert [record["rho"] for record in trials(study)] == [1, 2]  # the space has only these, of the default of twenty
    assert (study / "space.toml").read_text() == "rho = [1, 2]\n"
    assert {"epochs = 2", "lambda = 2.0", "factors = 4"} <= set((study / "best.toml").read_text().splitlines())


def test_when_every_trial_fails(stored: Path, tmp_path: Path) -> None:
    code, out, errors = call(
        "tune", "-d", stored, "--study", tmp_path, "--trials", 1, "--factors", 4, "--lr", 3e38, "-q"
    )
    assert (code, out) == (1, "")
    assert errors.startswith("error: every trial failed, the first because")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "DATASET is missing"),
        (["-d", "nowhere"], "no data set at nowhere"),
        (["-d", "{data}", "--metric", "auc"], "--metric must be a metric such as ndcg@10"),
        (["-d", "{data}", "--tau", "0"], "--tau must be at least 1e-32, got 0.0"),
        (["-d", "{data}", "--seconds", "-1"], "--seconds must be at least 0, got -1"),
        (["-d", "{data}", "--seconds", "nan"], "--seconds must be at least 0, got nan"),
        (["-d", "{data}", "--study", "{data}"], "exists and is not a study"),
        (["-d", "{data}", "--space", "missing.toml"], "missing.toml: no such configuration file"),
        (["-d", "{data}", "--space", "bad.toml"], "bad.toml: unknown option 'facters'; did you mean 'factors'?"),
        (["-d", "{data}", "--config", "bad.toml"], "bad.toml: unknown option 'facters'; did you mean 'factors'?"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: list[str],
    message: str,
    stored: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.toml").write_text("facters = [4]\n")
    code, out, errors = call("tune", *(argument.format(data=stored) for argument in arguments))
    assert (code, out) == (2, "")
    assert errors.startswith("error: ")
    assert message in errors
    assert errors.count("\n") == 1
    assert not Path("studies").exists()


def test_another_study_and_no_trials_exit_with_2(stored: Path, tmp_path: Path) -> None:
    options = ["--trials", 1, "--factors", 4, "--epochs", 1, "-q"]
    assert call("tune", "-d", stored, "--study", tmp_path, *options)[0] == 0
    code, _, errors = call("tune", "-d", stored, "--study", tmp_path, *options, "--seed", 1)
    assert (code, errors.count("\n")) == (2, 1)
    assert "holds a study with seed 0, and now it is 1" in errors
    assert call("tune", "-d", stored, "--trials", 0)[0] == 2


# The command, which kills itself in the second epoch of trial 2.
KILLED = """
import os, signal
from drm_triton.cli import main
from drm_triton.training.tune import Study

attempt = Study.attempt


def killed(self, number, point, on_epoch):
    epochs = []

    def epoch_end():
        on_epoch()
        epochs.append(number)
        if epochs == [2, 2]:
            os.kill(os.getpid(), signal.SIGKILL)

    return attempt(self, number, point, epoch_end)


Study.attempt = killed
main()
"""


@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_killed_interrupted_and_resumed_equals_uninterrupted(
    stored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, study = tmp_path / "whole", tmp_path / "study"
    arguments = ["tune", "-d", stored, "--study", study, "--trials", 6, "--factors", 4, "--epochs", 3]
    done = run_python("-c", KILLED, *arguments)
    assert done.returncode == -signal.SIGKILL
    assert [record["number"] for record in trials(study)] == [0, 1]

    attempt = Study.attempt

    def ctrl_c() -> None:
        raise KeyboardInterrupt

    def interrupted(self: Study, number: int, point: Any, on_epoch: Any) -> Any:
        return attempt(self, number, point, ctrl_c if number == 4 else on_epoch)

    with monkeypatch.context() as patched:
        patched.setattr(Study, "attempt", interrupted)
        code, out, errors = call(*arguments)
    assert code == 130, errors
    assert [record["number"] for record in trials(study)] == [0, 1, 2, 3]
    assert f"4 of 6 trials are finished; continue with: drm-triton tune -d {stored}" in errors
    assert "best.toml" in out

    data = Dataset.load(stored)
    tune(data, whole, 6, factors=4, epochs=3)
    tune(data, study, 6, factors=4, epochs=3)
    assert trials(study) == trials(whole)
    assert (study / "best.toml").read_bytes() == (whole / "best.toml").read_bytes()
