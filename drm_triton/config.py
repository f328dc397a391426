"""The configuration of `DRM`: one frozen dataclass, validated once, read from and written to TOML."""

# ruff: noqa: RUF009  (`option` calls `dataclasses.field`)

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from drm_triton.base_config import LISTS, LOSS, MODEL, TRAINING, Config
from drm_triton.errors import InputError
from drm_triton.names import (
    MAX_FLOAT32,
    MAX_INT32,
    MAX_SEED,
    MAX_THREADS,
    TAU_RANGE,
    BackendChoice,
    CovForm,
    FitOn,
    Init,
    InteractionWeights,
    Negatives,
    ObjectiveName,
    Precision,
    Schedule,
    Score,
    UserSampling,
    Weight,
)
from drm_triton.options import option

# Default numbers of negatives: one in ITEMS_PER_NEGATIVE items of the catalogue, within bounds. See docs/defaults.md.
ITEMS_PER_NEGATIVE = 200
FEWEST_NEGATIVES, MOST_NEGATIVES = 45, 100
FEWEST_OF_THE_TOP = 15  # with hinge or drm, which learn from the negatives at the top of a list
EARLIER_LEAST_ETA = 45  # runs recorded max(15 rho, 45) negatives when that was the default

OVER_CATALOGUE = ("softmax", "softmax@k")  # objectives that are defined for the whole catalogue
SOFTMAX_K = 20
POOL = 32768
SAMPLED_BATCH = 2048
CATALOGUE_BATCH = 256  # users; a step with more of them changes every item less often


