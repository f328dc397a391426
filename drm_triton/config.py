"""Training configuration: one frozen dataclass, validated once, to and from TOML."""

import dataclasses
import difflib
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, get_args

from drm_triton.errors import InputError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ObjectiveName = Literal["hinge+drm", "hinge", "drm", "mse", "mse+drm"]
FitOn = Literal["train", "train+valid", "all"]
Init = Literal["spectral", "normal"]
Schedule = Literal["linear", "constant"]
CovForm = Literal["decorrelate", "printed"]

METRICS = ("precision", "recall", "ndcg", "map", "map_k", "hit", "mrr")  # here, and not in `metrics`, which needs NumPy
MIN_ETA = 45  # one positive ranks clearly better against 45 negatives than against 15, see docs/defaults.md

LARGEST = 3.4e38  # in float32, the kernels' type
TAU_RANGE = (1e-32, 1e32)  # the kernels' own, which cannot be imported without torch
SEEDS = 2**63  # the kernels take seeds below this

# Spelled differently in files and on the command line, because `lambda` is a Python keyword.
ALIASES = {"lambda": "lam"}
FILE_NAMES = {name: alias for alias, name in ALIASES.items()}


@dataclass(frozen=True)
class TrainConfig:
    """What determines a trained model, besides the data. The comment of a field gives the paper's search space.

    Examples
    --------
    >>> TrainConfig(factors=32, lr=0.05).eta_in_force
    45
    >>> TrainConfig.from_mapping({"facters": 32})
    Traceback (most recent call last):
    ...
    drm_triton.errors.InputError: unknown configuration key 'facters'; did you mean 'factors'?
    """

    score: Literal["dot", "l2"] = "dot"
    factors: int = 64  # 16, 32, 64, 128
    rho: int = 1  # positives in a list: 1 .. 5
    eta: int | None = None  # negatives in a list; None: 15 rho as in the paper, but at least 45
    share: int = 32  # lists that are trained with the same draws of negatives; 1 in the paper
    k: int | None = None  # cut-off of the relaxed metric; None: rho
    tau: float = 0.5  # .1, .3, .5, 1, 3, 10
    lam: float = 10.0  # .1, .5, 1, 2, 3, 5
    weight: Literal["uniform", "precision", "recall", "ndcg", "ap"] = "uniform"
    margin: float = 1.0
    lr: float = 0.2  # 1e-4 .. .1, at a constant rate
    schedule: Schedule = "linear"  # of lr: down to 0 over the epochs, or constant as in the paper
    cov: float = 0.0  # l2 only: .1, .5, 1, 3, 5, 10
    cov_every: int = 10  # steps between covariance gradients, each weighted by this number
    cov_form: CovForm = "decorrelate"
    objective: ObjectiveName = "hinge+drm"
    init: Init = "spectral"
    batch_size: int = 2048
    epochs: int = 20
    user_sampling: Literal["proportional", "uniform"] = "proportional"
    seed: int = 0
    fit_on: FitOn = "train"
    backend: Literal["auto", "cpu", "triton", "reference"] = "auto"
    threads: int | None = None  # None: all cores
    eval_every: int = 1  # epochs between validations; 0: never
    patience: int = 0  # validations without a better one before stopping; 0: never stop early
    monitor: str = "ndcg@10"  # the validation metric that `best` and `patience` go by

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            choices = get_args(field.type)
            value = _coerced(FILE_NAMES.get(field.name, field.name), getattr(self, field.name), field.type)
            object.__setattr__(self, field.name, value)  # the way that is left in a frozen dataclass
            if choices and isinstance(choices[0], str) and value not in choices:
                raise InputError(f"{field.name} must be one of {', '.join(choices)}, got {value!r}")
        for name in ("factors", "rho", "eta", "share", "k", "batch_size", "epochs", "cov_every", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{name} must be at least 1, got {value}")
            if value is not None and value >= 2**31:
                raise InputError(f"{name} must be below 2^31, got {value}")
        for name in ("eval_every", "patience", "lam", "cov", "seed"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise InputError(
                    f"{FILE_NAMES.get(name, name)} must be finite and at least 0, got {getattr(self, name)}"
                )
        for name in ("tau", "lr"):
            if not 0 < getattr(self, name) < LARGEST:
                raise InputError(f"{name} must be positive and finite, got {getattr(self, name)}")
        if not TAU_RANGE[0] <= self.tau <= TAU_RANGE[1]:
            raise InputError(f"tau must be from {TAU_RANGE[0]:g} to {TAU_RANGE[1]:g}, got {self.tau}")
        if self.seed >= SEEDS:
            raise InputError(f"seed must be below 2^63 = {SEEDS}, got {self.seed}")
        if not float("-inf") < self.margin < float("inf"):
            raise InputError(f"margin must be finite, got {self.margin}")
        if self.k is not None and self.k > self.rho + self.eta_in_force:
            raise InputError(f"k must be at most rho + eta = {self.rho + self.eta_in_force}, got {self.k}")
        name, _, cut_off = self.monitor.partition("@")
        if name not in METRICS or not cut_off.isdecimal() or not 1 <= int(cut_off) <= 1000:
            raise InputError(f"monitor must be a metric such as ndcg@10 ({', '.join(METRICS)}), got {self.monitor!r}")
        if self.cov > 0 and self.score != "l2":
            raise InputError("cov (covariance regularisation) goes with score = l2 only")

    @property
    def eta_in_force(self) -> int:
        """Negatives in a list."""
        return max(15 * self.rho, MIN_ETA) if self.eta is None else self.eta

    def resolved(self) -> "TrainConfig":
        """The same training with `eta` and `k` spelled out, as a run records it.

        Examples
        --------
        >>> TrainConfig(rho=4).resolved().to_dict()["eta"]
        60
        """
        return dataclasses.replace(self, eta=self.eta_in_force, k=self.rho if self.k is None else self.k)

    @property
    def fit_parts(self) -> tuple[str, ...]:
        """The parts of a data set that are trained on: train, and those that `fit_on` adds."""
        return ("train", "valid", "test") if self.fit_on == "all" else tuple(self.fit_on.split("+"))

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], where: str = "") -> "TrainConfig":
        """Build from plain values; an unknown key or a value of the wrong type is an error that says where."""
        known = [field.name for field in dataclasses.fields(cls)]
        check_names(values, where)
        given = {}
        for key, value in values.items():
            name = ALIASES.get(key, key)
            if name not in known:
                near = difflib.get_close_matches(key, [*known, *ALIASES], n=1)
                hint = f"; did you mean {near[0]!r}?" if near else f"; known keys: {', '.join(sorted(known))}"
                raise InputError(f"{where}unknown configuration key {key!r}{hint}")
            given[name] = value
        try:
            return cls(**given)
        except InputError as error:
            raise InputError(f"{where}{error}") from None

    @classmethod
    def from_toml(cls, path: str | Path, overrides: Mapping[str, Any] | None = None) -> "TrainConfig":
        """Read a TOML file; `overrides` win over the file. An error is blamed on the one of them that has it."""
        values, flags = read_toml(path), overrides or {}
        try:
            return cls.from_mapping(overridden(values, flags))
        except InputError as error:
            problem = str(error)
        for part, where in ((flags, ""), (values, f"{path}: ")):
            try:
                cls.from_mapping(part)
            except InputError as error:
                if str(error) == problem:
                    raise InputError(where + problem) from None
        raise InputError(f"{path} and the options that override it: {problem}")  # which do not go together

    def to_dict(self) -> dict[str, Any]:
        """Plain values under their file names; options that are None are left out."""
        values = dataclasses.asdict(self)
        return {FILE_NAMES.get(name, name): value for name, value in values.items() if value is not None}

    def to_toml(self) -> str:
        """Text of a TOML file that reads back as this configuration."""
        # Numbers, strings and booleans are written alike in TOML and JSON.
        return "".join(f"{key} = {json.dumps(value)}\n" for key, value in self.to_dict().items())


