"""Batches of training lists, written out or in a short form."""

from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from drm_triton.errors import InputError
from drm_triton.kernels.checks import (
    INT32,
    INT64,
    check_devices,
    check_index,
    check_integer,
    check_shared,
    check_tensor,
)


class SharedNegatives(NamedTuple):
    """The negatives that groups of consecutive lists have in common.

    List b belongs to group b // size. Its negative at position j is items[b // size, j], unless replaced[b, j]: the
    shared draw is one of the user's items, and the list has a separate draw instead.
    """

    size: int  # lists in a group; the last group may have fewer
    items: Tensor  # int32 [ceil(B / size), eta]
    replaced: Tensor  # bool [B, eta]


class OwnNegatives(NamedTuple):
    """The negatives that lists have in place of shared ones.

    Those of list b are entries first[b] .. first[b] + counts[b] - 1 of `places` and `items`. Entries of no list have no
    meaning.
    """

    first: Tensor  # int64 [B]
    counts: Tensor  # int64 [B]
    places: Tensor  # int32, of the shared negatives among those of the group, ascending within a list
    items: Tensor  # int32

    def entries(self) -> tuple[Tensor, Tensor]:
        """Return the lists of all entries with a meaning, list by list, and the positions of these entries: int64."""
        lists = torch.arange(len(self.counts), device=self.counts.device).repeat_interleave(self.counts)
        before = self.counts.cumsum(0) - self.counts
        return lists, torch.arange(len(lists), device=lists.device) + (self.first - before)[lists]


class ListBatch:
    """B training lists.

    users : int32 [B]
    items : int32 [B, n], rho positives followed by eta negatives
    shared : None if each list has its own negatives
    """

    def __init__(self, users: Tensor, items: Tensor, shared: SharedNegatives | None = None) -> None:
        self.users, self._items, self._shared = users, items, shared

    @property
    def items(self) -> Tensor:
        """Items of the lists."""
        return self._items

    @property
    def shared(self) -> SharedNegatives | None:
        """The negatives that lists have in common."""
        return self._shared

    def positives(self, rho: int) -> Tensor:
        """Return the positives of lists that have `rho` of them: int32 [B, rho]."""
        return self.items[:, :rho]

    def check_shapes(self, function: str, rho: int) -> int:
        """Raise unless the shapes of the tensors fit each other; return the number of items in a list."""
        check_tensor(function, "items", self.items, (len(self.users), None), INT32)
        if self.shared is not None:
            check_shared(function, self.shared, self.items, rho)
        check_devices(function, users=self.users, items=self.items)
        return self.items.shape[1]

    def check_values(self, function: str, n_items: int) -> None:
        """Raise unless all items are in 0 .. n_items - 1."""
        check_index(function, "items", self.items, n_items)
        if self.shared is not None:
            check_index(function, "the items of shared", self.shared.items, n_items)

    def ids(self) -> Tensor:
        """Return the items of all lists, some of them several times: int32 [E]."""
        shared = [] if self.shared is None else [self.shared.items.flatten()]
        return torch.cat([self.items.flatten(), *shared])

    def renumbered(self, users: Tensor, ids: Tensor) -> "ListBatch":
        """Return the same lists with other numbers of their users [B], and of the items that `ids` returned [E]."""
        n = self.items.numel()
        shared = self.shared and self.shared._replace(items=ids[n:].view(self.shared.items.shape))
        return ListBatch(users, ids[:n].view(self.items.shape), shared)


