"""Adagrad step and projection of the rows of a table that a batch touches, in place.

With x_b = vectors[sources[b]], term (b, j) adds coefficients[b, j] x_b to the gradient of its row under `dot`, and
2 coefficients[b, j] (x_b - row) under `l2`. For each row, in the order of the terms:
    grad = sum of its terms,   state += grad^2,   row -= lr grad / (sqrt(state) + eps),   row /= max(1, ||row||)
A table of bfloat16 is computed in float32, and rounded at random (`rounding`).

Merged terms. A group of lists that share negatives adds to a shared item once, not once per list. With c_jt the
coefficient of list t at the shared item j, 0 if the list replaced the item:

    sums [eta, d] = c [eta, lists] x [lists, d]      totals [eta] = c 1

The group adds sums_j under `dot`, and 2 (sums_j - totals_j row) under `l2`, to the gradient of shared item j. With
m = 46, one positive and groups of 32 lists, one term in nineteen remains to be added.

Terms with coefficient 0 are left out, and rows without another term are neither read nor written (docs/objective.md,
"Long lists"). Hinge and DRM have a gradient at some items of a long list only. If at most a sixth of the lists have
one at each of the shared items of a program, it adds these terms one by one, without a product.

Entries are the merged terms, followed by the B m terms. `buckets` groups those that remain by row, in their order. Then
two kernels sum and take the step:

    fold   the sum of each full chunk of CHUNK entries of a row, for rows with that many
    step   per row: the sums of its chunks, then the other entries, and the step

So a popular row is summed by many programs, and each row has one owner and one order of summation: no float atomics,
the same bits in every run, and the B x m x d gradients of the terms are never stored. With a dense gradient, every row
is visited, otherwise those with entries.

On a GPU, the host does not read the values of rows and sources. Of terms with another coefficient than 0, those with a
source outside `vectors` make their row NaN, and those with a row outside the table are skipped and fail an assertion on
the device.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from drm_triton.errors import InputError
from drm_triton.kernels import protocol
from drm_triton.kernels.batches import SharedNegatives
from drm_triton.kernels.checks import check_update
from drm_triton.kernels.gpu import softsort
from drm_triton.kernels.gpu.buckets import LIVE, NO_ROW, OUTSIDE, TOUCHED, group_entries
from drm_triton.kernels.gpu.launch import launch, register_limit
from drm_triton.kernels.gpu.rounding import GROUP, rounded, rounding_bits, widened
from drm_triton.kernels.protocol import GradientTerms, Rounding
from drm_triton.names import MAX_INT32, Score

ADAGRAD_EPS = tl.constexpr(protocol.ADAGRAD_EPS)
BAD_ROW = tl.constexpr(-2)  # for a shared item that is negative, which NO_ROW would hide
CHUNK = tl.constexpr(16)  # entries of a row that are folded
MAX_MERGED = 64  # lists in a merged term. Larger groups are divided: a batch has few of them, too few for a GPU


# ---------------------------------------------------------------------------------------------------------------
# Merging the terms of lists that share negatives


def merge_sizes(d: int, m: int, dtype: torch.dtype, share: int) -> dict[str, int]:
    """Return tile sizes and warps of `_merge_kernel` for d factors of a type, lists of m items and groups of `share`.

    16 columns per program waste none of the paper's eta = 15 rho but the last. A batch has few groups, so small tiles
    keep more of a GPU busy. Without tensor cores, a product holds BLOCK_LISTS values of each of its rows and columns in
    registers. A thread uses about 64 registers with 16 lists, and spills with 32. Long lists have so many columns that
    programs of two warps keep a GPU busy. These find terms and add them with fewer instructions. One warp would spill.
    """
    long = m > softsort.MAX_ITEMS  # DRM of longer lists has a gradient at its active items only
    block_d = max(16, min(256 // dtype.itemsize if long else 64, triton.next_power_of_2(d)))
    sizes = {"BLOCK_N": 16, "BLOCK_LISTS": 16, "BLOCK_D": block_d, "num_warps": 2 if long else 4}
    return {"LONG": long, "TILE": triton.next_power_of_2(min(share, MAX_MERGED)) if long else 1, **sizes}


@triton.jit
def _shared_coefficients(lists, end, negative, coefficients_ptr, replaced_ptr, m, eta):
    """Return the coefficients of lists before `end` at shared negatives, 0 if replaced: [negatives, lists]."""
    mask = (lists < end)[None, :] & (negative < eta)[:, None]
    kept = tl.load(replaced_ptr + lists[None, :] * eta + negative[:, None], mask=mask, other=1) == 0
    term = lists[None, :] * m + (m - eta + negative)[:, None]
    return tl.load(coefficients_ptr + term, mask=kept, other=0.0)


@triton.jit
def _load_vectors(sources_ptr, vectors_ptr, lists, mask, n_vectors, offs_d, d):
    """Return factors offs_d of the vectors of lists, [lists, d], 0 without `mask`, and which of the sources exist."""
    source = tl.load(sources_ptr + lists, mask=mask, other=0)
    known = source.to(tl.uint32) < n_vectors.to(tl.uint32)  # as unsigned numbers, negative sources are too large
    offset = tl.where(known, source, 0).to(tl.int64)[:, None] * d + offs_d[None, :]
    x = tl.load(vectors_ptr + offset, mask=(mask & known)[:, None] & (offs_d < d)[None, :], other=0.0)
    return widened(x), known


@triton.jit
def _merge_as_product(
    begin, end, negative, coefficients_ptr, vectors_ptr, sources_ptr, replaced_ptr, n_vectors, m, eta, offs_d, d,
    BLOCK_LISTS: tl.constexpr,
):  # fmt: skip
    """Return the sums of all terms of lists begin .. end - 1, their totals, and which negatives have a gradient."""
    dtype: tl.constexpr = coefficients_ptr.dtype.element_ty
    sums, totals = tl.zeros((negative.shape[0], offs_d.shape[0]), dtype), tl.zeros(negative.shape, dtype)
    used = tl.zeros(negative.shape, tl.int32)
    for start in tl.range(begin, end, BLOCK_LISTS, num_stages=1):  # too few iterations for prefetching to pay
        lists = start + tl.arange(0, BLOCK_LISTS)
        coefficient = _shared_coefficients(lists, end, negative, coefficients_ptr, replaced_ptr, m, eta)
        used |= tl.max((coefficient != 0).to(tl.int32), axis=1)
        x, known = _load_vectors(sources_ptr, vectors_ptr, lists, lists < end, n_vectors, offs_d, d)
        # In the product, 0 times a value that is not finite would make rows NaN to which the list adds nothing. So a
        # list with such a value, or with an unknown source, has x = 0, and its coefficients are NaN unless they are 0.
        finite = known & (tl.sum(x * 0, axis=1) == 0)
        x = tl.where(finite[:, None], x, 0.0)
        coefficient = tl.where(finite[None, :] | (coefficient == 0), coefficient, float("nan"))
        sums = tl.dot(coefficient, x, sums, input_precision="ieee", out_dtype=dtype)
        if tl.program_id(1) == 0:
            totals += tl.sum(coefficient, axis=1)
    return sums, totals, used


@triton.jit
def _merge_one_by_one(
    places, most, begin, negative, coefficients_ptr, vectors_ptr, sources_ptr, n_vectors, m, eta, offs_d, d,
    TILE: tl.constexpr,
):  # fmt: skip
    """Return sums and totals of the terms of lists begin + places [negatives, TILE], where places < TILE.

    A negative has at most `most` terms. They are added in the order of the lists. In float32 on NVIDIA GPUs, the sums
    have the bits of the product, which adds them in this order too.
    """
    dtype: tl.constexpr = coefficients_ptr.dtype.element_ty
    sums, totals = tl.zeros((negative.shape[0], offs_d.shape[0]), dtype), tl.zeros(negative.shape, dtype)
    place = tl.full(negative.shape, -1, tl.int32)
    for _ in range(most):
        place = tl.min(tl.where(places > place[:, None], places, TILE), axis=1)
        lists = begin + place
        x, known = _load_vectors(sources_ptr, vectors_ptr, lists, place < TILE, n_vectors, offs_d, d)
        term = lists * m + (m - eta + negative)
        coefficient = tl.load(coefficients_ptr + term, mask=place < TILE, other=0.0)
        coefficient = tl.where(known, coefficient, float("nan"))
        sums = tl.fma(tl.broadcast_to(coefficient[:, None], x.shape), x, sums)
        totals += coefficient
    return sums, totals


@triton.jit(do_not_specialize=["B", "n_vectors", "group_size", "tile_size", "tiles_of_group", "blocks_of_n"])
def _merge_kernel(
    coefficients_ptr,  # [B, m]
    vectors_ptr,  # [*, d]
    sources_ptr,  # int32 [B]
    shared_ptr,  # int32 [groups, eta]: shared items
    replaced_ptr,  # bool [B, eta]
    merged_rows_ptr,  # int32 [n_merged], out
    sums_ptr,  # [n_merged, d], out
    totals_ptr,  # [n_merged], out
    B: tl.int64,
    n_vectors: tl.int64,
    group_size: tl.int64,  # lists in a group
    tile_size: tl.int64,  # lists of a group that are merged
    tiles_of_group: tl.int64,
    blocks_of_n: tl.int32,
    m: tl.int32,
    eta: tl.int32,
    d: tl.int32,
    LONG: tl.constexpr,  # few shared negatives of a list may have a gradient
    TILE: tl.constexpr,  # at least tile_size, read if LONG
    BLOCK_N: tl.constexpr,
    BLOCK_LISTS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Merge one tile of lists, BLOCK_N shared negatives and BLOCK_D factors; the first block of factors writes rows."""
    tile = (tl.program_id(0) // blocks_of_n).to(tl.int64)
    group = tile // tiles_of_group
    negative = (tl.program_id(0) % blocks_of_n) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    begin = group * group_size + (tile % tiles_of_group) * tile_size
    end = tl.minimum(tl.minimum(begin + tile_size, (group + 1) * group_size), B)
    if LONG:
        place = tl.arange(0, TILE)
        coefficient = _shared_coefficients(begin + place, end, negative, coefficients_ptr, replaced_ptr, m, eta)
        places = tl.where(coefficient != 0, place[None, :], TILE)  # NaN is not 0
        count = tl.sum((places < TILE).to(tl.int32), axis=1)
        most = tl.max(count, axis=0)
        used = (count > 0).to(tl.int32)
        if 6 * most <= tile_size:  # with more, the product takes fewer instructions and loads
            sums, totals = _merge_one_by_one(
                places, most, begin, negative, coefficients_ptr, vectors_ptr, sources_ptr, n_vectors, m, eta, offs_d, d,
                TILE,
            )  # fmt: skip
        else:
            sums, totals, used = _merge_as_product(
                begin, end, negative, coefficients_ptr, vectors_ptr, sources_ptr, replaced_ptr, n_vectors, m, eta,
                offs_d, d, BLOCK_LISTS,
            )  # fmt: skip
    else:
        sums, totals, used = _merge_as_product(
            begin, end, negative, coefficients_ptr, vectors_ptr, sources_ptr, replaced_ptr, n_vectors, m, eta,
            offs_d, d, BLOCK_LISTS,
        )  # fmt: skip
    live = used != 0
    place = tile * eta + negative
    tl.store(sums_ptr + place[:, None] * d + offs_d[None, :], sums, mask=live[:, None] & (offs_d < d)[None, :])
    if tl.program_id(1) == 0:
        row = tl.load(shared_ptr + group * eta + negative, mask=live, other=0)
        row = tl.where(live, tl.where(row < 0, BAD_ROW, row), NO_ROW)  # a row without a gradient is not updated
        tl.store(merged_rows_ptr + place, row, mask=negative < eta)
        tl.store(totals_ptr + place, totals, mask=live)


def tiles_to_merge(shared: SharedNegatives, B: int) -> tuple[int, int]:
    """Return the number of lists in a group, and the number of tiles that it is divided into."""
    group_size = min(shared.size, B)
    return group_size, triton.cdiv(group_size, MAX_MERGED)


def merge_terms(terms: GradientTerms, shared: SharedNegatives, rows: Tensor, sums: Tensor, totals: Tensor) -> None:
    """Merge the terms at shared items; write rows [n_merged], and the first n_merged of `sums` and `totals`."""
    (B, m), (groups, eta), d = terms.rows.shape, shared.items.shape, terms.vectors.shape[1]
    group_size, tiles_of_group = tiles_to_merge(shared, B)
    tile_size = triton.cdiv(group_size, tiles_of_group)
    sizes = merge_sizes(d, m, sums.dtype, shared.size)
    blocks_of_n = triton.cdiv(eta, sizes["BLOCK_N"])
    launch(
        _merge_kernel,
        (groups * tiles_of_group * blocks_of_n, triton.cdiv(d, sizes["BLOCK_D"])),
        terms.coefficients,
        terms.vectors,
        terms.sources,
        shared.items.contiguous(),
        shared.replaced.contiguous(),
        rows,
        sums,
        totals,
        B=B,
        n_vectors=len(terms.vectors),
        group_size=group_size,
        tile_size=tile_size,
        tiles_of_group=tiles_of_group,
        blocks_of_n=blocks_of_n,
        m=m,
        eta=eta,
        d=d,
        **sizes,
    )


# ---------------------------------------------------------------------------------------------------------------
# The step


def fold_sizes(d: int) -> dict[str, int]:
    """Return tile sizes and warps of `_fold_kernel` for d factors: CHUNK rows, 32 floats per thread."""
    block_d = triton.next_power_of_2(d)
    num_warps = max(1, min(8, block_d // 64))
    return {"BLOCK_D": block_d, "BLOCK_CHUNKS": 16, "num_warps": num_warps, **register_limit(255)}


def step_sizes(d: int, dtype: torch.dtype, rounds: bool = False) -> dict[str, int]:
    """Return tile sizes and warps of `_step_kernel` for d factors: up to 8 rows, 16 floats or 8 doubles per thread.

    Most rows have one or two entries. The addresses and sums of 8 rows cost little more than those of one. A thread
    uses up to 168 registers.
    """
    block_d = max(triton.next_power_of_2(d), GROUP.value if rounds else 1)
    return {
        "BLOCK_D": block_d,
        "BLOCK_ROWS": max(1, min(8, 2048 // (block_d * dtype.itemsize))),
        "num_warps": max(1, min(8, block_d // 512)),
        **register_limit(168),
    }


@triton.jit
def _load_terms(
    entry,
    mask,
    is_sum,
    coefficients_ptr,
    vectors_ptr,
    sources_ptr,
    sums_ptr,
    totals_ptr,
    n_merged,
    n_vectors,
    m,
    offs_d,
    d,
):
    """Return what entries add to their rows, [entries, d], and their coefficients, [entries]; 0 without `mask`."""
    term = (entry - n_merged).to(tl.int32)
    is_term = mask & (is_sum == 0)
    coefficient = tl.load(coefficients_ptr + term.to(tl.int64), mask=is_term, other=0.0)
    source = tl.load(sources_ptr + term // m, mask=is_term, other=0)
    known = source.to(tl.uint32) < n_vectors.to(tl.uint32)  # as unsigned numbers, negative sources are too large
    mask_d = (offs_d < d)[None, :]
    offset = source.to(tl.int64)[:, None] * d + offs_d[None, :]
    x = widened(tl.load(vectors_ptr + offset, mask=(is_term & known)[:, None] & mask_d, other=0.0))
    coefficient = tl.where(known, coefficient, float("nan"))
    x = coefficient[:, None] * x
    is_sum = mask & is_sum
    x = tl.load(sums_ptr + entry[:, None] * d + offs_d[None, :], mask=is_sum[:, None] & mask_d, other=x)
    return x, tl.load(totals_ptr + entry, mask=is_sum, other=coefficient)


@triton.jit(do_not_specialize=["n_vectors", "n_merged", "m"])
def _fold_kernel(
    order_ptr,  # int32 [n_entries]
    order_rows_ptr,  # int32 [n_entries]
    counts_ptr,  # int32 [n_rows]
    ends_ptr,  # int32 [n_rows]
    n_ptr,  # int32 [4], see `Buckets.totals`
    coefficients_ptr,  # [B, m]
    vectors_ptr,  # [*, d]
    sources_ptr,  # int32 [B]
    sums_ptr,  # [n_merged + chunks, d]: of merged terms; out: of chunks
    totals_ptr,  # [n_merged + chunks]: of merged terms; out: of chunks
    n_vectors: tl.int64,
    n_merged: tl.int64,
    m: tl.int32,
    d: tl.int32,
    BLOCK_CHUNKS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Sum the full chunks of rows. Each contains one place that is a multiple of CHUNK, by which it is numbered."""
    number = tl.program_id(0) * BLOCK_CHUNKS + tl.arange(0, BLOCK_CHUNKS)
    n_live = tl.load(n_ptr + LIVE)
    if tl.program_id(0) * BLOCK_CHUNKS * CHUNK < n_live:
        offs_d = tl.arange(0, BLOCK_D)
        place = number * CHUNK
        row = tl.load(order_rows_ptr + place, mask=place < n_live, other=0)
        end, count = tl.load(ends_ptr + row), tl.load(counts_ptr + row)
        begin = place - (place - (end - count)) % CHUNK
        full = (place < n_live) & (begin + CHUNK <= end)
        for i in range(tl.sum(full.to(tl.int32), axis=0)):
            chosen = full & (tl.cumsum(full.to(tl.int32), axis=0) == i + 1)
            offs = tl.sum(tl.where(chosen, begin, 0), axis=0) + tl.arange(0, CHUNK)
            entry = tl.load(order_ptr + offs).to(tl.int64)
            x, coefficient = _load_terms(
                entry, entry >= 0, entry < n_merged, coefficients_ptr, vectors_ptr, sources_ptr, sums_ptr, totals_ptr,
                n_merged, n_vectors, m, offs_d, d,
            )  # fmt: skip
            out = n_merged + tl.sum(tl.where(chosen, number, 0), axis=0)
            tl.store(sums_ptr + out * d + offs_d, tl.sum(x, axis=0), mask=offs_d < d)
            tl.store(totals_ptr + out, tl.sum(coefficient, axis=0))


@triton.jit(do_not_specialize=["n_rows", "n_vectors", "n_merged", "m", "seed", "table_number", "first_row"])
def _step_kernel(
    table_ptr,  # [R, d], in place
    state_ptr,  # [R, d], in place
    order_ptr,  # int32 [n_entries]
    counts_ptr,  # int32 [R]
    ends_ptr,  # int32 [R]
    touched_ptr,  # int32 [n_entries], not read if DENSE
    n_ptr,  # int32 [4], see `Buckets.totals`
    coefficients_ptr,  # [B, m]
    vectors_ptr,  # [*, d]
    sources_ptr,  # int32 [B]
    sums_ptr,  # [n_merged + chunks, d]
    totals_ptr,  # [n_merged + chunks]
    dense_ptr,  # [R, d], read if DENSE
    lr_ptr,  # float64, one number; NaN to change nothing
    step_ptr,  # int64, one number, read if ROUND
    n_rows: tl.int64,
    n_vectors: tl.int64,
    n_merged: tl.int64,
    m: tl.int32,
    d: tl.int32,
    seed: tl.int64,
    table_number: tl.int32,
    first_row: tl.int64,  # number of row 0 in the whole table
    L2: tl.constexpr,
    SPHERE: tl.constexpr,
    DENSE: tl.constexpr,
    ROUND: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Sum the gradients of BLOCK_ROWS rows, and take the step."""
    offs_d = tl.arange(0, BLOCK_D)
    dtype: tl.constexpr = state_ptr.dtype.element_ty
    lr, begin = tl.load(lr_ptr), tl.program_id(0) * BLOCK_ROWS
    n_steps = n_rows.to(tl.int32)
    if not DENSE:
        n_steps = tl.load(n_ptr + TOUCHED)
    if (lr == lr) & (begin < n_steps):
        row = begin + tl.arange(0, BLOCK_ROWS)
        exists = row < n_steps
        if not DENSE:
            row = tl.load(touched_ptr + row, mask=exists, other=0)
        mask = exists[:, None] & (offs_d < d)[None, :]
        offset = row.to(tl.int64)[:, None] * d + offs_d[None, :]
        x_row = widened(tl.load(table_ptr + offset, mask=mask, other=0.0))
        grad, total = tl.zeros((BLOCK_ROWS, BLOCK_D), dtype), tl.zeros((BLOCK_ROWS,), dtype)
        count = tl.load(counts_ptr + row, mask=exists, other=0)
        start = tl.load(ends_ptr + row, mask=exists, other=0) - count
        chunks = count // CHUNK
        last = chunks + count % CHUNK
        for i in range(tl.max(last, axis=0)):
            folded = i < chunks
            place = start + chunks * (CHUNK - 1) + i
            entry = tl.load(order_ptr + place, mask=(i < last) & (folded == 0), other=0).to(tl.int64)
            chunk = (start + i * CHUNK + CHUNK - 1) // CHUNK
            entry = tl.where(folded, n_merged + chunk, entry)
            x, coefficient = _load_terms(
                entry, i < last, folded | (entry < n_merged), coefficients_ptr, vectors_ptr, sources_ptr, sums_ptr,
                totals_ptr, n_merged, n_vectors, m, offs_d, d,
            )  # fmt: skip
            grad += x
            total += coefficient
        if L2:
            grad = 2 * (grad - total[:, None] * x_row)
        if DENSE:
            grad += tl.load(dense_ptr + offset, mask=mask, other=0.0)
        if SPHERE:
            grad -= tl.sum(grad * x_row, axis=1)[:, None] * x_row
        state = tl.load(state_ptr + offset, mask=mask, other=0.0) + grad * grad
        tl.store(state_ptr + offset, state, mask=mask)
        x_row -= lr.to(dtype) * grad / (tl.sqrt(state) + ADAGRAD_EPS)
        norm = tl.sqrt(tl.sum(x_row * x_row, axis=1))
        least = norm if SPHERE else 1.0
        norm = tl.where(norm == 0, 1.0, tl.maximum(norm, least))
        x_row = x_row / norm[:, None]
        if ROUND:
            random = rounding_bits(seed, tl.load(step_ptr), table_number, first_row + row, BLOCK_D)
            x_row = rounded(x_row, random, table_ptr.dtype.element_ty)
        tl.store(table_ptr + offset, x_row, mask=mask)


def merge_shared(terms: GradientTerms) -> GradientTerms:
    """Return the terms one by one. They are not merged: the host would have to wait for the number that remains."""
    return terms.one_by_one()


def update_rows(
    table: Tensor,
    state: Tensor,
    terms: GradientTerms,
    lr: float | Tensor,
    score: Score,
    dense: Tensor | None = None,
    rounding: Rounding | None = None,
) -> None:
    """Take one Adagrad step and project onto the unit ball, in place (see `protocol.Backend.update_rows`).

    Nothing here waits for a GPU, and the sizes of all tensors depend only on the shapes of the arguments.
    """
    check_update(table, state, terms, lr, score, dense, rounding, values=table.device.type == "cpu")
    if terms.totals is not None or terms.sums is not None:  # `merge_shared` returns none here
        raise InputError("update_rows: totals and sums are for terms that were merged on the CPU")
    n_rows, d = table.shape
    rows, coefficients, vectors, sources = (x.contiguous() for x in terms[:4])
    terms, shared = GradientTerms(rows, coefficients, vectors, sources), terms.shared
    eta = n_merged = 0
    if shared is not None and shared.size > 1 and rows.numel() > 0:
        eta = shared.items.shape[1]
        n_merged = shared.items.numel() * tiles_to_merge(shared, len(rows))[1]
    n_entries = n_merged + rows.numel()
    if (n_entries == 0 and dense is None) or table.numel() == 0:
        return
    if n_entries > MAX_INT32:  # the kernels divide 32-bit numbers, which takes a fraction of the time
        raise InputError(f"update_rows: {n_entries:,} terms, at most {MAX_INT32:,}; use smaller batches")
    n_sums = n_merged + triton.cdiv(n_entries, CHUNK.value)
    merged_rows, sums, totals = rows.new_empty(n_merged), state.new_empty(n_sums, d), state.new_empty(n_sums)
    replaced = rows  # not read unless lists share negatives
    if shared is not None and eta > 0:
        merge_terms(terms, shared, merged_rows, sums, totals)
        replaced = shared.replaced.contiguous()
    buckets = group_entries(rows, coefficients, replaced, merged_rows, eta, n_rows)
    summands = (coefficients, vectors, sources, sums, totals)
    sizes: dict[str, Any] = {"n_vectors": len(vectors), "n_merged": n_merged, "m": max(1, rows.shape[1]), "d": d}
    if n_entries > 0:
        order, order_rows, counts, ends, _, numbers = buckets
        blocks = fold_sizes(d)
        grid = (triton.cdiv(n_entries, CHUNK.value * blocks["BLOCK_CHUNKS"]),)
        launch(_fold_kernel, grid, order, order_rows, counts, ends, numbers, *summands, **sizes, **blocks)
    lr = _on_device(lr, torch.float64, table.device)
    blocks = step_sizes(d, state.dtype, rounding is not None)
    launch(
        _step_kernel,
        (triton.cdiv(n_rows if dense is not None else min(n_rows, n_entries), blocks["BLOCK_ROWS"]),),
        table,
        state,
        buckets.order,
        buckets.counts,
        buckets.ends,
        buckets.touched,
        buckets.totals,
        *summands,
        table if dense is None else dense.contiguous(),  # not read without DENSE
        lr,
        lr if rounding is None else _on_device(rounding.step, torch.int64, table.device),  # not read without ROUND
        n_rows=n_rows,
        seed=0 if rounding is None else rounding.seed,
        table_number=0 if rounding is None else rounding.table,
        first_row=0 if rounding is None else rounding.first_row,
        L2=score == "l2",
        SPHERE=score == "cosine",
        DENSE=dense is not None,
        ROUND=rounding is not None,
        **sizes,
        **blocks,
    )
    torch._assert_async(buckets.totals[OUTSIDE.value] == 0, f"update_rows: rows must be in [0, {n_rows})")


def _on_device(number: float | Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a number as a tensor. Filling does not make the host wait, copying would."""
    return number if isinstance(number, Tensor) else torch.full((), number, dtype=dtype, device=device)
