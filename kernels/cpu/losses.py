"""Scores, losses and gradients of one list, in vector registers."""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from drm_triton.kernels.cpu.active import ACTIVE_MIN, gather
from drm_triton.kernels.cpu.runtime.bits import count_at_least, first_at_least
from drm_triton.kernels.cpu.runtime.jit import allocating, inline, prefetch_row
from drm_triton.kernels.cpu.runtime.simd import LANES, largest, padded, smallest
from drm_triton.kernels.cpu.softsort import (
    SortBuffers,
    active_items,
    all_finite,
    exp,
    pad,
    relaxed_topk,
    relaxed_topk_gradient,
    shortened,
    sort_buffers,
)

f32 = np.float32
NAN = f32(np.nan)


class LossParameters(NamedTuple):
    """An `Objective` for lists of n = rho + eta items, for compiled functions."""

    rho: int
    weights: NDArray[np.float32]  # w_k [K]; under `ap` to be multiplied by the positives among the first k
    ap: bool
    tau: float
    lam: np.float32
    margin: np.float32
    phi: NDArray[np.float32]  # [eta + 1], weight of the hinge for each number of violations
    hinge: bool
    drm: bool
    mse: bool
    softmax: bool
    psl: bool
    bpr: bool
    psl_scale: np.float32
    temperature: float


class ListBuffers(NamedTuple):
    """Buffers for one list of n items, padded to a multiple of LANES."""

    s: NDArray[np.float32]  # scores
    y: NDArray[np.float32]  # relevance: 1 for positives
    q: NDArray[np.float32]  # Q, then dL/dQ
    ds: NDArray[np.float32]  # gradient to the scores
    hits: NDArray[np.float32]  # 1 at the ranks of positives
    w: NDArray[np.float32]  # [K], rank weights of this list
    sorting: SortBuffers


@allocating
def list_buffers(n, weights):
    """Allocate buffers for a list of n items."""
    rows = np.empty((5, padded(n, LANES)), np.float32)
    sorting = sort_buffers(n, weights.size, rows[0])
    return ListBuffers(rows[0], rows[1], rows[2], rows[3], rows[4], weights.copy(), sorting)


@inline
def score_item(u, v, l2):
    """Return u . v, or -||u - v||^2 under l2."""
    total = f32(0)
    if l2:
        for c in range(u.size):
            total -= (u[c] - v[c]) * (u[c] - v[c])
    else:
        for c in range(u.size):
            total += u[c] * v[c]
    return total


@inline
def score_items(u, V, items, following, l2, s):
    """Compute the scores of items; prefetch the rows of `following`, the next list's items."""
    for j in range(items.size):
        prefetch_row(V, following[j])
        s[j] = score_item(u, V[items[j]], l2)


@inline
def add_four(g, v, total):
    """Add g0 v0 + g1 v1 + g2 v2 + g3 v3 to total [d], which is then read and written once for four rows."""
    (g0, g1, g2, g3), (v0, v1, v2, v3) = g, v
    for c in range(total.size):
        total[c] += (g0 * v0[c] + g1 * v1[c]) + (g2 * v2[c] + g3 * v3[c])


@inline
def add_one(g, v, total):
    """Add g v to total [d]."""
    for c in range(total.size):
        total[c] += g * v[c]


@inline
def add_rows(V, items, g, total):
    """Add sum_j g_j v_j to total [d]."""
    n = items.size
    for j in range(0, n - 3, 4):
        rows = V[items[j]], V[items[j + 1]], V[items[j + 2]], V[items[j + 3]]
        add_four((g[j], g[j + 1], g[j + 2], g[j + 3]), rows, total)
    for j in range(n & ~3, n):
        add_one(g[j], V[items[j]], total)


@inline
def convert_to_l2(u, g, user_grad):
    """Replace the user's gradient under dot, sum_j g_j v_j, by that under l2: -2 sum_j g_j (u - v_j)."""
    total = f32(0)
    for j in range(g.size):
        total += g[j]
    for c in range(u.size):
        user_grad[c] = f32(2) * (user_grad[c] - total * u[c])


@inline
def hinge_loss(positives, negatives, margin, phi, g_positives, g_negatives):
    """Return phi(violations) * max(0, margin - min positive + max negative) and add its gradient."""
    gap, weight, i, j = hinge_pair(positives, negatives, margin, phi)
    g_positives[i] -= weight
    g_negatives[j] += weight
    return weight * gap


