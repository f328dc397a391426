"""The interactions of the users whose lists a rank trains on, from the ranks that hold these users.

A rank reads the interactions of its own users only, so that the data set may be larger than the memory of a machine.
Every rank knows how many interactions each user has.
"""

from __future__ import annotations

import torch
from torch import Tensor

from drm_triton.data.csr import CSR
from drm_triton.distributed.rows import Division, distinct
from drm_triton.distributed.world import World
from drm_triton.kernels.batches import ListBatch
from drm_triton.kernels.catalogue import CataloguePlan
from drm_triton.kernels.cpu.sampling import list_users, sample_lists
from drm_triton.kernels.protocol import ListPlan


class Interactions:
    """Interactions without weights that are divided by users."""

    def __init__(self, world: World, fit: CSR, users: Division) -> None:
        self.world, self.users = world, users
        held = users.rows(world.rank)
        self.own = fit.between(held.start, held.stop)
        self.indptr = fit.tensors("cpu")[0]

    def fetch(self, wanted: Tensor) -> Tensor:
        """Return the items of some users, int32 [m] ascending, one user after the other: int32."""
        world, first = self.world, self.users.bounds[self.world.rank]
        requests = [[wanted[cut]] for cut in self.users.cut(wanted)]
        asked = world.exchange(requests)
        replies = [[torch.from_numpy(self.own.take((ids - first).numpy()).indices)] for (ids,) in asked]
        sizes = [[int(self.degrees(ids).sum())] for (ids,) in requests]
        return torch.cat([items for (items,) in world.exchange(replies, sizes)])

    def degrees(self, users: Tensor) -> Tensor:
        """Return the number of interactions of users [m]: int64 [m]."""
        return self.indptr[users.long() + 1] - self.indptr[users.long()]


class ListSampler:
    """Draws lists as `sample_lists` of the CPU kernels does."""

    def __init__(self, interactions: Interactions) -> None:
        self.interactions = interactions
        self.begin = torch.zeros(interactions.users.n_rows, dtype=torch.int64)  # of the users of the last lists

    def __call__(self, plan: ListPlan, epoch: int, start: int, stop: int) -> ListBatch:
        """Draw lists number start .. stop - 1 of an epoch."""
        users, _ = distinct(list_users(plan, epoch, start, stop))
        items, degrees = self.interactions.fetch(users), self.interactions.degrees(users)
        self.begin[users.long()] = degrees.cumsum(0) - degrees
        return sample_lists(plan.holding(items, self.begin), epoch, start, stop)


class DividedCatalogue(CataloguePlan):
    """A plan whose interactions are divided by users. Every rank needs those of all users of a step."""

    def __init__(
        self, interactions: Interactions, n_items: int, seed: int, pool: int, prior: Tensor | None = None
    ) -> None:
        self.interactions = interactions
        super().__init__(interactions.indptr, torch.empty(0, dtype=torch.int32), n_items, seed, pool, None, prior)

    def positives(self, users: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the items of users [B] by rows: indptr [B + 1] and indices."""
        ascending, order = users.sort()
        items, degrees = self.interactions.fetch(ascending), self.interactions.degrees(ascending)
        indptr = torch.cat([degrees.new_zeros(1), degrees.cumsum(0)])
        rows = CSR(indptr.numpy(), items.numpy(), (len(users), self.n_items))
        return *rows.take(order.argsort().numpy()).tensors("cpu"), None
