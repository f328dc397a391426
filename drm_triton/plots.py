"""Plots: learning curves of a run, ranking quality by user activity, and models side by side."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl
from matplotlib.figure import Figure  # not pyplot, which needs a display and has global state

from drm_triton.names import HEADLINE_METRICS, LOSSES


def learning_curves(records: Sequence[dict[str, Any]], path: Path) -> None:
    """Plot loss and validation metrics over epochs and over seconds to a PNG file."""
    epochs = [record["epoch"] for record in records]
    seconds, total = [], 0.0
    for record in records:
        total += record["seconds"]
        seconds.append(total)
    figure = Figure(figsize=(10, 6), layout="constrained")
    axes = figure.subplots(2, 2, sharey="row")
    for column, (x, label) in enumerate(((epochs, "epoch"), (seconds, "seconds of training"))):
        for name in ("loss", *LOSSES):
            values = [record.get(name, 0.0) for record in records]  # some models have no loss
            if any(values):
                axes[0, column].plot(x, values, label=name, marker="." if len(x) < 40 else None)
        for name in HEADLINE_METRICS:
            points = [(position, record[name]) for position, record in zip(x, records, strict=True) if name in record]
            if points:
                axes[1, column].plot(*zip(*points, strict=True), label=name, marker="." if len(points) < 40 else None)
        axes[1, column].set_xlabel(label)
    axes[0, 0].set_ylabel("mean over training lists")
    axes[1, 0].set_ylabel("mean over users")
    for ax in axes[:, 0]:
        if ax.get_legend_handles_labels()[0]:
            ax.legend()
    for ax in axes.flat:
        ax.grid(alpha=0.3)
    figure.savefig(path, dpi=120, format="png")


def activity_bars(groups: pl.DataFrame, metric: str, path: Path) -> None:
    """Plot the mean of a metric for the groups of users of `evaluate.by_activity` to a PNG file."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    ax = figure.subplots()
    labels = [f"{low}–{high}" for low, high in groups.select("min_train", "max_train").iter_rows()]
    bars = ax.bar(labels, groups[metric].to_list())
    ax.bar_label(bars, fmt="%.3f")
    ax.set_xlabel("training interactions of the user")
    ax.set_ylabel(f"mean {metric}")
    ax.grid(axis="y", alpha=0.3)
    figure.savefig(path, dpi=120, format="png")


def metric_intervals(rows: Sequence[Mapping[str, Any]], title: str, label: str, path: Path) -> None:
    """Plot means of models with their intervals, one panel for each metric, to a PNG file.

    Parameters
    ----------
    rows : each with `model`, `metric`, `mean`, and the ends `low` and `high` of the interval. Models and metrics are
        shown in their first order.
    title : title of the figure
    label : what the means are over, the label of the x axes
    path : file to write
    """
    models = list(dict.fromkeys(row["model"] for row in rows))
    metrics = list(dict.fromkeys(row["metric"] for row in rows))
    n_columns = 2 if len(metrics) == 4 else min(len(metrics), 3)
    n_rows = -(-len(metrics) // n_columns)
    width, height = max(7, 1.5 + 3 * n_columns), 0.6 + n_rows * (0.9 + 0.3 * len(models))
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(n_rows, n_columns, sharey=True, squeeze=False)
    for ax, metric in zip(axes.flat, metrics, strict=False):
        for row in (row for row in rows if row["metric"] == metric):
            errors = [[row["mean"] - row["low"]], [row["high"] - row["mean"]]]
            color = f"C{models.index(row['model']) % 10}"
            ax.errorbar(row["mean"], models.index(row["model"]), xerr=errors, fmt="o", capsize=3, color=color)
        ax.set_title(metric)
        ax.set_xlabel(label)
        ax.grid(axis="x", alpha=0.3)
        ax.margins(x=0.1)
    for ax in axes.flat[len(metrics) :]:
        ax.set_axis_off()
    for ax in axes[:, 0]:
        # Names are not formulas: matplotlib would take text between two dollar signs for one.
        ax.set_yticks(range(len(models)), labels=models, parse_math=False)
        ax.set_ylabel("model")
        ax.set_ylim(len(models) - 0.5, -0.5)  # the first model at the top
    figure.suptitle(title, parse_math=False, wrap=True)
    figure.savefig(path, dpi=120, format="png")
