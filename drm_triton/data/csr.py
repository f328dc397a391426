"""Binary sparse matrices in compressed sparse row (CSR) format."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from drm_triton.errors import InputError
from drm_triton.names import WEIGHT_RANGE

if TYPE_CHECKING:
    import scipy.sparse
    import torch


COUNTED = 1 << 24  # columns that are counted at a time: NumPy copies them to int64


@dataclass(frozen=True)
class CSR:
    """A binary sparse matrix by rows: row u has the columns ``indices[indptr[u]:indptr[u + 1]]``, ascending.

    Rows are users and columns are items, both given by their codes. The interactions may have weights, which say how
    much each of them counts in training.

    Attributes
    ----------
    indptr : int64 [rows + 1]
    indices : int32 [nnz]
    shape : (rows, columns)
    weights : float32 [nnz], or None
        Weight of each interaction, in the order of `indices`.

    Examples
    --------
    >>> matrix = CSR.from_pairs(np.array([0, 0, 1]), np.array([0, 2, 2]), shape=(2, 3))
    >>> matrix.row(0), matrix.degrees(), matrix.popularity()
    (array([0, 2], dtype=int32), array([2, 1]), array([1, 0, 2]))
    """

    indptr: NDArray[np.int64]
    indices: NDArray[np.int32]
    shape: tuple[int, int]
    weights: NDArray[np.float32] | None = None

    @classmethod
    def from_pairs(
        cls,
        rows: NDArray[np.integer],
        columns: NDArray[np.integer],
        shape: tuple[int, int],
        weights: NDArray[np.float32] | None = None,
    ) -> CSR:
        """Build a matrix from distinct pairs, both arrays [n], sorted by row, then by column."""
        indptr = np.zeros(shape[0] + 1, dtype=np.int64)
        np.cumsum(np.bincount(rows, minlength=shape[0]), out=indptr[1:])
        return cls(indptr, columns.astype(np.int32, copy=False), shape, weights)

    @classmethod
    def from_rows(cls, rows: Sequence[NDArray[np.int32]], n_columns: int) -> CSR:
        """Build a matrix from the columns of each row, int32 and ascending; there must be a row."""
        return cls(np.cumsum([0, *map(len, rows)]), np.concatenate(rows), (len(rows), n_columns))

    @classmethod
    def from_mask(cls, mask: NDArray[np.bool_]) -> CSR:
        """Build a matrix from the places of an array that are True; there must be a row."""
        return cls.from_rows([np.flatnonzero(row).astype(np.int32) for row in mask], mask.shape[1])

    @classmethod
    def from_keys(
        cls, keys: NDArray[np.int64], shape: tuple[int, int], weights: NDArray[np.float32] | None = None
    ) -> CSR:
        """Build a matrix from `keys` [nnz] as the method `keys` returns them: distinct and ascending."""
        rows, columns = np.divmod(keys, max(shape[1], 1))
        return cls.from_pairs(rows, columns, shape, weights)

    @classmethod
    def from_any(cls, matrix: Any, n_items: int, name: str = "matrix", weighted: bool = False) -> CSR:
        """Build a matrix from a scipy sparse matrix or a pair (indptr, indices).

        Columns need not be sorted within a row. Repeated ones count once. If `weighted`, the values of a scipy matrix
        are the weights of the interactions, and those of repeated columns are added. An InputError calls the matrix
        `name`.
        """
        indptr, indices = _pointers(matrix, name)
        if hasattr(matrix, "shape") and matrix.shape[1] != n_items:
            raise InputError(f"from_csr: `{name}` has {matrix.shape[1]} columns, but there are {n_items} items")
        if not rises(indptr, len(indices)):
            raise InputError(
                f"from_csr: the row pointers of `{name}` must rise from 0 to {len(indices)}, the number of indices"
            )
        if len(indices) and not 0 <= indices.min() <= indices.max() < n_items:
            outside = indices.min() if indices.min() < 0 else indices.max()
            raise InputError(f"from_csr: `{name}` has item {outside}, which is not in 0..{n_items - 1}")
        shape = (len(indptr) - 1, n_items)
        keys = np.repeat(np.arange(shape[0]), np.diff(indptr)) * n_items + indices
        if not weighted:
            return cls.from_keys(np.unique(keys), shape)
        values = _values(matrix, keys, name)
        keys, inverse = np.unique(keys, return_inverse=True)
        weights = np.bincount(inverse, values, len(keys)).astype(np.float32)
        return cls.from_keys(keys, shape, weights)

    @classmethod
    def empty(cls, shape: tuple[int, int], weighted: bool = False) -> CSR:
        """Return a matrix without interactions."""
        weights = np.zeros(0, dtype=np.float32) if weighted else None
        return cls(np.zeros(shape[0] + 1, dtype=np.int64), np.zeros(0, dtype=np.int32), shape, weights)

    @property
    def nnz(self) -> int:
        """The number of interactions."""
        return len(self.indices)

    def row(self, u: int) -> NDArray[np.int32]:
        """Return the columns of row `u`: int32 [degree of u]."""
        return self.indices[self.indptr[u] : self.indptr[u + 1]]

    def degrees(self) -> NDArray[np.int64]:
        """Return the number of interactions of each row: int64 [rows]."""
        return np.diff(self.indptr)

    def popularity(self) -> NDArray[np.int64]:
        """Return the number of interactions of each column: int64 [columns]."""
        counts = np.zeros(self.shape[1], dtype=np.int64)
        for start in range(0, self.nnz, COUNTED):
            counts += np.bincount(self.indices[start : start + COUNTED], minlength=self.shape[1])
        return counts

    def keys(self) -> NDArray[np.int64]:
        """Return row * columns + column of each interaction, ascending: int64 [nnz]."""
        return np.repeat(np.arange(self.shape[0]), self.degrees()) * self.shape[1] + self.indices

    def take(self, rows: NDArray[np.integer]) -> CSR:
        """Return the given rows in that order: CSR [len(rows), columns]."""
        degrees = self.indptr[rows + 1] - self.indptr[rows]
        indptr = np.concatenate([[0], np.cumsum(degrees)])
        taken = np.repeat(self.indptr[rows] - indptr[:-1], degrees) + np.arange(indptr[-1])
        weights = None if self.weights is None else self.weights[taken]
        return CSR(indptr, self.indices[taken], (len(rows), self.shape[1]), weights)

    def between(self, start: int, stop: int) -> CSR:
        """Return the rows start .. stop - 1. Columns are not copied: of a stored matrix, only these rows are read."""
        indptr = self.indptr[start : stop + 1]
        entries = slice(indptr[0], indptr[-1])
        weights = None if self.weights is None else self.weights[entries]
        return CSR(indptr - indptr[0], self.indices[entries], (stop - start, self.shape[1]), weights)

    def union(self, other: CSR) -> CSR:
        """Return the interactions of both matrices. They must be disjoint, as the parts of a split are."""
        keys = np.concatenate([self.keys(), other.keys()])
        if self.weights is None or other.weights is None:
            keys.sort()
            return CSR.from_keys(keys, self.shape)
        order = np.argsort(keys)
        return CSR.from_keys(keys[order], self.shape, np.concatenate([self.weights, other.weights])[order])

    def minus(self, other: CSR) -> CSR:
        """Return the interactions that another matrix does not have. Weights are left out."""
        keys, others = self.keys(), other.keys()
        if not len(others):
            return self.unweighted()
        places = np.searchsorted(others, keys)  # both ascend, so this is much faster than `numpy.isin`
        return CSR.from_keys(keys[others[np.minimum(places, len(others) - 1)] != keys], self.shape)

    def extended(self, shape: tuple[int, int]) -> CSR:
        """Return the same interactions in a matrix with more rows and columns at the end."""
        added = np.full(shape[0] - self.shape[0], self.nnz, self.indptr.dtype)
        return CSR(np.concatenate([self.indptr, added]), self.indices, shape, self.weights)

    def unweighted(self) -> CSR:
        """Return the same interactions without weights."""
        return CSR(self.indptr, self.indices, self.shape)

    def tensors(self, device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `indptr` and `indices` as torch tensors. On the CPU they share memory with the arrays."""
        import torch

        from drm_triton.kernels.devices import to_device

        with warnings.catch_warnings():
            # torch warns of read-only arrays, as memory-mapped ones are. Nothing writes to these tensors.
            warnings.simplefilter("ignore", UserWarning)
            indptr, indices = torch.from_numpy(self.indptr), torch.from_numpy(self.indices)
        return to_device(indptr, torch.device(device)), to_device(indices, torch.device(device))

    def to_scipy(self, dtype: DTypeLike = np.float32) -> scipy.sparse.csr_matrix:
        """Return a scipy matrix of the same shape whose stored values are 1."""
        import scipy.sparse

        # scipy wants row pointers and columns of one type. It would copy both to int64 if only the columns were int32.
        small = self.nnz <= np.iinfo(np.int32).max
        indptr = self.indptr.astype(np.int32) if small else self.indptr
        return scipy.sparse.csr_matrix((np.ones(self.nnz, dtype), self.indices, indptr), shape=self.shape)


