"""Pairs of a user and an item that a filter removed: nothing is learned from them, but the user has the item."""

from __future__ import annotations

import polars as pl

from drm_triton.data.csr import CSR

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
    elsewhere = found.filter(pl.col("key").is_null()).select("user", "item").unique()
    return CSR.from_keys(keys, liked.shape).minus(liked), elsewhere
