"""CDAE (Wu, DuBois, Zheng and Ester, WSDM 2016) on the CPU: the hidden layer, and training with sampled outputs.

The hidden layer of a user with items P_u is

    h = sigmoid(delta sum_{i in x} W_i + P_u + b),     scores  y_i = V_i . h + c_i

where x keeps each item with probability 1 - q in training, delta = 1 / (1 - q), and is P_u with delta = 1 otherwise. A
visit of a user draws x and ratio * n_u other items, with replacement, as negatives. Its loss is the sum of
log(1 + exp(-y_i)) over P_u and of log(1 + exp(y_j)) over the negatives. A row that takes part in it then takes one step
of Adagrad, along its whole gradient.

Users are visited one after the other, as each needs the rows that the one before has changed. A visit costs
(1 + ratio) n_u rows, each read and written once.
"""

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from drm_triton.data.csr import CSR
from drm_triton.kernels.cpu.runtime import threads
from drm_triton.kernels.cpu.runtime.jit import inline, kernel
from drm_triton.kernels.cpu.sampling import draw_negatives, philox
from drm_triton.kernels.streams import POSITIVES

u64, f64 = np.uint64, np.float64
Array = NDArray[np.floating[Any]]
USERS_GRAIN = 64  # users of a task, at least


class Tables(NamedTuple):
    """The parameters, or Adagrad's sums of squared gradients. W and V are the same array if they are tied."""

    W: Array  # [N, d] input vectors
    V: Array  # [N, d] output vectors
    P: Array  # [M, d] user nodes
    b: Array  # [d]
    c: Array  # [N] item biases


class Visits(NamedTuple):
    """How users are visited in an epoch. The names are those that `sampling.draw_negatives` reads."""

    seed: np.uint64
    epoch4: np.uint64
    indptr: NDArray[np.int64]
    indices: NDArray[np.int32]
    n_items: int
    ratio: int
    threshold: np.uint64  # an item is dropped if its random word is below: q * 2^32
    scale: float  # delta
    tied: bool
    lr: float
    ridge: float
    beta: float


class VisitBuffers(NamedTuple):
    """Buffers for one visit."""

    rank: NDArray[np.int64]  # [most draws + 3]
    low: NDArray[np.int64]  # [most draws + 3]
    draws: NDArray[np.int32]  # [most draws] negatives
    outputs: NDArray[np.int32]  # [most draws + most items] items of the loss, each once, the user's first
    kept: NDArray[np.bool_]  # [most items]
    g: Array  # [most outputs] derivative of the loss to the score
    times: NDArray[np.int32]  # [N] how often an item was drawn; 0 between visits
    vectors: Array  # [3, d] h, dh, dz


@inline
def hidden_layer(items, kept, W, scale, node, b, h):
    """Write the hidden layer for the items that are kept."""
    h[:] = h.dtype.type(0)
    for j in range(items.size):
        if kept[j]:
            w = W[items[j]]
            for k in range(h.size):
                h[k] += w[k]
    for k in range(h.size):
        z = scale * h[k] + node[k] + b[k]
        h[k] = f64(1) / (f64(1) + math.exp(-f64(z)))


@kernel
def hidden_layers(start, stop, indptr, indices, W, P, b, H):
    """Write the hidden layer of users start .. stop - 1, from all of their items. P may have no rows: it is then 0."""
    most = 0
    for user in range(start, stop):
        most = max(most, indptr[user + 1] - indptr[user])
    kept, none = np.ones(most, np.bool_), np.zeros(b.size, b.dtype)
    for user in range(start, stop):
        items = indices[indptr[user] : indptr[user + 1]]
        hidden_layer(items, kept, W, W.dtype.type(1), P[user] if P.shape[0] > 0 else none, b, H[user])


def encode(items: CSR, W: Array, P: Array, b: Array) -> Array:
    """Return the hidden layer of each user from all items: [users, d].

    A row depends only on the user's items and node, to the bit. New users have no node: P is then [0, d].
    """
    H = np.empty((items.shape[0], len(b)), W.dtype)
    threads.split(hidden_layers, len(H), USERS_GRAIN, items.indptr, items.indices, W, P, b, H)
    return H


