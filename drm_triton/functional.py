"""The DRM objective for any torch model: differentiable functions of scores [B, n].

For one list of n scores s, with c_k = n + 1 - 2k and b_j = sum_l |s_j - s_l|:

    P_k = softmax((c_k s - b) / tau),   Q = sum_{k<=K} w_k P_k

P_k is the relaxed indicator of the item at rank k, and Q that of the top K. `soft_topk` returns Q, `drm_loss` the
squared distance ||y - Q||^2 to the relevance y, and `relaxed_metric` the inner product <Q, y>. See docs/objective.md.

Scores are float32 or float64. float16 and bfloat16 are computed in float32 and the result is cast back. A mask marks
the entries that exist (True). Padding can contain any value, even NaN. It does not change the result and gets gradient
zero. The functions work under torch.compile. They have first derivatives in reverse mode only. Second derivatives and
forward mode raise NotImplementedError.
"""

import functools
import os
from typing import Any

import torch
from torch import Tensor

from drm_triton.kernels import backend_for
from drm_triton.kernels.checks import check_choice, check_dense, check_integer, check_tau
from drm_triton.kernels.protocol import Backend
from drm_triton.kernels.weights import rank_weights
from drm_triton.lapsum import lapsum
from drm_triton.lists import (
    check_cut_off,
    check_score_lists,
    check_values,
    differentiable,
    list_loss,
    reduced,
    working_type,
)
from drm_triton.names import Reduction, RelaxedMetric, SoftTopK, Weight


def drm_loss(
    scores: Tensor,
    relevance: Tensor,
    k: int | None = None,
    tau: float = 1.0,
    weight: Weight = "uniform",
    mask: Tensor | None = None,
    reduction: Reduction = "mean",
    *,
    validate: bool = True,
) -> Tensor:
    """Compute the squared distance ||y - Q||^2 between relevance y and the relaxed top K of the scores of each list.

    Parameters
    ----------
    scores : [B, n] float. Higher is better.
    relevance : [B, n] bool, integer or float, at least 0. Entries above 0 are the positives.
    k : cut-off K from 1 to n. With None each list has its own K, the number of its positives. Q can then equal a binary
        y, and a list without positives has loss 0. None synchronises with the GPU once, to find the largest K.
    tau : temperature above 0. With a small tau the loss is close to the hard metric, with sparse and steep gradients.
        With a large tau it is smooth.
    weight : rank weights w_k. uniform: 1. precision: 1/K. recall: 1/#positives. ndcg: 1/(log2(k + 1) IDCG@K).
        ap: P@k/min(K, #positives), where P@k is that of the hard ranking and has no gradient.
    mask : [B, n] bool, False for padding. None means no padding.
    reduction : mean or sum over the lists, or none for one loss per list.
    validate : check the values of the tensors, which synchronises with the GPU once. Shapes, types, k and tau are
        always checked. Under torch.compile values are not checked. Without the check, a list with a score that is not
        finite has loss NaN.

    Returns
    -------
    Tensor
        Scalar, or [B] with reduction "none".

    Raises
    ------
    InputError
        A ValueError. The message contains the violated rule and the offending value.

    Examples
    --------
    >>> scores = torch.tensor([[2.0, 0.5, 1.0, -1.0]], requires_grad=True)
    >>> relevance = torch.tensor([[1, 1, 0, 0]])
    >>> loss = drm_loss(scores, relevance, tau=0.1)
    >>> round(loss.item(), 3)
    1.973
    >>> loss.backward()
    >>> scores.grad.argmin().item()  # gradient descent raises the positive that is ranked too low
    1
    >>> round(drm_loss(torch.tensor([[2.0, 1.0, 0.5, -1.0]]), relevance, tau=0.1).item(), 3)
    0.0
    """
    check_choice("drm_loss", "weight", weight, Weight)
    check_choice("drm_loss", "reduction", reduction, Reduction)
    check_dense("drm_loss", "relevance", relevance)
    _check("drm_loss", scores, relevance, k, tau, mask, validate)
    s, y, w, mask = _prepare(scores, relevance, k, weight, mask)
    loss, _ = _drm_lists(s, y, w, float(tau), mask)
    return reduced(loss, reduction).to(scores.dtype)


