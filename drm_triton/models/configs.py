"""The options of the models besides DRM. Imports no torch: the command line reads it."""

# ruff: noqa: RUF009  (`option` and `as_in_drm` call `dataclasses.field`)

from dataclasses import dataclass, field
from typing import Any, ClassVar

from drm_triton.base_config import LISTS, LOSS, MODEL, TRAINING, Config
from drm_triton.config import SAMPLED_BATCH, TrainConfig
from drm_triton.errors import InputError
from drm_triton.names import (
    MAX_FLOAT32,
    MAX_INT32,
    BackendChoice,
    CovForm,
    FitOn,
    NegativeSampling,
    Output,
    SimilarityName,
)
from drm_triton.options import option

MAX_RATIO = 1000  # negatives for each item of a user


def as_in_drm(name: str) -> Any:
    """Declare an option as the configuration of DRM does."""
    declared = TrainConfig.fields()[name]
    return field(default=declared.default, metadata=declared.metadata)


def learning_rate(default: float, search: tuple[float, ...], help: str = "Learning rate.") -> Any:
    """Declare the option `lr`."""
    paper = (1e-4, 1e-3, 5e-3, 0.01, 0.03, 0.05, 0.1)
    return option(default, help, TRAINING, positive=True, most=MAX_FLOAT32, paper=paper, search=search)


def ridge(
    default: float, search: tuple[float, ...], help: str = "Weight of the squared norms.", in_paper: bool = True
) -> Any:
    """Declare the option `regularization`."""
    paper = (1e-4, 1e-3, 3e-3, 0.01, 0.03) if in_paper else ()
    return option(default, help, LOSS, least=0, most=MAX_FLOAT32, paper=paper, search=search)


def passes(default: int, over: str, search: tuple[int, ...] = ()) -> Any:
    """Declare the option `epochs`."""
    return option(default, f"Number of passes over the {over}.", TRAINING, least=1, most=MAX_INT32, search=search)


@dataclass(frozen=True)
class ModelConfig(Config):
    """Options of every model. Models that are trained in epochs also have an option `epochs`."""

    epochs = 1  # of a model with a closed form

    seed: int = as_in_drm("seed")
    fit_on: FitOn = as_in_drm("fit_on")
    backend: BackendChoice = as_in_drm("backend")
    threads: int | None = as_in_drm("threads")
    eval_every: int = as_in_drm("eval_every")
    patience: int = as_in_drm("patience")
    monitor: str = as_in_drm("monitor")


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
class CDAEConfig(ModelConfig):
    """Options of `CDAE`."""

    model: ClassVar[str] = "cdae"

    factors: int = as_in_drm("factors")
    tied: bool = option(False, "Whether the input and the output vector of an item are the same.", MODEL)
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
    regularization: float = ridge(
        0.01, (0.001, 0.003, 0.01, 0.03), "Weight of the squared norms of the rows that a step changes."
    )
    lr: float = learning_rate(0.1, (0.03, 0.05, 0.1, 0.2), "Learning rate of Adagrad.")
    epochs: int = passes(50, "users")

    def idle(self) -> set[str]:
        """Return the options that do not change the training, whatever their values."""
        return {"ratio"} if self.output == "full" else set()


@dataclass(frozen=True)
class BPRConfig(ModelConfig):
    """Options of `BPR`."""

    model: ClassVar[str] = "bpr"

    factors: int = as_in_drm("factors")
    negative_sampling: NegativeSampling = option(
        "uniform",
        "How the item of a pair that the user does not have is drawn: uniformly, or in proportion to its popularity.",
        LISTS,
        paper=("popularity",),
        search=("uniform", "popularity"),
    )
    regularization: float = ridge(0.01, (0.001, 0.003, 0.01, 0.03))
    lr: float = learning_rate(0.05, (0.02, 0.05, 0.1))
    epochs: int = passes(60, "interactions", (30, 60, 120))


@dataclass(frozen=True)
class ALSConfig(ModelConfig):
    """Options of the models that are fitted by alternating least squares."""

    factors: int = as_in_drm("factors")
    regularization: float = ridge(0.03, (0.01, 0.1, 1.0, 10.0))
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
class WARPConfig(ModelConfig):
    """Options of `WARP`."""

    model: ClassVar[str] = "warp"

    factors: int = as_in_drm("factors")
    max_sampled: int = option(
        10,
        "Number of items that are drawn at most to find one that ranks too high.",
        LISTS,
        least=1,
        most=10_000,
        paper=("10 to 50",),
        search=(10, 30, 50),
    )
    lr: float = learning_rate(0.05, (0.02, 0.05, 0.1))
    epochs: int = passes(20, "interactions", (10, 20, 40))


