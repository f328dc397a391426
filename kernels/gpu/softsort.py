"""Relaxed top-K membership by NeuralSort, its gradient, and the DRM loss of lists.

For the scores s of a list of n items:   R_j = sum_l max(0, s_l - s_j)
    P_k = softmax(-(2 R + (2k - 1) s) / tau),   Q = sum_{k <= K} w_k P_k                       # Q: [n]
Gradient, with q = dL/dQ:   dz_k = w_k P_k (q - <P_k, q>) / tau,   G = sum_k dz_k
    ds_j = sum_k (1 - 2k) dz_kj + sum_l ([s_l >= s_j] + [s_l > s_j]) (G_j + G_l)
These are the P_k and the gradient of `reference` without the terms that cancel: see `kernels/cpu/softsort.py`.
DRM:   r = y - Q,   L = ||r||^2,   q = -2 r

A list of up to MAX_ITEMS items is one program. The n x n differences and the P_k are tiles in registers, and a list is
read once and written once. Longer lists are computed by `softsort_tiled`. Ragged lists have a mask. A masked entry has
Q = ds = 0 for any score, and n is the number of the other entries. A list with a score that is not finite gives NaN.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from drm_triton.kernels.checks import check_softsort
from drm_triton.kernels.gpu import softsort_tiled

MAX_ITEMS = 128  # with 4 warps; longer lists are divided into tiles, with several programs per list


def softsort_sizes(n: int, k: int) -> dict[str, int]:
    """Return tile sizes and warps for lists of n items with cut-off k."""
    block_n = max(16, triton.next_power_of_2(n))
    # All ranks of the paper's K = rho <= 5 in one iteration. More than 8 ranks cost registers and gain little.
    block_k = min(8, triton.next_power_of_2(k))
    # A warp per 32 items: the pairwise sums need no exchange between warps.
    return {"BLOCK_N": block_n, "BLOCK_K": block_k, "num_warps": max(1, block_n // 32)}


# The functions below work on one list in registers, s [BLOCK_N]. Entries that are padding or masked ("dead") are NaN in
# s. Every comparison with NaN is false, so the pairwise sums need no mask.
# The n x n differences are computed in strips [STRIP, BLOCK_N]: few registers, and no strip beyond n.
STRIP = tl.constexpr(16)


@triton.jit
def nan_or_zero(s, live):
    """Return NaN if a live score is not finite, else 0. Added to every result: a NaN in s looks like a dead entry."""
    return tl.where(tl.sum(tl.where(live, tl.abs(s), 0.0), axis=0) < float("inf"), 0.0, float("nan")).to(s.dtype)


@triton.jit
def _strip(x, start):
    """Return entries start .. start + STRIP - 1 of x: [STRIP, 1]."""
    return tl.gather(x, start + tl.arange(0, STRIP), 0)[:, None]


@triton.jit
def above_sums(s, n):
    """Return R_j = sum_l max(0, s_l - s_j): [BLOCK_N]."""
    total = tl.zeros((STRIP, s.shape[0]), s.dtype)
    for start in range(0, n, STRIP):
        above = _strip(s, start) - s[None, :]
        total += tl.where(above > 0, above, 0.0)
    return tl.sum(total, axis=0)


@triton.jit
def pair_sums(s, G, n):
    """Return sum_l ([s_l >= s_j] + [s_l > s_j]) (G_j + G_l): [BLOCK_N]."""
    total = tl.zeros((STRIP, s.shape[0]), s.dtype)
    for start in range(0, n, STRIP):
        s_l = _strip(s, start)
        times = (s_l >= s[None, :]).to(s.dtype) + (s_l > s[None, :]).to(s.dtype)
        total += times * (G[None, :] + _strip(G, start))
    return tl.sum(total, axis=0)


@triton.jit
def hard_rank(s, n):
    """Return the position of each entry in descending order, from 0, ties to the lower index: [BLOCK_N]."""
    index = tl.arange(0, s.shape[0])[None, :]
    total = tl.zeros((STRIP, s.shape[0]), tl.int32)
    for start in range(0, n, STRIP):
        s_l, index_l = _strip(s, start), start + tl.arange(0, STRIP)[:, None]
        total += ((s_l > s[None, :]) | ((s_l == s[None, :]) & (index_l < index))).to(tl.int32)
    return tl.sum(total, axis=0)


@triton.jit
def relaxed_rows(s, R, rank, tau):
    """Return 1 - 2k and P_k for a tile of ranks: [BLOCK_K, 1], [BLOCK_K, BLOCK_N]; dead entries are 0."""
    c = (1 - 2 * rank).to(s.dtype)[:, None]
    live = (s == s)[None, :]
    z = tl.where(live, (c * s[None, :] - 2 * R[None, :]) / tau, float("-inf"))
    e = tl.exp(tl.where(live, z - tl.max(z, axis=1)[:, None], float("-inf")))
    Z = tl.sum(e, axis=1)[:, None]
    return c, e / tl.where(Z > 0, Z, 1.0)  # 0 for a list with no live entry


@triton.jit
def rank_weight(w_ptr, rank, K, positive_ranks, AP: tl.constexpr):
    """Return w_k [BLOCK_K, 1], 0 beyond K.

    Under AP, w_ptr holds 1 / (k min(K, #positives)), and the result is this times the hits up to k. positive_ranks
    [BLOCK_N], used under AP only, holds the hard rank of the positives and a number beyond every rank for other items.
    """
    w = tl.load(w_ptr + rank - 1, mask=rank <= K, other=0.0)[:, None]
    if AP:
        w *= tl.sum((positive_ranks[None, :] < rank[:, None]).to(w.dtype), axis=1)[:, None]
    return w


@triton.jit
def soft_topk(s, R, w_ptr, K, tau, positive_ranks, AP: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return Q = sum_k w_k P_k: [BLOCK_N]."""
    Q = tl.zeros_like(s)
    for start in range(1, K + 1, BLOCK_K):
        rank = start + tl.arange(0, BLOCK_K)
        _, P = relaxed_rows(s, R, rank, tau)
        Q += tl.sum(rank_weight(w_ptr, rank, K, positive_ranks, AP) * P, axis=0)
    return Q


@triton.jit
def soft_topk_gradient(s, R, q, w_ptr, n, K, tau, positive_ranks, AP: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return the gradient ds for an upstream gradient q = dL/dQ, zero for dead entries: [BLOCK_N]."""
    ds, G = tl.zeros_like(s), tl.zeros_like(s)
    for start in range(1, K + 1, BLOCK_K):
        rank = start + tl.arange(0, BLOCK_K)
        c, P = relaxed_rows(s, R, rank, tau)
        w = rank_weight(w_ptr, rank, K, positive_ranks, AP)
        dz = w * P * (q[None, :] - tl.sum(P * q[None, :], axis=1)[:, None]) / tau
        ds += tl.sum(c * dz, axis=0)
        G += tl.sum(dz, axis=0)
    return tl.where(s == s, ds + pair_sums(s, G, n), 0.0)


@triton.jit
def _lists_kernel(
    s_ptr,  # [B, n]
    q_or_y_ptr,  # [B, n]: the upstream gradient q for "backward", the relevance y for "drm", unused for "forward"
    w_ptr,  # [B, K]
    mask_ptr,  # bool [B, n]
    loss_ptr,  # [B], out for "drm"
    out_ptr,  # [B, n]: Q for "forward", else ds
    n: tl.int32,
    K: tl.int32,
    tau: tl.float64,
    MODE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    offs_n = tl.arange(0, BLOCK_N)
    mask_n = offs_n < n
    live = tl.load(mask_ptr + row * n + offs_n, mask=mask_n, other=0) != 0
    s = tl.load(s_ptr + row * n + offs_n, mask=live, other=float("nan"))
    nan = nan_or_zero(s, live)
    tau = tl.full((), tau, s.dtype)
    w_row = w_ptr + row * K
    R = above_sums(s, n)
    if MODE != "forward":
        q_or_y = tl.load(q_or_y_ptr + row * n + offs_n, mask=live, other=0.0)
    if MODE != "backward":
        Q = soft_topk(s, R, w_row, K, tau, offs_n, False, BLOCK_K)
    if MODE == "forward":
        tl.store(out_ptr + row * n + offs_n, tl.where(live, Q + nan, 0.0), mask=mask_n)
    else:
        q = q_or_y
        if MODE == "drm":
            r = tl.where(live, q_or_y - Q, 0.0)
            tl.store(loss_ptr + row, tl.sum(r * r, axis=0) + nan)
            q = -2 * r
        ds = soft_topk_gradient(s, R, q, w_row, n, K, tau, offs_n, False, BLOCK_K)
        tl.store(out_ptr + row * n + offs_n, tl.where(live, ds + nan, 0.0), mask=mask_n)


def _launch(mode: str, s: Tensor, q_or_y: Tensor, w: Tensor, tau: float, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Run `_lists_kernel`, with copies of tensors that are not contiguous; return loss [B] and Q or ds [B, n]."""
    s, q_or_y, w, mask = s.contiguous(), q_or_y.contiguous(), w.contiguous(), mask.contiguous()
    (B, n), K = s.shape, w.shape[1]
    loss, out = s.new_empty(B), torch.empty_like(s)
    if B > 0:
        _lists_kernel[(B,)](
            s, q_or_y, w, mask, loss, out, n=n, K=K, tau=tau, MODE=mode, **softsort_sizes(n, K), enable_fp_fusion=True
        )
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
    if s.shape[1] > MAX_ITEMS:
        return softsort_tiled.soft_topk_forward(s, w, tau, mask)
    return _launch("forward", s, s, w, tau, mask)[1]


def soft_topk_backward(s: Tensor, w: Tensor, tau: float, mask: Tensor, q: Tensor) -> Tensor:
    """Compute the gradient ds [B, n] for an upstream gradient q = dL/dQ [B, n]; see `soft_topk_forward`."""
    check_softsort("soft_topk_backward", s, w, tau, mask, q=q)
    if s.shape[1] > MAX_ITEMS:
        return softsort_tiled.soft_topk_backward(s, w, tau, mask, q)
    return _launch("backward", s, q, w, tau, mask)[1]


def drm_lists(s: Tensor, y: Tensor, w: Tensor, tau: float, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the DRM loss ||y - Q||^2 of each list [B] and its gradient to the scores [B, n], for y [B, n]."""
    check_softsort("drm_lists", s, w, tau, mask, y=y)
    if s.shape[1] > MAX_ITEMS:
        return softsort_tiled.drm_lists(s, y, w, tau, mask)
    return _launch("drm", s, y, w, tau, mask)
