"""A model with the users of one shard, so that independent jobs recommend to all users.

It holds the rows of its users only: of the factors, of the interactions and of the ids. It has all items, and what
depends on all users, such as the popularity of items, is that of the whole model. So the recommendations of all shards,
one after the other, are those of the whole model, row for row.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from drm_triton.data import store
from drm_triton.data.attributes import RESERVED
from drm_triton.data.dataset import Dataset
from drm_triton.data.prepare.inputs import sha256
from drm_triton.data.shard import Shard
from drm_triton.models import load, model_class
from drm_triton.ranking.cold import Vectors
from drm_triton.recommender.factors import FactorRecommender
from drm_triton.training import checkpoint
from drm_triton.training.run import checkpoint_directory

if TYPE_CHECKING:
    from drm_triton.recommender.recommender import Recommender


def load_shard(path: str | Path, shard: Shard, verify: bool = False) -> Recommender[Any]:
    """Load the part of a saved model, or of the best checkpoint of a run, that has the users of a shard.

    Of a model file, all of it is verified, block by block; of a model in shards, those files that have some of the
    users or items. If users or items have attributes, the whole model is loaded, because vectors of cold items are
    predicted from all others.

    Parameters
    ----------
    path : directory of the model or the run
    shard : which users
    verify : verify all of the interactions even if they were verified before; see `DRM.load`
    """
    place = checkpoint_directory(path)
    file = place / checkpoint.FILE
    kind = model_class(checkpoint.read_metadata(file).get("model", "drm"))
    if any(set(store.table_columns(place / "data", name)) - set(RESERVED) for name in ("users", "items")):
        model = load(path, verify=verify)
        return _part_of(model, shard.users(model.interactions.n_users))
    if verify:
        checkpoint.check_recorded(file)
    data = Dataset.load(place / "data", verify=verify)
    users = shard.users(data.n_users)
    own = slice(users.start, users.stop)
    learned = [name for name in checkpoint.names(file) if not name.endswith("_state")]  # of the optimiser
    rows = {name: own if name in kind.user_tensors else slice(None) for name in learned}
    tensors, metadata = checkpoint.read_rows(file, rows)
    return kind.restored(place, tensors, metadata, data.of_users(users))


def described(path: str | Path) -> dict[str, str | None]:
    """Return what identifies a model and its data, without reading them: the checksums that they record."""
    place = checkpoint_directory(path)
    file = place / checkpoint.FILE
    data = store.read_meta(place / "data")
    return {
        "model": checkpoint.identity(file) or str(sha256([file])[0]["sha256"]),  # version 0.2 recorded none
        "data": data.get("checksum"),
        "titles": data.get("titles"),
        "dropped": (data.get("dropped") or {}).get("checksum"),
    }


def _part_of(model: Recommender[Any], users: range) -> Recommender[Any]:
    """Return a model with some of the users of a loaded one. Predicted vectors stay those of the whole model."""
    part = type(model)(model.config)
    rows = slice(users.start, users.stop)
    part._tensors = {name: x[rows] if name in model.user_tensors else x for name, x in model.tensors.items()}
    part._interactions = model.interactions.of_users(users)
    part._epoch, part._place, part._fitted_config = model._epoch, model._place, model._fitted_config
    if isinstance(model, FactorRecommender) and isinstance(part, FactorRecommender):
        U, V, cold_users, cold_items = model.vectors
        part._vectors = part._tensors, Vectors(U[rows], V, cold_users[rows], cold_items)
    return part
