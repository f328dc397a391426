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
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors
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
    with _opened(path) as (file, metadata):
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        header = file.metadata()
    if CHECKSUM in header and header[CHECKSUM] != checksum(tensors, header[ABOUT]):
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
    with _opened(path) as (_, metadata):
        return metadata


@contextmanager
def _opened(path: Path) -> Iterator[tuple[Any, dict[str, Any]]]:
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            metadata = json.loads(header.get(ABOUT, "{}"))
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
            if not {*header} <= {ABOUT, CHECKSUM} or "config" not in metadata:  # a file of version 0.2 has no checksum
                raise ValueError("its metadata is damaged")
            yield file, metadata
    except InputError:
        raise
    except FileNotFoundError:
        raise InputError(f"{path}: no such model; give a run or checkpoint directory") from None
    except (safetensors.SafetensorError, OSError, ValueError, RecursionError, MemoryError) as error:
        raise InputError(f"{path}: not a readable model file ({error})") from error


def _link(existing: Path, new: Path) -> None:
    new.unlink()
    try:
        os.link(existing, new)
    except OSError:  # a file system without hard links
        new.write_bytes(existing.read_bytes())