@dataclass(frozen=True)
class CMLConfig(ModelConfig):
    """Options of `CML`. Those that `TrainConfig` has too mean the same."""

    model: ClassVar[str] = "cml"

    factors: int = as_in_drm("factors")
    eta: int | None = option(
        20,
        "Number of negatives in a training list: items that its user does not have.",
        LISTS,
        least=1,
        most=MAX_INT32,
        paper=("10 to 50",),
        search=(20, 50),
    )
    margin: float = option(
        1.0,
        "By how much a positive should score above a negative, in the hinge part.",
        LOSS,
        paper=(1,),
        search=(0.5, 1.0, 1.9),
    )
    cov: float = option(
        0.0,
        "Weight of the covariance regularisation.",
        LOSS,
        least=0,
        most=MAX_FLOAT32,
        paper=(0.1, 0.5, 1, 3, 5, 10),
        search=(0.0, 1.0, 10.0),
    )
    cov_every: int = as_in_drm("cov_every")
    cov_form: CovForm = as_in_drm("cov_form")
    lr: float = learning_rate(0.1, (0.05, 0.1, 0.2), "Learning rate of Adagrad.")
    batch_size: int | None = option(
        None, "Number of lists in a training step.", TRAINING, least=1, most=MAX_INT32, unset=f"{SAMPLED_BATCH}"
    )
    epochs: int = passes(20, "training lists", (10, 20, 40))


@dataclass(frozen=True)
class SQLRankConfig(ModelConfig):
    """Options of `SQLRank`."""

    model: ClassVar[str] = "sqlrank"

    factors: int = as_in_drm("factors")
    ratio: int = option(
        10, "Number of negatives for each item of a user.", LISTS, least=1, most=MAX_RATIO, search=(3, 5, 10)
    )
    regularization: float = ridge(
        2.0, (0.5, 1.0, 2.0, 4.0), "Weight of the squared norms of the factors.", in_paper=False
    )
    lr: float = learning_rate(
        0.2,
        (0.05, 0.1, 0.2, 0.4),
        "Learning rate of the first epoch. `lr` times `regularization` must be below 2.",
    )
    lr_decay: float = option(
        0.97, "Factor of the learning rate from one epoch to the next.", TRAINING, positive=True, most=1.0
    )
    epochs: int = passes(60, "users")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lr * self.regularization >= 2:
            raise InputError(
                f"`lr` times `regularization` must be below 2, got {self.lr:g} * {self.regularization:g}: each step "
                "multiplies all factors by 1 - `lr` * `regularization`, so they would grow without bound; lower one of "
                "them"
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
    regularization: float = ridge(
        0.01,
        (0.001, 0.003, 0.01, 0.03),
        "Weight of the squared norms, times a power of the weight of the row; see `ridge_power`.",
        in_paper=False,
    )
    unobserved_weight: float = option(
        0.1,
        "Weight of all pairs of a user and an item, where an interaction has the further weight 1.",
        LOSS,
        positive=True,
        most=MAX_FLOAT32,
        search=(0.003, 0.01, 0.03, 0.1, 0.3),
    )
    ridge_power: float = option(
        1.0,
        "How the ridge of a row grows with the weight of its pairs: not at all with 0, in proportion with 1.",
        LOSS,
        least=0,
        most=2,
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


@dataclass(frozen=True)
class PopularityConfig(ModelConfig):
    """Options of `Popularity`."""

    model: ClassVar[str] = "popularity"


CONFIGS: dict[str, type[Config]] = {
    config.model: config
    for config in (
        TrainConfig,
        SLIMConfig,
        CDAEConfig,
        BPRConfig,
        WMFConfig,
        WARPConfig,
        CMLConfig,
        SQLRankConfig,
        SRRMFConfig,
        IALSConfig,
        EASEConfig,
        RP3betaConfig,
        ItemKNNConfig,
        GFCFConfig,
        PopularityConfig,
    )
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
