"""Tests of significance: by hand, against SciPy, in simulations with known answers, and on degenerate input."""

import math
from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from drm_triton.errors import InputError
from drm_triton.experiments import significance
from drm_triton.experiments.significance import Significance, bootstrap_interval, holm, paired_t, welch, wilcoxon

Values = NDArray[np.float64]
PAIRED: list[Callable[..., object]] = [paired_t, wilcoxon, bootstrap_interval]


def metric_like(n: int, seed: int) -> tuple[Values, Values]:
    """Return values of n users as recall has them: many zeros, many ties."""
    rng = np.random.default_rng(seed)
    held_out = rng.integers(1, 7, n)
    return tuple(rng.binomial(held_out, p) / held_out for p in (0.3, 0.25))  # type: ignore[return-value]


# -- Welch -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n_a", "n_b"), [(2, 2), (5, 5), (3, 40), (200, 7)])
def test_welch_is_that_of_scipy(n_a: int, n_b: int) -> None:
    rng = np.random.default_rng(n_a)
    a, b = rng.normal(0.30, 0.002, n_a), rng.normal(0.301, 0.01, n_b)
    assert welch(a, b) == pytest.approx(tuple(stats.ttest_ind(a, b, equal_var=False)), rel=1e-10)


@pytest.mark.parametrize("n", [2, 5, 50])
def test_a_single_value_is_exact(n: int) -> None:
    a = np.random.default_rng(n).normal(0.3, 0.01, n)
    one_sample = stats.ttest_1samp(a, 0.31)
    assert welch(a, [0.31]) == pytest.approx((one_sample.statistic, one_sample.pvalue), rel=1e-10)
    assert welch([0.31], a) == pytest.approx((-one_sample.statistic, one_sample.pvalue), rel=1e-10)
    assert welch(a, [0.31] * 5) == welch(a, [0.31])  # a model whose seeds make no difference is exact too


@pytest.mark.parametrize(("a", "b"), [([0.3], [0.3]), ([0.3], [0.4]), ([0.1] * 5, [0.4]), ([0.1] * 3, [0.7] * 5)])
def test_two_exact_values_are_not_tested(a: list[float], b: list[float]) -> None:
    assert welch(a, b) is None


def test_welch_rejects_as_often_as_it_says() -> None:
    # Unequal variances, five seeds: 4,000 trials without a difference, so 200 rejections, with standard deviation 14.
    rng = np.random.default_rng(1)
    trials = zip(rng.normal(0, 1, (4000, 5)), rng.normal(0, 3, (4000, 5)), strict=True)
    rejected = sum(test.p <= 0.05 for a, b in trials if (test := welch(a, b)))
    assert abs(rejected - 200) < 3 * 14


# -- paired tests ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 10, 1000])
def test_paired_t_is_that_of_scipy(n: int) -> None:
    a, b = metric_like(n, 6)
    assert (a != b).any()
    assert paired_t(a, b) == pytest.approx(tuple(stats.ttest_rel(a, b)), rel=1e-10)


def test_paired_t_with_one_degree_of_freedom_by_hand() -> None:
    t, p = paired_t([3, 1], [0, 0])  # t = 2 / 1; Student's distribution with one degree of freedom is Cauchy's
    assert t == pytest.approx(2)
    assert p == pytest.approx(1 - 2 * math.atan(2) / math.pi)


@pytest.mark.parametrize("n", [4, 12, 50, 51, 400])
def test_wilcoxon_without_ties_is_that_of_scipy(n: int) -> None:
    rng = np.random.default_rng(n)
    a, b = rng.random(n), rng.random(n) * 0.9
    w, p = wilcoxon(a, b)
    assert p == pytest.approx(stats.wilcoxon(a, b, method="exact" if n <= 50 else "approx").pvalue, rel=1e-10)
    positive = stats.wilcoxon(a, b, alternative="greater").statistic  # the sum of the positive ranks
    assert w == pytest.approx(2 * positive - n * (n + 1) / 2)


def test_wilcoxon_with_ties_and_zeros_is_that_of_scipy() -> None:
    a, b = metric_like(3000, 0)
    a, b = np.round(a, 6), np.round(b, 6)  # without the last bits, where SciPy sees no ties
    assert (a == b).mean() > 0.2
    expected = stats.wilcoxon(np.round(a - b, 6), zero_method="wilcox", correction=False, method="approx")
    assert wilcoxon(a, b).p == pytest.approx(expected.pvalue, rel=1e-10)


