"""`drm-triton tune`: search the training options for a data set."""

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from drm_triton.base_config import overridden
from drm_triton.cli import complete
from drm_triton.cli.messages import FlagReporter, first_word
from drm_triton.cli.options import FIELDS, config_options, given, option
from drm_triton.cli.train import FILES, chosen_config, sizes_of
from drm_triton.config import TrainConfig
from drm_triton.models.configs import CONFIGS
from drm_triton.options import declaration

if TYPE_CHECKING:
    from drm_triton.training.tune import Study

SEARCH, FIXED = "Search", "Fixed options, not searched"
SEARCHED = tuple(name for name, field in FIELDS.items() if declaration(field).search)  # unless given


@config_options("objective", "backend", "threads", panel=FIXED)
@config_options(*SEARCHED, panel=FIXED, show_defaults=False)
def tune(
    dataset: complete.DatasetArgument = None,
    dataset_option: Annotated[
        str | None, option("The same as DATASET.", FILES, "--dataset", "-d", complete=complete.datasets)
    ] = None,
    model: Annotated[str | None, option(f"Model: {', '.join(CONFIGS)}. [drm]", FILES, complete=complete.models)] = None,
    study: Annotated[
        Path | None, option("Directory of the study. [studies/<dataset>]", FILES, "--study", "--out", "-o")
    ] = None,
    overwrite: Annotated[bool, option("Discard the finished trials of the study.", FILES, "--overwrite")] = False,
    config: Annotated[Path | None, option("TOML file with options to fix. Flags override it.", FILES)] = None,
    quiet: Annotated[bool, option("Do not print progress.", FILES, "--quiet", "-q")] = False,
    as_json: Annotated[bool, option("Print the result as one JSON object.", FILES, "--json")] = False,
    trials: Annotated[
        int, typer.Option(min=1, help="Total number of trials, including finished ones.", rich_help_panel=SEARCH)
    ] = 20,
    seconds: Annotated[float | None, option("Start no new trial after this number of seconds.", SEARCH)] = None,
    monitor: Annotated[
        str | None, option(f"Validation metric to maximise. [{TrainConfig.monitor}]", SEARCH, "--metric")
    ] = None,
    seed: Annotated[
        int | None, option(f"Seed of the random search and of every trial. [{TrainConfig.seed}]", SEARCH)
    ] = None,
    space: Annotated[
        Path | None, option("TOML file with another search space, in lines such as rho = [1, 2, 3].", SEARCH)
    ] = None,
    **options: Any,
) -> None:
    """Search for good training options with random trials.

    Each trial is trained on the training part and evaluated on the validation
    part. Trial 0 uses the defaults. Options given here or in --config are
    fixed, and the rest of the search space is searched. Every finished trial is
    stored in the study directory. Run the same command again to continue.
    best.toml holds the configuration of the best trial. Ctrl-C loses the
    current trial only, and exits with 130.

    Examples:

      drm-triton tune melon

      drm-triton tune melon --objective hinge+drm --trials 40 --out studies/drm

      drm-triton train melon --config studies/melon/best.toml
    """
    dataset = complete.required_dataset(dataset, dataset_option)
    with first_word(quiet or as_json):
        from drm_triton import atomic
        from drm_triton.data import find_dataset
        from drm_triton.data.dataset import Dataset
        from drm_triton.errors import DrmError
        from drm_triton.training.tune import Study, check_seconds, checked_space

    check_seconds(seconds)
    flags = given({"monitor": monitor, "seed": seed, **options})
    kind = chosen_config(model, config)
    if config is None:
        base = kind.from_mapping(flags)  # here, so that an error of a flag does not name the file of the space
        fixed = flags
    else:
        base = kind.from_toml(config, flags)
        fixed = overridden(kind.read_toml(config), flags)
    searched = checked_space(kind.read_toml(space) if space else base.search_space(), fixed, kind, space or "")
    place = find_dataset(dataset)
    data = Dataset.load(place)
    directory = study or Path("studies") / place.absolute().name
    if overwrite:
        atomic.discard_directory(directory, marker="trials.csv")
    found = Study(directory, data, searched, fixed, kind.model)

    reporter = FlagReporter(quiet=quiet or as_json)
    reporter.line(f"{kind.model} on {sizes_of(data)}")
    reporter.line(f"study directory {found.path}")
    reporter.line(f"{trials} trials ({len(found.records)} finished), to maximise {found.metric} over")
    for name, values in found.space.items():
        reporter.line(f"  {name}: {', '.join(map(str, values))}")
    interrupted = False
    try:
        found.run(trials, seconds, reporter)
    except KeyboardInterrupt:  # the current trial is lost; the finished trials are on disk
        interrupted = True
    left = next(found.remaining(trials), None) is not None
    if not left and found.best is None:
        raise DrmError(
            f"every trial failed, the first because {found.records[0]['error']}; see {found.path}/trials.csv"
        )
    train = ["drm-triton", "train", dataset, "--config", f"{found.path}/best.toml", "--fit-on", "train+valid"]
    if as_json:
        result = {"study": str(found.path), "metric": found.base.monitor, "trials": len(found.records)}
        result |= {"failed": len(found.records) - len(found.ranked), "finished": not left, "interrupted": interrupted}
        print(json.dumps({**result, "best": found.best, "train": shlex.join(train) if found.best else None}))
    elif found.best is not None:
        _print_best(found)
        print(f"\nTrain it on train and valid with:\n  {shlex.join(train)}")
    if left:
        again = shlex.join(["drm-triton", *sys.argv[1:]])
        reporter.line(f"{len(found.records)} of {trials} trials are finished; continue with: {again}")
    elif len(found.records) < trials:
        reporter.line(f"the search space has only these {len(found.records)} trials")
    if interrupted:
        raise typer.Exit(130)


def _print_best(study: "Study", count: int = 5) -> None:
    """Print a table of the best trials, one in each column: with many options, rows would be too long."""
    columns = [["trial", study.metric, "best epoch", "seconds", *study.space]]
    for record in study.ranked[:count]:
        numbers = [f"{record['number']}", f"{record[study.metric]:.4f}", f"{record['best_epoch']}"]
        options = ["default" if record[name] is None else f"{record[name]}" for name in study.space]
        columns.append([*numbers, f"{record['seconds']:.1f}", *options])
    label, *widths = (max(map(len, column)) for column in columns)
    for title, *cells in zip(*columns, strict=True):
        print(title.ljust(label), *(cell.rjust(width) for cell, width in zip(cells, widths, strict=True)), sep="  ")
