"""What a report shows, measured: each run with its metrics and its lists for a sample of users."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from drm_triton.config import TrainConfig
from drm_triton.data.dataset import CSR, Dataset
from drm_triton.errors import InputError
from drm_triton.model import DRM
from drm_triton.progress import SILENT, Reporter
from drm_triton.ranking.evaluate import MIN_TRAIN, Evaluation, evaluate, factor_ranker, popularity_ranker
from drm_triton.training.checkpoint import FILE
from drm_triton.training.run import best_record, checkpoint_directory, read_environment, read_metrics

CUT_OFFS = (10, 50)


@dataclass(eq=False)
class Data:
    """A data set of one or more runs, and how it is used to measure them."""

    name: str
    dataset: Dataset
    on: str | None  # the held-out part, None where the data holds nothing out
    n_sample: int
    popularity: dict[str, Evaluation] = field(default_factory=dict)  # the baseline, by what it was counted on

    @cached_property
    def seen(self) -> CSR:
        """What is excluded from the rankings: all that comes before the held-out part."""
        return self.dataset.train.union(self.dataset.valid) if self.on == "test" else self.dataset.train

    @cached_property
    def held_out(self) -> CSR:
        """The relevant items of each user."""
        return getattr(self.dataset, self.on) if self.on else CSR.empty(self.dataset.train.shape)

    def baselines(self) -> list[tuple[str, Evaluation]]:
        """Popularity under its name: more than one where runs were fit on different parts of the data."""
        several = len(self.popularity) > 1
        return [(f"popularity of {on}" if several else "popularity", result) for on, result in self.popularity.items()]

    @cached_property
    def sample(self) -> NDArray[np.int64]:
        """Codes of the users to show: evenly spaced in the order of activity, among those that are measured."""
        activity = self.seen.degrees()
        users = np.flatnonzero((self.held_out.degrees() > 0) & (activity >= MIN_TRAIN))
        if len(users) == 0:
            users = np.flatnonzero(activity > 0)
        users = users[np.argsort(activity[users], kind="stable")]
        n = min(self.n_sample, len(users))
        return users[np.linspace(0, len(users) - 1, n).round().astype(np.int64)]


@dataclass(frozen=True)
class Measured:
    """One run, or one saved model."""

    name: str
    path: Path
    data: Data
    config: TrainConfig
    checkpoint: str  # best, last or saved
    records: list[dict[str, Any]]  # of metrics.jsonl, empty for a saved model
    environment: dict[str, Any]  # of env.json, likewise
    evaluation: Evaluation | None
    popularity: Evaluation | None
    unmeasured: str  # why there is no evaluation
    top: NDArray[np.int32]  # [users in data.sample, k], -1 where fewer items remain

    @property
    def monitor(self) -> str:
        """The column of `records` that the best epoch goes by."""
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
) -> list[Measured]:
    """Load each run with its data, evaluate it, and rank for the sample of users; see `write_report`."""
    places = [Path(path) for path in paths]
    if len({place.resolve() for place in places}) < len(places):
        raise InputError("a run is given twice; give each run once")
    given = {str(Path(path)): Dataset.load(path) for path in datasets}
    # All runs are looked at before the first is measured, and one model at a time is held.
    found = [_dataset(place, _load(place), _environment(place), given) for place in places]
    for unused in given.keys() - {str(dataset.path) for dataset in found}:
        raise InputError(f"--dataset {unused}: none of the runs needs it; leave it out")
    different = {dataset.checksum: dataset for dataset in found}
    names = distinct_names([dataset.path or Path() for dataset in different.values()])
    sets = {
        checksum: Data(name, dataset, _held_out_part(dataset, on), users)
        for name, (checksum, dataset) in zip(names, different.items(), strict=True)
    }
    return [
        _measure(name, place, sets[dataset.checksum], k, reporter)
        for name, place, dataset in zip(distinct_names(places), places, found, strict=True)
    ]


def data_of(runs: Sequence[Measured]) -> list[Data]:
    """The data sets behind the runs, each once."""
    return list(dict.fromkeys(run.data for run in runs))


def distinct_names(paths: Sequence[Path]) -> list[str]:
    """The last part of each path, or the whole where that would not tell them apart.

    Examples
    --------
    >>> distinct_names([Path("runs/a"), Path("runs/b")])
    ['a', 'b']
    >>> distinct_names([Path("x/a"), Path("y/a")]) == [str(Path("x/a")), str(Path("y/a"))]
    True
    """
    short = [path.name or path.resolve().name for path in paths]
    return short if len(set(short)) == len(short) else [str(path) for path in paths]


def _measure(name: str, path: Path, data: Data, k: int, reporter: Reporter) -> Measured:
    model, records = _load(path), _records(path)
    ops, _ = model.backend()
    rank = factor_ranker(ops, model.user_factors, model.item_factors, model.config.score)
    evaluation = popularity = None
    unmeasured = ""
    exclude = data.seen
    fit_on = model.config.fit_on
    if data.on is None:
        unmeasured = "its data set holds nothing out to measure it on"
    elif data.on in model.config.fit_parts:
        unmeasured = f"it was fit on {fit_on}, so it has seen what it would be measured on"
        exclude = model.interactions.train  # what came before, and this
    elif not ((data.seen.degrees() >= MIN_TRAIN) & (data.held_out.degrees() > 0)).any():
        unmeasured = f"no user has both held-out items and at least {MIN_TRAIN} training interactions"
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
    top = rank(data.sample, exclude.take(data.sample), k)
    checkpoint = checkpoint_directory(path).name
    return Measured(
        name=name,
        path=path,
        data=data,
        config=model.config,
        checkpoint=checkpoint if checkpoint in ("best", "last") and _home(path) else "saved",
        records=records,
        environment=_environment(path),
        evaluation=evaluation,
        popularity=popularity,
        unmeasured=unmeasured,
        top=top,
    )


def _load(path: Path) -> DRM:
    if (path / "config.toml").exists() and not any((path / part / FILE).exists() for part in ("best", "last")):
        raise InputError(
            f"{path} has no checkpoint yet: it was stopped within its first epoch; "
            f"take it up again with drm-triton train --resume {path}"
        )
    return DRM.load(path)


def _home(path: Path) -> Path | None:
    """The run directory that `path` is, or is a checkpoint of; None for a saved model."""
    places = (path, path.parent) if path.name in ("best", "last") else (path,)
    return next((place for place in places if (place / "config.toml").exists()), None)


def _environment(path: Path) -> dict[str, Any]:
    home = _home(path)
    if home is None or not (home / "env.json").exists():
        return {}
    return read_environment(home)


def _records(path: Path) -> list[dict[str, Any]]:
    home = _home(path)
    records = read_metrics(home) if home else []
    for number, record in enumerate(records, 1):
        whole = isinstance(record, dict) and {"epoch", "loss", "seconds"} <= record.keys()
        if not whole or not all(isinstance(value, int | float) for value in record.values()):
            raise InputError(f"{path}: line {number} of metrics.jsonl is not the record of an epoch; remove the file")
    return records


def _dataset(path: Path, model: DRM, environment: dict[str, Any], given: dict[str, Dataset]) -> Dataset:
    """The data set a model was fit on: one of those given, or where the run found it."""
    for dataset in given.values():
        if model.was_fit_on(dataset):
            return dataset
    recorded = environment.get("data", {}).get("path")
    if recorded is None:
        where = "does not say where its data lies" if not given else f"was not fit on {' or '.join(given)}"
        raise InputError(f"{path} {where}; give the data set it was fit on with --dataset PATH")
    if not os.path.exists(recorded):
        also = f", and {' or '.join(given)} is other data" if given else ""
        raise InputError(f"{path}: its data set is no longer at {recorded}{also}; say where it is with --dataset PATH")
    dataset = Dataset.load(recorded)
    if not model.was_fit_on(dataset):
        raise InputError(
            f"{path} was fit on other data than {recorded} holds now; prepare it again as it was, or say where the "
            "original is with --dataset PATH"
        )
    return dataset


def _held_out_part(dataset: Dataset, asked: str | None) -> str | None:
    if asked is None:
        return next((part for part in ("test", "valid") if getattr(dataset, part).nnz), None)
    if getattr(dataset, asked).nnz == 0:
        raise InputError(f"{dataset.path} has no {asked} part to measure on; leave out --on {asked}")
    return asked
