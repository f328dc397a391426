"""Features of attributes: the columns of each type, hashing, missing values, and that they are always the same."""

import datetime
import string

import numpy as np
import polars as pl
import pytest
import scipy.sparse

from drm_triton.data import features as module
from drm_triton.data.features import features


def dense(**columns: object) -> np.ndarray:
    """Return the features of a table with these attributes."""
    table = pl.DataFrame(columns)
    found = features(table.insert_column(0, pl.int_range(len(table), eager=True).alias("id")))
    assert isinstance(found, scipy.sparse.csr_matrix)
    assert found.dtype == np.float32
    lengths = np.sqrt(found.multiply(found).sum(1)).A1
    assert np.all(np.isclose(lengths, 1, atol=1e-6) | (lengths == 0))
    return found.toarray()


def test_categories_have_a_column_each_and_missing_ones_none() -> None:
    found = dense(genre=["rock", "jazz", None, "rock", "jazz"])
    np.testing.assert_array_equal(found, [[0, 1], [1, 0], [0, 0], [0, 1], [1, 0]])
    np.testing.assert_array_equal(dense(sale=[True, False, None, True, False]), found)


def test_tags_share_the_length_of_their_attribute() -> None:
    found = dense(tags=[["a", "b"], ["b", "b"], [], None, ["a", "b", "once"]])
    np.testing.assert_allclose(found**2, [[0.5, 0.5], [0, 1], [0, 0], [0, 0], [0.5, 0.5]], rtol=1e-6)
    both = dense(tags=[["a", "b"], ["a", "b"]], genre=["x", "x"])
    np.testing.assert_allclose(both**2, [[0.25, 0.25, 0.5]] * 2, rtol=1e-6)  # an attribute counts once, as a whole


def test_what_a_single_row_has_is_left_out() -> None:
    assert dense(sku=["x1", "x2", "x3"]).shape == (3, 0)
    assert dense(sku=["x1", "x2", "x2"]).tolist() == [[0], [1], [1]]


def test_numbers_are_piecewise_linear() -> None:
    values = np.random.default_rng(0).permutation(np.linspace(5, 85, 801))
    found = dense(price=[*values, None])
    assert found.shape == (802, module.KNOTS)
    assert np.all(np.count_nonzero(found[:-1], axis=1) <= 2)
    assert not found[-1].any()
    weights = found[:-1] / found[:-1].sum(1, keepdims=True)
    np.testing.assert_allclose(weights @ np.linspace(5, 85, module.KNOTS), values, rtol=1e-5)  # knots are quantiles
    np.testing.assert_array_equal(
        dense(price=[1, 2, 3]), dense(price=[datetime.date(2024, 1, day) for day in (1, 2, 3)])
    )
    assert dense(price=[4.0, 4.0, None]).shape == (3, 0)  # the same for all rows
    assert dense(price=pl.Series([None, None], dtype=pl.Float64)).shape == (2, 0)


def test_knots_are_those_of_rows_with_interactions() -> None:
    """A number beyond those of the examples counts as the nearest of them."""
    table = pl.DataFrame({"id": range(6), "year": [1990, 1995, 2000, 2025, 971, 1992]})
    examples = np.array([True, True, True, False, False, False])
    found = features(table, examples).toarray()
    np.testing.assert_array_equal(found[3], found[2])
    np.testing.assert_array_equal(found[4], found[0])
    np.testing.assert_array_equal(found[:3], features(table[:3]).toarray())
    assert 0 < np.count_nonzero(found[5]) <= 2
    assert not (found[5] == found[0]).all()
    assert features(table, np.zeros(6, dtype=bool)).shape == (6, 0)


def test_long_text_is_taken_as_words() -> None:
    found = dense(plot=["A cat and a dog.", "The dog, the house!", "no CAT in sight here", None])
    assert found.shape == (4, 2)  # cat, dog
    assert (found > 0).tolist() == [[True, True], [False, True], [True, False], [False, False]]
    assert dense(name=["New York City"] * 4 + ["Rio de Janeiro"]).shape == (5, 1)  # repeated: a category


def test_wide_attributes_are_hashed_the_same_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [module._bucket(word, 1024) for word in ("rock", "jazz", "Ä")] == [281, 387, 988]
    monkeypatch.setattr(module, "MAX_BLOCK", 8)
    words = [[a, b] for a in string.ascii_lowercase for b in string.ascii_uppercase[:3]]
    found = dense(tags=words)
    assert found.shape == (78, 8)
    for (a, b), row in zip(words, found, strict=True):
        assert set(np.flatnonzero(row)) == {module._bucket(a, 8), module._bucket(b, 8)}


def test_many_attributes_do_not_make_too_many_columns() -> None:
    rng = np.random.default_rng(0)
    columns = {f"c{n}": [str(value) for value in rng.integers(0, 300, 2000)] for n in range(20)}
    assert dense(**columns).shape[1] <= module.MAX_FEATURES
    numbers = {f"x{n}": rng.random(50) for n in range(1500)}  # such as an embedding of texts
    assert dense(**numbers).shape == (50, 3000)
