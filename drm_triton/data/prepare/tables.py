"""Tables of any common format as raw interactions: delimited text, Parquet, JSON lines, JSON arrays, data frames."""

from __future__ import annotations

import glob
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import polars as pl

from drm_triton.data.frames import from_pandas
from drm_triton.data.prepare.columns import (
    ROLES,
    NoColumnError,
    NoHeaderError,
    find_columns,
    listing,
    looks_like_data,
    plain,
    spells,
)
from drm_triton.data.prepare.description import column_notes
from drm_triton.data.prepare.failures import read_errors
from drm_triton.data.prepare.inputs import InputFile, Inputs, SkippedLines, printable
from drm_triton.data.prepare.raw import SKIP_LINES, FileFormat, RawInteractions, RawTable
from drm_triton.data.prepare.text import first_lines, scan_text, to_utf8
from drm_triton.errors import InputError

# Names of files that look like a table.
PATTERNS = (
    "*.csv", "*.tsv", "*.psv", "*.txt", "*.dat", "*.data", "*.parquet", "*.pq", "*.json", "*.jsonl", "*.ndjson"
)  # fmt: skip
# Fields of `FileFormat` that tables use.
TABLE_FIELDS = frozenset(
    {*ROLES, "columns", "separator", "encoding", "decimal", "date_format", "event_weight", "skip_bad_rows"}
)
TITLE_COLUMNS = frozenset(
    {
        "artistname", "booktitle", "itemname", "itemtitle", "movietitle", "name", "songname", "title", "trackname"
    }
)  # fmt: skip

ValueKind = Literal["text", "lines", "typed"]


@dataclass(frozen=True)
class Scanned:
    """A table that was opened.

    Attributes
    ----------
    frame : all columns, named as in the file or by `FileFormat.columns`
    kind : whether the values are uninterpreted text, JSON lines, or have types
    file : the file that was opened: a copy if its encoding or a mark at its begin had to be changed
    lines : the first lines of a text file
    is_good : returns whether a line can be read; None if the file does not consist of lines
    quoted : fields may be in quotation marks
    skipped : lines that were left out already
    """

    frame: pl.LazyFrame
    kind: ValueKind
    file: InputFile
    lines: Sequence[str] = ()
    is_good: Callable[[str], bool] | None = None
    quoted: bool = False
    skipped: SkippedLines = field(default_factory=SkippedLines)

    def locate(self) -> str:
        """Return the damaged line of a file that cannot be read, as "line 17", or ""."""
        return self.file.first_bad_line(self.is_good) if self.is_good else ""

    def columns(self) -> list[str]:
        """Return the names of the columns."""
        with read_errors(self.file.name, self.locate):
            return self.frame.collect_schema().names()


def read_tables(
    inputs: Inputs, files: Sequence[InputFile], file_format: FileFormat, titles: pl.LazyFrame | None = None
) -> RawInteractions:
    """Read files as interactions. The columns are found by name in each file."""
    tables, kinds, found_in, columns_of = [], set(), [], []
    given = {role: getattr(file_format, role) for role in ROLES}
    if given["weight"] is None and "weight" in (file_format.columns or ()):
        given["weight"] = "weight"  # named by its position
    for file in files:
        find = partial(find_columns, given=given, where=file.name)
        scanned, columns = open_table(inputs, file, file_format, find)
        try:
            found = find(columns)
        except NoColumnError as error:
            row = _without_suffixes(columns)
            if scanned.kind == "text" and not file_format.columns and looks_like_data(row):
                raise NoHeaderError(error, row) from None
            raise
        used = _used(found, file_format, file.name)
        tables.append(as_table(inputs, scanned, used, columns, file_format, tuple(used.values())))
        kinds.add(scanned.kind)
        found_in.append(found)
        columns_of.append(columns)
    text = kinds == {"text"}
    return replace(
        _described(tables, found_in, columns_of, file_format),
        text=text,
        titles=titles,
        files=[f.on_disk for f in files],
        weight=used.get("event") or given["weight"],
    )


def _without_suffixes(columns: Sequence[str]) -> list[str]:
    """Return the first row of a file as it is written: as names of columns, equal values got different names."""
    return [column.partition("_duplicated_")[0] for column in columns]


def open_table(
    inputs: Inputs, file: InputFile, file_format: FileFormat, find: Callable[[Sequence[str]], Mapping[str, str]]
) -> tuple[Scanned, list[str]]:
    """Open one table. Also return the names of its columns.

    Parameters
    ----------
    find : returns those of the columns that must be numbers or text, by role
    """
    scanned = scan(inputs, file, file_format)
    try:
        return scanned, scanned.columns()
    except InputError:
        if scanned.kind != "lines":
            raise
    scanned = _without_bad_lines(inputs, scanned, find, bool(file_format.skip_bad_rows))
    return scanned, scanned.columns()


