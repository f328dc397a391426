"""`list_terms`: what a training step on lists needs: losses, gradients of users, and sums of gradients of items.

Lists with hinge or DRM that share negatives are processed in tiles. Of a tile, SCORED lists at a time are scored as a
product of small matrices, and their scores are read while they are in the cache. DRM is computed for LANES lists at a
time (`columns`). Each gradient is then used twice, for the user and for the sum of a shared negative:

    user_grad_b += g_bj v_j        sum_j += g_bj u_b

For short lists, these are two more products. Of a long list, hinge and DRM have a gradient at a few dozen items, the
active ones (`active`) and the pair of the hinge, and only these are used. No array of B x n scores or gradients is
written. Lists with other losses, with their own negatives, or in groups of fewer than SHARE_MIN use `list_gradients`.

Cost of a list: 2 n d operations for the scores, about ten passes over those of a long list, what `columns` takes for
the m active items, and 4 m d operations for the two sums. With 1,000 negatives, m is about 100 after one epoch.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from drm_triton.kernels.checks import INT32, check_lists
from drm_triton.kernels.cpu.active import ACTIVE_MIN
from drm_triton.kernels.cpu.columns import Columns, column_buffers, drm_of_columns
from drm_triton.kernels.cpu.gradients import list_gradients, loss_parameters
from drm_triton.kernels.cpu.losses import (
    NAN,
    ListBuffers,
    add_one,
    average_precision_weights,
    hinge_pair,
    list_buffers,
    score_items,
)
from drm_triton.kernels.cpu.runtime import threads
from drm_triton.kernels.cpu.runtime.arrays import FLOAT32, empty, view
from drm_triton.kernels.cpu.runtime.bits import BITS, find_true
from drm_triton.kernels.cpu.runtime.jit import allocating, inline, kernel, prefetch_row
from drm_triton.kernels.cpu.runtime.simd import (
    ITEMS,
    LANES,
    ROWS,
    VECTORS,
    exchange_rows,
    multiply,
    padded,
    score_lists,
)
from drm_triton.kernels.cpu.softsort import active_positions, all_finite
from drm_triton.kernels.cpu.tiles import Groups, divide, tile_bounds
from drm_triton.kernels.protocol import GradientTerms, ListBatch, ListTerms, Objective
from drm_triton.names import LOSSES

f32 = np.float32
TILE = 256  # lists whose terms of one shared negative become one sum, at most
SCORED = 64  # lists that are scored at once: their scores stay in the second-level cache
LISTS_AHEAD = 32  # lists between the prefetch of their rows and their use
SHARE_MIN = 16  # smallest group of lists that is processed in tiles: a tile stores a sum for each negative
TASK = 1 << 20  # negatives whose terms a thread counts at least: fewer take less time than to start it
UNUSED = -1  # row of a term of an item that has no gradient


class TermInputs(NamedTuple):
    """Arguments of `list_terms`."""

    U: NDArray[np.float32]  # [M, d]
    V: NDArray[np.float32]  # [N, d]
    users: NDArray[np.int32]  # [B]
    items: NDArray[np.int32]  # [B, n]
    weights: NDArray[np.float32]  # [B], of the lists
    l2: bool  # score is l2, not dot


class TermOutputs(NamedTuple):
    """Results of `list_terms`.

    Of a tile, the terms of the positives come first, list by list, then those of the negatives that lists have in place
    of shared ones, and last those of the shared negatives, whose coefficient is 1.
    """

    losses: NDArray[np.float32]  # [2, B], hinge and drm
    user_grad: NDArray[np.float32]  # [B, d]
    starts: NDArray[np.int64]  # [tiles + 1]; tile t has the terms starts[t] .. starts[t + 1] - 1
    rows: NDArray[np.int32]  # [E]
    coefficients: NDArray[np.float32]  # [E]
    totals: NDArray[np.float32]  # [E]
    sources: NDArray[np.int32]  # [E]
    vectors: NDArray[np.float32]  # [B + tiles * eta, d]: factors of the lists' users, then sums of shared negatives


class DenseBuffers(NamedTuple):
    """Buffers for short lists, whose items all have a gradient; `padded` sizes are multiples of what `multiply` needs.

    They have no rows if lists are long.
    """

    rows: NDArray[np.float32]  # [eta, padded d] factors of the shared negatives
    vectors: NDArray[np.float32]  # [scored, padded d] factors of the users
    g: NDArray[np.float32]  # [scored + ROWS, n] gradients to the scores, those of shared negatives after rho others
    user_grad: NDArray[np.float32]  # [scored, padded d]
    sums: NDArray[np.float32]  # [padded eta, padded d]


class TermBuffers(NamedTuple):
    """Buffers for the lists that are scored at once."""

    user_columns: NDArray[np.float32]  # [d, scored] factors of the users
    scores: NDArray[np.float32]  # [scored, padded n], -inf in the padding
    of_list: ListBuffers
    columns: Columns  # the lists whose DRM is computed at once
    hinge: NDArray[np.float32]  # [2, LANES], hinge loss and Phi of these lists
    pair: NDArray[np.int64]  # [2, LANES], positions of the positive and the negative of the hinge
    finite: NDArray[np.bool_]  # [scored], whether all scores of a list are
    replaced: NDArray[np.int64]  # [eta], where one list has negatives in place of shared ones
    slot: NDArray[np.int64]  # [eta], number of each of them among these
    places: NDArray[np.int64]  # [n + 2], shared negatives of one list that have a gradient
    g: NDArray[np.float32]  # [n + 2], these gradients
    dense: DenseBuffers


@inline
def begin_tile(tile, inputs, groups, rho, out):
    """Prepare the terms of a tile, and copy the users' factors."""
    _, start, stop = tile_bounds(tile, groups)
    eta, first = groups.items.shape[1], out.starts[tile]
    sums, shared = inputs.users.size + tile * eta, out.starts[tile + 1] - eta
    out.vectors[sums : sums + eta] = f32(0)
    for j in range(eta):
        out.rows[shared + j], out.sources[shared + j] = UNUSED, sums + j
        out.coefficients[shared + j], out.totals[shared + j] = f32(1), f32(0)
    last = inputs.users.size - 1
    for b in range(start, stop):
        u, vector, ahead = inputs.U[inputs.users[b]], out.vectors[b], min(b + LISTS_AHEAD, last)
        prefetch_row(inputs.U, inputs.users[ahead])
        for c in range(u.size):
            vector[c] = u[c]
        for i in range(rho):
            prefetch_row(inputs.V, inputs.items[ahead, i])
            term = first + (b - start) * rho + i
            out.rows[term], out.sources[term], out.coefficients[term] = inputs.items[b, i], b, f32(0)


