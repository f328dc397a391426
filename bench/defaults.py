"""Effect of each default: change one option at a time, on several data sets.

    python -m bench.defaults --data PATH [--objective hinge+drm] [--sets lastfm,amazon,citeulike,ml-100k] [--workers 2]

The result is the mean validation NDCG@10 of some seeds. Each finished training is a line of results/defaults.jsonl; a
restarted command skips these trainings. The table is results/defaults_softmax.md, or that of another objective.
"""

import argparse
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from drm_triton.bench import quality
from drm_triton.machine import processor

TRIALS = quality.RESULTS / "defaults.jsonl"

VARIANTS: dict[str, list[dict[str, Any]]] = {
    "softmax": [
        {},
        {"temperature": 0.07},
        {"temperature": 0.1},
        {"temperature": 0.15},
        {"temperature": 0.2},
        {"temperature": 0.3},
        {"lr": 0.1},
        {"lr": 0.4},
        {"epochs": 10},
        {"epochs": 40},
        {"batch_size": 64},
        {"batch_size": 1024},
        {"factors": 32},
        {"factors": 128},
        {"init": "normal"},
        {"pool": 1024},
        {"pool": 8192},
        {"score": "dot"},
        {"score": "l2"},
        {"negatives": "sampled"},
        {"negatives": "sampled", "eta": 200},
        {"objective": "softmax@k"},
        {"objective": "softmax@k", "tau": 0.2},
        {"objective": "softmax+drm", "score": "cosine"},
        {"objective": "psl"},
        {"objective": "bpr"},
        {"objective": "hinge+drm"},
        {"objective": "hinge+drm", "score": "cosine"},
    ],
    "hinge+drm": [
        {},
        {"init": "normal"},
        {"schedule": "constant", "lr": 0.1},
        {"lr": 0.1},
        {"lr": 0.4},
        {"batch_size": 16, "share": 16},  # nearly one update per list
        {"batch_size": 8192},
        {"share": 1},
        {"share": 128},
        {"user_sampling": "uniform"},
        {"rho": 3},
        {"rho": 3, "lambda": 3.0},
        {"eta": 15},
        {"eta": 90},
        {"tau": 0.3},
        {"tau": 1.0},
        {"lambda": 3.0},
        {"lambda": 30.0},
        {"margin": 0.5},
        {"factors": 32},
        {"factors": 128},
        {"epochs": 10},
        {"weight": "ndcg", "rho": 3},
        {"score": "l2"},
        {"objective": "hinge"},
        {"objective": "drm"},
        {"score": "cosine"},
        {"eta": 200},
        {"eta": 200, "tau": 2.0},
    ],
    "hinge": [  # sums of two losses, and each of them alone; `parts` are sums that the trainer does not offer
        {},
        {"objective": "hinge+drm"},
        {"parts": "hinge+softmax"},
        {"parts": "hinge+psl"},
        {"parts": "hinge+bpr"},
        {"objective": "softmax", "negatives": "sampled", "score": "dot"},
        {"objective": "softmax+drm"},
        {"objective": "psl", "score": "dot"},
        {"objective": "bpr", "score": "dot"},
    ],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--objective", choices=list(VARIANTS), default="softmax")
    parser.add_argument("--sets", default="lastfm,amazon,citeulike,ml-100k")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--report-only", action="store_true", help="only write the table of the finished trainings")
    args = parser.parse_args()
    sets = args.sets.split(",")
    os.environ.update(NUMBA_NUM_THREADS="1", OMP_NUM_THREADS="1")  # one core for each worker
    variants = VARIANTS[args.objective]
    places = {name: quality.prepared(name, args.data) for name in sets}

    def tasks_of(variant: dict[str, Any], name: str) -> list[dict[str, Any]]:
        task: dict[str, Any] = {"set": name, "data": places[name], "model": "DRM", "on": "valid"}
        task["options"] = {"objective": args.objective, **variant}
        return [{**task, "seed": seed} for seed in range(args.seeds)]

    tasks = [task for variant in variants for name in sets for task in tasks_of(variant, name)]
    if not args.report_only:
        quality.run_all(tasks, args.workers, TRIALS)
    found = {quality.key(result): result["ndcg@10"] for result in quality.finished(TRIALS)}
    lines = [
        f"Validation NDCG@10 (seeds: {args.seeds}), one option changed at a time from the defaults of `--objective "
        f"{args.objective}`.",
        f"{processor()}, {time.strftime('%Y-%m-%d')}; made by `python -m bench.defaults --objective {args.objective}`.",
        "",
        "| changed | " + " | ".join(sets) + " | mean ratio to the default |",
        "|---|" + "---|" * (len(sets) + 1),
    ]
    default_values: list[float] = []
    for variant in variants:
        keys = [[quality.key(task) for task in tasks_of(variant, name)] for name in sets]
        if any(key not in found for of_set in keys for key in of_set):  # not finished
            continue
        values = [float(np.mean([found[key] for key in of_set])) for of_set in keys]
        default_values = default_values or values
        ratio = float(np.mean(np.divide(values, default_values)))
        name = ", ".join(f"{key} {value}" for key, value in variant.items()) or "nothing"
        lines.append(f"| {name} | " + " | ".join(f"{value:.4f}" for value in values) + f" | {ratio:.3f} |")
    text = "\n".join(lines) + "\n"
    (quality.RESULTS / f"defaults_{args.objective}.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
