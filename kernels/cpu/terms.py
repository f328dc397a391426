"""`list_terms`: what a training step on lists needs. Long lists have few gradients, and only these are computed.

Hinge and DRM of a long list have a gradient at a few dozen items. Lists that share negatives are processed in tiles. Of
a tile, SCORED lists at a time are scored as a product of small matrices. The scores of a list are read while they are
in the cache, its active items are found (`active`), and the gradients of these are kept. They are then sorted by
negative, so that the row of a negative, and the sum of its terms, are read once for all of these lists:

    user_grad_b += g_bj v_j        sum_j += g_bj u_b

No array of B x n scores or gradients is written. Lists with other losses, with their own negatives, or in groups of
fewer than SHARE_MIN use `list_gradients`.

Cost of a list: 2 n d operations for the scores, about ten passes over them, 8 m^2 / LANES vector operations to sort the
m active items, and 4 m d operations for the two sums. With 1,000 negatives, m is about 100 after one epoch.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from drm_triton.kernels.checks import INT32, check_lists
from drm_triton.kernels.cpu.active import ACTIVE_MIN
from drm_triton.kernels.cpu.gradients import list_gradients, loss_parameters
from drm_triton.kernels.cpu.losses import NAN, active_drm_loss, add_one, hinge_pair, list_buffers, score_items
from drm_triton.kernels.cpu.runtime import threads
from drm_triton.kernels.cpu.runtime.arrays import FLOAT32, empty, view
from drm_triton.kernels.cpu.runtime.bits import BITS, find_true
from drm_triton.kernels.cpu.runtime.jit import allocating, inline, kernel, prefetch_row
from drm_triton.kernels.cpu.runtime.simd import ITEMS, padded, scatter_rows, score_lists, sum_rows
from drm_triton.kernels.cpu.softsort import all_finite
from drm_triton.kernels.cpu.tiles import Groups, divide, tile_bounds
from drm_triton.kernels.protocol import GradientTerms, ListBatch, ListTerms, Objective
from drm_triton.names import LOSSES

f32 = np.float32
TILE = 256  # lists whose terms of one shared negative become one sum, at most
SCORED = 64  # lists that are scored at once: their scores stay in the second-level cache
SHARE_MIN = 16  # smallest group of lists that is processed in tiles: a tile stores a sum for each negative
ROWS_AHEAD = 8  # negatives between the prefetch of a row and its use
UNUSED = -1  # row of a place for a term that holds none


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
    starts: NDArray[np.int64]  # [tiles + 1]; tile t has the places starts[t] .. starts[t + 1] - 1
    rows: NDArray[np.int32]  # [E]
    coefficients: NDArray[np.float32]  # [E]
    totals: NDArray[np.float32]  # [E]
    sources: NDArray[np.int32]  # [E]
    vectors: NDArray[np.float32]  # [B + tiles * eta, d]: factors of the lists' users, then sums of shared negatives


class SharedTerms(NamedTuple):
    """Gradients to the scores of shared negatives: first list by list, then by negative."""

    negatives: NDArray[np.int32]  # [most]
    users: NDArray[np.int64]  # [2, most], where the rows of their lists' users begin
    g: NDArray[np.float32]  # [2, most]
    starts: NDArray[np.int64]  # [eta + 2]; those of negative j end up at starts[j] .. starts[j + 1] - 1


class TermBuffers(NamedTuple):
    """Buffers for the lists that are scored at once."""

    columns: NDArray[np.float32]  # [d, SCORED] factors of the users
    scores: NDArray[np.float32]  # [SCORED, padded n], -inf in the padding
    replaced: NDArray[np.int64]  # [eta], positions at which one list has a negative in place of a shared one
    positions: NDArray[np.int64]  # [n + 2], items of one list that have a gradient
    g: NDArray[np.float32]  # [n + 2], these gradients
    g_sums: NDArray[np.float32]  # [SCORED], their sum for each list
    shared: SharedTerms


@inline
def sparse_gradient(s, n, loss, buffers, positions, g):
    """Return hinge and DRM of a list, and the number of its gradients that may not be 0; write these.

    An item may appear twice. s holds the scores of the n items, and -inf after them.
    """
    rho, hinge, drm, count = loss.rho, f32(0), f32(0), 0
    if not all_finite(s[:n]):  # one bad score makes the whole list NaN, so that it is noticed
        for j in range(n):
            positions[j], g[j] = j, NAN
        return NAN if loss.hinge else f32(0), NAN if loss.drm else f32(0), n
    if loss.drm:
        drm, active = active_drm_loss(s, n, loss, buffers)
        count = active.size
        for i in range(count):
            positions[i], g[i] = active[i], buffers.ds[i]
    if loss.hinge:
        gap, weight, i, j = hinge_pair(s[:rho], s[rho:n], loss.margin, loss.phi)
        if gap > 0:
            positions[count], g[count] = i, -weight
            positions[count + 1], g[count + 1] = rho + j, weight
            count += 2
        hinge = weight * gap
    return hinge, drm, count


@inline
def keep_gradients(b, t, count, number, place, inputs, groups, rho, first, buffers, out):
    """Keep the `count` gradients of list b, which is number t of those that are scored at once.

    `number` gradients of shared negatives are kept so far. The terms of the positives begin at place `first`, those of
    negatives in place of shared ones at `place`. Returns the new number and place.
    """
    items, replaced, user_grad = inputs.items[b], groups.replaced[b], out.user_grad[b]
    shared, weight, total = buffers.shared, inputs.weights[b], f32(0)
    user_grad[:] = f32(0)
    for e in range(count):
        j, g = buffers.positions[e] - rho, weight * buffers.g[e]
        total += g
        if j >= 0 and not replaced[j]:
            shared.negatives[number], shared.users[0, number], shared.g[0, number] = j, t * user_grad.size, g
            shared.starts[j + 2] += 1
            number += 1
            continue
        if j < 0:
            out.coefficients[first + rho + j] += g
        else:
            out.rows[place], out.sources[place] = items[rho + j], b
            out.coefficients[place] = out.totals[place] = g
            place += 1
        add_one(g, inputs.V[items[rho + j]], user_grad)
    buffers.g_sums[t] = total
    return number, place


@inline
def sort_by_negative(number, shared):
    """Sort gradients by negative; those of one negative stay in the order of the lists. `starts` was 0 before them."""
    starts = shared.starts
    for j in range(1, starts.size - 2):
        starts[j + 1] += starts[j]
    for e in range(number):
        j = shared.negatives[e] + 1
        place = starts[j]
        shared.users[1, place], shared.g[1, place] = shared.users[0, e], shared.g[0, e]
        starts[j] = place + 1


@inline
def add_shared(begin, end, tile, inputs, groups, buffers, out):
    """Add the gradients of shared negatives to those of the users of lists begin .. end - 1, and to the tile's sums."""
    d, eta, shared = inputs.U.shape[1], groups.items.shape[1], buffers.shared
    items, sums = groups.items[tile_bounds(tile, groups)[0]], inputs.users.size + tile * eta
    first = out.starts[tile + 1] - eta
    V, vectors = inputs.V.reshape(-1), out.vectors.reshape(-1)
    users, user_grad = vectors[begin * d : end * d], out.user_grad.reshape(-1)[begin * d : end * d]
    for j in range(eta):
        prefetch_row(inputs.V, items[min(j + ROWS_AHEAD, eta - 1)])
        low, high = shared.starts[j], shared.starts[j + 1]
        if low < high:
            of_users, g = shared.users[1, low:high], shared.g[1, low:high]
            scatter_rows(user_grad, of_users, g, high - low, V, np.int64(items[j]) * d, d)
            sum_rows(users, of_users, g, high - low, vectors, (sums + j) * d, d)
            total = f32(0)
            for e in range(high - low):
                total += g[e]
            out.rows[first + j] = items[j]
            out.totals[first + j] += total


