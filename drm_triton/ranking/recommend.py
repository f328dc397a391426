"""Top-K lists as frames: for whom, from which items, and what to do about ids that the model does not know."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, get_args

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray
from torch import Tensor

from drm_triton.data.csr import CSR, by_popularity
from drm_triton.data.dataset import Dataset
from drm_triton.data.frames import from_pandas
from drm_triton.data.ids import as_series, lookup, named, unknown_ids
from drm_triton.errors import InputError
from drm_triton.kernels.protocol import Backend
from drm_triton.names import Score

Unknown = Literal["error", "skip", "popular"]

BLOCK = 4096  # persons ranked at a time, and
BLOCK_ROWS = 1 << 20  # rows of a frame, at most: bounds the memory of a stream of lists


class Candidates:
    """The items that may be recommended, best first by the top-K kernel or by popularity.

    The kernel sees a table of the candidates alone, in the order of the codes, so ties go to the lower code as ever.

    Parameters
    ----------
    only : external ids to choose from; None for all items
    without : external ids to leave out
    """

    def __init__(self, data: Dataset, V: Tensor, only: Any = None, without: Any = None) -> None:
        self.data, self.V = data, V
        self.codes: NDArray[np.int64] | None = None  # ascending; None: all
        if only is None and without is None:
            return
        allowed = np.ones(data.n_items, dtype=bool)
        if only is not None:
            allowed[:] = False
            allowed[_known_items(only, data, "only")] = True
        if without is not None:
            allowed[_known_items(without, data, "without")] = False
        if not allowed.any():
            raise InputError("nothing is left to recommend: `only` less `without` has none of the model's items")
        self.codes = np.flatnonzero(allowed)
        self.V = V[torch.from_numpy(self.codes).to(V.device)]

    def top_k(
        self, ops: Backend, queries: Tensor, k: int, score: Score, seen: CSR | None
    ) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Codes and scores of the k best candidates of each query, [m, k], with code -1 where there are no more."""
        mask = None if seen is None else self._among(seen).tensors(queries.device)
        items, scores = (x.cpu().numpy() for x in ops.top_k(queries, ops.pack_items(self.V, score), k, mask))
        if self.codes is not None:
            items = np.where(items >= 0, self.codes.astype(np.int32)[items], -1)
        return items, scores

    def popular(self, k: int) -> NDArray[np.int32]:
        """Codes of the k candidates with the most interactions, ties to the lower code."""
        return by_popularity(self.data.train.popularity(), self.codes)[:k].astype(np.int32)

    def _among(self, seen: CSR) -> CSR:
        """Those of the seen items that are candidates, by their place among them."""
        if self.codes is None:
            return seen
        place = np.full(seen.shape[1], -1, dtype=np.int32)
        place[self.codes] = np.arange(len(self.codes), dtype=np.int32)
        kept = place[seen.indices] >= 0
        rows = np.repeat(np.arange(seen.shape[0]), seen.degrees())
        return CSR.from_pairs(rows[kept], place[seen.indices[kept]], (seen.shape[0], len(self.codes)))

    def __len__(self) -> int:
        return len(self.V)


