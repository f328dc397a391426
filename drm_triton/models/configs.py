"""The options of the models besides DRM. Imports no torch: the command line reads it."""

# ruff: noqa: RUF009  (`option` calls `dataclasses.field`)

from dataclasses import dataclass
from typing import ClassVar

from drm_triton.base_config import TRAINING, Config
from drm_triton.config import TrainConfig
from drm_triton.errors import InputError
from drm_triton.names import MAX_INT32, MAX_SEED, BackendChoice, FitOn
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


CONFIGS: dict[str, type[Config]] = {config.model: config for config in (TrainConfig, PopularityConfig)}


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