@inline
def hinge_pair(positives, negatives, margin, phi):
    """Return the gap margin - min positive + max negative, its weight in the loss, and the positions of both.

    The weight is phi(violations), or 0 if the gap is not positive. Ties go to the lower position.
    """
    lowest, highest = smallest(positives), largest(negatives)
    gap = margin - lowest + highest
    if not gap > 0:
        return f32(0), f32(0), 0, 0
    violations = count_at_least(negatives, lowest - margin)
    i, j = 0, first_at_least(negatives, highest)
    while positives[i] != lowest:
        i += 1
    return gap, phi[violations], i, j


@inline
def average_precision_weights(s, rho, weights, hits, w):
    """w_k = weights_k times the positives among the first k of the hard ranking. `hits` is a buffer.

    Ties go to the lower position. `weights` contains the divisors, see `training_rank_weights`.
    """
    hits[:] = 0
    for i in range(rho):
        rank = 0
        for j in range(s.size):
            rank += s[j] > s[i] or (s[j] == s[i] and j < i)
        hits[rank] = 1
    found = f32(0)
    for k in range(w.size):
        found += hits[k]
        w[k] = found * weights[k]


@inline
def drm_loss(s, loss, buffers, g):
    """Return the DRM loss ||y - Q||^2 and add lam times its gradient to g."""
    n = s.size
    if n >= ACTIVE_MIN:
        square, active = active_drm_loss(s, loss, buffers)
        for i in range(active.size):
            g[active[i]] += buffers.ds[i]
        return square
    if loss.ap:
        average_precision_weights(s, loss.rho, loss.weights, buffers.hits, buffers.w)
    for j in range(n):
        buffers.s[j], buffers.y[j] = s[j], f32(j < loss.rho)
    square = drm_of_packed(n, loss, buffers)
    for j in range(n):
        g[j] += buffers.ds[j]
    return square


@inline
def active_drm_loss(s, loss, buffers):
    """Return the DRM loss of a long list and the positions of its active items.

    The first entries of `buffers.ds` are lam times their gradients; those of the other items are 0.
    """
    if loss.ap:
        average_precision_weights(s, loss.rho, loss.weights, buffers.hits, buffers.w)
    _, active = active_items(s, s.size, buffers.w, loss.tau, buffers.sorting)
    gather(s, active, buffers.s)
    for i in range(active.size):
        buffers.y[i] = f32(active[i] < loss.rho)
    return drm_of_packed(active.size, loss, buffers), active


@inline
def drm_of_packed(m, loss, buffers):
    """Return ||y - Q||^2 of the first m entries of `buffers.s`, whose relevance is in `y`; write the gradient to `ds`.

    Q is 0 for the other positives of the list.
    """
    size, w = padded(m, LANES), buffers.w
    x, y, q, ds = buffers.s[:size], buffers.y[:size], buffers.q[:size], buffers.ds[:size]
    sorting = shortened(buffers.sorting, m)
    pad(x, m)
    y[m:] = f32(0)
    relaxed_topk(x, m, w, loss.tau, sorting, q)
    square, absent, scale = f32(0), f32(loss.rho), f32(2) * loss.lam
    for j in range(size):
        residual = q[j] - y[j]
        square += residual * residual
        absent -= y[j]
        q[j] = scale * residual
    relaxed_topk_gradient(x, m, w, loss.tau, q, sorting, ds)
    return square + absent


@inline
def mse_loss(s, rho, g):
    """Return the mean squared error of the scores against 1 and 0, and add its gradient to g."""
    square = f32(0)
    for j in range(s.size):
        r = s[j] - f32(j < rho)
        square += r * r
        g[j] += f32(2 / s.size) * r
    return square * f32(1 / s.size)


@inline
def softplus_sigmoid(x, weight):
    """Return weight * log(1 + exp(x)) and its derivative, without overflow."""
    e = exp(-abs(x))
    return weight * (max(x, f32(0)) + f32(math.log1p(e))), weight * (f32(1) if x > 0 else e) / (f32(1) + e)


