"""The sections with facts: configuration, environment and data of the runs."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from drm_triton.config import TrainConfig
from drm_triton.report import svg
from drm_triton.report.markup import details, escape, table
from drm_triton.report.measure import Data, Measured


def configuration_section(runs: Sequence[Measured]) -> str:
    """Options of each run: those that differ first (of one run: those that differ from the defaults)."""
    settings = [_settings(run.config) for run in runs]
    others = settings if len(runs) > 1 else [*settings, _settings(TrainConfig())]
    names = list(settings[0])
    differing = [name for name in names if len({options[name] for options in others}) > 1]
    alike = [name for name in names if name not in differing]
    heads = ["option", *(svg.named(number, run.name) for number, run in enumerate(runs, 1))]

    def rows(chosen: Sequence[str]) -> list[list[str]]:
        return [
            [f"<code>{name}</code>", *(f"<code>{escape(options[name])}</code>" for options in settings)]
            for name in chosen
        ]

    if len(runs) == 1:
        default = others[1]
        with_default = [
            [*row, f"<code>{escape(default[name])}</code>"]
            for name, row in zip(differing, rows(differing), strict=True)
        ]
        first = table("Options that differ from the defaults", [*heads, "default"], with_default, kind="options")
        said = f"{len(alike)} options at their defaults"
    else:
        first = table("Options that differ between the runs", heads, rows(differing), kind="options differ")
        said = f"{len(alike)} options that are the same in all runs"
    if not differing:
        first = f"<p>{'All options are at their defaults.' if len(runs) == 1 else 'The options do not differ.'}</p>"
    rest = details(said, table(said, heads, rows(alike), kind="options"))
    return first + rest + _environments(runs, heads)


def _settings(config: TrainConfig) -> dict[str, str]:
    """Each option as text; those left open as what they come to."""
    values = dataclasses.asdict(config.resolved())
    return {
        "lambda" if name == "lam" else name: "all cores" if chosen is None else f"{chosen}"
        for name, chosen in values.items()
    }


def _environments(runs: Sequence[Measured], heads: Sequence[str]) -> str:
    def of(run: Measured, *keys: str) -> str:
        found: Any = run.environment
        for key in keys:
            found = found.get(key) if isinstance(found, dict) else None
        return "–" if found is None else escape(found)

    wanted = {
        "run": None, "started": ("started",), "drm-triton": ("drm_triton",), "Python": ("python",),
        **{name: ("packages", name) for name in ("torch", "triton", "numba", "numpy", "polars")},
        "system": ("machine", "system"), "processor": ("machine", "processor"), "cores": ("machine", "cores"),
        "data checksum": ("data", "checksum"),
    }  # fmt: skip
    rows = [
        [label, *(f"<bdi>{escape(run.path)}</bdi>" if keys is None else of(run, *keys) for run in runs)]
        for label, keys in wanted.items()
    ]
    return details("Where and with what they ran", table("Environment", ["", *heads[1:]], rows, kind="options"))


def data_section(data: Sequence[Data]) -> str:
    """Statistics of each data set."""
    sets = [one.dataset for one in data]
    rows: list[list[str]] = [
        ["users", *(f"{one.n_users:,}" for one in sets)],
        ["items", *(f"{one.n_items:,}" for one in sets)],
        ["interactions", *(f"{one.n_interactions:,}" for one in sets)],
        ["average per user", *(f"{one.n_interactions / max(one.n_users, 1):.1f}" for one in sets)],
        ["average per item", *(f"{one.n_interactions / max(one.n_items, 1):.1f}" for one in sets)],
        ["density", *(f"{one.n_interactions / max(one.n_users * one.n_items, 1):.4%}" for one in sets)],
    ]
    for part in ("train", "valid", "test"):
        shares = ((getattr(one, part).nnz, one.n_interactions) for one in sets)
        rows.append([part, *(f"{n:,} <small>{n / max(total, 1):.1%}</small>" for n, total in shares)])
    rows.append(["source", *(escape(one.meta.get("source", "–")) for one in sets)])
    rows.append(["split", *(_split(one.meta.get("options")) for one in sets)])
    names = [f"<bdi>{escape(one.name)}</bdi>" for one in data]
    content = table("Statistics of the data", ["", *names], rows, kind="figures")
    for one in data:
        steps = one.dataset.meta.get("steps") or []
        if steps:
            lines = [(escape(s["step"]), *(f"{s[n]:,}" for n in ("interactions", "users", "items"))) for s in steps]
            heads = ["step", "interactions", "users", "items"]
            said = f"How <bdi>{escape(one.name)}</bdi> was prepared"
            content += details(said, table(f"Preparation of {one.name}", heads, lines, kind="figures"))
    return content


def _split(options: Any) -> str:
    if not options:
        return "–"
    ratios = "/".join(f"{100 * ratio / sum(options['ratios']):g}" for ratio in options["ratios"])
    return escape(f"{options['split']} {ratios}, seed {options['seed']}")
