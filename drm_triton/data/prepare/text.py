"""Delimited text files as lazy frames: separator, header and quoting are recognised."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import polars as pl

from drm_triton.data.prepare.columns import ROLES, listing, plain, spells
from drm_triton.data.prepare.failures import read_errors
from drm_triton.data.prepare.inputs import InputFile, Inputs, printable
from drm_triton.data.prepare.raw import FileFormat
from drm_triton.errors import InputError

SEPARATORS = ("::", "\t", "|", ";", ",", " ")  # tried in this order; " " means any run of blanks
_NAMED = {"tab": "\t", "\\t": "\t", "comma": ",", "semicolon": ";", "pipe": "|", "space": " "}
_BY_SUFFIX = {".csv": ",", ".tsv": "\t", ".psv": "|", ".tab": "\t"}
_LINE = "line"


def to_utf8(inputs: Inputs, file: InputFile, file_format: FileFormat) -> InputFile:
    """Return the file, or a copy of it in UTF-8 if `file_format` gives another encoding."""
    encoding = file_format.encoding
    if encoding is None or encoding.lower().replace("_", "-") in ("utf-8", "utf8"):
        return file
    return InputFile(file.name, inputs.unpack(file, encoding), file.on_disk)


def first_lines(file: InputFile, count: int = 20) -> list[str]:
    """Return the first lines of a text file, decompressed. Refuse a file that is not UTF-8 text."""
    with read_errors(file.name):
        with file.path.open("rb") as handle:
            if handle.read(2) in (b"\xff\xfe", b"\xfe\xff"):
                raise InputError(f'{file.name} is in UTF-16, not UTF-8: give `encoding="utf-16"`')
        column = lines_of(file, lossy=True).head(count).collect().to_series()
    if column.str.contains("\0", literal=True).any():
        raise InputError(
            f"{file.name} has NUL bytes in its first lines, so it is not UTF-8 text: give "
            '`encoding="utf-16-le"` or `encoding="utf-16-be"` if it is in UTF-16, or another file'
        )
    return [line or "" for line in column]


def lines_of(file: InputFile, lossy: bool = False) -> pl.LazyFrame:
    """Return the lines of a text file as one column, `line`. A blank line is null."""
    return pl.scan_csv(
        file.path,
        has_header=False,
        new_columns=[_LINE],
        separator="\x1e",  # a control character that text files do not contain, so that each line is one field
        quote_char=None,
        infer_schema=False,
        encoding="utf8-lossy" if lossy else "utf8",
        glob=False,
    )


def given_separator(file_format: FileFormat) -> str | None:
    """Return the separator that the user gave, by itself or by name, or None."""
    separator = file_format.separator and _NAMED.get(file_format.separator, file_format.separator)
    if separator and (set(separator) & set('"\r\n') or printable(separator) != separator):
        raise InputError(
            f"`separator` {separator!r} cannot be used: give UTF-8 text without quotation marks and line ends"
        )
    return separator


def guess_separator(lines: Sequence[str], suffix: str = "") -> str | None:
    """Return the separator that divides every line into the same number of fields, at least two, or None.

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


