"""`ItemRecommender`: a model with weights between items."""

from __future__ import annotations

from functools import partial
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from drm_triton.base_config import Config
from drm_triton.data.csr import CSR
from drm_triton.errors import InputError
from drm_triton.ranking.item_index import ROWS, ItemIndex, ItemWeights
from drm_triton.ranking.known_first import Index, known_first
from drm_triton.recommender.recommender import Recommender

C = TypeVar("C", bound=Config)


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

    def dataset_queries(self, users: NDArray[np.int64]) -> CSR:
        """Return the training items of users, or their held-out items if they have no others."""
        train, liked = self.interactions.train, self.interactions.liked
        rows = [train.row(u) if train.indptr[u] < train.indptr[u + 1] else liked.row(u) for u in users]
        return CSR.from_rows(rows, train.shape[1])

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
