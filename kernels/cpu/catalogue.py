"""`catalogue_gradients` on the CPU: products of BLAS, and the loss of a user in one pass over the scores in the cache.

Threads take blocks of USERS_PER_TASK users (scores, loss, gradient to the users) and then blocks of ITEMS_PER_TASK
items (gradient to the items). Each block is a product on one thread, whose shape depends on the sizes alone, so that
the bits of the result do not depend on the number of threads.
"""

import math
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from drm_triton.kernels.catalogue import USERS_PER_TASK, gradient_of_products, scores_of_products, user_blocks
from drm_triton.kernels.checks import INT32, INT64, check_catalogue
from drm_triton.kernels.cpu.active import kth_largest
from drm_triton.kernels.cpu.losses import softplus_sigmoid
from drm_triton.kernels.cpu.runtime import threads
from drm_triton.kernels.cpu.runtime.arrays import FLOAT32, empty, view
from drm_triton.kernels.cpu.runtime.jit import inline, kernel
from drm_triton.kernels.cpu.runtime.simd import largest
from drm_triton.kernels.cpu.softsort import all_finite, exp
from drm_triton.kernels.protocol import CatalogueBatch, CatalogueGradients, Objective, Pool
from drm_triton.kernels.torch_threads import one_torch_thread
from drm_triton.names import Score

ITEMS_PER_TASK = 2048  # items of a product that a thread computes at once
f32 = np.float32


class CatalogueLoss(NamedTuple):
    """The loss of a user, for compiled functions."""

    temperature: float
    at_k: bool
    k: int
    tau: float
    n_negatives: int  # only the first n_negatives columns are negatives
    log_ratio: float


class UserLosses(NamedTuple):
    """The positives of a batch of users, and the losses of the users, for compiled functions."""

    indptr: NDArray[np.int64]  # [B + 1]
    indices: NDArray[np.int32]
    weights: NDArray[np.float32]  # of the positives, shaped like indices
    loss: CatalogueLoss
    losses: NDArray[np.float32]  # [B], out


class PositiveBuffers(NamedTuple):
    """Buffers for one user."""

    s: NDArray[np.float32]  # [most positives of a user]
    weights: NDArray[np.float32]  # [most positives of a user]
    heap: NDArray[np.float32]  # [min(K, N)]


@inline
def softmax_of_user(s, positives, weights, loss, buffers):
    """Return the loss of one user with scores s [N]; s becomes the gradient to them. weights: of the positives."""
    n = positives.size
    if not all_finite(s):
        s[:] = np.nan
        return f32(np.nan)
    if n == 0:
        s[:] = f32(0)
        return f32(0)
    s_positives = buffers.s[:n]
    for i in range(n):
        s_positives[i] = s[positives[i]]
    if loss.at_k:
        beta, inverse_tau = kth_largest(s, buffers.heap.size, buffers.heap), f32(1 / loss.tau)
        for i in range(n):
            buffers.weights[i] = weights[i] / (f32(1) + f32(math.exp(inverse_tau * (beta - s_positives[i]))))
        weights = buffers.weights[:n]
    for i in range(n):
        s[positives[i]] = -np.inf
    negatives = s[: loss.n_negatives]
    s[loss.n_negatives :] = f32(0)
    inverse, highest, total = f32(1 / loss.temperature), largest(negatives), f32(0)
    if highest == -np.inf:  # the user has all items of the pool
        s[:] = f32(0)
        return f32(0)
    for j in range(negatives.size):
        e = exp(inverse * (negatives[j] - highest))
        negatives[j] = e
        total += e
    scale, log_total = f32(1 / math.sqrt(n)), f32(math.log(total) + loss.log_ratio)
    value, wrong = f32(0), f32(0)
    for i in range(n):
        x = inverse * (highest - s_positives[i]) + log_total
        softplus, fraction = softplus_sigmoid(x, weights[i])  # fraction of the negatives in the softmax
        value += softplus
        s_positives[i] = -scale * inverse * fraction
        wrong += fraction
    factor = scale * inverse * wrong / total
    for j in range(negatives.size):
        negatives[j] *= factor
    for i in range(n):
        s[positives[i]] = s_positives[i]
    return scale * value


