"""Means and paired tests of models over the same users."""

import numpy as np
import pytest
from numpy.typing import NDArray

from drm_triton.errors import InputError
from drm_triton.experiments.paired import ahead, compare_users, table_of_means, table_of_tests
from drm_triton.experiments.significance import bootstrap_interval, holm, paired_t, wilcoxon

METRICS = ["ndcg@10", "recall@50"]


@pytest.fixture(scope="module")
def values() -> dict[str, NDArray[np.float64]]:
    """Return values of 120 users: A is well ahead of B in the first metric, C is B with noise in the second."""
    rng = np.random.default_rng(0)
    b = rng.random((120, 2))
    c = b + rng.normal(0, 0.01, b.shape) * [0, 1]
    return {"A": b + np.array([0.1, 0]) + rng.normal(0, 0.05, b.shape), "B": b, "C": c}


def test_each_pair_and_metric_has_its_tests(values: dict[str, NDArray[np.float64]]) -> None:
    means, tests = compare_users(values, METRICS, resamples=200)
    assert [(mean.model, mean.metric) for mean in means] == [(model, metric) for model in "ABC" for metric in METRICS]
    for mean in means:
        column = values[mean.model][:, METRICS.index(mean.metric)]
        assert mean.mean == pytest.approx(column.mean())
        assert (mean.low, mean.high) == tuple(bootstrap_interval(column, 0 * column, resamples=200))
    assert [(test.a + test.b, test.metric) for test in tests] == [
        (pair, metric) for pair in ("AB", "AC", "BC") for metric in METRICS
    ]
    for test in tests:
        a, b = (values[model][:, METRICS.index(test.metric)] for model in (test.a, test.b))
        assert (test.mean_a, test.mean_b, test.difference) == pytest.approx((a.mean(), b.mean(), (a - b).mean()))
        assert (test.low, test.high) == tuple(bootstrap_interval(a, b, resamples=200))
        assert test.low <= test.difference <= test.high
        assert (test.t, test.p_t) == paired_t(a, b)
        assert (test.w, test.p_wilcoxon) == wilcoxon(a, b)
        assert test.users == 120
    assert [test.p_t_holm for test in tests] == holm([test.p_t for test in tests])
    assert [test.p_wilcoxon_holm for test in tests] == holm([test.p_wilcoxon for test in tests])


def test_only_a_model_that_beats_every_other_significantly_is_marked(values: dict[str, NDArray[np.float64]]) -> None:
    means, tests = compare_users(values, METRICS, resamples=100)
    assert ahead(tests) == {("A", "ndcg@10")}
    header, rows = table_of_means(means, tests)
    assert header == ["model", *METRICS]
    marks = [[cell.mark for cell in row[1:]] for row in rows]  # type: ignore[union-attr]
    assert marks == [["*", ""], ["", ""], ["", ""]]
    swapped = {name: values[name] for name in ("B", "A")}
    assert ahead(compare_users(swapped, METRICS, resamples=100)[1]) == {("A", "ndcg@10")}


def test_significance_is_judged_after_the_correction() -> None:
    signs = np.tile([-1.0, 1.0], 100)[:, None]
    shifted, base = signs + 0.17, np.zeros_like(signs)  # t = 0.17 sqrt(199) = 2.4
    one = compare_users({"A": shifted, "B": base}, ["ndcg@10"], resamples=100)[1]
    assert ahead(one) == {("A", "ndcg@10")}
    models = {"A": np.hstack([shifted, *[signs] * 10]), "B": np.hstack([base] * 11)}
    tests = compare_users(models, [f"ndcg@{k}" for k in range(1, 12)], resamples=100)[1]
    assert tests[0].p_t == one[0].p_t < 0.05 < tests[0].p_t_holm
    assert ahead(tests) == set()


def test_table_of_a_pair() -> None:
    a, b = np.array([[0.5], [0.75], [1.0], [0.75]]), np.array([[0.5], [0.5], [0.5], [0.5]])
    _, tests = compare_users({"A": a, "B": b}, ["map@10"])
    header, rows = table_of_tests(tests)
    assert header[:5] == ["metric", "A", "B", "difference", "95 % interval"]
    # d = 0, 1/4, 1/2, 1/4 as in the example of paired_t, scaled; Wilcoxon: three of three positive
    assert rows == [
        ["map@10", "0.7500", "0.5000", "0.2500", "0.0625 to 0.4375", "0.0917", "0.0917", "0.2500", "0.2500"]
    ]


def test_one_model() -> None:
    with pytest.raises(InputError, match="two or more models are needed, got 1"):
        compare_users({"A": np.zeros((3, 1))}, ["map@10"])
