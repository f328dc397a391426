"""The engine behind `drm_triton.serving.app`: answers single requests from a fitted model, in batches.

A request becomes a `TopKRequest`: the query of a user, the items to exclude, and k. Requests that wait at the same time
share one search, which costs little more for eight queries than for one. The index is built once, at the start, and ids
are found in dictionaries, so no frame is built on the way.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import polars as pl
from numpy.typing import NDArray

from drm_triton.data.csr import CSR, by_popularity
from drm_triton.data.ids import SHOWN, IdIndex
from drm_triton.errors import InputError
from drm_triton.ranking.known_first import Index
from drm_triton.ranking.popular import PopularIndex
from drm_triton.ranking.recommend import popular_index
from drm_triton.ranking.rules import RuledIndex, Rules
from drm_triton.recommender import Recommender
from drm_triton.serving.metrics import Metrics
from drm_triton.serving.search import ItemSearch

# Requests in one call. They fit into one block of queries (64 on a GPU, 128 or 256 on a CPU), so they share each read
# of an item.
MAX_BATCH = 64

Request = TypeVar("Request")
Result = TypeVar("Result")
ExternalId = int | str
ItemCodes = NDArray[np.int32]  # ascending, without repeats

NO_ITEMS: ItemCodes = np.zeros(0, dtype=np.int32)
NO_RULES = Rules()
MAX_RULES = 32  # sets of rules whose indexes are kept


class UnknownIdError(InputError):
    """The model has no user or item with this id, or the user has no interactions in the training data."""


class MicroBatcher(Generic[Request, Result]):
    """Collects requests and processes them in batches, one batch at a time, in a thread of `pool`.

    A request that arrives alone is processed at once. Requests that arrive during a batch form the next one.

    Parameters
    ----------
    process : returns the results of a batch of requests, in order
    pool : executor that runs `process`
    on_batch : called with the size of each batch
    """

    def __init__(
        self,
        process: Callable[[list[Request]], Sequence[Result]],
        pool: Executor,
        on_batch: Callable[[int], None] = lambda size: None,
    ) -> None:
        self._process, self._pool, self._on_batch = process, pool, on_batch
        self._waiting: list[tuple[Request, asyncio.Future[Result]]] = []
        self._worker: asyncio.Task[None] | None = None

    async def submit(self, request: Request) -> Result:
        """Return the result of one request."""
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, future))
        if self._worker is None:
            self._worker = asyncio.create_task(self._process_all())
        return await future

    async def _process_all(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting[:MAX_BATCH], self._waiting[MAX_BATCH:]
            self._on_batch(len(batch))
            requests, futures = [request for request, _ in batch], [future for _, future in batch]
            try:
                results = await asyncio.get_running_loop().run_in_executor(self._pool, self._process, requests)
            except Exception as error:
                for future in futures:
                    if not future.done():
                        future.set_exception(error)
            else:
                for future, result in zip(futures, results, strict=True):
                    if not future.done():  # the client may have disconnected
                        future.set_result(result)
        self._worker = None


class TopKRequest(NamedTuple):
    """A request for the k best rows of an index."""

    query: Any  # a vector [d], or the codes of the user's items for an item-item model
    excluded: ItemCodes
    k: int


class TopKResult(NamedTuple):
    """Rows of an index and their scores, best first."""

    codes: list[int]
    scores: list[float]


def search_batch(index: Index, requests: list[TopKRequest]) -> list[TopKResult]:
    """Answer requests with one search; it looks for the largest k, and each result is cut to its own k."""
    if isinstance(index, RuledIndex) and len({request.k for request in requests}) > 1:
        return [search_batch(index, [request])[0] for request in requests]  # a shorter list may have other items
    k = min(max(request.k for request in requests), len(index))
    queries: Any = index.stack([request.query for request in requests])
    codes, scores = index.search(queries, k, CSR.from_rows([request.excluded for request in requests], index.n_items))
    results = []
    for request, row, row_scores in zip(requests, codes.tolist(), scores.tolist(), strict=True):
        n_found = row.index(-1) if row[-1] == -1 else k
        size = min(n_found, request.k)
        results.append(TopKResult(row[:size], row_scores[:size]))
    return results


def row_of(queries: Any, number: int) -> Any:
    """Return one query of several: a vector [d], or the codes of a user's items."""
    return queries.row(number) if isinstance(queries, CSR) else queries[number]


class Searches(NamedTuple):
    """How items are found under some rules: by a model, and by popularity."""

    best: MicroBatcher[TopKRequest, TopKResult]
    popular: Index


