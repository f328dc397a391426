"""Random search of the training options.

A study is a directory:

env.json       versions, machine, data set and its checksum, the search space, and `base`, the options of trial 0
space.toml     the searched options and the values of each
trials.jsonl   one line for each finished trial: number, status, options, best epoch, seconds, validation metrics
trials.csv     the same as a table
best.toml      the configuration of the best trial, for `drm-triton train --config`

Each trial is trained on the training part and evaluated on the validation part. The test part is not used. Trial 0 uses
the defaults, so the best trial is at least as good on the validation part. The other trials are distinct random points
of the space. The seed and the number i determine trial i. A longer study therefore starts with the trials of a shorter
one, and an interrupted study continues with the trials that it would have run.
"""

import json
import math
import random
import textwrap
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from drm_triton import atomic
from drm_triton.base_config import Config, in_file, overridden
from drm_triton.data.dataset import Dataset
from drm_triton.errors import DrmError, InputError
from drm_triton.lock import Lock
from drm_triton.models import model_class
from drm_triton.models.configs import config_class
from drm_triton.names import MIN_TRAIN
from drm_triton.options import ALIASES, FILE_NAMES
from drm_triton.progress import SILENT, Reporter
from drm_triton.ranking.evaluate import measurable
from drm_triton.training.display import announced_compilation, loading_kernels
from drm_triton.training.run import csv_text, environment
from drm_triton.training.state import EpochEnd
from drm_triton.training.weights import require_weights

FIXED_ONLY = (
    "seed",
    "monitor",
    "fit_on",
    "eval_every",
    "patience",
    "stop_after",
    "backend",
    "threads",
)  # never searched
FREE = ("backend", "threads")  # may change between the sessions of a study
MAX_VALIDATIONS = 20  # of a trial

Point = dict[str, Any]  # a point of the search space: option -> value, under the names in files
Record = dict[str, Any]  # one line of trials.jsonl


def tune(
    dataset: Dataset,
    study: str | Path,
    trials: int = 20,
    seconds: float | None = None,
    space: Mapping[str, Sequence[Any]] | None = None,
    reporter: Reporter = SILENT,
    model: str = "drm",
    **fixed: Any,
) -> "Study":
    """Search the training options for a data set, or continue an interrupted search.

    Parameters
    ----------
    dataset : Dataset, with a validation part
    study : directory of the study; an existing study is continued
    trials : total number of trials, with trial 0 (the defaults) and finished trials included
    seconds : start no trial after this time; None for no limit
    space : option -> values to draw from; None for that of the model's configuration
    reporter : shows a line for each trial
    model : name of the model
    **fixed : options of the model with the same value in every trial; they are removed from the space. `monitor` is
        the metric to maximise. `seed` is the seed of the random points and of every training.

    Returns
    -------
    Study : `records` are the finished trials, `best` is the best of them, `best_config` is its configuration

    Examples
    --------
    >>> import tempfile
    >>> import polars as pl
    >>> frame = pl.DataFrame({"user": [u for u in range(20) for _ in range(10)],
    ...                       "item": [i % 30 for u in range(20) for i in range(u, u + 20, 2)]})
    >>> data = Dataset.from_frame(frame)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     study = tune(data, folder, trials=3, space={"lr": [0.1, 0.3], "tau": [0.5, 1.0]}, factors=4, epochs=2)
    >>> [record["number"] for record in study.records], sorted(study.best.keys() & {"lr", "tau", "valid/ndcg@10"})
    ([0, 1, 2], ['lr', 'tau', 'valid/ndcg@10'])
    """
    check_seconds(seconds)
    found = Study(study, dataset, space, fixed, model)
    found.run(trials, seconds, reporter)
    return found


