"""The data set on disk: a directory of memory-mappable arrays, id tables and one JSON file.

    meta.json                         format version, sizes, checksum, source, options, statistics
    train.indptr.npy   int64 [users + 1]      little-endian, as are the other two splits: valid.*, test.*
    train.indices.npy  int32 [interactions]   item codes, increasing within a user
    users.parquet      id                     row k is the external id of user code k
    items.parquet      id, and title where the source has titles

A store is written beside its final place and renamed into it, so a directory of that name is always complete.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from drm_triton.errors import InputError

FORMAT = "drm-triton dataset"
VERSION = 1
SPLIT_NAMES = ("train", "valid", "test")


def check_target(path: Path, overwrite: bool, marker: str = "meta.json") -> Path:
    """Refuse an output directory that exists or cannot be written, before any work is done.

    With `overwrite` an existing directory may be replaced if it holds a file `marker`, as those of this program do, or
    nothing at all.

    Returns
    -------
    Path
        The place itself, absolute, without links and "..": what is checked here must be what is written later, even
        if directories on the way come into being between the two.
    """
    try:
        place = Path(os.path.realpath(path))
        taken = os.path.lexists(place)
        if taken and not overwrite:
            raise InputError(f"the output directory {path} already exists: give another, or --overwrite to replace it")
        if taken and not (place / marker).is_file() and (not place.is_dir() or any(place.iterdir())):
            raise InputError(
                f"{path} exists and was not made by this program, so --overwrite leaves it alone; give another"
            )
        parent = place.parent
        while not parent.exists():
            parent = parent.parent
        if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
            raise InputError(f"cannot write {path}: {parent} is not a writable directory; give another directory")
    except OSError as error:  # a name too long, a directory that may not be entered
        raise InputError(f"cannot write {path}: {error.strerror or error}; give another directory") from error
    return place


@contextmanager
def atomic_directory(path: Path, overwrite: bool = False, marker: str = "meta.json") -> Iterator[Path]:
    """Yield a temporary sibling of `path` that takes its place when the block ends well, and vanishes otherwise."""
    place = check_target(path, overwrite, marker)
    made = None
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        # Of a long name only the beginning: with what is added it must remain one that the system takes.
        made = Path(tempfile.mkdtemp(prefix=f".{place.name[:50]}.", suffix=".partial", dir=place.parent))
        yield made
        for file in made.iterdir():
            _sync(file)
        _sync(made)
        made.chmod(0o777 & ~umask())  # mkdtemp makes it private
        check_target(place, overwrite, marker)  # again: the work may have taken hours
        _swap(made, place, overwrite)
        _sync(place.parent)
    except (OSError, pl.exceptions.PolarsError) as error:
        raise write_error(path, error) from error
    finally:  # on success it is no longer there; on any failure, Ctrl-C included, nothing may stay
        if made is not None:
            shutil.rmtree(made, ignore_errors=True)


def write(
    path: Path, arrays: dict[str, NDArray], tables: dict[str, pl.DataFrame], meta: dict[str, Any], overwrite: bool
) -> None:
    """Write a store: `arrays` as <name>.npy, `tables` as <name>.parquet, `meta` as meta.json."""
    with atomic_directory(path, overwrite) as folder:
        for name, array in arrays.items():
            write_array(folder / f"{name}.npy", array)
        for name, table in tables.items():
            table.write_parquet(folder / f"{name}.parquet", compression="zstd")
        header = {"format": FORMAT, "version": VERSION}
        (folder / "meta.json").write_text(json.dumps(header | meta, indent=2, ensure_ascii=False) + "\n", "utf-8")


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


def _swap(made: Path, path: Path, overwrite: bool) -> None:
    """Rename `made` to `path`; with `overwrite` an old directory steps aside first and comes back if that fails."""
    if not (overwrite and path.exists()):
        made.rename(path)  # fails on a file or a directory that is not empty
        return
    aside = Path(tempfile.mkdtemp(prefix=f".{path.name[:50]}.", suffix=".old", dir=path.parent))
    old = aside / "old"
    path.rename(old)
    try:
        made.rename(path)
    except BaseException:
        old.rename(path)
        raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def write_array(file: Path, array: NDArray) -> None:
    """Write what np.save would; np.save itself does not say so when the disk is full."""
    array = np.ascontiguousarray(array)
    with file.open("wb") as handle:
        np.lib.format.write_array_header_1_0(handle, np.lib.format.header_data_from_array_1_0(array))
        handle.write(array.data)


def write_error(path: Path, error: BaseException) -> InputError:
    """Say in one paragraph why `path` could not be written."""
    # Polars passes the system's message on, not its number.
    full = any(os.strerror(code) in str(error) for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
    advice = "free some space" if full else "check the directory's permissions"
    return InputError(
        f"cannot write {path}: {_first_line(error)}; nothing was left behind; {advice} or give another directory"
    )


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0]


def _sync(path: Path) -> None:
    """Flush a file or directory to the disk, so that a power cut after the rename cannot leave it empty."""
    if os.name == "nt":
        return  # Windows cannot flush a directory, nor a file that is open for reading only
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def umask() -> int:
    """Return the permissions that new files must not have; the system tells only by setting them."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
