"""Features of items or users: their attributes as a sparse matrix. `drm_triton.ranking.cold` predicts vectors from it.

Each attribute becomes a block of columns, by its type:

category, truth value   one column for each value
tags                    one column for each tag
text                    one column for each word; text is a column of mostly different values of several words
number, date            one column for each of nine knots, which are quantiles of the values; a value has weights at the
                        two knots next to it, so a linear map of the features is piecewise linear in the value. The
                        values are those of rows with interactions. A value beyond them counts as the nearest: nothing
                        is known about it

A value, tag or word of a single row is left out: it says nothing about other rows. If a block would be too wide, its
columns are buckets, and a hash (BLAKE2b) says which bucket a value belongs to. The matrix depends on the table and on
which rows have interactions, so a model that keeps the data needs to keep nothing else.
"""

from __future__ import annotations

import hashlib

import numpy as np
import polars as pl
import scipy.sparse
from numpy.typing import NDArray

from drm_triton.data.attributes import attributes

MAX_FEATURES = 2048  # of a matrix: a regression on so many takes a few seconds
MAX_BLOCK = 1024  # columns of an attribute
TEXT_WORDS = 3  # a column of text has at least so many words in the mean,
TEXT_DISTINCT = 0.5  # and at least this share of its values are different
KNOTS = 9  # of a number


def features(table: pl.DataFrame, examples: NDArray[np.bool_] | None = None) -> scipy.sparse.csr_matrix:
    """Return the features of the rows of a table of items or users: float32 [rows, F].

    The rows have length 1, or 0 where a row has no attributes.

    Parameters
    ----------
    table : table of a data set, by code; its columns `id` and `title` are no attributes
    examples : [rows], which rows have interactions; default: all

    Examples
    --------
    >>> table = pl.DataFrame({"id": [1, 2, 3], "genre": ["jazz", "jazz", None], "tags": [["a"], ["a", "b"], ["b"]]})
    >>> (features(table).toarray() ** 2).round(2).tolist()
    [[0.5, 0.5, 0.0], [0.5, 0.25, 0.25], [0.0, 0.0, 1.0]]
    """
    names = attributes(table)
    widest = max(2, min(MAX_BLOCK, MAX_FEATURES // max(len(names), 1)))
    examples = np.ones(len(table), dtype=bool) if examples is None else examples
    blocks = [_block(table[name], examples, widest) for name in names]
    empty = scipy.sparse.csr_matrix((len(table), 0), dtype=np.float32)
    joined = scipy.sparse.hstack([empty, *blocks], format="csr", dtype=np.float32)
    lengths = np.sqrt(joined.multiply(joined).sum(1)).A1
    return scipy.sparse.diags(1 / np.maximum(lengths, 1e-30), dtype=np.float32) @ joined


def _block(column: pl.Series, examples: NDArray[np.bool_], widest: int) -> scipy.sparse.csr_matrix:
    """Return the features of one attribute: [rows, at most `widest`]."""
    if column.dtype == pl.List:
        return _values(column, widest)
    if column.dtype == pl.Boolean:
        return _values(column.cast(pl.String).reshape((-1, 1)).arr.to_list(), widest)
    if column.dtype != pl.String:
        return _number(column, examples, widest)
    words = column.str.to_lowercase().str.extract_all(r"\w+")
    known = column.drop_nulls()
    distinct = known.n_unique() >= TEXT_DISTINCT * len(known)
    is_text = distinct and words.drop_nulls().list.len().sum() >= TEXT_WORDS * len(known)
    return _values(words if is_text else column.reshape((-1, 1)).arr.to_list(), widest)


def _values(lists: pl.Series, widest: int) -> scipy.sparse.csr_matrix:
    """Return the features of lists of values, one column for each value; the rows have length 1."""
    rows = pl.DataFrame({"row": np.arange(len(lists)), "value": lists.alias("value")}).explode("value").drop_nulls()
    rows = rows.unique().filter(pl.len().over("value") > 1).sort("row", "value")
    vocabulary = rows["value"].unique().sort()
    if len(vocabulary) <= widest:
        columns = np.arange(len(vocabulary))
    else:
        columns = np.array([_bucket(value, widest) for value in vocabulary], dtype=np.int64)
    code = rows.select(pl.col("value").replace_strict(vocabulary, pl.Series(columns), return_dtype=pl.Int64))
    lengths = rows.select(1 / pl.len().over("row").cast(pl.Float32).sqrt()).to_series()
    width = min(len(vocabulary), widest)
    where = (rows["row"].to_numpy(), code.to_series().to_numpy())
    return scipy.sparse.csr_matrix((lengths.to_numpy(), where), (len(lists), width), dtype=np.float32)


def _bucket(value: str, buckets: int) -> int:
    """Return the bucket of a value: the same on every machine."""
    return int.from_bytes(hashlib.blake2b(value.encode(), digest_size=8).digest(), "little") % buckets


def _number(column: pl.Series, examples: NDArray[np.bool_], widest: int) -> scipy.sparse.csr_matrix:
    """Return the features of numbers or dates: the weights of the two knots next to a value, which add up to 1."""
    raw: NDArray[np.float64] = column.to_physical().cast(pl.Float64).to_numpy()
    known = ~np.isnan(raw)
    fitted, places = raw[known & examples], np.linspace(0, 1, min(KNOTS, widest))
    knots = np.unique(np.quantile(fitted, places)) if len(fitted) else fitted
    if len(knots) < 2:  # the same for all rows
        return scipy.sparse.csr_matrix((len(raw), 0), dtype=np.float32)
    values = np.clip(raw[known], knots[0], knots[-1])
    right = np.clip(np.searchsorted(knots, values), 1, len(knots) - 1)
    weight = (values - knots[right - 1]) / (knots[right] - knots[right - 1])
    rows = np.tile(np.flatnonzero(known), 2)
    entries = np.concatenate([1 - weight, weight]), (rows, np.concatenate([right - 1, right]))
    return scipy.sparse.csr_matrix(entries, (len(raw), len(knots)), dtype=np.float32)
