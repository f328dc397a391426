"""Items of which nothing is known come last, and fill a result only if fewer than k others remain."""

from functools import partial

import numpy as np
import pytest
import scipy.sparse
import torch

from drm_triton.data.csr import CSR
from drm_triton.kernels import get_backend
from drm_triton.ranking.item_index import ItemIndex, ItemWeights
from drm_triton.ranking.known_first import known_first
from drm_triton.ranking.topk import TopKIndex

N = 12
KNOWN = np.isin(np.arange(N), [1, 2, 5, 8, 11])
VECTORS = torch.from_numpy(np.random.default_rng(0).normal(size=(N, 4)).astype(np.float32))


def sparse(rows: list[list[int]]) -> CSR:
    return CSR.from_rows([np.array(row, dtype=np.int32) for row in rows], N)


@pytest.mark.parametrize("k", [1, 3, 5, 7, 12])
@pytest.mark.parametrize("candidates", [None, [0, 1, 2, 3, 5, 9], [0, 3, 4], [1, 2]])
def test_equals_a_plain_sort(k: int, candidates: list[int] | None) -> None:
    allowed = np.arange(N) if candidates is None else np.array(candidates)
    excluded = sparse([[1, 3], [], [1, 2, 5, 8, 11], list(range(N))])
    queries = VECTORS[[0, 4, 7, 9]]
    index = known_first(
        partial(TopKIndex, get_backend("cpu"), VECTORS, "dot"), KNOWN, None if candidates is None else allowed
    )
    k = min(k, len(index))
    assert len(index) == len(allowed)
    assert index.n_items == N
    items, scores = index.search(queries, k, excluded)
    assert items.shape == scores.shape == (4, k)
    for row, query in enumerate(queries):
        left = [item for item in allowed if item not in excluded.row(row)]
        value = {item: float(query @ VECTORS[item]) for item in left}
        expected = sorted(left, key=lambda item: (not KNOWN[item], -value[item]))[:k]
        assert items[row].tolist() == expected + [-1] * (k - len(expected))
        np.testing.assert_allclose(scores[row, : len(expected)], [value[item] for item in expected], rtol=1e-5)
        assert np.all(np.isneginf(scores[row, len(expected) :]))


def test_an_index_of_items_whose_scores_are_negative() -> None:
    """Unknown items have weight 0, so a plain search would return them before items with negative weights."""
    W = np.where(np.eye(N, dtype=bool) | ~KNOWN | ~KNOWN[:, None], 0, -1.0)
    make = partial(ItemIndex, ItemWeights(sparse=scipy.sparse.csr_matrix(W.astype(np.float32))), N)
    query = sparse([[1]])
    assert make(None).search(query, 3, query)[0].tolist() == [[0, 3, 4]]
    assert known_first(make, KNOWN).search(query, 5, query)[0].tolist() == [[2, 5, 8, 11, 0]]
