"""What every source hands to the pipeline, and which column of a table is which."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polars as pl

from drm_triton.errors import InputError

ROLES = ("user", "item", "rating", "timestamp")

# Usual spellings, compared without case, spaces, dots, dashes and underscores; "userId" is "user" with an id.
SPELLINGS: dict[str, frozenset[str]] = {
    role: frozenset(words.split())
    for role, words in {
        "user": "user users u customer client member reviewer visitor account profile player listener reader person "
        "playlist session viewer subscriber",
        "item": "item items i movie m film product asin parentasin song track artist album book isbn business anime "
        "game app article news video recipe model show post photo poi venue location restaurant beer hotel sku ad doc "
        "document content course job",
        "rating": "rating ratings rate score scores stars star starrating overall weight value preference plays "
        "playcount reviewscore reviewrating userrating",
        "timestamp": "timestamp time ts date datetime unixtime unixreviewtime reviewtime eventtime createdat created "
        "reviewdate createtime ratedat tstamp when",
    }.items()
}


@dataclass(frozen=True)
class Part:
    """The interactions of one file.

    Attributes
    ----------
    name : the file, for messages
    frame : columns ``user``, ``item`` and, where there are such, ``rating``, ``timestamp``, and ``row`` (a number from
        0, for messages) if a row of the file holds several interactions
    locate : called when the file turns out to be damaged; returns where, such as "line 17", or ""
    quick : the same, quicker to read, but fails where values are not of the type that is expected
    unit : what a row of the file is called in messages
    """

    name: str
    frame: pl.LazyFrame
    locate: Callable[[], str] = str
    quick: pl.LazyFrame | None = None
    unit: str = "row"


@dataclass(frozen=True)
class Raw:
    """Interactions as read from a source, one row each.

    Attributes
    ----------
    parts : the files, in the order given
    text : bool
        The ids were read from a text file, where 17 and "17" look the same: whole numbers become integers, unless
        some id (such as 007) would not come back as it was written. Blanks around an id do not belong to it.
    named : bool
        The user can say which column is which, and may be advised to.
    python : bool
        The user calls a function, and options are its arguments.
    titles : LazyFrame, optional
        Columns ``item`` and ``title``.
    files : paths
        The input files, whose checksums are recorded.
    own_filter : (description, function), optional
        A filter particular to the source, applied before all others to a frame with ``user``, ``item``, ``rating``.
    """

    parts: Sequence[Part]
    text: bool = False
    titles: pl.LazyFrame | None = None
    files: Sequence[Path] = field(default_factory=tuple)
    own_filter: tuple[str, Callable[[pl.LazyFrame], pl.LazyFrame]] | None = None
    named: bool = False
    python: bool = False

    def option(self, name: str) -> str:
        """Spell an option as this user would give it: ``--min-rating`` or ``min_rating``."""
        return name.replace("-", "_") if self.python else f"--{name}"


def find_columns(
    columns: Sequence[str], given: Mapping[str, str | None], where: str, option: str = "--"
) -> dict[str, str]:
    """Decide which column plays which role.

    Parameters
    ----------
    columns : names seen in the table
    given : role -> column name, None to recognise the usual spellings, or "" to do without (rating, timestamp)
    where : the file or frame, for messages
    option : what stands before a role in messages, "--" for the command line

    Returns
    -------
    dict
        role -> column; ``rating`` and ``timestamp`` may be absent. Several candidates for one of those two count as
        none, as no step needs it unless it is named.

    Raises
    ------
    InputError
        If a named column is missing, or the user's or the item's column is missing or ambiguous.
    """
    seen = ", ".join(repr(c) for c in columns)
    found: dict[str, str] = {}
    for role in ROLES:
        name = given.get(role)
        if name == "" and role in ("rating", "timestamp"):
            continue
        if name is not None:
            matches = [c for c in columns if c == name] or [c for c in columns if plain(c) == plain(name)]
            if len(matches) != 1:
                raise InputError(
                    f"{where} has no column {name!r} (asked for by {option}{role}); its columns are {seen}"
                )
            found[role] = matches[0]
            continue
        matches = [c for c in columns if spells(c, role)]
        if len(matches) == 1:
            found[role] = matches[0]
        elif role in ("user", "item"):
            problem = (
                f"several columns of {where} could be the {role}'s: {', '.join(map(repr, matches))}"
                if matches
                else f"{where} has no column recognised as the {role}'s; its columns are {seen}"
            )
            hint = _headerless(columns, matches) if option else ""  # of a frame the advice cannot be followed
            raise InputError(f"{problem}; name it with {option}{role}{hint}")
    if found["user"] == found["item"]:
        raise InputError(
            f"{where}: column {found['user']!r} cannot be both user and item; name them with {option}user, {option}item"
        )
    return found


def _headerless(columns: Sequence[str], matches: Sequence[str]) -> str:
    """Hint for a file whose first row is data."""
    data_like = not matches and any(c.strip().lstrip("-").replace(".", "", 1).isdigit() for c in columns)
    return (
        ", or, as the first row looks like data, give --columns user,item,... for a file without header"
        if data_like
        else ""
    )


def spells(name: str, role: str) -> bool:
    """Whether a column's name is a usual spelling of a role.

    Examples
    --------
    >>> spells("movieId", "item"), spells("User_ID", "user"), spells("title", "item")
    (True, True, False)
    """
    word = plain(name)
    return word in SPELLINGS[role] or (role in ("user", "item") and word.removesuffix("id") in SPELLINGS[role])


def plain(name: str) -> str:
    """Reduce a column's name to its letters and digits, in one case."""
    return "".join(ch for ch in name.casefold() if ch.isalnum())


def raw_from_frame(frame: Any, names: Mapping[str, str | None]) -> Raw:
    """Take interactions from a polars DataFrame or LazyFrame, or a pandas DataFrame."""
    if isinstance(frame, pl.LazyFrame | pl.DataFrame):
        columns = frame.lazy().collect_schema().names()
    elif hasattr(frame, "columns") and hasattr(frame, "to_dict"):
        columns = [str(c) for c in frame.columns]
    else:
        raise InputError(f"from_frame takes a polars or pandas frame, not {type(frame).__name__}")
    roles = find_columns(columns, names, "the frame", option="")
    if not isinstance(frame, pl.LazyFrame | pl.DataFrame):
        frame = from_pandas(frame, list(roles.values()))
    chosen = frame.lazy().select(pl.col(name).alias(role) for role, name in roles.items())
    return Raw([Part("the frame", chosen)], named=True, python=True)


def from_pandas(frame: Any, names: Sequence[str]) -> pl.DataFrame:
    """Take columns of a pandas frame."""
    columns = [str(c) for c in frame.columns]
    return pl.DataFrame({name: _column(frame.iloc[:, columns.index(name)]) for name in names})


def _column(column: Any) -> pl.Series:
    """Convert a pandas column without needing pyarrow; missing values of any kind become null."""
    values = column.to_numpy()
    if values.dtype.kind in "iub":
        return pl.Series(values)
    if values.dtype.kind == "M":
        return pl.Series(values.astype("datetime64[us]"))
    missing = column.isna().to_numpy()
    listed = values.tolist()
    return pl.Series([None if gone else value for value, gone in zip(listed, missing, strict=True)], strict=False)