def soft_topk(
    scores: Tensor,
    k: int,
    tau: float = 1.0,
    mask: Tensor | None = None,
    *,
    method: SoftTopK = "neuralsort",
    validate: bool = True,
) -> Tensor:
    """Compute the relaxed indicator of the top k of each list, Q.

    Parameters
    ----------
    scores, k, tau, mask, validate : as in `drm_loss`
    method : neuralsort: Q = sum_{j<=k} P_j, as in `drm_loss`. lapsum: Q_j = F((s_j - beta) / tau), with the Laplace
        distribution function F and the threshold beta for which Q sums to k. lapsum costs a selection of the best 2k
        items and a few passes over the list, on every device, and no entry of Q exceeds 1. Its tau is measured against
        differences of scores, and that of neuralsort against differences of scores times n.

    Returns
    -------
    Tensor
        [B, n], at least 0, and 0 for padding. Each row sums to k, or to the number of its entries if that is smaller.
        It converges to the hard 0/1 indicator as tau goes to 0.

    Examples
    --------
    >>> soft_topk(torch.tensor([[3.0, 1.0, 2.0]]), k=2, tau=0.5).round(decimals=3)
    tensor([[0.9870, 0.1070, 0.9060]])
    >>> soft_topk(torch.tensor([[3.0, 1.0, 2.0]]), k=2, tau=0.5, method="lapsum").round(decimals=3)
    tensor([[0.9770, 0.1960, 0.8270]])
    """
    check_choice("soft_topk", "method", method, SoftTopK)
    _check("soft_topk", scores, None, k, tau, mask, validate)
    Q: Tensor
    if method == "lapsum":
        s = scores.to(working_type(scores))
        s = s if mask is None else torch.where(mask, s, 0)  # padding can contain any value
        Q, _ = lapsum(s, int(k), float(tau), mask)
    else:
        s, _, w, mask = _prepare(scores, torch.zeros_like(scores), k, "uniform", mask)
        Q = _soft_topk(s, w, float(tau), mask)
    return Q.to(scores.dtype)


def relaxed_metric(
    scores: Tensor,
    relevance: Tensor,
    k: int | None,
    tau: float = 1.0,
    metric: RelaxedMetric = "ndcg",
    mask: Tensor | None = None,
    reduction: Reduction = "mean",
    *,
    validate: bool = True,
) -> Tensor:
    """Compute a differentiable metric at k, <Q, y> with the rank weights of the metric.

    It converges to the metric as tau goes to 0.

    Parameters
    ----------
    scores, relevance, k, tau, mask, reduction, validate : as in `drm_loss`. A list without positives has metric 0 and
        counts in the mean.
    metric : precision, recall, ndcg or ap. ndcg uses graded relevance as gains. The others use only whether it is
        above 0.

    Returns
    -------
    Tensor
        Scalar, or [B] with reduction "none". Higher is better, so the negative is a loss.

    Examples
    --------
    >>> scores, relevance = torch.tensor([[3.0, 2.0, 1.0]]), torch.tensor([[0, 1, 1]])
    >>> relaxed_metric(scores, relevance, k=2, tau=0.01, metric="recall")
    tensor(0.5000)
    """
    check_choice("relaxed_metric", "metric", metric, RelaxedMetric)
    check_choice("relaxed_metric", "reduction", reduction, Reduction)
    check_dense("relaxed_metric", "relevance", relevance)
    _check("relaxed_metric", scores, relevance, k, tau, mask, validate)
    gain = relevance if metric == "ndcg" else relevance > 0
    s, y, w, mask = _prepare(scores, gain, k, metric, mask)
    value = (_soft_topk(s, w, float(tau), mask) * y).sum(-1)
    return reduced(value, reduction).to(scores.dtype)


class DRMLoss(torch.nn.Module):
    """`drm_loss` as a module.

    Examples
    --------
    >>> criterion = DRMLoss(k=1, weight="ndcg")
    >>> criterion
    DRMLoss(k=1, tau=1.0, weight='ndcg', reduction='mean')
    >>> criterion(torch.zeros(1, 2), torch.tensor([[1, 0]]))
    tensor(0.5000)
    """

    def __init__(
        self, k: int | None = None, tau: float = 1.0, weight: Weight = "uniform", reduction: Reduction = "mean"
    ) -> None:
        super().__init__()
        check_choice("DRMLoss", "weight", weight, Weight)
        check_choice("DRMLoss", "reduction", reduction, Reduction)
        check_tau("DRMLoss", tau)
        if k is not None:
            check_integer("DRMLoss", "k", k, 1)
        self.k, self.tau, self.weight, self.reduction = k, tau, weight, reduction

    def forward(self, scores: Tensor, relevance: Tensor, mask: Tensor | None = None) -> Tensor:
        """See `drm_loss`."""
        return drm_loss(scores, relevance, self.k, self.tau, self.weight, mask, self.reduction)

    def extra_repr(self) -> str:
        """Return the settings that print() shows."""
        return f"k={self.k}, tau={self.tau}, weight={self.weight!r}, reduction={self.reduction!r}"


