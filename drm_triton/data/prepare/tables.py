"""Tables of any usual kind as lazy Polars frames: CSV and its kin, Parquet, JSON lines, JSON arrays."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import polars as pl

from drm_triton.data.prepare.columns import ROLES, Part, Raw, find_columns, plain, spells
from drm_triton.data.prepare.inputs import Input, Inputs, first_bad_line, reading
from drm_triton.errors import InputError

SEPARATORS = ("::", "\t", "|", ";", ",", " ")  # tried in this order; " " means any run of blanks
_NAMED = {"tab": "\t", "\\t": "\t", "comma": ",", "semicolon": ";", "pipe": "|", "space": " "}
_BY_SUFFIX = {".csv": ",", ".tsv": "\t", ".psv": "|", ".tab": "\t"}
_TITLES = frozenset("title name itemtitle itemname movietitle artistname songname trackname booktitle".split())  # noqa: SIM905
_LINE = "line"


@dataclass(frozen=True)
class Reading:
    """How to read the input: every field may be left to be recognised.

    Attributes
    ----------
    user, item, rating, timestamp : column names; "" for a rating or time that is to be ignored
    columns : names by position, for a file without header; other names than the four roles are skipped
    separator : between the fields of a text file
    encoding : of a text file that is not UTF-8
    leading : what a line of a lists file begins with: user, count or none
    titles : a table of item ids and titles
    """

    user: str | None = None
    item: str | None = None
    rating: str | None = None
    timestamp: str | None = None
    columns: Sequence[str] | None = None
    separator: str | None = None
    encoding: str | None = None
    leading: str | None = None
    titles: str | None = None


Kind = Literal["text", "lines", "typed"]
TABLE_FIELDS = frozenset({*ROLES, "columns", "separator", "encoding"})  # what a source that reads tables heeds


def read_tables(inputs: Inputs, files: Sequence[Input], how: Reading, titles: pl.LazyFrame | None = None) -> Raw:
    """Read files of one kind as interactions; the columns are found in each by name."""
    parts, kinds = [], set()
    given = {role: getattr(how, role) for role in ROLES}
    for file in files:
        frame, kind, locate = scan(inputs, file, how)
        with reading(file.name, locate):
            columns = frame.collect_schema().names()
        found = find_columns(columns, given, file.name)
        roles = [pl.col(name).alias(role) for role, name in found.items()]
        quick, unit = None, "row"
        if kind == "text":
            quick = scan(inputs, file, how, number=found.get("rating"))[0].select(roles)
            unit = "row" if how.columns else "data row"
        elif kind == "lines":
            quick, frame = frame.select(roles), scan(inputs, file, how, sample=None)[0]
            locate = partial(first_bad_line, file, partial(_is_row, columns=tuple(found.values())))
        parts.append(Part(file.name, frame.select(roles), locate, quick, unit))
        kinds.add(kind)
    return Raw(parts, text=kinds == {"text"}, titles=titles, files=[f.on_disk for f in files], named=True)


def read_titles(inputs: Inputs, file: Input, how: Reading) -> pl.LazyFrame:
    """Read a table of items: columns ``item`` and ``title``."""
    frame, _, _ = scan(inputs, file, how)
    with reading(file.name):
        columns = frame.collect_schema().names()
    title = next((c for c in columns if plain(c) in _TITLES), None)
    item = next((c for c in columns if plain(c) == "id"), None)
    item = item or next((c for c in columns if spells(c, "item")), None)
    if title is None or item is None:
        raise InputError(
            f"{file.name} needs a column of item ids (id, itemId, ...) and one of titles (title, name, ...); "
            f"its columns are {columns}"
        )
    return frame.select(pl.col(item).alias("item"), pl.col(title).alias("title"))


def scan(
    inputs: Inputs, file: Input, how: Reading, number: str | None = None, sample: int | None = 1000
) -> tuple[pl.LazyFrame, Kind, Callable[[], str]]:
    """Open one table.

    Parameters
    ----------
    number : str, optional
        Of a text file, the column that the reader itself is to parse as numbers.
    sample : int, optional
        Of JSON lines, how many decide the types of the columns; None for all of them.

    Returns
    -------
    frame : LazyFrame
        All its columns, by their own names or those of `how.columns`.
    kind : {"text", "lines", "typed"}
        Whether the values are uninterpreted text, JSON lines, or otherwise typed.
    locate : function
        Finds the damaged line of a file that could not be read, as "line 17".
    """
    if file.kind == "parquet":
        _has_names(file, how)
        return pl.scan_parquet(file.path), "typed", str
    if file.suffix in (".parquet", ".pq"):
        raise InputError(f"cannot read {file.name}: it is not a Parquet file, whatever its name says, or it is damaged")
    file = utf8(inputs, file, how)
    lines = head(file)
    if not any(line.strip() for line in lines):
        raise InputError(f"{file.name} is empty: give a file with interactions")
    first = next(line for line in lines if line.strip()).lstrip("\ufeff \t")
    if first.startswith("{") or file.suffix in (".jsonl", ".ndjson"):
        _has_names(file, how)
        file = inputs.without_mark(file)
        return pl.scan_ndjson(file.path, infer_schema_length=sample), "lines", partial(first_bad_line, file, _is_row)
    if first.startswith("[") and file.suffix == ".json":
        _has_names(file, how)
        file = inputs.without_mark(file)
        with reading(file.name):
            path = inputs.unpack(file) if file.kind == "gzip" else file.path
            return pl.read_json(path, infer_schema_length=None).lazy(), "typed", str
    with reading(file.name):
        frame, width = _scan_text(file, lines, how, number)
    return frame, "text", partial(first_bad_line, file, width)


def utf8(inputs: Inputs, file: Input, how: Reading) -> Input:
    """Return the file, or a copy of it in UTF-8 if `how` says that it is in another encoding."""
    if how.encoding is None or how.encoding.lower().replace("_", "-") in ("utf-8", "utf8"):
        return file
    return Input(file.name, inputs.unpack(file, how.encoding), file.on_disk)


def _has_names(file: Input, how: Reading) -> None:
    if how.columns:
        raise InputError(
            f"{file.name} names its own columns: leave --columns out, and use --user, --item, ... if needed"
        )


def _is_row(line: str, columns: Sequence[str] = ()) -> bool:
    """Whether a line is a JSON object in which `columns` are numbers or text, where it has them."""
    row = json.loads(line) if line.strip() else {}
    return isinstance(row, dict) and all(type(row.get(c)) in (str, int, float, type(None)) for c in columns)


def head(file: Input, rows: int = 20) -> list[str]:
    """Return the first lines of a text file, decompressed."""
    with reading(file.name):
        with file.path.open("rb") as handle:
            if handle.read(2) in (b"\xff\xfe", b"\xfe\xff"):
                raise InputError(f"{file.name} is in UTF-16, not UTF-8: give --encoding utf-16")
        column = lines_of(file, lossy=True).head(rows).collect().to_series()
    if column.str.contains("\0", literal=True).any():
        raise InputError(
            f"{file.name} has NUL bytes in its first lines, so it is not UTF-8 text: give --encoding utf-16-le or "
            "utf-16-be if it is in UTF-16, or another file"
        )
    return [line or "" for line in column]


def lines_of(file: Input, lossy: bool = False) -> pl.LazyFrame:
    """Return the lines of a text file as one column, `line`; null where a line is blank."""
    return pl.scan_csv(
        file.path,
        has_header=False,
        new_columns=[_LINE],
        separator="\x1e",  # a control character that text files do not have, so that a line is one field
        quote_char=None,
        infer_schema=False,
        encoding="utf8-lossy" if lossy else "utf8",
        glob=False,
    )


def named_separator(how: Reading) -> str | None:
    """Return the separator that is asked for by itself or by name, if one is."""
    separator = how.separator and _NAMED.get(how.separator, how.separator)
    if separator and set(separator) & set('"\r\n'):
        raise InputError(f"--separator {separator!r} cannot be used: quotation marks and line ends have other meanings")
    return separator


def guess_separator(lines: Sequence[str], suffix: str = "") -> str | None:
    """Return the separator that divides every line into the same number of fields, two or more, or None.

    Examples
    --------
    >>> guess_separator(["1::7::4.5", "2::9::3"])
    '::'
    >>> guess_separator(["user;score", "1;4,5"])
    ';'
    """
    lines = [line for line in lines if line.strip()]
    fitting = []
    for separator in SEPARATORS:
        counts = {len(_fields(line, separator)) for line in lines}
        if len(counts) == 1 and counts.pop() > 1:
            fitting.append(separator)
    usual = _BY_SUFFIX.get(suffix)
    if usual in fitting or (not fitting and usual and usual in lines[0]):
        return usual
    return fitting[0] if fitting else next((s for s in SEPARATORS if s in lines[0]), None)


def _fields(line: str, separator: str) -> list[str]:
    if separator == " ":
        return line.split()
    if _is_long(separator) or '"' not in line:
        return line.split(separator)
    return next(csv.reader([line], delimiter=separator), [])


def _is_long(separator: str) -> bool:
    """Whether Polars' CSV reader, which takes one byte, cannot take it."""
    return len(separator.encode()) > 1


