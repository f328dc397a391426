"""The public loss, soft top-K and metrics: values, gradients, padding, types, torch.compile, and bad input."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import drm_triton
from drm_triton import DRMLoss, drm_loss, functional, relaxed_metric, soft_topk
from drm_triton.errors import InputError
from drm_triton.kernels import reference, why_not
from drm_triton.kernels.weights import rank_weights
from drm_triton.names import BackendName, RelaxedMetric, Weight

METRICS: tuple[RelaxedMetric, ...] = ("precision", "recall", "ndcg", "ap")
WEIGHTS: tuple[Weight, ...] = ("uniform", *METRICS)
TOLERANCE: dict[torch.dtype, dict[str, Any]] = {  # of results against float64; half types round once, at the end
    torch.float64: {"rtol": 1e-9, "atol": 1e-11},
    torch.float32: {"rtol": 1e-4, "atol": 1e-5},
    torch.bfloat16: {"rtol": 1e-2, "atol": 1e-2},
    torch.float16: {"rtol": 2e-3, "atol": 2e-3},
}


@pytest.fixture(params=["reference", "cpu"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    choose(request.param, monkeypatch)


@pytest.fixture(params=["reference", "cpu", "triton"])
def any_backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also test Triton, in its interpreter, with few lists. These tests check the call from torch, not the results."""
    if request.param == "triton" and torch.cuda.is_available():
        pytest.skip("the tensors of these tests are on the CPU")
    choose(request.param, monkeypatch)


def choose(name: BackendName, monkeypatch: pytest.MonkeyPatch) -> None:
    reason = why_not(name)
    if reason is not None:
        pytest.skip(f"{name}: {reason}")
    monkeypatch.setenv("DRM_BACKEND", name)


