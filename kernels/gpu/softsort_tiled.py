"""`softsort` for lists of any length: of its active items only, in tiles of BLOCK_N items and BLOCK_K ranks.

Items far below the K-th score take no part in the first K ranks (docs/objective.md has the proof). The first kernel
finds the active ones, a few dozen of a thousand, and packs their scores. The others run over these alone. They are
parallel within a list too, so one list of 4096 active items fills a GPU:

    pack   : per list, some passes over its scores     the active items, their number and their positions
    pairs  : per tile of items, loop over all items    R_j = sum_l max(0, s_l - s_j),  or the pairs of the gradient
    ranks  : per tile of ranks, loop over all items    top_k = max_j z_kj,  Z_k = sum_j exp(z_kj - top_k),  <P_k, q>
    items  : per tile of items, loop over all ranks    Q_j = sum_k w_k P_kj,  or G_j and sum_k (1 - 2k) dz_kj

P_k is recomputed from (top_k, Z_k) where it is needed: n * K exponentials are cheaper than n * K floats of traffic. The
host does not know how many items are active: tiles beyond them end at once.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from drm_triton.kernels.gpu.launch import launch, register_limit
from drm_triton.kernels.gpu.ordered import float_of, ordered
from drm_triton.kernels.protocol import FLOAT32_MARGIN, FLOAT64_MARGIN

# 32 values of a tile per thread, 16 if several tiles are held at once.
PACK_SIZES = {"BLOCK_N": 512, "num_warps": 4}
PAIRS_SIZES = {"BLOCK_J": 64, "BLOCK_L": 128, "num_warps": 8}
RANKS_SIZES = {"BLOCK_K": 16, "BLOCK_N": 128, "num_warps": 4, **register_limit(168)}
ITEMS_SIZES = {"BLOCK_K": 16, "BLOCK_N": 128, "num_warps": 4}
AIM = tl.constexpr(1.01)  # steps of Newton's method aim this much above the target, which rounding could miss otherwise
WORTHWHILE = tl.constexpr(0.9)  # a step is followed by another one if it drops a tenth of the items


@triton.jit
def _load_live(s_row, mask_row, offs_n, n):
    """Return the scores at offs_n, and which of them are entries of the list."""
    live = tl.load(mask_row + offs_n, mask=offs_n < n, other=0) != 0
    return tl.load(s_row + offs_n, mask=live, other=float("-inf")), live


@triton.jit
def _kth_largest(s_row, mask_row, n, K, BITS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the K-th largest score of a list, by bisection of its bits. The list has at least K entries."""
    integer: tl.constexpr = tl.int32 if BITS == 32 else tl.int64
    low = tl.full((), -(2 ** (BITS - 1)), integer)  # at least K scores are >= low, fewer are >= high
    high = tl.full((), 2 ** (BITS - 1) - 1, integer)
    for _ in range(BITS):
        middle = (low & high) + ((low ^ high) >> 1)  # the mean, without overflow
        reach = tl.zeros((), tl.int32)
        for start in range(0, n, BLOCK_N):
            s, live = _load_live(s_row, mask_row, start + tl.arange(0, BLOCK_N), n)
            reach += tl.sum((live & (ordered(s) >= middle)).to(tl.int32), axis=0)
        low = tl.where(reach >= K, middle, low)
        high = tl.where(reach >= K, high, middle)
    return float_of(low)


