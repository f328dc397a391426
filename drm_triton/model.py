"""`DRM`: the recommender. Fit it to a data set, get recommendations, save it and load it."""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ParamSpec

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray
from torch import Tensor

from drm_triton import atomic
from drm_triton.config import TrainConfig, check_names, of_trained_model
from drm_triton.data.dataset import CSR, Dataset
from drm_triton.errors import DrmError, InputError
from drm_triton.kernels import use_backend
from drm_triton.kernels.precision import table_type, widened
from drm_triton.kernels.protocol import Backend
from drm_triton.names import (
    CUT_OFFS,
    MIN_TRAIN,
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
    Unknown,
    UserSampling,
    Weight,
)
from drm_triton.options import ALIASES
from drm_triton.progress import SILENT, Reporter
from drm_triton.ranking.evaluate import Evaluation, evaluate, factor_ranker
from drm_triton.ranking.fold_in import fold_in
from drm_triton.ranking.recommend import (
    candidate_items,
    check_k,
    describe_users_without_interactions,
    encode_histories,
    known_users,
    new_users,
    recommendation_frames,
    similar_frame,
)
from drm_triton.ranking.topk import TopKIndex
from drm_triton.training import checkpoint
from drm_triton.training.loop import check_factors, initial_state, interactions_to_fit, train
from drm_triton.training.preflight import warm_up, warn_if_unvalidated, warn_of_idle_options
from drm_triton.training.run import Run, checkpoint_directory, interactions_only
from drm_triton.training.state import BatchCallback, EpochCallback, EpochEnd
from drm_triton.training.step import smaller_steps
from drm_triton.training.weights import require_weights

Ids = Sequence[Any] | pl.Series | NDArray[Any]  # external ids
Histories = Mapping[Any, Ids] | Sequence[Ids] | pl.DataFrame  # the items of each new user

P = ParamSpec("P")


class NotFittedError(DrmError):
    """The model has no factors yet."""


def _explain_keywords(init: Callable[P, None]) -> Callable[P, None]:
    """Check the keywords of `DRM` before Python does, because Python's error does not suggest a name.

    `lambda` is accepted for `lam`, so that `DRM(**config.to_dict())` works.
    """

    @functools.wraps(init)
    def checked_init(*args: P.args, **kwargs: P.kwargs) -> None:
        options = {name: value for name, value in kwargs.items() if name != "config"}
        config = kwargs.get("config", args[1] if len(args) > 1 else None)
        try:
            check_names(options)
        except InputError as error:
            raise InputError(f"DRM: {error}") from None
        if not isinstance(config, TrainConfig | None):
            raise InputError(f"DRM: `config` must be a TrainConfig, got {config!r}; give options as keywords")
        if config is not None and options:
            raise InputError(f"DRM: give a TrainConfig or options as keywords, not both; got {', '.join(options)}")
        kwargs.update((ALIASES[name], kwargs.pop(name)) for name in list(kwargs) if name in ALIASES)
        init(*args, **kwargs)

    return checked_init


