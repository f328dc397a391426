"""How a training option is declared, and what follows from the declaration.

Each field of `TrainConfig` is declared with `option`. Validation, the command-line options of `train` and `tune`, and
the table in docs/options.md are derived from these declarations. The keyword parameters of `DRM` are written out,
because editors and type checkers read source code; a test compares them with the declarations.

    python -m drm_triton.options > docs/options.md
"""

import dataclasses
import difflib
import functools
import math
from collections.abc import Iterable
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, get_args

from drm_triton.errors import InputError

if TYPE_CHECKING:
    from drm_triton.config import TrainConfig

# `lambda` is a Python keyword: the option is called `lam` in Python, and `lambda` in files and on the command line.
ALIASES = {"lambda": "lam"}
FILE_NAMES = {name: alias for alias, name in ALIASES.items()}


@dataclasses.dataclass(frozen=True)
class Option:
    """Declaration of one option. Its name, type and default are those of the field.

    Parameters
    ----------
    help : one or two sentences; other options are named in backticks
    group : heading in `--help` and in the docs
    least, most : bounds, both included
    positive : the value must be above 0
    paper : values that the paper searches or uses
    unset : what a default of None means
    search : values that `tune` searches by default; empty if it does not search the option
    """

    help: str
    group: str
    least: float | None = None
    most: float | None = None
    positive: bool = False
    paper: tuple[float | str, ...] = ()
    unset: str = ""
    search: tuple[float | str, ...] = ()

    @property
    def paper_text(self) -> str:
        """The values of the paper, for example "16, 32, 64, 128"."""
        return ", ".join(map(str, self.paper))


def option(
    default: Any,
    help: str,
    group: str,
    *,
    least: float | None = None,
    most: float | None = None,
    positive: bool = False,
    paper: tuple[float | str, ...] = (),
    unset: str = "",
    search: tuple[float | str, ...] = (),
) -> Any:
    """Declare a dataclass field as an option; see `Option`."""
    declared = Option(help, group, least, most, positive, paper, unset, search)
    return dataclasses.field(default=default, metadata={"option": declared})


def declaration(field: "dataclasses.Field[Any]") -> Option:
    """Return the declaration of a field."""
    declared: Option = field.metadata["option"]
    return declared


def choices(field: "dataclasses.Field[Any]") -> tuple[str, ...]:
    """Return the values of a field with a type `Literal` or `Literal | None`, or nothing for other fields."""
    kind: Any = field.type
    return _choices(kind)


@functools.cache  # a grid of thousands of configurations asks again and again
def _choices(kind: Any) -> tuple[str, ...]:
    return tuple(value for part in (kind, *get_args(kind)) for value in get_args(part) if isinstance(value, str))


def default_text(field: "dataclasses.Field[Any]") -> str:
    """Return the default as text, or what a default of None means."""
    return declaration(field).unset if field.default is None else str(field.default)


def checked(field: "dataclasses.Field[Any]", value: Any) -> Any:
    """Return a value in the type of its field.

    NumPy numbers are accepted, and integers where a float is declared.

    Raises
    ------
    InputError
        The type is wrong, or the value is not a choice or is out of range.
    """
    value = _converted(field, value)
    allowed = choices(field)
    if allowed and value is not None and value not in allowed:
        raise InputError(f"`{field.name}` must be one of {', '.join(allowed)}, got {value!r}")
    if isinstance(value, int | float):
        problem = _range_problem(declaration(field), value)
        if problem:
            raise InputError(f"`{field.name}` must be {problem}, got {value}")
    return value


def _converted(field: "dataclasses.Field[Any]", value: Any) -> Any:
    accepted = get_args(field.type) or (field.type,)
    if choices(field):
        accepted = (str, type(None)) if type(None) in accepted else (str,)
    if isinstance(value, bool):
        if bool in accepted:
            return value
    else:
        if isinstance(value, Integral) and int in accepted:
            return int(value)
        if isinstance(value, Real) and float in accepted:
            return float(value)
        if isinstance(value, accepted):
            return value
    names = " or ".join(kind.__name__ for kind in accepted if kind is not type(None))
    raise InputError(f"`{field.name}` must be {names}, got {value!r}")


