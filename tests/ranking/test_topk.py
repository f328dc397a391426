"""The index behind every top-K search: candidates, excluded rows, and items that are packed once."""

import numpy as np
import pytest
import torch

from drm_triton import DRM
from drm_triton.data.csr import CSR
from drm_triton.kernels import get_backend
from drm_triton.names import Score
from drm_triton.ranking.topk import TopKIndex, similarity_vectors


def excluded_rows(*rows: list[int]) -> CSR:
    return CSR(np.cumsum([0, *map(len, rows)]), np.concatenate(rows).astype(np.int32), (len(rows), 50))


@pytest.mark.parametrize("score", ["dot", "l2"])
def test_candidates_are_the_rows_that_remain_of_a_full_search(score: Score) -> None:
    generator = torch.Generator().manual_seed(4)
    vectors, queries = torch.randn(50, 6, generator=generator), torch.randn(3, 6, generator=generator)
    vectors[10:20] = vectors[10]  # ties
    excluded = excluded_rows([1, 11, 12, 49], [], list(range(0, 50, 2)))
    candidates = np.arange(1, 50, 3)
    full = TopKIndex(get_backend("cpu"), vectors, score)
    some = TopKIndex(get_backend("cpu"), vectors, score, candidates)
    assert (len(full), len(some)) == (50, 17)
    all_rows, all_scores = full.search(queries, 50, excluded)
    rows, scores = some.search(queries, 17, excluded)
    assert rows.dtype == np.int32
    assert scores.dtype == np.float32
    for query in range(3):
        kept = np.isin(all_rows[query], candidates)
        n_found = kept.sum()
        assert n_found == len(set(candidates) - set(excluded.row(query)))
        assert rows[query, :n_found].tolist() == all_rows[query, kept].tolist()
        np.testing.assert_array_equal(scores[query, :n_found], all_scores[query, kept])
        assert (rows[query, n_found:] == -1).all()
        assert (scores[query, n_found:] == -np.inf).all()


def test_similarity_is_the_cosine_or_the_distance() -> None:
    factors = torch.tensor([[3.0, 4.0], [0.0, 2.0]])
    scaled = torch.tensor([[0.6, 0.8], [0.0, 1.0]])
    for score in ("dot", "cosine"):
        torch.testing.assert_close(similarity_vectors(factors, score), scaled)
    assert similarity_vectors(factors, "l2") is factors


def test_items_are_packed_once_for_all_blocks(models: dict[str, DRM], monkeypatch: pytest.MonkeyPatch) -> None:
    model = models["dot"]
    backend, _ = model.backend()
    whole = model.recommend(k=3)
    packed: list[int] = []

    def count(V: torch.Tensor, score: Score) -> object:
        packed.append(len(V))
        return pack_items(V, score)

    pack_items = backend.pack_items
    monkeypatch.setattr(backend, "pack_items", count)
    monkeypatch.setattr("drm_triton.ranking.recommend.QUERIES_PER_BLOCK", 7)
    assert model.recommend(k=3).equals(whole)
    assert packed == [len(model.item_factors)]