def by_popularity(popularity: NDArray[np.int64], items: NDArray[np.integer] | None = None) -> NDArray[np.integer]:
    """Sort items by falling popularity. Ties go to the lower code.

    Parameters
    ----------
    popularity : int64 [n_items]
        Interactions of each item, see `CSR.popularity`.
    items : int [m], ascending, optional
        Codes of the items to sort; all items by default.

    Examples
    --------
    >>> by_popularity(np.array([1, 5, 1, 7]))
    array([3, 1, 0, 2])
    """
    if items is None:
        return np.argsort(-popularity, kind="stable")
    return items[np.argsort(-popularity[items], kind="stable")]


def columns_of(matrix: Any) -> int:
    """Return the number of columns of a scipy matrix, or the least number that a pair (indptr, indices) needs."""
    if hasattr(matrix, "shape"):
        return int(matrix.shape[1])
    return int(_pointers(matrix, "matrix")[1].max(initial=-1)) + 1


def _values(matrix: Any, keys: NDArray[np.int64], name: str) -> NDArray[np.float64]:
    """Return the values of a scipy matrix with these keys, which must be weights."""
    if not hasattr(matrix, "tocsr"):
        raise InputError(f"from_csr: `weighted` needs scipy sparse matrices, whose values it takes; `{name}` has none")
    values: NDArray[np.float64] = np.asarray(matrix.tocsr().data, dtype=np.float64)
    bad = np.flatnonzero(~((values >= WEIGHT_RANGE[0]) & (values <= WEIGHT_RANGE[1])))
    if len(bad):
        row, column = divmod(int(keys[bad[0]]), matrix.shape[1])
        raise InputError(
            f"from_csr: `{name}` has the value {values[bad[0]]:g} in row {row}, column {column}; a weight is a number "
            f"from {WEIGHT_RANGE[0]:g} to {WEIGHT_RANGE[1]:g}: change it, or remove the entry (a stored 0 with "
            "`eliminate_zeros`)"
        )
    return values


