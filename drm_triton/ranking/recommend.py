"""Recommendations as frames: users or histories -> queries -> top-K items -> frame.

`Recommender.recommend_blocks` runs these steps:

1. `known_users` or `new_users` turns external ids into `TargetUsers`.
2. `candidate_items` turns `only`, `without` and `where` into the items to choose from, which an index packs once. What
   is chosen for single users is in `ranking.per_user`, and rules of whole lists are in `ranking.rules`.
3. `recommendation_frames` searches the index, one block of users after the other.

The queries are vectors of users, for a `TopKIndex`, or their items, for an `ItemIndex`.

`similar_frame` does the same for similar items and similar users.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import polars as pl
from numpy.typing import NDArray

from drm_triton.data.conditions import Condition, satisfying
from drm_triton.data.csr import CSR
from drm_triton.data.dataset import Dataset
from drm_triton.data.frames import from_pandas
from drm_triton.data.ids import as_series, lookup, named, unknown_ids
from drm_triton.errors import InputError, warn
from drm_triton.names import Unknown
from drm_triton.ranking.known_first import Index
from drm_triton.ranking.popular import PopularIndex
from drm_triton.ranking.rules import RuledIndex
from drm_triton.ranking.topk import QUERIES_PER_BLOCK

if TYPE_CHECKING:
    from drm_triton.ranking.per_user import PerUser

Queries = Any  # float32 [m, d] for a TopKIndex, CSR [m, N] for an ItemIndex

MAX_FRAME_ROWS = 1 << 20  # bounds the memory of one frame when k is large


@dataclass(frozen=True)
class TargetUsers:
    """The users to recommend items to.

    Attributes
    ----------
    ids : external ids [m]
    rows : int64 [m], each user's row in `seen`; -1 for a user without a row
    seen : CSR, the items that a user already has
    has_query : bool [m]; a user without a query gets the most popular items
    queries : maps rows [b] to the queries of an index
    removed : position of a user without a row -> codes of the items that the user has by pairs that a filter removed
    """

    ids: pl.Series
    rows: NDArray[np.int64]
    seen: CSR
    has_query: NDArray[np.bool_]
    queries: Callable[[NDArray[np.int64]], Queries]
    removed: Mapping[int, NDArray[np.int32]] = field(default_factory=dict)

    def seen_by(self, positions: NDArray[np.int64]) -> CSR:
        """Return what some users have: CSR [b, N]."""
        rows = self.rows[positions]
        if (rows >= 0).all():
            return self.seen.take(rows)
        nothing = self.seen.indices[:0]
        found = [
            self.seen.row(r) if r >= 0 else self.removed.get(p, nothing)
            for r, p in zip(rows, positions.tolist(), strict=True)
        ]
        return CSR.from_rows(found, self.seen.shape[1])

    def nobody(self) -> TargetUsers:
        """Return the same without users."""
        return replace(self, ids=self.ids.clear(), rows=self.rows[:0], has_query=self.has_query[:0])


# -- 1. users or histories -> queries ------------------------------------------------------------------------------


def known_users(
    users: Any,
    data: Dataset,
    queries: Callable[[NDArray[np.int64]], Queries],
    unknown: Unknown,
    cold: NDArray[np.bool_] | None = None,
) -> TargetUsers:
    """Select users of the data set.

    Parameters
    ----------
    users : external ids; None for all users with interactions, and cold users
    data : data set of the model
    queries : maps codes of users [b] to their queries
    unknown : handling of ids that `find_users` does not find
    cold : bool [M], users who need no interactions; none by default
    """
    ids, codes, has_query = find_users(users, data, unknown, cold)
    outside = np.flatnonzero(codes < 0)
    removed: dict[int, NDArray[np.int32]] = {}
    if len(outside):
        others, items = data.removed_users
        rows = lookup(ids[outside], others)
        removed = {position: items.row(row) for position, row in zip(outside.tolist(), rows, strict=True) if row >= 0}
    return TargetUsers(ids, codes, data.owned, has_query, queries, removed)


def new_users(
    histories: Any,
    data: Dataset,
    queries: Callable[[CSR], Queries],
    unknown: Unknown,
    known: NDArray[np.bool_] | None = None,
) -> TargetUsers:
    """Select users who are not in the training data, given by the items they liked.

    Parameters
    ----------
    histories, unknown, known : see `encode_histories`
    data : training data of the model
    queries : maps liked items, CSR [b, N], to queries
    """
    ids, liked = encode_histories(histories, data, unknown, known)
    return TargetUsers(ids, np.arange(len(ids)), liked, liked.degrees() > 0, lambda rows: queries(liked.take(rows)))


def find_users(
    users: Any, data: Dataset, unknown: Unknown, cold: NDArray[np.bool_] | None = None
) -> tuple[pl.Series, NDArray[np.int64], NDArray[np.bool_]]:
    """Return external ids and codes of users, code -1 for unknown ones, and whether something is known about them.

    A user without interactions, held-out ones included, has an id, but nothing is known about this user, except if it
    is a `cold` one. Such users are treated as unknown. When all users are selected (`users` is None), they are skipped
    with a warning instead of raising an error.
    """
    check_unknown(unknown)
    ids = data.user_ids if users is None else as_series(users, "user")
    codes = np.arange(data.n_users) if users is None else lookup(ids, data.user_ids).astype(np.int64)
    known = codes >= 0
    without_interactions = known.copy()
    empty = data.liked.degrees() == 0
    without_interactions[known] = (empty if cold is None else empty & ~cold)[codes[known]]
    found = known & ~without_interactions
    if unknown == "popular" and not found.all():
        typed_ids = ids.cast(data.user_ids.dtype, strict=False)
        return (ids.cast(pl.String) if typed_ids.null_count() else typed_ids), codes, found
    if not known.all():
        _raise_or_warn(ids.filter(~known), len(ids), data.user_ids, "user", unknown)
    if without_interactions.any():
        reason = describe_users_without_interactions(ids.filter(without_interactions), "the data set")
        if unknown == "error" and users is not None:
            raise InputError(f"{reason}, so nothing is known about their taste; {_alternatives('user')}")
        warn(f"skipped {without_interactions.sum():,} of {len(ids):,} users: {reason}")
    return data.user_ids[codes[found]], codes[found], found[found]


def describe_users_without_interactions(users: pl.Series, where: str) -> str:
    """Return the clause of a message that names users without interactions in a place."""
    users = users.unique(maintain_order=True)
    one = len(users) == 1
    return f"user{'' if one else 's'} {named(users)} {'has' if one else 'have'} no interactions in {where}"


def encode_histories(
    histories: Any, data: Dataset, unknown: Unknown = "error", known: NDArray[np.bool_] | None = None
) -> tuple[pl.Series, CSR]:
    """Return the ids of new users and the codes of their items: CSR [B, N].

    Parameters
    ----------
    histories : mapping from user to item ids, list of lists of item ids (the users are then 0, 1, ...), or frame with
        columns user and item. Repeated items count once.
    data : training data of the model
    unknown : handling of item ids that the model does not know. `error` raises. `skip` and `popular` ignore these
        items; users without any known item are then left out (`skip`) or kept with an empty row (`popular`).
    known : bool [N], items of which the model knows something; it treats others like unknown ids. None: all
    """
    check_unknown(unknown)
    users, rows, items = user_item_pairs(histories, "histories")
    codes = lookup(items, data.item_ids).astype(np.int64)
    if known is not None:
        nothing = (codes >= 0) & ~known[np.maximum(codes, 0)]
        if nothing.any() and unknown == "error":
            raise InputError(
                f"{named(items.filter(nothing))}: no interactions in the training data, and no attributes that this "
                f"model could use instead, so they say nothing about a user. Leave them out, or {_alternatives('item')}"
            )
        codes[nothing] = -1
    if (codes < 0).any():
        _raise_or_warn(items.filter(codes < 0), len(items), data.item_ids, "item", unknown, data.item_titles)
        rows, codes = rows[codes >= 0], codes[codes >= 0]
    matrix = CSR.from_keys(np.unique(rows * data.n_items + codes), (len(users), data.n_items))
    empty = matrix.degrees() == 0
    if empty.any() and unknown == "error":
        raise InputError(f"the history of user {users.filter(empty)[0]!r} is empty: give at least one item")
    if empty.any() and unknown == "skip":
        warn(f"skipped {empty.sum():,} of {len(users):,} users: the model knows none of their items")
        return users.filter(~empty), matrix.take(np.flatnonzero(~empty))
    return users, matrix


def user_item_pairs(histories: Any, option: str) -> tuple[pl.Series, NDArray[np.int64], pl.Series]:
    """Return users [B], and for each item of a history the position of its user [n] and the item id [n].

    `option` is the name of `histories` in messages.
    """
    if hasattr(histories, "columns"):  # a polars or pandas frame
        if not {"user", "item"} <= set(histories.columns):
            raise InputError(f"a frame of `{option}` needs columns user and item; it has {list(histories.columns)}")
        if not isinstance(histories, pl.DataFrame):
            histories = from_pandas(histories, ["user", "item"])
        if histories["user"].null_count():
            raise InputError(f"a frame of `{option}` has rows without a user; complete or remove them")
        users = histories["user"].unique(maintain_order=True)
        positions = pl.DataFrame({"user": users}).with_row_index("row")
        rows = histories.select("user").join(positions, on="user", how="left", maintain_order="left")["row"]
        return users, rows.to_numpy().astype(np.int64), as_series(histories["item"], "item")
    if isinstance(histories, str | bytes) or not hasattr(histories, "__iter__"):
        raise InputError(
            f"`{option}` must be a list of lists of item ids, a mapping from user to such a list, or a frame with "
            f"columns user and item, not {type(histories).__name__}"
        )
    item_lists = list(histories.values()) if isinstance(histories, Mapping) else list(histories)
    single = [items for items in item_lists if isinstance(items, str | bytes) or not hasattr(items, "__iter__")]
    if single and not isinstance(histories, Mapping):
        raise InputError(
            f"`{option}` must hold a list of item ids for each user, but holds the single value {single[0]!r}; for one "
            f"user, write [[{single[0]!r}, ...]] or {{user: [{single[0]!r}, ...]}}"
        )
    users = as_series(histories if isinstance(histories, Mapping) else range(len(item_lists)), "user")
    series = [as_series(items, "item") for items in item_lists]
    filled = [items for items in series if len(items)] or [pl.Series(dtype=pl.String)]
    if len({items.dtype for items in filled}) > 1:  # some histories hold ids as text
        filled = [items.cast(pl.String) for items in filled]
    return users, np.repeat(np.arange(len(item_lists)), [len(items) for items in series]), pl.concat(filled)


# -- 2. the items to choose from -----------------------------------------------------------------------------------


def candidate_items(
    data: Dataset, only: Any = None, without: Any = None, where: Sequence[Condition] = ()
) -> NDArray[np.int64] | None:
    """Return the codes of the items that may be recommended, ascending; None for all items.

    Parameters
    ----------
    data : training data of the model
    only : external ids of items to choose from; None for all
    without : external ids of items to leave out
    where : conditions that items must satisfy
    """
    if only is None and without is None and not where:
        return None
    allowed = satisfying(data.items, where)
    if not allowed.any():
        conditions = " and ".join(map(str, where))
        raise InputError(f"no items are left to recommend: no item satisfies `where` {conditions}")
    if only is not None:
        chosen = np.zeros(data.n_items, dtype=bool)
        chosen[_known_item_codes(only, data, "only")] = True
        allowed &= chosen
    if without is not None:
        allowed[_known_item_codes(without, data, "without")] = False
    if not allowed.any():
        removing = [f"`{name}`" for name, given in (("without", without is not None), ("where", where)) if given]
        remove = "removes" if len(removing) == 1 else "remove"
        raise InputError(
            f"no items are left to recommend: {' and '.join(removing)} {remove} all items that could be chosen"
        )
    return np.flatnonzero(allowed)


def _known_item_codes(ids: Any, data: Dataset, option: str) -> NDArray[np.int32]:
    """Return the codes of the ids that the model knows. It never recommends other items, so these only warn."""
    items = as_series(ids, "item")
    codes = lookup(items, data.item_ids)
    missing = items.filter(codes < 0)
    if option == "only" and len(missing) == len(items):
        if len(items) == 0:
            raise InputError("`only` is empty: give at least one item to choose from")
        raise InputError(f"`only`: {unknown_ids(missing, data.item_ids, 'item', data.item_titles)}")
    if len(missing):
        warn_of_unknown_items(missing, len(items), option)
    return codes[codes >= 0]


def warn_of_unknown_items(missing: pl.Series, total: int, option: str) -> None:
    """Warn of items in `only` or `without` that the model does not know."""
    warn(f"`{option}`: the model does not know {len(missing):,} of the {total:,} items: {named(missing)}")


# -- 3. queries -> top-K items -> frame ----------------------------------------------------------------------------


def recommendation_frames(
    users: TargetUsers,
    index: Index,
    data: Dataset,
    k: int,
    exclude_seen: bool,
    per_user: PerUser | None = None,
) -> Iterator[pl.DataFrame]:
    """Yield frames with columns user, rank, item, score, each for one block of users.

    Parameters
    ----------
    users : users to recommend to
    index : index of the candidate items
    data : training data of the model, for item ids and popularity
    k : number of items per user
    exclude_seen : leave out the items of `users.seen`
    per_user : items that each user may or must not get
    """
    k = min(k, len(index))
    popular = None if users.has_query.all() else popular_index(data.popularity, index)
    block_size = max(1, min(QUERIES_PER_BLOCK, MAX_FRAME_ROWS // k))
    if per_user is not None:
        block_size = min(block_size, per_user.users_at_once)

    def excluded(positions: NDArray[np.int64]) -> CSR | None:
        seen = users.seen_by(positions) if exclude_seen else None
        return seen if per_user is None else per_user.excluded(positions, seen)

    for start in range(0, max(len(users.ids), 1), block_size):  # yield at least one frame, so that columns are known
        block = np.arange(start, min(start + block_size, len(users.ids)))
        ranked = users.has_query[block]
        items = np.zeros((len(block), k), dtype=np.int32)
        scores = np.full(items.shape, np.nan, dtype=np.float32)
        if ranked.any():
            queries = users.queries(users.rows[block[ranked]])
            items[ranked], scores[ranked] = index.search(queries, k, excluded(block[ranked]))
        if popular is not None and not ranked.all():
            items[~ranked] = popular.search(np.zeros((~ranked).sum()), k, excluded(block[~ranked]))[0]
        yield _ranked_frame("user", users.ids[block], "item", data.item_ids, items, scores)


def popular_index(popularity: NDArray[np.int64], index: Index) -> PopularIndex | RuledIndex:
    """Return an index of the most popular items that obeys the rules of another index."""
    popular = PopularIndex(popularity, index.candidates)
    return index.over(popular) if isinstance(index, RuledIndex) else popular


def similar_frame(
    kind: str, codes: NDArray[np.int32], ids: pl.Series, index: Index, queries: Queries, k: int
) -> pl.DataFrame:
    """Return the k rows most similar to some rows, never the row itself: a frame of kind, rank, similar, score.

    Parameters
    ----------
    kind : `item` or `user`, the name of the first column
    codes : int32 [m], rows to find similar rows for
    ids : external ids of all rows
    index : index whose scores are the similarities
    queries : its queries for the rows [m]
    k : number of similar rows for each
    """
    check_k(f"similar_{kind}s", k)
    itself = CSR(np.arange(len(codes) + 1), codes, (len(codes), len(ids)))
    similar, scores = index.search(queries, min(k, len(index)), itself)
    return _ranked_frame(kind, ids[codes], "similar", ids, similar, scores)


def _ranked_frame(
    query_column: str,
    query_ids: pl.Series,
    result_column: str,
    result_ids: pl.Series,
    codes: NDArray[np.int32],
    scores: NDArray[np.float32],
) -> pl.DataFrame:
    """Return one row for each entry of codes [m, k] that is not -1, with the external ids of query and result."""
    m, k = codes.shape
    kept = codes >= 0
    return pl.DataFrame(
        {
            query_column: query_ids[np.repeat(np.arange(m), kept.sum(1))],
            "rank": np.broadcast_to(np.arange(1, k + 1, dtype=np.int32), kept.shape)[kept],
            result_column: result_ids[codes[kept]],
            "score": pl.Series(scores[kept], nan_to_null=True),
        }
    )


# -- checks and messages -------------------------------------------------------------------------------------------


def check_k(function: str, k: int) -> None:
    """Raise unless k is a positive integer."""
    if not isinstance(k, int | np.integer) or isinstance(k, bool) or k < 1:
        raise InputError(f"{function}: `k` must be an integer of at least 1, got {k!r}")


def check_unknown(unknown: str) -> None:
    """Raise unless `unknown` is one of the allowed values."""
    if unknown not in get_args(Unknown):
        raise InputError(f"`unknown` must be one of {', '.join(get_args(Unknown))}, got {unknown!r}")


def _raise_or_warn(
    missing: pl.Series, total: int, known: pl.Series, kind: str, unknown: Unknown, titles: pl.Series | None = None
) -> None:
    if unknown == "error":
        raise InputError(f"{unknown_ids(missing, known, kind, titles)}. Correct the ids, or {_alternatives(kind)}")
    warn(f"skipped {len(missing):,} of {total:,} {kind} ids that the model does not know: {named(missing)}")


def _alternatives(kind: str) -> str:
    """Return the end of an error message that offers the other values of `unknown`."""
    recipients = "to them" if kind == "user" else "to users without known items"
    return (
        f'use `unknown="skip"` to skip such {kind}s, or `unknown="popular"` to recommend the most popular items '
        f"{recipients}"
    )
