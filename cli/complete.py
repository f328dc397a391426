"""Shell completion, and the arguments that several commands have in common."""

from pathlib import Path
from typing import Annotated

import typer


def datasets(incomplete: str) -> list[str]:
    """Return the names of prepared data sets under the data directory."""
    from drm_triton.data import data_dir

    names = sorted(place.parent.name for place in data_dir().glob("*/meta.json"))
    return [name for name in names if name.startswith(incomplete)]


def paper_datasets(incomplete: str) -> list[str]:
    """Return the names of the data sets of the paper and of prepared data sets."""
    from drm_triton.experiments.published import SETS

    return list(dict.fromkeys([*(name for name in SETS if name.startswith(incomplete)), *datasets(incomplete)]))


def runs(incomplete: str) -> list[str]:
    """Return the run directories under runs/. The shell completes other paths itself."""
    places = sorted(str(place.parent) for place in Path("runs").glob("*/config.toml"))
    return [place for place in places if place.startswith(incomplete)]


def models(incomplete: str) -> list[str]:
    """Return the names of the models."""
    from drm_triton.models.configs import CONFIGS

    return [name for name in CONFIGS if name.startswith(incomplete)]


def sources(incomplete: str) -> list[tuple[str, str]]:
    """Return the sources of `prepare` with their descriptions."""
    from drm_triton.data.prepare.sources import SOURCES

    return [(name, source.summary) for name, source in SOURCES.items() if name.startswith(incomplete)]


RunArgument = Annotated[
    Path,
    typer.Argument(metavar="RUN", help="Run directory, or a saved model.", show_default=False, autocompletion=runs),
]
