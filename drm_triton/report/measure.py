"""Evaluate runs and compute recommendations for a sample of users: everything that a report shows."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from drm_triton.base_config import Config
from drm_triton.data.dataset import CSR, Dataset
from drm_triton.errors import InputError
from drm_triton.models import load
from drm_triton.names import CUT_OFFS, MIN_TRAIN
from drm_triton.progress import SILENT, Reporter
from drm_triton.ranking.evaluate import Evaluation, evaluate, measurable, popularity_ranker
from drm_triton.recommender import Recommender
from drm_triton.training.checkpoint import FILE
from drm_triton.training.run import best_record, checkpoint_directory, dataset_path, read_environment, read_metrics


@dataclass(eq=False)
class RunData:
    """A data set that one or more runs were trained on, and how the report uses it."""

    name: str
    dataset: Dataset
    on: str | None  # the held-out part to evaluate on; None if the data has none
    n_sample: int
    popularity: dict[str, Evaluation] = field(default_factory=dict)  # the baseline, by `fit_on` of the runs

    @cached_property
    def seen(self) -> CSR:
        """The interactions before the held-out part. They are excluded from the rankings."""
        return self.dataset.train.union(self.dataset.valid) if self.on == "test" else self.dataset.train

    @cached_property
    def held_out(self) -> CSR:
        """The relevant items of each user."""
        return getattr(self.dataset, self.on) if self.on else CSR.empty(self.dataset.train.shape)

    def baselines(self) -> list[tuple[str, Evaluation]]:
        """Return label and evaluation of each popularity baseline, one for each `fit_on` of the runs."""
        several = len(self.popularity) > 1
        return [(f"popularity of {on}" if several else "popularity", result) for on, result in self.popularity.items()]

    @cached_property
    def sample(self) -> NDArray[np.int64]:
        """Codes of the users to show: evaluated users, evenly spaced in order of activity."""
        activity = self.seen.degrees()
        users = measurable(self.seen, self.held_out)
        if len(users) == 0:
            users = np.flatnonzero(activity > 0)
        users = users[np.argsort(activity[users], kind="stable")]
        n = min(self.n_sample, len(users))
        return users[np.linspace(0, len(users) - 1, n).round().astype(np.int64)]


@dataclass(frozen=True)
class MeasuredRun:
    """A run or a saved model with its evaluation."""

    name: str
    path: Path
    data: RunData
    config: Config
    checkpoint: str  # best, last or saved
    records: list[dict[str, Any]]  # lines of metrics.jsonl; empty for a saved model
    environment: dict[str, Any]  # env.json; empty for a saved model
    evaluation: Evaluation | None
    popularity: Evaluation | None
    not_evaluated: str  # the reason, if there is no evaluation
    recommendations: NDArray[np.int32]  # [users in data.sample, k], padded with -1

    @property
    def monitor(self) -> str:
        """The column of `records` that decides which epoch is best."""
        return f"valid/{self.config.monitor}"

    @property
    def best_epoch(self) -> int | None:
        """The first epoch with the highest monitored metric, None without validation."""
        return best_record(self.records, self.config.monitor).get("epoch")


def measure_runs(
    paths: Sequence[str | Path],
    datasets: Sequence[str | Path] = (),
    on: str | None = None,
    users: int = 50,
    k: int = 10,
    reporter: Reporter = SILENT,
) -> list[MeasuredRun]:
    """Load each run with its data, evaluate it, and recommend items to a sample of users.

    See `write_report` for the parameters.
    """
    run_paths = [Path(path) for path in paths]
    if len({path.resolve() for path in run_paths}) < len(run_paths):
        raise InputError("a run is given twice; give each run once")
    given = {str(Path(path)): Dataset.load(path) for path in datasets}
    # Check all runs before evaluating the first. Only one model at a time stays in memory.
    found = [_dataset(path, _load(path), _environment(path), given) for path in run_paths]
    for unused in given.keys() - {str(dataset.path) for dataset in found}:
        raise InputError(f"no run needs the data set {unused}; leave it out of `datasets`")
    distinct = {dataset.checksum: dataset for dataset in found}
    names = distinct_names([dataset.path or Path() for dataset in distinct.values()])
    data = {
        checksum: RunData(name, dataset, _held_out_part(dataset, on), users)
        for name, (checksum, dataset) in zip(names, distinct.items(), strict=True)
    }
    return [
        _measure(name, path, data[dataset.checksum], k, reporter)
        for name, path, dataset in zip(distinct_names(run_paths), run_paths, found, strict=True)
    ]


def data_of(runs: Sequence[MeasuredRun]) -> list[RunData]:
    """Return the data sets of the runs, without duplicates."""
    return list(dict.fromkeys(run.data for run in runs))


def distinct_names(paths: Sequence[Path]) -> list[str]:
    """Return the last component of each path, or the whole paths if two of these components are equal.

    Examples
    --------
    >>> distinct_names([Path("runs/a"), Path("runs/b")])
    ['a', 'b']
    >>> distinct_names([Path("x/a"), Path("y/a")]) == [str(Path("x/a")), str(Path("y/a"))]
    True
    """
    short = [path.name or path.resolve().name for path in paths]
    return short if len(set(short)) == len(short) else [str(path) for path in paths]


def _measure(name: str, path: Path, data: RunData, k: int, reporter: Reporter) -> MeasuredRun:
    model, records = _load(path), _records(path)
    rank = model.ranker()
    evaluation = popularity = None
    not_evaluated = ""
    excluded = data.seen
    fit_on = model.config.fit_on
    if data.on is None:
        not_evaluated = "its data set has no held-out part"
    elif data.on in model.config.fit_parts:
        not_evaluated = f"it was trained on {fit_on}, which includes the {data.on} part"
        excluded = model.interactions.train  # this includes the held-out part
    elif len(measurable(data.seen, data.held_out)) == 0:
        not_evaluated = f"no user has both held-out items and at least {MIN_TRAIN} training interactions"
    else:
        with reporter.step(f"{name}: ranking all items for every user", total=data.dataset.n_users, unit="users") as s:
            evaluation = evaluate(
                rank, data.seen, data.held_out, CUT_OFFS, progress=lambda done, total: s.advance(done - s.done)
            )
        if fit_on not in data.popularity:
            with reporter.step(f"{name}: ranking by popularity, the baseline"):
                baseline = popularity_ranker(model.interactions.train)
                data.popularity[fit_on] = evaluate(baseline, data.seen, data.held_out, CUT_OFFS)
        popularity = data.popularity[fit_on]
    recommendations = rank(data.sample, excluded.take(data.sample), k)
    checkpoint = checkpoint_directory(path).name
    return MeasuredRun(
        name=name,
        path=path,
        data=data,
        config=model.config,
        checkpoint=checkpoint if checkpoint in ("best", "last") and _run_directory(path) else "saved",
        records=records,
        environment=_environment(path),
        evaluation=evaluation,
        popularity=popularity,
        not_evaluated=not_evaluated,
        recommendations=recommendations,
    )


def _load(path: Path) -> Recommender[Any]:
    checkpoints = (path / name / FILE for name in ("best", "last"))
    if (path / "config.toml").exists() and not any(file.exists() for file in checkpoints):
        raise InputError(
            f"{path} has no checkpoint: training stopped before the end of the first epoch; resume the training "
            "of this run, or leave it out"
        )
    return load(path)


def _run_directory(path: Path) -> Path | None:
    """Return the run directory of a path that is one or is a checkpoint in one; None for a saved model."""
    candidates = (path, path.parent) if path.name in ("best", "last") else (path,)
    return next((folder for folder in candidates if (folder / "config.toml").exists()), None)


def _environment(path: Path) -> dict[str, Any]:
    run = _run_directory(path)
    if run is None or not (run / "env.json").exists():
        return {}
    return read_environment(run)


def _records(path: Path) -> list[dict[str, Any]]:
    run = _run_directory(path)
    records = read_metrics(run) if run else []
    for number, record in enumerate(records, 1):
        complete = isinstance(record, dict) and {"epoch", "seconds"} <= record.keys()
        if not complete or not all(isinstance(value, int | float) for value in record.values()):
            raise InputError(f"{path}: line {number} of metrics.jsonl is not a record of an epoch; remove the file")
    return records


def _dataset(path: Path, model: Recommender[Any], environment: dict[str, Any], given: dict[str, Dataset]) -> Dataset:
    """Return the data set a model was trained on: one of those given, or the one that the run has."""
    for dataset in given.values():
        if model.was_fit_on(dataset):
            return dataset
    run = _run_directory(path)
    recorded = dataset_path(run, environment) if run and environment else None
    if recorded is None:
        problem = "does not record where its data is" if not given else f"was not trained on {' or '.join(given)}"
        raise InputError(f"{path} {problem}; give the data set it was trained on in `datasets`")
    if not os.path.exists(recorded):
        also = f", and it was not trained on {' or '.join(given)}" if given else ""
        raise InputError(f"{path}: its data set is no longer at {recorded}{also}; give its new path in `datasets`")
    dataset = Dataset.load(recorded)
    if not model.was_fit_on(dataset):
        raise InputError(
            f"{path} was trained on other data than {recorded} holds now; prepare the original data again, or give "
            "its path in `datasets`"
        )
    return dataset


def _held_out_part(dataset: Dataset, requested: str | None) -> str | None:
    if requested is None:
        return next((name for name in ("test", "valid") if getattr(dataset, name).nnz), None)
    if getattr(dataset, requested).nnz == 0:
        raise InputError(f"{dataset.path} has no {requested} part; leave out `on`")
    return requested
