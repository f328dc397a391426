"""Losses of lists other than DRM, and their gradients to the scores: tiles [lists, items] in registers.

The first rho columns of a tile are positives. `live` says which entries belong to a list; others have gradient 0.
"""

import triton
import triton.language as tl

from drm_triton.kernels.protocol import Objective
from drm_triton.names import LOSSES

# Bits of PARTS, the parts of the loss that are on. DRM is computed before the others. In `HINGE & PARTS`, the bit comes
# first: in the interpreter PARTS is an int.
HINGE, _, MSE, SOFTMAX, PSL, BPR = (tl.constexpr(1 << place) for place in range(len(LOSSES)))


def parts_mask(objective: Objective) -> int:
    """Return PARTS of an objective."""
    return sum(1 << LOSSES.index(part) for part in objective.parts)


@triton.jit
def log1p(x):
    """Return log(1 + x) for x >= 0, accurate for small x too (Kahan)."""
    y = 1 + x
    return tl.where(y == 1, x, tl.log(y) * (x / tl.where(y == 1, 1.0, y - 1)))


@triton.jit
def hinge_loss(s, col, live, rho, margin, ratio):
    """Return the hinge loss of each list and its gradient; `ratio` is N / eta."""
    positive, negative, none = col < rho, live & (col >= rho), s.shape[1]
    lowest = tl.min(tl.where(positive, s, float("inf")), axis=1)[:, None]
    highest = tl.max(tl.where(negative, s, float("-inf")), axis=1)[:, None]
    i = tl.min(tl.where(positive & (s == lowest), col, none), axis=1)[:, None]
    j = tl.min(tl.where(negative & (s == highest), col, none), axis=1)[:, None]
    violations = tl.sum((negative & (margin - lowest + s >= 0)).to(s.dtype), axis=1)[:, None]
    gap = margin - lowest + highest
    phi = tl.where(gap > 0, log1p(ratio * violations), 0.0)
    loss = tl.sum(tl.where(col == j, phi * gap, 0.0), axis=1)
    return loss, tl.where(col == j, phi, 0.0) - tl.where(col == i, phi, 0.0)


@triton.jit
def mse_loss(s, col, live, n, rho):
    """Return the mean squared error against 1 and 0 of each list, and its gradient."""
    error = tl.where(live, s - (col < rho).to(s.dtype), 0.0)
    return tl.sum(error * error, axis=1) / n, 2 * error / n


@triton.jit
def softmax_loss(s, col, live, rho, temperature):
    """Return sum_i log(1 + sum_j exp((s_j - s_i) / temperature)) of each list, and its gradient."""
    positive, negative = live & (col < rho), live & (col >= rho)
    highest = tl.max(tl.where(negative, s, float("-inf")), axis=1)[:, None]
    e = tl.where(negative, tl.exp((s - highest) / temperature), 0.0)
    total = tl.sum(e, axis=1)[:, None]
    x = (highest - s) / temperature + tl.log(total)
    rest = tl.exp(-tl.abs(x))
    loss = tl.sum(tl.where(positive, tl.maximum(x, 0.0) + log1p(rest), 0.0), axis=1)
    wrong = tl.where(positive, tl.where(x > 0, 1.0, rest) / (1 + rest), 0.0)  # weight of the negatives in the softmax
    return loss, (tl.sum(wrong, axis=1)[:, None] / total * e - wrong) / temperature


@triton.jit
def score_at(s, col, i):
    """Return the score in column i of each list: [lists, 1]."""
    return tl.sum(tl.where(col == i, s, 0.0), axis=1)[:, None]


