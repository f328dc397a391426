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
from numbers import Integral
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from drm_triton.errors import InputError
from drm_triton.kernels import backend_for
from drm_triton.kernels.checks import check_choice, check_dense, check_integer, check_not_meta, check_tau
from drm_triton.kernels.protocol import Backend
from drm_triton.kernels.weights import rank_weights
from drm_triton.names import Reduction, RelaxedMetric, Weight


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
    _check_lists("drm_loss", scores, relevance, k, tau, mask, validate)
    s, y, w, mask = _prepare(scores, relevance, k, weight, mask)
    loss, _ = _call(_drm_lists, _DrmLists, s, y, w, float(tau), mask)
    return _reduce(loss, reduction).to(scores.dtype)


def soft_topk(scores: Tensor, k: int, tau: float = 1.0, mask: Tensor | None = None, *, validate: bool = True) -> Tensor:
    """Compute the relaxed indicator of the top k of each list, Q = sum_{j<=k} P_j.

    Parameters
    ----------
    scores, k, tau, mask, validate : as in `drm_loss`

    Returns
    -------
    Tensor
        [B, n], at least 0, and 0 for padding. Each row sums to k, or to the number of its entries if that is smaller.
        It converges to the hard 0/1 indicator as tau goes to 0.

    Examples
    --------
    >>> soft_topk(torch.tensor([[3.0, 1.0, 2.0]]), k=2, tau=0.5).round(decimals=3)
    tensor([[0.9870, 0.1070, 0.9060]])
    """
    _check_lists("soft_topk", scores, None, k, tau, mask, validate)
    s, _, w, mask = _prepare(scores, torch.zeros_like(scores), k, "uniform", mask)
    Q: Tensor = _call(_soft_topk, _SoftTopK, s, w, float(tau), mask)
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
    _check_lists("relaxed_metric", scores, relevance, k, tau, mask, validate)
    gain = relevance if metric == "ndcg" else relevance > 0
    s, y, w, mask = _prepare(scores, gain, k, metric, mask)
    value = (_call(_soft_topk, _SoftTopK, s, w, float(tau), mask) * y).sum(-1)
    return _reduce(value, reduction).to(scores.dtype)


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
def _soft_topk(s: Tensor, w: Tensor, tau: float, mask: Tensor) -> Tensor:
    return _backend(s).soft_topk_forward(s.contiguous(), _trim(w, s), tau, mask.contiguous())


@torch.library.custom_op("drm_triton::soft_topk_backward", mutates_args=())
def _soft_topk_backward(s: Tensor, w: Tensor, tau: float, mask: Tensor, q: Tensor) -> Tensor:
    return _backend(s).soft_topk_backward(s.contiguous(), _trim(w, s), tau, mask.contiguous(), q.contiguous())


@torch.library.custom_op("drm_triton::drm_lists", mutates_args=())
def _drm_lists(s: Tensor, y: Tensor, w: Tensor, tau: float, mask: Tensor) -> tuple[Tensor, Tensor]:
    return _backend(s).drm_lists(s.contiguous(), y.contiguous(), _trim(w, s), tau, mask.contiguous())


@_soft_topk.register_fake
def _(s: Tensor, w: Tensor, tau: float, mask: Tensor) -> Tensor:
    return s.new_empty(s.shape)


@_soft_topk_backward.register_fake
def _(s: Tensor, w: Tensor, tau: float, mask: Tensor, q: Tensor) -> Tensor:
    return s.new_empty(s.shape)


@_drm_lists.register_fake
def _(s: Tensor, y: Tensor, w: Tensor, tau: float, mask: Tensor) -> tuple[Tensor, Tensor]:
    return s.new_empty(s.shape[0]), s.new_empty(s.shape)


