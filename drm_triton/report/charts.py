"""The sections with charts: learning curves, and ranking quality by user activity."""

import math
from collections.abc import Sequence

from drm_triton.names import HEADLINE_METRICS
from drm_triton.ranking.evaluate import by_activity
from drm_triton.report import svg
from drm_triton.report.markup import MAIN_METRIC, details, escape, metric_title, table, value
from drm_triton.report.measure import MeasuredRun, data_of

MAX_EPOCH_ROWS = 60  # of the table under the curves


def curves_section(runs: Sequence[MeasuredRun]) -> str:
    """Draw loss and validation metrics over epochs and over seconds, with a table of the values."""
    without_records = [run for run in runs if not run.records]
    notes = "".join(_no_curves_note(run) for run in without_records)
    if len(without_records) == len(runs):
        return notes
    monitored = {run.monitor: None for run in runs}
    columns = ["loss", *[*dict.fromkeys([*monitored, *HEADLINE_METRICS])][: max(len(monitored), len(HEADLINE_METRICS))]]
    charts = ""
    for title, x_label in (("Over epochs", "epochs"), ("Over seconds of training", "seconds")):
        figures = "".join(_chart(runs, column, x_label) for column in columns)
        charts += f'<h3>{title}</h3><div class="charts">{figures}</div>'
    values = "".join(
        f"<h4>{svg.run_label(number, run.name)}</h4>{_records_table(run, columns)}"
        for number, run in enumerate(runs, 1)
        if run.records
    )
    hint = "The ring marks the best epoch. " if any(run.best_epoch for run in runs) else ""
    if len(runs) > 1:
        hint += "Compare losses only between runs with the same objective and the same data."
    return f'{legend(runs)}{notes}<p class="quiet">{hint}</p>{charts}{details("Table of these values", values)}'


def _no_curves_note(run: MeasuredRun) -> str:
    reason = "a saved model has no training history" if run.checkpoint == "saved" else "it has no completed epoch"
    return f'<p class="note">No learning curves for <bdi>{escape(run.name)}</bdi>: {reason}.</p>'


def legend(runs: Sequence[MeasuredRun], baseline: bool = False) -> str:
    """Build the legend: the names of the runs with their colours. A single entry needs no legend."""
    entries = [f"<li>{svg.run_label(number, run.name)}</li>" for number, run in enumerate(runs, 1)]
    if baseline:
        entries.append(f"<li>{svg.run_label(0, 'popularity')}</li>")
    return f'<ul class="legend">{"".join(entries)}</ul>' if len(entries) > 1 else ""


def _chart(runs: Sequence[MeasuredRun], column: str, x_label: str) -> str:
    curves = []
    for number, run in enumerate(runs, 1):
        points, best, seconds = [], None, 0.0
        for record in run.records:
            seconds += record["seconds"]
            x = record["epoch"] if x_label == "epochs" else seconds
            if column in record and math.isfinite(record[column]):
                points.append((x, record[column]))
                if record["epoch"] == run.best_epoch:
                    best = points[-1]
        if points:
            curves.append(svg.Curve(run.name, number, points, best))
    if not curves:
        return ""
    title = _title(column)
    chart = svg.lines(title, x_label, curves, whole=x_label == "epochs")
    return f"<figure><figcaption>{title}</figcaption>{chart}</figure>"


def _title(column: str) -> str:
    return f"Validation {metric_title(column.removeprefix('valid/'))}" if column.startswith("valid/") else "Loss"


def _records_table(run: MeasuredRun, columns: Sequence[str]) -> str:
    every = math.ceil(len(run.records) / MAX_EPOCH_ROWS)
    shown = [
        record
        for position, record in enumerate(run.records, 1)
        if position % every == 0 or position in (1, len(run.records)) or record["epoch"] == run.best_epoch
    ]
    present = [column for column in columns if any(column in record for record in shown)]
    rows = []
    for record in shown:
        epoch = f"{record['epoch']}{' (best)' if record['epoch'] == run.best_epoch else ''}"
        cells = [value(record.get(column)) for column in present]
        rows.append((epoch, *cells, f"{record['seconds']:.2f}"))
    heads = ["epoch", *(_title(column) for column in present), "seconds"]
    note = f'<p class="quiet">Every {every}th epoch, and the best.</p>' if every > 1 else ""
    return note + table(f"Epochs of {run.name}", heads, rows, kind="figures")


def activity_section(runs: Sequence[MeasuredRun]) -> str:
    """Draw NDCG@10 for groups of users with few to many training interactions, one chart for each data set."""
    charts = ""
    for data in data_of(runs):
        series, frames = [], []
        for number, run in enumerate(runs, 1):
            if run.data is data and run.evaluation is not None:
                frames.append(by_activity(run.evaluation, MAIN_METRIC))
                series.append(svg.Bars(run.name, number, frames[-1][MAIN_METRIC].to_list()))
        if not frames:
            continue
        for label, evaluation in data.baselines():
            series.append(svg.Bars(label, 0, by_activity(evaluation, MAIN_METRIC)[MAIN_METRIC].to_list()))
        groups = [
            f"{low}{f'–{high}' if high > low else ''} interactions ({users:,} users)"
            for low, high, users in frames[0].select("min_train", "max_train", "users").iter_rows()
        ]
        title = f"NDCG@10 by activity on {data.name}"
        charts += (
            f"<figure><figcaption>NDCG@10 on {data.on}, <bdi>{escape(data.name)}</bdi></figcaption>"
            f"{svg.bars(title, groups, series)}</figure>"
        )
    if not charts:
        return '<p class="note">No run was evaluated, so there is no chart.</p>'
    return legend(runs, baseline=True) + f'<div class="activity">{charts}</div>'
