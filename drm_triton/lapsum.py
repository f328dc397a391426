"""LapSum: a soft top K of scores [B, n] by a sum of Laplace distribution functions (Struski et al., 2025).

    Q_j = F((s_j - beta) / tau),   F(x) = exp(x) / 2 for x <= 0 and 1 - exp(-x) / 2 for x > 0

The threshold beta of a list is the number for which Q sums to K. It has a closed form. Q never exceeds 1, and has a
gradient everywhere, ties included. With the density f = F',

    ds = f * (q - <f, q> / sum f) / tau       for an upstream gradient q.

Only the first 2K items of the ranking can lie above beta: if beta were the score of rank m, the first m items would
have Q >= 1/2, a sum of m/2 or more. All others enter the equation of beta by a single number, the sum of their exp(s_j
/ tau). So a list costs a selection of 2K items and three passes over n, not a sort.
"""

import math
from typing import Any

import torch
from torch import Tensor

from drm_triton.lists import differentiable, exp_


@torch.library.custom_op("drm_triton::lapsum", mutates_args=())
def _lapsum_forward(s: Tensor, k: int, tau: float, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return Q and the density f, both [B, n] and 0 for padding."""
    n = s.shape[1]
    s, mask = s.contiguous(), None if mask is None else mask.contiguous()
    nan_or_zero = 0 * s.sum(1, keepdim=True)  # a score that is not finite makes its list NaN
    length = torch.full_like(nan_or_zero, n) if mask is None else mask.sum(1, keepdim=True).to(s.dtype)
    if mask is not None:
        s = torch.where(mask, s, -torch.finfo(s.dtype).max / 2)  # no part in any sum
    K = length.clamp(max=k)
    reference, log_u = _threshold(s, K, min(2 * k, n), tau)
    log_u = torch.where(length == K, -math.inf, log_u)  # a list of K items or fewer is the top K
    x = s.sub(reference).div_(tau).sub_(log_u + nan_or_zero)
    above = x > 0
    f = exp_(x.abs_().neg_()).div_(2)
    if mask is not None:
        above, f = above & mask, torch.where(mask, f, 0)
    return torch.where(above, 1 - f, f), f


def _threshold(s: Tensor, K: Tensor, m: int, tau: float) -> tuple[Tensor, Tensor]:
    """Find beta = reference + tau log_u [B, 1] of lists with more than K items. Only the first m items can lie above.

    Let x be the scores divided by tau, and c items lie above beta. With a = sum exp(x_ref - x_l) over these, r = sum
    exp(x_l - x_ref) over the others and u = exp(x_beta - x_ref), the sum of Q is K if a u^2 + 2 (K - c) u - r = 0.
    """
    top = s.topk(m).values
    others = exp_(s.sub(top[:, -1:]).clamp_(max=0).div_(tau)).sum(1) - m
    # In turn for each item i of the top: A = sum exp(x_i - x_l) over the items l at or above i, and R = sum exp(x_l -
    # x_i) over those at or below. In step t, each sum is that of 2^t items; the next step doubles them.
    A, R = torch.ones_like(top), torch.ones_like(top)
    R[:, -1] += others
    step = 1
    while step < m:
        decay = exp_(top[:, step:].sub(top[:, :-step]).div_(tau))
        A = torch.cat([A[:, :step], A[:, step:] + decay * A[:, :-step]], 1)
        R = torch.cat([R[:, :-step] + decay * R[:, step:], R[:, -step:]], 1)
        step *= 2
    ranks = torch.arange(1, m + 1, device=s.device)
    sum_of_q = ranks - A / 2 + (R - 1) / 2  # if beta were the score of this rank; ascending
    c = (sum_of_q < K).sum(1, keepdim=True)
    # beta lies between ranks c and c + 1. The reference is the one that it is close to, for precision.
    last, first = (c - 1).clamp(min=0), c.clamp(max=m - 1)
    gap = (top.gather(1, last) - top.gather(1, first)) / tau
    log_a = torch.where(c > 0, A.gather(1, last).log(), -math.inf)  # relative to rank c
    log_r = torch.where(c < m, R.gather(1, first).log(), -math.inf)  # relative to rank c + 1
    e = K - c
    root = (e.abs() + (e * e + torch.exp(log_a + log_r - gap)).sqrt()).log()
    below = c < K
    log_u = torch.where(below, log_r - root, torch.where(c > K, root - log_a, (log_r - gap - log_a) / 2))
    return torch.where(below, top.gather(1, first), top.gather(1, last)), log_u


@_lapsum_forward.register_fake
def _(s: Tensor, k: int, tau: float, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    return s.new_empty(s.shape), s.new_empty(s.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[1])
    s, _, ctx.tau, mask = inputs
    ctx.save_for_backward(s, output[1], mask)


def _backward(ctx: Any, q: Tensor) -> Tensor:
    _, f, mask = ctx.saved_tensors
    q = q if mask is None else torch.where(mask, q, 0)
    total = f.sum(1, keepdim=True).clamp(min=torch.finfo(f.dtype).tiny)
    mean = (f * q).sum(1, keepdim=True) / total
    ds: Tensor = f * (q - mean) / ctx.tau
    return ds


lapsum = differentiable(_lapsum_forward, _save, _backward)
