"""`drm-triton reproduce`: make a table or a figure of the paper, with the published figures beside ours."""

from pathlib import Path
from typing import Annotated

import typer

from drm_triton.cli import complete
from drm_triton.cli.messages import QuietOption
from drm_triton.names import Target

DATA, BUDGET = "Data", "Budget"


def reproduce(
    what: Annotated[Target, typer.Argument(metavar="WHAT", help="Table or figure of the paper.", show_default=False)],
    dataset: Annotated[
        str | None,
        typer.Option(
            "--dataset",
            "-d",
            help="Data set of the paper (sketchfab, epinion, ml-20m, melon), or any prepared data set. "
            r"\[all four for table1, ml-20m for table5, else sketchfab]",
            rich_help_panel=DATA,
            show_default=False,
            autocompletion=complete.paper_datasets,
        ),
    ] = None,
    raw: Annotated[
        list[str] | None,
        typer.Option(
            help=r"Raw files of --dataset, to prepare it first. May be repeated. \[data/raw/DATASET]",
            rich_help_panel=DATA,
            show_default=False,
        ),
    ] = None,
    scale: Annotated[
        float | None,
        typer.Option(
            help=r"Size of a synthetic stand-in, relative to the published one. \[about 50,000 interactions]",
            rich_help_panel=DATA,
            show_default=False,
        ),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="First look: few trials and epochs, two seeds.", rich_help_panel=BUDGET),
    ] = False,
    trials: Annotated[
        int | None,
        typer.Option(
            help=r"Random points of the search space of the paper for each model. \[8]",
            rich_help_panel=BUDGET,
            show_default=False,
        ),
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(help=r"Number of final trainings. \[5, for table5 3]", rich_help_panel=BUDGET, show_default=False),
    ] = None,
    epochs: Annotated[
        int | None,
        typer.Option(
            help=r"Most epochs of a training. \[the default of each model, for table5 20, for figure2 60]",
            rich_help_panel=BUDGET,
            show_default=False,
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(help=r"Processes, with one thread each. \[all cores]", rich_help_panel=BUDGET, show_default=False),
    ] = None,
    models: Annotated[
        str | None,
        typer.Option(
            help=r"For table3 and figure3: models, separated by commas. \[table3: all of the paper; figure3: warp, "
            "cml, drm-dot, drm-l2]",
            rich_help_panel=BUDGET,
            show_default=False,
        ),
    ] = None,
    runs: Annotated[
        list[Path] | None,
        typer.Option(
            "--run",
            help="For figure3: run directory or saved model to show instead. May be repeated.",
            rich_help_panel=BUDGET,
            show_default=False,
            autocompletion=complete.runs,
        ),
    ] = None,
    comparison: Annotated[
        Path | None,
        typer.Option(
            help="For table3, table4 and figure3: directory of the trainings, which they share. "
            r"\[trainings-DATASET beside --out]",
            rich_help_panel=BUDGET,
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="Directory for the table as .md, .tex and .json, and the picture, which replace older ones. "
            r"\[reproduce/WHAT-DATASET]",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
    quiet: QuietOption = False,
) -> None:
    """Reproduce a table or a figure of the paper, with the published figures beside ours.

    table1: statistics of the data. table3: all models. table4: DRM alone.
    table5: correlation of loss and metric. figure2: effect of rho. figure3:
    groups of users. Where the real data is absent, a synthetic stand-in is
    generated, and everything is labelled so. Run the same command again to
    continue after a stop.

    Examples:

      drm-triton reproduce table1

      drm-triton reproduce table3 --dataset epinion --raw ratings_data.txt

      drm-triton reproduce figure2 --dataset melon --quick
    """
    import json

    from drm_triton.cli.messages import FlagReporter, continuable, first_word, in_flags

    with first_word(quiet or as_json):
        from drm_triton.experiments.protocol import names_of
        from drm_triton.experiments.reproduce import reproduce as make

    with continuable():
        result, files = make(
            what,
            dataset,
            out,
            raw,
            scale,
            quick,
            FlagReporter(quiet=quiet or as_json),
            trials=trials,
            seeds=seeds,
            epochs=epochs,
            workers=workers,
            models=None if models is None else names_of(models),
            runs=runs or None,
            comparison=comparison,
        )
    if as_json:
        print(json.dumps({**result.to_json(), "files": [str(file) for file in files]}, ensure_ascii=False))
        return
    print(in_flags(result.text()))
    print("\n".join(f"{result.prefix}wrote {file}" for file in files))
