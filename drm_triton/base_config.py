"""What the configurations of all models have in common: checks, names, TOML files."""

import dataclasses
import json
import re
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from drm_triton.errors import InputError
from drm_triton.names import METRICS, SPLIT_PARTS, BackendChoice, FitOn
from drm_triton.options import ALIASES, FILE_NAMES, checked, declaration, nearest_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MAX_CUT_OFF = 1000  # of `monitor`, and of the metrics that `evaluate` prints
CUT_OFF = re.compile("[1-9][0-9]{0,3}")  # digits of other scripts are numbers to Python, but no names of metrics
MODEL, LISTS, LOSS, TRAINING = "Model", "Lists", "Loss", "Training"  # groups of options

C = TypeVar("C", bound="Config")


class Config:
    """Base of the configurations. A subclass is a frozen dataclass whose fields are declared with `option`."""

    model: ClassVar[str]  # the name of the model, as in `drm-triton train --model`
    epochs: int
    seed: int
    fit_on: FitOn
    backend: BackendChoice
    threads: int | None
    eval_every: int
    patience: int
    monitor: str

    def __post_init__(self) -> None:
        for field in self.fields().values():
            object.__setattr__(self, field.name, checked(field, getattr(self, field.name)))  # frozen: no assignment
        name, _, cut_off = self.monitor.partition("@")
        if name not in METRICS or not CUT_OFF.fullmatch(cut_off) or int(cut_off) > MAX_CUT_OFF:
            raise InputError(
                f"`monitor` must be a metric such as ndcg@10 ({', '.join(METRICS)}; cut-off from 1 to {MAX_CUT_OFF}), "
                f"got {self.monitor!r}"
            )

    @classmethod
    def fields(cls) -> "dict[str, dataclasses.Field[Any]]":
        """Return the fields by name."""
        return {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]

    @property
    def fit_parts(self) -> tuple[str, ...]:
        """The parts of a data set that `fit_on` names."""
        return SPLIT_PARTS if self.fit_on == "all" else tuple(self.fit_on.split("+"))

    @property
    def epochs_matter(self) -> bool:
        """Whether the result after an epoch depends on the number of epochs, as with a linear learning rate."""
        return False

    @property
    def weighted(self) -> bool:
        """Whether training uses the weights of the interactions."""
        return False

    @property
    def last_epoch(self) -> int:
        """The epoch after which training ends at the latest."""
        return self.epochs

    def on_all_interactions(self: C, epoch: int | None) -> C:
        """Return the options that train the same model on all interactions, until an epoch (None: until the last)."""
        until = {} if epoch is None or epoch == self.last_epoch else {self._last_epoch_option(): epoch}
        return dataclasses.replace(self, fit_on="all", eval_every=0, patience=0, **until)  # type: ignore[type-var]

    def _last_epoch_option(self) -> str:
        return "stop_after" if self.epochs_matter else "epochs"

    def following(self, n_items: int) -> dict[str, Any]:
        """Return the values of options that were not given and follow from the number of items."""
        return {}

    def resolved(self: C) -> C:
        """Return the same configuration with the values in force in place of None, as a run records it."""
        return self

    def continuing(self: C, stored: C) -> C:
        """Return the options for going on with a run that recorded `stored`.

        They differ if earlier versions recorded a default that is no longer one.
        """
        return self

    def changed(self) -> dict[str, Any]:
        """Return the options that differ from the defaults, by their Python names."""
        values = {name: getattr(self, name) for name in self.fields()}
        return {name: value for name, value in values.items() if value != self.fields()[name].default}

    def idle(self) -> set[str]:
        """Return the options that do not change the training, whatever their values."""
        return set()

    def search_space(self) -> dict[str, list[Any]]:
        """Return the default search space of `tune`: option -> values, under the names in files."""
        return {
            FILE_NAMES.get(name, name): list(declaration(field).search)
            for name, field in self.fields().items()
            if declaration(field).search and name not in self.idle()
        }

    @classmethod
    def check_names(cls, values: Mapping[str, Any]) -> None:
        """Raise if a name is not an option of this model, or if one option is given under two names."""
        for alias, name in ALIASES.items():
            if alias in values and name in values:
                raise InputError(f"'{name}' and '{alias}' are the same option; give only one of them")
        options = tuple(cls.fields())
        for key in values:
            if ALIASES.get(key, key) not in options:
                near = nearest_name(key, options)
                hint = f"did you mean `{near}`?" if near else f"the options are {', '.join(options)}"
                raise InputError(f"unknown option `{key}`{cls._of_model()}; {hint}")

    @classmethod
    def _of_model(cls) -> str:
        return f" of the model {cls.model}"

    @classmethod
    def from_mapping(cls: type[C], values: Mapping[str, Any], where: str = "") -> C:
        """Build a configuration from plain values.

        Parameters
        ----------
        values : option -> value; `lambda` is accepted for `lam`
        where : the file that the values come from, for error messages
        """
        try:
            cls.check_names(values)
            return cls(**{ALIASES.get(key, key): value for key, value in values.items()})
        except InputError as error:
            raise InputError(in_file(where, str(error))) from None

    @classmethod
    def from_toml(cls: type[C], path: str | Path, overrides: Mapping[str, Any] | None = None) -> C:
        """Read a TOML file.

        `overrides` replace values of the file. An error message says whether the file, an override, or both together
        are wrong.
        """
        values, flags = cls.read_toml(path), overrides or {}
        try:
            return cls.from_mapping(overridden(values, flags))
        except InputError as error:
            problem = str(error)
        for given, where in ((flags, ""), (values, str(path))):
            try:
                cls.from_mapping(given)
            except InputError as error:
                if str(error) == problem:
                    raise InputError(in_file(where, problem)) from None
        in_file_only = {ALIASES.get(key, key) for key in values} - {ALIASES.get(key, key) for key in flags}
        raise InputError(f"{path} and the options that override it: {_with_keys(problem, in_file_only)}")

    @classmethod
    def read_toml(cls, path: str | Path) -> dict[str, Any]:
        """Read the options of this model from a TOML file, without the line that names the model."""
        values = read_toml(path)
        named = values.pop("model", cls.model)
        if named != cls.model:
            raise InputError(f"{path} holds the options of the model {named!r}, not those of {cls.model}")
        try:
            cls.check_names(values)
        except InputError as error:
            raise InputError(in_file(path, str(error))) from None
        return values

    def to_dict(self) -> dict[str, Any]:
        """Return plain values by their names in files. Options that are None are left out."""
        values = {name: getattr(self, name) for name in self.fields()}
        return {FILE_NAMES.get(name, name): value for name, value in values.items() if value is not None}

    def to_toml(self) -> str:
        """Return the text of a TOML file with this configuration."""
        # JSON and TOML write numbers, strings and booleans in the same way.
        values = {"model": self.model, **self.to_dict()}
        return "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())


