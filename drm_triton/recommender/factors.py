"""`FactorRecommender`: a model with a vector for each user and each item."""

from __future__ import annotations

from abc import abstractmethod
from functools import partial
from typing import TypeVar

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray
from torch import Tensor

from drm_triton.base_config import Config
from drm_triton.data.csr import CSR
from drm_triton.errors import InputError
from drm_triton.kernels.devices import to_device
from drm_triton.names import Score
from drm_triton.ranking.cold import Vectors, with_cold_rows
from drm_triton.ranking.known_first import Index, known_first
from drm_triton.ranking.recommend import (
    describe_users_without_interactions,
    encode_histories,
    similar_frame,
)
from drm_triton.ranking.topk import TopKIndex, similarity_vectors
from drm_triton.recommender.model import Tensors
from drm_triton.recommender.recommender import Histories, Ids, Recommender
from drm_triton.training import checkpoint

C = TypeVar("C", bound=Config)


class FactorRecommender(Recommender[C]):
    """A model with a vector for each user and each item."""

    _vectors: tuple[Tensors, Vectors] | None = None  # what was learned, and the vectors that it gives

    @abstractmethod
    def factors(self, tensors: Tensors) -> tuple[Tensor, Tensor]:
        """Return the vectors whose score ranks, of users [M, d] and of items [N, d], both float32."""

    @abstractmethod
    def fold_in_items(self, liked: CSR) -> Tensor:
        """Return the vectors of new users from the codes of the items they liked, CSR [B, N]: float32 [B, d]."""

    def layout(self, n_users: int, n_items: int) -> Tensors:
        """Return the tensors of a training state without content: by default, two tables of factors."""
        d = getattr(self.config, "factors", 1)
        return {
            "user_factors": torch.empty(n_users, d, device="meta"),
            "item_factors": torch.empty(n_items, d, device="meta"),
        }

    @property
    def score_name(self) -> Score:
        """The score of the vectors."""
        return "dot"

    @property
    def biased(self) -> bool:
        """Whether the last column of the item vectors is a bias, and that of the user vectors 1."""
        return False

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

    def dataset_queries(self, users: NDArray[np.int64]) -> Tensor:
        """Return the vectors of users of the data set, folded in if the model has learned nothing about them."""
        queries, data = self.queries(users), self.interactions
        new = np.flatnonzero((data.train.degrees()[users] == 0) & (data.liked.degrees()[users] > 0))
        if len(new):
            queries[to_device(torch.from_numpy(new), queries.device)] = self.new_queries(data.liked.take(users[new]))
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
        """Return the item factors, without their bias: float32 [N, d]."""
        return self._directions(self.item_factors).detach().cpu().numpy()

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
        vectors = similarity_vectors(self._directions(factors), self.score_name)
        queries = vectors[to_device(torch.from_numpy(codes), vectors.device)]
        return TopKIndex(self.backend()[0], vectors, self.score_name, candidates), queries

    def _directions(self, factors: Tensor) -> Tensor:
        """Return factors without the column of biases, which says nothing about what they have in common."""
        return factors[:, :-1] if self.biased else factors

    def _check_sizes(self, where: str) -> None:
        layout = self.layout(self.interactions.n_users, self.interactions.n_items)
        checkpoint.check_layout(self.tensors, self.learned(layout), where)
