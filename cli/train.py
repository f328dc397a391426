"""`drm-triton train`: train a model on a prepared data set."""

import json
import shlex
import signal
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from drm_triton.cli import complete
from drm_triton.cli.messages import FlagReporter, first_word, wrapped
from drm_triton.cli.options import config_options, given, option
from drm_triton.cli.together import announce_restart, in_world, is_first, launch, launched, train_together
from drm_triton.errors import InputError
from drm_triton.models.configs import CONFIGS, config_class
from drm_triton.names import HEADLINE_METRICS, RANK_TIMEOUT, SPLIT_PARTS, LogTo
from drm_triton.progress import counted

if TYPE_CHECKING:
    from drm_triton.base_config import Config
    from drm_triton.data.dataset import Dataset
    from drm_triton.progress import Reporter
    from drm_triton.recommender import Recommender
    from drm_triton.training.state import BatchCallback, EpochCallback, EpochEnd, Progress

FILES = "Files and output"


@config_options()
def train(
    dataset: complete.DatasetArgument = None,
    dataset_option: Annotated[
        str | None, option("The same as DATASET.", FILES, "--dataset", "-d", complete=complete.datasets)
    ] = None,
    model: Annotated[str | None, option(f"Model: {', '.join(CONFIGS)}. [drm]", FILES, complete=complete.models)] = None,
    run: Annotated[Path | None, option("Run directory. [runs/<dataset>-<time>]", FILES, "--run", "--out", "-o")] = None,
    overwrite: Annotated[bool, option("Replace an existing run.", FILES, "--overwrite")] = False,
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
    devices: Annotated[
        int | None,
        option(
            "Number of processes on this machine that train together, each on its GPU, or on its share of the cores.",
            FILES,
        ),
    ] = None,
    timeout: Annotated[
        float, option(f"Seconds that processes that train together wait for each other. [{RANK_TIMEOUT}]", FILES)
    ] = RANK_TIMEOUT,
    log: Annotated[LogTo | None, option("Also log each epoch to this service.", FILES)] = None,
    quiet: Annotated[bool, option("Do not print progress.", FILES, "--quiet", "-q")] = False,
    as_json: Annotated[bool, option("Print the result as one JSON object.", FILES, "--json")] = False,
    **options: Any,
) -> None:
    """Train a model on a prepared data set.

    Examples:

      drm-triton train melon

      drm-triton train data/ratings --score l2 --factors 128 --out runs/l2

      drm-triton train melon --model ease --regularization 300

      drm-triton train --resume runs/l2

      drm-triton train data/ratings-new --from runs/l2 --out runs/l2-new

      drm-triton train melon --devices 4

      torchrun --nproc-per-node 4 -m drm_triton train melon --out runs/melon

    At Ctrl-C and at SIGTERM, training is saved and stops with exit code 130 or 143.
    """
    with in_world(devices, timeout) as world:
        starts = devices is not None and world is None and not dry_run  # only starts the processes that train
        reporter = FlagReporter(quiet=quiet or as_json or dry_run or starts or not is_first())
        if from_run is not None:
            if config is not None or resume is not None:
                raise InputError("`from_run` uses the options of the run; leave out `config` and `resume`")
            if devices is not None or world is not None:
                raise InputError("`from_run` works in one process; leave out `devices` and torchrun")
            name = complete.required_dataset(dataset, dataset_option)
            _update(from_run, name, model, run, overwrite, given(options), dry_run, reporter, as_json, log)
            return

        def resolve() -> "tuple[Dataset, Config, Path]":
            return _resolve(dataset, dataset_option, model, run, overwrite, config, resume, given(options))

        with first_word(reporter.quiet):
            data, settings, place = resolve() if world is None else world.together(resolve)
        if (devices is not None or world is not None) and settings.model != "drm":
            raise InputError(
                f"several processes train `model` drm only, not {settings.model}; leave out `devices` and torchrun"
            )
        if starts:
            assert devices is not None
            launch(devices)
        if world is not None:
            announce_restart(reporter, run or resume)
        announce(reporter, settings, "on", data, place)
        with first_word(reporter.quiet):
            from drm_triton.models import model_class

            untrained = model_class(settings.model)(settings)
        if dry_run:
            if is_first():
                _print_plan(data, untrained, as_json, devices if world is None else world.size)
        elif world is not None:
            train_together(world, untrained, data, place, resume is not None, reporter, overwrite, as_json, log)
        else:
            show_training(
                lambda callbacks, on_batch: untrained.fit(
                    data, callbacks, place, resume is not None, on_batch, reporter, overwrite=overwrite
                ),
                settings,
                place,
                reporter,
                as_json,
                log,
            )