def random_lists(
    B: int = 5, n: int = 9, dtype: torch.dtype = torch.float64, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Return scores, relevance with a positive in each list, and a mask with a True in each list."""
    random = torch.Generator().manual_seed(seed)
    scores = torch.randn(B, n, generator=random, dtype=torch.float64).to(dtype)
    relevance = torch.rand(B, n, generator=random) < 0.4
    mask = torch.rand(B, n, generator=random) < 0.8
    relevance[:, 0] = mask[:, 0] = True
    return scores, relevance, mask


def gradient_of(function: Callable[..., Tensor], scores: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """Return the value of a function of scores and its gradient for a fixed upstream gradient."""
    leaf = scores.detach().clone().requires_grad_()
    value = function(leaf, *args, **options)
    upstream = torch.linspace(-1, 2, value.numel(), dtype=value.dtype).reshape(value.shape)
    value.backward(upstream)
    assert leaf.grad is not None
    return value.detach(), leaf.grad


# ---------------------------------------------------------------------------------------------------------------
# Values and gradients


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("k", [1, 3, 9, None])
@pytest.mark.parametrize("padded", [False, True])
def test_drm_loss_and_gradient_agree_with_autograd(weight: Weight, k: int | None, padded: bool) -> None:
    scores, relevance, mask = random_lists()
    value, gradient = gradient_of(
        drm_loss, scores, relevance, k, 0.5, weight, mask if padded else None, reduction="none"
    )
    everything = mask if padded else torch.ones_like(mask)

    def formula(s: Tensor) -> Tensor:
        y = (relevance & everything).to(s.dtype)
        w = rank_weights(s.detach(), y, k, weight, everything)
        return (y - reference.soft_topk_forward(s, w, 0.5, everything)).square().sum(1)

    expected_value, expected_gradient = gradient_of(formula, scores)
    torch.testing.assert_close(value, expected_value, **TOLERANCE[torch.float64])
    torch.testing.assert_close(gradient, expected_gradient, **TOLERANCE[torch.float64])


@pytest.mark.usefixtures("backend")
def test_gradcheck() -> None:
    scores, relevance, mask = random_lists(B=2, n=7)
    scores.requires_grad_()
    assert torch.autograd.gradcheck(lambda s: drm_loss(s, relevance, mask=mask, weight="ndcg"), scores)
    assert torch.autograd.gradcheck(lambda s: drm_loss(s, relevance, 4, reduction="none"), scores)
    assert torch.autograd.gradcheck(lambda s: soft_topk(s, 3, 0.7, mask), scores)
    for metric in METRICS:
        assert torch.autograd.gradcheck(lambda s, m=metric: relaxed_metric(s, relevance, 3, metric=m), scores)


@pytest.mark.usefixtures("backend")
def test_soft_topk_sums_to_k_or_to_the_length_of_a_shorter_list() -> None:
    scores, _, mask = random_lists(n=9)
    mask[1, 2:] = False
    assert soft_topk(scores, 4).sum(1).tolist() == pytest.approx([4] * 5)
    Q = soft_topk(scores, 4, mask=mask)
    assert Q.sum(1).tolist() == pytest.approx(mask.sum(1).clamp(max=4).tolist())
    assert (Q[~mask] == 0).all()


@pytest.mark.usefixtures("backend")
def test_relaxed_metrics_reach_the_metrics() -> None:
    scores = torch.tensor([[9.0, 7.0, 5.0, 3.0, 1.0]])
    relevance = torch.tensor([[3, 0, 1, 0, 2]])  # hits at ranks 1, 3 and 5
    third = 1 / math.log2(3)
    expected: dict[RelaxedMetric, float] = {
        "precision": 2 / 4,
        "recall": 2 / 3,
        "ap": (1 / 1 + 2 / 3) / 3,
        "ndcg": (3 + 1 / 2) / (3 + 2 * third + 1 / 2),  # graded gains 3, 2, 1
    }
    for metric, value in expected.items():
        assert relaxed_metric(scores, relevance, 4, 0.01, metric).item() == pytest.approx(value, rel=1e-6)


@pytest.mark.usefixtures("backend")
def test_without_k_the_hard_ranking_of_binary_relevance_has_loss_zero() -> None:
    relevance = torch.tensor([[1, 1, 0, 0, 0], [1, 1, 1, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]])
    scores = torch.arange(5.0, 0, -1).repeat(4, 1).requires_grad_()
    loss = drm_loss(scores, relevance, tau=0.02, reduction="none")
    assert loss.tolist() == pytest.approx([0, 0, 0, 0], abs=1e-9)
    # Ranked worst first, a list with K positives and 2K <= n has K misses and K wrong items in its top K.
    worst = drm_loss(-scores, relevance, tau=0.02, reduction="none")
    assert worst[0].item() == pytest.approx(4, rel=1e-6)


@pytest.mark.usefixtures("backend")
def test_ap_whose_first_ranks_all_miss_keeps_the_later_ranks() -> None:
    scores = torch.tensor([[4.0, 3.0, 2.0, 1.0]])  # P@1 = 0: the first column of the weights is zero
    relevance = torch.tensor([[0, 1, 1, 0]])
    for k in (4, None):
        expected = (1 / 2 + 2 / 3) / 2 if k else (1 / 2) / 2
        assert relaxed_metric(scores, relevance, k, 0.01, "ap").item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.usefixtures("backend")
def test_long_lists() -> None:
    scores, relevance, mask = random_lists(1, 4096, torch.float32)
    relevance &= scores > 1.5
    value, gradient = gradient_of(drm_loss, scores, relevance, 3, mask=mask)
    y = (relevance & mask).double()
    w = torch.ones(1, 3, dtype=torch.float64)
    expected_value, expected_gradient = reference.drm_lists(scores.double(), y, w, 1.0, mask)
    torch.testing.assert_close(value.double(), expected_value[0], rtol=1e-3, atol=1e-3)
    scale = expected_gradient.abs().max()
    torch.testing.assert_close(-gradient.double() / scale, expected_gradient / scale, rtol=1e-3, atol=1e-3)


@pytest.mark.usefixtures("backend")
def test_reductions_agree() -> None:
    scores, relevance, _ = random_lists()
    for function in (
        lambda r: drm_loss(scores, relevance, reduction=r),
        lambda r: relaxed_metric(scores, relevance, 2, reduction=r),
    ):
        lists = function("none")
        assert lists.shape == (5,)
        torch.testing.assert_close(function("sum"), lists.sum())
        torch.testing.assert_close(function("mean"), lists.mean())


def test_module_is_the_function() -> None:
    scores, relevance, mask = random_lists()
    module = DRMLoss(k=2, tau=0.5, weight="ndcg", reduction="sum")
    expected = drm_loss(scores, relevance, 2, 0.5, "ndcg", mask, "sum")
    assert torch.equal(module(scores, relevance, mask), expected)


# ---------------------------------------------------------------------------------------------------------------
# Padding, types, layouts


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("padding", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("k", [2, None])
def test_padding_can_contain_anything_and_gets_no_gradient(padding: float, k: int | None) -> None:
    scores, relevance, mask = random_lists()
    dirty_scores = torch.where(mask, scores, padding)
    dirty_relevance = torch.where(mask, relevance.double(), math.nan)
    for weight in WEIGHTS:
        value, gradient = gradient_of(drm_loss, dirty_scores, dirty_relevance, k, weight=weight, mask=mask)
        expected_value, expected_gradient = gradient_of(drm_loss, scores, relevance, k, weight=weight, mask=mask)
        assert torch.equal(value, expected_value)
        assert torch.equal(gradient, expected_gradient)
        assert (gradient[~mask] == 0).all()
    Q, gradient = gradient_of(soft_topk, dirty_scores, 2, mask=mask)
    assert Q.isfinite().all()
    assert (gradient[~mask] == 0).all()
    value, gradient = gradient_of(relaxed_metric, dirty_scores, dirty_relevance, k, mask=mask)
    assert value.isfinite()
    assert (gradient[~mask] == 0).all()


@pytest.mark.usefixtures("backend")
def test_a_padded_list_is_the_shorter_list() -> None:
    scores, relevance, mask = random_lists()
    for b in range(len(scores)):
        kept = mask[b]
        alone = drm_loss(scores[b : b + 1, kept], relevance[b : b + 1, kept], weight="ndcg")
        padded = drm_loss(scores, relevance, weight="ndcg", mask=mask, reduction="none")[b]
        torch.testing.assert_close(padded, alone, **TOLERANCE[torch.float64])


@pytest.mark.usefixtures("backend")
def test_a_list_of_padding_alone_has_loss_zero_without_validation() -> None:
    scores, relevance, mask = random_lists()
    mask[2] = False
    for k in (2, None):
        value, gradient = gradient_of(drm_loss, scores, relevance, k, mask=mask, reduction="none", validate=False)
        assert value[2] == 0
        assert (gradient[2] == 0).all()
        assert gradient.isfinite().all()


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_results_have_the_type_of_the_scores(dtype: torch.dtype) -> None:
    scores, relevance, mask = random_lists(dtype=dtype)
    calls = (
        (drm_loss, (relevance, None, 1.0, "ap", mask)),
        (soft_topk, (3, 1.0, mask)),
        (relaxed_metric, (relevance, 3, 1.0, "ndcg", mask)),
    )
    for function, args in calls:
        value, gradient = gradient_of(function, scores, *args)
        expected_value, expected_gradient = gradient_of(function, scores.double(), *args)
        assert value.dtype == gradient.dtype == dtype
        torch.testing.assert_close(value.double(), expected_value, **TOLERANCE[dtype])
        torch.testing.assert_close(gradient.double(), expected_gradient, **TOLERANCE[dtype])


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("kind", [torch.bool, torch.int64, torch.uint8, torch.float32])
def test_relevance_can_have_any_type_and_stays_unchanged(kind: torch.dtype) -> None:
    scores, relevance, mask = random_lists()
    given = relevance.to(kind)
    before = [tensor.clone() for tensor in (scores, given, mask)]
    expected = drm_loss(scores, relevance.double(), mask=mask)
    assert torch.equal(drm_loss(scores, given, mask=mask), expected)
    assert all(torch.equal(tensor, copy) for tensor, copy in zip((scores, given, mask), before, strict=True))


@pytest.mark.usefixtures("backend")
def test_layout_of_the_inputs_does_not_matter() -> None:
    scores, relevance, mask = random_lists()
    views = [tensor.T.contiguous().T for tensor in (scores, relevance, mask)]
    assert not any(view.is_contiguous() for view in views)
    expected_value, expected_gradient = gradient_of(drm_loss, scores, relevance, mask=mask)
    leaf = views[0].requires_grad_()
    value = drm_loss(leaf, views[1], mask=views[2])
    value.backward(torch.tensor(-1.0, dtype=value.dtype))  # the upstream gradient that gradient_of uses for a scalar
    assert torch.equal(value.detach(), expected_value)
    assert leaf.grad is not None
    assert torch.equal(leaf.grad, expected_gradient)
    row = torch.randn(1, 9, dtype=torch.float64)
    assert torch.equal(soft_topk(row.expand(4, 9), 2), soft_topk(row, 2).repeat(4, 1))


# ---------------------------------------------------------------------------------------------------------------
# As torch operations


@pytest.mark.usefixtures("any_backend")
@pytest.mark.parametrize(("dtype", "k"), [(torch.float32, None), (torch.float64, 2)])
def test_opcheck(dtype: torch.dtype, k: int | None) -> None:
    scores, relevance, mask = random_lists(B=2, n=5, dtype=dtype)
    leaf, y = scores.clone().requires_grad_(), relevance.to(dtype)
    w = rank_weights(scores, y, k, "ndcg", mask)
    torch.library.opcheck(torch.ops.drm_triton.soft_topk.default, (leaf, w, 1.0, mask))
    torch.library.opcheck(torch.ops.drm_triton.soft_topk_backward.default, (scores, w, 1.0, mask, y))
    torch.library.opcheck(torch.ops.drm_triton.drm_lists.default, (leaf, y, w, 1.0, mask))


class Ranker(torch.nn.Module):
    """A linear model trained with all three functions."""

    def __init__(self, k: int | None, weight: Weight) -> None:
        super().__init__()
        self.score = torch.nn.Linear(4, 1, bias=False, dtype=torch.float64)
        self.loss, self.k = DRMLoss(k, weight=weight), k

    def forward(self, features: Tensor, relevance: Tensor, mask: Tensor) -> Tensor:
        scores = self.score(features).squeeze(-1)
        metric = relaxed_metric(scores, relevance, self.k, mask=mask)
        loss: Tensor = self.loss(scores, relevance, mask)
        return loss - metric + soft_topk(scores, 2, mask=mask)[:, 0].sum()


@pytest.mark.usefixtures("any_backend")
@pytest.mark.parametrize(
    ("any_backend", "k", "weight"),
    [
        *((name, k, weight) for name in ("reference", "cpu") for k, weight in ((3, "uniform"), (None, "ap"))),
        *(pytest.param("triton", k, weight, marks=pytest.mark.slow) for k, weight in ((3, "uniform"), (None, "ap"))),
    ],
    indirect=["any_backend"],
)
def test_compiles_without_a_graph_break_and_gives_the_same(k: int | None, weight: Weight) -> None:
    torch.manual_seed(0)
    model = Ranker(k, weight)
    # All of torch.compile except inductor, whose C++ code is slow to build.
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for B, n in ((2, 5), (3, 7)):  # the second shape makes it compile for dynamic shapes
        _, relevance, mask = random_lists(B, n)
        features = torch.randn(B, n, 4, dtype=torch.float64)
        results = []
        for run in (model, compiled):
            model.zero_grad()
            value = run(features, relevance, mask)
            value.backward()
            assert model.score.weight.grad is not None
            results.append((value.detach(), model.score.weight.grad.clone()))
        torch.testing.assert_close(results[0], results[1], **TOLERANCE[torch.float64])


def test_second_derivative_raises() -> None:
    scores, relevance, _ = random_lists()
    scores.requires_grad_()
    for value in (drm_loss(scores, relevance), relaxed_metric(scores, relevance, 2), soft_topk(scores, 2)[0, 0]):
        (gradient,) = torch.autograd.grad(value, scores, create_graph=True)
        with pytest.raises(NotImplementedError, match="first derivatives only"):
            gradient.square().sum().backward()


@pytest.mark.usefixtures("any_backend")
@pytest.mark.parametrize(
    "function", [drm_loss, relaxed_metric, lambda s, y, k, mask: soft_topk(s, k, mask=mask)[:, 0].sum()]
)
def test_func_grad_is_backward_and_forward_mode_raises(function: Callable[..., Tensor]) -> None:
    scores, relevance, mask = random_lists()
    expected = scores.clone().requires_grad_()
    function(expected, relevance, 3, mask=mask).backward()
    gradient = torch.func.grad(lambda s: function(s, relevance, 3, mask=mask))
    torch.testing.assert_close(gradient(scores), expected.grad, rtol=0, atol=0)
    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        torch.func.jvp(lambda s: function(s, relevance, 3, mask=mask), (scores,), (scores,))
    with pytest.raises((NotImplementedError, RuntimeError)):
        torch.func.hessian(lambda s: function(s, relevance, 3, mask=mask))(scores)


# ---------------------------------------------------------------------------------------------------------------
# Bad input

S, Y = torch.zeros(2, 3), torch.tensor([[1, 0, 0], [0, 1, 0]])
NAN = torch.tensor([[0, 0, 0], [0, math.nan, 0]])
BAD_LISTS = [
    ((torch.zeros(3), Y), {}, r"scores must be \[B, n\].*got shape \[3\]"),
    ((torch.zeros(0, 3), Y[:0]), {}, r"B and n at least 1, got shape \[0, 3\]"),
    ((torch.zeros(2, 0), Y[:, :0]), {}, r"B and n at least 1, got shape \[2, 0\]"),
    ((S.long(), Y), {}, "scores must be float16, .* got torch.int64"),
    ((S, Y[:, :2]), {}, r"scores and relevance must have the same shape, got \[2, 3\] and \[2, 2\]"),
    ((S, Y.to(torch.complex64)), {}, "relevance must be bool, integer or float, got torch.complex64"),
    ((S, Y.to("meta")), {}, "scores and relevance must be on the same device, got cpu and meta"),
    ((S, Y), {"mask": torch.ones(2, 4, dtype=torch.bool)}, "scores and mask must have the same shape"),
    ((S, Y), {"mask": torch.ones(2, 3)}, "mask must be bool, .* got torch.float32"),
    ((S, Y), {"k": 0}, "k must be an integer from 1 to the list length 3, got 0"),
    ((S, Y), {"k": 4}, "k must be .* got 4"),
    ((S, Y), {"k": 1.5}, "k must be .* got 1.5"),
    ((S, Y), {"tau": 0.0}, r"tau must be finite and at least 1e-32, at most 1e\+32, got 0.0"),
    ((S, Y), {"tau": -1}, "tau .* got -1"),
    ((S, Y), {"tau": math.nan}, "tau .* got nan"),
    ((S, Y), {"tau": math.inf}, "tau .* got inf"),
    ((S, Y), {"tau": torch.tensor(1.0)}, r"tau .* got tensor\(1.\)"),
    ((S, Y), {"tau": 1e-40}, "tau .* got 1e-40"),
    ((S, Y), {"tau": None}, "tau .* got None"),
    ((S.tolist(), Y), {}, "scores must be a torch tensor, got list"),
    ((S, Y.numpy()), {}, "relevance must be a torch tensor, got ndarray"),
    ((S, None), {}, "relevance must be a torch tensor, got NoneType"),
    ((S, Y), {"mask": [[True] * 3] * 2}, "mask must be a torch tensor, got list"),
    ((S.to_sparse(), Y), {}, "scores must be dense, got layout torch.sparse_coo"),
    ((S.to("meta"), Y.to("meta")), {}, "scores must hold values, got a tensor on the meta device"),
    (
        (S + 1e37, Y),
        {"tau": 1e-6},
        r"scores must be finite and at most 1e\+31 in magnitude, .* got .* at row 0, column 0",
    ),
    ((S, Y), {"reduction": "max"}, "reduction must be one of mean, sum, none, got 'max'"),
    ((NAN, Y), {}, "scores must be finite .* got nan at row 1, column 1"),
    ((torch.full((2, 3), -math.inf), Y), {}, "scores must be finite .* got -inf at row 0, column 0"),
    ((torch.full((2, 3), math.inf).half(), Y), {}, "scores must be finite .* got inf at row 0, column 0"),
    ((torch.full((2, 3), math.nan).bfloat16(), Y), {}, "scores must be finite .* got nan at row 0, column 0"),
    ((S, -Y), {}, "relevance must be finite and at least 0, got -1 at row 0, column 0"),
    ((S, NAN), {}, "relevance must be finite and at least 0, got nan at row 1, column 1"),
    ((S, Y), {"mask": torch.tensor([[True] * 3, [False] * 3])}, "mask must leave at least one entry .* row 1"),
]


@pytest.mark.parametrize("function", [drm_loss, relaxed_metric])
@pytest.mark.parametrize(("args", "options", "message"), BAD_LISTS)
def test_bad_input_is_rejected(
    function: Callable[..., Tensor], args: tuple[Any, ...], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=f"^{function.__name__}: .*{message}") as error:
        function(*args, **{"k": 1, **options})
    assert isinstance(error.value, ValueError)


def test_bad_choices_are_rejected() -> None:
    with pytest.raises(InputError, match=r"drm_loss: weight must be one of uniform, .* got 'dcg'"):
        drm_loss(S, Y, weight="dcg")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"relaxed_metric: metric must be one of precision, .* got 'uniform'"):
        relaxed_metric(S, Y, 1, metric="uniform")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="DRMLoss: weight"):
        DRMLoss(weight="mrr")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="soft_topk: k must be an integer from 1 to the list length 3, got None"):
        soft_topk(S, None)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"soft_topk: scores must be finite .* got nan at row 1, column 1"):
        soft_topk(NAN, 1)
    with pytest.raises(InputError, match="DRMLoss: tau must be finite and at least 1e-32"):
        DRMLoss(tau=0)
    with pytest.raises(InputError, match="DRMLoss: k must be an integer of at least 1, got 0"):
        DRMLoss(k=0)
    with pytest.raises(InputError, match=r"DRMLoss: k must be an integer of at least 1, got 2.5"):
        DRMLoss(k=2.5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"relevance": Y[:1]}, r"scores and relevance must have the same shape, got \[2, 3\] and \[1, 3\]"),
        ({"mask": torch.ones(2, 3)}, "mask must be bool"),
        ({"k": 4}, "k must be an integer from 1 to the list length 3, got 4"),
        ({"tau": 0.0}, "tau must be finite .* got 0.0"),
        ({"tau": -1.0}, "tau must be finite .* got -1.0"),
    ],
)
def test_shapes_k_and_tau_are_checked_under_compile_too(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"relevance": Y, "k": 2, **change}

    def run(s: Tensor) -> Tensor:
        return drm_loss(s, **arguments)

    torch._dynamo.reset()
    with pytest.raises(InputError, match=f"drm_loss: {message}"):
        torch.compile(run, backend="aot_eager")(S)
    torch._dynamo.reset()
    with pytest.raises(Exception, match=rf"InputError\('drm_loss: {message}"):  # dynamo wraps the error
        torch.compile(run, backend="aot_eager", fullgraph=True)(S)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_are_summed_in_float32(dtype: torch.dtype) -> None:
    """Each of the 1000 losses is slightly above 1/2. A sum in half precision would lose the difference."""
    scores = torch.tensor([[0.0, 0.05]], dtype=dtype).expand(1000, 2)
    relevance = torch.tensor([[1, 0]]).expand(1000, 2)
    total = drm_loss(scores, relevance, 1, reduction="sum")
    exact = drm_loss(scores.double(), relevance, 1, reduction="sum")
    assert total == exact.to(dtype)


@pytest.mark.usefixtures("any_backend")
def test_values_are_not_checked_without_validation() -> None:
    compiled = torch.compile(lambda s: drm_loss(s, Y, 1, reduction="none"), fullgraph=True, backend="aot_eager")
    assert compiled(NAN).isnan().tolist() == [False, True]
    assert drm_loss(NAN, Y, 1, reduction="none", validate=False).isnan().tolist() == [False, True]
    with pytest.raises(InputError, match="k must be"):
        drm_loss(S, Y, 4, validate=False)


def test_backend_is_chosen_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRM_BACKEND", "none-such")
    with pytest.raises(InputError, match=r"DRM_BACKEND must be auto, .* got 'none-such'"):
        drm_loss(S, Y)


def test_public_names() -> None:
    assert {"drm_loss", "soft_topk", "relaxed_metric", "DRMLoss"} <= set(drm_triton.__all__)
    assert drm_triton.drm_loss is functional.drm_loss
