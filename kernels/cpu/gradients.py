"""Losses and gradients of a batch of lists, each list from its rows to its user's gradient in one go.

Per list 4 n d operations for scores and user gradient, about 8 n^2 for the pairs and 30 K n for the relaxed rows; it
reads n + 1 rows of d floats and writes 2 n + d + 4 floats. Nothing of size n x n or n x d is stored. Lists that share
their negatives (`shared`) read the rows of these once, and take scores and gradients as products of matrices.
"""

import numpy as np
from torch import Tensor

from drm_triton.kernels.checks import INT32, check_lists
from drm_triton.kernels.cpu.lists import Loss, add_rows, list_loss, score_items, scratch_for, turn_to_l2
from drm_triton.kernels.cpu.runtime import threads
from drm_triton.kernels.cpu.runtime.arrays import FLOAT32, empty, view
from drm_triton.kernels.cpu.runtime.jit import inline, kernel
from drm_triton.kernels.cpu.shared import gradients_of_groups, lists_in_tile
from drm_triton.kernels.protocol import ListBatch, ListGradients, Objective

f32 = np.float32


@inline
def list_gradient(b, following, U, V, users, items, l2, loss, scratch, scores, losses, g, user_grad):
    """Scores, losses and gradients of list b; meanwhile the rows of the following list are asked for."""
    u, du = U[users[b]], user_grad[b]
    score_items(u, V, items[b], items[following], l2, scores[b])
    losses[0, b], losses[1, b], losses[2, b] = list_loss(scores[b], loss, scratch, g[b])
    du[:] = f32(0)
    add_rows(V, items[b], g[b], du)
    if l2:
        turn_to_l2(u, g[b], du)


@kernel
def gradients_of_lists(start, stop, U, V, users, items, l2, loss, scores, losses, g, user_grad):
    """Scores [B, n], losses [3, B] and gradients of lists start .. stop - 1."""
    scratch = scratch_for(items.shape[1], loss.weights)
    for b in range(start, stop):
        following = min(b + 1, stop - 1)
        list_gradient(b, following, U, V, users, items, l2, loss, scratch, scores, losses, g, user_grad)


def loss_of(objective: Objective, n: int, n_items: int) -> Loss:
    """What the compiled functions take."""
    violations = np.arange(n - objective.rho + 1)
    phi = np.log1p(n_items / (n - objective.rho) * violations).astype(np.float32)
    return Loss(
        objective.rho, rank_weights(objective), objective.weight == "ap", float(objective.tau), f32(objective.lam),
        f32(objective.margin), phi, objective.hinge, objective.drm, objective.mse,
    )  # fmt: skip


def rank_weights(objective: Objective) -> np.ndarray:
    """w_k [K] for lists with rho positives; those of `ap` depend on the scores and are left to the kernel."""
    K, rho = objective.K, objective.rho
    discount = 1 / np.log2(np.arange(2, K + 2))
    w = {
        "uniform": np.ones(K),
        "precision": np.full(K, 1 / K),
        "recall": np.full(K, 1 / rho),
        "ndcg": discount / discount[:rho].sum(),
        "ap": np.ones(K),
    }[objective.weight]
    return w.astype(np.float32)


def list_gradients(U: Tensor, V: Tensor, batch: ListBatch, objective: Objective) -> ListGradients:
    """Losses of B lists, their gradient to the scores and to the user's row.

    A list with a score that is not finite has loss and gradient NaN.

    Parameters
    ----------
    U : float32 [M, d]; V : float32 [N, d]; users : int32 [B]; items : int32 [B, n], the first rho being positives
    """
    name, users, items = "list_gradients", batch.users, batch.items
    user_rows = view(name, "U", U, (None, None), FLOAT32)
    item_rows = view(name, "V", V, (None, U.shape[1]), FLOAT32)
    user_ids = view(name, "users", users, (None,), INT32)
    item_ids = view(name, "items", items, (len(users), None), INT32)
    check_lists(U, V, batch, objective)
    (B, n), d = items.shape, U.shape[1]
    scores, g, user_grad, losses = empty(U, B, n), empty(U, B, n), empty(U, B, d), empty(U, 3, B)
    args = (
        user_rows, item_rows, user_ids, item_ids, objective.score == "l2", loss_of(objective, n, len(V)),
        *(x.numpy() for x in (scores, losses, g, user_grad)),
    )  # fmt: skip
    share = 1 if batch.shared is None else min(lists_in_tile(batch.shared.size), B)
    if share <= 1:
        threads.split(gradients_of_lists, B, 16, *args)
    else:
        threads.split(gradients_of_groups, -(-B // share), 1, share, *args)
    hinge, drm, mse = losses
    return ListGradients(scores, hinge, drm, mse, hinge + objective.lam * drm + mse, g, user_grad)