def _scan_text(
    file: Input, lines: Sequence[str], how: Reading, number: str | None
) -> tuple[pl.LazyFrame, Callable[[str], bool]]:
    """Open a delimited file; also return a check that a line has no more fields than the first."""
    blank = next(k for k, line in enumerate(lines) if line.strip())  # lines before the header
    lines = lines[blank:]
    if "\r" in lines[0].rstrip("\r") and '"' not in lines[0]:
        raise InputError(
            f"the lines of {file.name} end with a carriage return alone: convert them, for example with "
            "`tr '\\r' '\\n'`"
        )
    separator = named_separator(how) or guess_separator(lines, file.suffix)
    if separator is None:
        raise InputError(
            f"{file.name}: no usual separator divides its first line {lines[0][:80]!r} into columns; give --separator"
        )
    first = [name.strip() for name in _fields(lines[0].lstrip("\ufeff"), separator)]
    names = list(how.columns) if how.columns else None
    if names:
        _check_positions(file.name, names, first)
    if separator == " " or _is_long(separator):
        return _split_lines(file, separator, names, first, skip=blank), lambda line: True

    def fits(line: str) -> bool:
        return len(_fields(line, separator)) <= len(first)

    # Tab- and pipe-separated files often hold quotation marks that mean nothing; a whole field in them means quoting.
    quoted = separator in ",;" or any(
        f[:1] == f[-1:] == '"' for line in lines for f in line.split(separator) if len(f) > 1
    )
    open_csv = partial(
        pl.scan_csv,
        file.path,
        has_header=names is None,
        skip_lines=blank,
        separator=separator,
        quote_char='"' if quoted else None,
        infer_schema=False,
        glob=False,
    )
    with reading(file.name):
        columns = open_csv().collect_schema().names()
    renamed = _padded(names, len(columns)) if names else [c.strip() for c in columns]
    repeated = [c for c in first if first.count(c) > 1 and any(spells(c, role) for role in ROLES)]
    if repeated and not names:
        raise InputError(
            f"{file.name} has several columns named {repeated[0]!r}: rename one, or remove the header and "
            "give --columns"
        )
    numbers = {c: pl.Float64 for c, name in zip(columns, renamed, strict=True) if name == number}
    return open_csv(schema_overrides=numbers).rename(dict(zip(columns, renamed, strict=True))), fits