@given(st.lists(st.integers(-3, 3), min_size=2, max_size=10))
def test_exact_wilcoxon_is_the_share_of_signs(d: list[int]) -> None:
    others = [x for x in d if x]
    ranks = stats.rankdata(np.abs(others))
    w = float(np.sign(others) @ ranks) if others else 0.0
    signed = [float(np.array(signs) @ ranks) for signs in product((-1, 1), repeat=len(others))]
    share = np.mean([abs(value) >= abs(w) for value in signed])
    assert wilcoxon(d, [0] * len(d)) == (w, share)


def test_wilcoxon_ties_differences_that_only_rounding_separates() -> None:
    a, b = [1 / 3, 2 / 3, 2 / 3], [0, 1 / 3, 1]
    assert 2 / 3 - 1 / 3 != 1 - 2 / 3
    assert wilcoxon(a, b).statistic == 2  # ranks 2, 2, 2


@pytest.mark.parametrize("test", [paired_t, wilcoxon])
@pytest.mark.parametrize("n", [20, 150])  # exact and approximate
def test_paired_tests_reject_as_often_as_they_say(test: Callable[..., Significance], n: int) -> None:
    # 2,000 trials without a difference: 100 rejections, with standard deviation 10.
    rng = np.random.default_rng(n)
    level = rng.random((2000, n))  # of the users, in common to both models
    a, b = level + rng.normal(0, 0.1, level.shape), level + rng.normal(0, 0.1, level.shape)
    rejected = sum(test(x, y).p <= 0.05 for x, y in zip(a, b, strict=True))
    assert abs(rejected - 100) < 3 * 10


@pytest.mark.parametrize("test", [paired_t, wilcoxon])
def test_exchanging_the_models_changes_the_sign(test: Callable[..., Significance]) -> None:
    a, b = metric_like(300, 2)
    assert test(a, b).statistic > 0
    assert test(b, a) == pytest.approx((-test(a, b).statistic, test(a, b).p), rel=1e-12)


# -- bootstrap ---------------------------------------------------------------------------------------------------------


def test_the_interval_is_that_of_scipy() -> None:
    a, b = metric_like(80, 1)
    expected = stats.bootstrap((a - b,), np.mean, n_resamples=20_000, method="BCa", rng=np.random.default_rng(0))
    error = np.std(a - b) / np.sqrt(80)
    low, high = bootstrap_interval(a, b, resamples=20_000)
    # The ends are quantiles of 20,000 draws, with a standard deviation of about 0.02 standard errors.
    assert low == pytest.approx(expected.confidence_interval.low, abs=0.1 * error)
    assert high == pytest.approx(expected.confidence_interval.high, abs=0.1 * error)


def test_an_interval_by_hand() -> None:
    # The sum of four draws from 0, 1, 1, 2 is binomial (8, 1/2): symmetric, so that nothing is corrected, and between 1
    # and 7 with probability 0.992, between 2 and 6 with 0.93. Many resamples are equal to the mean.
    assert list(bootstrap_interval([0, 1, 1, 2], [0, 0, 0, 0])) == [1 / 4, 7 / 4]


def test_the_interval_of_many_users_is_the_normal_one() -> None:
    a, b = metric_like(4000, 3)
    error = np.std(a - b, ddof=1) / np.sqrt(4000)
    low, high = bootstrap_interval(a, b, resamples=4000)
    assert (low, high) == pytest.approx((a - b).mean() + np.array([-1.96, 1.96]) * error, abs=0.15 * error)


def test_intervals_contain_the_truth_as_often_as_they_say() -> None:
    # Differences of 200 users, most of them 0, the others skewed: mean 0.2. 1,500 trials, as columns.
    rng = np.random.default_rng(4)
    d = np.where(rng.random((200, 1500)) < 0.3, rng.exponential(2, (200, 1500)) - 4 / 3, 0)
    low, high = bootstrap_interval(d, np.zeros_like(d), resamples=1000)
    inside = ((low <= 0.2) & (high >= 0.2)).mean()
    assert 0.93 < inside < 0.965
    below, above = (low > 0.2).mean(), (high < 0.2).mean()
    assert max(below, above) < 0.05  # the misses are on both sides


def test_the_interval_is_corrected_for_skewness() -> None:
    d = np.r_[np.zeros(45), np.full(5, 1.0)]  # a mean of 0.1: the upper end must be farther away than the lower one
    low, high = bootstrap_interval(d, 0 * d)
    plain = np.quantile(np.random.default_rng(0).binomial(50, 0.1, 10_000) / 50, [0.025, 0.975])
    assert plain[0] < low < 0.1
    assert plain[1] < high


