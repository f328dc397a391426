"""Kills of processes that train together: each time, training must end with the bits of an undisturbed run.

torchrun starts two processes. At a random moment, a random one is killed (SIGKILL), and torchrun starts both again.
They go on from the last checkpoint. Moments are spread over the training: the start, and a random part of each epoch.

What is lost is at most the work since the last checkpoint, which is an epoch, and the time to start the processes.

    python -m bench.distributed_faults --kills 20 --save

A training has up to three kills. The results are written after each training, and a later call goes on from there.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from drm_triton.bench.commands import run_content

N_RANKS = 2
KILLS_OF_A_TRAINING = 3
OPTIONS = ["--factors", "8", "--epochs", "6", "--objective", "hinge+drm", "--batch-size", "64"]
OPTIONS += ["--backend", "reference"]
SERIAL = {"OMP_NUM_THREADS": "1", "POLARS_MAX_THREADS": "1"}


def children(pid: int) -> dict[int, int]:
    """Return the processes that a process has started, by rank."""
    found = {}
    try:
        pids = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        for one in pids:
            variables = Path(f"/proc/{one}/environ").read_bytes().split(b"\0")
            rank = [entry for entry in variables if entry.startswith(b"RANK=")]
            if rank:
                found[int(rank[0][5:])] = int(one)
    except OSError:  # it has just ended
        pass
    return found


def epochs_of(run: Path) -> int:
    """Return the number of epochs that a run has recorded."""
    try:
        return len((run / "metrics.jsonl").read_text().splitlines())
    except OSError:
        return 0


def wait_for_epochs(launcher: "subprocess.Popen[Any]", run: Path, epochs: int) -> bool:
    """Wait until ranks run and the run has recorded some epochs. Return whether it has, before the training ended."""
    while launcher.poll() is None:
        if len(children(launcher.pid)) == N_RANKS and epochs_of(run) >= epochs:
            return True
        time.sleep(0.01)
    return False


def kill_at_random(
    launcher: "subprocess.Popen[Any]", run: Path, epochs: tuple[int, int], rank: int | None = None
) -> dict[str, Any] | None:
    """Kill a rank at a random moment after a number of epochs in a range. Return which and when.

    None means that the training ended before.

    Parameters
    ----------
    launcher : the process that has started the ranks, or is about to
    run : the directory of the run
    epochs : the first and the last number of epochs to kill after
    rank : which one; a random one by default
    """
    wanted, delay = random.randint(*epochs), random.uniform(0, 1.5)
    if not wait_for_epochs(launcher, run, wanted):
        return None
    time.sleep(delay)
    ranks = children(launcher.pid)
    chosen = rank if rank is not None else random.randrange(N_RANKS)
    if chosen not in ranks:
        return None
    done = epochs_of(run)
    os.kill(ranks[chosen], signal.SIGKILL)
    while children(launcher.pid).get(chosen) == ranks[chosen]:  # until it is gone, and others may take its place
        time.sleep(0.01)
    return {"rank": chosen, "after_epochs": done, "delay": round(delay, 3)}


def torchrun(data: Path, run: Path, log: Path) -> "subprocess.Popen[Any]":
    """Start a training on two processes."""
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(N_RANKS)]
    again = ["--max-restarts", str(KILLS_OF_A_TRAINING)]
    words = [*launcher, *again, "-m", "drm_triton", "train", "--dataset", str(data), "--out", str(run), *OPTIONS]
    with log.open("w") as file:
        return subprocess.Popen([sys.executable, "-m", *words], stdout=file, stderr=file, env={**os.environ, **SERIAL})


def prepare(folder: Path) -> tuple[Path, Any]:
    """Make a data set, and train on it in one process without a fault; return it and the content of the run."""
    chance = random.Random(1)
    pairs = {(user, int(60 * chance.random() ** 2)) for user in range(60) for _ in range(11)}
    (folder / "table.csv").write_text("user,item\n" + "".join(f"u{user},i{item}\n" for user, item in sorted(pairs)))
    data, run = folder / "data", folder / "whole"
    for words in (
        ["prepare", "table", "--raw", folder / "table.csv", "--out", data, "--quiet"],
        ["train", data, "--run", run, "--quiet", *OPTIONS],
    ):
        subprocess.run([sys.executable, "-m", "drm_triton", *map(str, words)], check=True, env={**os.environ, **SERIAL})
    return data, run_content(run)


def main() -> None:
    """Kill, compare, print a line for each training, and exit with 1 if a bit was lost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--save", action="store_true", help="write bench/results/distributed_faults.json")
    args = parser.parse_args()
    from drm_triton.bench.record import RESULTS, environment
    from drm_triton.bench.record import save as record

    stored = RESULTS / "distributed_faults.json"
    rows: list[dict[str, Any]] = json.loads(stored.read_text())["rows"] if args.save and stored.exists() else []
    with tempfile.TemporaryDirectory(prefix="drm-kills-") as folder:
        data, expected = prepare(Path(folder))
        while sum(row["kills"] for row in rows) < args.kills:
            run, log = Path(folder) / f"run{len(rows)}", Path(folder) / "log"
            process = torchrun(data, run, log)
            kills = [kill_at_random(process, run, epochs) for epochs in ((0, 1), (1, 3), (3, 4))]
            code = process.wait()
            same = code == 0 and run_content(run) == expected
            done = [kill for kill in kills if kill is not None]
            rows.append({"kills": len(done), "exit_code": code, "same_bits": same, "killed": done})
            print(rows[-1] if same else f"{rows[-1]}\n{log.read_text()}", flush=True)
            if args.save:
                record("distributed_faults", environment(), rows)
    sys.exit(int(not all(row["same_bits"] for row in rows)))


if __name__ == "__main__":
    main()