def overridden(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Replace options by others. An option may be given under either of its names.

    Examples
    --------
    >>> overridden({"lambda": 1.0, "tau": 2.0}, {"lam": 3.0})
    {'tau': 2.0, 'lam': 3.0}
    """
    taken = {ALIASES.get(key, key) for key in overrides}
    return {**{key: value for key, value in values.items() if ALIASES.get(key, key) not in taken}, **overrides}


def read_toml(path: str | Path) -> dict[str, Any]:
    """Read a TOML file. Errors name the file."""
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except FileNotFoundError:
        raise InputError(f"{path}: no such configuration file") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"{path}: not valid TOML: {error}") from None


def in_file(path: str | Path, message: str) -> str:
    """Return an error message about a file: it names the file, and options as the keys of the file.

    Without a path, the message is returned as it is.

    Examples
    --------
    >>> in_file("c.toml", "`lam` must be at least 0, got -1")
    "c.toml: 'lambda' must be at least 0, got -1"
    """
    if not str(path):
        return message
    return f"{path}: {_with_keys(message)}"


def _with_keys(message: str, names: Collection[str] | None = None) -> str:
    """Name options as the keys of a file: those in `names`, or all."""

    def key(found: "re.Match[str]") -> str:
        name = found[1]
        return f"'{FILE_NAMES.get(name, name)}'" if names is None or name in names else found[0]

    return re.sub(r"`(\w+)`", key, message)
