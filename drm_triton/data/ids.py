"""External ids and the codes 0..n-1 behind them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from drm_triton.errors import InputError

SHOWN = 5  # unknown ids that a message names
COMPARED = 2000  # known ids that are compared letter by letter with an unknown one


def as_series(ids: Any, kind: str) -> pl.Series:
    """Ids in any usual container as a series: whole numbers or text."""
    if isinstance(ids, str | bytes | int | float) or not hasattr(ids, "__iter__"):
        raise InputError(f"{kind} ids come as a list, got the single value {ids!r}; write [{ids!r}]")
    values = ids if isinstance(ids, pl.Series) else ids.tolist() if hasattr(ids, "tolist") else list(ids)
    try:
        series = pl.Series("id", values, strict=False)
    except (TypeError, OverflowError, pl.exceptions.PolarsError) as error:
        raise InputError(f"{kind} ids must be whole numbers or text ({error})") from None
    if series.dtype.is_nested() or series.dtype in (pl.Object, pl.Binary):
        raise InputError(f"{kind} ids must be whole numbers or text, not {series.dtype}")
    return series


def lookup(asked: pl.Series, known: pl.Series) -> NDArray[np.int32]:
    """Codes of external ids, int32 [len(asked)], with -1 for those that are not known.

    The text "17" finds the number 17 and the other way round: ids typed on a command line are text.

    Examples
    --------
    >>> lookup(pl.Series(["30", "31"]), pl.Series([10, 20, 30]))
    array([ 2, -1], dtype=int32)
    """
    same_kind = asked.cast(known.dtype, strict=False).alias("id")
    if asked.dtype.is_float() and known.dtype.is_integer():  # 1.5 is not 1
        same_kind = same_kind.set(same_kind != asked, None)
    if known.is_sorted() and len(known):  # as `prepare` numbers them: a binary search needs no table of all ids
        place = np.minimum(known.search_sorted(same_kind).to_numpy(), len(known) - 1)
        found = known[place].eq_missing(same_kind).to_numpy()
        return np.where(found, place, -1).astype(np.int32)
    table = known.alias("id").to_frame().with_row_index("code")
    codes = same_kind.to_frame().join(table, on="id", how="left", maintain_order="left")["code"]
    return codes.cast(pl.Int32).fill_null(-1).to_numpy(writable=True)


class IdIndex:
    """Finds the codes of single ids by a dictionary. `lookup` is for many ids at once.

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
    """Codes of external ids, int32 [len(ids)]; one that is not known is an error that names it."""
    asked = as_series(ids, kind)
    codes = lookup(asked, known)
    if (codes < 0).any():
        raise unknown_ids(asked.filter(codes < 0), known, kind, titles)
    return codes


def unknown_ids(unknown: pl.Series, known: pl.Series, kind: str, titles: pl.Series | None = None) -> InputError:
    """Make the error for ids that are not known: it names some, and what may have been meant."""
    unknown = unknown.unique(maintain_order=True)
    near = nearest(str(unknown[0]), known, titles)
    hint = f"; the nearest are {', '.join(near)}" if near else ""
    example = repr(known[0]) if len(known) else "none"
    return InputError(
        f"unknown {kind} id{'s' if len(unknown) > 1 else ''}: {named(unknown)}; the data set has {len(known):,} "
        f"{kind}s ({known.dtype} ids such as {example}){hint}"
    )


def named(ids: pl.Series) -> str:
    """The first few of some ids, and how many more there are."""
    more = f" and {len(ids) - SHOWN:,} more" if len(ids) > SHOWN else ""
    return ", ".join(repr(value) for value in ids.head(SHOWN)) + more


def nearest(text: str, known: pl.Series, titles: pl.Series | None = None, count: int = 3) -> list[str]:
    """Known ids, with their titles, that resemble a text: those whose title holds it, or that are spelt almost so.

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
            holds = column.str.to_lowercase().str.contains(text.lower(), literal=True).fill_null(False)
            found += holds.arg_true().head(count).to_list()
    if not found and known.dtype == pl.String:
        # Letter by letter is slow: only ids of about this length that share the first or the last letter.
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
