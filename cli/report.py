"""`drm-triton report`: runs on one HTML page."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from drm_triton.cli import complete


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN",
            help="Run directories, or saved models.",
            show_default=False,
            autocompletion=complete.runs,
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Directory to write.", show_default=False)],
    dataset: Annotated[
        list[str] | None,
        typer.Option(
            "--dataset",
            "-d",
            help="Prepared data, if not where the runs found it; may be repeated.",
            show_default=False,
            autocompletion=complete.datasets,
        ),
    ] = None,
    on: Annotated[
        Literal["valid", "test"] | None,
        typer.Option(help="Held-out part; default test, or valid if there is none.", show_default=False),
    ] = None,
    users: Annotated[int, typer.Option(help="Users to show, spread over activity.", min=0, max=1000)] = 50,
    k: Annotated[int, typer.Option("--k", help="Items recommended to each of them.", min=1, max=100)] = 10,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier report.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Write one self-contained HTML page about a run, or about several side by side.

    Metrics with their formulas, learning curves, quality by user activity, a
    sample of users with history and recommendations, configuration and data.

    Examples:

      drm-triton report runs/melon --out reports/melon

      drm-triton report runs/dot runs/l2 --out reports/dot-or-l2 --overwrite

      drm-triton report model --dataset data/melon --out reports/model
    """
    from drm_triton.data import find_dataset
    from drm_triton.progress import Reporter
    from drm_triton.report import write_report

    datasets = [find_dataset(name) for name in dataset or ()]
    page = write_report(runs, out, datasets, on, users, k, overwrite, Reporter(quiet=quiet))
    print(f"wrote {page} ({page.stat().st_size / 1000:,.0f} kB)")
