"""Command-line options of `train` and `tune`, generated from the options of all models."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import typer

from drm_triton.cli.messages import in_flags
from drm_triton.models.configs import CONFIGS
from drm_triton.options import FILE_NAMES, choices, declaration, default_text

Command = TypeVar("Command", bound=Callable[..., Any])

# DRM comes first, so its declaration of a shared option is the one that `--help` shows.
FIELDS = {name: field for config in reversed(CONFIGS.values()) for name, field in config.fields().items()}
OF_MODELS = {name: [model for model, config in CONFIGS.items() if name in config.fields()] for name in FIELDS}
FLAGS = {name: f"--{FILE_NAMES.get(name, name).replace('_', '-')}" for name in FIELDS}
OTHER_MODELS = "Options of other models"  # heading in `--help`


def option(help: str, panel: str, *names: str, complete: Callable[[str], list[str]] | None = None) -> Any:
    """Make an option without a default: None means that it was not given."""
    shown = help.replace("[", r"\[")  # Rich would take brackets for markup
    return typer.Option(*names, help=shown, rich_help_panel=panel, show_default=False, autocompletion=complete)


def config_options(*names: str, panel: str | None = None, show_defaults: bool = True) -> Callable[[Command], Command]:
    """Add options of the models to a command that takes `**options`.

    Typer builds a command from the signature of a function, so this decorator extends the signature. Typer then passes
    the options by name, and the function receives them in `options`; those not given are None.

    Parameters
    ----------
    *names : options; those of all models if none is given
    panel : heading in `--help`; None for the group of each option
    show_defaults : show the defaults in `--help`
    """

    def extended(command: Command) -> Command:
        signature = inspect.signature(command)
        own = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        added = [_parameter(FIELDS[name], panel, show_defaults) for name in names or _in_order()]
        command.__signature__ = signature.replace(parameters=[*own, *added])  # type: ignore[attr-defined]
        return command

    return extended


def _in_order() -> list[str]:
    """Return the names of all options: those of DRM in the order of its configuration, then the others."""
    return list(dict.fromkeys(name for config in CONFIGS.values() for name in config.fields()))


def given(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that were given on the command line."""
    return {name: value for name, value in options.items() if value is not None}


def _parameter(field: "dataclasses.Field[Any]", panel: str | None, show_default: bool) -> inspect.Parameter:
    values = choices(field)
    kind: Any = str if values else field.type

    def complete(incomplete: str) -> list[str]:
        return [value for value in values if value.startswith(incomplete)]

    made = option(
        _help(field, show_default),
        panel or (declaration(field).group if "drm" in OF_MODELS[field.name] else OTHER_MODELS),
        FLAGS[field.name] + (f"/--no-{FLAGS[field.name][2:]}" if field.type is bool else ""),
        complete=complete if values else None,
    )
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, made]
    )


def _help(field: "dataclasses.Field[Any]", show_default: bool) -> str:
    declared, values = declaration(field), choices(field)
    sentences = [in_flags(declared.help, FLAGS)]
    if values:
        sentences.append(f"One of {', '.join(values)}.")
    if declared.paper:
        sentences.append(f"Paper: {declared.paper_text}.")
    if "drm" not in OF_MODELS[field.name]:
        sentences.append(f"Of {', '.join(OF_MODELS[field.name])}.")
    elif show_default:
        sentences.append(f"[{in_flags(default_text(field), FLAGS)}]")
    return " ".join(sentences)
