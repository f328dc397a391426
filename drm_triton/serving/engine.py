"""The engine behind `drm_triton.serving.app`: answers single requests from a fitted model, in batches.

A request becomes a `TopKRequest`: a vector, the items to exclude, and k. Requests that wait at the same time share one
call of the top-K kernel, which costs little more for eight rows than for one. The items are packed for the kernel once,
at the start, and ids are found in dictionaries, so no frame is built on the way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from itertools import islice
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray
from torch import Tensor

from drm_triton.data.csr import CSR
from drm_triton.data.ids import SHOWN, IdIndex
from drm_triton.errors import InputError
from drm_triton.model import DRM
from drm_triton.ranking.fold_in import fold_in
from drm_triton.ranking.recommend import popular_items
from drm_triton.ranking.topk import TopKIndex, similarity_vectors

# Requests in one call. They fit into one block of queries (64 on a GPU, 128 or 256 on a CPU), so they share each read
# of an item.
MAX_BATCH = 64

Request = TypeVar("Request")
Result = TypeVar("Result")
ExternalId = int | str
ItemCodes = NDArray[np.int32]  # ascending, without repeats

NO_ITEMS: ItemCodes = np.zeros(0, dtype=np.int32)


class UnknownIdError(InputError):
    """The model has no user or item with this id, or the user has no interactions in the training data."""


class MicroBatcher(Generic[Request, Result]):
    """Collects requests and processes them in batches, one batch at a time, in a thread of `pool`.

    A request that arrives alone is processed at once. Requests that arrive during a batch form the next one.

    Parameters
    ----------
    process : returns the results of a batch of requests, in order
    pool : executor that runs `process`
    """

    def __init__(self, process: Callable[[list[Request]], Sequence[Result]], pool: Executor) -> None:
        self._process, self._pool = process, pool
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

    vector: Tensor  # [d]
    excluded: ItemCodes
    k: int


class TopKResult(NamedTuple):
    """Rows of an index and their scores, best first."""

    codes: list[int]
    scores: list[float]


def search_batch(index: TopKIndex, requests: list[TopKRequest]) -> list[TopKResult]:
    """Answer requests with one search; it looks for the largest k, and each result is cut to its own k."""
    k = min(max(request.k for request in requests), len(index))
    vectors = torch.stack([request.vector for request in requests])
    codes, scores = index.search(vectors, k, stack_rows([request.excluded for request in requests], len(index)))
    results = []
    for request, row, row_scores in zip(requests, codes.tolist(), scores.tolist(), strict=True):
        n_found = row.index(-1) if row[-1] == -1 else k
        size = min(n_found, request.k)
        results.append(TopKResult(row[:size], row_scores[:size]))
    return results


def stack_rows(rows: Sequence[ItemCodes], n_columns: int) -> CSR:
    """Return a CSR matrix with these rows."""
    return CSR(np.cumsum([0, *map(len, rows)]), np.concatenate(rows), (len(rows), n_columns))


class Engine:
    """Answers single requests from a fitted model: ids in, JSON-ready dictionaries out.

    An answer lists items as {item, title, score}, best first. `title` is present only if the data has titles. An item
    that is listed for its popularity has score None. `unknown` is the handling of ids that the model does not know:
    "error" raises UnknownIdError; "popular" ignores them and lists the most popular items if nothing else is left.
    """

    def __init__(self, model: DRM) -> None:
        data, config = model.interactions, model.config
        self.train = data.train
        self.user_factors, self.item_factors = model.user_factors, model.item_factors
        self.users, self.items = IdIndex(data.user_ids), IdIndex(data.item_ids)
        self.titles: list[str | None] | None = (
            None if data.item_titles is None else data.item_titles.cast(pl.String).to_list()
        )
        self.by_popularity: list[int] = popular_items(data.train, data.n_items).tolist()
        self.similarity = similarity_vectors(self.item_factors, config)

        backend, _ = model.backend()
        item_index = TopKIndex(backend, self.item_factors, config.score_in_force)
        similarity_index = TopKIndex(backend, self.similarity, config.score_in_force)

        def fold_in_batch(histories: list[ItemCodes]) -> Sequence[Tensor]:
            return list(fold_in(self.item_factors, stack_rows(histories, data.n_items), config, backend))

        # Compile the kernels before the first request.
        item_0 = np.zeros(1, dtype=np.int32)
        search_batch(item_index, [TopKRequest(fold_in_batch([item_0])[0], item_0, 1)])
        search_batch(similarity_index, [TopKRequest(self.similarity[0], item_0, 1)])
        # Each batcher occupies at most one thread. `initializer` gives it the model's number of kernel threads.
        pool = ThreadPoolExecutor(3, "serve", initializer=model.backend)
        self._best_items = MicroBatcher(partial(search_batch, item_index), pool)
        self._similar_items = MicroBatcher(partial(search_batch, similarity_index), pool)
        self._fold_in = MicroBatcher(fold_in_batch, pool)

    async def recommend(self, user: str, k: int, exclude_seen: bool, unknown: str) -> dict[str, Any]:
        """Return what `DRM.recommend` returns for one user."""
        code = self.users.find(user)
        seen = NO_ITEMS if code is None else self.train.row(code)
        if code is None or len(seen) == 0:
            if unknown == "popular":
                user_id = user if code is None else self.users.ids[code]
                return {"user": user_id, "items": self._popular_items(k, NO_ITEMS)}
            if code is None:
                raise unknown_id_error("user", [user])
            raise UnknownIdError(f"user {user[:80]!r} has no interactions in the training data")
        best = await self._best_items.submit(
            TopKRequest(self.user_factors[code], seen if exclude_seen else NO_ITEMS, k)
        )
        return {"user": self.users.ids[code], "items": self._describe(*best)}

    async def recommend_from(
        self, liked: list[ExternalId], k: int, exclude: list[ExternalId], unknown: str
    ) -> dict[str, Any]:
        """Return what `DRM.recommend_from` returns for one new user."""
        history, unknown_liked = self.items.split(liked)
        if unknown_liked and unknown == "error":
            raise unknown_id_error("item", unknown_liked)
        excluded = np.union1d(history, self.items.split(exclude)[0])
        if len(history):
            vector = await self._fold_in.submit(history)
            items = self._describe(*await self._best_items.submit(TopKRequest(vector, excluded, k)))
        else:
            items = self._popular_items(k, excluded)
        return {"items": items, "unknown": unknown_liked}

    async def similar(self, item: str, k: int) -> dict[str, Any]:
        """Return what `DRM.similar_items` returns for one item."""
        code = self.items.find(item)
        if code is None:
            raise unknown_id_error("item", [item])
        itself = np.array([code], dtype=np.int32)
        similar = await self._similar_items.submit(TopKRequest(self.similarity[code], itself, k))
        return {"item": self.items.ids[code], "items": self._describe(*similar)}

    def _describe(self, codes: Iterable[int], scores: Iterable[float | None]) -> list[dict[str, Any]]:
        """Return ids, titles and scores of items."""
        ids, titles = self.items.ids, self.titles
        if titles is None:
            return [{"item": ids[code], "score": score} for code, score in zip(codes, scores, strict=True)]
        return [
            {"item": ids[code], "title": titles[code], "score": score}
            for code, score in zip(codes, scores, strict=True)
        ]

    def _popular_items(self, k: int, excluded: ItemCodes) -> list[dict[str, Any]]:
        left_out = set(excluded.tolist())
        codes = list(islice((code for code in self.by_popularity if code not in left_out), k))
        return self._describe(codes, [None] * len(codes))


def unknown_id_error(kind: str, ids: Sequence[ExternalId]) -> UnknownIdError:
    """Return the error that names unknown ids. Unlike the error of the model, it reveals no other ids to the client."""
    names = ", ".join(repr(value)[:80] for value in ids[:SHOWN])
    more = f" and {len(ids) - SHOWN:,} more" if len(ids) > SHOWN else ""
    return UnknownIdError(f"unknown {kind} id{'s' if len(ids) > 1 else ''}: {names}{more}")
