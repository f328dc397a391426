"""Metrics: hand-worked fractions, and two independent libraries."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drm_triton.config import METRICS
from drm_triton.metrics import ranking_metrics

HITS = np.array([[1, 0, 1, 0], [0, 0, 0, 0], [0, 1, 1, 1]], dtype=bool)
RELEVANT = np.array([2, 3, 5])


def test_hand_worked_values() -> None:
    at4 = ranking_metrics(HITS, RELEVANT, 4)
    log2 = math.log2
    ideal = [1, 1 + 1 / log2(3), 1 + 1 / log2(3) + 1 / log2(4), 1 + 1 / log2(3) + 1 / log2(4) + 1 / log2(5)]
    expected = {
        "precision": [2 / 4, 0, 3 / 4],
        "recall": [2 / 2, 0, 3 / 5],
        "ndcg": [(1 + 1 / log2(4)) / ideal[1], 0, (1 / log2(3) + 1 / log2(4) + 1 / log2(5)) / ideal[3]],
        "map": [(1 / 1 + 2 / 3) / 2, 0, (1 / 2 + 2 / 3 + 3 / 4) / 4],
        "map_k": [(1 / 1 + 2 / 3) / 4, 0, (1 / 2 + 2 / 3 + 3 / 4) / 4],
        "hit": [1, 0, 1],
        "mrr": [1, 0, 1 / 2],
    }
    assert tuple(at4) == METRICS
    for name, values in expected.items():
        np.testing.assert_allclose(at4[name], values, rtol=1e-15, err_msg=name)


def test_a_shorter_ranking_than_k_counts_as_misses() -> None:
    short, long = np.array([[True]]), np.array([[True, False, False]])
    for name in METRICS:
        assert ranking_metrics(short, np.array([2]), 3)[name] == ranking_metrics(long, np.array([2]), 3)[name]


@given(st.integers(1, 12), st.integers(1, 40), st.integers(0, 2**32 - 1))
def test_metrics_stay_within_their_bounds(k: int, n_relevant: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    ranks = rng.choice(60, size=n_relevant, replace=False)
    hits = np.isin(np.arange(k), ranks)[None, :]
    for name, values in ranking_metrics(hits, np.array([n_relevant]), k).items():
        assert 0 <= values[0] <= 1 + 1e-12, name


@pytest.fixture(scope="module")
def random_rankings() -> tuple[list[list[int]], list[set[int]], dict[str, np.ndarray]]:
    """300 users, |T| from 1 to 40, 30 ranked items."""
    rng = np.random.default_rng(0)
    ranked = [rng.permutation(200)[:30].tolist() for _ in range(300)]
    relevant = [set(rng.choice(200, size=rng.integers(1, 41), replace=False).tolist()) for _ in range(300)]
    hits = np.array([[item in T for item in items] for items, T in zip(ranked, relevant, strict=True)])
    return ranked, relevant, ranking_metrics(hits, np.array([len(T) for T in relevant]), 10)


def test_agreement_with_trec_eval(random_rankings: tuple) -> None:
    pytrec_eval = pytest.importorskip("pytrec_eval")
    ranked, relevant, ours = random_rankings
    judged = {str(u): {str(i): 1 for i in T} for u, T in enumerate(relevant)}
    # Ranks as scores: trec_eval takes near-equal scores for ties and breaks them by id.
    run = {str(u): {str(i): float(100 - r) for r, i in enumerate(items)} for u, items in enumerate(ranked)}
    measures = {"recall.10", "ndcg_cut.10", "map_cut.10", "P.10"}
    theirs = pytrec_eval.RelevanceEvaluator(judged, measures).evaluate(run)
    for u, T in enumerate(relevant):
        row = theirs[str(u)]
        assert ours["recall"][u] == pytest.approx(row["recall_10"], abs=1e-12)
        assert ours["ndcg"][u] == pytest.approx(row["ndcg_cut_10"], abs=1e-12)
        assert ours["precision"][u] == pytest.approx(row["P_10"], abs=1e-12)
        assert ours["map"][u] == pytest.approx(row["map_cut_10"] * len(T) / min(10, len(T)), abs=1e-12)


def test_agreement_with_ranx(random_rankings: tuple) -> None:
    ranx = pytest.importorskip("ranx")
    ranked, relevant, ours = random_rankings
    judged = ranx.Qrels({str(u): {str(i): 1 for i in T} for u, T in enumerate(relevant)})
    run = ranx.Run({str(u): {str(i): float(100 - r) for r, i in enumerate(items)} for u, items in enumerate(ranked)})
    names = {
        "ndcg@10": "ndcg",
        "recall@10": "recall",
        "precision@10": "precision",
        "hit_rate@10": "hit",
        "mrr@10": "mrr",
    }
    theirs = ranx.evaluate(judged, run, [*names, "map@10"], return_mean=False)
    for name, own in names.items():
        by_user = dict(zip(run.keys(), theirs[name], strict=True))
        values = [by_user[str(u)] for u in range(len(relevant))]
        np.testing.assert_allclose(ours[own], values, rtol=1e-12, atol=1e-12, err_msg=name)
