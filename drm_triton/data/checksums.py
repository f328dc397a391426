"""SHA-256 of the content of a data set. It does not depend on the place of the files or on versions of libraries."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from drm_triton.data.attributes import attributes
from drm_triton.data.csr import CSR

if TYPE_CHECKING:
    from drm_triton.data.dataset import Dataset


def content_checksum(data: Dataset) -> str:
    """Return the checksum of what a model learns from and is measured on: ids, interactions, weights, attributes."""
    digest = hashlib.sha256()
    for ids in (data.user_ids, data.item_ids):
        _update_ids(digest, ids)
    for matrix in (data.train, data.valid, data.test):
        _update(digest, matrix)
    for table in (data.users, data.items):
        if names := attributes(table):
            digest.update(table.select(names).write_ndjson().encode())
    return digest.hexdigest()


def matrix_checksum(matrix: CSR) -> str:
    """Return the checksum of a matrix."""
    digest = hashlib.sha256()
    _update(digest, matrix)
    return digest.hexdigest()


def rows_checksum(rows: pl.DataFrame) -> str:
    """Return the checksum of rows of a user and an item, by external ids."""
    digest = hashlib.sha256()
    for ids in (rows["user"], rows["item"]):
        _update_ids(digest, ids)
    return digest.hexdigest()


def text_checksum(texts: pl.Series) -> str:
    """Return the checksum of texts, some of which may be null."""
    return hashlib.sha256(json.dumps(texts.to_list()).encode()).hexdigest()


def _update_ids(digest: hashlib._Hash, ids: pl.Series) -> None:
    if ids.dtype == pl.String:
        digest.update(b"text")
        digest.update(ids.str.len_bytes().to_numpy().astype("<u4").tobytes())
        digest.update("".join(ids).encode())
    else:
        digest.update(b"int")
        digest.update(ids.to_numpy().astype("<i8").tobytes())


def _update(digest: hashlib._Hash, matrix: CSR) -> None:
    digest.update(np.ascontiguousarray(matrix.indptr, dtype="<i8").data)
    digest.update(np.ascontiguousarray(matrix.indices, dtype="<i4").data)
    if matrix.weights is not None:
        digest.update(np.ascontiguousarray(matrix.weights, dtype="<f4").data)
