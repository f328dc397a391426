"""`sample_lists`: lists drawn by random access. They equal those of the reference to the bit; it explains the scheme.

Cost of a list at rho = 3, eta = 45: 12 Philox blocks, 4 permutations of 16 hashes, and 45 binary searches in the user's
items. It reads those items and writes n ids. Lists that share negatives draw the blocks once per group. Each list then
finds out which shared draws are items of its user: it looks up the user's items in a hash table of the draws, or
searches for the draws if the user has very many items.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from drm_triton.kernels.checks import INT64, check_sample, check_sample_users
from drm_triton.kernels.cpu.runtime import threads
from drm_triton.kernels.cpu.runtime.arrays import empty, view
from drm_triton.kernels.cpu.runtime.bits import leading_zeros
from drm_triton.kernels.cpu.runtime.jit import allocating, inline, kernel
from drm_triton.kernels.protocol import ListBatch, ListPlan, SharedNegatives
from drm_triton.kernels.streams import FEISTEL_ROUNDS, NEGATIVES, ORDER, POSITIVES, SHARED_BLOCK, USER

# Every operand is uint64: Numba turns uint64 with a signed integer into float64.
u64 = np.uint64
MASK32, S13, S16, S32 = u64(0xFFFFFFFF), u64(13), u64(16), u64(32)
MULTIPLY0, MULTIPLY1, WEYL0, WEYL1 = u64(0xD2511F53), u64(0xCD9E8D57), u64(0x9E3779B9), u64(0xBB67AE85)
MIX0, MIX1 = u64(0x85EBCA6B), u64(0xC2B2AE35)
ZERO, ONE = u64(0), u64(1)
SEARCH_BLOCK = 64  # lists whose users are searched together
TABLE_LOAD = 8  # entries of the hash table of shared draws, for each draw
SEARCH_ABOVE = 16  # times eta: shared draws are searched for in the items of a user who has more than this


class PlanArrays(NamedTuple):
    """A `ListPlan` and an epoch, for compiled functions."""

    seed: np.uint64
    epoch4: np.uint64  # 4 * epoch: added to the number of a stream, it is the second word of Philox' counter
    proportional: bool
    indptr: NDArray[np.int64]  # [M + 1]
    begin: NDArray[np.int64]  # [M] or more: where the items of each user are in `indices`
    indices: NDArray[np.int32]
    first_list: NDArray[np.int64]  # [M + 1]
    eligible_users: NDArray[np.int32]
    n_items: int
    rho: int
    share: int


class BatchArrays(NamedTuple):
    """The lists to fill. The last two arrays are empty if lists have their own negatives."""

    start: int  # number of the first list
    users: NDArray[np.int32]  # [B]
    items: NDArray[np.int32]  # [B, n]
    shared_items: NDArray[np.int32]  # [G, eta]
    replaced: NDArray[np.bool_]  # [B, eta]


class ListBlockBuffers(NamedTuple):
    """Buffers for the users and positives of up to SEARCH_BLOCK lists."""

    number: NDArray[np.uint64]  # of a list in its epoch
    ident: NDArray[np.uint64]  # what keys the permutation of the user's items
    image: NDArray[np.uint64]  # argument of a permutation, then its value
    size: NDArray[np.uint64]  # of the permuted range
    h: NDArray[np.uint64]  # log2 of the columns of the Feistel grid
    grid_rows: NDArray[np.uint64]
    user: NDArray[np.int64]
    offset: NDArray[np.int64]  # position of the list among those of its user
    keys: NDArray[np.uint64]  # [4, lists]; flat as long as the number of lists is open


class NegativeBuffers(NamedTuple):
    """Buffers for the negatives of one list, and the draws of its group."""

    rank: NDArray[np.int64]  # [eta + 3] ranks among the items that the user does not have
    low: NDArray[np.int64]  # [eta + 3] positions in the user's items
    shared: NDArray[np.int32]  # [eta] draws of the group
    table_heads: NDArray[np.int32]  # hash table: the last draw whose item has these low bits, or -1; a power of two
    following: NDArray[np.int32]  # [eta] the draw before this one in the table with the same low bits, or -1


@inline
def philox(seed, word1, ident, block):
    """Return four uniform words. word1 is 4 * epoch + stream."""
    c0, c1, c2, c3 = block, word1 & MASK32, ident & MASK32, ident >> S32
    key0, key1 = seed & MASK32, seed >> S32
    for _ in range(10):
        product0, product1 = c0 * MULTIPLY0, c2 * MULTIPLY1
        c0, c1, c2, c3 = (
            (product1 >> S32) ^ c1 ^ key0,
            product1 & MASK32,
            (product0 >> S32) ^ c3 ^ key1,
            product0 & MASK32,
        )
        key0, key1 = (key0 + WEYL0) & MASK32, (key1 + WEYL1) & MASK32
    return c0, c1, c2, c3


@inline
def below(word, size):
    """Map a uniform word to 0 .. size - 1. The product fits because size < 2^32."""
    return (word * size) >> S32


@inline
def mix(x, key):
    """Hash 32-bit x under a 32-bit key."""
    x = (x ^ key) & MASK32
    x = ((x ^ (x >> S16)) * MIX0) & MASK32
    x = ((x ^ (x >> S13)) * MIX1) & MASK32
    return x ^ (x >> S16)


@inline
def feistel_round(image, h, rows, key0, key1):
    """Apply one round of the Feistel network on a grid of 2^h columns and `rows` rows."""
    last_column = (ONE << h) - ONE
    column, row = image & last_column, image >> h
    column = (column + below(mix(row, key0), last_column + ONE)) & last_column
    row = row + below(mix(column, key1), rows)
    row = min(row, row - rows)  # modulo rows: an unsigned number below 0 is the larger one
    return (row << h) | column


@inline
def permute(buffers):
    """Replace image[b] by its image under the permutation of 0 .. size[b] - 1 with keys[:, b]."""
    image, size, keys, h, rows = buffers.image, buffers.size, buffers.keys, buffers.h, buffers.grid_rows
    lists = image.size
    for b in range(lists):
        h[b] = (u64(64) - leading_zeros(size[b] - ONE)) >> ONE
        rows[b] = (size[b] + (ONE << h[b]) - ONE) >> h[b]
    for i in range(FEISTEL_ROUNDS):
        key0, key1, step = keys[2 * (i % 2)], keys[2 * (i % 2) + 1], u64(i)
        for b in range(lists):  # the inner loop, so that it runs in vector registers
            image[b] = feistel_round(image[b], h[b], rows[b], key0[b] + step, key1[b] + step)
    for b in range(lists):  # the few images that are not below size are permuted again
        while image[b] >= size[b]:
            for i in range(FEISTEL_ROUNDS):
                even, step = 2 * (i % 2), u64(i)
                image[b] = feistel_round(image[b], h[b], rows[b], keys[even, b] + step, keys[even + 1, b] + step)


@inline
def draw_users(plan, buffers):
    """Fill `user` with the users of the lists in `number`, and `offset` with the position among the user's lists."""
    number, image, size, keys = buffers.number, buffers.image, buffers.size, buffers.keys
    user, offset, first_list = buffers.user, buffers.offset, plan.first_list
    lists = number.size
    if not plan.proportional:
        for b in range(lists):
            draw = philox(plan.seed, plan.epoch4 + u64(USER), number[b], ZERO)[0]
            user[b] = plan.eligible_users[np.int64(below(draw, u64(plan.eligible_users.size)))]
            offset[b] = 0
        return
    order = philox(plan.seed, plan.epoch4 + u64(ORDER), ZERO, ZERO)
    for b in range(lists):
        image[b], size[b], user[b] = number[b], u64(first_list[-1]), 0
        keys[0, b], keys[1, b], keys[2, b], keys[3, b] = order
    permute(buffers)
    # Find the last user whose first list is not above the slot. All lists take each step of the binary search together:
    # their loads overlap, and there is no branch to mispredict.
    length = first_list.size - 1
    while length > 1:
        half = length >> 1
        for b in range(lists):
            user[b] = user[b] + half if first_list[user[b] + half] <= np.int64(image[b]) else user[b]
        length -= half
    for b in range(lists):
        offset[b] = np.int64(image[b]) - first_list[user[b]]


