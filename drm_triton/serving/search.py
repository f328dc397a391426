"""Search for items by title or id, for the page of the service and for `GET /items`."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

import numpy as np
import polars as pl
from numpy.typing import NDArray


def folded(text: str) -> str:
    """Return text without differences of case and accents.

    Examples
    --------
    >>> folded("Björk – JÓGA")
    'bjork – joga'
    """
    letters = unicodedata.normalize("NFKD", text.casefold())
    return letters if letters.isascii() else "".join(c for c in letters if not unicodedata.combining(c))


class ItemSearch:
    """Finds items whose title or id contains a text.

    Parameters
    ----------
    ids : external ids, by code
    titles : titles by code, or None
    by_popularity : item codes, the most popular first

    Examples
    --------
    >>> search = ItemSearch([7, 70], ["Heat", "Ran"], [1, 0])
    >>> search.find("HE", 5), search.find("7", 5), search.find("", 5)
    ([0], [0, 1], [1, 0])
    """

    def __init__(
        self, ids: Sequence[int | str], titles: Sequence[str | None] | None, by_popularity: Sequence[int]
    ) -> None:
        self._codes: NDArray[np.int64] = np.array(by_popularity, dtype=np.int64)
        self._ids = pl.Series([folded(str(ids[code])) for code in by_popularity], dtype=pl.String)
        self._columns = [self._ids]
        if titles is not None:
            self._columns.insert(0, pl.Series([folded(titles[code] or "") for code in by_popularity], dtype=pl.String))

    def find(self, text: str, k: int) -> list[int]:
        """Return the codes of at most k items.

        The item with exactly this id comes first, then items whose title or id begins with the text, then items that
        contain it; the more popular first within each. An empty text finds the most popular items.
        """
        text = folded(text.strip())
        if not text:
            return [int(code) for code in self._codes[:k]]
        masks = [
            self._ids == text,
            *(column.str.starts_with(text) for column in self._columns),
            *(column.str.contains(text, literal=True) for column in self._columns),
        ]
        places = dict.fromkeys(place for mask in masks for place in mask.arg_true().head(k).to_list())
        return [int(self._codes[place]) for place in list(places)[:k]]
