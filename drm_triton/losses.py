"""List losses for any torch model, beside `drm_loss`: differentiable functions of scores [B, n].

For one list, let i run over the positives (relevance above 0) and j over the negatives (relevance 0), and let
d_ij = s_j - s_i. With the temperature T:

    softmax_loss        sum_i log(1 + sum_j exp(d_ij / T))
    softmax_at_k_loss   the same sum, with weight sigma((s_i - beta) / T_w) for positive i
    psl_loss            sum_i log(1 + sum_j relu(1 + d_ij)^(1 / T))
    bpr_loss            the mean of log(1 + exp(d_ij)) over all pairs

The loss of a list without positives or without negatives is 0. docs/losses.md says when to use which.

Types, padding, torch.compile and derivatives are as in `drm_triton.functional`. Grades of relevance are not used. Each
loss is one operation that computes losses and gradients together. It finds the positions of the positives, for which it
waits for a GPU once.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import softplus

from drm_triton.errors import InputError
from drm_triton.kernels.checks import check_choice, check_dense, check_number
from drm_triton.lists import check_cut_off, check_score_lists, check_values, exp_, list_loss, reduced, working_type
from drm_triton.names import TAU_RANGE, Reduction

PAIRS = 1 << 18  # pairs of a positive and a negative that are in memory at once


def softmax_loss(
    scores: Tensor,
    relevance: Tensor,
    temperature: float = 1.0,
    mask: Tensor | None = None,
    reduction: Reduction = "mean",
    *,
    validate: bool = True,
) -> Tensor:
    """Compute the softmax loss of each list, sum_i log(1 + sum_j exp((s_j - s_i) / temperature)).

    Each positive i competes with all negatives j at once, and not with the other positives. This is the loss of
    `--objective softmax`.

    Parameters
    ----------
    scores : [B, n] float. Higher is better.
    relevance : [B, n] bool, integer or float, at least 0. Entries above 0 are the positives, the others the negatives.
    temperature : above 0. A small temperature gives most of the gradient to the negatives with the highest scores.
    mask : [B, n] bool, False for padding. None means no padding. A list of padding alone has loss 0.
    reduction : mean or sum over the lists, or none for one loss per list.
    validate : check the values of the tensors, as in `drm_loss`.

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
    >>> scores = torch.tensor([[2.0, 0.0, 0.0]])
    >>> round(softmax_loss(scores, torch.tensor([[0, 1, 1]])).item(), 4)  # 2 log(1 + exp(2))
    4.2539
    """
    s, positive, negative = _prepare("softmax_loss", scores, relevance, temperature, mask, reduction, validate)
    below_all = s.new_full((s.shape[0],), -math.inf)  # every positive has weight 1
    loss, _ = _softmax_lists(s, positive, negative, float(temperature), below_all, 1.0)
    return reduced(loss, reduction).to(scores.dtype)


def softmax_at_k_loss(
    scores: Tensor,
    relevance: Tensor,
    k: int | None = None,
    temperature: float = 1.0,
    temperature_weight: float = 1.0,
    threshold: Tensor | None = None,
    mask: Tensor | None = None,
    reduction: Reduction = "mean",
    *,
    validate: bool = True,
) -> Tensor:
    """Compute the softmax loss with more weight for the positives near the top k: SL@K.

    The term of positive i in `softmax_loss` is multiplied by sigma((s_i - beta) / temperature_weight). The threshold
    beta is the k-th largest score of the list. The weight is near 1 for positives above it and near 0 for positives far
    below. Weight and threshold are constants in the gradient, so the gradient never lowers a weight.

    Parameters
    ----------
    scores, relevance, temperature, mask, reduction, validate : as in `softmax_loss`
    k : cut-off from 1 to n. Lists with fewer than k entries have weights 1. Give either `k` or `threshold`.
    temperature_weight : above 0. A small value makes the weight a step at the threshold.
    threshold : [B] float, the threshold beta of each list. Use it if the lists are samples: the k-th largest score of
        a sample is lower than that of all items.

    Returns
    -------
    Tensor
        Scalar, or [B] with reduction "none".

    Examples
    --------
    >>> scores, relevance = torch.tensor([[2.0, 0.0, 0.0]]), torch.tensor([[0, 1, 1]])
    >>> round(softmax_at_k_loss(scores, relevance, k=2).item(), 4)  # beta = 0: both positives have weight 1/2
    2.1269
    >>> softmax_at_k_loss(scores, relevance, threshold=torch.tensor([0.0])) == softmax_at_k_loss(scores, relevance, k=2)
    tensor(True)
    """
    name = "softmax_at_k_loss"
    check_number(name, "temperature_weight", temperature_weight, *TAU_RANGE)
    s, positive, negative = _prepare(name, scores, relevance, temperature, mask, reduction, validate)
    if threshold is not None and k is None:
        _check_threshold(name, threshold, scores, validate)
        beta = threshold.detach().to(s.dtype)
    elif k is not None and threshold is None:
        check_cut_off(name, k, scores)
        existing = s.detach() if mask is None else torch.where(mask, s.detach(), -math.inf)
        beta = existing.topk(int(k), sorted=False).values.amin(1)
    else:
        raise InputError(f"{name}: give either k or threshold, got {'neither' if k is None else 'both'}")
    loss, _ = _softmax_lists(s, positive, negative, float(temperature), beta, float(temperature_weight))
    return reduced(loss, reduction).to(scores.dtype)


def psl_loss(
    scores: Tensor,
    relevance: Tensor,
    temperature: float = 0.1,
    mask: Tensor | None = None,
    reduction: Reduction = "mean",
    *,
    validate: bool = True,
) -> Tensor:
    """Compute the pairwise softmax loss of each list, sum_i log(1 + sum_j relu(1 + s_j - s_i)^(1 / temperature)).

    It is the softmax loss with relu(1 + d)^(1 / T) in place of exp(d / T), which grows less with d. A negative with a
    very high score, perhaps a positive that was not observed, therefore has less weight. It is meant for differences of
    scores in [-1, 1], for example half of a cosine. Larger differences are allowed. A negative that is more than 1
    below a positive has no part in its loss. If this holds for all negatives, the term of the positive is log(1 + 0) =
    0, with gradient 0.

    Memory is bounded: the pairs of a positive and a negative are processed in blocks.

    Parameters
    ----------
    scores, relevance, mask, reduction, validate : as in `softmax_loss`
    temperature : above 0, at most 1. Above 1, the gradient would have no bound at d = -1. At 1, it has a step there.

    Returns
    -------
    Tensor
        Scalar, or [B] with reduction "none".

    Examples
    --------
    >>> relevance = torch.tensor([[1, 0, 0]])
    >>> round(psl_loss(torch.tensor([[0.5, 0.0, 1.0]]), relevance, temperature=0.5).item(), 4)  # log(1 + 1/4 + 9/4)
    1.2528
    >>> psl_loss(torch.tensor([[2.0, 0.0, 1.0]]), relevance)
    tensor(0.)
    """
    check_number("psl_loss", "temperature", temperature, TAU_RANGE[0], 1.0)
    s, positive, negative = _prepare("psl_loss", scores, relevance, temperature, mask, reduction, validate)
    loss, _ = _psl_lists(s, positive, negative, float(temperature))
    return reduced(loss, reduction).to(scores.dtype)


def bpr_loss(
    scores: Tensor,
    relevance: Tensor,
    mask: Tensor | None = None,
    reduction: Reduction = "mean",
    *,
    validate: bool = True,
) -> Tensor:
    """Compute the BPR loss of each list, the mean of log(1 + exp(s_j - s_i)) over pairs of positive i and negative j.

    All negatives below a positive have nearly the same, small weight, however many they are. Memory is bounded: the
    pairs are processed in blocks.

    Parameters
    ----------
    scores, relevance, mask, reduction, validate : as in `softmax_loss`

    Returns
    -------
    Tensor
        Scalar, or [B] with reduction "none".

    Examples
    --------
    >>> round(bpr_loss(torch.tensor([[1.0, 1.0, 0.0]]), torch.tensor([[1, 0, 0]])).item(), 4)  # log 2 and log(1 + 1/e)
    0.5032
    """
    s, positive, negative = _prepare("bpr_loss", scores, relevance, 1.0, mask, reduction, validate)
    loss, _ = _bpr_lists(s, positive, negative)
    return reduced(loss, reduction).to(scores.dtype)


# ---------------------------------------------------------------------------------------------------------------
# Losses and gradients. s [B, n], positive and negative bool [B, n].


@list_loss
def _softmax_lists(
    s: Tensor, positive: Tensor, negative: Tensor, temperature: float, threshold: Tensor, temperature_weight: float
) -> tuple[Tensor, Tensor]:
    """Weighted softmax: O(B n) time and memory, since all positives of a list compete with the same negatives."""
    place, b = _places(positive)
    positives = s.flatten()[place]
    e = _only(negative, s)
    top = _maximum(e)
    e = exp_(e.sub_(top).div_(temperature))  # at most 1, and nearly 0 where there is no negative
    Z = e.sum(1, keepdim=True)
    x = Z[b, 0].log() + (top[b, 0] - positives) / temperature
    weight = torch.sigmoid((positives - threshold[b]) / temperature_weight)
    loss = s.new_zeros(len(s)).index_add_(0, b, weight * softplus(x))
    g_positives = weight * torch.sigmoid(x) / temperature
    g_total = s.new_zeros(len(s)).index_add_(0, b, g_positives)[:, None]
    gradient = e.mul_(g_total / Z.clamp(min=1))  # Z is at least 1 if there is a negative
    gradient.view(-1)[place] = -g_positives
    return _nan_unless_finite(s, loss, gradient)


@list_loss
def _psl_lists(s: Tensor, positive: Tensor, negative: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    negatives = _only(negative, s)
    best = _maximum(negatives)
    loss, gradient = s.new_zeros(len(s)), torch.zeros_like(negatives)
    zero = torch.finfo(s.dtype).eps ** 2  # in place of 0, whose logarithm is slow; far below the rounding of 1 + d
    for place, b in _blocks(positive):
        base = (s.flatten()[place] - 1)[:, None]
        x = negatives.index_select(0, b).sub_(base).clamp_(min=zero)
        top = (best[b] - base).clamp_(min=zero).log_()
        e = exp_(x.log().sub_(top).div_(temperature))  # (x / its maximum)^(1 / temperature)
        e.mul_(x.sub(zero).sign_())
        S = e.sum(1, keepdim=True)
        log_sum = S.log() + top / temperature  # -inf if every x is 0
        loss.index_add_(0, b, softplus(log_sum[:, 0]))
        e.div_(x)  # dx^(1/T) / dx = x^(1/T) / (T x)
        g_pairs = e.mul_(torch.sigmoid(log_sum) / (S.clamp(min=1) * temperature))
        gradient.index_add_(0, b, g_pairs)
        gradient.view(-1)[place] = -g_pairs.sum(1)
    return _nan_unless_finite(s, loss, gradient)


@list_loss
def _bpr_lists(s: Tensor, positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor]:
    negatives = _only(negative, s)
    loss, gradient = s.new_zeros(len(s)), torch.zeros_like(negatives)
    for place, b in _blocks(positive):
        d = negatives.index_select(0, b).sub_(s.flatten()[place][:, None])
        loss.index_add_(0, b, softplus(d).sum(1))
        g_pairs = d.sigmoid_()
        gradient.index_add_(0, b, g_pairs)
        gradient.view(-1)[place] = -g_pairs.sum(1)
    pairs = (positive.sum(1) * negative.sum(1)).clamp(min=1)
    return _nan_unless_finite(s, loss / pairs, gradient.div_(pairs[:, None]))


def _places(positive: Tensor) -> tuple[Tensor, Tensor]:
    """Return the place of each positive in the flattened batch, ascending, and its list."""
    place = positive.flatten().nonzero().squeeze(1)
    return place, place // positive.shape[1]


def _blocks(positive: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield `_places` in blocks of at most PAIRS pairs."""
    size = max(1, PAIRS // positive.shape[1])
    return zip(*(each.split(size) for each in _places(positive)), strict=True)


def _only(chosen: Tensor, s: Tensor) -> Tensor:
    """Return a copy of the scores with -inf for the entries that are not chosen."""
    return torch.where(chosen.contiguous(), s.contiguous(), -math.inf)


def _maximum(s: Tensor) -> Tensor:
    """Return the maximum of each row [B, 1], finite if the row is -inf throughout, so that it can be subtracted."""
    return s.amax(1, keepdim=True).clamp_(min=torch.finfo(s.dtype).min)


def _nan_unless_finite(s: Tensor, loss: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Make loss and gradient of a list NaN if it has a score that is not finite."""
    nan_or_zero = 0 * s.sum(1)
    return loss + nan_or_zero, gradient.add_(nan_or_zero[:, None])


# ---------------------------------------------------------------------------------------------------------------
# Arguments


def _prepare(
    function: str,
    scores: Tensor,
    relevance: Tensor,
    temperature: float,
    mask: Tensor | None,
    reduction: Reduction,
    validate: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Check the arguments. Return scores [B, n] in the type to compute in, and which are positives and negatives."""
    check_choice(function, "reduction", reduction, Reduction)
    check_dense(function, "relevance", relevance)
    check_score_lists(function, scores, relevance, mask)
    check_number(function, "temperature", temperature, *TAU_RANGE)
    check_values(function, scores, relevance, temperature, mask, validate, empty_lists=True)
    s, positive = scores.to(working_type(scores)), relevance.detach() > 0
    if mask is None:
        return s, positive, ~positive
    return torch.where(mask, s, 0), positive & mask, ~positive & mask  # padding can contain any value


def _check_threshold(function: str, threshold: Tensor, scores: Tensor, validate: bool) -> None:
    check_dense(function, "threshold", threshold)
    if threshold.shape != scores.shape[:1] or not threshold.is_floating_point():
        seen = f"{threshold.dtype} {list(threshold.shape)}"
        raise InputError(f"{function}: threshold must be float, one per list [{len(scores)}], got {seen}")
    if threshold.device != scores.device:
        seen = f"{scores.device} and {threshold.device}"
        raise InputError(f"{function}: scores and threshold must be on the same device, got {seen}")
    if validate and not torch.compiler.is_compiling() and bool(threshold.isnan().any()):
        row = int(threshold.isnan().nonzero()[0])
        raise InputError(f"{function}: threshold must be a number, got nan at row {row}")
