"""Print progress to stderr: a bar or spinner on a terminal for steps longer than a second, plain lines elsewhere.

stdout contains only results, so `--json` prints one object and nothing else.
"""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import Any

BAR_AFTER = 1.0  # seconds before a bar appears; short steps show none
LINE_EVERY = 10.0  # seconds between the lines of one long step without a terminal


class Reporter:
    """Prints the steps of a long operation.

    Parameters
    ----------
    quiet : bool
        Print nothing.

    Examples
    --------
    >>> with Reporter(quiet=True).step("counting", total=3) as step:
    ...     step.advance(2)
    ...     step.advance()
    >>> step.done
    3
    """

    def __init__(self, quiet: bool = False) -> None:
        self.quiet = quiet
        self.terminal = not quiet and sys.stderr.isatty()

    def line(self, text: str) -> None:
        """Print one line."""
        if not self.quiet:
            print(text, file=sys.stderr, flush=True)

    def step(self, name: str, total: int | None = None, unit: str = "") -> Step:
        """Return a step, a context manager. `total` is its size in `unit`s; the unit "bytes" shows the speed too."""
        return Step(self, name, total, unit)


class Step:
    """One step of a `Reporter`. `advance` records progress, `note` sets the result."""

    def __init__(self, reporter: Reporter, name: str, total: int | None, unit: str) -> None:
        self.reporter, self.name, self.total, self.unit = reporter, name, total, unit
        self.done = 0
        self._result = ""
        self._bar: Any = None
        self._lock = threading.Lock()
        self._over = False

    def __enter__(self) -> Step:
        self._start = self._last_line = time.monotonic()
        if self.reporter.terminal:
            self._timer = threading.Timer(BAR_AFTER, self._show)
            self._timer.daemon = True
            self._timer.start()
        return self

    def advance(self, amount: int = 1) -> None:
        """Record that `amount` more units are done."""
        self.done += amount
        if self._bar is not None:
            self._bar.update(self._task, completed=self.done, total=self.total)
        elif not self.reporter.terminal and time.monotonic() - self._last_line > LINE_EVERY:
            self._last_line = time.monotonic()
            self.reporter.line(f"{self.name}: {self.done:,} {self.unit}{self._share()}")

    def _share(self) -> str:
        """Return the share that is done and the time that the rest takes at the same speed."""
        if not self.total:
            return ""
        left = (time.monotonic() - self._start) / self.done * max(self.total - self.done, 0) if self.done else 0.0
        spell = f"{left / 60:.0f} min" if left >= 120 else f"{left:.0f} s"
        return f" ({self.done / self.total:.0%})" + (f", about {spell} left" if left >= 1 else "")

    def note(self, result: str) -> None:
        """Set the result that the final line of the step prints."""
        self._result = result

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._lock:  # the timer may be about to show the bar
            self._over = True
        if self.reporter.terminal:
            self._timer.cancel()
        if self._bar is not None:
            self._bar.stop()
        if kind is None:
            result = f": {self._result}" if self._result else ""
            self.reporter.line(f"{self.name}{result} ({time.monotonic() - self._start:.1f} s)")

    def _show(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            MofNCompleteColumn,
            Progress,
            SpinnerColumn,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        columns: list[Any] = [SpinnerColumn(), TextColumn("{task.description}")]
        if self.unit == "bytes":
            columns += [BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()]
        elif self.total is not None:
            columns += [BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()]
        bar = Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True)
        with self._lock:
            if self._over:
                return
            self._task = bar.add_task(self.name, total=self.total, completed=self.done)
            bar.start()
            self._bar = bar


SILENT = Reporter(quiet=True)
