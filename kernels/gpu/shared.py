"""Entries that lists share, summed before they are sorted.

Lists come in groups of `share`, most of which name at position j the row that the group's first list names there, the
leading row. With c_jt = coef of list t at position j where t names the leading row, else 0:

    sums [n, d] = c [n, share] x [share, d]      pulls [n] = c 1

so that a group adds sums_j under `dot` and 2 (sums_j - pulls_j row) under `l2` to the gradient of its leading row j:
n merged entries in place of share n. An entry of a list that names another row remains as it is.

Whatever the lists are, G groups have G n + B n keys: first those of the merged entries, then one for each entry of the
batch, NO_ROW where it was merged. These sort before all rows and are passed over, so no size depends on the data and
the host waits for nothing. With n = 46 and share = 32, an entry in eighteen is left to be added.

Per group 2 n share d operations, 4 (2 n share + share + share d) bytes in and 4 (n d + 2 n + n share) out. Rows of X
are asked for once more for each further BLOCK_N positions, entries for each further BLOCK_D factors; caches have them.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

NO_ROW = tl.constexpr(-1)
BAD_ROW = tl.constexpr(-2)  # any negative row of the caller's


def block_sizes(d: int) -> dict[str, int]:
    """Tile sizes and warps for rows of d factors.

    16 positions in a program waste none of the paper's n = 16 rho, and a batch has few groups: small tiles keep more of
    a GPU busy. A product without tensor cores holds BLOCK_T values of each of its rows and columns in registers: with
    16 a thread takes about 64 in all, with 32 it spills.
    """
    block_d = max(16, min(64, triton.next_power_of_2(d)))
    return {"BLOCK_N": 16, "BLOCK_T": 16, "BLOCK_D": block_d, "num_warps": 4}


@triton.jit(do_not_specialize=["B", "n_sources", "merged", "share", "tiles"])
def _sums_kernel(
    rows_ptr,  # int32 [B, n]
    coef_ptr,  # [B, n]
    X_ptr,  # [*, d]
    source_ptr,  # int32 [B]
    keys_ptr,  # int32 [G n + B n], out
    sums_ptr,  # [G n, d], out
    pulls_ptr,  # [G n], out
    B: tl.int64,
    n_sources: tl.int64,
    merged: tl.int64,  # G n
    share: tl.int64,
    n: tl.int32,
    d: tl.int32,
    tiles: tl.int32,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """BLOCK_N positions of a group, BLOCK_D factors of their sums; the first part of factors writes keys and pulls."""
    group = (tl.program_id(0) // tiles).to(tl.int64)
    offs_n = (tl.program_id(0) % tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < n
    part = tl.program_id(1)
    offs_d = part * BLOCK_D + tl.arange(0, BLOCK_D)
    mask_d = offs_d < d
    dtype: tl.constexpr = sums_ptr.dtype.element_ty
    first = group * share
    last = tl.minimum(first + share, B)
    leading = tl.load(rows_ptr + first * n + offs_n, mask=mask_n, other=0)
    sums, pulls = tl.zeros((BLOCK_N, BLOCK_D), dtype), tl.zeros((BLOCK_N,), dtype)
    for start in tl.range(first, last, BLOCK_T, num_stages=1):  # too few turns for loads ahead to pay
        lists = start + tl.arange(0, BLOCK_T)
        live = lists < last
        entry = lists[None, :] * n + offs_n[:, None]
        mask = live[None, :] & mask_n[:, None]
        row = tl.load(rows_ptr + entry, mask=mask, other=0)
        same = row == leading[:, None]
        coef = tl.load(coef_ptr + entry, mask=mask & same, other=0.0)
        source = tl.load(source_ptr + lists, mask=live, other=0)
        known = source.to(tl.uint32) < n_sources.to(tl.uint32)  # unsigned, a negative number is beyond every table
        at = tl.where(known, source, 0).to(tl.int64)[:, None] * d + offs_d[None, :]
        x = tl.load(X_ptr + at, mask=(live & known)[:, None] & mask_d[None, :], other=0.0)
        # 0 times a number that is not finite would spoil leading rows that the list does not name: instead, its x is 0
        # and its coefficients, if not 0, are NaN. An unknown source is treated alike.
        sound = known & (tl.sum(x * 0, axis=1) == 0)
        x = tl.where(sound[:, None], x, 0.0)
        coef = tl.where(sound[None, :] | (coef == 0), coef, float("nan"))
        sums = tl.dot(coef, x, sums, input_precision="ieee", out_dtype=dtype)
        pulls += tl.sum(coef, axis=1)
        if part == 0:
            key = tl.where(same, NO_ROW, tl.where(row < 0, BAD_ROW, row))
            tl.store(keys_ptr + (merged + entry), key, mask=mask)
    entry = group * n + offs_n
    tl.store(sums_ptr + entry[:, None] * d + offs_d[None, :], sums, mask=mask_n[:, None] & mask_d[None, :])
    if part == 0:
        tl.store(keys_ptr + entry, tl.where(leading < 0, BAD_ROW, leading), mask=mask_n)
        tl.store(pulls_ptr + entry, pulls, mask=mask_n)


class Merged(NamedTuple):
    """Entries of G groups of lists."""

    keys: Tensor  # int32 [G n + B n]: rows of the merged entries, then of all, NO_ROW for those that were merged
    sums: Tensor  # [G n, d]
    pulls: Tensor  # [G n]


def sum_shared(rows: Tensor, coef: Tensor, X: Tensor, source: Tensor, share: int) -> Merged:
    """Merge the entries of every `share` lists that follow each other.

    Parameters
    ----------
    rows : int32 [B n]; coef : [B n]; X : [*, d]; source : int32 [B], all contiguous
    """
    B, d = len(source), X.shape[1]
    n, groups = len(rows) // B, triton.cdiv(B, share)
    merged = groups * n
    keys, sums, pulls = rows.new_empty(merged + B * n), X.new_empty(merged, d), X.new_empty(merged)
    blocks = block_sizes(d)
    tiles = triton.cdiv(n, blocks["BLOCK_N"])
    _sums_kernel[(groups * tiles, triton.cdiv(d, blocks["BLOCK_D"]))](
        rows, coef, X, source, keys, sums, pulls,
        B=B, n_sources=len(X), merged=merged, share=share, n=n, d=d, tiles=tiles, **blocks, enable_fp_fusion=True,
    )  # fmt: skip
    return Merged(keys, sums, pulls)
