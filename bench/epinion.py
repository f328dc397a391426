"""Epinion results of the paper: DRM with both scores, and the hinge alone, with the protocol of the paper.

    python -m bench.epinion --data PATH [--seeds 5] [--workers 2]

PATH is the folder that contains epinions/epinions_rating_with_timestamp.mat. `prepare epinion` splits it 70/10/20. For
each model, the setting below with the best validation NDCG@10 is trained on train + validation with each seed and
evaluated on test. Each finished training is a line of results/epinion.jsonl; a restarted command skips these trainings.
The table, with the published results, is results/epinion.md. The published MAP@10 divides by K; it is map_k@10 here.
"""

import argparse
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from drm_triton.bench import quality
from drm_triton.experiments import published
from drm_triton.machine import processor

TRIALS = quality.RESULTS / "epinion.jsonl"
PUBLISHED = {
    model: published.quality("epinion", name)
    for model, name in {"DRM dot": "drm-dot", "DRM L2": "drm-l2", "hinge dot": "warp", "hinge L2": "cml"}.items()
}
COMMON: dict[str, Any] = {"factors": 128, "lr": 0.2, "epochs": 30, "batch_size": 4096, "tau": 1.0}
# Four settings for each model.
DOT: list[dict[str, Any]] = [{}, {"margin": 0.5}, {"lambda": 3.0, "lr": 0.1}, {"eta": 90}]
L2: list[dict[str, Any]] = [{}, {"margin": 0.5}, {"lambda": 3.0}, {"eta": 90}]
HINGE: list[dict[str, Any]] = [{}, {"margin": 0.5}, {"lr": 0.1}, {"eta": 90}]
SEARCH: dict[str, list[dict[str, Any]]] = {
    "DRM dot": [{**COMMON, "score": "dot", **variant} for variant in DOT],
    "DRM L2": [{**COMMON, "score": "l2", **variant} for variant in L2],
    "hinge dot": [{**COMMON, "score": "dot", "objective": "hinge", **variant} for variant in HINGE],
    "hinge L2": [{**COMMON, "score": "l2", "objective": "hinge", **variant} for variant in HINGE],
}


def tasks_of(place: str, model: str, settings: list[dict[str, Any]], on: str, seeds: range) -> list[dict[str, Any]]:
    return [
        {"set": "epinion", "data": place, "model": model, "on": on, "options": options, "seed": seed}
        for options in settings for seed in seeds
    ]  # fmt: skip


def results_of(tasks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found = {quality.key(result): result for result in quality.finished(TRIALS)}
    return [found[quality.key(task)] for task in tasks]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--models", default=",".join(SEARCH))
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    args = parser.parse_args()
    models = args.models.split(",")
    os.environ.update(NUMBA_NUM_THREADS="1", OMP_NUM_THREADS="1")  # one core for each worker
    place = quality.prepared("epinion", args.data)
    search = {model: tasks_of(place, model, SEARCH[model], "valid", range(1)) for model in models}
    quality.run_all([task for tasks in search.values() for task in tasks], args.workers, TRIALS)
    best = {model: max(results_of(tasks), key=lambda r: r["ndcg@10"])["options"] for model, tasks in search.items()}
    final = {model: tasks_of(place, model, [best[model]], "test", range(1, args.seeds + 1)) for model in models}
    quality.run_all([task for tasks in final.values() for task in tasks], args.workers, TRIALS)
    lines = [
        f"Epinion, test means and standard deviations over {args.seeds} seeds, published results in brackets;",
        f"{processor()}, {time.strftime('%Y-%m-%d')}; made by `python -m bench.epinion`.",
        "",
        "| model | " + " | ".join(published.METRICS) + " | setting |",
        "|---|" + "---|" * (len(published.METRICS) + 1),
    ]
    for model in models:
        results = results_of(final[model])
        cells = []
        for metric, theirs in PUBLISHED[model].items():
            values = [result[metric] for result in results]
            cells.append(f"{np.mean(values):.4f} ± {np.std(values):.4f} ({theirs:.4f})")
        setting = ", ".join(f"{name} {value}" for name, value in best[model].items())
        lines.append(f"| {model} | " + " | ".join(cells) + f" | {setting} |")
    text = "\n".join(lines) + "\n"
    (quality.RESULTS / "epinion.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
