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
from drm_triton.experiments.results import Result, Row, text, value
from drm_triton.experiments.stand_in import Data, Labelled
from drm_triton.progress import SILENT, Reporter
from drm_triton.ranking.evaluate import Evaluation, by_activity

METRIC = "ndcg@10"
MODELS = ("warp", "cml", *OURS)  # each DRM and the model with the same score and the hinge alone
GROUPS = 5


def figure3(data: Data, models: Sequence[str], budget: Budget, folder: Path, reporter: Reporter = SILENT) -> Result:
    """Compare models in groups of users, after the trainings of Table 3. See `quality.table3`."""
    comparison = compared(data, models, budget, folder, reporter)
    degrees = data.dataset.train.union(data.dataset.valid).degrees()
    frames = {}
    for model in models:
        if comparison.finals(model):
            frame = comparison.per_user(model, METRIC)
            n_train = pl.Series("n_train", degrees[frame["user"].to_numpy()])
            frames[model] = frame.rename({"value": METRIC}).with_columns(n_train)
    missing = [model for model in models if model not in frames]
    notes = [f"{model} has no result: its trainings failed, see {folder}/outcomes.jsonl." for model in missing]
    what = f"models tuned with {budget.trials} trials, means of {budget.seeds} seeds"
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
    from drm_triton.models import load

    dataset = data.dataset
    seen, frames = dataset.train.union(dataset.valid), {}
    with Labelled(reporter, data.label).step("rank all items for every user", len(runs), "runs") as step:
        for run in runs:
            model = load(run)
            if not model.was_fit_on(dataset):
                raise InputError(f"{run} was not trained on {dataset.path}; give its data set in `dataset`")
            if "test" in model.config.fit_parts:
                raise InputError(f"{run} was fitted on {model.config.fit_on}, so it cannot be measured on test")
            frames[str(run)] = model.evaluate(dataset.test, seen, (10,)).per_user
            step.advance()
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
        for group in by_activity(Evaluation({}, frame), METRIC, GROUPS).iter_rows(named=True):
            low, high = group["min_train"], group["max_train"]
            rows.append(
                {
                    "data": data.label,
                    "interactions": f"{low}" if low == high else f"{low}–{high}",
                    "users": group["users"],
                    "model": model,
                    "ours": group[METRIC],
                }
            )
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
