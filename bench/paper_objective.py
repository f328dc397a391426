"""Options of the paper's objective, hinge+drm, that belong together, each on its own.

    python -m bench.paper_objective --data PATH [--sets ml-100k,lastfm] [--workers 2]

Lists: the paper's Figure 2 raises rho from 1 to 5 with eta = 15 rho, so that positives, negatives and K = rho grow
together. Here rho, eta and K vary independently. All trainings score about the same number of items, and so take about
the same time: the epochs are chosen for that.

Radius: rows are projected onto a ball of radius 1, so scores lie in [-1, 1] beside a margin of 1. A ball of radius r
multiplies the scores by r^2. The same ranking follows from the unit ball with margin / r^2, tau / r^2 and lambda / r^2:
the hinge is then r^-2 times as large, DRM is the same, and Adagrad ignores a factor of the loss.

Each finished training is a line of results/paper_objective.jsonl; a restarted command skips these trainings. The tables
are results/paper_objective.md.
"""

import argparse
import os
import time
from pathlib import Path
from typing import Any

from drm_triton.bench import quality
from drm_triton.experiments.list_lengths import equal_epochs
from drm_triton.machine import processor

TRIALS = quality.RESULTS / "paper_objective.jsonl"
METRICS = ("ndcg@10", "recall@50")
SCORED = 20 * 46  # items scored for each positive by the defaults: 20 epochs, 1 positive and 45 negatives

Options = dict[str, Any]
LISTS: list[Options] = [
    *({"rho": rho, "eta": eta, "k": k} for rho in (1, 2, 3, 5) for eta in (15, 45, 75) for k in sorted({1, rho})),
    *({"rho": 1, "eta": 45, "k": k} for k in (2, 5)),
    {"rho": 5, "eta": 75, "k": 5, "weight": "ndcg"},
    {"rho": 5, "eta": 75, "k": 5, "weight": "ap"},
]
RADII = (0.5, 1.0, 2.0, 4.0, 8.0)  # squared


def list_options(setting: Options) -> Options:
    """Return the options of a kind of list, with as many scored items as by default."""
    epochs = equal_epochs(setting["rho"], setting["eta"], SCORED)
    return {"objective": "hinge+drm", **setting, "epochs": epochs}


def radius_options(squared: float) -> Options:
    """Return the options of the unit ball that stand for a ball of another radius."""
    return {"objective": "hinge+drm", "margin": 1 / squared, "tau": 0.5 / squared, "lambda": 10 / squared}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--sets", default="ml-100k,lastfm")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    args = parser.parse_args()
    sets = args.sets.split(",")
    os.environ.update(NUMBA_NUM_THREADS="1", OMP_NUM_THREADS="1")  # one core for each worker
    settings = [*map(list_options, LISTS), *map(radius_options, RADII)]
    places = {name: quality.prepared(name, args.data) for name in sets}
    tasks = [{**task(options, name), "data": places[name]} for name in sets for options in settings]
    quality.run_all(tasks, args.workers, TRIALS)
    rows: dict[tuple[str, ...], list[tuple[tuple[Any, ...], Options]]] = {
        ("rho", "eta", "K", "weight", "epochs"): [
            ((s["rho"], s["eta"], s["k"], s.get("weight", "uniform"), list_options(s)["epochs"]), list_options(s))
            for s in sorted(LISTS, key=lambda setting: setting["rho"])
        ],
        ("radius squared",): [((squared,), radius_options(squared)) for squared in RADII],
    }
    lines = [
        "Validation NDCG@10 / Recall@50 of hinge+drm, dot scores, one seed.",
        f"{processor()}, {time.strftime('%Y-%m-%d')}; made by `python -m bench.paper_objective`.",
    ]
    found = {quality.key(result): result for result in quality.finished(TRIALS)}
    for names, table in rows.items():
        lines += ["", "| " + " | ".join([*names, *sets]) + " |", "|---" * (len(names) + len(sets)) + "|"]
        lines += [
            "| " + " | ".join([*map(str, values), *cells(options, sets, found)]) + " |" for values, options in table
        ]
    text = "\n".join(lines) + "\n"
    (quality.RESULTS / "paper_objective.md").write_text(text)
    print(text)


def task(options: Options, name: str) -> dict[str, Any]:
    """Return a training of `bench.quality`."""
    return {"set": name, "model": "DRM", "on": "valid", "options": options, "seed": 0}


def cells(options: Options, sets: list[str], found: dict[str, dict[str, Any]]) -> list[str]:
    """Return the results of a setting, of all that were found."""
    results = [found[quality.key(task(options, name))] for name in sets]
    return [" / ".join(f"{result[metric]:.4f}" for metric in METRICS) for result in results]


if __name__ == "__main__":
    main()
