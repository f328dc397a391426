"""Time and memory for data of different sizes: synthetic Melon at 0.1, 1 and 4 times its size.

    python -m bench.scale [--scales 0.1,1,4] [--objectives softmax,hinge+drm] [--epochs 2] [--factors 64]

The least memory is that of the factors and Adagrad's state, 2 * 4 (M + N) d bytes, and of the interactions, 4 bytes
each and 8 for each user. Each size is trained and evaluated in a new process. Its peak resident memory, minus the
memory after the imports, is compared with the least memory.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from drm_triton.names import ObjectiveName

RESULTS = Path(__file__).parent / "results"


def measure(path: str, objective: ObjectiveName, epochs: int, factors: int) -> None:
    """Train and evaluate in this process; print time and memory."""
    from drm_triton import DRM, Dataset
    from drm_triton.bench.record import environment
    from drm_triton.data.prepare.synthetic import Shape, generate
    from drm_triton.kernels import get_backend
    from drm_triton.training.preflight import memory_estimate

    # Import and compile everything with tiny data first, to measure the memory that does not depend on the data.
    users, items = generate(Shape(50, 40, 400), 0)
    import polars as pl

    tiny = Dataset.from_frame(pl.DataFrame({"user": users, "item": items}))
    DRM(objective=objective, factors=factors, epochs=1).fit(tiny)
    base = resident()

    data = Dataset.load(path)
    model = DRM(objective=objective, factors=factors, epochs=epochs, eval_every=0)
    records: list[dict[str, Any]] = []
    began = time.perf_counter()
    model.fit(data, [lambda end: records.append(end.record)])
    fitted = time.perf_counter() - began
    began = time.perf_counter()
    means = model.evaluate(data.valid).means
    evaluated = time.perf_counter() - began
    estimate = memory_estimate(data, model.config)
    least = estimate["factors"] + estimate["adagrad state"] + estimate["interactions"]
    result = {
        "objective": objective,
        "users": data.n_users,
        "items": data.n_items,
        "interactions": data.n_interactions,
        "epoch_seconds": min(record["seconds"] for record in records),
        "lists_per_second": max(record["lists_per_second"] for record in records),
        "initial_seconds": fitted - sum(record["seconds"] for record in records),
        "evaluate_seconds": evaluated,
        "valid_ndcg@10": means["ndcg@10"],
        "peak_bytes": peak() - base,
        "least_bytes": least,
        "times_least": (peak() - base) / least,
        "environment": environment(),
        "backend": get_backend().name,
    }
    print(json.dumps(result))


def resident() -> int:
    """Return the resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def peak() -> int:
    """Return the peak resident memory of this process in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scales", default="0.1,1,4")
    parser.add_argument("--objectives", default="softmax,hinge+drm")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--factors", type=int, default=64)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        measure(args.child, args.objectives, args.epochs, args.factors)
        return
    rows = []
    for scale in args.scales.split(","):
        path = Path("data") / "scale" / f"melon-{scale}"
        if not path.exists():
            command = f"prepare melon --synthetic --scale {scale} --out {path} -q"
            subprocess.run(
                [sys.executable, "-m", "drm_triton", *command.split()], check=True, stdout=subprocess.DEVNULL
            )
        for objective in args.objectives.split(","):
            row = measure_in_child(path, objective, args.epochs, args.factors)
            rows.append({"scale": float(scale), **row})
            print(
                f"scale {scale}, {objective}: {row['users']:,} x {row['items']:,}, {row['interactions']:,}: "
                f"{row['epoch_seconds']:.1f} s per epoch ({row['lists_per_second']:,.0f} lists/s), "
                f"initial factors {row['initial_seconds']:.1f} s, evaluation {row['evaluate_seconds']:.1f} s, "
                f"peak {row['peak_bytes'] / 2**20:,.0f} MiB = {row['times_least']:.2f} times the least memory",
                flush=True,
            )
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "scale.json").write_text(json.dumps({"command": "python -m bench.scale", "rows": rows}, indent=2) + "\n")


def measure_in_child(path: Path, objective: str, epochs: int, factors: int) -> dict[str, Any]:
    """Train and evaluate in a new process; return its measurements."""
    options = f"--child {path} --objectives {objective} --epochs {epochs} --factors {factors}"
    command = [sys.executable, "-m", "drm_triton.bench.scale", *options.split()]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


if __name__ == "__main__":
    main()
