"""`drm-triton bench`: measure the speed of the kernels."""

from pathlib import Path
from typing import Annotated

import typer

from drm_triton.cli.flags import Command, Group

bench = typer.Typer(cls=Group, help="Measure speed on this machine.", no_args_is_help=True)


@bench.callback()
def _bench() -> None:
    pass


@bench.command(cls=Command)
def kernels(
    only: Annotated[
        str | None,
        typer.Option(
            help="Sections to run, separated by commas: peaks, drm, long, step, topk, scaling, compilation.",
            show_default="all",
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Measure fewer sizes, with fewer repeats.")] = False,
    users: Annotated[int, typer.Option(help="Number of users.")] = 15_500,
    items: Annotated[int, typer.Option(help="Number of items.")] = 28_800,
    rho: Annotated[int, typer.Option(help="Number of positives in a list.")] = 3,
    eta: Annotated[int, typer.Option(help="Number of negatives in a list.")] = 45,
    factors: Annotated[int, typer.Option(help="Length of the vectors, d.")] = 64,
    batch: Annotated[int, typer.Option(help="Number of lists in a training step. Must be a multiple of 32.")] = 4096,
    tune: Annotated[
        bool,
        typer.Option(
            "--tune", help="Instead, choose launch options for these sizes on this GPU and store them for later runs."
        ),
    ] = False,
    out: Annotated[
        Path, typer.Option(help="Directory for kernels.csv, kernels.json and plots, which replace older ones.")
    ] = Path("bench-results"),
) -> None:
    """Compare the kernels with plain torch, and measure their time for different sizes.

    Examples:

      drm-triton bench kernels --quick --only drm,topk

      drm-triton bench kernels --factors 128 --out bench-results

      drm-triton bench kernels --tune --factors 128    # on a GPU
    """
    from drm_triton.cli.messages import first_word

    with first_word():
        from drm_triton.bench.kernels import Sizes, run, run_tuning

    sizes = Sizes(users, items, rho, eta, factors, batch)
    if tune:
        run_tuning(sizes)
        return
    run(only.split(",") if only else None, quick, out, sizes)
