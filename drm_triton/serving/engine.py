"""A fitted model that answers single requests, many at a time: what `drm_triton.serving.app` serves over HTTP.

A request becomes a question to the top-K kernel (a vector, the items to leave out, k), and questions that wait at the
same time are put in one call, which costs little more for eight rows than for one. The items are packed for the kernel
once, at the start. No frame is built and no table of ids searched on the way.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from itertools import islice
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray
from torch import Tensor

from drm_triton.data.csr import CSR
from drm_triton.data.ids import SHOWN
from drm_triton.errors import InputError
from drm_triton.kernels.protocol import Backend
from drm_triton.model import DRM
from drm_triton.names import Score
from drm_triton.ranking.fold_in import fold_in
from drm_triton.ranking.recommend import Candidates

MOST_TOGETHER = 64  # questions in one call: a block of the CPU kernel

Q = TypeVar("Q")
A = TypeVar("A")
Id = int | str
Codes = NDArray[np.int32]  # ascending, without repeats
Best = tuple[list[int], list[float]]  # rows of a table and their scores, the best first

NONE: Codes = np.zeros(0, dtype=np.int32)


class UnknownIdError(InputError):
    """The model has no user or item of this id, or has learnt nothing about the user."""


class Batches(Generic[Q, A]):
    """Answers questions in batches, one batch at a time and off the event loop.

    A question that comes alone is answered at once; those that come while a batch is at work make up the next one.
    """

    def __init__(self, answer: Callable[[list[Q]], Sequence[A]], pool: Executor) -> None:
        self._answer, self._pool = answer, pool
        self._waiting: list[tuple[Q, asyncio.Future[A]]] = []
        self._work: asyncio.Task[None] | None = None

    async def ask(self, question: Q) -> A:
        """Wait for the answer to one question."""
        future: asyncio.Future[A] = asyncio.get_running_loop().create_future()
        self._waiting.append((question, future))
        if self._work is None:
            self._work = asyncio.create_task(self._answer_all())
        return await future

    async def _answer_all(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting[:MOST_TOGETHER], self._waiting[MOST_TOGETHER:]
            questions, futures = [question for question, _ in batch], [future for _, future in batch]
            try:
                answers = await asyncio.get_running_loop().run_in_executor(self._pool, self._answer, questions)
            except Exception as error:
                for future in futures:
                    if not future.done():
                        future.set_exception(error)
            else:
                for future, answer in zip(futures, answers, strict=True):
                    if not future.done():  # whoever asked may have gone
                        future.set_result(answer)
        self._work = None


class Question(NamedTuple):
    """The k rows of a table that score best with a vector."""

    vector: Tensor  # [d]
    left_out: Codes
    k: int


def ranker(ops: Backend, table: Tensor, score: Score) -> Callable[[list[Question]], list[Best]]:
    """Answer questions about a table [N, d] by one call of the top-K kernel."""
    packed = ops.pack_items(table, score)

    def rank(questions: list[Question]) -> list[Best]:
        mask = _rows([question.left_out for question in questions], len(table))
        k = min(max(question.k for question in questions), len(table))
        vectors = torch.stack([question.vector for question in questions])
        found, scores = ops.top_k(vectors, packed, k, mask.tensors(table.device))
        lists = []
        for question, row, values in zip(questions, found.tolist(), scores.tolist(), strict=True):
            size = row.index(-1) if row[-1] == -1 else k
            size = min(size, question.k)
            lists.append((row[:size], values[:size]))
        return lists

    return rank


def _rows(rows: Sequence[Codes], columns: int) -> CSR:
    return CSR(np.cumsum([0, *map(len, rows)]), np.concatenate(rows), (len(rows), columns))


class Ids:
    """External ids by code, and codes by the text of an id: 17 and "17" are the same."""

    def __init__(self, ids: pl.Series, kind: str) -> None:
        self.ids: list[Id] = ids.to_list()
        self.kind = kind
        self._codes = {str(value): code for code, value in enumerate(self.ids)}

    def find(self, given: Id) -> int | None:
        """Code of an id, None if it is not known."""
        return self._codes.get(str(given))

    def split(self, given: Iterable[Id]) -> tuple[Codes, list[Id]]:
        """Codes of those that are known, and those that are not."""
        found = {value: self.find(value) for value in given}
        known = {code for code in found.values() if code is not None}
        return np.array(sorted(known), dtype=np.int32), [value for value, code in found.items() if code is None]

    def unknown(self, given: Sequence[Id]) -> UnknownIdError:
        """Make the error that names ids. Unlike that of the model, it tells a stranger nothing about other ids."""
        names = ", ".join(repr(value)[:80] for value in given[:SHOWN])
        more = f" and {len(given) - SHOWN:,} more" if len(given) > SHOWN else ""
        return UnknownIdError(f"unknown {self.kind} id{'s' if len(given) > 1 else ''}: {names}{more}")


class Service:
    """The questions that a fitted model answers: ids in, rows {item, title, score} out, the best first.

    Titles are there only if the data has them, and an item that is listed for being popular has a score of None.
    `unknown` says whether ids that the model does not know are an error, or are done without, and the list is that of
    the most popular items where nothing else is left.
    """

    def __init__(self, model: DRM) -> None:
        self.model = model
        self.data, self.U, self.V = model.interactions, model.user_factors, model.item_factors
        ops, _ = model.backend()
        score = model.config.score
        self.users, self.items = Ids(self.data.user_ids, "user"), Ids(self.data.item_ids, "item")
        titles = self.data.item_titles
        self.titles: list[str | None] | None = None if titles is None else titles.cast(pl.String).to_list()
        self.popular: list[int] = Candidates(self.data, self.V).popular(len(self.V)).tolist()
        self.similarity = torch.nn.functional.normalize(self.V) if score == "dot" else self.V

        def fit(histories: list[Codes]) -> Sequence[Tensor]:
            return list(fold_in(self.V, _rows(histories, len(self.V)), model.config, ops))

        best, alike = ranker(ops, self.V, score), ranker(ops, self.similarity, score)
        first = np.zeros(1, dtype=np.int32)
        best([Question(fit([first])[0], first, 1)])  # compiled, before the first request comes
        alike([Question(self.similarity[0], first, 1)])
        # Each sort of question is at work in one thread at most, with as many of the kernels' as the model may use.
        pool = ThreadPoolExecutor(3, "serve", initializer=model.backend)
        self._best, self._alike, self._fit = Batches(best, pool), Batches(alike, pool), Batches(fit, pool)

    async def recommend(self, user: str, k: int, exclude_seen: bool, unknown: str) -> dict[str, Any]:
        """As `DRM.recommend` for one user."""
        code = self.users.find(user)
        own = NONE if code is None else self.data.train.row(code)
        if code is None or len(own) == 0:
            if unknown == "popular":
                return {"user": user if code is None else self.users.ids[code], "items": self._most_popular(k, NONE)}
            if code is None:
                raise self.users.unknown([user])
            raise UnknownIdError(f"user {user[:80]!r} has no interactions in the training data")
        seen = own if exclude_seen else NONE
        best = await self._best.ask(Question(self.U[code], seen, k))
        return {"user": self.users.ids[code], "items": self._listed(*best)}

    async def recommend_from(self, liked: list[Id], k: int, exclude: list[Id], unknown: str) -> dict[str, Any]:
        """As `DRM.recommend_from` for one person."""
        history, strange = self.items.split(liked)
        if strange and unknown == "error":
            raise self.items.unknown(strange)
        left_out = np.union1d(history, self.items.split(exclude)[0])
        if len(history):
            vector = await self._fit.ask(history)
            listed = self._listed(*await self._best.ask(Question(vector, left_out, k)))
        else:
            listed = self._most_popular(k, left_out)
        return {"items": listed, "unknown": strange}

    async def similar(self, item: str, k: int) -> dict[str, Any]:
        """As `DRM.similar_items` for one item."""
        code = self.items.find(item)
        if code is None:
            raise self.items.unknown([item])
        itself = np.array([code], dtype=np.int32)
        alike = await self._alike.ask(Question(self.similarity[code], itself, k))
        return {"item": self.items.ids[code], "items": self._listed(*alike)}

    def _listed(self, codes: Iterable[int], scores: Iterable[float | None]) -> list[dict[str, Any]]:
        ids, titles = self.items.ids, self.titles
        if titles is None:
            return [{"item": ids[code], "score": score} for code, score in zip(codes, scores, strict=True)]
        return [
            {"item": ids[code], "title": titles[code], "score": score}
            for code, score in zip(codes, scores, strict=True)
        ]

    def _most_popular(self, k: int, left_out: Codes) -> list[dict[str, Any]]:
        absent = set(left_out.tolist())
        codes = list(islice((code for code in self.popular if code not in absent), k))
        return self._listed(codes, [None] * len(codes))
