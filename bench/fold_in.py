"""Is fold-in as good as training? Persons who were held out, from part of their items.

    python -m bench.fold_in --data PATH [--sets lastfm,citeulike] [--folds 0,1,2] [--score dot]

A tenth of the users is held out; four fifths of their items are their history, the rest is ranked for. Compared are
    fold-in     the model is trained on the other users, and the persons are folded in
    trained in  the model is trained on the histories too, and knows the persons as users
    same items  fold-in to the item factors of `trained in`: what fold-in loses by itself, apart from what item factors
                lose that have not met these persons' histories
    mean        the mean of the factors of the history
    popularity  the items with the most interactions

Cost of a fold-in: steps x lists x (4 n d + 8 n^2 + 30 K n) operations, as many as training spends on the lists.
Folds differ in who is held out. Each finished one is kept in results/fold_in.json; the table is results/fold_in.md.
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
from drm_triton.bench.record import RESULTS, Row, environment, race
from drm_triton.data.csr import CSR
from drm_triton.data.split import random_keys
from drm_triton.names import Score
from drm_triton.ranking.evaluate import Ranker, evaluate, factor_ranker, popularity_ranker
from drm_triton.ranking.fold_in import fold_in, mean_direction

WAYS = ("fold-in", "trained in", "same items", "mean", "popularity")
METRICS = ("ndcg@10", "recall@50")
TEST_SHARE = 0.2


def prepared(name: str, fold: int, data: Path) -> Dataset:
    """The set with a tenth of its users held out."""
    out = Path("data") / "fold_in" / f"{name}-{fold}"
    if not out.exists():
        options = f"{SETS[name].format(data)} --split users --ratios 90/0/10 --seed {fold} --out {out} -q"
        command = [sys.executable, "-m", "drm_triton", "prepare", *options.split()]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return Dataset.load(out)


def halves(held_out: CSR) -> tuple[CSR, CSR]:
    """Histories and what is to be found, of each person."""
    rows = np.repeat(np.arange(held_out.shape[0]), held_out.degrees())
    hidden = random_keys(1, rows, held_out.indices) < np.uint64(TEST_SHARE * 2**64)
    known, found = (CSR.from_pairs(rows[part], held_out.indices[part], held_out.shape) for part in (~hidden, hidden))
    return known, found


def measure(name: str, fold: int, score: Score, data: Path) -> Row:
    """One fold: two trainings, five ways to rank."""
    dataset = prepared(name, fold, data)
    persons = np.flatnonzero(dataset.test.degrees())
    history, hidden = halves(dataset.test)  # rows of users who train are empty in both
    both = dataset.train.union(history)
    empty = CSR.empty(both.shape)
    began = time.perf_counter()
    without = DRM(score=score, eval_every=0).fit(dataset)
    joined = DRM(score=score, eval_every=0).fit(Dataset(both, empty, empty))
    trained = time.perf_counter() - began
    ops, config = without.backend()[0], without.config

    def folded(model: DRM) -> Ranker:
        vectors = fold_in(model.item_factors, history, config, ops)
        return factor_ranker(ops, vectors, model.item_factors, config.score)

    V = without.item_factors
    rankers = {
        "fold-in": folded(without),
        "trained in": factor_ranker(ops, joined.user_factors, joined.item_factors, config.score),
        "same items": folded(joined),
        "mean": factor_ranker(ops, mean_direction(V, history), V, config.score),
        "popularity": popularity_ranker(dataset.train),
    }
    means = {way: evaluate(rank, history, hidden).means for way, rank in rankers.items()}
    one = history.take(persons[np.argsort(history.degrees()[persons])[[len(persons) // 2]]])  # the median person
    times = race(
        {
            "one": lambda: fold_in(V, one, config, ops),
            "all": lambda: fold_in(V, history.take(persons), config, ops),
        },
        seconds=2,
        least=3,
    )
    return {
        "set": name, "fold": fold, "score": score, "persons": len(persons),
        **{way: {metric: means[way][metric] for metric in METRICS} for way in WAYS},
        "items of the median person": one.nnz, "milliseconds for one": 1e3 * times["one"],
        "persons per second": len(persons) / times["all"], "training seconds": trained,
        "environment": environment(),
    }  # fmt: skip


def table(rows: list[Row]) -> str:
    """Means over folds, and fold-in as a share of training in."""
    lines = [
        "Held-out persons ranked for by fold-in and by training; means over folds of a tenth of the users each.",
        f"{rows[-1]['environment']['processor']}, {rows[-1]['environment']['date'][:10]}; made by "
        "`python -m bench.fold_in`.",
        "",
        "| set | score | folds | metric | " + " | ".join(WAYS) + " | fold-in / trained in | same items / trained in |",
        "|---|---|---|---|" + "---|" * (len(WAYS) + 2),
    ]
    for name, score in dict.fromkeys((row["set"], row["score"]) for row in rows):
        folds = [row for row in rows if (row["set"], row["score"]) == (name, score)]
        for metric in METRICS:
            means = {way: statistics.fmean(row[way][metric] for row in folds) for way in WAYS}
            cells = [f"{means[way]:.4f}" for way in WAYS]
            cells += [f"{means[way] / means['trained in']:.3f}" for way in ("fold-in", "same items")]
            lines.append(f"| {name} | {score} | {len(folds)} | {metric} | " + " | ".join(cells) + " |")
    one, many = (statistics.median(row[key] for row in rows) for key in ("milliseconds for one", "persons per second"))
    items = statistics.median(row["items of the median person"] for row in rows)
    load = statistics.median(row["environment"]["load"] or 0 for row in rows)
    threads = rows[-1]["environment"]["threads"]
    lines += [
        "",
        f"One person of {items:.0f} items: {one:.1f} ms. Many together: {many:,.0f} persons a second "
        f"({threads} threads, while the machine had a load of {load:.1f}).",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the real data sets")
    parser.add_argument("--sets", default="lastfm,citeulike")
    parser.add_argument("--folds", default="0,1,2")
    parser.add_argument("--score", default="dot")
    args = parser.parse_args()
    file = RESULTS / "fold_in.json"
    rows: list[Any] = json.loads(file.read_text())["rows"] if file.exists() else []
    for name in args.sets.split(","):
        for fold in map(int, args.folds.split(",")):
            rows = [row for row in rows if (row["set"], row["fold"], row["score"]) != (name, fold, args.score)]
            rows.append(measure(name, fold, args.score, args.data))
            rows.sort(key=lambda row: (row["set"], row["score"], row["fold"]))
            file.write_text(
                json.dumps({"command": "python -m bench.fold_in --data PATH", "rows": rows}, indent=1) + "\n"
            )
            (RESULTS / "fold_in.md").write_text(table(rows))
            print(table(rows), flush=True)


if __name__ == "__main__":
    main()
