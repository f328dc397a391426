"""Rows of the tables where they are needed, and their gradients where they are held.

A table of factors is divided by rows: a rank holds consecutive rows, with their Adagrad sums. For a step, it fetches
the rows that its lists need, and afterwards sends the gradient of each row to the rank that holds it. What several
ranks add to one row is summed there, in the order of the ranks and so in that of the lists: as one process would.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from drm_triton.distributed.world import World
from drm_triton.kernels.protocol import GradientTerms
from drm_triton.names import MAX_RANKS

LEAVES = MAX_RANKS  # consecutive parts of a table that are never divided


@dataclass(frozen=True)
class Division:
    """Which rank holds which rows of a table: consecutive leaves of it, which are consecutive rows.

    Examples
    --------
    >>> Division(640, 3).bounds
    (0, 210, 420, 640)
    """

    n_rows: int
    size: int  # ranks

    @cached_property
    def bounds(self) -> tuple[int, ...]:
        """Rank q holds rows bounds[q] .. bounds[q + 1] - 1."""
        return tuple(self._begin(self._leaf(rank)) for rank in range(self.size + 1))

    def leaves(self, rank: int) -> list[slice]:
        """Return the leaves of a rank, with rows counted from its first."""
        edges = [self._begin(leaf) - self.bounds[rank] for leaf in range(self._leaf(rank), self._leaf(rank + 1) + 1)]
        return [slice(start, stop) for start, stop in pairwise(edges)]

    def _leaf(self, rank: int) -> int:
        return LEAVES * rank // self.size

    def _begin(self, leaf: int) -> int:
        return self.n_rows * leaf // LEAVES

    def rows(self, rank: int) -> slice:
        """Return the rows of a rank."""
        return slice(self.bounds[rank], self.bounds[rank + 1])

    def cut(self, rows: Tensor) -> list[slice]:
        """Return the part of each rank in rows that ascend, [n]."""
        cuts = torch.searchsorted(rows, torch.tensor(self.bounds, dtype=rows.dtype, device=rows.device)).tolist()
        return [slice(start, stop) for start, stop in pairwise(cuts)]


def distinct(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distinct numbers among ids int32 [E], ascending, and the place of each id among them: int32."""
    found, places = ids.unique(return_inverse=True)
    return found, places.to(torch.int32)


def fetch(world: World, wanted: Sequence[tuple[Tensor, Division, Tensor]]) -> list[Tensor]:
    """Return rows of some tables.

    Parameters
    ----------
    wanted : for each table, the numbers of the wanted rows, int32 [n], ascending; which rank holds which rows; and the
        rows that this rank holds, [R, d]

    Returns
    -------
    the wanted rows of each table, [n, d]
    """
    cuts = [division.cut(rows) for rows, division, _ in wanted]
    requests = [[rows[cut[q]] for (rows, _, _), cut in zip(wanted, cuts, strict=True)] for q in range(world.size)]
    asked = world.exchange(requests)
    replies = [
        [
            table[(ids - division.bounds[world.rank]).long()]
            for ids, (_, division, table) in zip(part, wanted, strict=True)
        ]
        for part in asked
    ]
    received = world.exchange(replies, [[len(ids) for ids in part] for part in requests])
    return [torch.cat([part[number] for part in received]) for number in range(len(wanted))]


def leaving_terms(terms: GradientTerms, division: Division) -> list[list[Tensor]]:
    """Return for each rank the terms of its rows: rows, sources, coefficients, totals, and the vectors that they need.

    The terms have rows [E, 1] of the whole table, and come in their order. A vector is sent to a rank once.
    """
    rows, sources = terms.rows[:, 0], terms.sources.long()
    coefficients = terms.coefficients[:, 0]
    totals = coefficients if terms.totals is None else terms.totals[:, 0]
    place = torch.empty(len(terms.vectors), dtype=torch.int32, device=rows.device)
    parts = []
    for start, stop in pairwise(division.bounds):
        chosen = ((rows >= start) & (rows < stop)).nonzero()[:, 0]
        used = torch.zeros(len(place), dtype=torch.bool, device=rows.device)
        used[sources[chosen]] = True
        vectors = used.nonzero()[:, 0]
        place[vectors] = torch.arange(len(vectors), dtype=torch.int32, device=rows.device)
        parts.append(
            [rows[chosen], place[sources[chosen]], coefficients[chosen], totals[chosen], terms.vectors[vectors]]
        )
    return parts


def arrived_terms(parts: Sequence[Sequence[Tensor]], first_row: int) -> GradientTerms:
    """Return the terms that ranks have sent, in their order, with rows counted from the first that this rank holds."""
    rows = torch.cat([part[0] for part in parts]) - first_row
    before, sources = 0, []
    for part in parts:
        sources.append(part[1] + before)
        before += len(part[4])
    coefficients, totals, vectors = (torch.cat([part[number] for part in parts]) for number in (2, 3, 4))
    return GradientTerms(rows[:, None], coefficients[:, None], vectors, torch.cat(sources), None, totals[:, None])


def leaving_rows(rows: Tensor, gradients: Tensor, division: Division) -> list[list[Tensor]]:
    """Return for each rank its rows and their gradients, in their order: rows int32 [B], gradients [B, d]."""
    parts = []
    for start, stop in pairwise(division.bounds):
        chosen = ((rows >= start) & (rows < stop)).nonzero()[:, 0]
        parts.append([rows[chosen], gradients[chosen]])
    return parts


def arrived_rows(parts: Sequence[Sequence[Tensor]], first_row: int) -> GradientTerms:
    """Return the gradients of rows that ranks have sent, in their order."""
    rows, gradients = (torch.cat([part[number] for part in parts]) for number in (0, 1))
    return GradientTerms.of_rows(rows - first_row, gradients)


def whole_table(world: World, own: Tensor) -> Tensor:
    """Return a table of which each rank holds some rows, [R, d] of this one."""
    return torch.cat([part[0] for part in world.exchange([[own]] * world.size)])
