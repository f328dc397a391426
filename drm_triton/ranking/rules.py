"""Rules of recommendation lists: conditions on items, at most so many items of a category, and diversity.

`Rules` says what is wanted, without a model. `Recommender.ruled_index` returns an index that obeys it: conditions leave
items out of the index, and a `RuledIndex` chooses among the best items of another index. It chooses one item after the
other. With R the items chosen so far, the next one is the item i with the highest

    (1 - diversity) r_i - diversity max_{j in R} cos(v_i, v_j)

in a pool of the best items (maximal marginal relevance, MMR). r_i is the score, scaled so that it is 0 for the worst
and 1 for the best item of the pool. v are item factors. Without diversity, this is the next item of the ranking. An
item is passed over if R has the most items allowed in one of its categories. If the pool ends before the list is full,
the best of all items that are still allowed make up the next pool, so no list is shorter than it must be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray
from torch import Tensor

from drm_triton.data.conditions import Condition, conditions
from drm_triton.data.csr import CSR
from drm_triton.errors import InputError
from drm_triton.kernels.devices import to_device
from drm_triton.names import MAX_INT32
from drm_triton.ranking.known_first import Index
from drm_triton.ranking.limits import Limits

POOL = 2  # items of the first pool, as a multiple of k
DIVERSE_POOL = 10  # the same with diversity
WORKSPACE = 1 << 22  # numbers of a temporary array: bounds the memory
MASK = 1 << 24  # the same for bits of lists and items

Items = NDArray[np.int32]
Scores = NDArray[np.float32]


@dataclass(frozen=True)
class Rules:
    """Rules that the lists of all users obey. Create them with `Rules.of`, which checks them.

    Attributes
    ----------
    where : conditions on the attributes of items, all of which must hold
    at_most : pairs of an attribute and the most items of a list with the same value of it
    diversity : weight of diversity, from 0 to below 1
    """

    where: tuple[Condition, ...] = ()
    at_most: tuple[tuple[str, int], ...] = ()
    diversity: float = 0.0

    @classmethod
    def of(
        cls,
        where: Condition | Iterable[Condition] | None = None,
        at_most: Mapping[str, int] | None = None,
        diversity: float = 0.0,
    ) -> Rules:
        """Return checked rules.

        Examples
        --------
        >>> Rules.of("price<=20", {"genre": 2})
        Rules(where=('price<=20',), at_most=(('genre', 2),), diversity=0.0)
        """
        if at_most is not None and not isinstance(at_most, Mapping):
            raise InputError(f'`at_most` must map attributes to numbers, as {{"genre": 2}}, got {at_most!r}')
        for name, number in (at_most or {}).items():
            is_integer = isinstance(number, int | np.integer) and not isinstance(number, bool)
            if not is_integer or not 1 <= number <= MAX_INT32:
                raise InputError(
                    f"`at_most`: the number for {name} must be an integer from 1 to {MAX_INT32}, got {number!r}"
                )
        is_number = isinstance(diversity, int | float | np.number) and not isinstance(diversity, bool)
        if not is_number or not 0 <= diversity < 1:
            raise InputError(f"`diversity` must be a number from 0 to below 1, got {diversity!r}")
        limits = tuple((name, int(number)) for name, number in (at_most or {}).items())
        return cls(conditions(where), limits, float(diversity))

    def applied(self, index: Index, items: pl.DataFrame, factors: Callable[[], NDArray[np.float32]]) -> Index:
        """Return an index that obeys `at_most` and `diversity`; the given one if they ask for nothing.

        Parameters
        ----------
        index : index of the items that satisfy `where`
        items : table of all items, by code
        factors : returns the item factors, float32 [N, d]; called only for `diversity`
        """
        if not self.at_most and not self.diversity:
            return index
        limits = Limits.of(items, self.at_most, index.candidates)
        return RuledIndex(index, limits, self.diversity, factors() if self.diversity else None)


class RuledIndex:
    """Finds the best items of another index that obey rules together, with the methods of `TopKIndex`.

    Parameters
    ----------
    index : ranks the items
    limits : categories of the items, and how many items of each a list may have
    diversity : weight of diversity, from 0 to below 1
    factors : item factors, float32 [N, d]; needed for diversity
    """

    def __init__(
        self,
        index: Index,
        limits: Limits,
        diversity: float = 0.0,
        factors: NDArray[np.float32] | None = None,
    ) -> None:
        self.index, self.limits, self.diversity, self.factors = index, limits, diversity, factors
        self.candidates, self.n_items = index.candidates, index.n_items

    def __len__(self) -> int:
        return len(self.index)

    def over(self, index: Index) -> RuledIndex:
        """Return the same rules for another ranking."""
        return RuledIndex(index, self.limits, self.diversity, self.factors)

    def stack(self, queries: Sequence[Any]) -> Any:
        """Return the queries of a search from single ones, as the other index does."""
        return self.index.stack(queries)

    def search(self, queries: Any, k: int, excluded: CSR | None = None) -> tuple[Items, Scores]:
        """Return k items for each query and their scores, in the order in which they were chosen.

        The parameters and the result are those of `TopKIndex.search`. With diversity, the result for a smaller k is not
        the beginning of that for a larger one, because the pool is smaller.
        """
        m, depth = queries.shape[0], min(k * (DIVERSE_POOL if self.diversity else POOL), len(self))
        items, scores = np.full((m, k), -1, dtype=np.int32), np.full((m, k), -np.inf, dtype=np.float32)

        def extend(rows: NDArray[np.int64], left_out: CSR | None) -> NDArray[np.int64]:
            """Extend lists by items of the next pool; return the rows whose lists are not finished."""
            pool, pool_scores = self.index.search(rows_of(queries, rows), depth, left_out)
            items[rows], scores[rows] = self._extended(items[rows], scores[rows], pool, pool_scores)
            unfinished: NDArray[np.int64] = rows[(items[rows, -1] < 0) & (pool[:, -1] >= 0)]
            return unfinished[~self.limits.leave_nothing(items[unfinished])] if len(unfinished) else unfinished

        others = [np.zeros(0, dtype=np.int64)]
        width = max(self.limits.width, 0 if self.factors is None else self.factors.shape[1])
        for rows in _blocks(np.arange(m), WORKSPACE // max(depth * width, 1)):
            others.append(extend(rows, None if excluded is None else excluded.take(rows)))
        for rows in _blocks(np.concatenate(others), MASK // self.limits.categories.shape[0]):
            while len(rows):
                taken = None if excluded is None else excluded.take(rows)
                rows = extend(rows, self._no_longer_allowed(items[rows], taken))
        return items, scores

    def _no_longer_allowed(self, lists: Items, excluded: CSR | None) -> CSR:
        """Return the excluded items, those of the lists [m, k], and those of closed categories: CSR [m, N]."""
        found = np.zeros((len(lists), self.limits.categories.shape[0]), dtype=bool)
        for row, items in enumerate(lists):
            found[row, items[items >= 0]] = True
            if excluded is not None:
                found[row, excluded.row(row)] = True
        for row, category in zip(*self.limits.closed(lists), strict=True):
            found[row, self.limits.items.row(category)] = True
        return CSR.from_mask(found)

    def _extended(self, items: Items, scores: Scores, pool: Items, pool_scores: Scores) -> tuple[Items, Scores]:
        """Return lists [m, k] that begin with the given ones, extended by items of a pool [m, n], both padded with -1.

        A list has k items, or no item of its pool can be added to it.
        """
        m, k = items.shape
        every, length, allowed = np.arange(m), (items >= 0).sum(1), pool >= 0
        categories = self.limits.of_items(pool)
        room = np.where(categories >= 0, self.limits.most[categories] if len(self.limits.most) else 1, k)
        relevance = np.broadcast_to(-np.arange(pool.shape[1], dtype=np.float32), pool.shape)
        nearest = np.full(pool.shape, -np.inf, dtype=np.float32)  # cosine with the most similar item of the list
        vectors = np.zeros((*pool.shape, 0), dtype=np.float32)
        if self.factors is not None:
            relevance, vectors = _scaled(pool, pool_scores), _directions(self.factors, pool)

        def add(present: NDArray[np.bool_], its_categories: NDArray[np.int32], vector: NDArray[np.float32]) -> None:
            """Account for another item of each list, where it is present [m]."""
            for category in np.where(present[:, None] & (its_categories >= 0), its_categories, -2).T:
                np.subtract(room, categories == category[:, None, None], out=room)
            np.logical_and(allowed, (room > 0).all(2), out=allowed)
            if self.factors is not None:
                cosines = np.einsum("mnd,md->mn", vectors, vector)
                np.maximum(nearest, np.where(present[:, None], cosines, -np.inf), out=nearest)

        for j in range(int(length.max(initial=0))):
            directions = vectors[:, 0] if self.factors is None else _directions(self.factors, items[:, j])
            add(items[:, j] >= 0, self.limits.of_items(items[:, j : j + 1])[:, 0], directions)
        for _ in range(k):
            present = (length < k) & allowed.any(1)
            if not present.any():
                break
            similarity = np.where(np.isfinite(nearest), nearest, 0)
            value = (1 - self.diversity) * relevance - self.diversity * similarity
            best = np.where(allowed, value, -np.inf).argmax(1)
            rows = every[present]
            items[rows, length[rows]] = pool[rows, best[rows]]
            scores[rows, length[rows]] = pool_scores[rows, best[rows]]
            length[rows] += 1
            allowed[rows, best[rows]] = False
            add(present, categories[every, best], vectors[every, best])
        return items, scores


def rows_of(queries: Any, rows: NDArray[np.int64]) -> Any:
    """Return some of the queries of a search."""
    if isinstance(queries, CSR):
        return queries.take(rows)
    return queries[to_device(torch.from_numpy(rows), queries.device) if isinstance(queries, Tensor) else rows]


def _blocks(rows: NDArray[np.int64], size: int) -> Iterator[NDArray[np.int64]]:
    size = max(size, 1)
    for start in range(0, len(rows), size):
        yield rows[start : start + size]


def _scaled(pool: Items, scores: Scores) -> Scores:
    """Return scores [m, n], best first, scaled to 0 for the worst and 1 for the best item of the pool.

    An item that the index ranks last because nothing is known of it has no higher value than those before it.
    """
    present, scores = pool >= 0, np.minimum.accumulate(scores, axis=1)
    lowest = np.where(present, scores, np.inf).min(1, keepdims=True)
    above = np.where(present, scores - lowest, 0)
    return (above / np.where(above[:, :1] > 0, above[:, :1], 1)).astype(np.float32, copy=False)


def _directions(factors: NDArray[np.float32], items: Items) -> NDArray[np.float32]:
    """Return the factors of items, scaled to length 1: float32 [*items.shape, d]."""
    vectors = factors[items]
    length = np.sqrt(np.einsum("...d,...d->...", vectors, vectors))
    return (vectors / np.where(length > 0, length, 1)[..., None]).astype(np.float32, copy=False)
