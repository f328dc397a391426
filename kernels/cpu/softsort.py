"""NeuralSort's relaxed top-K of one list, and its gradient, in memory linear in n.

The softmax does not feel a constant, so with R_j = sum_l max(0, s_l - s_j) the reference's (c_k s - b)/tau becomes

    z_kj = -(2 R_j + (2k - 1) s_j) / tau

which is as exact for the first ranks as they are for the scores, where c_k s and b are both of size n |s| and cancel.
The gradient follows, with dz_k = w_k P_k (q - <P_k, q>) / tau and G = sum_k dz_k, whose sum over the list is 0:

    ds_j = sum_k (1 - 2k) dz_kj + sum_l ([s_l >= s_j] + [s_l > s_j]) (G_j + G_l)

which is the reference's, again without the terms of size n G that cancel for the first ranks, where G is.

Short lists take the n^2 pairs in vector registers: 3 and 5 vector operations per 8 or 16 pairs; long ones sort. Arrays
are padded to whole vectors with entries that have P = 0.
The first KEPT rows P_k are kept from Q to the gradient, the others computed twice.
"""

import math

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload
from torch import Tensor

from drm_triton.kernels.checks import FLOATS, check_softsort
from drm_triton.kernels.cpu.runtime import threads
from drm_triton.kernels.cpu.runtime.arrays import view
from drm_triton.kernels.cpu.runtime.jit import inline, kernel
from drm_triton.kernels.cpu.runtime.simd import LANES, largest, least, padded, sum_above, sum_pairs

KEPT = 8  # rows P_k kept from Q to its gradient, in the first-level cache; those beyond are computed again
PAIRWISE_MAX = 640  # longest list treated by pairs; beyond it sorting is quicker (AVX-512, float32)

f32 = np.float32
LOG2E, LN2_HIGH, LN2_LOW = f32(1.44269504), f32(0.693359375), f32(-2.12194440e-4)
SMALLEST = f32(-87.0)  # exp of less is no normal number: flushed to 0


@intrinsic
def float_from_bits(context, bits):
    """Reinterpret an int32 as a float32."""

    def build(context, builder, signature, args):
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), build


def exp(x):
    """exp(x) for x <= 0, vectorisable in float32 (error below 2 ulp)."""
    return math.exp(x)


@overload(exp, jit_options={"fastmath": {"contract"}})
def _exp(x):
    if x != types.float32:
        return lambda x: math.exp(x)

    def exp_float32(x):
        y = max(x, SMALLEST)
        k = np.int32(y * LOG2E - f32(0.5))  # truncation rounds to nearest, as y <= 0
        r = (y - f32(k) * LN2_HIGH) - f32(k) * LN2_LOW
        p = f32(1.9875691500e-4)
        p = p * r + f32(1.3981999507e-3)
        p = p * r + f32(8.3334519073e-3)
        p = p * r + f32(4.1665795894e-2)
        p = p * r + f32(1.6666665459e-1)
        p = p * r + f32(5.0000001201e-1)
        p = p * r * r + r + f32(1)
        value = p * float_from_bits(np.int32((k + 127) << 23))
        return value if x >= SMALLEST else f32(0)

    return exp_float32


@inline
def pad(s, n):
    """Fill s from entry n on with a number below the others, which then neither adds to them nor ranks above them."""
    lowest = least(s[:n])
    s[n:] = max(lowest - abs(lowest) - 1, np.finfo(s.dtype).min)


