"""Lists drawn by random access: bit for bit those of the reference, where the scheme is explained.

Per list at rho = 3, eta = 45: 12 Philox blocks, 4 permutations of 16 hashes, and 45 binary searches among the user's
items; it reads those items and writes n ids.
"""

import numpy as np
import torch
from torch import Tensor

from drm_triton.errors import InputError
from drm_triton.kernels.cpu import threads
from drm_triton.kernels.cpu.jit import inline, kernel
from drm_triton.kernels.interface import ListPlan
from drm_triton.kernels.reference import NEGATIVES, ORDER, POSITIVES, ROUNDS, USER

# Every operand is uint64: Numba turns uint64 with a signed integer into float64.
u64 = np.uint64
MASK32, S13, S16, S32 = u64(0xFFFFFFFF), u64(13), u64(16), u64(32)
MULTIPLY0, MULTIPLY1, WEYL0, WEYL1 = u64(0xD2511F53), u64(0xCD9E8D57), u64(0x9E3779B9), u64(0xBB67AE85)
MIX0, MIX1 = u64(0x85EBCA6B), u64(0xC2B2AE35)
ZERO, ONE = u64(0), u64(1)


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


@inline
def permute(index, size, keys):
    """Image of `index` under the keyed permutation of 0 .. size - 1."""
    h = ZERO
    while (size - ONE) >> (h + h) > ONE:  # half the bit length of size - 1, rounded down
        h += ONE
    columns = ONE << h
    rows = (size + columns - ONE) >> h
    even0, odd0, even1, odd1 = keys
    image = index
    while True:
        column, row = image & (columns - ONE), image >> h
        for i in range(ROUNDS // 2):
            step = u64(2 * i)
            column = (column + below(mix(row, even0 + step), columns)) & (columns - ONE)
            row = row + below(mix(column, odd0 + step), rows)
            row = row - rows if row >= rows else row
            step += ONE
            column = (column + below(mix(row, even1 + step), columns)) & (columns - ONE)
            row = row + below(mix(column, odd1 + step), rows)
            row = row - rows if row >= rows else row
        image = (row << h) | column
        if image < size:
            return image


@kernel
def draw_lists(
    start, stop, begin, seed, epoch4, proportional, indptr, indices, first, eligible, n_items, rho, users, items
):
    """Fill rows start .. stop - 1 of users and items with lists number begin + start and on."""
    n_lists, eta = first[-1], items.shape[1] - rho
    order = philox(seed, epoch4 + u64(ORDER), ZERO, ZERO)
    rank = np.empty((eta + 3) // 4 * 4, np.int32)
    for b in range(start, stop):
        number = u64(begin + b)
        if proportional:
            slot = np.int64(permute(number, u64(n_lists), order))
            low, length = np.int64(0), first.size - 1  # the last user whose first list is not above the slot
            while length > 1:
                half = length >> 1
                low = low + half if first[low + half] <= slot else low
                length -= half
            user = low
            offset, ident = (slot - first[user]) * rho, u64(user)
        else:
            user = np.int64(
                eligible[np.int64(below(philox(seed, epoch4 + u64(USER), number, ZERO)[0], u64(eligible.size)))]
            )
            offset, ident = np.int64(0), number
        users[b] = user

        row = indptr[user]
        degree = indptr[user + 1] - row
        keys = philox(seed, epoch4 + u64(POSITIVES), ident, ZERO)
        for t in range(rho):
            position = permute(u64((offset + t) % degree), u64(degree), keys)
            items[b, t] = indices[row + np.int64(position)]

        others = u64(n_items - degree)
        for block in range(rank.size // 4):
            w0, w1, w2, w3 = philox(seed, epoch4 + u64(NEGATIVES), number, u64(block))
            rank[4 * block] = below(w0, others)
            rank[4 * block + 1] = below(w1, others)
            rank[4 * block + 2] = below(w2, others)
            rank[4 * block + 3] = below(w3, others)
        for j in range(eta):
            # The rank-th item that is no positive: rank + the positives at or before it. Positive number p has
            # indices[p] - p non-positives below it.
            low, length = np.int64(0), degree
            while length > 0:
                half = (length + 1) >> 1
                low = low + half if indices[row + low + half - 1] - (low + half - 1) <= rank[j] else low
                length -= half
            items[b, rho + j] = rank[j] + low


def sample_lists(plan: ListPlan, epoch: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """Draw lists number start .. stop - 1 of an epoch.

    Returns
    -------
    users : int32 [B]
    items : int32 [B, n], the rho positives and then the eta negatives
    """
    if plan.indptr.device.type != "cpu":
        raise InputError(f"sample_lists: the plan must be on the CPU, got device {plan.indptr.device}")
    if not (epoch >= 0 and 0 <= start <= stop):
        raise InputError(
            f"sample_lists: epoch must be at least 0 and 0 <= start <= stop, got {epoch}, {start} and {stop}"
        )
    if plan.user_sampling == "proportional" and stop > plan.n_lists:
        raise InputError(f"sample_lists: an epoch holds {plan.n_lists} lists, asked for number {stop - 1}")
    users = torch.empty(stop - start, dtype=torch.int32)
    items = torch.empty(stop - start, plan.n, dtype=torch.int32)
    threads.split(
        draw_lists, stop - start, 64,
        start, u64(plan.seed), u64(4 * epoch), plan.user_sampling == "proportional",
        plan.indptr.numpy(), plan.indices.numpy(), plan.first.numpy(), plan.eligible.numpy(),
        plan.n_items, plan.rho, users.numpy(), items.numpy(),
    )  # fmt: skip
    return users, items
