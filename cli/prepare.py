"""`drm-triton prepare`: turn a source's files into a data set."""

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from drm_triton import atomic
from drm_triton.cli import complete
from drm_triton.errors import InputError

Split = Literal["random", "per-user", "leave-last", "time", "users"]
Leading = Literal["user", "count", "none"]

DEFAULT_SIZES = {"users": 1_000, "items": 500, "interactions": 20_000}

_READING = "Reading the files"
_KEEPING = "What to keep, and how to split it"
_MAKING = "Generated and downloaded data"


def prepare(
    source: Annotated[
        str | None,
        typer.Argument(
            help="Where the data comes from; see --list.", metavar="SOURCE", autocompletion=complete.sources
        ),
    ] = None,
    raw: Annotated[
        list[str] | None,
        typer.Option(help="File, glob, folder or zip to read; may be repeated. (default: data/raw/SOURCE)"),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Directory to write. (default: data/SOURCE)")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the output if it exists.")] = False,
    list_sources: Annotated[bool, typer.Option("--list", help="Show the sources and exit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print no progress.")] = False,
    min_rating: Annotated[
        float | None,
        typer.Option(help="Keep rows rated at least this. (default: the source's)", rich_help_panel=_KEEPING),
    ] = None,
    min_user: Annotated[
        int | None, typer.Option(help="Keep users with so many items, iterated (k-core).", rich_help_panel=_KEEPING)
    ] = None,
    min_item: Annotated[
        int | None, typer.Option(help="Keep items with so many users, iterated (k-core).", rich_help_panel=_KEEPING)
    ] = None,
    split: Annotated[
        Split,
        typer.Option(
            help="random: over all interactions; per-user: within each user; leave-last: each user's last two; "
            "time: the newest of all; users: whole users.",
            rich_help_panel=_KEEPING,
        ),
    ] = "random",
    ratios: Annotated[str, typer.Option(help="Shares of train/valid/test.", rich_help_panel=_KEEPING)] = "70/10/20",
    seed: Annotated[int, typer.Option(help="Seed of the split and of generated data.", rich_help_panel=_KEEPING)] = 0,
    user: Annotated[str | None, typer.Option(help="Column of the users.", rich_help_panel=_READING)] = None,
    item: Annotated[str | None, typer.Option(help="Column of the items.", rich_help_panel=_READING)] = None,
    rating: Annotated[str | None, typer.Option(help="Column of the ratings.", rich_help_panel=_READING)] = None,
    timestamp: Annotated[str | None, typer.Option(help="Column of the times.", rich_help_panel=_READING)] = None,
    columns: Annotated[
        str | None,
        typer.Option(
            help="Columns by position for a file without header: user,item,rating,timestamp; others are skipped.",
            rich_help_panel=_READING,
        ),
    ] = None,
    separator: Annotated[
        str | None,
        typer.Option(help="Between fields; tab, comma, space, or any text such as '::'.", rich_help_panel=_READING),
    ] = None,
    encoding: Annotated[
        str | None, typer.Option(help="Of text files that are not UTF-8.", rich_help_panel=_READING)
    ] = None,
    leading: Annotated[
        Leading | None,
        typer.Option(help="What a line of source lists begins with. (default: user)", rich_help_panel=_READING),
    ] = None,
    titles: Annotated[
        str | None, typer.Option(help="Table of item ids and titles, for source table.", rich_help_panel=_READING)
    ] = None,
    download: Annotated[
        bool, typer.Option("--download", help="Fetch the source's files first.", rich_help_panel=_MAKING)
    ] = False,
    synthetic: Annotated[
        bool,
        typer.Option(
            "--synthetic", help="For melon: write a generated train.json and prepare that.", rich_help_panel=_MAKING
        ),
    ] = False,
    scale: Annotated[
        float | None, typer.Option(help="Size of --synthetic; 1 is Melon's. (default: 1)", rich_help_panel=_MAKING)
    ] = None,
    users: Annotated[
        int | None, typer.Option(help="For source synthetic. (default: 1,000)", rich_help_panel=_MAKING)
    ] = None,
    items: Annotated[
        int | None, typer.Option(help="For source synthetic. (default: 500)", rich_help_panel=_MAKING)
    ] = None,
    interactions: Annotated[
        int | None, typer.Option(help="For source synthetic. (default: 20,000)", rich_help_panel=_MAKING)
    ] = None,
) -> None:
    """Turn interactions of any kind into a compact data set: read, filter, encode, split, store.

    Examples:

      drm-triton prepare table --raw ratings.csv --out data/ratings

      drm-triton prepare melon --raw train.json

      drm-triton prepare ml-100k --download --min-user 5
    """
    from drm_triton.cli.info import describe, summary
    from drm_triton.data.prepare import prepare as preparation
    from drm_triton.data.prepare import sources
    from drm_triton.data.prepare.build import Options
    from drm_triton.data.prepare.synthetic import Shape
    from drm_triton.data.prepare.tables import Reading
    from drm_triton.progress import Reporter

    if list_sources:
        _print_sources(as_json)
        return
    if source is None:
        raise InputError("prepare needs a source: `drm-triton prepare --list` shows them")
    chosen = sources.find_source(source)
    report = Reporter(quiet)
    options = Options(
        min_rating=chosen.min_rating if min_rating is None else min_rating,
        min_user=chosen.min_user if min_user is None else min_user,
        min_item=chosen.min_item if min_item is None else min_item,
        split=split,
        ratios=_shares(ratios),
        seed=seed,
    )
    out = out or preparation.data_dir() / chosen.name
    reading = Reading(user, item, rating, timestamp, _names(columns), separator, encoding, leading, titles)
    sizes = {"users": users, "items": items, "interactions": interactions}
    given = {name: size for name, size in sizes.items() if size is not None}
    generated = synthetic or chosen.name == "synthetic"
    if synthetic and chosen.name != "melon":
        raise InputError("--synthetic imitates melon only: use `prepare melon --synthetic` or `prepare synthetic`")
    if scale is not None and not synthetic:
        raise InputError("--scale is the size of --synthetic data: give both or neither")
    if given and chosen.name != "synthetic":
        raise InputError(f"--{min(given)} is for source synthetic; for melon --synthetic give --scale")
    if raw and (generated or download):
        raise InputError("generated or downloaded data does not come from --raw: leave --raw out")
    if generated and (download or reading != Reading()):
        raise InputError(
            "generated data is neither downloaded nor read: leave --download and the options for reading out"
        )
    atomic.check_directory(out, overwrite, preparation.store.MARKER)
    remarks = None
    if chosen.name == "synthetic":
        data = preparation.prepare_synthetic(Shape(**DEFAULT_SIZES | given), out, options, overwrite, report)
    else:
        if synthetic:
            shape = Shape.melon(1.0 if scale is None else scale)
            raw = [str(preparation.write_synthetic_melon(shape, seed, report))]
            remarks = {"synthetic": dataclasses.asdict(shape)}
        elif download:
            from drm_triton.data.prepare.download import fetch_source

            raw = [str(fetch_source(chosen, preparation.raw_dir(chosen), report))]
        paths = raw or [str(path) for path in preparation.find_raw(chosen)]
        own = min_user is None and min_item is None  # counts asked for stand in place of the source's own filter
        data = preparation.prepare(chosen, paths, out, reading, options, overwrite, report, own, remarks)
    if as_json:
        print(json.dumps(summary(data, out), ensure_ascii=False))
    else:
        describe(data, out)


def _names(columns: str | None) -> tuple[str, ...] | None:
    return tuple(name.strip() for name in columns.split(",")) if columns else None


def _shares(text: str) -> tuple[float, float, float]:
    try:
        train, valid, test = (float(part) for part in text.replace(",", "/").split("/"))
    except ValueError:
        raise InputError(
            f"--ratios {text!r} is not three numbers: give train/valid/test, for example 70/10/20"
        ) from None
    return train, valid, test


def _print_sources(as_json: bool) -> None:
    from drm_triton.data.prepare.sources import SOURCES

    if as_json:
        fields = ("name", "summary", "origin", "licence", "layout", "wanted", "url")
        print(
            json.dumps({"sources": [{f: getattr(s, f) for f in fields} for s in SOURCES.values()]}, ensure_ascii=False)
        )
        return
    for source in SOURCES.values():
        print(f"{source.name:<10} {source.summary}")
        print(f"{'':<10} from: {source.origin}")
        print(f"{'':<10} format: {source.layout}")
        print(f"{'':<10} licence: {source.licence}")
        if source.url:
            print(f"{'':<10} --download: {source.url}")
