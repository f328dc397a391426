"""The data set on disk: a directory of memory-mappable arrays, id tables and one JSON file.

    meta.json                         format version, sizes, checksum, source, options, statistics
    train.indptr.npy   int64 [users + 1]      little-endian, as are the other two splits: valid.*, test.*
    train.indices.npy  int32 [interactions]   item codes, increasing within a user
    users.parquet      id                     row k is the external id of user code k
    items.parquet      id, and title where the source has titles

A store is written atomically (see `atomic`), so a directory of that name is always complete.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from drm_triton.errors import InputError

FORMAT = "drm-triton dataset"
VERSION = 1
MARKER = "meta.json"  # the file that makes a directory a data set
SPLIT_NAMES = ("train", "valid", "test")


def write(folder: Path, arrays: dict[str, NDArray], tables: dict[str, pl.DataFrame], meta: dict[str, Any]) -> None:
    """Fill a directory: `arrays` as <name>.npy, `tables` as <name>.parquet, `meta` as meta.json."""
    for name, array in arrays.items():
        write_array(folder / f"{name}.npy", array)
    for name, table in tables.items():
        table.write_parquet(folder / f"{name}.parquet", compression="zstd")
    header = {"format": FORMAT, "version": VERSION}
    (folder / MARKER).write_text(json.dumps(header | meta, indent=2, ensure_ascii=False) + "\n", "utf-8")


def read_meta(path: Path) -> dict[str, Any]:
    """Read meta.json and check that this version of the program understands the store."""
    try:
        if not path.exists():
            raise InputError(f"no data set at {path}: make one with `drm-triton prepare`, or check the path")
        meta = json.loads((path / "meta.json").read_text("utf-8"))
        if not isinstance(meta, dict) or meta.get("format") != FORMAT:
            raise ValueError("it does not describe a data set of this program")
    except FileNotFoundError:
        raise InputError(
            f"{path} is not a prepared data set: it has no meta.json; make one with `drm-triton prepare`"
        ) from None
    except InputError:
        raise
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {path / 'meta.json'}: {error}; prepare the data set again") from error
    if meta.get("version") != VERSION:
        raise InputError(
            f"{path} has data format version {meta.get('version')!r} and this program reads version {VERSION}: "
            "prepare the data again with this version, or use the version that wrote it"
        )
    return meta


def open_array(path: Path, name: str, dtype: str, length: int) -> NDArray:
    """Memory-map one array and verify its type and length."""
    file = path / f"{name}.npy"
    try:
        array = np.load(file, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise InputError(f"{file} is missing or damaged ({error}): prepare the data set again") from error
    if array.dtype != np.dtype(dtype) or array.shape != (length,):
        raise InputError(
            f"{file} holds {array.dtype}{list(array.shape)} where meta.json promises {np.dtype(dtype)}[{length}]: "
            "the data set is damaged; prepare it again"
        )
    return array


def table_length(path: Path, name: str) -> int:
    """Return the number of rows of a Parquet id table, from its footer alone, and verify that it has ids."""
    file = path / f"{name}.parquet"
    try:
        return int(pl.scan_parquet(file).select(pl.col("id").len()).collect().item())
    except (OSError, pl.exceptions.PolarsError) as error:
        raise InputError(f"{file} is missing or damaged ({_first_line(error)}): prepare the data set again") from error


def write_array(file: Path, array: NDArray) -> None:
    """Write what np.save would; np.save itself does not say so when the disk is full."""
    array = np.ascontiguousarray(array)
    with file.open("wb") as handle:
        np.lib.format.write_array_header_1_0(handle, np.lib.format.header_data_from_array_1_0(array))
        handle.write(array.data)


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0]
