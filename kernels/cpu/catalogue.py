"""`catalogue_gradients` on the CPU: three products of matrices and a softmax, while the scores are in the cache.

Users are processed WIDTH at a time, one in each lane of a few vector registers, and items in chunks of CHUNK. For each
chunk, with its rows V_c,

    s = V_c u,    e = exp((s - m) / temperature),    user_grad += sum_j e_j v_j,

where m is the largest score of the user so far. If a chunk raises it, what has been summed is multiplied by the
exponential of the difference. When the loss is known, so is the gradient to the score of a negative: it is e times a
factor of the user and the chunk. In a second pass, over chunks of items, the factors multiply the users:

    item_grad_j = sum_u e_ju (factor u).

Positives have e = 0. Their gradients are added one by one.

What is computed for a user does not depend on the other users of the batch, and the sums for an item have the order of
the users, so the bits do not depend on the number of threads.

Cost of a user: 6 N d operations for the products, and an exponential for each of N items. It is written and read in the
cache of a core, and read once more by the second pass.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from drm_triton.kernels.catalogue import threshold_rank, user_blocks
from drm_triton.kernels.checks import INT32, INT64, check_catalogue
from drm_triton.kernels.cpu.columns import exp
from drm_triton.kernels.cpu.losses import NAN, add_one, score_item, softplus_sigmoid
from drm_triton.kernels.cpu.runtime import threads
from drm_triton.kernels.cpu.runtime.arrays import FLOAT32, empty, view
from drm_triton.kernels.cpu.runtime.jit import allocating, inline, kernel
from drm_triton.kernels.cpu.runtime.products import ITEMS, multiply, multiply_add, score_columns, transpose
from drm_triton.kernels.cpu.runtime.rows import any_above, insert_row, row_operation
from drm_triton.kernels.cpu.runtime.simd import LANES, ROWS, WIDTH, padded
from drm_triton.kernels.protocol import CatalogueBatch, CatalogueGradients, Objective, Pool

CHUNK = 512  # items whose scores for WIDTH users stay in the second-level cache, beside their rows
f32 = np.float32


class CatalogueLoss(NamedTuple):
    """The loss of a user, for compiled functions."""

    temperature: float
    at_k: bool
    rank: int  # of the threshold beta, among the scores of the first n_negatives items
    tau: float
    n_negatives: int  # only the first n_negatives items are negatives
    log_ratio: float
    l2: bool  # score is l2, not dot


class CatalogueInputs(NamedTuple):
    """Users, their positives, and items."""

    U: NDArray[np.float32]  # [M, d]
    V: NDArray[np.float32]  # [N, d]
    users: NDArray[np.int32]  # [B]
    indptr: NDArray[np.int64]  # [B + 1]
    indices: NDArray[np.int32]
    weights: NDArray[np.float32]  # of the positives, shaped like indices
    prior: NDArray[np.float32]  # [N], or [0] if there is none


class CatalogueOutputs(NamedTuple):
    """Results for the users, and what the second pass needs of them. A block has WIDTH users."""

    losses: NDArray[np.float32]  # [B]
    user_grad: NDArray[np.float32]  # [B, d]
    e: NDArray[np.float32]  # [blocks, padded N, WIDTH] exponentials; 0 for positives
    factors: NDArray[np.float32]  # [blocks, chunks, WIDTH], e times this is the gradient to the score of a negative
    g: NDArray[np.float32]  # gradients to the scores of the positives, shaped like indices
    first: NDArray[np.int64]  # [blocks, chunks + 1, WIDTH], where the positives in a chunk begin in `indices`


class BlockBuffers(NamedTuple):
    """Buffers for WIDTH users."""

    users: NDArray[np.float32]  # [WIDTH, padded d]
    user_columns: NDArray[np.float32]  # [d, WIDTH]
    sums: NDArray[np.float32]  # [WIDTH, padded d], sum of e v
    rows: NDArray[np.float32]  # [CHUNK, padded d] rows of V; empty if d needs no padding
    every: NDArray[np.int32]  # [CHUNK], 0, 1, 2, ...
    product: NDArray[np.float32]  # [WIDTH, padded d], what one chunk adds to `sums`
    state: NDArray[np.float32]  # [3, WIDTH]: the largest score so far, the sum of e, and that of |s| / 2^32
    before: NDArray[np.float32]  # [WIDTH], the largest score before a chunk
    top: NDArray[np.float32]  # [rank, WIDTH], the largest scores so far of the items that beta is a score of
    s: NDArray[np.float32]  # [most positives of a user], their scores


@allocating
def block_buffers(d, most, rank):
    """Allocate the buffers for users who have at most `most` positives."""
    width = padded(d, LANES)
    return BlockBuffers(
        np.zeros((WIDTH, width), np.float32),
        np.empty((d, WIDTH), np.float32),
        np.empty((WIDTH, width), np.float32),
        np.zeros((0 if d == width else CHUNK, width), np.float32),
        np.arange(CHUNK).astype(np.int32),
        np.empty((WIDTH, width), np.float32),
        np.empty((3, WIDTH), np.float32),
        np.empty(WIDTH, np.float32),
        np.empty((rank, WIDTH), np.float32),
        np.empty(most, np.float32),
    )


# ---------------------------------------------------------------------------------------------------------------
# Users


@row_operation("s", "state", "n")
def _add_absolute(at):
    """Add the sum of |s| / 2^32 over n rows to row 2 of `state`: it is finite if all scores are."""
    scale = at.constant(2.0**-32)

    def step(i, carried):
        return [at.fused(at.absolute(at.read("s", i)), scale, carried[0])]

    at.write(at.loop(at["n"], 1, [at.read("state", at.i64(2))], step)[0], "state", at.i64(2))


@row_operation("s", "state", "n")
def _raise_largest(at):
    """Row 0 of `state` becomes the largest of itself and n rows of scores."""

    def step(i, carried):
        score = at.read("s", i)
        return [at.builder.select(at.builder.fcmp_ordered(">", score, carried[0]), score, carried[0])]

    at.write(at.loop(at["n"], 1, [at.read("state", at.i64(0))], step)[0], "state", at.i64(0))


@row_operation("s", "state", "n", "scale")
def _exponentials(at):
    """Replace n rows of scores by exp(scale (s - m)), m being row 0 of `state`, and add their sum to row 1.

    The sum of these rows alone comes first: a sum that runs through all items would round more.
    """
    largest, scale = at.read("state", at.i64(0)), at.splat(at["scale"])

    def step(i, carried):
        e = exp(at, at.builder.fmul(scale, at.builder.fsub(at.read("s", i), largest)))
        at.write(e, "s", i)
        return [at.builder.fadd(carried[0], e)]

    total = at.loop(at["n"], 1, [at.zero], step)[0]
    at.write(at.builder.fadd(at.read("state", at.i64(1)), total), "state", at.i64(1))


@inline
def add_to_users(s, n, V, buffers):
    """Add the product of exponentials, n rows of s, and as many rows of V to the sums of the users."""
    rows, sums, product = buffers.rows, buffers.sums, buffers.product
    if rows.shape[0] == 0:
        multiply(s.reshape(-1), 1, WIDTH, V, n, product)
    else:
        for j in range(n):
            for c in range(V.shape[1]):
                rows[j, c] = V[j, c]
        multiply(s.reshape(-1), 1, WIDTH, rows, n, product)
    for t in range(WIDTH):
        for c in range(sums.shape[1]):
            sums[t, c] += product[t, c]


@inline
def begin_block(begin, lists, inputs, first, buffers):
    """Copy the users of a block, the first of which is `begin`."""
    buffers.sums[:] = f32(0)
    buffers.state[0], buffers.state[1], buffers.state[2] = f32(-np.inf), f32(0), f32(0)
    buffers.top[:] = f32(-np.inf)
    for t in range(WIDTH):
        b = begin + min(t, lists - 1)  # lanes without a user repeat the last one
        u, user = inputs.U[inputs.users[b]], buffers.users[t]
        for c in range(u.size):
            user[c] = u[c]
        first[0, t] = inputs.indptr[b]
    transpose(buffers.users, buffers.user_columns)


@inline
def leave_out_positives(begin, lists, start, stop, s, inputs, first, following):
    """Give the positives among items start .. stop - 1 the score -inf, and write where the others begin."""
    for t in range(WIDTH):
        b, place = begin + min(t, lists - 1), first[t]
        while place < inputs.indptr[b + 1] and inputs.indices[place] < stop:
            s[inputs.indices[place] - start, t] = -np.inf
            place += 1
        following[t] = place


@inline
def raise_largest(s, n, scale, buffers):
    """Include n rows in the largest score of each user, and adapt what was summed with the former one."""
    state, before = buffers.state, buffers.before
    for t in range(WIDTH):
        before[t] = state[0, t]
    _raise_largest(s, state, n)
    for t in range(WIDTH):
        if state[0, t] > before[t] and state[1, t] > 0:
            decline = f32(math.exp(scale * (before[t] - state[0, t])))
            state[1, t] *= decline
            for c in range(buffers.sums.shape[1]):
                buffers.sums[t, c] *= decline


@inline
def chunk_of_users(begin, lists, start, stop, s, first, following, inputs, loss, buffers):
    """Replace s, rows for items start .. stop - 1, by exponentials, and add up what belongs to the users of a block."""
    n, scale = stop - start, f32(1 / loss.temperature)
    items, V = buffers.every[:n], inputs.V[start:stop]
    score_columns(V, items, items, buffers.user_columns, loss.l2, s.reshape(-1), WIDTH)
    if inputs.prior.size > 0:
        for j in range(n):
            for t in range(WIDTH):
                s[j, t] += inputs.prior[start + j]
    _add_absolute(s, buffers.state, n)
    n_negatives = max(0, min(n, loss.n_negatives - start))
    if loss.at_k:
        last = buffers.top.shape[0] - 1
        for j in range(n_negatives):
            if any_above(s, j, buffers.top, last):
                insert_row(s, buffers.top, last + 1, j)
    leave_out_positives(begin, lists, start, stop, s, inputs, first, following)
    s[n_negatives:] = f32(0)
    if n_negatives == 0:
        return
    raise_largest(s, n_negatives, scale, buffers)
    _exponentials(s, buffers.state, n_negatives, scale)
    add_to_users(s, n_negatives, V, buffers)


@inline
def loss_of_user(b, t, inputs, loss, buffers, g, user_grad):
    """Return the loss of user b, number t of a block, and a factor of the gradients of the negatives.

    Writes the gradients of the positives, `g`, and of the user.
    """
    own = slice(inputs.indptr[b], inputs.indptr[b + 1])
    positives, weights, u = inputs.indices[own], inputs.weights[own], buffers.users[t, : user_grad.size]
    n, highest, total, s = positives.size, buffers.state[0, t], buffers.state[1, t], buffers.s
    user_grad[:] = g[:] = f32(0)
    if not buffers.state[2, t] < np.inf:
        user_grad[:] = g[:] = NAN
        return NAN, NAN
    if n == 0 or highest == -np.inf:  # no positives, or the user has all items of the pool
        return f32(0), f32(0)
    inverse, log_total = f32(1 / loss.temperature), f32(math.log(total) + loss.log_ratio)
    scale, value, wrong = f32(1 / math.sqrt(n)), 0.0, 0.0
    beta, inverse_tau = buffers.top[buffers.top.shape[0] - 1, t], f32(1 / loss.tau)
    for i in range(n):
        s[i] = score_item(u, inputs.V[positives[i]], loss.l2)
        if inputs.prior.size > 0:
            s[i] += inputs.prior[positives[i]]
        weight = weights[i]
        if loss.at_k:
            weight /= f32(1) + f32(math.exp(inverse_tau * (beta - s[i])))
        softplus, fraction = softplus_sigmoid(inverse * (highest - s[i]) + log_total, weight)
        value += softplus  # fraction: of the negatives in the softmax
        wrong += fraction
        g[i] = -scale * inverse * fraction
    # The gradients to the scores of a user sum to 0, so that under l2, no multiple of the user has to be subtracted.
    factor, two = f32(scale * inverse * wrong / total), f32(2) if loss.l2 else f32(1)
    for c in range(user_grad.size):
        user_grad[c] = two * factor * buffers.sums[t, c]
    for i in range(n):
        add_one(two * g[i], inputs.V[positives[i]], user_grad)
    return f32(scale * value), factor


@inline
def block_of_users(block, inputs, loss, buffers, out):
    """Compute losses, users' gradients and exponentials of a block of users."""
    begin, n_items = block * WIDTH, inputs.V.shape[0]
    lists, e, first, factors = min(WIDTH, inputs.users.size - begin), out.e[block], out.first[block], out.factors[block]
    begin_block(begin, lists, inputs, first, buffers)
    for chunk in range(factors.shape[0]):
        start = chunk * CHUNK
        stop, end = min(start + CHUNK, n_items), min(start + CHUNK, e.shape[0])
        s = e[start:end]
        chunk_of_users(begin, lists, start, stop, s, first[chunk], first[chunk + 1], inputs, loss, buffers)
        for t in range(WIDTH):
            factors[chunk, t] = buffers.state[0, t]
    for t in range(WIDTH):
        if t >= lists:
            factors[:, t] = f32(0)
            continue
        b = begin + t
        g = out.g[inputs.indptr[b] : inputs.indptr[b + 1]]
        out.losses[b], factor = loss_of_user(b, t, inputs, loss, buffers, g, out.user_grad[b])
        for chunk in range(factors.shape[0]):
            largest, highest = factors[chunk, t], buffers.state[0, t]
            if factor != 0:
                factors[chunk, t] = factor * f32(math.exp((largest - highest) / loss.temperature))
            else:
                factors[chunk, t] = f32(0)


