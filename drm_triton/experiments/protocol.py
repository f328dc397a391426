"""The protocol of a comparison: tune each model on validation, train the best with several seeds, measure on test.

A comparison is a directory:

plan.json        the checksum of the data set, the search space, the metric, versions and machine
outcomes.jsonl   one line for each finished training: model, stage (tune or test), options, seed, metrics, seconds
users/           metrics of each user on test, one Parquet file for each final training

A training is one task. Tasks run in several processes, each with one thread, and each outcome is stored at once. When
the command is started again, finished tasks are skipped. A task depends on its options and its seed only, so the
outcomes do not depend on the number of processes or on interruptions.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import polars as pl

from drm_triton import atomic
from drm_triton.data.dataset import Dataset
from drm_triton.data.leaderboards import protocol
from drm_triton.errors import DrmError, InputError
from drm_triton.experiments.entries import Entry, SpaceName, entries
from drm_triton.lock import Lock
from drm_triton.models.configs import config_class
from drm_triton.names import MIN_TRAIN
from drm_triton.progress import SILENT, Reporter
from drm_triton.ranking.evaluate import measurable
from drm_triton.training.run import environment
from drm_triton.training.state import EpochEnd
from drm_triton.training.tune import replaced, with_validations

Outcome = dict[str, Any]  # one line of outcomes.jsonl
Task = dict[str, Any]  # what identifies an outcome, and where the data is

PLAN = "plan.json"
ONE_THREAD = ("NUMBA_NUM_THREADS", "OMP_NUM_THREADS")
IDENTITY = ("model", "stage", "options", "seed")


@dataclass(frozen=True)
class Plan:
    """What is compared, and how.

    Attributes
    ----------
    models : names of entries
    space : "paper" for the search spaces of the paper, "ours" for those of `tune`
    trials : number of random points for each model; None for all points of the space
    seeds : number of final trainings of each model
    metric : validation metric that chooses the options
    fixed : options that are not searched, for all models that have them
    """

    models: tuple[str, ...]
    space: SpaceName = "ours"
    trials: int | None = 20
    seeds: int = 5
    metric: str = "recall@50"
    fixed: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.trials is not None and self.trials < 1:
            raise InputError(f"compare: `trials` must be at least 1, got {self.trials}")
        if self.seeds < 1:
            raise InputError(f"compare: `seeds` must be at least 1, got {self.seeds}")
        for entry in self.entries():
            entry.settings(self.space, self.metric, 1)  # raises if the paper does not have it

    def entries(self) -> list[Entry]:
        """Return the entries."""
        return [entry.with_fixed(self.fixed) for entry in entries(self.models)]


class Comparison:
    """A directory of a comparison, created or opened.

    Parameters
    ----------
    path : the directory
    dataset : a stored data set with a validation and a test part
    plan : what to compare. An opened comparison may have other models, more trials and more seeds.
    """

    def __init__(self, path: str | Path, dataset: Dataset, plan: Plan) -> None:
        self.path, self.dataset, self.plan = Path(path), dataset, plan
        if dataset.path is None:
            raise InputError("compare: the data set must be stored on disk; save it first")
        for part in ("valid", "test"):
            if getattr(dataset, part).nnz == 0:
                raise InputError(
                    f"compare: the data set has no {part} part; prepare it with other `ratios`, or with `valid_ratio` "
                    "if its parts are given"
                )
        if len(measurable(dataset.train, dataset.valid)) == 0:
            raise InputError(
                f"compare: no user has both validation items and at least {MIN_TRAIN} training interactions; prepare "
                "the data with another `split`"
            )
        dataset.verify()  # its checksum is recorded or compared
        self._open()
        self.outcomes = self._read()

    # -- the tasks -----------------------------------------------------------------------------------------------

    def tuning_tasks(self) -> list[Task]:
        """Return one task for each trial of each model."""
        return list(self._trials.values())

    @cached_property
    def _trials(self) -> dict[str, Task]:
        """The tuning tasks by their keys. A whole grid has thousands of them."""
        tasks = [
            self._task(entry.name, "tune", {"model": config.model, **config.to_dict()}, 0)
            for entry in self.plan.entries()
            for config in entry.settings(self.plan.space, self.plan.metric, self.plan.trials)
        ]
        return {_key(task): task for task in tasks}

    def final_tasks(self) -> list[Task]:
        """Return the final trainings: the best options of each model, with each seed."""
        return [
            self._task(entry.name, "test", options, seed)
            for entry in self.plan.entries()
            if (options := self.best_options(entry.name)) is not None
            for seed in range(1, self._seeds_of(entry) + 1)
        ]

    def best_trial(self, name: str) -> Outcome | None:
        """Return the best finished trial of a model, the first if tied, among those of the plan."""
        mine = [outcome for outcome in self.outcomes if (outcome["model"], outcome["status"]) == (name, "done")]
        found = [outcome for outcome in mine if _key(outcome) in self._trials]
        return max(found, key=lambda outcome: outcome[self.plan.metric], default=None)

    def best_options(self, name: str) -> dict[str, Any] | None:
        """Return the options of the best trial, with the number of epochs after which it was the best."""
        best = self.best_trial(name)
        if best is None:
            return None
        options = dict(best["options"])
        return {**options, "epochs": best["best_epoch"]} if "epochs" in options else options

    def finals(self, name: str) -> list[Outcome]:
        """Return the finished final trainings of a model with its best options, by seed."""
        wanted = {_key(task) for task in self.final_tasks() if task["model"] == name}
        found = [outcome for outcome in self.outcomes if _key(outcome) in wanted and outcome["status"] == "done"]
        return sorted(found, key=lambda outcome: outcome["seed"])

    def unfinished(self, tasks: Iterable[Task]) -> list[Task]:
        """Return the tasks without an outcome."""
        done = {_key(outcome) for outcome in self.outcomes}
        return [task for task in tasks if _key(task) not in done]

    # -- running them --------------------------------------------------------------------------------------------

    def run(self, workers: int | None = None, reporter: Reporter = SILENT, retry_failed: bool = False) -> None:
        """Run what is not finished: first all trials, then the final trainings. Failed ones are repeated on request."""
        with Lock(self.path, "comparison") as lock:
            self._open()  # another process may have replaced it since
            atomic.clean_within(self.path)
            self.outcomes = self._read(repair=True)  # or finished some trainings
            if retry_failed:
                self.outcomes = [outcome for outcome in self.outcomes if outcome["status"] != "failed"]
            for title, tasks in (
                ("tune on validation", self.tuning_tasks),
                ("train and measure on test", self.final_tasks),
            ):
                self._run_tasks(title, self.unfinished(tasks()), workers or os.cpu_count() or 1, reporter, lock)

    def _run_tasks(self, title: str, tasks: list[Task], workers: int, reporter: Reporter, lock: Lock) -> None:
        if not tasks:
            return
        with reporter.step(title, len(tasks), "trainings") as step, _runner(min(workers, len(tasks))) as run:
            for outcome in run(run_task, tasks):
                lock.check(self.path)
                self.outcomes.append(outcome)
                self._append(outcome)
                step.advance()
                reporter.line(describe(outcome, self.plan.metric))

    # -- files ---------------------------------------------------------------------------------------------------

    def _task(self, name: str, stage: str, options: dict[str, Any], seed: int) -> Task:
        places = {"data": str(self.dataset.path), "users": str(self.path / "users"), "metric": self.plan.metric}
        return {"model": name, "stage": stage, "options": options, "seed": seed, **places}

    def _seeds_of(self, entry: Entry) -> int:
        from drm_triton.models import model_class

        return 1 if model_class(entry.model).deterministic else self.plan.seeds

    def _open(self) -> None:
        """Create the directory, or check that it holds a comparison on the same data, in the same space."""
        identity = {"checksum": self.dataset.checksum, "space": self.plan.space, "metric": self.plan.metric}
        file = self.path / PLAN
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if not any(not entry.name.startswith(".") for entry in self.path.iterdir()):
                config = self.plan.entries()[0].base(self.plan.space, self.plan.metric)
                found = {**identity, "environment": environment(config, self.dataset)}
                atomic.write_text(file, json.dumps(found, indent=2) + "\n")
            recorded = json.loads(file.read_text("utf-8"))
            before = {name: recorded[name] for name in identity}
        except OSError as error:
            reason = f"cannot be the directory of a comparison ({error.strerror})"
            raise InputError(f"{self.path}: {reason}; give another `out`") from None
        except (ValueError, KeyError, TypeError):
            raise InputError(f"{self.path} exists and is not a comparison; give another `out`") from None
        for name, value in identity.items():
            if before[name] != value:
                raise InputError(
                    f"{self.path} holds a comparison with {name} {before[name]}, and now it is {value}; give the same "
                    "options to continue it, or give another `out`"
                )

    def _read(self, repair: bool = False) -> list[Outcome]:
        """Read the outcomes, the last one of a task that was repeated.

        With `repair`, remove a last line that is cut off; it may be one that is being written.
        """
        file = self.path / "outcomes.jsonl"
        lines = file.read_text("utf-8").split("\n") if file.exists() else [""]
        outcomes = []
        for number, line in enumerate(lines[:-1], 1):  # a last line that is cut off, as after a crash, is dropped
            try:
                outcomes.append(_completed(json.loads(line)))
            except ValueError as error:
                raise DrmError(f"{file} is damaged: line {number} ({error}); remove that line") from None
        if lines[-1] and repair:
            atomic.write_text(file, "".join(json.dumps(outcome) + "\n" for outcome in outcomes))
        return list({_key(outcome): outcome for outcome in outcomes}.values())

    def _append(self, outcome: Outcome) -> None:
        with open(self.path / "outcomes.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(outcome) + "\n")

    def per_user(self, name: str, metrics: Sequence[str]) -> pl.DataFrame:
        """Return the means over the seeds of metrics of each user on test: columns user, n_train and the metrics."""
        frames = [pl.read_parquet(self.path / outcome["users"], glob=False) for outcome in self.finals(name)]
        joined = pl.concat([frame.select("user", "n_train", *metrics) for frame in frames])
        return joined.group_by("user", "n_train").agg(pl.col(metrics).mean()).sort("user")


def names_of(text: str) -> tuple[str, ...]:
    """Return names that are separated by commas.

    Examples
    --------
    >>> names_of("wmf, ease")
    ('wmf', 'ease')
    """
    return tuple(name.strip() for name in text.split(",") if name.strip())


def space_name(text: str) -> SpaceName:
    """Return the name of a search space, verified."""
    if text == "paper":
        return "paper"
    if text == "ours":
        return "ours"
    raise InputError(f"`space` must be paper or ours, got {text!r}")


def run_task(task: Task) -> Outcome:
    """Train and measure once. A training that diverges or needs more memory than there is is an outcome, too."""
    outcome = {name: task[name] for name in IDENTITY}
    began = time.perf_counter()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            measured = _tune(task) if task["stage"] == "tune" else _test(task)
        outcome |= {"status": "done", **measured}
    except (DrmError, MemoryError, RuntimeError) as error:  # torch raises RuntimeError when memory runs out
        outcome |= {"status": "failed", "error": str(error)}
    return {**outcome, "seconds": round(time.perf_counter() - began, 2)}


def _tune(task: Task) -> dict[str, Any]:
    """Train on the training part; return the metrics of the best epoch on validation."""
    found: dict[str, Any] = {}

    def epoch_end(end: EpochEnd) -> None:
        if end.improved:
            metrics = {name[6:]: value for name, value in end.record.items() if name.startswith("valid/")}
            found.update({"best_epoch": end.record["epoch"], **metrics})

    model = _model(task["options"], fit_on="train", threads=1, seed=0)
    type(model)(with_validations(model.config)).fit(Dataset.load(task["data"]), [epoch_end], progress=False)
    return found


def _test(task: Task) -> dict[str, Any]:
    """Train on the training and validation parts; return the metrics on test, and store those of each user."""
    data = Dataset.load(task["data"])
    model = _model(task["options"], fit_on="train+valid", threads=1, seed=task["seed"], eval_every=0)
    model.fit(data, progress=False)
    result = model.evaluate(data.test, data.train.union(data.valid), *protocol(data.meta))
    # A model may be trained again with other options, after more trials: its files must not replace each other.
    mark = hashlib.sha256(_key(task).encode()).hexdigest()[:8]
    folder, name = Path(task["users"]), f"{task['model'].replace('@', '-at-')}-{task['seed']}-{mark}.parquet"
    folder.mkdir(exist_ok=True)
    atomic.write_file(folder / name, result.per_user.write_parquet)
    return {**result.means, "users": f"{folder.name}/{name}"}


def _model(options: dict[str, Any], **fixed: Any) -> Any:
    from drm_triton.models import model_class

    values = {name: value for name, value in options.items() if name != "model"}
    kind = options["model"]
    return model_class(kind)(replaced(config_class(kind).from_mapping(values), **fixed))


def describe(outcome: Outcome, metric: str) -> str:
    """Return one line about an outcome."""
    options = ", ".join(f"{name} {value}" for name, value in changed_options(outcome["options"]).items())
    what = f"{outcome['model']}, {outcome['stage']}, seed {outcome['seed']}"
    if outcome["status"] == "failed":
        return f"{what}: failed: {outcome['error']}"
    return f"{what}: {metric} {outcome[metric]:.4f}, {outcome['seconds']:.1f} s ({options or 'defaults'})"


def changed_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that differ from the defaults of the model, without the metric that chose them."""
    config = config_class(options["model"]).from_mapping({k: v for k, v in options.items() if k != "model"})
    return {name: value for name, value in config.changed().items() if name != "monitor"}


