"""Build a `Dataset` from raw interactions: read, filter by rating, remove duplicates, k-core, encode, split.

Polars streams the columns needed and turns ids into codes. Codes follow the sorted external ids, so the order of rows
does not matter. From then on an interaction is a 64-bit integer: the user code in the upper half, the item code in the
lower half. Sorting these integers puts duplicates side by side and leaves the rows of a CSR matrix in order. This is
done in memory (`codes`), or, with many rows, in files (`spill`).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, cast

import numpy as np
import polars as pl

from drm_triton.data.dataset import Dataset
from drm_triton.data.prepare.codes import Interactions, to_codes
from drm_triton.data.prepare.description import describe_rows, skipped_text
from drm_triton.data.prepare.failures import read_errors
from drm_triton.data.prepare.raw import RawInteractions
from drm_triton.data.prepare.read import IDS, collect
from drm_triton.data.prepare.spill import Pairs, stored_codes
from drm_triton.data.prepare.values import is_missing
from drm_triton.data.split import PAPER_RATIOS, SPLITS, check_ratios
from drm_triton.errors import InputError, warn
from drm_triton.names import SplitName
from drm_triton.progress import SILENT, Reporter, counted

POSITIVE = "rating > 0"  # the filter without `min_rating`
MANY = 1 << 25  # rows from which on pairs are sorted in files


@dataclass(frozen=True)
class BuildOptions:
    """Which interactions to keep and how to split them. `Dataset.from_frame` explains each option."""

    min_rating: float | None = None
    min_user: int = 1
    min_item: int = 1
    split: SplitName = "random"
    ratios: tuple[float, float, float] = PAPER_RATIOS
    seed: int = 0

    def __post_init__(self) -> None:
        if self.split not in SPLITS:
            raise InputError(f"unknown `split` {self.split!r}: choose one of {', '.join(SPLITS)}")
        check_ratios(self.ratios)
        # NumPy numbers are accepted but cannot be stored as JSON, so they become Python numbers.
        object.__setattr__(self, "ratios", tuple(float(r) for r in self.ratios))
        for name in ("min_user", "min_item", "seed"):
            try:
                object.__setattr__(self, name, operator.index(getattr(self, name)))
            except TypeError:
                raise InputError(f"`{name}` must be a whole number, got {getattr(self, name)!r}") from None
            if name != "seed" and getattr(self, name) < 0:
                raise InputError(f"`{name}` must not be negative, got {getattr(self, name)}")
        if self.min_rating is not None:
            if not isinstance(self.min_rating, int | float | np.number) or self.min_rating != self.min_rating:
                raise InputError(f"`min_rating` must be a number, got {self.min_rating!r}")
            object.__setattr__(self, "min_rating", float(self.min_rating))


def build(raw: RawInteractions, options: BuildOptions, reporter: Reporter = SILENT) -> Dataset:
    """Build a data set from raw interactions. Its meta contains the statistics of each step."""
    steps: list[dict[str, Any]] = []
    dropped: list[pl.DataFrame] = []  # rows that filters remove, some of which another row may keep

    def record(name: str, rows: int, users: int, items: int) -> None:
        steps.append({"step": name, "interactions": rows, "users": users, "items": items})
        if rows == 0:
            raise _empty_error(steps, raw)

    with reporter.step("read") as step:
        rows = collect(raw, options)
        frame, described = rows.frame, describe_rows(rows)
        bad = rows.known
        warn_skipped(described.get("skipped"), len(frame))
        step.note(counted(len(frame), "row"))
        del rows
    with reporter.step("filter") as step:
        user_ids, item_ids = (frame[role].unique().sort().alias("id") for role in ("user", "item"))
        warn_missing(user_ids, item_ids, raw)
        record("read", len(frame), len(user_ids), len(item_ids))
        if raw.file_format.event_weight is not None:
            described["events"] = count_events(frame, raw)
            frame, others = weigh_events(frame, raw.file_format.event_weight)
            dropped.append(others)
            record(f"events {', '.join(raw.file_format.event_weight)}", len(frame), *distinct_ids(frame))
        if raw.own_filter:
            name, keep = raw.own_filter
            dropped.append(frame.select(IDS))
            frame = keep(frame.lazy()).collect()
            record(name, len(frame), *distinct_ids(frame))
        frame, low = keep_rated(frame, raw, options.min_rating)
        dropped.append(low)
        many = len(frame) > MANY and not {"time", "weight"} & set(frame.columns)
        codes: Any = (stored_codes if many else to_codes)(frame, user_ids, item_ids)
        del frame
        interactions: Interactions | Pairs = (Pairs if many else Interactions)(codes)
        del codes
        if options.min_rating is not None or len(low):
            name = POSITIVE if options.min_rating is None else f"rating >= {options.min_rating:g}"
            record(name, *interactions.rows)
        record("one row per user and item", *interactions.sizes())
        if max(options.min_user, options.min_item) > 1:
            removed = interactions.keep_core(options.min_user, options.min_item)
            dropped.append(pl.DataFrame({"user": user_ids[removed[0]], "item": item_ids[removed[1]]}))
            items, users = counted(options.min_user, "item"), counted(options.min_item, "user")
            record(f"at least {items} per user and {users} per item", *interactions.sizes())
        user_ids, item_ids = interactions.used_ids(user_ids, item_ids)
        n_interactions = steps[-1]["interactions"]
        step.note(sizes_text(n_interactions, len(user_ids), len(item_ids)))
    with reporter.step("split") as step:
        train, valid, test = interactions.split(options.split, options.ratios, options.seed)
        if not train.nnz:
            raise InputError(
                f"split {options.split} leaves none of {n_interactions:,} interactions to train on: raise the first of "
                "`ratios`, choose another `split`, or give more data"
            )
        step.note(f"{train.nnz:,} train, {valid.nnz:,} valid, {test.nnz:,} test")
    meta: dict[str, Any] = {"source": "frame", "options": asdict(options), "steps": steps, **described}
    if raw.weight:
        meta["weights"] = {"column": raw.weight}
    data = Dataset(train, valid, test, user_ids.to_frame(), with_titles(item_ids, raw), meta)
    return with_removed(data, pl.concat(dropped), bad)


def with_removed(data: Dataset, filtered: pl.DataFrame, bad: pl.DataFrame | None) -> Dataset:
    """Return a data set that knows the pairs that filters removed, and those of bad rows, which are counted apart."""
    data = data.with_dropped(filtered) if len(filtered) else data
    if bad is None or bad.is_empty():
        return data
    both = data.with_dropped(bad)
    both.meta["skipped"]["pairs"] = both.dropped.nnz - data.dropped.nnz
    return both


def weigh_events(frame: pl.DataFrame, event_weight: Mapping[str, float]) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Keep the rows of the named events, and give each the weight of its event. Also return user and item of others."""
    named = pl.col("event").is_in(list(event_weight))
    kept, others = frame.filter(named), frame.filter(~named).select(IDS)
    weight = pl.col("event").replace_strict(list(event_weight), [float(w) for w in event_weight.values()])
    return kept.with_columns(weight=weight).drop("event"), others