class _FirstDerivative(torch.autograd.Function):
    """Return the gradient unchanged, and raise when it is differentiated again.

    Without this, autograd would treat the gradient as a constant and return a wrong second derivative.
    """

    @staticmethod
    def forward(gradient: Tensor, *inputs: Tensor) -> Tensor:
        return gradient

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> None:
        raise NotImplementedError("drm_loss, soft_topk and relaxed_metric have first derivatives only")


def _first_derivative(gradient: Tensor, *inputs: Tensor) -> Tensor:
    result: Tensor = _FirstDerivative.apply(gradient, *inputs)  # type: ignore[no-untyped-call]
    return result


def _save_soft_topk(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    s, w, ctx.tau, mask = inputs
    ctx.save_for_backward(s, w, mask)


def _backward_soft_topk(ctx: Any, q: Tensor) -> tuple[Tensor, None, None, None]:
    s, w, mask = ctx.saved_tensors
    ds = _soft_topk_backward(s.detach(), w, ctx.tau, mask, q.detach())
    return _first_derivative(ds, s, q), None, None, None


def _save_drm_lists(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(inputs[0], output[1])


def _backward_drm_lists(ctx: Any, d_loss: Tensor, _: Tensor) -> tuple[Tensor, None, None, None, None]:
    s, gradient = ctx.saved_tensors  # the forward pass has computed the gradient already
    return _first_derivative(d_loss.detach()[:, None] * gradient, s, d_loss), None, None, None, None


_soft_topk.register_autograd(_backward_soft_topk, setup_context=_save_soft_topk)
_drm_lists.register_autograd(_backward_drm_lists, setup_context=_save_drm_lists)


# Custom operations do not support torch.func. An autograd.Function with the same forward and backward does.


class _SoftTopK(torch.autograd.Function):
    forward = staticmethod(lambda *inputs: _soft_topk(*inputs))
    setup_context = staticmethod(_save_soft_topk)
    backward = staticmethod(_backward_soft_topk)


class _DrmLists(torch.autograd.Function):
    forward = staticmethod(lambda *inputs: _drm_lists(*inputs))
    setup_context = staticmethod(_save_drm_lists)
    backward = staticmethod(_backward_drm_lists)


def _call(operation: Any, function: type[torch.autograd.Function], *inputs: Any) -> Any:
    transformed = torch._C._are_functorch_transforms_active() and not torch.compiler.is_compiling()
    return function.apply(*inputs) if transformed else operation(*inputs)


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
# Arguments and results


def _prepare(
    scores: Tensor, relevance: Tensor, k: int | None, weight: Weight, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return scores and relevance [B, n] in the type to compute in, padding zeroed; weights [B, K]; mask [B, n]."""
    dtype = torch.float32 if scores.dtype in (torch.float16, torch.bfloat16) else scores.dtype
    s, y = scores.to(dtype), relevance.detach().to(dtype)
    narrow = not torch.compiler.is_compiling()  # while tracing, shapes cannot depend on values
    if mask is None:
        w = rank_weights(s.detach(), y, k, weight, None, narrow)
        return s, y, w, torch.ones_like(s, dtype=torch.bool)
    s, y = torch.where(mask, s, 0), torch.where(mask, y, 0)  # padding can contain any value
    w = rank_weights(s.detach(), y, k, weight, mask, narrow)
    # A list of padding alone has weights 0. Without its mask the softmax is defined: loss and gradient are 0, not NaN.
    return s, y, w, mask | ~mask.any(-1, keepdim=True)


def _reduce(values: Tensor, reduction: Reduction) -> Tensor:
    if reduction == "none":
        return values
    return values.mean() if reduction == "mean" else values.sum()


def _check_lists(
    function: str,
    scores: Tensor,
    relevance: Tensor | None,
    k: int | None,
    tau: float,
    mask: Tensor | None,
    validate: bool,
) -> None:
    """Raise InputError if the arguments are invalid. Values of tensors are checked only if `validate`."""
    check_dense(function, "scores", scores)
    if mask is not None:
        check_dense(function, "mask", mask)
    if scores.ndim != 2 or 0 in scores.shape:
        raise InputError(f"{function}: scores must be [B, n], B and n at least 1, got shape {list(scores.shape)}")
    if scores.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise InputError(f"{function}: scores must be float16, bfloat16, float32 or float64, got {scores.dtype}")
    for name, other in (("relevance", relevance), ("mask", mask)):
        if other is not None and other.shape != scores.shape:
            seen = f"{list(scores.shape)} and {list(other.shape)}"
            raise InputError(f"{function}: scores and {name} must have the same shape, got {seen}")
        if other is not None and other.device != scores.device:
            seen = f"{scores.device} and {other.device}"
            raise InputError(f"{function}: scores and {name} must be on the same device, got {seen}")
    check_not_meta(function, "scores", scores)
    if relevance is not None and relevance.dtype.is_complex:
        raise InputError(f"{function}: relevance must be bool, integer or float, got {relevance.dtype}")
    if mask is not None and mask.dtype != torch.bool:
        raise InputError(f"{function}: mask must be bool, True where an entry exists, got {mask.dtype}")
    n = scores.shape[1]
    k_per_list = k is None and relevance is not None
    if not k_per_list and not (isinstance(k, Integral) and 1 <= k <= n):
        raise InputError(f"{function}: k must be an integer from 1 to the list length {n}, got {k!r}")
    check_tau(function, tau)
    if torch.compiler.is_compiling():
        return  # tensors have no values while tracing
    if forward_ad._current_level >= 0 and _tangent(scores) is not None:
        raise NotImplementedError(f"{function} has no forward-mode derivative; use backward or torch.func.grad")
    if validate:
        _check_values(function, scores, relevance, tau, mask)


def _tangent(scores: Tensor) -> Tensor | None:
    tangent: Tensor | None = forward_ad.unpack_dual(scores).tangent
    return tangent


def _check_values(function: str, scores: Tensor, relevance: Tensor | None, tau: float, mask: Tensor | None) -> None:
    # No sum over a list exceeds 8 n max|s|, before or after the division by tau.
    dtype = scores.dtype if scores.dtype == torch.float64 else torch.float32
    largest = torch.finfo(dtype).max * min(1.0, float(tau)) / (8 * scores.shape[1])
    rule = f"scores must be finite and at most {largest:.1g} in magnitude, or sums over a list overflow"
    # For each rule the tensor, the smallest and the largest value that it allows, and the values to compare: half types
    # cannot represent the bound of the scores, and not all integer types can be compared.
    ranges = [(rule, scores, -largest, largest, scores.detach().to(dtype))]
    if relevance is not None and relevance.dtype != torch.bool:
        grades = relevance.detach() if relevance.is_floating_point() else relevance.to(dtype)
        ranges.append(
            ("relevance must be finite and at least 0", relevance, 0.0, torch.finfo(grades.dtype).max, grades)
        )
    checks = []
    for _, _, least, most, values in ranges:
        low, high = torch.aminmax(values if mask is None else torch.where(mask, values, 0))  # NaN if any value is
        checks.append((low >= least) & (high <= most))
    if mask is not None:
        checks.append(mask.any(-1).all())
    if all(torch.stack(checks).tolist()):  # the only synchronisation
        return
    for rule, tensor, least, most, values in ranges:
        wrong = ~((values >= least) & (values <= most))
        _raise_first(function, rule, tensor, wrong if mask is None else wrong & mask)
    if mask is not None:
        _raise_first(function, "mask must leave at least one entry in each list", mask, ~mask.any(-1, keepdim=True))


def _raise_first(function: str, rule: str, tensor: Tensor, wrong: Tensor) -> None:
    """Raise InputError for the first entry that violates a rule, if there is one."""
    found = wrong.nonzero()
    if len(found):
        row, column = found[0].tolist()
        raise InputError(f"{function}: {rule}, got {tensor[row, column].item()} at row {row}, column {column}")
