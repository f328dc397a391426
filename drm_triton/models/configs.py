"""The options of the models besides DRM. Imports no torch: the command line reads it."""

# ruff: noqa: RUF009  (`option` calls `dataclasses.field`)

from dataclasses import dataclass
from typing import ClassVar

from drm_triton.base_config import LISTS, LOSS, MODEL, TRAINING, Config
from drm_triton.config import TrainConfig
from drm_triton.errors import InputError
from drm_triton.names import MAX_FLOAT32, MAX_INT32, MAX_SEED, BackendChoice, FitOn, Output
from drm_triton.options import option

MAX_RATIO = 1000  # negatives for each item of a user


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
class SQLRankConfig(ModelConfig):
    """Options of `SQLRank`."""

    model: ClassVar[str] = "sqlrank"

    factors: int = option(
        64,
        "Length of the user and item vectors, d.",
        MODEL,
        least=1,
        most=MAX_INT32,
        paper=(16, 32, 64, 128),
        search=(32, 64, 128),
    )
    ratio: int = option(
        10, "Number of negatives for each item of a user.", LISTS, least=1, most=MAX_RATIO, search=(3, 5, 10)
    )
    regularization: float = option(
        2.0,
        "Weight of the squared norms of the factors.",
        LOSS,
        least=0,
        most=MAX_FLOAT32,
        search=(0.5, 1.0, 2.0, 4.0),
    )
    lr: float = option(
        0.2,
        "Learning rate of the first epoch. `lr` times `regularization` must be below 2.",
        TRAINING,
        positive=True,
        most=MAX_FLOAT32,
        paper=("1e-4 to 0.1",),
        search=(0.05, 0.1, 0.2, 0.4),
    )
    lr_decay: float = option(
        0.97, "Factor of the learning rate from one epoch to the next.", TRAINING, positive=True, most=1.0
    )
    epochs: int = option(60, "Number of passes over the users.", TRAINING, least=1, most=MAX_INT32)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lr * self.regularization >= 2:
            raise InputError(
                f"`lr` times `regularization` must be below 2, got {self.lr:g} * {self.regularization:g}: each step "
                "multiplies all factors by 1 - `lr` * `regularization`, so they would grow without bound; lower one of "
                "them"
            )


@dataclass(frozen=True)
class CDAEConfig(ModelConfig):
    """Options of `CDAE`."""

    model: ClassVar[str] = "cdae"

    factors: int = option(
        64,
        "Length of the user and item vectors, d.",
        MODEL,
        least=1,
        most=MAX_INT32,
        paper=(16, 32, 64, 128),
        search=(32, 64, 128),
    )
    tied: bool = option(True, "Whether the input and the output vector of an item are the same.", MODEL)
    corruption: float = option(
        0.5,
        "Probability with which an item of a user is left out of the input in training.",
        MODEL,
        least=0.0,
        most=0.99,
        search=(0.2, 0.5, 0.8),
    )
    output: Output = option(
        "sampled", "Outputs that the loss is computed for: a user's items and sampled negatives, or all items.", LISTS
    )
    ratio: int = option(
        5,
        "Number of negatives for each item of a user, with `output` sampled.",
        LISTS,
        least=1,
        most=MAX_RATIO,
        search=(3, 5, 10),
    )
    regularization: float = option(
        0.01,
        "Weight of the squared norms of the rows that a step changes.",
        LOSS,
        least=0,
        most=MAX_FLOAT32,
        paper=(1e-4, 1e-3, 3e-3, 0.01, 0.03),
        search=(1e-3, 3e-3, 0.01, 0.03),
    )
    lr: float = option(
        0.1,
        "Learning rate of Adagrad.",
        TRAINING,
        positive=True,
        most=MAX_FLOAT32,
        paper=("1e-4 to 0.1",),
        search=(0.03, 0.05, 0.1, 0.2),
    )
    epochs: int = option(50, "Number of passes over the users.", TRAINING, least=1, most=MAX_INT32)

    def idle(self) -> set[str]:
        """Return the options that do not change the training, whatever their values."""
        return {"ratio"} if self.output == "full" else set()


CONFIGS: dict[str, type[Config]] = {
    config.model: config for config in (TrainConfig, PopularityConfig, SQLRankConfig, CDAEConfig)
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
