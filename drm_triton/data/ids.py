"""External ids of users and items, and their codes 0..n-1."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from drm_triton.errors import InputError

SHOWN = 5  # unknown ids named in a message
COMPARED = 2000  # known ids compared with an unknown one, letter by letter


def as_series(ids: Any, kind: str) -> pl.Series:
    """Return ids from a list, array or series as a series of whole numbers or text. `kind` is user or item."""
    if isinstance(ids, str | bytes | int | float) or not hasattr(ids, "__iter__"):
        raise InputError(f"{kind} ids must be a list, got the single value {ids!r}; write [{ids!r}]")
    values = ids if isinstance(ids, pl.Series) else ids.tolist() if hasattr(ids, "tolist") else list(ids)
    try:
        series = pl.Series("id", values, strict=False)
    except (TypeError, OverflowError, pl.exceptions.PolarsError) as error:
        raise InputError(f"{kind} ids must be whole numbers or text ({error})") from None
    if series.dtype.is_nested() or series.dtype in (pl.Object, pl.Binary):
        raise InputError(f"{kind} ids must be whole numbers or text, not {series.dtype}")
    return series


def lookup(ids: pl.Series, known: pl.Series) -> NDArray[np.int32]:
    """Return the codes of external ids: int32 [len(ids)], -1 for unknown ids.

    The text "17" finds the number 17 and the other way round, because ids on a command line are text. `IdIndex` finds
    single ids faster.

    Parameters
    ----------
    ids : ids to find
    known : all ids, by code

    Examples
    --------
    >>> lookup(pl.Series(["30", "31"]), pl.Series([10, 20, 30]))
    array([ 2, -1], dtype=int32)
    """
    same_type = ids.cast(known.dtype, strict=False).alias("id")
    if ids.dtype.is_float() and known.dtype.is_integer():  # 1.5 is not 1
        same_type = same_type.set(same_type != ids, None)
    if known.is_sorted() and len(known):  # true for prepared data: a binary search needs no table of all ids
        place = np.minimum(known.search_sorted(same_type).to_numpy(), len(known) - 1)
        found = known[place].eq_missing(same_type).to_numpy()
        return np.where(found, place, -1).astype(np.int32)
    table = known.alias("id").to_frame().with_row_index("code")
    codes = same_type.to_frame().join(table, on="id", how="left", maintain_order="left")["code"]
    return codes.cast(pl.Int32).fill_null(-1).to_numpy(writable=True)


class IdIndex:
    """Find the codes of single ids in a dictionary. `lookup` is for many ids at once.

    The text "17" finds the number 17 and the other way round.

    Attributes
    ----------
    ids : external ids by code

    Examples
    --------
    >>> index = IdIndex(pl.Series([10, 20, 30]))
    >>> index.find("30"), index.find(31)
    (2, None)
    >>> index.split(["30", 31, 10])
    (array([0, 2], dtype=int32), [31])
    """

    def __init__(self, ids: pl.Series) -> None:
        self.ids: list[int | str] = ids.to_list()
        self._codes = {str(value): code for code, value in enumerate(self.ids)}

    def find(self, external_id: int | str) -> int | None:
        """Return the code of an id, or None if it is not known."""
        return self._codes.get(str(external_id))

    def split(self, external_ids: Iterable[int | str]) -> tuple[NDArray[np.int32], list[int | str]]:
        """Return the codes of the known ids, ascending and without repeats, and the ids that are not known."""
        found = {value: self.find(value) for value in external_ids}
        codes = {code for code in found.values() if code is not None}
        return np.array(sorted(codes), dtype=np.int32), [value for value, code in found.items() if code is None]


def encode(ids: Any, known: pl.Series, kind: str, titles: pl.Series | None = None) -> NDArray[np.int32]:
    """Return the codes of external ids: int32 [len(ids)]. Raise an error that names unknown ids."""
    series = as_series(ids, kind)
    codes = lookup(series, known)
    if (codes < 0).any():
        raise unknown_ids(series.filter(codes < 0), known, kind, titles)
    return codes


def unknown_ids(unknown: pl.Series, known: pl.Series, kind: str, titles: pl.Series | None = None) -> InputError:
    """Return the error for unknown ids. It names some of them, and known ids that are similar."""
    unknown = unknown.unique(maintain_order=True)
    near = nearest(str(unknown[0]), known, titles)
    hint = f"; the nearest are {', '.join(near)}" if near else ""
    example = repr(known[0]) if len(known) else "none"
    return InputError(
        f"unknown {kind} id{'s' if len(unknown) > 1 else ''}: {named(unknown)}; the data set has {len(known):,} "
        f"{kind}s ({known.dtype} ids such as {example}){hint}"
    )


def named(ids: pl.Series) -> str:
    """Return the first ids for a message, and the number of the others."""
    more = f" and {len(ids) - SHOWN:,} more" if len(ids) > SHOWN else ""
    return ", ".join(repr(value) for value in ids.head(SHOWN)) + more


def nearest(text: str, known: pl.Series, titles: pl.Series | None = None, count: int = 3) -> list[str]:
    """Return known ids, with titles, whose id or title contains a text, or else whose id has a similar spelling.

    Examples
    --------
    >>> nearest("matrix", pl.Series([1, 2]), pl.Series(["Heat", "The Matrix"]))
    ["2 ('The Matrix')"]
    >>> nearest("jhon", pl.Series(["ann", "john"]))
    ["'john'"]
    """
    if not text:
        return []
    names = known.cast(pl.String)
    found: list[int] = []
    for column in (names, titles):
        if column is not None:
            contains = column.str.to_lowercase().str.contains(text.lower(), literal=True).fill_null(False)
            found += contains.arg_true().head(count).to_list()
    if not found and known.dtype == pl.String:
        # Comparing letter by letter is slow, so compare only ids of similar length with the same first or last letter.
        length = names.str.len_chars().cast(pl.Int32)
        likely = ((length - len(text)).abs() <= 2) & (
            names.str.starts_with(text[0]) | names.str.ends_with(text[-1]) | (length <= 4)
        )
        candidates = names.filter(likely).head(COMPARED).to_list()
        close = difflib.get_close_matches(text, candidates, n=count)
        found = [int(code) for code in lookup(pl.Series(close, dtype=pl.String), known)]
    titled = [titles[code] if titles is not None else None for code in found]
    pairs = dict.fromkeys(zip(found, titled, strict=True))
    return [f"{known[code]!r} ({title!r})" if title else repr(known[code]) for code, title in pairs][:count]


def given_ids(kind: str, ids: Any, rows: int) -> pl.DataFrame | None:
    """Return a table of the ids that a caller gives for the rows of a matrix, or None if there are none."""
    if ids is None:
        return None
    try:
        series = _as_ids(pl.Series("id", ids))
    except (TypeError, pl.exceptions.PolarsError) as error:
        raise InputError(f"from_csr: `{kind}_ids` must be whole numbers or text ({error})") from error
    if len(series) != rows or series.null_count() or series.n_unique() != rows:
        raise InputError(f"from_csr: `{kind}_ids` must be {rows} different ids without nulls, got {len(series)}")
    return series.to_frame()


def _as_ids(ids: pl.Series) -> pl.Series:
    """Return ids as Int64 or String, like `prepare`. Raise if that would change an id."""
    if ids.dtype.is_integer() and ids.dtype != pl.UInt64:
        return ids.cast(pl.Int64)
    if ids.dtype.is_numeric():
        whole = ids.cast(pl.Int64, strict=False)
        if ids.dtype == pl.UInt64:
            return ids.cast(pl.String) if whole.null_count() > ids.null_count() else whole
        if not ((whole == ids) & (whole.abs() < 2**53)).all():
            raise TypeError(f"not {ids.dtype} with fractions")
        return whole
    if ids.dtype.is_nested() or ids.dtype in (pl.Binary, pl.Object):
        raise TypeError(f"not {ids.dtype}")
    return ids.cast(pl.String)
