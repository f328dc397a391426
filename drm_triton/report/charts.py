"""The sections with charts: how the runs learnt, and how well they serve users of different activity."""

import math
from collections.abc import Sequence

from drm_triton.ranking.evaluate import by_activity
from drm_triton.report import svg
from drm_triton.report.markup import HEADLINE, METRICS, details, escape, table, value
from drm_triton.report.measure import Measured, data_of

CURVES = ("valid/ndcg@10", "valid/map@10", "valid/recall@50")
MOST_EPOCHS = 60  # rows of the table behind the curves


def curves_section(runs: Sequence[Measured]) -> str:
    """Loss and validation metrics, over epochs and over seconds, with the numbers behind them."""
    without = [run for run in runs if not run.records]
    said = "".join(
        f'<p class="note">No learning curves of <bdi>{escape(run.name)}</bdi>: '
        f"{'a saved model keeps no record of its training' if run.checkpoint == 'saved' else 'no epoch is on record'}"
        ".</p>"
        for run in without
    )
    if len(without) == len(runs):
        return said
    monitored = {run.monitor: None for run in runs}
    columns = ["loss", *[*dict.fromkeys([*monitored, *CURVES])][: max(len(monitored), len(CURVES))]]
    content = ""
    for title, x_label in (("Over epochs", "epochs"), ("Over seconds of training", "seconds")):
        figures = "".join(_chart(runs, column, x_label) for column in columns)
        content += f'<h3>{title}</h3><div class="charts">{figures}</div>'
    numbers = "".join(
        f"<h4>{svg.named(number, run.name)}</h4>{_records_table(run, columns)}"
        for number, run in enumerate(runs, 1)
        if run.records
    )
    reading = "The ring marks the best epoch. " if any(run.best_epoch for run in runs) else ""
    if len(runs) > 1:
        reading += "Losses compare only between runs of the same objective on the same data."
    return (
        f'{legend(runs)}{said}<p class="quiet">{reading}</p>'
        f"{content}{details('The numbers behind the curves', numbers)}"
    )


def legend(runs: Sequence[Measured], baseline: bool = False) -> str:
    """Names of the runs in their colours, where there is more than one thing to tell apart."""
    entries = [f"<li>{svg.named(number, run.name)}</li>" for number, run in enumerate(runs, 1)]
    if baseline:
        entries.append(f"<li>{svg.named(0, 'popularity')}</li>")
    return f'<ul class="legend">{"".join(entries)}</ul>' if len(entries) > 1 else ""


def _chart(runs: Sequence[Measured], column: str, x_label: str) -> str:
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
    metric, _, k = column.removeprefix("valid/").partition("@")
    return f"Validation {METRICS.get(metric, metric)}@{k}" if k else "Loss"


def _records_table(run: Measured, columns: Sequence[str]) -> str:
    every = math.ceil(len(run.records) / MOST_EPOCHS)
    shown = [
        record
        for at, record in enumerate(run.records, 1)
        if at % every == 0 or at == 1 or at == len(run.records) or record["epoch"] == run.best_epoch
    ]
    present = [column for column in columns if any(column in record for record in shown)]
    rows = []
    for record in shown:
        epoch = f"{record['epoch']}{' (best)' if record['epoch'] == run.best_epoch else ''}"
        cells = [value(record.get(column)) for column in present]
        rows.append((epoch, *cells, f"{record['seconds']:.2f}"))
    heads = ["epoch", *(_title(column) for column in present), "seconds"]
    note = f'<p class="quiet">One epoch in {every}, and the best.</p>' if every > 1 else ""
    return note + table(f"Epochs of {run.name}", heads, rows, kind="figures")


def activity_section(runs: Sequence[Measured]) -> str:
    """NDCG@10 of groups of users by their number of training interactions, for each data set."""
    content = ""
    for data in data_of(runs):
        series, frames = [], []
        for number, run in enumerate(runs, 1):
            if run.data is data and run.evaluation is not None:
                frames.append(by_activity(run.evaluation, HEADLINE))
                series.append(svg.Bars(run.name, number, frames[-1][HEADLINE].to_list()))
        if not frames:
            continue
        for label, result in data.baselines():
            series.append(svg.Bars(label, 0, by_activity(result, HEADLINE)[HEADLINE].to_list()))
        groups = [
            f"{low}{f'–{high}' if high > low else ''} interactions ({users:,} users)"
            for low, high, users in frames[0].select("min_train", "max_train", "users").iter_rows()
        ]
        title = f"NDCG@10 by activity on {data.name}"
        content += (
            f"<figure><figcaption>NDCG@10 on {data.on}, <bdi>{escape(data.name)}</bdi></figcaption>"
            f"{svg.bars(title, groups, series)}</figure>"
        )
    if not content:
        return '<p class="note">Nothing is measured, so there are no groups to show.</p>'
    return legend(runs, baseline=True) + f'<div class="activity">{content}</div>'
