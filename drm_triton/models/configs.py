"""The options of the models besides DRM. Imports no torch: the command line reads it."""

# ruff: noqa: RUF009  (`option` calls `dataclasses.field`)

from dataclasses import dataclass
from typing import ClassVar

from drm_triton.base_config import LOSS, MODEL, TRAINING, Config
from drm_triton.config import TrainConfig
from drm_triton.errors import InputError
from drm_triton.names import MAX_FLOAT32, MAX_INT32, MAX_SEED, BackendChoice, FitOn, SimilarityName
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
class SLIMConfig(ModelConfig):
    """Options of `SLIM`."""

    model: ClassVar[str] = "slim"
    l1: float = option(
        1.0,
        "Weight of the sum of the weights, in numbers of users. Items that share at most this many have none.",
        LOSS,
        least=0,
        most=MAX_FLOAT32,
        paper=(0.1, 0.5, 1, 3, 5, 10, 20),
        search=(0.1, 0.5, 1.0, 3.0, 5.0, 10.0),
    )
    l2: float = option(
        10.0,
        "Weight of the squared norm of the weights, in numbers of users.",
        LOSS,
        least=0,
        most=MAX_FLOAT32,
        paper=(0.1, 0.5, 1, 3, 5, 10, 20),
        search=(1.0, 5.0, 20.0, 50.0, 100.0),
    )
    neighbors: int | None = option(
        None,
        "Number of items from which an item can have a weight: those nearest to it by cosine.",
        MODEL,
        least=1,
        most=MAX_INT32,
        unset="all items",
    )


@dataclass(frozen=True)
class EASEConfig(ModelConfig):
    """Options of `EASE`."""

    model: ClassVar[str] = "ease"
    regularization: float = option(
        200.0,
        "Weight of the squared norm of the weights between items, in numbers of users.",
        LOSS,
        positive=True,
        most=MAX_FLOAT32,
        search=(10.0, 30.0, 100.0, 200.0, 300.0, 500.0, 1000.0, 3000.0),
    )


@dataclass(frozen=True)
class RP3betaConfig(ModelConfig):
    """Options of `RP3beta`."""

    model: ClassVar[str] = "rp3beta"
    alpha: float = option(
        0.6,
        "Exponent of the transition probabilities of the random walk.",
        MODEL,
        least=0,
        most=10,
        search=(0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0),
    )
    beta: float = option(
        0.4,
        "Exponent of the number of users of an item, by which its weights are divided. 0 is P3alpha.",
        MODEL,
        least=0,
        most=10,
        search=(0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6),
    )
    neighbors: int | None = option(
        500,
        "Number of weights that each item keeps: the largest from it, and of these the largest to each item.",
        MODEL,
        least=1,
        most=MAX_INT32,
        search=(100, 200, 500, 1000),
    )
    normalize_rows: bool = option(False, "Divide the weights from an item by their sum.", MODEL, search=(False, True))


@dataclass(frozen=True)
class ItemKNNConfig(ModelConfig):
    """Options of `ItemKNN`."""

    model: ClassVar[str] = "itemknn"
    similarity: SimilarityName = option(
        "cosine",
        "Similarity of items by the users that they share.",
        MODEL,
        search=("cosine", "jaccard", "dice"),
    )
    neighbors: int | None = option(
        100,
        "Number of neighbours of an item: the most similar items.",
        MODEL,
        least=1,
        most=MAX_INT32,
        search=(20, 50, 100, 200, 500),
    )
    shrink: float = option(
        0.0,
        "Added to the denominator of the similarity. It lowers similarities that few users support.",
        MODEL,
        least=0,
        most=MAX_FLOAT32,
        search=(0.0, 10.0, 50.0, 100.0),
    )


@dataclass(frozen=True)
class GFCFConfig(ModelConfig):
    """Options of `GFCF`."""

    model: ClassVar[str] = "gfcf"
    factors: int = option(
        256,
        "Number of singular vectors of the ideal low-pass filter.",
        MODEL,
        least=1,
        most=MAX_INT32,
        search=(64, 128, 256, 512),
    )
    low_pass_weight: float = option(
        0.3,
        "Weight of the ideal low-pass filter beside the linear filter.",
        MODEL,
        least=0,
        most=MAX_FLOAT32,
        search=(0.0, 0.1, 0.3, 1.0),
    )


CONFIGS: dict[str, type[Config]] = {
    config.model: config
    for config in (TrainConfig, SLIMConfig, EASEConfig, RP3betaConfig, ItemKNNConfig, GFCFConfig, PopularityConfig)
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
