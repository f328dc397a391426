"""Any table with one interaction per row."""

from __future__ import annotations

from dataclasses import replace

from drm_triton.data.prepare.inputs import Inputs
from drm_triton.data.prepare.raw import FileFormat, RawInteractions
from drm_triton.data.prepare.sources.base import Source
from drm_triton.data.prepare.tables import PATTERNS, TABLE_FIELDS, read_tables, read_titles


def read(inputs: Inputs, file_format: FileFormat) -> RawInteractions:
    """Read one or several files. Of a zip file, read every member that looks like a table."""
    titles = None
    described: dict[str, str] = {}
    if file_format.titles:
        title_inputs = Inputs([file_format.titles], inputs.scratch, "titles")
        # The file of titles has its own header, separator and column names.
        title_format = FileFormat(encoding=file_format.encoding)
        file = title_inputs.find(PATTERNS, "the table of titles")
        titles, described = read_titles(title_inputs, file, title_format)
    return replace(read_tables(inputs, inputs.all(PATTERNS), file_format, titles), title_columns=described)


TABLE = Source(
    name="table",
    summary="any CSV, TSV, PSV, Parquet or JSON-lines file, with or without gzip, zstd or zip",
    origin="your own",
    licence="your own",
    layout="one interaction per row; columns are recognised or named; blanks around ids in a text file are removed",
    read=read,
    reads=TABLE_FIELDS | {"titles"},
    takes_parts=True,
)
