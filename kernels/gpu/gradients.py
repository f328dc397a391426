"""Losses of training lists and their gradients to the scores and to the user's row.

For a list of n items, the first rho positive (y = 1), u = U[user], v_j = V[item_j]:
    s_j = u.v_j  or  -||u - v_j||^2
    hinge  i = argmin of s over positives, j = argmax over negatives (ties: the first), Phi = log(1 + N / eta *
           #{negatives with margin - s_i + s_neg >= 0}):   Phi max(0, margin - s_i + s_j),   ds_i = -Phi, ds_j = Phi
    drm    ||y - Q||^2, see `softsort`
    mse    mean (s - y)^2,   ds = 2 (s - y) / n
    loss = hinge + lam drm + mse + the losses of `losses`,   g = dloss/ds
    user_grad = sum_j g_j v_j  or  -2 sum_j g_j (u - v_j)

Three kernels, each of which reads its inputs once for a tile of lists:

    scores         [lists, d] x [d, eta] for the negatives that a group of lists shares; others one by one
    losses         s -> losses and g; a list of up to softsort.MAX_ITEMS items is sorted for DRM
    user gradient  [lists, eta] x [eta, d], and the entries that are not shared one by one

A product over a group reads rho + eta / lists rows for each list in place of n. A list with its own negatives has no
products. DRM of longer lists, and in float64, is computed by `softsort_tiled` between the first two kernels. Products
are exact to the rounding of each operation, without tensor cores. Each of their entries is one sum in one thread.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from drm_triton.kernels.batches import ListBatch
from drm_triton.kernels.checks import check_lists
from drm_triton.kernels.gpu import softsort, softsort_tiled
from drm_triton.kernels.gpu.groups import BLOCK_LISTS, groups_of, kept_shared, tile_of_lists
from drm_triton.kernels.gpu.launch import launch, register_limit
from drm_triton.kernels.gpu.losses import finish, parts_mask
from drm_triton.kernels.gpu.rounding import widened
from drm_triton.kernels.gpu.softsort import above_sums, nan_or_zero, soft_topk, soft_topk_gradient, sort_lists
from drm_triton.kernels.precision import arithmetic
from drm_triton.kernels.protocol import ListGradients, ListTerms, Objective
from drm_triton.kernels.weights import rank_weights, training_rank_weights
from drm_triton.names import LOSSES

# Numbers of float64 take two registers each. So tiles have half as many of them: otherwise threads would spill.


def scores_sizes(dtype: torch.dtype) -> dict[str, int]:
    """Return tile sizes and warps of `_scores_kernel` for scores of a type.

    Without tensor cores, a thread holds the factors of its rows and columns of a product: BLOCK_FACTORS of each.
    """
    block_d = 256 // dtype.itemsize
    return {"BLOCK_LISTS": BLOCK_LISTS, "BLOCK_N": 16, "BLOCK_FACTORS": 16, "BLOCK_D": block_d, "num_warps": 1}


def user_gradient_sizes(d: int, dtype: torch.dtype) -> dict[str, int]:
    """Return tile sizes and warps of `_user_gradient_kernel` for d factors of a type."""
    block_d = max(16, min(256 // dtype.itemsize, triton.next_power_of_2(d)))
    return {"BLOCK_LISTS": BLOCK_LISTS, "BLOCK_N": 16, "BLOCK_D": block_d, "num_warps": 4}


def losses_sizes(n: int, dtype: torch.dtype) -> dict[str, int]:
    """Return tile sizes and warps of `_losses_kernel`. A long list is a program, with at least 4 items per thread.

    Each thread holds sums of all lists of its program. With all losses, it would spill those of 8 short lists.
    """
    if n <= softsort.MAX_ITEMS:
        sizes = softsort.softsort_sizes(n)
        lists = sizes["BLOCK_LISTS"] // (2 if sizes["BLOCK_N"] <= 32 else 1)
        return sizes | {"BLOCK_LISTS": max(1, lists * 4 // dtype.itemsize)}
    block_n = triton.next_power_of_2(n)
    num_warps = max(1, min(16, block_n // 128))
    registers = min(255, 2048 // num_warps)  # a multiprocessor has 2048 for each lane
    return {"BLOCK_LISTS": 1, "BLOCK_N": block_n, "num_warps": num_warps, **register_limit(registers)}


# Reading the values of users and items would make the host wait for the device. So the kernels check the ids. The row
# of an id outside its table is not read, and its score is NaN. This makes the losses and gradients of the list NaN.


@triton.jit
def _inside(ids, n_rows):
    """Return which ids are rows of a table."""
    return ids.to(tl.uint32) < n_rows.to(tl.uint32)  # as unsigned numbers, negative ids are too large


@triton.jit
def _load_rows(table_ptr, ids, n_rows, mask, offs_d, d):
    """Return factors offs_d of rows of a table, 0 for ids outside it: [rows, d]."""
    mask = mask & _inside(ids, n_rows)
    offset = ids.to(tl.int64)[:, None] * d + offs_d[None, :]
    return widened(tl.load(table_ptr + offset, mask=mask[:, None] & (offs_d < d)[None, :], other=0.0))


@triton.jit
def _score(u, v, L2: tl.constexpr):
    """Return the part of the scores of u with v, row by row, that a tile of factors contributes."""
    if L2:
        return -tl.sum((u - v) * (u - v), axis=1)
    else:
        return tl.sum(u * v, axis=1)


@triton.jit
def _next(own, last, n):
    """Return the first column of each list in `own` [lists, columns] beyond column `last`, n if there is none."""
    return tl.min(tl.where(own > last[:, None], own, n), axis=1)


@triton.jit(do_not_specialize=["B", "group_size", "tiles_of_group", "n_users", "n_items"])
def _scores_kernel(
    U_ptr,  # [M, d]
    V_ptr,  # [N, d]
    users_ptr,  # int32 [B]
    items_ptr,  # int32 [B, n]
    shared_ptr,  # int32 [groups, eta], read if SHARED
    replaced_ptr,  # bool [B, eta], read if SHARED
    s_ptr,  # [B, n], out
    B: tl.int64,
    group_size: tl.int64,
    tiles_of_group: tl.int64,
    n_users: tl.int64,
    n_items: tl.int64,
    n: tl.int32,
    eta: tl.int32,
    d: tl.int32,
    L2: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK_LISTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_FACTORS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Compute the scores of a tile of lists in BLOCK_N columns."""
    group, lists, exists = tile_of_lists(tl.program_id(0).to(tl.int64), B, group_size, tiles_of_group, BLOCK_LISTS)
    col = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    dtype: tl.constexpr = s_ptr.dtype.element_ty
    inside = exists[:, None] & (col < n)[None, :]
    users = tl.load(users_ptr + lists, mask=exists, other=-1)
    own = tl.where(inside, col[None, :], n)  # columns whose items the list does not share
    if SHARED:
        negative = col - (n - eta)
        mask = (negative >= 0) & (col < n)
        items = tl.load(shared_ptr + group * eta + negative, mask=mask, other=-1)
        s, norms = tl.zeros((BLOCK_LISTS, BLOCK_N), dtype), tl.zeros((BLOCK_LISTS, BLOCK_N), dtype)
        for start in tl.range(0, d, BLOCK_FACTORS, num_stages=1):
            offs_d = start + tl.arange(0, BLOCK_FACTORS)
            u = _load_rows(U_ptr, users, n_users, exists, offs_d, d)
            v = _load_rows(V_ptr, items, n_items, mask, offs_d, d)
            s = tl.dot(u, tl.trans(v), s, input_precision="ieee", out_dtype=dtype)
            if L2:
                norms += tl.sum(u * u, axis=1)[:, None] + tl.sum(v * v, axis=1)[None, :]
        if L2:
            s = 2 * s - norms
        s = tl.where(_inside(users, n_users)[:, None] & _inside(items, n_items)[None, :], s, float("nan"))
        kept = kept_shared(replaced_ptr, lists, exists, col, n, eta)
        tl.store(s_ptr + lists[:, None] * n + col[None, :], s, mask=kept)
        own = tl.where(kept, n, own)

    most = tl.max(tl.sum((own < n).to(tl.int32), axis=1), axis=0)
    position = tl.full((BLOCK_LISTS,), -1, tl.int32)
    for _ in range(most):
        position = _next(own, position, n)
        item = tl.load(items_ptr + lists * n + position, mask=position < n, other=-1)
        value = tl.zeros((BLOCK_LISTS,), dtype)
        for start in range(0, d, BLOCK_D):
            offs_d = start + tl.arange(0, BLOCK_D)
            u = _load_rows(U_ptr, users, n_users, exists, offs_d, d)
            v = _load_rows(V_ptr, item, n_items, exists, offs_d, d)
            value += _score(u, v, L2)
        value = tl.where(_inside(users, n_users) & _inside(item, n_items), value, float("nan"))
        tl.store(s_ptr + lists * n + position, value, mask=position < n)


