"""Read raw interactions: only the columns needed, with ids and ratings checked and bad rows reported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import polars as pl

from drm_triton.data.prepare.failures import read_errors
from drm_triton.data.prepare.raw import DATE_ORDERS, SKIP_ROWS, RawInteractions, RawTable
from drm_triton.data.prepare.values import (
    SMALL_INTEGERS,
    WHOLE_NUMBER,
    date_evidence,
    id_values,
    is_kept,
    is_missing,
    rating_values,
    shows_decimal,
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
EITHER_ORDER = "may begin with day or month"  # what is wrong with a date such as 02/04/2024
_GROUP = 200  # files in one query
SAMPLE_ROWS = 1000  # rows that decide whether ids are whole numbers, and how times are written


@dataclass(frozen=True)
class Rows:
    """The rows of all files.

    Attributes
    ----------
    raw : where they come from
    frame : columns user, item, and as needed event, keep (the rating suffices), rating, time, weight, part
    dates : the times are dates, in microseconds
    skipped : number of rows that were left out because they cannot be used
    first_skipped : the first of them, and what is wrong with it
    lines : number of them that are lines that cannot be read, so that user and item are not known
    place : number of the table that contains the first, and of the row in this table, both from 0
    known : user and item of those of them that have both
    """

    raw: RawInteractions
    frame: pl.DataFrame
    dates: bool = False
    skipped: int = 0
    first_skipped: str = ""
    lines: int = 0
    place: tuple[int, int] = (0, 0)
    known: pl.DataFrame | None = None


def collect(raw: RawInteractions, options: BuildOptions) -> Rows:
    """Read the columns needed. With `skip_bad_rows`, lines that cannot be read are removed from copies of the files."""
    try:
        rows = _collect_rows(raw, options)
    except InputError:
        if not raw.file_format.skip_bad_rows:
            raise
        repaired = replace(raw, tables=[table.repair() if table.repair else table for table in raw.tables])
        if not any(table.skipped for table in repaired.tables):
            raise  # it is something else
        rows = _collect_rows(repaired, options)
    tables = list(rows.raw.tables)
    first = next((k for k, table in enumerate(tables) if table.skipped), None)
    if first is None:
        return rows
    lines = sum(table.skipped for table in tables)
    is_row = rows.skipped and rows.place < (first, tables[first].rows_before_skipped)
    first_skipped = rows.first_skipped if is_row else tables[first].first_skipped
    return replace(rows, skipped=rows.skipped + lines, first_skipped=first_skipped, lines=lines)


def _collect_rows(raw: RawInteractions, options: BuildOptions) -> Rows:
    """Read the columns needed.

    The first pass takes the quick frames and leaves a null where that fails. Only if there is a null, a careful pass
    follows, which handles blank lines, blanks around numbers and negative ids. If nulls remain, a further pass reads
    ids that are not whole numbers as text, or numbers with a decimal comma. A null that remains is an error in the
    data.
    """
    file_format = raw.file_format
    skip, decimal = bool(file_format.skip_bad_rows), file_format.decimal
    careful = decimal is not None
    view = replace(raw, tables=[t if t.quick is None or careful else replace(t, frame=t.quick) for t in raw.tables])
    _check_needs(raw, _schema(view), options)
    whole = {role: _looks_whole(view, role) for role in IDS}
    is_weight = "rating" in raw.roles and raw.roles["rating"] == raw.roles.get("weight")  # which is above 0 anyway
    time: tuple[pl.Expr, bool] | None = None
    while True:
        schema = _schema(view)
        columns = {}
        for role in IDS:
            check_id_type(raw.name, schema[role], role)
            columns[role] = id_values(role, schema[role], raw.text, whole[role], careful, refuse_missing=skip)
        if "rating" in schema and (options.min_rating is not None or not is_weight):
            # The rating itself is for the record. Float32 takes half the memory.
            columns["keep"] = is_kept(schema["rating"], options.min_rating, careful, decimal)
            columns["rating"] = rating_values(schema["rating"], careful, decimal).cast(pl.Float32)
        if "event" in schema:
            columns["event"] = pl.col("event").cast(pl.String).str.strip_chars().fill_null("")
        if options.split in NEEDS_TIME:
            sample, order = partial(_sample, view, "timestamp"), partial(_date_order, raw)
            time = time_values("timestamp", schema["timestamp"], sample, file_format.date_format, order)
            columns["time"] = time[0]
        if "weight" in schema:
            columns["weight"] = weight_values(schema["weight"], columns.get("keep"), careful, decimal)
        if raw.is_split:
            columns["part"] = pl.col("part")
        try:
            frame = _select(view, schema, columns, drop_blank=careful and raw.text)
        except InputError:
            if careful:
                raise
            careful, view = True, raw
            continue
        lost = [name for name in columns if name != "rating" and frame[name].null_count()]
        if not lost:
            return Rows(raw, frame, time is not None and time[1])
        if not careful:
            careful, view = True, raw
        elif any(whole.get(name) and _has_text_ids(raw, name, columns[name], skip) for name in lost):
            whole.update({role: False for role in whole if role in lost})
        elif decimal is None and (recognised := _decimal_mark(raw, schema, lost)):
            decimal = recognised
        else:
            break
    place, problem, advice = _first_problem(raw, {name: columns[name] for name in lost})
    if not skip:
        raise InputError(f"{problem}: {advice}")
    usable = pl.all_horizontal(pl.col(lost).is_not_null())
    good, known = frame.filter(usable), frame.filter(~usable).select(IDS).drop_nulls()
    dates = time is not None and time[1]
    return Rows(raw, good, dates, len(frame) - len(good), problem, place=place, known=known)


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


def check_id_type(where: str, dtype: pl.DataType, role: str) -> None:
    """Refuse ids of a type that is neither a number nor text."""
    if dtype.is_nested() or dtype in (pl.Binary, pl.Object):
        raise InputError(
            f"{where} has {role} ids of type {dtype}, which cannot be used: make them whole numbers or text"
        )


def _collect(raw: RawInteractions, query: pl.LazyFrame) -> pl.DataFrame:
    """Collect a query over all files. If that fails, raise the error of the file that causes it."""
    try:
        with read_errors(raw.name):
            return query.collect(engine="streaming")
    except InputError:
        for table in raw.tables:
            with table.read_errors():
                table.frame.collect(engine="streaming")
        raise


def _select(
    raw: RawInteractions, schema: Mapping[str, pl.DataType], columns: Mapping[str, pl.Expr], drop_blank: bool
) -> pl.DataFrame:
    """Return columns of all files. Many files are read in groups: Polars takes long to plan a query over thousands."""
    frames = []
    for start in range(0, len(raw.tables), _GROUP):
        group = replace(raw, tables=raw.tables[start : start + _GROUP])
        frames.append(_collect(group, _concat(group, drop_blank, schema).select(**columns)))
    return frames[0] if len(frames) == 1 else pl.concat(frames)


def _schema(raw: RawInteractions) -> dict[str, pl.DataType]:
    """Return the types of the columns that all files have."""
    schemas = []
    for table in raw.tables:
        with table.read_errors():
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


def _concat(
    raw: RawInteractions, drop_blank: bool = False, schema: Mapping[str, pl.DataType] | None = None
) -> pl.LazyFrame:
    """Return the rows of all files, in the types of `schema`, by default those that the files have in common."""
    schema = _schema(raw) if schema is None else schema
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
    sample = _sample(raw, role).str.strip_chars()
    if raw.file_format.skip_bad_rows:  # which a missing id is
        sample = sample.filter(~sample.to_frame(role).select(is_missing(pl.col(role))).to_series())
    return bool(sample.str.contains(WHOLE_NUMBER).all())


def _sample(raw: RawInteractions, column: str) -> pl.Series:
    """Return the first values of a column that are not null."""
    table = raw.tables[0]
    with table.read_errors():
        return table.frame.select(column).head(SAMPLE_ROWS).collect().to_series().drop_nulls()


def _has_text_ids(raw: RawInteractions, role: str, whole: pl.Expr, refuse_missing: bool) -> bool:
    """Return whether some ids become usable if they are read as text instead of whole numbers."""
    text = id_values(role, _schema(raw)[role], raw.text, whole=False, careful=True, refuse_missing=refuse_missing)
    return bool(_collect(raw, _concat(raw).select((whole.is_null() & text.is_not_null()).any())).item())


def _decimal_mark(raw: RawInteractions, schema: Mapping[str, pl.DataType], lost: Sequence[str]) -> str | None:
    """Return the decimal mark that the numbers in text show, or None if none of them has a comma."""
    for column, role in (("keep", "rating"), ("weight", "weight")):
        if column not in lost or schema[role] != pl.String:
            continue
        shown = _collect(raw, _concat(raw).select(*(e.alias(str(k)) for k, e in enumerate(shows_decimal(role)))))
        has_comma, comma, point = shown.row(0)
        if comma != point:
            return "comma" if comma else "point"
        if has_comma and not comma:
            raise decimal_error(f"{raw.name}: the commas in the {role}s")
    return None


def decimal_error(commas: str) -> InputError:
    """Return the error for commas that may be decimal marks or not, after the words that say where they are."""
    return InputError(
        f'{commas}, as in 1,234, may be decimal marks or group digits: give `decimal="comma"` or `decimal="point"`'
    )


def _date_order(raw: RawInteractions) -> str:
    """Return whether day or month comes first in dates such as 02/04/2024, if a day above 12 shows it."""
    shown = _collect(raw, _concat(raw).select(*(e.alias(str(k)) for k, e in enumerate(date_evidence()))))
    day_first, month_first = shown.row(0)
    if day_first == month_first:
        problem = "begin with a day in some rows and a month in others" if day_first else EITHER_ORDER
        example = _sample(raw, "timestamp")[0]
        raise date_error(f"{raw.name}: the dates, as in {example}, {problem}")
    return DATE_ORDERS[0] if day_first else DATE_ORDERS[1]


def date_error(problem: str) -> InputError:
    """Return the error for dates whose order of day and month is not known."""
    return InputError(
        f"{problem}: give `date_format` {' or '.join(DATE_ORDERS)}, or a pattern such as '%d/%m/%Y %H:%M'"
    )


_EXAMPLE = "for example '%d/%m/%Y %H:%M'"
_PROBLEMS = {  # column that has a null -> role, what is wrong
    "user": ("user", "has no usable user id"),
    "item": ("item", "has no usable item id"),
    "keep": ("rating", "has a rating that is missing, infinite or not a number"),
    "time": ("timestamp", "has a time that is neither a number nor a date like that of other rows"),
    "weight": ("weight", f"has a weight that is not a number from {WEIGHT_RANGE[0]:g} to {WEIGHT_RANGE[1]:g}"),
}


def _first_problem(raw: RawInteractions, lost: Mapping[str, pl.Expr]) -> tuple[tuple[int, int], str, str]:
    """Return the first row with a null in one of some columns: its table and its number, what is wrong, what to do."""
    schema = _schema(raw)
    bad = pl.any_horizontal(expression.is_null() for expression in lost.values())
    for number, table in enumerate(raw.tables):
        numbered = table.frame if "row" in table.frame.collect_schema() else table.frame.with_row_index("row")
        values = (pl.col(_PROBLEMS[column][0]).alias(f"{column} given") for column in lost)
        rows = numbered.select("row", *_aligned(table, schema), *values)
        if raw.text:
            rows = rows.filter(~pl.all_horizontal(pl.col(*schema).is_null()))
        wrong = (expression.is_null().alias(f"{column} wrong") for column, expression in lost.items())
        found = rows.filter(bad).select("row", pl.col("^.* given$"), *wrong).head(1).collect()
        if len(found):
            row = found.row(0, named=True)
            column = next(column for column in lost if row[f"{column} wrong"])
            value = row[f"{column} given"]
            shown = "" if value is None or value == "" else f" ({value!r})"
            problem = f"{table.unit} {row['row'] + 1:,} of {table.name} {_PROBLEMS[column][1]}{shown}"
            return (number, row["row"]), problem, _advice(raw, column)
    column = next(iter(lost))
    return (0, 0), f"{raw.name} {_PROBLEMS[column][1]} in some row", _advice(raw, column)


def _advice(raw: RawInteractions, column: str) -> str:
    """Return what to do about a row with a null in a column."""
    role = _PROBLEMS[column][0]
    advice = "correct or remove that row"
    if raw.has_columns and column in ("keep", "time", "weight"):
        advice += f", or name another column as `{role}`"
        advice += f" (`{role}` '' ignores ratings)" if column == "keep" else ""
    if raw.has_columns:
        advice += SKIP_ROWS
    if raw.has_columns and column == "time":
        given = raw.file_format.date_format
        advice += f"; check `date_format` {given!r}" if given else f"; if it is a date, give `date_format`, {_EXAMPLE}"
    if raw.has_columns and column == "weight":
        advice += "; to leave out all rows with small weights, name the column as `rating` too and give `min_rating`"
    return advice
