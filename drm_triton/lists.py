"""What functions of scores [B, n] have in common: checks of their arguments, and custom operations with a gradient.

`drm_triton.functional` and `drm_triton.losses` define the functions.
"""

import math
from collections.abc import Callable
from numbers import Integral
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from drm_triton.errors import InputError
from drm_triton.kernels.checks import check_dense, check_not_meta
from drm_triton.names import Reduction

# ---------------------------------------------------------------------------------------------------------------
# Custom operations with a gradient


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
        raise NotImplementedError("the list losses, soft_topk and relaxed_metric have first derivatives only")


def differentiable(
    operation: Any, save: Callable[[Any, tuple[Any, ...], Any], None], backward: Callable[[Any, Tensor], Tensor]
) -> Callable[..., Any]:
    """Give a custom operation its derivative, and return the function to call.

    The first output is a differentiable function of the first input, the scores. All others are constants.

    Parameters
    ----------
    operation : a `torch.library.custom_op`
    save : (ctx, inputs, output), stores in ctx what `backward` needs, as in a torch.autograd.Function. The first saved
        tensor is the scores.
    backward : (ctx, upstream), returns the gradient of the scores for the upstream gradient of the first output.
    """

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.set_materialize_grads(False)  # no zeros in the place of gradients that do not exist
        ctx.constants = [None] * (len(inputs) - 1)
        save(ctx, inputs, output)

    def derivative(ctx: Any, upstream: Tensor | None, *_: None) -> tuple[Any, ...]:
        if upstream is None:
            return None, *ctx.constants
        ds = backward(ctx, upstream.detach())
        return _FirstDerivative.apply(ds, ctx.saved_tensors[0], upstream), *ctx.constants  # type: ignore[no-untyped-call]

    operation.register_autograd(derivative, setup_context=setup_context)

    # Custom operations do not support torch.func. An autograd.Function with the same forward and backward does.
    methods: dict[str, Any] = {"forward": lambda *inputs: operation(*inputs), "setup_context": setup_context}
    methods["backward"] = derivative
    function: Any = type("Function", (torch.autograd.Function,), {k: staticmethod(f) for k, f in methods.items()})

    def call(*inputs: Any) -> Any:
        transformed = torch._C._are_functorch_transforms_active() and not torch.compiler.is_compiling()
        return function.apply(*inputs) if transformed else operation(*inputs)

    return call


def list_loss(losses: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Turn a function that computes losses and gradients of lists into a differentiable torch operation.

    Parameters
    ----------
    losses : a function of the scores s [B, n] and of constants. It returns the loss of each list [B] and its gradient
        to the scores [B, n], contiguous. Its annotations are the signature of the operation, and its name without
        leading underscores is the name of the operation.

    Returns
    -------
    Callable
        The same function. Autograd, torch.compile and torch.func can differentiate its first result.
    """
    operation = torch.library.custom_op(f"drm_triton::{losses.__name__.lstrip('_')}", losses, mutates_args=())
    operation.register_fake(lambda s, *_: (s.new_empty(s.shape[0]), s.new_empty(s.shape)))

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(inputs[0], output[1])

    def backward(ctx: Any, d_loss: Tensor) -> Tensor:
        _, gradient = ctx.saved_tensors  # the forward pass has computed the gradient already
        result: Tensor = d_loss[:, None] * gradient
        return result

    return differentiable(operation, save, backward)


def exp_(x: Tensor) -> Tensor:
    """Replace x by exp(x), in place. Results too small for a normal number become the smallest ones, not 0.

    On a CPU, an exponential that underflows takes more than ten times as long as any other.
    """
    return x.clamp_(min=math.log(torch.finfo(x.dtype).tiny) + 1).exp_()


# ---------------------------------------------------------------------------------------------------------------
# Arguments and results


def working_type(scores: Tensor) -> torch.dtype:
    """Return the type to compute in: that of the scores, or float32 for half types."""
    return torch.float32 if scores.dtype in (torch.float16, torch.bfloat16) else scores.dtype


def reduced(values: Tensor, reduction: Reduction) -> Tensor:
    """Reduce the values of the lists [B]."""
    if reduction == "none":
        return values
    return values.mean() if reduction == "mean" else values.sum()


def check_score_lists(function: str, scores: Tensor, relevance: Tensor | None, mask: Tensor | None) -> None:
    """Raise InputError if shapes, types or devices are invalid."""
    for name, tensor in (("scores", scores), ("relevance", relevance), ("mask", mask)):
        if tensor is not None:
            check_dense(function, name, tensor)
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


def check_cut_off(function: str, k: object, scores: Tensor) -> None:
    """Raise InputError unless k is a rank of the lists."""
    n = scores.shape[1]
    if not (isinstance(k, Integral) and 1 <= int(k) <= n):
        raise InputError(f"{function}: k must be an integer from 1 to the list length {n}, got {k!r}")


def check_values(
    function: str,
    scores: Tensor,
    relevance: Tensor | None,
    temperature: float,
    mask: Tensor | None,
    validate: bool,
    empty_lists: bool,
) -> None:
    """Raise InputError if values of the tensors are invalid. Without `validate`, they are not read.

    `empty_lists` allows lists of padding alone.
    """
    if torch.compiler.is_compiling():
        return  # tensors have no values while tracing
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(scores).tangent is not None:
        raise NotImplementedError(f"{function} has no forward-mode derivative; use backward or torch.func.grad")
    if not validate:
        return
    # No sum over a list exceeds 8 n max|s|, before or after the division by the temperature.
    dtype = scores.dtype if scores.dtype == torch.float64 else torch.float32
    largest = torch.finfo(dtype).max * min(1.0, float(temperature)) / (8 * scores.shape[1])
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
    if mask is not None and not empty_lists:
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