def test_the_same_seed_gives_the_same_bits_alone_or_in_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = [metric_like(333, seed) for seed in range(7)]
    a, b = (np.stack(values, 1) for values in zip(*pairs, strict=True))
    together = bootstrap_interval(a, b, resamples=500, seed=5)
    monkeypatch.setattr(significance, "BLOCK", 7)
    alone = np.stack([bootstrap_interval(x, y, resamples=500, seed=5) for x, y in pairs], 1)
    assert together.shape == (2, 7)
    assert together.tobytes() == alone.tobytes()
    assert not np.array_equal(together, bootstrap_interval(a, b, resamples=500, seed=6))


def test_the_scale_of_the_values_is_the_scale_of_the_interval() -> None:
    a, b = metric_like(50, 0)
    small = bootstrap_interval(a * 2.0**-40, b * 2.0**-40, resamples=500)
    assert np.array_equal(small * 2.0**40, bootstrap_interval(a, b, resamples=500))


def test_progress_of_the_bootstrap() -> None:
    calls: list[tuple[int, int]] = []
    bootstrap_interval([1, 2], [0, 0], resamples=100, progress=lambda *call: calls.append(call))
    assert calls == [(64, 100), (100, 100)]


@pytest.mark.parametrize("arguments", [{"level": 0}, {"level": 1.0}, {"resamples": 99}, {"seed": -1}])
def test_bad_arguments_of_the_bootstrap(arguments: dict[str, float]) -> None:
    (name,) = arguments
    with pytest.raises(InputError, match=f"bootstrap_interval: `{name}` must be"):
        bootstrap_interval([1, 2], [0, 0], **arguments)


# -- Holm --------------------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(0, 1), max_size=12))
def test_holm_is_the_step_down_procedure(p: list[float]) -> None:
    adjusted = holm(p)
    assert [0 <= before <= after <= 1 for before, after in zip(p, adjusted, strict=True)] == [True] * len(p)
    by_p = sorted(range(len(p)), key=lambda i: p[i])
    assert [adjusted[i] for i in by_p] == sorted(adjusted)
    for alpha in (0.01, 0.05, 0.3):
        rejected = 0
        while rejected < len(p) and p[by_p[rejected]] * (len(p) - rejected) <= alpha:
            rejected += 1
        assert sum(value <= alpha for value in adjusted) == rejected


def test_holm_keeps_the_probability_of_any_false_rejection() -> None:
    # 2,000 tables of 10 tests without a difference: 100 tables with a rejection, with standard deviation 10.
    p = np.random.default_rng(0).random((2000, 10))
    tables = sum(min(holm(row)) <= 0.05 for row in p)
    assert abs(tables - 100) < 3 * 10
    assert (p.min(1) <= 0.05).mean() > 0.35  # uncorrected


@pytest.mark.parametrize("p", [[0.1, math.nan], [-0.1], [1.1], [[0.1]]])
def test_holm_refuses_what_is_no_p_value(p: list[float]) -> None:
    with pytest.raises(InputError, match=r"holm: `p_values` must be numbers from 0 to 1"):
        holm(p)


# -- degenerate input --------------------------------------------------------------------------------------------------


def test_equal_models() -> None:
    a, _ = metric_like(100, 0)
    assert paired_t(a, a) == wilcoxon(a, a) == (0, 1)
    assert list(bootstrap_interval(a, a)) == [0, 0]


def test_the_same_difference_for_all_users() -> None:
    a = np.arange(8.0)
    assert paired_t(a, a + 1) == (-math.inf, 0)
    assert wilcoxon(a, a + 1) == (-36, 2 / 2**8)
    assert list(bootstrap_interval(a, a + 1)) == [-1, -1]


@pytest.mark.parametrize("test", [welch, *PAIRED])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_values_that_are_not_finite(test: Callable[..., object], bad: float) -> None:
    name = test.__name__
    with pytest.raises(InputError, match=f"{name}: `b` has {bad} at position 2; give finite numbers only"):
        test([1, 2, 3], [1, 2, bad])
    with pytest.raises(InputError, match=f"{name}: `a` has"):
        test([bad, 2, 3], [1, 2, 3])


@pytest.mark.parametrize("test", PAIRED)
def test_too_few_or_different_users(test: Callable[..., object]) -> None:
    with pytest.raises(InputError, match="one user is not enough"):
        test([1], [2])
    with pytest.raises(InputError, match=r"must have the same users, got shapes \[3\] and \[2\]"):
        test([1, 2, 3], [2, 3])


@pytest.mark.parametrize("test", [welch, *PAIRED])
@pytest.mark.parametrize("values", [[], 1.0, np.zeros((2, 2, 2))])
def test_no_list_of_numbers(test: Callable[..., object], values: object) -> None:
    with pytest.raises(InputError, match="`a` must be a list of one or more numbers"):
        test(values, values)
