"""New rows for a model: they are read and filtered as the rows that it was trained on."""

from __future__ import annotations

from typing import Any

import polars as pl

from drm_triton.data.csr import CSR
from drm_triton.data.dataset import Dataset
from drm_triton.data.frames import is_pandas
from drm_triton.errors import InputError

COLUMNS = ("user", "item", "rating", "event")  # roles of columns, see `Dataset.from_frame`
FILTERS = ("min_rating", "event_weight")


def filters_of(meta: dict[str, Any]) -> dict[str, Any]:
    """Return how rows were read and filtered: by name, the arguments of `Dataset.from_frame` that were given.

    Parameters
    ----------
    meta : of a data set, or of the interactions that a model keeps, which have an entry `filters`
    """
    given: dict[str, Any] = {}
    for entry in ("options", "reading", "filters"):
        given |= meta.get(entry) or {}
    return {name: given[name] for name in (*COLUMNS, *FILTERS) if given.get(name) is not None}


def new_rows(interactions: Any, filters: dict[str, Any]) -> Dataset:
    """Return new interactions as a data set. Those that the filters remove are its dropped pairs, even if all are.

    Parameters
    ----------
    interactions : Dataset, polars or pandas frame, or scipy sparse matrix
    filters : see `filters_of`. The columns of a frame may have these names, or usual ones.

    Examples
    --------
    >>> frame = pl.DataFrame({"user": ["ann", "ann"], "item": ["x", "y"], "rating": [5, 1]})
    >>> data = new_rows(frame, {"min_rating": 4.0})
    >>> data.n_interactions, data.dropped_elsewhere.rows()
    (1, [('ann', 'y')])
    """
    if isinstance(interactions, pl.LazyFrame):
        interactions = interactions.collect()
    if isinstance(interactions, Dataset) or not hasattr(interactions, "columns"):
        if hasattr(interactions, "tocsr") and any(name in filters for name in FILTERS):
            raise InputError(
                "the model was trained on rows that `min_rating` or `event_weight` chose, which a matrix does not "
                "have; give a frame with ratings or events, or a Dataset, of which all interactions count"
            )
        return Dataset.of(interactions)
    if not len(interactions):
        raise InputError("there are no new interactions: the frame has no rows")
    try:
        return _filtered(interactions, filters)
    except InputError as error:
        raise InputError(
            f"{error} (these are parameters of `Dataset.from_frame`; those of the training hold for new rows, too. For "
            "others, build a data set with it and ratios=(1, 0, 0), and give that)"
        ) from None


def _filtered(frame: Any, filters: dict[str, Any]) -> Dataset:
    from drm_triton.data.prepare.build import BuildOptions, keep_rated, weigh_events
    from drm_triton.data.prepare.raw import FileFormat
    from drm_triton.data.prepare.read import IDS, collect
    from drm_triton.data.prepare.tables import read_frame

    min_rating, event_weight = (filters.get(name) for name in FILTERS)
    present = {"", *map(str, frame.columns)}  # "" ignores ratings
    names = {role: filters[role] for role in COLUMNS if filters.get(role) in present}
    raw = read_frame(frame, FileFormat(**names, event_weight=event_weight))
    rows = collect(raw, BuildOptions(min_rating)).frame
    kept, dropped = (rows, rows.select(IDS).clear()) if event_weight is None else weigh_events(rows, event_weight)
    kept, low = keep_rated(kept, raw, min_rating)
    if kept.is_empty():
        users, items = (kept.select(pl.col(role).alias("id")) for role in IDS)
        nothing = CSR.empty((0, 0))
        data = Dataset(nothing, nothing, nothing, users, items)
    else:
        data = Dataset.of(kept.select(IDS))
    data.is_pandas = is_pandas(frame)
    return data.with_dropped(pl.concat([dropped, low]))
