"""Cold items from attributes: how well are items without interactions ranked, and by which method?

    python -m bench.features --data PATH [--folds 3] [--models "softmax,DRM dot"]

PATH holds ml-100k/u.data and u.item; ratings of at least 4 are interactions, and the attributes are the genres and the
year of a film. In each fold, a fifth of the films is cold: all their interactions are taken out of the training data.
A fifth of the interactions of the other films is held out too. Three rankings are measured:

    cold    among the cold films only, against all their interactions
    warm    among the other films only, against their held-out interactions: does a method harm them?
    all     among all films, against the held-out interactions and a fifth of those of the cold films. A share of 0.2
            of the relevant films is then cold; the share of cold films in the top 10 should be of that order.

The methods:

    random              the mean of a random ranking
    neighbours          sum of the cosines of the features of a film and those of the user's films, no model
    regress             what drm-triton does: a ridge regression from features to vectors after training, see
                        `drm_triton.ranking.cold`. The methods below differ from it in one thing:
    regress, year linear    the year as one linear feature, not as knots
    regress, by count   films weighted by their number of interactions
    regress, mean length    predicted vectors scaled to the mean length of the learned ones
    regress, no variance    for L2 scores only: without the variance of the prediction
    pulled c            the same, and after each epoch the vectors of films with n interactions move towards their
                        prediction, by c / (c + n): training regularised towards a linear map of the features

Each finished training is a line of results/features.jsonl for each method. The command can be stopped at any time; when
restarted, it skips these trainings. The table is results/features.md.
"""

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray
from torch.nn.functional import normalize

from drm_triton import DRM, Dataset
from drm_triton.bench.record import RESULTS, save_table
from drm_triton.data import features as features_module
from drm_triton.data.csr import CSR
from drm_triton.data.features import features
from drm_triton.data.split import random_keys
from drm_triton.errors import InputError
from drm_triton.models import BPR, IALS
from drm_triton.ranking.cold import regress
from drm_triton.ranking.evaluate import Ranker, evaluate
from drm_triton.recommender import FactorRecommender
from drm_triton.training.state import EpochEnd

TRIALS = RESULTS / "features.jsonl"
COLUMNS = ("cold recall@50", "cold ndcg@10", "warm ndcg@10", "all ndcg@10", "cold in top 10")
COLD_SHARE = HELD_OUT_SHARE = 0.2
PULLS = (1.0, 10.0)
# fmt: off
GENRES = (
    "unknown", "Action", "Adventure", "Animation", "Children", "Comedy", "Crime", "Documentary", "Drama", "Fantasy",
    "Film-Noir", "Horror", "Musical", "Mystery", "Romance", "Sci-Fi", "Thriller", "War", "Western",
)
# fmt: on
MODELS: dict[str, Callable[..., FactorRecommender[Any]]] = {
    "softmax": DRM,
    "DRM dot": lambda **options: DRM(objective="hinge+drm", eta=45, **options),
    "DRM L2": lambda **options: DRM(objective="hinge+drm", eta=45, score="l2", **options),
    "iALS": lambda **options: IALS(**options),
    "BPR": lambda **options: BPR(**options),
}
Row = dict[str, Any]
Vectors = NDArray[np.float64]