class Engine:
    """Answers single requests from a fitted model: ids in, JSON-ready dictionaries out.

    An answer lists items as {item, title, score}, best first. `title` is present only if the data has titles. An item
    that is listed for its popularity has score None. `unknown` is the handling of ids that the model does not know:
    "error" raises UnknownIdError; "popular" ignores them and lists the most popular items if nothing else is left.
    """

    def __init__(self, model: Recommender[Any], metrics: Metrics | None = None) -> None:
        self.metrics = metrics = metrics or Metrics()
        self.model, data = model, model.interactions
        self.train, self.liked = data.train, data.liked
        self.seen = data.owned  # what a user has, which is not recommended
        self.users, self.items = IdIndex(data.user_ids), IdIndex(data.item_ids)
        removed_users, self.seen_by_removed = data.removed_users  # who are unknown, but have items
        self.removed_users = IdIndex(removed_users)
        self.titles: list[str | None] | None = (
            None if data.item_titles is None else data.item_titles.cast(pl.String).to_list()
        )
        self.cold_users, self.known_items = model.cold_users, model.known_items()
        self.cold_items = frozenset(np.flatnonzero(model.cold_items).tolist())
        self.by_popularity: list[int] = by_popularity(data.popularity).tolist()
        self.search = ItemSearch(self.items.ids, self.titles, self.by_popularity)
        item_index = model.index()
        similarity_index, self.similarity_queries = model.similarity(np.arange(data.n_items, dtype=np.int32))
        self.user_queries = model.queries(np.arange(data.n_users))

        def fold_in_batch(histories: list[ItemCodes]) -> Sequence[Any]:
            queries = model.new_queries(CSR.from_rows(histories, data.n_items))
            return [row_of(queries, number) for number in range(len(histories))]

        # Compile the kernels before the first request.
        item_0 = np.zeros(1, dtype=np.int32)
        search_batch(item_index, [TopKRequest(fold_in_batch([item_0])[0], item_0, 1)])
        search_batch(similarity_index, [TopKRequest(row_of(self.similarity_queries, 0), item_0, 1)])
        # Each batcher occupies at most one thread, and a search for text another. `initializer` gives them the model's
        # number of kernel threads. The threads end when the engine is no longer used.
        self._pool = pool = ThreadPoolExecutor(4, "serve", initializer=model.backend)
        self._best_items = MicroBatcher(partial(search_batch, item_index), pool, partial(metrics.batch, "search"))
        self._similar_items = MicroBatcher(
            partial(search_batch, similarity_index), pool, partial(metrics.batch, "similar")
        )
        self._fold_in = MicroBatcher(fold_in_batch, pool, partial(metrics.batch, "fold_in"))
        self._without_rules = Searches(self._best_items, PopularIndex(data.popularity))
        self._ruled: OrderedDict[Rules, Searches] = OrderedDict()  # the last used at the end

    async def recommend(
        self,
        user: str,
        k: int,
        exclude_seen: bool,
        unknown: str,
        rules: Rules = NO_RULES,
        only: Sequence[ExternalId] = (),
        exclude: Sequence[ExternalId] = (),
    ) -> dict[str, Any]:
        """Return what `Recommender.recommend` returns for one user."""
        code = self.users.find(user)
        searches = await self._searches(rules)
        left_out = self._left_out(self._seen_by(user, code) if exclude_seen else NO_ITEMS, only, exclude)
        cold = code is not None and bool(self.cold_users[code])
        if code is None or (len(self.liked.row(code)) == 0 and not cold):
            if unknown == "popular":
                user_id = user if code is None else self.users.ids[code]
                items = self._popular_items(searches, k, left_out)
                return {"user": user_id, "items": items}
            if code is None:
                raise unknown_id_error("user", [user])
            raise UnknownIdError(f"user {user[:80]!r} has no interactions in the data set")
        if cold or len(self.train.row(code)):
            query = row_of(self.user_queries, code)
        else:  # the model has learned nothing of this user, whose items were all held out
            query = await self._fold_in.submit(self.liked.row(code))
        best = await searches.best.submit(TopKRequest(query, left_out, k))
        answer = {"user": self.users.ids[code], "items": self._describe(*best)}
        return {**answer, "cold": True} if cold else answer

    async def recommend_from(
        self,
        liked: list[ExternalId],
        k: int,
        exclude: list[ExternalId],
        unknown: str,
        rules: Rules = NO_RULES,
        only: Sequence[ExternalId] = (),
    ) -> dict[str, Any]:
        """Return what `Recommender.recommend_from` returns for one new user."""
        history, unknown_liked = self.items.split(liked)
        nothing = ~self.known_items[history]  # of which nothing is known
        unknown_liked += [self.items.ids[code] for code in history[nothing].tolist()]
        history = history[~nothing]
        if unknown_liked and unknown == "error":
            raise unknown_id_error("item", unknown_liked)
        searches = await self._searches(rules)
        excluded = self._left_out(history, only, exclude)
        if len(history):
            vector = await self._fold_in.submit(history)
            items = self._describe(*await searches.best.submit(TopKRequest(vector, excluded, k)))
        else:
            items = self._popular_items(searches, k, excluded)
        return {"items": items, "unknown": unknown_liked}

    async def similar(self, item: str, k: int) -> dict[str, Any]:
        """Return what `Recommender.similar_items` returns for one item."""
        code = self.items.find(item)
        if code is None:
            raise unknown_id_error("item", [item])
        if not self.known_items[code]:
            raise UnknownIdError(f"item {item[:80]!r} has neither interactions nor attributes to compare it by")
        itself = np.array([code], dtype=np.int32)
        similar = await self._similar_items.submit(TopKRequest(row_of(self.similarity_queries, code), itself, k))
        return {"item": self.items.ids[code], "items": self._describe(*similar)}

    async def find(self, text: str, k: int) -> dict[str, Any]:
        """Return at most k items whose title or id contains a text."""
        codes = await asyncio.get_running_loop().run_in_executor(self._pool, self.search.find, text, k)
        rows = self._describe(codes, [None] * len(codes))
        return {"items": [{name: row[name] for name in row if name not in ("score", "cold")} for row in rows]}

    def _seen_by(self, user: str, code: int | None) -> ItemCodes:
        """Return what a user has, also if filters removed all rows of the user, who has no code then."""
        if code is not None:
            return self.seen.row(code)
        row = self.removed_users.find(user)
        return NO_ITEMS if row is None else self.seen_by_removed.row(row)

    def _left_out(self, seen: ItemCodes, only: Sequence[ExternalId], exclude: Sequence[ExternalId]) -> ItemCodes:
        """Return the items that an answer leaves out: seen, excluded, or not among `only`."""
        if exclude:
            seen = np.union1d(seen, self.items.split(exclude)[0])
        if only:
            others = np.ones(len(self.items.ids), dtype=bool)
            others[self.items.split(only)[0]] = False
            seen = np.union1d(seen, np.flatnonzero(others)).astype(np.int32)
        return seen

    async def _searches(self, rules: Rules) -> Searches:
        """Return the searches that obey rules. Those of the last few rules are kept."""
        if rules == NO_RULES:
            return self._without_rules
        if rules not in self._ruled:
            make = asyncio.get_running_loop().run_in_executor
            index = await make(self._pool, self.model.ruled_index, rules)
            best = MicroBatcher(partial(search_batch, index), self._pool, partial(self.metrics.batch, "search"))
            self._ruled[rules] = Searches(best, popular_index(self.model.interactions.popularity, index))
            if len(self._ruled) > MAX_RULES:
                self._ruled.popitem(last=False)
        self._ruled.move_to_end(rules)
        return self._ruled[rules]

    def _describe(self, codes: Iterable[int], scores: Iterable[float | None]) -> list[dict[str, Any]]:
        """Return ids, titles and scores of items, and flag cold ones."""
        ids, titles = self.items.ids, self.titles
        if titles is None:
            rows = [{"item": ids[code], "score": score} for code, score in zip(codes, scores, strict=True)]
        else:
            rows = [
                {"item": ids[code], "title": titles[code], "score": score}
                for code, score in zip(codes, scores, strict=True)
            ]
        if self.cold_items:
            for code, row in zip(codes, rows, strict=True):
                row["cold"] = code in self.cold_items
        return rows

    def _popular_items(self, searches: Searches, k: int, excluded: ItemCodes) -> list[dict[str, Any]]:
        codes = search_batch(searches.popular, [TopKRequest(None, excluded, k)])[0].codes
        return self._describe(codes, [None] * len(codes))


def unknown_id_error(kind: str, ids: Sequence[ExternalId]) -> UnknownIdError:
    """Return the error that names unknown ids. Unlike the error of the model, it reveals no other ids to the client."""
    names = ", ".join(repr(value)[:80] for value in ids[:SHOWN])
    more = f" and {len(ids) - SHOWN:,} more" if len(ids) > SHOWN else ""
    return UnknownIdError(f"unknown {kind} id{'s' if len(ids) > 1 else ''}: {names}{more}")
