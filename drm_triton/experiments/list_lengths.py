"""Figure 2 of the paper: the effect of rho, the number of positives in a list, on NDCG@10.

The paper raises rho from 1 to 5 with eta = 15 rho, so that positives, negatives and K = rho grow together. Here this is
also separated: rho with a fixed eta, and eta with rho = 1. All trainings score about the same number of items, and so
take about the same time: the epochs are chosen for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from drm_triton.data.dataset import Dataset
from drm_triton.experiments.pictures import list_curves
from drm_triton.experiments.protocol import Comparison, Plan, Task
from drm_triton.experiments.published import CLAIMS
from drm_triton.experiments.quality import Budget
from drm_triton.experiments.results import Result, Row, means_of, text, value
from drm_triton.experiments.stand_in import Data, Labelled
from drm_triton.experiments.tables import number
from drm_triton.models.configs import config_class
from drm_triton.progress import SILENT, Reporter

RHOS = (1, 2, 3, 4, 5)
PER_POSITIVE = 15  # negatives, in the paper
ETA = PER_POSITIVE * RHOS[-1]
SCORES = ("dot", "l2")
# The paper sets lambda = 1 and does not state the others. These are values of its search space.
OPTIONS: dict[str, Any] = {
    "objective": "hinge+drm", "schedule": "constant", "factors": 64, "lr": 0.1, "tau": 1.0, "lambda": 1.0
}  # fmt: skip
# What varies: its name, the lists (rho, eta), and which of the two is on the x axis.
COUPLED = "rho, eta = 15 rho"
WAYS: tuple[tuple[str, tuple[tuple[int, int], ...], int], ...] = (
    (COUPLED, tuple((rho, PER_POSITIVE * rho) for rho in RHOS), 0),
    (f"rho, eta = {ETA}", tuple((rho, ETA) for rho in RHOS), 0),
    ("eta, rho = 1", tuple((1, PER_POSITIVE * rho) for rho in RHOS), 1),
)


def equal_epochs(rho: int, eta: int, scored: float) -> int:
    """Return the number of epochs in which `scored` items are scored for each positive.

    An epoch has 1 / rho lists for each positive, and a list has rho + eta items.

    Examples
    --------
    >>> equal_epochs(1, 15, scored=320), equal_epochs(5, 75, scored=320), equal_epochs(1, 75, scored=320)
    (20, 20, 4)
    """
    return max(1, round(scored * rho / (rho + eta)))


class Sweep(Comparison):
    """Trainings with all lists, both scores and several seeds, each measured on test. Nothing is tuned."""

    def __init__(self, path: Path, dataset: Dataset, seeds: int, epochs: int) -> None:
        self.epochs = epochs
        models = tuple(f"drm-{score}" for score in SCORES)
        super().__init__(path, dataset, Plan(models, "paper", 1, seeds, "ndcg@10"))

    def tuning_tasks(self) -> list[Task]:
        """Return no tasks."""
        return []

    def final_tasks(self) -> list[Task]:
        """Return one task for each list, score and seed."""
        lists = dict.fromkeys(one for _, lists, _ in WAYS for one in lists)
        return [
            self._task(_name(score, *one), "test", self._options(score, *one), seed)
            for score in SCORES
            for one in lists
            for seed in range(1, self.plan.seeds + 1)
        ]

    def _options(self, score: str, rho: int, eta: int) -> dict[str, Any]:
        epochs = equal_epochs(rho, eta, self.epochs * (1 + PER_POSITIVE))
        config = config_class("drm").from_mapping(
            {**OPTIONS, "score": score, "rho": rho, "eta": eta, "epochs": epochs, "monitor": self.plan.metric}
        )
        return {"model": "drm", **config.to_dict()}


def figure2(data: Data, budget: Budget, folder: Path, reporter: Reporter = SILENT) -> Result:
    """Measure NDCG@10 for lists with one to five positives.

    Parameters
    ----------
    data : the data set
    budget : `seeds`, `workers` and `epochs`, the number of epochs with eta = 15 rho, are used
    folder : directory of the trainings; finished ones are not repeated
    reporter : shows the progress
    """
    sweep = Sweep(folder, data.dataset, budget.seeds, budget.epochs or 60)
    sweep.run(budget.workers, Labelled(reporter, data.label))
    rows = [
        _row(sweep, data, way, axis, score, rho, eta)
        for way, lists, axis in WAYS
        for score in SCORES
        for rho, eta in lists
    ]
    sets, claim = CLAIMS["figure2"]
    notes = [
        *data.notes,
        f"The paper prints a picture only, of {' and '.join(sets)}, so there is no published figure to subtract. "
        f"Its claim: {claim}.",
        *(_found(rows, score) for score in SCORES),
        "The paper states lambda = 1 only. Ours: "
        + ", ".join(f"{option} {given}" for option, given in OPTIONS.items() if option != "objective")
        + ". All trainings score about as many items.",
    ]
    return Result(
        "figure2",
        f"effect of rho and eta on test NDCG@10, {means_of(budget.seeds)}",
        [data],
        {
            "data": text("data"),
            "vary": text("vary"),
            "score": text("score"),
            "rho": text("rho"),
            "eta": text("eta"),
            "epochs": text("epochs"),
            "ndcg@10": value("ours"),
            "sd": value("sd"),
            "published": lambda row: "picture",
        },
        rows,
        notes,
        {"seeds": budget.seeds, "epochs": sweep.epochs, "options": OPTIONS},
        budget.quick,
        lambda place, title: list_curves(rows, title, place),
    )


def _row(sweep: Sweep, data: Data, way: str, axis: int, score: str, rho: int, eta: int) -> Row:
    finals = sweep.finals(_name(score, rho, eta))
    found = [outcome["ndcg@10"] for outcome in finals]
    return {
        "data": data.label,
        "vary": way,
        "along": ("rho, positives in a list", "eta, negatives in a list")[axis],
        "x": (rho, eta)[axis],
        "score": score,
        "rho": rho,
        "eta": eta,
        "epochs": sweep._options(score, rho, eta)["epochs"],
        "ours": float(np.mean(found)) if found else None,
        "sd": float(np.std(found, ddof=1)) if len(found) > 1 else None,
    }


def _name(score: str, rho: int, eta: int) -> str:
    return f"{score}-rho{rho}-eta{eta}"


def _found(rows: Sequence[Row], score: str) -> str:
    """Return a sentence on what we find: the best list of each way."""
    parts = []
    for way, _, axis in WAYS:
        line = [row for row in rows if row["vary"] == way and row["score"] == score and row["ours"] is not None]
        if line:
            best, last = max(line, key=lambda row: row["ours"]), line[-1]
            name = ("rho", "eta")[axis]
            parts.append(
                f"[{way}] best at {name} {best['x']} ({number(best['ours'])}), {number(last['ours'])} at {last['x']}"
            )
    return f"Ours, {score}: {'; '.join(parts) or 'no training is finished'}."