def _check_positions(name: str, names: list[str], first: list[str]) -> None:
    """Refuse column names that cannot fit, and names for a file that has its own."""
    if not {"user", "item"} <= set(names) or any(names.count(role) > 1 for role in ROLES):
        raise InputError(
            f"--columns {','.join(names)} must name user and item, each role once, for example "
            "user,item,rating,timestamp"
        )
    if len(names) > len(first):
        raise InputError(
            f"--columns names {len(names)} columns and {name} has {len(first)}: {first}; check --separator"
        )
    spelled = [{role for role in ROLES if spells(field, role)} for field in first]
    if {"user"} in spelled and {"item"} in spelled:
        raise InputError(
            f"{name} begins with a header, {first}: leave --columns out, or name columns with --user and --item"
        )


def _padded(names: Sequence[str], width: int) -> list[str]:
    """Names for every column: those given that play no role, and those beyond, get a name that nothing matches."""
    return [names[k] if k < len(names) and names[k] in ROLES else f"#{k + 1}" for k in range(width)]


def _split_lines(file: Input, separator: str, names: list[str] | None, first: list[str], skip: int) -> pl.LazyFrame:
    """Divide lines at a separator that Polars' CSV reader does not know: several characters, or runs of blanks."""
    columns = _padded(names, len(first)) if names else first
    line = pl.col(_LINE).str
    fields = line.extract_all(r"\S+") if separator == " " else line.split(separator)
    frame = lines_of(file).slice(skip if names else skip + 1)
    # A row of other length than the first has a null in its last column, which no later step lets pass as an id.
    return frame.select(fields.alias(_LINE)).select(
        pl.col(_LINE).list.get(k, null_on_oob=True).alias(column) for k, column in enumerate(columns)
    )
