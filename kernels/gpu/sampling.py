"""Draw training lists on the device, equal to those of `reference.sample_lists` to the bit.

List number L of an epoch is a pure function of (seed, epoch, L): Philox 4x32-10 with key = seed and counter =
(block, 4 * epoch + stream, id, id >> 32). A program draws BLOCK_LISTS lists:

    slot      = permutation of 0 .. n_lists - 1 at L              (Feistel network on a grid, no memory)
    user      = last u with first_list[u] <= slot                 (binary search)
    positives = the user's row at permuted positions slot * rho .. slot * rho + rho - 1, modulo its length
    negatives = item of rank r among the items outside the row    (binary search for the positives below it)

With shared negatives, `_shared_kernel` first draws those of each group from all items. A list replaces the draws of its
group that are in the user's row by its own draws of rank r. Nothing is rejected and drawn again, so a user with nearly
all items costs the same as any other user.
"""

import torch
import triton
import triton.language as tl

from drm_triton.kernels import streams
from drm_triton.kernels.batches import ListBatch, SharedNegatives
from drm_triton.kernels.checks import check_sample
from drm_triton.kernels.gpu.launch import launch, register_limit
from drm_triton.kernels.protocol import ListPlan

ORDER = tl.constexpr(streams.ORDER)
USER = tl.constexpr(streams.USER)
POSITIVES = tl.constexpr(streams.POSITIVES)
NEGATIVES = tl.constexpr(streams.NEGATIVES)
SHARED_BLOCK = tl.constexpr(streams.SHARED_BLOCK)
FEISTEL_ROUNDS = tl.constexpr(streams.FEISTEL_ROUNDS)

# 256 draws per warp, 8 per thread.
SHARED_SIZES = {"BLOCK_GROUPS": 4, "BLOCK_NEGATIVES": 64, "num_warps": 1}


def sample_sizes(rho: int) -> dict[str, int]:
    """Return tile sizes and warps of `_sample_kernel`: a warp, whose lanes do the scalar work of a list each.

    A thread searches 8 negatives at a time, with up to 200 registers. With 16, it would need more than 255.
    """
    block_positives = min(4, triton.next_power_of_2(rho))
    sizes = {"BLOCK_LISTS": 32, "BLOCK_POSITIVES": block_positives, "BLOCK_NEGATIVES": 8, "num_warps": 1}
    return {**sizes, **register_limit(200)}


@triton.jit
def _words(seed, epoch, stream, ident, block):
    """Return four uniform 32-bit words for each int64 `ident` and uint32 `block` of the same shape."""
    c1 = tl.zeros_like(block) + (4 * epoch.to(tl.int64) + stream).to(tl.uint32)
    return tl.philox(seed, block, c1, ident.to(tl.uint32), (ident >> 32).to(tl.uint32))


@triton.jit
def words_in_order(seed, epoch, stream, ident, block):
    """Return the words of a stream in order, four per block: ident and block [L, C] -> [L, 4 C]."""
    word0, word1, word2, word3 = _words(seed, epoch, stream, ident, block)
    # Interleaving [w0 w2] with [w1 w3] restores the order.
    return tl.interleave(tl.interleave(word0, word2), tl.interleave(word1, word3))


@triton.jit
def _below(word, size):
    """Map a uniform word to 0 .. size - 1, both uint32."""
    return tl.umulhi(word, size)


@triton.jit
def _mix(x, key):
    """Hash uint32 x under a uint32 key (the finaliser of MurmurHash3)."""
    x = x ^ key
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def _half_bits(size):
    """Return half the bit length of size - 1, rounded down."""
    rest = size - 1
    bits = tl.zeros_like(rest)
    for i in tl.static_range(6):
        shift = 32 >> i
        high = (rest >> shift) > 0
        bits += tl.where(high, shift, 0)
        rest = tl.where(high, rest >> shift, rest)
    return (bits + (rest > 0)) >> 1


