"""Load a model for the service: all of it into memory, where files that change later cannot reach it.

If files were mapped and then replaced in place, the service would rank with parts of two models. If they were
truncated, the system would end it (SIGBUS).
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from drm_triton.errors import InputError
from drm_triton.models import load
from drm_triton.recommender import Recommender
from drm_triton.training.run import checkpoint_directory

ATTEMPTS = 5  # readings of a model whose files change meanwhile


def load_in_memory(path: Path, verify: bool = False) -> Recommender[Any]:
    """Load a saved model, or the best checkpoint of a run, into memory.

    Parameters
    ----------
    path : directory of the model or the run
    verify : compute all checksums again; see `DRM.load`

    Raises
    ------
    InputError
        If there is no model, if it cannot be read, or if its files change each time that they are read.
    """
    for _ in range(ATTEMPTS):
        before = _stamp(path)
        model = load(path, mapped=False, verify=verify)
        if _stamp(path) == before:
            return model
    raise InputError(f"{path}: the model changes while it is read; try again when it is complete")


def _stamp(path: Path) -> dict[str, tuple[int, int, int]]:
    """Return inode, size and time of change of every file of a model."""
    found = {}
    for folder, _, names in os.walk(checkpoint_directory(path), followlinks=True):
        for name in names:
            with suppress(FileNotFoundError):  # a training removes files that are no longer needed
                state = os.stat(os.path.join(folder, name))
                found[os.path.join(folder, name)] = (state.st_ino, state.st_size, state.st_mtime_ns)
    return found
