"""NeuralSort's relaxed top-K of one list and its gradient, in memory linear in n.

A softmax does not change if a constant is added to its logits. With R_j = sum_l max(0, s_l - s_j), the logits of the
reference, (c_k s - b) / tau, become

    z_kj = -(2 R_j + (2k - 1) s_j) / tau

For the first ranks, these are as exact as the scores. c_k s and b are both of size n |s| and would cancel. With
dz_k = w_k P_k (q - <P_k, q>) / tau and G = sum_k dz_k, whose sum over the list is 0, the gradient is

    ds_j = sum_k (1 - 2k) dz_kj + sum_l ([s_l >= s_j] + [s_l > s_j]) (G_j + G_l)

This is the gradient of the reference, again without terms of size n G that cancel for the first ranks.

Short lists compute all n^2 pairs in vector registers, with 3 and 5 vector operations per 8 or 16 pairs. Of a long list,
only the active items are processed (`active`). If these are still many, they are sorted, with 2 vector operations per 8
or 16 pairs, and use running sums. Arrays are padded to a multiple of LANES with entries that have P = 0.

The first part of this file sorts one list and is used by training. The second part contains the operations
`soft_topk_forward`, `soft_topk_backward` and `drm_lists` on batches of lists with masks.
"""

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import overload
from numpy.typing import NDArray
from torch import Tensor

from drm_triton.kernels.checks import FLOATS, check_softsort
from drm_triton.kernels.cpu.active import ACTIVE_MIN, active_threshold, gather, scatter
from drm_triton.kernels.cpu.runtime import threads
from drm_triton.kernels.cpu.runtime.arrays import view
from drm_triton.kernels.cpu.runtime.bits import find_at_least
from drm_triton.kernels.cpu.runtime.jit import allocating, inline, intrinsic, kernel
from drm_triton.kernels.cpu.runtime.simd import LANES, largest, padded, rank_entries, smallest, sum_above, sum_pairs

KEPT = 8  # rows P_k of n entries that are kept from Q to its gradient; the others are computed twice
PAIRWISE_MAX = 63  # longest list that computes the sums of all pairs; longer ones are sorted and use running sums
COUNTING_MAX = 1024  # longest list that is sorted by counting, for each entry, those before it

f32 = np.float32
LOG2E, LN2_HIGH, LN2_LOW = f32(1.44269504), f32(0.693359375), f32(-2.12194440e-4)
SMALLEST = f32(-87.0)  # exp of a smaller number is subnormal and becomes 0
# Of (exp(r) - 1 - r) / r^2 for |r| <= log(2) / 2, from the highest power on.
EXP_POLYNOMIAL = tuple(
    f32(c)
    for c in (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
)


@intrinsic
def float_from_bits(context, bits):
    """Reinterpret an int32 as a float32."""

    def build(context, builder, signature, args):
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), build


def exp(x):
    """Return exp(x) for x <= 0. In float32 it can be vectorised, with an error below 2 ulp."""
    return math.exp(x)


@overload(exp, jit_options={"fastmath": {"contract"}})
def _exp(x):
    if x != types.float32:
        return lambda x: math.exp(x)

    def exp_float32(x):
        y = max(x, SMALLEST)
        k = np.int32(y * LOG2E - f32(0.5))  # truncation rounds to nearest, as y <= 0
        r = (y - f32(k) * LN2_HIGH) - f32(k) * LN2_LOW
        p = EXP_POLYNOMIAL[0]
        p = p * r + EXP_POLYNOMIAL[1]
        p = p * r + EXP_POLYNOMIAL[2]
        p = p * r + EXP_POLYNOMIAL[3]
        p = p * r + EXP_POLYNOMIAL[4]
        p = p * r + EXP_POLYNOMIAL[5]
        p = p * r * r + r + f32(1)
        value = p * float_from_bits(np.int32((k + 127) << 23))
        return value if x >= SMALLEST else f32(0)

    return exp_float32


# ---------------------------------------------------------------------------------------------------------------
# The relaxed sort of one list and its gradient, used by training (`losses`) and by the operations below


class SortBuffers(NamedTuple):
    """Buffers for the relaxed sort of one list of n entries, padded to a multiple of LANES."""

    R: NDArray[Any]  # [padded n], R_j = sum_l max(0, s_l - s_j)
    G: NDArray[Any]  # [padded n], sum_k dz_k
    rows: NDArray[Any]  # [(KEPT + 1) * padded n] or less, P_k times totals[k - 1] for the ranks kept, and one more row
    totals: NDArray[Any]  # [ranks kept]
    order: NDArray[np.int64]  # [n], positions in descending order of the scores, for long lists
    rank: NDArray[np.int64]  # [padded n], number of entries with a larger score, for long lists
    active: NDArray[np.int64]  # [n], positions of the active items, for long lists


