"""`drm-triton recommend`: the best items for users, or for persons the model has never met."""

import csv
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from drm_triton.cli.complete import RunArgument
from drm_triton.cli.output import Format, check_output, with_titles, write
from drm_triton.errors import InputError

if TYPE_CHECKING:
    import polars as pl


def recommend(
    run: RunArgument,
    user: Annotated[
        list[str] | None, typer.Option("--user", "-u", help="Id of a user; may be repeated.", show_default=False)
    ] = None,
    users: Annotated[Path | None, typer.Option(help="File with a user id a line.", show_default=False)] = None,
    everyone: Annotated[bool, typer.Option("--all", help="Every user of the training data.")] = False,
    liked: Annotated[
        list[str] | None,
        typer.Option(
            help='Items that a new person likes, separated by commas ("a,b" in quotes is one id); may be repeated.',
            show_default=False,
        ),
    ] = None,
    history: Annotated[
        Path | None,
        typer.Option(
            help="Items that new persons like: a CSV, TSV or Parquet table with columns user and item, or a text file "
            "with a person's item ids on each line.",
            show_default=False,
        ),
    ] = None,
    k: Annotated[int, typer.Option("--k", "-k", help="Items for each.")] = 10,
    exclude_seen: Annotated[
        bool, typer.Option("--exclude-seen/--include-seen", help="Leave out what the user already has.")
    ] = True,
    only: Annotated[
        Path | None, typer.Option(help="File with an item id a line: choose from these.", show_default=False)
    ] = None,
    without: Annotated[
        Path | None, typer.Option(help="File with an item id a line: leave these out.", show_default=False)
    ] = None,
    unknown: Annotated[
        Literal["error", "skip", "popular"],
        typer.Option(help="For ids the model does not know: stop, leave them out, or recommend the popular items."),
    ] = "error",
    form: Annotated[
        Format | None,
        typer.Option("--format", help=r"How to write \[by the ending of --out, or table].", show_default=False),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write to this file.", show_default=False)] = None,
) -> None:
    """Print the best items for users, with scores; ids as they were in your data.

    A person who was not in the training data gets a vector from the items he or she likes (--liked, --history).

    Examples:

      drm-triton recommend runs/melon --user 12 --user 99

      drm-triton recommend runs/melon --liked 1043,77,2210 --k 5

      drm-triton recommend runs/melon --history new.csv --out lists.csv

      drm-triton recommend runs/melon --all --only stock.txt --out top.parquet
    """
    given = [user is not None, users is not None, everyone, liked is not None, history is not None]
    if sum(given) != 1:
        raise InputError("say for whom, in one way: --user, --users, --all, --liked or --history")
    form = check_output(form, out)

    from drm_triton.data.histories import read_histories, read_ids
    from drm_triton.model import DRM

    asked: dict[str, Any] = {"k": k, "exclude_seen": exclude_seen, "unknown": unknown}
    if liked is not None:
        asked["histories"] = {"you": _items(liked)}
    elif history is not None:
        asked["histories"] = read_histories(history)
    elif not everyone:
        asked["users"] = user if users is None else read_ids(users)
    asked["only"] = None if only is None else read_ids(only)
    asked["without"] = None if without is None else read_ids(without)
    model = DRM.load(run)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        blocks = model.recommend_blocks(**asked)
    for warning in told:
        print(f"warning: {warning.message}", file=sys.stderr)
    rows = 0

    def counted() -> Iterator["pl.DataFrame"]:
        nonlocal rows
        for block in blocks:
            rows += len(block)
            yield with_titles(block, model.interactions, "item")

    write(counted(), form, out)
    if rows == 0:
        print(
            "warning: there is nothing to recommend: nobody is left of those asked for, or they have all items that "
            "there are to choose from; --include-seen lists those too",
            file=sys.stderr,
        )


def _items(liked: list[str]) -> list[str]:
    """Ids separated by commas, in quotes where they hold one."""
    try:
        return [item.strip() for items in csv.reader(liked) for item in items if item.strip()]
    except csv.Error as error:
        raise InputError(
            f"--liked {liked}: {error}; put an id that holds commas, quotes or line ends into a file for --history"
        ) from None
