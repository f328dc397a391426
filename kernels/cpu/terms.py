"""`list_terms`: what a training step on lists needs: losses, gradients of users, and sums of gradients of items.

Lists with hinge or DRM that share negatives are processed in tiles (`term_tiles`). Of a tile, WIDTH lists at a time are
scored as a product of small matrices, and their losses are computed together, one list in each lane of a few vector
registers. Each gradient is then used twice, for the user and for the sum of a shared negative:

    user_grad_b += g_bj v_j        sum_j += g_bj u_b

For short lists, these are two more products. Of a long list, hinge and DRM have a gradient at few of the items, the
active ones (`active_columns`) and the pair of the hinge, and only these are used (`runtime/entries`). No array of
B x n scores or gradients is written. Lists with other losses, with their own negatives, or in groups of fewer than
SHARE_MIN use `list_gradients`.

Cost of a list: 2 n d operations for the scores, about four passes over those of a long list, what `columns` takes for
the m active items, and 4 m d operations for the two sums. With 1,000 negatives, m is about 100 after one epoch.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from drm_triton.errors import InputError
from drm_triton.kernels.batches import GroupedBatch, ListBatch
from drm_triton.kernels.checks import INT32, INT64, check_index, check_lists
from drm_triton.kernels.cpu.active import ACTIVE_MIN
from drm_triton.kernels.cpu.gradients import list_gradients, loss_parameters
from drm_triton.kernels.cpu.runtime import threads
from drm_triton.kernels.cpu.runtime.arrays import FLOAT32, empty, view
from drm_triton.kernels.cpu.runtime.jit import inline, kernel
from drm_triton.kernels.cpu.term_tiles import UNUSED, term_buffers, tile_terms
from drm_triton.kernels.cpu.tiles import Tiles, divide, tile_bounds
from drm_triton.kernels.protocol import GradientTerms, ListTerms, Objective
from drm_triton.names import LOSSES

f32 = np.float32
TILE = 256  # lists whose terms of one shared negative become one sum, at most
SHARE_MIN = 16  # smallest group of lists that is processed in tiles: a tile stores a sum for each negative
TASK = 1 << 14  # negatives whose terms a thread computes at least: fewer take less time than to start it


class TermInputs(NamedTuple):
    """Arguments of `list_terms`."""

    U: NDArray[np.float32]  # [M, d]
    V: NDArray[np.float32]  # [N, d]
    users: NDArray[np.int32]  # [B]
    positives: NDArray[np.int32]  # [B, rho]
    weights: NDArray[np.float32]  # [B], of the lists
    l2: bool  # score is l2, not dot


class TermGroups(NamedTuple):
    """The negatives of a `GroupedBatch`, and the division of its lists into tiles."""

    tiles: Tiles
    items: NDArray[np.int32]  # [G, eta], shared
    # The others are those of `OwnNegatives`.
    first: NDArray[np.int64]  # [B]
    counts: NDArray[np.int64]  # [B]
    places: NDArray[np.int32]
    own_items: NDArray[np.int32]


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
    sources: NDArray[np.int32]  # [E], rows of U, or M plus a row of sums
    sums: NDArray[np.float32]  # [tiles * eta, d] of shared negatives
    unused: NDArray[np.int64]  # [tiles], terms without a gradient, whose row is UNUSED; -1 if an id is invalid


@inline
def valid(tile, inputs, groups):
    """Return whether all ids of a tile are valid, and the places of negatives in lists."""
    group, start, stop = tile_bounds(tile, groups.tiles)
    n_users, n_items, eta = inputs.U.shape[0], inputs.V.shape[0], groups.items.shape[1]
    result = True
    for j in range(eta if start < stop else 0):
        result &= 0 <= groups.items[group, j] < n_items
    for b in range(start, stop):
        result &= 0 <= inputs.users[b] < n_users
        for i in range(inputs.positives.shape[1]):
            result &= 0 <= inputs.positives[b, i] < n_items
        own, count = groups.first[b], groups.counts[b]
        result &= (own >= 0) & (own <= groups.places.size - count)  # the sum of both may overflow
        for i in range(own, own + count if result else own):
            result &= (0 <= groups.own_items[i] < n_items) & (0 <= groups.places[i] < eta)
    return result


@kernel
def terms_of_tiles(start, stop, inputs, groups, loss, out):
    """Compute losses, users' gradients and terms of tiles start .. stop - 1."""
    rho, eta, d = inputs.positives.shape[1], groups.items.shape[1], inputs.U.shape[1]
    buffers = term_buffers(rho, eta, d, loss.weights, loss.drm and rho + eta < ACTIVE_MIN)
    for tile in range(start, stop):
        out.unused[tile] = -1
        if valid(tile, inputs, groups):
            tile_terms(tile, inputs, groups, loss, buffers, out)
            out.unused[tile] = 0
            for term in range(out.starts[tile], out.starts[tile + 1]):
                out.unused[tile] += out.rows[term] == UNUSED


