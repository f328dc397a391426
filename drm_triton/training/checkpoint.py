"""A model on disk: a directory with a safetensors file and the interactions it was fit on.

    model.safetensors   what the model has learned: user_factors [M, d], item_factors [N, d] of a factor model; also
                        user_state, item_state if training can resume. The text in its header is one JSON object:
                        format, version, model, config, training progress; and the checksum of all this
    data/               users.parquet, items.parquet (external ids, titles) and the interactions, see `data.store`

Only model.safetensors changes during training. It is written atomically: a reader, or a run that resumes after a kill,
finds the old model or the new one.

A training on several processes writes row shards beside it, all at once, each process its own (`write_shard`). The
model file then has no tensors, but a list of the shards, see `shards`: it is a manifest, which one process writes when
all shards are complete (`write_manifest`). `read_tensors` and `read_rows` read both.
"""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drm_triton import atomic
from drm_triton.errors import DrmError, InputError
from drm_triton.kernels.precision import widened
from drm_triton.training import shards, tensor_file
from drm_triton.training.shards import Rows, Shard
from drm_triton.training.tensor_file import ADVICE, TensorFile

FORMAT, SHARD_FORMAT = "drm-triton model", "drm-triton shard"
VERSION = 1
FILE = "model.safetensors"
KINDS = {"model": str, "config": dict, "training": dict, "shards": list}  # of the entries of the JSON object
ATTEMPTS = 5  # readings of a checkpoint that is replaced meanwhile


# -- writing -----------------------------------------------------------------------------------------------------------


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, Any], also: Path | None = None) -> None:
    """Write a model file atomically, and link or copy it to a second path `also`. bfloat16 becomes float32."""
    _commit(path, _stored(tensors), metadata, also)


def write_shard(
    folder: Path,
    tag: str,
    rank: int,
    world_size: int,
    tensors: dict[str, Tensor],
    first_rows: dict[str, int],
    total_rows: dict[str, int],
) -> dict[str, Any]:
    """Write the rows that a process has, atomically. bfloat16 becomes float32.

    Parameters
    ----------
    folder : directory of the checkpoint
    tag : a name of this moment of the training, such as "e3-p4096". Another moment needs another tag, because the
        shards of the last checkpoint must stay until the next is complete
    rank, world_size : number of the process, and number of processes
    tensors : rows [n, ...] of each tensor; n may be 0, and differ between tensors
    first_rows, total_rows : the number of the first of these rows, and the number of rows of the entire tensor, by name

    Returns
    -------
    dict
        The description of the shard for `write_manifest`, of values that JSON knows.
    """
    tensors = _stored(tensors)
    rows = {
        name: Rows(first_rows[name], len(tensor), total_rows[name], tensor.dtype, tuple(tensor.shape[1:]))
        for name, tensor in tensors.items()
    }
    file = shards.file_name(tag, rank, world_size)
    described = {name: part.described() for name, part in rows.items()}
    about = json.dumps({"format": SHARD_FORMAT, "version": VERSION, "tensors": described})
    checksum = tensor_file.checksum(tensors, about)
    atomic.write_file(folder / file, lambda place: tensor_file.write(place, tensors, about, checksum))
    return Shard(file, checksum, rows).described()


def write_manifest(
    path: Path, described: list[dict[str, Any]], metadata: dict[str, Any], also: Path | None = None
) -> None:
    """Make the shards that all processes have written beside `path` the checkpoint, atomically.

    Then remove the shards of the checkpoint before it. A kill at any moment leaves the old checkpoint or the new one.

    Parameters
    ----------
    path : the model file
    described : what `write_shard` returned in each process
    metadata : as in `write_tensors`
    also : a second model file, in another directory, for the same checkpoint; its shards are links or copies

    Raises
    ------
    DrmError
        If the shards do not have all rows of each tensor, each of them once, or if one of them is not there.
    """
    try:
        found = shards.parsed(described)
        shards.check_files(path.parent, found)
    except ValueError as error:
        raise DrmError(
            f"cannot write {path}: {error}; all processes must write to the same directory; what was saved before is "
            "intact"
        ) from error
    if also is not None:
        for shard in found:
            link = partial(atomic.link_or_copy, path.parent / shard.file)
            atomic.write_file(also.parent / shard.file, link)
    _commit(path, {}, {**metadata, "shards": described}, also)


def remove_leftovers(path: Path) -> None:
    """Remove the shards beside a model file that it does not name. Nobody may be writing shards there meanwhile."""
    named: list[Shard] = []
    if path.exists():
        try:
            with _opened(path) as (_, _, found):
                named = found or []
        except InputError:  # it is damaged, and its shards may help to repair it
            return
    if path.parent.is_dir():
        shards.remove_unnamed(path.parent, named)


def _commit(path: Path, tensors: dict[str, Tensor], metadata: dict[str, Any], also: Path | None) -> None:
    """Write a model file, and before it a link or a copy of it. Then remove shards that are no longer needed."""
    about = json.dumps({"format": FORMAT, "version": VERSION, **metadata})
    checksum = tensor_file.checksum(tensors, about)
    places = [path] if also is None else [path, also]

    def write(temporary: Path) -> None:
        if "shards" in metadata:  # also after a power cut, they must be there if the manifest is
            for place in places:
                atomic.flush(place.parent)
        tensor_file.write(temporary, tensors, about, checksum)
        if also is not None:
            atomic.write_file(also, partial(atomic.link_or_copy, temporary))

    atomic.write_file(path, write)
    for place in places:
        remove_leftovers(place)


