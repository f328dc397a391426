"""`drm-triton train`: train a model on a prepared data set."""

import json
import shlex
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

from drm_triton.cli import complete
from drm_triton.cli.messages import FlagReporter
from drm_triton.cli.options import config_options, given, option
from drm_triton.models.configs import CONFIGS, config_class
from drm_triton.names import HEADLINE_METRICS, SPLIT_PARTS

if TYPE_CHECKING:
    from drm_triton.base_config import Config
    from drm_triton.data.dataset import Dataset
    from drm_triton.progress import Reporter
    from drm_triton.recommender import Recommender
    from drm_triton.training.state import EpochEnd, Progress

FILES = "Files and output"


@config_options()
def train(
    dataset: Annotated[
        str | None,
        option(
            "Prepared data set: a directory, or a name under data/.",
            FILES,
            "--dataset",
            "-d",
            complete=complete.datasets,
        ),
    ] = None,
    model: Annotated[str | None, option(f"Model: {', '.join(CONFIGS)}. [drm]", FILES, complete=complete.models)] = None,
    run: Annotated[Path | None, option("Run directory. [runs/<dataset>-<time>]", FILES)] = None,
    config: Annotated[Path | None, option("TOML file with options. Flags override it.", FILES)] = None,
    resume: Annotated[Path | None, option("Run directory to continue.", FILES, complete=complete.runs)] = None,
    from_run: Annotated[
        Path | None,
        option(
            "Run or saved model to update with the interactions, users and items of the data set. Its options hold, "
            "and --epochs is the number of epochs of the update. [15 % of the training]",
            FILES,
            "--from",
            complete=complete.runs,
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        option("Print the configuration, the memory estimate and the sizes of the data, and exit.", FILES, "--dry-run"),
    ] = False,
    quiet: Annotated[bool, option("Do not print progress.", FILES, "--quiet", "-q")] = False,
    as_json: Annotated[bool, option("Print the result as one JSON object.", FILES, "--json")] = False,
    **options: Any,
) -> None:
    """Train a model on a prepared data set.

    Examples:

      drm-triton train --dataset melon

      drm-triton train -d data/ratings --score l2 --factors 128 --run runs/l2

      drm-triton train -d melon --model ease --regularization 300

      drm-triton train --resume runs/l2

      drm-triton train --from runs/l2 -d data/ratings-new --run runs/l2-new
    """
    if from_run is not None:
        _update(from_run, dataset, model, run, config, resume, dry_run, quiet, as_json, given(options))
        return
    from drm_triton.models import model_class

    data, settings, place = _resolve(dataset, model, run, config, resume, given(options))
    untrained = model_class(settings.model)(settings)
    if dry_run:
        _print_plan(data, untrained, as_json)
        return
    show_training(
        lambda display, reporter: untrained.fit(
            data, [display.epoch_end], place, resume is not None, display.batch_end, reporter
        ),
        settings,
        f"{data!r}; run directory {place}",
        place,
        quiet,
        as_json,
    )


def _update(
    from_run: Path,
    dataset: str | None,
    model: str | None,
    run: Path | None,
    config: Path | None,
    resume: Path | None,
    dry_run: bool,
    quiet: bool,
    as_json: bool,
    options: dict[str, Any],
) -> None:
    """Train a model on from an old one."""
    from drm_triton.errors import InputError
    from drm_triton.models import load
    from drm_triton.training.warm_start import FIXED

    if config is not None or resume is not None:
        raise InputError("`from_run` uses the options of the run; leave out `config` and `resume`")
    source = load(from_run)
    fixed = [name for name in FIXED if name in options]
    if model not in (None, source.config.model):
        fixed.append("model")
    if fixed:
        named = ", ".join(f"`{name}`" for name in fixed)
        raise InputError(f"{from_run}: an update cannot change {named}; train a new model")
    epochs = options.pop("epochs", None)
    source.set_params(**options)
    data, _, place = _resolve(dataset, source.config.model, run, None, None, options)
    if dry_run:
        _print_plan(data, source, as_json)
        return
    show_training(
        lambda display, reporter: source.partial_fit(
            data, epochs, [display.epoch_end], place, display.batch_end, reporter
        ),
        source.config,
        f"{data!r}; run directory {place}",
        place,
        quiet,
        as_json,
    )


def show_training(
    fit: "Callable[[Display, Reporter], object]",
    settings: "Config",
    header: str,
    place: Path,
    quiet: bool,
    as_json: bool,
) -> None:
    """Train with progress, stop at Ctrl-C, and print the result.

    Parameters
    ----------
    fit : trains with the callbacks of a display
    settings : the options of the training
    header : first line
    place : the run directory
    quiet, as_json : see `train`
    """
    from drm_triton.training.run import best_record, read_metrics

    reporter = FlagReporter(quiet=quiet or as_json)
    display = Display(reporter, settings, header)
    with stop_on_interrupt(display), warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: reporter.line(f"warning: {message}")
        fit(display, reporter)
    records = read_metrics(place)  # of all epochs, also those before a resume
    best = {k: v for k, v in best_record(records, settings.monitor).items() if k.startswith("valid/")}
    if display.interrupted:  # printed even if quiet: otherwise the work would seem lost
        again = shlex.join(["drm-triton", "train", "--resume", str(place)])
        print(f"stopped; continue with: {again}", file=sys.stderr)
    if as_json:
        epochs = records[-1]["epoch"] if records else 0
        print(json.dumps({"run": str(place), "epochs": epochs, "interrupted": display.interrupted, **best}))
    elif not display.interrupted:
        metrics = ", ".join(f"{name} {best[name]:.4f}" for name in HEADLINE_METRICS if name in best)
        print(f"trained {place}" + (f" (best epoch: {metrics})" if metrics else ""))


def _resolve(
    dataset: str | None,
    model: str | None,
    run: Path | None,
    config: Path | None,
    resume: Path | None,
    options: dict[str, Any],
) -> "tuple[Dataset, Config, Path]":
    """Return the data set, the configuration and the run directory."""
    from drm_triton.data import find_dataset
    from drm_triton.data.dataset import Dataset
    from drm_triton.errors import InputError
    from drm_triton.training.run import check_resumable, dataset_of, existing

    if resume is not None:
        if run is not None or config is not None:
            raise InputError("`resume` uses the directory and configuration of the run; leave out `run` and `config`")
        stored = existing(resume) / "config.toml"
        settings = chosen_config(model, stored).from_toml(stored, options)
        check_resumable(resume, settings, list(options))
        return dataset_of(resume, find_dataset(dataset) if dataset else None), settings, resume
    if dataset is None:
        raise InputError("`dataset` is missing: give the name or path of a prepared data set (drm-triton prepare)")
    kind = chosen_config(model, config)
    settings = kind.from_toml(config, options) if config else kind.from_mapping(options)
    path = find_dataset(dataset)
    data = Dataset.load(path)
    return data, settings, run or Path("runs") / f"{path.name}-{time.strftime('%Y%m%d-%H%M%S')}"


def chosen_config(model: str | None, file: Path | None) -> "type[Config]":
    """Return the class of the options: that of the model given, or else of the one that a file names, or else DRM's."""
    from drm_triton.base_config import read_toml

    named = read_toml(file).get("model") if file else None
    return config_class(model or named or "drm")


def _print_plan(data: "Dataset", model: "Recommender[Any]", as_json: bool) -> None:
    from drm_triton.training.loop import interactions_to_fit

    settings = model.config.resolved()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of options and validation: this prints the plan only
        model.check_fit(data, interactions_to_fit(data, settings))
    memory = model.memory_estimate(data)
    sizes = {part: getattr(data, part).nnz for part in SPLIT_PARTS}
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
    """Progress of a training: a bar for the current epoch, and a line for each finished epoch."""

    def __init__(self, reporter: Any, settings: "Config", header: str) -> None:
        self.reporter, self.settings, self.header = reporter, settings, header
        self.interrupted = False
        self._step: Any = None

    def batch_end(self, state: "Progress", n_lists: int) -> bool:
        """Advance the bar. Return True if the user has pressed Ctrl-C."""
        if self.header:
            self.reporter.line(self.header)
            self.header = ""
        if self._step is None:
            title = f"epoch {state.epoch + 1}/{self.settings.last_epoch}"
            self._step = self.reporter.step(title, total=n_lists, unit="lists").__enter__()
        self._step.advance(state.position - self._step.done)
        if self.interrupted:
            self._step.__exit__(KeyboardInterrupt, None, None)
        return self.interrupted

    def epoch_end(self, end: "EpochEnd") -> bool:
        """Print the line of the epoch."""
        record = end.record
        parts = [f"loss {record['loss']:.4f}"] if "loss" in record else []
        if "lists_per_second" in record:
            parts.append(f"{record['lists_per_second']:,.0f} lists/s")
        left = (self.settings.last_epoch - record["epoch"]) * record["seconds"]
        if left:
            parts.append(f"{left:.0f} s left")
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
    """Stop the training after the current batch at the first Ctrl-C, and immediately at the second."""

    def stop(number: int, frame: FrameType | None) -> None:
        if display.interrupted:
            raise KeyboardInterrupt
        display.interrupted = True
        display.reporter.line("stopping soon (press Ctrl-C again to stop immediately)")

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
