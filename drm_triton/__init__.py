"""drm-triton: top-K recommenders trained on the ranking metric itself."""

import importlib
from typing import TYPE_CHECKING, Any

from drm_triton._version import __version__

if TYPE_CHECKING:
    from drm_triton.data.dataset import Dataset

# Public name -> module that defines it. Loaded on first use, so that `import drm_triton` is quick:
# torch alone takes a second or two, and a data-preparation script never needs it.
_PUBLIC = {
    "Dataset": "drm_triton.data.dataset",
}

__all__ = ["Dataset", "__version__"]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'drm_triton' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
