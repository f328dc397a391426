"""The run directory: what training writes to disk, and how it resumes.

config.toml     the resolved configuration
env.json        versions, machine, GPU and its launch options, data set and its checksum; in an update, the old model
metrics.jsonl   one line per epoch; metrics.csv has the same columns
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

from torch import Tensor

from drm_triton import atomic
from drm_triton._version import __version__
from drm_triton.base_config import C, Config
from drm_triton.config import TrainConfig
from drm_triton.data import store
from drm_triton.data.dataset import CSR, Dataset
from drm_triton.data.new_rows import filters_of
from drm_triton.data.prepare.inputs import printable
from drm_triton.errors import DrmError, InputError
from drm_triton.kernels import get_backend, why_not
from drm_triton.lock import Lock
from drm_triton.machine import processor, versions
from drm_triton.names import BackendChoice
from drm_triton.training import checkpoint
from drm_triton.training.state import EpochEnd, Progress, checked_counters
from drm_triton.training.warm_start import WarmStart

Stored = tuple[dict[str, Tensor], dict[str, Any]]  # tensors and counters of a checkpoint
MARKER = "last/data/meta.json"  # by which `overwrite` recognises a run; any directory may have a config.toml
# options that do not change what was trained so far
RESUMABLE = {"epochs", "stop_after", "patience", "threads", "backend"}


class Run:
    """An open run directory. As a callback of `loop.train` it records each epoch."""

    def __init__(self, path: Path, config: Config, records: list[dict[str, Any]], lock: Lock) -> None:
        self.path, self.config, self.records, self.lock = path, config.resolved(), records, lock

    @classmethod
    def create(
        cls,
        path: str | Path,
        config: Config,
        dataset: Dataset,
        fit: CSR,
        overwrite: bool = False,
        start: WarmStart | None = None,
        more: dict[str, Any] | None = None,
    ) -> "Run":
        """Create a run directory. A directory that is not empty is refused, unless it is a run to `overwrite`.

        The start of an update is stored as the first checkpoint, so that the run resumes without the old model. `more`
        goes to env.json.
        """
        dataset.verify()  # its checksum is recorded
        path = Path(path) if overwrite and Path(path).is_dir() else new_directory(path)
        described = environment(config, dataset) | ({} if start is None else {"from": start.origin}) | (more or {})
        marker = MARKER if overwrite else None  # without a marker, only an empty directory is replaced
        with atomic.directory(path, True, marker, last="config.toml") as folder:
            interactions_only(dataset, fit, config.fit_parts).save(folder / "last" / "data")
            (folder / "best").mkdir()
            if start is not None and start.state is not None:
                _write_state(folder / "last" / checkpoint.FILE, config.resolved(), start.state)
            shutil.copytree(folder / "last" / "data", folder / "best" / "data", copy_function=atomic.link_or_copy)
            atomic.write_text(folder / "env.json", json.dumps(described, indent=2) + "\n")
            atomic.write_text(folder / "config.toml", config.resolved().to_toml())
            lock = Lock(folder, "run")  # here, so that there is no moment without it
        return cls(path, config, [], lock)

    @classmethod
    def open(
        cls,
        path: str | Path,
        dataset: Dataset,
        config: Config,
        layout: dict[str, Tensor] | None = None,
        rows: dict[str, slice] | None = None,
    ) -> tuple["Run", Stored | None]:
        """Open a run and read its last checkpoint: tensors and counters, or None if it stopped before the first one.

        `config` may differ from that of the run in the RESUMABLE options. It is written to config.toml. `layout` and
        `rows`: see `last_checkpoint`.
        """
        path, config = existing(path), config.resolved()
        lock = Lock(path, "run")  # before anything is read: another process may be replacing the run
        try:
            stored = type(config).from_toml(path / "config.toml").resolved()
            changed = [name for name in config.fields() if getattr(stored, name) != getattr(config, name)]
            check_resumable(path, config, changed)
            dataset.verify()  # its checksum is compared
            recorded = str(read_environment(path)["data"].get("checksum"))
            if recorded != dataset.checksum:
                raise InputError(
                    f"{path} was trained on other data than {dataset.path or 'the data set given'} "
                    f"(checksum {recorded[:12]}, not {dataset.checksum[:12]}); prepare the same data or start a new run"
                )
            if changed:
                atomic.write_text(path / "config.toml", config.to_toml())
            return cls._of_last_checkpoint(path, config, changed, lock, layout, rows)
        except BaseException:
            lock.release()
            raise

    @classmethod
    def _of_last_checkpoint(
        cls,
        path: Path,
        config: Config,
        changed: Sequence[str],
        lock: Lock,
        layout: dict[str, Tensor] | None,
        rows: dict[str, slice] | None,
    ) -> tuple["Run", Stored | None]:
        atomic.clean(path.resolve())
        atomic.clean_within(path)
        for which in ("last", "best"):
            checkpoint.remove_leftovers(path / which / checkpoint.FILE)
        if not (path / "last" / checkpoint.FILE).exists():
            return cls(path, config, [], lock), None
        tensors, counters = last_checkpoint(path, layout, rows)
        if counters.get("first_epoch") and config.epochs_matter and "stop_after" in changed:
            raise InputError(
                f"{path}: a resumed update cannot change `stop_after`: the linear schedule of the learning rate "
                "depends on it"
            )
        # A run that was killed after recording an epoch and before saving it has one line too many.
        records = [record for record in read_metrics(path) if record["epoch"] <= counters["epoch"]]
        run = cls(path, config, records, lock)
        if records:
            run.write_metrics()  # drop that line even if no epoch follows
        return run, (tensors, counters)

    def __call__(self, end: EpochEnd) -> None:
        """Record an epoch: first its metrics, then the checkpoint."""
        self.records.append(end.record)
        self.write_metrics()
        self.save(end.state, best=end.improved)

    def write_metrics(self) -> None:
        """Write metrics.jsonl and metrics.csv."""
        self.lock.check(self.path)
        lines = "".join(json.dumps(record) + "\n" for record in self.records)
        atomic.write_text(self.path / "metrics.jsonl", lines)
        atomic.write_text(self.path / "metrics.csv", csv_text(self.records))

    def save(self, state: Progress, best: bool = False) -> None:
        """Write the state to last/, and also to best/ if it is the best so far."""
        self.lock.check(self.path)
        also = self.path / "best" / checkpoint.FILE if best else None
        _write_state(self.path / "last" / checkpoint.FILE, self.config, state, also)

    def draw_curves(self) -> None:
        """Write curves.png."""
        from drm_triton.plots import learning_curves

        self.lock.check(self.path)
        config, best = self.config, best_record(self.records, self.config.monitor).get("epoch")
        objective = f", objective {config.objective}" if isinstance(config, TrainConfig) else ""
        title = f"{printable(self.path.resolve().name)}: model {config.model}{objective}"
        factors = {"drm": config.lam} if isinstance(config, TrainConfig) else {}
        atomic.write_file(
            self.path / "curves.png", lambda place: learning_curves(self.records, place, title, best, factors)
        )


def last_checkpoint(
    path: Path, layout: dict[str, Tensor] | None = None, rows: dict[str, slice] | None = None
) -> Stored:
    """Read the last checkpoint of a run.

    Parameters
    ----------
    path : the run
    layout : the tensors that it must have, see `Model.layout`; None if they are not known
    rows : the rows to read, see `checkpoint.read_rows`; None for all
    """
    file = path / "last" / checkpoint.FILE
    tensors, metadata = checkpoint.read_tensors(file) if rows is None else checkpoint.read_rows(file, rows)
    if layout is not None:
        wanted = layout if rows is None else {name: layout[name][own] for name, own in rows.items()}
        checkpoint.check_layout(tensors, wanted, file)
    return tensors, checked_counters(metadata.get("training"), file)


def _write_state(path: Path, config: Config, state: Progress, also: Path | None = None) -> None:
    checkpoint.write_tensors(path, state.tensors(), described_state(config, state), also)


def described_state(config: Config, state: Progress) -> dict[str, Any]:
    """Return the metadata of a checkpoint."""
    return {"model": config.model, "config": config.to_dict(), "training": state.counters()}


def interactions_only(dataset: Dataset, fit: CSR, fit_parts: Sequence[str] = ("train",)) -> Dataset:
    """Return the data set that a model keeps: without weights, and with the ids of the original.

    Its `train` part is what the model was fit on. The parts that it was not fit on and the dropped pairs stay, because
    a user has these items too, so they are never recommended. The filters stay for rows that follow.
    """
    valid, test = (
        CSR.empty(fit.shape) if name in fit_parts else getattr(dataset, name).unweighted() for name in ("valid", "test")
    )
    meta = {"source": "model", "filters": filters_of(dataset.meta)}
    kept = Dataset(fit.unweighted(), valid, test, dataset.users, dataset.items, meta, dropped=dataset.dropped)
    kept.dropped_elsewhere, kept.is_pandas = dataset.dropped_elsewhere, dataset.is_pandas
    return kept


def new_directory(path: str | Path) -> Path:
    """Create the directory of a new run. A directory that is not empty is refused."""
    path = Path(path)
    try:
        if (path / "config.toml").exists():
            raise InputError(
                f"{path} already contains a run; resume it with `resume`, replace it with `overwrite`, or give another "
                "`run`"
            )
        place = Path(os.path.realpath(path))
        place.mkdir(parents=True, exist_ok=True)  # also where a link leads that leads nowhere
        atomic.clean_fixed(place)
        if not atomic.is_empty(path):
            raise InputError(f"{path} exists and is not empty; give another `run`")
    except OSError as error:
        raise InputError(f"{path}: cannot create the run directory ({error.strerror}); give another `run`") from None
    return path


def check_resumable(path: Path, config: Config, changed: Sequence[str]) -> None:
    """Raise if a run cannot resume with these options changed."""
    fixed = sorted(set(changed) - RESUMABLE)
    if fixed:
        allowed_here = sorted(RESUMABLE & config.fields().keys())
        refused, allowed = (", ".join(f"`{name}`" for name in names) for names in (fixed, allowed_here))
        raise InputError(f"{path}: a resumed run cannot change {refused}, only {allowed}")
    if config.epochs_matter and "epochs" in changed:
        raise InputError(
            f"{path}: a resumed run cannot change `epochs`: the linear schedule of the learning rate depends on it"
        )


def continuing(path: str | Path, config: C) -> C:
    """Return the options for going on with a run, see `Config.continuing`."""
    return config.continuing(type(config).from_toml(existing(path) / "config.toml"))


def existing(path: str | Path) -> Path:
    """Return the path of a run directory, verified."""
    path = Path(path)
    if not (path / "config.toml").exists():
        raise InputError(f"{path} is not a run directory: it has no config.toml; give a directory that training wrote")
    return path


def checkpoint_directory(path: str | Path) -> Path:
    """Return the directory of a run's model: its best checkpoint, else its last. A checkpoint directory is accepted."""
    path = Path(path)
    for place in (path, path / "best", path / "last"):
        if (place / checkpoint.FILE).exists():
            return place
    raise InputError(f"{path}: there is no model; give a run directory or a saved model")