def top_lists(
    ops: Backend,
    persons: pl.Series,
    modelled: NDArray[np.bool_],
    ask: Callable[[NDArray[np.int64]], tuple[Tensor, CSR]],
    candidates: Candidates,
    k: int,
    score: Score,
    exclude_seen: bool,
) -> Iterator[pl.DataFrame]:
    """Lists of some persons, block by block, in frames with columns user, rank, item, score.

    Parameters
    ----------
    persons : their ids
    modelled : bool [len(persons)]; those without a vector get the most popular items, with a score of null
    ask : called with positions in `persons`, gives the vectors [m, d] of these and the items that each has seen
    """
    k = min(k, len(candidates))
    popular = candidates.popular(k) if not modelled.all() else np.zeros(k, dtype=np.int32)
    size = max(1, min(BLOCK, BLOCK_ROWS // k))
    for start in range(0, max(len(persons), 1), size):  # at least one frame, if an empty one
        block = np.arange(start, min(start + size, len(persons)))
        items = np.tile(popular, (len(block), 1))
        scores = np.full(items.shape, np.nan, dtype=np.float32)
        ours = modelled[block]
        if ours.any():
            vectors, seen = ask(block[ours])
            items[ours], scores[ours] = candidates.top_k(ops, vectors, k, score, seen if exclude_seen else None)
        yield _frame("user", persons[block], "item", candidates.data.item_ids, items, scores)


def similar(
    ops: Backend, kind: str, codes: NDArray[np.int32], ids: pl.Series, factors: Tensor, k: int, score: Score
) -> pl.DataFrame:
    """The k rows of a table of factors most similar to some of its rows, in a frame of kind, rank, similar, score."""
    check_k(f"similar_{kind}s", k)
    table = torch.nn.functional.normalize(factors) if score == "dot" else factors
    itself = CSR(np.arange(len(codes) + 1), codes, (len(codes), len(ids)))
    queries = table[torch.from_numpy(codes).to(table.device)]
    found, scores = ops.top_k(queries, ops.pack_items(table, score), min(k, len(ids)), itself.tensors(table.device))
    return _frame(kind, ids[codes], "similar", ids, found.cpu().numpy(), scores.cpu().numpy())


def _frame(
    left: str, of: pl.Series, right: str, ids: pl.Series, codes: NDArray[np.int32], scores: NDArray[np.float32]
) -> pl.DataFrame:
    """Rows of the lists codes [m, k] that are not -1."""
    m, k = codes.shape
    kept = codes >= 0
    return pl.DataFrame(
        {
            left: of[np.repeat(np.arange(m), kept.sum(1))],
            "rank": np.broadcast_to(np.arange(1, k + 1, dtype=np.int32), kept.shape)[kept],
            right: ids[codes[kept]],
            "score": pl.Series(scores[kept], nan_to_null=True),
        }
    )


def find_users(users: Any, data: Dataset, unknown: Unknown) -> tuple[pl.Series, NDArray[np.int64]]:
    """External ids and codes of the users asked for, code -1 for those who are to get popular items.

    A user without interactions in the training data has an id, but a vector that nothing was learnt of: such users are
    treated as unknown. Among all users (None) they are no error, and are left out with a warning.
    """
    check_unknown(unknown)
    asked = data.user_ids if users is None else as_series(users, "user")
    codes = np.arange(data.n_users) if users is None else lookup(asked, data.user_ids).astype(np.int64)
    known = codes >= 0
    idle = known.copy()
    idle[known] = data.train.degrees()[codes[known]] == 0
    learnt = known & ~idle
    if unknown == "popular" and not learnt.all():
        ids = asked.cast(data.user_ids.dtype, strict=False)
        return (asked.cast(pl.String) if ids.null_count() else ids), np.where(learnt, codes, -1)
    if not known.all():
        _refuse_or_warn(asked.filter(~known), len(asked), data.user_ids, "user", unknown)
    if idle.any():
        if unknown == "error" and users is not None:
            raise InputError(
                f"{without_interactions(asked.filter(idle))}, so nothing is known of their taste: leave such users out "
                "(unknown: skip) or have the most popular items (unknown: popular)"
            )
        _warn(f"left out {idle.sum():,} of {len(asked):,} users: {without_interactions(asked.filter(idle))}")
    return data.user_ids[codes[learnt]], codes[learnt]


def without_interactions(users: pl.Series) -> str:
    """What to say of users whom the model has an id of, and nothing else."""
    users = users.unique(maintain_order=True)
    one = len(users) == 1
    return f"user{'' if one else 's'} {named(users)} {'has' if one else 'have'} no interactions in the training data"


def encode_histories(histories: Any, data: Dataset, unknown: Unknown = "error") -> tuple[pl.Series, CSR]:
    """Persons and the codes of their items, ascending and without repeats: CSR [B, N].

    Parameters
    ----------
    histories : mapping of a person to item ids, list of lists of them (the persons are 0, 1, ...), or frame with
        columns user, item
    unknown : what to do about items that the model does not know: `error`, or otherwise do without them; and about
        persons of whom nothing is left: `error`, `skip` them, or keep them without items
    """
    check_unknown(unknown)
    persons, rows, asked = _pairs(histories)
    codes = lookup(asked, data.item_ids).astype(np.int64)
    if (codes < 0).any():
        _refuse_or_warn(asked.filter(codes < 0), len(asked), data.item_ids, "item", unknown, data.item_titles)
        rows, codes = rows[codes >= 0], codes[codes >= 0]
    keys = np.unique(rows * data.n_items + codes)
    matrix = CSR.from_pairs(*np.divmod(keys, max(data.n_items, 1)), (len(persons), data.n_items))
    empty = matrix.degrees() == 0
    if empty.any() and unknown == "error":
        raise InputError(f"the history of person {persons.filter(empty)[0]!r} is empty: give at least one item")
    if empty.any() and unknown == "skip":
        _warn(f"left out {empty.sum():,} of {len(persons):,} persons, of whose items the model knows none")
        return persons.filter(~empty), matrix.take(np.flatnonzero(~empty))
    return persons, matrix


def _pairs(histories: Any) -> tuple[pl.Series, NDArray[np.int64], pl.Series]:
    """Persons [B], and for each item in their histories the number of its person and its id: [n], [n]."""
    if hasattr(histories, "columns"):  # of polars or pandas
        if not {"user", "item"} <= set(histories.columns):
            raise InputError(f"a frame of histories needs columns user and item; it has {list(histories.columns)}")
        if not isinstance(histories, pl.DataFrame):
            histories = from_pandas(histories, ["user", "item"])
        persons = histories["user"].unique(maintain_order=True)
        numbers = pl.DataFrame({"user": persons}).with_row_index("row")
        rows = histories.select("user").join(numbers, on="user", how="left", maintain_order="left")["row"]
        return persons, rows.to_numpy().astype(np.int64), as_series(histories["item"], "item")
    if isinstance(histories, str | bytes) or not hasattr(histories, "__iter__"):
        raise InputError("histories are a list of lists of item ids, or a mapping of a person to such a list")
    lists = list(histories.values()) if isinstance(histories, Mapping) else list(histories)
    persons = as_series(histories if isinstance(histories, Mapping) else range(len(lists)), "person")
    series = [as_series(items, "item") for items in lists]
    filled = [items for items in series if len(items)] or [pl.Series(dtype=pl.String)]
    if len({items.dtype for items in filled}) > 1:  # some have their ids as text
        filled = [items.cast(pl.String) for items in filled]
    return persons, np.repeat(np.arange(len(lists)), [len(items) for items in series]), pl.concat(filled)


def check_k(function: str, k: int) -> None:
    """Raise unless k is a number of items."""
    if not isinstance(k, int | np.integer) or isinstance(k, bool) or k < 1:
        raise InputError(f"{function}: k must be at least 1, got {k!r}")


def check_unknown(unknown: str) -> None:
    """Raise unless it is one of the three ways."""
    if unknown not in get_args(Unknown):
        raise InputError(f"unknown must be one of {', '.join(get_args(Unknown))}, got {unknown!r}")


def _refuse_or_warn(
    missing: pl.Series, asked: int, known: pl.Series, kind: str, unknown: Unknown, titles: pl.Series | None = None
) -> None:
    if unknown == "error":
        raise InputError(
            f"{unknown_ids(missing, known, kind, titles)}. Correct the ids, or leave such {kind}s out (unknown: skip) "
            "or have the most popular items where nothing is known (unknown: popular)"
        )
    _warn(f"left out {len(missing):,} of {asked:,} {kind} ids that the model does not know: {named(missing)}")


def _known_items(ids: Any, data: Dataset, option: str) -> NDArray[np.int32]:
    """Codes of those of the ids that the model knows: what it does not know, it does not recommend anyway."""
    asked = as_series(ids, "item")
    codes = lookup(asked, data.item_ids)
    missing = asked.filter(codes < 0)
    if option == "only" and len(missing) == len(asked):
        if len(asked) == 0:
            raise InputError("only: the list of items to choose from is empty")
        raise InputError(f"only: {unknown_ids(missing, data.item_ids, 'item', data.item_titles)}")
    if len(missing):
        _warn(f"{option}: the model does not know {len(missing):,} of the {len(asked):,} items: {named(missing)}")
    return codes[codes >= 0]


def _warn(message: str) -> None:
    warnings.warn(message, UserWarning, stacklevel=5)
