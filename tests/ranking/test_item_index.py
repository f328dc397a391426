"""Search with item-item weights: order, ties, items to leave out, blocks of users."""

import numpy as np
import pytest
import scipy.sparse
import torch

from drm_triton.data.csr import CSR
from drm_triton.kernels.cpu.runtime.threads import set_threads
from drm_triton.ranking import item_index
from drm_triton.ranking.item_index import ItemIndex, ItemWeights, item_ranker


def identity(n: int) -> CSR:
    """Return users who each have one item, so that their scores are the rows of the weights."""
    return CSR(np.arange(n + 1), np.arange(n, dtype=np.int32), (n, n))


def test_ranker_excludes_seen_items_and_gives_ties_to_the_lower_index() -> None:
    W = torch.zeros(5, 5)
    W[0] = torch.tensor([0.0, -0.0, 1.0, -2.0, 0.0])
    W[1] = torch.tensor([3.0, 3.0, 3.0, -torch.inf, -1.0])
    seen = CSR.from_pairs(np.array([0, 1]), np.array([2, 0]), (2, 5))
    rank = item_ranker(ItemWeights(sparse=scipy.sparse.csr_matrix(W.numpy())), identity(5))
    assert rank(np.array([0, 1]), seen, 4).tolist() == [[0, 1, 4, 3], [1, 2, 4, -1]]
    assert rank(np.array([1]), seen.take(np.array([1])), 7).tolist() == [[1, 2, 4, -1, -1, -1, -1]]


def test_search_is_a_stable_sort(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(item_index, "ROWS", 7)
    W = np.random.default_rng(0).integers(-3, 4, (30, 30)).astype(np.float32)
    items, scores = ItemIndex(ItemWeights(dense=torch.from_numpy(W)), 30).search(identity(30), 10)
    expected = np.argsort(-W, 1, kind="stable")[:, :10]
    assert (items == expected).all()
    assert (scores == np.take_along_axis(W, expected, 1)).all()


def test_scores_are_the_sum_of_all_parts() -> None:
    rng = np.random.default_rng(0)
    left, right = (torch.from_numpy(rng.standard_normal((6, 2)).astype(np.float32)) for _ in range(2))
    dense = torch.from_numpy(rng.standard_normal((6, 6)).astype(np.float32))
    sparse = scipy.sparse.random_array((6, 6), density=0.3, rng=rng, format="csr", dtype=np.float32)
    items = CSR.from_pairs(np.array([0, 0, 2]), np.array([1, 4, 5]), (3, 6))
    expected = items.to_scipy().toarray() @ (left @ right.T + dense + torch.from_numpy(sparse.toarray())).numpy()
    np.testing.assert_allclose(ItemWeights(sparse, dense, (left, right)).scores(items), expected, atol=1e-5)


@pytest.mark.usefixtures("threads")
def test_a_user_has_the_same_bits_alone_and_in_any_batch() -> None:
    rng = np.random.default_rng(0)
    left, right = (torch.from_numpy(rng.standard_normal((2500, 300)).astype(np.float32)) for _ in range(2))
    users, columns = np.nonzero(rng.random((70, 2500)) < 0.02)
    items = CSR.from_pairs(users, columns, (70, 2500))
    weights = ItemWeights(low_rank=(left, right))
    together = weights.scores(items)
    np.testing.assert_allclose(together, items.to_scipy().toarray() @ (left @ right.T).numpy(), atol=1e-3)
    for n_threads in (1, 2):
        set_threads(n_threads)
        torch.set_num_threads(n_threads)
        for m in (1, 2, 3, 7, 17, 33):
            assert (weights.scores(items.take(np.arange(m))) == together[:m]).all(), (n_threads, m)
