"""The result of a comparison: means over seeds on test, Welch's t-test between models, paired tests over users."""

from __future__ import annotations

import json
import textwrap
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from drm_triton import atomic
from drm_triton.data.leaderboards import K, leaderboard
from drm_triton.data.leaderboards import Result as PublishedResult
from drm_triton.errors import InputError
from drm_triton.experiments.paired import Mean, PairedTest, compare_users, table_of_tests
from drm_triton.experiments.protocol import Comparison, Outcome, changed_options
from drm_triton.experiments.significance import LEVEL, RESAMPLES, holm, welch
from drm_triton.experiments.tables import Row, latex, markdown, markdown_text, number, p_text, ranked
from drm_triton.machine import processor
from drm_triton.progress import SILENT, Reporter

METRICS = ("map@10", "ndcg@10", "recall@50", "ndcg@50")  # of the paper's Table 3
PUBLIC_METRICS = (f"recall@{K}", f"ndcg@{K}")  # of the published results of public splits
ALPHA = 0.01  # as in the paper
MARK = "*"


@dataclass(frozen=True)
class WelchTest:
    """Two models in one metric, over seeds. `p` and `p_holm` are None if neither model has randomness."""

    a: str
    b: str
    metric: str
    mean_a: float
    mean_b: float
    p: float | None
    p_holm: float | None


@dataclass(frozen=True)
class Result:
    """A finished comparison.

    Attributes
    ----------
    title : what was measured
    finals : for each model the outcomes of its final trainings
    trials : for each model the number of its trials, of those that failed, and the seconds of all of them
    welch : tests over seeds, for all pairs of models and all metrics
    means, paired : means over users with intervals, and paired tests over users; values of a user are means over seeds
    metrics : the columns of the tables
    published : published results on the same public split
    """

    title: str
    finals: dict[str, list[Outcome]]
    trials: dict[str, tuple[int, int, float]]
    welch: list[WelchTest]
    means: list[Mean]
    paired: list[PairedTest]
    metrics: tuple[str, ...]
    published: list[PublishedResult]

    def rows(self) -> list[dict[str, Any]]:
        """Return for each model its name and the means over its seeds."""
        return [
            {"model": name, **{metric: _mean(outcomes, metric) for metric in self.metrics}}
            for name, outcomes in self.finals.items()
        ]

    def table(self) -> tuple[list[str], list[Row]]:
        """Return header and rows of the means, with a mark where the best is significantly ahead of all others."""
        published = [{**one.to_dict(), "model": one.label} for one in self.published]
        rows = ranked([*self.rows(), *published], self.metrics, dict.fromkeys(_ahead(self.welch), MARK))
        seeds = [*(f"{len(outcomes)}" for outcomes in self.finals.values()), *("" for _ in published)]
        return ["model", *self.metrics, "seeds"], [[*row, count] for row, count in zip(rows, seeds, strict=True)]

    def settings(self) -> tuple[list[str], list[Row]]:
        """Return header and rows of the chosen options and the cost of finding them."""
        rows: list[Row] = []
        for name, outcomes in self.finals.items():
            trials, failed, seconds = self.trials[name]
            options = ", ".join(f"{key} {value}" for key, value in changed_options(outcomes[0]["options"]).items())
            final = np.mean([outcome["seconds"] for outcome in outcomes])
            rows.append([name, options, f"{trials}", f"{failed}", f"{seconds:.0f}", f"{final:.0f}"])
        return ["model", "options", "trials", "failed", "seconds of tuning", "seconds of a final training"], rows

    def welch_table(self) -> tuple[list[str], list[Row]]:
        """Return header and rows of Welch's tests between the best model of each metric and each other model."""
        rows: list[Row] = []
        for metric in self.metrics:
            best = max(self.rows(), key=lambda row: row[metric])["model"]
            for test in (test for test in self.welch if test.metric == metric and best in (test.a, test.b)):
                sides = [(test.a, test.mean_a), (test.b, test.mean_b)]
                (_, mean_of_best), (other, mean) = sides if test.a == best else sides[::-1]
                p, adjusted = ("" if value is None else p_text(value) for value in (test.p, test.p_holm))
                rows.append([metric, best, other, number(mean_of_best), number(mean), p, adjusted])
        return ["metric", "best", "other", "mean of best", "mean of other", "p (Welch)", "p (Holm)"], rows

    def summary(self) -> str:
        """Return the table of means with its legend."""
        return "\n".join([markdown(*self.table()), textwrap.fill(_legend(), 80) + "\n"])

    def to_markdown(self) -> str:
        """Return all tables."""
        parts = [f"# {markdown_text(self.title)}\n", self.summary()]
        parts += ["## Options that were chosen\n"]
        parts += ["Only options that differ from the defaults are shown.\n", markdown(*self.settings())]
        if self.welch:
            parts += ["## Over seeds\n", markdown(*self.welch_table()), "## Over users\n"]
            for a, b in combinations(self.finals, 2):
                tests = [test for test in self.paired if (test.a, test.b) == (a, b)]
                parts += [f"### {markdown_text(a)} and {markdown_text(b)}\n", markdown(*table_of_tests(tests))]
        return "\n".join(parts)

    def to_latex(self) -> str:
        """Return the table of means in LaTeX."""
        return latex(*self.table(), f"{self.title}. {_legend()}", "tab:comparison")

    def to_json(self) -> str:
        """Return all figures as a JSON object."""
        content = {
            "title": self.title,
            "models": {name: [*outcomes] for name, outcomes in self.finals.items()},
            "trials": {
                name: dict(zip(("trials", "failed", "seconds"), cost, strict=True))
                for name, cost in self.trials.items()
            },
            "welch": [asdict(test) for test in self.welch],
            "means": [asdict(mean) for mean in self.means],
            "paired": [{**asdict(test), "t": test.t if np.isfinite(test.t) else None} for test in self.paired],
        }
        return json.dumps(content, indent=2, allow_nan=False) + "\n"

    def write(self, folder: Path) -> None:
        """Write compare.md, compare.tex, compare.json and compare.png."""
        from drm_triton.plots import metric_intervals

        atomic.write_text(folder / "compare.md", self.to_markdown())
        atomic.write_text(folder / "compare.tex", self.to_latex())
        atomic.write_text(folder / "compare.json", self.to_json())
        if self.means:
            title = f"{self.title}: mean and {100 * LEVEL:g} % interval over users"
            rows = [asdict(mean) for mean in self.means]
            atomic.write_file(folder / "compare.png", lambda file: metric_intervals(rows, title, "mean", file))


