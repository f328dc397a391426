"""The record of how a table was understood: which column was taken for what, its range, and advice about the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

import polars as pl

from drm_triton.data.prepare.columns import WEIGHT_NAMES, listing, plain, spells
from drm_triton.data.prepare.raw import RawInteractions
from drm_triton.data.prepare.read import SAMPLE_ROWS, Rows
from drm_triton.progress import counted

_RATING_ENDS = ("rating", "score", "stars")  # of names that are not recognised
_EPOCH = datetime(1970, 1, 1)  # in UTC


def column_notes(found: Mapping[str, str], columns: Sequence[str], has_event_weight: bool) -> list[str]:
    """Return advice about columns that are not used, or not as one might expect.

    Parameters
    ----------
    found : role -> column
    columns : names of all columns of the table
    has_event_weight : the events have weights
    """
    notes = []
    for role in ("rating", "timestamp"):
        candidates = [c for c in columns if spells(c, role)]
        if role not in found and len(candidates) > 1:
            notes.append(f"no {role} is used, because several columns may contain it: {listing(candidates)}")
    if "weight" not in found and not has_event_weight:
        others = {column for role, column in found.items() if role != "rating"}
        for column in columns:
            if plain(column) in WEIGHT_NAMES and column not in others:
                notes.append(f"{column!r} looks like weights: `weight` {column} makes them count in training")
    for column in columns:
        if "rating" not in found and plain(column).endswith(_RATING_ENDS) and not spells(column, "rating"):
            notes.append(f"{column!r} looks like ratings: `rating` {column} uses them")
    if "event" in found and not has_event_weight:
        notes.append(
            f"{found['event']!r} looks like types of events, which all count alike now: `event_weight` with, for "
            "example, view=1,buy=5 keeps the named ones and weighs them"
        )
    return notes


def describe_rows(rows: Rows) -> dict[str, Any]:
    """Return the entries of meta.json about the columns of tables and about rows that were skipped."""
    described: dict[str, Any] = {}
    raw = rows.raw
    if raw.roles:
        examples = _examples(raw)
        described["columns"] = {
            role: {"column": column, "first": examples.get(role)} | _range(role, rows)
            for role, column in raw.roles.items()
        }
        described["ignored_columns"] = list(raw.ignored)
        described["notes"] = [*raw.notes, *_missing_ratings(rows.frame)]
    if raw.title_columns:
        described["title_columns"] = dict(raw.title_columns)
    if rows.skipped:
        described["skipped"] = {"rows": rows.skipped, "first": rows.first_skipped, "lines": rows.lines}
    return described


def skipped_text(skipped: Mapping[str, Any]) -> str:
    """Return what else is to say about rows that were skipped: the first, and how many lines are lost altogether."""
    text = f"the first: {skipped['first']}"
    if lines := skipped.get("lines"):
        text += f"; user and item are unknown in {counted(lines, 'line')}, so they may be recommended"
    return text


def _missing_ratings(frame: pl.DataFrame) -> list[str]:
    """Return the note that rows without a rating count. With a threshold, none of them has been kept so far."""
    missing = frame["rating"].fill_nan(None).null_count() if "rating" in frame.columns else 0
    return [f"{missing:,} of {len(frame):,} rows have no rating and count as positives"] if missing else []


def _examples(raw: RawInteractions) -> dict[str, Any]:
    """Return the first value of each role that is not missing, as it is in the file."""
    table = raw.tables[0]
    with table.read_errors():
        head = table.frame.head(SAMPLE_ROWS).collect()
    examples = {}
    for column in head.drop("row", strict=False).iter_columns():
        value = next(iter(column.drop_nulls().head(1)), None)
        examples[column.name] = value if isinstance(value, str | int | None) else str(value)
    return examples


def _range(role: str, rows: Rows) -> dict[str, Any]:
    """Return the least and the greatest value of a role, if it was read as numbers or dates, or that it is not used."""
    column = {"timestamp": "time"}.get(role, role)
    if column not in rows.frame.columns:
        return {"used": False}
    values = rows.frame[column]
    if not values.dtype.is_numeric():
        return {}
    if values.dtype.is_float():
        values = values.fill_nan(None)
    if not values.count():
        return {}
    ends: dict[str, Any] = {"least": values.min(), "most": values.max()}
    if role == "timestamp" and rows.dates:
        return {name: str(_EPOCH + timedelta(microseconds=ends[name])) for name in ends}
    return ends
