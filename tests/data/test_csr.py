"""Binary sparse matrices by rows."""

import warnings

import numpy as np
import pytest
import torch

from drm_triton.data.csr import CSR, by_popularity

DENSE = np.array([[0, 1, 0, 1], [0, 0, 0, 0], [1, 1, 0, 0]])


@pytest.fixture
def matrix() -> CSR:
    rows, columns = np.nonzero(DENSE)
    return CSR.from_pairs(rows, columns, (3, 4))


def test_rows_columns_and_sizes(matrix: CSR) -> None:
    assert matrix.row(0).tolist() == [1, 3]
    assert matrix.row(1).tolist() == []
    assert matrix.degrees().tolist() == [2, 0, 2]
    assert matrix.nnz == 4
    assert matrix.indptr.dtype == np.int64
    assert matrix.indices.dtype == np.int32
    assert matrix.to_scipy().toarray().tolist() == DENSE.tolist()


def test_keys_and_back(matrix: CSR) -> None:
    assert matrix.keys().tolist() == [1, 3, 8, 9]
    again = CSR.from_keys(matrix.keys(), matrix.shape)
    assert again.to_scipy().toarray().tolist() == DENSE.tolist()
    assert CSR.from_keys(np.zeros(0, dtype=np.int64), (2, 0)).nnz == 0


def test_take_and_union(matrix: CSR) -> None:
    taken = matrix.take(np.array([2, 0, 2]))
    assert taken.to_scipy().toarray().tolist() == DENSE[[2, 0, 2]].tolist()
    other = CSR.from_pairs(np.array([1, 2]), np.array([2, 3]), matrix.shape)
    assert matrix.union(other).to_scipy().toarray().tolist() == (DENSE + other.to_scipy().toarray()).tolist()


def test_rows_between_two_share_memory(matrix: CSR) -> None:
    for start, stop in ((0, 3), (1, 3), (2, 3), (1, 1), (3, 3)):
        part = matrix.between(start, stop)
        assert part.shape == (stop - start, 4)
        assert part.to_scipy().toarray().tolist() == DENSE[start:stop].tolist()
    assert np.shares_memory(matrix.between(1, 3).indices, matrix.indices)
    weighted = CSR(matrix.indptr, matrix.indices, matrix.shape, np.array([1, 2, 3, 4], dtype=np.float32))
    weights = weighted.between(1, 3).weights
    assert weights is not None
    assert weights.tolist() == [3, 4]


def test_tensors_share_memory_and_do_not_warn_of_read_only_arrays(matrix: CSR) -> None:
    matrix.indices.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        indptr, indices = matrix.tensors(torch.device("cpu"))
    assert (indptr.dtype, indices.dtype) == (torch.int64, torch.int32)
    assert indices.tolist() == matrix.indices.tolist()
    assert indices.data_ptr() == matrix.indices.ctypes.data


def test_popularity(matrix: CSR) -> None:
    popularity = matrix.popularity()
    assert popularity.dtype == np.int64
    assert popularity.tolist() == [1, 2, 0, 1]  # the third item has no interactions
    assert by_popularity(popularity).tolist() == [1, 0, 3, 2]
    assert by_popularity(popularity, np.array([0, 2, 3], dtype=np.int32)).tolist() == [0, 3, 2]
    assert CSR.empty((2, 3)).popularity().tolist() == [0, 0, 0]


def test_weights_go_with_their_interactions() -> None:
    rows, columns = np.nonzero(DENSE)
    matrix = CSR.from_pairs(rows, columns, (3, 4), np.array([1, 2, 3, 4], dtype=np.float32))
    taken = matrix.take(np.array([2, 0, 2]))
    assert taken.weights is not None
    assert taken.weights.tolist() == [3, 4, 1, 2, 3, 4]
    other = CSR.from_pairs(np.array([1, 2]), np.array([2, 3]), matrix.shape, np.array([5, 6], dtype=np.float32))
    both = matrix.union(other)
    assert both.weights is not None
    assert dict(zip(both.keys().tolist(), both.weights.tolist(), strict=True)) == {1: 1, 3: 2, 6: 5, 8: 3, 9: 4, 11: 6}
    assert matrix.union(other.unweighted()).weights is None
    assert matrix.union(CSR.empty(matrix.shape, weighted=True)).weights is not None
