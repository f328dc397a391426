"""`list_terms`: what a training step on lists needs: losses, gradients of users, and sums of gradients of items.

Lists with hinge or DRM that share negatives are processed in tiles. Of a tile, WIDTH lists at a time are scored as a
product of small matrices, and their losses are computed together, one list in each lane of a few vector registers
(`active_columns`, `columns`), while the scores are in the cache. Each gradient is then used twice, for the user and for the sum of a shared negative:

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
from drm_triton.kernels.cpu.active_columns import ActiveBuffers, Extremes, active_buffers, find_active, find_extremes
from drm_triton.kernels.cpu.columns import Columns, column_buffers, copy_scores, drm_of_columns, pad_columns
from drm_triton.kernels.cpu.gradients import list_gradients, loss_parameters
from drm_triton.kernels.cpu.losses import NAN, add_one, average_precision_weights, score_item
from drm_triton.kernels.cpu.runtime import threads
from drm_triton.kernels.cpu.runtime.arrays import FLOAT32, empty, view
from drm_triton.kernels.cpu.runtime.bits import BITS, find_true
from drm_triton.kernels.cpu.runtime.exchange import ExchangeBuffers, exchange_buffers, exchange_rows, not_zero
from drm_triton.kernels.cpu.runtime.jit import allocating, inline, kernel, prefetch_row
from drm_triton.kernels.cpu.runtime.simd import (
    ITEMS,
    LANES,
    ROWS,
    WIDTH,
    multiply,
    padded,
    score_columns,
)
from drm_triton.kernels.cpu.softsort import all_finite
from drm_triton.kernels.cpu.tiles import Groups, divide, tile_bounds
from drm_triton.kernels.protocol import GradientTerms, ListBatch, ListTerms, Objective
from drm_triton.names import LOSSES

f32 = np.float32
TILE = 256  # lists whose terms of one shared negative become one sum, at most
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


class TermBuffers(NamedTuple):
    """Buffers for up to WIDTH lists that are scored at once. Column t of an array belongs to list t of them."""

    user_columns: NDArray[np.float32]  # [d, WIDTH] factors of the users
    scores: NDArray[np.float32]  # [padded n, WIDTH]; if lists are long, -inf in the padding
    extremes: Extremes
    hinge: NDArray[np.float32]  # [2, WIDTH], hinge loss and Phi
    finite: NDArray[np.bool_]  # [WIDTH], whether there is such a list, and all its scores are
    weights: NDArray[np.float32]  # [WIDTH], of the lists
    replaced: NDArray[np.int64]  # [WIDTH * eta], where the lists have negatives in place of shared ones
    own: NDArray[np.int64]  # [WIDTH + 1]; replaced[own[t] : own[t + 1]] belong to list t
    columns: Columns  # what takes part in the relaxed top K
    active: ActiveBuffers
    hits: NDArray[np.float32]  # [n], for `average_precision_weights`
    w: NDArray[np.float32]  # [K]
    g: NDArray[np.float32]  # [rho + padded eta, WIDTH] gradients to the scores
    totals: NDArray[np.float32]  # [WIDTH], their sums
    users: NDArray[np.float32]  # [WIDTH, padded d] factors of the users
    user_grad: NDArray[np.float32]  # [WIDTH, padded d]
    rows: NDArray[np.float32]  # [eta, padded d] factors of the shared negatives; only if lists are short
    sums: NDArray[np.float32]  # [padded eta, padded d]; only if lists are short
    exchange: ExchangeBuffers


@allocating
def term_buffers(n, eta, d, weights, short):
    """Allocate the buffers for the lists that are scored at once."""
    width, height, rho = padded(d, LANES), padded(eta, ROWS), n - eta
    columns = column_buffers(n, weights.size)
    for k in range(weights.size):
        for t in range(WIDTH):
            columns.w[k, t] = weights[k]
    return TermBuffers(
        np.zeros((d, WIDTH), np.float32),
        np.zeros((padded(rho + padded(eta, ITEMS), BITS), WIDTH), np.float32),
        Extremes(np.empty((4, WIDTH), np.float32), np.empty((2, WIDTH), np.int32)),
        np.empty((2, WIDTH), np.float32),
        np.empty(WIDTH, np.bool_),
        np.zeros(WIDTH, np.float32),
        np.empty(WIDTH * eta, np.int64),
        np.empty(WIDTH + 1, np.int64),
        columns,
        active_buffers(weights.size),
        np.empty(n, np.float32),
        np.empty(weights.size, np.float32),
        np.empty((rho + height, WIDTH), np.float32),
        np.empty(WIDTH, np.float32),
        np.zeros((WIDTH, width), np.float32),
        np.empty((WIDTH, width), np.float32),
        np.zeros((eta if short else 0, width), np.float32),
        np.empty((height if short else 0, width), np.float32),
        exchange_buffers(eta),
    )


# ---------------------------------------------------------------------------------------------------------------
# Scores


@inline
def begin_tile(tile, inputs, groups, rho, out):
    """Prepare the terms of a tile, and copy the users' factors."""
    _, start, stop = tile_bounds(tile, groups)
    eta, first = groups.items.shape[1], out.starts[tile]
    sums, shared = inputs.users.size + tile * eta, out.starts[tile + 1] - eta
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
            out.rows[term], out.sources[term] = inputs.items[b, i], b


