"""The table of a training: rows, the best epoch, the time left with validation, and what a watcher sees meanwhile."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from drm_triton import DRM, Dataset
from drm_triton.models import EASE, Popularity
from drm_triton.progress import SILENT, Reporter
from drm_triton.training import display
from drm_triton.training.display import COMPILING, Display, announced_compilation, loading_kernels
from drm_triton.training.state import EpochEnd, Progress
from tests.conftest import on_terminal, run_python


class Clock:
    """Time that passes only when a test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(display, "time", SimpleNamespace(monotonic=lambda: self.now))


def shown(
    clock: Clock, epochs: int, eval_every: int, train: float, validate: float, save: float = 0.0, loss: bool = True
) -> Display:
    """Play a training with constant times through a display."""
    config: Any = SimpleNamespace(last_epoch=epochs, eval_every=eval_every, monitor="ndcg@10")
    seen = Display(Reporter(), config, validates=eval_every > 0)
    state = Progress()
    for epoch in range(1, epochs + 1):
        clock.now += train
        state.position, state.seconds = 10, train
        seen.batch_end(state, 10)
        record: dict[str, Any] = {"epoch": epoch, "seconds": train} | ({"loss": 1 / epoch} if loss else {})
        if eval_every and (epoch % eval_every == 0 or epoch == epochs):
            clock.now += validate
            record["valid/ndcg@10"] = 0.1 * min(epoch, 2)
        state.epoch = epoch
        state.start_epoch()
        seen.epoch_end(EpochEnd(record, state, improved=epoch <= 2))
        clock.now += save
    return seen


def test_the_time_left_includes_validation(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    shown(Clock(monkeypatch), epochs=4, eval_every=1, train=10, validate=5)
    header, *rows = capsys.readouterr().err.splitlines()
    assert header.split() == ["epoch", "loss", "valid/ndcg@10", "time", "time", "left"]
    assert [row.split()[-2:] for row in rows[:3]] == [["45", "s"], ["30", "s"], ["15", "s"]]
    assert [row.split()[:2] for row in rows] == [
        ["1/4", "1.0000"],
        ["2/4", "0.5000"],
        ["3/4", "0.3333"],
        ["4/4", "0.2500"],
    ]
    assert ["*" in row for row in rows] == [True, True, False, False]
    assert all(row[header.index("time") - 3 :].split()[:2] == ["15", "s"] for row in rows)  # of an epoch


def test_validations_that_are_rare_count_as_often_as_they_come(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown(Clock(monkeypatch), epochs=5, eval_every=2, train=10, validate=30, save=1)
    _, *rows = capsys.readouterr().err.splitlines()
    left = [row.split()[-2] for row in rows[1:4]]
    # After epoch 2: three epochs of 10.5 s (one of two was saved) and two validations of 30 s.
    assert left == ["92", "81", "41"]


def test_without_validation_and_loss_there_are_no_such_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown(Clock(monkeypatch), epochs=1, eval_every=0, train=1, validate=0, loss=False)
    assert [line.split() for line in capsys.readouterr().err.splitlines()] == [
        ["epoch", "time", "time", "left"],
        ["1/1", "1.0", "s"],
    ]


def test_validating_is_visible_in_a_log_if_it_takes_long(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("drm_triton.progress.LINE_EVERY", 0.01)
    config: Any = SimpleNamespace(last_epoch=2, eval_every=1, monitor="ndcg@10")
    with Display(Reporter(), config, validates=True) as seen:
        seen.batch_end(Progress(position=3, seconds=1.0), 3)
        step: Any = seen._step
        text = ""
        while "validating" not in text:  # the watcher prints it
            text += capsys.readouterr().err
    assert "epoch 1/2: validating: " in text
    assert step._over.is_set()  # a training that ends within an epoch leaves nothing behind


DATA = Dataset.from_csr(([0, 6, 12], [*range(6), *range(2, 8)]), n_items=9)


@pytest.mark.parametrize("model", [DRM(factors=2, epochs=2), EASE(), Popularity()])
def test_fit_shows_the_epochs_on_request(model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    model.fit(DATA)
    assert capsys.readouterr().err == ""  # nobody is watching
    model.fit(DATA, progress=True)
    rows = capsys.readouterr().err.splitlines()
    epochs = model.config.epochs
    assert [row.split()[0] for row in rows[-1 - epochs :]] == ["epoch", *(f"{n + 1}/{epochs}" for n in range(epochs))]
    model.fit(DATA, progress=True, reporter=SILENT)
    assert capsys.readouterr().err == ""


WATCHED = """
from drm_triton import DRM, Dataset
data = Dataset.from_csr(([0, 2, 3], [1, 0, 1]), n_items=3)
for progress in (None, False):
    print("progress", progress, flush=True)
    DRM(factors=2, epochs=2).fit(data, progress=progress)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_fit_shows_the_epochs_on_a_terminal() -> None:
    exit_code, screen = on_terminal(sys.executable, "-c", WATCHED)
    assert exit_code == 0
    first, second = screen.split("progress False")
    assert "1/2" in first
    assert "2/2" in first
    assert "/2" not in second


def test_a_compilation_is_announced_once(capsys: pytest.CaptureFixture[str]) -> None:
    from numba import njit

    def compiled() -> None:
        njit(lambda x: x + 1)(1)
        njit(lambda x: x + 2)(1)

    with announced_compilation(Reporter()):
        assert capsys.readouterr().err == ""
        compiled()
        assert capsys.readouterr().err == f"{COMPILING}\n"
    compiled()
    with announced_compilation(SILENT):
        compiled()
    assert capsys.readouterr().err == ""
    assert "once, about half a minute" in COMPILING


def test_the_step_of_the_kernels_counts_what_is_compiled(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from numba import njit

    with loading_kernels(Reporter()):
        pass
    assert capsys.readouterr().err.startswith("load the kernels (")
    monkeypatch.setattr("drm_triton.progress.LINE_EVERY", 0.01)
    text = ""
    with loading_kernels(Reporter()):
        njit(lambda x: x + 1)(1)
        njit(lambda x: x + 2)(1)
        while "2 functions" not in text:
            text += capsys.readouterr().err
    assert "compile the kernels: 2 functions compiled\n" in text
    assert capsys.readouterr().err.splitlines()[-1].startswith("compile the kernels (")


COUNTED = """
import time
from drm_triton import progress
progress.BAR_AFTER = 0.01
with progress.Reporter().step("slow work", unit="functions compiled") as step:
    while step._bar is None:
        time.sleep(0.01)
    step.advance(7)
    step._bar.refresh()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_counted_work_of_unknown_size_has_a_bar() -> None:
    exit_code, screen = on_terminal(sys.executable, "-c", COUNTED)
    assert exit_code == 0
    assert "━" in screen
    assert "7 functions compiled" in screen


def test_an_epoch_prints_short() -> None:
    code = (
        "from drm_triton import DRM, Dataset\n"
        "data = Dataset.from_csr(([0, 6, 12], [*range(6), *range(2, 8)]), n_items=9)\n"
        "DRM(factors=2, epochs=1).fit(data, [print])"
    )
    printed = run_python("-c", code).stdout
    assert printed.startswith("EpochEnd(epoch=1, loss=")
    assert len(printed) < 100
