"""The quality benchmark: its draws, a training of each kind of model, and tables that show only what is finished."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.sparse import csr_matrix
from scipy.stats import ttest_ind

from drm_triton import Dataset
from drm_triton.bench import quality

Results = list[dict[str, Any]]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Callable[[Results], None]:
    """Return a function that puts results in place of the stored ones."""

    def put(results: Results) -> None:
        monkeypatch.setattr(quality, "finished", lambda: results)

    return put


def results_of(model: str, value: float, budget: int, seeds: int, name: str = "ml-100k") -> Results:
    """Return the results of a whole search and its final trainings. The last setting is the best on validation."""
    settings = quality.draws(name, model, budget)
    base = {"set": name, "model": model}
    search = [
        {**base, "on": "valid", "options": options, "seed": 0, **dict.fromkeys(quality.METRICS, number)}
        for number, options in enumerate(settings)
    ]
    finals = [
        {**base, "on": "test", "options": settings[-1], "seed": seed, **dict.fromkeys(quality.METRICS, mean)}
        for seed in quality.seeds_of(model, seeds)
        for mean in [value + seed / 1e3]
    ]
    return [*search, *finals]


@pytest.mark.parametrize("model", quality.MODELS)
def test_draws_are_different_and_the_first_ones_stay(model: str) -> None:
    settings = quality.draws("lastfm", model, 12)
    assert len({str(setting) for setting in settings}) == 12
    assert settings[:5] == quality.draws("lastfm", model, 5)


def test_draws_end_with_the_space() -> None:
    assert {setting["lam"] for setting in quality.draws("lastfm", "EASE", 100)} == set(quality.SPACES["EASE"]["lam"])


def test_stored_trainings_belong_to_the_spaces() -> None:
    for result in quality.finished():
        name, model = result["set"], result["model"]
        spaces = [quality.SPACES[model], quality.SPACES[model] | quality.SPACES_OF_SETS.get((name, model), {})]
        assert any(belongs(result["options"], space) for space in spaces)


def belongs(options: dict[str, Any], space: quality.Space) -> bool:
    return options.keys() == space.keys() and all(value in space[name] for name, value in options.items())


@pytest.mark.parametrize("model", ["softmax", "EASE", "RP3beta", "iALS"])
def test_a_training_of_each_kind_of_model(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)  # tests share this process
    liked = np.random.default_rng(0).random((30, 40)) < 0.5  # half of the items; a fifth of them is held out
    place = np.cumsum(liked, 1) % 10
    train, valid, test = (csr_matrix(liked & part) for part in (place > 1, place == 0, place == 1))
    Dataset.from_csr(train, valid, test).save(tmp_path / "data")
    options = {**quality.draws("lastfm", model, 1)[0], **({"epochs": 1} if model in ("softmax", "iALS") else {})}
    task = {"set": "x", "data": str(tmp_path / "data"), "model": model, "on": "test", "options": options, "seed": 1}
    result = quality.train_and_measure(task)
    assert all(0 <= result[metric] <= 1 for metric in quality.METRICS)
    assert result["recall@50"] == 1  # all unseen items are in the first 50


def test_p_value_is_welch_and_takes_a_single_value_as_exact() -> None:
    ours, other = [0.5, 0.52, 0.51], [0.4, 0.45, 0.41]
    assert quality.p_value(ours, other) == pytest.approx(ttest_ind(ours, other, equal_var=False).pvalue, rel=1e-12)
    many = list(0.4 + 1e-9 * np.random.default_rng(0).standard_normal(10**5))
    assert quality.p_value(ours, [0.4]) == pytest.approx(quality.p_value(ours, many), rel=1e-3)
    assert quality.p_value([0.5], [0.4]) is None


def others_of(value: float, budget: int, seeds: int) -> Results:
    """Return the results of all models that are not ours; EASE is the best of them."""
    others = {model: value - 0.1 for model in quality.MODELS if model not in quality.OURS} | {"EASE": value}
    return [result for model, v in others.items() for result in results_of(model, v, budget, seeds)]


def test_report_of_finished_models(store: Callable[[Results], None]) -> None:
    store(results_of("DRM L2", 0.3, 3, 5) + others_of(0.2, 3, 5))
    text = quality.report(3, 5)
    assert "| DRM L2 | **0.3030** / **0.3030** |" in text
    assert "| EASE | 0.2010 / 0.2010 |" in text
    assert "| ml-100k | recall@50 | DRM L2 | 0.3030 | EASE | 0.2010 | < 0.0001 |" in text
    assert "| EASE | 1 | 0.2010 | 0.2010 | 0.2010 | 0.2010 | lam " in text
    assert "| ALS | 5 | 0.1030 |" in text


def test_report_of_one_seed_has_no_test(store: Callable[[Results], None]) -> None:
    store(results_of("DRM L2", 0.3, 3, 1) + others_of(0.2, 3, 1))
    assert "| ml-100k | recall@50 | DRM L2 | 0.3010 | EASE | 0.2010 | no test |" in quality.report(3, 1)


@pytest.mark.parametrize("missing", [0, 2, -1])  # a trial, the best trial, a seed
def test_report_leaves_out_what_is_not_finished(store: Callable[[Results], None], missing: int) -> None:
    unfinished = results_of("DRM L2", 0.3, 3, 5)
    del unfinished[missing]
    store(unfinished + results_of("EASE", 0.2, 3, 5))
    text = quality.report(3, 5)
    assert "DRM L2" not in text
    assert "| EASE | 0.2010 / 0.2010 |" in text


def test_report_names_no_best_before_all_other_models_are_finished(store: Callable[[Results], None]) -> None:
    store(results_of("DRM L2", 0.3, 3, 5) + others_of(0.2, 3, 5)[:-1])
    text = quality.report(3, 5)
    assert "| DRM L2 | 0.3030 / 0.3030 |" in text
    assert "| ml-100k | ndcg@10 |" not in text


def test_report_does_not_wait_for_a_model_that_is_left_out(store: Callable[[Results], None]) -> None:
    others = [model for model in quality.MODELS if model not in quality.OURS and model != "EASE"]
    results = [result for model in others for result in results_of(model, 0.2, 3, 5, "epinion")]
    store(results_of("DRM L2", 0.3, 3, 5, "epinion") + results)
    assert "| DRM L2 | **0.3030** / **0.3030** |" in quality.report(3, 5)


def test_report_ours_is_chosen_on_validation(store: Callable[[Results], None]) -> None:
    low, high = results_of("DRM L2", 0.3, 3, 5), results_of("DRM dot", 0.2, 3, 5)
    high[2]["recall@50"] = 10
    low[2]["ndcg@10"] = 10
    store(low + high + others_of(0.25, 3, 5))
    by_recall, by_metric = quality.report(3, 5).split("chosen for each metric")
    assert "| ml-100k | ndcg@10 | DRM dot | 0.2030 | EASE | 0.2510 |" in by_recall
    assert "| ml-100k | ndcg@10 | DRM L2 | 0.3030 | EASE | 0.2510 |" in by_metric
    assert "| ml-100k | recall@50 | DRM dot | 0.2030 | EASE | 0.2510 |" in by_metric
