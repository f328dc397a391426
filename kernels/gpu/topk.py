"""The k best items of each query, without a matrix of all scores: estimates of groups, then exact scores of a few.

`filter` estimates the best score of each group of items. Then one program ranks the items of one query:

    threshold : a score that at least k unseen items reach, from the lower bounds of the groups
    groups    : those whose upper bound reaches the threshold, a few more than k
    scores    : of the items of these groups, exact; those that reach the threshold go to a buffer
    prune     : drop seen items, and all but the k best

The groups are divided into BLOCK_GROUPS classes, and the best lower bound of each class is kept. A class has an item
that good. If the query has seen n items, at most n of these are seen. So the (k + n)-th best of the classes is a score
that k unseen items reach. With several times as many classes as k + n, it is hardly lower than the k-th best score.

The buffer holds keys, which order by score and then by the lower item:
    key = ordered(score) << 31 | (2^31 - 1 - item)        int64, >= 0
When it is full, a bisection (counting keys >= middle) finds the k-th largest key, and its score becomes the threshold.
So any number of items may pass, as when all scores are equal. k and the size of the buffer are run-time numbers.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from drm_triton.kernels import devices
from drm_triton.kernels.checks import can_rank, check_items, check_top_k
from drm_triton.kernels.gpu.filter import BLOCK_M, GROUP, ItemLayout, estimate_groups, pack, pack_queries
from drm_triton.kernels.gpu.launch import launch, register_limit
from drm_triton.kernels.gpu.ordered import float_of, ordered
from drm_triton.kernels.gpu.sampling import _count_at_most
from drm_triton.kernels.protocol import PackedItems, SeenItems
from drm_triton.names import Score

BUFFER_BYTES = 1 << 28  # of estimates and buffers in a launch; more queries take several launches
CLASSES = (512, 4096)  # of groups, at least and at most
CLASSES_PER_WARP = 512  # 16 numbers in each thread; with one warp, sums need no barrier

# A row of 16 factors is read by 4 threads.
RANK_SIZES = {"BLOCK_ITEMS": 64, "BLOCK_D": 16, "BLOCK_KEYS": 128, **register_limit(168)}
ROUNDING, TINY = tl.constexpr(2.0**-21), tl.constexpr(1e-33)  # see `filter`


@triton.jit
def _key(score, item):
    """Return the int64 key of a float32 score and an item."""
    rank = ordered(tl.where(score == 0, 0.0, score)).to(tl.int64) + 0x80000000  # -0.0 ties with 0.0
    return (rank << 31) | (0x7FFFFFFF - item).to(tl.int64)


@triton.jit
def _score(key):
    """Return the score of a key."""
    return float_of(((key >> 31) - 0x80000000).to(tl.int32))


@triton.jit
def _estimate(estimates_row, error_ptr, norm_ptr, group, stride, query_error, query_norm, d, L2: tl.constexpr):
    """Return the estimates of groups, and by how much a score may differ from them."""
    inside = group < stride  # whole vectors, so that they are loaded at once
    estimate = tl.load(estimates_row + group, mask=inside, other=float("-inf"))
    error = tl.load(error_ptr + group, mask=inside, other=0.0)
    norm = tl.load(norm_ptr + group, mask=inside, other=0.0)
    rounding = (d + 16).to(tl.float32) * ROUNDING
    tiny = tl.zeros_like(error) + (d + 16).to(tl.float32) * TINY
    if L2:
        size = query_norm + norm + error
        slack = tl.fma(size * rounding, size, tiny)
        slack = tl.fma(error, tl.zeros_like(error) + 2 * query_norm, slack)
        slack = tl.fma(norm, tl.zeros_like(error) + 2 * query_error, slack)
    else:
        slack = tl.fma(error, tl.zeros_like(error) + (query_norm + rounding * query_norm), tiny)
        slack = tl.fma(norm, tl.zeros_like(error) + (query_error + rounding * query_norm), slack)
    return estimate, slack


@triton.jit
def _reached(values, wanted):
    """Return a number that at least `wanted` of the values reach, and few more; -inf if there are not so many."""
    rank = ordered(values)
    low = tl.min(rank).to(tl.int64)  # at least `wanted` values are >= low
    high = tl.max(rank).to(tl.int64) + 1  # fewer are >= high
    reach = tl.full((), values.shape[0], tl.int32)
    while (high - low > 1) & (reach > wanted + wanted // 8):
        middle = (low + high) >> 1
        count = tl.sum((rank >= middle).to(tl.int32))
        reach = tl.where(count >= wanted, count, reach)
        low = tl.where(count >= wanted, middle, low)
        high = tl.where(count >= wanted, high, middle)
    return tl.where(reach >= wanted, float_of(low.to(tl.int32)), float("-inf"))


@triton.jit
def _unseen(key, seen_ptr, begin, end):
    """Return whether the items of keys are not among the seen ones, which ascend from `begin` to `end`."""
    item = (0x7FFFFFFF - (key & 0x7FFFFFFF)).to(tl.int64)
    step = tl.full((), 1, tl.int64)
    while step < end - begin:
        step = step << 1
    at_most = _count_at_most(seen_ptr + begin, end - begin, step, item, SLOPE=0)
    return tl.load(seen_ptr + begin + at_most - 1, mask=at_most > 0, other=-1) != item


@triton.jit
def _keep(buffer_row, count, low, seen_ptr, begin, end, SEEN: tl.constexpr, BLOCK_KEYS: tl.constexpr):
    """Drop the keys below `low` and, if SEEN, those of seen items; return how many are left."""
    kept = tl.zeros((), tl.int32)
    for start in range(0, count, BLOCK_KEYS):
        offs = start + tl.arange(0, BLOCK_KEYS)
        key = tl.load(buffer_row + offs, mask=offs < count, other=-1)
        keep = (key >= low) & (key >= 0)
        if SEEN:
            keep = keep & _unseen(key, seen_ptr, begin, end)
        place = kept + tl.cumsum(keep.to(tl.int32), axis=0) - 1
        tl.debug_barrier()  # all threads have read this block; places never pass it
        tl.store(buffer_row + place, key, mask=keep)
        kept += tl.sum(keep.to(tl.int32))
        tl.debug_barrier()
    return kept


@triton.jit
def _prune(buffer_row, count, k, threshold, seen_ptr, begin, end, SEEN: tl.constexpr, BLOCK_KEYS: tl.constexpr):
    """Keep the k largest keys of unseen items; return how many there are, and the new threshold."""
    tl.debug_barrier()  # makes the appended keys visible to all threads
    if SEEN:
        count = _keep(buffer_row, count, tl.full((), 0, tl.int64), seen_ptr, begin, end, True, BLOCK_KEYS)
    if count >= k:
        low = tl.full((), 0x7FFFFFFFFFFFFFFF, tl.int64)
        high = tl.full((), 0, tl.int64)
        for start in range(0, count, BLOCK_KEYS):
            offs = start + tl.arange(0, BLOCK_KEYS)
            key = tl.load(buffer_row + offs, mask=offs < count, other=-1)
            low = tl.minimum(low, tl.min(tl.where(key < 0, 0x7FFFFFFFFFFFFFFF, key)))
            high = tl.maximum(high, tl.max(key) + 1)
        # Invariant: at least k keys are >= low, fewer than k are >= high. Keys are distinct, so exactly k remain.
        while high - low > 1:
            middle = low + ((high - low) >> 1)
            reach = tl.zeros((), tl.int32)
            for start in range(0, count, BLOCK_KEYS):
                offs = start + tl.arange(0, BLOCK_KEYS)
                key = tl.load(buffer_row + offs, mask=offs < count, other=-1)
                reach += tl.sum((key >= middle).to(tl.int32))
            low = tl.where(reach >= k, middle, low)
            high = tl.where(reach == k, low + 1, tl.where(reach < k, middle, high))
        count = _keep(buffer_row, count, low, seen_ptr, begin, end, False, BLOCK_KEYS)
        threshold = tl.maximum(threshold, _score(low))
    return count, threshold


# Not specialised: what depends on the data, and the place of the queries in it.
@triton.jit(
    do_not_specialize=["n_items", "n_seen", "n_groups", "k"],
    do_not_specialize_on_alignment=["queries_ptr", "indptr_ptr", "seen_ptr", "query_error_ptr", "query_norm_ptr"],
)
def _rank_kernel(
    queries_ptr,  # [m, d]
    V_ptr,  # [n_items, d]
    indptr_ptr,  # int64 [m + 1]
    seen_ptr,  # int32 [n_seen]
    estimates_ptr,  # [m, stride]
    error_ptr,  # [n_groups]
    norm_ptr,  # [n_groups]
    query_error_ptr,  # [m], infinite for a query without estimates
    query_norm_ptr,  # [m]
    groups_ptr,  # int32 [m, BLOCK_GROUPS], scratch
    buffer_ptr,  # int64 [m, capacity], out: the k best keys, -1 if there are fewer
    n_items: tl.int64,
    n_seen: tl.int64,
    n_groups: tl.int32,
    stride: tl.int32,
    d: tl.int32,
    k: tl.int32,
    capacity: tl.int32,
    L2: tl.constexpr,
    SEEN: tl.constexpr,
    EVEN: tl.constexpr,  # whether d is a multiple of BLOCK_D
    GROUP: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    BLOCK_ITEMS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    estimates_row, groups_row = estimates_ptr + row * stride, groups_ptr + row * BLOCK_GROUPS
    query_row, buffer_row = queries_ptr + row * d, buffer_ptr + row * capacity
    query_error, query_norm = tl.load(query_error_ptr + row), tl.load(query_norm_ptr + row)
    begin, end = tl.full((), 0, tl.int64), tl.full((), 0, tl.int64)
    if SEEN:  # within the array, whatever the host has not read
        begin = tl.minimum(tl.maximum(tl.load(indptr_ptr + row), 0), n_seen)
        end = tl.minimum(tl.maximum(tl.load(indptr_ptr + row + 1), begin), n_seen)
    offs_g = tl.arange(0, BLOCK_GROUPS)

    classes = tl.full((BLOCK_GROUPS,), float("-inf"), tl.float32)
    for start in range(0, n_groups, BLOCK_GROUPS):
        group = start + offs_g
        estimate, slack = _estimate(estimates_row, error_ptr, norm_ptr, group, stride, query_error, query_norm, d, L2)
        classes = tl.maximum(classes, tl.where(group < n_groups, estimate - slack, float("-inf")))
    threshold = tl.where(query_error < float("inf"), _reached(classes, k + (end - begin)), float("-inf"))

    count = tl.zeros((), tl.int32)
    for start in range(0, n_groups, BLOCK_GROUPS):
        group = start + offs_g
        estimate, slack = _estimate(estimates_row, error_ptr, norm_ptr, group, stride, query_error, query_norm, d, L2)
        near = (group < n_groups) & ~(estimate + slack < threshold)  # also if the sum is NaN
        n_near = tl.sum(near.to(tl.int32))
        tl.debug_barrier()  # all threads have read the groups of the block before
        tl.store(groups_row + tl.cumsum(near.to(tl.int32), axis=0) - 1, group, mask=near)
        tl.debug_barrier()
        for first in range(0, n_near * GROUP, BLOCK_ITEMS):
            offs = first + tl.arange(0, BLOCK_ITEMS)
            inside = offs < n_near * GROUP
            item = tl.load(groups_row + offs // GROUP, mask=inside, other=0).to(tl.int64) * GROUP + offs % GROUP
            inside = inside & (item < n_items)
            item_row = V_ptr + (tl.minimum(item, n_items - 1) * d)[:, None]  # of a row that exists, in any case
            total = tl.zeros((BLOCK_ITEMS, BLOCK_D), tl.float32)
            for factor in range(0, d, BLOCK_D):
                offs_d = factor + tl.arange(0, BLOCK_D)
                if EVEN:
                    q, v = tl.load(query_row + offs_d), tl.load(item_row + offs_d[None, :])
                else:
                    q = tl.load(query_row + offs_d, mask=offs_d < d, other=0.0)
                    v = tl.load(item_row + offs_d[None, :], mask=(offs_d < d)[None, :], other=0.0)
                q = tl.broadcast_to(q[None, :], (BLOCK_ITEMS, BLOCK_D))
                total = tl.fma(q - v, q - v, total) if L2 else tl.fma(q, v, total)
            score = tl.sum(total, axis=1)
            if L2:
                score = -score
            good = inside & (score >= threshold)
            n_good = tl.sum(good.to(tl.int32))
            if n_good > 0:
                place = count + tl.cumsum(good.to(tl.int32), axis=0) - 1
                tl.store(buffer_row + place, _key(score, item.to(tl.int32)), mask=good)
                count += n_good
            if count > capacity - BLOCK_ITEMS:
                count, threshold = _prune(buffer_row, count, k, threshold, seen_ptr, begin, end, SEEN, BLOCK_KEYS)
    count, threshold = _prune(buffer_row, count, k, threshold, seen_ptr, begin, end, SEEN, BLOCK_KEYS)
    for start in range(0, k, BLOCK_KEYS):
        offs = start + tl.arange(0, BLOCK_KEYS)
        tl.store(buffer_row + offs, tl.full((BLOCK_KEYS,), -1, tl.int64), mask=(offs >= count) & (offs < k))


def pack_items(V: Tensor, score: Score) -> PackedItems:
    """Prepare items for `top_k`."""
    norm = check_items(V, score)
    return PackedItems(V, score, norm, pack(V, score) if len(V) else None)


def rank_sizes(k: int) -> dict[str, int]:
    """Return the compile-time arguments of `_rank_kernel` and its number of warps."""
    classes = min(max(CLASSES[0], triton.next_power_of_2(4 * k)), CLASSES[1])
    return {"BLOCK_GROUPS": classes, "GROUP": GROUP, "num_warps": classes // CLASSES_PER_WARP, **RANK_SIZES}


def top_k(queries: Tensor, items: PackedItems, k: int, seen: SeenItems | None = None) -> tuple[Tensor, Tensor]:
    """Find the k best items of each query, best first, in float32 (see `protocol.Backend.top_k`)."""
    reads = devices.on_host(queries)
    check_top_k(queries, items, k, seen, values=reads)
    m, device = len(queries), queries.device
    best = torch.full((m, k), -1, dtype=torch.int32, device=device)
    scores = torch.full((m, k), -torch.inf, device=device)
    layout = items.layout
    if not isinstance(layout, ItemLayout):  # there are no items
        return best, scores
    none = torch.zeros(1, dtype=torch.int64, device=device)
    indptr, indices = (none, none) if seen is None else (seen[0].contiguous(), seen[1].contiguous())
    # A buffer has space for k keys and several blocks. A prune leaves k, so 4 k makes prunes rare.
    capacity = triton.next_power_of_2(4 * k + 4 * RANK_SIZES["BLOCK_ITEMS"])
    stride, sizes = len(layout.bytes.scale), rank_sizes(k)
    bytes_per_query = 4 * stride + 4 * sizes["BLOCK_GROUPS"] + 8 * capacity
    queries_per_launch = max(1, BUFFER_BYTES // bytes_per_query // BLOCK_M) * BLOCK_M
    for start in range(0, m, queries_per_launch):
        block = slice(start, start + queries_per_launch)
        rows = queries[block].float().contiguous()
        rounded = pack_queries(rows, items.norm)
        estimates = torch.empty(len(rows), stride, device=device)
        estimate_groups(rounded, layout, items.score, estimates)
        buffer = torch.empty(len(rows), capacity, dtype=torch.int64, device=device)
        launch(
            _rank_kernel,
            (len(rows),),
            rows,
            layout.rows,
            indptr[start:],
            indices,
            estimates,
            layout.bytes.error,
            layout.bytes.norm,
            rounded.error,
            rounded.norm,
            torch.empty(len(rows), sizes["BLOCK_GROUPS"], dtype=torch.int32, device=device),
            buffer,
            n_items=len(items.V),
            n_seen=len(indices),
            n_groups=triton.cdiv(len(items.V), GROUP),  # the copies that follow would count as items
            stride=stride,
            d=rows.shape[1],
            k=k,
            capacity=capacity,
            L2=items.score == "l2",
            SEEN=seen is not None,
            EVEN=rows.shape[1] % RANK_SIZES["BLOCK_D"] == 0,
            **sizes,
        )
        key = buffer[:, :k].sort(dim=1, descending=True).values
        rank = (key >> 31) - 2**31
        bits = (rank ^ ((rank >> 31) & 0x7FFFFFFF)).to(torch.int32)
        best[block] = torch.where(key < 0, -1, 0x7FFFFFFF - (key & 0x7FFFFFFF)).to(torch.int32)
        scores[block] = torch.where(key < 0, -torch.inf, bits.view(torch.float32))
    if reads:
        return best, scores
    valid = can_rank(queries, items, seen)[:, None]
    return torch.where(valid, best, -1), torch.where(valid, scores, torch.nan)