@dataclass(frozen=True)
class TrainConfig(Config):
    """All options that determine a trained model, besides the data. docs/options.md lists them.

    Examples
    --------
    >>> TrainConfig(factors=32, lr=0.05).batch_in_force
    256
    >>> TrainConfig(factors=0)
    Traceback (most recent call last):
    ...
    drm_triton.errors.InputError: `factors` must be at least 1, got 0
    """

    model: ClassVar[str] = "drm"

    score: Score | None = option(
        None,
        "Score of an item for a user: cosine, dot product, or negative squared Euclidean distance (l2).",
        MODEL,
        paper=("dot", "l2"),
        unset="dot if `objective` contains hinge, drm or mse, otherwise cosine",
        search=("dot", "l2"),
    )
    factors: int = option(
        64,
        "Length of the user and item vectors, d.",
        MODEL,
        least=1,
        most=MAX_INT32,
        paper=(16, 32, 64, 128),
        search=(32, 64, 128),
    )
    init: Init = option(
        "spectral",
        "Initial factors: a truncated SVD of the interactions (spectral), or random numbers (normal).",
        MODEL,
    )
    precision: Precision = option(
        "float32",
        "Number format of the factor tables in training. With bfloat16, they take half the memory on a GPU, and each "
        "row is rounded at random after its step. On the CPU, rows are rounded as on a GPU, and no memory is saved.",
        MODEL,
    )

    rho: int = option(
        1,
        "Number of positives in a training list: items that its user has.",
        LISTS,
        least=1,
        most=MAX_INT32,
        paper=("1 to 5",),
    )
    negatives: Negatives | None = option(
        None,
        "Negatives of a list: a sample of `eta` items, or all items that its user does not have. With all, a list is a "
        "user, its positives are all of the user's items, and `objective` must be softmax or softmax@k.",
        LISTS,
        paper=("sampled",),
        unset="all if `objective` is softmax or softmax@k, otherwise sampled",
    )
    pool: int = option(
        POOL,
        "Size of the random pool of negatives drawn for each step with `negatives` all. Used if the catalogue has more "
        "than twice this many items.",
        LISTS,
        least=1,
        most=MAX_INT32,
    )
    eta: int | None = option(
        None,
        "Number of negatives in a training list: items that its user does not have.",
        LISTS,
        least=1,
        most=MAX_INT32,
        paper=("15 rho",),
        unset=f"N / {ITEMS_PER_NEGATIVE} in a catalogue of N items, rounded to a multiple of 5, "
        f"from {FEWEST_OF_THE_TOP} (without hinge and drm: {FEWEST_NEGATIVES}) to {MOST_NEGATIVES}, "
        "but at least 15 times `rho` and, with drm, at least `k`",
        search=(15, 45, 90, 200),
    )
    share: int = option(
        32,
        "Number of consecutive lists that use the same negatives. 1 draws negatives for each list.",
        LISTS,
        least=1,
        most=MAX_INT32,
        paper=(1,),
    )
    user_sampling: UserSampling = option(
        "proportional", "How users are drawn: in proportion to their number of interactions, or uniformly.", LISTS
    )

    objective: ObjectiveName = option(
        "softmax",
        "Loss of a list. A + joins two parts: hinge+drm is the hinge loss plus `lam` times the DRM loss.",
        LOSS,
        paper=("hinge+drm", "drm"),
    )
    k: int | None = option(
        None,
        "Number of ranks that count as the top in the DRM part, at most `rho` + `eta`, and in softmax@k.",
        LOSS,
        least=1,
        most=MAX_INT32,
        paper=("rho",),
        unset=f"`rho`, or {SOFTMAX_K} with softmax@k",
    )
    tau: float = option(
        0.5,
        "Temperature of the relaxed sort, and of the top K in softmax@k. Lower values are closer to a hard ranking.",
        LOSS,
        least=TAU_RANGE[0],
        most=TAU_RANGE[1],
        paper=(0.1, 0.3, 0.5, 1, 3, 10),
        search=(0.5, 1.0),
    )
    lam: float = option(
        10.0,
        "Weight of the DRM part of the loss.",
        LOSS,
        least=0,
        paper=(0.1, 0.5, 1, 2, 3, 5),
        search=(3.0, 10.0, 30.0),
    )
    weight: Weight = option("uniform", "How much each rank counts in the DRM part.", LOSS)
    margin: float = option(
        1.0, "By how much a positive should score above a negative, in the hinge part.", LOSS, search=(0.5, 1.0)
    )
    temperature: float | None = option(
        None,
        "Temperature of the softmax, psl and bpr parts. Lower values put more weight on the hardest negatives.",
        LOSS,
        least=TAU_RANGE[0],
        most=TAU_RANGE[1],
        unset="0.65 N^(-1/6) in a catalogue of N items",
        search=(0.07, 0.1, 0.14, 0.2, 0.28),
    )
    popularity: float = option(
        0.0,
        "Exponent of popularity: an item with n interactions counts n^`popularity` times in the softmax, in training "
        "and in the ranking. Needs `negatives` all and a `score` other than l2.",
        LOSS,
        least=0,
        most=MAX_FLOAT32,
        search=(0.0, 0.2, 0.4),
    )
    interaction_weights: InteractionWeights = option(
        "off",
        "How the loss of a list depends on the weights of its positives, which prepare --weight stores: "
        "not at all (off), in proportion to the weight (raw) or to log(1 + weight), or by BM25.",
        LOSS,
    )
    interaction_weight_cap: float | None = option(
        None,
        "Largest weight of an interaction, as a multiple of the mean weight.",
        LOSS,
        positive=True,
        unset="none",
    )
    cov: float = option(
        0.0, "Weight of the covariance regularisation. Needs `score` l2.", LOSS, least=0, paper=(0.1, 0.5, 1, 3, 5, 10)
    )
    cov_every: int = option(
        10,
        "Number of steps between covariance gradients. Each gradient is multiplied by this number.",
        LOSS,
        least=1,
        most=MAX_INT32,
    )
    cov_form: CovForm = option(
        "decorrelate",
        "Formula of the covariance regularisation: decorrelate the factors, or as printed in the paper.",
        LOSS,
        paper=("printed",),
    )

    lr: float = option(
        0.2,
        "Learning rate of Adagrad.",
        TRAINING,
        positive=True,
        most=MAX_FLOAT32,
        paper=("1e-4 to 0.1",),
        search=(0.1, 0.2, 0.4),
    )
    schedule: Schedule = option(
        "linear", "Learning rate over the epochs: linear decrease to 0, or constant.", TRAINING, paper=("constant",)
    )
    batch_size: int | None = option(
        None,
        "Number of lists in a training step. With sampled negatives, it must be a multiple of `share`.",
        TRAINING,
        least=1,
        most=MAX_INT32,
        paper=(1,),
        unset=f"{SAMPLED_BATCH}, or {CATALOGUE_BATCH} if `negatives` is all",
    )
    epochs: int = option(
        20, "Number of passes over the training lists.", TRAINING, least=1, most=MAX_INT32, search=(10, 20, 40, 80)
    )
    stop_after: int | None = option(
        None,
        "Last epoch to train. The learning rate still falls as if all `epochs` followed.",
        TRAINING,
        least=1,
        most=MAX_INT32,
        unset="`epochs`",
    )
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
    threads: int | None = option(None, "Number of CPU threads.", TRAINING, least=1, most=MAX_THREADS, unset="all cores")
    eval_every: int = option(1, "Number of epochs between validations. 0 disables validation.", TRAINING, least=0)
    patience: int = option(
        0, "Stop after this many validations without improvement. 0 disables early stopping.", TRAINING, least=0
    )
    monitor: str = option("ndcg@10", "Validation metric that selects the best epoch and controls `patience`.", TRAINING)

    def __post_init__(self) -> None:
        super().__post_init__()
        if "drm" in self.parts and self.eta is not None and self.k_in_force > self.rho + self.eta:
            raise InputError(f"`k` must be at most `rho` + `eta` = {self.rho + self.eta}, got {self.k}")
        longest = self.rho + max(15 * self.rho, MOST_NEGATIVES)  # of the lists with the default of eta
        if "drm" in self.parts and self.eta is None and self.k_in_force > longest:
            raise InputError(f"`k` must be at most {longest} unless `eta` is given, got {self.k}")
        if self.negatives_in_force == "sampled" and self.batch_in_force % self.share:
            raise InputError(_batch_problem(self.batch_in_force, self.share))
        if self.negatives == "all" and self.objective not in OVER_CATALOGUE:
            raise InputError(f"`negatives` all needs `objective` {' or '.join(OVER_CATALOGUE)}, got {self.objective}")
        if self.negatives == "sampled" and self.objective == "softmax@k":
            raise InputError("`objective` softmax@k needs `negatives` all")
        if self.cov > 0 and self.score_in_force != "l2":
            raise InputError("`cov` (covariance regularisation) needs `score` l2")
        if self.popularity > 0 and self.negatives_in_force != "all":
            raise InputError("`popularity` needs `negatives` all, and so `objective` softmax or softmax@k")
        if self.popularity > 0 and self.score_in_force == "l2":
            raise InputError("`popularity` needs `score` cosine or dot, got l2")

    @property
    def parts(self) -> frozenset[str]:
        """The losses that `objective` adds up, some of LOSSES. softmax@k is the softmax with weights."""
        return frozenset(self.objective.removesuffix("@k").split("+"))

    @property
    def score_in_force(self) -> Score:
        """The score of an item for a user."""
        if self.score is not None:
            return self.score
        return "dot" if {"hinge", "drm", "mse"} & self.parts else "cosine"

    @property
    def negatives_in_force(self) -> Negatives:
        """Which negatives a list has."""
        if self.negatives is not None:
            return self.negatives
        return "all" if self.objective in OVER_CATALOGUE else "sampled"

    @property
    def k_in_force(self) -> int:
        """Number of ranks that count as the top."""
        if self.k is not None:
            return self.k
        return SOFTMAX_K if self.objective == "softmax@k" else self.rho

    @property
    def batch_in_force(self) -> int:
        """Number of lists in a training step."""
        if self.batch_size is not None:
            return self.batch_size
        return CATALOGUE_BATCH if self.negatives_in_force == "all" else SAMPLED_BATCH

    def eta_for(self, n_items: int) -> int:
        """Return the number of negatives in a list in a catalogue of this size.

        Examples
        --------
        >>> [TrainConfig(objective="hinge+drm").eta_for(n_items) for n_items in (1_000, 17_632, 1_000_000)]
        [15, 90, 100]
        >>> TrainConfig(objective="drm", rho=3, k=50).eta_for(1_000)
        50
        """
        if self.eta is not None:
            return self.eta
        fewest = FEWEST_OF_THE_TOP if self.parts & {"hinge", "drm"} else FEWEST_NEGATIVES
        ranks = self.k_in_force if "drm" in self.parts else 0  # a list has at least as many items
        follows = 5 * round(n_items / ITEMS_PER_NEGATIVE / 5)
        return max(15 * self.rho, ranks, fewest, min(follows, MOST_NEGATIVES))

    def temperature_for(self, n_items: int) -> float:
        """Return the temperature of the softmax, psl and bpr parts in a catalogue of this size.

        Examples
        --------
        >>> round(TrainConfig().temperature_for(10_000), 3)
        0.14
        """
        return 0.65 * n_items ** (-1 / 6) if self.temperature is None else self.temperature

    def following(self, n_items: int) -> dict[str, Any]:
        """Return the values of options that were not given and follow from the number of items.

        Examples
        --------
        >>> TrainConfig(objective="hinge+drm").following(17_632)
        {'eta': 90}
        """
        values = {"eta": self.eta_for(n_items), "temperature": self.temperature_for(n_items)}
        return {name: values[name] for name in values if getattr(self, name) is None and name not in self.idle()}

    def resolved(self) -> "TrainConfig":
        """Return the same configuration with the values in force in place of None, as a run records it.

        `eta` and `temperature` may stay None: they depend on the catalogue.

        Examples
        --------
        >>> TrainConfig(rho=4).resolved().to_dict()["k"]
        4
        """
        return dataclasses.replace(
            self,
            score=self.score_in_force,
            negatives=self.negatives_in_force,
            k=self.k_in_force,
            batch_size=self.batch_in_force,
        )

    @property
    def earlier_eta(self) -> int:
        """The default number of negatives of earlier versions, which every run recorded."""
        return max(15 * self.rho, EARLIER_LEAST_ETA)

    def continuing(self, stored: "TrainConfig") -> "TrainConfig":
        """Return the options for going on with a run that recorded `stored`: with its default number of negatives.

        Examples
        --------
        >>> TrainConfig().continuing(TrainConfig(eta=45)).eta, TrainConfig().continuing(TrainConfig(eta=90)).eta
        (45, None)
        """
        recorded = self.eta is None and stored.eta == stored.earlier_eta
        return dataclasses.replace(self, eta=stored.eta) if recorded else self

    @property
    def epochs_matter(self) -> bool:
        """Whether the result after an epoch depends on the number of epochs."""
        return self.schedule == "linear"

    @property
    def weighted(self) -> bool:
        """Whether training uses the weights of the interactions."""
        return self.interaction_weights != "off"

    @property
    def last_epoch(self) -> int:
        """The epoch after which training ends at the latest."""
        return self.epochs if self.stop_after is None else min(self.stop_after, self.epochs)

    def changed(self) -> dict[str, Any]:
        """Return the options that differ from the defaults, by their Python names.

        Examples
        --------
        >>> TrainConfig(factors=32).resolved().changed()
        {'factors': 32}
        """
        # A model that was saved has explicit values in place of defaults that depend on other options.
        usual = TrainConfig(objective=self.objective).negatives_in_force
        decisive = {"rho": TrainConfig.rho, "objective": TrainConfig.objective, "negatives": usual}
        defaults = TrainConfig(rho=self.rho, objective=self.objective, negatives=self.negatives).resolved()
        values = dataclasses.asdict(self)
        if self.negatives_in_force == "all" and self.eta == self.earlier_eta:
            values["eta"] = None  # recorded, and without effect
        return {
            name: value
            for name, value in values.items()
            if value is not None and value != decisive.get(name, getattr(defaults, name))
        }

    def idle(self) -> set[str]:
        """Return the options that do not change the training, whatever their values.

        Examples
        --------
        >>> sorted(TrainConfig(objective="hinge").idle())
        ['cov_every', 'cov_form', 'interaction_weight_cap', 'k', 'lam', 'pool', 'popularity', 'tau', 'temperature', \
'weight']
        """
        parts, every = self.parts, self.negatives_in_force == "all"
        top = "drm" in parts or self.objective == "softmax@k"
        idle = {
            **dict.fromkeys(("rho", "eta", "share", "user_sampling"), every),
            "pool": not every,
            "popularity": not every or self.score_in_force == "l2",
            **dict.fromkeys(("k", "tau"), not top),
            **dict.fromkeys(("lam", "weight"), "drm" not in parts),
            "margin": "hinge" not in parts,
            "temperature": not parts & {"softmax", "psl", "bpr"},
            "interaction_weight_cap": self.interaction_weights == "off",
            **dict.fromkeys(("cov_every", "cov_form"), self.cov == 0),
        }
        return {name for name, is_idle in idle.items() if is_idle}

    def without_effect(self) -> list[str]:
        """Return the options that differ from the defaults and do not change the training.

        Examples
        --------
        >>> TrainConfig(tau=0.3).without_effect()
        ['tau']
        >>> TrainConfig(objective="hinge+drm", weight="ndcg").without_effect()
        ['weight']
        """
        # The only rank of K = 1 has weight 1, but 1 / rho for recall, and 0 or 1 under ap.
        one_weight = self.k_in_force == 1 and (self.rho == 1 or self.weight != "recall") and self.weight != "ap"
        idle = self.idle() | ({"weight"} if one_weight else set())
        return [name for name in self.changed() if name in idle]

    def search_space(self) -> dict[str, list[Any]]:
        """Return the default search space of `tune`: the options that matter for the objective.

        Examples
        --------
        >>> list(TrainConfig().search_space())
        ['factors', 'temperature', 'popularity', 'lr', 'epochs']
        >>> list(TrainConfig(objective="hinge+drm").search_space())
        ['score', 'factors', 'eta', 'tau', 'lambda', 'margin', 'lr', 'epochs']
        """
        space = super().search_space()
        if not {"hinge", "drm"} & self.parts:
            space.pop("score")
        return space

    @classmethod
    def _of_model(cls) -> str:
        return ""


def of_trained_model(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options stored with a model, with a batch size that `TrainConfig` accepts.

    Version 0.1 accepted batch sizes that are not a multiple of `share`. A trained model does not depend on them.

    Examples
    --------
    >>> of_trained_model({"batch_size": 100, "share": 32})
    {'batch_size': 128, 'share': 32}
    """
    values = dict(values)
    if "batch_size" in values and "share" in values:
        values["batch_size"] = -(-values["batch_size"] // values["share"]) * values["share"]
    return values


def _batch_problem(batch_size: int, share: int) -> str:
    below = batch_size // share * share
    fitting = f"{below} or {below + share}" if below else f"{share}"
    return f"`batch_size` {batch_size} is not a multiple of `share` {share}: use {fitting}, or `share` 1"
