from pathlib import Path
from typing import Annotated

import typer

bench = typer.Typer(help="Measure speed on this machine.", no_args_is_help=True)


@bench.callback()
def _bench() -> None:
    pass


@bench.command()
def kernels(
    only: Annotated[
        str | None,
        typer.Option(
            help="Sections, comma-separated: peaks, drm, step, topk, scaling, compilation.", show_default="all"
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer sizes and repeats.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for kernels.csv, kernels.json and the plots.")] = Path(
        "bench-results"
    ),
) -> None:
    """Race the kernels against plain torch and show how their cost grows."""
    from drm_triton.bench.kernels import run

    run(only.split(",") if only else None, quick, out)
