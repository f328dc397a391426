"""Scores, losses and gradients of a batch of lists, each list from its rows to its user's gradient in one go.

Per list 4 n d operations for scores and user gradient, about 8 n^2 for the pairs and 30 K n for the relaxed rows; it
reads n + 1 rows of d floats and writes 2 n + d + 4 floats. Nothing of size n x n or n x d is stored.
"""

import math

import numpy as np
from torch import Tensor

from drm_triton.kernels.cpu import threads
from drm_triton.kernels.cpu.arrays import FLOAT32, empty, view
from drm_triton.kernels.cpu.jit import inline, kernel, prefetch_row
from drm_triton.kernels.cpu.softsort import KEPT, all_finite, relaxed_topk, relaxed_topk_gradient
from drm_triton.kernels.interface import INT32, ListGradients, Objective, check_lists

f32 = np.float32
NAN = f32(np.nan)


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
def user_gradient(u, V, items, g, l2, du):
    """Gradient du = sum_j g_j v_j, or -2 sum_j g_j (u - v_j)."""
    n, d = items.size, u.size
    du[:] = f32(0)
    for j in range(0, n - 3, 4):
        v0, v1, v2, v3 = V[items[j]], V[items[j + 1]], V[items[j + 2]], V[items[j + 3]]
        g0, g1, g2, g3 = g[j], g[j + 1], g[j + 2], g[j + 3]
        for c in range(d):
            du[c] += (g0 * v0[c] + g1 * v1[c]) + (g2 * v2[c] + g3 * v3[c])
    for j in range(n & ~3, n):
        v0, g0 = V[items[j]], g[j]
        for c in range(d):
            du[c] += g0 * v0[c]
    if l2:
        total = f32(0)
        for j in range(n):
            total += g[j]
        for c in range(d):
            du[c] = f32(2) * (du[c] - total * u[c])


@inline
def hinge_loss(s, rho, margin, n_items, g):
    """Return the hinge loss and add its gradient to g."""
    n = s.size
    lowest, highest = s[0], s[rho]
    for t in range(1, rho):
        lowest = min(lowest, s[t])
    for t in range(rho + 1, n):
        highest = max(highest, s[t])
    i, j = 0, rho  # the first of each
    while s[i] != lowest:
        i += 1
    while s[j] != highest:
        j += 1
    gap = margin - s[i] + s[j]
    if not gap > 0:
        return f32(0)
    violations = 0
    for t in range(rho, n):
        violations += margin - s[i] + s[t] >= 0
    phi = f32(math.log1p(n_items / (n - rho) * violations))
    g[i] -= phi
    g[j] += phi
    return phi * gap


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


@kernel
def gradients_of_lists(
    start, stop, U, V, users, items, l2, rho, weights, ap, tau, lam, margin, hinge_on, drm_on, mse_on,
    scores, hinge, drm, mse, loss, g, user_grad,
):  # fmt: skip
    """Everything in `ListGradients`, for lists start .. stop - 1."""
    n = items.shape[1]
    scratch, order = np.empty((5, n), np.float32), np.empty(n, np.int64)
    R, G, q, ds, hits = scratch[0], scratch[1], scratch[2], scratch[3], scratch[4]
    w = weights.copy()
    totals = np.empty(min(KEPT, w.size), np.float32)
    rows = np.empty((totals.size + 1) * n, np.float32)
    for b in range(start, stop):
        u, s, gb = U[users[b]], scores[b], g[b]
        score_items(u, V, items[b], items[min(b + 1, stop - 1)], l2, s)
        finite = all_finite(s)
        gb[:] = f32(0)
        hinge_b, drm_b, mse_b = f32(0), f32(0), f32(0)
        if hinge_on and finite:
            hinge_b = hinge_loss(s, rho, margin, V.shape[0], gb)
        if drm_on and finite:
            if ap:
                average_precision_weights(s, rho, hits, w)
            relaxed_topk(s, R, order, w, tau, rows, totals, q)
            for j in range(n):
                r = f32(j < rho) - q[j]
                drm_b += r * r
                q[j] = f32(-2) * lam * r
            relaxed_topk_gradient(s, R, order, w, tau, q, rows, totals, G, ds)
            for j in range(n):
                gb[j] += ds[j]
        if mse_on and finite:
            for j in range(n):
                r = s[j] - f32(j < rho)
                mse_b += r * r
                gb[j] += f32(2 / n) * r
            mse_b *= f32(1 / n)
        if not finite:  # one bad score spoils the whole list, visibly
            hinge_b, drm_b, mse_b = NAN if hinge_on else f32(0), NAN if drm_on else f32(0), NAN if mse_on else f32(0)
            gb[:] = NAN
        hinge[b], drm[b], mse[b], loss[b] = hinge_b, drm_b, mse_b, hinge_b + lam * drm_b + mse_b
        user_gradient(u, V, items[b], gb, l2, user_grad[b])


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


def list_gradients(U: Tensor, V: Tensor, users: Tensor, items: Tensor, objective: Objective) -> ListGradients:
    """Losses of B lists, their gradient to the scores and to the user's row.

    A list with a score that is not finite has loss and gradient NaN.

    Parameters
    ----------
    U : float32 [M, d]; V : float32 [N, d]; users : int32 [B]; items : int32 [B, n], the first rho being positives
    """
    name = "list_gradients"
    user_rows = view(name, "U", U, (None, None), FLOAT32)
    item_rows = view(name, "V", V, (None, U.shape[1]), FLOAT32)
    user_ids = view(name, "users", users, (None,), INT32)
    item_ids = view(name, "items", items, (len(users), None), INT32)
    check_lists(U, V, users, items, objective)
    (B, n), d = items.shape, U.shape[1]
    scores, g, user_grad = empty(U, B, n), empty(U, B, n), empty(U, B, d)
    hinge, drm, mse, loss = (empty(U, B) for _ in range(4))
    threads.split(
        gradients_of_lists, B, 16,
        user_rows, item_rows, user_ids, item_ids, objective.score == "l2", objective.rho,
        rank_weights(objective), objective.weight == "ap", objective.tau, f32(objective.lam), f32(objective.margin),
        objective.hinge, objective.drm, objective.mse,
        *(x.numpy() for x in (scores, hinge, drm, mse, loss, g, user_grad)),
    )  # fmt: skip
    return ListGradients(scores, hinge, drm, mse, loss, g, user_grad)
