"""An update of a model compared with a training from scratch on the same interactions.

    python -m bench.update --data PATH [--sets movietweetings,amazon,ml-100k] [--seeds 0,1,2] [--objective softmax]

Interactions are ordered by time. The old model is trained on the first 90 %, without users and items that come later.
The next 5 % are new. All trainings leave out a random tenth of these 95 %, the part `held out`. The last 5 %, the part
`next`, come after everything that was trained on. Both parts are ranked over the whole catalogue.
    scratch     train on old and new interactions
    update      train on from the old run, as `drm-triton train --from` does, with its factors and Adagrad sums
    saved       the same from a model that was saved without Adagrad sums
    mean items  like update, but new items start at the mean of their users
    zero items  like update, but new items start at 0
    small rate  like update, but the learning rate is that of the last epochs of the training
    old         the old factors, and new users and items folded in: an update before its first epoch

Seconds are those of the processor, for the whole of `fit` or `partial_fit` without the files of a run. A finished
training is a line of results/update.jsonl; a restarted command skips it. The table is results/update.md.
"""

import argparse
import dataclasses
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from torch.nn.functional import normalize

from drm_triton import DRM, Dataset, atomic
from drm_triton.bench.record import RESULTS, Row, environment
from drm_triton.data.csr import CSR
from drm_triton.data.split import random_keys
from drm_triton.ranking.evaluate import evaluate
from drm_triton.ranking.fold_in import mean_direction
from drm_triton.recommender import Tensors
from drm_triton.training.state import State
from drm_triton.training.warm_start import Known, unknown_rows, update_epochs, users_of

ROWS = RESULTS / "update.jsonl"
FILES = {
    "movietweetings": ("movietweetings-100k/ratings.dat", "::"),
    "amazon": ("amazon-hin/user_item.dat", "\t"),
    "ml-100k": ("ml-100k/u.data", "\t"),
}
OLD, NEW = 0.90, 0.95  # ends of the old and the new interactions
HELD_OUT = 0.1
METHODS = ("scratch", "update", "saved", "mean items", "zero items", "small rate", "old")
PARTS = ("held out", "next", "new users", "new items")
METRICS = ("ndcg@10", "recall@50")


@dataclasses.dataclass(frozen=True)
class Timeline:
    """A data set in time.

    Attributes
    ----------
    old, both : the old interactions, and the old and the new ones
    parts : CSR of the codes of `both`, what is ranked: by name of PARTS
    """

    old: Dataset
    both: Dataset
    parts: dict[str, CSR]


class MeanItems(DRM):
    """DRM whose updates start new items at the mean of their users."""

    def updated_state(self, old: Tensors, known: Known, fit: CSR) -> State:
        """Return the state before the first epoch of an update."""
        state = super().updated_state(old, known, fit)
        items = unknown_rows(known.items, fit.popularity())
        state.V[items] = normalize(mean_direction(state.U, users_of(items, fit)))
        return state


class ZeroItems(DRM):
    """DRM whose updates start new items at 0."""

    def updated_state(self, old: Tensors, known: Known, fit: CSR) -> State:
        """Return the state before the first epoch of an update."""
        state = super().updated_state(old, known, fit)
        state.V[unknown_rows(known.items, fit.popularity())] = 0
        return state


class OldFactors(DRM):
    """DRM whose updates do not change a factor."""

    def train(self, stored: Any, *others: Any, **named: Any) -> State:
        """Return the start of an update as it is."""
        return State.of_checkpoint(*stored)


def read(name: str, data: Path) -> Timeline:
    """Read a data set and divide it by time."""
    file, separator = FILES[name]
    lines = [line.split(separator) for line in (data / file).read_text().splitlines()]
    frame = pl.DataFrame({"user": [int(r[0]) for r in lines], "item": [int(r[1]) for r in lines]})
    frame = frame.with_columns(time=pl.Series([int(r[3]) for r in lines])).unique(["user", "item"], keep="first")
    frame = frame.sort("time", "user", "item")
    place = pl.int_range(pl.len()) / pl.len()
    keys = random_keys(7, frame["user"].to_numpy(), frame["item"].to_numpy())
    frame = frame.with_columns(place.alias("place"), hidden=pl.Series(keys < np.uint64(HELD_OUT * 2**64)))
    past, shown = pl.col("place") < NEW, ~pl.col("hidden")
    old, both = (Dataset.of(frame.filter(pl.col("place") < end, shown).select("user", "item")) for end in (OLD, NEW))
    held_out, later = (_encoded(frame.filter(rows), both) for rows in (past & ~shown, ~past))
    known, after = Known.of(old, both), held_out.union(later)
    parts = {
        "held out": held_out,
        "next": later,
        "new users": _filtered(after, rows=known.users < 0),
        "new items": _filtered(after, columns=known.items < 0),
    }
    return Timeline(old, both, parts)


def _encoded(frame: pl.DataFrame, data: Dataset) -> CSR:
    """Return the interactions with known users and items by code."""
    known = frame.filter(pl.col("user").is_in(data.user_ids.implode()), pl.col("item").is_in(data.item_ids.implode()))
    keys = data.encode_users(known["user"]).astype(np.int64) * data.n_items + data.encode_items(known["item"])
    return CSR.from_keys(np.unique(keys), data.train.shape)