@inline
def score_block(begin, end, group, inputs, groups, rho, buffers, out):
    """Compute the scores of lists begin .. end - 1 of one group."""
    V, l2, n = inputs.V, inputs.l2, inputs.items.shape[1]
    for b in range(begin, end):
        vector = out.vectors[b]
        for c in range(vector.size):
            buffers.user_columns[c, b - begin] = vector[c]
    items, stride = groups.items[group], buffers.scores.shape[1]
    score_lists(V, items, items, buffers.user_columns, l2, buffers.scores.reshape(-1)[rho:], stride)
    for b in range(begin, end):
        u, s, items = out.vectors[b], buffers.scores[b - begin], inputs.items[b]
        score_items(u, V, items[:rho], items[:rho], l2, s[:rho])
        for i in range(find_true(groups.replaced[b], buffers.replaced)):
            j = rho + buffers.replaced[i]
            score_items(u, V, items[j : j + 1], items[j : j + 1], l2, s[j : j + 1])
        s[n:] = f32(-np.inf)


@inline
def pack_list(row, n, t, loss, buffers):
    """Make a list lane t of `columns`: its active items, or none if a score is not finite; find the pair of its hinge.

    This row of `scores` holds the scores of its n items, and -inf after them. Returns the number of active items.
    """
    columns, of_list, rho, size = buffers.columns, buffers.of_list, loss.rho, 0
    s, finite = buffers.scores[row], buffers.finite[row]
    buffers.hinge[0, t], buffers.hinge[1, t] = f32(0), f32(0)
    if finite and loss.hinge:
        gap, weight, buffers.pair[0, t], buffers.pair[1, t] = hinge_pair(s[:rho], s[rho:n], loss.margin, loss.phi)
        buffers.hinge[0, t], buffers.hinge[1, t] = weight * gap, weight
    if finite and loss.drm:
        if loss.ap:
            average_precision_weights(s[:n], rho, loss.weights, of_list.hits, of_list.w)
        for k in range(of_list.w.size):
            columns.w[k, t] = of_list.w[k]
        if n < ACTIVE_MIN:
            size = n
            for j in range(n):
                columns.s[j, t], columns.order[j, t] = s[j], j
        else:
            _, active = active_positions(s, n, of_list.w, loss.tau, of_list.sorting)
            size = active.size
            for i in range(size):
                columns.s[i, t], columns.order[i, t] = s[active[i]], active[i]
    columns.size[t] = size
    return size


