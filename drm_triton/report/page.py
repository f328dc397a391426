"""Render the page: one function for each section, assembled by the template page.html."""

import base64
import hashlib
from collections.abc import Sequence
from importlib import resources
from string import Template

from drm_triton._version import __version__
from drm_triton.config import TrainConfig
from drm_triton.experiments.paired import Mean
from drm_triton.experiments.significance import LEVEL
from drm_triton.names import CUT_OFFS, MIN_TRAIN
from drm_triton.ranking.evaluate import Evaluation
from drm_triton.report import svg
from drm_triton.report.charts import activity_section, curves_section
from drm_triton.report.differences import Comparisons, differences_section, intervals_of
from drm_triton.report.facts import configuration_section, data_section
from drm_triton.report.markup import MAIN_METRIC, METRIC_TITLES, escape, table, value
from drm_triton.report.measure import MeasuredRun, RunData, data_of
from drm_triton.report.users import users_section


def render(runs: Sequence[MeasuredRun], comparisons: Comparisons) -> str:
    """Return the HTML of the whole page. `comparisons` are those of `differences.compare`."""
    style, script = _asset("style.css"), _asset("script.js")
    names = ", ".join(run.name for run in runs)
    return Template(_asset("page.html")).substitute(
        # Only this style and this script can run, and nothing can be fetched, whatever text the data contains.
        policy=f"default-src 'none'; style-src '{content_hash(style)}'; script-src '{content_hash(script)}'",
        style=style,
        script=script,
        title=escape(f"{names} – drm-triton report"),
        heading=f"<bdi>{escape(names)}</bdi>" if len(runs) == 1 else f"Comparison of {len(runs)} runs",
        different_data=_different_data_note(data_of(runs)),
        overview="".join(_card(number, run) for number, run in enumerate(runs, 1)),
        metrics_note=_metrics_note(runs, bool(comparisons)),
        metrics=metrics_table(runs, comparisons),
        differences=differences_section(runs, comparisons),
        min_train=MIN_TRAIN,
        curves=curves_section(runs),
        activity=activity_section(runs),
        users=users_section(runs),
        configuration=configuration_section(runs),
        data=data_section(data_of(runs)),
        version=escape(__version__),
    )


def _different_data_note(data: Sequence[RunData]) -> str:
    if len(data) == 1:
        return ""
    names = ", ".join(f"<bdi>{escape(one.name)}</bdi>" for one in data)
    return (
        f'<p class="note">These runs were trained on different data sets ({names}). Compare metrics only within one '
        "data set. The best value of each data set is bold.</p>"
    )


def _card(number: int, run: MeasuredRun) -> str:
    config, facts = run.config, []
    if run.records:
        seconds = sum(record["seconds"] for record in run.records)
        n = len(run.records)
        facts.append(f"{n} epochs in {_duration(seconds)}" if n > 1 else f"trained in {_duration(seconds)}")
        if n > 1 and run.best_epoch is not None:
            facts[-1] += f"; best: epoch {run.best_epoch}"
    if isinstance(config, TrainConfig):
        facts.append(f"{escape(config.objective)}, {escape(config.score_in_force)} score, {config.factors} factors")
    else:
        facts.append(f"model {config.model}")
    facts.append(f"data <bdi>{escape(run.data.name)}</bdi>")
    if run.checkpoint != "best":
        facts.append({"last": "evaluated at its last checkpoint", "saved": "a saved model"}[run.checkpoint])
    if run.evaluation is None:
        figure = f'<p class="none">Not evaluated: {escape(run.not_evaluated)}.</p>'
    else:
        assert run.popularity is not None
        figure = (
            f'<p class="figure">{value(run.evaluation.means[MAIN_METRIC], ".3f")}'
            f"<span>NDCG@10 on {run.data.on}<br>popularity {run.popularity.means[MAIN_METRIC]:.3f}</span></p>"
        )
    return f'<li class="card"><h2>{svg.run_label(number, run.name)}</h2>{figure}<p>{"<br>".join(facts)}</p></li>'


def metrics_table(runs: Sequence[MeasuredRun], comparisons: Comparisons) -> str:
    """Build the table of metrics.

    The columns are, for each data set, its runs and its popularity baseline. The best value of each data set is bold.
    Metrics that were compared have their intervals.
    """
    intervals: dict[tuple[int, str], Mean] = {}
    groups, heads, columns = [], [], []
    for data in data_of(runs):
        intervals |= intervals_of(data, runs, comparisons)
        models: list[tuple[str, Evaluation | None]] = []
        for number, run in enumerate(runs, 1):
            if run.data is data:
                models.append((svg.run_label(number, run.name), run.evaluation))
        models += [(escape(label), evaluation) for label, evaluation in data.baselines()]
        groups.append(f'<th scope="colgroup" colspan="{len(models)}"><bdi>{escape(data.name)}</bdi></th>')
        heads += [head for head, _ in models]
        columns.append([evaluation for _, evaluation in models])
    rows = []
    for name, title in METRIC_TITLES.items():
        for k in CUT_OFFS:
            cells = []
            for group in columns:
                values = [None if evaluation is None else evaluation.means[f"{name}@{k}"] for evaluation in group]
                best = max((v for v in values if v is not None), default=None)
                for v, evaluation in zip(values, group, strict=True):
                    cell = f"<strong>{value(v)}</strong>" if v is not None and v == best else value(v)
                    mean = intervals.get((id(evaluation), f"{name}@{k}"))
                    cells.append(cell + (f"<small>{mean.low:.4f}–{mean.high:.4f}</small>" if mean else ""))
            rows.append((f"{title}@{k}", *cells))
    if all(run.evaluation is None for run in runs):
        return ""
    above = f"<tr><td></td>{''.join(groups)}</tr>" if len(groups) > 1 else ""
    return table("Metrics of each run", ["", *heads], rows, above, "figures metrics")


def _metrics_note(runs: Sequence[MeasuredRun], has_intervals: bool) -> str:
    """Say which users the means are over, and which runs were not evaluated."""
    sources = []
    for data in data_of(runs):
        users = next((len(run.evaluation.per_user) for run in runs if run.data is data and run.evaluation), 0)
        if users:
            sources.append(f"{users:,} users of <bdi>{escape(data.name)}</bdi> ({data.on} part)")
    content = ""
    if sources:
        within = " and data set" if len(sources) > 1 else ""
        content = f'<p class="quiet">Means over {", ".join(sources)}. The best value of each row{within} is bold.'
        if has_intervals:
            content += f" Under some values is their {100 * LEVEL:g} % interval over users."
        content += "</p>"
    for run in runs:
        if run.evaluation is None:
            content += (
                f'<p class="note"><bdi>{escape(run.name)}</bdi> was not evaluated: {escape(run.not_evaluated)}.</p>'
            )
    return content


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text("utf-8")


def content_hash(content: str) -> str:
    """Return the hash of a style or script as a Content-Security-Policy names it."""
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