@inline
def softmax_loss(positives, negatives, temperature, exponentials, g_positives, g_negatives):
    """Return sum_i log(1 + sum_j exp((s_j - s_i) / temperature)) and add its gradient. `exponentials` is a buffer."""
    inverse, highest, total = f32(1 / temperature), largest(negatives), f32(0)
    for j in range(negatives.size):
        e = exp(inverse * (negatives[j] - highest))
        exponentials[j] = e
        total += e
    loss, wrong, log_total = f32(0), f32(0), f32(math.log(total))
    for i in range(positives.size):
        x = inverse * (highest - positives[i]) + log_total
        softplus, fraction = softplus_sigmoid(x, f32(1))  # fraction of the negatives in the softmax
        loss += softplus
        g_positives[i] -= inverse * fraction
        wrong += fraction
    scale = inverse * wrong / total
    for j in range(negatives.size):
        g_negatives[j] += scale * exponentials[j]
    return loss


@inline
def psl_loss(positives, negatives, scale, temperature, slopes, g_positives, g_negatives):
    """Return sum_i log(1 + sum_j r_ij^(1 / temperature)), r_ij = max(0, 1 + scale (s_j - s_i)), and add its gradient.

    `slopes` is a buffer.
    """
    inverse, highest, loss = f32(1 / temperature), largest(negatives), f32(0)
    for i in range(positives.size):
        top = f32(1) + scale * (highest - positives[i])  # the largest r_ij
        if not top > 0:
            continue
        total = f32(0)
        for j in range(negatives.size):
            r = max(f32(0), f32(1) + scale * (negatives[j] - positives[i]))
            e = exp(min(f32(0), inverse * f32(math.log(r / top)))) if r > 0 else f32(0)
            slopes[j] = e / r if r > 0 else f32(0)
            total += e
        x = inverse * f32(math.log(top)) + f32(math.log(total))
        softplus, fraction = softplus_sigmoid(x, f32(1))
        loss += softplus
        factor = scale * inverse * fraction / total
        g_positive = f32(0)
        for j in range(negatives.size):
            g_negatives[j] += factor * slopes[j]
            g_positive += factor * slopes[j]
        g_positives[i] -= g_positive
    return loss


@inline
def bpr_loss(positives, negatives, temperature, g_positives, g_negatives):
    """Return sum_i mean_j log(1 + exp((s_j - s_i) / temperature)) and add its gradient."""
    inverse, mean, loss = f32(1 / temperature), f32(1 / negatives.size), f32(0)
    for i in range(positives.size):
        g_positive, total = f32(0), f32(0)
        for j in range(negatives.size):
            x = inverse * (negatives[j] - positives[i])
            softplus, fraction = softplus_sigmoid(x, f32(1))
            total += softplus
            g_pair = mean * inverse * fraction
            g_negatives[j] += g_pair
            g_positive += g_pair
        g_positives[i] -= g_positive
        loss += mean * total
    return loss


@inline
def losses_of_list(s, loss, buffers, g):
    """Return the parts of the loss of a list with scores s [n], in the order of LOSSES; write the gradient to g [n]."""
    rho = loss.rho
    if not all_finite(s):  # one bad score makes the whole list NaN, so that it is noticed
        g[:] = NAN
        return (
            NAN if loss.hinge else f32(0),
            NAN if loss.drm else f32(0),
            NAN if loss.mse else f32(0),
            NAN if loss.softmax else f32(0),
            NAN if loss.psl else f32(0),
            NAN if loss.bpr else f32(0),
        )
    g[:] = f32(0)
    hinge = hinge_loss(s[:rho], s[rho:], loss.margin, loss.phi, g[:rho], g[rho:]) if loss.hinge else f32(0)
    drm = drm_loss(s, loss, buffers, g) if loss.drm else f32(0)
    mse = mse_loss(s, rho, g) if loss.mse else f32(0)
    softmax, psl, bpr = f32(0), f32(0), f32(0)
    if loss.softmax:
        softmax = softmax_loss(s[:rho], s[rho:], loss.temperature, buffers.q, g[:rho], g[rho:])
    if loss.psl:
        psl = psl_loss(s[:rho], s[rho:], loss.psl_scale, loss.temperature, buffers.q, g[:rho], g[rho:])
    if loss.bpr:
        bpr = bpr_loss(s[:rho], s[rho:], loss.temperature, g[:rho], g[rho:])
    return hinge, drm, mse, softmax, psl, bpr
