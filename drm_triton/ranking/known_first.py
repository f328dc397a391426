"""`known_first`: an index whose searches return items of which nothing is known after all others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from drm_triton.data.csr import CSR

Found = tuple[NDArray[np.int32], NDArray[np.float32]]


class Index(Protocol):
    """What finds the best items for queries: `TopKIndex`, `ItemIndex`, `KnownFirst`.

    Attributes
    ----------
    candidates : ascending codes of the items that a search may return; None for all
    n_items : number of all items, candidates or not
    """

    candidates: NDArray[np.int64] | None
    n_items: int

    def __len__(self) -> int:
        """Return the number of items that a search may return."""

    def stack(self, queries: Sequence[Any]) -> Any:
        """Return the queries of a search from single ones."""

    def search(self, queries: Any, k: int, excluded: CSR | None = None) -> Found:
        """Return the k best items of each query and their scores: both [m, k], padded with -1 and -inf."""


class KnownFirst:
    """An index of known items, and of others that fill the result of a query for which fewer than k of them remain."""

    def __init__(self, known: Index, others: Callable[[], Index], candidates: NDArray[np.int64] | None, n: int) -> None:
        self.known, self.others, self.candidates = known, others, candidates
        self.n_items, self._size = known.n_items, n

    def __len__(self) -> int:
        return self._size

    def stack(self, queries: Sequence[Any]) -> Any:
        """Return the queries of a search from single ones."""
        return self.known.stack(queries)

    def search(self, queries: Any, k: int, excluded: CSR | None = None) -> Found:
        """Return the k best items of each query and their scores, as the index of the known items does."""
        reach = min(k, len(self.known))
        items, scores = self.known.search(queries, reach, excluded)
        items = np.pad(items, ((0, 0), (0, k - reach)), constant_values=-1)
        scores = np.pad(scores, ((0, 0), (0, k - reach)), constant_values=-np.inf)
        left = items < 0
        if left.any():
            others = self.others()
            more, more_scores = others.search(queries, min(k, len(others)), excluded)
            rank = left.cumsum(1) - 1  # among the places that are left
            filled = left & (rank < more.shape[1])
            source = np.nonzero(filled)[0], rank[filled]
            items[filled], scores[filled] = more[source], more_scores[source]
        return items, scores


def known_first(
    make: Callable[[NDArray[np.int64] | None], Index],
    known: NDArray[np.bool_] | None,
    candidates: NDArray[np.int64] | None = None,
) -> Index:
    """Return an index of all items, or of some candidates, that ranks known items before others.

    Parameters
    ----------
    make : makes an index of all items (None), or of some, given by ascending codes
    known : bool [N]; None if all items are
    candidates : ascending codes
    """
    if known is None:
        return make(candidates)
    items = np.arange(len(known)) if candidates is None else candidates
    first, others = items[known[items]], items[~known[items]]
    if len(first) == 0 or len(others) == 0:
        return make(candidates)
    return KnownFirst(make(first), cache(lambda: make(others)), candidates, len(items))