@inline
def draw_visit(user, row, visits, buffers):
    """Draw what is kept and the negatives; return the number of distinct outputs."""
    kept, outputs, times = buffers.kept, buffers.outputs, buffers.times
    for j in range(0, row.size, 4):
        words = philox(visits.seed, visits.epoch4 + u64(POSITIVES), u64(user), u64(j // 4))
        for i in range(min(4, row.size - j)):
            kept[j + i] = words[i] >= visits.threshold
    for j in range(row.size):
        outputs[j] = row[j]
    count = row.size
    draws = buffers.draws[: visits.ratio * row.size if row.size < visits.n_items else 0]
    draw_negatives(visits, u64(user), row, buffers, draws)
    for j in range(draws.size):
        if times[draws[j]] == 0:
            outputs[count] = draws[j]
            count += 1
        times[draws[j]] += 1
    return count


@inline
def adagrad_row(row, state, g, h, weight, dz, lr, ridge, beta):
    """Take one step of Adagrad along g h + weight dz + ridge row."""
    for k in range(row.size):
        gradient = g * h[k] + weight * dz[k] + ridge * row[k]
        state[k] += gradient * gradient
        row[k] -= lr * gradient / (beta + np.sqrt(state[k]))


@inline
def visit_user(user, row, visits, tables, states, buffers):
    """Take the step of one visit; return its loss."""
    W, V, P, b, c = tables
    h, dh, dz = buffers.vectors[0], buffers.vectors[1], buffers.vectors[2]
    real = h.dtype.type
    lr, ridge, beta, scale = real(visits.lr), real(visits.ridge), real(visits.beta), real(visits.scale)
    count, outputs, g = draw_visit(user, row, visits, buffers), buffers.outputs, buffers.g
    hidden_layer(row, buffers.kept, W, scale, P[user], b, h)
    loss = f64(0)
    dh[:] = real(0)
    for j in range(count):
        v, y = V[outputs[j]], c[outputs[j]]
        for k in range(h.size):
            y += v[k] * h[k]
        # A positive has the loss log(1 + exp(x)) of x = -y, a negative that was drawn t times t times that of x = y.
        sign, weight = (f64(-1), f64(1)) if j < row.size else (f64(1), f64(buffers.times[outputs[j]]))
        x = sign * f64(y)
        e = math.exp(-abs(x))
        loss += weight * (max(x, f64(0)) + math.log1p(e))
        g[j] = sign * weight * (f64(1) if x > 0 else e) / (f64(1) + e)
        for k in range(h.size):
            dh[k] += g[j] * v[k]
    for k in range(h.size):
        dz[k] = dh[k] * h[k] * (real(1) - h[k])
    for j in range(count):
        i = outputs[j]
        kept = j < row.size and buffers.kept[j]
        adagrad_row(V[i], states.V[i], g[j], h, scale if visits.tied and kept else real(0), dz, lr, ridge, beta)
        if kept and not visits.tied:
            adagrad_row(W[i], states.W[i], real(0), h, scale, dz, lr, ridge, beta)
        gradient = g[j] + ridge * c[i]
        states.c[i] += gradient * gradient
        c[i] -= lr * gradient / (beta + np.sqrt(states.c[i]))
        buffers.times[i] = 0
    adagrad_row(P[user], states.P[user], real(0), h, real(1), dz, lr, ridge, beta)
    adagrad_row(b, states.b, real(0), h, real(1), dz, lr, ridge, beta)
    return loss


@kernel
def visit_users(start, stop, visits, tables, states, times):
    """Visit users start .. stop - 1 in order; return the sum of their losses. A user without items is left out."""
    most = 0
    for user in range(start, stop):
        most = max(most, visits.indptr[user + 1] - visits.indptr[user])
    draws, b = most * visits.ratio, tables.b
    buffers = VisitBuffers(
        np.empty(draws + 3, np.int64),
        np.empty(draws + 3, np.int64),
        np.empty(draws, np.int32),
        np.empty(draws + most, np.int32),
        np.empty(most, np.bool_),
        np.empty(draws + most, b.dtype),
        times,
        np.empty((3, b.size), b.dtype),
    )
    loss = f64(0)
    for user in range(start, stop):
        row = visits.indices[visits.indptr[user] : visits.indptr[user + 1]]
        if row.size > 0:
            loss += visit_user(user, row, visits, tables, states, buffers)
    return loss