@inline
def draw_positives(plan, buffers, positives):
    """Fill positives [lists, rho] with the next rho items of each user, under the permutation that `ident` keys."""
    user, offset, image, size, keys = buffers.user, buffers.offset, buffers.image, buffers.size, buffers.keys
    lists, rho, indptr, begin = user.size, positives.shape[1], plan.indptr, plan.begin
    for b in range(lists):
        keys[0, b], keys[1, b], keys[2, b], keys[3, b] = philox(
            plan.seed, plan.epoch4 + u64(POSITIVES), buffers.ident[b], ZERO
        )
        size[b] = indptr[user[b] + 1] - indptr[user[b]]
    for t in range(rho):
        for b in range(lists):
            image[b] = u64(offset[b] * rho + t) % size[b]
        permute(buffers)
        for b in range(lists):
            positives[b, t] = plan.indices[begin[user[b]] + np.int64(image[b])]


@inline
def search(row, target, slope, low, count):
    """Fill low[j], j < count, with the number of positions p that have row[p] - slope * p <= target[j].

    All searches take each step together, and the comparison uses the sign bit. A branch would be mispredicted every
    other time, which triples the cost of the whole list. Together with permutations in vector registers, this made
    sampling four times as fast.
    """
    low[:count] = 0
    length = row.size
    while length > 0:
        half = (length + 1) >> 1
        for j in range(count):
            p = low[j] + half - 1
            above = (target[j] - (np.int64(row[p]) - slope * p)) >> 63  # -1 if position p is above the target, else 0
            low[j] += half & ~above
        length -= half


