import os
from pathlib import Path


def data_dir() -> Path:
    """Return where data lives by default: $DRM_DATA, or data/ in the working directory."""
    return Path(os.environ.get("DRM_DATA") or "data")
