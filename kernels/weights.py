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


def rank_weights(s: Tensor, y: Tensor, k: int | None, weight: Weight, mask: Tensor) -> Tensor:
    """Return w_k for k = 1 .. K: [B, K], zero beyond the length of a list. The gradient treats them as constants.

    Parameters
    ----------
    s : [B, n] scores; only `ap` uses them. Ties go to the lower position.
    y : [B, n] relevance. Entries with y > 0 are positives. A list without positives has weight 0 under recall, ndcg
        and ap.
    k : cut-off K. With None each list has its own K, the number of its positives, and the result is [B, n].
    mask : bool [B, n], False for padding
    """
    y = torch.where(mask, y, 0).to(s.dtype)
    positives = (y > 0).sum(-1, keepdim=True)
    K = positives if k is None else torch.full_like(positives, k)
    rank = torch.arange(1, (s.shape[1] if k is None else k) + 1, device=s.device)
    used = rank <= torch.minimum(K, mask.sum(-1, keepdim=True))
    if weight == "uniform":
        w = torch.ones_like(used, dtype=s.dtype)
    elif weight == "precision":
        w = (1 / K.to(s.dtype)).expand_as(used)
    elif weight == "recall":
        w = (1 / positives.to(s.dtype)).expand_as(used)
    elif weight == "ndcg":
        discount = 1 / torch.log2(1 + rank.to(s.dtype))
        ideal = y.sort(dim=-1, descending=True).values[:, : len(rank)]
        w = discount / (ideal * discount).sum(-1, keepdim=True)
    else:
        ranking = torch.where(mask, s, -math.inf).sort(dim=-1, descending=True, stable=True).indices[:, : len(rank)]
        hits = (y.gather(-1, ranking) > 0).to(s.dtype)
        w = hits.cumsum(-1) / rank / torch.minimum(K, positives).to(s.dtype)
    if weight in ("recall", "ndcg", "ap"):
        used = used & (positives > 0)
    return torch.where(used, w, 0)


@lru_cache(maxsize=64)
def list_weights(objective: Objective, dtype: torch.dtype, device: torch.device) -> Tensor:
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