class DRM:
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
        Number of negatives in a training list: items that its user does not have. Default: 15 times `rho`, at least
        45.
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
    >>> frame = pl.DataFrame({"user": ["ann", "ann", "bob", "bob", "cy"], "item": ["x", "y", "x", "y", "x"]})
    >>> data = Dataset.from_frame(frame, ratios=(1, 0, 0))
    >>> model = DRM(factors=4, epochs=3).fit(data)
    >>> model.recommend(["cy"], k=1)["item"].to_list()
    ['y']
    >>> model
    DRM(factors=4, epochs=3)
    """

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
        interaction_weights: InteractionWeights = "off",
        interaction_weight_cap: float | None = None,
        cov: float = 0.0,
        cov_every: int = 10,
        cov_form: CovForm = "decorrelate",
        lr: float = 0.2,
        schedule: Schedule = "linear",
        batch_size: int | None = None,
        epochs: int = 20,
        seed: int = 0,
        fit_on: FitOn = "train",
        backend: BackendChoice = "auto",
        threads: int | None = None,
        eval_every: int = 1,
        patience: int = 0,
        monitor: str = "ndcg@10",
    ) -> None:
        self.config = (
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
                interaction_weights=interaction_weights,
                interaction_weight_cap=interaction_weight_cap,
                cov=cov,
                cov_every=cov_every,
                cov_form=cov_form,
                lr=lr,
                schedule=schedule,
                batch_size=batch_size,
                epochs=epochs,
                seed=seed,
                fit_on=fit_on,
                backend=backend,
                threads=threads,
                eval_every=eval_every,
                patience=patience,
                monitor=monitor,
            )
        )
        self._factors: tuple[Tensor, Tensor] | None = None
        self._interactions: Dataset | None = None

    def __repr__(self) -> str:
        return f"DRM({', '.join(f'{name}={value!r}' for name, value in self.config.changed().items())})"

    # -- training ------------------------------------------------------------------------------------------------

    def fit(
        self,
        dataset: Dataset,
        callbacks: Iterable[EpochCallback] = (),
        run: str | Path | None = None,
        resume: bool = False,
        on_batch: BatchCallback | None = None,
        reporter: Reporter = SILENT,
    ) -> "DRM":
        """Train on a data set.

        Parameters
        ----------
        dataset : Dataset
        callbacks : called with an `EpochEnd` after each epoch; a callback that returns True ends the training
        run : directory for the configuration, metrics and checkpoints; None writes nothing
        resume : continue the training in `run` from its last checkpoint
        on_batch : called with (state, lists in an epoch) after each step; returning True ends the training
        reporter : shows progress while the kernels are loaded

        Returns
        -------
        this DRM, with the factors of the best epoch on the validation part, or of the last epoch without validation
        """
        if not isinstance(dataset, Dataset):
            raise InputError(
                f"DRM.fit takes a Dataset, not {type(dataset).__name__}; convert a frame with Dataset.from_frame"
            )
        if resume and run is None:
            raise InputError("DRM.fit: `resume` needs `run`, the directory of the run to continue")
        backend, device = self.backend()  # first: a backend that cannot be used leaves no run directory behind
        fit = interactions_to_fit(dataset, self.config)
        require_weights(fit, self.config.interaction_weights)
        warn_if_unvalidated(self.config, dataset)
        warn_of_idle_options(self.config)
        keeper: Run | _Best
        state = None
        if run is None:
            keeper = _Best()
        elif resume:
            keeper, state = Run.open(run, dataset, self.config)
        else:
            keeper = Run.create(run, self.config, dataset, fit)
        with reporter.step("load the kernels (compiled at first use)"):
            warm_up(self.config, backend, device)
        if state is None:
            state = initial_state(self.config, fit, device)
        state = state.to(device, table_type(self.config.precision, backend.name))
        state = train(state, self.config, dataset, fit, backend, [*callbacks, keeper], on_batch)
        if isinstance(keeper, Run):
            if state.position:  # stopped within an epoch
                check_factors(state, self.config)
                keeper.save(state)
            keeper.draw_curves()
            return self._become(DRM.load(keeper.path))
        U, V = keeper.factors or (state.U, state.V)
        self._factors = widened(U), widened(V)
        self._interactions = interactions_only(dataset, fit)
        return self

    def backend(self) -> tuple[Backend, torch.device]:
        """Return the backend and the device of the configuration, with its number of threads set."""
        return use_backend(self.config.backend, self.config.threads)

    # -- the fitted model ----------------------------------------------------------------------------------------

    @property
    def user_factors(self) -> Tensor:
        """User factors U, float32 [M, d]."""
        return self._fitted()[0]

    @property
    def item_factors(self) -> Tensor:
        """Item factors V, float32 [N, d]."""
        return self._fitted()[1]

    @property
    def interactions(self) -> Dataset:
        """The interactions that the model was fitted on, as the `train` part, and the external ids."""
        self._fitted()
        assert self._interactions is not None
        return self._interactions

    def was_fit_on(self, dataset: Dataset) -> bool:
        """Return whether a data set has the ids and the interactions that the model was fitted on."""
        mine, fit = self.interactions, interactions_to_fit(dataset, self.config)
        return (
            fit.shape == mine.train.shape
            and np.array_equal(fit.indptr, mine.train.indptr)
            and np.array_equal(fit.indices, mine.train.indices)
            and dataset.user_ids.equals(mine.user_ids)
            and dataset.item_ids.equals(mine.item_ids)
        )

    def recommend(
        self,
        users: Ids | None = None,
        k: int = 10,
        exclude_seen: bool = True,
        only: Ids | None = None,
        without: Ids | None = None,
        unknown: Unknown = "error",
    ) -> pl.DataFrame:
        """Return the k best items for each user.

        Parameters
        ----------
        users : sequence of ids, optional
            Users to recommend to. Default: all users with interactions in the training data.
        k : int, default 10
            Number of items per user.
        exclude_seen : bool, default True
            Leave out items that the user has interacted with.
        only : sequence of ids, optional
            Items to choose from. Default: all items.
        without : sequence of ids, optional
            Items to leave out.
        unknown : {"error", "skip", "popular"}, default "error"
            Handling of users without interactions in the training data: raise an error, skip them with a warning, or
            recommend the most popular items to them, with score null.

        Returns
        -------
        polars.DataFrame
            Columns user, rank (1 is best), item, score. A user has fewer than k rows if fewer items remain.
        """
        return pl.concat(self.recommend_blocks(users, None, k, exclude_seen, only, without, unknown))

    def recommend_from(
        self,
        histories: Histories,
        k: int = 10,
        exclude_seen: bool = True,
        only: Ids | None = None,
        without: Ids | None = None,
        unknown: Unknown = "error",
    ) -> pl.DataFrame:
        """Return the k best items for new users, who are not in the training data, from the items they liked.

        The parameters not listed here and the result are those of `recommend`.

        Parameters
        ----------
        histories : mapping, sequence or frame
            Mapping from user to item ids, list of lists of item ids (the users are then 0, 1, ...), or frame with
            columns user and item.
        exclude_seen : bool, default True
            Leave out the items of the user's history.
        unknown : {"error", "skip", "popular"}, default "error"
            Handling of item ids that the model does not know: raise an error, or ignore these items. Users without any
            known item are then skipped ("skip"), or get the most popular items with score null ("popular").

        Examples
        --------
        >>> frame = pl.DataFrame({"user": ["ann", "ann", "bob", "bob", "cy"], "item": ["x", "y", "x", "y", "z"]})
        >>> model = DRM(factors=4, epochs=3).fit(Dataset.from_frame(frame, ratios=(1, 0, 0)))
        >>> model.recommend_from({"dora": ["x"]}, k=1).select("user", "item").rows()
        [('dora', 'y')]
        """
        return pl.concat(self.recommend_blocks(None, histories, k, exclude_seen, only, without, unknown))

    def recommend_blocks(
        self,
        users: Ids | None = None,
        histories: Histories | None = None,
        k: int = 10,
        exclude_seen: bool = True,
        only: Ids | None = None,
        without: Ids | None = None,
        unknown: Unknown = "error",
    ) -> Iterator[pl.DataFrame]:
        """Yield the result of `recommend`, or of `recommend_from` if `histories` are given, in blocks of users.

        Each frame holds a few thousand users, so memory does not grow with their number. The arguments are checked
        before the first frame is requested.
        """
        check_k("recommend", k)
        if users is not None and histories is not None:
            raise InputError("recommend_blocks: give `users` or `histories`, not both")
        data, (U, V), (backend, _) = self.interactions, self._fitted(), self.backend()
        if histories is None:
            targets = known_users(users, data, U, unknown)
        else:
            targets = new_users(histories, data, V, self.config, backend, unknown)
        index = TopKIndex(backend, V, self.config.score_in_force, candidate_items(data, only, without))
        return recommendation_frames(targets, index, data, k, exclude_seen)

    def fold_in(self, histories: Histories) -> Tensor:
        """Return the vectors of new users, fitted to the items they liked: float32 [B, d].

        The item factors stay fixed, and the training objective fits the vectors; see `drm_triton.ranking.fold_in`.
        The same items give the same vector, bit for bit, in any order and in any batch.

        Parameters
        ----------
        histories : mapping, sequence or frame
            As in `recommend_from`. No history may be empty.
        """
        _, liked = encode_histories(histories, self.interactions)
        return fold_in(self.item_factors, liked, self.config, self.backend()[0])

    def similar_items(self, items: Ids, k: int = 10) -> pl.DataFrame:
        """Return the k items most similar to each given item, never the item itself.

        The similarity of items v and w is the cosine of their factors under `cosine` and `dot`, and -||v - w||^2 under
        `l2`. The cosine ignores the length of a factor, which reflects popularity under `dot`.

        Parameters
        ----------
        items : sequence of ids
            Items to find similar items for.
        k : int, default 10
            Number of similar items for each.

        Returns
        -------
        polars.DataFrame
            Columns item, rank (1 is the most similar), similar, score.
        """
        data, (backend, _) = self.interactions, self.backend()
        codes = data.encode_items(items)
        return similar_frame(backend, "item", codes, data.item_ids, self.item_factors, self.config, k)

    def similar_users(self, users: Ids, k: int = 10) -> pl.DataFrame:
        """Return the k users most similar to each given user, as `similar_items` does for items.

        Users without interactions in the training data are never returned: their factors are still the initial ones.

        Parameters
        ----------
        users : sequence of ids
            Users to find similar users for.
        k : int, default 10
            Number of similar users for each.

        Returns
        -------
        polars.DataFrame
            Columns user, rank (1 is the most similar), similar, score.
        """
        data, (backend, _) = self.interactions, self.backend()
        codes = data.encode_users(users)
        trained = data.train.degrees() > 0
        if not trained[codes].all():
            reason = describe_users_without_interactions(data.user_ids[codes[~trained[codes]]])
            raise InputError(f"{reason}, so the model cannot compare them; give other users")
        return similar_frame(
            backend,
            "user",
            codes,
            data.user_ids,
            self.user_factors,
            self.config,
            k,
            np.flatnonzero(trained),
        )

    def evaluate(
        self, held_out: CSR, seen: CSR | None = None, ks: Sequence[int] = CUT_OFFS, min_train: int = MIN_TRAIN
    ) -> Evaluation:
        """Rank all unseen items for each user and compare the ranking with held-out interactions.

        Parameters
        ----------
        held_out : CSR [M, N]
            Relevant items of each user, for example `dataset.test`.
        seen : CSR [M, N], optional
            Items to exclude from the ranking. Default: the interactions that the model was fitted on.
        ks : sequence of int, default (10, 50)
            Cut-offs.
        min_train : int, default 5
            Users with fewer interactions in `seen` are left out.
        """
        backend, _ = self.backend()
        rank = factor_ranker(backend, *self._fitted(), self.config.score_in_force)
        return evaluate(rank, self.interactions.train if seen is None else seen, held_out, ks, min_train)

    # -- files ---------------------------------------------------------------------------------------------------

    def save(self, path: str | Path, overwrite: bool = False) -> None:
        """Write the model to a directory, atomically. docs/formats.md describes the files.

        Parameters
        ----------
        path : the directory
        overwrite : replace a saved model
        """
        U, V = self._fitted()
        _check_finite(U, V, self.config, "this DRM")
        with atomic.directory(Path(path), overwrite, marker=checkpoint.FILE) as folder:
            # Save a copy: `Dataset.save` records where a data set is stored, and this folder is temporary.
            interactions_only(self.interactions, self.interactions.train).save(folder / "data")
            tensors = {"user_factors": U, "item_factors": V}
            checkpoint.write_tensors(folder / checkpoint.FILE, tensors, {"config": self.config.resolved().to_dict()})

    @classmethod
    def load(cls, path: str | Path) -> "DRM":
        """Load a saved model, or the best checkpoint of a run."""
        place = checkpoint_directory(path)
        tensors, metadata = checkpoint.read_tensors(place / checkpoint.FILE)
        model = cls(TrainConfig.from_mapping(of_trained_model(metadata["config"]), where=str(place)))
        model._interactions = Dataset.load(place / "data")
        U, V = tensors["user_factors"], tensors["item_factors"]
        sizes = (len(U), len(V)), (model._interactions.n_users, model._interactions.n_items)
        if sizes[0] != sizes[1]:
            raise InputError(f"{place}: factors of {sizes[0]} users and items, but ids of {sizes[1]}")
        _check_finite(U, V, model.config, str(place))
        _, device = model.backend()
        model._factors = U.to(device), V.to(device)
        return model

    # -- internal ------------------------------------------------------------------------------------------------

    def _fitted(self) -> tuple[Tensor, Tensor]:
        if self._factors is None:
            raise NotFittedError("this DRM has no factors yet: call fit or load first")
        return self._factors

    def _become(self, other: "DRM") -> "DRM":
        self._factors, self._interactions = other._factors, other._interactions
        return self


def _check_finite(U: Tensor, V: Tensor, config: TrainConfig, where: str) -> None:
    if not (torch.isfinite(U).all() and torch.isfinite(V).all()):
        raise InputError(f"{where}: the factors are not finite; train again with {smaller_steps(config)}")


class _Best:
    """Callback that keeps the factors of the best epoch in memory, for a training without a run directory."""

    factors: tuple[Tensor, Tensor] | None = None

    def __call__(self, end: EpochEnd) -> None:
        if end.state.best is not None and end.improved:
            self.factors = end.state.U.clone(), end.state.V.clone()
