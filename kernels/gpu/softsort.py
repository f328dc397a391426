"""Relaxed top-K membership by NeuralSort, its gradient, and the DRM loss of lists.

For the scores s of a list of n items:   R_j = sum_l max(0, s_l - s_j)
    P_k = softmax(-(2 R + (2k - 1) s) / tau),   Q = sum_{k <= K} w_k P_k                       # Q: [n]
Gradient, with q = dL/dQ:   dz_k = w_k P_k (q - <P_k, q>) / tau,   G = sum_k dz_k
    ds_j = sum_k (1 - 2k) dz_kj + sum_l ([s_l >= s_j] + [s_l > s_j]) (G_j + G_l)
These are the P_k and the gradient of `reference` without the terms that cancel: see `kernels/cpu/softsort.py`.
DRM:   r = y - Q,   L = ||r||^2,   q = -2 r

The sums over pairs are running sums over the sorted list, with places j = 0 .. n - 1:
    R_j = sum_{i <= j} i (s_{i-1} - s_i)                           # no term is negative, so nothing cancels
    sum_l ... = (first + last + 1) G_j + C_{first-1} + C_last      # C: running sums of G
where first .. last are the places of the items with the score s_j, place j alone unless there are ties.

A program sorts and computes some lists of up to MAX_ITEMS items in registers. Each is read once and written once.
Longer lists, and lists in float64, are computed by `softsort_tiled`. Ragged lists have a mask. A masked entry has
Q = ds = 0 for any score, and n is the number of the other entries. A list with a score that is not finite gives NaN.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from drm_triton.kernels.checks import check_softsort
from drm_triton.kernels.gpu import softsort_tiled
from drm_triton.kernels.gpu.launch import launch, register_limit
from drm_triton.kernels.gpu.ordered import float_of, ordered

MAX_ITEMS = 128  # longer lists are divided into tiles, with several programs per list


def softsort_sizes(n: int) -> dict[str, int]:
    """Return tile sizes and warps for lists of n items: a warp, with 8 entries per thread.

    In one warp, sorts and running sums exchange values without shared memory. With all losses, a thread needs about 130
    registers, and 186 on sm_75. There is room for 10 to 12 warps.
    """
    block_n = max(16, triton.next_power_of_2(n))
    return {"BLOCK_LISTS": 256 // block_n, "BLOCK_N": block_n, "num_warps": 1, **register_limit(192)}


# The functions below work on a tile of lists in registers, s [lists, places]. Entries that are padding or masked
# ("dead") are sorted to the end.


@triton.jit
def nan_or_zero(s, live):
    """Return NaN for each list with a live score that is not finite, else 0, to be added to every result: [lists]."""
    return tl.where(tl.sum(tl.where(live, tl.abs(s), 0.0), axis=1) < float("inf"), 0.0, float("nan")).to(s.dtype)


@triton.jit
def sort_lists(s, live):
    """Sort the live scores of each list in descending order, equal ones by position; return them and their positions.

    What follows them in a row are the dead entries.
    """
    position = tl.arange(0, s.shape[1])[None, :]
    score = tl.where(live, ordered(s + 0.0), -(2**31))  # + 0.0: -0.0 has the place of 0.0. No score is -2^31.
    key = (score.to(tl.int64) << 32) | (~position).to(tl.uint32).to(tl.int64)
    key = tl.sort(key, dim=1, descending=True)
    return float_of((key >> 32).to(tl.int32)), ~key.to(tl.int32)


@triton.jit
def neighbours(x, step: tl.constexpr):
    """Return the entry `step` places on of each list, the last one beyond the ends."""
    n: tl.constexpr = x.shape[1]
    place = tl.minimum(tl.maximum(tl.arange(0, n) + step, 0), n - 1)
    return tl.gather(x, tl.broadcast_to(place[None, :], x.shape), 1)


@triton.jit
def above_sums(s, place, live):
    """Return R_j = sum_l max(0, s_l - s_j) of sorted lists."""
    return tl.cumsum(tl.where(live, place * (neighbours(s, -1) - s), 0.0), axis=1)


@triton.jit
def larger(a, b):
    """Return the larger number."""
    return tl.maximum(a, b)


@triton.jit
def smaller(a, b):
    """Return the smaller number."""
    return tl.minimum(a, b)


@triton.jit
def pair_sums(s, G, place, live):
    """Return sum_l ([s_l >= s_j] + [s_l > s_j]) (G_j + G_l) of sorted lists. G is 0 at dead entries."""
    C = tl.cumsum(G, axis=1)
    total = 2 * (place * G + C)
    tie = live & (place > 0) & (neighbours(s, -1) == s)  # with the entry before
    if tl.max(tl.max(tie.to(tl.int32), axis=1), axis=0) > 0:
        first = tl.associative_scan(tl.where(tie, 0, tl.broadcast_to(place, s.shape)), 1, larger)
        goes_on = (neighbours(tie.to(tl.int32), 1) > 0) & (place < s.shape[1] - 1)
        last = tl.associative_scan(tl.where(goes_on, s.shape[1], place), 1, smaller, reverse=True)
        above = tl.where(first > 0, tl.gather(C, tl.maximum(first - 1, 0), 1), 0.0)
        total = (first + last + 1) * G + above + tl.gather(C, last, 1)
    return total


@triton.jit
def relaxed_row(s, R, live, k, tau):
    """Return P_k of sorted lists; dead entries are 0."""
    z = tl.where(live, ((1 - 2 * k) * s - 2 * R) / tau, float("-inf"))
    e = tl.where(live, tl.exp(z - tl.max(z, axis=1)[:, None]), 0.0)
    Z = tl.sum(e, axis=1)[:, None]
    return e * (1 / tl.where(Z > 0, Z, 1.0))  # 0 for a list with no live entry


@triton.jit
def rank_weight(w_row, k, hit, place, AP: tl.constexpr):
    """Return w_k of each list: [lists, 1].

    Under AP, w_row holds 1 / (k min(K, #positives)), and the result is this times the number of positives (`hit`) among
    the first k.
    """
    w = tl.load(w_row + (k - 1))
    if AP:
        w *= tl.sum((hit & (place < k)).to(w.dtype), axis=1)[:, None]
    return w


@triton.jit
def soft_topk(s, R, live, w_row, K, tau, hit, place, AP: tl.constexpr):
    """Return Q = sum_k w_k P_k of sorted lists."""
    Q = tl.zeros_like(s)
    for k in range(1, K + 1):
        Q += rank_weight(w_row, k, hit, place, AP) * relaxed_row(s, R, live, k, tau)
    return Q


@triton.jit
def soft_topk_gradient(s, R, live, q, w_row, K, tau, hit, place, AP: tl.constexpr):
    """Return the gradient ds of sorted lists for an upstream gradient q = dL/dQ, zero for dead entries."""
    ds, G = tl.zeros_like(s), tl.zeros_like(s)
    for k in range(1, K + 1):
        P = relaxed_row(s, R, live, k, tau)
        dz = rank_weight(w_row, k, hit, place, AP) * P * (q - tl.sum(P * q, axis=1)[:, None]) / tau
        ds += (1 - 2 * k) * dz
        G += dz
    return tl.where(live, ds + pair_sums(s, G, place, live), 0.0)


@triton.jit(do_not_specialize=["B"])
def _lists_kernel(
    s_ptr,  # [B, n]
    q_or_y_ptr,  # [B, n]: the upstream gradient q for "backward", the relevance y for "drm", unused for "forward"
    w_ptr,  # [B, K]
    mask_ptr,  # bool [B, n]
    loss_ptr,  # [B], out for "drm"
    out_ptr,  # [B, n]: Q for "forward", else ds
    B: tl.int64,
    n: tl.int32,
    K: tl.int32,
    tau: tl.float64,
    MODE: tl.constexpr,
    BLOCK_LISTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_LISTS + tl.arange(0, BLOCK_LISTS)
    place = tl.arange(0, BLOCK_N)[None, :]
    inside = (row < B)[:, None] & (place < n)
    entry = row[:, None] * n + place
    live = tl.load(mask_ptr + entry, mask=inside, other=0) != 0
    s = tl.load(s_ptr + entry, mask=live, other=0.0)
    nan = nan_or_zero(s, live)
    n_live = tl.sum(live.to(tl.int32), axis=1)[:, None]
    s, position = sort_lists(s, live)
    entry, live = row[:, None] * n + position, place < n_live
    inside = (row < B)[:, None] & (position < n)
    tau = tl.full((), tau, s.dtype)
    w_row = w_ptr + tl.minimum(row, B - 1)[:, None] * K
    R = above_sums(s, place, live)
    if MODE != "forward":
        q_or_y = tl.load(q_or_y_ptr + entry, mask=live, other=0.0)
    if MODE != "backward":
        Q = soft_topk(s, R, live, w_row, K, tau, live, place, False)
    if MODE == "forward":
        tl.store(out_ptr + entry, tl.where(live, Q + nan[:, None], 0.0), mask=inside)
    else:
        q = q_or_y
        if MODE == "drm":
            r = tl.where(live, q_or_y - Q, 0.0)
            tl.store(loss_ptr + row, tl.sum(r * r, axis=1) + nan, mask=row < B)
            q = -2 * r
        ds = soft_topk_gradient(s, R, live, q, w_row, K, tau, live, place, False)
        tl.store(out_ptr + entry, tl.where(live, ds + nan[:, None], 0.0), mask=inside)


def tiled(s: Tensor) -> bool:
    """Return whether lists with scores s [B, n] are computed by `softsort_tiled`."""
    return s.shape[1] > MAX_ITEMS or s.dtype == torch.float64


def _run(mode: str, s: Tensor, q_or_y: Tensor, w: Tensor, tau: float, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Run `_lists_kernel`, with copies of tensors that are not contiguous; return loss [B] and Q or ds [B, n]."""
    s, q_or_y, w, mask = s.contiguous(), q_or_y.contiguous(), w.contiguous(), mask.contiguous()
    (B, n), K = s.shape, w.shape[1]
    loss, out = s.new_empty(B), torch.empty_like(s)
    if B > 0:
        sizes = softsort_sizes(n)
        grid = (triton.cdiv(B, sizes["BLOCK_LISTS"]),)
        launch(_lists_kernel, grid, s, q_or_y, w, mask, loss, out, B=B, n=n, K=K, tau=tau, MODE=mode, **sizes)
    return loss, out


def soft_topk_forward(s: Tensor, w: Tensor, tau: float, mask: Tensor) -> Tensor:
    """Compute Q = sum_k w_k P_k.

    Parameters
    ----------
    s : [B, n] scores, float32 or float64
    w : [B, K] rank weights, of the same type
    mask : bool [B, n], False for padding

    Returns
    -------
    [B, n]
    """
    check_softsort("soft_topk_forward", s, w, tau, mask)
    if tiled(s):
        return softsort_tiled.soft_topk_forward(s, w, tau, mask)
    return _run("forward", s, s, w, tau, mask)[1]


def soft_topk_backward(s: Tensor, w: Tensor, tau: float, mask: Tensor, q: Tensor) -> Tensor:
    """Compute the gradient ds [B, n] for an upstream gradient q = dL/dQ [B, n]; see `soft_topk_forward`."""
    check_softsort("soft_topk_backward", s, w, tau, mask, q=q)
    if tiled(s):
        return softsort_tiled.soft_topk_backward(s, w, tau, mask, q)
    return _run("backward", s, q, w, tau, mask)[1]


def drm_lists(s: Tensor, y: Tensor, w: Tensor, tau: float, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the DRM loss ||y - Q||^2 of each list [B] and its gradient to the scores [B, n], for y [B, n]."""
    check_softsort("drm_lists", s, w, tau, mask, y=y)
    if tiled(s):
        return softsort_tiled.drm_lists(s, y, w, tau, mask)
    return _run("drm", s, y, w, tau, mask)
