"""A run directory: what a training leaves on disk, and how it is taken up again.

config.toml     the resolved configuration
env.json        versions, machine, data set and its checksum
metrics.jsonl   one line an epoch; metrics.csv has the same columns
last/, best/    checkpoints, see `checkpoint`: the latest, and the best by the monitored metric
curves.png      loss and validation metrics over epochs and seconds
"""

import csv
import io
import json
import os
import platform
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from drm_triton import atomic
from drm_triton._version import __version__
from drm_triton.config import TrainConfig
from drm_triton.data.dataset import CSR, Dataset
from drm_triton.errors import DrmError, InputError
from drm_triton.machine import processor, versions
from drm_triton.training import checkpoint
from drm_triton.training.state import EpochEnd, State

TENSORS = {"user_factors": "U", "item_factors": "V", "user_state": "U_state", "item_state": "V_state"}
RESUMABLE = {"epochs", "patience", "threads", "backend"}  # what may change without changing what was trained
COUNTERS = ("epoch", "position", "step", "seconds", "sums", "best", "best_epoch", "stale")


class Run:
    """A run directory in use. As a callback of `loop.train` it records each epoch."""

    def __init__(self, path: Path, config: TrainConfig, records: list[dict[str, Any]]) -> None:
        self.path, self.config, self.records = path, config.resolved(), records

    @classmethod
    def create(cls, path: str | Path, config: TrainConfig, dataset: Dataset, fit: CSR) -> "Run":
        """Make a new run directory; one that holds a run already is an error."""
        path = new_directory(path)
        with atomic.directory(path, overwrite=True) as folder:  # no marker: it replaces only an empty directory
            interactions_only(dataset, fit).save(folder / "last" / "data")
            (folder / "best").mkdir()
            shutil.copytree(folder / "last" / "data", folder / "best" / "data", copy_function=_link_or_copy)
            atomic.write_text(folder / "env.json", json.dumps(environment(config, dataset), indent=2) + "\n")
            atomic.write_text(folder / "config.toml", config.resolved().to_toml())
        return cls(path, config, [])

    @classmethod
    def open(cls, path: str | Path, dataset: Dataset, config: TrainConfig) -> tuple["Run", State | None]:
        """Take up a run at its last checkpoint (None if it was stopped before the first one).

        `config` may differ from the run's in RESUMABLE options, and is written to config.toml.
        """
        path = Path(path)
        stored = TrainConfig.from_toml(existing(path) / "config.toml").resolved().to_dict()
        config = config.resolved()
        changed = sorted(name for name, value in config.to_dict().items() if stored.get(name) != value)
        check_resumable(path, config.schedule, changed)
        recorded = str(read_environment(path)["data"].get("checksum"))
        if recorded != dataset.checksum:
            raise InputError(
                f"{path} was trained on other data than {dataset.path or 'the data set given'} "
                f"(checksum {recorded[:12]}, not {dataset.checksum[:12]}); prepare the same data or start a new run"
            )
        if changed:
            atomic.write_text(path / "config.toml", config.to_toml())
        for left in path.glob(f"*/.*{atomic.PARTIAL}"):  # by a process that was killed while it wrote
            left.unlink()
        if not (path / "last" / checkpoint.FILE).exists():
            return cls(path, config, []), None
        tensors, metadata = checkpoint.read_tensors(path / "last" / checkpoint.FILE)
        fields: dict[str, Any] = {field: tensors[name] for name, field in TENSORS.items()}
        state = State(**fields, **{name: metadata["training"][name] for name in COUNTERS})
        # A run killed between recording an epoch and saving it has a line too many.
        records = [record for record in read_metrics(path) if record["epoch"] <= state.epoch]
        run = cls(path, config, records)
        if records:
            run.write_metrics()  # without what was dropped, even if no epoch follows
        return run, state

    def __call__(self, end: EpochEnd) -> None:
        """Record an epoch: metrics first, then the checkpoint that makes it final."""
        self.records.append(end.record)
        self.write_metrics()
        self.save(end.state, best=end.improved)

    def write_metrics(self) -> None:
        """Write metrics.jsonl and metrics.csv."""
        lines = "".join(json.dumps(record) + "\n" for record in self.records)
        atomic.write_text(self.path / "metrics.jsonl", lines)
        atomic.write_text(self.path / "metrics.csv", csv_text(self.records))

    def save(self, state: State, best: bool = False) -> None:
        """Write the state to last/, and to best/ as well if it is the best so far."""
        tensors = {name: getattr(state, field) for name, field in TENSORS.items()}
        counters = {name: getattr(state, name) for name in COUNTERS}
        metadata = {"config": self.config.to_dict(), "training": counters}
        also = self.path / "best" / checkpoint.FILE if best else None
        checkpoint.write_tensors(self.path / "last" / checkpoint.FILE, tensors, metadata, also)

    def draw_curves(self) -> None:
        """Write curves.png."""
        from drm_triton.plots import learning_curves

        atomic.write_file(self.path / "curves.png", lambda place: learning_curves(self.records, place))


