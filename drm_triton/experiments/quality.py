"""Tables 3 and 4 of the paper: test metrics of tuned models beside the published ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from drm_triton.experiments import published
from drm_triton.experiments.entries import ENTRIES
from drm_triton.experiments.pictures import beside_published
from drm_triton.experiments.protocol import Comparison, Plan
from drm_triton.experiments.results import Result, Row, difference, means_of, text, value
from drm_triton.experiments.significance import welch
from drm_triton.experiments.stand_in import Data, Labelled
from drm_triton.experiments.tables import number, p_text
from drm_triton.progress import SILENT, Reporter

METRICS = (*published.METRICS, "map@10")
TABLE_4 = ("cml", "drm-alone-l2", "drm-l2")
OURS = ("drm-dot", "drm-l2")
MAP_NOTE = "MAP@10 of the paper divides by K, so it stands beside map_k@10; map@10 divides by min(K, held-out items)."
PROTOCOL = (
    MAP_NOTE,
    "The paper does not publish its split into train, valid and test. Ours is another random one.",
)


@dataclass(frozen=True)
class Budget:
    """How much is trained.

    Attributes
    ----------
    trials : number of random points of the search space for each model
    seeds : number of final trainings
    epochs : number of epochs, at most, of each training; None for the default of the model
    workers : number of processes; None for all cores
    quick : whether it is only a first look
    """

    trials: int | None = None
    seeds: int = 5
    epochs: int | None = None
    workers: int | None = None
    quick: bool = False


def compared(data: Data, models: Sequence[str], budget: Budget, folder: Path, reporter: Reporter) -> Comparison:
    """Run the comparison of some models in the paper's search space, or what is left of it."""
    fixed = {} if budget.epochs is None else {"epochs": budget.epochs}
    plan = Plan(tuple(models), "paper", budget.trials, budget.seeds, fixed=fixed)
    comparison = Comparison(folder, data.dataset, plan)
    comparison.run(budget.workers, Labelled(reporter, data.label))
    return comparison


def table3(data: Data, models: Sequence[str], budget: Budget, folder: Path, reporter: Reporter = SILENT) -> Result:
    """Compare the eight baselines of the paper and DRM with both scores.

    Parameters
    ----------
    data : the data set
    models : names of entries
    budget : how much is trained
    folder : directory of the comparison; finished trainings are not repeated
    reporter : shows the progress
    """
    comparison = compared(data, models, budget, folder, reporter)
    rows = quality_rows(comparison, data)
    left_out = [model for model in published.MODELS if model not in models]
    notes = [f"Not trained here: {', '.join(left_out)}."] if left_out else []
    notes += [sentence for metric in METRICS if (sentence := _best_against_best(comparison, metric))]
    if data.paper in ("ml-20m", "melon") and "sqlrank" in models:
        notes.append("The paper has no figures of sqlrank on this data set.")
    return _result("table3", "test metrics of tuned models", comparison, data, budget, rows, notes)


def table4(data: Data, budget: Budget, folder: Path, reporter: Reporter = SILENT) -> Result:
    """Compare the hinge alone (CML), DRM alone and both together, with L2 scores. See `table3`."""
    comparison = compared(data, TABLE_4, budget, folder, reporter)
    rows = quality_rows(comparison, data)
    notes = [] if data.paper == "sketchfab" else ["The paper has this table for SketchFab only."]
    title = "the hinge alone (cml), DRM alone and both, L2 scores"
    return _result("table4", title, comparison, data, budget, rows, notes)


def quality_rows(comparison: Comparison, data: Data) -> list[Row]:
    """Return one row for each metric and model, with ours and the published value or None."""
    rows: list[Row] = []
    for metric in METRICS:
        for model in comparison.plan.models:
            found = [outcome[metric] for outcome in comparison.finals(model)]
            row: dict[str, Any] = {"data": data.label, "metric": metric, "model": model, "seeds": len(found)}
            row["ours"] = float(np.mean(found)) if found else None
            row["sd"] = float(np.std(found, ddof=1)) if len(found) > 1 else None
            rows.append({**row, "published": published.quality(data.paper, model).get(metric)})
    return rows


def _result(
    what: str, title: str, comparison: Comparison, data: Data, budget: Budget, rows: list[Row], notes: list[str]
) -> Result:
    plan = comparison.plan
    notes = [*data.notes, *notes, *_failures(comparison), *PROTOCOL, _budget_note(plan.models, budget)]
    options = {model: comparison.best_options(model) for model in plan.models}
    return Result(
        what,
        f"{title}, {means_of(plan.seeds)}",
        [data],
        {
            "data": text("data"),
            "metric": text("metric"),
            "model": text("model"),
            "ours": value("ours"),
            "sd": value("sd"),
            "published": value("published"),
            "difference": difference(),
        },
        rows,
        notes,
        {"trials": plan.trials, "seeds": plan.seeds, "epochs": budget.epochs, "options": options},
        budget.quick,
        lambda place, heading: beside_published(rows, heading, place),
    )


def _best_against_best(comparison: Comparison, metric: str) -> str | None:
    """Return a sentence on the better DRM and the best baseline, or None if there are not both."""
    values = {model: [one[metric] for one in comparison.finals(model)] for model in comparison.plan.models}
    means = {model: float(np.mean(found)) for model, found in values.items() if found}
    ours = max((model for model in means if model in OURS), key=means.__getitem__, default=None)
    theirs = max((model for model in means if model not in OURS), key=means.__getitem__, default=None)
    if ours is None or theirs is None:
        return None
    test = welch(values[ours], values[theirs])
    p = f"p {p_text(test.p)}" if test is not None else "no test: one seed, or no randomness"
    return (
        f"{metric}: {ours} {number(means[ours])}, best baseline {theirs} {number(means[theirs])} "
        f"(Welch's t-test over seeds: {p})."
    )


def _failures(comparison: Comparison) -> list[str]:
    """Return a note on each model without a finished training."""
    notes = []
    for model in comparison.plan.models:
        if not comparison.finals(model):
            failed = [one for one in comparison.outcomes if one["model"] == model and one["status"] == "failed"]
            reason = failed[-1]["error"] if failed else "no training is finished"
            notes.append(f"{model} has no result: {reason}")
    return notes


def _budget_note(models: Sequence[str], budget: Budget) -> str:
    sizes = [int(np.prod([len(values) for values in ENTRIES[model].paper.values()])) for model in models]
    epochs = f"at most {budget.epochs} epochs" if budget.epochs else "at most the default number of epochs"
    points = "all" if budget.trials is None else f"{budget.trials} random"
    return (
        f"Budget: {points} of the {min(sizes):,} to {max(sizes):,} points of the paper's search space for each model, "
        f"chosen by recall@50 on validation; {epochs}. The paper searches all points and does not state its epochs."
    )
