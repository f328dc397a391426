"""At most so many items of a category in a list: the categories of items, from their attributes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import polars as pl
from numpy.typing import NDArray

from drm_triton.data.conditions import column, columns_of
from drm_triton.data.csr import CSR
from drm_triton.errors import InputError

MOST_DIGITS = 18  # of a limit in text


@dataclass(frozen=True)
class Limits:
    """The categories of items, and how many items of each a list may have.

    Attributes
    ----------
    categories : CSR [N, C], the categories of each candidate, of all limited attributes
    items : CSR [C, N], the candidates in each category
    most : int64 [C]
    attribute : int64 [C], number of the attribute whose value a category is
    complete : bool [attributes], whether each candidate is in a category of the attribute
    """

    categories: CSR
    items: CSR
    most: NDArray[np.int64]
    attribute: NDArray[np.int64]
    complete: NDArray[np.bool_]

    @classmethod
    def of(
        cls, table: pl.DataFrame, at_most: Sequence[tuple[str, int]], candidates: NDArray[np.int64] | None = None
    ) -> Limits:
        """Find the categories in a table of items. An item without a value is in no category.

        Parameters
        ----------
        table : attributes of all items, by code
        at_most : pairs of an attribute and the most items of a list with the same value of it
        candidates : codes of the items that lists may contain; None for all

        Examples
        --------
        >>> table = pl.DataFrame({"tags": [["a", "b"], [], ["b"]], "brand": ["x", "x", None]})
        >>> limits = Limits.of(table, [("tags", 2), ("brand", 1)])
        >>> limits.categories.row(0), limits.items.row(1), limits.most
        (array([0, 1, 2], dtype=int32), array([0, 2], dtype=int32), array([2, 2, 1]))
        """
        codes = np.arange(len(table)) if candidates is None else candidates
        found = [np.zeros((2, 0), dtype=np.int64)]  # items and their categories
        sizes: list[int] = []
        complete: list[bool] = []
        for name, _ in at_most:
            values = column(table, name, "at_most")
            if values.dtype.is_float():
                raise InputError(
                    f"`at_most`: {name} has decimal numbers, which are no categories; choose another attribute: "
                    f"{columns_of(table)}"
                )
            pairs = pl.DataFrame({"item": codes, "value": values[codes]})
            pairs = (pairs.explode("value") if values.dtype == pl.List else pairs).drop_nulls().unique()
            pairs = pairs.with_columns(value=pl.col("value").rank("dense").cast(pl.Int64) - 1 + sum(sizes))
            found.append(pairs.select("item", "value").to_numpy().T.astype(np.int64))
            sizes.append(pairs["value"].n_unique())
            complete.append(pairs["item"].n_unique() == len(codes))
        item, category = np.concatenate(found, axis=1)
        shape = len(table), sum(sizes)
        return cls(
            CSR.from_keys(np.sort(item * shape[1] + category), shape),
            CSR.from_keys(np.sort(category * shape[0] + item), shape[::-1]),
            np.repeat(np.array([number for _, number in at_most], dtype=np.int64), sizes),
            np.repeat(np.arange(len(sizes)), sizes),
            np.array(complete, dtype=bool),
        )

    @cached_property
    def width(self) -> int:
        """The most categories of one item."""
        return int(self.categories.degrees().max(initial=0))

    def of_items(self, items: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return the categories of items [m, n], padded with -1: int32 [m, n, most categories of one of them]."""
        rows = self.categories.take(np.maximum(items, 0).reshape(-1))
        degrees = np.where(items.reshape(-1) >= 0, rows.degrees(), 0)
        present = np.arange(max(degrees.max(initial=0), 1)) < degrees[:, None]
        padded = np.full(present.shape, -1, dtype=np.int32)
        padded[present] = rows.indices[np.repeat(items.reshape(-1) >= 0, rows.degrees())]
        return padded.reshape(*items.shape, -1)

    def closed(self, lists: NDArray[np.int32]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the categories without room of lists [m, k]: numbers of lists and categories, both int64 [n]."""
        categories = self.of_items(lists).reshape(len(lists), -1)
        rows, places = np.nonzero(categories >= 0)
        size = max(len(self.most), 1)
        keys, counts = np.unique(rows * size + categories[rows, places], return_counts=True)
        rows, found = np.divmod(keys, size)
        closed = counts >= self.most[found]
        return rows[closed], found[closed]

    def leave_nothing(self, lists: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Return whether all categories of an attribute are closed, so that no candidate can be added: bool [m]."""
        rows, categories = self.closed(lists)
        n_closed = np.zeros((len(lists), len(self.complete)), dtype=np.int64)
        np.add.at(n_closed, (rows, self.attribute[categories]), 1)
        sizes = np.bincount(self.attribute, minlength=len(self.complete))
        found: NDArray[np.bool_] = ((n_closed == sizes) & self.complete).any(1)
        return found


def parse_limits(at_most: Sequence[str]) -> dict[str, int]:
    """Return limits that are given as text.

    Examples
    --------
    >>> parse_limits(["genre=2"])
    {'genre': 2}
    """
    limits = {}
    for limit in at_most:
        name, _, number = limit.rpartition("=")
        number = number.strip()
        if not name.strip() or not (number.isascii() and number.isdigit() and len(number) <= MOST_DIGITS):
            raise InputError(f"`at_most`: {limit!r} is not an attribute and a number; write for example genre=2")
        if name.strip() in limits:
            raise InputError(f"`at_most` has two numbers for {name.strip()}; give one of them")
        limits[name.strip()] = int(number)
    return limits
