"""What a source is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from drm_triton.data.prepare.columns import Raw
from drm_triton.data.prepare.inputs import Inputs
from drm_triton.data.prepare.tables import Reading


@dataclass(frozen=True)
class Published:
    """Statistics of a prepared data set as the paper prints them, rounded as there."""

    users: int
    items: int
    interactions: int


@dataclass(frozen=True)
class Source:
    """Where a kind of data comes from, and how to read it.

    Attributes
    ----------
    name, summary : for the command line
    origin : where to get it
    licence : what its owner allows
    layout : the format of its files
    read : turns the user's files into interactions
    wanted : the file to put under the raw folder
    published : the paper's statistics, if the paper uses it
    min_rating, min_user, min_item : default filters
    reads : the fields of `Reading` it heeds; any other is refused rather than ignored
    url : public address for --download; its checksum is published at `url` + ".md5"
    """

    name: str
    summary: str
    origin: str
    licence: str
    layout: str
    read: Callable[[Inputs, Reading], Raw]
    wanted: str | None = None
    published: Published | None = None
    min_rating: float | None = None
    min_user: int = 1
    min_item: int = 1
    reads: frozenset[str] = frozenset()
    url: str | None = None
