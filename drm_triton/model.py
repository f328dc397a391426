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
from drm_triton.kernels.protocol import Backend
from drm_triton.names import (
    BackendChoice,
    CovForm,
    FitOn,
    Init,
    ObjectiveName,
    Schedule,
    Score,
    UserSampling,
    Weight,
)
from drm_triton.options import ALIASES
from drm_triton.progress import SILENT, Reporter
from drm_triton.ranking.evaluate import Evaluation, evaluate, factor_ranker
from drm_triton.ranking.fold_in import fold_in
from drm_triton.ranking.recommend import (
    Candidates,
    Unknown,
    check_k,
    encode_histories,
    find_users,
    similar,
    top_lists,
    without_interactions,
)
from drm_triton.training import checkpoint
from drm_triton.training.loop import check_factors, initial_state, interactions_to_fit, train
from drm_triton.training.preflight import warm_up, warn_if_unvalidated
from drm_triton.training.run import Run, checkpoint_directory, interactions_only
from drm_triton.training.state import BatchCallback, EpochCallback, EpochEnd

Ids = Sequence[Any] | pl.Series | NDArray[Any]  # external ids
Histories = Mapping[Any, Ids] | Sequence[Ids] | pl.DataFrame  # the items of each person

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
    """Factor model for top-K recommendation, trained on the differentiable ranking metric.

    Give the training options as keywords, or all together as a `TrainConfig`.

    Parameters
    ----------
    config : TrainConfig, optional
        All options at once, instead of the keywords below.
    score : {"dot", "l2"}, default "dot"
        Score of an item for a user: dot product, or negative squared Euclidean distance (l2).
    factors : int, default 64
        Length of the user and item vectors, d.
    init : {"spectral", "normal"}, default "spectral"
        Initial factors: a spectral embedding of the interactions, or random normal numbers.
    rho : int, default 1
        Positive items in a training list: items of its user.
    eta : int, optional
        Negative items in a training list: items that its user does not have. Default: 15 rho, at least 45.
    share : int, default 32
        Consecutive lists that share one draw of negative items. 1 draws for each list.
    user_sampling : {"proportional", "uniform"}, default "proportional"
        How often a user is drawn: in proportion to its interactions, or as often as any other.
    objective : {"hinge+drm", "hinge", "drm", "mse", "mse+drm"}, default "hinge+drm"
        Terms of the loss.
    k : int, optional
        Cut-off K of the relaxed metric. At most `rho` + `eta`. Default: rho.
    tau : float, default 0.5
        Temperature of the relaxed sort. Lower is closer to a hard sort.
    lam : float, default 10.0
        Weight of the DRM term.
    weight : {"uniform", "precision", "recall", "ndcg", "ap"}, default "uniform"
        Weights of the ranks in the relaxed metric.
    margin : float, default 1.0
        Margin of the hinge term.
    cov : float, default 0.0
        Weight of the covariance regularisation. Needs `score` l2.
    cov_every : int, default 10
        Steps between covariance gradients. Each gradient is multiplied by this number.
    cov_form : {"decorrelate", "printed"}, default "decorrelate"
        Covariance term: decorrelate the factors, or the formula as printed in the paper.
    lr : float, default 0.2
        Learning rate of Adagrad.
    schedule : {"linear", "constant"}, default "linear"
        Learning rate over the epochs: a linear decrease to 0, or constant.
    batch_size : int, default 2048
        Lists in a step. A multiple of `share`.
    epochs : int, default 20
        Passes over the interactions.
    seed : int, default 0
        Seed of every random number. The same seed gives the same model, bit by bit.
    fit_on : {"train", "train+valid", "all"}, default "train"
        Parts of the data set to train on.
    backend : {"auto", "cpu", "triton", "reference"}, default "auto"
        Implementation of the kernels. auto is triton with a GPU and cpu without.
    threads : int, optional
        CPU threads. Default: all cores.
    eval_every : int, default 1
        Epochs between validations. 0 disables validation.
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
        score: Score = "dot",
        factors: int = 64,
        init: Init = "spectral",
        rho: int = 1,
        eta: int | None = None,
        share: int = 32,
        user_sampling: UserSampling = "proportional",
        objective: ObjectiveName = "hinge+drm",
        k: int | None = None,
        tau: float = 0.5,
        lam: float = 10.0,
        weight: Weight = "uniform",
        margin: float = 1.0,
        cov: float = 0.0,
        cov_every: int = 10,
        cov_form: CovForm = "decorrelate",
        lr: float = 0.2,
        schedule: Schedule = "linear",
        batch_size: int = 2048,
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
                rho=rho,
                eta=eta,
                share=share,
                user_sampling=user_sampling,
                objective=objective,
                k=k,
                tau=tau,
                lam=lam,
                weight=weight,
                margin=margin,
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
        backend, device = self.backend()  # first: a backend that cannot be used leaves no run directory behind
        fit = interactions_to_fit(dataset, self.config)
        warn_if_unvalidated(self.config, dataset)
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
        state = train(state.to(device), self.config, dataset, fit, backend, [*callbacks, keeper], on_batch)
        if isinstance(keeper, Run):
            if state.position:  # stopped within an epoch
                check_factors(state, self.config)
                keeper.save(state)
            keeper.draw_curves()
            return self._become(DRM.load(keeper.path))
        self._factors = keeper.factors or (state.U, state.V)
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
        """The k best items of each user.

        Parameters
        ----------
        users : external ids; None for all users who have interactions in the training data
        k : items for each
        exclude_seen : leave out the items of the user's own interactions
        only, without : external ids of items to choose from, and to leave out
        unknown : what to do about users who have no interactions in the training data: `error`, `skip` them with a
            warning, or give them the most `popular` items, whose score is null

        Returns
        -------
        frame with columns user, rank (1 is best), item, score; fewer than k rows where fewer items remain
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
        """The k best items of persons who were not in the training data, from the items they liked.

        Parameters not listed here, and the result, are those of `recommend`.

        Parameters
        ----------
        histories : mapping of a person to item ids, list of lists of them (the persons are 0, 1, ...), or frame with
            columns user, item
        exclude_seen : leave out the items of the person's own history
        unknown : what to do about items the model does not know: `error`, or do without them; persons of whose items
            it knows none are then left out (`skip`) or given the most `popular` items, whose score is null

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
        """As `recommend`, or with `histories` as `recommend_from`, in frames of some thousand persons each.

        Memory does not grow with the number of persons. Arguments are checked before the first frame is asked for.
        """
        check_k("recommend", k)
        data, (U, V), (ops, device) = self.interactions, self._fitted(), self.backend()
        if histories is not None:
            if users is not None:
                raise InputError("recommend_blocks: give users or histories, not both")
            persons, matrix = encode_histories(histories, data, unknown)
            rows, modelled = np.arange(len(persons)), matrix.degrees() > 0
        else:
            persons, rows = find_users(users, data, unknown)
            matrix, modelled = data.train, rows >= 0

        def ask(part: NDArray[np.int64]) -> tuple[Tensor, CSR]:
            seen = matrix.take(rows[part])
            vectors = (
                U[torch.from_numpy(rows[part]).to(device)] if histories is None else fold_in(V, seen, self.config, ops)
            )
            return vectors, seen

        candidates = Candidates(data, V, only, without)
        return top_lists(ops, persons, modelled, ask, candidates, k, self.config.score, exclude_seen)

    def fold_in(self, histories: Histories) -> Tensor:
        """Vectors of persons who were not in the training data, float32 [B, d], from the items they liked.

        The item factors stay, and the vectors are fitted by the objective of training, see
        `drm_triton.ranking.fold_in`. The same items give the same vector, to the bit, in any order and any batch.

        Parameters
        ----------
        histories : as in `recommend_from`; none may be empty
        """
        _, matrix = encode_histories(histories, self.interactions)
        return fold_in(self.item_factors, matrix, self.config, self.backend()[0])

    def similar_items(self, items: Ids, k: int = 10) -> pl.DataFrame:
        """The k items most similar to each of some items, never the item itself.

        Similarity is what the score of the model leaves when one of its sides is taken for the other: the cosine of
        the factors under `dot`, where length says how popular an item is, and -||v - w||^2 under `l2`.

        Returns
        -------
        frame with columns item, rank (1 is the most similar), similar, score
        """
        data, ops = self.interactions, self.backend()[0]
        return similar(ops, "item", data.encode_items(items), data.item_ids, self.item_factors, k, self.config.score)

    def similar_users(self, users: Ids, k: int = 10) -> pl.DataFrame:
        """The k users most similar to each of some users: as `similar_items`, the first column being user."""
        data, ops = self.interactions, self.backend()[0]
        codes = data.encode_users(users)
        learnt = data.train.degrees() > 0  # the vectors of other users are where they began: they resemble by chance
        if not learnt[codes].all():
            raise InputError(f"{without_interactions(data.user_ids[codes[~learnt[codes]]])}; ask for other users")
        place = np.cumsum(learnt, dtype=np.int32) - 1  # of a user among those
        factors = self.user_factors[torch.from_numpy(learnt).to(self.user_factors.device)]
        return similar(ops, "user", place[codes], data.user_ids.filter(learnt), factors, k, self.config.score)

    def evaluate(self, held_out: CSR, seen: CSR | None = None, ks: Sequence[int] = (10, 50)) -> Evaluation:
        """Compare rankings with held-out interactions; `seen` (by default those it was fit on) are excluded."""
        ops, _ = self.backend()
        ranker = factor_ranker(ops, *self._fitted(), self.config.score)
        return evaluate(ranker, self.interactions.train if seen is None else seen, held_out, ks)

    # -- files ---------------------------------------------------------------------------------------------------

    def save(self, path: str | Path, overwrite: bool = False) -> None:
        """Write the model to a directory, atomically. docs/formats.md describes the files.

        Parameters
        ----------
        path : the directory
        overwrite : replace a saved model
        """
        U, V = self._fitted()
        _check_finite(U, V, "this DRM")
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
        _check_finite(U, V, str(place))
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


def _check_finite(U: Tensor, V: Tensor, where: str) -> None:
    if not (torch.isfinite(U).all() and torch.isfinite(V).all()):
        raise InputError(f"{where}: the factors are not finite; train again with a lower `lr` or a higher `tau`")


class _Best:
    """Callback that keeps the factors of the best epoch in memory, for a training without a run directory."""

    factors: tuple[Tensor, Tensor] | None = None

    def __call__(self, end: EpochEnd) -> None:
        if end.state.best is not None and end.improved:
            self.factors = end.state.U.clone(), end.state.V.clone()