def rises(indptr: NDArray[np.int64], nnz: int) -> bool:
    """Return whether row pointers rise from 0 to `nnz`. They are compared: a difference could overflow.

    Examples
    --------
    >>> rises(np.array([0, 1, 1, 3]), 3), rises(np.array([0, 2**62, -(2**63), -(2**62), 0, 1]), 1)
    (True, False)
    """
    return bool(len(indptr) and indptr[0] == 0 and indptr[-1] == nnz and (indptr[1:] >= indptr[:-1]).all())


def _pointers(matrix: Any, name: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    if hasattr(matrix, "tocsr"):
        matrix = matrix.tocsr()
        return matrix.indptr.astype(np.int64), matrix.indices.astype(np.int64)
    if not isinstance(matrix, tuple | list) or len(matrix) != 2:
        kind = type(matrix).__name__
        raise InputError(f"from_csr: `{name}` must be a scipy sparse matrix or a pair (indptr, indices), not {kind}")
    return _whole_numbers(matrix[0], name), _whole_numbers(matrix[1], name)


def _whole_numbers(values: Any, name: str) -> NDArray[np.int64]:
    """Return numbers as int64. Raise if that would change one."""
    array = np.asarray(values)
    found = array.astype(np.int64) if array.dtype.kind in "iu" or not array.size else None
    if found is None or array.ndim != 1 or not np.array_equal(found, array):  # uint64 may be too large
        raise InputError(f"from_csr: `indptr` and `indices` of `{name}` must be lists of whole numbers")
    return found
