"""Tables of attributes in files: read like tables of interactions, with types that follow from the values of text."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import polars as pl

from drm_triton.data.attributes import RESERVED, checked_attributes, id_column
from drm_triton.data.prepare.build import warn_missing_ids, warn_skipped
from drm_triton.data.prepare.inputs import Inputs
from drm_triton.data.prepare.raw import DATE_ORDERS, SKIP_ROWS, FileFormat, RawTable
from drm_triton.data.prepare.read import EITHER_ORDER, SAMPLE_ROWS, check_id_type, date_error, decimal_error
from drm_triton.data.prepare.tables import PATTERNS, as_table, open_table
from drm_triton.data.prepare.values import id_values, is_missing, number_values, time_values
from drm_triton.errors import InputError

# Fields of `FileFormat` that tables of attributes use. They have their own header, separator and column names.
ATTRIBUTE_FIELDS = frozenset({"encoding", "decimal", "date_format", "skip_bad_rows"})
DAY = 86_400_000_000  # microseconds


@dataclass(frozen=True)
class AttributeFile:
    """Attributes that were read from a file.

    Attributes
    ----------
    frame : the attributes, see `checked_attributes`
    skipped : number of rows that were left out and the first of them, as in meta.json; None if there are none
    """

    frame: pl.DataFrame
    skipped: dict[str, Any] | None


def read_attributes(path: str | Path, kind: str, file_format: FileFormat | None = None) -> AttributeFile:
    """Read a table of attributes. It may have every format that a table of interactions may have.

    Parameters
    ----------
    path : the file
    kind : `item` or `user`, whose ids the table has. Its column is called `id`, or as in a table of interactions.
    file_format : how to read it; only `ATTRIBUTE_FIELDS` matter
    """
    given = file_format or FileFormat()
    file_format = FileFormat(**{name: getattr(given, name) for name in ATTRIBUTE_FIELDS})
    skip = bool(file_format.skip_bad_rows)
    with tempfile.TemporaryDirectory(prefix="drm-triton-") as scratch:
        inputs = Inputs([path], Path(scratch), f"{kind}s")
        file = inputs.find(PATTERNS, f"the table of {kind}s")

        def find(columns: Sequence[str]) -> dict[str, str]:
            return {kind: id_column(columns, kind, file.name)}

        scanned, columns = open_table(inputs, file, file_format, find)
        named, is_text = find(columns)[kind], scanned.kind == "text"
        table = as_table(inputs, scanned, {c: c for c in columns}, columns, file_format, (named,))
        table, frame = _collect(table, skip)
    check_id_type(file.name, frame.schema[named], kind)
    ids = frame.select(id_values(named, frame.schema[named], is_text, whole=False, careful=True, refuse_missing=skip))
    blank = frame.select(pl.all_horizontal(pl.all().is_null()) & is_text).to_series()
    missing = ids.to_series().is_null() & ~blank
    skipped = _skipped(table, missing, kind)
    if missing.any() and not skip:
        raise InputError(f"{skipped['first']}: correct or remove that row{SKIP_ROWS}")
    frame = frame.with_columns(ids).filter(~missing & ~blank)
    if is_text:
        warn_missing_ids(frame[named].alias("id"), kind, file.name)
        kept = (named, *RESERVED)
        frame = frame.with_columns(_typed(frame[c], file_format, file.name) for c in columns if c not in kept)
    frame = checked_attributes(frame, kind, file.name)
    warn_skipped(skipped, len(frame))
    return AttributeFile(frame, skipped or None)


def _collect(table: RawTable, skip: bool) -> tuple[RawTable, pl.DataFrame]:
    """Return the rows of a table. If they cannot be read, leave out lines, and also return the table without them."""
    try:
        with table.read_errors():
            return table, table.frame.collect()
    except InputError:
        if not skip or table.repair is None:
            raise
    table = table.repair()
    with table.read_errors():
        return table, table.frame.collect()


def _skipped(table: RawTable, missing: pl.Series, kind: str) -> dict[str, Any]:
    """Return the number of lines and rows that cannot be used, and the first of them, or nothing."""
    total = table.skipped + int(missing.sum())
    row = missing.arg_max() or 0
    if missing.any() and not (table.skipped and row >= table.rows_before_skipped):
        return {"rows": total, "first": f"{table.unit} {row + 1:,} of {table.name} has no usable {kind} id"}
    return {"rows": total, "first": table.first_skipped} if total else {}


def _typed(column: pl.Series, file_format: FileFormat, where: str) -> pl.Series:
    """Return a column of text as truth values, dates or numbers, if all its values are such."""
    value = pl.col("value")
    text = column.to_frame("value").select(pl.when(~is_missing(value)).then(value.str.strip_chars())).to_series()
    if text.count():
        for read in (_truths, _times, _numbers):
            found = read(text, file_format, f"{where}: column {column.name!r}")
            if found is not None:
                return found.alias(column.name)
    return text.alias(column.name)


def _all_values(text: pl.Series, expression: pl.Expr) -> pl.Series | None:
    """Return an expression of the column `value`, or None if it is null where there is text."""
    for part in (text.drop_nulls().head(SAMPLE_ROWS), text):  # the first values often suffice to show that it is
        found = part.to_frame().select(expression.alias("value")).to_series()
        if found.null_count() > part.null_count():
            return None
    return found


def _truths(text: pl.Series, file_format: FileFormat, where: str) -> pl.Series | None:
    lower = pl.col("value").str.to_lowercase()
    return _all_values(text, lower.replace_strict({"true": True, "false": False}, default=None))


def _times(text: pl.Series, file_format: FileFormat, where: str) -> pl.Series | None:
    """Return dates, with a time of day if one has it. A given format need not fit: it may be for another column."""

    def read(date_format: str | None) -> pl.Series | None:
        time, is_date = time_values("value", pl.String(), text.drop_nulls, date_format, order)
        return _all_values(text, time) if is_date else None

    def order() -> str:
        fitting = [order for order in DATE_ORDERS if read(order) is not None]
        if len(fitting) > 1:
            raise date_error(f"{where}: the dates, as in {text.drop_nulls()[0]}, {EITHER_ORDER}")
        return fitting[0] if fitting else DATE_ORDERS[0]

    found = read(file_format.date_format)
    if found is None and file_format.date_format is not None:
        found = read(None)
    if found is None:
        return None
    times = found.cast(pl.Datetime("us"))
    return times.cast(pl.Date) if (found % DAY == 0).all() else times


def _numbers(text: pl.Series, file_format: FileFormat, where: str) -> pl.Series | None:
    """Return whole or decimal numbers. A given decimal mark need not fit: it may be for another column."""
    decimal = partial(number_values, "value", pl.String(), True)
    for number in (pl.col("value").cast(pl.Int64, strict=False), decimal(file_format.decimal), decimal(None)):
        found = _all_values(text, number)
        if found is not None:
            return found
    comma, point = (_all_values(text, decimal(mark)) for mark in ("comma", "point"))
    if comma is not None and point is not None:
        raise decimal_error(f"{where}: the commas")
    return point if comma is None else comma
