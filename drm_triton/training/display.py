"""How a training is shown: a bar for the current epoch, and a table with a row for each finished epoch."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from drm_triton.base_config import Config
from drm_triton.progress import Reporter, Step, duration
from drm_triton.training.state import BatchCallback, EpochEnd, Progress

COMPILING = "compiling the kernels for this processor (once, about half a minute)"
BEST = "*"  # marks an epoch that is the best so far


class Display:
    """Shows a training through a reporter. A context manager around the training.

    Parameters
    ----------
    reporter : prints
    config : of the model
    validates : whether the training validates, after each `eval_every` epochs and at the end
    """

    def __init__(self, reporter: Reporter, config: Config, validates: bool) -> None:
        self.reporter, self.config, self.validates = reporter, config, validates
        self._step: Step | None = None
        self._columns: dict[str, int] = {}  # title -> width
        self._began: float | None = None  # when the first epoch began
        self._trained = 0.0  # when the training part of the current epoch was done
        self._epochs = self._validations = 0  # since then
        self._validating = 0.0  # seconds of these validations

    def __enter__(self) -> Display:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._step is not None:  # stopped within an epoch
            self._step.__exit__(KeyboardInterrupt, None, None)

    def batches(self, then: BatchCallback | None) -> BatchCallback:
        """Return a callback that shows the progress after each batch and then calls another."""

        def on_batch(state: Progress, n_lists: int) -> bool | None:
            self.batch_end(state, n_lists)
            return then(state, n_lists) if then is not None else None

        return on_batch

    def batch_end(self, state: Progress, n_lists: int) -> None:
        """Advance the bar."""
        now = time.monotonic()
        if self._step is None:
            self._step = self._start(state.epoch + 1, now - state.seconds, n_lists)
        if self._step.total == n_lists:
            self._step.advance(state.position - self._step.done)
        if state.position >= n_lists:
            self._trained = now
            if self._is_validated(state.epoch + 1):
                self._step.become(f"epoch {state.epoch + 1}/{self.config.last_epoch}: validating")

    def epoch_end(self, end: EpochEnd) -> None:
        """Print the row of the epoch, and before the first row the titles of the columns."""
        now, epoch = time.monotonic(), end.record["epoch"]
        if self._step is None:  # resumed after the last batch of an epoch
            self._step, self._trained = self._start(epoch, now - end.record["seconds"], 0), now
        self._epochs += 1
        if self._is_validated(epoch):
            self._validations += 1
            self._validating += now - self._trained
        if not self._columns:
            self._columns = _columns(end.record, self.config, self.validates)
            self.reporter.line(_row(self._columns, {name: name for name in self._columns}))
        seconds = end.record["seconds"] + now - self._trained
        self._step.finish_with(_row(self._columns, self._cells(end, seconds, self._left(epoch, now))))
        self._step.__exit__(None, None, None)
        self._step = None

    def _start(self, epoch: int, began: float, n_lists: int) -> Step:
        """Begin the bar of an epoch, and in the first epoch the clock."""
        if self._began is None:
            self._began = began
        name = f"epoch {epoch}/{self.config.last_epoch}"
        return self.reporter.step(name, total=n_lists, unit="lists").__enter__()

    def _is_validated(self, epoch: int) -> bool:
        return self.validates and (epoch % self.config.eval_every == 0 or epoch == self.config.last_epoch)

    def _left(self, epoch: int, now: float) -> float:
        """Return the seconds that the epochs after `epoch` and their validations take, by the means so far."""
        assert self._began is not None
        ahead = range(epoch + 1, self.config.last_epoch + 1)
        per_epoch = (now - self._began - self._validating) / self._epochs
        per_validation = self._validating / max(self._validations, 1)
        return len(ahead) * per_epoch + sum(map(self._is_validated, ahead)) * per_validation

    def _cells(self, end: EpochEnd, seconds: float, left: float) -> dict[str, str]:
        record, monitored = end.record, f"valid/{self.config.monitor}"
        cells = {"epoch": f"{record['epoch']}/{self.config.last_epoch}", "time": duration(seconds)}
        if "loss" in record:
            cells["loss"] = f"{record['loss']:.4f}" if abs(record["loss"]) < 1e4 else f"{record['loss']:.4g}"
        if "lists_per_second" in record:
            cells["lists/s"] = f"{record['lists_per_second']:,.0f}"
        if monitored in record:
            cells[monitored] = f"{record[monitored]:.4f} {BEST if end.improved else ' '}"
        if record["epoch"] < self.config.last_epoch:
            cells["time left"] = duration(left)
        return cells


def _columns(record: dict[str, Any], config: Config, validates: bool) -> dict[str, int]:
    """Return the titles and widths of the columns that the records of a training fill."""
    columns = {"epoch": max(5, 2 * len(str(config.last_epoch)) + 1)}
    if "loss" in record:
        columns["loss"] = 9
    if validates:
        columns[f"valid/{config.monitor}"] = max(len(f"valid/{config.monitor}"), 8)
    if "lists_per_second" in record:
        columns["lists/s"] = 10
    return columns | {"time": 7, "time left": 9}


def _row(columns: dict[str, int], cells: dict[str, str]) -> str:
    return "  ".join(cells.get(name, "").rjust(width) for name, width in columns.items()).rstrip()


@contextmanager
def announced_compilation(reporter: Reporter) -> Iterator[None]:
    """Say so, once, if Numba compiles a kernel that is not in its cache."""
    if reporter.quiet:
        yield
        return
    from numba.core import event

    class Announcer(event.Listener):
        said = False

        def on_start(self, event: Any) -> None:
            if not self.said:
                self.said = True
                reporter.line(COMPILING)

        def on_end(self, event: Any) -> None:
            pass

    with event.install_listener("numba:compile", Announcer()):
        yield


@contextmanager
def loading_kernels(reporter: Reporter) -> Iterator[None]:
    """Show a step that loads the kernels. Once Numba compiles one, it says so and counts the compiled functions."""
    with reporter.step("load the kernels", unit="functions compiled") as step:
        if reporter.quiet:
            yield
            return
        from numba.core import event

        class Counter(event.Listener):
            compiles = False

            def on_start(self, event: Any) -> None:
                if not self.compiles:
                    self.compiles = True
                    step.become("compile the kernels")

            def on_end(self, event: Any) -> None:
                step.advance()

        with event.install_listener("numba:compile", Counter()):
            yield
