"""A checkpoint in row shards: which file holds which rows of which tensor.

A shard `model-TAG-RANK-of-WORLD.safetensors` holds some consecutive rows of each tensor. The manifest, which is the
model file (see `checkpoint`), lists the shards:

    file       its name, in the directory of the manifest
    checksum   of its content, see `tensor_file.checksum`
    tensors    for each tensor: its `first` row in this shard, the number of `rows` in this shard, the `total` rows of
               the tensor, its `dtype`, and the `shape` of a row
"""

import math
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from drm_triton import atomic
from drm_triton.errors import InputError
from drm_triton.training.tensor_file import ADVICE, DTYPES, is_size, opened

NAME = re.compile(r"model-[\w.+-]+-\d+-of-\d+\.safetensors", re.ASCII)
TYPE_NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}


class Rows(NamedTuple):
    """Consecutive rows of a tensor."""

    first: int
    rows: int
    total: int  # rows of the tensor
    dtype: torch.dtype
    shape: tuple[int, ...]  # of a row

    def described(self) -> dict[str, Any]:
        """Return the description in the manifest."""
        return {**self._asdict(), "dtype": str(self.dtype).removeprefix("torch."), "shape": [*self.shape]}

    def within(self, wanted: range) -> range:
        """Return which of the wanted rows of the tensor are here."""
        return range(max(self.first, wanted.start), min(self.first + self.rows, wanted.stop))


class Shard(NamedTuple):
    """A file with rows of tensors."""

    file: str
    checksum: str
    tensors: dict[str, Rows]

    def has_some(self, wanted: Mapping[str, range]) -> bool:
        """Return whether some of the wanted rows of tensors are in this file."""
        return any(part.within(wanted.get(name, range(0))) for name, part in self.tensors.items())

    def described(self) -> dict[str, Any]:
        """Return the description in the manifest."""
        return {**self._asdict(), "tensors": {name: rows.described() for name, rows in self.tensors.items()}}


def file_name(tag: str, rank: int, world_size: int) -> str:
    """Return the name of a shard.

    Examples
    --------
    >>> file_name("e3-p4096", 1, 4)
    'model-e3-p4096-1-of-4.safetensors'
    """
    name = f"model-{tag}-{rank}-of-{world_size}.safetensors"
    if not NAME.fullmatch(name) or not 0 <= rank < world_size:
        raise ValueError(f"{name!r} is not the name of a shard")
    return name


def parsed(described: Any) -> list[Shard]:
    """Return the shards that a manifest describes. Raise `ValueError` if they are not all rows, each of them once."""
    try:
        found = [Shard(shard["file"], shard["checksum"], _parsed_rows(shard["tensors"])) for shard in described]
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"the description of its shards is damaged: {error}") from None
    for shard in found:
        if not isinstance(shard.file, str) or not NAME.fullmatch(shard.file):
            raise ValueError(f"{shard.file!r} is not the name of a shard")
        if not isinstance(shard.checksum, str):
            raise ValueError(f"the checksum of {shard.file} is {shard.checksum!r}")
    if len({shard.file for shard in found}) < len(found):
        raise ValueError("it names a shard twice")
    for name in {name: None for shard in found for name in shard.tensors}:
        _check_complete(name, [shard.tensors[name] for shard in found if name in shard.tensors])
    return found


def _parsed_rows(described: dict[str, dict[str, Any]]) -> dict[str, Rows]:
    found = {}
    for name, entry in described.items():
        dtype = TYPE_NAMES.get(entry["dtype"])
        first, rows, total, shape = (entry[key] for key in ("first", "rows", "total", "shape"))
        if dtype is None or not isinstance(shape, list) or not all(map(is_size, [first, rows, total, *shape])):
            raise ValueError(f"the description of the rows of {name} is damaged")
        found[name] = Rows(first, rows, total, dtype, tuple(shape))
    return found


def _check_complete(name: str, parts: list[Rows]) -> None:
    """Raise `ValueError` if the parts of a tensor are not all its rows, each of them once."""
    if len({part[2:] for part in parts}) > 1:
        raise ValueError(f"its shards disagree about the shape or the type of {name}")
    here, total = 0, parts[0].total
    for part in sorted(parts):
        if part.rows and part.first != here:
            missing, row = part.first > here, min(part.first, here)
            raise ValueError(f"row {row:,} of {name} is in {'none' if missing else 'more than one'} of its shards")
        here += part.rows
    if here != total:
        raise ValueError(f"its shards have {here:,} rows of {name}, not {total:,}")


def check_files(folder: Path, shards: Sequence[Shard]) -> None:
    """Raise `ValueError` if a shard is missing, or has too few bytes for its rows."""
    for shard in shards:
        need = sum(part.rows * math.prod(part.shape) * part.dtype.itemsize for part in shard.tensors.values())
        try:
            size = os.path.getsize(folder / shard.file)
        except FileNotFoundError:
            raise ValueError(f"its shard {shard.file} is missing in {folder}") from None
        if size < need:
            raise ValueError(f"its shard {shard.file} is cut off: {size:,} bytes, at least {need:,} expected")


def read(folder: Path, shard: Shard, wanted: Mapping[str, range], out: Mapping[str, Tensor]) -> None:
    """Read the wanted rows that are in a shard, and verify all of the shard.

    Parameters
    ----------
    folder, shard : the file
    wanted : rows of tensors, by name
    out : tensors for these rows, of which those that are in the shard are filled
    """
    path = folder / shard.file
    with opened(path, "shard of a model", f"a shard of the model is missing; {ADVICE}") as file:
        found = {name: (layout.dtype, layout.shape) for name, layout in file.tensors.items()}
        if found != {name: (part.dtype, (part.rows, *part.shape)) for name, part in shard.tensors.items()}:
            raise InputError(f"{path} is a shard of another model: its tensors have other shapes; {ADVICE}")
        places = {}
        for name, part in shard.tensors.items():
            rows = wanted.get(name, range(0))
            here = part.within(rows)
            if here:
                places[name] = here.start - part.first, out[name][here.start - rows.start : here.stop - rows.start]
        checksum = file.read(places)
        if checksum == file.checksum != shard.checksum:
            raise InputError(f"{path} is a shard of another checkpoint: its checksum is another; {ADVICE}")
        if checksum != shard.checksum:
            raise InputError(f"{path} is damaged: its content does not have the recorded checksum; {ADVICE}")


def remove_unnamed(folder: Path, named: Sequence[Shard]) -> None:
    """Remove the shards of a directory except those that are named, and what killed processes left of others."""
    kept = {shard.file for shard in named}
    doomed = [
        folder / entry
        for entry in os.listdir(folder)
        if (NAME.fullmatch(entry) and entry not in kept)
        or (entry.startswith(".model") and entry.endswith(atomic.PARTIAL))
    ]
    with suppress(OSError):  # the next checkpoint tries again
        if doomed:
            atomic.flush(folder)  # the manifest that does not name them must be there first, also after a power cut
        for file in doomed:
            file.unlink()