@inline
def begin_tile(tile, inputs, groups, rho, out):
    """Prepare the places of a tile for its terms, and copy the users' factors."""
    _, start, stop = tile_bounds(tile, groups)
    eta, places = groups.items.shape[1], out.starts[tile]
    sums, first = inputs.users.size + tile * eta, out.starts[tile + 1] - eta
    out.rows[places : out.starts[tile + 1]] = UNUSED
    out.vectors[sums : sums + eta] = f32(0)
    for j in range(eta):
        out.coefficients[first + j], out.totals[first + j], out.sources[first + j] = f32(1), f32(0), sums + j
    for b in range(start, stop):
        u, vector = inputs.U[inputs.users[b]], out.vectors[b]
        for c in range(u.size):
            vector[c] = u[c]
        for i in range(rho):
            place = places + (b - start) * rho + i
            out.rows[place], out.sources[place], out.coefficients[place] = inputs.items[b, i], b, f32(0)


@inline
def score_block(begin, end, group, inputs, groups, rho, buffers, out):
    """Compute the scores of lists begin .. end - 1, at most SCORED of one group."""
    V, l2, n, last = inputs.V, inputs.l2, inputs.items.shape[1], inputs.users.size - 1
    for b in range(begin, end):
        vector = out.vectors[b]
        for c in range(vector.size):
            buffers.columns[c, b - begin] = vector[c]
    items, stride = groups.items[group], buffers.scores.shape[1]
    score_lists(V, items, items, buffers.columns, l2, buffers.scores.reshape(-1)[rho:], stride)
    for b in range(begin, end):
        u, s, items = out.vectors[b], buffers.scores[b - begin], inputs.items[b]
        score_items(u, V, items[:rho], inputs.items[min(b + 1, last), :rho], l2, s[:rho])
        for i in range(find_true(groups.replaced[b], buffers.replaced)):
            j = rho + buffers.replaced[i]
            score_items(u, V, items[j : j + 1], items[j : j + 1], l2, s[j : j + 1])
        s[n:] = f32(-np.inf)


