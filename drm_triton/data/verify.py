"""Whether the parts of a data set are what compiled code relies on, and which stores were found to be so before.

Compiled code checks no index. So a store is verified in full when it is loaded for the first time: its structure, and
the checksum of its content. A stamp in the user's cache records size, times and inode of its files. While they stay the
same, the store is loaded without reading it. A failing disk does not change them, and who can write to the disk below
the file system need not: `Dataset.load(path, verify=True)` reads everything again. A store that is found to be damaged
loses its stamp.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from drm_triton import atomic
from drm_triton.data.csr import CSR, rises
from drm_triton.data.store import ELSEWHERE
from drm_triton.user_cache import private_directory

BLOCK = 1 << 22  # interactions that are checked at a time
MOST_STAMPS = 2000  # kept in the cache; the older half is then removed

Stamp = dict[str, Any]


def find_problem(parts: dict[str, CSR]) -> str | None:
    """Return what is wrong with the structure of the parts of a data set, None if they are sound.

    Row pointers rise from 0 to the number of interactions. Columns are within the matrix and ascend within a row.
    Weights are positive and finite. No interaction is in two parts.
    """
    for name, matrix in parts.items():
        problem = _matrix_problem(matrix, name)
        if problem:
            return problem
    return _overlap(parts)


def _matrix_problem(matrix: CSR, name: str) -> str | None:
    indptr, indices, n_items = matrix.indptr, matrix.indices, matrix.shape[1]
    if not rises(indptr, len(indices)):
        return f"the row pointers of {name} do not rise from 0 to the number of its interactions"
    for start in range(0, len(indices), BLOCK):
        part = indices[start : start + BLOCK + 1]  # one more: the last is compared with the next block's first
        if part.min() < 0 or part.max() >= n_items:
            return f"{name} has items outside 0..{n_items - 1}"
        falls = start + 1 + np.flatnonzero(part[1:] <= part[:-1])
        if not np.array_equal(indptr[np.searchsorted(indptr, falls)], falls):  # only a new row may begin lower
            return f"the items of a user in {name} do not ascend"
        weights = None if matrix.weights is None else matrix.weights[start : start + BLOCK]
        if weights is not None and not (np.isfinite(weights) & (weights > 0)).all():
            return f"{name} has weights that are not positive and finite"
    return None


def _overlap(named: dict[str, CSR]) -> str | None:
    """Return a message if an interaction is in two of the parts."""
    parts = [part for part in named.values() if part.nnz]
    if len(parts) < 2:
        return None
    counts = np.sum([part.indptr for part in parts], axis=0)
    n_items, row = parts[0].shape[1], 0
    while row < len(counts) - 1:
        end = max(row + 1, int(np.searchsorted(counts, counts[row] + BLOCK, side="right")) - 1)
        keys = np.concatenate([_keys(part, row, end, n_items) for part in parts])
        keys.sort(kind="stable")  # merges the sorted parts
        if (keys[1:] == keys[:-1]).any():
            return f"an interaction is in more than one of {', '.join(named)}"
        row = end
    return None


def _keys(matrix: CSR, row: int, end: int, n_items: int) -> Any:
    degrees = np.diff(matrix.indptr[row : end + 1])
    return np.repeat(np.arange(row, end), degrees) * n_items + matrix.indices[matrix.indptr[row] : matrix.indptr[end]]


def unrecorded(meta: dict[str, Any], has_titles: bool) -> list[str]:
    """Return of which parts of a store meta.json records no checksum, so that nothing tells if they are damaged."""
    names = ["dropped", ELSEWHERE]
    known = {"the content": meta.get("checksum")} | ({"the titles": meta.get("titles")} if has_titles else {})
    known |= {f"{name}.*": meta[name].get("checksum") for name in names if meta.get(name) is not None}
    return [name for name, checksum in known.items() if checksum is None]


# -- stamps ------------------------------------------------------------------------------------------------------------


def stamp(path: Path) -> Stamp:
    """Return what tells whether the files of a directory have changed: size, times and inode of each."""
    found = {}
    for entry in sorted(os.scandir(path), key=lambda entry: entry.name):
        status = os.stat(entry.path)
        found[entry.name] = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
    return {"path": os.fsencode(os.path.realpath(path)).hex(), "files": found}


def is_known(path: Path, current: Stamp) -> bool:
    """Return whether a store was verified when its files had the stamp `current`."""
    file = _stamp_file(path)
    try:
        return file is not None and json.loads(file.read_text("utf-8")) == current
    except (OSError, ValueError):
        return False


def remember(path: Path, current: Stamp) -> None:
    """Record that a store was verified. Where this cannot be recorded, it is verified again next time."""
    file = _stamp_file(path)
    if file is None:
        return
    with suppress(Exception):
        _prune(file.parent)
        atomic.write_text(file, json.dumps(current))


def forget(path: Path) -> None:
    """Remove the record that a store was verified."""
    if (file := _stamp_file(path)) is not None:
        with suppress(OSError):
            file.unlink()


def _stamp_file(path: Path) -> Path | None:
    folder = private_directory("verified")
    name = hashlib.sha256(os.fsencode(os.path.realpath(path))).hexdigest()[:32]
    return None if folder is None else folder / f"{name}.json"


def _prune(folder: Path) -> None:
    files = list(folder.iterdir())
    if len(files) >= MOST_STAMPS:
        for file in sorted(files, key=lambda file: file.stat().st_mtime)[: MOST_STAMPS // 2]:
            file.unlink(missing_ok=True)
