"""`drm-triton tune`: search the options of a training for a data set."""

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from drm_triton.cli import complete
from drm_triton.cli.options import config_options, given, option
from drm_triton.cli.train import FILES

if TYPE_CHECKING:
    from drm_triton.training.tune import Study

SEARCH, FIXED = "Search", "Fixed, so not searched"
SEARCHED = ("score", "factors", "eta", "tau", "lam", "margin", "lr", "epochs")  # unless they are given


@config_options("backend", "threads", panel=FIXED)
@config_options(*SEARCHED, panel=FIXED, show_defaults=False)
def tune(
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
    study: Annotated[Path | None, option("Directory of the study [studies/<dataset>].", FILES)] = None,
    config: Annotated[Path | None, option("TOML file of options to fix; flags override it.", FILES)] = None,
    quiet: Annotated[bool, option("No progress.", FILES, "--quiet", "-q")] = False,
    as_json: Annotated[bool, option("Print the result as one JSON object.", FILES, "--json")] = False,
    trials: Annotated[
        int, typer.Option(min=1, help="Trials in all, finished ones included.", rich_help_panel=SEARCH)
    ] = 20,
    seconds: Annotated[float | None, option("Start no trial after so many seconds.", SEARCH)] = None,
    monitor: Annotated[str | None, option("Validation metric to maximise [ndcg@10].", SEARCH, "--metric")] = None,
    seed: Annotated[int | None, option("Of the draws and of every training [0].", SEARCH)] = None,
    space: Annotated[
        Path | None, option("TOML file instead of the default space: option = list of values.", SEARCH)
    ] = None,
    **options: Any,
) -> None:
    """Search the training options for a data set, by random trials.

    Each trial is trained on train and judged on validation; trial 0 is the
    defaults. What is given here or in --config is fixed, and the rest of the
    space is searched. Every finished trial is kept in the study directory: the
    same command again goes on from there, and its best.toml is ready to train.

    Examples:

      drm-triton tune --dataset melon

      drm-triton tune -d melon --score l2 --trials 40 --study studies/l2

      drm-triton train -d melon --config studies/melon/best.toml
    """
    from drm_triton.config import TrainConfig, overridden, read_toml
    from drm_triton.data import find_dataset
    from drm_triton.data.dataset import Dataset
    from drm_triton.errors import DrmError, InputError
    from drm_triton.model import DRM
    from drm_triton.progress import Reporter
    from drm_triton.training.preflight import warm_up
    from drm_triton.training.tune import SPACE, Study, checked_space

    if dataset is None:
        raise InputError("--dataset is missing: give the name or path of a prepared data set (drm-triton prepare)")
    if seconds is not None and not seconds >= 0:  # nor not a number
        raise InputError(f"--seconds must be at least 0, got {seconds:g}")
    flags = given({"monitor": monitor, "seed": seed, **options})
    if config is None:
        TrainConfig.from_mapping(flags)  # before the space, which would be blamed for an error of theirs
        fixed = flags
    else:
        TrainConfig.from_toml(config, flags)
        fixed = overridden(read_toml(config), flags)
    searched = checked_space(read_toml(space) if space else SPACE, fixed, space or "")
    place = find_dataset(dataset)
    data = Dataset.load(place)
    found = Study(study or Path("studies") / place.absolute().name, data, searched, fixed)

    reporter = Reporter(quiet=quiet or as_json)
    reporter.line(f"{data!r}; study directory {found.path}")
    reporter.line(f"{trials} trials ({len(found.records)} done), trained on train, to maximise {found.metric} over")
    for name, values in found.space.items():
        reporter.line(f"  {name}: {', '.join(map(str, values))}")
    interrupted = False
    try:
        with reporter.step("load the kernels (compiled at first use)"):
            warm_up(TrainConfig(), *DRM(found.base).backend())  # the defaults, for the trials' own may diverge
        for number, options in found.remaining(trials, seconds):
            title = f"trial {number} ({number + 1}/{trials})"
            with reporter.step(title, found.config(options).epochs, "epochs") as step:
                record = found.attempt(number, options, step.advance)
                step.note(_told(record, found))
    except KeyboardInterrupt:  # the trial under way is given up, and the finished ones are on disk
        interrupted = True
    left = next(found.remaining(trials), None) is not None
    if not left and found.best is None:
        raise DrmError(
            f"every trial failed, the first because {found.records[0]['error']}; see {found.path}/trials.csv"
        )
    train = ["drm-triton", "train", "--config", f"{found.path}/best.toml", "--dataset", dataset]
    train += ["--fit-on", "train+valid"]
    if as_json:
        result = {"study": str(found.path), "metric": found.base.monitor, "trials": len(found.records)}
        result |= {"failed": len(found.records) - len(found.ranked), "finished": not left, "interrupted": interrupted}
        print(json.dumps({**result, "best": found.best, "train": shlex.join(train) if found.best else None}))
        return
    if found.best is not None:
        _print_best(found)
        print(f"\ntrain it on all but test with:\n  {shlex.join(train)}")
    if left:
        again = shlex.join(["drm-triton", *sys.argv[1:]])
        reporter.line(f"{len(found.records)} of {trials} trials are done; to go on, the same again: {again}")
    elif len(found.records) < trials:
        reporter.line(f"the space has no more than these {len(found.records)} trials")


def _told(record: dict[str, Any], study: "Study") -> str:
    """One line of a finished trial."""
    options = ", ".join(f"{name} {record[name]}" for name in study.space if record[name] is not None)
    if record["status"] == "failed":
        return f"failed: {record['error']}; {options}"
    best = study.best or record
    told = f"{study.base.monitor} {record[study.metric]:.4f}, best {best[study.metric]:.4f} (trial {best['number']})"
    return f"{told}; {options}"


def _print_best(study: "Study", count: int = 5) -> None:
    """Table of the best trials, as plain aligned text."""
    rows = [["trial", study.metric, "epoch", "seconds", *study.space]]
    for record in study.ranked[:count]:
        numbers = [f"{record['number']}", f"{record[study.metric]:.4f}", f"{record['best_epoch']}"]
        options = ["default" if record[name] is None else f"{record[name]}" for name in study.space]
        rows.append([*numbers, f"{record['seconds']:.1f}", *options])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
