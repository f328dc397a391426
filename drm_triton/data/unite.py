"""Old and new interactions as one data set."""

from __future__ import annotations

import numpy as np
import polars as pl
from numpy.typing import NDArray

from drm_triton.data.csr import CSR
from drm_triton.data.dataset import Dataset
from drm_triton.data.ids import lookup
from drm_triton.errors import InputError


def united(old: Dataset, new: Dataset) -> Dataset:
    """Return all interactions of both data sets, of every part, as the part `train`. Weights are left out.

    Dropped pairs of both stay dropped, except those that the other data set has as an interaction.

    Users and items of `old` keep their codes, and new ones follow.

    Examples
    --------
    >>> old = Dataset.of(pl.DataFrame({"user": ["ann", "bob"], "item": ["x", "y"]}))
    >>> new = Dataset.of(pl.DataFrame({"user": ["abe", "bob"], "item": ["x", "x"]}))
    >>> both = united(old, new)
    >>> both.user_ids.to_list(), both.train.row(1).tolist()
    (['ann', 'bob', 'abe'], [0, 1])
    """
    users, rows = _joined(old.users, new.users, "user")
    items, columns = _joined(old.items, new.items, "item")
    shape = len(users), len(items)

    def both(before: CSR, added: CSR) -> CSR:
        keys = [
            _rows(before) * shape[1] + before.indices,
            rows[_rows(added)] * shape[1] + columns[added.indices],
        ]
        return CSR.from_keys(np.unique(np.concatenate(keys)), shape)

    train, empty = both(old.liked, new.liked), CSR.empty(shape)
    dropped = both(old.dropped, new.dropped).minus(train)
    data = Dataset(train, empty, empty, users, items, {"source": "update"}, dropped=dropped)
    types = pl.Schema({"user": users["id"].dtype, "item": items["id"].dtype})
    elsewhere = [
        one.dropped_elsewhere.cast(types, strict=False).drop_nulls()
        for one in (old, new)
        if one.dropped_elsewhere is not None
    ]
    return data.with_dropped(pl.concat(elsewhere)) if elsewhere else data


def _rows(matrix: CSR) -> NDArray[np.int64]:
    return np.repeat(np.arange(matrix.shape[0]), matrix.degrees())


def _joined(old: pl.DataFrame, new: pl.DataFrame, kind: str) -> tuple[pl.DataFrame, NDArray[np.int64]]:
    """Return the old rows, then the rows of unknown ids, and the codes of `new` in that table."""
    codes = lookup(new["id"], old["id"]).astype(np.int64)
    unknown = new.filter(codes < 0)
    try:
        unknown = unknown.with_columns(pl.col("id").cast(old["id"].dtype))
    except pl.exceptions.PolarsError:
        raise InputError(
            f"the {kind} ids of the model are whole numbers, such as {old['id'][0]!r}, but those of the new "
            f"interactions are not, such as {unknown['id'][0]!r}; give ids of the same kind"
        ) from None
    codes[codes < 0] = len(old) + np.arange(len(unknown))
    return pl.concat([old, unknown], how="diagonal_relaxed"), codes
