"""Items that single users may or must not get: `only` and `without` as tables of users and items."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from drm_triton.data.csr import CSR
from drm_triton.data.dataset import Dataset
from drm_triton.data.ids import lookup, named
from drm_triton.errors import InputError, warn
from drm_triton.ranking.recommend import user_item_pairs, warn_of_unknown_items
from drm_triton.ranking.topk import QUERIES_PER_BLOCK

MASK = 1 << 24  # bits of users and items that are held at once


class NothingLeftError(InputError):
    """Rules about single users leave nothing for any of them."""


def is_per_user(items: Any) -> bool:
    """Return whether `only` or `without` names users: a mapping from user to items, or a frame."""
    return isinstance(items, Mapping) or hasattr(items, "columns")


@dataclass(frozen=True)
class PerUser:
    """The items that each target user may get, and those that the user must not get.

    Attributes
    ----------
    only : CSR [m, N]; None for all items
    without : CSR [m, N]
    """

    only: CSR | None
    without: CSR

    @classmethod
    def of_users(cls, users: pl.Series, data: Dataset, only: Any, without: Any) -> PerUser | None:
        """Return what `only` and `without` say about users [m]; None if they name no users.

        Parameters
        ----------
        users : external ids of the target users
        data : data set of the model
        only, without : mapping from user to item ids, or frame with columns user and item; anything else is ignored
        """
        if not is_per_user(only) and not is_per_user(without):
            return None
        allowed, forbidden = None, CSR.empty((len(users), data.n_items))
        if is_per_user(without):
            forbidden = _items_of(users, without, data, "without")
        if is_per_user(only):
            allowed = _items_of(users, only, data, "only")
            nothing = users.filter(allowed.degrees() == 0)
            if len(nothing) == len(users) > 0:
                raise NothingLeftError(f"`only` has no known items for any of these users: {named(nothing)}")
            if len(nothing):
                count = f"{len(nothing):,} of {len(users):,} users"
                warn(f"`only` has no known items for {count}, who get no recommendations: {named(nothing)}")
        return cls(allowed, forbidden)

    @property
    def users_at_once(self) -> int:
        """The number of users that `excluded` may be called with: bounds its memory."""
        return QUERIES_PER_BLOCK if self.only is None else max(1, MASK // self.without.shape[1])

    @cached_property
    def _of_some_user(self) -> NDArray[np.int64]:
        """The items that some user may get, ascending."""
        assert self.only is not None
        return np.flatnonzero(self.only.popularity())

    def among(self, candidates: NDArray[np.int64] | None) -> NDArray[np.int64] | None:
        """Return those of the candidates, ascending codes or None for all items, that some user may get."""
        if self.only is None or not self.only.shape[0]:
            return candidates
        some = self._of_some_user
        found = some if candidates is None else np.intersect1d(some, candidates, assume_unique=True)
        if not len(found):
            raise NothingLeftError("no items are left to recommend: `only` has no item that these users may get")
        return found

    def excluded(self, positions: NDArray[np.int64], seen: CSR | None) -> CSR:
        """Return the items to leave out for some of the users, and the items that they have: CSR [b, N].

        Parameters
        ----------
        positions : int64 [b], places of the users among all target users
        seen : CSR [b, N], the items that they have, or None
        """
        parts = [self.without.take(positions), *([] if seen is None else [seen])]
        if self.only is None:
            return CSR.from_keys(_distinct(np.concatenate([part.keys() for part in parts])), parts[0].shape)
        found = np.zeros(parts[0].shape, dtype=bool)
        found[:, self._of_some_user] = True  # no index contains other items
        for row, position in enumerate(positions):
            found[row, self.only.row(position)] = False
            for part in parts:
                found[row, part.row(row)] = True
        return CSR.from_mask(found)


def _items_of(users: pl.Series, items: Any, data: Dataset, option: str) -> CSR:
    """Return the items that a table has for each of some users [m], none for users that are not in it: CSR [m, N]."""
    named_users, rows, ids = user_item_pairs(items, option)
    codes = lookup(ids, data.item_ids).astype(np.int64)
    known = codes >= 0
    if not known.all():
        warn_of_unknown_items(ids.filter(~known), len(ids), option)
    last = len(named_users)  # a row without items
    matrix = CSR.from_keys(_distinct(rows[known] * data.n_items + codes[known]), (last + 1, data.n_items))
    places = lookup(users, named_users) if last else np.full(len(users), -1)
    return matrix.take(np.where(places >= 0, places, last))


def _distinct(keys: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return keys of at least 0, ascending and without repeats. For millions of them, `np.unique` is slower."""
    keys = np.sort(keys)
    distinct: NDArray[np.int64] = keys[np.diff(keys, prepend=-1) > 0]
    return distinct
