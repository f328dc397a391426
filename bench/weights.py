"""Do the weights of interactions help? Training with play counts of Last.fm, against training without them.

    python -m bench.weights --data PATH [--seeds 3] [--models "DRM dot,DRM L2"]

PATH holds lastfm-hetrec/user_artists.dat: how often each listener has played each artist. Interactions are split
70/10/20 as in `bench.quality`. The metrics count every held-out artist once, however often it was played. So weights
help only if artists played often say more about the others.

Each model is trained with each choice of `interaction_weights` and `interaction_weight_cap` and otherwise default
options, with 45 negatives: on train, measured on valid; and on train + valid, measured on test. There is nothing to
choose on test.

Each finished training is a line of results/weights.jsonl. The command can be stopped at any time; when restarted, it
skips these trainings. The table, with Welch's t-test against training without weights, is results/weights.md.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from drm_triton import DRM, Dataset
from drm_triton.bench.record import RESULTS, save_table
from drm_triton.errors import InputError
from drm_triton.names import FitOn

TRIALS = RESULTS / "weights.jsonl"
METRICS = ("ndcg@10", "recall@50")

MODELS: dict[str, dict[str, Any]] = {
    "DRM dot": {"objective": "hinge+drm", "eta": 45},
    "DRM L2": {"objective": "hinge+drm", "eta": 45, "score": "l2"},
    "softmax over the catalogue": {"objective": "softmax", "temperature": 0.15},
}
WEIGHTS: dict[str, dict[str, Any]] = {
    "off": {},
    "raw": {"interaction_weights": "raw"},
    "raw, cap 3": {"interaction_weights": "raw", "interaction_weight_cap": 3.0},
    "log": {"interaction_weights": "log"},  # a cap of 3 would change neither these nor those of bm25
    "bm25": {"interaction_weights": "bm25"},
}


def load(folder: Path) -> Dataset:
    """Return the plays, with their counts as weights."""
    file = folder / "lastfm-hetrec" / "user_artists.dat"
    if not file.is_file():
        raise InputError(f"{file}: no such file")
    return Dataset.from_frame(pl.read_csv(file, separator="\t"), weight="weight")


def train_and_measure(data: Dataset, on: str, options: dict[str, Any], seed: int) -> dict[str, float]:
    """Train once; return the metrics."""
    fit_on: FitOn = "train" if on == "valid" else "train+valid"
    model = DRM(**options, seed=seed, fit_on=fit_on, eval_every=0).fit(data)
    means = model.evaluate(getattr(data, on)).means
    return {name: means[name] for name in METRICS}


def finished() -> list[dict[str, Any]]:
    """Return the finished trainings."""
    return [json.loads(line) for line in TRIALS.read_text().splitlines()] if TRIALS.exists() else []


def measure(data: Dataset, model: str, weights: str, on: str, seed: int) -> None:
    """Train and record the result, unless it is finished."""
    task = {"model": model, "weights": weights, "on": on, "seed": seed}
    if any({name: row[name] for name in task} == task for row in finished()):
        return
    row = {**task, **train_and_measure(data, on, {**MODELS[model], **WEIGHTS[weights]}, seed)}
    with open(TRIALS, "a") as file:
        file.write(json.dumps(row) + "\n")
    print(json.dumps(row), flush=True)


def table(rows: list[dict[str, Any]]) -> str:
    """Return the table: means over the seeds; a star marks p < 0.01 against training without weights."""
    from scipy.stats import ttest_ind

    columns = [(on, metric) for on in ("valid", "test") for metric in METRICS]
    header = ["model", "weights", *(f"{on} {metric}" for on, metric in columns), "seeds"]
    lines = [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
    for model in MODELS:
        for weights in WEIGHTS:
            cells, seeds = [], 0
            for on, metric in columns:
                values, without = (
                    [row[metric] for row in rows if (row["model"], row["weights"], row["on"]) == (model, name, on)]
                    for name in (weights, "off")
                )
                seeds = len(values)
                if not values:
                    cells.append("")
                    continue
                sure = weights != "off" and min(len(values), len(without)) > 1
                star = "*" if sure and ttest_ind(values, without, equal_var=False).pvalue < 0.01 else ""
                cells.append(f"{np.mean(values):.4f}{star}")
            if any(cells):
                lines.append(f"| {model} | {weights} | {' | '.join(cells)} | {seeds} |")
    return "\n".join([*lines, ""])


def main() -> None:
    """Run what is not finished, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--models", default=",".join(MODELS))
    arguments = parser.parse_args()
    data = load(arguments.data)
    for seed in range(arguments.seeds):
        for model in arguments.models.split(","):
            for weights in WEIGHTS:
                for on in ("valid", "test"):
                    measure(data, model, weights, on, seed)
    note = (
        "Last.fm, play counts as weights. Means over the seeds; a star marks a value that differs from that without "
        "weights (Welch's t-test, p < 0.01)."
    )
    save_table("weights", "Weighted interactions", note, table(finished()))


if __name__ == "__main__":
    main()