@inline
def draw_negatives(plan, number, row, first_draw, buffers, negatives):
    """Fill `negatives` with draws number first_draw .. of a list: uniform items outside `row`, the user's items."""
    rank, others = buffers.rank, u64(plan.n_items - row.size)
    skipped = first_draw % 4
    for block in range((skipped + negatives.size + 3) // 4):
        word1 = plan.epoch4 + u64(NEGATIVES)
        w0, w1, w2, w3 = philox(plan.seed, word1, number, u64(first_draw // 4 + block))
        rank[4 * block] = below(w0, others)
        rank[4 * block + 1] = below(w1, others)
        rank[4 * block + 2] = below(w2, others)
        rank[4 * block + 3] = below(w3, others)
    rank = rank[skipped:]
    # The rank-th item that is not a positive is rank + the number of positives at or before it. Positive number p has
    # row[p] - p other items below it.
    search(row, rank, 1, buffers.low, negatives.size)
    for j in range(negatives.size):
        negatives[j] = rank[j] + buffers.low[j]


@inline
def draw_shared(plan, group, buffers):
    """Fill `shared` with the draws of a group, uniform items, and enter each in the hash table by its low bits."""
    shared, table_heads = buffers.shared, buffers.table_heads
    table_heads[:] = -1
    for j in range(0, shared.size, 4):
        words = philox(plan.seed, plan.epoch4 + u64(NEGATIVES), group, u64(SHARED_BLOCK + j // 4))
        for i in range(min(4, shared.size - j)):
            item = np.int64(below(words[i], u64(plan.n_items)))
            slot = item & (table_heads.size - 1)
            shared[j + i], buffers.following[j + i], table_heads[slot] = item, table_heads[slot], j + i


@inline
def take_shared(plan, number, row, buffers, negatives, replaced):
    """Fill `negatives` with the shared draws, replacing those in `row`, the user's items, by draws of this list."""
    shared, low = buffers.shared, buffers.low
    eta = shared.size
    replaced[:] = False
    if row.size > SEARCH_ABOVE * eta:
        draw_negatives(plan, number, row, 0, buffers, negatives)
        search(row, shared, 0, low, eta)
        for j in range(eta):
            replaced[j] = low[j] > 0 and row[low[j] - 1] == shared[j]
            if not replaced[j]:
                negatives[j] = shared[j]
        return
    for j in range(eta):
        negatives[j] = shared[j]
    for p in range(row.size):
        j = buffers.table_heads[row[p] & (buffers.table_heads.size - 1)]
        while j >= 0:
            if shared[j] == row[p]:
                replaced[j] = True
                draw_negatives(plan, number, row, j, buffers, negatives[j : j + 1])
            j = buffers.following[j]


@inline
def first_lists(buffers, lists, number):
    """Return the buffers for some lists, the first of which has this number in its epoch."""
    block = ListBlockBuffers(
        buffers.number[:lists],
        buffers.ident[:lists],
        buffers.image[:lists],
        buffers.size[:lists],
        buffers.h[:lists],
        buffers.grid_rows[:lists],
        buffers.user[:lists],
        buffers.offset[:lists],
        buffers.keys[: 4 * lists].reshape(4, lists),  # contiguous, for vector loads
    )
    for b in range(lists):
        block.number[b] = number + b
    return block


@inline
def draw_block(start, stop, plan, buffers, negative_buffers, batch):
    """Fill lists start .. stop - 1, at most SEARCH_BLOCK, of a batch."""
    lists = stop - start
    block = first_lists(buffers, lists, batch.start + start)
    draw_users(plan, block)
    for b in range(lists):
        batch.users[start + b] = block.user[b]
        block.ident[b] = u64(block.user[b]) if plan.proportional else block.number[b]
    draw_positives(plan, block, batch.items[start:stop, : plan.rho])
    group = np.int64(-1)
    for b in range(lists):
        number, user, negatives = block.number[b], block.user[b], batch.items[start + b, plan.rho :]
        row = plan.indices[plan.begin[user] :][: plan.indptr[user + 1] - plan.indptr[user]]
        if plan.share == 1:
            draw_negatives(plan, number, row, 0, negative_buffers, negatives)
        else:
            if np.int64(number) // plan.share != group:
                group = np.int64(number) // plan.share
                draw_shared(plan, u64(group), negative_buffers)
                shared_items = batch.shared_items[group - batch.start // plan.share]
                for j in range(shared_items.size):
                    shared_items[j] = negative_buffers.shared[j]
            take_shared(plan, number, row, negative_buffers, negatives, batch.replaced[start + b])


@allocating
def sampling_buffers(eta):
    """Allocate the buffers for lists of eta negatives."""
    table_size = 1
    while table_size < TABLE_LOAD * eta:
        table_size *= 2
    unsigned, signed = np.empty((6, SEARCH_BLOCK), np.uint64), np.empty((2, SEARCH_BLOCK), np.int64)
    buffers = ListBlockBuffers(
        unsigned[0], unsigned[1], unsigned[2], unsigned[3], unsigned[4], unsigned[5], signed[0], signed[1],
        np.empty(4 * SEARCH_BLOCK, np.uint64),
    )  # fmt: skip
    negative_buffers = NegativeBuffers(
        np.empty(eta + 3, np.int64),
        np.empty(eta + 3, np.int64),
        np.empty(eta, np.int32),
        np.empty(table_size, np.int32),
        np.empty(eta, np.int32),
    )
    return buffers, negative_buffers


@kernel
def draw_lists(start, stop, plan, batch):
    """Fill lists start .. stop - 1 of a batch."""
    buffers, negative_buffers = sampling_buffers(batch.items.shape[1] - plan.rho)
    for block in range(start, stop, SEARCH_BLOCK):
        draw_block(block, min(block + SEARCH_BLOCK, stop), plan, buffers, negative_buffers, batch)


@inline
def draw_block_of_users(number, plan, buffers, users):
    """Write the users of the lists from list `number` on, at most SEARCH_BLOCK."""
    block = first_lists(buffers, users.size, number)
    draw_users(plan, block)
    for b in range(users.size):
        users[b] = block.user[b]


@kernel
def draw_only_users(start, stop, plan, first_number, users):
    """Write the users of lists start .. stop - 1 of those that begin with list `first_number`."""
    buffers, _ = sampling_buffers(1)
    for block in range(start, stop, SEARCH_BLOCK):
        draw_block_of_users(first_number + block, plan, buffers, users[block : min(block + SEARCH_BLOCK, stop)])


@kernel
def draw_users_alone(start, stop, plan, seeds, counts, first, batch):
    """Fill the lists of users start .. stop - 1: counts[u] lists of user u from list first[u] of the batch on."""
    buffers, negative_buffers = sampling_buffers(batch.items.shape[1] - plan.rho)
    none = np.empty((0, 0), np.int32)
    for user in range(start, stop):
        row = plan.indices[plan.indptr[user] : plan.indptr[user + 1]]
        indptr, first_list = np.array([0, row.size]), np.array([0, (row.size + plan.rho - 1) // plan.rho])
        alone = PlanArrays(
            seeds[user],
            plan.epoch4,
            True,
            indptr,
            indptr,
            row,
            first_list,
            plan.eligible_users,
            plan.n_items,
            plan.rho,
            1,
        )
        lists = slice(first[user], first[user] + counts[user])
        of_user = BatchArrays(0, batch.users[lists], batch.items[lists], none, batch.replaced)
        for block in range(0, counts[user], SEARCH_BLOCK):
            draw_block(block, min(block + SEARCH_BLOCK, counts[user]), alone, buffers, negative_buffers, of_user)
        of_user.users[:] = user


def sample_users(plan: ListPlan, seeds: torch.Tensor, epoch: int, most: int) -> ListBatch:
    """Draw the lists of each user as if the user were alone, at most `most` of a user."""
    indptr = view("sample_users", "the plan", plan.indptr, (None,), INT64)
    check_sample_users(plan, seeds, epoch, most)
    counts = np.minimum(plan.first_list.diff().numpy(), most)
    first = counts.cumsum() - counts
    B = int(counts.sum())
    users, items = empty(torch.int32, B), empty(torch.int32, B, plan.n)
    batch = BatchArrays(0, users.numpy(), items.numpy(), np.empty((0, 0), np.int32), np.empty((0, 0), np.bool_))
    own_seeds = view("sample_users", "seeds", seeds, (None,), INT64).astype(np.uint64)
    threads.split(draw_users_alone, len(counts), 8, plan_arrays(plan, epoch, indptr), own_seeds, counts, first, batch)
    return ListBatch(users, items)


def plan_arrays(plan: ListPlan, epoch: int, indptr: NDArray[np.int64]) -> PlanArrays:
    """Return a plan and an epoch in the form that compiled functions take."""
    return PlanArrays(
        seed=u64(plan.seed),
        epoch4=u64(4 * epoch),
        proportional=plan.user_sampling == "proportional",
        indptr=indptr,
        begin=indptr if plan.begin is None else plan.begin.numpy(),
        indices=plan.indices.numpy(),
        first_list=plan.first_list.numpy(),
        eligible_users=plan.eligible_users.numpy(),
        n_items=plan.n_items,
        rho=plan.rho,
        share=plan.share,
    )


def list_users(plan: ListPlan, epoch: int, start: int, stop: int) -> torch.Tensor:
    """Return the users of the lists that `sample_lists` would draw, without the items of anyone: int32 [B]."""
    indptr = view("list_users", "the plan", plan.indptr, (None,), INT64)
    check_sample(plan, epoch, start, stop)
    users = empty(torch.int32, stop - start)
    threads.split(draw_only_users, len(users), SEARCH_BLOCK, plan_arrays(plan, epoch, indptr), start, users.numpy())
    return users


def sample_lists(plan: ListPlan, epoch: int, start: int, stop: int) -> ListBatch:
    """Draw lists number start .. stop - 1 of an epoch; `start` must be a multiple of `plan.share`."""
    indptr = view("sample_lists", "the plan", plan.indptr, (None,), INT64)
    check_sample(plan, epoch, start, stop)
    B, sharing = stop - start, plan.share > 1
    users, items = empty(torch.int32, B), empty(torch.int32, B, plan.n)
    shared_items = empty(torch.int32, -(-B // plan.share) if sharing else 0, plan.eta)
    replaced = empty(torch.bool, B if sharing else 0, plan.eta)
    arrays = plan_arrays(plan, epoch, indptr)
    batch = BatchArrays(start, users.numpy(), items.numpy(), shared_items.numpy(), replaced.numpy())
    threads.split(draw_lists, B, SEARCH_BLOCK, arrays, batch)
    return ListBatch(users, items, SharedNegatives(plan.share, shared_items, replaced) if sharing else None)
