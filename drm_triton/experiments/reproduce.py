"""Reproduce a table or a figure of the paper: find the data, train what is missing, print ours beside the published."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from drm_triton.errors import InputError
from drm_triton.experiments import published
from drm_triton.experiments.alignment import table5
from drm_triton.experiments.list_lengths import figure2
from drm_triton.experiments.quality import Budget, table3, table4
from drm_triton.experiments.results import MISSING, Result, Row, text
from drm_triton.experiments.stand_in import Data, find_data, of_dataset
from drm_triton.experiments.user_groups import MODELS as GROUPED_MODELS
from drm_triton.experiments.user_groups import figure3, figure3_of_runs
from drm_triton.names import Target
from drm_triton.progress import SILENT, Reporter

TUNED = Budget(trials=8, seeds=5)
BUDGETS: dict[str, Budget] = {
    "table3": TUNED,
    "table4": TUNED,
    "table5": Budget(seeds=3, epochs=20),
    "figure2": Budget(seeds=5, epochs=60),
    "figure3": TUNED,
}
QUICK: dict[str, Budget] = {
    "table3": replace(TUNED, trials=2, seeds=2, epochs=5),
    "table4": replace(TUNED, trials=2, seeds=2, epochs=5),
    "table5": Budget(seeds=2, epochs=8),
    "figure2": Budget(seeds=2, epochs=8),
    "figure3": replace(TUNED, trials=2, seeds=2, epochs=5),
}
COMPARED = ("trials", "seeds", "epochs", "workers", "comparison")
USED: dict[str, tuple[str, ...]] = {  # options besides those that every table and figure has
    "table1": (),
    "table3": (*COMPARED, "models"),
    "table4": COMPARED,
    "table5": ("seeds", "epochs"),
    "figure2": ("seeds", "epochs", "workers"),
    "figure3": (*COMPARED, "models", "runs"),
}
DEFAULT_SET = {"table5": "ml-20m"}  # that of the paper; SketchFab for all others


def reproduce(
    what: Target,
    dataset: str | None = None,
    out: str | Path | None = None,
    raw: Sequence[str | Path] | None = None,
    scale: float | None = None,
    quick: bool = False,
    reporter: Reporter = SILENT,
    **options: Any,
) -> tuple[Result, list[Path]]:
    """Reproduce a table or a figure of the paper and write it to files.

    Parameters
    ----------
    what : "table1", "table3", "table4", "table5", "figure2" or "figure3"
    dataset : one of the paper's data sets, or the name or path of a prepared one. By default all four for Table 1,
        ML-20M for Table 5 and SketchFab for the others.
    out : directory to write; by default reproduce/<what>-<dataset>
    raw, scale : see `stand_in.find_data`
    quick : a first look, with a small budget
    reporter : shows the progress
    **options : `trials`, `seeds`, `epochs`, `workers`, `models`, `runs`, `comparison`, as far as they are USED

    Returns
    -------
    the result, and the files that were written
    """
    if what not in get_args(Target):
        raise InputError(f"`what` must be one of {', '.join(get_args(Target))}, got {what!r}")
    given = {name: option for name, option in options.items() if option is not None and option != []}
    if unused := sorted(given.keys() - {*USED[what]}):
        raise InputError(f"{what} does not use `{unused[0]}`: leave it out")
    for name in ("trials", "seeds", "epochs", "workers"):
        if given.get(name, 1) < 1:
            raise InputError(f"`{name}` must be at least 1, got {given[name]}")
    data = _data(what, dataset, raw, scale, given, reporter)
    name = f"-{data[0].name}" if dataset is not None or len(data) == 1 else ""
    folder = Path("reproduce") / f"{what}{name}" if out is None else Path(out)
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is not a directory; give another `out`")
    result = table1(data) if what == "table1" else _trained(what, data[0], folder, quick, given, reporter)
    return result, result.write(folder)


def table1(data: Sequence[Data]) -> Result:
    """Compare the statistics of data sets with the published ones."""
    rows: list[Row] = []
    for one in data:
        found, printed = statistics(one), published.statistics(one.paper)
        rows += [
            {"data": one.label, "statistic": name, "ours": found[name], "published": printed.get(name)}
            for name in found
        ]

    def relative(row: Row) -> str:
        return MISSING if row["published"] is None else f"{row['ours'] / row['published'] - 1:+.1%}"

    columns = {
        "data": text("data"),
        "statistic": text("statistic"),
        "ours": lambda row: _statistic(row["statistic"], row["ours"]),
        "published": lambda row: _statistic(row["statistic"], row["published"]),
        "difference": relative,
    }
    notes = [
        *dict.fromkeys(note for one in data for note in one.notes),
        "The paper rounds to three digits, so differences below 0.5 % mean nothing. It does not state its filters.",
        "Its densities have two digits. That of Epinion, 0.048 %, does not follow from its counts, which give 0.050 %.",
    ]
    return Result("table1", "statistics of the data", data, columns, rows, notes)


def statistics(data: Data) -> dict[str, float]:
    """Return the statistics of Table 1 of a data set."""
    found = data.dataset
    users, items, interactions = found.n_users, found.n_items, found.n_interactions
    return {
        "users": users,
        "items": items,
        "interactions": interactions,
        "per_user": interactions / max(users, 1),
        "per_item": interactions / max(items, 1),
        "density": interactions / max(users * items, 1),
    }


def _statistic(name: str, found: float | None) -> str:
    if found is None:
        return MISSING
    return f"{found:.3%}" if name == "density" else f"{found:.1f}" if name.startswith("per_") else f"{found:,}"


def _data(
    what: str,
    dataset: str | None,
    raw: Sequence[str | Path] | None,
    scale: float | None,
    given: dict[str, Any],
    reporter: Reporter,
) -> list[Data]:
    from drm_triton.training.run import dataset_of

    if dataset is not None:
        return [find_data(dataset, raw, scale, reporter)]
    if raw:
        raise InputError("`raw` needs `dataset`, the data set that the files belong to")
    if "runs" in given:
        return [of_dataset(dataset_of(given["runs"][0]))]
    names = published.SETS if what == "table1" else [DEFAULT_SET.get(what, "sketchfab")]
    return [find_data(name, None, scale, reporter) for name in names]


def _trained(what: str, data: Data, folder: Path, quick: bool, given: dict[str, Any], reporter: Reporter) -> Result:
    """Reproduce what needs trainings."""
    if "runs" in given:
        others = sorted(given.keys() - {"runs"})
        if others or quick:
            raise InputError(f"`runs` are trained already: leave out `{others[0] if others else 'quick'}`")
        return figure3_of_runs(data, given["runs"], reporter)
    numbers = {name: given[name] for name in ("trials", "seeds", "epochs", "workers") if name in given}
    budget = replace((QUICK if quick else BUDGETS)[what], **numbers, quick=quick)
    if what == "table5":
        return table5(data, budget, folder, reporter)
    ending = f"{data.name}-quick" if quick else data.name
    if what == "figure2":
        return figure2(data, budget, folder / f"trainings-{ending}", reporter)
    # Table 3, Table 4 and Figure 3 share their trainings, beside their directories.
    comparison = Path(given.get("comparison") or folder.parent / f"trainings-{ending}")
    if what == "table4":
        return table4(data, budget, comparison, reporter)
    models = given.get("models") or (published.MODELS if what == "table3" else GROUPED_MODELS)
    return (table3 if what == "table3" else figure3)(data, models, budget, comparison, reporter)
