"""Stochastic gradient steps on pairs of items: BPR and WARP, one pair at a time.

A *task* is the interactions of some users with some items, and the candidates from which negatives are drawn. All rows
that a task reads and writes belong to these users and items. Tasks that have none in common therefore run at the same
time, each one as sequential gradient descent, and the result does not depend on the number of threads.
`drm_triton.models.pairs` divides an epoch into such tasks.

Random words come from Philox as in `streams`: ORDER divides the items, USER shuffles the interactions of users,
POSITIVES draws interactions and NEGATIVES candidates. The ids are positions in the epoch, so no two tasks share one.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from drm_triton.kernels.cpu.runtime.jit import allocating, inline, kernel, prefetch_row
from drm_triton.kernels.cpu.sampling import ZERO, below, philox, u64
from drm_triton.kernels.streams import NEGATIVES, ORDER, POSITIVES, USER

f32 = np.float32
CHUNK = 256  # pairs drawn together: their random words are computed in vector registers, their rows prefetched
AHEAD = 4  # pairs between the prefetch of a row and its use
ITEM = 0xFFFFFFFF  # the bits of a pair, user << 32 | item, that are the item


class Task(NamedTuple):
    """Interactions to train on, and candidates for the negatives."""

    seed: np.uint64
    epoch4: np.uint64  # 4 * epoch, as in `sampling.PlanArrays`
    first: int  # position of the first pair in the epoch
    pairs: NDArray[np.int64]  # [n] interactions, user << 32 | item
    candidates: NDArray[np.int64]  # [c]; a negative is the item of a uniform draw of these
    indptr: NDArray[np.int64]  # items of all users, which are not negatives of theirs
    indices: NDArray[np.int32]


class Tables(NamedTuple):
    """What a task changes. The states are Adagrad's; BPR has none, and they are empty."""

    U: NDArray[np.float32]  # [M, d]
    V: NDArray[np.float32]  # [N, d]
    b: NDArray[np.float32]  # [N]
    U_state: NDArray[np.float32]
    V_state: NDArray[np.float32]
    b_state: NDArray[np.float32]