def count_events(frame: pl.DataFrame, raw: RawInteractions) -> dict[str, int]:
    """Return the number of rows of each event, most frequent first. Refuse weights of events that do not occur."""
    counts = frame["event"].value_counts().sort(["count", "event"], descending=[True, False])
    found = dict(counts.head(100).iter_rows())
    for event in raw.file_format.event_weight or ():
        if event not in counts["event"]:
            listed = ", ".join(f"{name} ({counted(rows, 'row')})" for name, rows in list(found.items())[:10])
            raise InputError(f"`event_weight` names {event!r}, but no row has this event; the events are {listed}")
    return found


def keep_rated(
    frame: pl.DataFrame, raw: RawInteractions, min_rating: float | None
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Keep the rows whose rating suffices, and return user and item of the others. Without a threshold, warn of these.

    A rating of 0 or less is no sign that the user likes the item, unless the user says so by a threshold.
    """
    if "keep" not in frame.columns:
        return frame, frame.select(IDS).clear()
    kept, others = frame.filter("keep"), frame.filter(~pl.col("keep")).select(IDS)
    if len(others) and min_rating is None:
        least = cast(float, frame["rating"].fill_nan(None).min())
        advice = "these items are not recommended to these users either; "
        advice += f"`min_rating` {math.floor(least):g} keeps them" if not raw.is_split else ""
        if raw.has_columns:
            advice += ("" if raw.is_split else ", and ") + "`rating` '' ignores all ratings"
        warn(
            f"{len(others):,} of {len(frame):,} rows of {raw.name} have a rating of 0 or less and are left out, as "
            f"they do not say that the user likes the item; {advice}"
        )
    return kept.drop("keep", "rating"), others


def warn_skipped(skipped: Mapping[str, Any] | None, kept: int) -> None:
    """Warn of rows that were skipped, if there are any: an entry of meta.json, and the number of the other rows."""
    if skipped:
        total = skipped["rows"] + kept
        warn(f"{skipped['rows']:,} of {total:,} rows cannot be used and are left out; {skipped_text(skipped)}")


def warn_missing(user_ids: pl.Series, item_ids: pl.Series, raw: RawInteractions) -> None:
    """Warn of ids in text files that are spelled like a missing value."""
    if raw.text and raw.has_columns:
        warn_missing_ids(user_ids, "user", raw.name)
        warn_missing_ids(item_ids, "item", raw.name)


def warn_missing_ids(ids: pl.Series, role: str, where: str) -> None:
    """Warn if one of the ids of users or items, called `id`, is spelled like a missing value."""
    if ids.dtype != pl.String:
        return
    missing = ids.filter(ids.to_frame().select(is_missing(pl.col("id"))).to_series())
    if len(missing):
        warn(
            f"{where} has rows with the {role} id {missing[0]!r}, which is taken for the id of one {role}: give "
            "`skip_bad_rows` to leave out these rows if it means that the id is missing"
        )


def sizes_text(interactions: int, users: int, items: int) -> str:
    """Return the sizes of a data set for a message."""
    return f"{counted(interactions, 'interaction')}, {counted(users, 'user')}, {counted(items, 'item')}"


def distinct_ids(frame: pl.DataFrame) -> tuple[int, int]:
    """Return the numbers of users and items."""
    return frame["user"].n_unique(), frame["item"].n_unique()


def _empty_error(steps: list[dict[str, Any]], raw: RawInteractions) -> InputError:
    """Return the error for a step that left no interactions."""
    if len(steps) == 1:
        return InputError("the input has no interactions: it is a header without rows, or lists without items")
    before, after = steps[-2], steps[-1]
    own = raw.own_filter is not None and raw.own_filter[0] == after["step"]
    advice = "give `min_user` and `min_item` instead" if own else "lower `min_rating`, `min_user` or `min_item`"
    if after["step"] == POSITIVE:
        advice = "give `min_rating` if these ratings are good ones, or `rating` '' to ignore them"
    return InputError(
        f"the filter {after['step']!r} removes all interactions: before it there were "
        f"{sizes_text(before['interactions'], before['users'], before['items'])}; {advice}"
    )


def with_titles(item_ids: pl.Series, raw: RawInteractions) -> pl.DataFrame:
    """Return the table of items, with titles if the source has them."""
    items = item_ids.to_frame()
    if raw.titles is None:
        return items
    item = pl.col("item")
    if raw.text and raw.titles.collect_schema()["item"] == pl.String:
        item = item.str.strip_chars()  # like the ids
    titles = raw.titles.select(item.cast(item_ids.dtype, strict=False).alias("id"), "title")
    titles = titles.drop_nulls("id").unique("id", keep="first", maintain_order=True)
    with read_errors("the titles"):
        return items.lazy().join(titles, on="id", how="left", maintain_order="left").collect()
