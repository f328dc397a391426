"""`Recommender`: what all models have in common. Fit, recommend, measure, save and load.

There are two kinds of fitted models. A `FactorRecommender` has a vector for each user and each item. An
`ItemRecommender` has weights between items, and its users are their interactions. Both answer through an index
(`ranking.topk`, `ranking.item_index`), which finds the best items for the queries of users.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray
from torch import Tensor

from drm_triton import atomic
from drm_triton.base_config import Config
from drm_triton.data.conditions import Condition
from drm_triton.data.csr import CSR
from drm_triton.data.dataset import Dataset
from drm_triton.data.frames import is_pandas, to_pandas
from drm_triton.data.ids import named
from drm_triton.data.unite import united
from drm_triton.errors import DrmError, InputError
from drm_triton.kernels import use_backend
from drm_triton.kernels.devices import to_device
from drm_triton.kernels.protocol import Backend
from drm_triton.names import CUT_OFFS, MIN_TRAIN, Score, Unknown
from drm_triton.options import ALIASES
from drm_triton.progress import Reporter
from drm_triton.ranking.cold import Vectors, flag_cold, with_cold_rows
from drm_triton.ranking.evaluate import Evaluation, Ranker, evaluate
from drm_triton.ranking.item_index import ROWS, ItemIndex, ItemWeights
from drm_triton.ranking.known_first import Index, known_first
from drm_triton.ranking.per_user import PerUser, is_per_user
from drm_triton.ranking.recommend import (
    Queries,
    candidate_items,
    check_k,
    describe_users_without_interactions,
    encode_histories,
    known_users,
    new_users,
    recommendation_frames,
    similar_frame,
)
from drm_triton.ranking.rules import Rules
from drm_triton.ranking.topk import QUERIES_PER_BLOCK, TopKIndex, similarity_vectors
from drm_triton.training import checkpoint
from drm_triton.training.display import Display, announced_compilation
from drm_triton.training.loop import can_validate, interactions_to_fit
from drm_triton.training.run import Run, Stored, checkpoint_directory, interactions_only
from drm_triton.training.state import BatchCallback, EpochCallback, EpochEnd, Progress
from drm_triton.training.warm_start import Known, WarmStart, update_epochs, warn_of_leaks

Ids = Sequence[Any] | pl.Series | NDArray[Any]  # external ids
Histories = Mapping[Any, Ids] | Sequence[Ids] | pl.DataFrame  # the items of each new user
ItemChoice = Ids | Mapping[Any, Ids] | pl.DataFrame  # items for all users, or for each user
Where = Condition | Iterable[Condition]  # conditions on the attributes of items
Interactions = Any  # a Dataset, a polars or pandas frame, or a scipy sparse matrix
Tensors = dict[str, Tensor]

FINITE_BLOCK = 1 << 20  # numbers that are checked at once

C = TypeVar("C", bound=Config)
R = TypeVar("R", bound="Recommender[Any]")


class NotFittedError(DrmError):
    """The model has learned nothing yet."""


class Recommender(ABC, Generic[C]):
    """A model for top-K recommendation. Subclasses define how it is trained and what a query is."""

    Config: ClassVar[type[Config]]
    deterministic: ClassVar[bool] = False  # whether the seed has no effect
    optimiser_state: ClassVar[bool] = False  # whether training keeps Adagrad's sums

    def __init__(self, config: C) -> None:
        self.config = config
        self._tensors: Tensors | None = None  # what was learned
        self._interactions: Dataset | None = None
        self._epoch: int | None = None
        self._pandas = False  # whether it was fitted on a pandas frame
        self._place: Path | None = None  # the directory that the model was loaded from

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self.config.changed().items())
        return f"{type(self).__name__}({options})"

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Return the options by name, as estimators of scikit-learn do. `deep` has no effect."""
        return {name: getattr(self.config, name) for name in self.config.fields()}

    def set_params(self: R, **options: Any) -> R:
        """Change options, as estimators of scikit-learn do. What was learned stays until the next `fit`."""
        self.config.check_names(options)
        by_name = {ALIASES.get(name, name): value for name, value in options.items()}
        self.config = dataclasses.replace(self.config, **by_name)
        return self

    # -- what a kind of model defines ----------------------------------------------------------------------------

    @abstractmethod
    def train(
        self,
        stored: Stored | None,
        dataset: Dataset,
        fit: CSR,
        callbacks: Sequence[EpochCallback],
        on_batch: BatchCallback | None,
        reporter: Reporter,
    ) -> Progress:
        """Train, from the beginning or from a stored checkpoint, and return the final state."""

    @abstractmethod
    def index(self, candidates: NDArray[np.int64] | None = None) -> Index:
        """Return an index of all items, or of some candidates, given by ascending codes."""

    @abstractmethod
    def queries(self, users: NDArray[np.int64]) -> Queries:
        """Return the queries of users of the training data, given by their codes [m]."""

    @abstractmethod
    def queries_of_owners(self, users: NDArray[np.int64], owned: CSR) -> Queries:
        """Return the queries of users of the data set, given by their codes [m] and all their items, CSR [m, N].

        It differs from `queries` for users all of whose interactions were held out of the training. The model has
        learned nothing about them, so they are treated as new users who liked these items.
        """

    @abstractmethod
    def new_queries(self, liked: CSR) -> Queries:
        """Return the queries of new users from the items they liked, CSR [m, N]."""

    @abstractmethod
    def pair_scores(self, queries: Queries, items: NDArray[np.int32]) -> NDArray[np.float32]:
        """Return the score of items[r] for query r: float32 [m]."""

    @abstractmethod
    def similarity(self, items: NDArray[np.int32]) -> tuple[Index, Queries]:
        """Return an index of all items whose scores are similarities, and its queries for some items."""

    def diversity_factors(self) -> NDArray[np.float32]:
        """Return the item factors whose cosine is the similarity of items in a list: float32 [N, d]."""
        raise InputError(
            f"`diversity` compares the factors of items, which {type(self).__name__} does not have; use `at_most` with "
            "an attribute of the items, or a model with factors"
        )

    @abstractmethod
    def memory_estimate(self, dataset: Dataset) -> dict[str, int]:
        """Return the bytes that training holds, by purpose."""

    def updated_state(self, old: Tensors, known: Known, fit: CSR) -> Progress | None:
        """Return the state before the first epoch of an update, or None if the model has to be trained anew.

        Parameters
        ----------
        old : what this model has learned, with the state of the optimiser if it is known
        known : which users and items this model knows
        fit : the interactions to train on
        """
        return None

    def learned(self, tensors: Tensors) -> Tensors:
        """Return what a fitted model needs of the tensors of a training state."""
        return tensors

    def placed(self, tensors: Tensors) -> Tensors:
        """Return what was learned on the device where the model needs it."""
        return tensors

    def warm_up(self) -> None:
        """Compile the kernels that training uses."""

    def check_fit(self, dataset: Dataset, fit: CSR) -> None:
        """Raise or warn before training if options and data do not go together."""

    # -- training ------------------------------------------------------------------------------------------------

    def fit(
        self: R,
        dataset: Interactions,
        callbacks: Iterable[EpochCallback] = (),
        run: str | Path | None = None,
        resume: bool = False,
        on_batch: BatchCallback | None = None,
        reporter: Reporter | None = None,
        progress: bool | None = None,
        overwrite: bool = False,
    ) -> R:
        """Train on a data set, or on all interactions of a table or a matrix.

        Parameters
        ----------
        dataset : Dataset, polars or pandas DataFrame, or scipy sparse matrix
            Of a `Dataset`, the model learns from the part that the option `fit_on` names. Of a table, it learns from
            all rows; `Dataset.from_frame` recognises the columns. Of a matrix [users, items], it learns from all stored
            entries, and ids are row and column numbers.
        callbacks : called with an `EpochEnd` after each epoch; a callback that returns True ends the training
        run : directory for the configuration, metrics and checkpoints; None writes nothing
        resume : continue the training in `run` from its last checkpoint
        on_batch : called with (state, lists in an epoch) after each step; returning True ends the training
        reporter : shows the progress, in place of the one that `progress` chooses
        progress : show the epochs in a table; None shows them on a terminal and in a notebook
        overwrite : replace the run that is in `run`

        Returns
        -------
        this model, as after the best epoch on the validation part, or after the last epoch without validation
        """
        if resume and run is None:
            raise InputError(f"{type(self).__name__}.fit: `resume` needs `run`, the directory of the run to continue")
        self._pandas = is_pandas(dataset)
        dataset = Dataset.of(dataset, weighted=self.config.weighted)
        return self._fit(dataset, None, callbacks, run, resume, on_batch, reporter, progress, overwrite)

    def partial_fit(
        self: R,
        interactions: Interactions,
        epochs: int | None = None,
        callbacks: Iterable[EpochCallback] = (),
        run: str | Path | None = None,
        on_batch: BatchCallback | None = None,
        reporter: Reporter | None = None,
        progress: bool | None = None,
        overwrite: bool = False,
    ) -> R:
        """Update this model with new interactions, users and items: train on from what it has learned.

        Known users and items start from their vectors, new ones are folded in, and a few epochs on all interactions
        follow; docs/updating.md has the details. A model without vectors of users and items is trained anew.

        Parameters
        ----------
        interactions : Dataset, polars or pandas DataFrame, or scipy sparse matrix
            Of a `Dataset`, which holds old and new interactions, the model learns from the part that `fit_on` names.
            Its codes may differ from those of the model. A table or a matrix has new interactions only. They join those
            that the model keeps, and the model learns from all of them, also from those that were held out.
        epochs : int, optional
            Number of epochs, at most those of the training. They count as the last ones of the training. Default: 15 %
            of the training.
        callbacks, run, on_batch, reporter, progress, overwrite : see `fit`
            `fit` with `resume` also resumes the run of an update.

        Examples
        --------
        >>> from drm_triton import DRM
        >>> frame = pl.DataFrame({"user": ["ann", "ann", "bob", "bob", "cy"], "item": ["x", "y", "x", "y", "x"]})
        >>> model = DRM(factors=4, epochs=3).fit(frame)
        >>> model = model.partial_fit(pl.DataFrame({"user": ["dora", "ann"], "item": ["x", "z"]}))
        >>> model.recommend(["dora"], k=1)["item"].to_list()
        ['y']
        """
        if not isinstance(interactions, Dataset):
            if self.config.weighted:
                raise InputError(
                    f"{type(self).__name__}.partial_fit: a model keeps no weights of interactions; give a Dataset with "
                    "the old and the new interactions"
                )
            interactions = united(self.interactions, Dataset.of(interactions))
        n_epochs = update_epochs(self.config, epochs)
        return self._fit(interactions, n_epochs, callbacks, run, False, on_batch, reporter, progress, overwrite)

    def _fit(
        self: R,
        dataset: Dataset,
        update: int | None,
        callbacks: Iterable[EpochCallback],
        run: str | Path | None,
        resume: bool,
        on_batch: BatchCallback | None,
        reporter: Reporter | None,
        progress: bool | None,
        overwrite: bool,
    ) -> R:
        """Train; `update` is the number of epochs if the training starts from what this model has learned."""
        self.backend()  # first: a backend that cannot be used leaves no run directory behind
        fit = interactions_to_fit(dataset, self.config)
        self.check_fit(dataset, fit)
        reporter = reporter or Reporter.wanted(progress)
        keeper: Run | _Best
        start = None if update is None else self._warm_start(dataset, fit, update, reporter)
        stored = None if start is None or start.state is None else (start.state.tensors(), start.state.counters())
        if run is None:
            keeper = _Best(self.learned)
        elif resume:
            keeper, stored = Run.open(run, dataset, self.config)
        else:
            keeper = Run.create(run, self.config, dataset, fit, overwrite, start)
        display = Display(reporter, self.config, can_validate(self.config, dataset))
        with keeper.lock if isinstance(keeper, Run) else nullcontext():
            with display, announced_compilation(reporter):
                followers = [display.epoch_end, *callbacks, keeper]
                state = self.train(stored, dataset, fit, followers, display.batches(on_batch), reporter)
            if isinstance(keeper, Run):
                if state.position:  # stopped within an epoch
                    keeper.save(state)
                keeper.draw_curves()
                return self._become(type(self).load(keeper.path))
        self._tensors = self.placed(keeper.tensors or self.learned(state.tensors()))
        self._epoch, self._place = keeper.epoch or state.epoch, None
        self._interactions = interactions_only(dataset, fit, self.config.fit_parts)
        return self

    def _warm_start(self, dataset: Dataset, fit: CSR, epochs: int, reporter: Reporter) -> WarmStart:
        """Return where an update of this model begins."""
        tensors, width = self._training_tensors(), getattr(self.config, "factors", None)
        if width is not None and "user_factors" in tensors and tensors["user_factors"].shape[1] != width:
            raise InputError(
                f"an update cannot change `factors`: the model has {tensors['user_factors'].shape[1]}, not {width}; "
                "fit a new model"
            )
        known = Known.of(self.interactions, dataset)
        warn_of_leaks(self.interactions, dataset, known, self.config.fit_parts)
        kept = tensors.keys() > self.tensors.keys()
        origin = {"path": None if self._place is None else str(self._place.absolute()), **known.described()}
        state = self.updated_state(tensors, known, fit)
        if state is None:
            reporter.line(f"{self.config.model} has no vectors to start from: it is trained anew")
            return WarmStart(None, {**origin, "start": "anew"})
        state.first_epoch = state.epoch = self.config.last_epoch - epochs
        if not kept and self.optimiser_state:
            reporter.line("the model has no Adagrad sums (a saved model has none): they start as in a new training")
        return WarmStart(state, {**origin, "start": "factors and Adagrad sums" if kept else "factors"})

    def _training_tensors(self) -> Tensors:
        """Return what was learned, with the state of the optimiser if the checkpoint of this model is still there."""
        if self._place is not None and (self._place / checkpoint.FILE).exists():
            stored, _ = checkpoint.read_tensors(self._place / checkpoint.FILE)
            if all(name in stored and torch.equal(stored[name], own.cpu()) for name, own in self.tensors.items()):
                return stored
        return self.tensors

    def refit(
        self: R,
        dataset: Dataset | None = None,
        callbacks: Iterable[EpochCallback] = (),
        run: str | Path | None = None,
        on_batch: BatchCallback | None = None,
        reporter: Reporter | None = None,
        progress: bool | None = None,
        overwrite: bool = False,
    ) -> R:
        """Return the final model: the same options and the same number of epochs, trained on all interactions.

        The number of epochs is that after which this model was the best on the validation part.

        Parameters
        ----------
        dataset : Dataset, optional
            The data set that this model was trained on. Default: the interactions that the model keeps, which have no
            weights.
        callbacks, run, on_batch, reporter, progress, overwrite : see `fit`

        Examples
        --------
        >>> from drm_triton import DRM
        >>> frame = pl.DataFrame([(u, u + n) for u in range(6) for n in range(9)], ["user", "item"], orient="row")
        >>> data = Dataset.from_frame(frame)
        >>> final = DRM(factors=4, epochs=3).fit(data).refit()
        >>> data.train.nnz, final.interactions.train.nnz
        (38, 54)
        """
        kept = self.interactions
        if dataset is None:
            if self.config.weighted:
                raise InputError(
                    f"{type(self).__name__}.refit: a model keeps no weights of interactions; give the data set that it "
                    "was trained on as `dataset`"
                )
            dataset = interactions_only(kept, kept.train)  # a copy: it has no path
        elif not self.was_fit_on(dataset):
            raise InputError(f"{type(self).__name__}.refit: the model was not trained on this `dataset`")
        return self.untrained_final().fit(dataset, callbacks, run, False, on_batch, reporter, progress, overwrite)

    def untrained_final(self: R) -> R:
        """Return the model that `refit` trains, untrained."""
        if self.config.fit_on == "all":
            raise InputError(f"{type(self).__name__}.refit: the model has learned from all interactions already")
        return type(self)(self.config.on_all_interactions(self._epoch))

    def backend(self) -> tuple[Backend, torch.device]:
        """Return the backend and the device of the configuration, with its number of threads set."""
        return use_backend(self.config.backend, self.config.threads)

    # -- the fitted model ----------------------------------------------------------------------------------------

    @property
    def tensors(self) -> Tensors:
        """What the model has learned, by the names in its file."""
        if self._tensors is None:
            raise NotFittedError(f"this {type(self).__name__} has learned nothing yet: call fit or load first")
        return self._tensors

    @property
    def interactions(self) -> Dataset:
        """The interactions that the model was fitted on, as the `train` part, those held out, and the external ids."""
        assert self.tensors is not None
        assert self._interactions is not None
        return self._interactions

    @property
    def cold_items(self) -> NDArray[np.bool_]:
        """Which items have no training interactions, but a vector predicted from their attributes: bool [N]."""
        return np.zeros(self.interactions.n_items, dtype=bool)

    @property
    def cold_users(self) -> NDArray[np.bool_]:
        """Which users have no training interactions, but a vector predicted from their attributes: bool [M]."""
        return np.zeros(self.interactions.n_users, dtype=bool)

    def known_items(self) -> NDArray[np.bool_]:
        """Return which items have training interactions or are cold items. Others come last in all rankings."""
        return (self.interactions.train.popularity() > 0) | self.cold_items

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
        only: ItemChoice | None = None,
        without: ItemChoice | None = None,
        unknown: Unknown = "error",
        where: Where | None = None,
        at_most: Mapping[str, int] | None = None,
        diversity: float = 0.0,
    ) -> pl.DataFrame:
        """Return the k best items for each user.

        Parameters
        ----------
        users : sequence of ids, optional
            Users to recommend to. Default: all users with interactions, and cold users.
        k : int, default 10
            Number of items per user.
        exclude_seen : bool, default True
            Leave out items that the user has, also those that were held out of the training.
        only : sequence of ids, mapping or frame, optional
            Items to choose from. Default: all items. A mapping from user to item ids, or a frame with columns user and
            item, gives each user items to choose from; a user who is not in it gets none.
        without : sequence of ids, mapping or frame, optional
            Items to leave out, for all users or, as for `only`, for each user.
        unknown : {"error", "skip", "popular"}, default "error"
            Handling of users without interactions: raise an error, skip them with a warning, or recommend the most
            popular items to them, with score null.
        where : str or polars.Expr, or several of them, optional
            Conditions on the attributes of items, all of which must hold: "price<=20", "genre=Drama", "in_stock". An
            item without a value does not satisfy a condition on it.
        at_most : mapping from attribute to int, optional
            The most items of a list with the same value of an attribute, or with the same tag: {"genre": 2}.
        diversity : float, default 0
            Weight of diversity, from 0 to below 1: re-rank the best 10 k items by maximal marginal relevance. The
            scores stay those of the model, so they do not fall with the rank.

        Returns
        -------
        polars.DataFrame
            Columns user, rank (1 is best), item, score. A user has fewer than k rows if fewer items remain. If the
            model has cold items or users, column cold is true where the item or the user has no interactions, so that
            the score is predicted from attributes. Items without training interactions that are not cold come last. It
            is a pandas frame if the model was fitted on one, or if `users` is a pandas object.
        """
        rules = (only, without, unknown, where, at_most, diversity)
        return self._as_given(pl.concat(self.recommend_blocks(users, None, k, exclude_seen, *rules)), users)

    def recommend_from(
        self,
        histories: Histories,
        k: int = 10,
        exclude_seen: bool = True,
        only: ItemChoice | None = None,
        without: ItemChoice | None = None,
        unknown: Unknown = "error",
        where: Where | None = None,
        at_most: Mapping[str, int] | None = None,
        diversity: float = 0.0,
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
        >>> from drm_triton import DRM
        >>> frame = pl.DataFrame({"user": ["ann", "ann", "bob", "bob", "cy"], "item": ["x", "y", "x", "y", "z"]})
        >>> model = DRM(factors=4, epochs=3).fit(Dataset.from_frame(frame, ratios=(1, 0, 0)))
        >>> model.recommend_from({"dora": ["x"]}, k=1).select("user", "item").rows()
        [('dora', 'y')]
        """
        rules = (only, without, unknown, where, at_most, diversity)
        return self._as_given(pl.concat(self.recommend_blocks(None, histories, k, exclude_seen, *rules)), histories)

    def recommend_blocks(
        self,
        users: Ids | None = None,
        histories: Histories | None = None,
        k: int = 10,
        exclude_seen: bool = True,
        only: ItemChoice | None = None,
        without: ItemChoice | None = None,
        unknown: Unknown = "error",
        where: Where | None = None,
        at_most: Mapping[str, int] | None = None,
        diversity: float = 0.0,
    ) -> Iterator[pl.DataFrame]:
        """Yield the result of `recommend`, or of `recommend_from` if `histories` are given, in blocks of users.

        Each frame holds a few thousand users, so memory does not grow with their number. The arguments are checked
        before the first frame is requested.
        """
        check_k("recommend", k)
        if users is not None and histories is not None:
            raise InputError("recommend_blocks: give `users` or `histories`, not both")
        data = self.interactions
        if histories is None:
            targets = known_users(users, data, self.queries_of_owners, unknown, self.cold_users)
        else:
            targets = new_users(histories, data, self.new_queries, unknown)
        rules = Rules.of(where, at_most, diversity)
        per_user = PerUser.of_users(targets.ids, data, only, without)
        only, without = (None if is_per_user(items) else items for items in (only, without))
        candidates = candidate_items(data, only, without, rules.where)
        index = self._obeying(rules, candidates if per_user is None else per_user.among(candidates))
        frames = recommendation_frames(targets, index, data, k, exclude_seen, per_user)
        new = histories is not None  # their ids are no ids of the data set
        cold_users = data.user_ids.clear() if new else data.user_ids.filter(self.cold_users)
        cold = {"item": data.item_ids.filter(self.cold_items), "user": cold_users}
        return (flag_cold(frame, cold) for frame in frames)

    def ruled_index(self, rules: Rules) -> Index:
        """Return an index whose searches obey rules. `ranking.recommend.popular_index` does the same by popularity."""
        return self._obeying(rules, candidate_items(self.interactions, where=rules.where))

    def _obeying(self, rules: Rules, candidates: NDArray[np.int64] | None) -> Index:
        return rules.applied(self.index(candidates), self.interactions.items, self.diversity_factors)

    def similar_items(self, items: Ids, k: int = 10) -> pl.DataFrame:
        """Return the k items most similar to each given item, never the item itself.

        The similarity of items v and w is the cosine of their factors if the score is `cosine` or `dot`, and
        -||v - w||^2 if it is `l2`. The cosine ignores the length of a factor, which reflects popularity under `dot`. In
        an item-item model, it is the weight from v to w.

        Parameters
        ----------
        items : sequence of ids
            Items to find similar items for.
        k : int, default 10
            Number of similar items for each.

        Returns
        -------
        polars.DataFrame
            Columns item, rank (1 is the most similar), similar, score, and cold as in `recommend`.
        """
        data = self.interactions
        codes = data.encode_items(items)
        unknown = codes[~self.known_items()[codes]]
        if len(unknown):
            raise InputError(
                f"{named(data.item_ids[unknown])}: no interactions in the training data, and no attributes that this "
                "model could use instead, so it cannot compare the item; give other items"
            )
        index, queries = self.similarity(codes)
        frame = similar_frame("item", codes, data.item_ids, index, queries, k)
        cold = data.item_ids.filter(self.cold_items)
        return self._as_given(flag_cold(frame, {"item": cold, "similar": cold}), items)

    def ranker(self) -> Ranker:
        """Return the function that ranks all items for users of the training data."""
        index = self.index()

        def rank(users: NDArray[np.int64], seen: CSR, k: int) -> NDArray[np.int32]:
            return index.search(self.queries(users), k, seen)[0]

        return rank

    def score(self, users: Ids, items: Ids) -> NDArray[np.float32]:
        """Return the scores of pairs of a user and an item: float32 [n]. `recommend` ranks by the same scores.

        Parameters
        ----------
        users : sequence of ids [n]
        items : sequence of ids [n]

        Examples
        --------
        >>> from drm_triton import DRM
        >>> frame = pl.DataFrame({"user": ["ann", "ann", "bob", "bob", "cy"], "item": ["x", "y", "x", "y", "x"]})
        >>> model = DRM(factors=4, epochs=3).fit(frame)
        >>> best = model.recommend(["cy"], k=1)
        >>> bool(abs(model.score(["cy"], best["item"])[0] - best["score"][0]) < 1e-6)
        True
        """
        data = self.interactions
        rows, columns = data.encode_users(users).astype(np.int64), data.encode_items(items)
        if len(rows) != len(columns):
            raise InputError(f"score: {len(rows):,} users but {len(columns):,} items; give one item for each user")
        empty = (data.owned.degrees()[rows] == 0) & ~self.cold_users[rows]
        if empty.any():
            reason = describe_users_without_interactions(data.user_ids[rows[empty]], "the data set")
            raise InputError(f"{reason}, so nothing is known about their taste; leave them out")
        found = [np.zeros(0, np.float32)]
        for start in range(0, len(rows), QUERIES_PER_BLOCK):
            block = slice(start, start + QUERIES_PER_BLOCK)
            queries = self.queries_of_owners(rows[block], data.owned.take(rows[block]))
            found.append(self.pair_scores(queries, columns[block]))
        return np.concatenate(found)

    def held_out(self, dataset: Dataset, on: str = "test") -> tuple[CSR, CSR]:
        """Return what a part of the data set may be measured with: the items seen before it, and its items.

        Refuse a data set that the model was not trained on, and a part that it was trained on.

        Parameters
        ----------
        dataset : the data set that the model was trained on
        on : "valid" or "test"
        """
        if on not in ("valid", "test"):
            raise InputError(f"`on` must be valid or test, got {on!r}")
        if not self.was_fit_on(dataset):
            raise InputError(
                f"the model was not trained on {dataset.path or 'this data set'}; give the data set of the training in "
                "`dataset`"
            )
        if on in self.config.fit_parts:
            raise InputError(f"the model was fitted on {self.config.fit_on}, so it cannot be measured on {on}")
        seen = dataset.train.union(dataset.valid) if on == "test" else dataset.train
        return seen, getattr(dataset, on)

    def evaluate(
        self,
        held_out: CSR | Dataset,
        seen: CSR | None = None,
        ks: Sequence[int] = CUT_OFFS,
        min_train: int = MIN_TRAIN,
        beyond_accuracy: bool = False,
        on: str = "test",
    ) -> Evaluation:
        """Rank all unseen items for each user and compare the ranking with held-out interactions.

        Parameters
        ----------
        held_out : CSR [M, N] or Dataset
            Relevant items of each user, for example `dataset.test`. Or the data set that the model was trained on; then
            `on` names its part, and the items before that part are excluded from the ranking.
        seen : CSR [M, N], optional
            Items to exclude from the ranking. Default: the interactions that the model was fitted on.
        ks : sequence of int, default (10, 50)
            Cut-offs.
        min_train : int, default 5
            Users with fewer interactions in `seen` are left out.
        beyond_accuracy : bool, default False
            Also compute novelty, diversity, exposure and other metrics beyond accuracy; docs/metrics.md defines them.
        on : {"valid", "test"}, default "test"
            Part of a data set to measure on.
        """
        if isinstance(held_out, Dataset):
            if seen is not None:
                raise InputError("evaluate: give a data set or `seen`, not both")
            seen, held_out = self.held_out(held_out, on)
        seen = self.interactions.train if seen is None else seen
        return evaluate(self.ranker(), seen, held_out, ks, min_train, beyond_accuracy=beyond_accuracy)

    # -- files ---------------------------------------------------------------------------------------------------

    def save(self, path: str | Path, overwrite: bool = False) -> None:
        """Write the model to a directory, atomically. docs/formats.md describes the files.

        Parameters
        ----------
        path : the directory
        overwrite : replace a saved model
        """
        self._check_finite(f"this {type(self).__name__}")
        with atomic.directory(Path(path), overwrite, marker=checkpoint.FILE) as folder:
            # Save a copy: `Dataset.save` records where a data set is stored, and this folder is temporary.
            interactions_only(self.interactions, self.interactions.train).save(folder / "data")
            metadata = {"model": self.config.model, "config": self.config.resolved().to_dict()}
            if self._epoch is not None:
                metadata["training"] = {"epoch": self._epoch}
            checkpoint.write_tensors(folder / checkpoint.FILE, self.tensors, metadata)

    @classmethod
    def load(cls: type[R], path: str | Path) -> R:
        """Load a saved model, or the best checkpoint of a run."""
        place = checkpoint_directory(path)
        tensors, metadata = checkpoint.read_tensors(place / checkpoint.FILE)
        stored = metadata.get("model", "drm")
        if stored != cls.Config.model:
            raise InputError(f"{place} holds a model of the kind {stored}; load it with drm_triton.models.load")
        model = cls(cls.stored_config(metadata["config"], str(place)))
        model._interactions = Dataset.load(place / "data")
        model._epoch, model._place = metadata.get("training", {}).get("epoch") or None, place
        try:
            model._tensors = model.placed(model.learned(tensors))
            model._check_sizes(str(place))
        except (KeyError, IndexError, TypeError, AttributeError, RuntimeError) as error:
            raise InputError(f"{place}: the tensors are not those of the model {stored} ({error})") from error
        model._check_finite(str(place))
        return model

    @classmethod
    def stored_config(cls, values: dict[str, Any], where: str) -> Any:
        """Return the configuration that a model file holds."""
        return cls.Config.from_mapping(values, where=where)

    # -- internal ------------------------------------------------------------------------------------------------

    def _as_given(self, frame: pl.DataFrame, argument: object) -> pl.DataFrame:
        """Return a result as a pandas frame if the caller uses pandas."""
        if self._pandas or is_pandas(argument):
            converted: Any = to_pandas(frame)
            return converted  # type: ignore[no-any-return]  # the annotation serves those who use polars
        return frame

    def _check_sizes(self, where: str) -> None:
        """Raise if the tensors do not have the numbers of users and items of the interactions."""

    def _check_finite(self, where: str) -> None:
        if not all_finite(self.tensors):
            raise InputError(f"{where}: the factors are not finite; train again with {self.remedy()}")

    def remedy(self) -> str:
        """Return what to change if the training diverges."""
        return "other options"

    def _become(self: R, other: R) -> R:
        self._tensors, self._interactions = other._tensors, other._interactions
        self._epoch, self._place = other._epoch, other._place
        return self


def all_finite(tensors: Tensors) -> bool:
    """Return whether all numbers are finite. It needs little memory besides the tensors."""
    parts = (part for tensor in tensors.values() for part in tensor.reshape(-1).split(FINITE_BLOCK))
    return all(bool(torch.isfinite(part).all()) for part in parts)


class FactorRecommender(Recommender[C]):
    """A model with a vector for each user and each item."""

    _vectors: tuple[Tensors, Vectors] | None = None  # what was learned, and the vectors that it gives

    @abstractmethod
    def factors(self, tensors: Tensors) -> tuple[Tensor, Tensor]:
        """Return the vectors whose score ranks, of users [M, d] and of items [N, d], both float32."""

    @abstractmethod
    def fold_in_items(self, liked: CSR) -> Tensor:
        """Return the vectors of new users from the codes of the items they liked, CSR [B, N]: float32 [B, d]."""

    @property
    def score_name(self) -> Score:
        """The score of the vectors."""
        return "dot"

    @property
    def vectors(self) -> Vectors:
        """The vectors that rank, on the device of the backend. Those of cold users and items are predicted."""
        if self._vectors is None or self._vectors[0] is not self.tensors:
            device = self.backend()[1]
            U, V = (table.to(device) for table in self.factors(self.tensors))
            self._vectors = self.tensors, with_cold_rows(U, V, self.interactions, self.score_name)
        return self._vectors[1]

    @property
    def user_factors(self) -> Tensor:
        """User factors U, float32 [M, d]."""
        return self.vectors.users

    @property
    def item_factors(self) -> Tensor:
        """Item factors V, float32 [N, d]."""
        return self.vectors.items

    @property
    def cold_items(self) -> NDArray[np.bool_]:
        """Which items have no training interactions, but a vector predicted from their attributes: bool [N]."""
        return self.vectors.cold_items

    @property
    def cold_users(self) -> NDArray[np.bool_]:
        """Which users have no training interactions, but a vector predicted from their attributes: bool [M]."""
        return self.vectors.cold_users

    def index(self, candidates: NDArray[np.int64] | None = None) -> Index:
        """Return an index of all items, or of some candidates, given by ascending codes."""
        make = partial(TopKIndex, self.backend()[0], self.item_factors, self.score_name)
        return known_first(make, self.known_items(), candidates)

    def queries(self, users: NDArray[np.int64]) -> Tensor:
        """Return the vectors of users of the training data, given by their codes [m]: float32 [m, d]."""
        U = self.user_factors
        return U[to_device(torch.from_numpy(users), U.device)]

    def queries_of_owners(self, users: NDArray[np.int64], owned: CSR) -> Tensor:
        """Return the vectors of users of the data set, folded in if the model has learned nothing about them."""
        queries = self.queries(users)
        new = np.flatnonzero((self.interactions.train.degrees()[users] == 0) & (owned.degrees() > 0))
        if len(new):
            queries[to_device(torch.from_numpy(new), queries.device)] = self.new_queries(owned.take(new))
        return queries

    def new_queries(self, liked: CSR) -> Tensor:
        """Return the vectors of new users from the items they liked, CSR [m, N]: float32 [m, d]."""
        return self.fold_in_items(liked)

    def pair_scores(self, queries: Tensor, items: NDArray[np.int32]) -> NDArray[np.float32]:
        """Return the score of items[r] for the vector queries[r]: float32 [m]."""
        V = self.item_factors
        vectors = V[to_device(torch.from_numpy(items.astype(np.int64)), V.device)]
        if self.score_name == "l2":
            return -(queries - vectors).square().sum(1).cpu().numpy()
        return (queries * vectors).sum(1).cpu().numpy()

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
        return self.fold_in_items(liked)

    def similarity(self, items: NDArray[np.int32]) -> tuple[TopKIndex, Tensor]:
        """Return an index of all items whose scores are similarities, and its queries for some items."""
        known = self.known_items()
        return self._similarity(self.item_factors, items, None if known.all() else np.flatnonzero(known))

    def diversity_factors(self) -> NDArray[np.float32]:
        """Return the item factors: float32 [N, d]."""
        return self.item_factors.detach().cpu().numpy()

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
        data = self.interactions
        codes = data.encode_users(users)
        trained = data.train.degrees() > 0
        if not trained[codes].all():
            users = data.user_ids[codes[~trained[codes]]]
            reason = describe_users_without_interactions(users, "the training data")
            raise InputError(f"{reason}, so the model cannot compare them; give other users")
        index, queries = self._similarity(self.user_factors, codes, np.flatnonzero(trained))
        return self._as_given(similar_frame("user", codes, data.user_ids, index, queries, k), users)

    def _similarity(
        self, factors: Tensor, codes: NDArray[np.int32], candidates: NDArray[np.int64] | None = None
    ) -> tuple[TopKIndex, Tensor]:
        vectors = similarity_vectors(factors, self.score_name)
        queries = vectors[to_device(torch.from_numpy(codes), vectors.device)]
        return TopKIndex(self.backend()[0], vectors, self.score_name, candidates), queries

    def _check_sizes(self, where: str) -> None:
        U, V = self.factors(self.tensors)
        wanted = self.interactions.n_users, self.interactions.n_items
        if (len(U), len(V)) != wanted:
            raise InputError(f"{where}: factors of {len(U), len(V)} users and items, but ids of {wanted}")
        if {U.dtype, V.dtype} != {torch.float32} or (U.ndim, V.ndim) != (2, 2) or U.shape[1] != V.shape[1]:
            raise InputError(f"{where}: the factors are not two float32 tables with as many columns")


class ItemRecommender(Recommender[C]):
    """A model with weights between items. The query of a user is the user's items."""

    @property
    def weights(self) -> ItemWeights:
        """The weights between items."""
        return ItemWeights.of_tensors(self.tensors, self.interactions.n_items)

    def index(self, candidates: NDArray[np.int64] | None = None) -> Index:
        """Return an index of all items, or of some candidates, given by ascending codes."""
        return known_first(partial(ItemIndex, self.weights, self.interactions.n_items), self.known_items(), candidates)

    def queries(self, users: NDArray[np.int64]) -> CSR:
        """Return the items of users of the training data, given by their codes [m]: CSR [m, N]."""
        return self.interactions.train.take(users)

    def queries_of_owners(self, users: NDArray[np.int64], owned: CSR) -> CSR:
        """Return the training items of users, or all their items if none of them is a training item."""
        train = self.interactions.train.take(users)
        rows = zip(train.degrees(), range(len(users)), strict=True)
        return CSR.from_rows([train.row(r) if n else owned.row(r) for n, r in rows], train.shape[1])

    def new_queries(self, liked: CSR) -> CSR:
        """Return the items of new users."""
        return liked

    def pair_scores(self, queries: CSR, items: NDArray[np.int32]) -> NDArray[np.float32]:
        """Return the score of items[r] for a user with the items of row r: float32 [m]."""
        weights, found = self.weights, np.zeros(len(items), np.float32)
        for start in range(0, len(items), ROWS):
            block = np.arange(start, min(start + ROWS, len(items)))
            found[block] = weights.scores(queries.take(block))[np.arange(len(block)), items[block]]
        return found

    def similarity(self, items: NDArray[np.int32]) -> tuple[Index, CSR]:
        """Return an index of all items whose scores are the weights from an item, and its queries for some items."""
        single = CSR(np.arange(len(items) + 1), items, (len(items), self.interactions.n_items))
        return self.index(), single

    def _check_sizes(self, where: str) -> None:
        try:
            self.weights.check(self.interactions.n_items)
        except ValueError as error:
            raise InputError(
                f"{where}: the weights are not those of {self.interactions.n_items} items ({error})"
            ) from None


class _Best:
    """Callback that keeps what was learned until the best epoch, for a training without a run directory."""

    def __init__(self, learned: Callable[[Tensors], Tensors]) -> None:
        self.learned, self.tensors, self.epoch = learned, None, None

    tensors: Tensors | None
    epoch: int | None

    def __call__(self, end: EpochEnd) -> None:
        if end.state.best is not None and end.improved:
            self.tensors = {name: tensor.clone() for name, tensor in self.learned(end.state.tensors()).items()}
            self.epoch = end.state.epoch
