"""Group entries by row, with integers only: a count for each row, then a place for each entry.

    collect   live entries, in any order; an atomic counter of its row gives each one a slot
    arrive    running sums of the counts are the ends of the rows: each entry goes to its row, in the order of the slots
    order     each entry counts those of its row that are below it, and goes to that place

The slots depend on the order in which programs run, the result does not. A row of c entries costs c^2 comparisons. Few
rows have more than a few entries, and a row with a thousand is compared by many programs at once. No size depends on
the data, so the host does not wait to learn how many entries are live. Per live entry, 36 bytes are read or written
beside the counts, 8 bytes a row.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from drm_triton.kernels.gpu.launch import launch

NO_ROW = tl.constexpr(-1)  # row of a merged term that is not added
SIZES = {"BLOCK": 256, "num_warps": 1}
LIVE, TOUCHED, OUTSIDE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # in `Buckets.totals`


class Buckets(NamedTuple):
    """The live ones of E entries, grouped by row."""

    order: Tensor  # int32 [E]: the entries of row 0, then of row 1, ..., ascending in each row
    order_rows: Tensor  # int32 [E]: their rows
    counts: Tensor  # int32 [n_rows]: entries of each row
    ends: Tensor  # int32 [n_rows]: running sums of the counts
    touched: Tensor  # int32 [E]: rows with entries, in any order
    totals: Tensor  # int32 [4]: numbers of live entries, of touched rows, of entries with a row outside the table, 0


@triton.jit(do_not_specialize=["n_entries", "n_merged", "n_rows", "m", "eta"])
def _collect_kernel(
    rows_ptr,  # int32 [B, m]
    coefficients_ptr,  # [B, m]
    replaced_ptr,  # bool [B, eta], not read if eta = 0
    merged_rows_ptr,  # int32 [n_merged]: rows of the first entries; the others are those of rows_ptr
    entries_ptr,  # int32 [n_entries], out
    entry_rows_ptr,  # int32 [n_entries], out
    slots_ptr,  # int32 [n_entries], out
    touched_ptr,  # int32 [n_entries], out
    counts_ptr,  # int32 [n_rows], 0
    n_ptr,  # int32 [4], 0; see `Buckets.totals`
    n_entries: tl.int32,
    n_merged: tl.int32,
    n_rows: tl.int64,
    m: tl.int32,
    eta: tl.int32,
    BLOCK: tl.constexpr,
):
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = entry < n_entries
    term = entry - n_merged
    is_term = exists & (term >= 0)
    number = term // m
    negative = term - number * m - (m - eta)
    # A negative that its list shares is part of a merged term.
    shared = is_term & (negative >= 0)
    alone = tl.load(replaced_ptr + number.to(tl.int64) * eta + negative, mask=shared, other=1) != 0
    coefficient = tl.load(coefficients_ptr + term.to(tl.int64), mask=is_term & alone, other=0.0)
    wanted = coefficient != 0  # NaN is not 0
    row = tl.load(rows_ptr + term.to(tl.int64), mask=wanted, other=0)
    row = tl.load(merged_rows_ptr + entry, mask=exists & (term < 0), other=row)
    wanted |= exists & (term < 0) & (row != NO_ROW)
    inside = row.to(tl.uint32) < n_rows.to(tl.uint32)  # as unsigned numbers, negative rows are too large
    n_outside = tl.sum((wanted & (inside == 0)).to(tl.int32), axis=0)
    if n_outside > 0:
        tl.atomic_add(n_ptr + OUTSIDE, n_outside, sem="relaxed")
    live = wanted & inside
    n_live = tl.sum(live.to(tl.int32), axis=0)
    if n_live > 0:
        slot = tl.atomic_add(counts_ptr + row, 1, mask=live, sem="relaxed")
        place = tl.atomic_add(n_ptr + LIVE, n_live, sem="relaxed") + tl.cumsum(live.to(tl.int32), axis=0) - 1
        tl.store(entries_ptr + place, entry, mask=live)
        tl.store(entry_rows_ptr + place, row, mask=live)
        tl.store(slots_ptr + place, slot, mask=live)
        first = (live & (slot == 0)).to(tl.int32)
        place = tl.atomic_add(n_ptr + TOUCHED, tl.sum(first, axis=0), sem="relaxed") + tl.cumsum(first, axis=0) - 1
        tl.store(touched_ptr + place, row, mask=first != 0)


@triton.jit
def _arrive_kernel(
    entries_ptr,  # int32 [n_entries]
    entry_rows_ptr,  # int32 [n_entries]
    slots_ptr,  # int32 [n_entries]
    counts_ptr,  # int32 [n_rows]
    ends_ptr,  # int32 [n_rows]
    n_ptr,  # int32 [4], see `Buckets.totals`
    arrived_ptr,  # int32 [n_entries], out
    BLOCK: tl.constexpr,
):
    n_live, begin = tl.load(n_ptr + LIVE), tl.program_id(0) * BLOCK
    if begin < n_live:
        offs = begin + tl.arange(0, BLOCK)
        live = offs < n_live
        row = tl.load(entry_rows_ptr + offs, mask=live, other=0)
        start = tl.load(ends_ptr + row, mask=live, other=0) - tl.load(counts_ptr + row, mask=live, other=0)
        entry = tl.load(entries_ptr + offs, mask=live, other=0)
        tl.store(arrived_ptr + start + tl.load(slots_ptr + offs, mask=live, other=0), entry, mask=live)


@triton.jit
def _order_kernel(
    entries_ptr,  # int32 [n_entries]
    entry_rows_ptr,  # int32 [n_entries]
    counts_ptr,  # int32 [n_rows]
    ends_ptr,  # int32 [n_rows]
    n_ptr,  # int32 [4], see `Buckets.totals`
    arrived_ptr,  # int32 [n_entries]
    order_ptr,  # int32 [n_entries], out
    order_rows_ptr,  # int32 [n_entries], out
    BLOCK: tl.constexpr,
):
    n_live, begin = tl.load(n_ptr + LIVE), tl.program_id(0) * BLOCK
    if begin < n_live:
        offs = begin + tl.arange(0, BLOCK)
        live = offs < n_live
        row = tl.load(entry_rows_ptr + offs, mask=live, other=0)
        entry = tl.load(entries_ptr + offs, mask=live, other=0)
        count = tl.load(counts_ptr + row, mask=live, other=0)
        place = tl.load(ends_ptr + row, mask=live, other=0) - count
        arrived = arrived_ptr + place
        for i in range(tl.max(count, axis=0)):
            other = tl.load(arrived + i, mask=i < count, other=2**31 - 1)
            place += (other < entry).to(tl.int32)
        tl.store(order_ptr + place, entry, mask=live)
        tl.store(order_rows_ptr + place, row, mask=live)


def group_entries(
    rows: Tensor, coefficients: Tensor, replaced: Tensor, merged_rows: Tensor, eta: int, n_rows: int
) -> Buckets:
    """Group entries by row: first the merged terms, then those of rows [B, m].

    Not live are merged terms with row NO_ROW, terms with coefficient 0, and those in the last eta columns of `rows`
    that `replaced` [B, eta] does not mark.
    """
    n_merged, n_entries = len(merged_rows), len(merged_rows) + rows.numel()
    width = 4 * triton.cdiv(n_entries, 4)  # all begin at multiples of 16 bytes
    entries, entry_rows, slots, arrived, order, order_rows, touched = rows.new_empty(7, width).unbind()
    totals, counts = rows.new_zeros(4 + n_rows).split([4, n_rows])
    grid = (triton.cdiv(n_entries, SIZES["BLOCK"]),)
    if n_entries > 0:
        launch(
            _collect_kernel, grid,
            rows, coefficients, replaced, merged_rows, entries, entry_rows, slots, touched, counts, totals,
            n_entries=n_entries, n_merged=n_merged, n_rows=n_rows, m=rows.shape[1], eta=eta, **SIZES,
        )  # fmt: skip
    ends = counts.cumsum(0, dtype=torch.int32)
    if n_entries > 0:
        launch(_arrive_kernel, grid, entries, entry_rows, slots, counts, ends, totals, arrived, **SIZES)
        launch(_order_kernel, grid, entries, entry_rows, counts, ends, totals, arrived, order, order_rows, **SIZES)
    return Buckets(order, order_rows, counts, ends, touched, totals)
