"""`sample_lists`: lists drawn by random access. They equal those of the reference to the bit; it explains the scheme.

Cost of a list at rho = 3, eta = 45: 12 Philox blocks, 4 permutations of 16 hashes, and 45 binary searches in the user's
items. It reads those items and writes n ids. Lists that share negatives draw the blocks once per group. Each list then
finds out which shared draws are items of its user: it looks up the user's items in a bitmap of the draws, without a
branch, and the few that it has in a hash table. If the user has very many items, it searches for the draws instead. A
draw that is replaced costs a Philox block and a binary search. The shared draws are written once for the group, and
for each list only what it has in place of some of them: with 1,000 negatives, a list is 5 KB if written out.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from drm_triton.kernels.batches import GroupedBatch, ListBatch, OwnNegatives
from drm_triton.kernels.checks import INT64, check_sample, check_sample_users
from drm_triton.kernels.cpu.permutation import PermutationBuffers, first_permutations, permutation_buffers, permute
from drm_triton.kernels.cpu.runtime import threads
from drm_triton.kernels.cpu.runtime.arrays import empty, view
from drm_triton.kernels.cpu.runtime.jit import CACHE_LINE, allocating, inline, kernel, prefetch
from drm_triton.kernels.protocol import ListPlan
from drm_triton.kernels.streams import NEGATIVES, ORDER, POSITIVES, SHARED_BLOCK, USER

# Every operand is uint64: Numba turns uint64 with a signed integer into float64.
u64 = np.uint64
MASK32, S16, S32 = u64(0xFFFFFFFF), u64(16), u64(32)
MULTIPLY0, MULTIPLY1, WEYL0, WEYL1 = u64(0xD2511F53), u64(0xCD9E8D57), u64(0x9E3779B9), u64(0xBB67AE85)
ZERO, ONE, S6, LAST_BIT = u64(0), u64(1), u64(6), u64(63)
SEARCH_BLOCK = 64  # lists whose users are searched together
TASK = 1024  # lists that a thread draws at least: fewer take less time than to start it
AHEAD = 128  # items of each user that are prefetched, whether the user has them or not: a branch would cost more
FILTER_BITS = 1 << 15  # bits of the bitmap of shared draws, at least: 4 KB, which stay in the cache
FILTER_LOAD = 64  # bits of it for each draw, at least
TABLE_LOAD = 8  # entries of the hash table of shared draws, for each draw
SEARCH_ABOVE = 16  # times eta: shared draws are searched for in the items of a user who has more than this
REPLACED_TOGETHER = 64  # draws, at least, that are replaced together
SORTED_BY_INSERTION = 32  # draws of one list, at most: the time grows with their square


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


class OwnArrays(NamedTuple):
    """`OwnNegatives` to fill. Those of a block of lists are together, from entry eta times its first list on."""

    first: NDArray[np.int64]  # [B]
    counts: NDArray[np.int64]  # [B]
    places: NDArray[np.int32]  # [B * eta]
    items: NDArray[np.int32]  # [B * eta]


class BatchArrays(NamedTuple):
    """The lists to fill. If they share negatives, `items` has the positives; if not, the arrays after it are empty."""

    start: int  # number of the first list
    users: NDArray[np.int32]  # [B]
    items: NDArray[np.int32]  # [B, n or rho]
    of_groups: NDArray[np.int32]  # [G, eta]
    own: OwnArrays


class ListBlockBuffers(NamedTuple):
    """Buffers for the users and positives of up to SEARCH_BLOCK lists."""

    number: NDArray[np.uint64]  # of a list in its epoch
    ident: NDArray[np.uint64]  # what keys the permutation of the user's items
    user: NDArray[np.int64]
    offset: NDArray[np.int64]  # position of the list among those of its user, then of a positive among the user's items
    permutation: PermutationBuffers


class Replacements(NamedTuple):
    """Shared draws to replace. In each list, they are items of its user. All arrays: [eta + 1 + REPLACED_TOGETHER]."""

    owner: NDArray[np.int64]  # list in its block
    place: NDArray[np.int64]  # of the draw among the shared ones
    number: NDArray[np.uint64]  # of the list in its epoch
    begin: NDArray[np.int64]  # where the items of its user are
    size: NDArray[np.int64]  # items of its user, of which the binary search goes through ever fewer


class NegativeBuffers(NamedTuple):
    """Buffers for the negatives of one list, the draws of its group, and those of them to replace in some lists."""

    rank: NDArray[np.int64]  # [eta + 3 + REPLACED_TOGETHER] ranks among the items that the user does not have
    low: NDArray[np.int64]  # [eta + 3 + REPLACED_TOGETHER] positions in the user's items
    group: NDArray[np.int64]  # [1] whose draws `shared` has, -1 before the first
    shared: NDArray[np.int32]  # [eta] draws of the group
    drawn: NDArray[np.uint64]  # bitmap: the bits of the draws, by their low bits; a power of two
    table_heads: NDArray[np.int32]  # hash table: the last draw whose item has these low bits, or -1; a power of two
    following: NDArray[np.int32]  # [eta] the draw before this one in the table with the same low bits, or -1
    candidates: NDArray[np.uint64]  # [SEARCH_ABOVE * eta + 1] items whose bit is set
    marked: NDArray[np.bool_]  # [eta] draws to replace in one list
    replacements: Replacements


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
    return (word * (size & MASK32)) >> S32  # the mask tells LLVM that a 32-bit multiplication will do


@inline
def draw_users(plan, block):
    """Fill `user` with the users of the lists in `number`, and `offset` with the position among the user's lists."""
    number, user, offset, first_list = block.number, block.user, block.offset, plan.first_list
    image, size, keys = block.permutation.image, block.permutation.size, block.permutation.keys
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
    permute(block.permutation)
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
def prefetch_items(plan, users):
    """Prefetch the first items of some users."""
    for b in range(users.size):
        begin = plan.begin[users[b]]
        for p in range(begin, begin + AHEAD, CACHE_LINE):
            prefetch(plan.indices, p)