class Study:
    """A study directory, created or opened. The parameters are those of `tune`."""

    def __init__(
        self,
        path: str | Path,
        dataset: Dataset,
        space: Mapping[str, Sequence[Any]] | None,
        fixed: Mapping[str, Any],
        model: str = "drm",
    ) -> None:
        self.path, self.dataset, self.model = Path(path), dataset, model_class(model)
        self.base = config_class(model).from_mapping(fixed)
        self.space = checked_space(self.base.search_space() if space is None else space, fixed, type(self.base))
        if self.base.fit_on != "train":
            raise InputError(
                f"tune: `fit_on` must be train, got {self.base.fit_on}: trials are evaluated on the validation part"
            )
        if min([self.base.epochs, *self.space.get("epochs", [])]) < 1:
            raise InputError("tune: `epochs` must be at least 1")
        if dataset.valid.nnz == 0:
            raise InputError("tune: the data set has no validation part; prepare it with other `ratios`")
        if len(measurable(dataset.train, dataset.valid)) == 0:
            raise InputError(
                f"tune: no user has both validation items and at least {MIN_TRAIN} training interactions; prepare the "
                "data with another `split`"
            )
        for transform in self.space.get("interaction_weights", []):
            require_weights(dataset.train, transform)
        self.model(self.base).backend()  # fail early if the backend cannot be used
        self.model(self.base).check_fit(dataset, dataset.train)
        dataset.verify()  # its checksum is recorded or compared
        self._open()
        self.records = self._read()

    @property
    def metric(self) -> str:
        """The column of the records that the study maximises."""
        return f"valid/{self.base.monitor}"

    @property
    def ranked(self) -> list[Record]:
        """The trials that did not fail, best first. Ties are in the order of their numbers."""
        done = [record for record in self.records if record["status"] == "done"]
        return sorted(done, key=lambda record: -record[self.metric])

    @property
    def best(self) -> Record | None:
        """The best trial so far."""
        return next(iter(self.ranked), None)

    @property
    def best_config(self) -> Config | None:
        """The configuration of the best trial, with the number of epochs after which it was evaluated."""
        best = self.best
        if best is None:
            return None
        config = self.config({name: best[name] for name in self.space})
        return replaced(config, epochs=best["best_epoch"]) if "epochs" in config.fields() else config

    def config(self, point: Point) -> Config:
        """Return the configuration of a trial."""
        return replaced(self.base, **point)

    def run(self, trials: int, seconds: float | None = None, reporter: Reporter = SILENT) -> None:
        """Run the unfinished trials up to `trials`. Start no trial after `seconds`."""
        with Lock(self.path, "study") as lock:
            self._open()  # another process may have replaced it since
            atomic.clean_within(self.path)
            self.records = self._read()  # or finished some trials
            self._write()  # a killed process may have written trials.jsonl only
            self._run(trials, seconds, reporter, lock)

    def _run(self, trials: int, seconds: float | None, reporter: Reporter, lock: Lock) -> None:
        if next(self.remaining(trials), None) is None:
            return
        with announced_compilation(reporter), loading_kernels(reporter):
            # The time of a trial then includes compiling only for options that need another variant of a kernel.
            self.model(self.base).warm_up()
        for number, point in self.remaining(trials, seconds):
            title = f"trial {number} ({number + 1}/{trials})"
            with reporter.step(title, self.config(point).epochs, "epochs") as step:
                record = self.attempt(number, point, step.advance)
                lock.check(self.path)
                self.records.append(record)
                self._write()
                step.note(self.describe(record))
            options = ", ".join(f"{name} {record[name]}" for name in self.space if record[name] is not None)
            if options:
                reporter.line(textwrap.indent(textwrap.fill(options, 76), "  "))

    def remaining(self, trials: int, seconds: float | None = None) -> Iterator[tuple[int, Point]]:
        """Yield number and point of each unfinished trial up to `trials`, and stop after `seconds`."""
        began = time.monotonic()
        for number, point in islice(enumerate(draws(self.space, self.base)), len(self.records), trials):
            if seconds is not None and time.monotonic() - began >= seconds:
                return
            yield number, point

    def attempt(self, number: int, point: Point, on_epoch: Callable[[], object] | None = None) -> Record:
        """Train and evaluate one trial. Return its record, which says so if it diverges or runs out of memory."""
        outcome: Record = {}

        def epoch_end(end: EpochEnd) -> None:
            if end.improved:
                metrics = {name: value for name, value in end.record.items() if name.startswith("valid/")}
                outcome.update({"best_epoch": end.record["epoch"], **metrics})
            if on_epoch is not None:
                on_epoch()

        began = time.perf_counter()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # not again in each trial
                self.model(with_validations(self.config(point))).fit(self.dataset, [epoch_end], progress=False)
        except InputError:  # the data is wrong, and every trial would fail
            raise
        except (DrmError, MemoryError, RuntimeError) as error:  # torch raises RuntimeError when memory runs out
            outcome = {"status": "failed", "error": str(error)}
        seconds = round(time.perf_counter() - began, 3)
        return {"number": number, "status": "done", **point, "seconds": seconds, **outcome}

    def describe(self, record: Record) -> str:
        """Return one line about a finished trial: its metric, and the best so far."""
        if record["status"] == "failed":
            return f"failed: {record['error']}"
        best, value = self.best or record, f"{self.base.monitor} {record[self.metric]:.4f}"
        return f"{value}, best {best[self.metric]:.4f} (trial {best['number']})"

    # -- files ---------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        """Create the directory, or check that it holds the same study."""
        definition = {"space": self.space, "base": {"model": self.base.model, **self.base.to_dict()}}
        file = self.path / "env.json"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            taken = [entry.name for entry in self.path.iterdir() if not entry.name.startswith(".")]
        except OSError as error:
            raise InputError(
                f"{self.path}: cannot be a study directory ({error.strerror}); give another `study`"
            ) from None
        if not taken:
            found = environment(self.base, self.dataset)
            atomic.write_text(file, json.dumps({**found, **definition}, indent=2) + "\n")
        try:
            recorded = json.loads(file.read_text("utf-8"))
            before = _identity(recorded["data"]["checksum"], recorded["space"], {"model": "drm", **recorded["base"]})
        except (OSError, ValueError, KeyError, TypeError):
            raise InputError(f"{self.path} exists and is not a study; give another `study`") from None
        now = _identity(self.dataset.checksum, **definition)
        for name in [*before, *now]:
            old, new = before.get(name, "not given"), now.get(name, "not given")
            if old != new:
                raise InputError(
                    f"{self.path} holds a study with {name} {old}, and now it is {new}; "
                    "give the options of the study to continue it, or give another `study`"
                )
        text = "".join(f"{name} = {json.dumps(values)}\n" for name, values in self.space.items())
        atomic.write_text(self.path / "space.toml", text)

    def _read(self) -> list[Record]:
        file = self.path / "trials.jsonl"
        try:
            return [json.loads(line) for line in file.read_text("utf-8").splitlines()] if file.exists() else []
        except ValueError as error:
            raise DrmError(f"{file} is damaged ({error}); repair it, or give another `study`") from None

    def _write(self) -> None:
        """Write trials.jsonl first, which makes the trials final, and then the files derived from it."""
        if not self.records:
            return
        lines = "".join(json.dumps(record) + "\n" for record in self.records)
        atomic.write_text(self.path / "trials.jsonl", lines)
        atomic.write_text(self.path / "trials.csv", csv_text(self.records))
        best, config = self.best, self.best_config
        if best is not None and config is not None:
            title = f"# trial {best['number']} of {len(self.records)}: {self.metric} {best[self.metric]:.6f}\n"
            atomic.write_text(self.path / "best.toml", title + config.to_toml())