def _completed(outcome: Outcome) -> Outcome:
    """Return an outcome with the options that were added since it was stored, at their defaults."""
    defaults = config_class(outcome["options"]["model"])().to_dict()
    return {**outcome, "options": {**defaults, **outcome["options"]}}


def _key(task: Task | Outcome) -> str:
    """Return a text that identifies a task."""
    return json.dumps([task[name] for name in IDENTITY], sort_keys=True)


@contextmanager
def _runner(workers: int) -> Iterator[Callable[..., Iterable[Outcome]]]:
    """Make a function that maps tasks to outcomes, in processes with one thread each, or here if one is enough."""
    if workers == 1:
        yield map
        return
    context = multiprocessing.get_context("spawn")
    with _one_thread(), ProcessPoolExecutor(workers, context, initializer=_ignore_interrupts) as pool:
        try:
            yield lambda function, tasks: (
                done.result() for done in as_completed([pool.submit(function, task) for task in tasks])
            )
        except BrokenProcessPool:
            raise DrmError(
                "a process died during a training, perhaps for lack of memory; finished trainings are stored: run the "
                "same command again, with fewer `workers`"
            ) from None
        except BaseException:  # as after Ctrl-C: do not wait for the trainings that are running
            for process in multiprocessing.active_children():
                process.terminate()
            raise


@contextmanager
def _one_thread() -> Iterator[None]:
    """Let processes that start in this context have one thread."""
    before = {name: os.environ.get(name) for name in ONE_THREAD}
    os.environ.update(dict.fromkeys(ONE_THREAD, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def _ignore_interrupts() -> None:
    """Leave Ctrl-C, which a terminal sends to all processes, to the one that started the others."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
