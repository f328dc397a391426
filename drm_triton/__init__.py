"""drm-triton: top-K recommenders trained with ranking losses: softmax over the catalogue, or DRM."""

import importlib
from typing import TYPE_CHECKING, Any

from drm_triton._version import __version__

if TYPE_CHECKING:
    from drm_triton.config import TrainConfig
    from drm_triton.data.dataset import Dataset
    from drm_triton.functional import DRMLoss, drm_loss, relaxed_metric, soft_topk
    from drm_triton.losses import bpr_loss, psl_loss, softmax_at_k_loss, softmax_loss
    from drm_triton.model import DRM

# Public name -> module that defines it. Modules are imported on first use, so `import drm_triton` is fast:
# torch alone takes a second or two, and preparing data does not need it.
_PUBLIC = {
    "DRM": "drm_triton.model",
    "DRMLoss": "drm_triton.functional",
    "Dataset": "drm_triton.data.dataset",
    "TrainConfig": "drm_triton.config",
    "bpr_loss": "drm_triton.losses",
    "drm_loss": "drm_triton.functional",
    "psl_loss": "drm_triton.losses",
    "relaxed_metric": "drm_triton.functional",
    "soft_topk": "drm_triton.functional",
    "softmax_at_k_loss": "drm_triton.losses",
    "softmax_loss": "drm_triton.losses",
}

__all__ = [
    "DRM",
    "DRMLoss",
    "Dataset",
    "TrainConfig",
    "__version__",
    "bpr_loss",
    "drm_loss",
    "psl_loss",
    "relaxed_metric",
    "soft_topk",
    "softmax_at_k_loss",
    "softmax_loss",
]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'drm_triton' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
