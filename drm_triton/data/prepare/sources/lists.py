"""Files with one user per line, followed by its items, as CiteULike and LightGCN distribute them."""

from __future__ import annotations

import polars as pl

from drm_triton.data.prepare.columns import Part, Raw
from drm_triton.data.prepare.inputs import Input, Inputs, reading
from drm_triton.data.prepare.sources.base import Source
from drm_triton.data.prepare.tables import Reading, head, lines_of, named_separator, utf8
from drm_triton.errors import InputError

LEADING = ("user", "count", "none")


def read(inputs: Inputs, how: Reading) -> Raw:
    """Read lists; a user without an id of its own is known by the number of its line, from 0, in every file alike."""
    leading = how.leading or "user"
    if leading not in LEADING:
        raise InputError(f"--leading {leading!r} is not known: choose user, count or none")
    files = inputs.all(("*.txt", "*.dat", "*.csv", "*.tsv", "*.lists"))
    return Raw(
        [Part(f.name, _rows(utf8(inputs, f, how), leading, how), unit="line") for f in files],
        text=True,
        files=[f.on_disk for f in files],
    )


def _rows(file: Input, leading: str, how: Reading) -> pl.LazyFrame:
    head(file)  # refuses what is not UTF-8
    separator = named_separator(how)
    with reading(file.name):
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
            "--leading (user, count or none), and that the file is complete"
        )
    if how.leading is None and len(counted) > 1 and counted["right"].all():
        raise InputError(
            f"every line of {file.name} begins with the number of its items: give --leading count, or --leading user "
            "if it is the user's id after all"
        )
    items = pl.col("tokens") if leading == "none" else pl.col("tokens").list.slice(1)
    user = pl.col("tokens").list.first() if leading == "user" else pl.col("row").cast(pl.String)
    return lists.lazy().select("row", user=user, item=items).filter(pl.col("item").list.len() > 0).explode("item")


LISTS = Source(
    name="lists",
    summary="one user per line, followed by its items",
    origin="for example CiteULike's users.dat (--leading count) or LightGCN's train.txt (--leading user)",
    licence="that of the data",
    layout="items separated by blanks; a line begins with the user's id, the number of items, or the first item",
    read=read,
    reads=frozenset({"leading", "separator", "encoding"}),
)
