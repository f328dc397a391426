"""Lists drawn by random access: bit for bit those of the reference, where the scheme is explained.

Per list at rho = 3, eta = 45: 12 Philox blocks, 4 permutations of 16 hashes, and 45 binary searches among the user's
items; it reads those items and writes n ids. Where lists share negatives, the blocks are drawn once for all of them,
and each list looks which of these are items of its user: one by one in the table of marks, or if the user has very many
by the same searches.
"""

from typing import NamedTuple

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from drm_triton.errors import InputError
from drm_triton.kernels.checks import check_sample
from drm_triton.kernels.cpu.runtime import threads
from drm_triton.kernels.cpu.runtime.jit import inline, kernel
from drm_triton.kernels.protocol import ListBatch, ListPlan, SharedNegatives
from drm_triton.kernels.streams import FEISTEL_ROUNDS, NEGATIVES, ORDER, POSITIVES, SHARED_BLOCK, USER

# Every operand is uint64: Numba turns uint64 with a signed integer into float64.
u64 = np.uint64
MASK32, S13, S16, S32 = u64(0xFFFFFFFF), u64(13), u64(16), u64(32)
MULTIPLY0, MULTIPLY1, WEYL0, WEYL1 = u64(0xD2511F53), u64(0xCD9E8D57), u64(0x9E3779B9), u64(0xBB67AE85)
MIX0, MIX1 = u64(0x85EBCA6B), u64(0xC2B2AE35)
ZERO, ONE = u64(0), u64(1)
BLOCK = 64  # lists whose users are searched together
MARKS = 4096  # a power of two
LONG = 16  # times eta: users with more items are searched, not looked through


@inline
def philox(seed, word1, ident, block):
    """Four uniform words; word1 = 4 * epoch + stream."""
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
    """Map a uniform word to 0 .. size - 1; size < 2^32, so the product fits."""
    return (word * size) >> S32


@inline
def mix(x, key):
    """Hash 32-bit x under a 32-bit key."""
    x = (x ^ key) & MASK32
    x = ((x ^ (x >> S16)) * MIX0) & MASK32
    x = ((x ^ (x >> S13)) * MIX1) & MASK32
    return x ^ (x >> S16)


@intrinsic
def leading_zeros(context, word):
    """Number of zero bits above the highest one of a uint64."""

    def build(context, builder, signature, args):
        return builder.ctlz(args[0], ir.Constant(ir.IntType(1), 0))

    return types.uint64(types.uint64), build


@inline
def feistel_round(image, h, rows, key0, key1):
    """One round of the Feistel network on a grid of 2^h columns and `rows` rows."""
    last_column = (ONE << h) - ONE
    column, row = image & last_column, image >> h
    column = (column + below(mix(row, key0), last_column + ONE)) & last_column
    row = row + below(mix(column, key1), rows)
    row = min(row, row - rows)  # the one below rows: unsigned, a negative number is the larger
    return (row << h) | column


@inline
def permute(image, size, keys, h, rows):
    """Replace each image[b] by its image under the permutation of 0 .. size[b] - 1 with keys[:, b].

    h and rows are scratch.
    """
    lanes = image.size
    for b in range(lanes):
        h[b] = (u64(64) - leading_zeros(size[b] - ONE)) >> ONE
        rows[b] = (size[b] + (ONE << h[b]) - ONE) >> h[b]
    for i in range(FEISTEL_ROUNDS):
        key0, key1, step = keys[2 * (i % 2)], keys[2 * (i % 2) + 1], u64(i)
        for b in range(lanes):  # in vector registers, hence inside the loop over rounds
            image[b] = feistel_round(image[b], h[b], rows[b], key0[b] + step, key1[b] + step)
    for b in range(lanes):  # the few that fell outside walk on
        while image[b] >= size[b]:
            for i in range(FEISTEL_ROUNDS):
                even, step = 2 * (i % 2), u64(i)
                image[b] = feistel_round(image[b], h[b], rows[b], keys[even, b] + step, keys[even + 1, b] + step)


@inline
def draw_users(number, seed, epoch4, proportional, first, eligible, image, size, keys, h, rows, user, offset):
    """Users of the lists in `number`, and the position of each list among those of its user; the rest is scratch."""
    lanes = number.size
    if not proportional:
        for b in range(lanes):
            draw = philox(seed, epoch4 + u64(USER), number[b], ZERO)[0]
            user[b], offset[b] = eligible[np.int64(below(draw, u64(eligible.size)))], 0
        return
    order = philox(seed, epoch4 + u64(ORDER), ZERO, ZERO)
    for b in range(lanes):
        image[b], size[b], user[b] = number[b], u64(first[-1]), 0
        keys[0, b], keys[1, b], keys[2, b], keys[3, b] = order
    permute(image, size, keys, h, rows)
    # The last user whose first list is not above the slot. All lists take a step of the binary search together: their
    # loads overlap, and there is no branch to mispredict.
    length = first.size - 1
    while length > 1:
        half = length >> 1
        for b in range(lanes):
            user[b] = user[b] + half if first[user[b] + half] <= np.int64(image[b]) else user[b]
        length -= half
    for b in range(lanes):
        offset[b] = np.int64(image[b]) - first[user[b]]


