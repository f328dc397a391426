"""`softsort` for lists of any length: tiles of BLOCK_N items and BLOCK_K ranks, memory linear in n.

Three kernels run over all lists. They are parallel within a list too, so one list of 4096 items fills a GPU:

    pairs  : per tile of items, loop over all items    R_j = sum_l max(0, s_l - s_j),  or the pairs of the gradient
    ranks  : per tile of ranks, loop over all items    top_k = max_j z_kj,  Z_k = sum_j exp(z_kj - top_k),  <P_k, q>
    items  : per tile of items, loop over all ranks    Q_j = sum_k w_k P_kj,  or G_j and sum_k (1 - 2k) dz_kj

P_k is recomputed from (top_k, Z_k) where it is needed: n * K exponentials are cheaper than n * K floats of traffic.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from drm_triton.kernels.gpu.options import register_limit

# 32 values of a tile per thread, 16 if several tiles are held at once.
PAIRS_SIZES = {"BLOCK_J": 64, "BLOCK_L": 128, "num_warps": 8}
RANKS_SIZES = {"BLOCK_K": 16, "BLOCK_N": 128, "num_warps": 4, **register_limit(168)}
ITEMS_SIZES = {"BLOCK_K": 16, "BLOCK_N": 128, "num_warps": 4}


@triton.jit
def _pairs_kernel(
    s_ptr,  # [B, n]
    mask_ptr,  # bool [B, n]
    G_ptr,  # [B, n], read if GRADIENT
    out_ptr,  # [B, n]: R; if GRADIENT, holds sum_k (1 - 2k) dz_k and becomes ds
    n: tl.int32,
    tiles: tl.int32,
    GRADIENT: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    row = (tl.program_id(0) // tiles).to(tl.int64) * n
    offs_j = (tl.program_id(0) % tiles) * BLOCK_J + tl.arange(0, BLOCK_J)
    mask_j = offs_j < n
    live_j = tl.load(mask_ptr + row + offs_j, mask=mask_j, other=0) != 0
    s_j = tl.load(s_ptr + row + offs_j, mask=live_j, other=0.0)
    total = tl.zeros_like(s_j)
    if GRADIENT:
        G_j = tl.load(G_ptr + row + offs_j, mask=live_j, other=0.0)
    for start in range(0, n, BLOCK_L):
        offs_l = start + tl.arange(0, BLOCK_L)
        live_l = tl.load(mask_ptr + row + offs_l, mask=offs_l < n, other=0) != 0
        s_l = tl.load(s_ptr + row + offs_l, mask=live_l, other=0.0)
        above = s_l[None, :] - s_j[:, None]
        if GRADIENT:
            G_l = tl.load(G_ptr + row + offs_l, mask=live_l, other=0.0)
            pair = tl.where(live_l[None, :], G_j[:, None] + G_l[None, :], 0.0)
            total += tl.sum(tl.where(above > 0, 2 * pair, tl.where(above == 0, pair, 0.0)), axis=1)
        else:
            total += tl.sum(tl.where(live_l[None, :] & (above > 0), above, 0.0), axis=1)
    if GRADIENT:
        total = tl.load(out_ptr + row + offs_j, mask=live_j, other=0.0) + total
    tl.store(out_ptr + row + offs_j, tl.where(live_j, total, 0.0), mask=mask_j)


@triton.jit
def _logits(s_ptr, R_ptr, mask_ptr, offs_n, n, c, tau):
    """Return z_kj = (c_k s_j - 2 R_j) / tau, c_k = 1 - 2k, and whether j is live: [BLOCK_K, BLOCK_N], [1, BLOCK_N]."""
    live = tl.load(mask_ptr + offs_n, mask=offs_n < n, other=0) != 0
    s = tl.load(s_ptr + offs_n, mask=live, other=0.0)
    R = tl.load(R_ptr + offs_n, mask=live, other=0.0)
    return (c * s[None, :] - 2 * R[None, :]) / tau, live[None, :]


@triton.jit
def _ranks_kernel(
    s_ptr,  # [B, n]
    R_ptr,  # [B, n]
    mask_ptr,  # bool [B, n]
    q_ptr,  # [B, n], read if DOT
    top_ptr,  # [B, K], out
    Z_ptr,  # [B, K], out
    dot_ptr,  # [B, K], out if DOT: <P_k, q>
    n: tl.int32,
    K: tl.int32,
    tiles: tl.int32,
    tau: tl.float64,
    DOT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row = (tl.program_id(0) // tiles).to(tl.int64)
    rank = (tl.program_id(0) % tiles) * BLOCK_K + 1 + tl.arange(0, BLOCK_K)
    s_row, R_row, mask_row = s_ptr + row * n, R_ptr + row * n, mask_ptr + row * n
    dtype: tl.constexpr = s_ptr.dtype.element_ty
    tau = tl.full((), tau, dtype)
    c = (1 - 2 * rank).to(dtype)[:, None]
    top = tl.full((BLOCK_K,), float("-inf"), dtype)
    for start in range(0, n, BLOCK_N):
        z, live = _logits(s_row, R_row, mask_row, start + tl.arange(0, BLOCK_N), n, c, tau)
        top = tl.maximum(top, tl.max(tl.where(live, z, float("-inf")), axis=1))
    Z, dot = tl.zeros_like(top), tl.zeros_like(top)
    for start in range(0, n, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)
        z, live = _logits(s_row, R_row, mask_row, offs_n, n, c, tau)
        e = tl.exp(tl.where(live, z - top[:, None], float("-inf")))
        Z += tl.sum(e, axis=1)
        if DOT:
            q = tl.load(q_ptr + row * n + offs_n, mask=offs_n < n, other=0.0)
            dot += tl.sum(tl.where(live, e * q[None, :], 0.0), axis=1)
    Z = tl.where(Z > 0, Z, 1.0)  # a list with no live entry
    offs_k = row * K + rank - 1
    tl.store(top_ptr + offs_k, top, mask=rank <= K)
    tl.store(Z_ptr + offs_k, Z, mask=rank <= K)
    if DOT:
        tl.store(dot_ptr + offs_k, dot / Z, mask=rank <= K)


@triton.jit
def _items_kernel(
    s_ptr,  # [B, n]
    R_ptr,  # [B, n]
    mask_ptr,  # bool [B, n]
    w_ptr,  # [B, K]
    q_ptr,  # [B, n], read if GRADIENT
    top_ptr,  # [B, K]
    Z_ptr,  # [B, K]
    dot_ptr,  # [B, K], read if GRADIENT
    out_ptr,  # [B, n], out: Q; if GRADIENT, sum_k (1 - 2k) dz_k
    G_ptr,  # [B, n], out if GRADIENT
    n: tl.int32,
    K: tl.int32,
    tiles: tl.int32,
    tau: tl.float64,
    GRADIENT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row = (tl.program_id(0) // tiles).to(tl.int64)
    offs_n = (tl.program_id(0) % tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
    s_row, R_row, mask_row = s_ptr + row * n, R_ptr + row * n, mask_ptr + row * n
    dtype: tl.constexpr = s_ptr.dtype.element_ty
    tau = tl.full((), tau, dtype)
    out = tl.zeros((BLOCK_N,), dtype)
    if GRADIENT:
        G = tl.zeros((BLOCK_N,), dtype)
        q = tl.load(q_ptr + row * n + offs_n, mask=offs_n < n, other=0.0)[None, :]
    for start in range(1, K + 1, BLOCK_K):
        rank = start + tl.arange(0, BLOCK_K)
        offs_k, mask_k = row * K + rank - 1, rank <= K
        c = (1 - 2 * rank).to(dtype)[:, None]
        z, live = _logits(s_row, R_row, mask_row, offs_n, n, c, tau)
        top = tl.load(top_ptr + offs_k, mask=mask_k, other=float("inf"))[:, None]
        Z = tl.load(Z_ptr + offs_k, mask=mask_k, other=1.0)[:, None]
        w = tl.load(w_ptr + offs_k, mask=mask_k, other=0.0)[:, None]
        wP = w * tl.exp(tl.where(live, z - top, float("-inf"))) / Z
        if GRADIENT:
            dot = tl.load(dot_ptr + offs_k, mask=mask_k, other=0.0)[:, None]
            dz = wP * (q - dot) / tau
            out += tl.sum(c * dz, axis=0)
            G += tl.sum(dz, axis=0)
        else:
            out += tl.sum(wP, axis=0)
    tl.store(out_ptr + row * n + offs_n, out, mask=offs_n < n)
    if GRADIENT:
        tl.store(G_ptr + row * n + offs_n, G, mask=offs_n < n)


class _TiledLists:
    """Contiguous arguments of one call, and the launches of the kernels."""

    def __init__(self, s: Tensor, w: Tensor, tau: float, mask: Tensor) -> None:
        # One score that is not finite makes the whole list NaN.
        finite = torch.where(mask, s, 0).abs().sum(-1, keepdim=True) < math.inf
        self.s = torch.where(finite, s, math.nan).contiguous()
        self.w, self.mask, self.tau = w.contiguous(), mask.contiguous(), tau
        (self.B, self.n), self.K = s.shape, w.shape[1]
        self.top, self.Z, self.dot = (torch.empty_like(self.w) for _ in range(3))
        self.R = self._pairs(torch.empty_like(self.s))

    def _pairs(self, out: Tensor, G: Tensor | None = None) -> Tensor:
        """Write R to `out`; with G, turn sum_k (1 - 2k) dz_k in `out` into ds."""
        tiles = triton.cdiv(self.n, PAIRS_SIZES["BLOCK_J"])
        _pairs_kernel[(self.B * tiles,)](
            self.s, self.mask, out if G is None else G, out, n=self.n, tiles=tiles, GRADIENT=G is not None,
            **PAIRS_SIZES, enable_fp_fusion=True,
        )  # fmt: skip
        return out

    def _ranks(self, q: Tensor | None) -> None:
        """Compute top and Z of each rank; with q, also <P_k, q>."""
        tiles = triton.cdiv(self.K, RANKS_SIZES["BLOCK_K"])
        _ranks_kernel[(self.B * tiles,)](
            self.s, self.R, self.mask, self.s if q is None else q, self.top, self.Z, self.dot,
            n=self.n, K=self.K, tiles=tiles, tau=self.tau, DOT=q is not None, **RANKS_SIZES, enable_fp_fusion=True,
        )  # fmt: skip

    def _items(self, q: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return Q, with q sum_k (1 - 2k) dz_k and G."""
        out, G = torch.empty_like(self.s), torch.empty_like(self.s)
        tiles = triton.cdiv(self.n, ITEMS_SIZES["BLOCK_N"])
        _items_kernel[(self.B * tiles,)](
            self.s, self.R, self.mask, self.w, self.s if q is None else q, self.top, self.Z, self.dot,
            out, G, n=self.n, K=self.K, tiles=tiles, tau=self.tau, GRADIENT=q is not None, **ITEMS_SIZES,
            enable_fp_fusion=True,
        )  # fmt: skip
        return out, G

    def forward(self) -> Tensor:
        """Return Q."""
        self._ranks(None)
        return self._items(None)[0]

    def backward(self, q: Tensor) -> Tensor:
        """Return ds for an upstream gradient q."""
        q = torch.where(self.mask, q, 0)
        self._ranks(q)
        return self._pairs(*self._items(q))


def soft_topk_forward(s: Tensor, w: Tensor, tau: float, mask: Tensor) -> Tensor:
    """Compute Q = sum_k w_k P_k: [B, n]."""
    return _TiledLists(s, w, tau, mask).forward()


def soft_topk_backward(s: Tensor, w: Tensor, tau: float, mask: Tensor, q: Tensor) -> Tensor:
    """Compute the gradient ds [B, n] for an upstream gradient q = dL/dQ [B, n]."""
    return _TiledLists(s, w, tau, mask).backward(q)


def drm_lists(s: Tensor, y: Tensor, w: Tensor, tau: float, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the DRM loss ||y - Q||^2 of each list [B] and its gradient to the scores [B, n]."""
    lists = _TiledLists(s, w, tau, mask)
    r = torch.where(mask, y - lists.forward(), 0)
    return (r * r).sum(-1), lists.backward(-2 * r)
