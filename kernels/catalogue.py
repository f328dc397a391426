"""Lists that are the whole catalogue: a user's items are the positives, all other items the negatives.

Nothing is sampled. The scores of a block of users are one product of matrices, S = U_b V^T, and with g = dL/dS the
gradients are two more, g V and g^T U_b. So a user costs 6 N d operations, however many items the user has. The loss of
a user is

    n^-1/2 sum_i w_i log(1 + sum_j exp((s_j - s_i) / temperature))

over the user's n positives i and all negatives j, and 0 without positives. A user with a hundred times the
interactions counts ten times as much: a compromise between counting users and counting interactions equally. The weight
w_i is that of the interaction, 1 by default, times that of `top_k_weights` for softmax@k. A prior of each item, such as
its popularity, may be added to its scores. It is constant, so it has no gradient.

In a large catalogue, a random pool of items stands for all of them in one step: V then holds the items of the pool, and
the sum over the negatives is multiplied by the number of items that each of them stands for. The rank of the threshold
of softmax@k is divided by it.

This module holds what every backend shares, and the operation in torch for `reference` and `gpu`.
"""

import math
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from drm_triton.errors import InputError
from drm_triton.kernels.checks import check_catalogue
from drm_triton.kernels.precision import widened
from drm_triton.kernels.protocol import NOTHING_TO_TRAIN_ON, CatalogueBatch, CatalogueGradients, Objective, Pool
from drm_triton.names import Score

BLOCK_SCORES = 1 << 25  # scores held at once: 128 MB in float32
USERS_PER_TASK = 32  # blocks have a multiple of as many users, which the CPU kernel processes at once


