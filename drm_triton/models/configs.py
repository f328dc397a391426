"""The options of the models besides DRM. Imports no torch: the command line reads it."""

# ruff: noqa: RUF009  (`option` calls `dataclasses.field`)

from dataclasses import dataclass
from typing import ClassVar

from drm_triton.base_config import LOSS, MODEL, TRAINING, Config
from drm_triton.config import TrainConfig
from drm_triton.errors import InputError
from drm_triton.names import MAX_FLOAT32, MAX_INT32, MAX_SEED, BackendChoice, FitOn
from drm_triton.options import option


@dataclass(frozen=True)
class ModelConfig(Config):
    """Options of every model. Models that are trained in epochs also have an option `epochs`."""

    epochs = 1  # of a model with a closed form

    seed: int = option(
        0,
        "Seed of all random numbers. The same seed gives the same model, bit for bit.",
        TRAINING,
        least=0,
        most=MAX_SEED,
    )
    fit_on: FitOn = option("train", "Split parts to train on.", TRAINING)
    backend: BackendChoice = option(
        "auto", "Implementation of the kernels. auto uses triton if there is a GPU, and cpu otherwise.", TRAINING
    )
    threads: int | None = option(None, "Number of CPU threads.", TRAINING, least=1, most=MAX_INT32, unset="all cores")
    eval_every: int = option(1, "Number of epochs between validations. 0 disables validation.", TRAINING, least=0)
    patience: int = option(
        0, "Stop after this many validations without improvement. 0 disables early stopping.", TRAINING, least=0
    )
    monitor: str = option("ndcg@10", "Validation metric that selects the best epoch and controls `patience`.", TRAINING)


@dataclass(frozen=True)
class PopularityConfig(ModelConfig):
    """Options of `Popularity`."""

    model: ClassVar[str] = "popularity"


@dataclass(frozen=True)
class ALSConfig(ModelConfig):
    """Options of the models that are fitted by alternating least squares."""

    factors: int = option(
        64,
        "Length of the user and item vectors, d.",
        MODEL,
        least=1,
        most=MAX_INT32,
        paper=(16, 32, 64, 128),
        search=(32, 64, 128),
    )
    regularization: float = option(
        0.03,
        "Weight of the squared norms.",
        LOSS,
        least=0,
        most=MAX_FLOAT32,
        paper=(0.0001, 0.001, 0.003, 0.01, 0.03),
        search=(0.01, 0.1, 1.0, 10.0),
    )
    epochs: int = option(
        15, "Number of times that all users and all items are fitted.", TRAINING, least=1, most=MAX_INT32
    )


@dataclass(frozen=True)
class WMFConfig(ALSConfig):
    """Options of `WMF`."""

    model: ClassVar[str] = "wmf"

    confidence: float = option(
        10.0,
        "Weight of an interaction, where a pair without one has the weight 1.",
        LOSS,
        least=1,
        most=MAX_FLOAT32,
        paper=(1, 3, 5, 10, 20),
        search=(3.0, 10.0, 30.0),
    )


@dataclass(frozen=True)
class IALSConfig(ALSConfig):
    """Options of `IALS`."""

    model: ClassVar[str] = "ials"

    block: int = option(
        128,
        "Number of columns of the factors that are fitted at once. With `factors` or more, each step is exact.",
        MODEL,
        least=1,
        most=MAX_INT32,
    )
    regularization: float = option(
        0.01,
        "Weight of the squared norms, times a power of the weight of the row; see `ridge_power`.",
        LOSS,
        least=0,
        most=MAX_FLOAT32,
        search=(0.001, 0.003, 0.01, 0.03),
    )
    unobserved_weight: float = option(
        0.1,
        "Weight of all pairs of a user and an item, where an interaction has the further weight 1.",
        LOSS,
        positive=True,
        most=MAX_FLOAT32,
        search=(0.01, 0.03, 0.1, 0.3),
    )
    ridge_power: float = option(
        1.0,
        "How the ridge of a row grows with the weight of its pairs: not at all with 0, in proportion with 1.",
        LOSS,
        least=0,
        most=2,
    )


@dataclass(frozen=True)
class SRRMFConfig(ALSConfig):
    """Options of `SRRMF`."""

    model: ClassVar[str] = "srrmf"

    confidence: float = option(
        10.0,
        "Weight of the pairs of an item that the user has and one that the user does not have, where pairs of two "
        "items that the user does not have have the weight 1.",
        LOSS,
        positive=True,
        most=MAX_FLOAT32,
        paper=(1, 3, 5, 10, 20),
        search=(1.0, 10.0, 100.0),
    )


CONFIGS: dict[str, type[Config]] = {
    config.model: config for config in (TrainConfig, WMFConfig, IALSConfig, SRRMFConfig, PopularityConfig)
}


def config_class(model: str) -> type[Config]:
    """Return the class of a model's options.

    Examples
    --------
    >>> config_class("drm").__name__
    'TrainConfig'
    """
    if model not in CONFIGS:
        raise InputError(f"`model` must be one of {', '.join(CONFIGS)}, got {model!r}")
    return CONFIGS[model]
