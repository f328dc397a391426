"""The data of a reproduction: one of the paper's data sets, its synthetic stand-in, or any other prepared data set.

The paper's data sets are looked for under the data directory, prepared or as raw files. Where there is neither, a
stand-in is generated from the published statistics, and everything that is made from it carries the words STAND_IN.
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from drm_triton.data import data_dir, find_dataset
from drm_triton.data.dataset import Dataset
from drm_triton.data.prepare import pipeline
from drm_triton.data.prepare.sources import find_source
from drm_triton.data.prepare.synthetic import Shape
from drm_triton.errors import InputError
from drm_triton.experiments import published
from drm_triton.progress import SILENT, Reporter, Step

STAND_IN = "synthetic stand-in"
WIDTH = 100  # columns of the printed text
INTERACTIONS = 50_000  # of a stand-in, approximately, unless a scale is given
MOST_DENSITY = 0.05  # of a stand-in; ML-20M has 73 interactions per user, too many for a small catalogue


@dataclass(frozen=True)
class Data:
    """A data set of a reproduction.

    Attributes
    ----------
    dataset : the data
    name : its name in tables and directories
    paper : the paper's data set that it is or stands in for, or None
    stand_in : whether it is synthetic
    notes : what the data cannot show
    """

    dataset: Dataset
    name: str
    paper: str | None
    stand_in: bool
    notes: tuple[str, ...]

    @property
    def label(self) -> str:
        """The name that tables show, with STAND_IN if it is one."""
        return f"{self.name} ({STAND_IN})" if self.stand_in else self.name


def find_data(
    name: str,
    raw: Sequence[str | Path] | None = None,
    scale: float | None = None,
    reporter: Reporter = SILENT,
) -> Data:
    """Find a data set, prepare it from its raw files, or generate its stand-in.

    Parameters
    ----------
    name : one of the paper's (`published.SETS`), or the name or path of a prepared data set
    raw : raw files of one of the paper's, to prepare them; None for those in data/raw
    scale : size of a stand-in relative to the paper's data set; None for about 50,000 interactions
    reporter : shows the steps
    """
    place = find_dataset(name)
    unused = "`raw`" if raw else "`scale`" if scale is not None else None
    if os.path.exists(place) or name not in published.SETS:
        if unused and name not in published.SETS:
            raise InputError(
                f"{unused} is for the data sets of the paper ({', '.join(published.SETS)}), not {name!r}: leave it out"
            )
        if unused:
            reporter.line(f"{place} is already prepared, so {unused} is not used")
        return of_dataset(Dataset.load(place))
    source = find_source(name)
    directory = pipeline.raw_dir(source)
    if raw or (directory.is_dir() and any(directory.iterdir())):
        if scale is not None:
            raise InputError(f"`scale` is the size of a {STAND_IN}, and there are raw files of {name}: leave it out")
        return of_dataset(pipeline.prepare(source, raw or None, data_dir() / name, reporter=reporter))
    return of_dataset(_generate(name, scale, reporter))


def of_dataset(dataset: Dataset) -> Data:
    """Describe a stored data set, with what can be known from its own description."""
    if dataset.path is None:
        raise InputError("reproduce: the data set must be stored on disk; save it first")
    source = str(dataset.meta.get("source"))
    paper = source if source in published.SETS else None
    stand_in = bool(dataset.meta.get("synthetic"))
    name = paper or dataset.path.name
    if paper is None:
        notes = [f"The paper does not have the data set {name}, so there are no published figures for it."]
    elif stand_in:
        notes = [_absent(paper, dataset)]
    else:
        notes = _preparation(paper, dataset)
    return Data(dataset, name, paper, stand_in, tuple(notes))


def _generate(name: str, scale: float | None, reporter: Reporter) -> Dataset:
    """Generate the stand-in of a data set, or open it if it was generated before."""
    counts = published.statistics(name)
    users, items, interactions = (counts[count] for count in ("users", "items", "interactions"))
    if scale is None:
        scale = INTERACTIONS / interactions
    shape = Shape.scaled(users, items, interactions, scale, MOST_DENSITY)
    place = data_dir() / f"{name}-{STAND_IN.replace(' ', '-')}-{shape.interactions}"
    if place.exists():
        return Dataset.load(place)
    return pipeline.prepare_synthetic(shape, place, reporter=Labelled(reporter, f"{name} ({STAND_IN})"), source=name)


def _absent(name: str, dataset: Dataset) -> str:
    source = find_source(name)
    return (
        f"The real {published.TITLES[name]} is absent; this is a {STAND_IN} with {dataset.n_interactions:,} generated "
        "interactions, about as many per user as published. Differences from published figures say nothing about "
        "the paper. "
        f"To use the real data, get {source.wanted} from {source.origin}, and put it into "
        f"{pipeline.raw_dir(source)} or give it as `raw`."
    )


def _preparation(name: str, dataset: Dataset) -> list[str]:
    """Return a note if the data was not prepared as the paper says."""
    usual = asdict(pipeline.default_options(find_source(name)))
    now = {**usual, **(dataset.meta.get("options") or {})}
    other = [
        f"{option} {now[option]}, not {value}"
        for option, value in usual.items()
        if option != "seed" and _as_shares(now[option]) != _as_shares(value)
    ]
    return [f"The data was not prepared as the paper says: {'; '.join(other)}."] if other else []


def _as_shares(value: Any) -> Any:
    """Return ratios as shares of 1, so that 70/10/20 is 0.7/0.1/0.2, and any other value as it is."""
    return [round(part / sum(value), 6) for part in value] if isinstance(value, list | tuple) else value


class Labelled(Reporter):
    """A reporter that puts a label before each line of another, and cuts lines that are longer than a screen."""

    def __init__(self, reporter: Reporter, label: str) -> None:
        self.reporter, self.label = reporter, label
        self.quiet, self.terminal = reporter.quiet, reporter.terminal

    def line(self, text: str) -> None:
        """Print one line."""
        self.reporter.line(textwrap.shorten(f"{self.label}: {text}", WIDTH, placeholder=" …"))

    def step(self, name: str, total: int | None = None, unit: str = "") -> Step:
        """Return a step. Its bar has the label, too."""
        return Step(self.reporter, f"{self.label}: {name}", total, unit)
