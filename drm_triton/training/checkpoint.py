"""A model on disk: a directory with one safetensors file and the interactions it was fit on.

    model.safetensors   what the model has learned: user_factors [M, d], item_factors [N, d] of a factor model; also
                        user_state, item_state if training can resume. The metadata in its header is one JSON object:
                        format, version, model, config, training progress; and the checksum of all this
    data/               users.parquet, items.parquet (external ids, titles) and the interactions, see `data.store`

Only model.safetensors changes during training. It is written atomically: a reader, or a run that resumes after a kill,
finds the old model or the new one.
"""

import hashlib
import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from torch import Tensor

from drm_triton import atomic
from drm_triton.errors import InputError
from drm_triton.kernels.precision import widened

FORMAT = "drm-triton model"
VERSION = 1
FILE = "model.safetensors"
ABOUT, CHECKSUM = "drm-triton", "checksum"  # entries of the header
DTYPES = {"F32": torch.float32, "F64": torch.float64, "I32": torch.int32, "I64": torch.int64, "U8": torch.uint8}
KINDS = {"model": str, "config": dict, "training": dict}  # of the entries of the JSON object, where they are present


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, Any], also: Path | None = None) -> None:
    """Write a model file atomically, and link or copy it to a second path `also`. bfloat16 becomes float32."""
    tensors = {name: widened(tensor.detach().cpu()).contiguous() for name, tensor in tensors.items()}
    about = json.dumps({"format": FORMAT, "version": VERSION, **metadata})
    header = {ABOUT: about, CHECKSUM: checksum(tensors, about)}

    def write(temporary: Path) -> None:
        safetensors.torch.save_file(tensors, temporary, metadata=header)
        if also is not None:
            atomic.write_file(also, lambda place: _link(temporary, place))

    atomic.write_file(path, write)


def checksum(tensors: dict[str, Tensor], about: str) -> str:
    """Return the SHA-256 of the metadata and of the name, type, shape and bytes of each tensor, by name."""
    digest = hashlib.sha256(about.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"\n{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read a model file and verify its format and its checksum. Return its tensors, on the CPU, and its metadata."""
    with _opened(path) as (file, header, metadata):
        tensors = _read_all(file, header)
    if header.entries.get(CHECKSUM) not in (None, checksum(tensors, header.entries[ABOUT])):
        raise InputError(
            f"{path} is damaged: its content does not have the checksum that it records; train again, or restore it "
            "from a copy"
        )
    if metadata.get("model", "drm") == "drm":
        missing = {"user_factors", "item_factors"} - tensors.keys()
        if missing:
            raise InputError(f"{path}: the model file lacks {', '.join(sorted(missing))}")
    return tensors, metadata


def read_metadata(path: Path) -> dict[str, Any]:
    """Read the metadata of a model file and verify its format."""
    with _opened(path) as (_, _, metadata):
        return metadata


class _Header(NamedTuple):
    """What stands before the bytes of the tensors."""

    entries: dict[str, str]  # text entries
    tensors: dict[str, dict[str, Any]]  # dtype, shape and data_offsets of each


@contextmanager
def _opened(path: Path) -> Iterator[tuple[BufferedReader, _Header, dict[str, Any]]]:
    """Open a model file. Yield it, at the first byte of its tensors, with its header and the model's metadata."""
    try:
        with path.open("rb") as file:
            header = _read_header(file)
            metadata = json.loads(header.entries.get(ABOUT, "{}"))
            if not isinstance(metadata, dict) or metadata.get("format") != FORMAT:
                raise InputError(f"{path}: a safetensors file, but not a drm-triton model")
            if metadata.get("version") != VERSION:
                raise InputError(
                    f"{path}: model format version {metadata.get('version')!r}, but this program reads version "
                    f"{VERSION}; use the version of drm-triton that wrote it"
                )
            for name, kind in KINDS.items():
                if not isinstance(metadata.get(name, kind()), kind):
                    raise ValueError(f"{name} in its metadata is {metadata[name]!r}")
            # A file of version 0.2 has no checksum.
            if not {*header.entries} <= {ABOUT, CHECKSUM} or "config" not in metadata:
                raise ValueError("its metadata is damaged")
            yield file, header, metadata
    except InputError:
        raise
    except FileNotFoundError:
        raise InputError(f"{path}: no such model; give a run or checkpoint directory") from None
    except (OSError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise InputError(f"{path}: not a readable model file ({error})") from error


# The safetensors library maps a file. If it were truncated in the meantime, the system would end the process (SIGBUS).
# So the file is read here: a length, a header in JSON, and the bytes of the tensors, one after the other.


def _read_header(file: BufferedReader) -> _Header:
    """Read the header of a safetensors file, up to the first byte of its tensors."""
    size = int.from_bytes(file.read(8), "little")
    if size > os.fstat(file.fileno()).st_size - 8:
        raise ValueError("its header is cut off, or it is not a safetensors file")
    header = json.loads(file.read(size))
    if not isinstance(header, dict) or not all(isinstance(entry, dict) for entry in header.values()):
        raise ValueError("its header is damaged")
    entries = header.pop("__metadata__", {})
    if not all(isinstance(text, str) for text in entries.values()):
        raise ValueError("its metadata is damaged")
    return _Header(entries, header)


def _read_all(file: BufferedReader, header: _Header) -> dict[str, Tensor]:
    """Read the tensors of a safetensors file, which follow one another without gaps."""
    tensors, left = {}, os.fstat(file.fileno()).st_size - file.tell()
    place = 0
    for name, about in sorted(header.tensors.items(), key=lambda item: item[1].get("data_offsets", [0])):
        dtype, shape = DTYPES.get(about.get("dtype", "")), about.get("shape")
        if dtype is None or not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
            raise ValueError(f"type or shape of {name} is damaged")
        size = math.prod(shape) * dtype.itemsize
        if about.get("data_offsets") != [place, place + size] or place + size > left:
            raise ValueError(f"{name} is not where its header says")
        tensors[name] = torch.empty(shape, dtype=dtype)
        if size and file.readinto(tensors[name].view(-1).view(torch.uint8).numpy().data) != size:
            raise ValueError("it is cut off")
        place += size
    if place != left:
        raise ValueError("it has more bytes than its tensors")
    return tensors


def _link(existing: Path, new: Path) -> None:
    new.unlink()
    try:
        os.link(existing, new)
    except OSError:  # a file system without hard links
        new.write_bytes(existing.read_bytes())
