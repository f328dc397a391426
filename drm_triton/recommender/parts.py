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
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Part:
    """The file of one shard in a directory.

    Attributes
    ----------
    folder : the directory of all parts
    shard : which of them
    recorded : what it is made from
    """

    folder: Path
    shard: Shard
    recorded: dict[str, Any]

    @property
    def file(self) -> Path:
        """The file.

        Examples
        --------
        >>> Part(Path("top"), Shard(3, 16), {}).file.name
        'part-00003-of-00016.parquet'
        """
        return self.folder / f"part-{self.shard.index:05}-of-{self.shard.count:05}.parquet"

    def is_whole(self, overwrite: bool = False) -> bool:
        """Return whether the part is there already. Create the directory if need be.

        Parameters
        ----------
        overwrite : a part that was made from something else is to be replaced

        Raises
        ------
        InputError
            If the part was made from something else, or if the directory has parts of another number of shards.
        """
        if self.folder.exists() and not self.folder.is_dir():
            raise InputError(f"`out` {self.folder} is a file: with `shard`, give a directory for the parts")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"`out` {self.folder}: cannot create the directory ({error.strerror})") from None
        own = f"-of-{self.shard.count:05}.parquet"
        others = sorted(file.name for file in self.folder.glob("part-*-of-*.parquet") if not file.name.endswith(own))
        if others:
            raise InputError(
                f"`out` {self.folder} has parts of another number of shards, such as {others[0]}; give another "
                "directory, or remove them"
            )
        atomic.check_file(self.file, "give another `out`")
        if not self.file.exists():
            return False
        try:
            with self.file.open("rb") as handle:
                found = json.loads(pl.read_parquet_metadata(handle).get(KEY, "{}"))
        except DAMAGED_TABLE:
            return False  # cut off, as by a copy that was stopped
        if found == self.recorded or overwrite:
            return bool(found == self.recorded)
        names = sorted(name for name in {*found, *self.recorded} if found.get(name) != self.recorded.get(name))
        made = f"was made with {'another model' if 'model' in names else 'other values of ' + ', '.join(names)}"
        made = made if found else "is not a part that `recommend` wrote"
        raise InputError(f"{self.file} {made}; give another `out`, or use `overwrite` to replace it")

    def write(self, frames: Iterable[pl.DataFrame]) -> None:
        """Write the frames of the shard, atomically."""
        metadata = {KEY: json.dumps(self.recorded)}
        atomic.write_file(self.file, lambda place: write_parquet(frames, place, metadata))


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
