"""Data frames of other libraries as Polars frames."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import polars as pl


def from_pandas(frame: Any, names: Sequence[str]) -> pl.DataFrame:
    """Return some columns of a pandas frame as a Polars frame, without pyarrow. Missing values become null."""
    columns = [str(c) for c in frame.columns]
    return pl.DataFrame({name: _to_series(frame.iloc[:, columns.index(name)]) for name in names})


def is_pandas(value: object) -> bool:
    """Return whether a value is a frame, a series or an index of pandas, without importing pandas."""
    return type(value).__module__.partition(".")[0] == "pandas"


def to_pandas(frame: pl.DataFrame) -> Any:
    """Return a frame of ids, numbers and text as a pandas frame, without pyarrow. Missing numbers become NaN."""
    import pandas as pd

    return pd.DataFrame({column.name: _values(column) for column in frame})


def _values(column: pl.Series) -> Any:
    return column.to_list() if column.dtype == pl.String else column.to_numpy()


def _to_series(column: Any) -> pl.Series:
    values = column.to_numpy()
    if values.dtype.kind in "iub":
        return pl.Series(values)
    if values.dtype.kind == "M":
        return pl.Series(values.astype("datetime64[us]"))
    missing = column.isna().to_numpy()
    listed = values.tolist()
    return pl.Series([None if gone else value for value, gone in zip(listed, missing, strict=True)], strict=False)
