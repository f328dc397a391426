"""Helpers of the tests of data sets."""

from pathlib import Path
from typing import Any, Protocol

import pytest

from drm_triton import Dataset
from drm_triton.data.prepare.build import BuildOptions
from drm_triton.data.prepare.pipeline import prepare
from drm_triton.data.prepare.raw import FileFormat
from drm_triton.data.prepare.sources import find_source
from drm_triton.names import SplitName


def ids(data: Dataset) -> tuple[list[Any], list[Any]]:
    """Return the external ids of users and items."""
    return data.user_ids.to_list(), data.item_ids.to_list()


def titles(data: Dataset) -> list[str | None]:
    """Return the titles of the items, which the data set must have."""
    assert data.item_titles is not None
    return data.item_titles.to_list()


class MakeTable(Protocol):
    def __call__(
        self,
        content: str | bytes,
        name: str = ...,
        split: SplitName = ...,
        min_rating: float | None = ...,
        **fields: Any,
    ) -> Dataset: ...


@pytest.fixture
def table(tmp_path: Path) -> MakeTable:
    """Return a function that prepares a data set from the content of a table."""

    def make(
        content: str | bytes,
        name: str = "data.csv",
        split: SplitName = "random",
        min_rating: float | None = None,
        **fields: Any,
    ) -> Dataset:
        file = tmp_path / name
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
        options = BuildOptions(min_rating=min_rating, split=split)
        return prepare(find_source("table"), [file], tmp_path / "out", FileFormat(**fields), options, overwrite=True)

    return make
