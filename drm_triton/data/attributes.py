"""Attributes of items and users: a table with one row for each, read from a file and joined to a data set by id.

A column of text is a category. A column of lists of text, or of text with the separator `|` as in "Drama|Comedy", holds
tags. Numbers, truth values and dates stay what they are. A column `title` holds titles.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial
from pathlib import Path

import polars as pl

from drm_triton.errors import InputError

RESERVED = ("id", "title")  # columns of the tables of users and items that are no attributes
TAGS = "|"  # separates tags
SEPARATORS = (",", "\t", ";")
DECIMAL_COMMA = r"^\s*[+-]?\d+(,\d+)?\s*$"
READERS: dict[str, Callable[[io.BytesIO], pl.DataFrame]] = {
    ".parquet": pl.read_parquet,
    ".pq": pl.read_parquet,
    ".jsonl": pl.read_ndjson,
    ".ndjson": pl.read_ndjson,
}


def read_attributes(path: str | Path, kind: str) -> pl.DataFrame:
    """Read a table of attributes: CSV, TSV, JSON lines or Parquet.

    Parameters
    ----------
    path : the file
    kind : `item` or `user`, whose ids the table has. Its column is called `id`, or as in a table of interactions.
    """
    path = Path(path)
    try:
        content = path.read_bytes()
        read = READERS.get(path.suffix.lower(), _read_text)
        frame = read(io.BytesIO(content))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from None
    except pl.exceptions.PolarsError as error:
        reason = str(error).split("\n", 1)[0]
        raise InputError(f"{path}: not a readable table of {kind}s ({reason})") from None
    return checked_attributes(frame, kind, str(path))


def checked_attributes(frame: pl.DataFrame, kind: str, where: str) -> pl.DataFrame:
    """Return a table of attributes with the ids in the first column, called `id`, and tags as lists.

    Examples
    --------
    >>> frame = pl.DataFrame({"movieId": [1, 2], "genres": ["Drama|Crime", "Comedy"], "year": [1994, 1995]})
    >>> checked_attributes(frame, "item", "movies.csv").to_dicts()[0]
    {'id': 1, 'genres': ['Drama', 'Crime'], 'year': 1994}
    """
    from drm_triton.data.prepare.columns import spells  # not needed to load a data set

    found = [c for c in frame.columns if c.casefold() == "id"] or [c for c in frame.columns if spells(c, kind)]
    if len(found) != 1:
        columns = ", ".join(map(repr, frame.columns))
        problem = "no column" if not found else "several columns"
        raise InputError(f"{where}: {problem} could contain the ids of the {kind}s ({columns}); call one of them id")
    frame = frame.select(pl.col(found[0]).alias("id"), pl.exclude(found[0]))
    if frame["id"].null_count():
        raise InputError(f"{where}: row {frame['id'].is_null().arg_max()} has no id; remove it, or give it one")
    if frame["id"].is_duplicated().any():
        repeated = frame["id"].filter(frame["id"].is_duplicated())[0]
        raise InputError(f"{where}: {kind} {repeated!r} has several rows; keep one row for each {kind}")
    return frame.with_columns(_typed(frame[name], where) for name in frame.columns if name not in RESERVED)


def attributes(table: pl.DataFrame) -> list[str]:
    """Return the names of the attributes in the table of users or items of a data set."""
    return [name for name in table.columns if name not in RESERVED]


def join(known: pl.DataFrame, given: pl.DataFrame, kind: str) -> pl.DataFrame:
    """Add attributes to the table of a data set, by id.

    Parameters
    ----------
    known : table of users or items, by code
    given : attributes, see `checked_attributes`. Ids that the data set does not have get the codes after the others.
    kind : `item` or `user`, for messages

    Returns
    -------
    the table with the attributes; null where `given` does not have an id
    """
    kept = known.select(name for name in RESERVED if name in known.columns)
    ids = given["id"].cast(known["id"].dtype, strict=False)
    if ids.null_count():
        odd = given["id"].filter(ids.is_null())[0]
        raise InputError(
            f"attributes: {kind} {odd!r} cannot be an id of this data, whose {kind} ids are {_kind_of(known['id'])}"
        )
    given = given.with_columns(id=ids)
    if "title" in given.columns and "title" in kept.columns:
        kept = kept.drop("title")
    joined = kept.join(given, on="id", how="left", maintain_order="left")
    new = given.join(known.select("id"), on="id", how="anti", maintain_order="left").sort("id")
    return pl.concat([joined, new], how="diagonal")


def _read_text(content: io.BytesIO) -> pl.DataFrame:
    header = content.getvalue().split(b"\n", 1)[0].decode("utf-8-sig", "replace")
    separator = max(SEPARATORS, key=header.count)
    read = partial(pl.read_csv, separator=separator, infer_schema_length=None, try_parse_dates=True)
    frame = read(io.BytesIO(content.getvalue()))
    return frame if separator == "," else frame.with_columns(map(_with_decimal_point, frame))


def _with_decimal_point(column: pl.Series) -> pl.Series:
    """Return numbers with a decimal comma, which were read as text, as numbers."""
    if column.dtype != pl.String or not column.drop_nulls().str.contains(DECIMAL_COMMA).all():
        return column
    return column.str.strip_chars().str.replace(",", ".", literal=True).cast(pl.Float64)


def _typed(column: pl.Series, where: str) -> pl.Series:
    """Return a column of attributes in one of the types that are stored."""
    kind = column.dtype
    if kind == pl.List and kind.inner in (pl.String, pl.Null):  # type: ignore[attr-defined]
        return column.cast(pl.List(pl.String))
    if kind == pl.String:
        tags = bool(column.str.contains(TAGS, literal=True).any())
        return column.str.split(TAGS).list.eval(pl.element().str.strip_chars()) if tags else column
    if kind in (pl.Categorical, pl.Enum, pl.Null):
        return column.cast(pl.String)
    if kind.is_float() and not column.drop_nulls().is_finite().all():
        raise InputError(f"{where}: column {column.name!r} has values that are not finite; leave such fields empty")
    if kind.is_numeric() or kind.is_temporal() or kind == pl.Boolean:
        return column
    raise InputError(
        f"{where}: column {column.name!r} has type {kind}; attributes are text, lists of text, numbers, dates or "
        "truth values"
    )


def _kind_of(ids: pl.Series) -> str:
    return "text" if ids.dtype == pl.String else "integers"
