"""Binary sparse matrices by rows."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from drm_triton.errors import InputError

if TYPE_CHECKING:
    import scipy.sparse
    import torch


@dataclass(frozen=True)
class CSR:
    """A binary sparse matrix by rows: row u holds columns ``indices[indptr[u]:indptr[u + 1]]``, increasing.

    Attributes
    ----------
    indptr : int64 [rows + 1]
    indices : int32 [nnz]
    shape : (rows, columns)
    """

    indptr: NDArray[np.int64]
    indices: NDArray[np.int32]
    shape: tuple[int, int]

    @property
    def nnz(self) -> int:
        """The number of interactions."""
        return len(self.indices)

    def row(self, u: int) -> NDArray[np.int32]:
        """The columns of row `u`: int32 [degree of u]."""
        return self.indices[self.indptr[u] : self.indptr[u + 1]]

    def degrees(self) -> NDArray[np.int64]:
        """The number of interactions of each row: int64 [rows]."""
        return np.diff(self.indptr)

    def to_scipy(self, dtype: Any = np.float32) -> scipy.sparse.csr_matrix:
        """Return a scipy matrix of ones of the same shape."""
        import scipy.sparse

        # scipy takes int32 row pointers together with int32 columns, and copies both to int64 otherwise
        small = self.nnz <= np.iinfo(np.int32).max
        indptr = self.indptr.astype(np.int32) if small else self.indptr
        return scipy.sparse.csr_matrix((np.ones(self.nnz, dtype), self.indices, indptr), shape=self.shape)

    def tensors(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (indptr, indices) as tensors. On the CPU they share memory with the arrays."""
        import torch

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # memory-mapped arrays are read-only; nothing writes to these
            return torch.from_numpy(self.indptr).to(device), torch.from_numpy(self.indices).to(device)

    def take(self, rows: NDArray[np.int64]) -> CSR:
        """Return the given rows, in that order: CSR [len(rows), columns]."""
        degrees = self.degrees()[rows]
        indptr = np.concatenate([[0], np.cumsum(degrees)])
        within = np.arange(indptr[-1]) - np.repeat(indptr[:-1], degrees)
        return CSR(indptr, self.indices[np.repeat(self.indptr[rows], degrees) + within], (len(rows), self.shape[1]))

    def union(self, other: CSR) -> CSR:
        """Return the interactions of both; they must be disjoint, as the splits of a data set are."""
        keys = np.concatenate([matrix.keys() for matrix in (self, other)])
        keys.sort()
        return CSR.from_pairs(*np.divmod(keys, max(self.shape[1], 1)), self.shape)

    def keys(self) -> NDArray[np.int64]:
        """Return row * columns + column of each interaction, increasing: int64 [nnz]."""
        return np.repeat(np.arange(self.shape[0]), self.degrees()) * self.shape[1] + self.indices

    @classmethod
    def from_pairs(cls, rows: NDArray, columns: NDArray, shape: tuple[int, int]) -> CSR:
        """Build from pairs [n] sorted by row, then column."""
        indptr = np.zeros(shape[0] + 1, dtype=np.int64)
        np.cumsum(np.bincount(rows, minlength=shape[0]), out=indptr[1:])
        return cls(indptr, columns.astype(np.int32, copy=False), shape)

    @classmethod
    def empty(cls, shape: tuple[int, int]) -> CSR:
        """A matrix without interactions."""
        return cls(np.zeros(shape[0] + 1, dtype=np.int64), np.zeros(0, dtype=np.int32), shape)

    @classmethod
    def from_any(cls, matrix: Any, n_items: int, name: str = "matrix") -> CSR:
        """Build from a scipy sparse matrix or a pair (indptr, indices), verified; rows are sorted, repeats dropped."""
        indptr, indices = _pointers(matrix, name)
        if hasattr(matrix, "shape") and matrix.shape[1] != n_items:
            raise InputError(f"from_csr: {name} has {matrix.shape[1]} columns and there are {n_items} items")
        if not len(indptr) or indptr[0] != 0 or indptr[-1] != len(indices) or (np.diff(indptr) < 0).any():
            raise InputError(
                f"from_csr: {name}'s row pointers must rise from 0 to {len(indices)}, the number of indices"
            )
        if len(indices) and not 0 <= indices.min() <= indices.max() < n_items:
            outside = indices.min() if indices.min() < 0 else indices.max()
            raise InputError(f"from_csr: {name} has item {outside}, outside 0..{n_items - 1}")
        shape = (len(indptr) - 1, n_items)
        keys = np.unique(np.repeat(np.arange(shape[0]), np.diff(indptr)) * n_items + indices)
        return cls.from_pairs(*np.divmod(keys, max(n_items, 1)), shape)


def columns_of(matrix: Any) -> int:
    """Return the number of columns of a scipy matrix, or the least that a pair (indptr, indices) needs."""
    if hasattr(matrix, "shape"):
        return int(matrix.shape[1])
    return int(_pointers(matrix, "matrix")[1].max(initial=-1)) + 1


def _pointers(matrix: Any, name: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    if hasattr(matrix, "tocsr"):
        matrix = matrix.tocsr()
        return matrix.indptr.astype(np.int64), matrix.indices.astype(np.int64)
    if not isinstance(matrix, tuple | list) or len(matrix) != 2:
        kind = type(matrix).__name__
        raise InputError(f"from_csr: {name} must be a scipy sparse matrix or a pair (indptr, indices), not {kind}")
    return np.asarray(matrix[0], dtype=np.int64), np.asarray(matrix[1], dtype=np.int64)
