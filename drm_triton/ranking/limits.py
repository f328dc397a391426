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


@dataclass(frozen=True)
class Limits:
    """The categories of items, and how many items of each a list may have.

    Attributes
    ----------
    categories : CSR [N, C], the categories of each item, of all limited attributes
    items : CSR [C, N], the items of each category
    most : int64 [C]
    """

    categories: CSR
    items: CSR
    most: NDArray[np.int64]

    @classmethod
    def of(cls, table: pl.DataFrame, at_most: Sequence[tuple[str, int]]) -> Limits:
        """Find the categories in a table of items. An item without a value is in no category.

        Examples
        --------
        >>> table = pl.DataFrame({"tags": [["a", "b"], [], ["b"]], "brand": ["x", "x", None]})
        >>> limits = Limits.of(table, [("tags", 2), ("brand", 1)])
        >>> limits.categories.row(0), limits.items.row(1), limits.most
        (array([0, 1, 2], dtype=int32), array([0, 2], dtype=int32), array([2, 2, 1]))
        """
        found = [np.zeros((2, 0), dtype=np.int64)]  # items and their categories
        most: list[int] = []
        for name, number in at_most:
            values = column(table, name, "at_most")
            if values.dtype.is_float():
                raise InputError(
                    f"`at_most`: {name} has decimal numbers, which are no categories; choose another attribute: "
                    f"{columns_of(table)}"
                )
            pairs = values.alias("value").to_frame().with_row_index("item")
            pairs = (pairs.explode("value") if values.dtype == pl.List else pairs).drop_nulls().unique()
            pairs = pairs.with_columns(value=pl.col("value").rank("dense").cast(pl.Int64) - 1 + len(most))
            found.append(pairs.select("item", "value").to_numpy().T.astype(np.int64))
            most += [number] * pairs["value"].n_unique()
        item, category = np.concatenate(found, axis=1)
        shape = len(table), len(most)
        return cls(
            CSR.from_keys(np.sort(item * shape[1] + category), shape),
            CSR.from_keys(np.sort(category * shape[0] + item), shape[::-1]),
            np.array(most, dtype=np.int64),
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

    def closed_items(self, lists: NDArray[np.int32]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Return the items of all categories of which a list [m, k] has the most items allowed.

        Returns
        -------
        rows : int64 [n], number of the list
        items : int32 [n], pairs may repeat
        """
        categories = self.of_items(lists).reshape(len(lists), -1)
        rows, places = np.nonzero(categories >= 0)
        size = max(len(self.most), 1)
        keys, counts = np.unique(rows * size + categories[rows, places], return_counts=True)
        rows, found = np.divmod(keys, size)
        closed = counts >= self.most[found]
        items = self.items.take(found[closed])
        return np.repeat(rows[closed], items.degrees()), items.indices


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
        if not name.strip() or not (number.strip().isascii() and number.strip().isdigit()):
            raise InputError(f"`at_most`: {limit!r} is not an attribute and a number; write for example genre=2")
        limits[name.strip()] = int(number)
    return limits