def overridden(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Options with others that win over them, whichever of its names an option is given by.

    Examples
    --------
    >>> overridden({"lambda": 1.0, "tau": 2.0}, {"lam": 3.0})
    {'tau': 2.0, 'lam': 3.0}
    """
    taken = {ALIASES.get(key, key) for key in overrides}
    return {**{key: value for key, value in values.items() if ALIASES.get(key, key) not in taken}, **overrides}


def check_names(values: Mapping[str, Any], where: str = "") -> None:
    """Raise if an option is given by two of its names."""
    for alias, name in ALIASES.items():
        if alias in values and name in values:
            raise InputError(f"{where}both {name!r} and {alias!r} are given, which are one option; leave one out")


def read_toml(path: str | Path) -> dict[str, Any]:
    """Parse a TOML file into a flat mapping, with errors that name the file."""
    try:
        with open(path, "rb") as file:
            values = tomllib.load(file)
    except FileNotFoundError:
        raise InputError(f"{path}: no such configuration file") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not valid TOML: {error}") from None
    check_names(values, f"{path}: ")
    return values


def _coerced(name: str, value: Any, kind: Any) -> Any:
    """Check a value against a field's type; NumPy's numbers serve too, and an integer where a float is asked."""
    accepted = get_args(kind) or (kind,)
    if isinstance(accepted[0], str):
        accepted = (str,)
    if not isinstance(value, bool):
        if isinstance(value, Integral) and int in accepted:
            return int(value)
        if isinstance(value, Real) and float in accepted:
            return float(value)
        if isinstance(value, accepted):
            return value
    names = " or ".join(t.__name__ for t in accepted if t is not type(None))
    raise InputError(f"{name} must be {names}, got {value!r}")
