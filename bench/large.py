"""Time and memory for data of 10^7 users, 10^6 items and 10^8 interactions, stage by stage.

    python -m bench.large [--scale 1] [--folder data/large] [--stages generate,prepare,...] [--keep]

| stage     | what runs                                                                                             |
|-----------|-------------------------------------------------------------------------------------------------------|
| generate  | files of random interactions, users in no order; popularity and activity are skewed                   |
| prepare   | `drm-triton prepare table`: distinct pairs, ids to codes, split, store                                |
| train     | `drm-triton train --devices 2`: one epoch of hinge+drm, each user and item in one of two processes    |
| model     | a saved model with vectors of the planted classes: a stand-in for a trained one                       |
| evaluate  | all items ranked for the users of one shard, against their validation items                           |
| recommend | `drm-triton recommend --all --shard`: one part of 10,000 users                                        |

Every stage is a process of its own. Beside its seconds is what no program can go below: the seconds in which the disk
reads and writes its bytes, at the rate that was measured before, and the operations of its rankings, 2 m N d for N
items and m users. Its peak resident memory, pages of mapped files included, is beside the size of the arrays that it
has to hold. A stage that is done is not repeated if the command is started again. The folder is deleted at the end.

`--scale` 0.1 and 0.01 are data of a tenth and a hundredth of the users, items and interactions.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from drm_triton import atomic

RESULTS = Path(__file__).resolve().parent / "results"
FACTORS, CLASSES = 64, 256
SHARD_USERS = 10_000
FILES = 20
RANKS, RHO, ETA = 2, 5, 45  # processes that train; positives and negatives of a list
TRAINING = (
    f"--devices {RANKS} --objective hinge+drm --init normal --epochs 1 --eval-every 0 --batch-size 65536 "
    f"--rho {RHO} --eta {ETA} --factors {FACTORS}"
)
PAPER = 10**9  # interactions of an estimate
SIZES = {"users": 10**7, "items": 10**6, "interactions": 10**8}
Counts = dict[str, int]


def sizes(scale: float) -> Counts:
    """Return the numbers of users, items and interactions that are drawn."""
    return {name: round(size * scale) for name, size in SIZES.items()}


def shard(n_users: int) -> str:
    """Return the shard that is evaluated and recommended to: the middle one."""
    count = max(2, round(n_users / SHARD_USERS))
    return f"{count // 2}/{count}"


# -- the stages, each in a process of its own ----------------------------------------------------------------------


def generate(folder: Path, scale: float) -> None:
    """Write FILES tables of interactions.

    Rank r of an item has a density of r^(-2/3), rank of a user one of r^(-1/3). Users and items have classes, their ids
    modulo CLASSES; an item is in the user's class with a probability of one half.
    """
    n = sizes(scale)
    (folder / "raw").mkdir(parents=True, exist_ok=True)
    for number in range(FILES):
        rng = np.random.Generator(np.random.Philox(number))
        rows = n["interactions"] // FILES
        users = (n["users"] * rng.random(rows) ** 1.5).astype(np.int64)
        items = (n["items"] * rng.random(rows) ** 3).astype(np.int64)
        own = items - items % CLASSES + users % CLASSES
        items = np.where((rng.random(rows) < 0.5) & (own < n["items"]), own, items)
        table = pl.DataFrame({"user": users, "item": items})
        atomic.write_file(folder / "raw" / f"{number:03}.parquet", table.write_parquet)


def model(folder: Path, scale: float) -> None:
    """Save a model whose vectors are those of the planted classes, with noise."""
    import torch

    from drm_triton import DRM, Dataset

    data = Dataset.load(folder / "data")
    rng = torch.Generator().manual_seed(0)
    classes = torch.nn.functional.normalize(torch.randn(CLASSES, FACTORS, generator=rng))
    tensors = {}
    for name, ids in (("user_factors", data.user_ids), ("item_factors", data.item_ids)):
        table = torch.randn(len(ids), FACTORS, generator=rng).mul_(0.05)
        for start in range(0, len(ids), 1 << 16):
            rows = slice(start, start + (1 << 16))
            table[rows] += classes[torch.from_numpy(ids[rows].to_numpy() % CLASSES)]
            table[rows] = torch.nn.functional.normalize(table[rows])
        tensors[name] = table
    config = DRM(factors=FACTORS).config.to_dict()
    DRM.restored(folder, tensors, {"config": config}, data).save(folder / "model", overwrite=True)


def evaluate(folder: Path, scale: float) -> None:
    """Rank all items for the users of one shard."""
    from drm_triton import Dataset
    from drm_triton.data.shard import Shard
    from drm_triton.ranking.evaluate import average, evaluate_users
    from drm_triton.recommender.shards import load_shard

    data = Dataset.load(folder / "data")
    part = Shard.parse(shard(data.n_users))
    users = part.users(data.n_users)
    ranker = load_shard(trained(folder), part).ranker()
    own = data.of_users(users)
    result = average([evaluate_users(ranker, own.train, own.valid, range(own.n_users))])
    print(json.dumps({"users": len(result.per_user), "ndcg@10": result.means["ndcg@10"]}))


def trained(folder: Path) -> Path:
    """Return the model to rank with: the trained one, or else the stand-in."""
    return folder / "run" if (folder / "run" / "last" / "model.safetensors").exists() else folder / "model"


def command(stage: str, folder: Path, scale: float) -> list[str]:
    """Return the command of a stage."""
    program = [sys.executable, "-m", "drm_triton"]
    if stage == "prepare":
        files = str(folder / "raw" / "*.parquet")
        return [*program, "prepare", "table", "--raw", files, "--out", str(folder / "data"), "--overwrite", "-q"]
    if stage == "recommend":
        part = shard(json.loads((folder / "data" / "meta.json").read_text())["users"])
        return [*program, "recommend", str(trained(folder)), "--all", "--shard", part, "--out", str(folder / "top")]
    if stage == "train":
        return [*program, "train", str(folder / "data"), "--out", str(folder / "run"), "--overwrite", *TRAINING.split()]
    return [
        sys.executable,
        "-m",
        "drm_triton.bench.large",
        "--child",
        stage,
        "--folder",
        str(folder),
        "--scale",
        str(scale),
    ]


STAGES = ("generate", "prepare", "train", "model", "evaluate", "recommend")


# -- the least possible --------------------------------------------------------------------------------------------


def least(stage: str, folder: Path) -> dict[str, float]:
    """Return the bytes that a stage reads and writes, the operations of its rankings, and the bytes of its arrays."""
    raw, data, saved, top = (size_of(folder / name) for name in ("raw", "data", "model", "top"))
    if stage == "generate":
        return {"read": 0, "written": raw, "operations": 0, "arrays": 16 * rows_of(folder) / FILES}
    if stage == "prepare":
        return {"read": raw, "written": data, "operations": 0, "arrays": 8 * rows_of(folder)}
    meta = json.loads((folder / "data" / "meta.json").read_text())
    vectors = 4 * FACTORS * (meta["users"] + meta["items"])
    if stage == "train":  # scores, gradients of users and of items; each process holds its part of the tables
        operations = 6 * (RHO + ETA) * FACTORS * 0.7 * meta["interactions"] / RHO
        arrays = 2 * vectors / RANKS + 4 * 0.7 * meta["interactions"]
        return {"read": data, "written": 2 * vectors, "operations": operations, "arrays": arrays}
    if stage == "model":
        return {"read": data, "written": saved, "operations": 0, "arrays": vectors}
    index, count = map(int, shard(meta["users"]).split("/"))
    m = (index + 1) * meta["users"] // count - index * meta["users"] // count
    own = 4 * FACTORS * (m + meta["items"]) + 4 * meta["interactions"] * m / meta["users"] + 24 * m
    operations = 2 * m * meta["items"] * FACTORS
    return {"read": own, "written": top if stage == "recommend" else 0, "operations": operations, "arrays": own}


def rows_of(folder: Path) -> int:
    """Return the number of rows of the generated files."""
    return int(pl.scan_parquet(folder / "raw" / "*.parquet").select(pl.len()).collect().item())


def size_of(place: Path) -> int:
    """Return the bytes of the files in a directory; a file with several links counts once."""
    files = {status.st_ino: status.st_size for file in place.rglob("*") if (status := file.stat()) and file.is_file()}
    return sum(files.values())


def disk_rates(folder: Path, n_bytes: int = 1 << 29) -> dict[str, float]:
    """Measure the bytes per second that the disk writes and reads."""
    file = folder / "rate.bin"
    block = os.urandom(1 << 22)
    began = time.perf_counter()
    with file.open("wb") as handle:
        for _ in range(n_bytes // len(block)):
            handle.write(block)
        handle.flush()
        os.fsync(handle.fileno())
    written = time.perf_counter() - began
    with file.open("rb", buffering=0) as handle:
        os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # so that the disk is read, not the cache
        began = time.perf_counter()
        while handle.read(1 << 22):
            pass
    read = time.perf_counter() - began
    file.unlink()
    return {"write": n_bytes / written, "read": n_bytes / read}


# -- running -------------------------------------------------------------------------------------------------------


def machine(folder: Path, scale: float) -> None:
    """Print the rates of the disk, and the environment."""
    from drm_triton.bench.record import environment

    print(json.dumps({"rates": disk_rates(folder), "environment": environment()}))


def measure(stage: str, folder: Path, scale: float, rates: dict[str, float]) -> dict[str, Any]:
    """Run a stage in a new process; return its seconds, its peak memory, and the least possible."""
    began = time.perf_counter()
    child = subprocess.Popen(command(stage, folder, scale), stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    printed = child.stdout.read()
    _, status, usage = os.wait4(child.pid, 0)
    seconds = time.perf_counter() - began
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"stage {stage} failed with exit code {child.returncode}")
    work = least(stage, folder)
    return {
        "stage": stage,
        "seconds": seconds,
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "least_seconds": work["read"] / rates["read"] + work["written"] / rates["write"],
        "peak_bytes": usage.ru_maxrss * 1024,
        "least_bytes": work["arrays"],
        **work,
        "load": os.getloadavg()[0],
        "found": json.loads(printed) if stage == "evaluate" else {},
    }


def markdown(runs: list[dict[str, Any]]) -> str:
    """Return the results as tables."""
    lines = ["# Large data", "", "Made by `python -m bench.large`; `bench/large.py` explains each column.", ""]
    for run in sorted(runs, key=lambda run: -run["scale"]):
        made, made_on = run["sizes"], run["environment"]
        lines += [
            f"## {made['users']:,} users, {made['items']:,} items, {made['interactions']:,} interactions drawn",
            "",
            f"{os.cpu_count()} cores of an {made_on['processor']}, {made_on['date'][:10]}, --scale {run['scale']:g}.",
            "",
            "| stage | seconds | CPU seconds | seconds of the disk | operations, 10^9 | peak memory, GB "
            "| least memory, GB | load |",
            "|---|---|---|---|---|---|---|---|",
        ]
        lines += [
            f"| {row['stage']} | {row['seconds']:,.1f} | {row['cpu_seconds']:,.1f} | {row['least_seconds']:,.1f} "
            f"| {row['operations'] / 1e9:,.0f} "
            f"| {row['peak_bytes'] / 1e9:.2f} | {row['least_bytes'] / 1e9:.2f} | {row['load']:.0f} |"
            for row in run["rows"]
        ]
        lines.append("")
    return "\n".join(lines + on_paper(max(runs, key=lambda run: run["scale"])))


def on_paper(run: dict[str, Any]) -> list[str]:
    """Return the estimate for PAPER interactions: what grows with their number, in proportion."""
    factor = PAPER / run["sizes"]["interactions"]
    if run["scale"] < 1:  # small runs say little about it: imports are most of their memory
        return []
    return [
        f"## {PAPER:,} interactions, an estimate",
        "",
        f"Not measured: {factor:,.0f} times the figures of --scale {run['scale']:g}. Time and memory of a shard depend",
        "on the numbers of users and items, and hardly on that of interactions.",
        "",
        "| stage | CPU seconds | peak memory, GB |",
        "|---|---|---|",
        *(
            f"| {row['stage']} | {factor * row['cpu_seconds']:,.0f} | {factor * row['peak_bytes'] / 1e9:,.0f} |"
            for row in run["rows"]
            if row["stage"] == "prepare"
        ),
        "",
    ]


def record(run: dict[str, Any]) -> None:
    """Put the rows of a scale into large.json, and write large.md."""
    file = RESULTS / "large.json"
    known = json.loads(file.read_text())["runs"] if file.exists() else []
    runs = [other for other in known if other["scale"] != run["scale"]] + [run]
    atomic.write_text(file, json.dumps({"command": "python -m bench.large", "runs": runs}, indent=1) + "\n")
    atomic.write_text(RESULTS / "large.md", markdown(runs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--folder", type=Path, default=Path("data") / "large")
    parser.add_argument("--stages", default=",".join(STAGES))
    parser.add_argument("--keep", action="store_true", help="do not delete the folder")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        children: dict[str, Callable[[Path, float], None]] = {
            "machine": machine, "generate": generate, "model": model, "evaluate": evaluate
        }  # fmt: skip
        children[args.child](args.folder, args.scale)
        return
    args.folder.mkdir(parents=True, exist_ok=True)
    done = args.folder / "stages.json"
    if done.exists():
        run = json.loads(done.read_text())
    else:  # in a child: the peak of a stage starts at the memory of this process, which imports no torch
        described = subprocess.run(command("machine", args.folder, args.scale), check=True, capture_output=True).stdout
        run = {"scale": args.scale, "sizes": sizes(args.scale), **json.loads(described), "rows": []}
    for stage in args.stages.split(","):
        if stage in {row["stage"] for row in run["rows"]}:
            continue
        row = measure(stage, args.folder, args.scale, run["rates"])
        run["rows"].append(row)
        atomic.write_text(done, json.dumps(run))
        record(run)
        print(f"{stage}: {row['seconds']:.1f} s, peak {row['peak_bytes'] / 1e9:.2f} GB", flush=True)
    if not args.keep:
        shutil.rmtree(args.folder)


if __name__ == "__main__":
    main()
