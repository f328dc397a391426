"""The description of a source of data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from drm_triton.data.leaderboards import PublicSplit
from drm_triton.data.prepare.inputs import Inputs
from drm_triton.data.prepare.raw import FileFormat, RawInteractions


@dataclass(frozen=True)
class Published:
    """Statistics of a data set as printed in the paper, rounded."""

    users: int
    items: int
    interactions: int


@dataclass(frozen=True)
class Source:
    """A source of data: where to get its files, and how to read them.

    Attributes
    ----------
    name, summary : for the command line
    origin : where to get the data
    licence : what its owner allows
    layout : the format of its files
    read : reads the user's files as interactions
    wanted : the file to put into data/raw/<name>
    published : the statistics in the paper, if the paper uses the data
    min_rating, min_user, min_item : default filters
    reads : the fields of `FileFormat` that `read` uses; any other is refused
    url : public address of the file; its checksum is published at `url` + ".md5"
    takes_parts : a file for each of train, valid and test may be given instead of `raw`
    public_split : sizes and published results of the split, if the files are a public split
    """

    name: str
    summary: str
    origin: str
    licence: str
    layout: str
    read: Callable[[Inputs, FileFormat], RawInteractions]
    wanted: str | None = None
    published: Published | None = None
    min_rating: float | None = None
    min_user: int = 1
    min_item: int = 1
    reads: frozenset[str] = frozenset()
    url: str | None = None
    takes_parts: bool = False
    public_split: PublicSplit | None = None