@inline
def tile_terms(tile, inputs, groups, loss, of_list, buffers, out):
    """Compute losses, users' gradients and terms of the lists of a tile."""
    group, start, stop = tile_bounds(tile, groups)
    rho, n = loss.rho, inputs.items.shape[1]
    begin_tile(tile, inputs, groups, rho, out)
    place = out.starts[tile] + (stop - start) * rho
    for begin in range(start, stop, SCORED):
        end, number = min(begin + SCORED, stop), 0
        score_block(begin, end, group, inputs, groups, rho, buffers, out)
        buffers.shared.starts[:] = 0
        for b in range(begin, end):
            t, first = b - begin, out.starts[tile] + (b - start) * rho
            hinge, drm, count = sparse_gradient(buffers.scores[t], n, loss, of_list, buffers.positions, buffers.g)
            out.losses[0, b], out.losses[1, b] = inputs.weights[b] * hinge, inputs.weights[b] * drm
            number, place = keep_gradients(b, t, count, number, place, inputs, groups, rho, first, buffers, out)
        sort_by_negative(number, buffers.shared)
        add_shared(begin, end, tile, inputs, groups, buffers, out)
        if inputs.l2:
            for b in range(begin, end):
                u, user_grad, total = out.vectors[b], out.user_grad[b], buffers.g_sums[b - begin]
                for c in range(u.size):
                    user_grad[c] = f32(2) * (user_grad[c] - total * u[c])
    for p in range(out.starts[tile], out.starts[tile] + (stop - start) * rho):
        out.totals[p] = out.coefficients[p]


@allocating
def term_buffers(rho, eta, d):
    """Allocate the buffers for the lists that are scored at once."""
    n, most = rho + eta, SCORED * (eta + 1)
    shared = SharedTerms(
        np.empty(most, np.int32),
        np.empty((2, most), np.int64),
        np.empty((2, most), np.float32),
        np.empty(eta + 2, np.int64),
    )
    return TermBuffers(
        np.zeros((d, SCORED), np.float32),
        np.empty((SCORED, padded(rho + padded(eta, ITEMS), BITS)), np.float32),
        np.empty(eta, np.int64),
        np.empty(n + 2, np.int64),
        np.empty(n + 2, np.float32),
        np.empty(SCORED, np.float32),
        shared,
    )