def only_hinge_and_drm(objective: Objective) -> bool:
    """Return whether there are no other losses. Then few items of a long list have a gradient."""
    return set(objective.parts) <= {"hinge", "drm"}


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
    if group_size(batch) < SHARE_MIN or not only_hinge_and_drm(objective):
        lists = list_gradients(U, V, batch, objective, n_items).terms(U, batch, weights)
        if batch.items.shape[1] < ACTIVE_MIN or not only_hinge_and_drm(objective):
            return lists
        b, j = lists.items.coefficients.nonzero(as_tuple=True)
        rows, g = lists.items.rows[b, j], lists.items.coefficients[b, j]
        return lists._replace(items=GradientTerms(rows[:, None], g[:, None], U, batch.users[b]))
    name = "list_terms"
    check_lists(U, V, batch, objective, values=False)
    grouped = GroupedBatch.of(batch)
    (B, rho), own = grouped.of_lists.shape, grouped.own
    if weights is None:
        weights = torch.ones(B, dtype=torch.float32)
    inputs = TermInputs(
        view(name, "U", U, (None, None), FLOAT32),
        view(name, "V", V, (None, None), FLOAT32),
        view(name, "users", grouped.users, (None,), INT32),
        view(name, "positives", grouped.of_lists, (None, None), INT32),
        view(name, "weights", weights, (B,), FLOAT32),
        objective.score == "l2",
    )
    groups = TermGroups(
        divide(grouped.size, B, TILE),
        view(name, "negatives", grouped.of_groups, (None, None), INT32),
        view(name, "first of own", own.first, (B,), INT64),
        view(name, "counts of own", own.counts, (B,), INT64),
        view(name, "places of own", own.places, (None,), INT32),
        view(name, "items of own", own.items, (len(own.places),), INT32),
    )
    eta = groups.items.shape[1]
    check_index(name, "the counts of own negatives", own.counts, eta + 1)
    out = term_outputs(inputs, groups)
    loss = loss_parameters(objective, rho + eta, len(V) if n_items is None else n_items)
    grain = -(-TASK // max(1, groups.tiles.tile * eta))
    threads.split(terms_of_tiles, groups.tiles.n_tiles, grain, inputs, groups, loss, out)
    if out.unused.min(initial=0) < 0:
        check_lists(U, V, batch, objective)  # says what is invalid
        raise InputError(f"{name}: the batch has ids that do not exist")  # for what that check does not see

    columns = (out.rows, out.coefficients, out.totals, out.sources)
    if out.unused.any():
        used = out.rows != UNUSED
        columns = tuple(x[used] for x in columns)
    rows, coefficients, totals, sources = map(torch.from_numpy, columns)
    sums = torch.from_numpy(out.sums)
    terms = GradientTerms(rows[:, None], coefficients[:, None], U, sources, None, totals[:, None], sums)
    hinge, drm = out.losses  # as arrays: torch would take longer for so few numbers
    parts = dict.fromkeys(LOSSES, np.zeros(B, f32)) | {"hinge": hinge, "drm": drm}
    losses = {"loss": hinge + f32(objective.lam) * drm, **parts}
    losses_of_lists = {name: torch.from_numpy(values) for name, values in losses.items()}
    return ListTerms(losses_of_lists, torch.from_numpy(out.user_grad), terms)


def group_size(batch: ListBatch) -> int:
    """Return how many lists share their negatives."""
    if isinstance(batch, GroupedBatch):
        return batch.size
    return 1 if batch.shared is None else batch.shared.size


def term_outputs(inputs: TermInputs, groups: TermGroups) -> TermOutputs:
    """Allocate the results."""
    (B, rho), d, eta, tiles = inputs.positives.shape, inputs.U.shape[1], groups.items.shape[1], groups.tiles
    _, begin, end = tile_bounds.py_func(np.arange(tiles.n_tiles), tiles)
    begin, end = np.minimum(begin, B), np.minimum(end, B)  # of an empty tile they may be larger
    before = np.concatenate([[0], groups.counts.cumsum()])  # terms of `own` before each list
    terms = np.where(begin < end, rho * (end - begin) + before[end] - before[begin] + eta, 0)
    starts = np.concatenate([[0], terms.cumsum()])
    E = int(starts[-1])
    return TermOutputs(
        losses=np.empty((2, B), f32),
        user_grad=empty(torch.float32, B, d).numpy(),
        starts=starts,
        rows=np.empty(E, np.int32),
        coefficients=np.empty(E, f32),
        totals=np.empty(E, f32),
        sources=np.empty(E, np.int32),
        sums=empty(torch.float32, tiles.n_tiles * eta, d).numpy(),
        unused=np.empty(tiles.n_tiles, np.int64),
    )