@inline
def find_replaced(begin, end, groups, positions, own):
    """Write which negatives lists begin .. end - 1 have in place of shared ones.

    positions[own[t] : own[t + 1]] are t * eta + j for the negatives j of list begin + t.
    """
    eta = groups.items.shape[1]
    count, i = find_true(groups.replaced[begin:end].reshape(-1), positions), 0
    for t in range(end - begin):
        own[t] = i
        while i < count and positions[i] < (t + 1) * eta:
            i += 1
    own[end - begin] = count


@inline
def score_block(begin, end, group, inputs, groups, rho, buffers, out):
    """Compute the scores of lists begin .. end - 1 of one group; prefetch the rows of the next group."""
    V, l2, n, scores, items = inputs.V, inputs.l2, inputs.items.shape[1], buffers.scores, groups.items[group]
    following = groups.items[min(group + 1, groups.items.shape[0] - 1)]
    for b in range(begin, end):
        u, user = out.vectors[b], buffers.users[b - begin]
        for c in range(u.size):
            buffers.user_columns[c, b - begin] = user[c] = u[c]
    score_columns(V, items, following, buffers.user_columns, l2, scores[rho:].reshape(-1), WIDTH)
    scores[n:] = f32(-np.inf)
    for b in range(begin, end):
        t, u, of_list = b - begin, out.vectors[b], inputs.items[b]
        for i in range(rho):
            scores[i, t] = score_item(u, V[of_list[i]], l2)
        for i in range(buffers.own[t], buffers.own[t + 1]):
            j = rho + buffers.replaced[i] - t * items.size
            scores[j, t] = score_item(u, V[of_list[j]], l2)


# ---------------------------------------------------------------------------------------------------------------
# Losses


@inline
def find_hinge(begin, end, n, inputs, loss, buffers):
    """Find hinge loss and Phi of lists begin .. end - 1, and whether all scores are finite. Returns whether all are."""
    (values, positions), finite, every = buffers.extremes, buffers.finite, True
    find_extremes(buffers.scores, values, positions, n, loss.rho, loss.margin)
    finite[:] = False
    for t in range(end - begin):
        gap, phi = loss.margin - values[0, t] + values[1, t], f32(0)
        finite[t] = values[3, t] < np.inf  # false for NaN too
        if finite[t] and loss.hinge and gap > 0:
            phi = loss.phi[np.int64(values[2, t])]
        buffers.hinge[0, t], buffers.hinge[1, t] = phi * gap if phi > 0 else f32(0), phi
        buffers.weights[t] = inputs.weights[begin + t]
        every &= finite[t]
    return every


@inline
def fill_columns(lists, n, short, loss, buffers):
    """Write the items that take part in the relaxed top K to `columns`; return the number of its rows.

    A list with a score that is not finite has none.
    """
    scores, columns, finite = buffers.scores, buffers.columns, buffers.finite
    if loss.ap:
        for t in range(lists):
            average_precision_weights(scores[:n, t], loss.rho, loss.weights, buffers.hits, buffers.w)
            for k in range(buffers.w.size):
                columns.w[k, t] = buffers.w[k]
    if not short:
        return find_active(scores, n, finite, loss.tau, buffers.active, columns)
    for t in range(WIDTH):
        columns.size[t] = n if finite[t] else f32(0)
    copy_scores(scores, columns.s, columns.order, n)
    pad_columns(columns.size, columns.s, columns.order, n, n)
    return n