def _filtered(matrix: CSR, rows: Any = None, columns: Any = None) -> CSR:
    users = np.repeat(np.arange(matrix.shape[0]), matrix.degrees())
    chosen = rows[users] if columns is None else columns[matrix.indices]
    return CSR.from_pairs(users[chosen], matrix.indices[chosen], matrix.shape)


def run_seed(timeline: Timeline, missing: list[str], options: dict[str, Any], save: Callable[[Row], None]) -> None:
    """Train the old model, and run the methods that are missing."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        DRM(**options).fit(timeline.old, run=place / "old")
        DRM.load(place / "old").save(place / "saved")

        def updated(kind: type[DRM], source: str = "old") -> DRM:
            return kind.load(place / source).partial_fit(timeline.both)

        methods: dict[str, Callable[[], DRM]] = {
            "scratch": lambda: DRM(**options).fit(timeline.both),
            "update": lambda: updated(DRM),
            "saved": lambda: updated(DRM, "saved"),
            "mean items": lambda: updated(MeanItems),
            "zero items": lambda: updated(ZeroItems),
            "small rate": lambda: _with_small_rate(DRM.load(place / "old")).partial_fit(timeline.both),
            "old": lambda: OldFactors.load(place / "old").partial_fit(timeline.both),
        }
        for method in missing:
            wall, processor = time.perf_counter(), time.process_time()
            model = methods[method]()
            seconds = {
                "processor seconds": time.process_time() - processor,
                "wall seconds": time.perf_counter() - wall,
            }
            save({"method": method, **seconds, **measured(model, timeline)})


def _with_small_rate(model: DRM) -> DRM:
    config = model.config
    return model.set_params(lr=config.lr * update_epochs(config, None) / config.epochs)


def measured(model: DRM, timeline: Timeline) -> Row:
    """Rank for every user that has one interaction at least."""
    found = {
        part: evaluate(model.ranker(), timeline.both.train, relevant, min_train=1)
        for part, relevant in timeline.parts.items()
        if relevant.nnz
    }
    return {part: {metric: one.means[metric] for metric in METRICS} for part, one in found.items()}


def table(rows: list[Row], sizes: dict[str, str]) -> str:
    """Format the means over seeds, and their ratios to a training from scratch."""
    last = rows[-1]["environment"]
    lines = [
        "An update compared with a training from scratch on the same interactions; means over seeds, and in brackets "
        "their ratio to scratch.",
        f"{last['processor']}, {last['date'][:10]}; made by `python -m bench.update`, which describes methods and "
        "parts.",
    ]
    for name, objective in dict.fromkeys((row["set"], row["objective"]) for row in rows):
        chosen = [row for row in rows if (row["set"], row["objective"]) == (name, objective)]
        of = {method: [row for row in chosen if row["method"] == method] for method in METHODS}
        lines += [
            "",
            f"**{name}, {objective}**: {sizes[name]}.",
            "",
            "| method | seeds | processor time | " + " | ".join(f"{p} {m}" for p in PARTS for m in METRICS) + " |",
            "|---|---|---|" + "---|" * (len(PARTS) * len(METRICS)),
        ]
        for method, own in of.items():
            if own and of["scratch"]:
                cells = [_cell([_seconds(row) for row in own], [_seconds(row) for row in of["scratch"]], "{:.1f} s")]
                cells += [
                    _cell([row[p][m] for row in own], [row[p][m] for row in of["scratch"]], "{:.4f}")
                    if p in own[0]
                    else "-"
                    for p in PARTS
                    for m in METRICS
                ]
                lines.append(f"| {method} | {len(own)} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _seconds(row: Row) -> float:
    return float(row["processor seconds"])


def _cell(values: list[float], reference: list[float], form: str) -> str:
    """Return a mean and its ratio to another. Both are 0 if a part is empty."""
    mean, other = statistics.fmean(values), statistics.fmean(reference)
    return f"{form.format(mean)} ({mean / other:.3f})" if other else "-"


def main() -> None:
    """Run what is missing, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the real data sets")
    parser.add_argument("--sets", default=",".join(FILES))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--objective", default="softmax")
    args = parser.parse_args()
    rows: list[Row] = [json.loads(line) for line in ROWS.read_text().splitlines()] if ROWS.exists() else []
    timelines = {name: read(name, args.data) for name in FILES}
    for seed in map(int, args.seeds.split(",")):
        for name in args.sets.split(","):
            identity = {"set": name, "objective": args.objective, "seed": seed}

            def save(row: Row, identity: Row = identity) -> None:
                rows.append({**identity, **row, "environment": environment()})
                atomic.write_text(ROWS, "".join(json.dumps(row) + "\n" for row in rows))
                print({key: value for key, value in rows[-1].items() if key != "environment"}, flush=True)

            done = [row["method"] for row in rows if identity.items() <= row.items()]
            missing = [method for method in METHODS if method not in done]
            if missing:
                options = {"objective": args.objective, "seed": seed, "eval_every": 0}
                DRM(**options).warm_up()
                run_seed(timelines[name], missing, options, save)
    sizes = {
        name: f"{one.old.train.nnz:,} old interactions, {one.both.train.nnz - one.old.train.nnz:,} new ones, "
        f"{one.both.n_users - one.old.n_users:,} new users, {one.both.n_items - one.old.n_items:,} new items; "
        + ", ".join(f"{part} {one.parts[part].nnz:,}" for part in PARTS)
        for name, one in timelines.items()
    }
    atomic.write_text(RESULTS / "update.md", table(rows, sizes))


if __name__ == "__main__":
    main()
