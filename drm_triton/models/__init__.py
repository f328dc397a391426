"""The models besides `DRM`, with the same methods: the baselines of the paper, and strong ones of today.

>>> from drm_triton.models import Popularity
>>> Popularity()
Popularity()
"""

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drm_triton.errors import InputError

if TYPE_CHECKING:
    from drm_triton.models.bpr import BPR
    from drm_triton.models.cdae import CDAE
    from drm_triton.models.cml import CML
    from drm_triton.models.ease import EASE
    from drm_triton.models.gfcf import GFCF
    from drm_triton.models.ials import IALS
    from drm_triton.models.itemknn import ItemKNN
    from drm_triton.models.popularity import Popularity
    from drm_triton.models.rp3beta import RP3beta
    from drm_triton.models.slim import SLIM
    from drm_triton.models.sqlrank import SQLRank
    from drm_triton.models.srrmf import SRRMF
    from drm_triton.models.warp import WARP
    from drm_triton.models.wmf import WMF
    from drm_triton.recommender import Recommender

# The name of a model, as in `drm-triton train --model` -> its module and its class. Modules are imported on first use.
MODELS = {
    "drm": ("drm_triton.model", "DRM"),
    "slim": ("drm_triton.models.slim", "SLIM"),
    "cdae": ("drm_triton.models.cdae", "CDAE"),
    "bpr": ("drm_triton.models.bpr", "BPR"),
    "wmf": ("drm_triton.models.wmf", "WMF"),
    "warp": ("drm_triton.models.warp", "WARP"),
    "cml": ("drm_triton.models.cml", "CML"),
    "sqlrank": ("drm_triton.models.sqlrank", "SQLRank"),
    "srrmf": ("drm_triton.models.srrmf", "SRRMF"),
    "ials": ("drm_triton.models.ials", "IALS"),
    "ease": ("drm_triton.models.ease", "EASE"),
    "rp3beta": ("drm_triton.models.rp3beta", "RP3beta"),
    "itemknn": ("drm_triton.models.itemknn", "ItemKNN"),
    "gfcf": ("drm_triton.models.gfcf", "GFCF"),
    "popularity": ("drm_triton.models.popularity", "Popularity"),
}

__all__ = [
    "BPR",
    "CDAE",
    "CML",
    "EASE",
    "GFCF",
    "IALS",
    "SLIM",
    "SRRMF",
    "WARP",
    "WMF",
    "ItemKNN",
    "Popularity",
    "RP3beta",
    "SQLRank",
    "load",
    "model_class",
]


def model_class(name: str) -> "type[Recommender[Any]]":
    """Return the class of a model by its name.

    Examples
    --------
    >>> model_class("popularity").__name__
    'Popularity'
    """
    if name not in MODELS:
        raise InputError(f"`model` must be one of {', '.join(MODELS)}, got {name!r}")
    module, class_name = MODELS[name]
    found: type[Recommender[Any]] = getattr(importlib.import_module(module), class_name)
    return found


def load(path: str | Path, mapped: bool = True, verify: bool = False) -> "Recommender[Any]":
    """Load a saved model of any kind, or the best checkpoint of a run. See `DRM.load` for the parameters."""
    from drm_triton.training import checkpoint
    from drm_triton.training.run import checkpoint_directory

    metadata = checkpoint.read_metadata(checkpoint_directory(path) / checkpoint.FILE)
    return model_class(metadata.get("model", "drm")).load(path, mapped, verify)


def __getattr__(name: str) -> Any:
    for module, class_name in MODELS.values():
        if name == class_name and module.startswith(__name__):
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
