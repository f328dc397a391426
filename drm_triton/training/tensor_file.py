"""Safetensors files with a text about their content, and the checksum of both.

The safetensors library writes them. It maps a file to read it: every page that was read counts as memory, and if the
file were truncated in the meantime, the system would end the process (SIGBUS). So files are read here, block by block:
a length of 8 bytes, a header in JSON, and the bytes of the tensors, one after the other.
"""

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BufferedReader
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors.torch
import torch
from numpy.typing import NDArray
from torch import Tensor

from drm_triton.errors import InputError

ABOUT, CHECKSUM = "drm-triton", "checksum"  # text entries of the header
ADVICE = "restore the directory from a copy, or train again"  # if a file is missing or damaged
LONGEST_HEADER = 100_000_000  # bytes, as in the safetensors library
BLOCK = 1 << 22  # bytes that are read and hashed at once
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


class Layout(NamedTuple):
    """Type, shape and place of a tensor in a file. Every tensor has rows."""

    dtype: torch.dtype
    shape: tuple[int, ...]  # [rows, ...]
    offset: int  # of its first byte in the file

    @property
    def row_bytes(self) -> int:
        """The size of a row."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """The size of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


def checksum(tensors: Mapping[str, Tensor], about: str) -> str:
    """Return the SHA-256 of the text and of the name, type, shape and bytes of each tensor, by name."""
    digest = hashlib.sha256(about.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(_title(name, tensor.dtype, tensor.shape))
        digest.update(_bytes(tensor).data)
    return digest.hexdigest()


def write(place: Path, tensors: dict[str, Tensor], about: str, checksum: str) -> None:
    """Write a file, not atomically."""
    safetensors.torch.save_file(tensors, place, {ABOUT: about, CHECKSUM: checksum})


class TensorFile:
    """An open file.

    Attributes
    ----------
    about : the text about the content; empty if there is none
    checksum : the checksum that the file records; None if there is none
    tensors : the layout of each tensor, by name
    """

    def __init__(self, file: BufferedReader) -> None:
        self.file = file
        after_length = os.fstat(file.fileno()).st_size - 8
        size = int.from_bytes(file.read(8), "little")
        if size > min(after_length, LONGEST_HEADER):
            raise ValueError("its header is cut off, or it is not a safetensors file")
        header = json.loads(file.read(size).decode())
        if not isinstance(header, dict) or not all(isinstance(entry, dict) for entry in header.values()):
            raise ValueError("its header is damaged")
        texts = header.pop("__metadata__", {})
        if not {*texts} <= {ABOUT, CHECKSUM} or not all(isinstance(text, str) for text in texts.values()):
            raise ValueError("its metadata is damaged")
        self.about: str = texts.get(ABOUT, "")
        self.checksum: str | None = texts.get(CHECKSUM)
        self.tensors = _layouts(header, 8 + size, 8 + after_length)

    def is_at(self, path: Path) -> bool:
        """Return whether a path still leads to this file, and not to one that replaced it."""
        try:
            return os.path.samestat(os.fstat(self.file.fileno()), path.stat())
        except OSError:
            return False

    def read(self, wanted: Mapping[str, tuple[int, Tensor]]) -> str:
        """Read rows of tensors, and return the checksum of the entire file. It needs one block of memory.

        Parameters
        ----------
        wanted : by name, the first row to read and a contiguous tensor that the rows from there on fill
        """
        digest, scratch = hashlib.sha256(self.about.encode()), np.empty(BLOCK, np.uint8)
        for name, layout in sorted(self.tensors.items()):
            digest.update(_title(name, layout.dtype, layout.shape))
            self.file.seek(layout.offset)
            first, tensor = wanted.get(name, (0, None))
            out = scratch[:0] if tensor is None else _bytes(tensor)
            before = first * layout.row_bytes
            after = layout.nbytes - before - len(out)
            for block in chain(_skipped(scratch, before), _split(out), _skipped(scratch, after)):
                if self.file.readinto(block.data) != len(block):
                    raise ValueError("it is cut off")
                digest.update(block.data)
        return digest.hexdigest()


@contextmanager
def opened(path: Path, what: str, missing: str) -> Iterator[TensorFile]:
    """Open a file. An error of the file, also within the block, becomes an `InputError`.

    Parameters
    ----------
    path : the file
    what : what the file should be, for the message
    missing : the message if there is no such file
    """
    try:
        with path.open("rb") as file:
            yield TensorFile(file)
    except InputError:
        raise
    except FileNotFoundError:
        raise InputError(f"{path}: {missing}") from None
    except (OSError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise InputError(f"{path}: not a readable {what} ({error})") from error


def is_size(value: Any) -> bool:
    """Return whether a value that was read can be a size. Above 2^48, no file can hold it."""
    return type(value) is int and 0 <= value < 1 << 48


def _layouts(header: dict[str, dict[str, Any]], start: int, end: int) -> dict[str, Layout]:
    """Return the layouts of the tensors of a header. Their bytes must fill the file from `start` to `end`."""
    layouts, place = {}, start
    for name, entry in sorted(header.items(), key=lambda item: item[1].get("data_offsets", [0])):
        dtype, shape = DTYPES.get(entry.get("dtype", "")), entry.get("shape")
        if dtype is None or not isinstance(shape, list) or not shape or not all(map(is_size, shape)):
            raise ValueError(f"type or shape of {name} is damaged")
        layouts[name] = layout = Layout(dtype, tuple(shape), place)
        if entry.get("data_offsets") != [place - start, place - start + layout.nbytes]:
            raise ValueError(f"{name} is not where its header says")
        place += layout.nbytes
    if place != end:
        raise ValueError(f"it has {end:,} bytes, but its header says {place:,}")
    return layouts


def _title(name: str, dtype: torch.dtype, shape: Sequence[int]) -> bytes:
    return f"\n{name} {dtype} {list(shape)}\n".encode()


def _bytes(tensor: Tensor) -> NDArray[np.uint8]:
    """Return a contiguous tensor as an array of bytes, which shares its memory."""
    array: NDArray[np.uint8] = tensor.view(-1).view(torch.uint8).numpy()
    return array


def _split(array: NDArray[np.uint8]) -> Iterator[NDArray[np.uint8]]:
    """Return blocks that make up an array."""
    return (array[start : start + BLOCK] for start in range(0, len(array), BLOCK))


def _skipped(scratch: NDArray[np.uint8], size: int) -> Iterator[NDArray[np.uint8]]:
    """Return blocks of `size` bytes in total that share one piece of memory."""
    return (scratch[: min(BLOCK, size - start)] for start in range(0, size, BLOCK))
