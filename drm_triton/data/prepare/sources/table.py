"""Any table with one interaction per row."""

from __future__ import annotations

from drm_triton.data.prepare.columns import Raw
from drm_triton.data.prepare.inputs import Inputs
from drm_triton.data.prepare.sources.base import Source
from drm_triton.data.prepare.tables import TABLE_FIELDS, Reading, read_tables, read_titles

_PATTERNS = (
    "*.csv",
    "*.tsv",
    "*.psv",
    "*.txt",
    "*.dat",
    "*.data",
    "*.parquet",
    "*.pq",
    "*.json",
    "*.jsonl",
    "*.ndjson",
)


def read(inputs: Inputs, how: Reading) -> Raw:
    """Read one file or several; of a zip, every member that looks like a table."""
    titles = None
    if how.titles:
        companion = Inputs([how.titles], inputs.scratch, "--titles")
        # Titles come from another file with its own header, separator and column names.
        titles = read_titles(companion, companion.find(_PATTERNS, "titles"), Reading(encoding=how.encoding))
    return read_tables(inputs, inputs.all(_PATTERNS), how, titles)


TABLE = Source(
    name="table",
    summary="any CSV, TSV, PSV, Parquet or JSON-lines file, with or without gzip, zstd or zip",
    origin="your own",
    licence="your own",
    layout="one interaction per row; columns recognised, or named by --user --item --rating --timestamp or --columns; "
    "blanks around ids of a text file are dropped",
    read=read,
    reads=TABLE_FIELDS | {"titles"},
)