@inline
def sort(s, order):
    """Fill order with the positions of its many first entries of s, ascending: Shell's sort, which needs no memory."""
    n = order.size
    for j in range(n):
        order[j] = j
    gap = n
    while gap > 1:
        gap = max(1, 5 * gap // 11)
        for j in range(gap, n):
            position, hole = order[j], j
            while hole >= gap and s[order[hole - gap]] > s[position]:
                order[hole] = order[hole - gap]
                hole -= gap
            order[hole] = position


@inline
def above_sums(s, n, R, order):
    """R_j = sum_l max(0, s_l - s_j); a long list leaves its ascending order in `order`."""
    if n <= PAIRWISE_MAX:
        sum_above(s, n, R)
    else:
        sort(s, order)
        total, upper = 0.0, s[order[n - 1]]
        for p in range(n):  # from the best down: every step is a sum of positive terms
            j = order[n - 1 - p]
            total += p * (np.float64(upper) - np.float64(s[j]))
            R[j], upper = total, s[j]
        R[n:] = 0


@inline
def add_pairs(s, n, G, order, ds):
    """ds_j += sum_l ([s_l >= s_j] + [s_l > s_j]) (G_j + G_l); order as `above_sums` left it."""
    if n <= PAIRWISE_MAX:
        sum_pairs(s, n, G, ds)
        return
    upper, high = 0.0, n  # sum of G of the entries above the group of ties low .. high - 1
    while high > 0:
        value, group, low = s[order[high - 1]], 0.0, high
        while low > 0 and s[order[low - 1]] == value:
            low -= 1
            group += G[order[low]]
        for p in range(low, high):
            j = order[p]
            ds[j] += G[j] * (2 * (n - high) + (high - low)) + (2 * upper + group)
        upper, high = upper + group, low


@inline
def relaxed_row(s, n, R, rank, tau, P):
    """P_k for k = rank, times the factor that is returned; 0 in the padding."""
    size, real = s.size, s.dtype.type
    scale_R, scale_s = real(-2 / tau), real(-(2 * rank - 1) / tau)
    for j in range(size):
        P[j] = scale_R * R[j] + scale_s * s[j]
    P[n:] = -np.inf
    top = largest(P)
    total = real(0)
    for j in range(size):
        e = exp(P[j] - top)
        P[j] = e
        total += e
    return total


@inline
def relaxed_topk(s, n, R, order, w, tau, rows, totals, Q):
    """Q = sum_k w_k P_k of the first n entries of s, which is padded, as are R and Q; R and order are filled.

    The first rows P_k, unnormalised, are left in `rows` and their sums in `totals`, as many as it has room for; `rows`
    has room for one more.
    """
    size, kept = s.size, totals.size
    above_sums(s, n, R, order)
    Q[:] = s.dtype.type(0)
    for rank in range(1, w.size + 1):
        weight, slot = w[rank - 1], min(rank - 1, kept)
        if weight != 0:
            P = rows[slot * size : (slot + 1) * size]
            total = relaxed_row(s, n, R, rank, tau, P)
            if slot < kept:
                totals[slot] = total
            weight /= total
            for j in range(size):
                Q[j] += weight * P[j]


@inline
def relaxed_topk_gradient(s, n, R, order, w, tau, q, rows, totals, G, ds):
    """Gradient ds to the scores for q = dL/dQ; R, order, rows and totals as `relaxed_topk` left them, G is scratch.

    All are padded; q must be finite there.
    """
    size, kept, real = s.size, totals.size, s.dtype.type
    G[:] = real(0)
    ds[:] = real(0)
    for rank in range(1, w.size + 1):
        if w[rank - 1] != 0:
            slot = min(rank - 1, kept)
            P = rows[slot * size : (slot + 1) * size]
            total = totals[slot] if slot < kept else relaxed_row(s, n, R, rank, tau, P)
            mean = real(0)
            for j in range(size):
                mean += P[j] * q[j]
            mean /= total
            scale, c = real(w[rank - 1] / tau) / total, real(1 - 2 * rank)
            for j in range(size):
                dz = scale * P[j] * (q[j] - mean)
                G[j] += dz
                ds[j] += c * dz
    add_pairs(s, n, G, order, ds)


@inline
def all_finite(s):
    """Whether no score is NaN or infinite: to be asked first, the functions above are for numbers."""
    largest = s.dtype.type(0)
    for j in range(s.size):
        largest += abs(s[j])
    return largest < np.inf  # false for NaN too


# Masked entries are left out by packing the others; the results are spread back.


@inline
def pack(mask, source, packed):
    """Copy the entries that are not masked, return their number."""
    length = 0
    for j in range(mask.size):
        if mask[j]:
            packed[length] = source[j]
            length += 1
    return length


@inline
def unpack(mask, packed, target):
    """Spread packed entries over those that are not masked; the others are 0."""
    length = 0
    for j in range(mask.size):
        if mask[j]:
            target[j] = packed[length]
            length += 1
        else:
            target[j] = 0


@inline
def forward_list(s, w, tau, mask, scratch, order, Q):
    """Q of one list; scratch [4, padded n]."""
    n = pack(mask, s, scratch[0])
    size = padded(n, LANES)
    x, R, P, total = scratch[0, :size], scratch[1, :size], scratch[2, :size], scratch[3, :size]
    if not all_finite(x[:n]):
        total[:] = np.nan
    elif n > 0:
        pad(x, n)
        relaxed_topk(x, n, R, order[:n], w, tau, P, total[:0], total)
    unpack(mask, total, Q)


@kernel
def forward_lists(start, stop, s, w, tau, mask, Q):
    """Q of lists start .. stop - 1."""
    scratch, order = np.empty((4, padded(s.shape[1], LANES)), s.dtype), np.empty(s.shape[1], np.int64)
    for b in range(start, stop):
        forward_list(s[b], w[b], tau, mask[b], scratch, order, Q[b])


@inline
def backward_list(s, w, tau, mask, q, scratch, order, ds):
    """Gradient of one list; scratch [6, padded n]."""
    n = pack(mask, s, scratch[0])
    pack(mask, q, scratch[1])
    size = padded(n, LANES)
    x, upstream, R = scratch[0, :size], scratch[1, :size], scratch[2, :size]
    P, G, total = scratch[3, :size], scratch[4, :size], scratch[5, :size]
    if not all_finite(x[:n]):
        total[:] = np.nan
    elif n > 0:
        pad(x, n)
        upstream[n:] = 0
        above_sums(x, n, R, order[:n])
        relaxed_topk_gradient(x, n, R, order[:n], w, tau, upstream, P, total[:0], G, total)
    unpack(mask, total, ds)


@kernel
def backward_lists(start, stop, s, w, tau, mask, q, ds):
    """Gradient of lists start .. stop - 1."""
    scratch, order = np.empty((6, padded(s.shape[1], LANES)), s.dtype), np.empty(s.shape[1], np.int64)
    for b in range(start, stop):
        backward_list(s[b], w[b], tau, mask[b], q[b], scratch, order, ds[b])


@inline
def drm_of_list(s, y, w, tau, mask, scratch, order, rows, totals, ds):
    """Loss and gradient of one list; scratch [5, padded n]."""
    real = s.dtype.type
    n = pack(mask, s, scratch[0])
    pack(mask, y, scratch[1])
    size = padded(n, LANES)
    x, r, R, G, total = scratch[0, :size], scratch[1, :size], scratch[2, :size], scratch[3, :size], scratch[4, :size]
    square = real(0)
    if not all_finite(x[:n]):
        square = real(np.nan)
        total[:] = np.nan
    elif n > 0:
        pad(x, n)
        r[n:] = 0
        relaxed_topk(x, n, R, order[:n], w, tau, rows, totals, total)
        for j in range(size):
            residual = r[j] - total[j]
            square += residual * residual
            r[j] = real(-2) * residual
        relaxed_topk_gradient(x, n, R, order[:n], w, tau, r, rows, totals, G, total)
    unpack(mask, total, ds)
    return square


@kernel
def drm_of_lists(start, stop, s, y, w, tau, mask, loss, ds):
    """Loss and gradient of lists start .. stop - 1."""
    scratch, order = np.empty((5, padded(s.shape[1], LANES)), s.dtype), np.empty(s.shape[1], np.int64)
    totals = np.empty(min(KEPT, w.shape[1]), s.dtype)
    rows = np.empty((totals.size + 1) * scratch.shape[1], s.dtype)
    for b in range(start, stop):
        loss[b] = drm_of_list(s[b], y[b], w[b], tau, mask[b], scratch, order, rows, totals, ds[b])


def _views(function: str, s: Tensor, w: Tensor, tau: float, mask: Tensor, **others: Tensor) -> list:
    """Check the arguments that the three operations share; s, w, mask and the others as arrays."""
    scores = view(function, "s", s, (None, None), FLOATS)
    check_softsort(function, s, w, tau, mask, **others)
    return [scores, *(x.detach().contiguous().numpy() for x in (w, mask, *others.values()))]


def _grain(n: int) -> int:
    """Lists per thread below which starting a thread costs more than it saves."""
    return max(1, 4096 // max(1, n))


def soft_topk_forward(s: Tensor, w: Tensor, tau: float, mask: Tensor) -> Tensor:
    """Q = sum_k w_k P_k: [B, n]; zero where masked, NaN for a list with a score that is not finite.

    Parameters
    ----------
    s : [B, n] float32 or float64; w : [B, K] of the same type; mask : bool [B, n], False where there is no entry
    """
    scores, weights, valid = _views("soft_topk_forward", s, w, tau, mask)
    Q = torch.empty(s.shape, dtype=s.dtype)
    threads.split(forward_lists, len(s), _grain(s.shape[1]), scores, weights, float(tau), valid, Q.numpy())
    return Q


def soft_topk_backward(s: Tensor, w: Tensor, tau: float, mask: Tensor, q: Tensor) -> Tensor:
    """Gradient ds [B, n] for an upstream gradient q = dL/dQ [B, n]; other arguments as in `soft_topk_forward`."""
    scores, weights, valid, upstream = _views("soft_topk_backward", s, w, tau, mask, q=q)
    ds = torch.empty(s.shape, dtype=s.dtype)
    threads.split(backward_lists, len(s), _grain(s.shape[1]), scores, weights, float(tau), valid, upstream, ds.numpy())
    return ds


def drm_lists(s: Tensor, y: Tensor, w: Tensor, tau: float, mask: Tensor) -> tuple[Tensor, Tensor]:
    """DRM loss ||y - Q||^2 of each list [B] and its gradient to the scores [B, n], for relevance y [B, n]."""
    scores, weights, valid, relevance = _views("drm_lists", s, w, tau, mask, y=y)
    loss, ds = torch.empty(len(s), dtype=s.dtype), torch.empty(s.shape, dtype=s.dtype)
    threads.split(
        drm_of_lists, len(s), _grain(s.shape[1]),
        scores, relevance, weights, float(tau), valid, loss.numpy(), ds.numpy(),
    )  # fmt: skip
    return loss, ds
