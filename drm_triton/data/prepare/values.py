"""Polars expressions that turn raw values into ids, numbers and times. A value that cannot be used becomes null."""

from __future__ import annotations

from collections.abc import Callable

import polars as pl

from drm_triton.names import WEIGHT_RANGE

# A whole number as Python writes it. Other spellings, such as 007, +7 and -0, would change as integers.
WHOLE_NUMBER = r"^(?:0|-?[1-9][0-9]{0,18})$"

SMALL_INTEGERS = (pl.Int8, pl.Int16, pl.Int32, pl.Int64, pl.UInt8, pl.UInt16, pl.UInt32)  # they fit into Int64

# Only unambiguous formats: 01/02/2020 is in January or in February, depending on the country. A time without an offset
# is in UTC.
_DATES = ("%Y-%m-%d", "%Y/%m/%d", *(f"%Y-%m-%d %H:%M{seconds}{z}" for seconds in (":%S%.f", "") for z in ("", "%z")))


def id_values(role: str, dtype: pl.DataType, from_text: bool, whole: bool, careful: bool) -> pl.Expr:
    """Return external ids as Int64 or String.

    Parameters
    ----------
    role : column ``user`` or ``item``
    from_text : the ids come from a text file, so that blanks around them are removed
    whole : the ids are expected to be whole numbers; any other is null
    careful : check each id by a regular expression, which is slower
    """
    column = pl.col(role)
    if dtype in SMALL_INTEGERS:
        return column.cast(pl.Int64)
    if dtype.is_float():  # pandas turns whole numbers into floats if one is missing
        return whole_numbers(column)
    text = column.cast(pl.String)
    if from_text and (careful or not whole):
        text = text.str.strip_chars()
    if whole:
        # Comparing text is much faster than a regular expression, and wrong only for negative numbers.
        plain = text.str.contains(WHOLE_NUMBER) if careful else (text >= "1") | (text == "0")
        return pl.when(plain).then(text.cast(pl.Int64, strict=False))
    return pl.when(text != "").then(text)


def whole_numbers(column: pl.Expr) -> pl.Expr:
    """Return floats as Int64; null if a float is not whole, or so large that it stands for several whole numbers."""
    exact = (column == column.floor()) & (column.abs() < 2**53)
    return pl.when(exact).then(column.cast(pl.Int64, strict=False))


def rating_values(dtype: pl.DataType, careful: bool) -> pl.Expr:
    """Return ratings as Float64."""
    return _numbers("rating", dtype, careful)


def weight_values(dtype: pl.DataType, kept: pl.Expr | None, careful: bool) -> pl.Expr:
    """Return weights as Float64; null if one is out of range. Only rows that are `kept`, if given, need a weight."""
    number = (
        _numbers("weight", dtype, careful) if dtype.is_numeric() or dtype == pl.String else pl.lit(None, pl.Float64)
    )
    weight = pl.when(number.is_between(*WEIGHT_RANGE)).then(number)
    return weight if kept is None else pl.when(kept).then(weight).otherwise(1.0)


def _numbers(role: str, dtype: pl.DataType, careful: bool) -> pl.Expr:
    column = pl.col(role)
    return (column.str.strip_chars() if careful and dtype == pl.String else column).cast(pl.Float64, strict=False)


def is_kept(dtype: pl.DataType, min_rating: float | None, careful: bool) -> pl.Expr:
    """Return whether a rating reaches `min_rating`; null if it is not a number or, with a threshold, missing."""
    number = rating_values(dtype, careful)
    if min_rating is None:
        return pl.when(pl.col("rating").is_null()).then(True).when(number.is_not_nan()).then(True)
    return pl.when(number.is_not_nan()).then(number >= min_rating)


def time_values(dtype: pl.DataType, sample: Callable[[], pl.Series]) -> pl.Expr:
    """Return times as numbers that sort: unix times unchanged, dates in microseconds.

    Parameters
    ----------
    dtype : type of the column ``timestamp``
    sample : returns its first values, which decide how text is read
    """
    column = pl.col("timestamp")
    if dtype.is_temporal():
        return column.cast(pl.Datetime("us")).cast(pl.Int64)
    if dtype.is_float():
        return pl.when(column.is_finite()).then(column)
    if dtype != pl.String:
        return column.cast(pl.Int64, strict=False)
    column, values = column.str.strip_chars(), sample().str.strip_chars()
    if len(values) and values.head(1).cast(pl.Float64, strict=False).null_count() == 0:
        if values.str.contains(r"^[+-]?[0-9]+$").all():
            return column.cast(pl.Int64, strict=False)
        number = column.cast(pl.Float64, strict=False)
        return pl.when(number.is_finite()).then(number)
    column = column.str.replace(r"^(\d{4}-\d\d-\d\d)T", "$1 ").str.replace(r" ?(?:Z|UTC)$", "+00:00")
    column = column.str.replace(r"(:\S+[+-]\d\d)$", "${1}:00")
    return pl.coalesce(column.str.to_datetime(form, strict=False, time_unit="us").cast(pl.Int64) for form in _DATES)
