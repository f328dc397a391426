"""Random search of the training options: what was tried, what came of it, and the best of it as a ready file.

A study is a directory:

env.json       versions, machine, data set and checksum; the values searched, and `base`, the options of trial 0
space.toml     the options searched and the values of each; `--space` reads such a file
trials.jsonl   one line a finished trial: number, status, options, best epoch, seconds, validation metrics
trials.csv     the same as a table
best.toml      the configuration of the best trial, for `drm-triton train --config`

Each trial is trained on train and judged on validation; the test part is never looked at. Trial 0 is the defaults, so
the best is never below them on validation; the others are distinct random points of the space. Which point is trial i
follows from the seed and i alone: a longer study begins with the trials of a shorter one, and one that was stopped
goes on as if it never had been.
"""

import dataclasses
import json
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from drm_triton import atomic
from drm_triton.config import ALIASES, FILE_NAMES, TrainConfig, overridden
from drm_triton.data.dataset import Dataset
from drm_triton.errors import DrmError, InputError
from drm_triton.model import DRM
from drm_triton.ranking.evaluate import MIN_TRAIN, measurable
from drm_triton.training.run import csv_text, environment
from drm_triton.training.state import EpochEnd

# What is searched unless told otherwise: what bench/quality.py gives DRM.
SPACE: dict[str, list[Any]] = {
    "score": ["dot", "l2"],
    "factors": [32, 64, 128],
    "eta": [15, 45, 90],
    "tau": [0.5, 1.0],
    "lambda": [3.0, 10.0, 30.0],
    "margin": [0.5, 1.0],
    "lr": [0.05, 0.1, 0.2],
    "epochs": [10, 20, 30],
}
FIXED_ONLY = ("seed", "monitor", "fit_on", "eval_every", "patience", "backend", "threads")  # never searched
FREE = ("backend", "threads")  # may change between the sessions of a study

Options = dict[str, Any]  # by their names in files
Record = dict[str, Any]  # one line of trials.jsonl