def user_blocks(n_users: int, n_items: int) -> list[slice]:
    """Return blocks of users whose scores fit into BLOCK_SCORES. They depend on the sizes alone, not on the machine."""
    size = max(1, BLOCK_SCORES // max(1, n_items) // USERS_PER_TASK) * USERS_PER_TASK
    return [slice(start, min(start + size, n_users)) for start in range(0, n_users, size)]


def needs_pool(n_items: int, pool: int) -> bool:
    """Return whether a pool stands for the catalogue. To draw most of the items would take longer than to use all."""
    return n_items > 2 * pool


def gradient_of_products(products: Tensor, rows: Tensor, g: Tensor, score: Score) -> Tensor:
    """Return the gradient to rows [n, d].

    For users, g is dL/dS and the products are g V; for items, g is its transpose and the products are g U.
    """
    return 2 * (products - g.sum(1)[:, None] * rows) if score == "l2" else products


def scores_of_products(products: Tensor, u: Tensor, V: Tensor, score: Score, prior: Tensor | None) -> Tensor:
    """Turn the inner products u V^T [B, N] into scores, in place. The prior [N] of the items is added."""
    if score == "l2":
        products.mul_(2).sub_(u.square().sum(1, keepdim=True)).sub_(V.square().sum(1))
    return products if prior is None else products.add_(prior)


def threshold_rank(objective: Objective, pool: Pool | None, n_items: int) -> int:
    """Return the rank of the threshold beta of softmax@k among a user's scores, K if these are of all `n_items`.

    With a pool, the scores are those of the items that were drawn, whether the user has them or not. Each stands for
    `ratio` items of the catalogue, so beta is a quantile of a sample. The other positives of the batch are no sample.
    """
    drawn, ratio = (n_items, 1.0) if pool is None else (pool.n_negatives, pool.ratio)
    return min(max(1, round(objective.K / ratio)), drawn)


def top_k_weights(s: Tensor, objective: Objective, pool: Pool | None) -> Tensor:
    """Return the weight of each item as a positive: sigma((s_i - beta) / tau), beta the user's K-th largest score.

    An item in the user's top K counts nearly fully, one far below it hardly. The gradient treats the weights as
    constants. With a pool, beta is estimated from the items that were drawn, see `threshold_rank`.
    """
    drawn = s if pool is None else s[:, : pool.n_negatives]
    beta = drawn.topk(threshold_rank(objective, pool, s.shape[1]), 1).values[:, -1:]
    return torch.sigmoid((s - beta) / objective.tau)


def torch_softmax_of_users(
    s: Tensor, positive: Tensor, weights: Tensor, objective: Objective, pool: Pool | None
) -> tuple[Tensor, Tensor]:
    """Return the loss of each user [B] and its gradient to the scores s [B, N].

    positive : bool [B, N]
    weights : [B, N], 0 for negatives
    """
    z = s / objective.temperature
    negative = ~positive
    log_ratio = 0.0
    if pool is not None:
        negative[:, pool.n_negatives :] = False
        log_ratio = math.log(pool.ratio)
    negatives = z.masked_fill(~negative, -torch.inf)
    x = negatives.logsumexp(1, keepdim=True) + log_ratio - z
    if objective.at_k:
        weights = weights * top_k_weights(s, objective, pool)
    scale = positive.sum(1, keepdim=True).clamp(min=1).to(s.dtype).rsqrt()
    loss = scale[:, 0] * torch.where(positive, weights * torch.nn.functional.softplus(x), 0).sum(1)
    wrong = torch.where(positive, weights * torch.sigmoid(x), 0)  # fraction of the negatives in each softmax
    spread = torch.where(negative.any(1, keepdim=True), torch.softmax(negatives, 1), 0)  # not NaN without negatives
    return loss, scale / objective.temperature * (wrong.sum(1, keepdim=True) * spread - wrong)


def catalogue_gradients(
    U: Tensor, V: Tensor, batch: CatalogueBatch, objective: Objective, fixed_items: bool = False
) -> CatalogueGradients:
    """Compute losses of users over the whole catalogue, and their gradients to the users' rows and to the rows of V.

    With `fixed_items`, the gradient to the items is left out.
    A user with a score that is not finite has loss and gradient NaN, and so has every item then.
    """
    check_catalogue(U, V, batch, objective)
    u, V = widened(U[batch.users.long()]), widened(V)
    loss, user_grad, item_grad = u.new_empty(len(u)), torch.empty_like(u), torch.zeros_like(V[:0] if fixed_items else V)
    every, items = torch.arange(len(u), device=u.device), batch.indices.long()
    user_of = torch.repeat_interleave(every, batch.indptr.diff(), output_size=len(items))
    given = torch.ones_like(items, dtype=u.dtype) if batch.weights is None else batch.weights
    for block in user_blocks(len(u), len(V)):
        s = scores_of_products(u[block] @ V.T, u[block], V, objective.score, batch.prior)
        # The positives of other blocks go to a row that is cut off. To leave them out, the host would have to know
        # where this block begins and ends in `indices`, and would wait for the device.
        size = len(s)
        row = torch.where((user_of >= block.start) & (user_of < block.stop), user_of - block.start, size)
        positive = torch.zeros(size + 1, len(V), dtype=torch.bool, device=s.device)
        positive[row, items] = True
        weights = s.new_zeros(size + 1, len(V))
        weights[row, items] = given
        positive, weights = positive[:size], weights[:size]
        loss[block], g = torch_softmax_of_users(s, positive, weights, objective, batch.pool)
        user_grad[block] = gradient_of_products(g @ V, u[block], g, objective.score)
        if not fixed_items:
            item_grad += gradient_of_products(g.T @ u[block], V, g.T, objective.score)
    return CatalogueGradients(loss, user_grad, item_grad)


class CataloguePlan:
    """Which users a step trains on: each eligible user once in an epoch, in an order drawn for the epoch.

    Parameters
    ----------
    indptr : int64 [M + 1], on the CPU
    indices : int32 [nnz], on the CPU, strictly ascending within a row
        The training interactions. A user without interactions, or with all items, is left out. A batch has as many
        positives as its users have, and the host has to know this number. So batches are put together on the CPU.
    pool : number of negatives that are drawn for a step
        A catalogue of up to twice as many items is used as a whole.
    weights : float32 [nnz], optional
        Weight of each interaction in the loss.
    prior : float32 [N], optional
        Added to the score of each item.
    device : of the batches
    """

    def __init__(
        self,
        indptr: Tensor,
        indices: Tensor,
        n_items: int,
        seed: int,
        pool: int,
        weights: Tensor | None = None,
        prior: Tensor | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.indptr, self.indices, self.n_items, self.seed, self.pool = indptr, indices, n_items, seed, pool
        self.weights, self.prior, self.device = weights, prior, device or torch.device("cpu")
        self._order: tuple[int, Tensor] | None = None
        if self.n_lists == 0:
            raise InputError(NOTHING_TO_TRAIN_ON)

    @cached_property
    def eligible_users(self) -> Tensor:
        """int32: users with at least one positive and one negative, ascending."""
        degree = self.indptr.diff()
        return ((degree > 0) & (degree < self.n_items)).nonzero().squeeze(1).to(torch.int32)

    @property
    def n_lists(self) -> int:
        """Lists in an epoch: one for each eligible user."""
        return len(self.eligible_users)

    def order(self, epoch: int) -> Tensor:
        """Return the users of an epoch in their order."""
        if self._order is None or self._order[0] != epoch:
            drawn = torch.from_numpy(self._stream(epoch, 0).permutation(self.n_lists))
            self._order = epoch, self.eligible_users[drawn]
        return self._order[1]

    def batch(self, epoch: int, start: int, stop: int) -> CatalogueBatch:
        """Return lists number start .. stop - 1 of an epoch."""
        users = self.order(epoch)[start:stop].contiguous()
        batch = CatalogueBatch(users, *self.positives(users), prior=self.prior)
        if needs_pool(self.n_items, self.pool):
            batch = self._pooled(batch, self._stream(epoch, start + 1))
        return batch.to(self.device)

    def positives(self, users: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the items of users [B] by rows: indptr [B + 1], indices, and weights or None."""
        begin = self.indptr[users.long()]
        degree = self.indptr[users.long() + 1] - begin
        indptr = torch.cat([degree.new_zeros(1), degree.cumsum(0)])
        positions = torch.repeat_interleave(begin - indptr[:-1], degree)
        positions += torch.arange(len(positions))
        return indptr, self.indices[positions], None if self.weights is None else self.weights[positions]

    def _pooled(self, batch: CatalogueBatch, stream: np.random.Generator) -> CatalogueBatch:
        """Draw a pool, and let the positives refer to its items."""
        drawn = torch.from_numpy(stream.choice(self.n_items, self.pool, replace=False, shuffle=False))
        place = torch.full((self.n_items,), -1, dtype=torch.int64)  # of each item in the pool
        place[drawn] = torch.arange(self.pool)
        others = batch.indices[place[batch.indices.long()] < 0].unique().long()
        place[others] = torch.arange(self.pool, self.pool + len(others))
        items = torch.cat([drawn, others])
        # Ascending within a user, as every batch is.
        user = torch.repeat_interleave(torch.arange(len(batch.users)), batch.indptr.diff())
        columns, order = (user * len(items) + place[batch.indices.long()]).sort()
        return batch._replace(
            indices=(columns - user * len(items)).to(torch.int32),
            weights=None if batch.weights is None else batch.weights[order],
            pool=Pool(items.int(), self.pool, self.n_items / self.pool),
            prior=None if self.prior is None else self.prior[items],
        )

    def _stream(self, epoch: int, number: int) -> np.random.Generator:
        """Return random numbers: stream 0 of an epoch for the order of the users, the others for pools."""
        return np.random.Generator(np.random.Philox(key=[self.seed, epoch], counter=[0, 0, 0, number]))