# ---------------------------------------------------------------------------------------------------------------
# Custom torch operations. The weights w are constants and get no gradient.


@torch.library.custom_op("drm_triton::soft_topk", mutates_args=())
def _soft_topk_forward(s: Tensor, w: Tensor, tau: float, mask: Tensor) -> Tensor:
    return _backend(s).soft_topk_forward(s.contiguous(), _trim(w, s), tau, mask.contiguous())


@torch.library.custom_op("drm_triton::soft_topk_backward", mutates_args=())
def _soft_topk_backward(s: Tensor, w: Tensor, tau: float, mask: Tensor, q: Tensor) -> Tensor:
    return _backend(s).soft_topk_backward(s.contiguous(), _trim(w, s), tau, mask.contiguous(), q.contiguous())


@_soft_topk_forward.register_fake
def _(s: Tensor, w: Tensor, tau: float, mask: Tensor) -> Tensor:
    return s.new_empty(s.shape)


@_soft_topk_backward.register_fake
def _(s: Tensor, w: Tensor, tau: float, mask: Tensor, q: Tensor) -> Tensor:
    return s.new_empty(s.shape)


def _save_soft_topk(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    s, w, ctx.tau, mask = inputs
    ctx.save_for_backward(s, w, mask)


def _backward_soft_topk(ctx: Any, q: Tensor) -> Tensor:
    s, w, mask = ctx.saved_tensors
    ds: Tensor = _soft_topk_backward(s.detach(), w, ctx.tau, mask, q)
    return ds


_soft_topk = differentiable(_soft_topk_forward, _save_soft_topk, _backward_soft_topk)


@list_loss
def _drm_lists(s: Tensor, y: Tensor, w: Tensor, tau: float, mask: Tensor) -> tuple[Tensor, Tensor]:
    return _backend(s).drm_lists(s.contiguous(), y.contiguous(), _trim(w, s), tau, mask.contiguous())


def _backend(s: Tensor) -> Backend:
    return _cached_backend(s.device.type, os.environ.get("DRM_BACKEND"))


@functools.cache
def _cached_backend(device: str, environment: str | None) -> Backend:
    return backend_for(device)


def _trim(w: Tensor, s: Tensor) -> Tensor:
    """Remove the ranks that no list uses. With k = None, w of a compiled model has n columns."""
    if w.shape[1] == s.shape[1]:
        used = (w != 0).any(0) * torch.arange(1, w.shape[1] + 1, device=w.device)
        w = w[:, : max(1, int(used.max()))]
    return w.contiguous()


# ---------------------------------------------------------------------------------------------------------------
# Arguments


def _prepare(
    scores: Tensor, relevance: Tensor, k: int | None, weight: Weight, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return scores and relevance [B, n] in the type to compute in, padding zeroed; weights [B, K]; mask [B, n]."""
    dtype = working_type(scores)
    s, y = scores.to(dtype), relevance.detach().to(dtype)
    narrow = not torch.compiler.is_compiling()  # while tracing, shapes cannot depend on values
    if mask is None:
        w = rank_weights(s.detach(), y, k, weight, None, narrow)
        return s, y, w, torch.ones_like(s, dtype=torch.bool)
    s, y = torch.where(mask, s, 0), torch.where(mask, y, 0)  # padding can contain any value
    w = rank_weights(s.detach(), y, k, weight, mask, narrow)
    # A list of padding alone has weights 0. Without its mask the softmax is defined: loss and gradient are 0, not NaN.
    return s, y, w, mask | ~mask.any(-1, keepdim=True)


def _check(
    function: str,
    scores: Tensor,
    relevance: Tensor | None,
    k: int | None,
    tau: float,
    mask: Tensor | None,
    validate: bool,
) -> None:
    """Raise InputError if the arguments are invalid. Values of tensors are checked only if `validate`."""
    check_score_lists(function, scores, relevance, mask)
    if k is not None or relevance is None:  # with relevance, None means one K per list
        check_cut_off(function, k, scores)
    check_tau(function, tau)
    check_values(function, scores, relevance, tau, mask, validate, empty_lists=False)
