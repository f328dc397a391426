"""Item-item matrices: the Gram matrix in both forms, and the largest entries of rows."""

import numpy as np
import pytest
import scipy.sparse

from drm_triton.kernels.cpu.gram import Similarity, dense_gram, largest, similarities, transposed
from tests.models.items import CASE, dense, keep_largest, random_interactions


@pytest.mark.parametrize("n_items", [1, 63, 64, 130])  # around the bits of a word
def test_gram_matrix(n_items: int) -> None:
    train = random_interactions(40, n_items, 0.3)
    expected = dense(train).T @ dense(train)
    sparse = similarities(train, Similarity.of(train), diagonal=True, dtype=np.float32)
    assert sparse.dtype == np.float32
    assert sparse.nnz == (expected > 0).sum()
    assert (sparse.toarray() == expected).all()
    full = np.full((n_items, n_items), np.nan, np.float32)
    dense_gram(train, full)
    assert (full == expected).all()
    np.fill_diagonal(expected, 0)
    assert (similarities(train, Similarity.of(train)).toarray() == expected).all()


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
