"""Interactions as pairs of codes, in memory: one row per user and item, k-core, split."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from drm_triton.data.csr import CSR
from drm_triton.data.split import split
from drm_triton.names import SplitName


class Interactions:
    """Distinct pairs of a user and an item, sorted, with times and weights if there are any.

    Parameters
    ----------
    codes : columns user and item, and time and weight if there are any

    Attributes
    ----------
    rows : (rows, users, items) before repeated rows were removed
    """

    def __init__(self, codes: pl.DataFrame) -> None:
        self.rows = len(codes), *(_present(codes[role].to_numpy()) for role in ("user", "item"))
        self._users, self._items, self._time, self._weights = distinct(codes)

    def sizes(self) -> tuple[int, int, int]:
        """Return the numbers of pairs, users and items."""
        return len(self._users), _present(self._users), _present(self._items)

    def keep_core(self, min_user: int, min_item: int) -> tuple[NDArray[np.integer], NDArray[np.integer]]:
        """Remove users and items with too few pairs, until there are none. Return the removed pairs."""
        kept = core(self._users, self._items, min_user, min_item)
        removed = self._users[~kept], self._items[~kept]
        self._users, self._items = self._users[kept], self._items[kept]
        self._time, self._weights = (x if x is None else x[kept] for x in (self._time, self._weights))
        return removed

    def used_ids(self, user_ids: pl.Series, item_ids: pl.Series) -> tuple[pl.Series, pl.Series]:
        """Number the users and items that are in use anew, and return their ids."""
        self._users, user_ids = _compact(self._users, user_ids)
        self._items, item_ids = _compact(self._items, item_ids)
        self._shape = len(user_ids), len(item_ids)
        return user_ids, item_ids

    def split(self, method: SplitName, ratios: tuple[float, float, float], seed: int) -> list[CSR]:
        """Return the pairs of train, validation and test."""
        labels, weights = split(self._users, self._items, self._time, method, ratios, seed), self._weights
        masks = (labels == label for label in range(3))
        return [
            CSR.from_pairs(
                self._users[mask], self._items[mask], self._shape, weights if weights is None else weights[mask]
            )
            for mask in masks
        ]


def lazy_codes(frame: pl.DataFrame, user_ids: pl.Series, item_ids: pl.Series) -> pl.LazyFrame:
    """Replace external ids by codes, their positions in the sorted ids. The order of rows may change."""
    lazy = frame.lazy()
    for role, ids in (("user", user_ids), ("item", item_ids)):
        table = ids.alias(role).to_frame().with_row_index("code").lazy()
        lazy = lazy.join(table, on=role).drop(role).rename({"code": role})
    return lazy


def to_codes(frame: pl.DataFrame, user_ids: pl.Series, item_ids: pl.Series) -> pl.DataFrame:
    """Collect `lazy_codes`."""
    return lazy_codes(frame, user_ids, item_ids).collect(engine="streaming")


def distinct(
    codes: pl.DataFrame,
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[Any] | None, NDArray[np.float32] | None]:
    """Return users, items, times and weights [n], sorted by user, then item.

    Of repeated pairs, the latest time is kept, and the weights are added, in ascending order: their sum then does not
    depend on the order of rows.
    """
    pair = (pl.col("user").cast(pl.Int64) * 2**32 + pl.col("item")).alias("pair")
    others = [name for name in ("weight", "time") if name in codes.columns]
    frame = codes.select(pair, *others).sort("pair", *others)
    found = {name: frame[name].to_numpy() for name in frame.columns}
    different = found["pair"][1:] != found["pair"][:-1]
    if not different.all():
        first = np.flatnonzero(np.concatenate([[True], different]))
        found = {name: _MERGED[name].reduceat(values, first) for name, values in found.items()}
    pairs, weights = found["pair"], found.get("weight")
    return (
        (pairs >> 32).astype(np.int32),  # the upper half
        pairs.astype(np.int32),  # the lower half
        found.get("time"),
        weights if weights is None else weights.astype(np.float32),
    )


_MERGED = {"pair": np.maximum, "time": np.maximum, "weight": np.add}  # what becomes of the rows of one pair


def core(users: NDArray[np.integer], items: NDArray[np.integer], min_user: int, min_item: int) -> NDArray[np.bool_]:
    """Return a mask [n] of the largest subset where each user has `min_user` and each item `min_item` interactions."""
    kept = np.ones(len(users), dtype=bool)
    u, i = users, items
    while True:
        enough = (np.bincount(u) >= min_user)[u] & (np.bincount(i) >= min_item)[i]
        if enough.all():
            return kept
        kept[kept] = enough
        u, i = u[enough], i[enough]


def _present(codes: NDArray[np.integer]) -> int:
    """Return the number of distinct codes."""
    seen = np.zeros(int(codes.max()) + 1 if len(codes) else 0, dtype=bool)
    seen[codes] = True
    return int(np.count_nonzero(seen))


def _compact(codes: NDArray[np.int32], ids: pl.Series) -> tuple[NDArray[np.int32], pl.Series]:
    """Renumber codes [n] so that only ids still in use have one. The order of ids stays."""
    used = np.bincount(codes, minlength=len(ids)) > 0
    if used.all():
        return codes, ids
    return (np.cumsum(used, dtype=np.int32) - 1)[codes], ids.filter(pl.Series(used))