@allocating
def sort_buffers(n, ranks, like):
    """Allocate buffers of the type of `like` for lists of up to n entries that keep the rows of up to `ranks` ranks."""
    size = padded(n, LANES)
    return SortBuffers(
        np.empty(size, like.dtype),
        np.empty(size, like.dtype),
        np.empty((min(KEPT, ranks) + 1) * size, like.dtype),
        np.empty(ranks, like.dtype),
        np.empty(n, np.int64),
        np.empty(size, np.int64),
        np.empty(n, np.int64),
    )


@inline
def shortened(buffers, n):
    """Return the part of the buffers that a list of n entries uses. The shorter it is, the more rows are kept."""
    R, G, rows, totals, order, rank, active = buffers
    size = padded(n, LANES)
    return SortBuffers(R[:size], G[:size], rows, totals[: rows.size // size - 1], order[:n], rank[:size], active)


@inline
def pad(s, n):
    """Fill s from entry n on with a number below the others. It adds nothing to their sums and ranks below them."""
    lowest = smallest(s[:n])
    s[n:] = max(lowest - abs(lowest) - 1, np.finfo(s.dtype).min)


@inline
def sort_descending(x, positions, buffers):
    """Sort positions of x by descending x.

    Counting compares all pairs, but in vector registers and without branches. Longer lists use Shell's sort. It
    allocates nothing, which an inlined function may not.
    """
    n, order, rank = positions.size, buffers.order, buffers.rank
    if n <= COUNTING_MAX:
        packed = buffers.R[: padded(n, LANES)]
        gather(x, positions, packed)
        packed[n:] = packed[0]
        rank_entries(packed, n, rank)
        order[:n] = 0
        for i in range(n):  # equal numbers have the same rank; `order` counts those that have it so far
            first = rank[i]
            rank[i] = first + order[first]
            order[first] += 1
        for i in range(n):
            order[rank[i]] = positions[i]
        for i in range(n):
            positions[i] = order[i]
        return
    gap = n
    while gap > 1:
        gap = max(1, 5 * gap // 11)
        for i in range(gap, n):
            position, hole = positions[i], i
            while hole >= gap and x[positions[hole - gap]] < x[position]:
                positions[hole] = positions[hole - gap]
                hole -= gap
            positions[hole] = position


@inline
def above_sums(s, n, R):
    """R_j = sum_l max(0, s_l - s_j). A list of more than PAIRWISE_MAX entries must be in descending order."""
    if n <= PAIRWISE_MAX:
        sum_above(s, n, R)
    else:
        total, upper = 0.0, np.float64(s[0])
        for j in range(n):  # all terms are positive, so nothing cancels
            value = np.float64(s[j])
            total += j * (upper - value)
            R[j], upper = total, value
        R[n:] = 0


@inline
def add_pairs(s, n, G, ds):
    """ds_j += sum_l ([s_l >= s_j] + [s_l > s_j]) (G_j + G_l). The order of s is that of `above_sums`."""
    if n <= PAIRWISE_MAX:
        sum_pairs(s, n, G, ds)
        return
    above, low = 0.0, 0  # sum of G of the entries before the group of ties low .. high - 1
    while low < n:
        group, high = np.float64(G[low]), low + 1
        while high < n and s[high] == s[low]:
            group += G[high]
            high += 1
        for j in range(low, high):
            ds[j] += G[j] * (low + high) + (2 * above + group)
        above, low = above + group, high


@inline
def relaxed_row(s, n, R, rank, tau, P):
    """Write P_k for k = rank, times the total that is returned, to P. The padding is 0."""
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
def relaxed_topk(s, n, w, tau, buffers, Q):
    """Q = sum_k w_k P_k of the first n entries of s. s and Q are padded. The buffers are left for the gradient."""
    R, rows, totals = buffers.R, buffers.rows, buffers.totals
    size, kept = s.size, totals.size
    above_sums(s, n, R)
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
def relaxed_topk_gradient(s, n, w, tau, q, buffers, ds):
    """Gradient ds to the scores for q = dL/dQ, with the buffers of `relaxed_topk`.

    s, q and ds are padded; the padding of q must be finite.
    """
    R, G, rows, totals = buffers.R, buffers.G, buffers.rows, buffers.totals
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
    add_pairs(s, n, G, ds)


@inline
def all_finite(x):
    """Return whether no number is NaN or infinite. The functions above need finite scores."""
    total = x.dtype.type(0)
    for j in range(x.size):
        total += abs(x[j])
    return total < np.inf  # false for NaN too


@inline
def active_positions(x, n, w, tau, buffers):
    """Return the lowest score that takes part in Q, and the positions of the entries with at least this score.

    x : scores of the n items of the list, and any number of entries -inf
    """
    theta = x.dtype.type(np.finfo(x.dtype).min)
    if n >= ACTIVE_MIN:
        K = w.size
        while K > 1 and w[K - 1] == 0:
            K -= 1
        theta = active_threshold(x, n, K, tau, buffers.rows)
    return theta, buffers.active[: find_at_least(x, theta, buffers.active)]


@inline
def active_items(x, n, w, tau, buffers):
    """Like `active_positions`. If there are many, their scores descend, as `above_sums` needs them."""
    theta, active = active_positions(x, n, w, tau, buffers)
    if active.size > PAIRWISE_MAX:
        sort_descending(x, active, buffers)
    return theta, active


# ---------------------------------------------------------------------------------------------------------------
# Operations on batches of lists with masks, for `drm_loss`. Training does not use them. The entries of a list that are
# not masked are packed, of a long list only the active ones, and the result is unpacked.


class PackedBuffers(NamedTuple):
    """Buffers for the entries of one list that take part, padded to a multiple of LANES."""

    s: NDArray[Any]  # [padded n] scores
    y: NDArray[Any]  # [padded n] relevance; only `drm_of_list` uses it
    Q: NDArray[Any]  # [padded n]
    q: NDArray[Any]  # [padded n] dL/dQ
    ds: NDArray[Any]  # [padded n] gradient to the scores
    sorting: SortBuffers


@allocating
def packed_buffers(n, ranks, like):
    """Allocate buffers of the type of `like` for lists of up to n entries that keep the rows of up to `ranks` ranks."""
    rows = np.empty((5, padded(n, LANES)), like.dtype)
    return PackedBuffers(rows[0], rows[1], rows[2], rows[3], rows[4], sort_buffers(n, ranks, like))


@inline
def pack_scores(s, w, tau, mask, buffers):
    """Pack the scores of the entries that take part.

    Returns whether all entries that are not masked are finite, the lowest score that takes part, the positions of the
    packed entries, and the buffers for them.
    """
    x, zero, absent = buffers.ds[: s.size], s.dtype.type(0), s.dtype.type(-np.inf)
    n, total = 0, zero
    for j in range(s.size):
        n += mask[j]
        total += abs(s[j]) if mask[j] else zero
        x[j] = s[j] if mask[j] else absent
    finite = total < np.inf  # false for NaN too
    theta, active = zero, buffers.sorting.active[:0]
    if finite and n > 0:
        theta, active = active_items(x, n, w, tau, buffers.sorting)
        gather(x, active, buffers.s)
        pad(buffers.s[: padded(active.size, LANES)], active.size)
    m = active.size
    size = padded(max(m, 1), LANES)
    s, y, Q, q, ds, sorting = buffers
    return (
        finite,
        theta,
        active,
        PackedBuffers(s[:size], y[:size], Q[:size], q[:size], ds[:size], shortened(sorting, max(m, 1))),
    )


@inline
def unpack(packed, active, finite, mask, x):
    """Copy packed entries to their positions and write 0 to the others, or NaN to all if not all scores are finite."""
    if finite:
        scatter(packed, active, x)
    else:
        for j in range(mask.size):
            x[j] = np.nan if mask[j] else 0


@inline
def forward_list(s, w, tau, mask, buffers, Q):
    """Compute Q of one list."""
    finite, _, active, packed = pack_scores(s, w, tau, mask, buffers)
    if active.size > 0:
        relaxed_topk(packed.s, active.size, w, tau, packed.sorting, packed.Q)
    unpack(packed.Q, active, finite, mask, Q)


@kernel
def forward_lists(start, stop, s, w, tau, mask, Q):
    """Compute Q of lists start .. stop - 1."""
    buffers = packed_buffers(s.shape[1], 0, s)
    for b in range(start, stop):
        forward_list(s[b], w[b], tau, mask[b], buffers, Q[b])


@inline
def backward_list(s, w, tau, mask, q, buffers, ds):
    """Compute the gradient of one list."""
    finite, _, active, packed = pack_scores(s, w, tau, mask, buffers)
    n = active.size
    if n > 0:
        gather(q, active, packed.q)
        packed.q[n:] = 0
        above_sums(packed.s, n, packed.sorting.R)
        relaxed_topk_gradient(packed.s, n, w, tau, packed.q, packed.sorting, packed.ds)
    unpack(packed.ds, active, finite, mask, ds)


@kernel
def backward_lists(start, stop, s, w, tau, mask, q, ds):
    """Compute the gradients of lists start .. stop - 1."""
    buffers = packed_buffers(s.shape[1], 0, s)
    for b in range(start, stop):
        backward_list(s[b], w[b], tau, mask[b], q[b], buffers, ds[b])


@inline
def drm_of_list(s, y, w, tau, mask, buffers, ds):
    """Return the loss of one list and write its gradient to ds."""
    real = s.dtype.type
    finite, theta, active, packed = pack_scores(s, w, tau, mask, buffers)
    n, square = active.size, real(0 if finite else np.nan)
    if n > 0:
        for j in range(s.size):  # Q is 0 for the items that are not active
            square += y[j] * y[j] if mask[j] & (s[j] < theta) else real(0)
        gather(y, active, packed.y)
        packed.y[n:] = 0
        relaxed_topk(packed.s, n, w, tau, packed.sorting, packed.Q)
        for j in range(packed.s.size):
            residual = packed.y[j] - packed.Q[j]
            square += residual * residual
            packed.q[j] = real(-2) * residual
        relaxed_topk_gradient(packed.s, n, w, tau, packed.q, packed.sorting, packed.ds)
    unpack(packed.ds, active, finite, mask, ds)
    return square


@kernel
def drm_of_lists(start, stop, s, y, w, tau, mask, loss, ds):
    """Compute losses and gradients of lists start .. stop - 1."""
    buffers = packed_buffers(s.shape[1], w.shape[1], s)
    for b in range(start, stop):
        loss[b] = drm_of_list(s[b], y[b], w[b], tau, mask[b], buffers, ds[b])


def _views(function: str, s: Tensor, w: Tensor, tau: float, mask: Tensor, **others: Tensor) -> list[NDArray[Any]]:
    """Check the arguments that the three operations have in common; return s, w, mask and the others as arrays."""
    scores = view(function, "s", s, (None, None), FLOATS)
    check_softsort(function, s, w, tau, mask, **others)
    return [scores, *(x.detach().contiguous().numpy() for x in (w, mask, *others.values()))]


def _grain(n: int) -> int:
    """Return the smallest number of lists for which a thread saves more time than it takes to start."""
    return max(1, 4096 // max(1, n))


def soft_topk_forward(s: Tensor, w: Tensor, tau: float, mask: Tensor) -> Tensor:
    """Compute Q = sum_k w_k P_k: [B, n]. It is 0 where masked, and NaN for a list with a score that is not finite.

    Parameters
    ----------
    s : [B, n] scores, float32 or float64
    w : [B, K] rank weights of the same type
    mask : bool [B, n], False for padding
    """
    scores, weights, valid = _views("soft_topk_forward", s, w, tau, mask)
    Q = torch.empty(s.shape, dtype=s.dtype)
    threads.split(forward_lists, len(s), _grain(s.shape[1]), scores, weights, float(tau), valid, Q.numpy())
    return Q


def soft_topk_backward(s: Tensor, w: Tensor, tau: float, mask: Tensor, q: Tensor) -> Tensor:
    """Compute the gradient ds [B, n] for q = dL/dQ [B, n]; other arguments as in `soft_topk_forward`."""
    scores, weights, valid, upstream = _views("soft_topk_backward", s, w, tau, mask, q=q)
    ds = torch.empty(s.shape, dtype=s.dtype)
    threads.split(backward_lists, len(s), _grain(s.shape[1]), scores, weights, float(tau), valid, upstream, ds.numpy())
    return ds


def drm_lists(s: Tensor, y: Tensor, w: Tensor, tau: float, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the DRM loss ||y - Q||^2 [B] of lists with relevance y [B, n], and its gradient to the scores [B, n]."""
    scores, weights, valid, relevance = _views("drm_lists", s, w, tau, mask, y=y)
    loss, ds = torch.empty(len(s), dtype=s.dtype), torch.empty(s.shape, dtype=s.dtype)
    threads.split(
        drm_of_lists, len(s), _grain(s.shape[1]),
        scores, relevance, weights, float(tau), valid, loss.numpy(), ds.numpy(),
    )  # fmt: skip
    return loss, ds
