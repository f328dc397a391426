"""Show progress: a bar or a clock on a terminal or in a notebook for steps longer than a second, plain lines elsewhere.

Progress goes to stderr, and stdout contains only results, so `--json` prints one object and nothing else. A notebook
shows stderr as if it were an error. There, progress goes to the output of the cell.
"""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import Any

BAR_AFTER = 1.0  # seconds before a bar appears; short steps show none
LINE_EVERY = 10.0  # seconds between the lines of one long step without a terminal


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return type(shell).__name__ == "ZMQInteractiveShell"


def duration(seconds: float) -> str:
    """Return a duration for reading.

    Examples
    --------
    >>> [duration(seconds) for seconds in (0.04, 75, 540, 9000)]
    ['0.0 s', '75 s', '9 min', '2.5 h']
    """
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun.

    Examples
    --------
    >>> counted(1, "row"), counted(1200, "row")
    ('1 row', '1,200 rows')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


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
        self.notebook = not quiet and in_notebook()
        self.terminal = not quiet and not self.notebook and sys.stderr.isatty()
        self._status: Any = None  # the line of a notebook that changes

    @classmethod
    def wanted(cls, progress: bool | None) -> Reporter:
        """Return a reporter that prints if `progress` is True, or if it is None and somebody is watching.

        Somebody is watching if stderr is a terminal, or in a notebook.
        """
        return cls(quiet=not (sys.stderr.isatty() or in_notebook() if progress is None else progress))

    def line(self, text: str) -> None:
        """Print one line."""
        if not self.quiet:
            print(text, file=sys.stdout if self.notebook else sys.stderr, flush=True)

    def status(self, text: str) -> None:
        """Show a text in the changing line of a notebook, in place of the text before."""
        data = {"text/plain": text}
        if self._status is None:
            from IPython.display import display

            self._status = display(data, raw=True, display_id=True)
        else:
            self._status.update(data, raw=True)

    def step(self, name: str, total: int | None = None, unit: str = "") -> Step:
        """Return a step, a context manager.

        `total` is its size in `unit`s. With a unit and no total, the units are counted. The unit "bytes" shows the
        speed too.
        """
        return Step(self, name, total, unit)


class Step:
    """One step of a `Reporter`. `advance` records progress, `note` sets the result."""

    def __init__(self, reporter: Reporter, name: str, total: int | None, unit: str) -> None:
        self.reporter, self.name, self.total, self.unit = reporter, name, total, unit
        self.done = 0
        self._result = ""
        self._last: str | None = None
        self._bar: Any = None
        self._shown = False  # in a notebook
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._watcher: threading.Thread | None = None

    def __enter__(self) -> Step:
        self._start = self._last_line = time.monotonic()
        self._watch()
        return self

    def advance(self, amount: int = 1) -> None:
        """Record that `amount` more units are done."""
        self.done += amount
        if self._bar is not None:
            self._bar.update(self._task, completed=self.done, total=self.total)
        elif self._in_lines and self._watcher is None and time.monotonic() - self._last_line > LINE_EVERY:
            self._last_line = time.monotonic()
            self.reporter.line(f"{self.name}: {self._progress()}")

    def become(self, name: str) -> None:
        """Go on under another name, with work of unknown size."""
        with self._lock:
            self.name, self.total, self.done = name, None, 0
            if self._bar is not None:
                self._bar.update(self._task, description=name, completed=0, total=None)
        self._watch()

    def note(self, result: str) -> None:
        """Set the result that the final line of the step prints."""
        self._result = result

    def finish_with(self, line: str) -> None:
        """Set the final line itself, in place of name, result and time."""
        self._last = line

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._lock:  # the watcher may be about to show something
            self._over.set()
        if self._bar is not None:
            self._bar.stop()
        if self._shown:
            self.reporter.status("")
        if kind is None:
            result = f": {self._result}" if self._result else ""
            self.reporter.line(self._last or f"{self.name}{result} ({time.monotonic() - self._start:.1f} s)")

    @property
    def _in_lines(self) -> bool:
        return not self.reporter.terminal and not self.reporter.notebook

    def _progress(self) -> str:
        """Return how much is done, the share of it, and the time that the rest takes at the same speed."""
        elapsed = time.monotonic() - self._start
        if not self.done and not self.total:
            return duration(elapsed)
        share = left = ""
        if self.total:
            seconds = elapsed / self.done * max(self.total - self.done, 0) if self.done else 0.0
            share = f" ({self.done / self.total:.0%})"
            left = f", about {duration(round(seconds))} left" if seconds >= 1 else ""
        return f"{self.done:,} {self.unit}{share}{left}"

    def _watch(self) -> None:
        """Start the thread that shows the step later: a bar, or now and then a line for work of unknown size."""
        if self.reporter.quiet or self._watcher is not None or (self._in_lines and self.total is not None):
            return
        self._watcher = threading.Thread(target=self._show_later, daemon=True)
        self._watcher.start()

    def _show_later(self) -> None:
        while not self._over.wait(LINE_EVERY if self._in_lines else BAR_AFTER):
            with self._lock:
                if self._over.is_set():
                    return
                if self.reporter.terminal:
                    self._show_bar()
                    return  # it is drawn by a thread of its own
                if self.reporter.notebook:
                    self._shown = True
                    self.reporter.status(f"{self.name}: {self._progress()}")
                else:
                    self.reporter.line(f"{self.name}: {self._progress()}")

    def _show_bar(self) -> None:
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

        columns: list[Any] = [SpinnerColumn(), TextColumn("{task.description}", markup=False)]
        if self.unit == "bytes":
            columns += [BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()]
        elif self.total is not None:
            columns += [BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()]
        elif self.unit:  # a bar that pulses
            columns += [BarColumn(), TextColumn(f"{{task.completed:,.0f}} {self.unit}")]
        bar = Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True)
        self._task = bar.add_task(self.name, total=self.total, completed=self.done)
        bar.start()
        self._bar = bar


SILENT = Reporter(quiet=True)
