"""`drm-triton refit`: the final model of a run, trained on all interactions."""

from pathlib import Path
from typing import Annotated

import typer

from drm_triton.cli.complete import DatasetOfRun, RunArgument
from drm_triton.cli.messages import FlagReporter, QuietOption, command_line, first_word
from drm_triton.cli.train import announce, show_training
from drm_triton.errors import InputError


def refit(
    run: RunArgument,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help=r"Run directory of the final model. \[RUN-final]", show_default=False),
    ] = None,
    dataset: DatasetOfRun = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing run.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
    quiet: QuietOption = False,
) -> None:
    """Train the final model of a run: same options, best epoch, all interactions.

    A run is trained on a part of the interactions, so that it can be measured
    on the others. The final model learns from all of them. Use it to
    recommend. It cannot be measured any more.

    Examples:

      drm-triton refit runs/melon

      drm-triton refit runs/melon --out runs/production
    """
    reporter = FlagReporter(quiet=quiet or as_json)
    with first_word(reporter.quiet):
        from drm_triton.data import find_dataset
        from drm_triton.models import load
        from drm_triton.training.run import dataset_of

        model = load(run)
        model.interactions.verify()
        data = dataset_of(run, find_dataset(dataset) if dataset else None)
        settings = model.untrained_final().config
    place = out or run.with_name(f"{run.resolve().name}-final")
    if place.resolve() == run.resolve():
        raise InputError(f"--out {place} is the run itself, which would be lost; give another --out")
    if (place / "config.toml").exists() and not overwrite:
        again = command_line("train", "--resume", place)
        raise InputError(
            f"{place} already contains a run; replace it with --overwrite, give another --out, or continue it with:"
            f"{again}"
        )
    announce(reporter, settings, "on all of", data, place)
    show_training(
        lambda callbacks, on_batch: model.refit(data, callbacks, place, on_batch, reporter, overwrite=overwrite),
        settings,
        place,
        reporter,
        as_json,
    )