@inline
def store_losses(b, t, loss, buffers, out):
    """Store the losses of list b, number t of those that were scored. One bad score makes them NaN."""
    drm = buffers.columns.of_lists[0, t] if loss.drm else f32(0)
    hinge = buffers.hinge[0, t]
    if not buffers.finite[t]:
        hinge, drm = NAN if loss.hinge else f32(0), NAN if loss.drm else f32(0)
    out.losses[0, b], out.losses[1, b] = buffers.weights[t] * hinge, buffers.weights[t] * drm


# ---------------------------------------------------------------------------------------------------------------
# Gradients


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
def scatter_gradients(lists, n, loss, buffers):
    """Write the gradients to the scores of the lists to `g`, 0 where there is none."""
    columns, g, positions = buffers.columns, buffers.g, buffers.extremes.positions
    g[:] = f32(0)
    for t in range(lists):
        weight = buffers.weights[t]
        if not buffers.finite[t]:  # one bad score makes the whole list NaN, so that it is noticed
            g[:n, t] = NAN
            continue
        if loss.drm:
            for i in range(np.int64(columns.size[t])):
                g[columns.order[i, t], t] = weight * columns.ds[i, t]
        g[positions[0, t], t] -= weight * buffers.hinge[1, t]
        g[positions[1, t], t] += weight * buffers.hinge[1, t]


@inline
def sum_lists(lists, n, buffers):
    """Write the sum of the gradients of each list to `totals`."""
    g, totals = buffers.g, buffers.totals
    totals[:] = f32(0)
    for j in range(n):
        for t in range(lists):
            totals[t] += g[j, t]


@inline
def take_own(begin, end, own, inputs, rho, buffers, out):
    """Write the terms of the negatives that the lists have in place of shared ones, from `own` on; return their end.

    Their gradients become 0 in `g`.
    """
    g, eta = buffers.g, inputs.items.shape[1] - rho
    for t in range(end - begin):
        for i in range(buffers.own[t], buffers.own[t + 1]):
            j = rho + buffers.replaced[i] - t * eta
            out.rows[own] = inputs.items[begin + t, j] if g[j, t] != 0 else UNUSED
            out.coefficients[own] = out.totals[own] = g[j, t]
            out.sources[own] = begin + t
            g[j, t] = f32(0)
            own += 1
    return own


@inline
def add_products(lists, first, negatives, used, rho, sums, buffers, out):
    """Compute the gradients of users and sums that come from shared negatives as products; `first` says for the sums
    that there are none of former lists.
    """
    eta, of_shared = negatives.size, buffers.g[rho:].reshape(-1)
    multiply(of_shared, 1, WIDTH, buffers.rows, eta, buffers.user_grad)
    multiply(of_shared, WIDTH, 1, buffers.users, lists, buffers.sums)
    for j in range(eta):
        total, product = out.vectors[sums + j], buffers.sums[j]
        for c in range(total.size):
            total[c] = product[c] + (f32(0) if first else total[c])
        if not_zero(of_shared, j * WIDTH) != 0:
            used[j] = negatives[j]


@inline
def add_entries(first, negatives, used, rho, sums, inputs, buffers, out):
    """Like `add_products`, but only with the gradients that are not 0."""
    of_shared, users, user_grad = buffers.g[rho:].reshape(-1), buffers.users, buffers.user_grad
    if first:
        out.vectors[sums : sums + negatives.size] = f32(0)
    user_grad[:] = f32(0)
    exchange_rows(inputs.V, negatives, out.vectors, sums, of_shared, users, user_grad, used, buffers.exchange)


@inline
def finish_users(begin, end, own, positive, inputs, rho, buffers, out):
    """Write the terms of positives, from `positive` on, and the gradients of the users.

    own : the first of the terms that `take_own` has written
    """
    g, V = buffers.g, inputs.V
    for b in range(begin, end):
        t, user_grad = b - begin, out.user_grad[b]
        for c in range(user_grad.size):
            user_grad[c] = buffers.user_grad[t, c]
        for i in range(rho):
            out.coefficients[positive] = out.totals[positive] = g[i, t]
            add_one(g[i, t], V[inputs.items[b, i]], user_grad)
            positive += 1
        for term in range(own, own + buffers.own[t + 1] - buffers.own[t]):
            if out.rows[term] != UNUSED:
                add_one(out.coefficients[term], V[out.rows[term]], user_grad)
        own += buffers.own[t + 1] - buffers.own[t]
        if inputs.l2:
            for c in range(user_grad.size):
                user_grad[c] = f32(2) * (user_grad[c] - buffers.totals[t] * buffers.users[t, c])


