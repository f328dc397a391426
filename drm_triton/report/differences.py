"""The section of differences: intervals of the means, and paired tests between runs over the same users."""

from collections.abc import Sequence
from itertools import groupby

import numpy as np

from drm_triton.experiments.paired import ALPHA, Mean, PairedTest, compare_users
from drm_triton.experiments.significance import LEVEL, RESAMPLES
from drm_triton.experiments.tables import p_text
from drm_triton.names import HEADLINE_METRICS
from drm_triton.progress import SILENT, Reporter
from drm_triton.ranking.evaluate import Evaluation
from drm_triton.report import svg
from drm_triton.report.markup import details, escape, metric_title, table, value
from drm_triton.report.measure import MeasuredRun, RunData, data_of

TESTED = tuple(name.removeprefix("valid/") for name in HEADLINE_METRICS)

Compared = tuple[list[Mean], list[PairedTest]]
Comparisons = dict[RunData, Compared]


def compare(runs: Sequence[MeasuredRun], reporter: Reporter = SILENT) -> Comparisons:
    """Compare, for each data set, its evaluated runs and its popularity baselines over the same users.

    Models are called by their place in `models_of`. Data sets with fewer than two users or models are left out.
    """
    comparisons = {}
    for data in data_of(runs):
        values = {
            str(place): np.stack([evaluation.per_user[name].to_numpy() for name in TESTED], 1)
            for place, (_, evaluation) in enumerate(models_of(data, runs))
        }
        if len(values) > 1 and len(values["0"]) > 1:
            comparisons[data] = compare_users(values, TESTED, reporter=reporter)
    return comparisons


def models_of(data: RunData, runs: Sequence[MeasuredRun]) -> list[tuple[str, Evaluation]]:
    """Return the label, as HTML, and the evaluation of each run on a data set that was evaluated, and of baselines."""
    evaluated = [
        (svg.run_label(number, run.name), run.evaluation)
        for number, run in enumerate(runs, 1)
        if run.data is data and run.evaluation is not None
    ]
    return evaluated + [(escape(label), evaluation) for label, evaluation in data.baselines() if evaluated]


def intervals_of(data: RunData, runs: Sequence[MeasuredRun], comparisons: Comparisons) -> dict[tuple[int, str], Mean]:
    """Return the mean with its interval by (id of the evaluation, metric)."""
    models = models_of(data, runs)
    means, _ = comparisons.get(data, ([], []))
    return {(id(models[int(mean.model)][1]), mean.metric): mean for mean in means}


def differences_section(runs: Sequence[MeasuredRun], comparisons: Comparisons) -> str:
    """Build a table for each data set: the difference of each pair of models in each metric, with its tests."""
    if not comparisons:
        return '<p class="note">There is nothing to compare: no run was evaluated on two or more users.</p>'
    content = ""
    for data, (_, tests) in comparisons.items():
        labels = [label for label, _ in models_of(data, runs)]
        heads = ["metric", "verdict", "difference", f"{100 * LEVEL:g} % interval", "p (t)", "p (Wilcoxon)"]
        if len(comparisons) > 1:
            content += f"<h3>On <bdi>{escape(data.name)}</bdi></h3>"
        n_runs = len(labels) - len(data.baselines())
        against_baselines = ""
        for (a, b), pair in groupby(tests, key=lambda test: (int(test.a), int(test.b))):
            rows = [
                (
                    metric_title(test.metric),
                    _verdict(test, labels[a], labels[b]),
                    value(test.difference, "+.4f"),
                    f"{test.low:+.4f} to {test.high:+.4f}",
                    p_text(test.p_t_holm),
                    p_text(test.p_wilcoxon_holm),
                )
                for test in pair
            ]
            made = (
                f'<h3 class="pair"><b>{labels[a]}</b> against <b>{labels[b]}</b></h3>'
                f"{table('Differences of two models', heads, rows, kind='figures tests')}"
            )
            if b < n_runs or n_runs == 1:
                content += made
            else:
                against_baselines += made
        if against_baselines:
            content += details("Against popularity", against_baselines)
        content += (
            f'<p class="quiet">Paired over {tests[0].users:,} users. p-values are two-sided and corrected for the '
            f"{len(tests)} comparisons here (Holm).</p>"
        )
    return content + (
        f'<p class="quiet">Intervals are those of a bootstrap over users ({RESAMPLES:,} resamples, BCa). The verdict '
        f"names a model if the corrected p of the t-test is at most {ALPHA:g}. The tests say nothing about other "
        "seeds.</p>"
    )


def _verdict(test: PairedTest, a: str, b: str) -> str:
    return f"{a if test.difference > 0 else b} is ahead" if test.p_t_holm <= ALPHA else "no difference shown"