@triton.jit
def _pack_kernel(
    s_ptr,  # [B, n]
    mask_ptr,  # bool [B, n]
    packed_ptr,  # [B, n], out: scores of the active items
    position_ptr,  # int32 [B, n], out: their positions, ascending
    count_ptr,  # int32 [B], out: their number
    n: tl.int32,
    K: tl.int32,
    target: tl.float64,  # T tau
    BITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Find theta with D(theta) = T tau by Newton's method from below, and pack the items that are not below theta.

    D(theta) = (s_K - theta) + 2 sum_{l > K} max(0, s_l - theta) is convex and falls, so no step leads above the target
    but by rounding, and then the theta before it is used.
    """
    row = tl.program_id(0).to(tl.int64) * n
    s_row, mask_row = s_ptr + row, mask_ptr + row
    dtype: tl.constexpr = s_ptr.dtype.element_ty
    target = tl.full((), target, dtype)
    number, kth = tl.zeros((), tl.int32), tl.full((), float("-inf"), dtype)
    for start in range(0, n, BLOCK_N):
        s, live = _load_live(s_row, mask_row, start + tl.arange(0, BLOCK_N), n)
        number += tl.sum(live.to(tl.int32), axis=0)
        kth = tl.maximum(kth, tl.max(s, axis=0))
    if (K > 1) & (number > K):
        kth = _kth_largest(s_row, mask_row, n, K, BITS, BLOCK_N)
    ties = -K
    for start in range(0, n, BLOCK_N):
        s, live = _load_live(s_row, mask_row, start + tl.arange(0, BLOCK_N), n)
        ties += tl.sum((live & (s >= kth)).to(tl.int32), axis=0)

    weight = (1 + 2 * ties).to(dtype)
    least = tl.full((), float("-inf"), dtype)  # all items, if no step is safe
    theta, kept = kth - target * AIM, tl.full((), float("inf"), dtype)
    going = number > K
    while going:
        total, inside = tl.zeros((), dtype), tl.zeros((), dtype)
        for start in range(0, n, BLOCK_N):
            s, live = _load_live(s_row, mask_row, start + tl.arange(0, BLOCK_N), n)
            between = (s > theta) & (s < kth)
            total += tl.sum(tl.where(between, s - theta, 0.0), axis=0)
            inside += tl.sum(between.to(dtype), axis=0)
        reached, slope = weight * (kth - theta) + 2 * total, weight + 2 * inside
        safe = reached >= target
        least = tl.where(safe, theta, least)
        going = safe & (slope < kept * WORTHWHILE)
        kept = slope
        theta += (reached - AIM * target) / slope

    count = tl.zeros((), tl.int32)
    for start in range(0, n, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)
        s, live = _load_live(s_row, mask_row, offs_n, n)
        active = live & (s >= least)
        place = count + tl.cumsum(active.to(tl.int32), axis=0) - 1
        tl.store(packed_ptr + row + place, s, mask=active)
        tl.store(position_ptr + row + place, offs_n, mask=active)
        count += tl.sum(active.to(tl.int32), axis=0)
    tl.store(count_ptr + tl.program_id(0), count)


@triton.jit
def _pairs_kernel(
    s_ptr,  # [B, n], packed
    count_ptr,  # int32 [B]
    G_ptr,  # [B, n], packed, read if GRADIENT
    part_ptr,  # [B, n], packed, read if GRADIENT: sum_k (1 - 2k) dz_k
    position_ptr,  # int32 [B, n], read if GRADIENT
    out_ptr,  # [B, n], out: R, packed; if GRADIENT, ds at the positions of the items
    n: tl.int32,
    tiles: tl.int32,
    GRADIENT: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    list_number = tl.program_id(0) // tiles
    row, first = list_number.to(tl.int64) * n, (tl.program_id(0) % tiles) * BLOCK_J
    count = tl.load(count_ptr + list_number)
    if first < count:
        offs_j = first + tl.arange(0, BLOCK_J)
        mask_j = offs_j < count
        s_j = tl.load(s_ptr + row + offs_j, mask=mask_j, other=0.0)
        total = tl.zeros_like(s_j)
        if GRADIENT:
            G_j = tl.load(G_ptr + row + offs_j, mask=mask_j, other=0.0)
        for start in range(0, count, BLOCK_L):
            offs_l = start + tl.arange(0, BLOCK_L)
            mask_l = offs_l < count
            above = tl.load(s_ptr + row + offs_l, mask=mask_l, other=0.0)[None, :] - s_j[:, None]
            if GRADIENT:
                G_l = tl.load(G_ptr + row + offs_l, mask=mask_l, other=0.0)
                pair = tl.where(mask_l[None, :], G_j[:, None] + G_l[None, :], 0.0)
                total += tl.sum(tl.where(above > 0, 2 * pair, tl.where(above == 0, pair, 0.0)), axis=1)
            else:
                total += tl.sum(tl.where(mask_l[None, :] & (above > 0), above, 0.0), axis=1)
        place = offs_j
        if GRADIENT:
            total += tl.load(part_ptr + row + offs_j, mask=mask_j, other=0.0)
            place = tl.load(position_ptr + row + offs_j, mask=mask_j, other=0)
        tl.store(out_ptr + row + place, total, mask=mask_j)


@triton.jit
def _logits(s_row, R_row, offs_n, count, c, tau):
    """Return z_kj = (c_k s_j - 2 R_j) / tau, c_k = 1 - 2k, and which j are active: [BLOCK_K, BLOCK_N], [1, BLOCK_N]."""
    active = offs_n < count
    s = tl.load(s_row + offs_n, mask=active, other=0.0)
    R = tl.load(R_row + offs_n, mask=active, other=0.0)
    return (c * s[None, :] - 2 * R[None, :]) / tau, active[None, :]


@triton.jit
def _ranks_kernel(
    s_ptr,  # [B, n], packed
    R_ptr,  # [B, n], packed
    count_ptr,  # int32 [B]
    position_ptr,  # int32 [B, n], read if DOT
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
    s_row, R_row, count = s_ptr + row * n, R_ptr + row * n, tl.load(count_ptr + row)
    dtype: tl.constexpr = s_ptr.dtype.element_ty
    tau = tl.full((), tau, dtype)
    c = (1 - 2 * rank).to(dtype)[:, None]
    top = tl.full((BLOCK_K,), float("-inf"), dtype)
    for start in range(0, count, BLOCK_N):
        z, active = _logits(s_row, R_row, start + tl.arange(0, BLOCK_N), count, c, tau)
        top = tl.maximum(top, tl.max(tl.where(active, z, float("-inf")), axis=1))
    Z, dot = tl.zeros_like(top), tl.zeros_like(top)
    for start in range(0, count, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)
        z, active = _logits(s_row, R_row, offs_n, count, c, tau)
        e = tl.exp(tl.where(active, z - top[:, None], float("-inf")))
        Z += tl.sum(e, axis=1)
        if DOT:
            position = tl.load(position_ptr + row * n + offs_n, mask=offs_n < count, other=0)
            q = tl.load(q_ptr + row * n + position, mask=offs_n < count, other=0.0)
            dot += tl.sum(tl.where(active, e * q[None, :], 0.0), axis=1)
    Z = tl.where(Z > 0, Z, 1.0)  # a list without entries
    offs_k = row * K + rank - 1
    tl.store(top_ptr + offs_k, top, mask=rank <= K)
    tl.store(Z_ptr + offs_k, Z, mask=rank <= K)
    if DOT:
        tl.store(dot_ptr + offs_k, dot / Z, mask=rank <= K)


@triton.jit
def _items_kernel(
    s_ptr,  # [B, n], packed
    R_ptr,  # [B, n], packed
    count_ptr,  # int32 [B]
    position_ptr,  # int32 [B, n]
    w_ptr,  # [B, K]
    q_ptr,  # [B, n], read if GRADIENT
    top_ptr,  # [B, K]
    Z_ptr,  # [B, K]
    dot_ptr,  # [B, K], read if GRADIENT
    out_ptr,  # [B, n], out: Q at the positions of the items; if GRADIENT, sum_k (1 - 2k) dz_k, packed
    G_ptr,  # [B, n], packed, out if GRADIENT
    n: tl.int32,
    K: tl.int32,
    tiles: tl.int32,
    tau: tl.float64,
    GRADIENT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row, first = (tl.program_id(0) // tiles).to(tl.int64), (tl.program_id(0) % tiles) * BLOCK_N
    count = tl.load(count_ptr + row)
    dtype: tl.constexpr = s_ptr.dtype.element_ty
    tau = tl.full((), tau, dtype)
    if first < count:
        offs_n = first + tl.arange(0, BLOCK_N)
        mask_n = offs_n < count
        s_row, R_row = s_ptr + row * n, R_ptr + row * n
        place = tl.load(position_ptr + row * n + offs_n, mask=mask_n, other=0)
        out = tl.zeros((BLOCK_N,), dtype)
        if GRADIENT:
            G = tl.zeros((BLOCK_N,), dtype)
            q = tl.load(q_ptr + row * n + place, mask=mask_n, other=0.0)[None, :]
            place = offs_n
        for start in range(1, K + 1, BLOCK_K):
            rank = start + tl.arange(0, BLOCK_K)
            offs_k, mask_k = row * K + rank - 1, rank <= K
            c = (1 - 2 * rank).to(dtype)[:, None]
            z, active = _logits(s_row, R_row, offs_n, count, c, tau)
            top = tl.load(top_ptr + offs_k, mask=mask_k, other=float("inf"))[:, None]
            Z = tl.load(Z_ptr + offs_k, mask=mask_k, other=1.0)[:, None]
            w = tl.load(w_ptr + offs_k, mask=mask_k, other=0.0)[:, None]
            wP = w * tl.exp(tl.where(active, z - top, float("-inf"))) / Z
            if GRADIENT:
                dot = tl.load(dot_ptr + offs_k, mask=mask_k, other=0.0)[:, None]
                dz = wP * (q - dot) / tau
                out += tl.sum(c * dz, axis=0)
                G += tl.sum(dz, axis=0)
            else:
                out += tl.sum(wP, axis=0)
        tl.store(out_ptr + row * n + place, out, mask=mask_n)
        if GRADIENT:
            tl.store(G_ptr + row * n + offs_n, G, mask=mask_n)


class _ActiveLists:
    """Contiguous arguments of one call, the active items of the lists, and the launches of the kernels."""

    def __init__(self, s: Tensor, w: Tensor, tau: float, mask: Tensor) -> None:
        # One score that is not finite makes the whole list NaN. Nothing is computed for it.
        self.bad = mask & ~(torch.where(mask, s, 0).abs().sum(-1, keepdim=True) < math.inf)
        self.w, self.tau = w.contiguous(), tau
        (self.B, self.n), self.K = s.shape, w.shape[1]
        self.s, self.R = torch.empty_like(s, memory_format=torch.contiguous_format), s.new_empty(s.shape)
        self.position = torch.empty_like(self.s, dtype=torch.int32)
        self.count = torch.empty(self.B, dtype=torch.int32, device=s.device)
        self.top, self.Z, self.dot = (torch.empty_like(self.w) for _ in range(3))
        double = s.dtype == torch.float64
        margin, eps = FLOAT64_MARGIN if double else FLOAT32_MARGIN, torch.finfo(s.dtype).eps
        target = (margin + math.log(self.n)) * tau * (1 + (self.n + 8) * eps)  # the last factor: the rounding of D
        launch(
            _pack_kernel, (self.B,), s.contiguous(), (mask & ~self.bad).contiguous(), self.s, self.position, self.count,
            n=self.n, K=self.K, target=target, BITS=64 if double else 32, **PACK_SIZES,
        )  # fmt: skip
        self._pairs(self.R)

    def _pairs(self, out: Tensor, gradient: tuple[Tensor, Tensor] | None = None) -> None:
        """Write R to `out`; with sum_k (1 - 2k) dz_k and G, write ds."""
        tiles, (part, G) = triton.cdiv(self.n, PAIRS_SIZES["BLOCK_J"]), gradient or (self.s, self.s)
        launch(
            _pairs_kernel, (self.B * tiles,),
            self.s, self.count, G, part, self.position, out, n=self.n, tiles=tiles,
            GRADIENT=gradient is not None, **PAIRS_SIZES,
        )  # fmt: skip

    def _ranks(self, q: Tensor | None) -> None:
        """Compute top and Z of each rank; with q, also <P_k, q>."""
        tiles = triton.cdiv(self.K, RANKS_SIZES["BLOCK_K"])
        launch(
            _ranks_kernel, (self.B * tiles,),
            self.s, self.R, self.count, self.position, self.s if q is None else q, self.top, self.Z, self.dot,
            n=self.n, K=self.K, tiles=tiles, tau=self.tau, DOT=q is not None, **RANKS_SIZES,
        )  # fmt: skip

    def _items(self, q: Tensor | None, out: Tensor, G: Tensor) -> None:
        """Write Q to `out`; with q, write sum_k (1 - 2k) dz_k and G."""
        tiles = triton.cdiv(self.n, ITEMS_SIZES["BLOCK_N"])
        launch(
            _items_kernel, (self.B * tiles,),
            self.s, self.R, self.count, self.position, self.w, self.s if q is None else q, self.top, self.Z, self.dot,
            out, G, n=self.n, K=self.K, tiles=tiles, tau=self.tau, GRADIENT=q is not None, **ITEMS_SIZES,
        )  # fmt: skip

    def forward(self) -> Tensor:
        """Return Q."""
        Q = torch.zeros_like(self.s)
        self._ranks(None)
        self._items(None, Q, Q)
        return Q.masked_fill_(self.bad, math.nan)

    def backward(self, q: Tensor) -> Tensor:
        """Return ds for an upstream gradient q."""
        q, ds, part, G = q.contiguous(), torch.zeros_like(self.s), torch.empty_like(self.s), torch.empty_like(self.s)
        self._ranks(q)
        self._items(q, part, G)
        self._pairs(ds, (part, G))
        return ds.masked_fill_(self.bad, math.nan)


def soft_topk_forward(s: Tensor, w: Tensor, tau: float, mask: Tensor) -> Tensor:
    """Compute Q = sum_k w_k P_k: [B, n]."""
    return _ActiveLists(s, w, tau, mask).forward()


def soft_topk_backward(s: Tensor, w: Tensor, tau: float, mask: Tensor, q: Tensor) -> Tensor:
    """Compute the gradient ds [B, n] for an upstream gradient q = dL/dQ [B, n]."""
    return _ActiveLists(s, w, tau, mask).backward(q)


def drm_lists(s: Tensor, y: Tensor, w: Tensor, tau: float, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the DRM loss ||y - Q||^2 of each list [B] and its gradient to the scores [B, n]."""
    lists = _ActiveLists(s, w, tau, mask)
    r = torch.where(mask, y - lists.forward(), 0)
    return (r * r).sum(-1), lists.backward(-2 * r)