@kernel
def terms_of_tiles(start, stop, inputs, groups, loss, out):
    """Compute losses, users' gradients and terms of tiles start .. stop - 1."""
    of_list = list_buffers(padded(inputs.items.shape[1], BITS), loss.weights)
    buffers = term_buffers(loss.rho, groups.items.shape[1], inputs.U.shape[1])
    for tile in range(start, stop):
        tile_terms(tile, inputs, groups, loss, of_list, buffers, out)


@kernel
def count_places(start, stop, inputs, groups, rho, counts):
    """Write to `counts` the most terms that tiles start .. stop - 1 can have, -1 for a tile with an invalid id."""
    n_users, n_items, positions = inputs.U.shape[0], inputs.V.shape[0], np.empty(groups.items.shape[1], np.int64)
    for tile in range(start, stop):
        group, begin, end = tile_bounds(tile, groups)
        counts[tile], valid = (end - begin) * rho + positions.size, True
        for j in range(positions.size):
            valid &= 0 <= groups.items[group, j] < n_items
        for b in range(begin, end):
            count = find_true(groups.replaced[b], positions)
            counts[tile] += count + (count > 0)  # the hardest negative may have two terms, of hinge and DRM
            valid &= 0 <= inputs.users[b] < n_users
            for i in range(rho):
                valid &= 0 <= inputs.items[b, i] < n_items
            for i in range(count):
                valid &= 0 <= inputs.items[b, rho + positions[i]] < n_items
        if not valid:
            counts[tile] = -1


def is_sparse(objective: Objective, n: int) -> bool:
    """Return whether most items of lists of n items have gradient 0."""
    return n >= ACTIVE_MIN and not any((objective.mse, objective.softmax, objective.psl, objective.bpr))


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
    if not is_sparse(objective, batch.items.shape[-1]):
        return list_gradients(U, V, batch, objective, n_items).terms(U, batch, weights)
    if batch.shared is None or batch.shared.size < SHARE_MIN:
        losses, user_grad, items = list_gradients(U, V, batch, objective, n_items).terms(U, batch, weights)
        b, j = items.coefficients.nonzero(as_tuple=True)
        rows, g = items.rows[b, j], items.coefficients[b, j]
        return ListTerms(losses, user_grad, GradientTerms(rows[:, None], g[:, None], U, batch.users[b]))
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
    threads.split(count_places, groups.n_tiles, 4, inputs, groups, objective.rho, counts)
    if counts.min(initial=0) < 0:
        check_lists(U, V, batch, objective)  # says which id
    out = term_outputs(inputs, groups, counts)
    loss = loss_parameters(objective, batch.items.shape[1], len(V) if n_items is None else n_items)
    threads.split(terms_of_tiles, groups.n_tiles, 1, inputs, groups, loss, out)

    hinge, drm = torch.from_numpy(out.losses)
    nothing = torch.zeros_like(hinge)
    parts = dict.fromkeys(LOSSES, nothing) | {"hinge": hinge, "drm": drm}
    used = out.rows != UNUSED
    rows, coefficients, totals, sources = (
        torch.from_numpy(x[used]) for x in (out.rows, out.coefficients, out.totals, out.sources)
    )
    terms = GradientTerms(
        rows[:, None], coefficients[:, None], torch.from_numpy(out.vectors), sources, None, totals[:, None]
    )
    return ListTerms({"loss": objective.total(*parts.values()), **parts}, torch.from_numpy(out.user_grad), terms)


def term_outputs(inputs: TermInputs, groups: Groups, counts: NDArray[np.int64]) -> TermOutputs:
    """Allocate the results, with as many places for the terms of each tile as `counts` says."""
    (B, d), (_, eta) = (len(inputs.users), inputs.U.shape[1]), groups.items.shape
    starts = np.concatenate([[0], counts.cumsum()])
    E = int(starts[-1])
    return TermOutputs(
        losses=np.empty((2, B), f32),
        user_grad=np.empty((B, d), f32),
        starts=starts,
        rows=np.empty(E, np.int32),
        coefficients=np.empty(E, f32),
        totals=np.empty(E, f32),
        sources=np.empty(E, np.int32),
        vectors=empty(torch.float32, B + groups.n_tiles * eta, d).numpy(),
    )