@kernel
def losses_of_users(start, stop, inputs, loss, out):
    """Compute losses, users' gradients and exponentials of blocks start .. stop - 1."""
    most = 0
    for b in range(inputs.users.size):
        most = max(most, inputs.indptr[b + 1] - inputs.indptr[b])
    buffers = block_buffers(inputs.V.shape[1], most, loss.rank if loss.at_k else 1)
    for block in range(start, stop):
        block_of_users(block, inputs, loss, buffers, out)


# ---------------------------------------------------------------------------------------------------------------
# Items


class ItemBuffers(NamedTuple):
    """Buffers for a chunk of items."""

    users: NDArray[np.float32]  # [WIDTH, padded d], times their factors
    sums: NDArray[np.float32]  # [CHUNK, padded d]
    totals: NDArray[np.float32]  # [CHUNK], sums of the gradients to the scores, under l2


@inline
def scaled_users(block, lists, chunk, inputs, out, users):
    """Fill `users` with the users of a block, each times its factor in a chunk."""
    for t in range(lists):
        u, factor = inputs.U[inputs.users[block * WIDTH + t]], out.factors[block, chunk, t]
        for c in range(u.size):
            users[t, c] = factor * u[c]


@inline
def add_positives(block, lists, chunk, inputs, out, buffers):
    """Add the gradients of the positives of a block that are in a chunk."""
    for t in range(lists):
        b = block * WIDTH + t
        u = inputs.U[inputs.users[b]]
        for place in range(out.first[block, chunk, t], out.first[block, chunk + 1, t]):
            j = inputs.indices[place] - chunk * CHUNK
            add_one(out.g[place], u, buffers.sums[j, : u.size])
            buffers.totals[j] += out.g[place]


