"""`drm-triton report`: write one HTML page about runs."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from drm_triton.cli import complete
from drm_triton.cli.messages import QuietOption


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN",
            help="Run directories or saved models.",
            show_default=False,
            autocompletion=complete.runs,
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Directory to create.", show_default=False)],
    datasets: Annotated[
        list[str] | None,
        typer.Option(
            "--dataset",
            "-d",
            help="Prepared data set, if it is no longer at the path recorded in a run. May be repeated.",
            show_default=False,
            autocompletion=complete.datasets,
        ),
    ] = None,
    on: Annotated[
        Literal["valid", "test"] | None,
        typer.Option(
            help="Split part to measure on. Default: test, or valid if there is no test part.", show_default=False
        ),
    ] = None,
    users: Annotated[
        int, typer.Option(help="Number of users to show, from the least to the most active.", min=0, max=1000)
    ] = 50,
    k: Annotated[int, typer.Option("--k", help="Number of items to recommend to each user.", min=1, max=100)] = 10,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing report.")] = False,
    quiet: QuietOption = False,
) -> None:
    """Write one self-contained HTML page about a run, or about several runs side by side.

    The page shows metrics with their formulas, learning curves, quality by
    user activity, a sample of users with history and recommendations,
    configuration and data.

    Examples:

      drm-triton report runs/melon --out reports/melon

      drm-triton report runs/dot runs/l2 --out reports/dot-or-l2 --overwrite

      drm-triton report model --dataset data/melon --out reports/model
    """
    from drm_triton.cli.messages import FlagReporter, first_word
    from drm_triton.data import find_dataset

    with first_word(quiet):
        from drm_triton.report import write_report

    paths = [find_dataset(name) for name in datasets or ()]
    page = write_report(runs, out, paths, on, users, k, overwrite, FlagReporter(quiet=quiet))
    print(f"wrote {page} ({page.stat().st_size / 1000:,.0f} kB)")
