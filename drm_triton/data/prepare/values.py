"""Polars expressions that turn raw values into ids, numbers and times. A value that cannot be used becomes null."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import polars as pl

from drm_triton.names import WEIGHT_RANGE

# A whole number as Python writes it. Other spellings, such as 007, +7 and -0, would change as integers.
WHOLE_NUMBER = r"^(?:0|-?[1-9][0-9]{0,18})$"

SMALL_INTEGERS = (pl.Int8, pl.Int16, pl.Int32, pl.Int64, pl.UInt8, pl.UInt16, pl.UInt32)  # they fit into Int64

# Spellings of a missing value, in lower case.
MISSING = ("", "na", "n/a", "#n/a", "nan", "null", "none", "\\n")

_TIMES = ("", " %H:%M", " %H:%M:%S%.f", " %I:%M %p", " %I:%M:%S %p")  # of a day
# A time without an offset is in UTC.
_ISO = ("%Y-%m-%d", *(f"%Y-%m-%d %H:%M{seconds}{z}" for seconds in (":%S%.f", "") for z in ("", "%z")))
_ORDERS = {"day-first": "%d/%m/%Y", "month-first": "%m/%d/%Y"}
_NUMERIC_DATE = r"^(\d{1,2})([./-])(\d{1,2})[./-]\d{4}(?:\D|$)"  # 02.04.2024, 4/2/2024 or 02-04-2024
_NAMED_DATE = r"^(?:\d{1,2}[ -][A-Za-z]{3,9}|[A-Za-z]{3,9} \d{1,2}),?[ -]\d{4}"  # 2 Apr 2024, April 2, 2024

_GROUPED = r"^[+-]?\d{1,3}(?:MARK\d{3})+"  # digits in groups of three


def is_missing(text: pl.Expr) -> pl.Expr:
    """Return whether text stands for a missing value."""
    return text.str.strip_chars().str.to_lowercase().is_in(MISSING)


def id_values(
    role: str, dtype: pl.DataType, from_text: bool, whole: bool, careful: bool, refuse_missing: bool = False
) -> pl.Expr:
    """Return external ids as Int64 or String.

    Parameters
    ----------
    role : column ``user`` or ``item``
    from_text : the ids come from a text file, so that blanks around them are removed
    whole : the ids are expected to be whole numbers; any other is null
    careful : check each id by a regular expression, which is slower
    refuse_missing : an id such as NA is null too
    """
    column = pl.col(role)
    if dtype in SMALL_INTEGERS:
        return column.cast(pl.Int64)
    if dtype.is_float():  # pandas turns whole numbers into floats if one is missing
        return whole_numbers(column)
    text = column.cast(pl.String)
    if from_text and (careful or not whole):
        text = text.str.strip_chars()
    if refuse_missing:
        text = pl.when(~is_missing(text)).then(text)
    if whole:
        # Comparing text is much faster than a regular expression, and wrong only for negative numbers.
        plain = text.str.contains(WHOLE_NUMBER) if careful else (text >= "1") | (text == "0")
        return pl.when(plain).then(text.cast(pl.Int64, strict=False))
    return pl.when(text != "").then(text)


def whole_numbers(column: pl.Expr) -> pl.Expr:
    """Return floats as Int64; null if a float is not whole, or so large that it stands for several whole numbers."""
    exact = (column == column.floor()) & (column.abs() < 2**53)
    return pl.when(exact).then(column.cast(pl.Int64, strict=False))


def rating_values(dtype: pl.DataType, careful: bool, decimal: str | None = None) -> pl.Expr:
    """Return ratings as Float64. See `number_values`."""
    return number_values("rating", dtype, careful, decimal)


def weight_values(dtype: pl.DataType, kept: pl.Expr | None, careful: bool, decimal: str | None = None) -> pl.Expr:
    """Return weights as Float64; null if one is out of range. Only rows that are `kept`, if given, need a weight."""
    usable = dtype.is_numeric() or dtype == pl.String
    number = number_values("weight", dtype, careful, decimal) if usable else pl.lit(None, pl.Float64)
    weight = pl.when(number.is_between(*WEIGHT_RANGE)).then(number)
    return weight if kept is None else pl.when(kept).then(weight).otherwise(1.0)


def number_values(role: str, dtype: pl.DataType, careful: bool, decimal: str | None) -> pl.Expr:
    """Return numbers as Float64.

    Parameters
    ----------
    careful : remove blanks around numbers in text
    decimal : point or comma: the decimal mark of numbers in text; the other mark may group digits. None for a point
        without groups.
    """
    column = pl.col(role)
    if not careful or dtype != pl.String:
        return column.cast(pl.Float64, strict=False)
    column = column.str.strip_chars()
    if decimal is not None:
        mark, other = (",", ".") if decimal == "comma" else (".", ",")
        grouped = column.str.contains(_GROUPED.replace("MARK", rf"\{other}") + rf"(?:\{mark}\d*)?$")
        column = pl.when(grouped).then(column.str.replace_all(other, "", literal=True)).otherwise(column)
        # A mark that does not group is wrong here: 4.5 is not a number in a column with decimal commas.
        column = pl.when(~column.str.contains(other, literal=True)).then(column.str.replace(mark, ".", literal=True))
    return column.cast(pl.Float64, strict=False)


def shows_decimal(role: str) -> tuple[pl.Expr, pl.Expr, pl.Expr]:
    """Return whether a column of text has numbers with a comma, and whether it shows a decimal comma or point."""
    text = pl.col(role).str.strip_chars()
    either = text.str.contains(r"^[+-]?[\d.]*,\d+$")
    comma = either & (text.str.contains(r",(?:\d{1,2}|\d{4,})$") | text.str.contains(r"^[+-]?0?,|\."))
    point = text.str.contains(r"^[+-]?\d{1,3}(?:,\d{3})+\.\d*$") | text.str.contains(r",\d{3},\d{3}$")
    return (either | point).any(), comma.any(), point.any()


def is_kept(dtype: pl.DataType, min_rating: float | None, careful: bool, decimal: str | None = None) -> pl.Expr:
    """Return whether a rating reaches `min_rating` or, without a threshold, is above 0 or missing.

    The result is null if a rating is infinite, not a number or, with a threshold, missing.
    """
    number = rating_values(dtype, careful, decimal)
    finite = pl.when(number.is_finite())
    if min_rating is not None:
        return finite.then(number >= min_rating)
    missing = pl.col("rating").is_null()
    if dtype == pl.String and careful:
        missing |= is_missing(pl.col("rating"))
    return pl.when(missing | number.is_nan()).then(True).otherwise(finite.then(number > 0))


def time_values(
    role: str,
    dtype: pl.DataType,
    sample: Callable[[], pl.Series],
    date_format: str | None = None,
    date_order: Callable[[], str] = lambda: "day-first",
) -> tuple[pl.Expr, bool]:
    """Return times as numbers that sort, unix times unchanged and dates in microseconds, and whether they are dates.

    Parameters
    ----------
    role, dtype : name and type of the column
    sample : returns its first values, which decide how text is read
    date_format : how dates are written, if given: see `FileFormat`
    date_order : returns the order of day and month in dates such as 02/04/2024, or raises an error
    """
    column = pl.col(role)
    if dtype.is_temporal():
        return column.cast(pl.Datetime("us")).cast(pl.Int64), True
    if dtype.is_float():
        return pl.when(column.is_finite()).then(column), False
    if dtype != pl.String:
        return column.cast(pl.Int64, strict=False), False
    column, values = column.str.strip_chars(), sample().str.strip_chars()
    if date_format is not None and date_format not in _ORDERS:
        return _dates(column, (date_format,)), True
    values = values.filter(~values.to_frame("t").select(is_missing(pl.col("t"))).to_series())
    first = values[0] if len(values) else ""
    if date_format is None and values.head(1).cast(pl.Float64, strict=False).count():
        if values.str.contains(r"^[+-]?[0-9]+$").all():
            return column.cast(pl.Int64, strict=False), False
        number = column.cast(pl.Float64, strict=False)
        return pl.when(number.is_finite()).then(number), False
    if date_format is not None or re.match(_NUMERIC_DATE, first):
        found = re.match(_NUMERIC_DATE, first)
        dotted = found is not None and found[2] == "."
        order = date_format or ("day-first" if dotted else date_order())  # with dots, the day is always first
        mark = r"\." if dotted and date_format is None else "[./-]"
        column = column.str.replace(rf"^(\d{{1,2}}){mark}(\d{{1,2}}){mark}(\d{{4}})[, T]*", "$1/$2/$3 ")
        return _dates(column.str.strip_chars_end(), [_ORDERS[order] + time for time in _TIMES]), True
    if re.match(_NAMED_DATE, first):
        column = column.str.replace(r"^(\d{1,2})-([A-Za-z]+)-", "$1 $2 ").str.replace_all(r",", "")
        return _dates(column, [day + time for day in ("%d %B %Y", "%B %d %Y") for time in _TIMES]), True
    column = column.str.replace(r"^(\d{4})/(\d{1,2})/(\d{1,2})", "$1-$2-$3")
    column = column.str.replace(r"^(\d{4}-\d\d-\d\d)T", "$1 ").str.replace(r" ?(?:Z|UTC)$", "+00:00")
    column = column.str.replace(r"(:\S+[+-]\d\d)$", "${1}:00")
    return _dates(column, _ISO), True


def _dates(column: pl.Expr, forms: Sequence[str]) -> pl.Expr:
    return pl.coalesce(column.str.to_datetime(form, strict=False, time_unit="us").cast(pl.Int64) for form in forms)


def date_evidence() -> tuple[pl.Expr, pl.Expr]:
    """Return whether a column of dates such as 02/04/2024 has one that begins with a day, and one with a month."""
    parts = pl.col("timestamp").str.strip_chars().str.extract_groups(r"^(?<a>\d{1,2})[./-](?<b>\d{1,2})[./-]\d{4}")
    first, second = (parts.struct.field(name).cast(pl.Int64, strict=False) > 12 for name in "ab")
    return first.any(), second.any()
