"""`drm-triton train`: fit a model to a prepared data set."""

import json
import shlex
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

from drm_triton.cli import complete
from drm_triton.cli.messages import in_flags
from drm_triton.cli.options import config_options, given, option

if TYPE_CHECKING:
    from drm_triton.config import TrainConfig
    from drm_triton.data.dataset import Dataset
    from drm_triton.training.state import EpochEnd, State

FILES = "Files and output"


@config_options()
def train(
    dataset: Annotated[
        str | None,
        option(
            "Prepared data: a name under the data directory, or a path.",
            FILES,
            "--dataset",
            "-d",
            complete=complete.datasets,
        ),
    ] = None,
    run: Annotated[Path | None, option("Run directory [runs/<dataset>-<time>].", FILES)] = None,
    config: Annotated[Path | None, option("TOML file of options; flags override it.", FILES)] = None,
    resume: Annotated[Path | None, option("Take up a run where it stopped.", FILES, complete=complete.runs)] = None,
    dry_run: Annotated[
        bool, option("Print configuration, memory estimate and data, and stop.", FILES, "--dry-run")
    ] = False,
    quiet: Annotated[bool, option("No progress.", FILES, "--quiet", "-q")] = False,
    as_json: Annotated[bool, option("Print the result as one JSON object.", FILES, "--json")] = False,
    **options: Any,
) -> None:
    """Train a model on a prepared data set.

    Examples:

      drm-triton train --dataset melon

      drm-triton train -d data/ratings --score l2 --factors 128 --run runs/l2

      drm-triton train --resume runs/l2
    """
    from drm_triton.model import DRM
    from drm_triton.progress import Reporter
    from drm_triton.training.run import best_record, read_metrics

    data, settings, place = _resolved(dataset, run, config, resume, given(options))
    if dry_run:
        _print_plan(data, settings, as_json)
        return
    model = DRM(settings)
    reporter = Reporter(quiet=quiet or as_json)
    display = Display(reporter, settings, f"{data!r}; run directory {place}")
    with stop_on_interrupt(display), warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: reporter.line(f"warning: {in_flags(message)}")
        model.fit(data, [display.epoch_end], place, resume is not None, display.batch_end, reporter)
    records = read_metrics(place)  # of all epochs, where this was a resumed run
    best = {k: v for k, v in best_record(records, settings.monitor).items() if k.startswith("valid/")}
    if display.interrupted:  # told in any case: without it the work done would seem lost
        again = shlex.join(["drm-triton", "train", "--resume", str(place)])
        print(f"stopped; take it up again with: {again}", file=sys.stderr)
    if as_json:
        epochs = records[-1]["epoch"] if records else 0
        print(json.dumps({"run": str(place), "epochs": epochs, "interrupted": display.interrupted, **best}))
    elif not display.interrupted:
        metrics = ", ".join(f"{name} {best[name]:.4f}" for name in HEADLINE if name in best)
        print(f"trained {place}" + (f" (best epoch: {metrics})" if metrics else ""))


HEADLINE = ("valid/ndcg@10", "valid/map@10", "valid/recall@50")


def _resolved(
    dataset: str | None, run: Path | None, config: Path | None, resume: Path | None, options: dict[str, Any]
) -> "tuple[Dataset, TrainConfig, Path]":
    """Data set, configuration and run directory that the options name together."""
    from drm_triton.config import TrainConfig
    from drm_triton.data import find_dataset
    from drm_triton.data.dataset import Dataset
    from drm_triton.errors import InputError
    from drm_triton.training.run import check_resumable, dataset_of, existing

    if resume is not None:
        if run is not None or config is not None:
            raise InputError(
                "--resume takes its directory and configuration from the run; leave out --run and --config"
            )
        settings = TrainConfig.from_toml(existing(resume) / "config.toml", options)
        check_resumable(resume, settings.schedule, list(options))
        return dataset_of(resume, find_dataset(dataset) if dataset else None), settings, resume
    if dataset is None:
        raise InputError("--dataset is missing: give the name or path of a prepared data set (drm-triton prepare)")
    settings = TrainConfig.from_toml(config, options) if config else TrainConfig.from_mapping(options)
    path = find_dataset(dataset)
    data = Dataset.load(path)
    return data, settings, run or Path("runs") / f"{path.name}-{time.strftime('%Y%m%d-%H%M%S')}"


def _print_plan(data: "Dataset", settings: "TrainConfig", as_json: bool) -> None:
    from drm_triton.training.preflight import memory_estimate

    settings = settings.resolved()
    memory = memory_estimate(data, settings)
    sizes = {name: getattr(data, name).nnz for name in ("train", "valid", "test")}
    statistics = {"users": data.n_users, "items": data.n_items, **sizes}
    if as_json:
        print(json.dumps({"config": settings.to_dict(), "memory_bytes": memory, "data": statistics}))
        return
    print(settings.to_toml(), end="")
    print("\n# memory")
    for name, size in {**memory, "total": sum(memory.values())}.items():
        print(f"# {name}: {size / 2**20:,.1f} MiB")
    print("\n# data")
    for name, size in statistics.items():
        print(f"# {name}: {size:,}")


class Display:
    """Progress of a training: a bar for the epoch under way, a line for each that is done."""

    def __init__(self, reporter: Any, settings: "TrainConfig", header: str) -> None:
        self.reporter, self.settings, self.header = reporter, settings, header
        self.interrupted = False
        self._step: Any = None

    def batch_end(self, state: "State", n_lists: int) -> bool:
        """Move the bar; True if the user has asked to stop."""
        if self.header:
            self.reporter.line(self.header)
            self.header = ""
        if self._step is None:
            title = f"epoch {state.epoch + 1}/{self.settings.epochs}"
            self._step = self.reporter.step(title, total=n_lists, unit="lists").__enter__()
        self._step.advance(state.position - self._step.done)
        if self.interrupted:
            self._step.__exit__(KeyboardInterrupt, None, None)
        return self.interrupted

    def epoch_end(self, end: "EpochEnd") -> bool:
        """Print the epoch's line."""
        record = end.record
        parts = [f"loss {record['loss']:.4f}", f"{record['lists_per_second']:,.0f} lists/s"]
        left = (self.settings.epochs - record["epoch"]) * record["seconds"]
        if left:
            parts.append(f"{left:.0f} s to go")
        name = f"valid/{self.settings.monitor}"
        if name in record:
            parts.append(f"{name} {record[name]:.4f}")
            parts.append(f"best {end.state.best:.4f} (epoch {end.state.best_epoch})")
        self._step.note(", ".join(parts))
        self._step.__exit__(None, None, None)
        self._step = None
        return self.interrupted


@contextmanager
def stop_on_interrupt(display: Display) -> Iterator[None]:
    """Let the first Ctrl-C end the training after the batch under way; a second one ends it at once."""

    def stop(number: int, frame: FrameType | None) -> None:
        if display.interrupted:
            raise KeyboardInterrupt
        display.interrupted = True
        display.reporter.line("stopping after this batch (Ctrl-C again to stop at once)")

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
