"""Read raw interactions: only the columns needed, with ids and ratings checked and bad rows reported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import polars as pl

from drm_triton.data.prepare.failures import read_errors
from drm_triton.data.prepare.raw import RawInteractions, RawTable
from drm_triton.data.prepare.values import (
    SMALL_INTEGERS,
    WHOLE_NUMBER,
    id_values,
    is_kept,
    rating_values,
    time_values,
    weight_values,
    whole_numbers,
)
from drm_triton.data.split import NEEDS_TIME
from drm_triton.errors import InputError
from drm_triton.names import SPLIT_PARTS, WEIGHT_RANGE

if TYPE_CHECKING:
    from drm_triton.data.prepare.build import BuildOptions

IDS = ("user", "item")
PART_TYPE = pl.Enum(SPLIT_PARTS)  # of the column `part`
SAMPLE_ROWS = 1000  # rows that decide whether ids are whole numbers, and how times are written


def collect(raw: RawInteractions, options: BuildOptions) -> pl.DataFrame:
    """Read the columns needed: user, item, and as needed keep (the rating suffices), rating, time, weight, part.

    The first pass takes the quick frames and leaves a null where that fails. Only if there is a null, a careful pass
    follows, which handles blank lines, blanks around numbers and negative ids. If nulls remain among ids that look like
    whole numbers, a third pass reads these ids as text. A null that remains is an error in the data.
    """
    careful = False
    view = replace(raw, tables=[t if t.quick is None else replace(t, frame=t.quick) for t in raw.tables])
    _check_needs(raw, _schema(view), options)
    whole = {role: _looks_whole(view, role) for role in IDS}
    while True:
        schema = _schema(view)
        columns = {}
        for role in IDS:
            _check_id_type(raw, schema[role], role)
            columns[role] = id_values(role, schema[role], raw.text, whole[role], careful)
        if "rating" in schema:
            columns["keep"] = is_kept(schema["rating"], options.min_rating, careful)
        if raw.own_filter and "rating" in schema:
            columns["rating"] = rating_values(schema["rating"], careful).cast(pl.Float32)
        if options.split in NEEDS_TIME:
            columns["time"] = time_values(schema["timestamp"], partial(_sample, view, "timestamp"))
        if "weight" in schema:
            columns["weight"] = weight_values(schema["weight"], columns.get("keep"), careful)
        if raw.is_split:
            columns["part"] = pl.col("part")
        try:
            frame = _collect(view, _concat(view, drop_blank=careful and raw.text).select(**columns))
        except InputError:
            if careful:
                raise
            careful, view = True, raw
            continue
        lost = [name for name in columns if name != "rating" and frame[name].null_count()]
        if not lost:  # without a threshold, the ratings only had to be checked
            return frame if options.min_rating is not None else frame.drop("keep", strict=False)
        if not careful:
            careful, view = True, raw
        elif any(whole.get(name) for name in lost):
            whole.update({role: False for role in whole if role in lost})
        else:
            raise _error_at(raw, lost[0], columns[lost[0]])


def _check_needs(raw: RawInteractions, schema: Mapping[str, pl.DataType], options: BuildOptions) -> None:
    """Refuse options that need a rating or a time that the input does not have."""
    needs = []
    if options.min_rating is not None:
        needs.append(("rating", f"`min_rating` {options.min_rating:g}", "leave out `min_rating`"))
    if options.split in NEEDS_TIME:
        needs.append(("timestamp", f"`split` {options.split}", "choose another `split`"))
    for role, step, otherwise in needs:
        if role not in schema:
            problem = "which the data does not have:"
            if raw.has_columns:
                problem = f"but no column, or several, are recognised as such: name one as `{role}`, or"
            raise InputError(f"{raw.name}: {step} needs a {role} for each interaction, {problem} {otherwise}")


def _check_id_type(raw: RawInteractions, dtype: pl.DataType, role: str) -> None:
    if dtype.is_nested() or dtype in (pl.Binary, pl.Object):
        raise InputError(
            f"{raw.name} has {role} ids of type {dtype}, which cannot be used: make them whole numbers or text"
        )


def _collect(raw: RawInteractions, query: pl.LazyFrame) -> pl.DataFrame:
    """Collect a query over all files. If that fails, raise the error of the file that causes it."""
    try:
        with read_errors(raw.name):
            return query.collect(engine="streaming")
    except InputError:
        for table in raw.tables:
            with read_errors(table.name, table.locate):
                table.frame.collect(engine="streaming")
        raise


def _schema(raw: RawInteractions) -> dict[str, pl.DataType]:
    """Return the types of the columns that all files have."""
    schemas = []
    for table in raw.tables:
        with read_errors(table.name, table.locate):
            schemas.append(table.frame.collect_schema())
    common = [c for c in schemas[0].names() if c != "row" and all(c in s for s in schemas)]
    return {c: _common_type([s[c] for s in schemas], is_id=c in IDS) for c in common}


def _common_type(types: Sequence[pl.DataType], is_id: bool) -> pl.DataType:
    """Return the type for a column that has `types` in the files: text if they do not agree."""
    if len(set(types)) == 1:
        return types[0]
    if is_id and all(t in SMALL_INTEGERS or t.is_float() for t in types):
        return pl.Int64()
    if is_id or not all(t.is_numeric() for t in types):
        return pl.String()
    return pl.Float64() if any(t.is_float() for t in types) else pl.Int64()


def _aligned(table: RawTable, schema: Mapping[str, pl.DataType]) -> list[pl.Expr]:
    """Return the columns of one file in the types of `schema`. An id 2.0 becomes 2, as in files with integer ids."""
    own = table.frame.collect_schema()
    columns = []
    for c, dtype in schema.items():
        float_id = c in IDS and own[c].is_float() and own[c] != dtype
        columns.append((whole_numbers(pl.col(c)) if float_id else pl.col(c)).cast(dtype))
    return columns


def _concat(raw: RawInteractions, drop_blank: bool = False) -> pl.LazyFrame:
    schema = _schema(raw)
    frames = []
    for table in raw.tables:
        frame = table.frame.select(_aligned(table, schema))
        if drop_blank:
            frame = frame.filter(~pl.all_horizontal(pl.all().is_null()))
        frames.append(frame if table.part is None else frame.with_columns(part=pl.lit(table.part, PART_TYPE)))
    return frames[0] if len(frames) == 1 else pl.concat(frames)


def _looks_whole(raw: RawInteractions, role: str) -> bool:
    """Return whether the first ids are whole numbers that have to be read from text."""
    dtype = _schema(raw)[role]
    if dtype.is_integer() and dtype not in SMALL_INTEGERS:
        return True
    if not raw.text or dtype != pl.String:
        return False
    return bool(_sample(raw, role).str.strip_chars().str.contains(WHOLE_NUMBER).all())


def _sample(raw: RawInteractions, column: str) -> pl.Series:
    """Return the first values of a column that are not null."""
    table = raw.tables[0]
    with read_errors(table.name, table.locate):
        return table.frame.select(column).head(SAMPLE_ROWS).collect().to_series().drop_nulls()


_PROBLEMS = {  # column that has a null -> role, what is wrong
    "user": ("user", "has no usable user id"),
    "item": ("item", "has no usable item id"),
    "keep": ("rating", "has a rating that is missing or not a number"),
    "time": ("timestamp", "has a time that is neither a number nor like 2020-12-31 23:59:59"),
    "weight": ("weight", f"has a weight that is not a number from {WEIGHT_RANGE[0]:g} to {WEIGHT_RANGE[1]:g}"),
}


def _error_at(raw: RawInteractions, column: str, expression: pl.Expr) -> InputError:
    """Return the error for the first row where `expression` is null."""
    role, problem = _PROBLEMS[column]
    advice = "correct or remove that row"
    if raw.has_columns and column in ("keep", "time", "weight"):
        advice += f", or name another column as `{role}`"
        advice += f" (`{role}` '' ignores ratings)" if column == "keep" else ""
    if raw.has_columns and column == "weight":
        advice += "; to leave out all rows with small weights, name the column as `rating` too and give `min_rating`"
    schema = _schema(raw)
    for table in raw.tables:
        numbered = table.frame if "row" in table.frame.collect_schema() else table.frame.with_row_index("row")
        rows = numbered.select("row", *_aligned(table, schema), value=role)
        if raw.text:
            rows = rows.filter(~pl.all_horizontal(pl.exclude("row", "value").is_null()))
        bad = rows.filter(expression.is_null()).select("row", "value").head(1).collect()
        if len(bad):
            row, value = bad.row(0)
            shown = "" if value is None or value == "" else f" ({value!r})"
            return InputError(f"{table.unit} {row + 1:,} of {table.name} {problem}{shown}: {advice}")
    return InputError(f"{raw.name} {problem} in some row: {advice}")
