"""Shell completion, and the arguments that several commands have in common."""

from pathlib import Path
from typing import Annotated, Any

import typer

from drm_triton.errors import InputError


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


DATASET = "Prepared data set: a directory, or a name under data/."
DatasetArgument = Annotated[
    str | None,
    typer.Argument(metavar="DATASET", help=DATASET, show_default=False, autocompletion=datasets),
]
DatasetOfRun = Annotated[
    str | None,
    typer.Option(
        "--dataset",
        "-d",
        help=r"Prepared data set. \[the data set of the run]",
        show_default=False,
        autocompletion=datasets,
    ),
]
DatasetOption = Annotated[  # the parameter is called dataset_option, see `messages.select_command`
    str | None,
    typer.Option("--dataset", "-d", help="The same as DATASET.", show_default=False, autocompletion=datasets),
]


def either(argument: Any, option: Any, name: str) -> Any:
    """Return the value of a parameter that may be given as an argument or as an option; None if it is not given."""
    if argument is not None and option is not None and argument != option:
        raise InputError(f"`{name}` is given twice, as {argument} and as {option}; give it once")
    return option if argument is None else argument


def required_dataset(argument: str | None, option: str | None) -> str:
    """Return the data set that a command was given as an argument or as an option."""
    dataset: str | None = either(argument, option, "dataset")
    if dataset is None:
        raise InputError("`dataset` is missing: give the name or path of a prepared data set (drm-triton prepare)")
    return dataset


RunArgument = Annotated[
    Path,
    typer.Argument(metavar="RUN", help="Run directory, or a saved model.", show_default=False, autocompletion=runs),
]
VerifyOption = Annotated[  # of commands that load a model without measuring it
    bool,
    typer.Option(
        "--verify",
        help="Read the model and its data in full and compare all checksums, also if the files look unchanged.",
    ),
]