def dataset_of(path: str | Path, given: Path | None = None) -> Dataset:
    """Load the data set of a run: from `given`, or else from where the run has it."""
    path = Path(path)
    if given is not None:
        return Dataset.load(given)
    for place in (path, path.parent):  # a run, or a checkpoint inside one
        if (place / "env.json").exists():
            stored = dataset_path(place, read_environment(place))
            if stored is not None:
                return Dataset.load(stored)
    raise InputError(f"{path} does not record where its data set is; give `dataset`")


def dataset_path(run: Path, environment: dict[str, Any]) -> Path | None:
    """Return where the data set of a run is: as recorded, or in the run itself if it was not stored before.

    None if it is nowhere, because it had weights, which a run does not keep.
    """
    data = environment["data"]
    if data.get("path") is not None:
        return Path(data["path"])
    own = run / "last" / "data"
    return own if store.read_meta(own).get("checksum") == data.get("checksum") else None


def read_environment(path: str | Path) -> dict[str, Any]:
    """Read env.json of a run and verify that it has an entry `data`."""
    file = Path(path) / "env.json"
    try:
        environment = json.loads(file.read_text("utf-8"))
        if not isinstance(environment, dict) or not isinstance(environment.get("data"), dict):
            raise ValueError("it does not describe a run")
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"cannot read {file}: {error}; move the file away, or start a new run") from error
    return environment


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Read metrics.jsonl of a run. A last line that is cut off, as after a crash of the machine, is dropped."""
    file = Path(path) / "metrics.jsonl"
    if not file.exists():
        return []
    records = []
    *lines, rest = file.read_bytes().split(b"\n")  # the rest is empty if the file is complete
    for number, line in enumerate([*lines, rest], 1):
        try:
            record = json.loads(line)
            if not isinstance(record, dict) or not isinstance(record.get("epoch"), int):
                raise ValueError("it is not the record of an epoch")
        except (ValueError, RecursionError) as error:
            if number > len(lines):
                break
            raise DrmError(f"{file} is damaged: line {number} ({error}); remove it and resume the run") from None
        records.append(record)
    return records


def best_record(records: Sequence[dict[str, Any]], monitor: str) -> dict[str, Any]:
    """Return the record of the epoch with the best validation metric (the earliest if tied), or {} if there is none."""
    name = f"valid/{monitor}"
    return max((record for record in records if name in record), key=lambda record: record[name], default={})


def environment(config: Config, dataset: Dataset) -> dict[str, Any]:
    """Return what a result depends on besides its configuration."""
    return {
        "drm_triton": __version__,
        "python": platform.python_version(),
        "packages": versions(),
        "machine": {
            "system": platform.platform(),
            "processor": processor(),
            "cores": os.cpu_count(),
            **vectors(),
        },
        "gpu": gpu_in_use(config.backend),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "seed": config.seed,
        "following": config.following(dataset.n_items),
        "data": {
            "path": str(dataset.path.absolute()) if dataset.path else None,
            "checksum": dataset.checksum,
            "users": dataset.n_users,
            "items": dataset.n_items,
        },
    }


def vectors() -> dict[str, Any]:
    """Return what the CPU kernels are compiled for: LLVM's name of the processor, and the bits of a vector.

    Both decide the order of sums, and with it how results are rounded. They are None without Numba.
    """
    if why_not("cpu") is not None:
        return {"compiled_for": None, "vector_bits": None}
    from drm_triton.kernels.cpu.runtime.numba_private import target_name
    from drm_triton.kernels.cpu.runtime.simd import LANES

    return {"compiled_for": target_name(), "vector_bits": 32 * LANES}


def gpu_in_use(backend: BackendChoice) -> dict[str, Any] | None:
    """Return the GPU that trains and the launch options that were chosen for it, None if the backend uses no GPU."""
    if get_backend(None if backend == "auto" else backend).name != "triton":
        return None
    from drm_triton.kernels.gpu import tuning

    return tuning.in_force()


def csv_text(records: Sequence[dict[str, Any]]) -> str:
    """Return records as a CSV table with the union of their columns."""
    columns = list(dict.fromkeys(name for record in records for name in record))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue()
