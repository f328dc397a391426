"""Quality of fold-in compared with training: recommend to held-out users from a part of their items.

    python -m bench.fold_in --data PATH [--sets lastfm,citeulike] [--folds 0,1,2] [--objective softmax]

A tenth of the users is held out. Four fifths of their items are the history, the other items are relevant. Methods:
    fold-in     train on the other users, then fold in the held-out users
    trained in  train on the histories of the held-out users too
    same items  fold in with the item factors of `trained in`. The difference to `trained in` is the loss from folding
                in alone, without the loss from item factors that were trained on fewer users.
    mean        the mean factors of the history
    popularity  the items with the most interactions

Cost of a fold-in: 4 N d operations for each step over a whole catalogue of N items, two thirds of those of a step of
training; with sampled negatives, lists x (4 n d + 8 n^2 + 40 n K), as in training with share 1.
Each fold holds out other users. Finished folds are stored in results/fold_in.json; the table is results/fold_in.md.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from drm_triton import DRM, Dataset
from drm_triton.bench.quality import SETS
from drm_triton.bench.record import RESULTS, Row, environment, time_in_turns
from drm_triton.data.csr import CSR
from drm_triton.data.split import random_keys
from drm_triton.names import ObjectiveName
from drm_triton.ranking.evaluate import Ranker, evaluate, factor_ranker, popularity_ranker
from drm_triton.ranking.fold_in import fold_in, mean_direction

METHODS = ("fold-in", "trained in", "same items", "mean", "popularity")
METRICS = ("ndcg@10", "recall@50")
TEST_SHARE = 0.2  # of the items of a held-out user


def prepared(name: str, fold: int, data: Path) -> Dataset:
    """Prepare a data set with a tenth of its users held out."""
    out = Path("data") / "fold_in" / f"{name}-{fold}"
    if not out.exists():
        options = f"{SETS[name].format(data)} --split users --ratios 90/0/10 --seed {fold} --out {out} -q"
        command = [sys.executable, "-m", "drm_triton", "prepare", *options.split()]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return Dataset.load(out)


def history_and_relevant(held_out: CSR) -> tuple[CSR, CSR]:
    """Split the items of each held-out user into history and relevant items."""
    rows = np.repeat(np.arange(held_out.shape[0]), held_out.degrees())
    hidden = random_keys(1, rows, held_out.indices) < np.uint64(TEST_SHARE * 2**64)
    history, relevant = (
        CSR.from_pairs(rows[chosen], held_out.indices[chosen], held_out.shape) for chosen in (~hidden, hidden)
    )
    return history, relevant


def measure(name: str, fold: int, objective: ObjectiveName, data: Path) -> Row:
    """Measure one fold: two trainings, five methods."""
    dataset = prepared(name, fold, data)
    new_users = np.flatnonzero(dataset.test.degrees())
    history, relevant = history_and_relevant(dataset.test)  # rows of the other users are empty
    both = dataset.train.union(history)
    empty = CSR.empty(both.shape)
    began = time.perf_counter()
    without = DRM(objective=objective, eval_every=0).fit(dataset)
    joined = DRM(objective=objective, eval_every=0).fit(Dataset(both, empty, empty))
    trained = time.perf_counter() - began
    backend, config = without.backend()[0], without.config

    def folded(model: DRM) -> Ranker:
        vectors = fold_in(model.item_factors, history, config, backend)
        return factor_ranker(backend, vectors, model.item_factors, config.score_in_force)

    V = without.item_factors
    rankers = {
        "fold-in": folded(without),
        "trained in": factor_ranker(backend, joined.user_factors, joined.item_factors, config.score_in_force),
        "same items": folded(joined),
        "mean": factor_ranker(backend, mean_direction(V, history), V, config.score_in_force),
        "popularity": popularity_ranker(dataset.train),
    }
    means = {method: evaluate(rank, history, relevant).means for method, rank in rankers.items()}
    median = history.take(new_users[np.argsort(history.degrees()[new_users])[[len(new_users) // 2]]])  # one user
    times = time_in_turns(
        {
            "one": lambda: fold_in(V, median, config, backend),
            "all": lambda: fold_in(V, history.take(new_users), config, backend),
        },
        seconds=2,
        least=3,
    )
    return {
        "set": name, "fold": fold, "objective": objective, "users": len(new_users),
        **{method: {metric: means[method][metric] for metric in METRICS} for method in METHODS},
        "items of the median user": median.nnz, "milliseconds for one": 1e3 * times["one"],
        "users per second": len(new_users) / times["all"], "training seconds": trained,
        "environment": environment(),
    }  # fmt: skip


def table(rows: list[Row]) -> str:
    """Format the means over folds, and the ratio of fold-in to training."""
    lines = [
        "Recommendations to held-out users by fold-in and by training; means over folds of a tenth of the users each.",
        f"{rows[-1]['environment']['processor']}, {rows[-1]['environment']['date'][:10]}; made by "
        "`python -m bench.fold_in`.",
        "",
        "| set | objective | folds | metric | "
        + " | ".join(METHODS)
        + " | fold-in / trained in | same items / trained in |",
        "|---|---|---|---|" + "---|" * (len(METHODS) + 2),
    ]
    for name, objective in dict.fromkeys((row["set"], row["objective"]) for row in rows):
        folds = [row for row in rows if (row["set"], row["objective"]) == (name, objective)]
        for metric in METRICS:
            means = {method: statistics.fmean(row[method][metric] for row in folds) for method in METHODS}
            cells = [f"{means[method]:.4f}" for method in METHODS]
            cells += [f"{means[method] / means['trained in']:.3f}" for method in ("fold-in", "same items")]
            lines.append(f"| {name} | {objective} | {len(folds)} | {metric} | " + " | ".join(cells) + " |")
    for objective in dict.fromkeys(row["objective"] for row in rows):
        keys = ("milliseconds for one", "users per second", "items of the median user")
        own = [row for row in rows if row["objective"] == objective]
        one, many, items = (statistics.median(row[key] for row in own) for key in keys)
        lines += [
            "",
            f"{objective}: one user with {items:.0f} items takes {one:.1f} ms; {many:,.0f} users per second if many "
            f"are folded in at once ({own[-1]['environment']['threads']} threads).",
        ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the real data sets")
    parser.add_argument("--sets", default="lastfm,citeulike")
    parser.add_argument("--folds", default="0,1,2")
    parser.add_argument("--objective", default="softmax")
    args = parser.parse_args()
    file = RESULTS / "fold_in.json"
    rows: list[Any] = json.loads(file.read_text())["rows"] if file.exists() else []
    for name in args.sets.split(","):
        for fold in map(int, args.folds.split(",")):
            rows = [row for row in rows if (row["set"], row["fold"], row["objective"]) != (name, fold, args.objective)]
            rows.append(measure(name, fold, args.objective, args.data))
            rows.sort(key=lambda row: (row["set"], row["objective"], row["fold"]))
            file.write_text(
                json.dumps({"command": "python -m bench.fold_in --data PATH", "rows": rows}, indent=1) + "\n"
            )
            (RESULTS / "fold_in.md").write_text(table(rows))
            print(table(rows), flush=True)


if __name__ == "__main__":
    main()
