"""Pictures of reproduced tables and figures, as PNG files."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure  # not pyplot, which needs a display and has global state

Row = Mapping[str, Any]


def beside_published(rows: Sequence[Row], title: str, path: Path) -> None:
    """Plot our means with their standard deviations, and the published values, one panel for each metric.

    Parameters
    ----------
    rows : each with `metric`, `model`, `ours`, `sd` and `published`; values that are None are left out
    title : of the picture
    path : file to write
    """
    models, metrics = _distinct(rows, "model"), _distinct(rows, "metric")
    figure = Figure(figsize=(3 * len(metrics), 2.2 + 0.3 * len(models)), layout="constrained")
    axes = figure.subplots(1, len(metrics), sharey=True, squeeze=False)[0]
    handles: dict[str, Any] = {}
    for ax, metric in zip(axes, metrics, strict=True):
        for row in (row for row in rows if row["metric"] == metric):
            place = models.index(row["model"])
            if row["ours"] is not None:
                ax.errorbar(row["ours"], place, xerr=row["sd"] or 0.0, fmt="o", capsize=3, color="C0", label="ours")
            if row["published"] is not None:
                ax.plot(row["published"], place, "x", color="C1", label="published")
        ax.set_xlabel(f"{metric} on test")
        ax.grid(alpha=0.3)
        ax.margins(x=0.1)
        ax.locator_params(axis="x", nbins=4)
        handles |= dict(zip(*reversed(ax.get_legend_handles_labels()), strict=True))
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=2)
    axes[0].set_yticks(range(len(models)), labels=models)
    axes[0].set_ylabel("model")
    axes[0].set_ylim(len(models) - 0.5, -0.5)  # the first model at the top
    _save(figure, title, path)


def list_curves(rows: Sequence[Row], title: str, path: Path) -> None:
    """Plot NDCG@10 against rho or eta, one panel for each way to vary them.

    Parameters
    ----------
    rows : each with `vary`, `x` (rho or eta), `along` (its name), `score`, `ours` and `sd`
    title, path : see `beside_published`
    """
    ways = _distinct(rows, "vary")
    figure = Figure(figsize=(4 * len(ways), 4.2), layout="constrained")
    axes = figure.subplots(1, len(ways), sharey=True, squeeze=False)[0]
    for ax, way in zip(axes, ways, strict=True):
        for score in _distinct(rows, "score"):
            line = [row for row in rows if row["vary"] == way and row["score"] == score and row["ours"] is not None]
            if line:
                x, y, spread = ([row[name] or 0.0 for row in line] for name in ("x", "ours", "sd"))
                ax.errorbar(x, y, yerr=spread, marker="o", capsize=3, label=score)
                ax.set_xlabel(line[0]["along"])
                ax.set_xticks(x)
        ax.set_title(way)
        ax.grid(alpha=0.3)
        ax.legend(title="score")
    axes[0].set_ylabel("test ndcg@10, mean ± sd over seeds")
    _save(figure, title, path)


def group_bars(rows: Sequence[Row], title: str, path: Path) -> None:
    """Plot NDCG@10 of groups of users as bars, one colour for each model.

    Parameters
    ----------
    rows : each with `interactions` (of the group, as text), `users` (their number), `model` and `ours`
    title, path : see `beside_published`
    """
    groups, models = _distinct(rows, "interactions"), _distinct(rows, "model")
    sizes = {row["interactions"]: row["users"] for row in rows}
    figure = Figure(figsize=(max(7.0, 1.6 * len(groups) + 2), 4.5), layout="constrained")
    ax = figure.subplots()
    width = 0.8 / len(models)
    for number, model in enumerate(models):
        heights = [row["ours"] for row in rows if row["model"] == model]
        ax.bar([place + (number + 0.5) * width - 0.4 for place in range(len(groups))], heights, width, label=model)
    ax.set_xticks(range(len(groups)), labels=[f"{group}\n({sizes[group]:,} users)" for group in groups])
    ax.set_xlabel("training interactions of the user (number of users in the group)")
    ax.set_ylabel("mean ndcg@10 on test")
    ax.grid(axis="y", alpha=0.3)
    ax.legend()
    _save(figure, title, path)


def _distinct(rows: Sequence[Row], name: str) -> list[Any]:
    return list(dict.fromkeys(row[name] for row in rows))


def _save(figure: Figure, title: str, path: Path) -> None:
    figure.suptitle(title, fontsize="medium", parse_math=False)  # names are not formulas
    figure.savefig(path, dpi=120, format="png")
