"""Compare finished runs on the same held-out data: `compare_runs`, and the files of a comparison."""

import json
import math
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from drm_triton import atomic
from drm_triton.base_config import MAX_CUT_OFF
from drm_triton.errors import InputError, warn
from drm_triton.experiments.paired import (
    ALPHA,
    MARK,
    Mean,
    PairedTest,
    ahead,
    compare_users,
    table_of_means,
    table_of_tests,
)
from drm_triton.experiments.results import aligned
from drm_triton.experiments.significance import LEVEL, RESAMPLES
from drm_triton.experiments.tables import latex, markdown, markdown_text, number, p_text
from drm_triton.names import COMPARED_METRICS, CUT_OFFS, METRICS, MIN_TRAIN
from drm_triton.progress import SILENT, Reporter
from drm_triton.ranking.held_out import HeldOut
from drm_triton.report.measure import distinct_names
from drm_triton.training.run import checkpoint_directory

MARKER = "compare.json"  # the file by which a directory is recognised as a comparison


@dataclass(frozen=True)
class RunComparison:
    """Runs that were measured on the same users, and the tests between them.

    Attributes
    ----------
    dataset, checksum : path and checksum of the data set
    on : the part of it that the runs were measured on
    users : number of users
    runs : name, path and `fit_on` of each run
    means, tests : see `compare_users`
    """

    dataset: str
    checksum: str
    on: str
    users: int
    runs: list[dict[str, str]]
    means: list[Mean]
    tests: list[PairedTest]

    def to_json(self) -> str:
        """Return all figures as a JSON object. An infinite statistic, of users who all differ equally, is null."""
        content: dict[str, Any] = {**asdict(self), "level": LEVEL, "resamples": RESAMPLES}
        for test in content["tests"]:
            test["t"] = test["t"] if math.isfinite(test["t"]) else None
        return json.dumps(content, indent=2, allow_nan=False) + "\n"

    @property
    def title(self) -> str:
        """What was measured, in one line."""
        return f"{Path(self.dataset).name}, {self.on} part, {self.users:,} users"

    @property
    def pairs(self) -> list[list[PairedTest]]:
        """The tests, by pair of runs."""
        return [list(tests) for _, tests in groupby(self.tests, key=lambda test: (test.a, test.b))]

    def to_markdown(self) -> str:
        """Return the tables with a legend."""
        fits = ", ".join(f"{markdown_text(run['name'])} on {run['fit_on']}" for run in self.runs)
        parts = [
            "# Comparison of runs\n",
            f"{markdown_text(self.title)}. Trained: {fits}.\n",
            markdown(*table_of_means(self.means, self.tests)),
        ]
        for tests in self.pairs:
            parts += [f"## {markdown_text(tests[0].a)} and {markdown_text(tests[0].b)}\n"]
            parts += [markdown(*table_of_tests(tests))]
        parts += [textwrap.fill(_legend(len(self.tests)), 80) + "\n"]
        return "\n".join(parts)

    def to_text(self) -> str:
        """Return the tables for a terminal of 80 columns, p-values corrected only."""
        best = ahead(self.tests)
        metrics = list(dict.fromkeys(mean.metric for mean in self.means))
        rows: dict[str, list[str]] = {}
        for mean in self.means:
            mark = MARK if (mean.model, mean.metric) in best else " "
            rows.setdefault(mean.model, [textwrap.shorten(mean.model, 17)]).append(f"{mean.mean:.4f}{mark}")
        lines = [self.title, "", *aligned(["", *(f"{metric} " for metric in metrics)], [*rows.values()])]
        for tests in self.pairs:
            cells = [
                [
                    test.metric,
                    number(test.difference),
                    f"{number(test.low)} to {number(test.high)}",
                    p_text(test.p_t_holm),
                    p_text(test.p_wilcoxon_holm),
                ]
                for test in tests
            ]
            heads = ["", "difference", f"{100 * LEVEL:g} % interval", "p (t, Holm)", "p (Wilcoxon, Holm)"]
            lines += ["", f"{tests[0].a} - {tests[0].b}", *aligned(heads, cells)]
        return "\n".join([*lines, "", textwrap.fill(_legend(len(self.tests)), 80)]) + "\n"

    def to_latex(self) -> str:
        """Return the tables in LaTeX, one for the means and one for each pair of runs."""
        caption = f"Means over users: {self.title}. {_legend(len(self.tests))}"
        tables = [latex(*table_of_means(self.means, self.tests), caption, "tab:means")]
        for place, tests in enumerate(self.pairs, 1):
            caption = f"{tests[0].a} and {tests[0].b}: {self.title}."
            tables.append(latex(*table_of_tests(tests), caption, f"tab:pair-{place}", wide=True))
        return "\n".join(tables)

    def plot(self, path: Path) -> None:
        """Plot the means with their intervals to a PNG file."""
        from drm_triton.plots import metric_intervals

        title = f"{self.title}: mean and {100 * LEVEL:g} % interval"
        metric_intervals([asdict(mean) for mean in self.means], title, "mean over users", path)

    def write(self, out: str | Path, overwrite: bool = False) -> None:
        """Write compare.md, compare.tex, compare.json and compare.png to a directory, atomically."""
        with atomic.directory(out, overwrite, MARKER) as folder:
            atomic.write_text(folder / "compare.md", self.to_markdown())
            atomic.write_text(folder / "compare.tex", self.to_latex())
            atomic.write_text(folder / MARKER, self.to_json())
            self.plot(folder / "compare.png")