def _update(
    from_run: Path,
    dataset: str,
    model: str | None,
    run: Path | None,
    overwrite: bool,
    options: dict[str, Any],
    dry_run: bool,
    reporter: "Reporter",
    as_json: bool,
    log: LogTo | None,
) -> None:
    """Train a model on from an old one."""
    with first_word(reporter.quiet):
        from drm_triton.data import find_dataset
        from drm_triton.data.dataset import Dataset
        from drm_triton.models import load
        from drm_triton.training.warm_start import FIXED

        source, path = load(from_run), find_dataset(dataset)
        source.interactions.verify()  # the update learns from what the old model keeps
        data, place = Dataset.load(path), run or new_run(path)
    fixed = [name for name in FIXED if name in options]
    if model not in (None, source.config.model):
        fixed.append("model")
    if fixed:
        named = ", ".join(f"`{name}`" for name in fixed)
        raise InputError(f"{from_run}: an update cannot change {named}; train a new model")
    epochs = options.pop("epochs", None)
    source.set_params(**options)
    reporter.line(f"{source.config.model} from {from_run} on {sizes_of(data)}")
    reporter.line(f"run directory {place}")
    if dry_run:
        _print_plan(source.with_kept(data), source, as_json)
        return
    show_training(
        lambda callbacks, on_batch: source.partial_fit(
            data, epochs, callbacks, place, on_batch, reporter, overwrite=overwrite
        ),
        source.config,
        place,
        reporter,
        as_json,
        log,
    )


def show_training(
    fit: "Callable[[Sequence[EpochCallback], BatchCallback], object]",
    settings: "Config",
    place: Path,
    reporter: "Reporter",
    as_json: bool,
    log: LogTo | None = None,
    interrupt: "Interrupt | None" = None,
) -> None:
    """Train, stop at a signal, and print the result.

    Parameters
    ----------
    fit : trains with these callbacks of epochs and batches
    settings : the options of the training
    place : the run directory
    reporter : prints warnings
    as_json, log : see `train`
    interrupt : what handles the signals, if others need it too
    """
    from drm_triton.hooks import hook
    from drm_triton.training.run import best_record, read_metrics

    with interrupt or Interrupt(reporter) as interrupt, ExitStack() as stack, warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: reporter.line(wrapped(f"warning: {message}"))
        callbacks: list[EpochCallback] = [interrupt.epoch_end]
        if log is not None:
            callbacks.append(stack.enter_context(hook(log, place, settings)))
        fit(callbacks, interrupt.batch_end)
    records = read_metrics(place)  # of all epochs, also those before a resume
    found = best_record(records, settings.monitor)
    best = {k: v for k, v in found.items() if k.startswith("valid/")}
    if interrupt.signal:  # printed even if quiet: otherwise the work would seem lost
        again = shlex.join(["drm-triton", "train", "--resume", str(place)])
        print(f"stopped; continue with: {again}", file=sys.stderr)
    if as_json:
        epochs = records[-1]["epoch"] if records else 0
        print(json.dumps({"run": str(place), "epochs": epochs, "interrupted": bool(interrupt.signal), **best}))
    elif not interrupt.signal:
        print(f"trained {place}")
        if best:
            metrics = ", ".join(f"{name} {best[name]:.4f}" for name in HEADLINE_METRICS if name in best)
            print(f"best epoch {found['epoch']}: {metrics}")
    if interrupt.signal:
        raise typer.Exit(128 + interrupt.signal)


def announce(reporter: "Reporter", settings: "Config", on: str, data: "Dataset", place: Path) -> None:
    """Print what is trained, on which data, with which values of options that follow from them, and where."""
    reporter.line(f"{settings.model} {on} {sizes_of(data)}")
    if values := settings.following(data.n_items):
        named = ", ".join(f"{name} {value:.3g}" for name, value in values.items())
        reporter.line(f"{named}, from the number of items")
    reporter.line(f"run directory {place}")


def sizes_of(data: "Dataset") -> str:
    """Return the name and the sizes of a data set.

    The name of the directory, not its whole path, so that the line is short.
    """
    name = f"{data.path.absolute().name}: " if data.path else ""
    sizes = counted(data.n_users, "user"), counted(data.n_items, "item"), counted(data.n_interactions, "interaction")
    return name + ", ".join(sizes)


