"""Rank weights w_k of the relaxed metric: one formula for every backend.

uniform    1
precision  1 / K
recall     1 / #positives
ndcg       1 / (log2(k + 1) IDCG@K)
ap         P@k / min(K, #positives), with P@k of the hard ranking
"""

import math
from functools import lru_cache

import torch
from torch import Tensor

from drm_triton.kernels.protocol import Objective
from drm_triton.names import Weight


def rank_weights(
    s: Tensor, y: Tensor, k: int | None, weight: Weight, mask: Tensor | None, narrow: bool = False
) -> Tensor:
    """Return w_k for k = 1 .. K: [B, K], zero beyond the length of a list. The gradient treats them as constants.

    Parameters
    ----------
    s : [B, n] scores; only `ap` uses them. Ties go to the lower position.
    y : [B, n] relevance. Entries with y > 0 are positives. A list without positives has weight 0 under recall, ndcg
        and ap.
    k : cut-off K. With None each list has its own K, the number of its positives, and the result is [B, n].
    mask : bool [B, n], False for padding. None means no padding.
    narrow : with k None, return only as many columns as the largest K, at least one. This waits for the device.
    """
    B, n = s.shape
    if k is not None and mask is None and weight in ("uniform", "precision"):  # y does not matter
        return s.new_full((B, k), 1 if weight == "uniform" else 1 / k) * (torch.arange(k, device=s.device) < n)
    y = (y if mask is None else torch.where(mask, y, 0)).to(s.dtype)
    positives = (y > 0).sum(-1, keepdim=True, dtype=torch.int32)
    K = positives if k is None else torch.full_like(positives, k)
    columns = k or (max(1, int(K.max())) if narrow else n)
    rank = torch.arange(1, columns + 1, device=s.device, dtype=torch.int32)
    length = torch.full_like(K, n) if mask is None else mask.sum(-1, keepdim=True, dtype=torch.int32)
    used = rank <= torch.minimum(K, length)
    if weight == "uniform":
        w = torch.ones_like(used, dtype=s.dtype)
    elif weight == "precision":
        w = (1 / K.to(s.dtype)).expand_as(used)
    elif weight == "recall":
        w = (1 / positives.to(s.dtype)).expand_as(used)
    elif weight == "ndcg":
        discount = 1 / torch.log2(1 + rank.to(s.dtype))
        w = discount / (best(y, columns) * discount).sum(-1, keepdim=True)
    else:
        order = s if mask is None else torch.where(mask, s, -math.inf)
        ranking = order.sort(dim=-1, descending=True, stable=True).indices[:, :columns]
        hits = (y.gather(-1, ranking) > 0).to(s.dtype)
        w = hits.cumsum(-1) / rank / torch.minimum(K, positives).to(s.dtype)
    if weight in ("recall", "ndcg", "ap"):
        used = used & (positives > 0)
    return torch.where(used, w, 0)


def best(y: Tensor, count: int) -> Tensor:
    """Return the `count` largest numbers of each row, best first."""
    if 8 * count < y.shape[1]:  # a sort of whole rows is faster only if most of it is used
        return y.topk(count, dim=-1).values
    return y.sort(dim=-1, descending=True).values[:, :count]


@lru_cache(maxsize=64)
def training_rank_weights(objective: Objective, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return w_k [K] of training lists, which start with rho positives.

    Under `ap` the weights depend on the scores: a kernel multiplies these by the number of positives among the first k.
    The result is cached, so a training step copies nothing to the device.
    """
    rho, K = objective.rho, objective.K
    if objective.weight == "ap":
        w = 1 / torch.arange(1, K + 1, dtype=torch.float64) / min(K, rho)
    else:
        y = (torch.arange(rho + K) < rho).double()[None]
        w = rank_weights(y, y, K, objective.weight, torch.ones_like(y, dtype=torch.bool))[0]
    return w.to(device=device, dtype=dtype)
