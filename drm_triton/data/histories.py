"""Files of ids: one id per line, or items of users, such as the histories of new users."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from functools import partial
from pathlib import Path

import polars as pl

from drm_triton.data.prepare.columns import spells
from drm_triton.errors import InputError

SEPARATORS = ("\t", ";", "|", ",")  # of a table
TABLE_SUFFIXES = (".csv", ".tsv", ".tab", ".psv", ".parquet", ".pq")


def read_ids(path: Path) -> list[str]:
    """Read ids, one per line. Blank lines and blanks around an id are ignored."""
    lines = [line.strip() for line in _text(_content(path), path).split("\n")]
    ids = [line for line in lines if line]
    if not ids:
        raise InputError(f"{path} is empty: give a file with one id per line")
    return ids


def read_choice(path: Path) -> list[str] | pl.DataFrame:
    """Read items for all users, one id per line, or items for each user: a table with columns of users and items."""
    content = _content(path)
    if content.startswith(b"PAR1") or _separator(_text(content, path)) is not None:
        return read_histories(path)
    return read_ids(path)


def read_histories(path: Path) -> pl.DataFrame:
    """Read the histories of new users as a frame with columns user, item.

    A Parquet file, or a text file whose first line names a column of users and one of items, is a table with one row
    for each item of a user. Any other text file has one user per line: item ids separated by tabs, or else by commas,
    or else by blanks. The id of such a user is the number of the line, from 1.
    """
    content, suffix = _content(path), path.suffix.lower()
    if content.startswith(b"PAR1"):
        return _table(path, partial(pl.read_parquet, io.BytesIO(content)))
    if suffix in (".parquet", ".pq"):
        raise InputError(f"{path} is damaged, or not a Parquet file despite its name")
    text = _text(content, path)
    if not text.strip():
        raise InputError(f"{path} is empty: give a table with columns user and item, or a list of item ids per line")
    separator = _separator(text)
    if separator is not None or suffix in TABLE_SUFFIXES:
        source = io.BytesIO(text.lstrip().encode())
        return _table(path, partial(pl.read_csv, source, separator=separator or ",", infer_schema=False))
    return _parse_lines(text)


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror or error})") from None


def _text(content: bytes, path: Path) -> str:
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text ({error}): convert it, or give another file") from None
    if "\0" in text:
        raise InputError(f"{path} contains NUL bytes, so it is not text: give another file")
    return text


def _separator(text: str) -> str | None:
    """Return the separator of a table whose first line names a column of users and one of items; None if not so."""
    header = text.lstrip().split("\n", 1)[0].split("\r", 1)[0]
    return next((s for s in SEPARATORS if _names_both(next(csv.reader([header], delimiter=s), []))), None)


def _names_both(columns: list[str]) -> bool:
    return all(any(spells(column, role) for column in columns) for role in ("user", "item"))


def _table(path: Path, read: Callable[[], pl.DataFrame]) -> pl.DataFrame:
    """Read a table and return its columns of users and items."""
    try:
        frame = read()
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
        reason = str(error).split("\n", 1)[0]
        raise InputError(f"{path} cannot be read as a table ({reason}); check that it is complete") from None
    found = {role: [c for c in frame.columns if spells(c, role)] for role in ("user", "item")}
    if any(len(columns) != 1 for columns in found.values()):
        raise InputError(
            f"{path}: the table needs one column of users and one of items, for example named user and "
            f"item; its columns are {frame.columns}. A file with a list of item ids per line must be named .txt"
        )
    ids = frame.select(**{role: pl.col(columns[0]) for role, columns in found.items()})
    ids = ids.with_columns(pl.col(pl.String).str.strip_chars().replace("", None))
    empty = ids.select(pl.any_horizontal(pl.all().is_null())).to_series()
    if empty.any():
        row = empty.arg_true()[0] + 1
        raise InputError(f"{path}: data row {row:,} has no user or no item: complete or remove it")
    if ids.is_empty():
        raise InputError(f"{path} has a header but no rows: give a table with the items of each user")
    return ids


def _parse_lines(text: str) -> pl.DataFrame:
    """Return the items of each line."""
    separator = next((s for s in "\t," if s in text), None)
    users, items = [], []
    for number, line in enumerate(text.split("\n"), start=1):
        fields = line.split() if separator is None else next(csv.reader([line.strip()], delimiter=separator), [])
        kept = [field.strip() for field in fields if field.strip()]
        users += [number] * len(kept)
        items += kept
    return pl.DataFrame({"user": users, "item": items}, schema={"user": pl.Int64, "item": pl.String})
