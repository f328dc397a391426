"""The popularity prior: validation quality with and without it.

    python -m bench.popularity --data PATH [--sets ml-100k,amazon,lastfm,citeulike,epinion] [--seeds 3]

With `popularity` a, an item with n interactions counts n^a times in the softmax. All other options are the defaults, on
the two largest sets with half the epochs and twice the learning rate, and on epinion with a pool of 8,192 items. Every
exponent is trained with the first seed on all sets before the next seed begins. Each finished training is a line of
results/popularity.jsonl; a restarted command skips these trainings. The table is results/popularity.md.
"""

import argparse
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from drm_triton.bench import quality
from drm_triton.machine import processor

TRIALS = quality.RESULTS / "popularity.jsonl"
METRICS = ("ndcg@10", "recall@50")
EXPONENTS = (0.0, 0.4)
SHORT: dict[str, Any] = {"epochs": 10, "lr": 0.4}
OPTIONS: dict[str, dict[str, Any]] = {"ml-100k": {}, "amazon": {}, "lastfm": {}, "citeulike": SHORT, "epinion": SHORT}


def task(name: str, exponent: float, seed: int) -> dict[str, Any]:
    """Return a training of `bench.quality`."""
    options = {"objective": "softmax", "negatives": "all", **OPTIONS[name], "popularity": exponent}
    return {"set": name, "model": "DRM", "on": "valid", "options": options, "seed": seed}


def cell(name: str, exponent: float, seeds: int, found: dict[str, dict[str, Any]]) -> str:
    """Return mean and standard deviation of the finished seeds."""
    keys = [quality.key(task(name, exponent, seed)) for seed in range(seeds)]
    results = [found[key] for key in keys if key in found]
    if not results:
        return ""
    values = ([result[metric] for result in results] for metric in METRICS)
    text = " / ".join(f"{np.mean(x):.4f} ± {np.std(x):.4f}" for x in values)
    return f"{text} ({len(results)})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--sets", default=",".join(OPTIONS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--report-only", action="store_true")
    args = parser.parse_args()
    if not args.report_only:
        os.environ.update(NUMBA_NUM_THREADS="1", OMP_NUM_THREADS="1")  # one core for each worker
        places = {name: quality.prepared(name, args.data) for name in args.sets.split(",")}
        tasks = [
            {**task(name, exponent, seed), "data": place}
            for seed in range(args.seeds) for name, place in places.items() for exponent in EXPONENTS
        ]  # fmt: skip
        quality.run_all(tasks, args.workers, TRIALS)
    found = {quality.key(result): result for result in quality.finished(TRIALS)}
    lines = [
        "# Popularity prior",
        "",
        "Validation NDCG@10 / Recall@50 of softmax: mean ± standard deviation (seeds).",
        f"{processor()}, {time.strftime('%Y-%m-%d')}; made by `python -m bench.popularity`.",
        "",
        "| set | " + " | ".join(f"popularity {exponent:g}" for exponent in EXPONENTS) + " |",
        "|---" * (1 + len(EXPONENTS)) + "|",
    ]
    lines += [
        f"| {name} | " + " | ".join(cell(name, exponent, args.seeds, found) for exponent in EXPONENTS) + " |"
        for name in OPTIONS
    ]
    text = "\n".join(lines) + "\n"
    (quality.RESULTS / "popularity.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
