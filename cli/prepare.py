"""`drm-triton prepare`: turn raw files into a data set."""

import json
import math
import sys
import textwrap
from pathlib import Path
from typing import Annotated

import typer

from drm_triton.cli import complete
from drm_triton.cli.messages import QuietOption
from drm_triton.errors import InputError
from drm_triton.names import DecimalMark, Leading, SplitName, SplitPart

DEFAULT_SIZES = {"users": 1_000, "items": 500, "interactions": 20_000}

_READING = "How to read the files"
_KEEPING = "What to keep, and how to split it"
_MAKING = "Generated and downloaded data"


def prepare(
    source: Annotated[
        str | None,
        typer.Argument(
            help="Kind of data to read. --list shows all sources.", metavar="SOURCE", autocompletion=complete.sources
        ),
    ] = None,
    raw: Annotated[
        list[str] | None,
        typer.Option(help="File, glob, directory or zip file to read. May be repeated. (default: data/raw/SOURCE)"),
    ] = None,
    train: Annotated[
        str | None,
        typer.Option(help="For source table or lists: training part of files that are already split.", metavar="FILE"),
    ] = None,
    test: Annotated[str | None, typer.Option(help="With --train: the test part.", metavar="FILE")] = None,
    valid: Annotated[
        str | None, typer.Option(help="With --train: the validation part, if there is one.", metavar="FILE")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Output directory. (default: data/SOURCE)")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing data set.")] = False,
    list_sources: Annotated[bool, typer.Option("--list", help="Print the sources and exit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
    quiet: QuietOption = False,
    min_rating: Annotated[
        float | None,
        typer.Option(
            help="Keep rows with at least this rating. (default: depends on the source; if it has none, ratings of 0 "
            "or less are left out)",
            rich_help_panel=_KEEPING,
        ),
    ] = None,
    min_user: Annotated[
        int | None,
        typer.Option(help="Keep users with at least this many items.", rich_help_panel=_KEEPING),
    ] = None,
    min_item: Annotated[
        int | None,
        typer.Option(
            help="Keep items with at least this many users. Both filters are repeated until nothing changes (k-core).",
            rich_help_panel=_KEEPING,
        ),
    ] = None,
    split: Annotated[
        SplitName | None,
        typer.Option(
            help="Which interactions to hold out. random: drawn from all; per-user: drawn from each user; leave-last: "
            "the last two of each user; time: the newest; users: all interactions of some users. (default: random)",
            rich_help_panel=_KEEPING,
        ),
    ] = None,
    ratios: Annotated[
        str | None,
        typer.Option(
            help="Proportions of train/valid/test, but for leave-last. (default: 70/10/20)", rich_help_panel=_KEEPING
        ),
    ] = None,
    valid_ratio: Annotated[
        float | None,
        typer.Option(
            help="For files that are already split: share of the training part that becomes the validation part. "
            "(default: 0)",
            rich_help_panel=_KEEPING,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the split and of generated data.", rich_help_panel=_KEEPING)] = 0,
    user: Annotated[str | None, typer.Option(help="Name of the user column.", rich_help_panel=_READING)] = None,
    item: Annotated[str | None, typer.Option(help="Name of the item column.", rich_help_panel=_READING)] = None,
    rating: Annotated[
        str | None, typer.Option(help="Name of the rating column. '' ignores ratings.", rich_help_panel=_READING)
    ] = None,
    timestamp: Annotated[str | None, typer.Option(help="Name of the time column.", rich_help_panel=_READING)] = None,
    weight: Annotated[
        str | None,
        typer.Option(
            help="Name of a column of weights, such as numbers of plays. Weights of repeated rows are added. "
            "(default: no weights)",
            rich_help_panel=_READING,
        ),
    ] = None,
    event: Annotated[
        str | None,
        typer.Option(help="With --event-weight: name of the column of events.", rich_help_panel=_READING),
    ] = None,
    event_weight: Annotated[
        str | None,
        typer.Option(
            help="Weights of events, such as view=1,buy=5. Rows of other events are left out. (default: no weights)",
            metavar="EVENT=WEIGHT,...",
            rich_help_panel=_READING,
        ),
    ] = None,
    date_format: Annotated[
        str | None,
        typer.Option(
            help="How times and dates are written: day-first, month-first, or a pattern such as '%d/%m/%Y %H:%M'. "
            "(default: recognised if it is clear)",
            rich_help_panel=_READING,
        ),
    ] = None,
    decimal: Annotated[
        DecimalMark | None,
        typer.Option(
            help="Decimal mark of ratings, weights and attributes. (default: recognised if it is clear)",
            rich_help_panel=_READING,
        ),
    ] = None,
    skip_bad_rows: Annotated[
        bool,
        typer.Option(
            "--skip-bad-rows",
            help="Leave out rows that cannot be used, and print their number.",
            rich_help_panel=_READING,
        ),
    ] = False,
    columns: Annotated[
        str | None,
        typer.Option(
            help="Columns of a file without a header, such as user,item,rating,timestamp,weight,event. Other names "
            "are skipped.",
            rich_help_panel=_READING,
        ),
    ] = None,
    separator: Annotated[
        str | None,
        typer.Option(
            help="Separator of columns: tab, comma, space, or any text such as '::'.", rich_help_panel=_READING
        ),
    ] = None,
    encoding: Annotated[
        str | None, typer.Option(help="Encoding of text files that are not UTF-8.", rich_help_panel=_READING)
    ] = None,
    leading: Annotated[
        Leading | None,
        typer.Option(
            help="For source lists: what the first field of a line is. (default: user)", rich_help_panel=_READING
        ),
    ] = None,
    titles: Annotated[
        str | None, typer.Option(help="For source table: file with item ids and titles.", rich_help_panel=_READING)
    ] = None,
    download: Annotated[
        bool, typer.Option("--download", help="First download the files of the source.", rich_help_panel=_MAKING)
    ] = False,
    synthetic: Annotated[
        bool,
        typer.Option(
            "--synthetic", help="For source melon: generate a train.json and prepare it.", rich_help_panel=_MAKING
        ),
    ] = False,
    scale: Annotated[
        float | None,
        typer.Option(help="With --synthetic: size relative to Melon. (default: 1)", rich_help_panel=_MAKING),
    ] = None,
    users: Annotated[
        str | None,
        typer.Option(
            help="Table with attributes of users. For source synthetic: number of users. (default: 1,000)",
            rich_help_panel=_READING,
        ),
    ] = None,
    items: Annotated[
        str | None,
        typer.Option(
            help="Table with attributes of items, such as categories and prices, and of items without interactions. "
            "For source synthetic: number of items. (default: 500)",
            rich_help_panel=_READING,
        ),
    ] = None,
    interactions: Annotated[
        int | None,
        typer.Option(help="For source synthetic: number of interactions. (default: 20,000)", rich_help_panel=_MAKING),
    ] = None,
) -> None:
    """Prepare a data set from raw files: read, filter, encode, split, store.

    Examples:

      drm-triton prepare table --raw ratings.csv --out data/ratings

      drm-triton prepare melon --raw train.json

      drm-triton prepare ml-100k --download --min-user 5

      drm-triton prepare table --raw ratings.csv --items items.csv --out data/ratings

      drm-triton prepare lists --train train.txt --test test.txt --out data/lists
    """
    from drm_triton.cli.info import describe, summary
    from drm_triton.cli.messages import FlagReporter, command_line, first_word
    from drm_triton.data import data_dir

    if list_sources:
        _print_sources(as_json)
        return
    if source is None:
        raise InputError("prepare needs a source: `drm-triton prepare --list` prints them")
    with first_word(quiet):
        from drm_triton.data.prepare import pipeline
        from drm_triton.data.prepare.build import BuildOptions
        from drm_triton.data.prepare.columns import NoHeaderError
        from drm_triton.data.prepare.parts import PartsOptions
        from drm_triton.data.prepare.raw import FileFormat
        from drm_triton.data.prepare.sources import find_source
        from drm_triton.data.prepare.synthetic import Shape

    chosen = find_source(source)
    reporter = FlagReporter(quiet)
    files: dict[SplitPart, str | None] = {"train": train, "valid": valid, "test": test}
    parts = {part: file for part, file in files.items() if file is not None}
    filters = {"min_rating": min_rating, "min_user": min_user, "min_item": min_item, "split": split, "ratios": ratios}
    is_split = bool(parts) or chosen.public_split is not None
    if is_split and (given_filters := [name for name, value in filters.items() if value is not None]):
        raise InputError(f"files that are already split are kept as they are: leave out `{given_filters[0]}`")
    if valid_ratio is not None and not is_split:
        raise InputError("`valid_ratio` is for files that are already split: give `train` and `test`, or `ratios`")
    if split == "leave-last" and ratios is not None:
        raise InputError('`split="leave-last"` holds out two interactions of each user: leave out `ratios`')
    parts_options = PartsOptions(valid_ratio or 0.0, seed)
    options = BuildOptions(
        min_rating=chosen.min_rating if min_rating is None else min_rating,
        min_user=chosen.min_user if min_user is None else min_user,
        min_item=chosen.min_item if min_item is None else min_item,
        split=split or "random",
        ratios=_shares(ratios or "70/10/20"),
        seed=seed,
    )
    out = out or data_dir() / chosen.name
    file_format = FileFormat(
        user=user,
        item=item,
        rating=rating,
        timestamp=timestamp,
        weight=weight,
        event=event,
        columns=_names(columns),
        separator=separator,
        encoding=encoding,
        decimal=decimal,
        date_format=date_format,
        event_weight=_event_weights(event_weight),
        skip_bad_rows=skip_bad_rows or None,
        leading=leading,
        titles=titles,
    )
    tables = {name: table for name, table in (("users", users), ("items", items)) if table is not None}
    given_sizes = {} if interactions is None else {"interactions": interactions}
    if chosen.name == "synthetic":
        given_sizes |= {name: _size(name, table) for name, table in tables.items()}
    elif numbers := [name for name, table in tables.items() if table.isdigit() and not Path(table).exists()]:
        raise InputError(
            f"`{numbers[0]}` must be a table of attributes; a number is for source synthetic, and for melon "
            "`synthetic` give `scale`"
        )
    elif synthetic and tables:
        raise InputError(f"`{min(tables)}` cannot describe generated data; give `scale`, or use source synthetic")
    generated = synthetic or chosen.name == "synthetic"
    if synthetic and chosen.name != "melon":
        raise InputError("`synthetic` imitates melon only: use `prepare melon --synthetic` or `prepare synthetic`")
    if scale is not None and not synthetic:
        raise InputError("`scale` is the size of `synthetic` data: give both or neither")
    if given_sizes and chosen.name != "synthetic":
        raise InputError(f"`{min(given_sizes)}` is for source synthetic; for melon `synthetic` give `scale`")
    if (raw or parts) and (generated or download):
        given = "raw" if raw else min(parts)
        raise InputError(f"generated or downloaded data does not come from `{given}`: leave out `{given}`")
    if generated and (download or file_format != FileFormat()):
        raise InputError(
            "generated data is neither downloaded nor read: leave out `download` and the options for reading"
        )
    if chosen.name == "synthetic":
        shape = Shape(**DEFAULT_SIZES | given_sizes)
        data = pipeline.prepare_synthetic(shape, out, options, overwrite, reporter)
    elif synthetic:
        shape = Shape.melon(1.0 if scale is None else scale)
        data = pipeline.prepare_synthetic_melon(shape, out, options, overwrite, reporter)
    else:
        own_filter = min_user is None and min_item is None  # given counts replace the filter of the source
        try:
            data = pipeline.prepare(
                chosen,
                raw or None,
                out,
                file_format,
                parts_options if is_split else options,
                overwrite,
                reporter,
                own_filter,
                download,
                parts or None,
                tables,
            )
        except NoHeaderError as error:
            command = command_line(*sys.argv[1:], "--columns", ",".join(error.columns))
            raise InputError(f"{error}. The whole command:{command}") from None
    if as_json:
        print(json.dumps(summary(data, out), ensure_ascii=False))
    else:
        describe(data, out)


def _size(name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise InputError(f"`{name}` must be a number for source synthetic, got {text!r}")
    return int(text)


def _names(columns: str | None) -> tuple[str, ...] | None:
    return tuple(name.strip() for name in columns.split(",")) if columns else None


def _event_weights(text: str | None) -> dict[str, float] | None:
    """Parse view=1,buy=5."""
    if text is None:
        return None
    weights: dict[str, float] = {}
    for part in text.split(","):
        event, _, weight = part.rpartition("=")
        try:
            value = float(weight)
        except ValueError:
            value = math.nan
        if not event.strip() or math.isnan(value) or event.strip() in weights:
            raise InputError(f"`event_weight` {text!r} must be events, each once, with weights, such as view=1,buy=5")
        weights[event.strip()] = value
    return weights


def _shares(text: str) -> tuple[float, float, float]:
    try:
        train, valid, test = (float(part) for part in text.replace(",", "/").split("/"))
    except ValueError:
        raise InputError(f"`ratios` {text!r} must be three numbers, train/valid/test, for example 70/10/20") from None
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
        lines = [source.summary, f"from: {source.origin}", f"format: {source.layout}", f"licence: {source.licence}"]
        if source.url:
            lines.append(f"--download: {source.url}")
        for number, line in enumerate(lines):
            first = f"{source.name if number == 0 else '':<14} "
            print(textwrap.fill(line, 80, initial_indent=first, subsequent_indent=" " * 17, break_long_words=False))
