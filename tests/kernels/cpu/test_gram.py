"""Item-item matrices: the Gram matrix in both forms, and the largest entries of rows."""

import numpy as np
import pytest
import scipy.sparse

from drm_triton.kernels.cpu import dense_gram
from drm_triton.kernels.cpu.dense_gram import lower_gram
from drm_triton.kernels.cpu.gram import Similarity, largest, similarities, transposed
from tests.models.items import CASE, dense, keep_largest, random_interactions


@pytest.mark.parametrize("n_items", [1, 63, 64, 130])  # around the bits of a word
def test_gram_matrix(n_items: int) -> None:
    train = random_interactions(40, n_items, 0.3)
    expected = dense(train).T @ dense(train)
    sparse = similarities(train, Similarity.of(train), diagonal=True, dtype=np.float32)
    assert sparse.dtype == np.float32
    assert sparse.nnz == (expected > 0).sum()
    assert (sparse.toarray() == expected).all()
    np.fill_diagonal(expected, 0)
    assert (similarities(train, Similarity.of(train)).toarray() == expected).all()


@pytest.mark.parametrize("n_items", [1, 63, 64, 130])
@pytest.mark.parametrize(("n_users", "density"), [(30, 0.9), (300, 0.9), (300, 0.01), (1000, 0.3)])
def test_lower_half_of_the_dense_gram_matrix(n_users: int, n_items: int, density: float) -> None:
    train = random_interactions(n_users, n_items, density)
    for dtype in (np.float32, np.float64):
        found = np.full((n_items, n_items), np.nan, dtype)
        lower_gram(train, found)
        assert (np.tril(found) == np.tril(dense(train).T @ dense(train))).all()


def test_both_ways_to_add_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    for name in ("add_bits", "add_ones"):
        add = getattr(dense_gram, name)
        monkeypatch.setattr(dense_gram, name, lambda *args, name=name, add=add: (taken.append(name), add(*args)))
    for density in (0.9, 0.01):
        lower_gram(random_interactions(300, 130, density), np.zeros((130, 130), np.float32))
    assert sorted(set(taken), key=taken.index) == ["add_bits", "add_ones"]


@pytest.mark.parametrize("k", [1, 3, 40, 500])
def test_largest_entries_with_ties_to_the_lower_column(k: int) -> None:
    train = random_interactions(30, 90, 0.2)  # counts are small, so there are many ties
    counts = dense(train).T @ dense(train)
    np.fill_diagonal(counts, 0)
    expected = keep_largest(counts, k)
    found = similarities(train, Similarity.of(train), k)
    assert found.has_sorted_indices
    assert (found.toarray() == expected).all()
    assert (largest(scipy.sparse.csr_matrix(counts), k).toarray() == expected).all()


def test_similarity_of_weighted_users() -> None:
    train, rng = random_interactions(50, 20, 0.3), np.random.default_rng(1)
    weight, left, right, half = rng.random(50), *(1 + rng.random((3, 20)))
    c = dense(train).T @ (weight[:, None] * dense(train))
    expected = c / (left[:, None] * right + half[:, None] + half - 0.5 * c + 2.0)
    found = similarities(train, Similarity(weight, left, right, half, 0.5, 2.0), diagonal=True)
    np.testing.assert_allclose(found.toarray(), expected, rtol=1e-12)


def test_transposed() -> None:
    assert (transposed(CASE).to_scipy().toarray() == dense(CASE).T).all()
