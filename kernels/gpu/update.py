"""One Adagrad step and projection for every row of a table that a batch touches, in place.

Entry e adds coef_e x_e to the gradient of its row under `dot` and 2 coef_e (x_e - row) under `l2`, where x_e is the row
of X that its group names. Per row, in the order of the entries:
    grad = sum_e ...,   state += grad^2,   row -= lr grad / (sqrt(state) + eps),   row /= max(1, ||row||)

The entries are sorted by row (stable), so those of a row stand side by side. A program walks CHUNK sorted places; where
a row begins it sums the whole row's entries, BLOCK_E at a time, and updates it. Each row has one owner and one order of
summation: no atomics, the same bits on every run, and the E x d entry gradients are never stored. Entries of lists that
share their negatives are merged first, see `shared`.

On a GPU nobody waits for the values of rows and source: an entry whose source is outside X makes its row NaN, and rows
outside the table are left alone and fail an assertion on the device.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from drm_triton.kernels import protocol
from drm_triton.kernels.checks import check_update
from drm_triton.kernels.gpu.shared import NO_ROW, sum_shared
from drm_triton.kernels.protocol import GradientTerms
from drm_triton.names import Score

ADAGRAD_EPS = tl.constexpr(protocol.ADAGRAD_EPS)


def block_sizes(d: int, shared: bool) -> dict[str, int]:
    """Tile sizes and warps for rows of d factors; `shared`: some entries are sums of others."""
    block_d = triton.next_power_of_2(d)
    # Most entries are draws of negatives, a handful per row: 8 rows of X in flight hide the latency of the gather, and
    # 8 places per program keep the launch of mostly idle programs (a row starts every few places) off the bill. One
    # warp up to 128 factors: 8 x 128 floats are 32 a thread. Rows of sums beside those of X double that.
    warps = block_d // (64 if shared else 128)
    return {"BLOCK_D": block_d, "BLOCK_E": 8, "CHUNK": 8, "num_warps": max(1, min(8, warps))}


@triton.jit(do_not_specialize=["E", "merged", "keyed", "group", "n_rows", "n_sources"])
def _update_kernel(
    table_ptr,  # [R, d], in place
    state_ptr,  # [R, d], in place
    sorted_ptr,  # int32 [E]: rows, ascending
    order_ptr,  # int64 [E]: the entry at each sorted place
    coef_ptr,  # [E - merged]
    X_ptr,  # [*, d]
    source_ptr,  # int32 [(E - merged) / group]
    sums_ptr,  # [merged, d] (see `shared`), read if SHARED
    pulls_ptr,  # [merged]
    dense_ptr,  # [R, d], read if DENSE
    inside_ptr,  # bool, out: whether all rows are in the table
    n_rows: tl.int64,
    n_sources: tl.int64,
    E: tl.int64,
    merged: tl.int64,  # the first entries, sums of others
    keyed: tl.int64,  # entries; the keys of all rows follow if DENSE
    group: tl.int64,
    d: tl.int32,
    lr: tl.float64,
    L2: tl.constexpr,
    SHARED: tl.constexpr,
    DENSE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    CHUNK: tl.constexpr,
):
    offs_d = tl.arange(0, BLOCK_D)
    mask_d = offs_d < d
    dtype: tl.constexpr = table_ptr.dtype.element_ty
    first = tl.program_id(0).to(tl.int64) * CHUNK
    if first == 0:
        least = NO_ROW if SHARED else 0
        tl.store(inside_ptr, (tl.load(sorted_ptr) >= least) & (tl.load(sorted_ptr + E - 1) < n_rows))
    # Compared without sign below, a negative number is beyond every table.
    limit, source_limit = n_rows.to(tl.uint32), n_sources.to(tl.uint32)
    before = tl.load(sorted_ptr + first - 1, mask=first > 0, other=-1)
    for place in range(first, tl.minimum(first + CHUNK, E)):
        row = tl.load(sorted_ptr + place)
        if (row != before) & (row.to(tl.uint32) < limit):
            offset = row.to(tl.int64) * d + offs_d
            x_row = tl.load(table_ptr + offset, mask=mask_d, other=0.0)
            grad = tl.zeros((BLOCK_D,), dtype)
            if DENSE:
                grad = tl.load(dense_ptr + offset, mask=mask_d, other=0.0)
            unknown = tl.zeros((BLOCK_E,), tl.int32)  # sources outside X; here, as a NaN in coef takes more registers
            start = place
            while start >= 0:
                offs_e = start + tl.arange(0, BLOCK_E)
                mine = tl.load(sorted_ptr + offs_e, mask=offs_e < E, other=-1) == row
                entry = tl.load(order_ptr + offs_e, mask=mine, other=0)
                single = mine
                if DENSE:
                    single = mine & (entry < keyed)
                if SHARED:
                    at, summed = entry, mine & (entry < merged)
                    entry, single = entry - merged, single & (entry >= merged)
                coef = tl.load(coef_ptr + entry, mask=single, other=0.0)
                used = coef != 0  # a hinge alone leaves most coefficients at 0
                source = tl.load(source_ptr + entry // group, mask=used, other=0)
                unknown += (source.to(tl.uint32) >= source_limit).to(tl.int32)
                source = tl.where(source.to(tl.uint32) < source_limit, source, 0).to(tl.int64)
                x = tl.load(
                    X_ptr + source[:, None] * d + offs_d[None, :], mask=used[:, None] & mask_d[None, :], other=0.0
                )
                pull = tl.full((BLOCK_E,), 1, dtype)
                if SHARED:
                    coef = tl.where(summed, 1.0, coef)
                    pull = tl.load(pulls_ptr + at, mask=summed, other=1.0)
                    x = tl.load(
                        sums_ptr + at[:, None] * d + offs_d[None, :], mask=summed[:, None] & mask_d[None, :], other=x
                    )
                if L2:
                    x = 2 * (x - pull[:, None] * x_row[None, :])
                grad += tl.sum(coef[:, None] * x, axis=0)
                # On to the next tile if this one ended inside the row, else out.
                start = tl.where(tl.sum(mine.to(tl.int32), axis=0) == BLOCK_E, start + BLOCK_E, -1)
            grad = tl.where(tl.sum(unknown, axis=0) > 0, float("nan"), grad)
            total = tl.load(state_ptr + offset, mask=mask_d, other=0.0) + grad * grad
            x_row -= tl.full((), lr, dtype) * grad / (tl.sqrt(total) + ADAGRAD_EPS)
            norm = tl.sqrt(tl.sum(x_row * x_row, axis=0))
            tl.store(state_ptr + offset, total, mask=mask_d)
            tl.store(table_ptr + offset, x_row / tl.maximum(norm, 1.0), mask=mask_d)
        before = row


def update_rows(
    table: Tensor, state: Tensor, terms: GradientTerms, lr: float, score: Score, dense: Tensor | None = None
) -> None:
    """One Adagrad step and projection onto the unit ball for each row of `table` named in `rows`, in place.

    Parameters
    ----------
    table, state : [R, d] factors and Adagrad's sum of squares, contiguous
    rows : int32 [E]; coef : [E]; X : [*, d]; source : int32 [B], B dividing E (see `reference.update_rows`)
    share : lists in a group, most of which name the same row at the same position; 1 means that none do
    """
    check_update(table, state, terms, lr, score, dense, values=table.device.type == "cpu")
    E, d = terms.rows.numel(), table.shape[1]
    if E == 0 and dense is None:
        return
    rows, coef = terms.rows.flatten(), terms.coefficients.flatten()
    X, source = terms.vectors.contiguous(), terms.sources.contiguous()
    share = 1 if terms.shared is None else terms.shared.size
    keys, sums, pulls = sum_shared(rows.contiguous(), coef, X, source, share) if share > 1 else (rows, X[:0], coef[:0])
    keyed = len(keys)  # entries; with a dense gradient, every row has a further key, so that it is visited
    if dense is not None:
        keys = torch.cat([keys, torch.arange(len(table), dtype=torch.int32, device=table.device)])
    ascending, order = torch.sort(keys, stable=True)
    inside = torch.empty((), dtype=torch.bool, device=table.device)
    blocks = block_sizes(d, share > 1)
    # Nothing here waits for the device and every shape is that of the batch, so the trainer's step (sample, gradients,
    # both updates) can be captured in a CUDA graph as it stands.
    _update_kernel[(triton.cdiv(len(keys), blocks["CHUNK"]),)](
        table, state, ascending, order, coef, X, source, sums, pulls,
        table if dense is None else dense.contiguous(), inside,
        n_rows=len(table), n_sources=len(X), E=len(keys), merged=len(sums), keyed=keyed,
        group=max(1, terms.rows.shape[1]), d=d, lr=lr,
        L2=score == "l2", SHARED=share > 1, DENSE=dense is not None, **blocks, enable_fp_fusion=True,
    )  # fmt: skip
    torch._assert_async(inside, f"update_rows: rows must be in [0, {len(table)})")