def result_of(comparison: Comparison, reporter: Reporter = SILENT) -> Result:
    """Return the result of a comparison, of the models that have finished final trainings."""
    finals = {name: found for name in comparison.plan.models if (found := comparison.finals(name))}
    if not finals:
        failed = [outcome for outcome in comparison.outcomes if outcome["status"] == "failed"]
        reason = f", the first because {failed[0]['error']}" if failed else ""
        raise InputError(f"compare: no model was trained to the end{reason}; see {comparison.path}/outcomes.jsonl")
    trials = {name: _cost(comparison, name) for name in finals}
    published = leaderboard(comparison.dataset.meta)
    metrics = PUBLIC_METRICS if published else METRICS
    means: list[Mean] = []
    paired: list[PairedTest] = []
    if len(finals) > 1:
        frames = {name: comparison.per_user(name, metrics) for name in finals}
        values = {name: frame.select(metrics).to_numpy() for name, frame in frames.items()}
        means, paired = compare_users(values, metrics, resamples=RESAMPLES, reporter=reporter)
    return Result(_title(comparison), finals, trials, _welch_tests(finals, metrics), means, paired, metrics, published)


def _title(comparison: Comparison) -> str:
    plan, data = comparison.plan, comparison.dataset
    assert data.path is not None
    budget = "the whole grid" if plan.trials is None else f"{plan.trials} trials"
    space = "the paper" if plan.space == "paper" else "tune"
    fixed = "".join(f", {name} {value}" for name, value in plan.fixed.items())
    machine = f"{processor()}, {time.strftime('%Y-%m-%d')}"
    return f"{data.path.name}: {budget} in the space of {space}{fixed}, {plan.seeds} seeds; {machine}"


def _legend() -> str:
    return (
        "Means on test over seeds. The options of each model have the best validation Recall@50 of its trials, and the "
        f"final trainings are on train + validation. {MARK} the best, with p <= {ALPHA:g} against each other model "
        "(Welch's t-test over seeds, corrected by Holm; a model without randomness counts as an exact value)."
    )


def _welch_tests(finals: dict[str, list[Outcome]], metrics: Sequence[str]) -> list[WelchTest]:
    """Test all pairs of models in all metrics. Holm's correction is over all of them."""
    cells = [(a, b, metric) for a, b in combinations(finals, 2) for metric in metrics]
    found = [welch(*([outcome[metric] for outcome in finals[name]] for name in (a, b))) for a, b, metric in cells]
    adjusted = iter(holm([test.p for test in found if test is not None]))
    return [
        WelchTest(
            a,
            b,
            metric,
            _mean(finals[a], metric),
            _mean(finals[b], metric),
            None if test is None else test.p,
            None if test is None else next(adjusted),
        )
        for (a, b, metric), test in zip(cells, found, strict=True)
    ]


def _ahead(tests: list[WelchTest]) -> set[tuple[str, str]]:
    """Return (model, metric) where a model is significantly ahead of every other."""
    wins: dict[tuple[str, str], list[bool]] = {}
    for test in tests:
        significant = test.p_holm is not None and test.p_holm <= ALPHA
        wins.setdefault((test.a, test.metric), []).append(significant and test.mean_a > test.mean_b)
        wins.setdefault((test.b, test.metric), []).append(significant and test.mean_b > test.mean_a)
    return {place for place, won in wins.items() if all(won)}


def _cost(comparison: Comparison, name: str) -> tuple[int, int, float]:
    """Return the number of trials of a model, of those that failed, and the seconds of all of them."""
    trials = [o for o in comparison.outcomes if (o["model"], o["stage"]) == (name, "tune")]
    failed = sum(outcome["status"] == "failed" for outcome in trials)
    return len(trials), failed, sum(outcome["seconds"] for outcome in trials)


def _mean(outcomes: list[Outcome], metric: str) -> float:
    return float(np.mean([outcome[metric] for outcome in outcomes]))