def _stored(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: widened(tensor.detach().cpu()).contiguous() for name, tensor in tensors.items()}


# -- reading -----------------------------------------------------------------------------------------------------------


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read a model file and verify its format and its checksum. Return its tensors, on the CPU, and its metadata."""
    tensors, metadata = _read(path, None)
    if metadata.get("model", "drm") == "drm":
        _check_present(path, {"user_factors", "item_factors"}, tensors)
    return tensors, metadata


def names(path: Path) -> list[str]:
    """Return the names of the tensors of a model file."""
    with _opened(path) as (file, _, found):
        return sorted(file.tensors if found is None else found[0].tensors)


def identity(path: Path) -> str | None:
    """Return the checksum that a model file records, that of a manifest if it has shards."""
    with _opened(path) as (file, _, _):
        return file.checksum


def check_recorded(path: Path) -> None:
    """Raise if a model file records no checksum, so that nothing tells if it is damaged."""
    if identity(path) is None:
        raise InputError(
            f"{path} cannot be verified: files of version 0.2 record no checksum; leave out `verify`, or load and save "
            "the model in Python, which records one"
        )


def read_rows(path: Path, rows: dict[str, slice]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read some rows of tensors of a model file, and verify every file that contains some of them.

    Besides the result it needs little memory, whatever the size of the tensors.

    Parameters
    ----------
    path : the model file
    rows : which rows of which tensors, for example {"user_factors": slice(100, 200)}

    Returns
    -------
    tensors, metadata
        These rows of each tensor, on the CPU, and the metadata, as `read_tensors` returns them.
    """
    return _read(path, rows)


def read_metadata(path: Path) -> dict[str, Any]:
    """Read the metadata of a model file and verify its format."""
    with _opened(path) as (_, metadata, _):
        return metadata


def _read(path: Path, rows: dict[str, slice] | None) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read some rows of tensors, or all rows of all tensors if `rows` is None."""
    for attempt in range(1, ATTEMPTS + 1):
        with _opened(path) as (file, metadata, found):
            try:
                return _read_opened(path, file, found, rows), metadata
            except InputError:
                # A training removes the shards of a checkpoint when the next one is complete.
                if found is None or file.is_at(path) or attempt == ATTEMPTS:
                    raise
    raise AssertionError


def _read_opened(
    path: Path, file: TensorFile, found: list[Shard] | None, rows: dict[str, slice] | None
) -> dict[str, Tensor]:
    if found is None:
        parts = {name: Rows(0, x.shape[0], x.shape[0], x.dtype, x.shape[1:]) for name, x in file.tensors.items()}
    else:
        parts = {name: part for shard in found for name, part in shard.tensors.items()}
        try:
            shards.check_files(path.parent, found)
        except ValueError as error:
            raise InputError(f"{path}: {error}; {ADVICE}") from None
    chosen = dict.fromkeys(parts, slice(None)) if rows is None else rows
    _check_present(path, chosen, parts)
    wanted = {name: range(parts[name].total)[one] for name, one in chosen.items()}
    if any(one.step != 1 for one in wanted.values()):
        raise ValueError(f"rows must be consecutive: {rows}")
    out = {name: torch.empty(len(one), *parts[name].shape, dtype=parts[name].dtype) for name, one in wanted.items()}
    checksum = file.read({name: (wanted[name].start, out[name]) for name in wanted.keys() & file.tensors.keys()})
    if file.checksum not in (None, checksum):
        raise InputError(f"{path} is damaged: its content does not have the checksum that it records; {ADVICE}")
    for shard in found or ():
        if rows is None or shard.has_some(wanted):
            shards.read(path.parent, shard, wanted, out)
    return out


def check_layout(tensors: dict[str, Tensor], layout: dict[str, Tensor], where: str | Path) -> None:
    """Raise if tensors do not have the names, shapes and types of `layout`, whose content is not used."""
    for name in [*layout, *tensors]:
        found, wanted = (
            f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}" if (x := group.get(name)) is not None else "none"
            for group in (tensors, layout)
        )
        if found != wanted:
            raise InputError(
                f"{where} is damaged: of the tensor {name} it has {found}, but its options and its data need {wanted}; "
                f"{ADVICE}"
            )


def _check_present(path: Path, names: Iterable[str], found: Iterable[str]) -> None:
    missing = {*names} - {*found}
    if missing:
        raise InputError(f"{path}: the model file lacks {', '.join(sorted(missing))}")


@contextmanager
def _opened(path: Path) -> Iterator[tuple[TensorFile, dict[str, Any], list[Shard] | None]]:
    """Open a model file. Yield it with its metadata, and with its shards if it is a manifest."""
    with tensor_file.opened(path, "model file", "no such model; give a run or checkpoint directory") as file:
        metadata = json.loads(file.about or "{}")
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
        described = metadata.pop("shards", None)
        # A file of version 0.2 has no checksum. A manifest has one, and no tensors.
        if "config" not in metadata or (described is not None and (file.tensors or file.checksum is None)):
            raise ValueError("its metadata is damaged")
        yield file, metadata, None if described is None else shards.parsed(described)
