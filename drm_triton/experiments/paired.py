"""Compare models over the same users: means with intervals, and paired tests of all pairs of models."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from drm_triton.errors import InputError
from drm_triton.experiments.significance import LEVEL, RESAMPLES, bootstrap_interval, holm, paired_t, wilcoxon
from drm_triton.experiments.tables import Row, number, p_text, ranked
from drm_triton.progress import SILENT, Reporter

ALPHA = 0.05  # p-values up to this are marked as significant
MARK = "*"


@dataclass(frozen=True)
class Mean:
    """The mean of a metric over users, and the interval from `low` to `high` of the bootstrap."""

    model: str
    metric: str
    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class PairedTest:
    """Two models in one metric, over the same users.

    Attributes
    ----------
    a, b, metric : the models and the metric
    mean_a, mean_b : means over users
    difference : mean of a - b, with the bootstrap interval from `low` to `high`
    t, p_t : statistic and p-value of the paired t-test
    w, p_wilcoxon : statistic and p-value of Wilcoxon's signed-rank test
    p_t_holm, p_wilcoxon_holm : p-values adjusted for all pairs and metrics of the comparison, each test by itself
    users : number of users
    """

    a: str
    b: str
    metric: str
    mean_a: float
    mean_b: float
    difference: float
    low: float
    high: float
    t: float
    p_t: float
    p_t_holm: float
    w: float
    p_wilcoxon: float
    p_wilcoxon_holm: float
    users: int


def compare_users(
    values: Mapping[str, NDArray[np.float64]],
    metrics: Sequence[str],
    level: float = LEVEL,
    resamples: int = RESAMPLES,
    seed: int = 0,
    reporter: Reporter = SILENT,
) -> tuple[list[Mean], list[PairedTest]]:
    """Compute the mean of every model, and test every pair of models, in each metric.

    Parameters
    ----------
    values : for each of two or more models float64 [users, metrics], with the same users in the same order
    metrics : names of the columns
    level, resamples, seed : see `bootstrap_interval`
    reporter : receives the progress

    Returns
    -------
    means : by model, then by metric
    tests : by pair of models, then by metric
    """
    pairs = list(combinations(values, 2))
    if not pairs:
        raise InputError(f"compare_users: two or more models are needed, got {len(values)}")
    differences = {(a, b): values[a] - values[b] for a, b in pairs}
    columns = np.concatenate([*values.values(), *differences.values()], 1)
    with reporter.step("bootstrap over users", total=resamples, unit="resamples") as step:
        ends = bootstrap_interval(
            columns, np.zeros_like(columns), level, resamples, seed, lambda done, total: step.advance(done - step.done)
        )
    # [models + pairs, metrics, 2]
    intervals = np.moveaxis(ends, 0, 1).reshape(-1, len(metrics), 2).tolist()
    means = [
        Mean(model, metric, float(values[model][:, column].mean()), *intervals[place][column])
        for place, model in enumerate(values)
        for column, metric in enumerate(metrics)
    ]
    cells = [(a, b, column) for a, b in pairs for column in range(len(metrics))]
    t = [paired_t(values[a][:, column], values[b][:, column]) for a, b, column in cells]
    w = [wilcoxon(values[a][:, column], values[b][:, column]) for a, b, column in cells]
    t_holm, w_holm = (holm([test.p for test in tests]) for tests in (t, w))
    ends_of_pairs = [interval for pair in intervals[len(values) :] for interval in pair]
    tests = [
        PairedTest(
            a=a,
            b=b,
            metric=metrics[column],
            mean_a=float(values[a][:, column].mean()),
            mean_b=float(values[b][:, column].mean()),
            difference=float(differences[a, b][:, column].mean()),
            low=ends_of_pairs[number][0],
            high=ends_of_pairs[number][1],
            t=t[number].statistic,
            p_t=t[number].p,
            p_t_holm=t_holm[number],
            w=w[number].statistic,
            p_wilcoxon=w[number].p,
            p_wilcoxon_holm=w_holm[number],
            users=len(values[a]),
        )
        for number, (a, b, column) in enumerate(cells)
    ]
    return means, tests


def table_of_means(means: Sequence[Mean], tests: Sequence[PairedTest]) -> tuple[list[str], list[Row]]:
    """Return header and rows of the means, the best ones marked where they are `ahead`."""
    metrics = list(dict.fromkeys(mean.metric for mean in means))
    rows: dict[str, dict[str, float | str | None]] = {}
    for mean in means:
        rows.setdefault(mean.model, {"model": mean.model})[mean.metric] = mean.mean
    return ["model", *metrics], ranked([*rows.values()], metrics, dict.fromkeys(ahead(tests), MARK))


def ahead(tests: Sequence[PairedTest]) -> set[tuple[str, str]]:
    """Return (model, metric) where a model has a higher mean than every other, significantly in the t-test (Holm)."""
    rivals: dict[tuple[str, str], list[bool]] = {}
    for test in tests:
        significant = test.p_t_holm <= ALPHA
        rivals.setdefault((test.a, test.metric), []).append(significant and test.difference > 0)
        rivals.setdefault((test.b, test.metric), []).append(significant and test.difference < 0)
    return {place for place, wins in rivals.items() if all(wins)}


def table_of_tests(tests: Sequence[PairedTest], level: float = LEVEL) -> tuple[list[str], list[Row]]:
    """Return header and rows of the tests of one pair of models."""
    header = [
        "metric", tests[0].a, tests[0].b, "difference", f"{100 * level:g} % interval",
        "p (t)", "Holm", "p (Wilcoxon)", "Holm",
    ]  # fmt: skip
    rows: list[Row] = [
        [
            test.metric,
            number(test.mean_a),
            number(test.mean_b),
            number(test.difference),
            f"{number(test.low)} to {number(test.high)}",
            *map(p_text, (test.p_t, test.p_t_holm, test.p_wilcoxon, test.p_wilcoxon_holm)),
        ]
        for test in tests
    ]
    return header, rows
