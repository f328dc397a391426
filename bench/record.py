"""Time functions on a shared machine, and save results with their environment."""

import csv
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import numba
import torch

from drm_triton import atomic
from drm_triton._version import __version__
from drm_triton.kernels.cpu.runtime.threads import n_threads
from drm_triton.machine import processor

RESULTS = Path(__file__).resolve().parent / "results"
Row = dict[str, Any]

TURN = 0.2  # least seconds of a turn
PAUSE = 0.02  # seconds between turns, in which spinning threads of the last runner go to sleep


def time_in_turns(
    runners: Mapping[str, Callable[[], object]], seconds: float = 2.0, least: int = 5, most: int = 200
) -> dict[str, float]:
    """Run functions in turn and return the median time of each.

    Taking turns means that other load on the machine affects all of them. A turn lasts at least TURN seconds. A fast
    function runs many times in it, so the caches contain its own data and not that of the last runner. On a GPU,
    `triton.testing.do_bench` measures the times. It clears the cache before each run.

    Parameters
    ----------
    runners : functions by name
    seconds : total time after which no new round starts
    least, most : number of rounds
    """
    if torch.cuda.is_available():
        import triton.testing

        return {name: triton.testing.do_bench(run, return_mode="median") / 1e3 for name, run in runners.items()}
    for run in runners.values():  # compile and allocate
        run()
    times: dict[str, list[float]] = {name: [] for name in runners}
    end = time.perf_counter() + seconds
    for turn in range(most):
        if turn >= least and time.perf_counter() > end:
            break
        for name, run in runners.items():
            time.sleep(PAUSE)
            start, runs = time.perf_counter(), 0
            while runs == 0 or time.perf_counter() - start < TURN:
                run()
                runs += 1
            times[name].append((time.perf_counter() - start) / runs)
    return {name: statistics.median(values) for name, values in times.items()}


class Setting(NamedTuple):
    """A way to run a program."""

    label: str
    work: float  # done by one run, in the unit that all ways have in common
    run: Callable[[], object]


def fastest(candidates: Mapping[str, tuple[float, Callable[[], object]]], seconds: float = 5.0) -> Setting:
    """Race ways to run a program, given as work and function by label, and return the one that does most per second.

    Examples
    --------
    >>> fastest({"slow": (1, lambda: time.sleep(0.01)), "fast": (2, lambda: time.sleep(0.01))}, seconds=0).label
    'fast'
    """
    times = time_in_turns({label: run for label, (_, run) in candidates.items()}, seconds, least=3)
    label = max(candidates, key=lambda x: candidates[x][0] / times[x])
    return Setting(label, *candidates[label])


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=Path(__file__).resolve().parent, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else "unknown"


def environment() -> Row:
    """Return versions, machine, date and commit."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": _git("rev-parse", "--short", "HEAD") + ("+changes" if _git("status", "--porcelain", "-uno") else ""),
        "drm_triton": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numba": numba.__version__,
        "processor": torch.cuda.get_device_name() if torch.cuda.is_available() else processor(),
        "threads": n_threads(),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
    }


def save_table(name: str, title: str, note: str | None, table: str, folder: Path = RESULTS) -> None:
    """Write name.md: a title, the machine, the date and the command, perhaps a note about the table, and the table."""
    found = environment()
    made = f"{found['processor']}, {found['threads']} threads, {found['date'][:10]}, `python -m bench.{name}`"
    paragraphs = [f"# {title}", made, *([] if note is None else [note]), table]
    atomic.write_text(folder / f"{name}.md", "\n\n".join(paragraphs), parents=True)


def save(name: str, header: Row, rows: list[Row], folder: Path = RESULTS) -> None:
    """Write name.json (header and rows) and name.csv (rows with the fields of the header that identify the run)."""
    import io

    atomic.write_text(
        folder / f"{name}.json", json.dumps({"environment": header, "rows": rows}, indent=1) + "\n", parents=True
    )
    identity = {key: header[key] for key in ("date", "commit", "processor", "threads")}
    table = [{**row, **identity} for row in rows]
    columns = list(dict.fromkeys(key for row in table for key in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    atomic.write_text(folder / f"{name}.csv", text.getvalue(), parents=True)
