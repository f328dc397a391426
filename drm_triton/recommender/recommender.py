"""`Recommender`: recommend, compare items, score pairs, and measure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import polars as pl
from numpy.typing import NDArray

from drm_triton.base_config import Config
from drm_triton.data.conditions import Condition
from drm_triton.data.csr import CSR
from drm_triton.data.dataset import Dataset
from drm_triton.data.ids import named
from drm_triton.errors import HeldOutWarning, InputError, warn
from drm_triton.names import CUT_OFFS, MIN_TRAIN, Unknown
from drm_triton.ranking.cold import flag_cold
from drm_triton.ranking.evaluate import Evaluation, Ranker, evaluate
from drm_triton.ranking.known_first import Index
from drm_triton.ranking.per_user import NothingLeftError, PerUser, is_per_user
from drm_triton.ranking.recommend import (
    candidate_items,
    check_k,
    describe_users_without_interactions,
    known_users,
    new_users,
    recommendation_frames,
    similar_frame,
)
from drm_triton.ranking.rules import Rules
from drm_triton.ranking.topk import QUERIES_PER_BLOCK
from drm_triton.recommender.training import TrainableModel

Ids = Sequence[Any] | pl.Series | NDArray[Any]  # external ids
Histories = Mapping[Any, Ids] | Sequence[Ids] | pl.DataFrame  # the items of each new user
ItemChoice = Ids | Mapping[Any, Ids] | pl.DataFrame  # items for all users, or for each user
Where = Condition | Iterable[Condition]  # conditions on the attributes of items

C = TypeVar("C", bound=Config)


class Recommender(TrainableModel[C]):
    """A model for top-K recommendation. Subclasses define how it is trained and what a query is."""

    _warned_of: Dataset | None = None  # the interactions some of which, as a warning has said, are held out

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
            Leave out items that the user has, also those that were held out of the training, or that a filter removed.
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
            is a pandas frame if the model last learned from one, or if `users` is a pandas object.

        Warns
        -----
        HeldOutWarning
            Once for a model, if it has not learned from all interactions; see `refit`.
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
        self._warn_of_held_out()
        data = self.interactions
        if histories is None:
            targets = known_users(users, data, self.dataset_queries, unknown, self.cold_users)
        else:
            targets = new_users(histories, data, self.new_queries, unknown, self.known_items())
        rules = Rules.of(where, at_most, diversity)
        only_for_all, without_for_all = (None if is_per_user(items) else items for items in (only, without))
        candidates = candidate_items(data, only_for_all, without_for_all, rules.where)
        try:
            per_user = PerUser.of_users(targets.ids, data, only, without)
            candidates = candidates if per_user is None else per_user.among(candidates)
        except NothingLeftError:
            if not data.is_part:
                raise
            targets, per_user = targets.nobody(), None  # other parts may have users with items
        index = self._obeying(rules, candidates)
        frames = recommendation_frames(targets, index, data, k, exclude_seen, per_user)
        new = histories is not None  # their ids are no ids of the data set
        cold_users = data.user_ids.clear() if new else data.user_ids.filter(self.cold_users)
        cold = {"item": data.item_ids.filter(self.cold_items), "user": cold_users}
        return (flag_cold(frame, cold) for frame in frames)

    def _warn_of_held_out(self) -> None:
        """Warn, once for what was learned, if the model has not learned from all interactions."""
        data = self.interactions
        if data.train.nnz == data.n_interactions or self._warned_of is data:
            return
        self._warned_of = data
        warn(
            f"this model has learned from {data.train.nnz / data.n_interactions:.0%} of the interactions; the others "
            "are held out to measure it. `model.refit()` returns the final model, which learns from all of them",
            HeldOutWarning,
        )

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
        return self._as_given(flag_cold(frame, {"similar": cold}), items)

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
        empty = (data.liked.degrees()[rows] == 0) & ~self.cold_users[rows]
        if empty.any():
            reason = describe_users_without_interactions(data.user_ids[rows[empty]], "the data set")
            raise InputError(f"{reason}, so nothing is known about their taste; leave them out")
        found = [np.zeros(0, np.float32)]
        for start in range(0, len(rows), QUERIES_PER_BLOCK):
            block = slice(start, start + QUERIES_PER_BLOCK)
            found.append(self.pair_scores(self.dataset_queries(rows[block]), columns[block]))
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
                f"the model was not trained on {dataset.path or 'this data set'}; give the data set of the training"
            )
        if on in self.fitted_config.fit_parts:
            raise InputError(f"the model was fitted on {self.fitted_config.fit_on}, so it cannot be measured on {on}")
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
        if not isinstance(held_out, CSR):
            raise InputError(
                f"evaluate takes a Dataset or a CSR of held-out items, not {type(held_out).__name__}; build the data "
                "set with Dataset.from_frame, and fit the model on it"
            )
        seen = self.interactions.train if seen is None else seen
        result = evaluate(self.ranker(), seen, held_out, ks, min_train, beyond_accuracy=beyond_accuracy)
        ids = self.interactions.user_ids[result.per_user["user"]]
        return replace(result, per_user=result.per_user.with_columns(user=ids))
