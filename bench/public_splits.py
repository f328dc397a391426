"""Ranking quality on public splits, with the published protocol, beside published figures.

    python -m bench.public_splits --data PATH [--sets ml-1m-m1,amazon-cds-m1] [--models NAME|NAME] [--seeds 5]

PATH holds a folder for each set with the files that `drm-triton prepare` reads. The protocol is that of the published
results, see `drm_triton.data.leaderboards`, with 64 factors. Nothing is tuned on test. Each setting of a model is
trained on 90 % of the training part and measured on the rest; the one with the best NDCG@20 is trained `seeds` times on
all of it. The validation rows of up to 2026-11-17 have another draw of these 90 %.

Each finished training is a line of results/public_splits.jsonl. The command can be stopped at any time; when restarted,
it skips these trainings. The table is results/public_splits.md: means and standard deviations over the seeds, and p of
one-sample t-tests, Recall and NDCG against the best figure from elsewhere, with + above it and - below.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import scipy.stats

from drm_triton import DRM, Dataset
from drm_triton.bench.record import RESULTS, save_table
from drm_triton.data.leaderboards import LEAST_TRAIN, PUBLIC_SPLITS, K
from drm_triton.data.prepare.parts import PartsOptions
from drm_triton.data.prepare.pipeline import prepare
from drm_triton.data.prepare.sources import find_source

TRIALS = RESULTS / "public_splits.jsonl"
METRICS = (f"recall@{K}", f"ndcg@{K}")

DRM_OPTIONS = {"objective": "hinge+drm"}
MODELS: dict[str, list[dict[str, Any]]] = {
    "softmax, defaults": [{}],
    "softmax, pool 8192": [{"pool": 8192, "temperature": t} for t in (0.07, 0.1, 0.125, 0.15)],
    "softmax, pool 8192, longer": [{"pool": 8192, "temperature": t, "lr": 0.4, "epochs": 40} for t in (0.125, 0.15)],
    "softmax, pool 8192, longer, popularity": [
        {"pool": 8192, "temperature": 0.125, "lr": 0.4, "epochs": epochs, "popularity": a}
        for epochs in (40, 80)
        for a in (0.0, 0.2)
    ],
    "softmax@k": [{"objective": "softmax@k", "tau": t} for t in (0.25, 0.5, 1.0)],
    "DRM dot, defaults": [DRM_OPTIONS],
    "DRM L2, defaults": [{**DRM_OPTIONS, "score": "l2"}],
    "DRM, searched": [
        {**DRM_OPTIONS, "score": score, "eta": eta, "epochs": epochs}
        for score in ("dot", "l2")
        for eta in (15, 45, 100)
        for epochs in (20, 60)
    ],
}
SETS = ("ml-1m-m1", "amazon-cds-m1")
HELD_OUT = 0.1
NOTE = (
    "Figures with a source are not ours. p: t-test against the best of them in the metric, + above it, - below. The\n"
    "trainings ran on several processors, some of them busy, so that seconds of different rows do not compare."
)


def load(folder: Path, on: str) -> Dataset:
    """Return a set with all of its training part and its test part, or for `valid` with parts of the training part.

    There is no validation part, so that every model trains for all of its epochs.
    """
    options = PartsOptions(HELD_OUT if on == "valid" else 0.0)
    with tempfile.TemporaryDirectory() as place:
        data = prepare(find_source(folder.name), [folder], Path(place) / "data", options=options)
        return Dataset.from_csr(data.train.to_scipy(), test=getattr(data, on).to_scipy())


def train_and_measure(folder: Path, on: str, options: dict[str, Any], seed: int) -> dict[str, float]:
    """Train once; return the metrics and the seconds of the training."""
    data = load(folder, on)
    began = time.perf_counter()
    model = DRM(**options, seed=seed).fit(data)
    seconds = time.perf_counter() - began
    means = model.evaluate(data.test, ks=(K,), min_train=LEAST_TRAIN).means
    return {**{name: means[name] for name in METRICS}, "seconds": round(seconds, 1)}


def finished() -> list[dict[str, Any]]:
    """Return the finished trainings."""
    return [json.loads(line) for line in TRIALS.read_text().splitlines()] if TRIALS.exists() else []


def measure(folder: Path, model: str, on: str, options: dict[str, Any], seed: int) -> dict[str, Any]:
    """Return the result of a training, from the file if it is finished."""
    task = {"set": folder.name, "model": model, "on": on, "options": options, "seed": seed}
    for row in finished():
        if {name: row[name] for name in task} == task:
            return row
    row = {**task, **train_and_measure(folder, on, options, seed)}
    with open(TRIALS, "a") as file:
        file.write(json.dumps(row) + "\n")
    print(json.dumps(row), flush=True)
    return row


def against(values: list[float], figure: float) -> str:
    """Return whether the mean of some values is above or below a figure, and p of the t-test."""
    p = scipy.stats.ttest_1samp(values, figure).pvalue
    return ("+ " if np.mean(values) > figure else "- ") + ("< 0.0001" if p < 1e-4 else f"{p:.4f}")


def table(name: str, rows: list[dict[str, Any]]) -> str:
    """Return the table of a set, with one-sample t-tests against the best figures from elsewhere."""
    published = PUBLIC_SPLITS[name].results
    best = {METRICS[0]: max(r.recall for r in published), METRICS[1]: max(r.ndcg for r in published)}
    columns = [f"Recall@{K}", f"NDCG@{K}", "p", "seconds", "seeds"]
    lines = [f"## {name}", "", "| model | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for result in published:
        lines.append(f"| {result.model} ({result.source}) | {result.recall:.4f} | {result.ndcg:.4f} | | | |")
    for model in MODELS:
        mine = [row for row in rows if (row["set"], row["model"], row["on"]) == (name, model, "test")]
        if mine:
            means = [f"{np.mean([r[m] for r in mine]):.4f} ± {np.std([r[m] for r in mine]):.4f}" for m in METRICS]
            seconds = np.median([row["seconds"] for row in mine])
            tests = " / ".join(against([r[m] for r in mine], best[m]) for m in METRICS if len(mine) > 2)
            lines.append(f"| {model} | {means[0]} | {means[1]} | {tests} | {seconds:.0f} | {len(mine)} |")
    return "\n".join([*lines, ""])


def main() -> None:
    """Run what is not finished, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--sets", default=",".join(SETS))
    parser.add_argument("--models", default="|".join(MODELS), help="separated by |")
    parser.add_argument("--seeds", type=int, default=5)
    arguments = parser.parse_args()
    for name in arguments.sets.split(","):
        folder = arguments.data / name
        for model in arguments.models.split("|"):
            settings = MODELS[model]
            trials = [measure(folder, model, "valid", options, 0) for options in settings if len(settings) > 1]
            best = max(trials, key=lambda row: row[f"ndcg@{K}"])["options"] if trials else settings[0]
            for seed in range(arguments.seeds):
                measure(folder, model, "test", best, seed)
            rows = finished()
            save_table("public_splits", "Public splits", NOTE, "\n".join(table(key, rows) for key in SETS))


if __name__ == "__main__":
    main()