def tune(
    dataset: Dataset,
    study: str | Path,
    trials: int = 20,
    seconds: float | None = None,
    space: Mapping[str, Sequence[Any]] | None = None,
    **fixed: Any,
) -> "Study":
    """Search the options for a data set, or go on with a search that was stopped.

    Parameters
    ----------
    dataset : Dataset, with a validation part
    study : directory of the study; taken up if it is one already
    trials : how many the study shall have in all, trial 0 (the defaults) included
    seconds : start no trial later than this; None for no limit
    space : option -> values to draw from; None for `SPACE`
    **fixed : fields of TrainConfig that are the same in every trial and so leave the space; `monitor` is the metric
        to maximise, and `seed` is that of the draws and of every training

    Returns
    -------
    Study : `records` are the finished trials, `best` the best of them, `best_config` its configuration

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
    found = Study(study, dataset, space, fixed)
    for number, options in found.remaining(trials, seconds):
        found.attempt(number, options)
    return found


class Study:
    """A study in use: made, or opened if it is there already. Parameters as in `tune`."""

    def __init__(
        self,
        path: str | Path,
        dataset: Dataset,
        space: Mapping[str, Sequence[Any]] | None,
        fixed: Mapping[str, Any],
    ) -> None:
        self.path, self.dataset = Path(path), dataset
        self.base = TrainConfig.from_mapping(fixed)
        self.space = checked_space(SPACE if space is None else space, fixed)
        if self.base.fit_on != "train":
            raise InputError(f"tune: trials are trained on train and judged on valid, not fit on {self.base.fit_on}")
        if min([self.base.epochs, *self.space.get("epochs", [])]) < 1:
            raise InputError("tune: epochs must be at least 1, so that there is something to judge")
        if dataset.valid.nnz == 0:
            raise InputError("tune: the data set has no validation part to judge by; prepare it with one (--ratios)")
        if len(measurable(dataset.train, dataset.valid)) == 0:
            raise InputError(
                f"tune: no user has both validation items and at least {MIN_TRAIN} training interactions to judge by; "
                "prepare the data with another split (--split)"
            )
        DRM(self.base).backend()  # one that cannot be used would fail every trial
        self._open()
        self.records = self._read()
        self._write()  # those that follow from trials.jsonl may be behind it, if the process was killed

    @property
    def metric(self) -> str:
        """What is maximised: the name of its column in the records."""
        return f"valid/{self.base.monitor}"

    @property
    def ranked(self) -> list[Record]:
        """The trials that did not fail, best first; of equal ones the earlier first."""
        done = [record for record in self.records if record["status"] == "done"]
        return sorted(done, key=lambda record: -record[self.metric])

    @property
    def best(self) -> Record | None:
        """The best trial so far."""
        return next(iter(self.ranked), None)

    @property
    def best_config(self) -> TrainConfig | None:
        """The configuration of the best trial, with the number of epochs it was judged after."""
        best = self.best
        if best is None:
            return None
        return dataclasses.replace(self.config({name: best[name] for name in self.space}), epochs=best["best_epoch"])

    def config(self, options: Options) -> TrainConfig:
        """The configuration of a trial."""
        return TrainConfig.from_mapping({**self.base.to_dict(), **options})

    def remaining(self, trials: int, seconds: float | None = None) -> Iterator[tuple[int, Options]]:
        """Number and options of each trial up to `trials` that is not finished, until `seconds` are over."""
        began = time.monotonic()
        for number, options in islice(enumerate(draws(self.space, self.base)), len(self.records), trials):
            if seconds is not None and time.monotonic() - began >= seconds:
                return
            yield number, options

    def attempt(self, number: int, options: Options, on_epoch: Callable[[], object] | None = None) -> Record:
        """Train and judge one trial, and record it. One that diverges, or does not fit in memory, is recorded too."""
        outcome: Record = {}

        def epoch_end(end: EpochEnd) -> None:
            if end.improved:
                metrics = {name: value for name, value in end.record.items() if name.startswith("valid/")}
                outcome.update({"best_epoch": end.record["epoch"], **metrics})
            if on_epoch is not None:
                on_epoch()

        began = time.perf_counter()
        try:
            DRM(with_validations(self.config(options))).fit(self.dataset, [epoch_end])
        except InputError:  # the data's fault, not the trial's
            raise
        except (DrmError, MemoryError, RuntimeError) as error:  # torch tells of lacking memory by a RuntimeError
            outcome = {"status": "failed", "error": str(error)}
        seconds = round(time.perf_counter() - began, 3)
        self.records.append({"number": number, "status": "done", **options, "seconds": seconds, **outcome})
        self._write()
        return self.records[-1]

    # -- files ---------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        """Make the directory, or see that what is there is the same study."""
        made_of = {"space": self.space, "base": self.base.to_dict()}
        file = self.path / "env.json"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            taken = [entry.name for entry in self.path.iterdir() if not entry.name.startswith(".")]
        except OSError as error:
            raise InputError(
                f"{self.path}: cannot be a study directory ({error.strerror}); give another --study"
            ) from None
        if not taken:
            found = environment(self.base, self.dataset)
            atomic.write_text(file, json.dumps({**found, **made_of}, indent=2) + "\n")
        try:
            recorded = json.loads(file.read_text("utf-8"))
            before = _identity(recorded["data"]["checksum"], recorded["space"], recorded["base"])
        except (OSError, ValueError, KeyError, TypeError):
            raise InputError(f"{self.path} exists and is not a study; give another --study") from None
        now = _identity(self.dataset.checksum, **made_of)
        for name in [*before, *now]:
            was, wanted = before.get(name, "not given"), now.get(name, "not given")
            if was != wanted:
                raise InputError(
                    f"{self.path} holds a study with {name} {was}, and now it is {wanted}; "
                    "go on with what it was made with, or give another --study"
                )
        text = "".join(f"{name} = {json.dumps(values)}\n" for name, values in self.space.items())
        atomic.write_text(self.path / "space.toml", text)

    def _read(self) -> list[Record]:
        file = self.path / "trials.jsonl"
        try:
            return [json.loads(line) for line in file.read_text("utf-8").splitlines()] if file.exists() else []
        except ValueError as error:
            raise DrmError(f"{file} is damaged ({error}); mend it, or give another --study") from None

    def _write(self) -> None:
        """Write trials.jsonl, which makes the trials final, and the files that follow from it."""
        if not self.records:
            return
        lines = "".join(json.dumps(record) + "\n" for record in self.records)
        atomic.write_text(self.path / "trials.jsonl", lines)
        atomic.write_text(self.path / "trials.csv", csv_text(self.records))
        best, config = self.best, self.best_config
        if best is not None and config is not None:
            title = f"# trial {best['number']} of {len(self.records)}: {self.metric} {best[self.metric]:.6f}\n"
            atomic.write_text(self.path / "best.toml", title + config.to_toml())


def draws(space: Mapping[str, Sequence[Any]], base: TrainConfig) -> Iterator[Options]:
    """Options of trial 0, 1, 2, ...: the defaults, then random points of the space, none twice, until it is exhausted.

    Combinations that TrainConfig refuses, such as a k above rho + eta, are left out.

    Examples
    --------
    >>> list(draws({"lr": [0.1, 0.2], "rho": [1]}, TrainConfig(lr=0.2)))
    [{'lr': 0.2, 'rho': 1}, {'lr': 0.1, 'rho': 1}]
    """
    rng = random.Random(base.seed)  # of whose methods random() is the one that never changes between Pythons
    defaults = _defaults(space, base)
    yield defaults
    seen = {tuple(defaults.values())}
    on_grid = all(defaults[name] in values for name, values in space.items())
    for _ in range(math.prod(len(values) for values in space.values()) - on_grid):
        point = tuple(defaults.values())
        while point in seen:
            point = tuple(values[int(rng.random() * len(values))] for values in space.values())
        seen.add(point)
        options = dict(zip(space, point, strict=True))
        try:
            TrainConfig.from_mapping({**base.to_dict(), **options})
        except InputError:
            continue
        yield options


def with_validations(config: TrainConfig) -> TrainConfig:
    """Set the epochs that a trial is judged after: those that a later training can end with.

    A final training on train + valid has nothing to choose its best epoch by; it ends with its last. At a constant
    rate epoch e is the same whatever comes after it, so a trial may be judged by its best epoch, and trained anew for
    that many. The linear schedule is another with another number of epochs: only its last epoch can be had again.
    """
    every = config.epochs if config.schedule == "linear" else max(config.eval_every, 1)
    return dataclasses.replace(config, eval_every=every)


def checked_space(space: Mapping[str, Any], fixed: Mapping[str, Any], where: str = "") -> dict[str, list[Any]]:
    """Check a space; it comes back in the order of names, without repeated values and options that are `fixed`."""
    for name, values in space.items():
        if not isinstance(values, list | tuple) or not values or None in values:
            raise InputError(f"{where}a space gives each option a list of values; {name} is {values!r}")
        if name in FIXED_ONLY:
            raise InputError(f"{where}{name} cannot be searched; it is the same in every trial")
    single = {name: values[0] for name, values in space.items() if len(values) == 1}
    taken = {FILE_NAMES.get(name, name) for name in fixed}
    checked: dict[str, list[Any]] = {}
    for name in sorted(space):
        file_name = FILE_NAMES.get(name, name)
        if file_name not in taken:
            # beside options of a single value, since some go together only: cov > 0 with score = l2
            points = [overridden(single, {**fixed, name: value}) for value in space[name]]
            configs = [TrainConfig.from_mapping(point, where) for point in points]
            checked[file_name] = list(dict.fromkeys(getattr(config, ALIASES.get(name, name)) for config in configs))
    if not checked:
        raise InputError(f"{where}nothing is left to search: every option of the space is fixed; fix fewer")
    return checked


def _defaults(space: Mapping[str, Sequence[Any]], base: TrainConfig) -> Options:
    return {name: getattr(base, ALIASES.get(name, name)) for name in space}


def _identity(checksum: str, space: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, Any]:
    """What may not change while a study goes on, under the names that an error calls it by."""
    options = {"metric" if name == "monitor" else name: base[name] for name in base if name not in FREE}
    return {"data of checksum": checksum[:12], **options, **{f"values of {name}": space[name] for name in space}}