class Fold:
    """A cold-item split: a part of the items without interactions, and a part of the other interactions held out."""

    def __init__(self, data: Dataset, number: int) -> None:
        pairs, (M, N) = data.train, data.train.shape
        users = np.repeat(np.arange(M), pairs.degrees())
        self.cold = random_keys(number, np.arange(N), np.zeros(N, np.int64)) < np.uint64(COLD_SHARE * 2**64)
        hidden = random_keys(number + 1000, users, pairs.indices) < np.uint64(HELD_OUT_SHARE * 2**64)
        cold = self.cold[pairs.indices]

        def part(chosen: NDArray[np.bool_]) -> CSR:
            return CSR.from_pairs(users[chosen], pairs.indices[chosen], pairs.shape)

        self.train, self.of_warm, self.of_cold, self.of_all = map(part, (~cold & ~hidden, ~cold & hidden, cold, hidden))
        empty = CSR.empty(pairs.shape)
        self.data = Dataset(self.train, empty, empty, data.users, data.items)
        self.features = features(data.items, self.train.popularity() > 0)

    def metrics(self, scores: Callable[[NDArray[np.int64]], Vectors]) -> Row:
        """Return the metrics of a ranking by scores of users [m] and all items: [m, N]."""
        cold, warm, everything = np.flatnonzero(self.cold), np.flatnonzero(~self.cold), np.arange(len(self.cold))
        tops: list[NDArray[np.int32]] = []

        def among(items: NDArray[np.int64]) -> Ranker:
            def rank(users: NDArray[np.int64], seen: CSR, k: int) -> NDArray[np.int32]:
                found = scores(users)
                found[np.repeat(np.arange(len(users)), seen.degrees()), seen.indices] = -np.inf
                best = items[np.argsort(-found[:, items], 1, kind="stable")[:, :k]].astype(np.int32)
                tops.append(best[:, :10])
                return best

            return rank

        of_cold, of_warm, of_all = (
            evaluate(among(items), self.train, held_out).means
            for items, held_out in ((cold, self.of_cold), (warm, self.of_warm), (everything, self.of_all))
        )
        found = [of_cold["recall@50"], of_cold["ndcg@10"], of_warm["ndcg@10"], of_all["ndcg@10"]]
        return dict(zip(COLUMNS, map(float, [*found, self.cold[tops[-1]].mean()]), strict=True))


def load(folder: Path) -> Dataset:
    """Return the ratings of at least 4, and the genres and years of the films."""
    ratings, films = folder / "ml-100k" / "u.data", folder / "ml-100k" / "u.item"
    for file in (ratings, films):
        if not file.is_file():
            raise InputError(f"{file}: no such file")
    names = ["user", "item", "rating", "timestamp"]
    table = pl.read_csv(ratings, separator="\t", has_header=False, new_columns=names)
    lines = [line.split("|") for line in films.read_text("latin-1").splitlines()]
    items = pl.DataFrame(
        {
            "id": [int(line[0]) for line in lines],
            "year": [int(line[2][-4:]) if line[2] else None for line in lines],
            "genres": [[name for name, flag in zip(GENRES, line[5:], strict=True) if flag == "1"] for line in lines],
        }
    )
    return Dataset.from_frame(table, min_rating=4, ratios=(1, 0, 0)).with_attributes(items)


def predicted(
    fold: Fold, V: Vectors, count_weights: bool = False, mean_length: bool = False, year_linear: bool = False
) -> Vectors:
    """Return V with the vectors of the cold items predicted."""
    X = fold.features
    if year_linear:
        before, features_module.KNOTS = features_module.KNOTS, 2
        X = features(fold.data.items, fold.train.popularity() > 0)
        features_module.KNOTS = before
    counts = fold.train.popularity()
    warm = np.flatnonzero((counts > 0) & (X.getnnz(1) > 0))
    found = regress(X[warm], V[warm], counts[warm].astype(float) if count_weights else None)(X)
    if mean_length:
        lengths = np.linalg.norm(found, axis=1, keepdims=True)
        found *= np.linalg.norm(V[warm], axis=1).mean() / np.maximum(lengths, 1e-30)
    return np.where(fold.cold[:, None], found, V)


METHODS: dict[str, dict[str, bool]] = {
    "regress, year linear": {"year_linear": True},
    "regress, by count": {"count_weights": True},
    "regress, mean length": {"mean_length": True},
}


def pull(fold: Fold, strength: float, unit: bool) -> Callable[[EpochEnd], None]:
    """Return a callback that moves the vectors of items towards their prediction after each epoch."""
    counts = fold.train.popularity()
    warm = np.flatnonzero((counts > 0) & (fold.features.getnnz(1) > 0))
    share = torch.from_numpy(strength / (strength + counts[warm]))[:, None]

    def callback(end: EpochEnd) -> None:
        V: torch.Tensor = end.state.V  # type: ignore[attr-defined]
        learned = V[warm].double()
        found = torch.from_numpy(regress(fold.features[warm], learned.numpy())(fold.features[warm]))
        moved = learned + share * (found - learned)
        V[warm] = (normalize(moved) if unit else moved).float()

    return callback


