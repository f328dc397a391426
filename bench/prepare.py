"""Time and memory of data preparation.

The input is a synthetic ratings.csv with the shape of MovieLens-20M (20,000,263 rows) and a full-scale synthetic Melon
train.json. Three programs process each file, one child process at a time and in turn, so that other load on the machine
affects all of them:

    floor        only read the file with Polars: no preparation with Polars can be faster
    drm-triton   the whole command: read, threshold, de-duplicate, encode, split, checksum, store
    pandas       the same with pandas and scipy, as most people would write it

Time is the wall-clock time of the whole process, with the start of Python. Memory is the maximum resident set size.
Targets: drm-triton takes at most 3 times the floor, and at most 1.5 GB on ratings.csv.

    python bench/prepare.py [--rounds 5] [--small] [--keep DIR]

writes bench/results/prepare.json and prints the table. ratings.csv (about 500 MB) is read once, and 80 MB are written.
The CSR arrays of 10 million interactions take 40 MB. All other memory is temporary.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import polars as pl

import drm_triton
from drm_triton.data.prepare.synthetic import Shape, generate, write_melon

RESULTS = Path(__file__).parent / "results" / "prepare.json"
MAX_RATIO, MAX_GB = 3.0, 1.5

FLOOR = {
    "ratings.csv": "import polars as pl, sys; pl.read_csv(sys.argv[1])",
    "train.json": "import polars as pl, sys; pl.read_json(sys.argv[1])",
}
OURS = {
    "ratings.csv": ["prepare", "ml-20m"],
    "train.json": ["prepare", "melon"],
}
PANDAS_READ = {
    "ratings.csv": """
frame = pd.read_csv(raw, usecols=["userId", "movieId", "rating"])
frame = frame[frame.rating >= 4].rename(columns={"userId": "user", "movieId": "item"})
""",
    "train.json": """
playlists = json.load(open(raw))
frame = pd.DataFrame({"user": [p["id"] for p in playlists], "item": [p["songs"] for p in playlists]}).explode("item")
frame = frame.dropna().astype({"item": "int64"})
""",
}
PANDAS = """
import json, sys
from pathlib import Path
import numpy as np, pandas as pd, scipy.sparse as sp
raw, out = sys.argv[1], Path(sys.argv[2])
{read}
frame = frame.drop_duplicates(["user", "item"])
users, user_ids = pd.factorize(frame.user, sort=True)
items, item_ids = pd.factorize(frame.item, sort=True)
order = np.random.default_rng(0).permutation(len(users))
n_test, n_valid = round(0.2 * len(users)), round(0.1 * len(users))
out.mkdir()
for name, rows in zip(("test", "valid", "train"), np.split(order, [n_test, n_test + n_valid])):
    ones = np.ones(len(rows), dtype=np.float32)
    matrix = sp.csr_matrix((ones, (users[rows], items[rows])), shape=(len(user_ids), len(item_ids)))
    sp.save_npz(out / f"{{name}}.npz", matrix, compressed=False)
