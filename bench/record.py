"""Timing on a shared machine, and the record of what was measured where."""

import csv
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numba
import torch

from drm_triton import atomic
from drm_triton._version import __version__
from drm_triton.training.run import processor

RESULTS = Path(__file__).resolve().parent / "results"
Row = dict[str, Any]


TURN = 0.2  # seconds
PAUSE = 0.02  # seconds, in which threads that another runner left spinning go to sleep


def race(
    runners: dict[str, Callable[[], object]], seconds: float = 2.0, least: int = 5, most: int = 200
) -> dict[str, float]:
    """Median time of each runner in turns: what else the machine does hits all of them alike.

    A turn lasts at least TURN seconds, so that a quick runner is timed as it works, time after time, and not with the
    caches as a slow one left them.

    On a GPU `triton.testing.do_bench` takes the times, with its clearing of the cache.
    """
    if torch.cuda.is_available():
        import triton.testing

        return {name: triton.testing.do_bench(run, return_mode="median") / 1e3 for name, run in runners.items()}
    for run in runners.values():  # compile, touch the memory
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


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=Path(__file__).resolve().parent, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else "unknown"


def environment() -> Row:
    """Versions, machine, date and commit."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": _git("rev-parse", "--short", "HEAD") + ("+changes" if _git("status", "--porcelain", "-uno") else ""),
        "drm_triton": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numba": numba.__version__,
        "processor": torch.cuda.get_device_name() if torch.cuda.is_available() else processor(),
        "threads": numba.get_num_threads(),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
    }


def save(name: str, header: Row, rows: list[Row], folder: Path = RESULTS) -> None:
    """Write name.json (header and rows) and name.csv (rows, each with the header's fields that tell runs apart)."""
    import io

    atomic.write_text(
        folder / f"{name}.json", json.dumps({"environment": header, "rows": rows}, indent=1) + "\n", parents=True
    )
    told = {key: header[key] for key in ("date", "commit", "processor", "threads")}
    table = [{**row, **told} for row in rows]
    columns = list(dict.fromkeys(key for row in table for key in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    atomic.write_text(folder / f"{name}.csv", text.getvalue(), parents=True)