def scan_text(
    file: InputFile, lines: Sequence[str], file_format: FileFormat, number_column: str | None
) -> tuple[pl.LazyFrame, Callable[[str], bool], bool]:
    """Open a delimited file.

    Parameters
    ----------
    lines : its first lines
    number_column : the column that Polars parses as numbers; all others stay text

    Returns
    -------
    frame : LazyFrame
    has_room : function
        Returns whether a line has at most as many fields as the first.
    quoted : bool
        Fields may be in quotation marks.
    """
    blank = next(k for k, line in enumerate(lines) if line.strip())  # blank lines before the header
    lines = lines[blank:]
    if "\r" in lines[0].rstrip("\r") and '"' not in lines[0]:
        raise InputError(
            f"the lines of {file.name} end with a carriage return alone: convert them, for example with "
            "`tr '\\r' '\\n'`"
        )
    separator = given_separator(file_format) or guess_separator(lines, file.suffix)
    header = lines[0].lstrip("\ufeff").strip()
    if separator is None and (plain(header) == "id" or any(spells(header, role) for role in ("user", "item"))):
        separator = ","  # the only column has the ids
    if separator is None:
        raise InputError(
            f"{file.name}: no common separator divides its first line {lines[0][:80]!r} into columns; give `separator`"
        )
    first_row = [field.strip() for field in _fields(lines[0].lstrip("\ufeff"), separator)]
    names = list(file_format.columns) if file_format.columns else None
    if names:
        _check_positions(file.name, names, first_row)
    counts = Counter(first_row)
    repeated = [c for c, count in counts.items() if count > 1 and any(spells(c, role) for role in ROLES[:4])]
    if repeated and not names:
        raise InputError(
            f"{file.name} has several columns named {repeated[0]!r}: rename one, or remove the header and "
            "give `columns`"
        )
    if separator == " " or _is_long(separator):
        return _split_lines(file, separator, names, first_row, skip=blank), lambda line: True, False

    def has_room(line: str) -> bool:
        closed = line.count('"') % 2 == 0  # otherwise it may be the first line of a field with several
        return len(_fields(line, separator, strict=closed)) <= len(first_row)

    # Files separated by tabs or pipes often contain quotation marks without meaning. Only a field that begins and ends
    # with them shows that fields are quoted.
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
    with read_errors(file.name):
        columns = open_csv().collect_schema().names()
    renamed = _padded(names, len(columns)) if names else [c.strip() for c in columns]
    numbers = {c: pl.Float64 for c, name in zip(columns, renamed, strict=True) if name == number_column}
    frame = open_csv(schema_overrides=numbers).rename(dict(zip(columns, renamed, strict=True)))
    return frame, has_room, quoted


def _fields(line: str, separator: str, strict: bool = False) -> list[str]:
    """Divide a line. If `strict`, quotation marks must enclose whole fields, or csv.Error is raised."""
    if separator == " ":
        return line.split()
    if _is_long(separator) or '"' not in line:
        return line.split(separator)
    return next(csv.reader([line], delimiter=separator, strict=strict), [])


def _is_long(separator: str) -> bool:
    """Return whether the separator has several bytes. Polars' CSV reader takes one byte."""
    return len(separator.encode()) > 1


def _check_positions(name: str, names: list[str], first_row: list[str]) -> None:
    """Refuse `columns` that cannot fit, or for a file with a header."""
    if not {"user", "item"} <= set(names) or any(names.count(role) > 1 for role in ROLES):
        raise InputError(
            f"`columns` {','.join(names)} must name user and item, each role once, for example "
            "user,item,rating,timestamp"
        )
    if len(names) > len(first_row):
        raise InputError(
            f"`columns` names {len(names)} columns, but {name} has {len(first_row)}: {listing(first_row)}; "
            "check `separator`"
        )
    roles = [{role for role in ROLES if spells(field, role)} for field in first_row]
    if {"user"} in roles and {"item"} in roles:
        raise InputError(
            f"{name} begins with a header, {listing(first_row)}: leave out `columns`, or name columns with `user` and "
            "`item`"
        )


def _padded(names: Sequence[str], width: int) -> list[str]:
    """Return a name for every column. A column without role gets a name that matches nothing."""
    return [names[k] if k < len(names) and names[k] in ROLES else f"#{k + 1}" for k in range(width)]


def _distinct(names: Sequence[str]) -> list[str]:
    """Return names that are all different, as Polars' CSV reader makes them.

    Examples
    --------
    >>> _distinct(["5", "5", "5"])
    ['5', '5_duplicated_0', '5_duplicated_1']
    """
    before = [names[:k].count(name) for k, name in enumerate(names)]
    return [f"{name}_duplicated_{n - 1}" if n else name for name, n in zip(names, before, strict=True)]


def _split_lines(
    file: InputFile, separator: str, names: list[str] | None, first_row: list[str], skip: int
) -> pl.LazyFrame:
    """Divide lines at a separator that Polars' CSV reader does not support: several bytes, or runs of blanks."""
    columns = _padded(names, len(first_row)) if names else _distinct(first_row)
    line = pl.col(_LINE).str
    fields = line.extract_all(r"\S+") if separator == " " else line.split(separator)
    frame = lines_of(file).slice(skip if names else skip + 1)
    # A row that is shorter than the first has nulls in its last columns, which later steps refuse as ids.
    return frame.select(fields.alias(_LINE)).select(
        pl.col(_LINE).list.get(k, null_on_oob=True).alias(column) for k, column in enumerate(columns)
    )