@triton.jit(do_not_specialize=["B"])
def _losses_kernel(
    s_ptr,  # [B, n]
    w_ptr,  # [K]: rank weights, the same for every list (under AP: see `rank_weight`); read if DRM is "sorted"
    drm_ptr,  # [B], read if DRM is "given"
    losses_ptr,  # [parts + 1, B], out: the parts in the order of LOSSES, loss
    g_ptr,  # [B, n], out; if DRM is "given", in place: its gradient, then that of the loss
    B: tl.int64,
    n: tl.int32,
    rho: tl.int32,
    tau: tl.float64,
    lam: tl.float64,
    margin: tl.float64,
    ratio: tl.float64,
    temperature: tl.float64,
    psl_scale: tl.float64,
    K: tl.constexpr,  # so that P_1 is computed once if it is the only one
    DRM: tl.constexpr,  # "sorted": computed here from sorted lists, "given", or "off"
    AP: tl.constexpr,
    PARTS: tl.constexpr,  # see `losses`
    BLOCK_LISTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Compute losses and g of some lists."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_LISTS + tl.arange(0, BLOCK_LISTS)
    exists = row < B
    place = tl.arange(0, BLOCK_N)[None, :]
    live = exists[:, None] & (place < n)
    dtype: tl.constexpr = s_ptr.dtype.element_ty
    entry = row[:, None] * n + place
    s = tl.load(s_ptr + entry, mask=live, other=0.0)
    nan = nan_or_zero(s, live)
    position = tl.broadcast_to(place, s.shape)
    drm, ds = tl.zeros((BLOCK_LISTS,), dtype), tl.zeros_like(s)
    if DRM == "given":
        drm = tl.load(drm_ptr + row, mask=exists, other=0.0)
        ds = tl.load(g_ptr + entry, mask=live, other=0.0)
    if DRM == "sorted":
        tau = tl.full((), tau, dtype)
        w_row = w_ptr + tl.zeros((BLOCK_LISTS, 1), tl.int32)
        s, position = sort_lists(s, live)
        R = above_sums(s, place, live)
        hit = live & (position < rho)
        r = tl.where(live, hit.to(dtype) - soft_topk(s, R, live, w_row, K, tau, hit, place, AP), 0.0)
        drm = tl.sum(r * r, axis=1) + nan
        ds = soft_topk_gradient(s, R, live, -2 * r, w_row, K, tau, hit, place, AP)
    finish(
        row, exists, s, drm, ds, nan, position, live, losses_ptr, g_ptr,
        B, n, rho, lam, margin, ratio, temperature, psl_scale, PARTS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["B", "group_size", "tiles_of_group", "n_users", "n_items"])
def _user_gradient_kernel(
    U_ptr,  # [M, d]
    V_ptr,  # [N, d]
    users_ptr,  # int32 [B]
    items_ptr,  # int32 [B, n]
    shared_ptr,  # int32 [groups, eta], read if SHARED
    replaced_ptr,  # bool [B, eta], read if SHARED
    g_ptr,  # [B, n]
    user_grad_ptr,  # [B, d], out
    B: tl.int64,
    group_size: tl.int64,
    tiles_of_group: tl.int64,
    n_users: tl.int64,
    n_items: tl.int64,
    n: tl.int32,
    eta: tl.int32,
    d: tl.int32,
    L2: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK_LISTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Compute BLOCK_D factors of the user gradients of a tile of lists."""
    group, lists, exists = tile_of_lists(tl.program_id(0).to(tl.int64), B, group_size, tiles_of_group, BLOCK_LISTS)
    offs_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    dtype: tl.constexpr = g_ptr.dtype.element_ty
    total, g_sum = tl.zeros((BLOCK_LISTS, BLOCK_D), dtype), tl.zeros((BLOCK_LISTS,), dtype)
    for first in tl.range(0, n, BLOCK_N, num_stages=1):
        col = first + tl.arange(0, BLOCK_N)
        inside = exists[:, None] & (col < n)[None, :]
        g = tl.load(g_ptr + lists[:, None] * n + col[None, :], mask=inside, other=0.0)
        g_sum += tl.sum(g, axis=1)
        # Hinge and DRM have a gradient at few items of a long list. The rows of the others are not read.
        own = tl.where(g != 0, col[None, :], n)
        if SHARED:
            kept = (g != 0) & kept_shared(replaced_ptr, lists, exists, col, n, eta)
            used = tl.max(kept.to(tl.int32), axis=0) > 0
            if tl.max(used.to(tl.int32), axis=0) > 0:
                items = tl.load(shared_ptr + group * eta + (col - (n - eta)), mask=used, other=-1)
                v = _load_rows(V_ptr, items, n_items, used, offs_d, d)
                # A list with a row that is not finite has g = NaN. For the other lists, 0 times this row must be 0.
                v = tl.where(tl.abs(v) < float("inf"), v, 0.0)
                total = tl.dot(tl.where(kept, g, 0.0), v, total, input_precision="ieee", out_dtype=dtype)
            own = tl.where(kept, n, own)
        most = tl.max(tl.sum((own < n).to(tl.int32), axis=1), axis=0)
        position = tl.full((BLOCK_LISTS,), -1, tl.int32)
        for _ in range(most):
            position = _next(own, position, n)
            entry = lists * n + position
            item = tl.load(items_ptr + entry, mask=position < n, other=-1)
            coefficient = tl.load(g_ptr + entry, mask=position < n, other=0.0)
            v = _load_rows(V_ptr, item, n_items, exists, offs_d, d)
            total += coefficient[:, None] * v
    if L2:
        users = tl.load(users_ptr + lists, mask=exists, other=-1)
        u = _load_rows(U_ptr, users, n_users, exists, offs_d, d)
        total = 2 * (total - g_sum[:, None] * u)
    out = user_grad_ptr + lists[:, None] * d + offs_d[None, :]
    tl.store(out, total, mask=exists[:, None] & (offs_d < d)[None, :])


def list_gradients(
    U: Tensor, V: Tensor, batch: ListBatch, objective: Objective, n_items: int | None = None
) -> ListGradients:
    """Compute losses of lists, and their gradients to the scores and to the user's row.

    A list with a score that is not finite has loss and gradient NaN. On a GPU, so has a list with an id outside U or V.
    Tensors that are not contiguous are copied.
    """
    check_lists(U, V, batch, objective, values=U.device.type == "cpu")
    U, V, users, items = U.contiguous(), V.contiguous(), batch.users.contiguous(), batch.items.contiguous()
    (B, n), d = items.shape, U.shape[1]
    dtype = arithmetic(U.dtype)
    s, losses, user_grad = (U.new_empty(*shape, dtype=dtype) for shape in ((B, n), (len(LOSSES) + 1, B), (B, d)))
    if B == 0:
        return ListGradients._make([s, *losses, torch.empty_like(s), user_grad])
    groups = groups_of(items, batch.shared)
    tables = (U, V, users, items, *groups.tensors)
    flags = {"L2": objective.score == "l2", "SHARED": groups.sizes["eta"] > 0}
    sizes: dict[str, Any] = {"n_users": len(U), "n_items": len(V), "n": n, "d": d, **groups.sizes, **flags}

    blocks = scores_sizes(dtype)
    blocks_of_n = triton.cdiv(n, blocks["BLOCK_N"])
    launch(_scores_kernel, (groups.n_tiles, blocks_of_n), *tables, s, **sizes, **blocks)
    g = compute_losses(s, losses, objective, len(V) if n_items is None else n_items)
    blocks = user_gradient_sizes(d, dtype)
    blocks_of_d = triton.cdiv(d, blocks["BLOCK_D"])
    launch(_user_gradient_kernel, (groups.n_tiles, blocks_of_d), *tables, g, user_grad, **sizes, **blocks)
    return ListGradients._make([s, *losses, g, user_grad])


def compute_losses(s: Tensor, losses: Tensor, objective: Objective, n_items: int) -> Tensor:
    """Write the losses [parts + 1, B] of lists with scores s [B, n]; return g [B, n]."""
    B, n = s.shape
    drm, g, w = s, torch.empty_like(s), s  # drm and w are not read unless they are set below
    mode = "off"
    if objective.drm and not softsort.tiled(s):
        mode, w = "sorted", training_rank_weights(objective, s.dtype, s.device)
    elif objective.drm:
        mode, mask = "given", torch.ones_like(s, dtype=torch.bool)
        y = (torch.arange(n, device=s.device) < objective.rho).to(s.dtype).expand_as(s)
        drm, g = softsort_tiled.drm_lists(
            s, y, rank_weights(s, y, objective.K, objective.weight, mask), objective.tau, mask
        )
    sizes = losses_sizes(n, s.dtype)
    launch(
        _losses_kernel,
        (triton.cdiv(B, sizes["BLOCK_LISTS"]),),
        s,
        w,
        drm,
        losses,
        g,
        B=B,
        n=n,
        rho=objective.rho,
        K=objective.K,
        tau=objective.tau,
        lam=objective.lam,
        margin=objective.margin,
        ratio=n_items / max(1, n - objective.rho),
        temperature=objective.temperature,
        psl_scale=objective.psl_scale,
        DRM=mode,
        AP=objective.weight == "ap",
        PARTS=parts_mask(objective),
        **sizes,
    )
    return g


def list_terms(
    U: Tensor,
    V: Tensor,
    batch: ListBatch,
    objective: Objective,
    weights: Tensor | None = None,
    n_items: int | None = None,
) -> ListTerms:
    """Compute losses of lists, and the gradients of users and items: see `protocol.Backend.list_terms`."""
    return list_gradients(U, V, batch, objective, n_items).terms(U, batch, weights)
