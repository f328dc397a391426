"""Figure 3 of the paper: NDCG@10 in groups of users by their number of training interactions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from drm_triton.errors import InputError
from drm_triton.experiments.pictures import group_bars
from drm_triton.experiments.published import CLAIMS
from drm_triton.experiments.quality import OURS, Budget, compared
from drm_triton.experiments.results import Result, Row, means_of, text, value
from drm_triton.experiments.stand_in import Data, Labelled
from drm_triton.progress import SILENT, Reporter
from drm_triton.ranking.evaluate import Evaluation, by_activity
from drm_triton.ranking.held_out import HeldOut

METRIC = "ndcg@10"
MODELS = ("warp", "cml", *OURS)  # each DRM and the model with the same score and the hinge alone
GROUPS = 5


def figure3(data: Data, models: Sequence[str], budget: Budget, folder: Path, reporter: Reporter = SILENT) -> Result:
    """Compare models in groups of users, after the trainings of Table 3. See `quality.table3`."""
    comparison = compared(data, models, budget, folder, reporter)
    frames = {model: comparison.per_user(model, [METRIC]) for model in models if comparison.finals(model)}
    missing = [model for model in models if model not in frames]
    notes = [f"{model} has no result: its trainings failed, see {folder}/outcomes.jsonl." for model in missing]
    what = f"models tuned with {budget.trials} trials, {means_of(budget.seeds)}"
    settings = {"trials": budget.trials, "seeds": budget.seeds, "epochs": budget.epochs}
    return _result(data, frames, what, notes, settings, budget.quick)


def figure3_of_runs(data: Data, runs: Sequence[Path], reporter: Reporter = SILENT) -> Result:
    """Compare given runs in groups of users.

    Parameters
    ----------
    data : the data set that they were trained on
    runs : run directories or saved models
    reporter : shows the progress
    """
    labelled, frames = Labelled(reporter, data.label), {}
    for run in runs:
        held_out = HeldOut.of_run(run, "test", data.dataset.path)
        frames[str(run)] = held_out.evaluate((10,), reporter=labelled, step=f"{run}: rank all items").per_user
    return _result(data, frames, "given runs", [], {"runs": [str(run) for run in runs]}, False)


def _result(
    data: Data,
    frames: Mapping[str, pl.DataFrame],
    what: str,
    notes: list[str],
    settings: dict[str, Any],
    quick: bool,
) -> Result:
    """Make the figure of frames with a row for each user, by model: columns n_train and METRIC."""
    rows: list[Row] = []
    for model, frame in frames.items():
        for group in by_activity(Evaluation({}, frame, {}), METRIC, GROUPS).iter_rows(named=True):
            low, high = group["min_train"], group["max_train"]
            span = f"{low}" if low == high else f"{low}–{high}"
            common = {"data": data.label, "least": low, "interactions": span, "users": group["users"]}
            rows.append({**common, "model": model, "ours": group[METRIC]})
    rows.sort(key=lambda row: int(row["least"]))  # models side by side in each group; the sort is stable
    if not rows:
        raise InputError("figure3: no model has a result, so there is nothing to show; see the notes of the trainings")
    sets, claim = CLAIMS["figure3"]
    notes = [
        *data.notes,
        *notes,
        f"The paper prints a picture only, of {' and '.join(sets)}, so there is no published figure to subtract. "
        f"Its claim: {claim}.",
        *_found(rows),
        "The paper does not state the limits of its groups. Ours have about equal numbers of users.",
    ]
    return Result(
        "figure3",
        f"test NDCG@10 by training interactions of the user, {what}",
        [data],
        {
            "data": text("data"),
            "interactions": text("interactions"),
            "users": text("users"),
            "model": text("model"),
            "ndcg@10": value("ours"),
            "published": lambda row: "picture",
        },
        rows,
        notes,
        settings,
        quick,
        lambda place, title: group_bars(rows, title, place),
    )


def _found(rows: Sequence[Row]) -> list[str]:
    """Return a sentence on each DRM: in how many groups it is above the best other model."""
    groups = list(dict.fromkeys(row["interactions"] for row in rows))
    values = {(row["interactions"], row["model"]): row["ours"] for row in rows}
    models = {row["model"] for row in rows}
    sentences = []
    for own in (model for model in OURS if model in models and models - set(OURS)):
        rival = {group: max(values[group, model] for model in models - set(OURS)) for group in groups}
        ahead = [group for group in groups if values[group, own] > rival[group]]
        sentences.append(f"Ours: {own} is above the best baseline in {len(ahead)} of {len(groups)} groups.")
    return sentences
