"""Conditions on the attributes of items: `price<=20`, `genre=Drama|Comedy`, `in_stock`, `released>=2020-01-31`.

A condition is a column, an operator and a value, or the name of a column of truth values. `|` separates several values
of `=` and `!=`, of which one, or none, must match. For tags, `=` means that the item has the tag. An item without a
value satisfies no condition on it, neither `=` nor `!=`.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable, Sequence
from datetime import date, datetime
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from drm_triton.data.attributes import TAGS, attributes
from drm_triton.errors import InputError

Condition = str | pl.Expr
COMPARE: dict[str, Callable[[Any, Any], pl.Expr]] = {
    "<=": operator.le, ">=": operator.ge, "!=": operator.ne, "==": operator.eq, "=": operator.eq, "<": operator.lt,
    ">": operator.gt,
}  # fmt: skip
OPERATOR = re.compile("|".join(COMPARE))  # the longer ones come first
TRUTH = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def conditions(where: Condition | Iterable[Condition] | None) -> tuple[Condition, ...]:
    """Return one or several conditions as a tuple."""
    if where is None:
        return ()
    found = tuple(where) if isinstance(where, Iterable) and not isinstance(where, Condition) else (where,)
    for condition in found:
        if not isinstance(condition, Condition):
            raise InputError(
                f"`where` must be a text such as 'price<=20', a polars expression, or a list of these, got "
                f"{condition!r}"
            )
    return found


def satisfying(table: pl.DataFrame, where: Sequence[Condition]) -> NDArray[np.bool_]:
    """Return which rows of a table satisfy all conditions: bool [n].

    Parameters
    ----------
    table : attributes, see `drm_triton.data.attributes`
    where : conditions, as text or as polars expressions

    Examples
    --------
    >>> table = pl.DataFrame({"price": [5, 30, None], "genres": [["Drama"], ["Drama", "War"], ["War"]]})
    >>> satisfying(table, ["genres=Drama", pl.col("price") <= 20])
    array([ True, False, False])
    """
    allowed = np.ones(len(table), dtype=bool)
    for condition in where:
        expression = _parsed(condition, table) if isinstance(condition, str) else condition
        try:
            found = table.select(expression.alias("found"))["found"]
        except pl.exceptions.PolarsError as error:
            reason = str(error).split("\n", 1)[0]
            raise InputError(f"`where`: {condition} cannot be computed ({reason}); {columns_of(table)}") from None
        if found.dtype != pl.Boolean or len(found) != len(table):
            raise InputError(f"`where`: {condition} is not a truth value for each item but {found.dtype}")
        allowed &= found.fill_null(False).to_numpy()
    return allowed


def column(table: pl.DataFrame, name: str, option: str) -> pl.Series:
    """Return a column of attributes, or raise an error that lists the columns."""
    if name not in table.columns:
        raise InputError(f"`{option}`: the items have no attribute {name!r}; {columns_of(table)}")
    return table[name]


def columns_of(table: pl.DataFrame) -> str:
    """Return the clause of a message that lists the columns of a table of items."""
    names = ", ".join(f"{name} ({kind_of(table[name].dtype)})" for name in table.columns)
    hint = "" if attributes(table) else "; attributes are added when the data is prepared, see docs/attributes.md"
    return f"their columns are {names}{hint}"


def _parsed(condition: str, table: pl.DataFrame) -> pl.Expr:
    """Return a condition as an expression on the table."""
    text = condition.strip()
    # A column may have an operator in its name, so known names come first, the longest of them before the others.
    fitting = [name for name in table.columns if OPERATOR.match(text[len(name) :].lstrip()) and text.startswith(name)]
    found = OPERATOR.search(text, len(max(fitting, key=len)) if fitting else 0)
    if text in table.columns or found is None:
        if column(table, text, "where").dtype != pl.Boolean:
            kind = kind_of(table[text].dtype)
            raise InputError(f"`where`: {text} is {kind}, not a truth value; compare it, as in '{text}=VALUE'")
        return pl.col(text)
    name, compare, value = text[: found.start()].strip(), found[0], text[found.end() :].strip()
    dtype = column(table, name, "where").dtype
    if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"":
        value = value[1:-1]
    if not value:
        raise InputError(f"`where`: {condition!r} has no value after {compare}")
    if compare not in ("=", "==", "!="):
        if dtype in (pl.String, pl.Boolean, pl.List):
            raise InputError(f"`where`: {name} is {kind_of(dtype)}, which {compare} cannot compare; use = or !=")
        return COMPARE[compare](*_comparable(name, dtype, value))
    equal = [_equal(name, dtype, part.strip()) for part in value.split(TAGS)]
    return ~pl.any_horizontal(equal) if compare == "!=" else pl.any_horizontal(equal)


def _equal(name: str, dtype: pl.DataType, value: str) -> pl.Expr:
    if isinstance(dtype, pl.List):
        return pl.col(name).list.contains(pl.lit(value, pl.String))
    left, right = _comparable(name, dtype, value)
    return left == right


def _comparable(name: str, dtype: pl.DataType, value: str) -> tuple[pl.Expr, pl.Expr]:
    """Return a column and a value as expressions of the same type."""
    if dtype == pl.String:
        return pl.col(name), pl.lit(value)
    try:
        if dtype == pl.Boolean:
            return pl.col(name), pl.lit(TRUTH[value.lower()])
        if dtype.is_integer() and re.fullmatch(r"[+-]?\d{1,30}", value):
            return pl.col(name), pl.lit(int(value))
        if dtype.is_numeric():
            number = float(value)
            if not math.isfinite(number):
                raise ValueError(number)
            # 0.1 of a column of float32 is meant, which is another number than 0.1 in float64
            return pl.col(name), pl.lit(number, pl.Float32 if dtype == pl.Float32 else pl.Float64)
        if dtype == pl.Date:
            return pl.col(name), pl.lit(date.fromisoformat(value))
        if isinstance(dtype, pl.Datetime):
            if len(value) <= len("2020-01-31"):
                return pl.col(name).dt.date(), pl.lit(date.fromisoformat(value))
            moment = datetime.fromisoformat(value)
            if moment.tzinfo is not None:
                raise ValueError(value)
            return pl.col(name).dt.replace_time_zone(None), pl.lit(moment)
    except (KeyError, ValueError):
        raise InputError(f"`where`: {value!r} is no value to compare {name} with, which is {kind_of(dtype)}") from None
    raise InputError(f"`where`: {name} has type {dtype}, which only a polars expression can compare")


def kind_of(dtype: pl.DataType) -> str:
    """Return what a type is called in messages."""
    if isinstance(dtype, pl.List):
        return "tags"
    if dtype == pl.String:
        return "text"
    if dtype == pl.Boolean:
        return "true or false"
    if dtype == pl.Date:
        return "a date such as 2020-01-31"
    if isinstance(dtype, pl.Datetime):
        return "a time such as 2020-01-31 or 2020-01-31T18:30"
    return "a number" if dtype.is_numeric() else str(dtype)
