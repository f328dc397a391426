"""Lists that share their negatives: groups of `share` lists, most negatives of which are those of the first list.

The rows of these are read once for the group, and all that is done with them are small products of matrices:

    scores    [eta, d] x [d, share]
    du        [share, eta] x [eta, d]     gradient to the users
    sums      [n, share] x [share, d]     gradient to the items, which become one entry of `update_rows` each

A negative of a list that differs from the first's (a draw that was an item of its user) is treated by itself, so the
results are right for any lists. With n = 46 and share = 32, an entry in eighteen is left to be sorted and added.
"""

import math
from typing import NamedTuple

import numpy as np

from drm_triton.kernels.cpu.lists import add_rows, list_loss, score_items, scratch_for, turn_to_l2
from drm_triton.kernels.cpu.runtime import threads
from drm_triton.kernels.cpu.runtime.jit import inline, kernel, prefetch_row
from drm_triton.kernels.cpu.runtime.simd import LANES, ROWS, multiply, negative_distances, padded

f32 = np.float32
MOST_SHARING = 64  # lists treated as one group: more would gain little, and leave threads without work


def lists_in_tile(size: int) -> int:
    """Lists of a group that are treated together."""
    return size if size <= MOST_SHARING else math.gcd(size, MOST_SHARING)


class Group(NamedTuple):
    """Room for lists that share negatives, those of the first list."""

    rows: np.ndarray  # [padded eta, padded d] factors of these negatives
    columns: np.ndarray  # [d, padded share] factors of the users
    scores: np.ndarray  # [padded eta, padded share]
    g: np.ndarray  # [padded share, eta] gradient to these scores
    du: np.ndarray  # [padded share, padded d]
    singles: np.ndarray  # int64 [eta], positions of one list that differ from the first's


@inline
def score_group(U, V, users, negatives, following_users, following_negatives, l2, group):
    """Scores of the shared negatives; meanwhile the rows of the following group are asked for."""
    rows, columns, d = group.rows, group.columns, U.shape[1]
    for t in range(users.size):
        u = U[users[t]]
        for c in range(d):
            columns[c, t] = u[c]
    for t in range(following_users.size):
        prefetch_row(U, following_users[t])
    for j in range(negatives.size):
        prefetch_row(V, following_negatives[j])
        row, v = rows[j], V[negatives[j]]
        for c in range(d):
            row[c] = v[c]
    if l2:
        negative_distances(rows, d, columns, group.scores)
    else:
        multiply(rows, rows.shape[1], 1, columns, d, group.scores)


@inline
def differing(own, leading, singles):
    """Write to singles the positions where own is not leading; return their number."""
    count = 0
    for j in range(own.size):
        count += own[j] != leading[j]
    if count > 0:
        count = 0
        for j in range(own.size):
            if own[j] != leading[j]:
                singles[count] = j
                count += 1
    return count


@inline
def group_gradient(first, share, U, V, users, items, l2, loss, scratch, group, scores, losses, g, user_grad):
    """Scores, losses and gradients of lists first .. first + share - 1."""
    rho, B = loss.rho, users.size
    last, after = min(first + share, B), min(first + 2 * share, B)
    leading, eta = items[first, rho:], items.shape[1] - rho
    score_group(U, V, users[first:last], leading, users[last:after], items[min(last, B - 1), rho:], l2, group)
    for b in range(first, last):
        t, u, own, s, gb, du = b - first, U[users[b]], items[b, rho:], scores[b], g[b], user_grad[b]
        score_items(u, V, items[b, :rho], items[min(b + 1, B - 1), :rho], l2, s[:rho])
        negatives, g_negatives, shared = s[rho:], gb[rho:], group.g[t]
        for j in range(eta):
            negatives[j] = group.scores[j, t]
        singles = group.singles[: differing(own, leading, group.singles)]
        for i in range(singles.size):
            j = singles[i]
            score_items(u, V, own[j : j + 1], own[j : j + 1], l2, negatives[j : j + 1])
        losses[0, b], losses[1, b], losses[2, b] = list_loss(s, loss, scratch, gb)
        du[:] = f32(0)
        add_rows(V, items[b, :rho], gb[:rho], du)
        for j in range(eta):
            shared[j] = g_negatives[j]
        for i in range(singles.size):
            j = singles[i]
            add_rows(V, own[j : j + 1], g_negatives[j : j + 1], du)
            shared[j] = f32(0)
    multiply(group.g, eta, 1, group.rows, eta, group.du)
    for b in range(first, last):
        du, part = user_grad[b], group.du[b - first]
        for c in range(du.size):
            du[c] += part[c]
        if l2:
            turn_to_l2(U[users[b]], g[b], du)


