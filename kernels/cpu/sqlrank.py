"""Lists of SQL-Rank (Wu, Hsieh and Sharpnack, ICML 2018): queueing, their loss, and steps of gradient descent.

The list of a user is queued again in each epoch: the user's n_u items in random order, then ratio * n_u other items, or
all there are, drawn without replacement. With m_t = sigmoid(u . v_t) at position t = 1 .. D, a list has

    loss  sum_t log(T_t) - m_t,     T_t = sum_{r >= t} exp(m_r)
    c_t = d loss / d (u . v_t) = m_t (1 - m_t) (exp(m_t) C_t - 1),     C_t = sum_{r <= t} 1 / T_r

One pass backward gives all T_t and one forward all C_t, so that a list costs O(D d).

`step_users` does everything that concerns one user: coefficients, step of u, coefficients at the new u. The rows of V
that the list needs stay in the cache meanwhile. `add_item_gradients` sums c_t u for each item. A thread takes some
columns of the table and all users in their order: nothing is sorted, and the order of every sum is the same for any
number of threads.
"""

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from drm_triton.data.csr import CSR
from drm_triton.kernels.cpu.losses import add_rows
from drm_triton.kernels.cpu.runtime import threads
from drm_triton.kernels.cpu.runtime.jit import CACHE_LINE, inline, kernel, prefetch_row
from drm_triton.kernels.cpu.sampling import below, philox
from drm_triton.kernels.cpu.softsort import exp
from drm_triton.kernels.streams import NEGATIVES, POSITIVES

u64, f64 = np.uint64, np.float64
ZERO = u64(0)
Array = NDArray[np.floating[Any]]
AHEAD = 16  # positions between the prefetch of a row and its use
USERS_GRAIN = 16  # users of a task, at least


class Lists(NamedTuple):
    """Lists of consecutive users; that of user number u is items[first[u] : first[u + 1]], in order."""

    first: NDArray[np.int64]  # [users + 1]
    items: NDArray[np.int32]  # [entries]


# ---------------------------------------------------------------------------------------------------------------
# Queueing


