"""What a source gets, a `FileFormat`, and what it returns, `RawInteractions`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

import polars as pl

from drm_triton.data.prepare.failures import read_errors
from drm_triton.errors import InputError
from drm_triton.names import WEIGHT_RANGE, DecimalMark, SplitPart

SKIP_LINES = "; or give `skip_bad_rows` to leave out all such lines"  # advice about a file that cannot be read
SKIP_ROWS = ", or give `skip_bad_rows` to leave out all such rows"  # advice about a row that cannot be used
DATE_ORDERS = ("day-first", "month-first")  # values of `date_format` besides patterns


@dataclass(frozen=True)
class FileFormat:
    """How to read the input files. A field that is None is recognised from the file.

    Attributes
    ----------
    user, item, rating, timestamp : column names; "" ignores the ratings or times
    weight : name of the column of weights; None for no weights
    event : name of the column of event types, with `event_weight`
    columns : column names by position, for a file without header: the six names above; others are skipped
    separator : separator between the fields of a text file
    encoding : encoding of a text file that is not UTF-8
    decimal : point or comma: the decimal mark of numbers in text. The other mark may group digits.
    date_format : day-first, month-first, or a pattern such as %d/%m/%Y %H:%M
    event_weight : event type -> weight of its rows; rows of other types are left out. None to count all alike
    skip_bad_rows : True to leave out rows that cannot be used; None to refuse them
    leading : what each line of source lists begins with: user, count or none
    titles : path of a table of item ids and titles
    """

    user: str | None = None
    item: str | None = None
    rating: str | None = None
    timestamp: str | None = None
    weight: str | None = None
    event: str | None = None
    columns: Sequence[str] | None = None
    separator: str | None = None
    encoding: str | None = None
    decimal: str | None = None
    date_format: str | None = None
    event_weight: Mapping[str, float] | None = None
    skip_bad_rows: bool | None = None
    leading: str | None = None
    titles: str | None = None

    def __post_init__(self) -> None:
        if self.decimal not in (None, *get_args(DecimalMark)):
            raise InputError(f"unknown `decimal` {self.decimal!r}: choose point or comma")
        if self.date_format not in (None, *DATE_ORDERS) and "%" not in str(self.date_format):
            raise InputError(
                f"`date_format` {self.date_format!r} must be {' or '.join(DATE_ORDERS)}, or a pattern such as "
                "%d/%m/%Y %H:%M"
            )
        if self.event_weight is None and self.event:
            raise InputError("`event` needs `event_weight`, the events to keep and their weights, such as view=1,buy=5")
        if self.event_weight is not None and self.weight:
            raise InputError("`event_weight` and `weight` both give the weights: leave out one of them")
        if self.event_weight is not None and not self.event_weight:
            raise InputError("`event_weight` names no event: give for example view=1,buy=5")
        for event, weight in (self.event_weight or {}).items():
            if not isinstance(weight, int | float) or not WEIGHT_RANGE[0] <= weight <= WEIGHT_RANGE[1]:
                raise InputError(
                    f"`event_weight` of {event!r} must be a number from {WEIGHT_RANGE[0]:g} to {WEIGHT_RANGE[1]:g}, "
                    f"got {weight!r}; to leave out these events, do not name them"
                )


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
    repair : returns the table without the lines that cannot be read, if the file consists of lines
    skipped, first_skipped : number of lines that were left out, and the first of them, for messages
    rows_before_skipped : number of rows before the first of them
    """

    name: str
    frame: pl.LazyFrame
    locate: Callable[[], str] = str
    quick: pl.LazyFrame | None = None
    unit: str = "row"
    columns: Sequence[str] = ()
    part: SplitPart | None = None
    repair: Callable[[], RawTable] | None = None
    skipped: int = 0
    first_skipped: str = ""
    rows_before_skipped: int = 0

    @contextmanager
    def read_errors(self) -> Iterator[None]:
        """Raise an InputError that explains whatever fails while the file is read, and where."""
        try:
            with read_errors(self.name, self.locate):
                yield
        except InputError as error:
            raise InputError(f"{error}{SKIP_LINES if self.repair else ''}") from error


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
    title_columns : mapping
        Of a table of titles that the user gave: its ``file``, and its columns of ``item`` and ``title``.
    files : paths
        The input files. Their checksums are recorded.
    own_filter : (description, function), optional
        A filter that belongs to the source. It runs before all others, on a frame with ``user``, ``item``, ``rating``.
    weight : str, optional
        The column that the weights come from, for the record.
    roles : role -> column, as found in the files; for the record
    ignored : the other columns of the files
    notes : advice about the columns
    file_format : FileFormat
        How to read values: decimal mark, dates, events, bad rows.
    """

    tables: Sequence[RawTable]
    text: bool = False
    titles: pl.LazyFrame | None = None
    title_columns: Mapping[str, str] = field(default_factory=dict)
    files: Sequence[Path] = field(default_factory=tuple)
    own_filter: tuple[str, Callable[[pl.LazyFrame], pl.LazyFrame]] | None = None
    weight: str | None = None
    roles: Mapping[str, str] = field(default_factory=dict)
    ignored: Sequence[str] = ()
    notes: Sequence[str] = ()
    file_format: FileFormat = field(default_factory=FileFormat)

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