@inline
def chunk_of_items(chunk, inputs, l2, out, buffers, item_grad):
    """Compute the gradients of the items of a chunk."""
    start, stop = chunk * CHUNK, min((chunk + 1) * CHUNK, inputs.V.shape[0])
    sums, n_users = buffers.sums[: padded(stop - start, ROWS)], inputs.users.size
    sums[:] = f32(0)
    buffers.totals[:] = f32(0)
    for block in range(out.e.shape[0]):
        lists, e = min(WIDTH, n_users - block * WIDTH), out.e[block, start:]
        scaled_users(block, lists, chunk, inputs, out, buffers.users)
        multiply_add(e.reshape(-1), WIDTH, 1, buffers.users, lists, sums)
        if l2:
            for j in range(stop - start):
                for t in range(lists):
                    buffers.totals[j] += out.factors[block, chunk, t] * e[j, t]
        add_positives(block, lists, chunk, inputs, out, buffers)
    for j in range(stop - start):
        total, gradient, v = buffers.totals[j], item_grad[start + j], inputs.V[start + j]
        for c in range(v.size):
            gradient[c] = f32(2) * (sums[j, c] - total * v[c]) if l2 else sums[j, c]


@kernel
def gradients_of_items(start, stop, inputs, l2, out, item_grad):
    """Compute the gradients of the items of chunks start .. stop - 1."""
    width = padded(inputs.V.shape[1], LANES)
    buffers = ItemBuffers(
        np.zeros((WIDTH, width), np.float32), np.empty((CHUNK, width), np.float32), np.empty(CHUNK, np.float32)
    )
    for chunk in range(start, stop):
        chunk_of_items(chunk, inputs, l2, out, buffers, item_grad)


