"""The k best items of each query, without a matrix of all scores: blocked scores, seen-item mask, running top-k.

A program scores BLOCK_M queries against one split of the items, BLOCK_N at a time. A score that reaches the threshold
of its query is appended to the query's buffer of `capacity` keys in global memory:
    key = ordered(score) << 31 | (2^31 - 1 - item)        int64, >= 0
Keys are distinct. The larger key is the better item, and ties go to the lower item index. When a buffer may overflow,
a bisection (counting keys >= middle) finds the k-th largest key. Its score becomes the threshold, and smaller keys are
dropped. So a buffer always holds the k best items so far, in any order of the items. In a random order, few scores soon
pass the threshold, and pruning becomes rare. k and the capacity are run-time numbers: there is no sorting network and
nothing to unroll.

The seen items of a query ascend, so a program reads them once, in step with the items.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from drm_triton.kernels.checks import check_items, check_top_k
from drm_triton.kernels.protocol import PackedItems, SeenItems
from drm_triton.names import Score

BUFFER_BYTES = 1 << 28  # of all buffers in a launch; more queries take several launches
PROGRAMS = 1024  # enough to fill 132 to 304 multiprocessors several times; with fewer queries, the items are split

# Each row of V serves 64 queries. 8 scores per thread and 16 factors at a time leave registers for keys and addresses,
# which have 64 bits each. Larger tiles spill on some GPUs.
TOP_K_SIZES = {"BLOCK_M": 64, "BLOCK_N": 32, "BLOCK_D": 16, "num_warps": 8}
BLOCK_M, BLOCK_N = TOP_K_SIZES["BLOCK_M"], TOP_K_SIZES["BLOCK_N"]


@triton.jit
def _key(score, item):
    """Return the int64 key of a float32 score and an item."""
    bits = tl.where(score == 0, 0.0, score).to(tl.int32, bitcast=True)  # -0.0 ties with 0.0
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 0x80000000
    return (ordered << 31) | (0x7FFFFFFF - item).to(tl.int64)


@triton.jit
def _score(key):
    """Return the score of a key."""
    ordered = ((key >> 31) - 0x80000000).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


BLOCK_KEYS = tl.constexpr(32)  # keys of a buffer that `_prune` reads at a time


@triton.jit
def _prune(buffer_row, count, k):
    """Keep the k largest keys of each buffer; return new count and lowest score (-inf below k keys), [BLOCK_M] each."""
    longest = tl.max(count)
    full = count >= k
    # Invariant: at least k keys are >= low, fewer than k are >= high. Keys are distinct, so exactly k remain.
    low = tl.zeros(count.shape, tl.int64)
    high = tl.where(full, 0x7FFFFFFFFFFFFFFF, 1)
    tl.debug_barrier()  # makes the appended keys visible to all threads
    while tl.max(high - low) > 1:
        middle = low + ((high - low) >> 1)
        reach = tl.zeros(count.shape, tl.int32)
        for start in range(0, longest, BLOCK_KEYS):
            offs = start + tl.arange(0, BLOCK_KEYS)[None, :]
            key = tl.load(buffer_row[:, None] + offs, mask=offs < count[:, None], other=-1)
            reach += tl.sum((key >= middle[:, None]).to(tl.int32), axis=1)
        low = tl.where(reach >= k, middle, low)
        high = tl.where(reach == k, low + 1, tl.where(reach < k, middle, high))
    kept = tl.zeros(count.shape, tl.int32)
    for start in range(0, longest, BLOCK_KEYS):
        offs = start + tl.arange(0, BLOCK_KEYS)[None, :]
        key = tl.load(buffer_row[:, None] + offs, mask=offs < count[:, None], other=-1)
        keep = key >= low[:, None]
        place = kept[:, None] + tl.cumsum(keep.to(tl.int32), axis=1) - 1
        tl.debug_barrier()  # all threads have read this block; places never pass it
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
    buffer_ptr,  # int64 [m, splits, capacity], out: the k best keys of each split, -1 if there are fewer
    m: tl.int64,
    n_items: tl.int64,
    d: tl.int32,
    k: tl.int32,
    capacity: tl.int32,
    items_per_split: tl.int64,  # a multiple of BLOCK_N
    L2: tl.constexpr,
    SEEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask_m = offs_m < m
    begin = tl.program_id(1) * items_per_split
    end = tl.minimum(begin + items_per_split, n_items)
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

    for first_item in range(begin, end, BLOCK_N):
        item = (first_item + tl.arange(0, BLOCK_N)).to(tl.int32)
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
            while tl.min(seen) < first_item + BLOCK_N:
                valid = valid & (item[None, :] != seen[:, None])
                cursor += (seen < first_item + BLOCK_N).to(tl.int64)
                seen = tl.load(seen_ptr + cursor, mask=cursor < last, other=0x7FFFFFFF)
        good = valid & (score >= threshold[:, None])
        n_good = tl.sum(good.to(tl.int32), axis=1)
        if tl.max(n_good) > 0:
            place = count[:, None] + tl.cumsum(good.to(tl.int32), axis=1) - 1
            key = _key(score, item[None, :])
            tl.store(buffer_row[:, None] + place, key, mask=good)
            count += n_good
        if (tl.max(count) > capacity - BLOCK_N) | (first_item + BLOCK_N >= end):  # full, or the last block
            count, threshold = _prune(buffer_row, count, k)
    for start in range(0, k, BLOCK_N):
        offs = start + tl.arange(0, BLOCK_N)[None, :]
        empty = (offs >= count[:, None]) & (offs < k) & mask_m[:, None]
        tl.store(buffer_row[:, None] + offs, tl.full((BLOCK_M, BLOCK_N), -1, tl.int64), mask=empty)


def pack_items(V: Tensor, score: Score) -> PackedItems:
    """Prepare items for `top_k`."""
    return PackedItems(V, score, check_items(V, score), V.float().contiguous())


def top_k(queries: Tensor, items: PackedItems, k: int, seen: SeenItems | None = None) -> tuple[Tensor, Tensor]:
    """Find the k best items of each query, best first, in float32 (see `protocol.Backend.top_k`).

    `l2` is scored as 2 q.v - ||v||^2 - ||q||^2, so items with nearly equal scores may change places within rounding.
    """
    check_top_k(queries, items, k, seen)
    V, queries = items.layout, queries.float().contiguous()
    assert isinstance(V, Tensor)
    (m, d), n_items, device = queries.shape, len(V), queries.device
    none = torch.zeros(1, dtype=torch.int64, device=device)
    indptr, indices = (none, none) if seen is None else (seen[0].contiguous(), seen[1].contiguous())
    # A buffer has space for k keys and several blocks. A prune leaves k, so 4 k makes prunes rare after the first few.
    capacity = triton.next_power_of_2(4 * k + 8 * BLOCK_N)
    splits = max(1, min(PROGRAMS // max(1, triton.cdiv(m, BLOCK_M)), n_items // (2 * capacity)))
    items_per_split = triton.cdiv(triton.cdiv(n_items, BLOCK_N), splits) * BLOCK_N
    splits = max(1, triton.cdiv(n_items, items_per_split)) if n_items else 1
    queries_per_launch = max(BLOCK_M, BUFFER_BYTES // (8 * capacity * splits) // BLOCK_M * BLOCK_M)
    best = torch.empty(m, k, dtype=torch.int32, device=device)
    scores = torch.empty(m, k, dtype=torch.float32, device=device)
    for start in range(0, m, queries_per_launch):
        block = slice(start, start + queries_per_launch)
        n_queries = len(queries[block])
        buffer = torch.empty(n_queries, splits, capacity, dtype=torch.int64, device=device)
        _candidates_kernel[(triton.cdiv(n_queries, BLOCK_M), splits)](
            queries[block],
            V,
            indptr[start:],
            indices,
            buffer,
            m=n_queries,
            n_items=n_items,
            d=d,
            k=k,
            capacity=capacity,
            items_per_split=items_per_split,
            L2=items.score == "l2",
            SEEN=seen is not None,
            **TOP_K_SIZES,
            enable_fp_fusion=True,
        )
        key = buffer[:, :, :k].flatten(1).sort(dim=1, descending=True).values[:, :k]
        ordered = (key >> 31) - 2**31
        bits = (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(torch.int32)
        empty = key < 0
        best[block] = torch.where(empty, -1, 0x7FFFFFFF - (key & 0x7FFFFFFF)).to(torch.int32)
        scores[block] = torch.where(empty, -torch.inf, bits.view(torch.float32))
    return best, scores