@triton.jit
def _permute(index, size, key0, key1, key2, key3):
    """Return the image of int64 `index` under a keyed permutation of 0 .. size - 1 (see `reference.permute`).

    All arguments have the same shape. Columns and rows of the grid stay below 2^32 for any size below 2^62, so the
    rounds run on uint32.
    """
    h = _half_bits(size)
    columns = (tl.full(size.shape, 1, tl.int64) << h).to(tl.uint32)
    rows = ((size + (tl.full(size.shape, 1, tl.int64) << h) - 1) >> h).to(tl.uint32)
    image = index
    outside = size > 0
    while tl.max(outside.to(tl.int32)) > 0:
        column, row = image.to(tl.uint32) & (columns - 1), (image >> h).to(tl.uint32)
        for i in tl.static_range(FEISTEL_ROUNDS):
            even = key0 if i % 2 == 0 else key2
            odd = key1 if i % 2 == 0 else key3
            column = (column + _below(_mix(row, even + i), columns)) & (columns - 1)
            row = row + _below(_mix(column, odd + i), rows)
            row = tl.where(row >= rows, row - rows, row)
        image = tl.where(outside, (row.to(tl.int64) << h) | column.to(tl.int64), image)
        outside = image >= size
    return image


@triton.jit
def _count_at_most(base_ptr, length, step, target, SLOPE: tl.constexpr):
    """Count the i < length with base[i] - SLOPE * i <= target. These differences must not decrease.

    Binary search, one bit of the count at a time: `step` is a power of two, at least half of the largest count. It uses
    integers of the type of `target`. A uint32 is enough for items, and takes half the instructions of an int64.
    """
    count, length, step = tl.zeros_like(target), length.to(target.dtype), step.to(target.dtype)
    while step > 0:
        last = count + step - 1
        value = tl.load(base_ptr + last, mask=last < length, other=0).to(target.dtype) - SLOPE * last
        count = tl.where((last < length) & (value <= target), last + 1, count)
        step = step >> 1
    return count


@triton.jit
def _outside(words, row_ptr, degree, outside, step):
    """Return uniform items outside a user's row of `degree` items, from uniform words; there are `outside` of them."""
    rank = _below(words, outside)
    return (rank + _count_at_most(row_ptr, degree, step, rank, SLOPE=1)).to(tl.int32)


