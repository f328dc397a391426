"""The page: one function for each section, put together by the template page.html."""

import base64
import hashlib
from collections.abc import Sequence
from importlib import resources
from string import Template

from drm_triton._version import __version__
from drm_triton.ranking.evaluate import MIN_TRAIN
from drm_triton.report import svg
from drm_triton.report.charts import activity_section, curves_section
from drm_triton.report.facts import configuration_section, data_section
from drm_triton.report.markup import HEADLINE, METRICS, escape, table, value
from drm_triton.report.measure import CUT_OFFS, Data, Measured, data_of
from drm_triton.report.users import users_section


def render(runs: Sequence[Measured]) -> str:
    """Make the HTML of the whole page."""
    style, script = _asset("style.css"), _asset("script.js")
    names = ", ".join(run.name for run in runs)
    return Template(_asset("page.html")).substitute(
        # Only this style and this script may run, and nothing may be fetched, whatever the data contains.
        policy=f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'",
        style=style,
        script=script,
        title=escape(f"{names} – drm-triton report"),
        heading=f"<bdi>{escape(names)}</bdi>" if len(runs) == 1 else f"{len(runs)} runs compared",
        differ=_differ(data_of(runs)),
        overview="".join(_card(number, run) for number, run in enumerate(runs, 1)),
        metrics_note=_metrics_note(runs),
        metrics=metrics_table(runs),
        min_train=MIN_TRAIN,
        curves=curves_section(runs),
        activity=activity_section(runs),
        users=users_section(runs),
        configuration=configuration_section(runs),
        data=data_section(data_of(runs)),
        version=escape(__version__),
    )


def _differ(data: Sequence[Data]) -> str:
    if len(data) == 1:
        return ""
    names = ", ".join(f"<bdi>{escape(one.name)}</bdi>" for one in data)
    return (
        f'<p class="note">These runs were trained on different data sets ({names}). Their metrics stand side by side '
        "but cannot be compared across data sets; the best is marked within each.</p>"
    )


def _card(number: int, run: Measured) -> str:
    config, facts = run.config, []
    if run.records:
        seconds = sum(record["seconds"] for record in run.records)
        n = len(run.records)
        facts.append(f"{n} epoch{'s' if n != 1 else ''} in {_duration(seconds)}")
        if run.best_epoch is not None:
            facts[-1] += f"; best: epoch {run.best_epoch}"
    facts.append(f"{escape(config.objective)}, {escape(config.score)} score, {config.factors} factors")
    facts.append(f"data <bdi>{escape(run.data.name)}</bdi>")
    if run.checkpoint != "best":
        facts.append({"last": "measured is its last checkpoint", "saved": "a saved model"}[run.checkpoint])
    if run.evaluation is None:
        figure = f'<p class="none">Not measured: {escape(run.unmeasured)}.</p>'
    else:
        assert run.popularity is not None
        figure = (
            f'<p class="figure">{value(run.evaluation.means[HEADLINE], ".3f")}'
            f"<span>NDCG@10 on {run.data.on}<br>popularity {run.popularity.means[HEADLINE]:.3f}</span></p>"
        )
    return f'<li class="card"><h2>{svg.named(number, run.name)}</h2>{figure}<p>{"<br>".join(facts)}</p></li>'


def metrics_table(runs: Sequence[Measured]) -> str:
    """Metrics in columns: the runs on each data set, then its popularity baseline; the best of each set is bold."""
    groups, heads, columns = [], [], []
    for data in data_of(runs):
        mine: list[tuple[str, dict[str, float] | None]] = []
        for number, run in enumerate(runs, 1):
            if run.data is data:
                mine.append((svg.named(number, run.name), run.evaluation.means if run.evaluation else None))
        mine += [(escape(label), result.means) for label, result in data.baselines()]
        groups.append(f'<th scope="colgroup" colspan="{len(mine)}"><bdi>{escape(data.name)}</bdi></th>')
        heads += [head for head, _ in mine]
        columns.append([means for _, means in mine])
    rows = []
    for name, shown in METRICS.items():
        for k in CUT_OFFS:
            cells = []
            for group in columns:
                values = [None if means is None else means[f"{name}@{k}"] for means in group]
                best = max((v for v in values if v is not None), default=None)
                cells += [f"<strong>{value(v)}</strong>" if v is not None and v == best else value(v) for v in values]
            rows.append((f"{shown}@{k}", *cells))
    if all(run.evaluation is None for run in runs):
        return ""
    above = f"<tr><td></td>{''.join(groups)}</tr>" if len(groups) > 1 else ""
    return table("Metrics of each run", ["", *heads], rows, above, "figures metrics")


def _metrics_note(runs: Sequence[Measured]) -> str:
    """What the means are over, and which runs have none."""
    parts = []
    for data in data_of(runs):
        users = next((len(run.evaluation.per_user) for run in runs if run.data is data and run.evaluation), 0)
        if users:
            parts.append(f"{users:,} users of <bdi>{escape(data.name)}</bdi> ({data.on} part)")
    content = ""
    if parts:
        within = " on each data set" if len(parts) > 1 else ""
        content = f'<p class="quiet">Means over {", ".join(parts)}. The best of each row{within} is bold.</p>'
    for run in runs:
        if run.evaluation is None:
            content += f'<p class="note"><bdi>{escape(run.name)}</bdi> is not measured: {escape(run.unmeasured)}.</p>'
    return content


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text("utf-8")


def _digest(content: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