@inline
def places_of(plan, user):
    """Return where in `indices` the items of a user are."""
    return slice(plan.begin[user], plan.begin[user] + plan.indptr[user + 1] - plan.indptr[user])


@inline
def draw_positives(plan, block, positives):
    """Fill positives [lists, rho] with the next rho items of each user, under the permutation that `ident` keys."""
    ident, user, offset, rho = block.ident, block.user, block.offset, positives.shape[1]
    image, size, keys = block.permutation.image, block.permutation.size, block.permutation.keys
    seed, word1 = plan.seed, plan.epoch4 + u64(POSITIVES)
    for b in range(user.size):  # a loop of its own, so that it runs in vector registers
        keys[0, b], keys[1, b], keys[2, b], keys[3, b] = philox(seed, word1, ident[b], ZERO)
    for b in range(user.size):
        size[b] = plan.indptr[user[b] + 1] - plan.indptr[user[b]]
        offset[b] *= rho  # below size: a user has ceil(size / rho) lists
    for t in range(rho):
        for b in range(user.size):
            image[b] = offset[b]
            following = offset[b] + 1
            offset[b] = following if following < np.int64(size[b]) else 0
        permute(block.permutation)
        for b in range(user.size):
            positives[b, t] = plan.indices[plan.begin[user[b]] + np.int64(image[b])]


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
def draw_below(plan, number, first_block, size, count, draws):
    """Fill draws[j], j < count and up to three more, with numbers below `size` of the negatives of list `number`."""
    seed, word1 = plan.seed, plan.epoch4 + u64(NEGATIVES)
    for block in range((count + 3) // 4):
        w0, w1, w2, w3 = philox(seed, word1, number, u64(first_block + block))
        draws[4 * block] = below(w0, size)
        draws[4 * block + 1] = below(w1, size)
        draws[4 * block + 2] = below(w2, size)
        draws[4 * block + 3] = below(w3, size)


@inline
def draw_negatives(plan, number, row, buffers, negatives):
    """Fill `negatives` with the draws of a list: uniform items outside `row`, the user's items."""
    rank, low = buffers.rank, buffers.low
    draw_below(plan, number, 0, u64(plan.n_items - row.size), negatives.size, rank)
    # The rank-th item that is not a positive is rank + the number of positives at or before it. Positive number p has
    # row[p] - p other items below it.
    search(row, rank, 1, low, negatives.size)
    for j in range(negatives.size):
        negatives[j] = rank[j] + low[j]


@inline
def draw_shared(plan, group, buffers):
    """Fill `shared` with the draws of a group, uniform items, and enter each in the bitmap and in the hash table."""
    shared, item, drawn, table_heads = buffers.shared, buffers.rank, buffers.drawn, buffers.table_heads
    draw_below(plan, group, SHARED_BLOCK, u64(plan.n_items), shared.size, item)
    drawn[:] = 0
    table_heads[:] = -1
    for j in range(shared.size):
        shared[j] = item[j]
        drawn[word_of(drawn, u64(item[j]))] |= ONE << (u64(item[j]) & LAST_BIT)
        slot = item[j] & (table_heads.size - 1)
        buffers.following[j], table_heads[slot] = table_heads[slot], j


@inline
def word_of(drawn, item):
    """Return which word of the bitmap has the bit of an item, which is the bit that the lowest bits of the item say."""
    return (item >> S6) & u64(drawn.size - 1)


@inline
def find_shared(row, b, buffers, count):
    """Append the shared draws that are in `row`, the items of the user of list b, to those to replace.

    There are `count` of these so far. Returns how many there are now.
    """
    shared, low, drawn, candidates = buffers.shared, buffers.low, buffers.drawn, buffers.candidates
    owner, place = buffers.replacements.owner, buffers.replacements.place
    if row.size > SEARCH_ABOVE * shared.size:
        search(row, shared, 0, low, shared.size)
        for j in range(shared.size):
            owner[count], place[count] = b, j
            count += low[j] > 0 and row[low[j] - 1] == shared[j]
        return count
    found = ZERO
    for p in range(row.size):  # each is written, and the next one overwrites it unless its bit is set: no branch
        item = u64(row[p])
        candidates[found] = item
        found += (drawn[word_of(drawn, item)] >> (item & LAST_BIT)) & ONE
    for i in range(found):
        item = np.int64(candidates[i])
        j = buffers.table_heads[item & (buffers.table_heads.size - 1)]
        while j >= 0:
            owner[count], place[count] = b, j
            count += shared[j] == item
            j = buffers.following[j]
    return count


@inline
def replace_shared(plan, block, buffers, count, position, own):
    """Replace draw place[k] of list owner[k], k < count, by a draw of this list for its user.

    It becomes entry position + k of `own`. The searches take each step together, as in `search`.
    """
    rank, low, (owner, place, number, begin, size) = buffers.rank, buffers.low, buffers.replacements
    seed, word1, most = plan.seed, plan.epoch4 + u64(NEGATIVES), np.int64(0)
    for k in range(count):
        user, number[k] = block.user[owner[k]], block.number[owner[k]]
        begin[k], size[k], low[k] = plan.begin[user], plan.indptr[user + 1] - plan.indptr[user], 0
        most = max(most, size[k])
    for k in range(count):  # a loop of its own, so that it runs in vector registers
        w0, w1, w2, w3 = philox(seed, word1, number[k], u64(place[k] >> 2))
        even, odd = w2 if place[k] & 2 else w0, w3 if place[k] & 2 else w1
        rank[k] = below(odd if place[k] & 1 else even, u64(plan.n_items - size[k]))
    while most > 0:
        for k in range(count):
            half = (size[k] + 1) >> 1
            p = max(low[k] + half - 1, 0)  # at the end of a search, half is 0
            above = (rank[k] - (np.int64(plan.indices[begin[k] + p]) - p)) >> 63
            low[k] += half & ~above
            size[k] -= half
        most -= (most + 1) >> 1
    for k in range(count):
        own.places[position + k], own.items[position + k] = place[k], rank[k] + low[k]


@inline
def copy(source, target):
    """Copy an array. An assignment would allocate memory in case the two overlap."""
    for j in range(source.size):
        target[j] = source[j]


@inline
def sort_places(place, start, stop, marked):
    """Sort place[start] .. place[stop - 1], different numbers: mostly none or one, or in order already."""
    if stop - start > SORTED_BY_INSERTION:
        marked[:] = False
        for i in range(start, stop):
            marked[place[i]] = True
        for j in range(marked.size):  # each is written, and the next one overwrites it unless it is marked
            place[start] = j
            start += marked[j]
        return
    for i in range(start + 1, stop):
        value, k = place[i], i
        while k > start and place[k - 1] > value:
            place[k] = place[k - 1]
            k -= 1
        place[k] = value


@inline
def take_shared(plan, start, block, buffers, batch):
    """Give the lists of a block, the first of which is list `start` of the batch, the draws of their groups.

    Draws that the user has are replaced.
    """
    shared, own, count = buffers.shared, batch.own, np.int64(0)
    position = start * shared.size
    for b in range(block.user.size):
        group = np.int64(block.number[b]) // plan.share
        if group != buffers.group[0]:  # a group may be that of the block before
            buffers.group[0] = group
            draw_shared(plan, u64(group), buffers)
            copy(shared, batch.of_groups[group - batch.start // plan.share])
        before = count
        count = find_shared(plan.indices[places_of(plan, block.user[b])], b, buffers, count)
        sort_places(buffers.replacements.place, before, count, buffers.marked)
        own.first[start + b], own.counts[start + b] = position + before, count - before
        if count > REPLACED_TOGETHER or b == block.user.size - 1:
            replace_shared(plan, block, buffers, count, position, own)
            position, count = position + count, np.int64(0)


@inline
def first_lists(buffers, lists, number):
    """Return the buffers for some lists, the first of which has this number in its epoch."""
    block = ListBlockBuffers(
        buffers.number[:lists],
        buffers.ident[:lists],
        buffers.user[:lists],
        buffers.offset[:lists],
        first_permutations(buffers.permutation, lists),
    )
    for b in range(lists):
        block.number[b] = number + b
    return block


@inline
def draw_block(start, stop, plan, buffers, negative_buffers, batch):
    """Fill lists start .. stop - 1, at most SEARCH_BLOCK, of a batch."""
    block = first_lists(buffers, stop - start, batch.start + start)
    draw_users(plan, block)
    prefetch_items(plan, block.user)
    for b in range(stop - start):
        batch.users[start + b] = block.user[b]
        block.ident[b] = u64(block.user[b]) if plan.proportional else block.number[b]
    items = batch.items[start:stop]
    draw_positives(plan, block, items[:, : plan.rho])
    if plan.share > 1:
        take_shared(plan, start, block, negative_buffers, batch)
        return
    for b in range(stop - start):
        row = plan.indices[places_of(plan, block.user[b])]
        draw_negatives(plan, block.number[b], row, negative_buffers, items[b, plan.rho :])


@allocating
def power_of_two(least):
    """Return the smallest power of two that is at least this."""
    power = 1
    while power < least:
        power *= 2
    return power


@allocating
def sampling_buffers(eta):
    """Allocate the buffers for lists of eta negatives."""
    unsigned, signed = np.empty((2, SEARCH_BLOCK), np.uint64), np.empty((2, SEARCH_BLOCK), np.int64)
    permutation = permutation_buffers(SEARCH_BLOCK)
    together = eta + 1 + REPLACED_TOGETHER
    places = np.empty((4, together), np.int64)
    negative_buffers = NegativeBuffers(
        np.empty(together + 2, np.int64),
        np.empty(together + 2, np.int64),
        np.full(1, -1),
        np.empty(eta, np.int32),
        np.empty(power_of_two(max(FILTER_BITS, FILTER_LOAD * eta)) // 64, np.uint64),
        np.empty(power_of_two(TABLE_LOAD * eta), np.int32),
        np.empty(eta, np.int32),
        np.empty(SEARCH_ABOVE * eta + 1, np.uint64),
        np.empty(eta, np.bool_),
        Replacements(places[0], places[1], np.empty(together, np.uint64), places[2], places[3]),
    )
    return ListBlockBuffers(unsigned[0], unsigned[1], signed[0], signed[1], permutation), negative_buffers


@kernel
def draw_lists(start, stop, plan, eta, batch):
    """Fill lists start .. stop - 1 of a batch."""
    buffers, negative_buffers = sampling_buffers(eta)
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
        of_user = BatchArrays(0, batch.users[lists], batch.items[lists], batch.of_groups, batch.own)
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
    batch = BatchArrays(0, users.numpy(), items.numpy(), np.empty((0, 0), np.int32), own_arrays(0, 0))
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


def own_arrays(B: int, eta: int) -> OwnArrays:
    """Allocate what B lists have in place of shared negatives. Memory that is not written is not used."""
    first, count = np.empty((2, B), np.int64)
    return OwnArrays(first, count, empty(torch.int32, B * eta).numpy(), empty(torch.int32, B * eta).numpy())


def sample_lists(plan: ListPlan, epoch: int, start: int, stop: int) -> ListBatch:
    """Draw lists number start .. stop - 1 of an epoch; `start` must be a multiple of `plan.share`."""
    indptr = view("sample_lists", "the plan", plan.indptr, (None,), INT64)
    check_sample(plan, epoch, start, stop)
    B, sharing = stop - start, plan.share > 1
    users, items = empty(torch.int32, B), empty(torch.int32, B, plan.rho if sharing else plan.n)
    of_groups = empty(torch.int32, -(-B // plan.share) if sharing else 0, plan.eta)
    own = own_arrays(B if sharing else 0, plan.eta)
    batch = BatchArrays(start, users.numpy(), items.numpy(), of_groups.numpy(), own)
    threads.split(draw_lists, B, TASK, plan_arrays(plan, epoch, indptr), plan.eta, batch)
    if not sharing:
        return ListBatch(users, items)
    return GroupedBatch(users, items, plan.share, of_groups, OwnNegatives(*map(torch.from_numpy, own)))