def _range_problem(declared: Option, value: float) -> str:
    if not math.isfinite(value):
        return "finite"
    if declared.positive and value <= 0:
        return "positive"
    if declared.least is not None and value < declared.least:
        return f"at least {_number(declared.least)}"
    if declared.most is not None and value > declared.most:
        return f"at most {_number(declared.most)}"
    return ""


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


def nearest_name(unknown: str, names: Iterable[str]) -> str | None:
    """Return the option that an unknown name probably means.

    Examples
    --------
    >>> nearest_name("Lambda_", ["lam", "lr"]), nearest_name("facters", ["factors", "rho"]), nearest_name("x", ["lam"])
    ('lam', 'factors', None)
    """
    plain, known = unknown.strip("_").lower().replace("-", "_"), list(names)
    name = ALIASES.get(plain, plain)
    if name in known:
        return name
    near = difflib.get_close_matches(plain, [*known, *(alias for alias in ALIASES if ALIASES[alias] in known)], n=1)
    return ALIASES.get(near[0], near[0]) if near else None


# -- docs ------------------------------------------------------------------------------------------------------------

PAGE = """# Training options

<!-- Written by `python -m drm_triton.options`, from the declarations in `drm_triton/config.py`. -->

These are the options of a training run. Give them to `DRM` as keywords, to `drm-triton train` as flags, or in a TOML
file for `--config`. The names are the same everywhere, but flags have hyphens, as in `--batch-size`. There is one
exception: `lambda` is a Python keyword, so the option is called `lam` in Python.

The column "paper" shows the values that [the paper](https://arxiv.org/abs/2008.13141) uses or searches.
[defaults.md](defaults.md) explains the defaults, [objective.md](objective.md) the loss, and the
[glossary](glossary.md) the words.
"""


def options_page() -> str:
    """Return docs/options.md."""
    from drm_triton.config import TrainConfig

    return PAGE + "\n" + options_table(TrainConfig)


def options_table(config: "type[TrainConfig]") -> str:
    """Return a Markdown table of the options for each group."""
    groups: dict[str, list[dataclasses.Field[Any]]] = {}
    for field in dataclasses.fields(config):
        groups.setdefault(declaration(field).group, []).append(field)
    tables = []
    for group, fields in groups.items():
        rows = [option_row(field) for field in fields]
        header = "| option | default | values | paper | meaning |\n|---|---|---|---|---|\n"
        tables.append(f"## {group}\n\n{header}" + "".join(f"| {' | '.join(row)} |\n" for row in rows))
    return "\n".join(tables)


def option_row(field: "dataclasses.Field[Any]") -> list[str]:
    """Return the cells of an option in a table: name, default, values, values of the paper, meaning."""
    declared = declaration(field)
    alias = FILE_NAMES.get(field.name)
    name = f"`{field.name}`" + (f" (`{alias}`)" if alias else "")
    default = declared.unset if field.default is None else f"`{field.default}`"
    help = declared.help.replace("the paper", "[the paper](https://arxiv.org/abs/2008.13141)")
    return [name, default, values_text(field), declared.paper_text, help]


def values_text(field: "dataclasses.Field[Any]") -> str:
    """Return the values that an option accepts, for example "at least 1"."""
    declared, allowed = declaration(field), choices(field)
    if allowed:
        return ", ".join(f"`{value}`" for value in allowed)
    if field.type is bool:
        return "true or false"
    if declared.positive:
        return "positive"
    if isinstance(declared.least, float) and declared.most is not None:
        return f"{declared.least:g} to {declared.most:g}"
    if declared.least is not None:
        return f"at least {_number(declared.least)}"
    return "a metric and a cut-off" if field.type is str else "any number"


if __name__ == "__main__":
    print(options_page(), end="")
