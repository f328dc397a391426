"""The k best items of each query, without a queries x items matrix: blocked scores, seen-item mask, running top-k.

A program scores BLOCK_M queries against its share of the items, BLOCK_N at a time. A score that reaches the query's
threshold is appended to its buffer of `capacity` keys in global memory:
    key = ordered(score) << 31 | (2^31 - 1 - item)        int64, >= 0
Keys are distinct and the larger key is the better item, ties of score going to the lower item index. When a buffer may
overflow, the k-th largest key is found by bisection (counting keys >= middle), its score becomes the threshold, and the
smaller keys are dropped. In any order of the items a buffer holds all k best so far; in a random order the threshold
soon lets few scores pass and pruning becomes rare. k and the capacity are run-time numbers: no sorting network, nothing
to unroll.

The seen items of a query ascend, so each program walks them once, beside its items.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from drm_triton.kernels.checks import check_items, check_top_k
from drm_triton.kernels.protocol import PackedItems, SeenItems
from drm_triton.names import Score

SCRATCH = 1 << 28  # bytes of buffer in flight: queries beyond it are done in turn
PROGRAMS = 1024  # enough to fill 132 to 304 multiprocessors several times; fewer queries split the items instead


# Each row of V serves 64 queries. 8 scores a thread and 16 factors at a time leave registers for keys and addresses,
# which are 64 bits each; larger tiles spill on one GPU or another.
BLOCKS = {"BLOCK_M": 64, "BLOCK_N": 32, "BLOCK_D": 16, "num_warps": 8}
BLOCK_M, BLOCK_N = BLOCKS["BLOCK_M"], BLOCKS["BLOCK_N"]


@triton.jit
def _key(score, item):
    """int64 key of a float32 score."""
    bits = tl.where(score == 0, 0.0, score).to(tl.int32, bitcast=True)  # -0.0 ties with 0.0
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 0x80000000
    return (ordered << 31) | (0x7FFFFFFF - item).to(tl.int64)


@triton.jit
def _score(key):
    """Score of a key: the inverse of `_key`."""
    ordered = ((key >> 31) - 0x80000000).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


STRIP = tl.constexpr(32)  # keys of a buffer that `_prune` looks at in one go


@triton.jit
def _prune(buffer_row, count, k):
    """Keep the k largest keys of each buffer: new count and lowest score kept (-inf below k keys), [BLOCK_M] each."""
    longest = tl.max(count)
    full = count >= k
    # Invariant: at least k keys are >= low, fewer than k are >= high; keys are distinct, so k of them are left.
    low = tl.zeros(count.shape, tl.int64)
    high = tl.where(full, 0x7FFFFFFFFFFFFFFF, 1)
    tl.debug_barrier()  # the appended keys are visible to all threads
    while tl.max(high - low) > 1:
        middle = low + ((high - low) >> 1)
        reach = tl.zeros(count.shape, tl.int32)
        for start in range(0, longest, STRIP):
            offs = start + tl.arange(0, STRIP)[None, :]
            key = tl.load(buffer_row[:, None] + offs, mask=offs < count[:, None], other=-1)
            reach += tl.sum((key >= middle[:, None]).to(tl.int32), axis=1)
        low = tl.where(reach >= k, middle, low)
        high = tl.where(reach == k, low + 1, tl.where(reach < k, middle, high))
    kept = tl.zeros(count.shape, tl.int32)
    for start in range(0, longest, STRIP):
        offs = start + tl.arange(0, STRIP)[None, :]
        key = tl.load(buffer_row[:, None] + offs, mask=offs < count[:, None], other=-1)
        keep = key >= low[:, None]
        place = kept[:, None] + tl.cumsum(keep.to(tl.int32), axis=1) - 1
        tl.debug_barrier()  # all threads have read this tile: places never pass it
        tl.store(buffer_row[:, None] + place, key, mask=keep)
        kept += tl.sum(keep.to(tl.int32), axis=1)
    tl.debug_barrier()
    return kept, tl.where(full, _score(low), float("-inf"))


@triton.jit(do_not_specialize=["m", "n_items"])
def _candidates_kernel(
    queries_ptr,  # [m, d]
    V_ptr,  # [n_items, d]
    indptr_ptr,  # int64 [m + 1]
    seen_ptr,  # int32
    buffer_ptr,  # int64 [m, splits, capacity], out: the k best keys of each split first, -1 where there are fewer
    m: tl.int64,
    n_items: tl.int64,
    d: tl.int32,
    k: tl.int32,
    capacity: tl.int32,
    share: tl.int64,  # items of a split, a multiple of BLOCK_N
    L2: tl.constexpr,
    SEEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask_m = offs_m < m
    begin = tl.program_id(1) * share
    end = tl.minimum(begin + share, n_items)
    buffer_row = buffer_ptr + (offs_m * tl.num_programs(1) + tl.program_id(1)) * capacity
    count = tl.zeros((BLOCK_M,), tl.int32)
    threshold = tl.full((BLOCK_M,), float("-inf"), tl.float32)

    square = tl.zeros((BLOCK_M,), tl.float32)  # ||query||^2
    if L2:
        for start in range(0, d, BLOCK_D):
            offs_d = start + tl.arange(0, BLOCK_D)
            mask_q = mask_m[:, None] & (offs_d < d)[None, :]
            q = tl.load(queries_ptr + offs_m[:, None] * d + offs_d[None, :], mask=mask_q, other=0.0)
            square += tl.sum(q * q, axis=1)
    if SEEN:
        cursor = tl.load(indptr_ptr + offs_m, mask=mask_m, other=0)
        last = tl.load(indptr_ptr + offs_m + 1, mask=mask_m, other=0)
        if begin > 0:  # skip the seen items of earlier splits
            step = tl.full((), 1 << 30, tl.int64)
            while step > 0:
                probe = cursor + step - 1
                before = tl.load(seen_ptr + probe, mask=probe < last, other=0x7FFFFFFF) < begin
                cursor = tl.where(before, probe + 1, cursor)
                step = step >> 1

    for first in range(begin, end, BLOCK_N):
        item = (first + tl.arange(0, BLOCK_N)).to(tl.int32)
        mask_n = item < end
        score = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        norm = tl.zeros((BLOCK_N,), tl.float32)
        for start in range(0, d, BLOCK_D):
            offs_d = start + tl.arange(0, BLOCK_D)
            mask_d = offs_d < d
            q = tl.load(
                queries_ptr + offs_m[:, None] * d + offs_d[None, :], mask=mask_m[:, None] & mask_d[None, :], other=0.0
            )
            v = tl.load(
                V_ptr + item.to(tl.int64)[:, None] * d + offs_d[None, :],
                mask=mask_n[:, None] & mask_d[None, :],
                other=0.0,
            )
            score = tl.dot(q, tl.trans(v), score, input_precision="ieee")
            if L2:
                norm += tl.sum(v * v, axis=1)
        if L2:
            score = tl.minimum(2 * score - norm[None, :] - square[:, None], 0.0)
        valid = mask_m[:, None] & mask_n[None, :]
        if SEEN:
            seen = tl.load(seen_ptr + cursor, mask=cursor < last, other=0x7FFFFFFF)
            while tl.min(seen) < first + BLOCK_N:
                valid = valid & (item[None, :] != seen[:, None])
                cursor += (seen < first + BLOCK_N).to(tl.int64)
                seen = tl.load(seen_ptr + cursor, mask=cursor < last, other=0x7FFFFFFF)
        good = valid & (score >= threshold[:, None])
        fresh = tl.sum(good.to(tl.int32), axis=1)
        if tl.max(fresh) > 0:
            place = count[:, None] + tl.cumsum(good.to(tl.int32), axis=1) - 1
            key = _key(score, item[None, :])
            tl.store(buffer_row[:, None] + place, key, mask=good)
            count += fresh
        if (tl.max(count) > capacity - BLOCK_N) | (first + BLOCK_N >= end):  # full, or the last tile
            count, threshold = _prune(buffer_row, count, k)
    for start in range(0, k, BLOCK_N):
        offs = start + tl.arange(0, BLOCK_N)[None, :]
        empty = (offs >= count[:, None]) & (offs < k) & mask_m[:, None]
        tl.store(buffer_row[:, None] + offs, tl.full((BLOCK_M, BLOCK_N), -1, tl.int64), mask=empty)


def pack_items(V: Tensor, score: Score) -> PackedItems:
    """Prepare items for `top_k`."""
    return PackedItems(V, score, check_items(V, score), V.float().contiguous())


def top_k(queries: Tensor, items: PackedItems, k: int, seen: SeenItems | None = None) -> tuple[Tensor, Tensor]:
    """The k best items of each query row, best first, ties to the lower item index; in float32.

    `l2` is scored as 2 q.v - ||v||^2 - ||q||^2, so nearly equal scores may change places within rounding.

    Parameters
    ----------
    queries : [m, d]; V : [N, d], finite, and so small that no score overflows
    seen : (indptr int64 [m + 1], indices int32, ascending within a row): items of each query that are left out

    Returns
    -------
    items : int32 [m, k], scores : float32 [m, k]; where fewer than k items remain, item -1 with score -inf.
    """
    check_top_k(queries, items, k, seen)
    V, queries = items.layout, queries.float().contiguous()
    assert isinstance(V, Tensor)
    (m, d), n_items, device = queries.shape, len(V), queries.device
    none = torch.zeros(1, dtype=torch.int64, device=device)
    indptr, indices = (none, none) if seen is None else (seen[0].contiguous(), seen[1].contiguous())
    # Room for k keys and several tiles: a prune leaves k, so 4 k makes prunes rare after the first few.
    capacity = triton.next_power_of_2(4 * k + 8 * BLOCK_N)
    block_m = triton.cdiv(m, BLOCK_M)
    splits = max(1, min(PROGRAMS // max(1, block_m), n_items // (2 * capacity)))
    share = triton.cdiv(triton.cdiv(n_items, BLOCK_N), splits) * BLOCK_N
    splits = max(1, triton.cdiv(n_items, share)) if n_items else 1
    turn = max(BLOCK_M, SCRATCH // (8 * capacity * splits) // BLOCK_M * BLOCK_M)
    best = torch.empty(m, k, dtype=torch.int32, device=device)
    scores = torch.empty(m, k, dtype=torch.float32, device=device)
    for row in range(0, m, turn):
        part = queries[row : row + turn]
        buffer = torch.empty(len(part), splits, capacity, dtype=torch.int64, device=device)
        _candidates_kernel[(triton.cdiv(len(part), BLOCK_M), splits)](
            part, V, indptr[row:], indices, buffer, m=len(part), n_items=n_items, d=d, k=k, capacity=capacity,
            share=share, L2=items.score == "l2", SEEN=seen is not None, **BLOCKS, enable_fp_fusion=True,
        )  # fmt: skip
        key = buffer[:, :, :k].flatten(1).sort(dim=1, descending=True).values[:, :k]
        ordered = (key >> 31) - 2**31
        bits = (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(torch.int32)
        empty = key < 0
        best[row : row + turn] = torch.where(empty, -1, 0x7FFFFFFF - (key & 0x7FFFFFFF)).to(torch.int32)
        scores[row : row + turn] = torch.where(empty, -torch.inf, bits.view(torch.float32))
    return best, scores