@kernel
def gradients_of_groups(start, stop, share, U, V, users, items, l2, loss, scores, losses, g, user_grad):
    """Scores [B, n], losses [3, B] and gradients of groups start .. stop - 1."""
    scratch = scratch_for(items.shape[1], loss.weights)
    eta, d = items.shape[1] - loss.rho, U.shape[1]
    high, wide, across = padded(eta, ROWS), padded(d, LANES), padded(share, LANES)
    group = Group(
        np.zeros((high, wide), np.float32),
        np.zeros((d, across), np.float32),
        np.empty((high, across), np.float32),
        np.zeros((padded(share, ROWS), eta), np.float32),
        np.empty((padded(share, ROWS), wide), np.float32),
        np.empty(eta, np.int64),
    )
    for i in range(start, stop):
        group_gradient(i * share, share, U, V, users, items, l2, loss, scratch, group, scores, losses, g, user_grad)


class Entries(NamedTuple):
    """What `update_rows` adds: entry e is coef[e] x - pull[e] row for the row rows[e], the second part under l2 only.

    x is sums[at[e]], or X[~at[e]] where at[e] is negative.
    """

    rows: np.ndarray  # int32 [E]
    coef: np.ndarray  # float32 [E]
    pull: np.ndarray  # float32 [E]
    at: np.ndarray  # int32 [E]
    X: np.ndarray  # float32 [*, d]
    sums: np.ndarray  # float32 [*, d]


@kernel
def count_singles(start, stop, share, rows, counts):
    """counts[i] = positions in group i that do not name the row that its first list does; groups start .. stop - 1."""
    for i in range(start, stop):
        first, count = i * share, 0
        for b in range(first + 1, min(first + share, rows.shape[0])):
            for j in range(rows.shape[1]):
                count += rows[b, j] != rows[first, j]
        counts[i] = count


@inline
def fill_group(group, share, single, rows, coef, source, common, block, product, entries):
    """Write the entries of a group, those for positions that differ from number `single` on; common, ...: scratch."""
    first, n, X = group * share, rows.shape[1], entries.X
    size, d, entry = min(share, rows.shape[0] - first), X.shape[1], group * n
    leading = rows[first]
    for t in range(size):
        own, own_coef, origin, part, shared = rows[first + t], coef[first + t], source[first + t], block[t], common[t]
        x = X[origin]
        for c in range(d):
            part[c] = x[c]
        for j in range(n):
            shared[j] = own_coef[j]
        for j in range(n):
            if own[j] != leading[j]:
                shared[j] = f32(0)
                entries.rows[single], entries.at[single] = own[j], ~origin
                entries.coef[single] = entries.pull[single] = own_coef[j]
                single += 1
    multiply(common, 1, common.shape[1], block, size, product)
    for j in range(n):
        total, part = entries.sums[entry + j], product[j]
        for c in range(d):
            total[c] = part[c]
        entries.rows[entry + j], entries.at[entry + j] = leading[j], entry + j
        entries.coef[entry + j], entries.pull[entry + j] = f32(1), f32(0)
    for t in range(size):
        for j in range(n):
            entries.pull[entry + j] += common[t, j]


@kernel
def fill_entries(start, stop, share, rows, coef, source, position, entries):
    """Write the entries of groups start .. stop - 1."""
    high, wide = padded(rows.shape[1], ROWS), padded(entries.X.shape[1], LANES)
    common, block = np.zeros((share, high), np.float32), np.zeros((share, wide), np.float32)
    product = np.empty((high, wide), np.float32)
    for group in range(start, stop):
        fill_group(group, share, position[group], rows, coef, source, common, block, product, entries)


def sum_shared(rows: np.ndarray, coef: np.ndarray, X: np.ndarray, source: np.ndarray, share: int) -> Entries:
    """One entry for each position of a group, and one for each list that names another row there.

    Parameters
    ----------
    rows : int32 [B, n]; coef : float32 [B, n]; X : float32 [*, d]; source : int32 [B]
    """
    groups, n = -(-len(rows) // share), rows.shape[1]
    counts = np.empty(groups, np.int64)
    threads.split(count_singles, groups, 16, share, rows, counts)
    E = groups * n + int(counts.sum())
    position = E - counts[::-1].cumsum()[::-1]  # after the entries of all groups
    entries = Entries(
        np.empty(E, np.int32), np.empty(E, f32), np.empty(E, f32), np.empty(E, np.int32), X,
        np.empty((groups * n, X.shape[1]), f32),
    )  # fmt: skip
    threads.split(fill_entries, groups, 16, share, rows, coef, source, position, entries)
    return entries
