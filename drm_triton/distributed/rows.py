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

from drm_triton.distributed.world import Chosen, World
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

    def positions(self, rows: Tensor) -> list[Tensor]:
        """Return where each rank's rows are among rows [n], in their order."""
        return [
            ((rows >= start) & (rows < stop)).nonzero()[:, 0]
            if self.size > 1
            else torch.arange(len(rows), device=rows.device)
            for start, stop in pairwise(self.bounds)
        ]


def distinct(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distinct numbers among ids int32 [E], ascending, and the place of each id among them: int32."""
    found, places = ids.unique(return_inverse=True)
    return found, places.to(torch.int32)


@dataclass(frozen=True)
class Wanted:
    """Rows of a table that this rank needs, and where they go: row rows[q][i], of rank q, to place places[q][i]."""

    table: Tensor  # [R, d], the rows that this rank holds
    first_row: int  # of them
    rows: Sequence[Tensor]  # int32, of each rank
    places: Sequence[Tensor | slice]

    @classmethod
    def ascending(cls, rows: Tensor, division: Division, table: Tensor, rank: int) -> Wanted:
        """Rows int32 [n] that ascend."""
        cuts = division.cut(rows)
        return cls(table, division.bounds[rank], [rows[cut] for cut in cuts], cuts)


def fetch(world: World, wanted: Sequence[Wanted], asked: Sequence[Sequence[Tensor]] | None = None) -> list[Tensor]:
    """Return rows of some tables, [n, d] of each.

    Parameters
    ----------
    wanted : for each table, the rows that this rank needs
    asked : for each rank and table, the rows that it needs of this one, if they are known; otherwise, the ranks ask
    """
    requests = [[one.rows[q] for one in wanted] for q in range(world.size)]
    if asked is None:
        asked = world.exchange(requests)
    none = [one.rows[world.rank][:0] for one in wanted]  # own rows go to their places at once
    replies = [
        [
            Chosen(one.table, ids - one.first_row)
            for ids, one in zip(none if q == world.rank else part, wanted, strict=True)
        ]
        for q, part in enumerate(asked)
    ]
    sizes = [[0 if q == world.rank else len(ids) for ids in part] for q, part in enumerate(requests)]
    received = world.exchange(replies, sizes)
    results = []
    for number, one in enumerate(wanted):
        result = one.table.new_empty(sum(len(rows) for rows in one.rows), one.table.shape[1])
        for q, places in enumerate(one.places):
            if q != world.rank:
                result[places] = received[q][number]
            elif isinstance(places, slice):
                torch.index_select(one.table, 0, one.rows[q] - one.first_row, out=result[places])
            else:
                result[places] = one.table.index_select(0, one.rows[q] - one.first_row)
        results.append(result)
    return results


def leaving_terms(terms: GradientTerms, division: Division) -> list[list[Tensor | Chosen]]:
    """Return for each rank the terms of its rows: rows, sources, coefficients, totals, and the vectors that they need.

    The terms have rows [E, 1] of the whole table, and come in their order. A vector is sent to a rank once.
    """
    rows, sources = terms.rows[:, 0], terms.sources.long()
    coefficients = terms.coefficients[:, 0]
    totals = coefficients if terms.totals is None else terms.totals[:, 0]
    place = torch.empty(len(terms.vectors), dtype=torch.int32, device=rows.device)
    parts: list[list[Tensor | Chosen]] = []
    for chosen in division.positions(rows):
        used = torch.zeros(len(place), dtype=torch.bool, device=rows.device)
        used[sources[chosen]] = True
        vectors = used.nonzero()[:, 0]
        place[vectors] = torch.arange(len(vectors), dtype=torch.int32, device=rows.device)
        parts.append(
            [rows[chosen], place[sources[chosen]], coefficients[chosen], totals[chosen], Chosen(terms.vectors, vectors)]
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


def leaving_rows(rows: Tensor, gradients: Tensor, division: Division) -> list[list[Tensor | Chosen]]:
    """Return for each rank its rows and their gradients, in their order: rows int32 [B], gradients [B, d]."""
    return [[rows[chosen], Chosen(gradients, chosen)] for chosen in division.positions(rows)]


def arrived_rows(parts: Sequence[Sequence[Tensor]], first_row: int) -> GradientTerms:
    """Return the gradients of rows that ranks have sent, in their order."""
    rows, gradients = (torch.cat([part[number] for part in parts]) for number in (0, 1))
    return GradientTerms.of_rows(rows - first_row, gradients)


def whole_table(world: World, own: Tensor) -> Tensor:
    """Return a table of which each rank holds some rows, [R, d] of this one."""
    return torch.cat([part[0] for part in world.exchange([[own]] * world.size)])
