"""Metrics equal hand-computed values, and two other libraries on random rankings and on those of a real model."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from drm_triton import DRM
from drm_triton.data.prepare.pipeline import prepare
from drm_triton.data.prepare.sources import find_source
from drm_triton.names import METRICS
from drm_triton.ranking.evaluate import evaluate, factor_ranker
from drm_triton.ranking.metrics import ranking_metrics
from tests.conftest import run_python

HITS = np.array([[1, 0, 1, 0], [0, 0, 0, 0], [0, 1, 1, 1]], dtype=bool)
RELEVANT = np.array([2, 3, 5])
CUT_OFFS = (10, 30)


def test_hand_computed_values() -> None:
    at4 = ranking_metrics(HITS, RELEVANT, 4)
    log2 = math.log2
    ideal = [1, 1 + 1 / log2(3), 1 + 1 / log2(3) + 1 / log2(4), 1 + 1 / log2(3) + 1 / log2(4) + 1 / log2(5)]
    expected: dict[str, list[float]] = {
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


@dataclass
class Rankings:
    """Ranked items and relevant items of users, and our metrics by name and cut-off."""

    ranked: list[list[int]]
    relevant: list[set[int]]
    ours: dict[str, NDArray[np.float64]]

    def judged(self) -> dict[str, dict[str, int]]:
        return {f"{u}": {f"{i}": 1 for i in T} for u, T in enumerate(self.relevant)}

    def run(self, k: int) -> dict[str, dict[str, float]]:
        """Return the top k with ranks as scores: trec_eval treats nearly equal scores as ties and breaks them by id."""
        return {f"{u}": {f"{i}": float(100 - r) for r, i in enumerate(row[:k])} for u, row in enumerate(self.ranked)}

    def map_over_all_relevant(self, k: int) -> NDArray[np.float64]:
        """Return our map divided by |T|, as both libraries do; ours is divided by min(K, |T|)."""
        n_relevant = np.array([len(T) for T in self.relevant])
        values: NDArray[np.float64] = self.ours[f"map@{k}"] * np.minimum(k, n_relevant) / n_relevant
        return values


def random_rankings() -> Rankings:
    """300 users, |T| from 1 to 40, 30 ranked items."""
    rng = np.random.default_rng(0)
    ranked = [rng.permutation(200)[:30].tolist() for _ in range(300)]
    relevant = [set(rng.choice(200, size=rng.integers(1, 41), replace=False).tolist()) for _ in range(300)]
    hits = np.array([[item in T for item in items] for items, T in zip(ranked, relevant, strict=True)])
    n_relevant = np.array([len(T) for T in relevant])
    ours = {f"{name}@{k}": v for k in CUT_OFFS for name, v in ranking_metrics(hits, n_relevant, k).items()}
    return Rankings(ranked, relevant, ours)


def real_rankings(raw: Path, out: Path) -> Rankings:
    """Return what a model of MovieLens 100K (ratings 4 and 5) recommends, and its metrics on test by `evaluate`."""
    data = prepare(find_source("ml-100k"), [raw], out)
    model = DRM(factors=16, epochs=4, eval_every=0).fit(data)
    seen = data.train.union(data.valid)
    ranker = factor_ranker(model.backend()[0], model.user_factors, model.item_factors, model.config.score_in_force)
    measured = evaluate(ranker, seen, data.test, CUT_OFFS)
    users = measured.per_user["user"].to_numpy()
    ranked = ranker(users, seen.take(users), max(CUT_OFFS)).tolist()
    relevant = [set(data.test.row(u).tolist()) for u in users]
    ours = {name: measured.per_user[name].to_numpy() for name in measured.per_user.columns if "@" in name}
    for name, values in ours.items():
        assert measured.means[name] == pytest.approx(values.mean(), abs=1e-12)
    return Rankings(ranked, relevant, ours)


@pytest.fixture(scope="module", params=["random", "ml-100k"])
def rankings(
    request: pytest.FixtureRequest, shared_data: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Rankings:
    if request.param == "random":
        return random_rankings()
    return real_rankings(shared_data("ml-100k"), tmp_path_factory.mktemp("data") / "ml-100k")


def test_the_rankings_cover_every_case(rankings: Rankings) -> None:
    n_relevant = np.array([len(T) for T in rankings.relevant])
    for k in CUT_OFFS:
        hit = rankings.ours[f"hit@{k}"]
        assert len(hit) == len(rankings.ranked) >= 300
        assert 0.05 < hit.mean() < 0.995  # rankings with and without a hit
        assert (n_relevant < k).any()
        assert (n_relevant > k).any()  # where the divisors of map differ


@pytest.mark.parametrize("k", CUT_OFFS)
def test_agreement_with_trec_eval(rankings: Rankings, k: int) -> None:
    pytrec_eval = pytest.importorskip("pytrec_eval")
    # recip_rank has no cut-off, so the rankings are cut off
    names = {"recall": "recall", "ndcg_cut": "ndcg", "P": "precision", "success": "hit"}
    measures = {*(f"{name}.{k}" for name in names), f"map_cut.{k}", "recip_rank"}
    rows = pytrec_eval.RelevanceEvaluator(rankings.judged(), measures).evaluate(rankings.run(k))

    def theirs(measure: str) -> list[float]:
        return [rows[f"{u}"][measure] for u in range(len(rankings.ranked))]

    for name, own in names.items():
        assert_same(rankings.ours[f"{own}@{k}"], theirs(f"{name}_{k}"), name)
    assert_same(rankings.ours[f"mrr@{k}"], theirs("recip_rank"), "recip_rank")
    assert_same(rankings.map_over_all_relevant(k), theirs(f"map_cut_{k}"), "map_cut")


RANX = """
import json, sys
import ranx
judged, run, measures = json.load(sys.stdin)
run = ranx.Run(run)
rows = ranx.evaluate(ranx.Qrels(judged), run, measures, return_mean=False)
print(json.dumps({measure: dict(zip(run.keys(), rows[measure].tolist(), strict=True)) for measure in measures}))
"""


@pytest.mark.skipif(find_spec("ranx") is None, reason="needs ranx")
def test_agreement_with_ranx(rankings: Rankings) -> None:
    names = {"ndcg": "ndcg", "recall": "recall", "precision": "precision", "hit_rate": "hit", "mrr": "mrr"}
    measures = [f"{name}@{k}" for name in (*names, "map") for k in CUT_OFFS]
    task = json.dumps([rankings.judged(), rankings.run(max(CUT_OFFS)), measures])
    # In another process without a compiler: ranx compiles for a minute what Python does in a second.
    done = run_python("-c", RANX, input=task, NUMBA_DISABLE_JIT="1")
    assert done.returncode == 0, done.stderr
    values: dict[str, dict[str, float]] = json.loads(done.stdout)

    def theirs(measure: str) -> list[float]:
        return [values[measure][f"{u}"] for u in range(len(rankings.ranked))]

    for k in CUT_OFFS:
        for name, own in names.items():
            assert_same(rankings.ours[f"{own}@{k}"], theirs(f"{name}@{k}"), name)
        assert_same(rankings.map_over_all_relevant(k), theirs(f"map@{k}"), "map")


def assert_same(ours: NDArray[np.float64], theirs: list[float], name: str) -> None:
    """Check that the values of each user are equal."""
    np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-12, err_msg=name)
