"""Tables of any common format as raw interactions: delimited text, Parquet, JSON lines, JSON arrays, data frames."""

from __future__ import annotations

import glob
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import polars as pl

from drm_triton.data.frames import from_pandas
from drm_triton.data.prepare.columns import ROLES, find_columns, listing, plain, spells
from drm_triton.data.prepare.failures import read_errors
from drm_triton.data.prepare.inputs import InputFile, Inputs
from drm_triton.data.prepare.raw import FileFormat, RawInteractions, RawTable
from drm_triton.data.prepare.text import first_lines, scan_text, to_utf8
from drm_triton.errors import InputError

TABLE_FIELDS = frozenset({*ROLES, "columns", "separator", "encoding"})  # fields of `FileFormat` that tables use
TITLE_COLUMNS = frozenset(
    {
        "artistname", "booktitle", "itemname", "itemtitle", "movietitle", "name", "songname", "title", "trackname"
    }
)  # fmt: skip

ValueKind = Literal["text", "lines", "typed"]


def read_tables(
    inputs: Inputs, files: Sequence[InputFile], file_format: FileFormat, titles: pl.LazyFrame | None = None
) -> RawInteractions:
    """Read files as interactions. The columns are found by name in each file."""
    tables, kinds = [], set()
    given = {role: getattr(file_format, role) for role in ROLES}
    if given["weight"] is None and "weight" in (file_format.columns or ()):
        given["weight"] = "weight"  # named by its position
    for file in files:
        frame, kind, locate = scan(inputs, file, file_format)
        with read_errors(file.name, locate):
            columns = frame.collect_schema().names()
        found = find_columns(columns, given, file.name, _headerless_hint(columns))
        roles = [pl.col(name).alias(role) for role, name in found.items()]
        quick, unit = None, "row"
        if kind == "text":
            quick = scan(inputs, file, file_format, number_column=found.get("rating"))[0].select(roles)
            unit = "row" if file_format.columns else "data row"
        elif kind == "lines":
            quick, frame = frame.select(roles), scan(inputs, file, file_format, sample=None)[0]
            locate = partial(file.first_bad_line, partial(_is_row, columns=tuple(found.values())))
        tables.append(RawTable(file.name, frame.select(roles), locate, quick, unit, columns))
        kinds.add(kind)
    return RawInteractions(
        tables, text=kinds == {"text"}, titles=titles, files=[f.on_disk for f in files], weight=given["weight"]
    )


def read_frame(frame: Any, names: Mapping[str, str | None]) -> RawInteractions:
    """Return the interactions of a polars DataFrame or LazyFrame, or of a pandas DataFrame."""
    if isinstance(frame, pl.LazyFrame | pl.DataFrame):
        columns = frame.lazy().collect_schema().names()
    elif hasattr(frame, "columns") and hasattr(frame, "to_dict"):
        columns = [str(c) for c in frame.columns]
    else:
        raise InputError(f"from_frame takes a polars or pandas frame, not {type(frame).__name__}")
    roles = find_columns(columns, names, "the frame")
    if not isinstance(frame, pl.LazyFrame | pl.DataFrame):
        frame = from_pandas(frame, list(roles.values()))
    chosen = frame.lazy().select(pl.col(name).alias(role) for role, name in roles.items())
    return RawInteractions([RawTable("the frame", chosen, columns=columns)], weight=roles.get("weight"))


def read_titles(inputs: Inputs, file: InputFile, file_format: FileFormat) -> pl.LazyFrame:
    """Read a table of items. Return columns ``item`` and ``title``."""
    frame, _, _ = scan(inputs, file, file_format)
    with read_errors(file.name):
        columns = frame.collect_schema().names()
    title = next((c for c in columns if plain(c) in TITLE_COLUMNS), None)
    item = next((c for c in columns if plain(c) == "id"), None)
    item = item or next((c for c in columns if spells(c, "item")), None)
    if title is None or item is None:
        raise InputError(
            f"{file.name} needs a column of item ids (id, itemId, ...) and one of titles (title, name, ...); "
            f"its columns are {listing(columns)}"
        )
    return frame.select(pl.col(item).alias("item"), pl.col(title).alias("title"))


def scan(
    inputs: Inputs,
    file: InputFile,
    file_format: FileFormat,
    number_column: str | None = None,
    sample: int | None = 1000,
) -> tuple[pl.LazyFrame, ValueKind, Callable[[], str]]:
    """Open one table.

    Parameters
    ----------
    number_column : str, optional
        The column of a text file that Polars parses as numbers.
    sample : int, optional
        The number of JSON lines that decide the types of the columns; None for all.

    Returns
    -------
    frame : LazyFrame
        All columns, named as in the file or by `file_format.columns`.
    kind : {"text", "lines", "typed"}
        Whether the values are uninterpreted text, JSON lines, or have types.
    locate : function
        Returns the damaged line of a file that cannot be read, as "line 17", or "".
    """
    if file.kind == "parquet":
        _refuse_columns(file, file_format)
        return pl.scan_parquet(file.path, glob=False), "typed", str
    if file.suffix in (".parquet", ".pq"):
        raise InputError(f"cannot read {file.name}: it is damaged, or not a Parquet file despite its name")
    file = to_utf8(inputs, file, file_format)
    lines = first_lines(file)
    if not any(line.strip() for line in lines):
        raise InputError(f"{file.name} is empty: give a file with interactions")
    start = next(line for line in lines if line.strip()).lstrip("\ufeff \t")
    if start.startswith("{") or file.suffix in (".jsonl", ".ndjson"):
        _refuse_columns(file, file_format)
        file = inputs.without_mark(file)
        lines_frame = pl.scan_ndjson(glob.escape(str(file.path)), infer_schema_length=sample)  # it has no glob=False
        return lines_frame, "lines", partial(file.first_bad_line, _is_row)
    if start.startswith("[") and file.suffix == ".json":
        _refuse_columns(file, file_format)
        file = inputs.without_mark(file)
        with read_errors(file.name):
            path = inputs.unpack(file) if file.kind == "gzip" else file.path
            return pl.read_json(path, infer_schema_length=None).lazy(), "typed", str
    with read_errors(file.name):
        frame, has_room = scan_text(file, lines, file_format, number_column)
    return frame, "text", partial(file.first_bad_line, has_room)


def _headerless_hint(columns: Sequence[str]) -> str:
    """Return advice for a file whose first row looks like data, or ""."""
    if not any(c.strip().lstrip("-").replace(".", "", 1).isdigit() for c in columns):
        return ""
    return "; the first row looks like data: give `columns` user,item,... if the file has no header"


def _refuse_columns(file: InputFile, file_format: FileFormat) -> None:
    if file_format.columns:
        raise InputError(
            f"{file.name} names its own columns: leave out `columns`, and use `user`, `item`, ... if needed"
        )


def _is_row(line: str, columns: Sequence[str] = ()) -> bool:
    """Return whether a line is a JSON object in which the values of `columns` are numbers, text or missing."""
    row = json.loads(line) if line.strip() else {}
    return isinstance(row, dict) and all(type(row.get(c)) in (str, int, float, type(None)) for c in columns)
