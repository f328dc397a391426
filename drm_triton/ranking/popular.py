"""The most popular items, for users about whom nothing is known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from drm_triton.data.csr import CSR, by_popularity


class PopularIndex:
    """Finds the most popular items, with the methods of `TopKIndex`. The scores are numbers of interactions.

    Parameters
    ----------
    popularity : int64 [N], interactions of each item
    candidates : ascending item codes that a search may return; None for all items
    """

    def __init__(self, popularity: NDArray[np.int64], candidates: NDArray[np.int64] | None = None) -> None:
        self.candidates, self.n_items = candidates, len(popularity)
        self._order = by_popularity(popularity, candidates).astype(np.int32)
        self._scores = popularity[self._order].astype(np.float32)

    def __len__(self) -> int:
        return len(self._order)

    def stack(self, queries: Sequence[Any]) -> NDArray[Any]:
        """Return queries of a search, [m]. The result is the same for all of them but for the excluded items."""
        return np.zeros(len(queries))

    def search(
        self, queries: NDArray[Any], k: int, excluded: CSR | None = None
    ) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Return the k most popular items for each query and their scores, as `TopKIndex.search` does."""
        items = np.full((len(queries), k), -1, dtype=np.int32)
        scores = np.full(items.shape, -np.inf, dtype=np.float32)
        if excluded is None:
            items[:, : len(self)], scores[:, : len(self)] = self._order[:k], self._scores[:k]
            return items, scores
        for r in range(len(queries)):
            left_out = excluded.row(r)
            kept = np.flatnonzero(~np.isin(self._order[: k + len(left_out)], left_out))[:k]
            items[r, : len(kept)], scores[r, : len(kept)] = self._order[kept], self._scores[kept]
        return items, scores
