"""`list_terms`: what a training step on lists needs: losses, gradients of users, and sums of gradients of items.

Lists with hinge or DRM that share negatives are processed in tiles (`term_tiles`). Of a tile, WIDTH lists at a time are
scored as a product of small matrices, and their losses are computed together, one list in each lane of a few vector
registers. Each gradient is then used twice, for the user and for the sum of a shared negative:

    user_grad_b += g_bj v_j        sum_j += g_bj u_b

For short lists, these are two more products. Of a long list, hinge and DRM have a gradient at few of the items, the
active ones (`active_columns`) and the pair of the hinge, and only these are used (`runtime/exchange`). No array of
B x n scores or gradients is written. Lists with other losses, with their own negatives, or in groups of fewer than
SHARE_MIN use `list_gradients`.

Cost of a list: 2 n d operations for the scores, about five passes over those of a long list, what `columns` takes for
the m active items, and 4 m d operations for the two sums. With 1,000 negatives, m is about 100 after one epoch.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from drm_triton.kernels.checks import INT32, check_lists
from drm_triton.kernels.cpu.active import ACTIVE_MIN
from drm_triton.kernels.cpu.gradients import list_gradients, loss_parameters
from drm_triton.kernels.cpu.runtime import threads
from drm_triton.kernels.cpu.runtime.arrays import FLOAT32, empty, view
from drm_triton.kernels.cpu.runtime.jit import kernel
from drm_triton.kernels.cpu.runtime.simd import WIDTH
from drm_triton.kernels.cpu.term_tiles import UNUSED, term_buffers, tile_terms
from drm_triton.kernels.cpu.tiles import Groups, divide, find_replaced, tile_bounds
from drm_triton.kernels.protocol import GradientTerms, ListBatch, ListTerms, Objective
from drm_triton.names import LOSSES

f32 = np.float32
TILE = 256  # lists whose terms of one shared negative become one sum, at most
SHARE_MIN = 16  # smallest group of lists that is processed in tiles: a tile stores a sum for each negative
# Negatives whose terms a thread counts or computes at least: fewer take less time than to start it.
COUNT_TASK, TASK = 1 << 17, 1 << 14


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
    sources: NDArray[np.int32]  # [E], rows of U, or M plus a row of sums
    sums: NDArray[np.float32]  # [tiles * eta, d] of shared negatives


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
    negatives = max(1, groups.tile * groups.items.shape[1])  # of a tile
    threads.split(count_terms, groups.n_tiles, -(-COUNT_TASK // negatives), inputs, groups, objective.rho, counts)
    if counts.min(initial=0) < 0:
        check_lists(U, V, batch, objective)  # says which id
    out = term_outputs(inputs, groups, counts)
    loss = loss_parameters(objective, batch.items.shape[1], len(V) if n_items is None else n_items)
    threads.split(terms_of_tiles, groups.n_tiles, -(-TASK // negatives), inputs, groups, loss, out)

    columns, used = (out.rows, out.coefficients, out.totals, out.sources), out.rows != UNUSED
    if not used.all():
        columns = tuple(x[used] for x in columns)
    rows, coefficients, totals, sources = map(torch.from_numpy, columns)
    sums = torch.from_numpy(out.sums)
    terms = GradientTerms(rows[:, None], coefficients[:, None], U, sources, None, totals[:, None], sums)
    hinge, drm = out.losses  # as arrays: torch would take longer for so few numbers
    parts = dict.fromkeys(LOSSES, np.zeros(B, f32)) | {"hinge": hinge, "drm": drm}
    losses = {"loss": hinge + f32(objective.lam) * drm, **parts}
    losses_of_lists = {name: torch.from_numpy(values) for name, values in losses.items()}
    return ListTerms(losses_of_lists, torch.from_numpy(out.user_grad), terms)


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
        sums=empty(torch.float32, groups.n_tiles * eta, d).numpy(),
    )