def as_table(
    inputs: Inputs,
    scanned: Scanned,
    found: Mapping[str, str],
    columns: Sequence[str],
    file_format: FileFormat,
    simple: Sequence[str],
) -> RawTable:
    """Return a table that was opened.

    Parameters
    ----------
    found : role -> column to read
    columns : names of all columns
    simple : columns that must be numbers or text
    """
    roles = [pl.col(name).alias(role) for role, name in found.items()]
    file, frame, quick, unit, is_good = scanned.file, scanned.frame, None, "row", scanned.is_good
    if scanned.kind == "text":
        quick = scan_text(file, scanned.lines, file_format, found.get("rating"))[0].select(roles)
        unit = "row" if file_format.columns else "data row"
    elif scanned.kind == "lines":
        quick, frame = frame.select(roles), _scan_lines(file, sample=None)
        is_good = partial(_is_row, columns=simple)
    table = RawTable(file.name, frame.select(roles), str, quick, unit, columns)
    if is_good is None:
        return table

    def repair() -> RawTable:
        copy, skipped = inputs.without_bad_lines(file, is_good, scanned.quoted)
        if scanned.kind == "lines":
            frame = _scan_lines(copy, sample=None)
        else:
            frame = scan_text(copy, scanned.lines, file_format, None)[0]
        if scanned.skipped.count:
            skipped = replace(scanned.skipped, count=scanned.skipped.count + skipped.count)
        return _without_lines(replace(table, frame=frame.select(roles), quick=None), scanned, skipped, file_format)

    table = replace(table, locate=partial(file.first_bad_line, is_good), repair=repair)
    return _without_lines(table, scanned, scanned.skipped, file_format)


def _without_lines(table: RawTable, scanned: Scanned, skipped: SkippedLines, file_format: FileFormat) -> RawTable:
    """Return a table with the record of its lines that were left out."""
    if not skipped.count:
        return table
    no_rows = skipped.blank_before  # in JSON, a blank line is no row
    if scanned.kind == "text":
        header = 0 if file_format.columns else 1
        no_rows = header + next(k for k, line in enumerate(scanned.lines) if line.strip())
    return replace(
        table,
        skipped=skipped.count,
        first_skipped=f"{skipped.first} of {table.name} cannot be read",
        rows_before_skipped=skipped.rows_before - no_rows,
    )


def _without_bad_lines(
    inputs: Inputs, scanned: Scanned, find: Callable[[Sequence[str]], Mapping[str, str]], skip: bool
) -> Scanned:
    """Return JSON lines without those that are no objects, or have a list or an object in a column with a role.

    If they are not to be skipped, raise an error that names the first.
    """
    objects, _ = inputs.without_bad_lines(scanned.file, _is_row, quoted=False)
    with objects.open() as lines:
        rows = [json.loads(line) for line in itertools.islice(lines, 1000) if line.strip()]
    is_good = scanned.is_good
    if rows:
        found = find(list(dict.fromkeys(itertools.chain(*rows))))
        is_good = partial(_is_row, columns=tuple(found.values()))
    if not skip:
        try:
            replace(scanned, is_good=is_good).columns()
        except InputError as error:
            raise InputError(f"{error}{SKIP_LINES}") from error
    copy, skipped = inputs.without_bad_lines(scanned.file, is_good or _is_row, quoted=False)
    return replace(scanned, frame=_scan_lines(copy, sample=1000), file=copy, skipped=skipped)


def _used(found: Mapping[str, str], file_format: FileFormat, where: str) -> dict[str, str]:
    """Return the columns to read. Events are read only if they have weights."""
    if file_format.event_weight is None:
        return {role: column for role, column in found.items() if role != "event"}
    if "event" not in found:
        raise InputError(f"{where}: no column, or several, are recognised as the events: name one as `event`")
    return dict(found)


def _described(
    tables: Sequence[RawTable],
    found_in: Sequence[Mapping[str, str]],
    columns_of: Sequence[Sequence[str]],
    file_format: FileFormat,
) -> RawInteractions:
    """Return the interactions with the record of which column was taken for what."""
    roles: dict[str, str] = {}
    for role in ROLES:
        names = dict.fromkeys(found[role] for found in found_in if role in found)
        if names and (role != "event" or file_format.event_weight is not None):
            roles[role] = ", ".join(names)
    ignored = dict.fromkeys(
        column
        for found, columns in zip(found_in, columns_of, strict=True)
        for column in columns
        if column not in found.values() or (found.get("event") == column and "event" not in roles)
    )
    notes = column_notes(found_in[0], columns_of[0], file_format.event_weight is not None)
    if file_format.columns:
        positions = {name: f"column {k + 1}" for k, name in enumerate(columns_of[0])}
        roles = {role: positions[column] for role, column in roles.items()}
    return RawInteractions(tables, roles=roles, ignored=list(ignored), notes=notes, file_format=file_format)


