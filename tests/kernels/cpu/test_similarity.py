"""Similarities within lists, against the dense matrix of cosines."""

import numpy as np
import pytest
from numpy.typing import NDArray

from drm_triton.data.csr import CSR
from drm_triton.kernels.cpu import similarity
from drm_triton.kernels.cpu.runtime.threads import set_threads


def cosines_above(lists: NDArray[np.int32], train: CSR) -> NDArray[np.float64]:
    return similarity.cosines_above(lists, train.indptr, train.indices, train.shape[1])


def random_lists(seed: int, users: int, items: int, k: int) -> tuple[NDArray[np.int32], CSR]:
    """Return lists of different lengths, and a matrix in which item 0 has no user."""
    rng = np.random.default_rng(seed)
    dense = rng.random((users, items)) < rng.random(items) * 0.5
    dense[:, 0] = False
    rows, columns = np.nonzero(dense)
    lists = np.argsort(rng.random((users, items)), axis=1)[:, :k].astype(np.int32)
    lists[np.arange(k) >= rng.integers(0, k + 1, size=users)[:, None]] = -1
    return lists, CSR.from_pairs(rows, columns, (users, items))


@pytest.mark.parametrize(("users", "items", "k"), [(1, 3, 2), (60, 40, 7), (50, 90, 90)])
def test_sums_of_cosines(users: int, items: int, k: int) -> None:
    lists, train = random_lists(users, users, items, k)
    X = train.to_scipy(np.float64).toarray()
    cosine = X.T @ X / np.sqrt(np.maximum(np.outer(X.sum(0), X.sum(0)), 1))
    expected = np.zeros(lists.shape)
    for row, found in enumerate(lists):
        for rank in range((found >= 0).sum()):
            expected[row, rank] = cosine[found[rank], found[:rank]].sum()
    assert expected.any() or users == 1
    np.testing.assert_allclose(cosines_above(lists, train), expected, rtol=1e-12, atol=1e-15)


@pytest.mark.usefixtures("threads")
def test_the_number_of_threads_changes_no_bit() -> None:
    lists, train = random_lists(1, 200, 300, 30)
    found = []
    for count in (1, 2):
        set_threads(count)
        found.append(cosines_above(lists, train))
    assert np.array_equal(*found)


def test_read_only_arrays_and_lists_in_another_order_of_memory() -> None:
    lists, train = random_lists(2, 30, 20, 5)
    train.indices.flags.writeable = False
    assert np.array_equal(cosines_above(np.asfortranarray(lists), train), cosines_above(lists, train))


def test_no_lists() -> None:
    train = CSR.empty((3, 4))
    assert cosines_above(np.full((2, 3), -1, dtype=np.int32), train).tolist() == [[0, 0, 0], [0, 0, 0]]
    assert cosines_above(np.zeros((0, 3), dtype=np.int32), train).shape == (0, 3)
