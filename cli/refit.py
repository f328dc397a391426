"""`drm-triton refit`: the final model of a run, trained on all interactions."""

from pathlib import Path
from typing import Annotated

import typer

from drm_triton.cli import complete
from drm_triton.cli.complete import RunArgument
from drm_triton.cli.train import show_training


def refit(
    run: RunArgument,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help=r"Run directory of the final model. \[RUN-final]", show_default=False),
    ] = None,
    dataset: Annotated[
        str | None,
        typer.Option(
            "--dataset",
            "-d",
            help=r"Prepared data set. \[the data set of the run]",
            show_default=False,
            autocompletion=complete.datasets,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Do not print progress.")] = False,
) -> None:
    """Train the final model of a run: same options, best epoch, all interactions.

    A run is trained on a part of the interactions, so that it can be measured
    on the others. The final model learns from all of them. Use it to
    recommend. It cannot be measured any more.

    Examples:

      drm-triton refit runs/melon

      drm-triton refit runs/melon --out runs/production
    """
    from drm_triton.data import find_dataset
    from drm_triton.models import load
    from drm_triton.training.run import dataset_of

    model = load(run)
    data = dataset_of(run, find_dataset(dataset) if dataset else None)
    place = out or run.with_name(f"{run.resolve().name}-final")
    settings = model.untrained_final().config
    show_training(
        lambda display, reporter: model.refit(data, [display.epoch_end], place, display.batch_end, reporter),
        settings,
        f"{data!r}; run directory {place}",
        place,
        quiet,
        as_json,
    )