@triton.jit
def psl_loss(s, col, live, rho, scale, temperature):
    """Return sum_i log(1 + sum_j r_ij^(1 / temperature)), r_ij = max(0, 1 + scale (s_j - s_i)), and its gradient."""
    negative = live & (col >= rho)
    highest = tl.max(tl.where(negative, s, float("-inf")), axis=1)[:, None]
    loss, g = tl.zeros((s.shape[0],), s.dtype), tl.zeros_like(s)
    for i in range(rho):
        positive = score_at(s, col, i)
        r = tl.where(negative, tl.maximum(1 + scale * (s - positive), 0.0), 0.0)
        top = 1 + scale * (highest - positive)  # the largest r_ij
        some = top > 0
        top = tl.where(some, top, 1.0)
        e = tl.where(r > 0, tl.exp(tl.log(tl.where(r > 0, r, 1.0) / top) / temperature), 0.0)
        total = tl.where(some, tl.sum(e, axis=1)[:, None], 1.0)
        x = tl.log(top) / temperature + tl.log(total)
        rest = tl.exp(-tl.abs(x))
        loss += tl.sum(tl.where((col == i) & some, tl.maximum(x, 0.0) + log1p(rest), 0.0), axis=1)
        fraction = tl.where(x > 0, 1.0, rest) / (1 + rest)
        g_pairs = scale / temperature * fraction / total * tl.where(r > 0, e / tl.where(r > 0, r, 1.0), 0.0)
        g += g_pairs - tl.where(col == i, tl.sum(g_pairs, axis=1)[:, None], 0.0)
    return loss, g


@triton.jit
def bpr_loss(s, col, live, n, rho, temperature):
    """Return sum_i mean_j log(1 + exp((s_j - s_i) / temperature)) of each list, and its gradient."""
    negative = live & (col >= rho)
    loss, g = tl.zeros((s.shape[0],), s.dtype), tl.zeros_like(s)
    for i in range(rho):
        x = (s - score_at(s, col, i)) / temperature
        rest = tl.exp(-tl.abs(x))
        loss += tl.sum(tl.where(negative, tl.maximum(x, 0.0) + log1p(rest), 0.0), axis=1) / (n - rho)
        g_pairs = tl.where(negative, tl.where(x > 0, 1.0, rest) / (1 + rest), 0.0) / (temperature * (n - rho))
        g += g_pairs - tl.where(col == i, tl.sum(g_pairs, axis=1)[:, None], 0.0)
    return loss, g


@triton.jit
def finish(
    row, mask, s, drm, ds, nan, col, live, losses_ptr, g_ptr, B, n, rho, lam, margin, ratio, temperature, psl_scale,
    PARTS: tl.constexpr,
):  # fmt: skip
    """Add the other losses to DRM and its gradient ds; store losses and g.

    row : [lists], places in the batch; those with `mask` are stored
    drm, nan : [lists]; nan is NaN or 0, and is added to the losses that are on and to g. drm contains it.
    """
    dtype: tl.constexpr = s.dtype
    lam = tl.full((), lam, dtype)
    temperature = tl.full((), temperature, dtype)
    zero = tl.zeros((s.shape[0],), dtype)
    hinge, mse, softmax, psl, bpr = zero, zero, zero, zero, zero
    g = lam * ds + nan[:, None]
    if HINGE & PARTS:
        hinge, step = hinge_loss(s, col, live, rho, tl.full((), margin, dtype), tl.full((), ratio, dtype))
        hinge += nan
        g += step
    if MSE & PARTS:
        mse, step = mse_loss(s, col, live, n, rho)
        mse += nan
        g += step
    if SOFTMAX & PARTS:
        softmax, step = softmax_loss(s, col, live, rho, temperature)
        softmax += nan
        g += step
    if PSL & PARTS:
        psl, step = psl_loss(s, col, live, rho, tl.full((), psl_scale, dtype), temperature)
        psl += nan
        g += step
    if BPR & PARTS:
        bpr, step = bpr_loss(s, col, live, n, rho, temperature)
        bpr += nan
        g += step
    tl.store(g_ptr + row[:, None] * n + col, g, mask=live)
    tl.store(losses_ptr + row, hinge, mask=mask)
    tl.store(losses_ptr + B + row, drm, mask=mask)
    tl.store(losses_ptr + 2 * B + row, mse, mask=mask)
    tl.store(losses_ptr + 3 * B + row, softmax, mask=mask)
    tl.store(losses_ptr + 4 * B + row, psl, mask=mask)
    tl.store(losses_ptr + 5 * B + row, bpr, mask=mask)
    tl.store(losses_ptr + 6 * B + row, hinge + lam * drm + mse + softmax + psl + bpr, mask=mask)
