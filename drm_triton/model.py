"""`DRM`: the recommender trained with ranking losses."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec

import torch
from torch import Tensor

from drm_triton.config import TrainConfig, of_trained_model
from drm_triton.data.csr import CSR
from drm_triton.data.dataset import Dataset
from drm_triton.errors import InputError
from drm_triton.kernels.precision import table_type, widened
from drm_triton.names import (
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
from drm_triton.options import ALIASES
from drm_triton.progress import SILENT, Reporter
from drm_triton.ranking.fold_in import fold_in
from drm_triton.recommender import FactorRecommender, Tensors
from drm_triton.training.display import loading_kernels
from drm_triton.training.engine import SingleProcess
from drm_triton.training.loop import check_factors, initial_state, train
from drm_triton.training.preflight import (
    memory_estimate,
    warm_up,
    warn_if_unvalidated,
    warn_of_idle_options,
)
from drm_triton.training.prior import ranking_factors
from drm_triton.training.run import Stored
from drm_triton.training.state import BatchCallback, EpochCallback, State
from drm_triton.training.step import smaller_steps
from drm_triton.training.warm_start import Known, list_state
from drm_triton.training.weights import require_weights

P = ParamSpec("P")


def _explain_keywords(init: Callable[P, None]) -> Callable[P, None]:
    """Check the keywords of `DRM` before Python does, because Python's error does not suggest a name.

    `lambda` is accepted for `lam`, so that `DRM(**config.to_dict())` works.
    """

    @functools.wraps(init)
    def checked_init(*args: P.args, **kwargs: P.kwargs) -> None:
        options = {name: value for name, value in kwargs.items() if name != "config"}
        config = kwargs.get("config", args[1] if len(args) > 1 else None)
        try:
            TrainConfig.check_names(options)
        except InputError as error:
            raise InputError(f"DRM: {error}") from None
        if not isinstance(config, TrainConfig | None):
            raise InputError(f"DRM: `config` must be a TrainConfig, got {config!r}; give options as keywords")
        if config is not None and options:
            raise InputError(f"DRM: give a TrainConfig or options as keywords, not both; got {', '.join(options)}")
        kwargs.update((ALIASES[name], kwargs.pop(name)) for name in list(kwargs) if name in ALIASES)
        init(*args, **kwargs)

    return checked_init


class DRM(FactorRecommender[TrainConfig]):
    """Factor model for top-K recommendation.

    By default it is trained with the softmax loss over the whole catalogue, which ranks best on most data. With
    `objective="hinge+drm"` it is trained on the differentiable ranking metric, as in the paper,
    <https://arxiv.org/abs/2008.13141>.

    Give the training options as keywords, or all together as a `TrainConfig`.

    Parameters
    ----------
    config : TrainConfig, optional
        All options at once, instead of the keywords below.
    score : {"dot", "l2", "cosine"}, optional
        Score of an item for a user: cosine, dot product, or negative squared Euclidean distance (l2). Default: dot if
        `objective` contains hinge, drm or mse, otherwise cosine.
    factors : int, default 64
        Length of the user and item vectors, d.
    init : {"spectral", "normal"}, default "spectral"
        Initial factors: a truncated SVD of the interactions (spectral), or random numbers (normal).
    precision : {"float32", "bfloat16"}, default "float32"
        Number format of the factor tables in training. With bfloat16, they take half the memory on a GPU, and each row
        is rounded at random after its step. On the CPU, rows are rounded as on a GPU, and no memory is saved.
    rho : int, default 1
        Number of positives in a training list: items that its user has.
    negatives : {"sampled", "all"}, optional
        Negatives of a list: a sample of `eta` items, or all items that its user does not have. With all, a list is a
        user, its positives are all of the user's items, and `objective` must be softmax or softmax@k. Default: all if
        `objective` is softmax or softmax@k, otherwise sampled.
    pool : int, default 32768
        Size of the random pool of negatives drawn for each step with `negatives` all. Used if the catalogue has more
        than twice this many items.
    eta : int, optional
        Number of negatives in a training list: items that its user does not have. Default: N / 200 in a catalogue of
        N items, rounded to a multiple of 5, from 15 (without hinge and drm: 45) to 100, but at least 15 times `rho`
        and, with drm, at least `k`.
    share : int, default 32
        Number of consecutive lists that use the same negatives. 1 draws negatives for each list.
    user_sampling : {"proportional", "uniform"}, default "proportional"
        How users are drawn: in proportion to their number of interactions, or uniformly.
    objective : {"hinge+drm", "hinge", "drm", "mse", "mse+drm", "softmax", "softmax+drm", "softmax@k", "psl", "psl+drm",
        "bpr", "bpr+drm"}, default "softmax"
        Loss of a list. A + joins two parts: hinge+drm is the hinge loss plus `lam` times the DRM loss.
    k : int, optional
        Number of ranks that count as the top in the DRM part, at most `rho` + `eta`, and in softmax@k. Default: `rho`,
        or 20 with softmax@k.
    tau : float, default 0.5
        Temperature of the relaxed sort, and of the top K in softmax@k. Lower values are closer to a hard ranking.
    lam : float, default 10.0
        Weight of the DRM part of the loss.
    weight : {"uniform", "precision", "recall", "ndcg", "ap"}, default "uniform"
        How much each rank counts in the DRM part.
    margin : float, default 1.0
        By how much a positive should score above a negative, in the hinge part.
    temperature : float, optional
        Temperature of the softmax, psl and bpr parts. Lower values put more weight on the hardest negatives. Default:
        0.65 N^(-1/6) in a catalogue of N items.
    popularity : float, default 0.0
        Exponent of popularity: an item with n interactions counts n^`popularity` times in the softmax, in training and
        in the ranking. Needs `negatives` all and a `score` other than l2.
    interaction_weights : {"off", "raw", "log", "bm25"}, default "off"
        How the loss of a list depends on the weights of its positives, which prepare --weight stores: not
        at all (off), in proportion to the weight (raw) or to log(1 + weight), or by BM25.
    interaction_weight_cap : float, optional
        Largest weight of an interaction, as a multiple of the mean weight. Default: none.
    cov : float, default 0.0
        Weight of the covariance regularisation. Needs `score` l2.
    cov_every : int, default 10
        Number of steps between covariance gradients. Each gradient is multiplied by this number.
    cov_form : {"decorrelate", "printed"}, default "decorrelate"
        Formula of the covariance regularisation: decorrelate the factors, or as printed in the paper.
    lr : float, default 0.2
        Learning rate of Adagrad.
    schedule : {"linear", "constant"}, default "linear"
        Learning rate over the epochs: linear decrease to 0, or constant.
    batch_size : int, optional
        Number of lists in a training step. With sampled negatives, it must be a multiple of `share`. Default: 2048, or
        256 if `negatives` is all.
    epochs : int, default 20
        Number of passes over the training lists.
    stop_after : int, optional
        Last epoch to train. The learning rate still falls as if all `epochs` followed. Default: `epochs`.
    seed : int, default 0
        Seed of all random numbers. The same seed gives the same model, bit for bit.
    fit_on : {"train", "train+valid", "all"}, default "train"
        Split parts to train on.
    backend : {"auto", "cpu", "triton", "reference"}, default "auto"
        Implementation of the kernels. auto uses triton if there is a GPU, and cpu otherwise.
    threads : int, optional
        Number of CPU threads. Default: all cores.
    eval_every : int, default 1
        Number of epochs between validations. 0 disables validation.
    patience : int, default 0
        Stop after this many validations without improvement. 0 disables early stopping.
    monitor : str, default "ndcg@10"
        Validation metric that selects the best epoch and controls `patience`.

    Examples
    --------
    >>> import polars as pl
    >>> from drm_triton import Dataset
    >>> frame = pl.DataFrame({"user": ["ann", "ann", "bob", "bob", "cy"], "item": ["x", "y", "x", "y", "x"]})
    >>> data = Dataset.from_frame(frame, ratios=(1, 0, 0))
    >>> model = DRM(factors=4, epochs=3).fit(data)
    >>> model.recommend(["cy"], k=1)["item"].to_list()
    ['y']
    >>> model
    DRM(factors=4, epochs=3)
    """

    Config = TrainConfig
    optimiser_state = True

    @_explain_keywords
    def __init__(
        self,
        config: TrainConfig | None = None,
        *,
        score: Score | None = None,
        factors: int = 64,
        init: Init = "spectral",
        precision: Precision = "float32",
        rho: int = 1,
        negatives: Negatives | None = None,
        pool: int = 32768,
        eta: int | None = None,
        share: int = 32,
        user_sampling: UserSampling = "proportional",
        objective: ObjectiveName = "softmax",
        k: int | None = None,
        tau: float = 0.5,
        lam: float = 10.0,
        weight: Weight = "uniform",
        margin: float = 1.0,
        temperature: float | None = None,
        popularity: float = 0.0,
        interaction_weights: InteractionWeights = "off",
        interaction_weight_cap: float | None = None,
        cov: float = 0.0,
        cov_every: int = 10,
        cov_form: CovForm = "decorrelate",
        lr: float = 0.2,
        schedule: Schedule = "linear",
        batch_size: int | None = None,
        epochs: int = 20,
        stop_after: int | None = None,
        seed: int = 0,
        fit_on: FitOn = "train",
        backend: BackendChoice = "auto",
        threads: int | None = None,
        eval_every: int = 1,
        patience: int = 0,
        monitor: str = "ndcg@10",
    ) -> None:
        super().__init__(
            config
            if config is not None
            else TrainConfig(
                score=score,
                factors=factors,
                init=init,
                precision=precision,
                rho=rho,
                negatives=negatives,
                pool=pool,
                eta=eta,
                share=share,
                user_sampling=user_sampling,
                objective=objective,
                k=k,
                tau=tau,
                lam=lam,
                weight=weight,
                margin=margin,
                temperature=temperature,
                popularity=popularity,
                interaction_weights=interaction_weights,
                interaction_weight_cap=interaction_weight_cap,
                cov=cov,
                cov_every=cov_every,
                cov_form=cov_form,
                lr=lr,
                schedule=schedule,
                batch_size=batch_size,
                epochs=epochs,
                stop_after=stop_after,
                seed=seed,
                fit_on=fit_on,
                backend=backend,
                threads=threads,
                eval_every=eval_every,
                patience=patience,
                monitor=monitor,
            )
        )

    @property
    def score_name(self) -> Score:
        """The score of an item for a user."""
        return "dot" if self.biased else self.config.score_in_force

    @property
    def biased(self) -> bool:
        """Whether the vectors have a column for the popularity of the items."""
        return self.config.popularity > 0

    def check_fit(self, dataset: Dataset, fit: CSR) -> None:
        """Raise or warn before training if options and data do not go together."""
        require_weights(fit, self.config.interaction_weights)
        warn_if_unvalidated(self.config, dataset)
        warn_of_idle_options(self.config)

    def warm_up(self) -> None:
        """Compile the kernels that training uses."""
        warm_up(self.config, *self.backend())

    def memory_estimate(self, dataset: Dataset) -> dict[str, int]:
        """Return the bytes that training holds, by purpose."""
        return memory_estimate(dataset, self.config)

    def train(
        self,
        stored: Stored | None,
        dataset: Dataset,
        fit: CSR,
        callbacks: Sequence[EpochCallback],
        on_batch: BatchCallback | None = None,
        reporter: Reporter = SILENT,
    ) -> State:
        """Train, from the beginning or from a stored checkpoint, and return the final state."""
        backend, device = self.backend()
        with loading_kernels(reporter):
            self.warm_up()
        state = initial_state(self.config, fit, device) if stored is None else State.of_checkpoint(*stored)
        state = state.to(device, table_type(self.config.precision, backend.name))
        engine = SingleProcess(state, self.config, dataset, fit, backend)
        state = train(state, self.config, dataset, engine, callbacks, on_batch)
        if state.position:  # stopped within an epoch
            check_factors(state, self.config)
        return state

    def updated_state(self, old: Tensors, known: Known, fit: CSR) -> State:
        """Return the state before the first epoch of an update."""
        return list_state(old, known, fit, self.config, *self.backend())

    def layout(self, n_users: int, n_items: int) -> Tensors:
        """Return the factors and Adagrad's sums without content."""
        return State.layout(n_users, n_items, self.config.factors)

    def learned(self, tensors: Tensors) -> Tensors:
        """Return the factors as float32, without Adagrad's sums."""
        return {name: widened(tensors[name]) for name in ("user_factors", "item_factors")}

    def placed(self, tensors: Tensors) -> Tensors:
        """Return the factors on the device of the backend."""
        _, device = self.backend()
        return {name: tensor.to(device) for name, tensor in tensors.items()}

    def factors(self, tensors: Tensors) -> tuple[Tensor, Tensor]:
        """Return user factors [M, d] and item factors [N, d], with `popularity` one column more."""
        U, V = tensors["user_factors"], tensors["item_factors"]
        return ranking_factors(U, V, self.config, self.interactions.popularity) if self.biased else (U, V)

    def fold_in_items(self, liked: CSR) -> Tensor:
        """Return the vectors of new users from the codes of the items they liked, CSR [B, N]: float32 [B, d]."""
        V = self.item_factors
        if not self.biased:
            return fold_in(V, liked, self.config, self.backend()[0])
        U = fold_in(V[:, :-1].contiguous(), liked, self.config, self.backend()[0], prior=V[:, -1].contiguous())
        return torch.cat([U, U.new_ones(len(U), 1)], 1)

    @classmethod
    def stored_config(cls, values: dict[str, Any], where: str) -> TrainConfig:
        """Return the configuration that a model file holds."""
        return TrainConfig.from_mapping(of_trained_model(values), where=where)

    def remedy(self) -> str:
        """Return what to change if the training diverges."""
        return smaller_steps(self.config)
