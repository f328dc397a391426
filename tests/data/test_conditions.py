"""Conditions on attributes: which rows satisfy them, compared with plain Python, and what is refused."""

import operator
from datetime import date, datetime
from typing import Any

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drm_triton.data.conditions import conditions, satisfying
from drm_triton.errors import InputError

PLAIN = {
    "=": operator.eq, "==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt,
    ">=": operator.ge,
}  # fmt: skip
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "whole": st.integers(-3, 3),
    "decimal": st.sampled_from([-1.5, 0.0, 0.1, 2.0]),
    "day": st.dates(date(2020, 1, 1), date(2020, 1, 4)),
    "moment": st.datetimes(datetime(2020, 1, 1), datetime(2020, 1, 1, 0, 0, 3)).map(lambda t: t.replace(microsecond=0)),
    "text": st.sampled_from(["a", "b c", "d"]),
    "flag": st.booleans(),
    "tags": st.lists(st.sampled_from(["x", "y z", "w"]), max_size=3),
}
SCHEMA: dict[str, Any] = {
    "whole": pl.Int32, "decimal": pl.Float32, "day": pl.Date, "moment": pl.Datetime, "text": pl.String,
    "flag": pl.Boolean, "tags": pl.List(pl.String),
}  # fmt: skip


def shown(value: Any) -> str:
    if isinstance(value, date):
        return value.isoformat()
    return str(value).lower() if isinstance(value, bool) else str(value)


@given(st.data())
def test_a_condition_means_what_python_says(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(VALUES)))
    column = data.draw(st.lists(st.none() | VALUES[name], max_size=8))
    table = pl.DataFrame({name: pl.Series(column, dtype=SCHEMA[name])})
    ordered = name in ("whole", "decimal", "day", "moment")
    sign = data.draw(st.sampled_from([*PLAIN] if ordered else ["=", "==", "!="]))
    one = VALUES[name] if name != "tags" else st.sampled_from(["x", "y z", "w"])
    wanted = data.draw(st.lists(one, min_size=1, max_size=2 if sign in ("=", "==", "!=") else 1))
    blank = data.draw(st.sampled_from(["", " "]))
    condition = f"{blank}{name}{blank}{sign}{blank}{'|'.join(map(shown, wanted))}{blank}"

    def holds(value: Any) -> bool:
        if value is None:
            return False
        if name == "tags":
            return any(tag in value for tag in wanted) == (sign != "!=")
        if sign in ("=", "==", "!="):
            return (value in wanted) == (sign != "!=")
        return bool(PLAIN[sign](value, wanted[0]))

    assert satisfying(table, [condition]).tolist() == [holds(value) for value in column]


def test_conditions_of_a_day_on_a_time() -> None:
    table = pl.DataFrame({"t": [datetime(2020, 1, 1, 5), datetime(2020, 1, 2), None]})
    for zone in (None, "Europe/Berlin"):
        zoned = table.with_columns(pl.col("t").dt.replace_time_zone(zone))
        assert satisfying(zoned, ["t=2020-01-01"]).tolist() == [True, False, False]
        assert satisfying(zoned, ["t>2020-01-01"]).tolist() == [False, True, False]
        assert satisfying(zoned, ["t<=2020-01-01T05:00"]).tolist() == [True, False, False]


def test_all_must_hold_and_expressions_mix_with_text() -> None:
    table = pl.DataFrame({"price": [5, 15, 25, None], "in_stock": [True, False, True, True]})
    assert satisfying(table, []).tolist() == [True] * 4
    assert satisfying(table, ["in_stock", pl.col("price") < 20]).tolist() == [True, False, False, False]
    assert satisfying(table, conditions(pl.col("price").is_null())).tolist() == [False, False, False, True]
    assert satisfying(table, conditions("in_stock=no")).tolist() == [False, True, False, False]
    assert satisfying(table, ["price<1.5e1"]).tolist() == [True, False, False, False]


def test_names_with_operators_blanks_and_quotes() -> None:
    table = pl.DataFrame({"a": ["x", "=b"], "a<b": ["x", "y"], "on sale": [True, False]})
    assert satisfying(table, ["a<b=x"]).tolist() == [True, False]
    assert satisfying(table, ["a<b != 'x'"]).tolist() == [False, True]
    assert satisfying(table, ['a="=b"']).tolist() == [False, True]
    assert satisfying(table, ["on sale"]).tolist() == [True, False]
    assert satisfying(pl.DataFrame({"n": [2**60, 2**60 + 1]}), [f"n={2**60 + 1}"]).tolist() == [False, True]


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        ("colour=red", r"no attribute 'colour'; their columns are id \(a number\), .*genres \(tags\)"),
        ("colour", "no attribute 'colour'"),
        ("price", "price is a number, not a truth value"),
        ("price<cheap", "'cheap' is no value to compare price with, which is a number"),
        ("price<nan", "'nan' is no value"),
        ("price<=", "has no value after <="),
        ("in_stock=maybe", "which is true or false"),
        ("in_stock>0", "cannot compare; use = or !="),
        ("brand<z", "brand is text, which < cannot compare"),
        ("genres>=Drama", "genres is tags"),
        ("day<2020-13-01", "'2020-13-01' is no value to compare day with"),
        ("moment<2020-01-01T05:00+01:00", "is no value to compare moment with"),
        ("length>3", "only a polars expression"),
        (pl.col("colour") > 1, "cannot be computed .*their columns are"),
        (pl.col("price"), "not a truth value for each item"),
        (pl.col("price").max() > 1, "not a truth value for each item"),
    ],
)
def test_what_is_refused(condition: Any, message: str) -> None:
    table = pl.DataFrame(
        {
            "id": [1, 2],
            "price": [1.0, None],
            "in_stock": [True, None],
            "brand": ["a", None],
            "genres": [["Drama"], None],
            "day": [date(2020, 1, 1), None],
            "moment": [datetime(2020, 1, 1), None],
            "length": pl.Series([1, 2], dtype=pl.Duration),
        }
    )
    with pytest.raises(InputError, match=message):
        satisfying(table, [condition])


def test_a_table_without_attributes_and_a_value_that_is_no_condition() -> None:
    with pytest.raises(InputError, match=r"their columns are id \(text\); attributes are added when"):
        satisfying(pl.DataFrame({"id": ["x"]}), ["price<3"])
    with pytest.raises(InputError, match=r"`where` must be a text .*got 3"):
        conditions([3])  # type: ignore[list-item]
    assert conditions(None) == ()
