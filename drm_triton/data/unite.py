"""Old and new interactions as one data set."""

from __future__ import annotations

import numpy as np
import polars as pl
from numpy.typing import NDArray

from drm_triton.data.csr import CSR
from drm_triton.data.dataset import Dataset
from drm_triton.data.ids import lookup
from drm_triton.data.new_rows import filters_of
from drm_triton.errors import InputError
from drm_triton.names import SPLIT_PARTS


def united(old: Dataset, new: Dataset) -> Dataset:
    """Return the interactions of both data sets. Weights are left out.

    The split of `new` holds: what it holds out stays held out, also if `old` has it in another part. All other
    interactions of `old`, of every part, join the part `train`. Dropped pairs of both stay dropped, except those that
    the other data set has as an interaction.

    Users and items of `old` keep their codes, and new ones follow. Where both have a title or an attribute, that of
    `new` holds. The filters of `old` stay for rows that follow.

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

    def recoded(matrix: CSR) -> CSR:
        users = np.repeat(np.arange(matrix.shape[0]), matrix.degrees())
        return CSR.from_keys(np.unique(rows[users] * shape[1] + columns[matrix.indices]), shape)

    train, valid, test = (recoded(getattr(new, part)) for part in SPLIT_PARTS)
    train = train.union(old.liked.extended(shape).minus(train).minus(valid).minus(test))
    before = old.dropped.extended(shape)
    dropped = before.union(recoded(new.dropped).minus(before))
    for part in (train, valid, test):
        dropped = dropped.minus(part)
    meta = {"source": "update", "filters": filters_of(old.meta) or filters_of(new.meta)}
    data = Dataset(train, valid, test, users, items, meta, dropped=dropped)
    data.is_pandas = new.is_pandas
    types = pl.Schema({"user": users["id"].dtype, "item": items["id"].dtype})
    elsewhere = [
        one.dropped_elsewhere.cast(types, strict=False).drop_nulls()
        for one in (old, new)
        if one.dropped_elsewhere is not None
    ]
    return data.with_dropped(pl.concat(elsewhere)) if elsewhere else data


def has_all(new: Dataset, both: Dataset) -> bool:
    """Return whether a data set has all pairs of `both`, in which it was united with another one."""
    sizes = [(one.n_interactions, one.dropped.nnz, _n_rows(one.dropped_elsewhere)) for one in (new, both)]
    return sizes[0] == sizes[1]


def _n_rows(frame: pl.DataFrame | None) -> int:
    return 0 if frame is None else len(frame)


def _joined(old: pl.DataFrame, new: pl.DataFrame, kind: str) -> tuple[pl.DataFrame, NDArray[np.int64]]:
    """Return the old rows, then those of unknown ids, and the codes of `new` in that table."""
    ids = new["id"].cast(old["id"].dtype, strict=False)
    if ids.null_count():
        raise InputError(
            f"the {kind} ids of the model are whole numbers, such as {old['id'][0]!r}, but those of the new "
            f"interactions are not, such as {new['id'].filter(ids.is_null())[0]!r}; give ids of the same kind"
        )
    try:
        table = pl.concat([old, new.with_columns(id=ids)], how="diagonal_relaxed")
    except pl.exceptions.PolarsError as error:
        raise InputError(
            f"the attributes of the {kind}s have other types than those of the model ({str(error).splitlines()[0]}); "
            "give the same attributes as before, or none"
        ) from None
    joined = table.group_by("id", maintain_order=True).agg(pl.all().drop_nulls().last())
    return joined, lookup(ids, joined["id"]).astype(np.int64)
