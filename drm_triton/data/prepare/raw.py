"""What a source gets, a `FileFormat`, and what it returns, `RawInteractions`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import polars as pl

from drm_triton.names import SplitPart


@dataclass(frozen=True)
class FileFormat:
    """How to read the input files. A field that is None is recognised from the file.

    Attributes
    ----------
    user, item, rating, timestamp : column names; "" ignores the ratings or times
    weight : name of the column of weights; None for no weights
    columns : column names by position, for a file without header: the five names above; others are skipped
    separator : separator between the fields of a text file
    encoding : encoding of a text file that is not UTF-8
    leading : what each line of source lists begins with: user, count or none
    titles : path of a table of item ids and titles
    """

    user: str | None = None
    item: str | None = None
    rating: str | None = None
    timestamp: str | None = None
    weight: str | None = None
    columns: Sequence[str] | None = None
    separator: str | None = None
    encoding: str | None = None
    leading: str | None = None
    titles: str | None = None


@dataclass(frozen=True)
class RawTable:
    """The interactions of one file.

    Attributes
    ----------
    name : name of the file in messages
    frame : columns ``user``, ``item`` and, if the file has them, ``rating`` and ``timestamp``. With weights, also
        ``weight``. If a row of the file has several interactions, also ``row``: its number, from 0, for messages.
    locate : returns the place of the damage in a file that cannot be read, such as "line 17", or ""
    quick : the same interactions, faster to read, but reading fails if a value has an unexpected type
    unit : what messages call a row of the file
    columns : names of all columns of the file, if the user can choose among them
    part : train, valid or test if the files are already split; either all tables have a part or none
    """

    name: str
    frame: pl.LazyFrame
    locate: Callable[[], str] = str
    quick: pl.LazyFrame | None = None
    unit: str = "row"
    columns: Sequence[str] = ()
    part: SplitPart | None = None


@dataclass(frozen=True)
class RawInteractions:
    """Interactions as read from a source, one row each.

    Attributes
    ----------
    tables : one table for each file, in the given order
    text : bool
        The ids come from text files, where 17 and "17" look the same. Whole numbers become integers, unless an id
        such as 007 would change. Blanks around an id are removed.
    titles : LazyFrame, optional
        Columns ``item`` and ``title``.
    files : paths
        The input files. Their checksums are recorded.
    own_filter : (description, function), optional
        A filter that belongs to the source. It runs before all others, on a frame with ``user``, ``item``, ``rating``.
    weight : str, optional
        The column that the weights come from, for the record.
    """

    tables: Sequence[RawTable]
    text: bool = False
    titles: pl.LazyFrame | None = None
    files: Sequence[Path] = field(default_factory=tuple)
    own_filter: tuple[str, Callable[[pl.LazyFrame], pl.LazyFrame]] | None = None
    weight: str | None = None

    @property
    def name(self) -> str:
        """What messages call the input."""
        names = [table.name for table in self.tables]
        return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"

    @property
    def is_split(self) -> bool:
        """Whether the files are already split into train, test and perhaps valid."""
        return self.tables[0].part is not None

    @property
    def has_columns(self) -> bool:
        """Whether the user can choose the column of a rating or a time."""
        return any(table.columns for table in self.tables)
