"""Adagrad step and projection of the rows of a table that a batch touches, in place.

With x_b = vectors[sources[b]], term (b, j) adds coefficients[b, j] x_b to the gradient of its row under `dot`, and
2 coefficients[b, j] (x_b - row) under `l2`. For each row, in the order of the terms:
    grad = sum of its terms,   state += grad^2,   row -= lr grad / (sqrt(state) + eps),   row /= max(1, ||row||)

Every term has a key, its row. The keys are sorted (stable), so the terms of a row are adjacent. A program takes
KEYS_PER_PROGRAM sorted keys. For each row that begins among them, it sums all terms of the row, BLOCK_TERMS at a time,
and takes the step. Each row has one owner and one order of summation: no atomics, the same bits in every run, and the
B x m x d gradients of the terms are never stored. With a dense gradient, every row has one more key, so that every row
is visited.

Merged terms. A group of lists that share negatives adds to a shared item once, not once per list. With c_jt the
coefficient of list t at the shared item j, 0 if the list replaced the item:

    vector_sums [eta, d] = c [eta, lists] x [lists, d]      coefficient_sums [eta] = c 1

The group adds vector_sums_j under `dot`, and 2 (vector_sums_j - coefficient_sums_j row) under `l2`, to the gradient of
shared item j. The keys are those of the merged terms, followed by one for each of the B m terms. A term that was merged
has the key NO_ROW. This key sorts before all rows and is skipped. So no size depends on the data, and the host does not
wait for the device. With m = 46, one positive and groups of 32 lists, one term in eighteen remains to be added.

`_merge_kernel` executes 2 m d operations per list. It reads 4 (m + d + 1) + eta bytes and writes 4 m, and 4 eta (d + 2)
per group. It reads the vectors again for each further BLOCK_N columns, and the coefficients for each further BLOCK_D
factors. The caches hold both.

On a GPU, the host does not read the values of rows and sources. A term with a source outside `vectors` makes its row
NaN. Rows outside the table are skipped and fail an assertion on the device.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from drm_triton.kernels import protocol
from drm_triton.kernels.checks import check_update
from drm_triton.kernels.protocol import GradientTerms, SharedNegatives
from drm_triton.names import Score

ADAGRAD_EPS = tl.constexpr(protocol.ADAGRAD_EPS)
NO_ROW = tl.constexpr(-1)  # key of a merged term
BAD_ROW = tl.constexpr(-2)  # key of a term whose row is negative
MAX_MERGED = 64  # lists in a merged term. Larger groups are divided: a batch has few of them, too few for a GPU


# ---------------------------------------------------------------------------------------------------------------
# Merging the terms of lists that share negatives


def merge_sizes(d: int) -> dict[str, int]:
    """Return tile sizes and warps of `_merge_kernel` for d factors.

    16 columns per program waste none of the paper's n = 16 rho. A batch has few groups, so small tiles keep more of a
    GPU busy. Without tensor cores, a product holds BLOCK_LISTS values of each of its rows and columns in registers. A
    thread uses about 64 registers with 16 lists, and spills with 32.
    """
    block_d = max(16, min(64, triton.next_power_of_2(d)))
    return {"BLOCK_N": 16, "BLOCK_LISTS": 16, "BLOCK_D": block_d, "num_warps": 4}


@triton.jit(do_not_specialize=["B", "n_vectors", "n_merged", "group_size", "tile_size", "tiles_of_group", "tiles_of_n"])
def _merge_kernel(
    rows_ptr,  # int32 [B, m]
    coefficients_ptr,  # [B, m]
    vectors_ptr,  # [*, d]
    sources_ptr,  # int32 [B]
    shared_ptr,  # int32 [groups, eta]: shared items
    replaced_ptr,  # bool [B, eta]
    keys_ptr,  # int32 [n_merged + B m], out
    vector_sums_ptr,  # [n_merged, d], out
    coefficient_sums_ptr,  # [n_merged], out
    B: tl.int64,
    n_vectors: tl.int64,
    n_merged: tl.int64,
    group_size: tl.int64,  # lists in a group
    tile_size: tl.int64,  # lists of a group that are merged
    tiles_of_group: tl.int64,
    tiles_of_n: tl.int32,
    m: tl.int32,
    eta: tl.int32,
    d: tl.int32,
    BLOCK_N: tl.constexpr,
    BLOCK_LISTS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Merge one tile of lists, BLOCK_N columns and BLOCK_D factors; the first block of factors writes the keys."""
    tile = (tl.program_id(0) // tiles_of_n).to(tl.int64)
    group = tile // tiles_of_group
    offs_n = (tl.program_id(0) % tiles_of_n) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < m
    negative = offs_n - (m - eta)  # position among the negatives
    mask_negative = mask_n & (negative >= 0)
    block_of_d = tl.program_id(1)
    offs_d = block_of_d * BLOCK_D + tl.arange(0, BLOCK_D)
    mask_d = offs_d < d
    dtype: tl.constexpr = vector_sums_ptr.dtype.element_ty
    begin = group * group_size + (tile % tiles_of_group) * tile_size
    end = tl.minimum(tl.minimum(begin + tile_size, (group + 1) * group_size), B)
    vector_sums, coefficient_sums = tl.zeros((BLOCK_N, BLOCK_D), dtype), tl.zeros((BLOCK_N,), dtype)
    n_lists = tl.zeros((BLOCK_N,), tl.int32)  # lists that keep the shared item
    for start in tl.range(begin, end, BLOCK_LISTS, num_stages=1):  # too few iterations for prefetching to pay
        lists = start + tl.arange(0, BLOCK_LISTS)
        live = lists < end
        term = lists[None, :] * m + offs_n[:, None]
        mask = live[None, :] & mask_n[:, None]
        replaced = tl.load(
            replaced_ptr + lists[None, :] * eta + negative[:, None],
            mask=live[None, :] & mask_negative[:, None],
            other=1,
        )
        merged = replaced == 0
        coefficient = tl.load(coefficients_ptr + term, mask=merged, other=0.0)
        source = tl.load(sources_ptr + lists, mask=live, other=0)
        known = source.to(tl.uint32) < n_vectors.to(tl.uint32)  # as unsigned numbers, negative sources are too large
        offset = tl.where(known, source, 0).to(tl.int64)[:, None] * d + offs_d[None, :]
        x = tl.load(vectors_ptr + offset, mask=(live & known)[:, None] & mask_d[None, :], other=0.0)
        # In the product, 0 times a value that is not finite would make rows NaN to which the list adds nothing. So a
        # list with such a value, or with an unknown source, has x = 0, and its coefficients are NaN unless they are 0.
        finite = known & (tl.sum(x * 0, axis=1) == 0)
        x = tl.where(finite[:, None], x, 0.0)
        coefficient = tl.where(finite[None, :] | (coefficient == 0), coefficient, float("nan"))
        vector_sums = tl.dot(coefficient, x, vector_sums, input_precision="ieee", out_dtype=dtype)
        coefficient_sums += tl.sum(coefficient, axis=1)
        if block_of_d == 0:
            n_lists += tl.sum(merged.to(tl.int32), axis=1)
            row = tl.load(rows_ptr + term, mask=mask & (merged == 0), other=0)
            key = tl.where(merged, NO_ROW, tl.where(row < 0, BAD_ROW, row))
            tl.store(keys_ptr + (n_merged + term), key, mask=mask)
    place = tile * eta + negative
    offset = place[:, None] * d + offs_d[None, :]
    tl.store(vector_sums_ptr + offset, vector_sums, mask=mask_negative[:, None] & mask_d[None, :])
    if block_of_d == 0:
        row = tl.load(shared_ptr + group * eta + negative, mask=mask_negative, other=0)
        key = tl.where(n_lists == 0, NO_ROW, tl.where(row < 0, BAD_ROW, row))  # a row without terms is not updated
        tl.store(keys_ptr + place, key, mask=mask_negative)
        tl.store(coefficient_sums_ptr + place, coefficient_sums, mask=mask_negative)


class MergedTerms(NamedTuple):
    """Keys of all terms, and the merged terms."""

    keys: Tensor  # int32 [n_merged + B m]: rows of the merged terms, then of all terms, NO_ROW if merged
    vector_sums: Tensor  # [n_merged, d]
    coefficient_sums: Tensor  # [n_merged]


def merge_terms(terms: GradientTerms, shared: SharedNegatives) -> MergedTerms:
    """Merge the terms at shared items; `terms` are contiguous and have at least one list and one shared item."""
    (B, m), (groups, eta), d = terms.rows.shape, shared.items.shape, terms.vectors.shape[1]
    group_size = min(shared.size, B)
    tiles_of_group = triton.cdiv(group_size, MAX_MERGED)
    n_merged = groups * tiles_of_group * eta
    keys = terms.rows.new_empty(n_merged + B * m)
    vector_sums, coefficient_sums = terms.vectors.new_empty(n_merged, d), terms.vectors.new_empty(n_merged)
    sizes = merge_sizes(d)
    tiles_of_n = triton.cdiv(m, sizes["BLOCK_N"])
    _merge_kernel[(groups * tiles_of_group * tiles_of_n, triton.cdiv(d, sizes["BLOCK_D"]))](
        terms.rows,
        terms.coefficients,
        terms.vectors,
        terms.sources,
        shared.items.contiguous(),
        shared.replaced.contiguous(),
        keys,
        vector_sums,
        coefficient_sums,
        B=B,
        n_vectors=len(terms.vectors),
        n_merged=n_merged,
        group_size=group_size,
        tile_size=triton.cdiv(group_size, tiles_of_group),
        tiles_of_group=tiles_of_group,
        tiles_of_n=tiles_of_n,
        m=m,
        eta=eta,
        d=d,
        **sizes,
        enable_fp_fusion=True,
    )
    return MergedTerms(keys, vector_sums, coefficient_sums)


# ---------------------------------------------------------------------------------------------------------------
# The step


def update_sizes(d: int, merged: bool) -> dict[str, int]:
    """Return tile sizes and warps of `_update_kernel` for d factors; `merged` if there are merged terms.

    Most terms are negatives, a handful per row: 8 vectors in flight hide the latency of the gather. Most programs are
    idle, as a row begins every few keys: 8 keys per program keep the cost of launching them low. One warp up to 128
    factors: 8 x 128 floats are 32 per thread. Merged sums beside the vectors double that.
    """
    block_d = triton.next_power_of_2(d)
    warps = block_d // (64 if merged else 128)
    return {"BLOCK_D": block_d, "BLOCK_TERMS": 8, "KEYS_PER_PROGRAM": 8, "num_warps": max(1, min(8, warps))}


@triton.jit(do_not_specialize=["n_keys", "n_merged", "n_term_keys", "m", "n_rows", "n_vectors"])
def _update_kernel(
    table_ptr,  # [R, d], in place
    state_ptr,  # [R, d], in place
    sorted_keys_ptr,  # int32 [n_keys]: rows, ascending
    order_ptr,  # int64 [n_keys]: index of each sorted key before sorting
    coefficients_ptr,  # [B, m]
    vectors_ptr,  # [*, d]
    sources_ptr,  # int32 [B]
    vector_sums_ptr,  # [n_merged, d], read if MERGED
    coefficient_sums_ptr,  # [n_merged], read if MERGED
    dense_ptr,  # [R, d], read if DENSE
    inside_ptr,  # bool, out: whether all rows are in the table
    n_rows: tl.int64,
    n_vectors: tl.int64,
    n_keys: tl.int64,
    n_merged: tl.int64,  # the first keys are those of merged terms
    n_term_keys: tl.int64,  # keys of terms; if DENSE, a key for each row follows
    m: tl.int64,
    d: tl.int32,
    lr: tl.float64,
    L2: tl.constexpr,
    SPHERE: tl.constexpr,
    MERGED: tl.constexpr,
    DENSE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_TERMS: tl.constexpr,
    KEYS_PER_PROGRAM: tl.constexpr,
):
    offs_d = tl.arange(0, BLOCK_D)
    mask_d = offs_d < d
    dtype: tl.constexpr = table_ptr.dtype.element_ty
    begin = tl.program_id(0).to(tl.int64) * KEYS_PER_PROGRAM
    if begin == 0:
        least = NO_ROW if MERGED else 0
        tl.store(inside_ptr, (tl.load(sorted_keys_ptr) >= least) & (tl.load(sorted_keys_ptr + n_keys - 1) < n_rows))
    # Rows and sources are compared as unsigned numbers, so negative ones are too large.
    row_limit, source_limit = n_rows.to(tl.uint32), n_vectors.to(tl.uint32)
    previous = tl.load(sorted_keys_ptr + begin - 1, mask=begin > 0, other=-1)
    for place in range(begin, tl.minimum(begin + KEYS_PER_PROGRAM, n_keys)):
        row = tl.load(sorted_keys_ptr + place)
        if (row != previous) & (row.to(tl.uint32) < row_limit):
            offset = row.to(tl.int64) * d + offs_d
            x_row = tl.load(table_ptr + offset, mask=mask_d, other=0.0)
            grad = tl.zeros((BLOCK_D,), dtype)
            if DENSE:
                grad = tl.load(dense_ptr + offset, mask=mask_d, other=0.0)
            unknown = tl.zeros((BLOCK_TERMS,), tl.int32)  # sources outside; NaN coefficients would take more registers
            start = place
            while start >= 0:
                offs_t = start + tl.arange(0, BLOCK_TERMS)
                mine = tl.load(sorted_keys_ptr + offs_t, mask=offs_t < n_keys, other=-1) == row
                term = tl.load(order_ptr + offs_t, mask=mine, other=0)
                single = mine
                if DENSE:
                    single = mine & (term < n_term_keys)
                if MERGED:
                    merged_term, merged = term, mine & (term < n_merged)
                    term, single = term - n_merged, single & (term >= n_merged)
                coefficient = tl.load(coefficients_ptr + term, mask=single, other=0.0)
                used = coefficient != 0  # a hinge alone leaves most coefficients at 0
                source = tl.load(sources_ptr + term // m, mask=used, other=0)
                unknown += (used & (source.to(tl.uint32) >= source_limit)).to(tl.int32)
                source = tl.where(source.to(tl.uint32) < source_limit, source, 0).to(tl.int64)
                x = tl.load(
                    vectors_ptr + source[:, None] * d + offs_d[None, :], mask=used[:, None] & mask_d[None, :], other=0.0
                )
                row_factor = tl.full((BLOCK_TERMS,), 1, dtype)  # coefficient of the row under L2
                if MERGED:
                    coefficient = tl.where(merged, 1.0, coefficient)
                    row_factor = tl.load(coefficient_sums_ptr + merged_term, mask=merged, other=1.0)
                    x = tl.load(
                        vector_sums_ptr + merged_term[:, None] * d + offs_d[None, :],
                        mask=merged[:, None] & mask_d[None, :],
                        other=x,
                    )
                if L2:
                    x = 2 * (x - row_factor[:, None] * x_row[None, :])
                grad += tl.sum(coefficient[:, None] * x, axis=0)
                # Continue with the next tile if this one ended inside the row.
                start = tl.where(tl.sum(mine.to(tl.int32), axis=0) == BLOCK_TERMS, start + BLOCK_TERMS, -1)
            grad = tl.where(tl.sum(unknown, axis=0) > 0, float("nan"), grad)
            if SPHERE:
                grad -= tl.sum(grad * x_row, axis=0) * x_row
            total = tl.load(state_ptr + offset, mask=mask_d, other=0.0) + grad * grad
            x_row -= tl.full((), lr, dtype) * grad / (tl.sqrt(total) + ADAGRAD_EPS)
            norm = tl.sqrt(tl.sum(x_row * x_row, axis=0))
            tl.store(state_ptr + offset, total, mask=mask_d)
            least = norm if SPHERE else 1.0
            norm = tl.where(norm == 0, 1.0, tl.maximum(norm, least))
            tl.store(table_ptr + offset, x_row / norm, mask=mask_d)
        previous = row


def update_rows(
    table: Tensor,
    state: Tensor,
    terms: GradientTerms,
    lr: float,
    score: Score,
    dense: Tensor | None = None,
) -> None:
    """Take one Adagrad step and project onto the unit ball, in place (see `protocol.Backend.update_rows`).

    Nothing here waits for a GPU, and the sizes of all tensors depend only on the shapes of the arguments.
    """
    check_update(table, state, terms, lr, score, dense, values=table.device.type == "cpu")
    n_rows, d = table.shape
    rows, coefficients, vectors, sources, shared = terms
    vectors = vectors.contiguous()
    terms = GradientTerms(rows.contiguous(), coefficients.contiguous(), vectors, sources.contiguous())
    merging = shared is not None and shared.size > 1 and rows.numel() > 0 and shared.items.numel() > 0
    if shared is not None and merging:
        keys, vector_sums, coefficient_sums = merge_terms(terms, shared)
    else:
        keys, vector_sums, coefficient_sums = terms.rows.flatten(), vectors[:0], vectors.new_empty(0)
    n_term_keys = len(keys)
    if dense is not None:
        keys = torch.cat([keys, torch.arange(n_rows, dtype=torch.int32, device=table.device)])
    if len(keys) * d == 0:
        return
    sorted_keys, order = torch.sort(keys, stable=True)
    inside = torch.empty((), dtype=torch.bool, device=table.device)
    sizes = update_sizes(d, merging)
    _update_kernel[(triton.cdiv(len(keys), sizes["KEYS_PER_PROGRAM"]),)](
        table,
        state,
        sorted_keys,
        order,
        terms.coefficients,
        vectors,
        terms.sources,
        vector_sums,
        coefficient_sums,
        table if dense is None else dense.contiguous(),  # not read without DENSE
        inside,
        n_rows=n_rows,
        n_vectors=len(vectors),
        n_keys=len(keys),
        n_merged=len(vector_sums),
        n_term_keys=n_term_keys,
        m=max(1, rows.shape[1]),
        d=d,
        lr=lr,
        L2=score == "l2",
        SPHERE=score == "cosine",
        MERGED=merging,
        DENSE=dense is not None,
        **sizes,
        enable_fp_fusion=True,
    )
    torch._assert_async(inside, f"update_rows: rows must be in [0, {n_rows})")
