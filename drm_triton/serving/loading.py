"""Load a model for the service: a copy in memory, which files that change later cannot reach.

A loaded model maps its files. If they were replaced in place, the service would rank with parts of two models; if they
were truncated, the system would end it (SIGBUS).
"""

from __future__ import annotations

import copy
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from drm_triton.data.csr import CSR
from drm_triton.errors import InputError
from drm_triton.models import load
from drm_triton.recommender import Recommender
from drm_triton.training.run import checkpoint_directory

ATTEMPTS = 5  # readings of a model whose files change meanwhile


def load_in_memory(path: Path) -> Recommender[Any]:
    """Load a saved model, or the best checkpoint of a run, into memory.

    Raises
    ------
    InputError
        If there is no model, if it cannot be read, or if its files change each time that they are read.
    """
    for _ in range(ATTEMPTS):
        before = _stamp(path)
        model = in_memory(load(path))
        if _stamp(path) == before:
            return model
    raise InputError(f"{path}: the model changes while it is read; try again when it is complete")


def in_memory(model: Recommender[Any]) -> Recommender[Any]:
    """Replace everything that a fitted model maps from files by a copy, and return the model."""
    data = copy.copy(model.interactions)
    data._users, data._items = data.users, data.items  # reads tables that have not been read yet
    for name, value in vars(data).items():
        if isinstance(value, CSR):
            weights = None if value.weights is None else np.array(value.weights)
            setattr(data, name, CSR(np.array(value.indptr), np.array(value.indices), value.shape, weights))
    model._tensors = {name: tensor.clone() for name, tensor in model.tensors.items()}
    model._interactions = data
    return model


def _stamp(path: Path) -> dict[str, tuple[int, int, int]]:
    """Return inode, size and time of change of every file of a model."""
    found = {}
    for folder, _, names in os.walk(checkpoint_directory(path), followlinks=True):
        for name in names:
            with suppress(FileNotFoundError):  # a training removes files that are no longer needed
                state = os.stat(os.path.join(folder, name))
                found[os.path.join(folder, name)] = (state.st_ino, state.st_size, state.st_mtime_ns)
    return found
