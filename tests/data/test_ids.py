"""External ids and their codes."""

from typing import Any

import numpy as np
import polars as pl
import pytest

from drm_triton.data.ids import IdIndex, as_series, encode, lookup, named, nearest
from drm_triton.errors import InputError

NUMBERS, UNSORTED, TEXT = pl.Series([10, 20, 30]), pl.Series([30, 10, 20]), pl.Series(["a", "b", "c"])


@pytest.mark.parametrize("ids", [[1, 2], (1, 2), np.array([1, 2]), pl.Series([1, 2]), {1: "x", 2: "y"}, range(1, 3)])
def test_any_container(ids: Any) -> None:
    assert as_series(ids, "item").to_list() == [1, 2]


@pytest.mark.parametrize("ids", ["ab", 5, 1.5, b"ab", None])
def test_a_single_value_is_refused(ids: Any) -> None:
    with pytest.raises(InputError, match="item ids must be a list, got the single value"):
        as_series(ids, "item")


@pytest.mark.parametrize("ids", [[[1], [2]], [b"x"], [object()]])
def test_other_types_are_refused(ids: Any) -> None:
    with pytest.raises(InputError, match="item ids must be whole numbers or text"):
        as_series(ids, "item")


@pytest.mark.parametrize(
    ("ids", "known", "codes"),
    [
        ([30, 31, 10], NUMBERS, [2, -1, 0]),
        (["30", "x", "10"], NUMBERS, [2, -1, 0]),
        ([30.0, 10.5], NUMBERS, [2, -1]),
        ([None, 30], NUMBERS, [-1, 2]),
        ([30, 31, 20], UNSORTED, [0, -1, 2]),
        (["20", "x"], UNSORTED, [2, -1]),
        (["c", "d"], TEXT, [2, -1]),
        ([17], pl.Series(["17", "18"]), [0]),
        ([], NUMBERS, []),
        ([1], pl.Series([], dtype=pl.Int64), [-1]),
    ],
)
def test_lookup(ids: list[Any], known: pl.Series, codes: list[int]) -> None:
    found = lookup(pl.Series(ids, dtype=None if ids else pl.Int64), known)
    assert found.dtype == np.int32
    assert found.tolist() == codes


@pytest.mark.parametrize("known", [NUMBERS, UNSORTED, TEXT])
def test_the_index_and_lookup_agree(known: pl.Series) -> None:
    index = IdIndex(known)
    for value in [*known, *map(str, known), 99, "x"]:
        code = int(lookup(pl.Series([value]), known)[0])
        assert index.find(value) == (None if code < 0 else code)


def test_encode_names_unknown_ids() -> None:
    assert encode(["20", "10"], NUMBERS, "item").tolist() == [1, 0]
    with pytest.raises(InputError, match=r"unknown user id: 'd'; the data set has 3 users \(String ids such as 'a'\)"):
        encode(["a", "d"], TEXT, "user")


def test_named() -> None:
    assert named(pl.Series([1, 2])) == "1, 2"
    assert named(pl.Series(range(7))) == "0, 1, 2, 3, 4 and 2 more"


def test_nearest() -> None:
    titles = pl.Series(["Heat", None, "Heathers"])
    assert nearest("heat", NUMBERS, titles) == ["10 ('Heat')", "30 ('Heathers')"]
    assert nearest("2", NUMBERS, titles) == ["20"]
    assert nearest("", NUMBERS) == []
