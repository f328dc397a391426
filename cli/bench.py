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
    users: Annotated[int, typer.Option(help="Users of the races.")] = 15_500,
    items: Annotated[int, typer.Option(help="Items of the races.")] = 28_800,
    rho: Annotated[int, typer.Option(help="Positives in a list.")] = 3,
    eta: Annotated[int, typer.Option(help="Negatives in a list.")] = 45,
    factors: Annotated[int, typer.Option(help="Factors d.")] = 64,
    batch: Annotated[int, typer.Option(help="Lists in a step.")] = 4096,
    out: Annotated[Path, typer.Option(help="Folder for kernels.csv, kernels.json and the plots.")] = Path(
        "bench-results"
    ),
) -> None:
    """Race the kernels against plain torch and show how their cost grows.

    Examples:

      drm-triton bench kernels --quick --only drm,topk

      drm-triton bench kernels --factors 128 --out bench-results
    """
    from drm_triton.bench.kernels import Sizes, run

    run(only.split(",") if only else None, quick, out, Sizes(users, items, rho, eta, factors, batch))