@inline
def pad_columns(rows, n, columns):
    """Fill the lanes from their last item to row `rows` with entries that are no positives."""
    for t in range(LANES):
        for i in range(np.int64(columns.size[t]), rows):
            columns.s[i, t], columns.order[i, t] = f32(-np.inf), n


@inline
def add_gradient(position, g, total, count, replaced, rho, positive, own, shared, buffers, out):
    """Add the gradient to the score at a position of a list: to its term, or to those of shared negatives.

    positive, own, shared : the first terms of the list's positives, of its own negatives, and of the shared ones
    Returns the sum of the gradients and the number of those of shared negatives.
    """
    j = position - rho
    if j < 0:
        out.coefficients[positive + position] += g
    elif replaced[j]:
        out.coefficients[own + buffers.slot[j]] += g
    else:
        buffers.places[count], buffers.g[count] = j, g
        out.totals[shared + j] += g
        count += 1
    return total + g, count


@inline
def keep_gradients(b, t, row, own, positive, tile, inputs, groups, loss, buffers, out):
    """Add the gradients of list b to its terms, to the user's gradient and to the tile's sums.

    The list is this row of `scores`, and lane t of `columns`.
    The terms of the list's positives begin at `positive`, those of its negatives in place of shared ones at `own`.
    Returns the end of the latter.
    """
    columns, rho, weight = buffers.columns, loss.rho, inputs.weights[b]
    items, replaced, user_grad = inputs.items[b], groups.replaced[b], out.user_grad[b]
    eta, total, count = replaced.size, f32(0), 0
    shared, n_own = out.starts[tile + 1] - eta, find_true(replaced, buffers.replaced)
    for i in range(n_own):
        j = buffers.replaced[i]
        buffers.slot[j] = i
        out.rows[own + i], out.sources[own + i], out.coefficients[own + i] = items[rho + j], b, f32(0)
    if not buffers.finite[row]:  # one bad score makes the whole list NaN, so that it is noticed
        for j in range(rho + eta):
            total, count = add_gradient(j, NAN, total, count, replaced, rho, positive, own, shared, buffers, out)
    for i in range(np.int64(columns.size[t])):
        g = weight * columns.ds[i, t]
        j = np.int64(columns.order[i, t])
        total, count = add_gradient(j, g, total, count, replaced, rho, positive, own, shared, buffers, out)
    if buffers.hinge[1, t] != 0:
        g, i, j = weight * buffers.hinge[1, t], buffers.pair[0, t], rho + buffers.pair[1, t]
        total, count = add_gradient(i, -g, total, count, replaced, rho, positive, own, shared, buffers, out)
        total, count = add_gradient(j, g, total, count, replaced, rho, positive, own, shared, buffers, out)
    user_grad[:] = f32(0)
    for i in range(rho):
        add_one(out.coefficients[positive + i], inputs.V[items[i]], user_grad)
        out.totals[positive + i] = out.coefficients[positive + i]
    for i in range(n_own):
        add_one(out.coefficients[own + i], inputs.V[out.rows[own + i]], user_grad)
        out.totals[own + i] = out.coefficients[own + i]
        if out.coefficients[own + i] == 0:
            out.rows[own + i] = UNUSED
    if count > 0:
        negatives, sums = groups.items[tile_bounds(tile, groups)[0]], inputs.users.size + tile * eta
        for e in range(count):
            out.rows[shared + buffers.places[e]] = negatives[buffers.places[e]]
        exchange_rows(
            inputs.V, negatives, out.vectors, sums, buffers.places, buffers.g, count, out.vectors, out.user_grad, b
        )
    if inputs.l2:
        u = out.vectors[b]
        for c in range(u.size):
            user_grad[c] = f32(2) * (user_grad[c] - total * u[c])
    return own + n_own