def trainings(fold: Fold, name: str, strength: float | None) -> dict[str, Row]:
    """Train once; return the metrics of each method."""
    model = MODELS[name](eval_every=0)
    unit = model.score_name == "cosine"
    model.fit(fold.data, [] if strength is None else [pull(fold, strength, unit)])
    U, V = (table.cpu().numpy().astype(np.float64) for table in model.factors(model.tensors))

    def metrics_of(V: Vectors) -> Row:
        length = (V * V).sum(1) if model.score_name == "l2" else 0.0
        return fold.metrics(lambda users: (2.0 if model.score_name == "l2" else 1.0) * (U[users] @ V.T) - length)

    ours = metrics_of(model.item_factors.cpu().numpy().astype(np.float64))
    if strength is not None:
        return {f"pulled {strength:g}": ours}
    methods = METHODS | ({"regress, no variance": {}} if model.score_name == "l2" else {})
    return {"regress": ours} | {name: metrics_of(predicted(fold, V, **methods[name])) for name in methods}


def without_model(fold: Fold) -> dict[str, Row]:
    """Return the metrics of the rankings without a model."""
    X, random = fold.features.astype(np.float64), np.random.default_rng(0)
    profiles = fold.train.to_scipy(np.float64) @ X
    return {
        "random": fold.metrics(lambda users: random.random((len(users), len(fold.cold)))),
        "neighbours": fold.metrics(lambda users: (profiles[users] @ X.T).toarray()),
    }


def finished() -> list[Row]:
    """Return the finished trainings."""
    return [json.loads(line) for line in TRIALS.read_text().splitlines()] if TRIALS.exists() else []


def measure(data: Dataset, models: list[str], number: int) -> None:
    """Measure what is not finished of a fold, and record it."""
    fold = Fold(data, number)
    tasks: dict[tuple[str, str], Callable[[], dict[str, Row]]] = {("none", "random"): partial(without_model, fold)}
    for name in models:
        tasks[name, "regress"] = partial(trainings, fold, name, None)
        if name in ("softmax", "DRM dot", "DRM L2"):
            for strength in PULLS:
                tasks[name, f"pulled {strength:g}"] = partial(trainings, fold, name, strength)
    done = {(row["fold"], row["model"], row["method"]) for row in finished()}
    for (name, first), run in tasks.items():
        if (number, name, first) in done:
            continue
        rows = [{"fold": number, "model": name, "method": method, **row} for method, row in run().items()]
        with open(TRIALS, "a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        print("\n".join(map(json.dumps, rows)), flush=True)


def table(rows: list[Row]) -> str:
    """Return the table: means over the folds."""
    lines = [f"| model | method | {' | '.join(COLUMNS)} | folds |", "|---" * (len(COLUMNS) + 3) + "|"]
    for model, method in dict.fromkeys((row["model"], row["method"]) for row in rows):
        own = [row for row in rows if (row["model"], row["method"]) == (model, method)]
        cells = " | ".join(f"{np.mean([row[name] for row in own]):.4f}" for name in COLUMNS)
        lines.append(f"| {model} | {method} | {cells} | {len(own)} |")
    return "\n".join([*lines, ""])


def main() -> None:
    """Run what is not finished, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--folds", type=int, default=3)
    parser.add_argument("--models", default=",".join(MODELS))
    arguments = parser.parse_args()
    data = load(arguments.data)
    for number in range(arguments.folds):
        measure(data, arguments.models.split(","), number)
    note = (
        "ml-100k, ratings of at least 4; a fifth of the films without interactions; genres and years as attributes. "
        "Means over the folds; bench/features.py describes columns and methods."
    )
    save_table("features", "Cold items", note, table(sorted(finished(), key=lambda row: row["fold"])))


if __name__ == "__main__":
    main()
