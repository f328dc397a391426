"""Attributes of items and users: a table with one row for each, joined to a data set by id.

A column of text is a category. A column of lists of text, or of text with the separator `|` as in "Drama|Comedy", holds
tags. Numbers, truth values and dates stay what they are. A column `title` holds titles.
"""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl

from drm_triton.errors import InputError

RESERVED = ("id", "title")  # columns of the tables of users and items that are no attributes
TAGS = "|"  # separates tags


def checked_attributes(frame: pl.DataFrame, kind: str, where: str) -> pl.DataFrame:
    """Return a table of attributes with the ids in the first column, called `id`, and tags as lists.

    Examples
    --------
    >>> frame = pl.DataFrame({"movieId": [1, 2], "genres": ["Drama|Crime", "Comedy"], "year": [1994, 1995]})
    >>> checked_attributes(frame, "item", "movies.csv").to_dicts()[0]
    {'id': 1, 'genres': ['Drama', 'Crime'], 'year': 1994}
    """
    ids = id_column(frame.columns, kind, where)
    frame = frame.select(pl.col(ids).alias("id"), pl.exclude(ids))
    if frame["id"].null_count():
        row = frame["id"].is_null().arg_max() or 0
        raise InputError(f"{where}: row {row + 1:,} has no id; remove it, or give it one")
    if frame["id"].is_duplicated().any():
        repeated = frame["id"].filter(frame["id"].is_duplicated())[0]
        raise InputError(f"{where}: {kind} {repeated!r} has several rows; keep one row for each {kind}")
    return frame.with_columns(_typed(frame[name], where) for name in frame.columns if name not in RESERVED)


def id_column(columns: Sequence[str], kind: str, where: str) -> str:
    """Return the column of a table that has the ids of items or users: `id`, or as in a table of interactions."""
    from drm_triton.data.prepare.columns import spells  # not needed to load a data set

    found = [c for c in columns if c.casefold() == "id"] or [c for c in columns if spells(c, kind)]
    if len(found) != 1:
        listed = ", ".join(map(repr, columns))
        problem = "no column" if not found else "several columns"
        raise InputError(f"{where}: {problem} could contain the ids of the {kind}s ({listed}); call one of them id")
    return found[0]


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
    from drm_triton.data.prepare.values import id_values  # not needed to load a data set

    kept = known.select(name for name in RESERVED if name in known.columns)
    whole = known["id"].dtype != pl.String
    ids = given.select(id_values("id", given["id"].dtype, from_text=False, whole=whole, careful=True)).to_series()
    ids = ids.cast(known["id"].dtype)
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