def interactions_only(dataset: Dataset, fit: CSR) -> Dataset:
    """Make a data set of the interactions a model was fit on, with the ids of the original."""
    empty = CSR.empty(fit.shape)
    return Dataset(fit, empty, empty, dataset.users, dataset.items, {"source": "model"})


def new_directory(path: str | Path) -> Path:
    """Make the directory of a new run; one that holds anything already is an error."""
    path = Path(path)
    try:
        if (path / "config.toml").exists():
            raise InputError(f"{path} holds a run already; resume it with --resume {path}, or give another --run")
        path.mkdir(parents=True, exist_ok=True)
        if any(path.iterdir()):
            raise InputError(f"{path} exists and is not empty; give another --run")
    except OSError as error:
        raise InputError(f"{path}: cannot make the run directory ({error.strerror}); give another --run") from None
    return path


def check_resumable(path: Path, schedule: str, changed: Sequence[str]) -> None:
    """Raise if a run cannot be taken up with these options changed."""
    fixed = sorted(set(changed) - RESUMABLE)
    if fixed:
        raise InputError(f"{path}: a resumed run cannot change {', '.join(fixed)}; only {', '.join(sorted(RESUMABLE))}")
    if schedule == "linear" and "epochs" in changed:
        raise InputError(
            f"{path}: a resumed run cannot change epochs: the linear schedule of the learning rate ends with them"
        )


def existing(path: str | Path) -> Path:
    """Path of a run directory, verified."""
    path = Path(path)
    if not (path / "config.toml").exists():
        raise InputError(f"{path} is not a run directory (it has no config.toml); runs are made by drm-triton train")
    return path


def checkpoint_directory(path: str | Path) -> Path:
    """Where the model of a run is: its best checkpoint, or else its last; a checkpoint directory stands for itself."""
    path = Path(path)
    for place in (path, path / "best", path / "last"):
        if (place / checkpoint.FILE).exists():
            return place
    raise InputError(f"{path}: no model there; give a run directory made by drm-triton train, or a saved model")


def dataset_of(path: str | Path, given: Path | None = None) -> Dataset:
    """Load the data set a run was trained on: the one given, or where the run found it."""
    path = Path(path)
    if given is not None:
        return Dataset.load(given)
    for place in (path, path.parent):  # a run, or a checkpoint inside one
        if (place / "env.json").exists():
            stored = read_environment(place)["data"].get("path")
            if stored is not None:
                return Dataset.load(stored)
    raise InputError(f"{path} does not say where its data lies; give --dataset")


def read_environment(path: str | Path) -> dict[str, Any]:
    """A run's env.json; it says at least something under `data`."""
    file = Path(path) / "env.json"
    try:
        environment = json.loads(file.read_text("utf-8"))
        if not isinstance(environment, dict) or not isinstance(environment.get("data"), dict):
            raise ValueError("it does not describe a training")
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {file}: {error}; move it away and give --dataset") from error
    return environment


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Lines of a run's metrics.jsonl, less a last one that is cut off, as a crash of the machine may leave it."""
    file = Path(path) / "metrics.jsonl"
    if not file.exists():
        return []
    records = []
    *lines, rest = file.read_bytes().split(b"\n")  # the rest is empty where the file is whole
    for number, line in enumerate([*lines, rest], 1):
        try:
            record = json.loads(line)
            if not isinstance(record, dict) or not isinstance(record.get("epoch"), int):
                raise ValueError("it is not the record of an epoch")
        except ValueError as error:
            if number > len(lines):
                break
            raise DrmError(f"{file} is damaged: line {number} ({error}); remove it and resume the run") from None
        records.append(record)
    return records


def best_record(records: Sequence[dict[str, Any]], monitor: str) -> dict[str, Any]:
    """The record of the epoch with the best validation metric, the earliest of equal ones; empty without validation."""
    name = f"valid/{monitor}"
    return max((record for record in records if name in record), key=lambda record: record[name], default={})


def environment(config: TrainConfig, dataset: Dataset) -> dict[str, Any]:
    """What a result depends on besides its configuration."""
    return {
        "drm_triton": __version__,
        "python": platform.python_version(),
        "packages": versions(),
        "machine": {"system": platform.platform(), "processor": processor(), "cores": os.cpu_count()},
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "seed": config.seed,
        "data": {
            "path": str(dataset.path.absolute()) if dataset.path else None,
            "checksum": dataset.checksum,
            "users": dataset.n_users,
            "items": dataset.n_items,
        },
    }


def csv_text(records: Sequence[dict[str, Any]]) -> str:
    """Records as a CSV table, with the columns of all of them."""
    columns = list(dict.fromkeys(name for record in records for name in record))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue()


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copy2(source, target)