# ---------------------------------------------------------------------------------------------------------------


@inline
def tile_terms(tile, inputs, groups, loss, buffers, out):
    """Compute losses, users' gradients and terms of the lists of a tile."""
    group, start, stop = tile_bounds(tile, groups)
    rho, n, eta = loss.rho, inputs.items.shape[1], groups.items.shape[1]
    if start == stop:
        return
    begin_tile(tile, inputs, groups, rho, out)
    own, shared, sums = out.starts[tile] + (stop - start) * rho, out.starts[tile + 1] - eta, inputs.users.size + tile * eta
    negatives, used, short = groups.items[group], out.rows[shared:], buffers.rows.shape[0] > 0
    rows_finite = short and copy_rows(inputs.V, negatives, buffers.rows)
    for begin in range(start, stop, WIDTH):
        end = min(begin + WIDTH, stop)
        find_replaced(begin, end, groups, buffers.replaced, buffers.own)
        score_block(begin, end, group, inputs, groups, rho, buffers, out)
        dense = find_hinge(begin, end, n, inputs, loss, buffers) and rows_finite
        if loss.drm:
            rows = fill_columns(end - begin, n, short, loss, buffers)
            if rows > 0:
                drm_of_columns(buffers.columns, rows, rho, loss.lam, loss.tau)
        for b in range(begin, end):
            store_losses(b, b - begin, loss, buffers, out)
        scatter_gradients(end - begin, n, loss, buffers)
        if inputs.l2:
            sum_lists(end - begin, n, buffers)
        own_end = take_own(begin, end, own, inputs, rho, buffers, out)
        if dense:
            add_products(end - begin, begin == start, negatives, used, rho, sums, buffers, out)
        else:
            add_entries(begin == start, negatives, used, rho, sums, inputs, buffers, out)
        if inputs.l2:
            for j in range(eta):
                for t in range(end - begin):
                    out.totals[shared + j] += buffers.g[rho + j, t]
        positive = out.starts[tile] + (begin - start) * rho
        finish_users(begin, end, own, positive, inputs, rho, buffers, out)
        own = own_end


@kernel
def terms_of_tiles(start, stop, inputs, groups, loss, out):
    """Compute losses, users' gradients and terms of tiles start .. stop - 1."""
    n, eta, d = inputs.items.shape[1], groups.items.shape[1], inputs.U.shape[1]
    buffers = term_buffers(n, eta, d, loss.weights, loss.drm and n < ACTIVE_MIN)
    for tile in range(start, stop):
        tile_terms(tile, inputs, groups, loss, buffers, out)


@kernel
def count_terms(start, stop, inputs, groups, rho, counts):
    """Write to `counts` the number of terms of tiles start .. stop - 1, -1 for a tile with an invalid id."""
    n_users, n_items, eta = inputs.U.shape[0], inputs.V.shape[0], groups.items.shape[1]
    positions, own = np.empty(WIDTH * eta, np.int64), np.empty(WIDTH + 1, np.int64)
    for tile in range(start, stop):
        group, begin, end = tile_bounds(tile, groups)
        counts[tile], valid = (end - begin) * rho + (eta if begin < end else 0), True
        for j in range(eta):
            valid &= 0 <= groups.items[group, j] < n_items
        for block in range(begin, end, WIDTH):
            block_end = min(block + WIDTH, end)
            find_replaced(block, block_end, groups, positions, own)
            counts[tile] += own[block_end - block]
            for b in range(block, block_end):
                valid &= 0 <= inputs.users[b] < n_users
                for i in range(rho):
                    valid &= 0 <= inputs.items[b, i] < n_items
                t = b - block
                for i in range(own[t], own[t + 1]):
                    valid &= 0 <= inputs.items[b, rho + positions[i] - t * eta] < n_items
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