@inline
def draw_positives(ident, seed, word1, indptr, indices, image, size, keys, h, rows, user, offset, positives):
    """Positives of the lists of `user`: the next rho under the permutation that `ident` keys; the rest is scratch."""
    lanes, rho = user.size, positives.shape[1]
    for b in range(lanes):
        keys[0, b], keys[1, b], keys[2, b], keys[3, b] = philox(seed, word1, ident[b], ZERO)
        size[b] = indptr[user[b] + 1] - indptr[user[b]]
    for t in range(rho):
        for b in range(lanes):
            image[b] = u64(offset[b] * rho + t) % size[b]
        permute(image, size, keys, h, rows)
        for b in range(lanes):
            positives[b, t] = indices[indptr[user[b]] + np.int64(image[b])]


@inline
def search(row, target, slope, low, count):
    """Fill low[j], j < count, with the number of positions p that have row[p] - slope * p <= target[j].

    A step of the binary search for all at once, the comparison done on the sign bit: a compiler that makes it a branch,
    wrong every other time, triples the cost of the whole list.
    """
    low[:count] = 0
    length = row.size
    while length > 0:
        half = (length + 1) >> 1
        for j in range(count):
            p = low[j] + half - 1
            above = (target[j] - (np.int64(row[p]) - slope * p)) >> 63  # -1 where position p lies above, else 0
            low[j] += half & ~above
        length -= half