@inline
def fill_queue(seed, epoch4, ident, row, order, own, queue):
    """Fill the list of a user who has the items `row`, by two Fisher-Yates shuffles that stop when it is full.

    `order` [N] is 0 .. N - 1 and `own` [N] is false before and after. The shuffle of `order` passes over own items.
    """
    for t in range(row.size):
        queue[t], own[row[t]] = row[t], True
    words = philox(seed, epoch4 + u64(POSITIVES), ident, ZERO)
    for t in range(row.size):
        if t % 4 == 0:
            words = philox(seed, epoch4 + u64(POSITIVES), ident, u64(t // 4))
        other = t + np.int64(below(words[t % 4], u64(row.size - t)))
        queue[t], queue[other] = queue[other], queue[t]
    t, filled = 0, row.size
    while filled < queue.size:
        if t % 4 == 0:
            words = philox(seed, epoch4 + u64(NEGATIVES), ident, u64(t // 4))
        other = t + np.int64(below(words[t % 4], u64(order.size - t)))
        item = order[other]
        order[other], order[t] = order[t], item
        t += 1
        if not own[item]:
            queue[filled] = item
            filled += 1
    for i in range(t):  # an entry from t on that has changed is one of the items before
        if order[i] >= t:
            order[order[i]] = order[i]
    for i in range(t):
        order[i] = i
    for i in range(row.size):
        own[row[i]] = False


@kernel
def fill_queues(start, stop, seed, epoch4, idents, indptr, indices, n_items, lists):
    """Fill the lists of users start .. stop - 1."""
    order, own = np.arange(n_items).astype(np.int32), np.zeros(n_items, np.bool_)
    for i in range(start, stop):
        row, queue = indices[indptr[i] : indptr[i + 1]], lists.items[lists.first[i] : lists.first[i + 1]]
        fill_queue(seed, epoch4, idents[i], row, order, own, queue)


def queue_lengths(degrees: NDArray[np.int64], ratio: int, n_items: int) -> NDArray[np.int64]:
    """Return the lengths of the lists of users with n_u = `degrees`: int64 [users]."""
    lengths: NDArray[np.int64] = degrees + np.minimum(ratio * degrees, n_items - degrees)
    return lengths


def queue_lists(items: CSR, ratio: int, seed: int, epoch: int, idents: NDArray[np.uint64]) -> Lists:
    """Queue the lists of users for an epoch.

    Parameters
    ----------
    items : CSR [users, N]
    idents : uint64 [users], which key the random numbers of each user; two users may have the same
    """
    first = np.concatenate([[0], np.cumsum(queue_lengths(items.degrees(), ratio, items.shape[1]))])
    lists = Lists(first, np.empty(first[-1], np.int32))
    threads.split(
        fill_queues, items.shape[0], USERS_GRAIN, u64(seed), u64(4 * epoch), idents, items.indptr, items.indices,
        items.shape[1], lists,
    )  # fmt: skip
    return lists


# ---------------------------------------------------------------------------------------------------------------
# Loss and gradient


class PositionBuffers(NamedTuple):
    """Buffers for the positions of one list. Sums are float64, the others of the type of the factors."""

    score: NDArray[np.float32]
    m: NDArray[np.float32]
    slope: NDArray[np.float32]  # m (1 - m)
    growth: NDArray[np.float32]  # exp(m)
    tail: NDArray[np.float64]  # T


@inline
def list_coefficients(u, V, queue, buffers, coefficients):
    """Write the coefficients of one list; return its loss."""
    score, m, slope, growth, tail = buffers
    n, one = queue.size, u.dtype.type(1)
    for t in range(n):
        if t + AHEAD < n:
            prefetch_row(V, queue[t + AHEAD])
        v, total = V[queue[t]], u.dtype.type(0)
        for c in range(u.size):
            total += u[c] * v[c]
        score[t] = total
    for t in range(n):
        e = exp(-abs(score[t]))
        m[t] = (one if score[t] >= 0 else e) / (one + e)
        slope[t] = e / ((one + e) * (one + e))
        growth[t] = one / exp(-m[t])
    loss, below = f64(0), f64(0)
    for t in range(n - 1, -1, -1):
        below += f64(growth[t])
        tail[t] = below
        loss += math.log(below) - f64(m[t])
    above = f64(0)
    for t in range(n):
        above += f64(1) / tail[t]
        coefficients[t] = f64(slope[t]) * (f64(growth[t]) * above - f64(1))
    return loss


@kernel
def step_lists(start, stop, U, V, lists, lr, ridge, coefficients, losses):
    """Take the step of users start .. stop - 1; see `step_users`."""
    longest = 0
    for i in range(start, stop):
        longest = max(longest, lists.first[i + 1] - lists.first[i])
    values, tail = np.empty((4, longest), U.dtype), np.empty(longest, np.float64)
    buffers = PositionBuffers(values[0], values[1], values[2], values[3], tail)
    gradient = np.empty(U.shape[1], U.dtype)
    for i in range(start, stop):
        u, queue = U[i], lists.items[lists.first[i] : lists.first[i + 1]]
        c = coefficients[lists.first[i] : lists.first[i + 1]]
        losses[i] = list_coefficients(u, V, queue, buffers, c)
        gradient[:] = U.dtype.type(0)
        add_rows(V, queue, c, gradient)
        for k in range(u.size):
            u[k] -= lr * (gradient[k] + ridge * u[k])
        list_coefficients(u, V, queue, buffers, c)


def step_users(U: Array, V: Array, lists: Lists, lr: float, ridge: float) -> tuple[NDArray[np.float64], Array]:
    """Take a step of gradient descent for each user, in place.

    Parameters
    ----------
    U : float [users, d], C-contiguous vectors of the users of `lists`
    V : float [N, d], of the same type
    ridge : weight of ||U||^2 / 2 in the objective

    Returns
    -------
    losses : float64 [users], loss of each list before the step, without the ridge
    coefficients : float [entries], c_t of each position after the step
    """
    losses, coefficients = np.empty(len(U)), np.empty(len(lists.items), U.dtype)
    real = U.dtype.type
    threads.split(step_lists, len(U), USERS_GRAIN, U, V, lists, real(lr), real(ridge), coefficients, losses)
    return losses, coefficients


@kernel
def add_columns(start, stop, U, lists, coefficients, gradient):
    """Add the terms of all lists to columns start .. stop - 1 of the gradient."""
    for i in range(U.shape[0]):
        u = U[i, start:stop]
        for e in range(lists.first[i], lists.first[i + 1]):
            row, c = gradient[lists.items[e], start:stop], coefficients[e]
            for k in range(u.size):
                row[k] += c * u[k]


def add_item_gradients(U: Array, lists: Lists, coefficients: Array, gradient: Array) -> None:
    """Add c_t u of each position to the row of its item in `gradient` [N, d], users in their order."""
    threads.split(add_columns, U.shape[1], CACHE_LINE, U, lists, coefficients, gradient)