@inline
def store_losses(b, t, row, inputs, loss, buffers, out):
    """Store the losses of list b, in this row of `scores` and in lane t. One bad score makes them NaN."""
    hinge, drm = buffers.hinge[0, t], buffers.columns.of_lists[0, t] if loss.drm else f32(0)
    if not buffers.finite[row]:
        hinge, drm = NAN if loss.hinge else f32(0), NAN if loss.drm else f32(0)
    out.losses[0, b], out.losses[1, b] = inputs.weights[b] * hinge, inputs.weights[b] * drm


@inline
def copy_rows(V, items, rows):
    """Copy the rows of the shared negatives; return whether all are finite."""
    finite = True
    for j in range(items.size):
        row, v = rows[j], V[items[j]]
        for c in range(v.size):
            row[c] = v[c]
        finite &= all_finite(v)
    return finite


@inline
def keep_dense_gradients(b, t, row, own, positive, tile, inputs, groups, loss, buffers, out):
    """Like `keep_gradients`, for a list all of whose items are active.

    Gradients to the scores of shared negatives are written to this row of `dense.g`; `add_products` does the rest.
    """
    columns, rho, weight, n = buffers.columns, loss.rho, inputs.weights[b], inputs.items.shape[1]
    replaced, user_grad, g = groups.replaced[b], out.user_grad[b], buffers.dense.g[row]
    shared, total = out.starts[tile + 1] - replaced.size, f32(0)
    rows, totals, negatives = out.rows[shared:], out.totals[shared:], groups.items[tile_bounds(tile, groups)[0]]
    for i in range(n):
        g[columns.order[i, t]] = columns.ds[i, t]
    g[buffers.pair[0, t]] -= buffers.hinge[1, t]
    g[rho + buffers.pair[1, t]] += buffers.hinge[1, t]
    for j in range(n):
        g[j] *= weight
        total += g[j]
    user_grad[:] = f32(0)
    for i in range(rho):
        out.coefficients[positive + i] = out.totals[positive + i] = g[i]
        add_one(g[i], inputs.V[inputs.items[b, i]], user_grad)
    n_own = find_true(replaced, buffers.replaced)
    for i in range(n_own):
        j = rho + buffers.replaced[i]
        out.rows[own + i], out.sources[own + i] = inputs.items[b, j], b
        out.coefficients[own + i] = out.totals[own + i] = g[j]
        add_one(g[j], inputs.V[inputs.items[b, j]], user_grad)
        g[j] = f32(0)
    for j in range(replaced.size):
        totals[j] += g[rho + j]
        rows[j] = rows[j] if replaced[j] else negatives[j]
    if inputs.l2:
        u = out.vectors[b]
        for c in range(u.size):
            user_grad[c] -= total * u[c]
    return own + n_own


@inline
def add_products(begin, end, tile, inputs, groups, rho, dense, out):
    """Add the gradients of shared negatives in `dense.g` to those of the users, and to the tile's sums, as products."""
    n, eta, lists = inputs.items.shape[1], groups.items.shape[1], end - begin
    sums, g = inputs.users.size + tile * eta, dense.g.reshape(-1)[rho:]
    factor = f32(2) if inputs.l2 else f32(1)
    multiply(g, n, 1, dense.rows, eta, dense.user_grad)
    for b in range(begin, end):
        user_grad, product, vector = out.user_grad[b], dense.user_grad[b - begin], dense.vectors[b - begin]
        for c in range(user_grad.size):
            user_grad[c] = factor * (user_grad[c] + product[c])
            vector[c] = out.vectors[b, c]
    multiply(g, 1, n, dense.vectors, lists, dense.sums)
    for j in range(eta):
        total, product = out.vectors[sums + j], dense.sums[j]
        for c in range(total.size):
            total[c] += product[c]


