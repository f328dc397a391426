"""The format of a data set on disk: a directory of arrays that can be memory-mapped, id tables and a JSON file.

    meta.json                         format version, sizes, checksum, source, options, statistics
    train.indptr.npy   int64 [users + 1]      little-endian; valid.* and test.* are the other two parts of the split
    train.indices.npy  int32 [interactions]   item codes, ascending within a user
    train.weights.npy  float32 [interactions] weights of the interactions, if meta.json has an entry weights
    dropped.*.npy      like train.indptr and train.indices: what filters removed, if meta.json has an entry dropped
    dropped_elsewhere.parquet  user, item: ids of removed pairs whose user or item is not in the data set, if
                       meta.json has an entry dropped_elsewhere
    users.parquet      id                     row k is the external id of user code k
    items.parquet      id, and title if the source has titles

A data set is written atomically (see `drm_triton.atomic`), so a directory of that name is always complete.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import polars as pl
from numpy.typing import NDArray

from drm_triton.data.csr import CSR
from drm_triton.errors import InputError
from drm_triton.names import SPLIT_PARTS

FORMAT = "drm-triton dataset"
VERSION = 1
ARRAYS = {"indptr": "<i8", "indices": "<i4", "weights": "<f4"}  # fields of a matrix and their types
MARKER = "meta.json"  # the file that identifies a directory as a data set
ELSEWHERE = "dropped_elsewhere"  # a table of pairs, and its entry of meta.json
KINDS = {
    "checksum": str,
    "titles": str,
    "weights": dict,
    "dropped": dict,
    ELSEWHERE: dict,
    "options": dict,
    "reading": dict,
    "filters": dict,
    "steps": list,
}  # of entries of meta.json, if present

# What Polars raises for a damaged file. A panic is no Exception.
DAMAGED_TABLE = (OSError, ValueError, MemoryError, pl.exceptions.PolarsError, pl.exceptions.PanicException)


def write(directory: Path, matrices: dict[str, CSR], tables: dict[str, pl.DataFrame], meta: dict[str, Any]) -> None:
    """Write `matrices` as <name>.*.npy, `tables` as <name>.parquet and `meta` as meta.json into a directory."""
    for name, matrix in matrices.items():
        for field, dtype in ARRAYS.items():
            if (array := getattr(matrix, field)) is not None:
                write_array(directory / f"{name}.{field}.npy", array.astype(dtype, copy=False))
    for name, table in tables.items():
        with (directory / f"{name}.parquet").open("wb") as handle:  # Polars takes only paths in UTF-8
            table.write_parquet(handle, compression="zstd")
    header = {"format": FORMAT, "version": VERSION}
    (directory / MARKER).write_text(json.dumps(header | meta, indent=2, ensure_ascii=False) + "\n", "utf-8")


def read_meta(path: Path) -> dict[str, Any]:
    """Read meta.json and check that this version of the program can read the data set."""
    try:
        if not path.exists():
            raise InputError(f"no data set at {path}: make one with `drm-triton prepare`, or check the path")
        meta = json.loads((path / "meta.json").read_text("utf-8"))
        if not isinstance(meta, dict) or meta.get("format") != FORMAT:
            raise ValueError("it is not the description of a data set")
    except FileNotFoundError:
        raise InputError(
            f"{path} is not a prepared data set: it has no meta.json; make one with `drm-triton prepare`"
        ) from None
    except InputError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"cannot read {path / 'meta.json'}: {error}; prepare the data set again") from error
    if meta.get("version") != VERSION:
        raise InputError(
            f"{path} has data format version {meta.get('version')!r}, but this program reads version {VERSION}: "
            "prepare the data again with this version, or use the version that wrote it"
        )
    for name in ("users", "items", *SPLIT_PARTS):
        size = meta.get(name)
        if type(size) is not int or not 0 <= size <= sys.maxsize:
            raise InputError(f"{path / 'meta.json'} has no sizes of the data set: prepare it again")
    for name, kind in KINDS.items():
        if not isinstance(meta.get(name, kind()), kind) and meta[name] is not None:
            raise InputError(f"{path / 'meta.json'} is damaged: {name} is {meta[name]!r}; prepare the data set again")
    for name in ("dropped", ELSEWHERE):
        pairs = meta[name].get("pairs") if meta.get(name) is not None else 0
        if type(pairs) is not int or not 0 <= pairs <= sys.maxsize:
            raise InputError(f"{path / 'meta.json'} has no number of dropped pairs: prepare the data set again")
    return meta


def open_matrix(
    path: Path, name: str, shape: tuple[int, int], nnz: int, weighted: bool = False, mapped: bool = True
) -> CSR:
    """Memory-map the arrays of a matrix, or read them, and check their types and lengths."""
    lengths = {"indptr": shape[0] + 1, "indices": nnz} | ({"weights": nnz} if weighted else {})
    arrays = {
        field: open_array(path, f"{name}.{field}", ARRAYS[field], length, mapped) for field, length in lengths.items()
    }
    return CSR(shape=shape, **arrays)


def open_array(path: Path, name: str, dtype: str, length: int, mapped: bool = True) -> NDArray[Any]:
    """Memory-map one array, or read it, and check its type and length."""
    file = path / f"{name}.npy"
    try:
        array: NDArray[Any] = np.load(file, mmap_mode="r" if mapped else None, allow_pickle=False)
    except Exception as error:  # NumPy parses the header as Python, and raises what that does
        raise InputError(f"{file} is missing or damaged ({error}): prepare the data set again") from error
    if array.dtype != np.dtype(dtype) or array.shape != (length,):
        raise InputError(
            f"{file} contains {array.dtype}{list(array.shape)}, but meta.json promises {np.dtype(dtype)}[{length}]: "
            "the data set is damaged; prepare it again"
        )
    return array


def table_length(path: Path, name: str) -> int:
    """Return the number of rows of an id table, from the footer of the Parquet file, and check that it has ids."""
    with _open_table(path, name) as handle:
        return int(pl.scan_parquet(handle).select(pl.col("id").len()).collect().item())


def table_columns(path: Path, name: str) -> list[str]:
    """Return the names of the columns of an id table."""
    with _open_table(path, name) as handle:
        return list(pl.read_parquet_schema(handle))


def read_table(path: Path, name: str, rows: range | None = None) -> pl.DataFrame:
    """Read a table, or consecutive rows of it."""
    with _open_table(path, name) as handle:
        if rows is None:
            # Polars would map the file; it may be truncated meanwhile.
            return pl.read_parquet(io.BytesIO(handle.read()))
        return pl.scan_parquet(handle).slice(rows.start, len(rows)).collect()


@contextmanager
def _open_table(path: Path, name: str) -> Iterator[BinaryIO]:
    """Open a table. Polars gets the open file: a path is a pattern to it, and has to be UTF-8."""
    file = path / f"{name}.parquet"
    try:
        with file.open("rb") as handle:
            yield handle
    except DAMAGED_TABLE as error:
        raise InputError(f"{file} is missing or damaged ({_first_line(error)}): prepare the data set again") from error


def write_array(file: Path, array: NDArray[Any]) -> None:
    """Write an array as np.save does, which however does not report a full disk."""
    array = np.ascontiguousarray(array)
    with file.open("wb") as handle:
        np.lib.format.write_array_header_1_0(handle, np.lib.format.header_data_from_array_1_0(array))
        handle.write(array.data)


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0]
