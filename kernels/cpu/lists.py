"""What one list needs: its scores, losses, and gradients."""

from typing import NamedTuple

import numpy as np

from drm_triton.kernels.cpu.runtime.jit import allocating, inline, prefetch_row
from drm_triton.kernels.cpu.runtime.simd import LANES, largest, least, padded
from drm_triton.kernels.cpu.softsort import KEPT, all_finite, pad, relaxed_topk, relaxed_topk_gradient

f32 = np.float32
NAN = f32(np.nan)


class Loss(NamedTuple):
    """An `Objective` for lists of n items, as the compiled functions take it."""

    rho: int
    weights: np.ndarray  # w_k [K]; those of `ap` depend on the scores and are worked out for each list
    ap: bool
    tau: float
    lam: np.float32
    margin: np.float32
    phi: np.ndarray  # [eta + 1], the hinge's weight for each number of violations
    hinge: bool
    drm: bool
    mse: bool


class Scratch(NamedTuple):
    """Room for one list, padded to whole vectors."""

    s: np.ndarray
    R: np.ndarray
    G: np.ndarray
    q: np.ndarray
    ds: np.ndarray
    hits: np.ndarray
    rows: np.ndarray
    totals: np.ndarray
    w: np.ndarray
    order: np.ndarray


@allocating
def scratch_for(n, weights):
    """Room for a list of n items."""
    size = padded(n, LANES)
    totals = np.empty(min(KEPT, weights.size), np.float32)
    x = np.empty((6, size), np.float32)
    rows = np.empty((totals.size + 1) * size, np.float32)
    return Scratch(x[0], x[1], x[2], x[3], x[4], x[5], rows, totals, weights.copy(), np.empty(n, np.int64))


@inline
def score_items(u, V, items, following, l2, s):
    """s_j = u.v_j, or -||u - v_j||^2; meanwhile the rows of the following list are asked for."""
    for j in range(items.size):
        prefetch_row(V, following[j])
        v = V[items[j]]
        total = f32(0)
        if l2:
            for c in range(u.size):
                total -= (u[c] - v[c]) * (u[c] - v[c])
        else:
            for c in range(u.size):
                total += u[c] * v[c]
        s[j] = total


@inline
def add_rows(V, items, g, total):
    """Add sum_j g_j v_j to total."""
    n, d = items.size, total.size
    for j in range(0, n - 3, 4):
        v0, v1, v2, v3 = V[items[j]], V[items[j + 1]], V[items[j + 2]], V[items[j + 3]]
        g0, g1, g2, g3 = g[j], g[j + 1], g[j + 2], g[j + 3]
        for c in range(d):
            total[c] += (g0 * v0[c] + g1 * v1[c]) + (g2 * v2[c] + g3 * v3[c])
    for j in range(n & ~3, n):
        v0, g0 = V[items[j]], g[j]
        for c in range(d):
            total[c] += g0 * v0[c]


@inline
def turn_to_l2(u, g, du):
    """Make sum_j g_j v_j, the user's gradient under dot, that under l2: -2 sum_j g_j (u - v_j)."""
    total = f32(0)
    for j in range(g.size):
        total += g[j]
    for c in range(u.size):
        du[c] = f32(2) * (du[c] - total * u[c])


@inline
def hinge_loss(positives, negatives, margin, phi, g_positives, g_negatives):
    """Return the hinge loss and add its gradient."""
    lowest, highest = least(positives), largest(negatives)
    gap = margin - lowest + highest
    if not gap > 0:
        return f32(0)
    violations = 0
    for t in range(negatives.size):
        violations += margin - lowest + negatives[t] >= 0
    i, j = 0, 0  # the first of each
    while positives[i] != lowest:
        i += 1
    while negatives[j] != highest:
        j += 1
    g_positives[i] -= phi[violations]
    g_negatives[j] += phi[violations]
    return phi[violations] * gap


@inline
def average_precision_weights(s, rho, hits, w):
    """w_k = P@k / min(K, rho) of the hard ranking, ties to the lower position; hits is scratch [n]."""
    hits[:] = 0
    for i in range(rho):
        rank = 0
        for j in range(s.size):
            rank += s[j] > s[i] or (s[j] == s[i] and j < i)
        hits[rank] = 1
    found = 0
    for k in range(w.size):
        found += np.int64(hits[k])
        w[k] = found / ((k + 1) * min(w.size, rho))


@inline
def drm_loss(s, loss, scratch, g):
    """Return the DRM loss and add lam times its gradient to g."""
    n = s.size
    x, R, q, ds, w = scratch.s, scratch.R, scratch.q, scratch.ds, scratch.w
    for j in range(n):
        x[j] = s[j]
    pad(x, n)
    if loss.ap:
        average_precision_weights(s, loss.rho, scratch.hits, w)
    relaxed_topk(x, n, R, scratch.order, w, loss.tau, scratch.rows, scratch.totals, q)
    for j in range(loss.rho):
        q[j] -= f32(1)  # Q - y
    square, scale = f32(0), f32(2) * loss.lam
    for j in range(q.size):
        square += q[j] * q[j]
        q[j] *= scale
    relaxed_topk_gradient(x, n, R, scratch.order, w, loss.tau, q, scratch.rows, scratch.totals, scratch.G, ds)
    for j in range(n):
        g[j] += ds[j]
    return square


@inline
def mse_loss(s, rho, g):
    """Return the mean squared error and add its gradient to g."""
    square = f32(0)
    for j in range(s.size):
        r = s[j] - f32(j < rho)
        square += r * r
        g[j] += f32(2 / s.size) * r
    return square * f32(1 / s.size)


@inline
def list_loss(s, loss, scratch, g):
    """Hinge, DRM and MSE of a list with scores s, and the gradient of the whole to them."""
    rho = loss.rho
    if not all_finite(s):  # one bad score spoils the whole list, visibly
        g[:] = NAN
        return NAN if loss.hinge else f32(0), NAN if loss.drm else f32(0), NAN if loss.mse else f32(0)
    g[:] = f32(0)
    hinge = hinge_loss(s[:rho], s[rho:], loss.margin, loss.phi, g[:rho], g[rho:]) if loss.hinge else f32(0)
    drm = drm_loss(s, loss, scratch, g) if loss.drm else f32(0)
    mse = mse_loss(s, rho, g) if loss.mse else f32(0)
    return hinge, drm, mse