@inline
def tile_terms(tile, inputs, groups, loss, buffers, out):
    """Compute losses, users' gradients and terms of the lists of a tile."""
    group, start, stop = tile_bounds(tile, groups)
    rho, n, columns, scored = loss.rho, inputs.items.shape[1], buffers.columns, buffers.scores.shape[0]
    if start == stop:
        return
    begin_tile(tile, inputs, groups, rho, out)
    own = out.starts[tile] + (stop - start) * rho
    short = buffers.dense.rows.shape[0] > 0 and copy_rows(inputs.V, groups.items[group], buffers.dense.rows)
    for block in range(start, stop, scored):
        block_end, dense = min(block + scored, stop), short
        score_block(block, block_end, group, inputs, groups, rho, buffers, out)
        for row in range(block_end - block):
            buffers.finite[row] = all_finite(buffers.scores[row, :n])
            dense &= buffers.finite[row]
        for begin in range(block, block_end, LANES):
            end, rows = min(begin + LANES, block_end), 0
            columns.size[:] = f32(0)
            for b in range(begin, end):
                rows = max(rows, pack_list(b - block, n, b - begin, loss, buffers))
            if rows > 0:
                pad_columns(rows, n, columns)
                drm_of_columns(columns, rows, rho, loss.lam, loss.tau)
            for b in range(begin, end):
                t, row, positive = b - begin, b - block, out.starts[tile] + (b - start) * rho
                store_losses(b, t, row, inputs, loss, buffers, out)
                if dense:
                    own = keep_dense_gradients(b, t, row, own, positive, tile, inputs, groups, loss, buffers, out)
                else:
                    own = keep_gradients(b, t, row, own, positive, tile, inputs, groups, loss, buffers, out)
        if dense:
            add_products(block, block_end, tile, inputs, groups, rho, buffers.dense, out)


