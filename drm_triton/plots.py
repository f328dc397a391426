"""Plots: learning curves of a run, ranking quality by user activity, and models side by side."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import polars as pl
from matplotlib.figure import Figure  # not pyplot, which needs a display and has global state
from matplotlib.ticker import MaxNLocator

from drm_triton.names import HEADLINE_METRICS, LOSSES


def learning_curves(
    records: Sequence[dict[str, Any]],
    path: Path,
    title: str = "",
    best_epoch: int | None = None,
    factors: Mapping[str, float] | None = None,
) -> None:
    """Plot loss and validation metrics over epochs and over seconds to a PNG file.

    Parameters
    ----------
    records : of the epochs
    path : file to write
    title : title of the figure
    best_epoch : epoch to mark
    factors : what a part of the loss is multiplied with in the loss; 1 if it is not named. The parts that are drawn add
        up to the loss.
    """
    seconds = list(accumulate(record["seconds"] for record in records))
    groups = [
        ("mean over training lists", loss_curves(records, factors or {})),
        ("mean over users", {name: [record.get(name) for record in records] for name in HEADLINE_METRICS}),
    ]
    groups = [(label, curves) for label, curves in groups if any(v is not None for c in curves.values() for v in c)]
    rows = max(len(groups), 1)
    figure = Figure(figsize=(11, 0.6 + 2.8 * rows), layout="constrained")
    axes = figure.subplots(rows, 2, sharey="row", squeeze=False)
    for column, (x, label) in enumerate(
        (([record["epoch"] for record in records], "epoch"), (seconds, "seconds of training"))
    ):
        best = next((at for at, record in zip(x, records, strict=True) if record["epoch"] == best_epoch), None)
        for ax, (_, curves) in zip(axes[:, column], groups, strict=False):
            for name, values in curves.items():
                points = [(at, value) for at, value in zip(x, values, strict=True) if value is not None]
                if points:
                    marker = "." if len(points) < 40 else None
                    ax.plot(*zip(*points, strict=True), label=name, marker=marker)
            if best is not None:
                ax.axvline(best, color="0.5", linestyle=":", label=f"best epoch: {best_epoch}")
        axes[-1, column].set_xlabel(label)
        for ax in axes[:, column]:
            ax.set_xlim(left=0)
        if column == 0:
            axes[-1, column].xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    for (left, right), (label, curves) in zip(axes, groups, strict=False):
        left.set_ylabel(label)
        right.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))  # beside the curves, which it must not cover
        if min(value for values in curves.values() for value in values if value is not None) >= 0:
            left.set_ylim(bottom=0)  # so that one sees parts add up
    if not groups:
        axes[0, 0].set_title("no loss and no validation")
    for ax in axes.flat:
        ax.grid(alpha=0.3)
    figure.suptitle(title, parse_math=False, wrap=True)
    figure.savefig(path, dpi=120, format="png")


def loss_curves(records: Sequence[dict[str, Any]], factors: Mapping[str, float]) -> dict[str, list[float | None]]:
    """Return the loss and its parts, each multiplied by its factor, by labels that say how they add up.

    Examples
    --------
    >>> loss_curves([{"loss": 8.0, "hinge": 2.0, "drm": 3.0, "bpr": 0.0}], {"drm": 2.0})
    {'loss = hinge + 2 × drm': [8.0], 'hinge': [2.0], '2 × drm': [6.0]}
    >>> loss_curves([{"loss": 8.0, "softmax": 8.0}], {})
    {'loss = softmax': [8.0]}
    """
    parts: dict[str, list[float | None]] = {}
    for name in LOSSES:
        if any(record.get(name) for record in records):
            factor = factors.get(name, 1.0)
            label = name if factor == 1 else f"{factor:g} × {name}"
            parts[label] = [factor * record[name] if name in record else None for record in records]
    loss = f"loss = {' + '.join(parts)}" if parts else "loss"
    return {loss: [record.get("loss") for record in records], **(parts if len(parts) > 1 else {})}


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
