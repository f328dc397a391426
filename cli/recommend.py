"""`drm-triton recommend`: the best items for users of the training data, or for new users."""

import csv
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from drm_triton.cli.complete import RunArgument
from drm_triton.cli.output import (
    FormatOption,
    OutOption,
    OverwriteOption,
    QuietOption,
    check_output,
    note_if_held_out,
    with_titles,
    write,
)
from drm_triton.errors import InputError
from drm_triton.names import Unknown

if TYPE_CHECKING:
    import polars as pl


def recommend(
    run: RunArgument,
    user: Annotated[
        list[str] | None,
        typer.Option("--user", "-u", help="Id of a user. May be repeated.", show_default=False),
    ] = None,
    users: Annotated[Path | None, typer.Option(help="File with one user id per line.", show_default=False)] = None,
    everyone: Annotated[bool, typer.Option("--all", help="Recommend for all users of the data set.")] = False,
    liked: Annotated[
        list[str] | None,
        typer.Option(
            help='Item ids that a new user likes, separated by commas. Quotes make "a,b" one id. May be repeated.',
            show_default=False,
        ),
    ] = None,
    history: Annotated[
        Path | None,
        typer.Option(
            help="File with the items that new users like: a CSV, TSV or Parquet table with columns user and item, or "
            "a text file with the item ids of one user per line.",
            show_default=False,
        ),
    ] = None,
    k: Annotated[int, typer.Option("--k", "-k", help="Number of items per user.")] = 10,
    exclude_seen: Annotated[
        bool, typer.Option("--exclude-seen/--include-seen", help="Leave out items that the user already has.")
    ] = True,
    only: Annotated[
        Path | None,
        typer.Option(
            help="File with one item id per line, or a table with columns user and item: recommend only these.",
            show_default=False,
        ),
    ] = None,
    without: Annotated[
        Path | None,
        typer.Option(
            help="File with one item id per line, or a table with columns user and item: never recommend these.",
            show_default=False,
        ),
    ] = None,
    where: Annotated[
        list[str] | None,
        typer.Option(
            help='Recommend only items with this attribute: "price<=20", "genre=Drama|Comedy", "in_stock". May be '
            "repeated; then all must hold.",
            show_default=False,
        ),
    ] = None,
    at_most: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ATTRIBUTE=NUMBER",
            help="At most so many items of a list with the same value of an attribute, or the same tag. May be "
            "repeated.",
            show_default=False,
        ),
    ] = None,
    diversity: Annotated[
        float,
        typer.Option(help="Weight of diversity, from 0 to below 1: re-rank the best items so that they differ more."),
    ] = 0.0,
    unknown: Annotated[
        Unknown,
        typer.Option(help="For ids that the model does not know: stop, skip them, or recommend popular items."),
    ] = "error",
    form: FormatOption = None,
    out: OutOption = None,
    overwrite: OverwriteOption = True,
    quiet: QuietOption = False,
) -> None:
    """Print the best items for users, with scores. Ids are those of your data.

    For a new user, who is not in the training data, give the items that the user likes (--liked or --history).

    Examples:

      drm-triton recommend runs/melon --user 12 --user 99

      drm-triton recommend runs/melon --liked 1043,77,2210 --k 5

      drm-triton recommend runs/melon --history new.csv --out recommendations.csv

      drm-triton recommend runs/melon --all --only stock.txt --out top.parquet

      drm-triton recommend runs/melon --user 12 --where "price<=20" --at-most genre=2
    """
    sources = [user is not None, users is not None, everyone, liked is not None, history is not None]
    if sum(sources) != 1:
        raise InputError("give exactly one of --user, --users, --all, --liked and --history")
    form = check_output(form, out, overwrite)

    from drm_triton.cli.messages import FlagReporter, first_word

    with first_word(quiet):
        from drm_triton.data.histories import read_choice, read_histories, read_ids
        from drm_triton.ranking.limits import parse_limits

        selection: dict[str, Any] = {}
        if liked is not None:
            selection["histories"] = {"you": _split_ids(liked)}
        elif history is not None:
            selection["histories"] = read_histories(history)
        elif not everyone:
            selection["users"] = user if users is None else read_ids(users)
        selection["only"] = None if only is None else read_choice(only)
        selection["without"] = None if without is None else read_choice(without)
        selection |= {"where": where, "at_most": parse_limits(at_most or []), "diversity": diversity}

        from drm_triton.models import load

        model = load(run)
    note_if_held_out(model, run)
    blocks = model.recommend_blocks(k=k, exclude_seen=exclude_seen, unknown=unknown, **selection)
    reporter = FlagReporter(quiet=quiet or out is None)  # a screen full of recommendations needs no progress
    n_rows = 0

    def titled_blocks() -> Iterator["pl.DataFrame"]:
        nonlocal n_rows
        for block in blocks:
            n_rows += len(block)
            step.advance(block["user"].n_unique())
            yield with_titles(block, model.interactions, "item")

    with reporter.step("recommend", model.interactions.n_users if everyone else None, "users") as step:
        write(titled_blocks(), form, out)
        step.note(f"{n_rows:,} items for {step.done:,} users")
    if n_rows == 0:
        warnings.warn(
            "there is nothing to recommend: no user is left, or the users may get none of the items to choose from, or "
            "already have them (--include-seen recommends those too)",
            stacklevel=1,
        )


def _split_ids(liked: list[str]) -> list[str]:
    """Return ids that are separated by commas. An id that contains a comma is in quotes."""
    try:
        return [item.strip() for items in csv.reader(liked) for item in items if item.strip()]
    except csv.Error as error:
        raise InputError(
            f"--liked {liked}: {error}; put ids that contain quotes or line breaks into a file and give it as --history"
        ) from None
