"""Losses of training lists and their gradients to the scores and to the user's row, in one kernel.

For a list of n items, the first rho positive (y = 1), u = U[user], v_j = V[item_j]:
    s_j = u.v_j  or  -||u - v_j||^2
    hinge  i = argmin of s over positives, j = argmax over negatives (ties: the first), Phi = log(1 + N / eta *
           #{negatives with margin - s_i + s_neg >= 0}):   Phi max(0, margin - s_i + s_j),   ds_i = -Phi, ds_j = Phi
    drm    ||y - Q||^2, see `softsort`
    mse    mean (s - y)^2,   ds = 2 (s - y) / n
    loss = hinge + lam drm + mse,   g = dloss/ds
    user_grad = sum_j g_j v_j  or  -2 sum_j g_j (u - v_j)

A list of up to softsort.MAX_ITEMS items is one program. It reads n * d + d floats and writes 2 n + d + 4. P, Q and the
n x n differences stay in the program. Longer lists use separate kernels for the scores, `softsort_tiled` and the user
gradient.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from drm_triton.kernels.checks import check_lists
from drm_triton.kernels.gpu import softsort, softsort_tiled
from drm_triton.kernels.gpu.options import register_limit
from drm_triton.kernels.gpu.softsort import above_sums, hard_rank, nan_or_zero, soft_topk, soft_topk_gradient
from drm_triton.kernels.protocol import ListBatch, ListGradients, Objective
from drm_triton.kernels.weights import rank_weights, training_rank_weights
from drm_triton.names import LOSSES


def gradients_sizes(n: int, d: int, k: int) -> dict[str, int]:
    """Return tile sizes and warps of `_gradients_kernel` for lists of n items and d factors.

    The V tile is the largest: BLOCK_N * BLOCK_D floats, with a warp per 32 items. Up to 64 factors it takes at most 64
    registers per thread and stays in registers from the scores to the user gradient. With 128 factors, only 8 warps
    would fit on an NVIDIA multiprocessor. Tiles of 32 factors, gathered twice (the second time from the cache), leave
    room for 24.
    """
    block_d = triton.next_power_of_2(d)
    block_d = max(16, block_d) if block_d <= 64 else 32
    limit = register_limit(96 if block_d <= 32 else 144) if n > 32 else {}  # no spills; room for 20 and 12 to 14 warps
    return {**softsort.softsort_sizes(n, k), "BLOCK_D": block_d, **limit}


LONG_SIZES = {"BLOCK_N": 64, "BLOCK_D": 64, "num_warps": 4}  # of lists beyond MAX_ITEMS: 32 floats per thread


def finish_sizes(n: int) -> dict[str, int]:
    """Return tile size and warps of `_finish_kernel`: at least 4 items per thread."""
    block_n = triton.next_power_of_2(n)
    return {"BLOCK_N": block_n, "num_warps": max(1, min(16, block_n // 128))}


# Reading the values of users and items would make the host wait for the device. So the kernels check the ids. The row
# of an id outside its table is not read, and its score is NaN. This makes the losses and gradients of the list NaN.


@triton.jit
def _locate(users_ptr, items_ptr, row, offs_n, n, n_users, n_items):
    """Return the user of a list, the items at offs_n, and which items can be read (none if the user is unknown)."""
    user = tl.load(users_ptr + row)
    item = tl.load(items_ptr + row * n + offs_n, mask=offs_n < n, other=-1)
    known = user.to(tl.uint32) < n_users.to(tl.uint32)  # as unsigned numbers, negative ids are too large
    inside = item.to(tl.uint32) < tl.where(known, n_items, 0).to(tl.uint32)
    return tl.where(known, user, 0).to(tl.int64), item.to(tl.int64), inside


@triton.jit
def _load_rows(U_row, V_ptr, item, inside, start, d, BLOCK_D: tl.constexpr):
    """Load factors start .. start + BLOCK_D - 1 of user and items: [1, BLOCK_D], [BLOCK_N, BLOCK_D]."""
    offs_d = start + tl.arange(0, BLOCK_D)[None, :]
    u = tl.load(U_row + offs_d, mask=offs_d < d, other=0.0)
    v = tl.load(V_ptr + item[:, None] * d + offs_d, mask=inside[:, None] & (offs_d < d), other=0.0)
    return u, v


@triton.jit
def _score(u, v, L2: tl.constexpr):
    """Return the part of the scores that a tile of factors contributes: [BLOCK_N]."""
    if L2:
        return -tl.sum((u - v) * (u - v), axis=1)
    else:
        return tl.sum(u * v, axis=1)


@triton.jit
def _user_gradient(g, u, v, L2: tl.constexpr):
    """Return the part of the user gradient that a tile of items contributes: [BLOCK_D]."""
    if L2:
        return -2 * tl.sum(g[:, None] * (u - v), axis=0)
    else:
        return tl.sum(g[:, None] * v, axis=0)


@triton.jit
def _log1p(x):
    """Return log(1 + x) for x >= 0, accurate for small x too (Kahan)."""
    y = 1 + x
    return tl.where(y == 1, x, tl.log(y) * (x / tl.where(y == 1, 1.0, y - 1)))


@triton.jit
def _hinge(s, offs_n, live, rho, margin, ratio):
    """Return the hinge loss and its gradient to the scores; `ratio` is N / eta."""
    positive, negative = offs_n < rho, live & (offs_n >= rho)
    lowest = tl.min(tl.where(positive, s, float("inf")), axis=0)
    highest = tl.max(tl.where(negative, s, float("-inf")), axis=0)
    i = tl.min(tl.where(positive & (s == lowest), offs_n, s.shape[0]), axis=0)
    j = tl.min(tl.where(negative & (s == highest), offs_n, s.shape[0]), axis=0)
    violations = tl.sum((negative & (margin - lowest + s >= 0)).to(s.dtype), axis=0)
    gap = margin - lowest + highest
    phi = _log1p(ratio * violations)
    loss = tl.where(gap > 0, phi * gap, 0.0)
    step = tl.where(gap > 0, phi, 0.0)
    return loss, tl.where(offs_n == j, step, 0.0) - tl.where(offs_n == i, step, 0.0)


@triton.jit
def _softmax(s, offs_n, live, rho, temperature):
    """Return sum_i log(1 + sum_j exp((s_j - s_i) / temperature)) and its gradient to the scores."""
    positive, negative = offs_n < rho, live & (offs_n >= rho)
    highest = tl.max(tl.where(negative, s, float("-inf")), axis=0)
    e = tl.where(negative, tl.exp((s - highest) / temperature), 0.0)
    total = tl.sum(e, axis=0)
    x = (highest - s) / temperature + tl.log(total)
    rest = tl.exp(-tl.abs(x))
    loss = tl.sum(tl.where(positive, tl.maximum(x, 0.0) + _log1p(rest), 0.0), axis=0)
    wrong = tl.where(positive, tl.where(x > 0, 1.0, rest) / (1 + rest), 0.0)  # weight of the negatives in the softmax
    return loss, (tl.sum(wrong, axis=0) / total * e - wrong) / temperature


@triton.jit
def _psl(s, offs_n, live, rho, scale, temperature):
    """Return sum_i log(1 + sum_j r_ij^(1 / temperature)), r_ij = max(0, 1 + scale (s_j - s_i)), and its gradient."""
    negative = live & (offs_n >= rho)
    highest = tl.max(tl.where(negative, s, float("-inf")), axis=0)
    loss, g = tl.sum(tl.zeros_like(s), axis=0), tl.zeros_like(s)
    for i in range(rho):
        positive = tl.sum(tl.where(offs_n == i, s, 0.0), axis=0)
        r = tl.where(negative, tl.maximum(1 + scale * (s - positive), 0.0), 0.0)
        top = 1 + scale * (highest - positive)  # the largest r_ij
        some = top > 0
        top = tl.where(some, top, 1.0)
        e = tl.where(r > 0, tl.exp(tl.log(tl.where(r > 0, r, 1.0) / top) / temperature), 0.0)
        total = tl.where(some, tl.sum(e, axis=0), 1.0)
        x = tl.log(top) / temperature + tl.log(total)
        rest = tl.exp(-tl.abs(x))
        loss += tl.where(some, tl.maximum(x, 0.0) + _log1p(rest), 0.0)
        fraction = tl.where(x > 0, 1.0, rest) / (1 + rest)
        g_pairs = scale / temperature * fraction / total * tl.where(r > 0, e / tl.where(r > 0, r, 1.0), 0.0)
        g += g_pairs - tl.where(offs_n == i, tl.sum(g_pairs, axis=0), 0.0)
    return loss, g


@triton.jit
def _bpr(s, offs_n, live, n, rho, temperature):
    """Return sum_i mean_j log(1 + exp((s_j - s_i) / temperature)) and its gradient to the scores."""
    negative = live & (offs_n >= rho)
    loss, g = tl.sum(tl.zeros_like(s), axis=0), tl.zeros_like(s)
    for i in range(rho):
        x = (s - tl.sum(tl.where(offs_n == i, s, 0.0), axis=0)) / temperature
        rest = tl.exp(-tl.abs(x))
        loss += tl.sum(tl.where(negative, tl.maximum(x, 0.0) + _log1p(rest), 0.0), axis=0) / (n - rho)
        g_pairs = tl.where(negative, tl.where(x > 0, 1.0, rest) / (1 + rest), 0.0) / (temperature * (n - rho))
        g += g_pairs - tl.where(offs_n == i, tl.sum(g_pairs, axis=0), 0.0)
    return loss, g


@triton.jit
def _finish(
    row, s, drm, ds, nan, offs_n, live, losses_ptr, g_ptr, B, n, rho, lam, margin, ratio, temperature, psl_scale,
    HINGE: tl.constexpr, MSE: tl.constexpr, SOFTMAX: tl.constexpr, PSL: tl.constexpr, BPR: tl.constexpr,
):  # fmt: skip
    """Add the other losses to DRM and its gradient ds; store losses and g [BLOCK_N]. `nan` (NaN or 0) is added."""
    dtype: tl.constexpr = s.dtype
    lam = tl.full((), lam, dtype)
    hinge, mse, softmax = tl.zeros((), dtype), tl.zeros((), dtype), tl.zeros((), dtype)
    psl, bpr, g = tl.zeros((), dtype), tl.zeros((), dtype), lam * ds + nan
    temperature = tl.full((), temperature, dtype)
    if HINGE:
        hinge, step = _hinge(s, offs_n, live, rho, tl.full((), margin, dtype), tl.full((), ratio, dtype))
        hinge += nan
        g += step
    if MSE:
        error = tl.where(live, s - (offs_n < rho).to(dtype), 0.0)
        mse = tl.sum(error * error, axis=0) / n + nan
        g += 2 * error / n
    if SOFTMAX:
        softmax, step = _softmax(s, offs_n, live, rho, temperature)
        softmax += nan
        g += step
    if PSL:
        psl, step = _psl(s, offs_n, live, rho, tl.full((), psl_scale, dtype), temperature)
        psl += nan
        g += step
    if BPR:
        bpr, step = _bpr(s, offs_n, live, n, rho, temperature)
        bpr += nan
        g += step
    tl.store(g_ptr + row * n + offs_n, g, mask=live)
    tl.store(losses_ptr + row, hinge)
    tl.store(losses_ptr + B + row, drm)
    tl.store(losses_ptr + 2 * B + row, mse)
    tl.store(losses_ptr + 3 * B + row, softmax)
    tl.store(losses_ptr + 4 * B + row, psl)
    tl.store(losses_ptr + 5 * B + row, bpr)
    tl.store(losses_ptr + 6 * B + row, hinge + lam * drm + mse + softmax + psl + bpr)
    return g


@triton.jit(do_not_specialize=["B", "n_users", "n_items"])
def _gradients_kernel(
    U_ptr,  # [M, d]
    V_ptr,  # [N, d]
    users_ptr,  # int32 [B]
    items_ptr,  # int32 [B, n]
    w_ptr,  # [K]: rank weights, the same for every list (under AP: see `rank_weight`)
    s_ptr,  # [B, n], out
    losses_ptr,  # [7, B], out: the parts in the order of LOSSES, loss
    g_ptr,  # [B, n], out
    user_grad_ptr,  # [B, d], out
    B: tl.int64,
    n_users: tl.int64,
    n_items: tl.int64,
    n: tl.int32,
    d: tl.int32,
    rho: tl.int32,
    K: tl.int32,
    tau: tl.float64,
    lam: tl.float64,
    margin: tl.float64,
    ratio: tl.float64,
    temperature: tl.float64,
    psl_scale: tl.float64,
    L2: tl.constexpr,
    HINGE: tl.constexpr,
    DRM: tl.constexpr,
    MSE: tl.constexpr,
    SOFTMAX: tl.constexpr,
    PSL: tl.constexpr,
    BPR: tl.constexpr,
    AP: tl.constexpr,
    RESIDENT: tl.constexpr,  # d <= BLOCK_D: the V tile is loaded once
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    offs_n = tl.arange(0, BLOCK_N)
    live = offs_n < n
    dtype: tl.constexpr = s_ptr.dtype.element_ty
    user, item, inside = _locate(users_ptr, items_ptr, row, offs_n, n, n_users, n_items)
    U_row = U_ptr + user * d

    if RESIDENT:
        u, v = _load_rows(U_row, V_ptr, item, inside, 0, d, BLOCK_D)
        s = _score(u, v, L2)
    else:
        s = tl.zeros((BLOCK_N,), dtype)
        for start in range(0, d, BLOCK_D):
            u, v = _load_rows(U_row, V_ptr, item, inside, start, d, BLOCK_D)
            s += _score(u, v, L2)
    s = tl.where(inside, s, float("nan"))
    tl.store(s_ptr + row * n + offs_n, s, mask=live)
    # After the sum, all threads of a row hold its score. The gather leaves one score per thread, which halves the
    # registers and instructions of everything that follows.
    s = tl.gather(s, offs_n, 0)
    nan = nan_or_zero(s, live)

    drm, ds = tl.zeros((), dtype), tl.zeros((BLOCK_N,), dtype)
    if DRM:
        tau = tl.full((), tau, dtype)
        R = above_sums(s, n)
        positive_ranks = offs_n
        if AP:
            positive_ranks = tl.where(offs_n < rho, hard_rank(s, n), BLOCK_N)
        Q = soft_topk(s, R, w_ptr, K, tau, positive_ranks, AP, BLOCK_K)
        r = tl.where(live, (offs_n < rho).to(dtype) - Q, 0.0)
        drm = tl.sum(r * r, axis=0) + nan
        ds = soft_topk_gradient(s, R, -2 * r, w_ptr, n, K, tau, positive_ranks, AP, BLOCK_K)
    g = _finish(
        row, s, drm, ds, nan, offs_n, live, losses_ptr, g_ptr, B, n, rho, lam, margin, ratio, temperature, psl_scale,
        HINGE, MSE, SOFTMAX, PSL, BPR,
    )  # fmt: skip

    out = user_grad_ptr + row * d
    if RESIDENT:
        offs_d = tl.arange(0, BLOCK_D)
        tl.store(out + offs_d, _user_gradient(g, u, v, L2), mask=offs_d < d)
    else:
        for start in range(0, d, BLOCK_D):
            offs_d = start + tl.arange(0, BLOCK_D)
            u, v = _load_rows(U_row, V_ptr, item, inside, start, d, BLOCK_D)
            tl.store(out + offs_d, _user_gradient(g, u, v, L2), mask=offs_d < d)


@triton.jit(do_not_specialize=["n_users", "n_items"])
def _scores_kernel(
    U_ptr,  # [M, d]
    V_ptr,  # [N, d]
    users_ptr,  # int32 [B]
    items_ptr,  # int32 [B, n]
    s_ptr,  # [B, n], out
    n_users: tl.int64,
    n_items: tl.int64,
    n: tl.int32,
    d: tl.int32,
    tiles: tl.int32,
    L2: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Compute the scores of one tile of a long list."""
    row = (tl.program_id(0) // tiles).to(tl.int64)
    offs_n = (tl.program_id(0) % tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
    user, item, inside = _locate(users_ptr, items_ptr, row, offs_n, n, n_users, n_items)
    U_row = U_ptr + user * d
    s = tl.zeros((BLOCK_N,), s_ptr.dtype.element_ty)
    for start in range(0, d, BLOCK_D):
        u, v = _load_rows(U_row, V_ptr, item, inside, start, d, BLOCK_D)
        s += _score(u, v, L2)
    tl.store(s_ptr + row * n + offs_n, tl.where(inside, s, float("nan")), mask=offs_n < n)


@triton.jit(do_not_specialize=["B"])
def _finish_kernel(
    s_ptr,  # [B, n]
    drm_ptr,  # [B]
    losses_ptr,  # [7, B], out
    g_ptr,  # [B, n], in place: gradient of drm, then of the loss
    B: tl.int64,
    n: tl.int32,
    rho: tl.int32,
    lam: tl.float64,
    margin: tl.float64,
    ratio: tl.float64,
    temperature: tl.float64,
    psl_scale: tl.float64,
    HINGE: tl.constexpr,
    MSE: tl.constexpr,
    SOFTMAX: tl.constexpr,
    PSL: tl.constexpr,
    BPR: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Compute hinge, mse and loss of one long list."""
    row = tl.program_id(0).to(tl.int64)
    offs_n = tl.arange(0, BLOCK_N)
    live = offs_n < n
    s = tl.load(s_ptr + row * n + offs_n, mask=live, other=0.0)
    ds = tl.load(g_ptr + row * n + offs_n, mask=live, other=0.0)
    drm = tl.load(drm_ptr + row)
    nan = nan_or_zero(s, live)
    _finish(
        row, s, drm, ds, nan, offs_n, live, losses_ptr, g_ptr, B, n, rho, lam, margin, ratio, temperature, psl_scale,
        HINGE, MSE, SOFTMAX, PSL, BPR,
    )  # fmt: skip


@triton.jit(do_not_specialize=["n_users", "n_items"])
def _user_gradient_kernel(
    U_ptr,  # [M, d]
    V_ptr,  # [N, d]
    users_ptr,  # int32 [B]
    items_ptr,  # int32 [B, n]
    g_ptr,  # [B, n]
    user_grad_ptr,  # [B, d], out
    n_users: tl.int64,
    n_items: tl.int64,
    n: tl.int32,
    d: tl.int32,
    tiles: tl.int32,
    L2: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Compute one tile of factors of the user gradient of a long list."""
    row = (tl.program_id(0) // tiles).to(tl.int64)
    start = (tl.program_id(0) % tiles) * BLOCK_D
    offs_d = start + tl.arange(0, BLOCK_D)
    total = tl.zeros((BLOCK_D,), g_ptr.dtype.element_ty)
    for first_item in range(0, n, BLOCK_N):
        offs_n = first_item + tl.arange(0, BLOCK_N)
        user, item, inside = _locate(users_ptr, items_ptr, row, offs_n, n, n_users, n_items)
        g = tl.load(g_ptr + row * n + offs_n, mask=offs_n < n, other=0.0)
        u, v = _load_rows(U_ptr + user * d, V_ptr, item, inside, start, d, BLOCK_D)
        total += _user_gradient(g, u, v, L2)
    tl.store(user_grad_ptr + row * d + offs_d, total, mask=offs_d < d)


def list_gradients(U: Tensor, V: Tensor, batch: ListBatch, objective: Objective) -> ListGradients:
    """Compute losses of lists, and their gradients to the scores and to the user's row.

    A list with a score that is not finite has loss and gradient NaN. On a GPU, so has a list with an id outside U or V.
    Tensors that are not contiguous are copied.
    """
    check_lists(U, V, batch, objective, values=U.device.type == "cpu")
    U, V, users, items = U.contiguous(), V.contiguous(), batch.users.contiguous(), batch.items.contiguous()
    (B, n), d = items.shape, U.shape[1]
    s, losses, user_grad = U.new_empty(B, n), U.new_empty(len(LOSSES) + 1, B), U.new_empty(B, d)
    shapes = {"n_users": len(U), "n_items": len(V), "n": n, "d": d}
    loss_options = {
        "B": B,
        "rho": objective.rho,
        "lam": objective.lam,
        "margin": objective.margin,
        "ratio": len(V) / max(1, n - objective.rho),
        "HINGE": objective.hinge,
        "MSE": objective.mse,
        "temperature": objective.temperature,
        "psl_scale": objective.psl_scale,
        "SOFTMAX": objective.softmax,
        "PSL": objective.psl,
        "BPR": objective.bpr,
    }
    L2 = objective.score == "l2"
    if B == 0:
        g = torch.empty_like(s)
    elif n <= softsort.MAX_ITEMS:
        g = torch.empty_like(s)
        w = training_rank_weights(objective, U.dtype, U.device) if objective.drm else s  # not read without DRM
        sizes = gradients_sizes(n, d, objective.K)
        _gradients_kernel[(B,)](
            U, V, users, items, w, s, losses, g, user_grad,
            K=objective.K, tau=objective.tau, L2=L2, DRM=objective.drm, AP=objective.weight == "ap",
            RESIDENT=d <= sizes["BLOCK_D"], **shapes, **loss_options, **sizes, enable_fp_fusion=True,
        )  # fmt: skip
    else:
        drm, g = s.new_zeros(B), torch.zeros_like(s)
        tiles_of_n, tiles_of_d = triton.cdiv(n, LONG_SIZES["BLOCK_N"]), triton.cdiv(d, LONG_SIZES["BLOCK_D"])
        _scores_kernel[(B * tiles_of_n,)](
            U, V, users, items, s, tiles=tiles_of_n, L2=L2, **shapes, **LONG_SIZES, enable_fp_fusion=True
        )
        if objective.drm:
            mask = torch.ones_like(s, dtype=torch.bool)
            y = (torch.arange(n, device=s.device) < objective.rho).to(s.dtype).expand_as(s)
            w = rank_weights(s, y, objective.K, objective.weight, mask)
            drm, g = softsort_tiled.drm_lists(s, y, w, objective.tau, mask)
        _finish_kernel[(B,)](s, drm, losses, g, n=n, **loss_options, **finish_sizes(n), enable_fp_fusion=True)
        _user_gradient_kernel[(B * tiles_of_d,)](
            U, V, users, items, g, user_grad, tiles=tiles_of_d, L2=L2, **shapes, **LONG_SIZES, enable_fp_fusion=True
        )
    return ListGradients._make([s, *losses, g, user_grad])