# ---------------------------------------------------------------------------------------------------------------


def catalogue_loss_parameters(objective: Objective, pool: Pool | None, n_items: int) -> CatalogueLoss:
    """Return an objective in the form that compiled functions take."""
    return CatalogueLoss(
        temperature=float(objective.temperature),
        at_k=objective.at_k,
        rank=threshold_rank(objective, pool, n_items),
        tau=float(objective.tau),
        n_negatives=n_items if pool is None else pool.n_negatives,
        log_ratio=0.0 if pool is None else math.log(pool.ratio),
        l2=objective.score == "l2",
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
    given = torch.ones(len(batch.indices), dtype=torch.float32) if batch.weights is None else batch.weights
    inputs = CatalogueInputs(
        view(name, "U", U, (None, None), FLOAT32),
        view(name, "V", V, (None, None), FLOAT32),
        view(name, "users", batch.users, (None,), INT32),
        view(name, "the indptr of batch", batch.indptr, (None,), INT64),
        view(name, "the indices of batch", batch.indices, (None,), INT32),
        view(name, "the weights of batch", given, (len(batch.indices),), FLOAT32),
        view(name, "the prior of batch", V[:0, 0] if batch.prior is None else batch.prior, (None,), FLOAT32),
    )
    check_catalogue(U, V, batch, objective)
    (N, d), B = V.shape, len(batch.users)
    loss, user_grad = V.new_empty(B), V.new_empty(B, d)
    item_grad = torch.zeros_like(V) if B == 0 and not fixed_items else torch.empty_like(V[:0] if fixed_items else V)
    g, parameters = np.empty(len(inputs.indices), f32), catalogue_loss_parameters(objective, batch.pool, N)
    for block in user_blocks(B, N):
        of_block = inputs._replace(users=inputs.users[block], indptr=inputs.indptr[block.start : block.stop + 1])
        blocks, chunks = -(-len(of_block.users) // WIDTH), -(-N // CHUNK)
        out = CatalogueOutputs(
            loss.numpy()[block],
            user_grad.numpy()[block],
            empty(torch.float32, blocks, padded_items(N), WIDTH).numpy(),
            np.empty((blocks, chunks, WIDTH), f32),
            g,
            np.empty((blocks, chunks + 1, WIDTH), np.int64),
        )
        threads.split(losses_of_users, blocks, 1, of_block, parameters, out)
        if not fixed_items:
            of_items = item_grad if block.start == 0 else torch.empty_like(V)
            threads.split(gradients_of_items, chunks, 1, of_block, parameters.l2, out, of_items.numpy())
            if block.start > 0:
                item_grad += of_items
    return CatalogueGradients(loss, user_grad, item_grad)


def padded_items(n: int) -> int:
    """Return the rows that the scores of n items take."""
    most = max(ITEMS, ROWS)
    return -(-n // most) * most
