"""Reading raw interactions: only the columns needed, ids and ratings verified, bad rows named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import polars as pl

from drm_triton.data.prepare.columns import Part, Raw
from drm_triton.data.prepare.inputs import reading
from drm_triton.data.split import NEEDS_TIME
from drm_triton.errors import InputError

if TYPE_CHECKING:
    from drm_triton.data.prepare.build import Options

# The way Python and everyone else writes a whole number; 007, +7 and -0 would not come back as they were.
WHOLE_NUMBER = r"^(?:0|-?[1-9][0-9]{0,18})$"


def collect(raw: Raw, options: Options) -> pl.DataFrame:
    """Read the columns needed: user, item, and as asked keep (rating high enough), rating, time.

    The first pass takes the quick way and leaves a null wherever that did not do. Only if there is one, a careful pass
    follows (blank lines, spaces round numbers, negative ids), and then one that reads ids as the text they are; a null
    that is left is an error in the data.
    """
    careful = False
    view = replace(
        raw, parts=[replace(part, frame=part.frame if part.quick is None else part.quick) for part in raw.parts]
    )
    _check_needs(raw, _schema(view), options)
    whole = {role: _looks_whole(view, role) for role in ("user", "item")}
    while True:
        schema = _schema(view)
        columns = {role: _id(raw, schema[role], role, whole[role], careful) for role in ("user", "item")}
        if "rating" in schema:
            columns["keep"] = _keep(schema["rating"], options.min_rating, careful)
        if raw.own_filter and "rating" in schema:
            columns["rating"] = _number(schema["rating"], careful).cast(pl.Float32)
        if options.split in NEEDS_TIME:
            columns["time"] = _time(view, schema["timestamp"])
        try:
            frame = _run(view, _concat(view, drop_blank=careful and raw.text).select(**columns))
        except InputError:
            if careful:
                raise
            careful, view = True, raw
            continue
        lost = [name for name in columns if name != "rating" and frame[name].null_count()]
        if not lost:  # without a threshold the ratings were only to be verified
            return frame if options.min_rating is not None else frame.drop("keep", strict=False)
        if not careful:
            careful, view = True, raw
        elif any(whole.get(name) for name in lost):
            whole.update({role: False for role in whole if role in lost})
        else:
            raise _error_at(raw, lost[0], columns[lost[0]])


def _check_needs(raw: Raw, schema: Mapping[str, pl.DataType], options: Options) -> None:
    needs = (
        [("rating", f"min-rating {options.min_rating:g}", f"leave {raw.option('min-rating')} out")]
        if options.min_rating is not None
        else []
    )
    if options.split in NEEDS_TIME:
        needs.append(("timestamp", f"split {options.split!r}", "choose another split"))
    for role, step, otherwise in needs:
        if role not in schema:
            lack = (
                f"has no column, or several, recognised as such: name it with {raw.option(role)}, or"
                if raw.named
                else "has none:"
            )
            raise InputError(f"{step} needs a {role} for each interaction, and {_names(raw)} {lack} {otherwise}")


def _run(raw: Raw, query: pl.LazyFrame) -> pl.DataFrame:
    """Collect a query over all files; if that fails, find the file at fault."""
    try:
        with reading(_names(raw)):
            return query.collect(engine="streaming")
    except InputError:
        for part in raw.parts:
            with reading(part.name, part.locate):
                part.frame.collect(engine="streaming")
        raise


def _names(raw: Raw) -> str:
    names = [part.name for part in raw.parts]
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _schema(raw: Raw) -> dict[str, pl.DataType]:
    """Types of the columns that all files have; where files disagree the column is read as text."""
    schemas = []
    for part in raw.parts:
        with reading(part.name, part.locate):
            schemas.append(part.frame.collect_schema())
    common = [c for c in schemas[0].names() if c != "row" and all(c in s for s in schemas)]
    return {c: _common_type([s[c] for s in schemas], is_id=c in ("user", "item")) for c in common}


def _common_type(types: Sequence[pl.DataType], is_id: bool) -> pl.DataType:
    if len(set(types)) == 1:
        return types[0]
    if is_id and all(t in _SMALL_INTEGERS or t.is_float() for t in types):
        return pl.Int64()
    numbers = not is_id and all(t.is_numeric() for t in types)
    return (pl.Float64() if any(t.is_float() for t in types) else pl.Int64()) if numbers else pl.String()


def _aligned(part: Part, schema: Mapping[str, pl.DataType]) -> list[pl.Expr]:
    """The columns of one file in the types of `schema`; an id 2.0 is 2, as in a file where ids are integers."""
    own = part.frame.collect_schema()
    columns = []
    for c, dtype in schema.items():
        float_id = c in ("user", "item") and own[c].is_float() and own[c] != dtype
        columns.append((_whole(pl.col(c)) if float_id else pl.col(c)).cast(dtype))
    return columns


def _concat(raw: Raw, drop_blank: bool = False) -> pl.LazyFrame:
    schema = _schema(raw)
    frames = [part.frame.select(_aligned(part, schema)) for part in raw.parts]
    frame = frames[0] if len(frames) == 1 else pl.concat(frames)
    return frame.filter(~pl.all_horizontal(pl.all().is_null())) if drop_blank else frame


def _looks_whole(raw: Raw, role: str) -> bool:
    dtype = _schema(raw)[role]
    if dtype.is_integer() and dtype not in _SMALL_INTEGERS:
        return True
    if not raw.text or dtype != pl.String:
        return False
    return bool(_head(raw, role).str.strip_chars().str.contains(WHOLE_NUMBER).all())


def _head(raw: Raw, column: str) -> pl.Series:
    with reading(raw.parts[0].name, raw.parts[0].locate):
        return raw.parts[0].frame.select(column).head(1000).collect().to_series().drop_nulls()


_SMALL_INTEGERS = (pl.Int8, pl.Int16, pl.Int32, pl.Int64, pl.UInt8, pl.UInt16, pl.UInt32)


def _id(raw: Raw, dtype: pl.DataType, role: str, whole: bool, careful: bool) -> pl.Expr:
    """External ids are Int64 or String; null where an id is missing or, if `whole`, not a plain whole number."""
    column = pl.col(role)
    if dtype in _SMALL_INTEGERS:
        return column.cast(pl.Int64)
    if dtype.is_float():  # pandas makes whole numbers float when one is missing
        return _whole(column)
    if dtype.is_nested() or dtype in (pl.Binary, pl.Object):
        raise InputError(
            f"{_names(raw)} has {role} ids of type {dtype}, which cannot be used: make them whole numbers or text"
        )
    text = column.cast(pl.String)
    if raw.text and (careful or not whole):
        text = text.str.strip_chars()
    if whole:
        # Comparing texts is far quicker than a regular expression, and right but for negative numbers.
        plain = text.str.contains(WHOLE_NUMBER) if careful else (text >= "1") | (text == "0")
        return pl.when(plain).then(text.cast(pl.Int64, strict=False))
    return pl.when(text != "").then(text)


def _whole(column: pl.Expr) -> pl.Expr:
    """A float as Int64; null where it is not a whole number, or so large that neighbours would be the same float."""
    exact = (column == column.floor()) & (column.abs() < 2**53)
    return pl.when(exact).then(column.cast(pl.Int64, strict=False))


def _number(dtype: pl.DataType, careful: bool) -> pl.Expr:
    column = pl.col("rating")
    return (column.str.strip_chars() if careful and dtype == pl.String else column).cast(pl.Float64, strict=False)


def _keep(dtype: pl.DataType, min_rating: float | None, careful: bool) -> pl.Expr:
    """True or False, and null where the rating is not a number (or, with a threshold, missing)."""
    number = _number(dtype, careful)
    if min_rating is None:
        return pl.when(pl.col("rating").is_null()).then(True).when(number.is_not_nan()).then(True)
    return pl.when(number.is_not_nan()).then(number >= min_rating)


def _time(raw: Raw, dtype: pl.DataType) -> pl.Expr:
    """Time as a number that sorts: unix time as it is, dates in microseconds."""
    column = pl.col("timestamp")
    if dtype.is_temporal():
        return column.cast(pl.Datetime("us")).cast(pl.Int64)
    if dtype.is_float():
        return pl.when(column.is_finite()).then(column)
    if dtype != pl.String:
        return column.cast(pl.Int64, strict=False)
    column = column.str.strip_chars()
    head = _head(raw, "timestamp").str.strip_chars()
    if len(head) and head.head(1).cast(pl.Float64, strict=False).null_count() == 0:
        whole = head.str.contains(r"^[+-]?[0-9]+$").all()
        if whole:
            return column.cast(pl.Int64, strict=False)
        number = column.cast(pl.Float64, strict=False)
        return pl.when(number.is_finite()).then(number)
    column = column.str.replace(r"^(\d{4}-\d\d-\d\d)T", "$1 ").str.replace(r" ?(?:Z|UTC)$", "+00:00")
    column = column.str.replace(r"(:\S+[+-]\d\d)$", "${1}:00")
    return pl.coalesce(column.str.to_datetime(form, strict=False, time_unit="us").cast(pl.Int64) for form in _DATES)


# Only forms that mean one thing: 01/02/2020 is January in one country and February in another. A time without offset
# is taken as UTC.
_DATES = ("%Y-%m-%d", "%Y/%m/%d", *(f"%Y-%m-%d %H:%M{seconds}{z}" for seconds in (":%S%.f", "") for z in ("", "%z")))


_PROBLEMS = {
    "user": ("user", "has no usable user id"),
    "item": ("item", "has no usable item id"),
    "keep": ("rating", "has a rating that is missing or not a number"),
    "time": ("timestamp", "has a time that is neither a number nor like 2020-12-31 23:59:59"),
}


def _error_at(raw: Raw, column: str, expression: pl.Expr) -> InputError:
    """Find the first row where `expression` is null and say where it is."""
    role, problem = _PROBLEMS[column]
    advice = "correct or remove that row"
    if raw.named and column in ("keep", "time"):
        advice += f", or name another column with {raw.option(role)}"
        advice += f" ({raw.option(role)} '' ignores ratings)" if column == "keep" else ""
    schema = _schema(raw)
    for part in raw.parts:
        numbered = part.frame if "row" in part.frame.collect_schema() else part.frame.with_row_index("row")
        rows = numbered.select("row", *_aligned(part, schema), seen=role)
        if raw.text:
            rows = rows.filter(~pl.all_horizontal(pl.exclude("row", "seen").is_null()))
        bad = rows.filter(expression.is_null()).select("row", "seen").head(1).collect()
        if len(bad):
            row, value = bad.row(0)
            seen = "" if value is None or value == "" else f" ({value!r})"
            return InputError(f"{part.unit} {row + 1:,} of {part.name} {problem}{seen}: {advice}")
    return InputError(f"{_names(raw)} {problem} in some row: {advice}")
