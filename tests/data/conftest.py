"""Helpers of the tests of data sets."""

from typing import Any

from drm_triton import Dataset


def ids(data: Dataset) -> tuple[list[Any], list[Any]]:
    """Return the external ids of users and items."""
    return data.user_ids.to_list(), data.item_ids.to_list()


def titles(data: Dataset) -> list[str | None]:
    """Return the titles of the items, which the data set must have."""
    assert data.item_titles is not None
    return data.item_titles.to_list()
