"""`drm-triton recommend`: the best items for users of the training data, or for new users."""

import csv
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from drm_triton.cli.complete import RunArgument, VerifyOption
from drm_triton.cli.messages import QuietOption
from drm_triton.cli.output import (
    FormatOption,
    OutOption,
    OutputFormat,
    check_output,
    note_if_held_out,
    with_titles,
    write,
)
from drm_triton.cli.together import launched, settle, use_own_gpu
from drm_triton.errors import InputError
from drm_triton.names import Unknown
from drm_triton.progress import counted

if TYPE_CHECKING:
    import polars as pl

    from drm_triton.data.shard import Shard


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
    shard: Annotated[
        str | None,
        typer.Option(
            metavar="I/N",
            help="With --all: only part I of N of the users, numbered from 0, as a Parquet file in the directory "
            "--out. A part that is there already is kept.",
            show_default=False,
        ),
    ] = None,
    form: FormatOption = None,
    out: OutOption = None,
    overwrite: Annotated[
        bool,
        typer.Option("--overwrite", help="Replace an existing file --out, or with --shard a part of another model."),
    ] = False,
    verify: VerifyOption = False,
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

      drm-triton recommend runs/melon --all --shard 3/16 --out top/
    """
    sources = [user is not None, users is not None, everyone, liked is not None, history is not None]
    if sum(sources) != 1:
        raise InputError("give exactly one of --user, --users, --all, --liked and --history")
    if shard is None and everyone and launched():  # each process of torchrun takes a part of the users
        if out is None:
            raise InputError("several processes write parts: give --out, the directory for them")
        settle()
        use_own_gpu()
        shard = f"{os.environ['RANK']}/{os.environ['WORLD_SIZE']}"
    if shard is not None:
        folder, part_of = _checked_shard(shard, everyone, form, out)
    chosen = check_output(form, out, overwrite) if shard is None else "parquet"

    from drm_triton.cli.messages import FlagReporter, first_word

    options: dict[str, Any] = {"k": k, "exclude_seen": exclude_seen, "unknown": unknown}
    reporter = FlagReporter(quiet=quiet or out is None)  # a screen full of recommendations needs no progress
    write_all: Callable[[Iterable[pl.DataFrame]], None]
    with first_word(quiet):
        from drm_triton.data.histories import read_choice, read_histories, read_ids
        from drm_triton.data.prepare.inputs import sha256
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
        from drm_triton.recommender.parts import Part
        from drm_triton.recommender.shards import described, load_shard

        if shard is None:
            model, write_all = load(run, verify=verify), partial(write, form=chosen, out=out)
        else:
            files = {name: sha256([file])[0]["sha256"] for name, file in (("only", only), ("without", without)) if file}
            rules = {"where": where, "at_most": selection["at_most"], "diversity": diversity}
            part = Part(folder, part_of, described(run) | {"shard": str(part_of)} | options | rules | files)
            if part.is_whole(overwrite):
                reporter.line(f"recommend: {part.file} is whole, nothing to do")
                return
            model, write_all = load_shard(run, part_of, verify), part.write
    note_if_held_out(model, run)
    blocks = model.recommend_blocks(**options, **selection)
    n_rows = 0

    def titled_blocks() -> Iterator["pl.DataFrame"]:
        nonlocal n_rows
        for block in blocks:
            n_rows += len(block)
            step.advance(block["user"].n_unique())
            yield with_titles(block, model.interactions, "item")

    with reporter.step("recommend", model.interactions.n_users if everyone else None, "users") as step:
        write_all(titled_blocks())
        step.note(f"{counted(n_rows, 'item')} for {counted(step.done, 'user')}")
    if n_rows == 0 and not model.interactions.is_part:
        warnings.warn(
            "there is nothing to recommend: no user is left, or the users may get none of the items to choose from, or "
            "already have them (--include-seen recommends those too)",
            stacklevel=1,
        )


def _checked_shard(shard: str, everyone: bool, form: OutputFormat | None, out: Path | None) -> tuple[Path, "Shard"]:
    """Return the directory of the parts and the shard that --shard names, if the other options go with it."""
    from drm_triton.data.shard import Shard

    part = Shard.parse(shard)
    if not everyone:
        raise InputError("--shard splits all users: give --all, or leave out --shard")
    if out is None:
        raise InputError("--shard needs --out, the directory for the parts")
    if form not in (None, "parquet"):
        raise InputError(f"--shard writes Parquet files: leave out --format {form}")
    return out, part


def _split_ids(liked: list[str]) -> list[str]:
    """Return ids that are separated by commas. An id that contains a comma is in quotes."""
    try:
        return [item.strip() for items in csv.reader(liked) for item in items if item.strip()]
    except csv.Error as error:
        raise InputError(
            f"--liked {liked}: {error}; put ids that contain quotes or line breaks into a file and give it as --history"
        ) from None
