"""`drm-triton compare`: test the differences between runs, or tune models, train them and test the differences."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
from drm_triton.cli.messages import QuietOption
from drm_triton.experiments.entries import ENTRIES
from drm_triton.names import COMPARED_METRICS, METRICS, MIN_TRAIN

if TYPE_CHECKING:
    from drm_triton.experiments.protocol import Plan
    from drm_triton.progress import Reporter

MODELS = "Models to train"


def compare(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="RUN",
            help="Two or more run directories or saved models, trained on the same data set. With --models, the "
            "prepared data set.",
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
        typer.Option(
            "--out",
            "-o",
            help="Directory to create, with tables and a plot. With --models, it holds the trainings, and the same "
            r"command continues them. \[with --models: comparisons/<dataset>]",
            show_default=False,
        ),
    ] = None,
    models: Annotated[
        str | None,
        typer.Option(
            help=f"Models to tune, train and test, separated by commas: {', '.join(ENTRIES)}.",
            rich_help_panel=MODELS,
            show_default=False,
        ),
    ] = None,
    space: Annotated[
        str, typer.Option(help="Search space: paper (its Table 2) or ours (that of tune).", rich_help_panel=MODELS)
    ] = "ours",
    trials: Annotated[int, typer.Option(min=1, help="Random trials of each model.", rich_help_panel=MODELS)] = 20,
    grid: Annotated[
        bool, typer.Option("--grid", help="Try all points of the search space.", rich_help_panel=MODELS)
    ] = False,
    seeds: Annotated[int, typer.Option(min=1, help="Final trainings of each model.", rich_help_panel=MODELS)] = 5,
    factors: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=r"Factors of all models that have them. \[searched]",
            rich_help_panel=MODELS,
            show_default=False,
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1, help=r"Processes, with one thread each. \[all cores]", rich_help_panel=MODELS, show_default=False
        ),
    ] = None,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Repeat the trainings that failed.", rich_help_panel=MODELS)
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing comparison.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print all figures as one JSON object.")] = False,
    quiet: QuietOption = False,
) -> None:
    """Measure runs on the same users and test whether they differ by more than chance.

    For each pair of runs and each metric: both means, their difference with a bootstrap interval, and the p-values of
    the paired t-test and of Wilcoxon's test, also corrected for the number of comparisons (Holm).

    With a data set and --models, each model is tuned on the validation part by Recall@50, with the same number of
    trials, and trained with several seeds on the training and validation parts. Then their means on test are
    compared over seeds (Welch's t-test) and over users. Run the same command again to continue after a stop.

    Examples:

      drm-triton compare runs/dot runs/l2

      drm-triton compare runs/dot runs/l2 runs/cosine --metrics ndcg@10,recall@50 --out compared

      drm-triton compare runs/dot runs/l2 --on valid --json

      drm-triton compare melon --models wmf,ease,drm --trials 12
    """
    from drm_triton.cli.messages import FlagReporter, first_word
    from drm_triton.errors import InputError

    reporter = FlagReporter(quiet=quiet or as_json)
    with first_word(reporter.quiet):
        from drm_triton.data import find_dataset
        from drm_triton.experiments.protocol import Plan, names_of, space_name
        from drm_triton.experiments.runs import MARKER, compare_runs

    if models is not None:
        if runs and len(runs) > 1:
            raise InputError("give runs, or a data set and --models")
        _refuse_unused(
            {
                "--on": on != "test",
                "--k": k != DEFAULT_CUT_OFFS,
                "--metrics": metrics != ",".join(COMPARED_METRICS),
                "--min-train": min_train != MIN_TRAIN,
            }
        )
        fixed = {} if factors is None else {"factors": factors}
        plan = Plan(names_of(models), space_name(space), None if grid else trials, seeds, fixed=fixed)
        place = complete.required_dataset(str(runs[0]) if runs else None, dataset)
        _compare_models(plan, place, out, overwrite, workers, retry_failed, as_json, reporter)
        return
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
        reporter,
    )
    if out is not None:
        comparison.write(out, overwrite)
    print(comparison.to_json() if as_json else comparison.to_text(), end="")


def _refuse_unused(given: dict[str, bool]) -> None:
    """Raise if options were given that a comparison of models does not use."""
    from drm_triton.errors import InputError

    unused = [flag for flag, is_given in given.items() if is_given]
    if unused:
        raise InputError(f"--models does not use {', '.join(unused)}: its protocol is fixed; leave out {unused[0]}")


def _compare_models(
    plan: "Plan",
    dataset: str,
    out: Path | None,
    overwrite: bool,
    workers: int | None,
    retry_failed: bool,
    as_json: bool,
    reporter: "Reporter",
) -> None:
    """Run a comparison, or continue it, and print its result."""
    from drm_triton.cli.messages import continuable
    from drm_triton.data import find_dataset
    from drm_triton.data.dataset import Dataset
    from drm_triton.experiments.compare import result_of
    from drm_triton.experiments.protocol import PLAN, Comparison

    place = find_dataset(dataset)
    data = Dataset.load(place)
    directory = out or Path("comparisons") / place.absolute().name
    if overwrite:
        atomic.discard_directory(directory, PLAN)
    comparison = Comparison(directory, data, plan)
    finished = len(comparison.outcomes)
    reporter.line(f"comparison directory {comparison.path}, {finished} trainings finished")
    with continuable():
        comparison.run(workers, reporter, retry_failed)
    result = result_of(comparison, reporter)
    result.write(comparison.path)
    if as_json:
        print(result.to_json(), end="")
    else:
        print(f"{result.summary()}\nAll tests and options: {comparison.path}/compare.md")
