"""Recommendations of a shard as a Parquet file, a *part*: part-00003-of-00016.parquet.

The metadata of the file records what the part was made from: model, shard and options. So a job that is started again
finds the parts that are whole, and never takes those of another model for its own.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import polars as pl

from drm_triton import atomic
from drm_triton.data.shard import Shard
from drm_triton.data.store import DAMAGED_TABLE
from drm_triton.errors import InputError

KEY = "drm-triton recommendations"  # entry of the metadata of a part
ROW_GROUP = 1 << 19  # rows
SCRATCH = "frames"  # last word of the name of a directory with the frames that will be in a file


def part_file(folder: Path, shard: Shard) -> Path:
    """Return the place of a part.

    Examples
    --------
    >>> part_file(Path("top"), Shard(3, 16)).name
    'part-00003-of-00016.parquet'
    """
    return folder / f"part-{shard.index:05}-of-{shard.count:05}.parquet"


def is_whole(folder: Path, shard: Shard, recorded: dict[str, Any], overwrite: bool = False) -> bool:
    """Return whether a folder has a part. Create the folder if need be.

    Parameters
    ----------
    recorded : what the part is to be made from
    overwrite : a part that was made from something else is to be replaced

    Raises
    ------
    InputError
        If the part was made from something else, or if the folder has parts of another number of shards.
    """
    if folder.exists() and not folder.is_dir():
        raise InputError(f"`out` {folder} is a file: with `shard`, give a directory for the parts")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"`out` {folder}: cannot create the directory ({error.strerror})") from None
    others = sorted(set(folder.glob("part-*-of-*.parquet")) - set(folder.glob(f"part-*-of-{shard.count:05}.parquet")))
    if others:
        raise InputError(
            f"`out` {folder} has parts of another number of shards, such as {others[0].name}; give another directory, "
            "or remove them"
        )
    file = part_file(folder, shard)
    atomic.check_file(file, "give another `out`")
    if not file.exists():
        return False
    try:
        with file.open("rb") as handle:
            found = json.loads(pl.read_parquet_metadata(handle).get(KEY, "{}"))
    except DAMAGED_TABLE:
        return False  # cut off, as by a copy that was stopped
    if found == recorded:
        return True
    different = sorted(name for name in {*found, *recorded} if found.get(name) != recorded.get(name))
    if overwrite:
        return False
    raise InputError(
        f"{file} was made with {'another ' if different == ['model'] else 'other values of '}"
        f"{', '.join(different)}; give another `out`, or use `overwrite` to replace it"
    )


def write_part(frames: Iterable[pl.DataFrame], folder: Path, shard: Shard, recorded: dict[str, Any]) -> None:
    """Write the frames of a shard to its part, atomically. `recorded` is what the part is made from."""
    metadata = {KEY: json.dumps(recorded)}
    atomic.write_file(part_file(folder, shard), lambda place: write_parquet(frames, place, metadata))


def write_parquet(frames: Iterable[pl.DataFrame], place: Path, metadata: dict[str, str] | None = None) -> None:
    """Write each frame to a file, then all into one, so that only a few frames are in memory at a time."""
    for left in place.parent.glob(f"{place.name.rsplit('.', 2)[0]}.*.{SCRATCH}"):  # of a job that was killed
        if time.time() - left.stat().st_mtime > atomic.STALE:
            shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(f".{SCRATCH}", f"{place.name}.", place.parent) as scratch:
        files: list[Path] = []
        for number, frame in enumerate(frames):
            files.append(Path(scratch) / f"{number}.parquet")
            frame.write_parquet(files[-1], compression="uncompressed")
        pl.scan_parquet(files, glob=False).sink_parquet(place, metadata=metadata, row_group_size=ROW_GROUP)
