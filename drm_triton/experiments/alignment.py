"""Table 5 of the paper: correlation of the training loss and ranking metrics over epochs.

Each of four objectives is trained in one run per seed. The metrics on the training part are measured after each epoch,
with all items ranked and none excluded. The result is Pearson's correlation over all epochs except the first two, as in
the paper, with a constant learning rate and random initial factors, averaged over the seeds; -1 is best. The learning
rate is small enough that training does not converge before the last epoch. With a rate of .05 the metrics on the
training part are constant after five epochs, so that a correlation with them is meaningless.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from drm_triton import atomic
from drm_triton.config import TrainConfig
from drm_triton.data.dataset import CSR, Dataset
from drm_triton.errors import DrmError, InputError
from drm_triton.experiments.published import CORRELATED, CORRELATIONS
from drm_triton.experiments.quality import MAP_NOTE, Budget
from drm_triton.experiments.results import Result, Row, difference, means_of, text, value
from drm_triton.experiments.stand_in import Data, Labelled
from drm_triton.model import DRM
from drm_triton.progress import SILENT, Reporter
from drm_triton.ranking.evaluate import evaluate, factor_ranker, measurable
from drm_triton.training.state import EpochEnd

METRICS = ("map_k@10", "ndcg@10", "map@10")
MEASURED = tuple(f"{part} {metric}" for part in ("train", "valid") for metric in METRICS)
SKIPPED = 2  # first epochs, which the correlation leaves out
OPTIONS = {"schedule": "constant", "init": "normal", "lr": 0.02, "rho": 3}
ETA = 45  # 15 rho, as in the paper, whatever the catalogue
FILE = "correlations.jsonl"  # one line for each finished training


def correlations(data: Dataset, objective: str, epochs: int, seed: int) -> dict[str, float | None]:
    """Train once; return the correlations of the loss with each of MEASURED.

    A correlation is None if the loss or the metric does not change after the first two epochs.
    """
    options = {**OPTIONS, "eta": ETA, "objective": objective, "epochs": epochs, "seed": seed}
    model = DRM(TrainConfig.from_mapping(options))
    no_items = CSR.empty(data.train.shape)
    records: list[list[float]] = []

    def measure(end: EpochEnd) -> None:
        backend, device = model.backend()
        U, V = (table.to(device) for table in model.factors(end.state.tensors()))
        means = evaluate(factor_ranker(backend, U, V, model.score_name), no_items, data.train, (10,), min_train=0).means
        on_valid = [end.record[f"valid/{name}"] for name in METRICS]
        records.append([end.record["loss"], *(means[name] for name in METRICS), *on_valid])

    model.fit(data, [measure], progress=False)
    loss, *metrics = np.array(records[SKIPPED:]).T
    return {
        name: float(np.corrcoef(loss, values)[0, 1]) if np.ptp(loss) and np.ptp(values) else None
        for name, values in zip(MEASURED, metrics, strict=True)
    }


def table5(data: Data, budget: Budget, folder: Path, reporter: Reporter = SILENT) -> Result:
    """Measure how well a falling loss predicts better metrics, for four objectives.

    Parameters
    ----------
    data : the data set
    budget : `seeds` and `epochs` are used
    folder : where FILE keeps the finished trainings
    reporter : shows the progress
    """
    epochs = budget.epochs or 20
    if epochs < SKIPPED + 3:
        raise InputError(f"`epochs` must be at least {SKIPPED + 3}: the first {SKIPPED} do not count, got {epochs}")
    if len(measurable(data.dataset.train, data.dataset.valid)) == 0:
        raise InputError("table5 needs a data set with a validation part; prepare it with other `ratios`")
    found = _trained(data, budget.seeds, epochs, folder, Labelled(reporter, data.label))
    rows: list[Row] = []
    for name in sorted(MEASURED, key=lambda name: name not in CORRELATED):  # what the paper has, first
        for objective in CORRELATIONS:
            values = [one["correlations"][name] for one in found if one["objective"] == objective]
            defined = [one for one in values if one is not None]
            row: dict[str, Any] = {"data": data.label, "metric": name, "objective": objective, "seeds": len(defined)}
            row["ours"] = float(np.mean(defined)) if defined else None
            row["sd"] = float(np.std(defined, ddof=1)) if len(defined) > 1 else None
            published = dict(zip(CORRELATED, CORRELATIONS[objective], strict=True))
            rows.append({**row, "published": published.get(name)})
    notes = [
        *data.notes,
        *([] if data.paper == "ml-20m" else ["The published correlations are on ML-20M, and ours are on other data."]),
        "The paper does not state factors, learning rate and rho of these trainings: ours are "
        + ", ".join(f"{option} {given}" for option, given in OPTIONS.items())
        + ". hinge stands for the paper's WARP, and hinge+drm for its DRM dot.",
        MAP_NOTE,
    ]
    return Result(
        "table5",
        f"correlation of loss and metric, epochs {SKIPPED + 1} to {epochs}, {means_of(budget.seeds)}",
        [data],
        {
            "data": text("data"),
            "metric": text("metric"),
            "objective": text("objective"),
            "ours": value("ours", 3),
            "sd": value("sd", 3),
            "published": value("published", 3),
            "difference": difference(3),
        },
        rows,
        notes,
        {"seeds": budget.seeds, "epochs": epochs, "options": OPTIONS},
        budget.quick,
    )


def _trained(data: Data, seeds: int, epochs: int, folder: Path, reporter: Reporter) -> list[dict[str, Any]]:
    """Run the trainings that are not in FILE; return all of them."""
    file = folder / FILE
    done = _read(file)
    tasks: list[dict[str, Any]] = [
        {"checksum": data.dataset.checksum, "objective": objective, "epochs": epochs, "seed": seed}
        for objective in CORRELATIONS
        for seed in range(seeds)
    ]
    missing = [task for task in tasks if not any(task.items() <= one.items() for one in done)]
    with reporter.step("train and correlate", len(missing), "trainings") as step:
        for task in missing:
            result = correlations(data.dataset, task["objective"], epochs, task["seed"])
            done.append({**task, "correlations": result})
            atomic.write_text(file, "".join(json.dumps(one) + "\n" for one in done), parents=True)
            step.advance()
            shown = ", ".join(f"{name} {one:.3f}" for name, one in result.items() if one is not None)
            reporter.line(f"{task['objective']}, seed {task['seed']}: {shown}")
    return [one for task in tasks for one in done if task.items() <= one.items()]


def _read(file: Path) -> list[dict[str, Any]]:
    try:
        return [json.loads(line) for line in file.read_text("utf-8").splitlines()] if file.exists() else []
    except ValueError as error:
        raise DrmError(f"{file} is damaged ({error}); repair it, or give another `out`") from None
