"""`drm-triton evaluate`: metrics of a trained model on held-out interactions."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from drm_triton import atomic
from drm_triton.cli.complete import DatasetOfRun, RunArgument
from drm_triton.cli.measuring import OnOption, check_min_train, parse_cut_offs
from drm_triton.cli.messages import QuietOption
from drm_triton.cli.output import OutputFormat, check_file, write
from drm_triton.cli.together import in_world, is_first, use_own_gpu
from drm_triton.data.leaderboards import LEAST_TRAIN, K, Result, leaderboard, protocol
from drm_triton.errors import InputError
from drm_triton.names import CUT_OFFS, MIN_TRAIN

DEFAULT_K = ",".join(map(str, CUT_OFFS))
PER_USER_FORMATS: tuple[OutputFormat, ...] = ("parquet", "csv", "json", "jsonl")


def evaluate(
    run: RunArgument,
    on: OnOption = "test",
    k: Annotated[
        str | None,
        typer.Option(
            "--k",
            help=rf"Cut-offs K of the metrics, separated by commas. \[{DEFAULT_K}; for a public split also {K}]",
            show_default=False,
        ),
    ] = None,
    dataset: DatasetOfRun = None,
    min_train: Annotated[
        int | None,
        typer.Option(
            help="Leave out users with fewer training items than this. "
            rf"\[{MIN_TRAIN}; for a public split {LEAST_TRAIN}]",
            show_default=False,
        ),
    ] = None,
    per_user: Annotated[
        Path | None,
        typer.Option(
            help="Write each user's metrics to this file: .parquet, .csv, .json or .jsonl.", show_default=False
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Write what --json prints to this file, too.", show_default=False),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace existing files --per-user and --out.")
    ] = False,
    by_activity: Annotated[
        bool,
        typer.Option(
            "--by-activity",
            help="Also print metrics for groups of users by number of training items, and plot them in RUN. An older "
            "plot is replaced.",
        ),
    ] = False,
    beyond_accuracy: Annotated[
        bool,
        typer.Option(
            "--beyond-accuracy",
            help="Also measure novelty, diversity, popularity and the exposure of items.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the metrics as one JSON object.")] = False,
    quiet: QuietOption = False,
) -> None:
    """Rank all unseen items for every user and compare the ranking with the held-out items.

    A user's training items are left out of the ranking. With --on test, the validation items are left out too. For a
    public split, the results that others published are printed beside the model's. Under torchrun, each process ranks
    for a part of the users, and the first prints.

    Examples:

      drm-triton evaluate runs/melon --on test

      drm-triton evaluate runs/melon --k 5,20 --out metrics.json

      drm-triton evaluate runs/melon --per-user users.parquet --by-activity

      drm-triton evaluate runs/melon --beyond-accuracy
    """
    from drm_triton.cli.messages import FlagReporter, first_word
    from drm_triton.data import find_dataset

    reporter = FlagReporter(quiet=quiet or as_json or not is_first())
    with in_world() as world:
        cut_offs = None if k is None else parse_cut_offs(k)
        if min_train is not None:
            check_min_train(min_train)
        if out is not None:
            check_file(out, "out", overwrite, "give another `out`")  # before the slow steps
        if per_user is not None:
            check_file(per_user, "per_user", overwrite, "give another `per_user`")
            form = _form_of(per_user)
        with first_word(reporter.quiet):
            from drm_triton.ranking.evaluate import by_activity as grouped
            from drm_triton.ranking.evaluate import evaluate as measure
            from drm_triton.ranking.evaluate import popularity_ranker
            from drm_triton.ranking.held_out import HeldOut

            def load() -> HeldOut:
                return HeldOut.of_run(run, on, None if dataset is None else find_dataset(dataset))

            if world is None:
                measured = load()
            else:
                use_own_gpu()
                measured = world.together(load)
        model, data = measured.model, measured.data
        default_ks, default_min_train = protocol(data.meta)
        cut_offs = list(default_ks) if cut_offs is None else cut_offs
        min_train = default_min_train if min_train is None else min_train
        result = measured.evaluate(cut_offs, min_train, reporter, beyond_accuracy=beyond_accuracy, world=world)
    if not is_first():
        return
    published = leaderboard(data.meta) if on == "test" else []
    baseline = popularity_ranker(model.interactions.train)
    popularity = measure(
        baseline, measured.seen, measured.relevant, cut_offs, min_train, beyond_accuracy=beyond_accuracy
    ).means
    if per_user is not None:
        ids = data.user_ids[result.per_user["user"]]
        write([result.per_user.with_columns(user=ids)], form, per_user)
    if not as_json:
        _print_table(result.means, popularity, cut_offs)
        print(*describe_users(len(result.per_user), data.n_users, result.left_out), sep="\n")
        if published and K in cut_offs:
            _print_leaderboard(result.means, published)
    report: dict[str, Any] = {**result.means, "users": len(result.per_user), "left_out": result.left_out}
    report["popularity"] = popularity
    if published:
        report["published"] = [row.to_dict() for row in published]
    if by_activity:
        metric = f"ndcg@{cut_offs[0]}"
        groups = grouped(result)
        report["by_activity"] = groups.drop("group").to_dicts()
        plot = run / f"activity-{on}.png"
        _plot(groups, metric, plot)
        if not as_json:
            print(f"\nmean {metric} by training interactions (plot: {plot})")
            for row in groups.iter_rows(named=True):
                print(f"  {row['min_train']:>5} – {row['max_train']:<6} {row['users']:>8,} users  {row[metric]:.4f}")
    if out is not None:
        atomic.write_text(out, json.dumps(report, indent=2) + "\n")
    if as_json:
        print(json.dumps(report))


def _form_of(per_user: Path) -> OutputFormat:
    """Return the format that the name of the file asks for."""
    for form in PER_USER_FORMATS:
        if per_user.suffix.lower() == f".{form}":
            return form
    endings = ", ".join(f".{form}" for form in PER_USER_FORMATS)
    raise InputError(f"`per_user` {per_user}: the name says no known format; let it end with one of {endings}")


def describe_users(measured: int, total: int, left_out: dict[str, int]) -> list[str]:
    """Return lines that say how many users were measured, and why others were left out.

    Examples
    --------
    >>> describe_users(93, 100, {"without held-out items": 7})
    ['means over 93 of 100 users; left out:', '  7 without held-out items']
    """
    if not left_out:
        return [f"means over all {total:,} users"]
    return [
        f"means over {measured:,} of {total:,} users; left out:",
        *(f"  {count:,} {reason}" for reason, count in left_out.items()),
    ]


def _print_table(means: dict[str, float], popularity: dict[str, float], ks: list[int]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table()
    table.add_column("metric")
    table.add_column("model", justify="right")
    table.add_column("popularity", justify="right")
    for cut_off in ks:
        for name in (name for name in means if name.endswith(f"@{cut_off}")):
            table.add_row(name, f"{means[name]:.4f}", f"{popularity[name]:.4f}")
    Console().print(table)


def _print_leaderboard(means: dict[str, float], published: list[Result]) -> None:
    """Print the model among the published results, in ascending order of recall."""
    from rich.console import Console
    from rich.table import Table

    own = Result("this model", means[f"recall@{K}"], means[f"ndcg@{K}"], "")
    table = Table(title="results for this split")
    for name in ("model", f"recall@{K}", f"ndcg@{K}", "from"):
        table.add_column(name, justify="right" if "@" in name else "left")
    for row in sorted([*published, own], key=lambda row: row.recall):
        style = "bold" if row is own else None
        table.add_row(row.model, f"{row.recall:.4f}", f"{row.ndcg:.4f}", row.source, style=style)
    Console().print(table)


def _plot(groups: Any, metric: str, path: Path) -> None:
    from drm_triton.plots import activity_bars

    atomic.write_file(path, lambda file: activity_bars(groups, metric, file))
