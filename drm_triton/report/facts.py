"""The sections with tables of facts: configuration, environment and data of the runs."""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

from drm_triton.base_config import Config
from drm_triton.data.split import split_text
from drm_triton.names import SPLIT_PARTS
from drm_triton.options import FILE_NAMES, default_text
from drm_triton.report import svg
from drm_triton.report.markup import details, escape, table
from drm_triton.report.measure import MeasuredRun, RunData


def configuration_section(runs: Sequence[MeasuredRun]) -> str:
    """List the options of the runs.

    Options that differ between the runs come first. For a single run these are the options that differ from the
    defaults.
    """
    resolved = [run.config.resolved() for run in runs]
    names = list(dict.fromkeys(name for config in resolved for name in config.fields()))
    fields = resolved[0].fields()
    values = {name: [_option(config, name) for config in resolved] for name in names}
    if len({config.model for config in resolved}) > 1:
        values = {"model": [f"<code>{config.model}</code>" for config in resolved], **values}
    rows = {name: [f"<code>{FILE_NAMES.get(name, name)}</code>", *row] for name, row in values.items()}
    heads = ["option", *(svg.run_label(number, run.name) for number, run in enumerate(runs, 1))]
    if len(runs) == 1:
        different = list(runs[0].config.changed())
        with_default = [[*rows[name], _value(fields[name], fields[name].default)] for name in different]
        shown = table("Options that differ from the defaults", [*heads, "default"], with_default, kind="options")
        summary = f"{len(fields) - len(different)} options with their default values"
    else:
        different = [name for name, row in values.items() if len(set(row)) > 1]
        differing_rows = [rows[name] for name in different]
        shown = table("Options that differ between the runs", heads, differing_rows, kind="options differ")
        summary = f"{len(values) - len(different)} options with the same value in all runs"
    if not different:
        shown = f"<p>{'All options have their default values.' if len(runs) == 1 else 'The options do not differ.'}</p>"
    equal = [row for name, row in rows.items() if name not in different]
    return shown + details(summary, table(summary, heads, equal, kind="options")) + _environments(runs, heads)


def _option(config: Config, name: str) -> str:
    """Format the value of an option, or a dash if the model does not have it."""
    return _value(config.fields()[name], getattr(config, name)) if name in config.fields() else "–"


def _value(field: "dataclasses.Field[Any]", value: Any) -> str:
    """Format the value of an option. None is shown as what it means, in words."""
    if value is None:
        return re.sub(r"`(\w+)`", r"<code>\1</code>", escape(default_text(field)))
    return f"<code>{escape(value)}</code>"


def _environments(runs: Sequence[MeasuredRun], heads: Sequence[str]) -> str:
    def lookup(run: MeasuredRun, *keys: str) -> str:
        found: Any = run.environment
        for key in keys:
            found = found.get(key) if isinstance(found, dict) else None
        return "–" if found is None else escape(found)

    labels = {
        "run": None, "started": ("started",), "drm-triton": ("drm_triton",), "Python": ("python",),
        **{name: ("packages", name) for name in ("torch", "triton", "numba", "numpy", "polars")},
        "system": ("machine", "system"), "processor": ("machine", "processor"), "cores": ("machine", "cores"),
        "data checksum": ("data", "checksum"),
    }  # fmt: skip
    rows = [
        [label, *(f"<bdi>{escape(run.path)}</bdi>" if keys is None else lookup(run, *keys) for run in runs)]
        for label, keys in labels.items()
    ]
    return details("Environment", table("Environment", ["", *heads[1:]], rows, kind="options"))


def data_section(data: Sequence[RunData]) -> str:
    """List the statistics of each data set."""
    datasets = [one.dataset for one in data]
    rows: list[list[str]] = [
        ["users", *(f"{one.n_users:,}" for one in datasets)],
        ["items", *(f"{one.n_items:,}" for one in datasets)],
        ["interactions", *(f"{one.n_interactions:,}" for one in datasets)],
        ["average per user", *(f"{one.n_interactions / max(one.n_users, 1):.1f}" for one in datasets)],
        ["average per item", *(f"{one.n_interactions / max(one.n_items, 1):.1f}" for one in datasets)],
        ["density", *(f"{one.n_interactions / max(one.n_users * one.n_items, 1):.4%}" for one in datasets)],
    ]
    for split_part in SPLIT_PARTS:
        sizes = ((getattr(one, split_part).nnz, one.n_interactions) for one in datasets)
        rows.append([split_part, *(f"{n:,} <small>{n / max(total, 1):.1%}</small>" for n, total in sizes)])
    rows.append(["source", *(escape(one.meta.get("source", "–")) for one in datasets)])
    rows.append(["split", *(_split(one.meta.get("options")) for one in datasets)])
    names = [f"<bdi>{escape(one.name)}</bdi>" for one in data]
    content = table("Statistics of the data", ["", *names], rows, kind="figures")
    for one in data:
        steps = one.dataset.meta.get("steps") or []
        if steps:
            lines = [(escape(s["step"]), *(f"{s[n]:,}" for n in ("interactions", "users", "items"))) for s in steps]
            heads = ["step", "interactions", "users", "items"]
            summary = f"Preparation of <bdi>{escape(one.name)}</bdi>"
            content += details(summary, table(f"Preparation of {one.name}", heads, lines, kind="figures"))
    return content


def _split(options: Any) -> str:
    if not options:
        return "–"
    return escape(split_text(options))
