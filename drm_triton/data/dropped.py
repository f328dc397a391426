"""Pairs of a user and an item that a filter removed: nothing is learned from them, but the user has the item."""

from __future__ import annotations

import numpy as np
import polars as pl

from drm_triton.data.csr import CSR
from drm_triton.data.ids import lookup

Rows = pl.DataFrame  # columns user and item, external ids


def encode_dropped(rows: Rows, user_ids: pl.Series, item_ids: pl.Series, liked: CSR) -> tuple[CSR, Rows]:
    """Return removed rows by code, without those that another row keeps, and the rows of other users and items by id.

    Parameters
    ----------
    rows : removed rows, with ids of the types of `user_ids` and `item_ids`
    user_ids, item_ids : ids by code
    liked : CSR [M, N], the interactions that the data set keeps

    Examples
    --------
    >>> liked = CSR.from_keys(pl.Series([1]).to_numpy(), (1, 2))
    >>> rows = pl.DataFrame({"user": ["ann"] * 3, "item": ["x", "y", "z"]})
    >>> dropped, elsewhere = encode_dropped(rows, pl.Series(["ann"]), pl.Series(["x", "y"]), liked)
    >>> dropped.row(0), elsewhere.rows()
    (array([0], dtype=int32), [('ann', 'z')])
    """
    lazy = rows.lazy()
    for role, ids in (("user", user_ids), ("item", item_ids)):
        table = ids.alias(role).to_frame().with_row_index(f"{role} code").lazy()
        lazy = lazy.join(table, on=role, how="left")
    key = pl.col("user code").cast(pl.Int64) * liked.shape[1] + pl.col("item code")
    found = lazy.select("user", "item", key.alias("key")).collect(engine="streaming")
    keys = found["key"].drop_nulls().unique().sort().to_numpy()
    elsewhere = found.filter(pl.col("key").is_null()).select("user", "item").unique().sort("user", "item")
    return CSR.from_keys(keys, liked.shape).minus(liked), elsewhere


def removed_users(elsewhere: Rows | None, item_ids: pl.Series) -> tuple[pl.Series, CSR]:
    """Return the users who are not in the data set but have items of it: ids [m] and items, CSR [m, N].

    Parameters
    ----------
    elsewhere : rows of users and items that are not both in the data set; None if there are none
    item_ids : ids by code

    Examples
    --------
    >>> rows = pl.DataFrame({"user": ["ann", "dora", "dora"], "item": ["z", "x", "z"]})
    >>> users, items = removed_users(rows, pl.Series(["x", "y"]))
    >>> users.to_list(), items.row(0)
    (['dora'], array([0], dtype=int32))
    """
    n_items = len(item_ids)
    if elsewhere is None:
        return pl.Series("user", dtype=pl.String), CSR.empty((0, n_items))
    codes = lookup(elsewhere["item"], item_ids).astype(np.int64)
    found = elsewhere["user"].filter(codes >= 0)
    users = found.unique().sort()
    keys = lookup(found, users).astype(np.int64) * n_items + codes[codes >= 0]
    return users, CSR.from_keys(np.unique(keys), (len(users), n_items))


def elsewhere_problem(rows: Rows, pairs: int, user_ids: pl.Series, item_ids: pl.Series) -> str | None:
    """Return what is wrong with stored rows of users and items that are not both in the data set, None if nothing."""
    if dict(rows.schema) != {"user": user_ids.dtype, "item": item_ids.dtype} or sum(rows.null_count().row(0)):
        return "the dropped pairs of other users and items are not pairs of ids"
    return None if len(rows) == pairs else f"{len(rows):,} dropped pairs of other users and items, not {pairs:,}"