pd.Series(user_ids).to_csv(out / "users.csv")
pd.Series(item_ids).to_csv(out / "items.csv")
"""


def write_ratings(path: Path, shape: Shape) -> None:
    """Write a ratings.csv like that of MovieLens-20M: sorted by user, sparse film ids, about half rated 4 or more."""
    users, items = generate(shape, seed=0)
    rng = np.random.Generator(np.random.PCG64(1))
    film_ids = np.sort(rng.permutation(5 * shape.items)[: shape.items]) + 1
    shares = np.array([1, 3, 1, 7, 4, 21, 11, 28, 8, 16]) / 100
    frame = pl.DataFrame(
        {
            "userId": users + 1,
            "movieId": film_ids[items],
            "rating": rng.choice(np.arange(1, 11) / 2, size=len(users), p=shares),
            "timestamp": rng.integers(789_652_009, 1_427_784_002, size=len(users)),
        }
    )
    frame.write_csv(path)


def _make_ratings(path: Path, divisor: int) -> None:
    write_ratings(path, Shape(138_493 // divisor, 26_744 // divisor, 20_000_263 // divisor))


def _make_playlists(path: Path, divisor: int) -> None:
    write_melon(path, Shape.melon(1 / divisor))


def run(command: list[str]) -> tuple[float, float]:
    """Run a child process; return its seconds and its peak memory in GB."""
    start = time.perf_counter()
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    seconds = time.perf_counter() - start
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"{' '.join(command)[:200]} failed with exit code {child.returncode}")
    scale = 1 if sys.platform == "darwin" else 1024  # macOS reports bytes, Linux kilobytes
    return seconds, usage.ru_maxrss * scale / 1e9


def commands(raw: Path, out: Path) -> dict[str, list[str]]:
    """Return the command of each program."""
    python = sys.executable
    pandas_program = PANDAS.format(read=PANDAS_READ[raw.name])
    return {
        "floor": [python, "-c", FLOOR[raw.name], str(raw)],
        "drm-triton": [python, "-m", "drm_triton", *OURS[raw.name], "--raw", str(raw), "--out", f"{out}-ours", "-q"],
        "pandas": [python, "-c", pandas_program, str(raw), f"{out}-pandas"],
    }


def time_in_turns(raw: Path, folder: Path, rounds: int) -> dict[str, dict[str, float]]:
    """Run the three programs in turn; return medians over the rounds. A ratio compares times of the same round."""
    times: dict[str, list[float]] = {}
    memory: dict[str, list[float]] = {}
    with raw.open("rb") as handle:  # load the page cache: do not measure the disk
        while handle.read(1 << 20):
            pass
    for number in range(rounds):
        for name, command in commands(raw, folder / f"{raw.stem}-{number}").items():
            seconds, peak = run(command)
            times.setdefault(name, []).append(seconds)
            memory.setdefault(name, []).append(peak)
    return {
        name: {
            "seconds": statistics.median(times[name]),
            "fastest": min(times[name]),
            "times_the_floor": statistics.median(t / f for t, f in zip(times[name], times["floor"], strict=True)),
            "peak_gb": max(memory[name]),
        }
        for name in times
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--small", action="store_true", help="a fiftieth of the size, to test the script; do not record results"
    )
    parser.add_argument("--keep", type=Path, help="write the input files here and keep them for the next run")
    options = parser.parse_args()
    divisor = 50 if options.small else 1
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        files = options.keep or folder
        files.mkdir(parents=True, exist_ok=True)
        ratings, playlists = files / "ratings.csv", files / "train.json"
        # In separate processes: on Linux the peak memory of a child starts at that of its parent, so keep it small.
        for path, write in ((ratings, _make_ratings), (playlists, _make_playlists)):
            if not path.exists():
                maker = multiprocessing.get_context("spawn").Process(target=write, args=(path, divisor))
                maker.start()
                maker.join()
        results = {}
        for raw in (ratings, playlists):
            results[raw.name] = time_in_turns(raw, folder, options.rounds)
            print(f"\n{raw.name} ({raw.stat().st_size / 1e6:,.0f} MB), median of {options.rounds} rounds")
            print(f"{'':<12}{'seconds':>9}{'fastest':>9}{'x floor':>9}{'peak GB':>9}")
            for name, r in results[raw.name].items():
                print(
                    f"{name:<12}{r['seconds']:>9.2f}{r['fastest']:>9.2f}{r['times_the_floor']:>9.2f}{r['peak_gb']:>9.2f}"
                )
    if options.small:
        return
    RESULTS.parent.mkdir(exist_ok=True)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    record = {
        "results": results,
        "rounds": options.rounds,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}",
        "versions": {
            "drm-triton": drm_triton.__version__,
            "polars": pl.__version__,
            "python": platform.python_version(),
        },
        "commit": commit,
        "date": time.strftime("%Y-%m-%d"),
    }
    RESULTS.write_text(json.dumps(record, indent=2) + "\n")
    worst = max(r["drm-triton"]["times_the_floor"] for r in results.values())
    peak = results["ratings.csv"]["drm-triton"]["peak_gb"]
    met = worst <= MAX_RATIO and peak <= MAX_GB
    print(
        f"\ntargets (at most {MAX_RATIO:g} x floor, {MAX_GB:g} GB): {'met' if met else 'MISSED'}, "
        f"with {worst:.2f} x and {peak:.2f} GB"
    )
    sys.exit(0 if met else 1)


if __name__ == "__main__":
    main()