class GroupedBatch(ListBatch):
    """B training lists that share negatives, in a short form: what all lists of a group have is stored once.

    users : int32 [B]
    of_lists : int32 [B, rho], the positives
    size : lists in a group; the last group may have fewer
    of_groups : int32 [ceil(B / size), eta], the shared negatives
    own : what lists have in place of some of them
    """

    def __init__(self, users: Tensor, of_lists: Tensor, size: int, of_groups: Tensor, own: OwnNegatives) -> None:
        check_integer("GroupedBatch", "size", size, 1)
        self.users, self.of_lists, self.size, self.of_groups, self.own = users, of_lists, size, of_groups, own

    @classmethod
    def of(cls, batch: ListBatch) -> "GroupedBatch":
        """Return the short form of lists that share negatives."""
        if isinstance(batch, GroupedBatch):
            return batch
        assert batch.shared is not None
        size, negatives, replaced = batch.shared
        rho = batch.items.shape[1] - negatives.shape[1]
        lists, places = replaced.nonzero(as_tuple=True)
        count = torch.bincount(lists, minlength=len(replaced))
        own = OwnNegatives(count.cumsum(0) - count, count, places.to(torch.int32), batch.items[lists, rho + places])
        return cls(batch.users, batch.items[:, :rho], size, negatives, own)

    @cached_property
    def _written_out(self) -> tuple[Tensor, SharedNegatives]:
        rho, (lists, entries) = self.of_lists.shape[1], self.own.entries()
        places = self.own.places[entries].long()
        group = torch.arange(len(self.users), device=self.users.device) // self.size
        items = torch.cat([self.of_lists, self.of_groups[group]], 1)
        items[lists, rho + places] = self.own.items[entries]
        replaced = torch.zeros(len(items), self.of_groups.shape[1], dtype=torch.bool, device=items.device)
        replaced[lists, places] = True
        return items, SharedNegatives(self.size, self.of_groups, replaced)

    @property
    def items(self) -> Tensor:
        """Items of the lists, written out when they are first asked for."""
        return self._written_out[0]

    @property
    def shared(self) -> SharedNegatives:
        """The negatives that lists have in common."""
        return self._written_out[1]

    def positives(self, rho: int) -> Tensor:
        """Return the positives of lists that have `rho` of them: int32 [B, rho]."""
        return self.of_lists[:, :rho]

    def check_shapes(self, function: str, rho: int) -> int:
        """Raise unless the shapes of the tensors fit each other; return the number of items in a list."""
        B = len(self.users)
        check_tensor(function, "the positives", self.of_lists, (B, rho), INT32)
        check_tensor(function, "the negatives of groups", self.of_groups, (-(-B // self.size), None), INT32)
        check_tensor(function, "the first own negatives", self.own.first, (B,), INT64)
        check_tensor(function, "the counts of own negatives", self.own.counts, (B,), INT64)
        check_tensor(function, "the places of own negatives", self.own.places, (None,), INT32)
        check_tensor(function, "the own negatives", self.own.items, (len(self.own.places),), INT32)
        check_devices(function, users=self.users, positives=self.of_lists, negatives=self.of_groups, own=self.own.items)
        return rho + self.of_groups.shape[1]

    def check_values(self, function: str, n_items: int) -> None:
        """Raise unless all items are in 0 .. n_items - 1, and the own negatives of each list exist."""
        eta, entries = self.of_groups.shape[1], len(self.own.places)
        check_index(function, "the positives", self.of_lists, n_items)
        check_index(function, "the negatives of groups", self.of_groups, n_items)
        check_index(function, "the counts of own negatives", self.own.counts, min(eta, entries) + 1)
        if (self.own.first < 0).any() or (self.own.first > entries - self.own.counts).any():
            raise InputError(f"{function}: the own negatives must be among the {entries} entries")
        used = self.own.entries()[1]
        check_index(function, "the places of own negatives", self.own.places[used], eta)
        check_index(function, "the own negatives", self.own.items[used], n_items)

    def ids(self) -> Tensor:
        """Return the items of all lists, those of a group once: int32 [E]."""
        return torch.cat([self.of_lists.flatten(), self.of_groups.flatten(), self.own.items[self.own.entries()[1]]])

    def renumbered(self, users: Tensor, ids: Tensor) -> "GroupedBatch":
        """Return the same lists with other numbers of their users [B], and of the items that `ids` returned [E]."""
        entries = self.own.entries()[1]
        positives, negatives, own = ids.split([self.of_lists.numel(), self.of_groups.numel(), len(entries)])
        first = self.own.counts.cumsum(0) - self.own.counts
        return GroupedBatch(
            users,
            positives.view(self.of_lists.shape),
            self.size,
            negatives.view(self.of_groups.shape),
            OwnNegatives(first, self.own.counts, self.own.places[entries], own),
        )