@kernel
def softmax_of_users(start, stop, S, users):
    """Replace the scores of users start .. stop - 1 by their gradients, and write the losses. S begins with `start`."""
    most = 0
    for b in range(start, stop):
        most = max(most, users.indptr[b + 1] - users.indptr[b])
    heap = np.empty(min(users.loss.k, S.shape[1]), np.float32)
    buffers = PositiveBuffers(np.empty(most, np.float32), np.empty(most, np.float32), heap)
    for b in range(start, stop):
        own = slice(users.indptr[b], users.indptr[b + 1])
        users.losses[b] = softmax_of_user(S[b - start], users.indices[own], users.weights[own], users.loss, buffers)


def catalogue_loss_parameters(objective: Objective, pool: Pool | None, n_items: int) -> CatalogueLoss:
    """Return an objective in the form that compiled functions take."""
    return CatalogueLoss(
        temperature=float(objective.temperature),
        at_k=objective.at_k,
        k=objective.K,
        tau=float(objective.tau),
        n_negatives=n_items if pool is None else pool.n_negatives,
        log_ratio=0.0 if pool is None else math.log(pool.ratio),
    )


def catalogue_gradients(
    U: Tensor, V: Tensor, batch: CatalogueBatch, objective: Objective, fixed_items: bool = False
) -> CatalogueGradients:
    """Compute losses of users over the whole catalogue, and their gradients to the users' rows and to the rows of V.

    With `fixed_items`, the gradient to the items is left out.
    A user with a score that is not finite has loss and gradient NaN, and so has every item then.

    Parameters
    ----------
    U : float32 [M, d]
    V : float32 [N, d]
    batch : users int32 [B], their items as rows of (indptr int64 [B + 1], indices int32), weights float32 of the items,
        prior float32 [N]
    """
    name = "catalogue_gradients"
    for argument, value in (("U", U), ("V", V)):
        view(name, argument, value, (None, None), FLOAT32)
    indptr = view(name, "the indptr of batch", batch.indptr, (None,), INT64)
    indices = view(name, "the indices of batch", batch.indices, (None,), INT32)
    given = torch.ones(len(indices)) if batch.weights is None else batch.weights
    weights = view(name, "the weights of batch", given, (len(indices),), FLOAT32)
    check_catalogue(U, V, batch, objective)
    u = U[batch.users.long()]
    loss, user_grad = torch.empty(len(u)), torch.empty_like(u)
    item_grad = torch.zeros_like(V[:0] if fixed_items or len(u) else V)  # replaced by that of the first block
    parameters = catalogue_loss_parameters(objective, batch.pool, len(V))
    users = UserLosses(indptr, indices, weights, parameters, loss.numpy())
    with one_torch_thread():
        for block in user_blocks(len(u), len(V)):
            S = empty(u.dtype, block.stop - block.start, len(V))
            products = user_products(u[block], V, S, users, block.start, objective.score, batch.prior)
            user_grad[block] = gradient_of_products(products, u[block], S, objective.score)
            if not fixed_items:
                of_items = gradient_of_products(item_products(u[block], V, S), V, S.T, objective.score)
                item_grad = item_grad.add_(of_items) if block.start else of_items
    return CatalogueGradients(loss, user_grad, item_grad)


def user_products(
    u: Tensor, V: Tensor, S: Tensor, users: UserLosses, first_user: int, score: Score, prior: Tensor | None
) -> Tensor:
    """Compute the losses of the block u of users that begins with user `first_user` of the batch.

    S [B, N] becomes g = dL/dS. Returns its product g V.
    """
    products = torch.empty_like(u)

    def of_users(start: int) -> None:
        rows = slice(start, min(start + USERS_PER_TASK, len(u)))
        scores_of_products(torch.mm(u[rows], V.T, out=S[rows]), u[rows], V, score, prior)
        softmax_of_users(first_user + rows.start, first_user + rows.stop, S[rows].numpy(), users)
        torch.mm(S[rows], V, out=products[rows])

    threads.run(partial(of_users, start) for start in range(0, len(u), USERS_PER_TASK))
    return products


def item_products(u: Tensor, V: Tensor, g: Tensor) -> Tensor:
    """Return g^T u for g [B, N]."""
    products = empty(V.dtype, *V.shape)

    def of_items(start: int) -> None:
        items = slice(start, min(start + ITEMS_PER_TASK, len(V)))
        torch.mm(g[:, items].T, u, out=products[items])

    threads.run(partial(of_items, start) for start in range(0, len(V), ITEMS_PER_TASK))
    return products