@inline
def draw_negatives(seed, word1, number, row, n_items, first, rank, low, negatives):
    """Uniform items outside `row`, the ascending items of one user, from draw `first` on; rank and low are scratch."""
    others = u64(n_items - row.size)
    skipped = first % 4
    for block in range((skipped + negatives.size + 3) // 4):
        w0, w1, w2, w3 = philox(seed, word1, number, u64(first // 4 + block))
        rank[4 * block] = below(w0, others)
        rank[4 * block + 1] = below(w1, others)
        rank[4 * block + 2] = below(w2, others)
        rank[4 * block + 3] = below(w3, others)
    rank = rank[skipped:]
    # The rank-th item that is no positive is rank + the positives at or before it, and positive number p has row[p] - p
    # non-positives below it.
    search(row, rank, 1, low, negatives.size)
    for j in range(negatives.size):
        negatives[j] = rank[j] + low[j]


@inline
def draw_shared(seed, word1, group, n_items, shared, marks):
    """Uniform items, each marked in the table of its lowest bits."""
    marks[:] = False
    for j in range(0, shared.size, 4):
        words = philox(seed, word1, group, u64(SHARED_BLOCK + j // 4))
        for i in range(min(4, shared.size - j)):
            item = np.int64(below(words[i], u64(n_items)))
            shared[j + i], marks[item & (MARKS - 1)] = item, True


@inline
def take_shared(seed, word1, number, row, n_items, shared, marks, rank, low, negatives, replaced):
    """The shared draws, and one of this list's own in place of each that is in `row`."""
    eta = shared.size
    replaced[:] = False
    if row.size > LONG * eta:
        draw_negatives(seed, word1, number, row, n_items, 0, rank, low, negatives)
        search(row, shared, 0, low, eta)
        for j in range(eta):
            replaced[j] = low[j] > 0 and row[low[j] - 1] == shared[j]
            if not replaced[j]:
                negatives[j] = shared[j]
        return
    for j in range(eta):
        negatives[j] = shared[j]
    for p in range(row.size):
        if marks[row[p] & (MARKS - 1)]:
            for j in range(shared.size):
                if shared[j] == row[p]:
                    replaced[j] = True
                    draw_negatives(seed, word1, number, row, n_items, j, rank, low, negatives[j : j + 1])


class Scratch(NamedTuple):
    """Room for BLOCK lists, and below for the negatives of one."""

    unsigned: np.ndarray  # uint64 [6, BLOCK]
    signed: np.ndarray  # int64 [2, BLOCK]
    keys: np.ndarray  # uint64 [4 * BLOCK]
    rank: np.ndarray  # int64 [eta + 3]
    low: np.ndarray  # int64 [eta + 3]
    shared: np.ndarray  # int32 [eta], the draws that lists share
    marks: np.ndarray  # bool [MARKS], which lowest bits these have


@inline
def draw_block(
    start, stop, begin, seed, epoch4, proportional, indptr, indices, first, eligible, n_items, rho, share, scratch,
    users, items, group_items, replaced,
):  # fmt: skip
    """Fill rows start .. stop - 1, at most BLOCK, of users and items with lists number begin + start and on."""
    lanes = stop - start
    unsigned, shared, marks = scratch.unsigned, scratch.shared, scratch.marks
    number, ident, image, size = unsigned[0, :lanes], unsigned[1, :lanes], unsigned[2, :lanes], unsigned[3, :lanes]
    h, rows, user, offset = (
        unsigned[4, :lanes],
        unsigned[5, :lanes],
        scratch.signed[0, :lanes],
        scratch.signed[1, :lanes],
    )
    keys = scratch.keys[: 4 * lanes].reshape(4, lanes)
    for b in range(lanes):
        number[b] = begin + start + b
    draw_users(number, seed, epoch4, proportional, first, eligible, image, size, keys, h, rows, user, offset)
    for b in range(lanes):
        users[start + b] = user[b]
        ident[b] = u64(user[b]) if proportional else number[b]
    positives, word1 = items[start:stop, :rho], epoch4 + u64(POSITIVES)
    draw_positives(ident, seed, word1, indptr, indices, image, size, keys, h, rows, user, offset, positives)
    group, word1 = np.int64(-1), epoch4 + u64(NEGATIVES)
    for b in range(lanes):
        row, negatives = indices[indptr[user[b]] : indptr[user[b] + 1]], items[start + b, rho:]
        if share == 1:
            draw_negatives(seed, word1, number[b], row, n_items, 0, scratch.rank, scratch.low, negatives)
        else:
            if np.int64(number[b]) // share != group:
                group = np.int64(number[b]) // share
                draw_shared(seed, word1, u64(group), n_items, shared, marks)
                out = group_items[group - begin // share]
                for j in range(shared.size):
                    out[j] = shared[j]
            take_shared(
                seed, word1, number[b], row, n_items, shared, marks, scratch.rank, scratch.low, negatives,
                replaced[start + b],
            )  # fmt: skip


@kernel
def draw_lists(
    start, stop, begin, seed, epoch4, proportional, indptr, indices, first, eligible, n_items, rho, share, users, items,
    group_items, replaced,
):  # fmt: skip
    """Fill rows start .. stop - 1 of users and items with lists number begin + start and on."""
    eta = items.shape[1] - rho
    scratch = Scratch(
        np.empty((6, BLOCK), np.uint64),
        np.empty((2, BLOCK), np.int64),
        np.empty(4 * BLOCK, np.uint64),
        np.empty(eta + 3, np.int64),
        np.empty(eta + 3, np.int64),
        np.empty(eta, np.int32),
        np.empty(MARKS, np.bool_),
    )
    for block in range(start, stop, BLOCK):
        draw_block(
            block, min(block + BLOCK, stop), begin, seed, epoch4, proportional, indptr, indices, first, eligible,
            n_items, rho, share, scratch, users, items, group_items, replaced,
        )  # fmt: skip


def sample_lists(plan: ListPlan, epoch: int, start: int, stop: int) -> ListBatch:
    """Draw lists number start .. stop - 1 of an epoch."""
    if plan.indptr.device.type != "cpu":
        raise InputError(f"sample_lists: the plan must be on the CPU, got device {plan.indptr.device}")
    check_sample(plan, epoch, start, stop)
    users = torch.empty(stop - start, dtype=torch.int32)
    items = torch.empty(stop - start, plan.n, dtype=torch.int32)
    sharing = plan.share > 1
    group_items = torch.empty(-(-(stop - start) // plan.share) if sharing else 0, plan.eta, dtype=torch.int32)
    replaced = torch.empty(stop - start if sharing else 0, plan.eta, dtype=torch.bool)
    threads.split(
        draw_lists, stop - start, 64,
        start, u64(plan.seed), u64(4 * epoch), plan.user_sampling == "proportional",
        plan.indptr.numpy(), plan.indices.numpy(), plan.first_list.numpy(), plan.eligible_users.numpy(),
        plan.n_items, plan.rho, plan.share, users.numpy(), items.numpy(),
        group_items.numpy(), replaced.numpy(),
    )  # fmt: skip
    return ListBatch(users, items, SharedNegatives(plan.share, group_items, replaced) if sharing else None)
