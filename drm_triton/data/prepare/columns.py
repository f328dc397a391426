"""Which column of a table is which."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from drm_triton.errors import InputError

ROLES = ("user", "item", "rating", "timestamp", "weight", "event")


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Common column names, compared without case, blanks, dots, dashes and underscores. "userId" counts as "user".
SPELLINGS: dict[str, frozenset[str]] = {
    role: _words(words)
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
        "weight": "",  # never recognised: a column of weights has to be named
        "event": "event eventtype eventname action actiontype behavior behaviour behaviortype behaviourtype "
        "interactiontype",
    }.items()
}

# Names of timestamps that count if the table has none of those above.
_OTHER_TIMES = _words(
    "orderdate orderedat ordertime ordertimestamp purchasedate purchasedat purchasetime purchasetimestamp "
    "transactiondate transactiontime invoicedate eventdate eventtimestamp clicktime clickedat viewtime viewedat "
    "watchedat watchdate listenedat playedat readat visitedat checkintime dateadded addedat borrowdate loandate "
    "timestampms unixtimestamp ratingtimestamp ratingdate reviewtimestamp reviewedat starttime"
)

_NUMBER = re.compile(r"[+-]?\d+(?:[.,]\d+)?")
_TIME = re.compile(r"\d{9,}(?:\.\d+)?|\d{1,4}[-/.]\d{1,2}[-/.]\d{1,4}.*")  # unix times and dates

# Names of columns that often contain weights. They are not used unless they are named, so the user is told.
WEIGHT_NAMES = _words(
    "weight weights plays playcount nplays numplays count counts n quantity qty listens listencount views viewcount "
    "clicks frequency freq amount times"
)


class NoColumnError(InputError):
    """No column is recognised as the users, or as the items."""


class NoHeaderError(NoColumnError):
    """The same, and the first row of the file looks like data.

    Attributes
    ----------
    columns : what the columns seem to contain: `FileFormat.columns` for this file
    """

    def __init__(self, problem: NoColumnError, row: Sequence[str]) -> None:
        self.columns = _likely_columns(row)
        super().__init__(
            f"{problem}; the first row looks like data: if the file has no header, name the columns by position, here "
            f"perhaps `columns={','.join(self.columns)}`"
        )


def find_columns(columns: Sequence[str], given: Mapping[str, str | None], where: str) -> dict[str, str]:
    """Decide which column has which role.

    Parameters
    ----------
    columns : all column names of the table
    given : role -> column name; None to recognise the column by its name, "" for no rating, timestamp or weight
    where : name of the file or frame in messages

    Returns
    -------
    dict
        role -> column. ``rating``, ``timestamp`` and ``event`` may be missing: several candidates for one of them count
        as none, because no step needs it unless it is named. ``weight`` is there only if it is given.

    Raises
    ------
    InputError
        If a given column does not exist, or if the column of users or items is ambiguous. If none is recognised, it is
        a NoColumnError.
    """
    listed = listing(columns)
    found: dict[str, str] = {}
    for role in ROLES:
        name = given.get(role)
        if name == "" and role not in ("user", "item"):
            continue
        if name is not None:
            matches = [c for c in columns if c == name] or [c for c in columns if plain(c) == plain(name)]
            if len(matches) != 1:
                raise InputError(f"{where} has no column {name!r}, given as `{role}`; its columns are {listed}")
            found[role] = matches[0]
            continue
        matches = [c for c in columns if spells(c, role)]
        if role == "timestamp" and not matches:
            matches = [c for c in columns if plain(c) in _OTHER_TIMES]
        if len(matches) == 1:
            found[role] = matches[0]
        elif role in ("user", "item"):
            if matches:
                candidates = listing(matches)
                raise InputError(
                    f"several columns of {where} could contain the {role}s: {candidates}; name one as `{role}`"
                )
            raise NoColumnError(
                f"{where} has no column that is recognised as the {role}s; its columns are {listed}; "
                f"name one as `{role}`"
            )
    if found["user"] == found["item"]:
        raise InputError(
            f"{where}: column {found['user']!r} cannot be both user and item; name the columns as `user` and `item`"
        )
    return found


def looks_like_data(row: Sequence[str]) -> bool:
    """Return whether the first row of a file has a number, which is not a name of a column."""
    return any(_NUMBER.fullmatch(field.strip()) for field in row)


def _likely_columns(row: Sequence[str]) -> tuple[str, ...]:
    """Guess what the columns of a file without a header contain, from its first row.

    Examples
    --------
    >>> _likely_columns(["1", "1193", "5", "978300760"])
    ('user', 'item', 'rating', 'timestamp')
    >>> _likely_columns(["ann", "x", "2024-04-02", "blue"])
    ('user', 'item', 'timestamp')
    """
    names = ["user", "item"]
    for field in row[2:]:
        text = field.strip()
        role = "timestamp" if _TIME.fullmatch(text) else "rating" if _NUMBER.fullmatch(text) else "-"
        names.append("-" if role in names else role)
    while names[-1] == "-":
        names.pop()
    return tuple(names)


def spells(name: str, role: str) -> bool:
    """Return whether `name` is a common column name for a role.

    Examples
    --------
    >>> spells("movieId", "item"), spells("User_ID", "user"), spells("title", "item")
    (True, True, False)
    """
    word = plain(name)
    return word in SPELLINGS[role] or (role in ("user", "item") and word.removesuffix("id") in SPELLINGS[role])


def listing(names: Sequence[str], most: int = 20) -> str:
    """Return names for a message, the first of them if there are many.

    Examples
    --------
    >>> listing(["a", "b", "c"], most=2)
    "'a', 'b' and 1 more"
    """
    listed = ", ".join(repr(name) for name in names[:most])
    return listed if len(names) <= most else f"{listed} and {len(names) - most:,} more"


def plain(name: str) -> str:
    """Reduce a column name to its letters and digits, in lower case."""
    return "".join(character for character in name.casefold() if character.isalnum())
