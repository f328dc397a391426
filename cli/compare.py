"""`drm-triton compare`: test the differences between runs."""

from pathlib import Path
from typing import Annotated

import typer

from drm_triton import atomic
from drm_triton.cli import complete
from drm_triton.cli.measuring import (
    DEFAULT_CUT_OFFS,
    CutOffsOption,
    MinTrainOption,
    OnOption,
    check_min_train,
    parse_cut_offs,
)
from drm_triton.names import COMPARED_METRICS, METRICS, MIN_TRAIN


def compare(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="RUN",
            help="Two or more run directories or saved models, trained on the same data set.",
            show_default=False,
            autocompletion=complete.runs,
        ),
    ] = None,
    on: OnOption = "test",
    k: CutOffsOption = DEFAULT_CUT_OFFS,
    metrics: Annotated[
        str,
        typer.Option(
            help=f"Metrics, separated by commas: {', '.join(METRICS)}, at each cut-off of --k, or with a cut-off of "
            "their own, such as recall@20."
        ),
    ] = ",".join(COMPARED_METRICS),
    dataset: Annotated[
        str | None,
        typer.Option(
            "--dataset",
            "-d",
            help=r"Prepared data set. \[the data set of the runs]",
            show_default=False,
            autocompletion=complete.datasets,
        ),
    ] = None,
    min_train: MinTrainOption = MIN_TRAIN,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Directory to create, with tables and a plot.", show_default=False),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing comparison.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print all figures as one JSON object.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Do not print progress.")] = False,
) -> None:
    """Measure runs on the same users and test whether they differ by more than chance.

    For each pair of runs and each metric: both means, their difference with a bootstrap interval, and the p-values of
    the paired t-test and of Wilcoxon's test, also corrected for the number of comparisons (Holm).

    Examples:

      drm-triton compare runs/dot runs/l2

      drm-triton compare runs/dot runs/l2 runs/cosine --metrics ndcg@10,recall@50 --out compared

      drm-triton compare runs/dot runs/l2 --on valid --json
    """
    from drm_triton.cli.messages import FlagReporter
    from drm_triton.data import find_dataset
    from drm_triton.experiments.runs import MARKER, compare_runs

    ks = parse_cut_offs(k)
    check_min_train(min_train)
    if out is not None:
        atomic.check_directory(out, overwrite, MARKER)  # before the slow steps
    comparison = compare_runs(
        runs or [],
        metrics.split(","),
        ks,
        on,
        None if dataset is None else find_dataset(dataset),
        min_train,
        FlagReporter(quiet=quiet or as_json),
    )
    if out is not None:
        comparison.write(out, overwrite)
    print(comparison.to_json() if as_json else comparison.to_markdown(), end="")