def compare_runs(
    runs: Sequence[str | Path],
    metrics: Sequence[str] = COMPARED_METRICS,
    ks: Sequence[int] = CUT_OFFS,
    on: str = "test",
    dataset: Path | None = None,
    min_train: int = MIN_TRAIN,
    reporter: Reporter = SILENT,
) -> RunComparison:
    """Measure two or more runs on the same users, and test the differences.

    Parameters
    ----------
    runs : run directories or saved models, all trained on the same data set
    metrics : names such as ndcg, which stands for ndcg at each of `ks`, or ndcg@10
    ks : cut-offs of metrics that are given without one
    on : "valid" or "test", the part to measure on. No run may have been trained on it.
    dataset : the data set, if it is not at the path that the runs recorded
    min_train : leave out users with fewer training items
    reporter : receives the progress
    """
    columns = metric_columns(metrics, ks)
    cut_offs = sorted({int(column.partition("@")[2]) for column in columns})
    paths = [Path(run) for run in runs]
    _check_distinct(paths)
    names = distinct_names(paths)
    # Check all runs before the first is measured. Only one model at a time stays in memory.
    dataset, checksum, fit_parts = _common_data(paths, on, dataset)
    if len(set(fit_parts)) > 1:
        fits = ", ".join(f"{name} on {parts}" for name, parts in zip(names, fit_parts, strict=True))
        warn(f"some runs were trained on more of the data than others: {fits}")
    values = {}
    for name, path in zip(names, paths, strict=True):
        step = f"{name}: ranking all items for every user"
        frame = HeldOut.of_run(path, on, dataset).evaluate(cut_offs, min_train, reporter, step).per_user
        values[name] = np.stack([frame[column].to_numpy() for column in columns], 1)
    means, tests = compare_users(values, columns, reporter=reporter)
    described = [
        {"name": name, "path": str(path), "fit_on": parts}
        for name, path, parts in zip(names, paths, fit_parts, strict=True)
    ]
    return RunComparison(str(dataset), checksum, on, tests[0].users, described, means, tests)


def metric_columns(metrics: Sequence[str], ks: Sequence[int]) -> list[str]:
    """Return the names of metrics with cut-offs, each once.

    Examples
    --------
    >>> metric_columns(["ndcg", "recall@20"], [10, 50])
    ['ndcg@10', 'ndcg@50', 'recall@20']
    """
    columns: list[str] = []
    for given in metrics:
        name, at, cut_off = given.partition("@")
        if name not in METRICS or (at and not (cut_off.isdecimal() and 1 <= int(cut_off) <= MAX_CUT_OFF)):
            raise InputError(
                f"`metrics`: {given!r} is not a metric of users; give {', '.join(METRICS)}, or one of them with a "
                f"cut-off from 1 to {MAX_CUT_OFF}, such as ndcg@10"
            )
        columns += [f"{name}@{int(cut_off)}"] if at else [f"{name}@{k}" for k in ks]
    if not columns:
        raise InputError("`metrics` and cut-offs are needed, for example ndcg and 10")
    return list(dict.fromkeys(columns))


def _check_distinct(paths: Sequence[Path]) -> None:
    if len(paths) < 2:
        raise InputError(f"give two or more `runs` to compare, for example runs/a runs/b; got {len(paths)}")
    found: dict[Path, Path] = {}
    for path in paths:
        first = found.setdefault(checkpoint_directory(path).resolve(), path)
        if first is not path:
            raise InputError(f"{first} and {path} are the same run; give each run once")


def _common_data(paths: Sequence[Path], on: str, dataset: Path | None) -> tuple[Path | None, str, list[str]]:
    """Return path and checksum of the data set that all runs were trained on, and `fit_on` of each run."""
    described = []
    for path in paths:
        measured = HeldOut.of_run(path, on, dataset)
        described.append((measured.data.path, measured.data.checksum, measured.model.config.fit_on))
    place, checksum, _ = described[0]
    for path, (other_place, other, _) in zip(paths, described, strict=True):
        if other != checksum:
            raise InputError(
                f"{paths[0]} and {path} were trained on different data ({place}, {other_place}; checksums "
                f"{checksum[:12]}, {other[:12]}); give runs on the same data set"
            )
    return place, checksum, [fit_on for _, _, fit_on in described]


def _legend(comparisons: int) -> str:
    return (
        f"Intervals: {100 * LEVEL:g} % bootstrap over users ({RESAMPLES:,} resamples, BCa). p: two-sided, paired over "
        f"users. Holm: p corrected for the {comparisons} comparisons here. {MARK} best, with a corrected p of the "
        f"t-test of at most {ALPHA:g} against each other run. The tests say nothing about other seeds."
    )