@allocating
def term_buffers(n, eta, d, tile, weights, short):
    """Allocate the buffers for the lists that are scored at once, at most `tile`."""
    scored, width = padded(min(tile, SCORED), VECTORS * LANES), padded(d, LANES)
    # An odd number of words: rows that are a power of two apart would share the same few sets of the cache.
    row = BITS * ((n - eta + padded(eta, ITEMS) + BITS - 1) // BITS | 1)
    dense = DenseBuffers(
        np.zeros((eta if short else 0, width), np.float32),
        np.zeros((scored if short else 0, width), np.float32),
        np.zeros((scored + ROWS if short else 0, n), np.float32),
        np.empty((scored if short else 0, width), np.float32),
        np.empty((padded(eta, ROWS) if short else 0, width), np.float32),
    )
    return TermBuffers(
        np.zeros((d, scored), np.float32),
        np.empty((scored, row), np.float32),
        list_buffers(row, weights),
        column_buffers(n, weights.size),
        np.zeros((2, LANES), np.float32),
        np.zeros((2, LANES), np.int64),
        np.empty(scored, np.bool_),
        np.empty(eta, np.int64),
        np.empty(eta, np.int64),
        np.empty(n + 2, np.int64),
        np.empty(n + 2, np.float32),
        dense,
    )


@kernel
def terms_of_tiles(start, stop, inputs, groups, loss, out):
    """Compute losses, users' gradients and terms of tiles start .. stop - 1."""
    n, eta, d = inputs.items.shape[1], groups.items.shape[1], inputs.U.shape[1]
    buffers = term_buffers(n, eta, d, groups.tile, loss.weights, loss.drm and n < ACTIVE_MIN)
    for tile in range(start, stop):
        tile_terms(tile, inputs, groups, loss, buffers, out)


@kernel
def count_terms(start, stop, inputs, groups, rho, counts):
    """Write to `counts` the number of terms of tiles start .. stop - 1, -1 for a tile with an invalid id."""
    n_users, n_items, positions = inputs.U.shape[0], inputs.V.shape[0], np.empty(groups.items.shape[1], np.int64)
    for tile in range(start, stop):
        group, begin, end = tile_bounds(tile, groups)
        counts[tile], valid = (end - begin) * rho + (positions.size if begin < end else 0), True
        for j in range(positions.size):
            valid &= 0 <= groups.items[group, j] < n_items
        for b in range(begin, end):
            count = find_true(groups.replaced[b], positions)
            counts[tile] += count
            valid &= 0 <= inputs.users[b] < n_users
            for i in range(rho):
                valid &= 0 <= inputs.items[b, i] < n_items
            for i in range(count):
                valid &= 0 <= inputs.items[b, rho + positions[i]] < n_items
        if not valid:
            counts[tile] = -1


def only_hinge_and_drm(objective: Objective) -> bool:
    """Return whether there are no other losses. Then few items of a long list have a gradient."""
    return not any((objective.mse, objective.softmax, objective.psl, objective.bpr))


def list_terms(
    U: Tensor,
    V: Tensor,
    batch: ListBatch,
    objective: Objective,
    weights: Tensor | None = None,
    n_items: int | None = None,
) -> ListTerms:
    """Compute losses of B lists, and the gradients of users and items: see `protocol.Backend.list_terms`.

    Parameters
    ----------
    U : float32 [M, d]
    V : float32 [N, d]
    batch : users int32 [B], items int32 [B, n], the first rho of a list being positives
    weights : float32 [B], factors of the losses of the lists
    n_items : of the catalogue, N by default
    """
    if batch.shared is None or batch.shared.size < SHARE_MIN or not only_hinge_and_drm(objective):
        lists = list_gradients(U, V, batch, objective, n_items).terms(U, batch, weights)
        if batch.items.shape[1] < ACTIVE_MIN or not only_hinge_and_drm(objective):
            return lists
        b, j = lists.items.coefficients.nonzero(as_tuple=True)
        rows, g = lists.items.rows[b, j], lists.items.coefficients[b, j]
        return lists._replace(items=GradientTerms(rows[:, None], g[:, None], U, batch.users[b]))
    name = "list_terms"
    check_lists(U, V, batch, objective, values=False)
    B = len(batch.users)
    if weights is None:
        weights = torch.ones(B, dtype=torch.float32)
    inputs = TermInputs(
        view(name, "U", U, (None, None), FLOAT32),
        view(name, "V", V, (None, None), FLOAT32),
        view(name, "users", batch.users, (None,), INT32),
        view(name, "items", batch.items, (None, None), INT32),
        view(name, "weights", weights, (B,), FLOAT32),
        objective.score == "l2",
    )
    groups = divide(name, batch.shared, TILE)
    counts = np.empty(groups.n_tiles, np.int64)
    grain = -(-TASK // max(1, groups.tile * groups.items.shape[1]))
    threads.split(count_terms, groups.n_tiles, grain, inputs, groups, objective.rho, counts)
    if counts.min(initial=0) < 0:
        check_lists(U, V, batch, objective)  # says which id
    out = term_outputs(inputs, groups, counts)
    loss = loss_parameters(objective, batch.items.shape[1], len(V) if n_items is None else n_items)
    threads.split(terms_of_tiles, groups.n_tiles, 1, inputs, groups, loss, out)

    hinge, drm = torch.from_numpy(out.losses)
    nothing = torch.zeros_like(hinge)
    parts = dict.fromkeys(LOSSES, nothing) | {"hinge": hinge, "drm": drm}
    columns, used = (out.rows, out.coefficients, out.totals, out.sources), out.rows != UNUSED
    rows, coefficients, totals, sources = (torch.from_numpy(x if used.all() else x[used]) for x in columns)
    terms = GradientTerms(
        rows[:, None], coefficients[:, None], torch.from_numpy(out.vectors), sources, None, totals[:, None]
    )
    return ListTerms({"loss": objective.total(*parts.values()), **parts}, torch.from_numpy(out.user_grad), terms)


def term_outputs(inputs: TermInputs, groups: Groups, counts: NDArray[np.int64]) -> TermOutputs:
    """Allocate the results, with as many terms of each tile as `counts` says."""
    (B, d), (_, eta) = (len(inputs.users), inputs.U.shape[1]), groups.items.shape
    starts = np.concatenate([[0], counts.cumsum()])
    E = int(starts[-1])
    return TermOutputs(
        losses=np.empty((2, B), f32),
        user_grad=empty(torch.float32, B, d).numpy(),
        starts=starts,
        rows=np.empty(E, np.int32),
        coefficients=np.empty(E, f32),
        totals=np.empty(E, f32),
        sources=np.empty(E, np.int32),
        vectors=empty(torch.float32, B + groups.n_tiles * eta, d).numpy(),
    )
