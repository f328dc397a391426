"""A model with the users of one shard, so that independent jobs recommend to all users.

It holds the rows of its users only: of the factors, of the interactions and of the ids. It has all items, and what
depends on all users, such as the popularity of items, is that of the whole model. So the recommendations of all shards,
one after the other, are those of the whole model, row for row.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors

from drm_triton.data import store, verify
from drm_triton.data.attributes import RESERVED
from drm_triton.data.dataset import Dataset
from drm_triton.data.prepare.inputs import sha256
from drm_triton.data.shard import Shard
from drm_triton.errors import InputError
from drm_triton.models import load, model_class
from drm_triton.ranking.cold import Vectors
from drm_triton.recommender.factors import FactorRecommender
from drm_triton.training import checkpoint
from drm_triton.training.run import checkpoint_directory

if TYPE_CHECKING:
    from drm_triton.recommender.recommender import Recommender

HASHED = 1 << 24  # bytes of a model file that are hashed at a time
TYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32"}


def load_shard(path: str | Path, shard: Shard) -> Recommender[Any]:
    """Load the part of a saved model, or of the best checkpoint of a run, that has the users of a shard.

    The model file and the interactions are verified in full when a machine first sees them, block by block. If users or
    items have attributes, the whole model is loaded, because vectors of cold items are predicted from all others.
    """
    place = checkpoint_directory(path)
    file = place / checkpoint.FILE
    kind = model_class(checkpoint.read_metadata(file).get("model", "drm"))
    data = Dataset.load(place / "data")
    users = shard.users(data.n_users)
    if any(set(store.table_columns(place / "data", name)) - set(RESERVED) for name in ("users", "items")):
        return _part_of(load(path), users)
    current = verify.stamp(place)
    if not verify.is_known(place, current):
        _verify(file)
        verify.remember(place, current)
    with safetensors.safe_open(file, framework="pt") as opened:
        metadata = json.loads(opened.metadata()[checkpoint.ABOUT])
        tensors = {}
        for name in opened.keys():  # noqa: SIM118 (not a mapping)
            rows = opened.get_slice(name)
            tensors[name] = rows[users.start : users.stop] if name in kind.user_tensors else opened.get_tensor(name)
    return kind.restored(place, tensors, metadata, data.of_users(users))


def described(path: str | Path) -> dict[str, str | None]:
    """Return what identifies a model and its data, without reading them: the checksums that they record."""
    place = checkpoint_directory(path)
    file = place / checkpoint.FILE
    checkpoint.read_metadata(file)  # says what is wrong with a file that is no model
    with safetensors.safe_open(file, framework="pt") as opened:
        model = opened.metadata().get(checkpoint.CHECKSUM)
    if model is None:  # a file of version 0.2
        model = str(sha256([file])[0]["sha256"])
    data = store.read_meta(place / "data")
    return {"model": model, "data": data.get("checksum"), "titles": data.get("titles")}


def _part_of(model: Recommender[Any], users: range) -> Recommender[Any]:
    """Return a model with some of the users of a loaded one. Predicted vectors stay those of the whole model."""
    part = type(model)(model.config)
    rows = slice(users.start, users.stop)
    part._tensors = {name: x[rows] if name in model.user_tensors else x for name, x in model.tensors.items()}
    part._interactions = model.interactions.of_users(users)
    part._epoch, part._place = model._epoch, model._place
    if isinstance(model, FactorRecommender) and isinstance(part, FactorRecommender):
        U, V, cold_users, cold_items = model.vectors
        part._vectors = part._tensors, Vectors(U[rows], V, cold_users[rows], cold_items)
    return part


def _verify(file: Path) -> None:
    """Raise if a model file does not have the checksum that it records, without holding it in memory."""
    with file.open("rb") as handle:
        size = int.from_bytes(handle.read(8), "little")
        header = json.loads(handle.read(size))
        about = header.pop("__metadata__")
        digest = hashlib.sha256(about[checkpoint.ABOUT].encode())  # as in `checkpoint.checksum`
        for name, described in sorted(header.items()):
            kind = TYPES.get(described["dtype"], described["dtype"])
            digest.update(f"\n{name} torch.{kind} {described['shape']}\n".encode())
            begin, end = described["data_offsets"]
            handle.seek(8 + size + begin)
            for position in range(begin, end, HASHED):
                digest.update(handle.read(min(HASHED, end - position)))
    if about.get(checkpoint.CHECKSUM) not in (None, digest.hexdigest()):
        raise InputError(
            f"{file} is damaged: its content does not have the checksum that it records; train again, or restore it "
            "from a copy"
        )
