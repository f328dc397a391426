"""Data sets: where they are, how they are stored, and how raw files are prepared."""

import os
from pathlib import Path


def data_dir() -> Path:
    """Return the directory of data sets: $DRM_DATA, or data/ in the working directory."""
    return Path(os.environ.get("DRM_DATA") or "data")


def find_dataset(name: str | Path) -> Path:
    """Return the directory of a prepared data set, given as a path or as a name under the data directory.

    A path comes first, if there is a data set at it.
    """
    under = data_dir() / name
    taken = os.path.exists(Path(name) / "meta.json") or not os.path.exists(under)
    return Path(name) if taken else under
