"""Files with one user per line, followed by the items, as CiteULike and LightGCN distribute them."""

from __future__ import annotations

from typing import get_args

import polars as pl

from drm_triton.data.prepare.failures import read_errors
from drm_triton.data.prepare.inputs import InputFile, Inputs
from drm_triton.data.prepare.raw import FileFormat, RawInteractions, RawTable
from drm_triton.data.prepare.sources.base import Source
from drm_triton.data.prepare.text import first_lines, given_separator, lines_of, to_utf8
from drm_triton.errors import InputError
from drm_triton.names import Leading, SplitPart


def read(inputs: Inputs, file_format: FileFormat) -> RawInteractions:
    """Read lists of items. A user without an id gets the number of its line, from 0, in every file."""
    files = inputs.all(("*.txt", "*.dat", "*.csv", "*.tsv", "*.lists"))
    tables = [read_file(inputs, file, file_format) for file in files]
    return RawInteractions(tables, text=True, files=[file.on_disk for file in files])


def read_file(inputs: Inputs, file: InputFile, file_format: FileFormat, part: SplitPart | None = None) -> RawTable:
    """Read the lists of one file, which is a part of a split or not."""
    leading = file_format.leading or "user"
    if leading not in get_args(Leading):
        raise InputError(f"`leading` {leading!r} is unknown: choose user, count or none")
    return RawTable(file.name, _rows(to_utf8(inputs, file, file_format), leading, file_format), unit="line", part=part)


def _rows(file: InputFile, leading: str, file_format: FileFormat) -> pl.LazyFrame:
    """Return one row for each item of each line."""
    first_lines(file)  # refuses a file that is not UTF-8
    separator = given_separator(file_format)
    with read_errors(file.name):
        lines = lines_of(file).with_row_index("row").drop_nulls().collect()
    text = pl.col("line").str
    tokens = text.split(separator) if separator and separator != " " else text.extract_all(r"\S+")
    lists = lines.select("row", tokens=tokens).filter(pl.col("tokens").list.len() > 0)
    counted = lists.select(
        "row",
        first=pl.col("tokens").list.first(),
        right=pl.col("tokens").list.first() == (pl.col("tokens").list.len() - 1).cast(pl.String),
    )
    if leading == "count" and not counted["right"].all():
        row, first = counted.filter(~pl.col("right")).select("row", "first").row(0)
        raise InputError(
            f"line {row + 1:,} of {file.name} begins with {first!r}, which is not the number of its items: check "
            "`leading` (user, count or none), and that the file is complete"
        )
    if file_format.leading is None and len(counted) > 1 and counted["right"].all():
        raise InputError(
            f'every line of {file.name} begins with the number of its items: give `leading="count"`, or '
            '`leading="user"` if it is the user id'
        )
    items = pl.col("tokens") if leading == "none" else pl.col("tokens").list.slice(1)
    user = pl.col("tokens").list.first() if leading == "user" else pl.col("row").cast(pl.String)
    return lists.lazy().select("row", user=user, item=items).filter(pl.col("item").list.len() > 0).explode("item")


LISTS = Source(
    name="lists",
    summary="one user per line, followed by the items",
    origin="for example CiteULike's users.dat (lines begin with a count) or LightGCN's train.txt (with a user)",
    licence="depends on the data",
    layout="items separated by blanks; a line begins with the user id, the number of items, or the first item",
    read=read,
    reads=frozenset({"leading", "separator", "encoding"}),
    takes_parts=True,
)
