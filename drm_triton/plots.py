"""Plots: learning curves of a run, and ranking quality by user activity."""

from collections.abc import Sequence
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