@inline
def fill_words(seed, word1, first, words):
    """Fill `words`, of a size that is a multiple of 4, with uniform words: four of each id first, first + 1, ..."""
    for k in range(words.size // 4):
        w0, w1, w2, w3 = philox(seed, word1, u64(first + k), ZERO)
        words[4 * k], words[4 * k + 1], words[4 * k + 2], words[4 * k + 3] = w0, w1, w2, w3


@inline
def has_item(task, user, item):
    """Return whether a user has an item. The search has no branch that could be mispredicted."""
    low, length = task.indptr[user], task.indptr[user + 1] - task.indptr[user]
    if length == 0:
        return False
    while length > 1:
        half = length >> 1
        low = low + half if task.indices[low + half] <= item else low
        length -= half
    return task.indices[low] == item


@inline
def shuffle(seed, word1, first, words, x):
    """Permute x uniformly. `words` is a buffer of CHUNK numbers."""
    for stop in range(x.size, 0, -CHUNK):  # positions stop - 1 .. stop - CHUNK, from the last to the first
        fill_words(seed, word1, first + (x.size - stop) // 4, words)
        for t in range(min(CHUNK, stop)):
            last = stop - 1 - t
            other = np.int64(below(words[t], u64(last + 1)))
            x[last], x[other] = x[other], x[last]


# ---------------------------------------------------------------------------------------------------------------
# Division of an epoch into tasks


@kernel
def divide_items(seed, epoch4, bounds, order, block_of):
    """Permute `order`, all items, and write the block of each item: block k is order[bounds[k] : bounds[k + 1]]."""
    words = np.empty(CHUNK, np.uint64)
    shuffle(seed, epoch4 + u64(ORDER), 0, words, order)
    for k in range(bounds.size - 1):
        for t in range(bounds[k], bounds[k + 1]):
            block_of[order[t]] = k


@kernel
def count_pairs(start, stop, user_bounds, indptr, indices, block_of, counts):
    """Add the number of interactions of user block k, start <= k < stop, with item block l to counts[k, l]."""
    for k in range(start, stop):
        for p in range(indptr[user_bounds[k]], indptr[user_bounds[k + 1]]):
            counts[k, block_of[indices[p]]] += 1


@kernel
def group_pairs(start, stop, seed, epoch4, user_bounds, indptr, indices, block_of, begin, pairs):
    """Write the interactions of user blocks start .. stop - 1, in random order.

    Those of user block k with item block l begin at pairs[begin[k, l]].
    """
    words, position = np.empty(CHUNK, np.uint64), np.empty(begin.shape[1], np.int64)
    for k in range(start, stop):
        position[:] = begin[k]
        for user in range(user_bounds[k], user_bounds[k + 1]):
            for p in range(indptr[user], indptr[user + 1]):
                block = block_of[indices[p]]
                pairs[position[block]] = (np.int64(user) << 32) | indices[p]
                position[block] += 1
        for block in range(position.size):
            first = begin[k, block]
            shuffle(seed, epoch4 + u64(USER), first, words, pairs[first : position[block]])


# ---------------------------------------------------------------------------------------------------------------
# BPR


class Draws(NamedTuple):
    """Buffers for the pairs of a chunk."""

    words: NDArray[np.uint64]  # [CHUNK]
    users: NDArray[np.int32]  # [CHUNK]
    positives: NDArray[np.int32]  # [CHUNK]
    negatives: NDArray[np.int32]  # [CHUNK]; -1 if the user has the item that was drawn


@allocating
def draw_buffers():
    """Allocate the buffers of a chunk."""
    return Draws(
        np.empty(CHUNK, np.uint64), np.empty(CHUNK, np.int32), np.empty(CHUNK, np.int32), np.empty(CHUNK, np.int32)
    )


@inline
def draw_triples(task, ident, count, draws):
    """Draw `count` interactions with replacement, and a candidate for each."""
    fill_words(task.seed, task.epoch4 + u64(POSITIVES), ident, draws.words)
    for t in range(count):
        position = np.int64(below(draws.words[t], u64(task.pairs.size)))
        draws.users[t], draws.positives[t] = task.pairs[position] >> 32, task.pairs[position] & ITEM
    fill_words(task.seed, task.epoch4 + u64(NEGATIVES), ident, draws.words)
    for t in range(count):
        item = task.candidates[np.int64(below(draws.words[t], u64(task.candidates.size)))] & ITEM
        draws.negatives[t] = -1 if has_item(task, draws.users[t], item) else item


@inline
def bpr_step(u, v_i, v_j, z, lr, reg, fixed):
    """Step along -z (v_i - v_j) . u with the ridge `reg`; only u if the items are `fixed`."""
    for c in range(u.size):
        old, positive, negative = u[c], v_i[c], v_j[c]
        u[c] = old + lr * (z * (positive - negative) - reg * old)
        if not fixed:
            v_i[c] = positive + lr * (z * old - reg * positive)
            v_j[c] = negative - lr * (z * old + reg * negative)


@kernel
def bpr_task(task, tables, lr, reg, passes, fixed, result):
    """Train on passes * n triples. Add the sum of their losses, and their number, to result[0] and result[1].

    A triple whose candidate is an item of its user is left out.
    """
    U, V, b = tables.U, tables.V, tables.b
    draws = draw_buffers()
    total = passes * task.pairs.size
    for start in range(0, total, CHUNK):
        count = min(CHUNK, total - start)
        draw_triples(task, task.first + start // 4, count, draws)
        product, trained = 1.0, 0
        for t in range(count):
            ahead = min(t + AHEAD, count - 1)
            prefetch_row(U, draws.users[ahead])
            prefetch_row(V, draws.positives[ahead])
            prefetch_row(V, max(draws.negatives[ahead], 0))
            u, i, j = draws.users[t], draws.positives[t], draws.negatives[t]
            if j < 0:
                continue
            u_row, v_i, v_j = U[u], V[i], V[j]
            x = f32(0)
            for c in range(u_row.size):
                x += u_row[c] * (v_i[c] - v_j[c])
            x += b[i] - b[j]
            e = np.exp(-abs(x))
            z = (e if x > f32(0) else f32(1)) / (f32(1) + e)
            bpr_step(u_row, v_i, v_j, z, lr, reg, fixed)
            if not fixed:
                b[i] += lr * (z - reg * b[i])
                b[j] -= lr * (z + reg * b[j])
            # log(1 + exp(-x)); one logarithm for the whole chunk, whose product is at most 2^CHUNK
            product *= 1.0 + e
            result[0] += max(-x, f32(0))
            trained += 1
        result[0] += np.log(product)
        result[1] += trained


# ---------------------------------------------------------------------------------------------------------------
# WARP


@inline
def score(u, v):
    """Return u . v."""
    total = f32(0)
    for c in range(u.size):
        total += u[c] * v[c]
    return total


@inline
def warp_step(row, state, gradient, factor, lr):
    """Take a step along -factor * gradient; the state is used before the new square is added."""
    for c in range(row.size):
        g = factor * gradient[c]
        row[c] -= lr * g / np.sqrt(state[c])
        state[c] += g * g


@kernel
def warp_task(task, tables, lr, levels, passes, fixed, result):
    """Train on the interactions of a task in their order, `passes` times.

    A violator found at draw s has the weight levels[s], and after levels.size - 1 draws the search ends. Add the sum of
    the weighted hinge losses, and the number of violators, to result[0] and result[1].
    """
    U, V, b = tables.U, tables.V, tables.b
    n, d = task.pairs.size, U.shape[1]
    words, old, difference = np.empty(4 * CHUNK, np.uint64), np.empty(d, np.float32), np.empty(d, np.float32)
    one = np.ones(1, np.float32)
    word1, candidates = task.epoch4 + u64(NEGATIVES), u64(task.candidates.size)
    for number in range(passes):
        first = task.first + number * n
        for start in range(0, n, CHUNK):
            count = min(CHUNK, n - start)
            fill_words(task.seed, word1, first + start, words[: 4 * count])  # four draws of each interaction
            for t in range(start, start + count):
                u, i, ident = task.pairs[t] >> 32, task.pairs[t] & ITEM, u64(first + t)
                u_row = U[u]
                threshold = score(u_row, V[i]) + b[i] - f32(1)
                w0, w1, w2, w3 = ZERO, ZERO, ZERO, ZERO
                for s in range(1, levels.size):
                    k = (s - 1) % 4
                    if s <= 4:
                        word = words[4 * (t - start) + k]
                    else:
                        if k == 0:
                            w0, w1, w2, w3 = philox(task.seed, word1, ident, u64((s - 1) // 4))
                        word = (w0 if k == 0 else w1) if k < 2 else (w2 if k == 2 else w3)
                    j = task.candidates[np.int64(below(word, candidates))] & ITEM
                    excess = score(u_row, V[j]) + b[j] - threshold
                    if excess > f32(0) and not has_item(task, u, j):
                        level = levels[s]
                        v_i, v_j = V[i], V[j]
                        for c in range(d):
                            old[c], difference[c] = u_row[c], v_j[c] - v_i[c]
                        warp_step(u_row, tables.U_state[u], difference, level, lr)
                        if not fixed:
                            warp_step(v_i, tables.V_state[i], old, -level, lr)
                            warp_step(v_j, tables.V_state[j], old, level, lr)
                            warp_step(b[i : i + 1], tables.b_state[i : i + 1], one, -level, lr)
                            warp_step(b[j : j + 1], tables.b_state[j : j + 1], one, level, lr)
                        result[0] += level * excess
                        result[1] += 1
                        break
