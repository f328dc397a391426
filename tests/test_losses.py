"""The list losses and LapSum: values by hand and over all pairs, gradients, properties, padding, torch.compile."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import softplus
from torch.profiler import ProfilerActivity, profile

import drm_triton
from drm_triton import bpr_loss, losses, psl_loss, soft_topk, softmax_at_k_loss, softmax_loss
from drm_triton.errors import InputError
from drm_triton.kernels import get_backend, reference, why_not
from drm_triton.kernels.protocol import Objective
from drm_triton.names import BackendName
from tests.test_functional import TOLERANCE, gradient_of, random_lists

Loss = Callable[..., Tensor]


def at_k(scores: Tensor, relevance: Tensor, **options: Any) -> Tensor:
    return softmax_at_k_loss(scores, relevance, 2, 0.5, 0.7, **options)


def softmax(scores: Tensor, relevance: Tensor, **options: Any) -> Tensor:
    return softmax_loss(scores, relevance, 0.5, **options)


def psl(scores: Tensor, relevance: Tensor, **options: Any) -> Tensor:
    return psl_loss(scores, relevance, 0.3, **options)


LOSSES: list[Loss] = [softmax, at_k, psl, bpr_loss]


def pairs(loss: Loss, scores: Tensor, relevance: Tensor) -> Tensor:
    """Compute the losses of lists without padding by their formulas, over all pairs. Autograd can differentiate it."""
    values = []
    for s, y in zip(scores, relevance > 0, strict=True):
        d = s[~y][None, :] - s[y][:, None]  # [positives, negatives]
        if loss is bpr_loss:
            values.append(torch.log1p(d.exp()).mean() if d.numel() else 0 * s.sum())
        elif loss is psl:
            values.append(torch.log1p((1 + d).relu().pow(1 / 0.3).sum(1)).sum())
        else:
            beta = s.detach().sort(descending=True).values[1]
            weight = torch.sigmoid((s.detach()[y] - beta) / 0.7) if loss is at_k else torch.ones_like(s[y])
            values.append((weight * torch.log1p((d / 0.5).exp().sum(1))).sum())
    return torch.stack(values)


# ---------------------------------------------------------------------------------------------------------------
# Values and gradients


def test_values_by_hand() -> None:
    scores, relevance = torch.tensor([[0.0, math.log(2), math.log(3)]], dtype=torch.float64), torch.tensor([[1, 0, 0]])
    assert softmax_loss(scores, relevance).item() == pytest.approx(math.log(1 + 2 + 3))
    assert softmax_loss(scores, relevance, 0.5).item() == pytest.approx(math.log(1 + 4 + 9))
    assert bpr_loss(scores, relevance).item() == pytest.approx((math.log(3) + math.log(4)) / 2)
    # The second largest score is log 2: the weight of the positive is sigma(-log 2) = 1/3.
    assert softmax_at_k_loss(scores, relevance, 2).item() == pytest.approx(math.log(6) / 3)
    assert softmax_at_k_loss(scores, relevance, 2, 1.0, 0.5).item() == pytest.approx(math.log(6) / 5)
    threshold = torch.tensor([-math.log(3)], dtype=torch.float64)
    assert softmax_at_k_loss(scores, relevance, threshold=threshold).item() == pytest.approx(math.log(6) * 3 / 4)
    scores = torch.tensor([[0.25, 0.75, -0.25, -1.0]], dtype=torch.float64)  # d = 1/2, -1/2, -5/4
    relevance = torch.tensor([[1, 0, 0, 0]])
    assert psl_loss(scores, relevance, 0.5).item() == pytest.approx(math.log(1 + 2.25 + 0.25 + 0))
    assert psl_loss(scores, relevance, 1.0).item() == pytest.approx(math.log(1 + 1.5 + 0.5 + 0))


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("block", [1, 12, 1 << 18])
def test_losses_and_gradients_are_those_of_all_pairs(loss: Loss, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "PAIRS", block)
    scores, relevance, _ = random_lists(B=6, n=11)
    relevance[0], relevance[1] = False, True  # lists without positives and without negatives
    result = gradient_of(loss, scores, relevance, reduction="none")
    expected = gradient_of(lambda s: pairs(loss, s, relevance), scores)
    torch.testing.assert_close(result, expected, **TOLERANCE[torch.float64])


def test_softmax_is_the_training_objective() -> None:
    scores, _, _ = random_lists(B=5, n=9)
    relevance = (torch.arange(9) < 3).expand(5, 9)
    objective = Objective(3, hinge=False, drm=False, softmax=True, temperature=0.2)
    expected = reference.list_losses(scores, 100, objective)[3]
    torch.testing.assert_close(softmax_loss(scores, relevance, 0.2, reduction="none"), expected)


@pytest.mark.parametrize("ties", [False, True])
def test_gradcheck(ties: bool) -> None:
    scores, relevance, mask = random_lists(B=3, n=7)
    if ties:  # with whole numbers, many d are 0 and many are -1, where the relu has its kink
        scores = scores.round()
    scores.requires_grad_()
    for loss in (softmax, psl, bpr_loss):
        assert torch.autograd.gradcheck(lambda s, loss=loss: loss(s, relevance, mask=mask), scores)
        assert torch.autograd.gradcheck(lambda s, loss=loss: loss(s, relevance, reduction="none"), scores)
    # The weights are constants in the gradient. With a large temperature they hardly depend on the scores.
    assert torch.autograd.gradcheck(lambda s: softmax_at_k_loss(s, relevance, 2, 0.5, 1e9, mask=mask), scores)


@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_thresholds_of_all_items_weight_the_positives_of_a_sample(name: BackendName) -> None:
    """With the thresholds of `top_k`, the positives of sampled lists count as they do in the whole catalogue."""
    if reason := why_not(name):
        pytest.skip(reason)
    backend, k, draw = get_backend(name), 5, torch.Generator().manual_seed(4)
    U, V = torch.randn(3, 8, generator=draw), torch.randn(60, 8, generator=draw)
    _, best = backend.top_k(U, backend.pack_items(V, "dot"), k)
    relevance = torch.zeros(3, 60)
    relevance[:, :4] = 1
    scores, some = U @ V.T, torch.arange(12)  # all positives, and 8 of the other items
    sample = softmax_at_k_loss(
        scores[:, some], relevance[:, some], None, 0.5, 0.7, threshold=best[:, -1], reduction="none"
    )
    beta = np.partition(scores.double().numpy(), 60 - k)[:, 60 - k]
    for b, s in enumerate(scores.double().numpy()):
        terms = np.log1p(np.exp((s[4:12] - s[:4, None]) / 0.5).sum(1)) / (1 + np.exp((beta[b] - s[:4]) / 0.7))
        assert sample[b].item() == pytest.approx(terms.sum(), rel=1e-4)
    all_items = softmax_at_k_loss(scores, relevance, k, 0.5, 0.7)
    by_threshold = softmax_at_k_loss(scores, relevance, None, 0.5, 0.7, threshold=best[:, -1])
    torch.testing.assert_close(by_threshold, all_items, rtol=1e-5, atol=1e-6)


def test_weights_at_k_have_no_gradient() -> None:
    scores, relevance, _ = random_lists()
    threshold = scores.sort(1, descending=True).values[:, 2].requires_grad_()
    by_k = gradient_of(softmax_at_k_loss, scores, relevance, 3, 0.5, 0.1)
    by_threshold = gradient_of(softmax_at_k_loss, scores, relevance, None, 0.5, 0.1, threshold)
    torch.testing.assert_close(by_k, by_threshold, rtol=0, atol=0)
    assert threshold.grad is None
    steep = gradient_of(softmax_at_k_loss, scores, relevance, 3, 0.5, 1e-9, reduction="none")
    top = scores >= threshold[:, None]
    weight = torch.where(scores == threshold[:, None], 0.5, top.double())  # a step: only the positives of the top 3

    def weighted(s: Tensor) -> Tensor:
        alone = [softmax_loss(s, relevance & (torch.arange(9) == i), 0.5, ~relevance | (torch.arange(9) == i), "none")
                 for i in range(9)]  # fmt: skip
        return (weight * torch.stack(alone, 1)).sum(1)

    torch.testing.assert_close(steep, gradient_of(weighted, scores), **TOLERANCE[torch.float64])


def test_weights_are_one_in_lists_shorter_than_k() -> None:
    scores, relevance, mask = random_lists()
    mask[1, 3:] = False
    result = softmax_at_k_loss(scores, relevance, 4, mask=mask, reduction="none")
    assert result[1] == softmax_loss(scores, relevance, mask=mask, reduction="none")[1]
    lowest = torch.full((5,), -math.inf)
    everything = softmax_at_k_loss(scores, relevance, threshold=lowest, mask=mask)
    assert everything == softmax_loss(scores, relevance, mask=mask)


def test_psl_without_active_pairs_is_zero_and_differentiable() -> None:
    scores = torch.tensor([[1.0, 0.0, -0.5], [0.5, 0.0, -2.0]], requires_grad=True)
    relevance = torch.tensor([[1, 0, 0], [1, 0, 0]])
    for temperature in (1e-3, 0.1, 1.0):
        loss = psl_loss(scores, relevance, temperature, reduction="none")
        (gradient,) = torch.autograd.grad(loss.sum(), scores)
        assert loss[0] == 0
        assert (gradient[0] == 0).all()
        assert gradient[1, 1] > 0 or temperature == 1e-3  # 0.5^1000 is 0 in float32
        assert gradient[1, 2] == 0
        assert gradient.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("spread", [1e-20, 1.0, 1e4, 1e30])
def test_extreme_scores_and_temperatures_stay_finite(dtype: torch.dtype, spread: float) -> None:
    scores, relevance, _ = random_lists(dtype=dtype)
    scores = scores * spread
    for temperature in (1e-3, 1.0):
        for loss in (
            lambda s, t=temperature: softmax_loss(s, relevance, t),
            lambda s, t=temperature: softmax_at_k_loss(s, relevance, 2, t, 1e-6),
            lambda s, t=temperature: psl_loss(s, relevance, t),
            lambda s: bpr_loss(s, relevance),
        ):
            value, gradient = gradient_of(loss, scores)
            assert value.isfinite()
            assert gradient.isfinite().all()
            exact_value, exact_gradient = gradient_of(loss, scores.double())
            scale = max(1.0, float(exact_gradient.abs().max()))
            torch.testing.assert_close(value.double(), exact_value, rtol=1e-3, atol=1e-5)
            torch.testing.assert_close(gradient.double() / scale, exact_gradient / scale, rtol=1e-2, atol=1e-4)


# ---------------------------------------------------------------------------------------------------------------
# Properties


@pytest.mark.parametrize("loss", LOSSES)
def test_order_and_shift_of_the_scores_do_not_matter(loss: Loss) -> None:
    scores, relevance, mask = random_lists()
    value, gradient = gradient_of(loss, scores, relevance, mask=mask)
    order = torch.randperm(scores.shape[1], generator=torch.Generator().manual_seed(1))
    permuted = gradient_of(loss, scores[:, order], relevance[:, order], mask=mask[:, order])
    torch.testing.assert_close(permuted, (value, gradient[:, order]), **TOLERANCE[torch.float64])
    shifted = gradient_of(loss, scores + 5, relevance, mask=mask)
    torch.testing.assert_close(shifted, (value, gradient), **TOLERANCE[torch.float64])
    torch.testing.assert_close(gradient.sum(1), torch.zeros(5, dtype=torch.float64), rtol=0, atol=1e-12)


@pytest.mark.parametrize("loss", LOSSES)
def test_a_padded_list_is_the_shorter_list(loss: Loss) -> None:
    scores, relevance, mask = random_lists()
    mask[:, 1] = True  # two entries at least, for k = 2
    values = loss(scores, relevance, mask=mask, reduction="none")
    for b, kept in enumerate(mask):
        alone = loss(scores[b : b + 1, kept], relevance[b : b + 1, kept])
        torch.testing.assert_close(values[b], alone, **TOLERANCE[torch.float64])


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("padding", [math.nan, math.inf, -math.inf])
def test_padding_can_contain_anything_and_gets_no_gradient(loss: Loss, padding: float) -> None:
    scores, relevance, mask = random_lists()
    dirty = torch.where(mask, scores, padding), torch.where(mask, relevance.double(), math.nan)
    value, gradient = gradient_of(loss, *dirty, mask=mask)
    expected = gradient_of(loss, scores, relevance, mask=mask)
    torch.testing.assert_close((value, gradient), expected, rtol=0, atol=0)
    assert (gradient[~mask] == 0).all()


@pytest.mark.parametrize("loss", LOSSES)
def test_lists_without_pairs_have_loss_and_gradient_zero(loss: Loss) -> None:
    scores, relevance, mask = random_lists()
    relevance[0], relevance[1], mask[2] = False, True, False
    value, gradient = gradient_of(loss, scores, relevance, mask=mask, reduction="none")
    assert value[:3].tolist() == [0, 0, 0]
    assert (gradient[:3] == 0).all()
    assert (value[3:] > 0).all()


@pytest.mark.parametrize("loss", LOSSES)
def test_reductions_agree_and_grades_are_not_used(loss: Loss) -> None:
    scores, relevance, _ = random_lists()
    lists = loss(scores, relevance, reduction="none")
    assert lists.shape == (5,)
    torch.testing.assert_close(loss(scores, relevance, reduction="sum"), lists.sum())
    torch.testing.assert_close(loss(scores, relevance), lists.mean())
    for kind in (torch.uint8, torch.int64, torch.float32):
        assert torch.equal(loss(scores, 3 * relevance.to(kind), reduction="none"), lists)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_results_have_the_type_of_the_scores(loss: Loss, dtype: torch.dtype) -> None:
    scores, relevance, mask = random_lists(dtype=dtype)
    value, gradient = gradient_of(loss, scores, relevance, mask=mask)
    exact_value, exact_gradient = gradient_of(loss, scores.double(), relevance, mask=mask)
    assert value.dtype == gradient.dtype == dtype
    torch.testing.assert_close(value.double(), exact_value, **TOLERANCE[dtype])
    torch.testing.assert_close(gradient.double(), exact_gradient, **TOLERANCE[dtype])


@pytest.mark.parametrize("loss", LOSSES)
def test_layout_does_not_matter_and_inputs_stay_unchanged(loss: Loss) -> None:
    inputs = random_lists()
    views = [tensor.T.contiguous().T for tensor in inputs]
    assert torch.equal(loss(views[0], views[1], mask=views[2]), loss(inputs[0], inputs[1], mask=inputs[2]))
    assert all(torch.equal(view, tensor) for view, tensor in zip(views, inputs, strict=True))


@pytest.mark.parametrize("loss", LOSSES)
def test_memory_is_that_of_the_lists_not_of_the_pairs(loss: Loss, monkeypatch: pytest.MonkeyPatch) -> None:
    B, n = 4, 128
    monkeypatch.setattr(losses, "PAIRS", B * n)
    scores = torch.randn(B, n, requires_grad=True)
    relevance = torch.arange(n).expand(B, n) % 2 == 0  # 64 positives: 32 times as many pairs as entries
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as events:
        loss(scores, relevance).backward()
    largest = max(event.self_cpu_memory_usage for event in events.events())
    assert 4 * B * n <= largest <= 8 * B * n


# ---------------------------------------------------------------------------------------------------------------
# As torch operations


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_opcheck(dtype: torch.dtype) -> None:
    scores, relevance, mask = random_lists(B=2, dtype=dtype)
    leaf, negative = scores.clone().requires_grad_(), ~relevance & mask
    lists = (leaf, relevance & mask, negative)
    operations = torch.ops.drm_triton
    torch.library.opcheck(operations.softmax_lists.default, (*lists, 0.5, scores[:, 0], 1.0))
    torch.library.opcheck(operations.psl_lists.default, (*lists, 0.5))
    torch.library.opcheck(operations.bpr_lists.default, lists)
    for padding in (mask, None):
        torch.library.opcheck(operations.lapsum.default, (leaf, 2, 0.5, padding))


def membership(scores: Tensor, relevance: Tensor, mask: Tensor | None = None) -> Tensor:
    """A loss with LapSum."""
    return -(soft_topk(scores, 2, 0.5, mask, method="lapsum") * relevance).sum()


@pytest.mark.parametrize("loss", [*LOSSES, membership])
def test_compiles_without_a_graph_break_and_gives_the_same(loss: Loss) -> None:
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for B, n in ((5, 9), (3, 12)):  # the second shape makes it compile for dynamic shapes
        scores, relevance, mask = random_lists(B, n)
        for padding in (mask, None):
            expected = gradient_of(loss, scores, relevance, mask=padding)
            result = gradient_of(compiled, scores, relevance, mask=padding)
            torch.testing.assert_close(result, expected, **TOLERANCE[torch.float64])


@pytest.mark.parametrize("loss", [*LOSSES, membership])
def test_first_derivatives_only_and_in_reverse_mode(loss: Loss) -> None:
    scores, relevance, mask = random_lists()
    leaf = scores.clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss(leaf, relevance, mask=mask), leaf, create_graph=True)
    torch.testing.assert_close(
        torch.func.grad(lambda s: loss(s, relevance, mask=mask))(scores), expected, rtol=0, atol=0
    )
    with pytest.raises(NotImplementedError, match="first derivatives only"):
        expected.square().sum().backward()
    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        torch.func.jvp(lambda s: loss(s, relevance, mask=mask), (scores,), (scores,))


# ---------------------------------------------------------------------------------------------------------------
# LapSum


def laplace(x: Tensor) -> Tensor:
    return torch.where(x > 0, 1 - (-x.abs()).exp() / 2, (-x.abs()).exp() / 2)


def bisected(s: Tensor, k: int, tau: float) -> Tensor:
    """Return Q of one list in float64, with the threshold found by bisection."""
    low, high = s.min() - 1000 * tau, s.max() + 1000 * tau
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if laplace((s - middle) / tau).sum() > k else (low, middle)
    return laplace((s - low) / tau)


@pytest.mark.parametrize("scores", ["random", "whole", "equal", "two", "wide"])
@pytest.mark.parametrize("tau", [0.01, 0.3, 20.0])
def test_lapsum_is_its_definition(scores: str, tau: float) -> None:
    s = random_lists(B=1, n=13)[0][0]
    s = {"random": s, "whole": s.round(), "equal": 0 * s, "two": (s > 0).double(), "wide": 100 * s}[scores]
    for k in range(1, 13):
        Q = soft_topk(s[None], k, tau, method="lapsum")[0]
        assert Q.sum().item() == pytest.approx(k, rel=1e-12)
        if scores != "wide" or tau > 1:  # elsewhere Q is flat in the threshold, which bisection then cannot find
            torch.testing.assert_close(Q, bisected(s, k, tau), rtol=1e-6, atol=1e-9)
    assert (soft_topk(s[None], 13, tau, method="lapsum") == 1).all()


@pytest.mark.parametrize("k", [1, 3, 7])
@pytest.mark.parametrize("ties", [False, True])
def test_lapsum_gradcheck(k: int, ties: bool) -> None:
    scores, _, mask = random_lists(B=4, n=7)
    mask[1] = True
    scores = (scores.round() if ties else scores).requires_grad_()
    for padding in (mask, None):
        assert torch.autograd.gradcheck(lambda s, m=padding: soft_topk(s, k, 0.7, m, method="lapsum"), scores)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_lapsum_of_long_lists(dtype: torch.dtype) -> None:
    scores, _, mask = random_lists(3, 5000, dtype)
    mask[1, 30:] = False
    for k in (1, 20, 2400, 4999):
        for tau in (1e-4, 0.1, 10.0):
            Q, gradient = gradient_of(soft_topk, scores, k, tau, mask, method="lapsum")
            total = mask.sum(1).clamp(max=k).to(dtype)
            torch.testing.assert_close(Q.sum(1), total, rtol=50 * torch.finfo(dtype).eps, atol=0)
            assert (Q >= 0).all()
            assert (Q <= 1).all()
            assert (Q[~mask] == 0).all()
            assert (gradient[~mask] == 0).all()
            exact, exact_gradient = gradient_of(soft_topk, scores.double(), k, tau, mask, method="lapsum")
            torch.testing.assert_close(Q.double(), exact, rtol=0, atol=2e-3 if tau < 1e-3 else 2e-5)
            scale = exact_gradient.abs().max().clamp(min=1e-9)
            torch.testing.assert_close(gradient.double() / scale, exact_gradient / scale, rtol=0, atol=5e-3)


def test_lapsum_reaches_the_hard_top_k() -> None:
    scores, _, mask = random_lists()
    Q = soft_topk(scores, 3, 1e-6, method="lapsum")
    assert torch.equal(Q.round(), (scores >= scores.sort(1, descending=True).values[:, 2:3]).double())
    Q, gradient = gradient_of(soft_topk, torch.where(mask, scores, math.nan), 3, 1e-6, mask, method="lapsum")
    assert (Q[~mask] == 0).all()
    assert gradient.isfinite().all()


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_lapsum_has_the_type_of_the_scores(dtype: torch.dtype) -> None:
    scores, _, mask = random_lists(dtype=dtype)
    Q, gradient = gradient_of(soft_topk, scores, 3, 0.5, mask, method="lapsum")
    exact, exact_gradient = gradient_of(soft_topk, scores.double(), 3, 0.5, mask, method="lapsum")
    assert Q.dtype == gradient.dtype == dtype
    torch.testing.assert_close(Q.double(), exact, **TOLERANCE[dtype])
    torch.testing.assert_close(gradient.double(), exact_gradient, **TOLERANCE[dtype])


# ---------------------------------------------------------------------------------------------------------------
# Bad input

S, Y = torch.zeros(2, 3), torch.tensor([[1, 0, 0], [0, 1, 0]])
NAN = torch.tensor([[0, 0, 0], [0, math.nan, 0]])


@pytest.mark.parametrize("loss", [softmax_loss, softmax_at_k_loss, psl_loss, bpr_loss])
@pytest.mark.parametrize(
    ("args", "options", "message"),
    [
        ((torch.zeros(3), Y), {}, r"scores must be \[B, n\].*got shape \[3\]"),
        ((S.long(), Y), {}, "scores must be float16, .* got torch.int64"),
        ((S, Y[:, :2]), {}, r"scores and relevance must have the same shape, got \[2, 3\] and \[2, 2\]"),
        ((S, None), {}, "relevance must be a torch tensor, got NoneType"),
        ((S, Y), {"mask": torch.ones(2, 3)}, "mask must be bool, .* got torch.float32"),
        ((S, Y), {"reduction": "max"}, "reduction must be one of mean, sum, none, got 'max'"),
        ((NAN, Y), {}, "scores must be finite .* got nan at row 1, column 1"),
        ((S, -Y), {}, "relevance must be finite and at least 0, got -1 at row 0, column 0"),
    ],
)
def test_bad_lists_are_rejected(loss: Loss, args: tuple[Any, ...], options: dict[str, Any], message: str) -> None:
    cut_off = {"k": 1} if loss is softmax_at_k_loss else {}
    with pytest.raises(InputError, match=f"^{loss.__name__}: .*{message}"):
        loss(*args, **cut_off, **options)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: softmax_loss(S, Y, 0), "softmax_loss: temperature must be finite and at least 1e-32"),
        (lambda: softmax_loss(S + 1e37, Y, 1e-6), r"scores must be finite and at most 1e\+31 in magnitude"),
        (lambda: psl_loss(S, Y, 1.5), "psl_loss: temperature must be finite and at least 1e-32, at most 1.0, got 1.5"),
        (lambda: softmax_at_k_loss(S, Y), "softmax_at_k_loss: give either k or threshold, got neither"),
        (lambda: softmax_at_k_loss(S, Y, 1, threshold=S[:, 0]), "give either k or threshold, got both"),
        (lambda: softmax_at_k_loss(S, Y, 4), "k must be an integer from 1 to the list length 3, got 4"),
        (lambda: softmax_at_k_loss(S, Y, 1, 1.0, -1), "temperature_weight must be finite and at least 1e-32"),
        (lambda: softmax_at_k_loss(S, Y, threshold=0.5), "threshold must be a torch tensor, got float"),
        (lambda: softmax_at_k_loss(S, Y, threshold=S[0]), r"threshold must be float, .* got torch.float32 \[3\]"),
        (lambda: softmax_at_k_loss(S, Y, threshold=Y[:, 0]), r"threshold must be float, .* got torch.int64 \[2\]"),
        (lambda: softmax_at_k_loss(S, Y, threshold=S[:, 0].to("meta")), "scores and threshold must be on the same"),
        (lambda: softmax_at_k_loss(S, Y, threshold=NAN[:, 1]), "threshold must be a number, got nan at row 1"),
        (lambda: soft_topk(S, 1, method="dftopk"), "soft_topk: method must be one of neuralsort, lapsum, got 'dftopk'"),
        (lambda: soft_topk(NAN, 1, method="lapsum"), "scores must be finite .* got nan at row 1, column 1"),
    ],
)
def test_bad_arguments_are_rejected(call: Callable[[], Tensor], message: str) -> None:
    with pytest.raises(InputError, match=message):
        call()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("loss", LOSSES)
def test_without_validation_a_list_that_is_not_finite_is_nan(loss: Loss, bad: float) -> None:
    for column in range(3):  # a positive or a negative
        scores = S.clone()
        scores[1, column] = bad
        value, gradient = gradient_of(loss, scores, Y, reduction="none", validate=False)
        assert value.isnan().tolist() == [False, True]
        assert gradient.isnan().all(1).tolist() == [False, True]
        Q, gradient = gradient_of(soft_topk, scores, 2, method="lapsum", validate=False)
        assert Q.isnan().all(1).tolist() == [False, True]
        assert gradient.isnan().any(1).tolist() == [False, True]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_are_summed_in_float32(dtype: torch.dtype) -> None:
    scores = torch.tensor([[0.05, 0.0]], dtype=dtype).expand(1000, 2)
    relevance = torch.tensor([[1, 0]]).expand(1000, 2)
    exact = 1000 * softplus(-scores[0, 0].double())
    assert softmax_loss(scores, relevance, reduction="sum") == exact.to(dtype)
    assert bpr_loss(scores, relevance, reduction="sum") == exact.to(dtype)


def test_public_names() -> None:
    names = {"softmax_loss", "softmax_at_k_loss", "psl_loss", "bpr_loss"}
    assert names <= set(drm_triton.__all__)
    assert all(getattr(drm_triton, name) is getattr(losses, name) for name in names)
