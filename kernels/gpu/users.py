"""`sample_users`: lists of users who are each alone, all in one launch.

For a user alone, the permutation of all lists is one of the user's own lists, and the user's number is 0. Each list has
the seed of its user. Otherwise a program draws its lists as `sampling` does.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from drm_triton.kernels.batches import ListBatch
from drm_triton.kernels.checks import check_sample_users
from drm_triton.kernels.gpu.launch import launch
from drm_triton.kernels.gpu.sampling import (
    NEGATIVES,
    ORDER,
    _outside,
    _permute,
    _store_positives,
    _words,
    sample_sizes,
    words_in_order,
)
from drm_triton.kernels.protocol import ListPlan


@triton.jit(do_not_specialize=["n_out", "n_items", "epoch", "item_step"])
def _users_kernel(
    users_ptr,  # int32 [n_out], ascending
    numbers_ptr,  # int64 [n_out], number of each list among those of its user
    seeds_ptr,  # int64 [n_users]
    indptr_ptr,  # int64 [n_users + 1]
    indices_ptr,  # int32 [nnz]
    items_ptr,  # int32 [n_out, rho + eta], out
    epoch: tl.int64,
    n_out: tl.int64,
    n_items: tl.int64,
    rho: tl.int64,
    eta: tl.int64,
    item_step: tl.int64,  # largest power of two up to n_items
    BLOCK_LISTS: tl.constexpr,
    BLOCK_POSITIVES: tl.constexpr,
    BLOCK_NEGATIVES: tl.constexpr,
):
    out = tl.program_id(0).to(tl.int64) * BLOCK_LISTS + tl.arange(0, BLOCK_LISTS)
    mask = out < n_out
    last = tl.minimum(out, n_out - 1)  # lanes past the end repeat the last list, unstored
    user, number = tl.load(users_ptr + last).to(tl.int64), tl.load(numbers_ptr + last)
    seed = tl.load(seeds_ptr + user)
    begin = tl.load(indptr_ptr + user)
    degree = tl.load(indptr_ptr + user + 1) - begin
    zero = tl.zeros_like(number)
    items_row = items_ptr + out[:, None] * (rho + eta)

    key0, key1, key2, key3 = _words(seed, epoch, ORDER, zero, zero.to(tl.uint32))
    offset = _permute(number, (degree + rho - 1) // rho, key0, key1, key2, key3) * rho
    _store_positives(seed, epoch, zero, offset, indices_ptr + begin, degree, items_row, mask, rho, BLOCK_POSITIVES)

    offs_n = tl.arange(0, BLOCK_NEGATIVES)[None, :]
    block = tl.arange(0, BLOCK_NEGATIVES // 4)[None, :].to(tl.uint32) + zero.to(tl.uint32)[:, None]
    ident = number[:, None] + tl.zeros_like(block).to(tl.int64)
    outside = (n_items - degree).to(tl.uint32)[:, None]
    step = item_step
    while step > tl.max(degree):
        step = step >> 1
    for t in range(0, eta, BLOCK_NEGATIVES):
        words = words_in_order(seed[:, None], epoch, NEGATIVES, ident, block)
        item = _outside(words, indices_ptr + begin[:, None], degree[:, None], outside, step)
        tl.store(items_row + rho + t + offs_n, item, mask=mask[:, None] & (t + offs_n < eta))
        block += BLOCK_NEGATIVES // 4


def sample_users(plan: ListPlan, seeds: Tensor, epoch: int, most: int) -> ListBatch:
    """Draw the lists of each user as if the user were alone, at most `most` of a user."""
    check_sample_users(plan, seeds, epoch, most)
    device, n_users = plan.indptr.device, len(plan.indptr) - 1
    counts = plan.first_list.diff().clamp(max=most)
    every = torch.arange(n_users, dtype=torch.int32, device=device)
    users = every.repeat_interleave(counts)  # the host waits here, once, to know how many lists there are
    numbers = torch.arange(len(users), device=device) - (counts.cumsum(0) - counts)[users.long()]
    items = torch.empty(len(users), plan.n, dtype=torch.int32, device=device)
    sizes = sample_sizes(plan.rho)
    launch(
        _users_kernel,
        (triton.cdiv(len(users), sizes["BLOCK_LISTS"]),),
        users,
        numbers,
        seeds,
        plan.indptr,
        plan.indices,
        items,
        epoch=epoch,
        n_out=len(users),
        n_items=plan.n_items,
        rho=plan.rho,
        eta=plan.eta,
        item_step=1 << (plan.n_items.bit_length() - 1),
        **sizes,
    )
    return ListBatch(users, items)
