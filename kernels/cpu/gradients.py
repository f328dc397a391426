"""`list_gradients`: losses of a batch of lists, and their gradients to the scores and to the user's row.

With sampled negatives, groups of lists share them by default. Their rows are then read once for a tile of lists, and
the work on them is two small matrix products per tile:

    scores     [eta, d] x [d, lists]
    user_grad  [lists, eta] x [eta, d]

Training on lists that share negatives, with hinge and DRM alone, uses `terms` instead.

The positives of a list, and the negatives that it has in place of shared ones, are processed one by one.

Cost of a list: 4 n d operations for scores and user gradient, 8 n^2 for the pairs and about 40 n K for the relaxed
rows. Per item and rank, these are 28 to compute P (22 of them for exp), 2 for Q and 8 for the gradient; for ranks above
KEPT, P is computed twice. In lists of ACTIVE_MIN items or more, n is the number of active items for pairs and rows. A
list reads n + 1 rows of d floats (with shared negatives rho + 1 + eta / lists) and writes 2 n + d + 4 floats. Nothing
of size n x n or n x d is stored.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from drm_triton.kernels.batches import ListBatch
from drm_triton.kernels.checks import INT32, check_lists
from drm_triton.kernels.cpu.losses import (
    LossParameters,
    add_rows,
    convert_to_l2,
    list_buffers,
    losses_of_list,
    score_items,
)
from drm_triton.kernels.cpu.runtime import threads
from drm_triton.kernels.cpu.runtime.arrays import FLOAT32, empty, view
from drm_triton.kernels.cpu.runtime.jit import inline, kernel, prefetch_row
from drm_triton.kernels.cpu.runtime.products import ITEMS, multiply, score_lists
from drm_triton.kernels.cpu.runtime.simd import LANES, ROWS, WIDTH, padded
from drm_triton.kernels.cpu.softsort import all_finite
from drm_triton.kernels.cpu.tiles import groups_of, tile_bounds
from drm_triton.kernels.protocol import ListGradients, Objective
from drm_triton.kernels.weights import training_rank_weights
from drm_triton.names import LOSSES

f32 = np.float32
# Lists of a tile. Reading the rows of the shared negatives once for 64 lists costs little per list. Larger tiles would
# outgrow the cache and leave threads without work.
TILE = 64


class GradientInputs(NamedTuple):
    """Arguments of `list_gradients`."""

    U: NDArray[np.float32]  # [M, d]
    V: NDArray[np.float32]  # [N, d]
    users: NDArray[np.int32]  # [B]
    items: NDArray[np.int32]  # [B, n]
    l2: bool  # score is l2, not dot


class GradientOutputs(NamedTuple):
    """Results of `list_gradients`."""

    scores: NDArray[np.float32]  # [B, n]
    losses: NDArray[np.float32]  # [parts, B], in the order of LOSSES
    g: NDArray[np.float32]  # [B, n]
    user_grad: NDArray[np.float32]  # [B, d]


@inline
def store_losses(losses, b, values):
    """Store the losses of list b."""
    for part in range(losses.shape[0]):
        losses[part, b] = values[part]


# ---------------------------------------------------------------------------------------------------------------
# Lists that share negatives


class GradientBuffers(NamedTuple):
    """Buffers for the shared negatives of a tile; `padded` dimensions are multiples of what `simd` computes at once."""

    columns: NDArray[np.float32]  # [d, padded tile] factors of the users
    scores: NDArray[np.float32]  # [padded tile, padded eta]
    positions: NDArray[np.int64]  # [eta], negatives of one list that are not taken from the products
    not_finite: NDArray[np.bool_]  # [eta], rows that would spoil lists that do not contain them: 0 * inf is NaN
    rows: NDArray[np.float32]  # [eta, padded d] factors of the shared negatives
    g: NDArray[np.float32]  # [padded tile, eta] gradient to their scores
    user_grad: NDArray[np.float32]  # [padded tile, padded d]


@inline
def score_tile(tile, following, inputs, groups, buffers):
    """Compute the scores of the shared negatives of a tile; prefetch the rows of tile `following`."""
    group, start, stop = tile_bounds(tile, groups.tiles)
    next_group, next_start, next_stop = tile_bounds(following, groups.tiles)
    for t in range(stop - start):
        u = inputs.U[inputs.users[start + t]]
        for c in range(u.size):
            buffers.columns[c, t] = u[c]
    for b in range(next_start, next_stop):
        prefetch_row(inputs.U, inputs.users[b])
    scores = buffers.scores
    score_lists(
        inputs.V, groups.items[group], groups.items[next_group], buffers.columns, inputs.l2,
        scores.reshape(-1), scores.shape[1],
    )  # fmt: skip


@inline
def copy_rows(V, items, buffers):
    """Copy the rows of the shared negatives, with 0 for those that are not finite."""
    for j in range(items.size):
        row, v = buffers.rows[j], V[items[j]]
        for c in range(v.size):
            row[c] = v[c]
        buffers.not_finite[j] = not all_finite(v)
        if buffers.not_finite[j]:
            row[:] = f32(0)


@inline
def separate_positions(replaced, not_finite, positions):
    """Write to `positions` the negatives of a list that are not taken from the products; return their number."""
    count = 0
    for j in range(replaced.size):
        count += replaced[j] | not_finite[j]
    if count > 0:
        count = 0
        for j in range(replaced.size):
            if replaced[j] | not_finite[j]:
                positions[count] = j
                count += 1
    return count


@inline
def tile_gradients(tile, following, inputs, groups, loss, buffers, tile_buffers, out):
    """Compute scores, losses and gradients of the lists of a tile; prefetch the rows of tile `following`."""
    U, V, l2, rho, last = inputs.U, inputs.V, inputs.l2, loss.rho, inputs.users.size - 1
    group, start, stop = tile_bounds(tile, groups.tiles)
    if start == stop:
        return
    eta = groups.items.shape[1]
    score_tile(tile, following, inputs, groups, tile_buffers)
    copy_rows(V, groups.items[group], tile_buffers)
    for b in range(start, stop):
        t, u, s, g, user_grad = b - start, U[inputs.users[b]], out.scores[b], out.g[b], out.user_grad[b]
        positives, negatives, replaced = inputs.items[b, :rho], inputs.items[b, rho:], groups.replaced[b]
        score_items(u, V, positives, inputs.items[min(b + 1, last), :rho], l2, s[:rho])
        s_negatives, g_negatives = s[rho:], g[rho:]
        for j in range(eta):
            s_negatives[j] = tile_buffers.scores[t, j]
        count = separate_positions(replaced, tile_buffers.not_finite, tile_buffers.positions)
        positions = tile_buffers.positions[:count]
        for i in range(count):
            j = positions[i]
            score_items(u, V, negatives[j : j + 1], negatives[j : j + 1], l2, s_negatives[j : j + 1])
        store_losses(out.losses, b, losses_of_list(s, loss, buffers, g))
        user_grad[:] = f32(0)
        add_rows(V, positives, g[:rho], user_grad)
        for j in range(eta):
            tile_buffers.g[t, j] = g_negatives[j]
        for i in range(count):
            j = positions[i]
            add_rows(V, negatives[j : j + 1], g_negatives[j : j + 1], user_grad)
            tile_buffers.g[t, j] = f32(0)
    multiply(tile_buffers.g, eta, 1, tile_buffers.rows, eta, tile_buffers.user_grad)
    for b in range(start, stop):
        user_grad, of_shared = out.user_grad[b], tile_buffers.user_grad[b - start]
        for c in range(user_grad.size):
            user_grad[c] += of_shared[c]
        if l2:
            convert_to_l2(U[inputs.users[b]], out.g[b], user_grad)


@kernel
def gradients_of_tiles(start, stop, inputs, groups, loss, out):
    """Compute scores, losses and gradients of tiles start .. stop - 1."""
    eta, d = groups.items.shape[1], inputs.U.shape[1]
    buffers = list_buffers(inputs.items.shape[1], loss.weights)
    width, height = padded(d, LANES), padded(groups.tiles.tile, ROWS)
    columns = padded(groups.tiles.tile, WIDTH)  # lists of a tile
    tile_buffers = GradientBuffers(
        np.zeros((d, columns), np.float32),
        np.empty((columns, padded(eta, ITEMS)), np.float32),
        np.empty(eta, np.int64),
        np.empty(eta, np.bool_),
        np.zeros((eta, width), np.float32),
        np.zeros((height, eta), np.float32),
        np.empty((height, width), np.float32),
    )
    for tile in range(start, stop):
        tile_gradients(tile, min(tile + 1, stop - 1), inputs, groups, loss, buffers, tile_buffers, out)


# ---------------------------------------------------------------------------------------------------------------
# Lists with their own negatives


@inline
def list_gradient(b, following, inputs, loss, buffers, out):
    """Compute scores, losses and gradients of list b; prefetch the rows of list `following`."""
    V, items, s, g, user_grad = inputs.V, inputs.items[b], out.scores[b], out.g[b], out.user_grad[b]
    u = inputs.U[inputs.users[b]]
    score_items(u, V, items, inputs.items[following], inputs.l2, s)
    store_losses(out.losses, b, losses_of_list(s, loss, buffers, g))
    user_grad[:] = f32(0)
    add_rows(V, items, g, user_grad)
    if inputs.l2:
        convert_to_l2(u, g, user_grad)


@kernel
def gradients_of_lists(start, stop, inputs, loss, out):
    """Compute scores, losses and gradients of lists start .. stop - 1."""
    buffers = list_buffers(inputs.items.shape[1], loss.weights)
    for b in range(start, stop):
        list_gradient(b, min(b + 1, stop - 1), inputs, loss, buffers, out)


# ---------------------------------------------------------------------------------------------------------------


def loss_parameters(objective: Objective, n: int, n_items: int) -> LossParameters:
    """Return an objective in the form that compiled functions take, for lists of n items."""
    eta = n - objective.rho
    phi = np.log1p(n_items / eta * np.arange(eta + 1)).astype(np.float32)
    on: dict[str, Any] = {part: getattr(objective, part) for part in LOSSES}
    return LossParameters(
        rho=objective.rho,
        weights=training_rank_weights(objective, torch.float32, torch.device("cpu")).numpy(),
        ap=objective.weight == "ap",
        tau=float(objective.tau),
        lam=f32(objective.lam),
        margin=f32(objective.margin),
        phi=phi,
        psl_scale=f32(objective.psl_scale),
        temperature=float(objective.temperature),
        **on,
    )


def list_gradients(
    U: Tensor, V: Tensor, batch: ListBatch, objective: Objective, n_items: int | None = None
) -> ListGradients:
    """Compute losses of B lists, and their gradients to the scores and to the user's row.

    A list with a score that is not finite has loss and gradient NaN.

    Parameters
    ----------
    U : float32 [M, d]
    V : float32 [N, d]
    batch : users int32 [B], items int32 [B, n], the first rho of a list being positives
    n_items : of the catalogue, N by default
    """
    name = "list_gradients"
    inputs = GradientInputs(
        view(name, "U", U, (None, None), FLOAT32),
        view(name, "V", V, (None, U.shape[1]), FLOAT32),
        view(name, "users", batch.users, (None,), INT32),
        view(name, "items", batch.items, (len(batch.users), None), INT32),
        objective.score == "l2",
    )
    check_lists(U, V, batch, objective)
    (B, n), d = batch.items.shape, U.shape[1]
    scores, g, user_grad, losses = (empty(U.dtype, *shape) for shape in ((B, n), (B, n), (B, d), (len(LOSSES), B)))
    out = GradientOutputs(scores.numpy(), losses.numpy(), g.numpy(), user_grad.numpy())
    loss = loss_parameters(objective, n, len(V) if n_items is None else n_items)
    if batch.shared is None:
        threads.split(gradients_of_lists, B, 16, inputs, loss, out)
    else:
        groups = groups_of(name, batch.shared, TILE)
        threads.split(gradients_of_tiles, groups.tiles.n_tiles, 1, inputs, groups, loss, out)
    return ListGradients._make([scores, *losses, objective.total(*losses), g, user_grad])
