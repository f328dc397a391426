"""Ranking quality on public splits, with the published protocol, beside published figures.

    python -m bench.public_splits --data PATH [--sets ml-1m-m1,amazon-cds-m1] [--models NAME|NAME] [--seeds 5]

PATH holds a folder for each set with train.txt and test.txt: one user per line, followed by the user's items. The
protocol is that of the published figures: Recall@20 and NDCG@20 of every user with test items, over all items that are
not in the user's training part, with 64 factors. Nothing is tuned on test. Each setting of a model is trained on 90 %
of the training part and measured on the rest; the one with the best NDCG@20 is trained `seeds` times on all of it.

Each finished training is a line of results/public_splits.jsonl. The command can be stopped at any time; when restarted,
it skips these trainings. The table is results/public_splits.md.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from drm_triton import DRM, Dataset
from drm_triton.bench.record import environment
from drm_triton.data.csr import CSR
from drm_triton.errors import InputError

RESULTS = Path(__file__).parent / "results"
TRIALS = RESULTS / "public_splits.jsonl"
METRICS = ("recall@20", "ndcg@20")

DRM_OPTIONS = {"objective": "hinge+drm"}
MODELS: dict[str, list[dict[str, Any]]] = {
    "softmax, defaults": [{}],
    "softmax, pool 8192": [{"pool": 8192, "temperature": t} for t in (0.07, 0.1, 0.125, 0.15)],
    "softmax, pool 8192, longer": [{"pool": 8192, "temperature": t, "lr": 0.4, "epochs": 40} for t in (0.125, 0.15)],
    "softmax@k": [{"objective": "softmax@k", "tau": t} for t in (0.25, 0.5, 1.0)],
    "DRM dot, defaults": [DRM_OPTIONS],
    "DRM L2, defaults": [{**DRM_OPTIONS, "score": "l2"}],
}
# Recall@20 and NDCG@20 as published for these splits with 64 factors.
PUBLISHED = {
    "ml-1m-m1": {"EASE": (0.2759, 0.2660), "UltraGCN": (0.2787, 0.2642), "SimpleX": (0.2802, 0.2670)},
    "amazon-cds-m1": {"UltraGCN": (0.1622, 0.1043), "SimpleX": (0.1763, 0.1145)},
}
HELD_OUT = 0.1


def read_lists(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return users and items of the interactions in a file with one user per line."""
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    rows = [np.array(line.split(), dtype=np.int64) for line in path.read_text().splitlines() if line.strip()]
    users = np.concatenate([np.full(len(row) - 1, row[0]) for row in rows])
    return users, np.concatenate([row[1:] for row in rows])


def load(folder: Path, on: str) -> Dataset:
    """Return a set with all of its training part and its test part, or for `valid` with parts of the training part."""
    (users, items), (test_users, test_items) = (read_lists(folder / f"{part}.txt") for part in ("train", "test"))
    shape = (int(max(users.max(), test_users.max())) + 1, int(max(items.max(), test_items.max())) + 1)
    if on == "test":
        train, held_out = CSR.from_pairs(users, items, shape), CSR.from_pairs(test_users, test_items, shape)
    else:
        chosen = np.random.default_rng(0).random(len(users)) < HELD_OUT
        train = CSR.from_pairs(users[~chosen], items[~chosen], shape)
        held_out = CSR.from_pairs(users[chosen], items[chosen], shape)
    return Dataset.from_csr(train.to_scipy(), test=held_out.to_scipy())


def train_and_measure(folder: Path, on: str, options: dict[str, Any], seed: int) -> dict[str, float]:
    """Train once; return the metrics and the seconds of the training."""
    data = load(folder, on)
    began = time.perf_counter()
    model = DRM(**options, seed=seed).fit(data)
    seconds = time.perf_counter() - began
    means = model.evaluate(data.test, ks=(20,), min_train=1).means
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


def table(name: str, rows: list[dict[str, Any]]) -> str:
    """Return the table of a set."""
    lines = [f"## {name}", "", "| model | Recall@20 | NDCG@20 | seconds | seeds |", "|---|---|---|---|---|"]
    for model, figures in PUBLISHED[name].items():
        lines.append(f"| {model} (published) | {figures[0]:.4f} | {figures[1]:.4f} | | |")
    for model in MODELS:
        mine = [row for row in rows if (row["set"], row["model"], row["on"]) == (name, model, "test")]
        if mine:
            means = [f"{np.mean([r[m] for r in mine]):.4f} ± {np.std([r[m] for r in mine]):.4f}" for m in METRICS]
            seconds = np.median([row["seconds"] for row in mine])
            lines.append(f"| {model} | {means[0]} | {means[1]} | {seconds:.0f} | {len(mine)} |")
    return "\n".join([*lines, ""])


def main() -> None:
    """Run what is not finished, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--sets", default=",".join(PUBLISHED))
    parser.add_argument("--models", default="|".join(MODELS), help="separated by |")
    parser.add_argument("--seeds", type=int, default=5)
    arguments = parser.parse_args()
    for name in arguments.sets.split(","):
        folder = arguments.data / name
        for model in arguments.models.split("|"):
            settings = MODELS[model]
            trials = [measure(folder, model, "valid", options, 0) for options in settings if len(settings) > 1]
            best = max(trials, key=lambda row: row["ndcg@20"])["options"] if trials else settings[0]
            for seed in range(arguments.seeds):
                measure(folder, model, "test", best, seed)
            found, rows = environment(), finished()
            title = f"# Public splits\n\n{found['processor']}, {found['threads']} threads, {found['date'][:10]}, "
            text = "\n".join([title + "`python -m bench.public_splits`\n", *(table(key, rows) for key in PUBLISHED)])
            (RESULTS / "public_splits.md").write_text(text)


if __name__ == "__main__":
    main()