def draws(space: Mapping[str, Sequence[Any]], base: Config) -> Iterator[Point]:
    """Yield the points of trial 0, 1, 2, ...: the defaults, then distinct random points until the space is exhausted.

    Combinations that the configuration rejects, such as a k above rho + eta, are left out.

    Examples
    --------
    >>> from drm_triton import TrainConfig
    >>> list(draws({"lr": [0.1, 0.2], "rho": [1]}, TrainConfig(lr=0.2)))
    [{'lr': 0.2, 'rho': 1}, {'lr': 0.1, 'rho': 1}]
    """
    rng = random.Random(base.seed)  # only random() gives the same numbers in every version of Python
    defaults = _defaults(space, base)
    yield defaults
    seen = {tuple(defaults.values())}
    on_grid = all(defaults[name] in values for name, values in space.items())
    for _ in range(math.prod(len(values) for values in space.values()) - on_grid):
        drawn = tuple(defaults.values())
        while drawn in seen:
            drawn = tuple(values[int(rng.random() * len(values))] for values in space.values())
        seen.add(drawn)
        point = dict(zip(space, drawn, strict=True))
        try:
            replaced(base, **point)
        except InputError:
            continue
        yield point


def with_validations(config: Config) -> Config:
    """Set the epochs after which a trial is evaluated: those at which a later training can end.

    A final training on train and valid has no validation part, so it ends with its last epoch. With a constant learning
    rate, epoch e does not depend on the number of epochs. A trial is therefore evaluated by its best epoch, and a later
    training can stop there. The linear schedule depends on the number of epochs, so only the last epoch can be
    reproduced. Ranking all items can take longer than an epoch, so there are at most MAX_VALIDATIONS of them.
    """
    every = config.epochs if config.epochs_matter else max(config.eval_every, -(-config.epochs // MAX_VALIDATIONS))
    return replaced(config, eval_every=every)


def replaced(config: Config, **options: Any) -> Config:
    """Return a configuration with other values of some options, under the names in files."""
    return type(config).from_mapping({**config.to_dict(), **options})


def check_seconds(seconds: float | None) -> None:
    """Raise if a time limit is negative or not a number."""
    if seconds is not None and not seconds >= 0:
        raise InputError(f"`seconds` must be at least 0, got {seconds:g}")


def checked_space(
    space: Mapping[str, Any], fixed: Mapping[str, Any], config: type[Config], where: str | Path = ""
) -> dict[str, list[Any]]:
    """Check a search space. Return it sorted by name, without repeated values and without `fixed` options.

    Parameters
    ----------
    space : option -> list of values
    fixed : options with the same value in every trial
    config : the class of the model's options
    where : the file that the space comes from, for error messages
    """
    for name, values in space.items():
        if not isinstance(values, list | tuple) or not values or None in values:
            raise InputError(in_file(where, f"a space gives each option a list of values; `{name}` is {values!r}"))
        if name in FIXED_ONLY:
            raise InputError(in_file(where, f"`{name}` cannot be searched; it is the same in every trial"))
    single = {name: values[0] for name, values in space.items() if len(values) == 1}
    taken = {FILE_NAMES.get(name, name) for name in fixed}
    checked: dict[str, list[Any]] = {}
    for name in sorted(space):
        file_name = FILE_NAMES.get(name, name)
        if file_name not in taken:
            # Check with the options of a single value, because some need each other: cov > 0 needs score = l2.
            points = [overridden(single, {**fixed, name: value}) for value in space[name]]
            configs = [config.from_mapping(point, str(where)) for point in points]
            checked[file_name] = list(dict.fromkeys(getattr(one, ALIASES.get(name, name)) for one in configs))
    if not checked:
        raise InputError(in_file(where, "nothing is left to search: every option of the space is fixed; fix fewer"))
    return checked


def _defaults(space: Mapping[str, Sequence[Any]], base: Config) -> Point:
    return {name: getattr(base, ALIASES.get(name, name)) for name in space}


def _identity(checksum: str, space: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, Any]:
    """Return what must stay the same in a study, under the names for error messages."""
    options = {"metric" if name == "monitor" else name: base[name] for name in base if name not in FREE}
    return {"data of checksum": checksum[:12], **options, **{f"values of {name}": space[name] for name in space}}