# Arguments that depend on the data are not specialised: the kernel that `warm_up` compiles is the one that runs.
@triton.jit(do_not_specialize=["seed", "n_groups", "n_items"])
def _shared_kernel(
    clock_ptr,  # int64 [2]: epoch, first list
    shared_ptr,  # int32 [n_groups, eta], out
    seed: tl.int64,
    n_groups: tl.int64,
    n_items: tl.int64,
    eta: tl.int64,
    share: tl.int64,
    BLOCK_GROUPS: tl.constexpr,
    BLOCK_NEGATIVES: tl.constexpr,
):
    """Draw the negatives that the lists of a group share."""
    epoch, first_group = tl.load(clock_ptr), tl.load(clock_ptr + 1) // share
    group = tl.program_id(0).to(tl.int64) * BLOCK_GROUPS + tl.arange(0, BLOCK_GROUPS)
    offs_n = tl.program_id(1).to(tl.int64) * BLOCK_NEGATIVES + tl.arange(0, BLOCK_NEGATIVES)
    block = tl.program_id(1) * (BLOCK_NEGATIVES // 4) + tl.arange(0, BLOCK_NEGATIVES // 4)
    block = block[None, :].to(tl.uint32) + tl.zeros_like(group).to(tl.uint32)[:, None]
    ident = (first_group + group)[:, None] + tl.zeros_like(block).to(tl.int64)
    words = words_in_order(seed, epoch, NEGATIVES, ident, block + SHARED_BLOCK)
    item = _below(words, tl.zeros_like(words) + n_items.to(tl.uint32)).to(tl.int32)
    inside = (group < n_groups)[:, None] & (offs_n < eta)[None, :]
    tl.store(shared_ptr + group[:, None] * eta + offs_n[None, :], item, mask=inside)


@triton.jit
def _store_positives(
    seed, epoch, ident, offset, indices_row, degree, items_row, mask, rho, BLOCK_POSITIVES: tl.constexpr
):
    """Store items number offset .. offset + rho - 1 of each user, under the permutation that `ident` keys."""
    offs_p = tl.arange(0, BLOCK_POSITIVES)[None, :]
    key0, key1, key2, key3 = _words(seed, epoch, POSITIVES, ident, tl.zeros_like(ident).to(tl.uint32))
    for t in range(0, rho, BLOCK_POSITIVES):
        index = (offset[:, None] + t + offs_p) % degree[:, None]
        size = degree[:, None] + tl.zeros_like(index)
        position = _permute(index, size, key0[:, None], key1[:, None], key2[:, None], key3[:, None])
        item = tl.load(indices_row[:, None] + position)
        tl.store(items_row + t + offs_p, item, mask=mask[:, None] & (t + offs_p < rho))


@triton.jit(
    do_not_specialize=["seed", "n_out", "n_lists", "n_users", "n_eligible", "n_items", "user_step", "item_step"]
)
def _sample_kernel(
    clock_ptr,  # int64 [2]: epoch, first list
    first_list_ptr,  # int64 [n_users + 1]
    eligible_ptr,  # int32 [n_eligible]
    indptr_ptr,  # int64 [n_users + 1]
    indices_ptr,  # int32 [nnz]
    users_ptr,  # int32 [n_out], out
    items_ptr,  # int32 [n_out, rho + eta], out
    shared_ptr,  # int32 [groups, eta], read if SHARED
    replaced_ptr,  # bool [n_out, eta], out if SHARED
    seed: tl.int64,
    n_out: tl.int64,
    n_lists: tl.int64,
    n_users: tl.int64,
    n_eligible: tl.int64,
    n_items: tl.int64,
    rho: tl.int64,
    eta: tl.int64,
    share: tl.int64,
    user_step: tl.int64,  # largest power of two up to n_users
    item_step: tl.int64,  # largest power of two up to n_items
    PROPORTIONAL: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK_LISTS: tl.constexpr,
    BLOCK_POSITIVES: tl.constexpr,
    BLOCK_NEGATIVES: tl.constexpr,
):
    epoch, start = tl.load(clock_ptr), tl.load(clock_ptr + 1)
    out = tl.program_id(0).to(tl.int64) * BLOCK_LISTS + tl.arange(0, BLOCK_LISTS)
    mask = out < n_out
    number = tl.minimum(out, n_out - 1) + start  # lanes past the end repeat the last list, unstored
    zero = tl.zeros_like(number)

    if PROPORTIONAL:
        key0, key1, key2, key3 = _words(seed, epoch, ORDER, zero, zero.to(tl.uint32))
        slot = _permute(number, zero + n_lists, key0, key1, key2, key3)
        user = _count_at_most(first_list_ptr + 1, n_users, user_step, slot, SLOPE=0)
        offset = (slot - tl.load(first_list_ptr + user)) * rho
        positives_ident = user
    else:
        word, _, _, _ = _words(seed, epoch, USER, number, zero.to(tl.uint32))
        user = tl.load(eligible_ptr + _below(word, (zero + n_eligible).to(tl.uint32)).to(tl.int64)).to(tl.int64)
        offset = zero
        positives_ident = number
    tl.store(users_ptr + out, user.to(tl.int32), mask=mask)

    begin = tl.load(indptr_ptr + user)
    degree = tl.load(indptr_ptr + user + 1) - begin
    items_row = items_ptr + out[:, None] * (rho + eta)

    _store_positives(
        seed, epoch, positives_ident, offset, indices_ptr + begin, degree, items_row, mask, rho, BLOCK_POSITIVES
    )

    offs_n = tl.arange(0, BLOCK_NEGATIVES)[None, :]
    block = tl.arange(0, BLOCK_NEGATIVES // 4)[None, :].to(tl.uint32) + tl.zeros_like(number).to(tl.uint32)[:, None]
    ident = number[:, None] + tl.zeros_like(block).to(tl.int64)
    outside = (n_items - degree).to(tl.uint32)[:, None]
    longest = tl.max(degree)
    step = item_step
    while step > longest:
        step = step >> 1
    group = (out.to(tl.uint32) // share.to(tl.uint32)).to(tl.int64)  # a call has fewer than 2^31 lists
    for t in range(0, eta, BLOCK_NEGATIVES):
        inside = mask[:, None] & (t + offs_n < eta)
        if SHARED:
            item = tl.load(shared_ptr + group[:, None] * eta + t + offs_n, mask=inside, other=-1)
            at_most = _count_at_most(indices_ptr + begin[:, None], degree[:, None], step, item.to(tl.uint32), SLOPE=0)
            nearest = tl.load(indices_ptr + begin[:, None] + at_most - 1, mask=at_most > 0, other=-2)
            replaced = nearest == item
            tl.store(replaced_ptr + out[:, None] * eta + t + offs_n, replaced, mask=inside)
            if tl.max(tl.max(replaced.to(tl.int32), axis=1), axis=0) > 0:  # rarely, in a large catalogue
                words = words_in_order(seed, epoch, NEGATIVES, ident, block)
                own = _outside(words, indices_ptr + begin[:, None], degree[:, None], outside, step)
                item = tl.where(replaced, own, item)
        else:
            words = words_in_order(seed, epoch, NEGATIVES, ident, block)
            item = _outside(words, indices_ptr + begin[:, None], degree[:, None], outside, step)
        tl.store(items_row + rho + t + offs_n, item, mask=inside)
        block += BLOCK_NEGATIVES // 4


def sample_lists(plan: ListPlan, epoch: int, start: int, stop: int) -> ListBatch:
    """Draw lists number start .. stop - 1 of an epoch, equal to those of `reference` to the bit."""
    check_sample(plan, epoch, start, stop)
    return sample_at(plan, clock_at(epoch, start, plan.indptr.device), stop - start)


def clock_at(epoch: int, start: int, device: torch.device) -> torch.Tensor:
    """Return int64 [2] with an epoch and a list number. Filling does not make the host wait, copying would."""
    clock = torch.empty(2, dtype=torch.int64, device=device)
    clock[0].fill_(epoch)
    clock[1].fill_(start)
    return clock


def sample_at(plan: ListPlan, clock: torch.Tensor, n_out: int) -> ListBatch:
    """Draw `n_out` lists from the epoch and the list number on that are the first numbers of `clock`, on the device.

    The host knows neither, so the launches are the same for every step and can be captured in a graph.
    """
    device, n_users = plan.indptr.device, len(plan.indptr) - 1
    users = torch.empty(n_out, dtype=torch.int32, device=device)
    items = torch.empty(n_out, plan.n, dtype=torch.int32, device=device)
    shared = None
    n_groups = triton.cdiv(n_out, plan.share)
    if plan.share > 1:
        shared = SharedNegatives(
            plan.share,
            torch.empty(n_groups, plan.eta, dtype=torch.int32, device=device),
            torch.empty(n_out, plan.eta, dtype=torch.bool, device=device),
        )
    batch = ListBatch(users, items, shared)
    if n_out == 0:
        return batch
    if shared is not None:
        blocks_of_groups = triton.cdiv(n_groups, SHARED_SIZES["BLOCK_GROUPS"])
        launch(
            _shared_kernel,
            (blocks_of_groups, triton.cdiv(plan.eta, SHARED_SIZES["BLOCK_NEGATIVES"])),
            clock,
            shared.items,
            seed=plan.seed,
            n_groups=n_groups,
            n_items=plan.n_items,
            eta=plan.eta,
            share=plan.share,
            **SHARED_SIZES,
        )
    sizes = sample_sizes(plan.rho)
    launch(
        _sample_kernel,
        (triton.cdiv(n_out, sizes["BLOCK_LISTS"]),),
        clock,
        plan.first_list,
        plan.eligible_users,
        plan.indptr,
        plan.indices,
        users,
        items,
        items if shared is None else shared.items,  # not used without SHARED
        items if shared is None else shared.replaced,
        seed=plan.seed,
        n_out=n_out,
        n_lists=plan.n_lists,
        n_users=n_users,
        n_eligible=len(plan.eligible_users),
        n_items=plan.n_items,
        rho=plan.rho,
        eta=plan.eta,
        share=plan.share,
        user_step=1 << (n_users.bit_length() - 1),
        item_step=1 << (plan.n_items.bit_length() - 1),
        PROPORTIONAL=plan.user_sampling == "proportional",
        SHARED=plan.share > 1,
        **sizes,
    )
    return batch