def read_frame(frame: Any, file_format: FileFormat) -> RawInteractions:
    """Return the interactions of a polars DataFrame or LazyFrame, or of a pandas DataFrame."""
    if isinstance(frame, pl.LazyFrame | pl.DataFrame):
        columns = frame.lazy().collect_schema().names()
    elif hasattr(frame, "columns") and hasattr(frame, "to_dict"):
        columns = [str(c) for c in frame.columns]
    else:
        raise InputError(f"from_frame takes a polars or pandas frame, not {type(frame).__name__}")
    names = {role: getattr(file_format, role) for role in ROLES}
    found = find_columns(columns, names, "the frame")
    used = _used(found, file_format, "the frame")
    if not isinstance(frame, pl.LazyFrame | pl.DataFrame):
        frame = from_pandas(frame, list(used.values()))
    chosen = frame.lazy().select(pl.col(name).alias(role) for role, name in used.items())
    raw = _described([RawTable("the frame", chosen, columns=columns)], [found], [columns], file_format)
    return replace(raw, weight=used.get("event") or used.get("weight"))


def read_titles(inputs: Inputs, file: InputFile, file_format: FileFormat) -> tuple[pl.LazyFrame, dict[str, str]]:
    """Read a table of items. Return columns ``item`` and ``title``, and the names of file and columns."""
    scanned = scan(inputs, file, file_format)
    frame = scanned.frame
    with read_errors(file.name):
        columns = frame.collect_schema().names()
    title = next((c for c in columns if plain(c) in TITLE_COLUMNS), None)
    item = next((c for c in columns if plain(c) == "id"), None)
    item = item or next((c for c in columns if spells(c, "item")), None)
    if title is None or item is None:
        row, advice = _without_suffixes(columns), ""
        if scanned.kind == "text" and looks_like_data(row):
            columns = row
            advice = "; the first row looks like data: if the file has no header, put a line before it that names all "
            advice += f"{len(row)} columns, item and title among them"
        raise InputError(
            f"{file.name} needs a column of item ids (id, itemId, ...) and one of titles (title, name, ...); "
            f"its columns are {listing(columns, most=5 if advice else 20)}{advice}"
        )
    described = {"file": printable(file.on_disk.name), "item": item, "title": title}
    return frame.select(pl.col(item).alias("item"), pl.col(title).alias("title")), described


def scan(inputs: Inputs, file: InputFile, file_format: FileFormat) -> Scanned:
    """Open one table. The types of JSON lines are those of the first ones."""
    if file.kind == "parquet":
        _refuse_columns(file, file_format)
        return Scanned(pl.scan_parquet(file.path, glob=False), "typed", file)
    if file.suffix in (".parquet", ".pq"):
        raise InputError(f"cannot read {file.name}: it is damaged, or not a Parquet file despite its name")
    file = to_utf8(inputs, file, file_format)
    lines = first_lines(file)
    if not any(line.strip() for line in lines):
        raise InputError(f"{file.name} is empty: check `{inputs.parameter}`")
    start = next(line for line in lines if line.strip()).lstrip("\ufeff \t")
    if start.startswith("{") or file.suffix in (".jsonl", ".ndjson"):
        _refuse_columns(file, file_format)
        file = inputs.without_mark(file)
        return Scanned(_scan_lines(file, sample=1000), "lines", file, is_good=_is_row)
    if start.startswith("[") and file.suffix == ".json":
        _refuse_columns(file, file_format)
        file = inputs.without_mark(file)
        with read_errors(file.name):
            path = inputs.unpack(file) if file.kind == "gzip" else file.path
            return Scanned(pl.read_json(path, infer_schema_length=None).lazy(), "typed", file)
    with read_errors(file.name):
        frame, has_room, quoted = scan_text(file, lines, file_format, None)
    return Scanned(frame, "text", file, lines, has_room, quoted)


def _scan_lines(file: InputFile, sample: int | None) -> pl.LazyFrame:
    """Open JSON lines. The first `sample` lines decide the types of the columns, or all."""
    return pl.scan_ndjson(glob.escape(str(file.path)), infer_schema_length=sample)  # it has no glob=False


def _refuse_columns(file: InputFile, file_format: FileFormat) -> None:
    if file_format.columns:
        raise InputError(
            f"{file.name} names its own columns: leave out `columns`, and use `user`, `item`, ... if needed"
        )


def _is_row(line: str, columns: Sequence[str] = ()) -> bool:
    """Return whether a line is a JSON object in which the values of `columns` are numbers, text or missing."""
    row = json.loads(line) if line.strip() else {}
    return isinstance(row, dict) and all(type(row.get(c)) in (str, int, float, type(None)) for c in columns)