def _resolve(
    dataset: str | None,
    dataset_option: str | None,
    model: str | None,
    run: Path | None,
    overwrite: bool,
    config: Path | None,
    resume: Path | None,
    options: dict[str, Any],
) -> "tuple[Dataset, Config, Path]":
    """Return the data set, the configuration and the run directory."""
    from drm_triton.data import find_dataset
    from drm_triton.data.dataset import Dataset

    if resume is not None:
        from drm_triton.training.run import check_resumable, dataset_of, existing

        if run is not None or config is not None or overwrite:
            raise InputError(
                "`resume` uses the directory and configuration of the run; leave out `run`, `config` and `overwrite`"
            )
        stored = existing(resume) / "config.toml"
        settings = chosen_config(model, stored).from_toml(stored, options)
        check_resumable(resume, settings, list(options))
        given_dataset = complete.either(dataset, dataset_option, "dataset")
        return dataset_of(resume, find_dataset(given_dataset) if given_dataset else None), settings, resume
    name = complete.required_dataset(dataset, dataset_option)
    kind = chosen_config(model, config)
    settings = kind.from_toml(config, options) if config else kind.from_mapping(options)
    path = find_dataset(name)
    data = Dataset.load(path)
    return data, settings, run or new_run(path)


def new_run(dataset: Path) -> Path:
    """Return the default directory of a new run."""
    return Path("runs") / f"{dataset.name}-{time.strftime('%Y%m%d-%H%M%S')}"


def chosen_config(model: str | None, file: Path | None) -> "type[Config]":
    """Return the class of the options: that of the model given, or else of the one that a file names, or else DRM's."""
    from drm_triton.base_config import read_toml

    named = read_toml(file).get("model") if file else None
    return config_class(model or named or "drm")


def _print_plan(data: "Dataset", model: "Recommender[Any]", as_json: bool, n_ranks: int | None = None) -> None:
    """Print options, memory and data. With several processes, the memory is that of each."""
    from drm_triton.training.loop import interactions_to_fit

    settings = model.config.resolved()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of options and validation: this prints the plan only
        model.check_fit(data, interactions_to_fit(data, settings))
    memory = model.memory_estimate(data)
    if n_ranks is not None:
        from drm_triton.distributed.engine import memory_of_rank

        memory = memory_of_rank(data, settings, n_ranks)
    sizes = {part: getattr(data, part).nnz for part in SPLIT_PARTS}
    statistics = {"users": data.n_users, "items": data.n_items, **sizes}
    if as_json:
        print(json.dumps({"config": settings.to_dict(), "memory_bytes": memory, "data": statistics}))
        return
    print(settings.to_toml(), end="")
    print("\n# memory" if n_ranks is None else f"\n# memory of each of {n_ranks} processes")
    for name, size in {**memory, "total": sum(memory.values())}.items():
        print(f"# {name}: {size / 2**20:,.1f} MiB")
    print("\n# data")
    for name, size in statistics.items():
        print(f"# {name}: {size:,}")


class Interrupt:
    """Ends a training after the current batch at the first Ctrl-C or SIGTERM, and immediately at the second.

    A service manager or a batch system sends SIGTERM before it kills. The command then exits with 128 + the signal.
    """

    def __init__(self, reporter: "Reporter") -> None:
        self.reporter = reporter
        self.signal = 0  # number of the signal that asked to stop
        self._before: dict[int, Any] = {}

    def batch_end(self, state: "Progress", n_lists: int) -> bool:
        """Return whether to stop."""
        return self.signal > 0

    def epoch_end(self, end: "EpochEnd") -> bool:
        """Return whether to stop."""
        return self.signal > 0

    def __enter__(self) -> "Interrupt":
        self._before = {number: signal.signal(number, self._stop) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            # One of several processes is about to end, and torchrun may tell it to, because another one has.
            ending = launched() and number == signal.SIGTERM
            signal.signal(number, signal.SIG_IGN if ending else handler)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if launched() and number == signal.SIGTERM:  # torchrun may send it again, and also when a process has failed
            self.signal = self.signal or number
            return
        if self.signal:
            sys.exit(128 + number)
        self.signal = number
        self.reporter.line("stopping soon (press Ctrl-C again to stop immediately)")
