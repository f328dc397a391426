"""Relaxed top-K on the CPU against the float64 reference: any length, masks, graded relevance, both float types."""

import math
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from drm_triton.kernels import cpu, reference
from drm_triton.kernels.cpu.active import ACTIVE_MIN, active_threshold
from drm_triton.kernels.cpu.runtime.bits import find_at_least
from drm_triton.kernels.cpu.runtime.jit import allocating
from drm_triton.kernels.cpu.runtime.threads import set_threads
from drm_triton.kernels.cpu.softsort import COUNTING_MAX, PAIRWISE_MAX, exp
from drm_triton.kernels.weights import rank_weights
from drm_triton.names import Weight
from tests.kernels.conftest import SURE32, SURE64, adversarial
from tests.kernels.cpu.conftest import THREAD_COUNTS

LONG = COUNTING_MAX + 60  # a list that is sorted by comparisons


def case(
    seed: int, B: int, n: int, k: int, dtype: torch.dtype, weight: Weight = "uniform", ragged: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return scores, graded relevance, rank weights, mask and an upstream gradient, with garbage where masked."""
    g = torch.Generator().manual_seed(seed)
    s, q = torch.randn(B, n, generator=g, dtype=dtype), torch.randn(B, n, generator=g, dtype=dtype)
    y = torch.randint(0, 4, (B, n), generator=g).to(dtype)
    mask = torch.rand(B, n, generator=g) < (0.7 if ragged else 1)
    mask[:, 0] = True  # at least one entry
    s[~mask], y[~mask], q[~mask] = float("nan"), float("inf"), float("nan")
    w = rank_weights(s.double(), y.double(), k, weight, mask).to(dtype)
    return s, y, w, mask, q


def assert_close(got: Tensor, want: Tensor, n: int, k: int, size: float, tau: float) -> None:
    """Sums of n terms are off by about eps sqrt(n); a score's rounding is multiplied by up to 4 K / tau.

    The reference's, in float64, is multiplied by up to 2 n / tau.
    """
    eps = torch.finfo(got.dtype).eps
    own, others = n**0.5 + 4 * k * size / tau, 2 * n * size / tau
    bound = 4 * (eps * own + torch.finfo(want.dtype).eps * others) * max(want.abs().max().item(), 1)
    torch.testing.assert_close(got.double(), want, rtol=0, atol=bound)


def assert_agrees(s: Tensor, y: Tensor, w: Tensor, mask: Tensor, q: Tensor, tau: float, flat: float = 0) -> None:
    """Compare with the reference. `flat` is for lists of equal scores, where terms of the gradient cancel as well."""
    before = [x.clone() for x in (s, y, w, mask, q)]
    got = [
        cpu.soft_topk_forward(s, w, tau, mask),
        cpu.soft_topk_backward(s, w, tau, mask, q),
        *cpu.drm_lists(s, y, w, tau, mask),
    ]
    for x, kept in zip((s, y, w, mask, q), before, strict=True):
        torch.testing.assert_close(x, kept, rtol=0, atol=0, equal_nan=True)
    s, y, w, q = (x.double() for x in (s, y, w, q))
    want = [
        reference.soft_topk_forward(s, w, tau, mask),
        reference.soft_topk_backward(s, w, tau, mask, q),
        *reference.drm_lists(s, y, w, tau, mask),
    ]
    size = max(flat, s[mask].abs().max().item())
    for x, reference_x in zip(got, want, strict=True):
        assert_close(x, reference_x, s.shape[1], w.shape[1], size, tau)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "n", [1, 2, 3, 7, 8, 15, 16, 17, 48, 63, 100, 256, PAIRWISE_MAX + 1, COUNTING_MAX, COUNTING_MAX + 1]
)
def test_every_length(n: int, dtype: torch.dtype) -> None:
    for k in sorted({1, min(3, n), n if n < 300 else 20}):
        assert_agrees(*case(n, 3, n, k, dtype), tau=0.7)


@pytest.mark.parametrize("weight", get_args(Weight))
@pytest.mark.parametrize("tau", [0.1, 1.0, 10.0])
def test_every_weight_and_temperature(weight: Weight, tau: float) -> None:
    for dtype in (torch.float32, torch.float64):
        assert_agrees(*case(1, 40, 24, 5, dtype, weight), tau=tau)


def test_thousands_of_entries() -> None:
    assert_agrees(*case(2, 2, 2048, 10, torch.float32), tau=1.0)


@pytest.mark.parametrize("n", [16, 48, 128, 256, LONG, 2048])
@pytest.mark.parametrize("tau", [0.3, 3.0])
def test_gradient_of_a_float32_list_is_as_exact_at_any_length(n: int, tau: float) -> None:
    """The largest error over the largest entry stays at a few roundings of a score over tau."""
    s, y, w, mask, _ = case(n, 10 if n < LONG else 3, n, 3, torch.float32, ragged=False)
    want = reference.drm_lists(s.double(), y.double(), w.double(), tau, mask)[1]
    error = (cpu.drm_lists(s, y, w, tau, mask)[1] - want).abs().amax(1) / want.abs().amax(1)
    assert error.max() < 30 * 2.0**-23 / min(tau, 1)


@pytest.mark.parametrize("n", [20, LONG])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ties(n: int, dtype: torch.dtype) -> None:
    s, y, w, mask, q = case(3, 4, n, 5, dtype)
    s = s.round().clamp(-2, 2)
    s[0] = 0.25
    assert_agrees(s, y, w, mask, q, tau=1.0)


def test_the_largest_numbers() -> None:
    s, one = torch.tensor([[-2e38]]), torch.ones(1, 1)
    assert cpu.soft_topk_forward(s, one, 1.0, one.bool()).item() == 1


@pytest.mark.parametrize("size", [1e-30, 1e-4, 1e4, 1e8])
@pytest.mark.parametrize("n", [30, LONG])
def test_huge_and_tiny_scores(size: float, n: int) -> None:
    # Against scores of 1 with the temperature divided likewise: the relaxation only sees s / tau.
    s, y, w, mask, _ = case(4, 5, n, 4, torch.float32)
    scaled = s * torch.tensor(2.0) ** round(torch.tensor(size).log2().item())
    tau = 2.0 ** round(torch.tensor(size).log2().item())
    for x, plain in zip(cpu.drm_lists(scaled, y, w, tau, mask), cpu.drm_lists(s, y, w, 1.0, mask), strict=True):
        # To the bit, but for what vanishes: of the n terms of a gradient, some are subnormal on one side only, where
        # numbers are 2^-149 apart.
        vanishing = n * 2.0**-149 * max(1, tau)
        torch.testing.assert_close(x * (1 if x.ndim == 1 else tau), plain, rtol=0, atol=vanishing)
    loss, ds = cpu.drm_lists(s * size, y, w, 1.0, mask)  # flat or hard: never NaN
    assert loss.isfinite().all()
    assert ds.isfinite().all()


def test_first_ranks_are_exact_in_long_float32_lists() -> None:
    """The top of a long list is as exact as that of a short one: nothing of size n |s| cancels."""
    s, _, w, mask, _ = case(5, 4, 2000, 3, torch.float32, ragged=False)
    want = reference.soft_topk_forward(s.double(), w.double(), 1.0, mask)
    assert (cpu.soft_topk_forward(s, w, 1.0, mask) - want).abs().max() < 2e-6
    assert (reference.soft_topk_forward(s, w, 1.0, mask) - want).abs().max() > 2e-5


def test_nothing_and_empty_lists() -> None:
    s, y, w, mask, _ = case(7, 3, 5, 2, torch.float32)
    assert cpu.drm_lists(s[:0], y[:0], w[:0], 1.0, mask[:0])[1].shape == (0, 5)
    loss, ds = cpu.drm_lists(s, y, 0 * w, 1.0, torch.zeros_like(mask))
    assert not loss.any()
    assert not ds.any()


def test_threads_give_the_same_bits() -> None:
    arguments = case(8, 500, 70, 4, torch.float32)
    results = []
    for count in THREAD_COUNTS:
        set_threads(count)
        results.append(cpu.drm_lists(*arguments[:3], 1.0, arguments[3]))
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


# ---------------------------------------------------------------------------------------------------------------
# Long lists, of which only the active items are processed


@allocating
def active(x: NDArray[Any], k: int, tau: float) -> NDArray[np.bool_]:
    """Return which entries of a list are active."""
    theta = active_threshold(x, len(x), k, tau, np.empty_like(x))
    positions = np.empty(len(x), np.int64)
    found = np.zeros(len(x), np.bool_)
    for j in positions[: find_at_least(x, theta, positions)]:
        found[j] = True
    return found


def assert_agrees_on(s: Tensor, k: int, weight: Weight, tau: float, ragged: bool = False) -> None:
    g = torch.Generator().manual_seed(k)
    y = (torch.rand(s.shape, generator=g) < 0.1) * torch.randint(1, 4, s.shape, generator=g)
    mask = torch.rand(s.shape, generator=g) < (0.9 if ragged else 1)
    y, q = y.to(s.dtype), torch.randn(s.shape, generator=g, dtype=s.dtype)
    w = rank_weights(s.double(), y.double(), k, weight, mask).to(s.dtype)
    for b in range(len(s)):  # one by one: the tolerance follows the scores of the list
        here = slice(b, b + 1)
        assert_agrees(s[here], y[here], w[here], mask[here], q[here], tau, flat=8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("tau", [0.01, 0.5, 10.0, 100.0])
def test_long_lists_agree_on_adversarial_scores(tau: float, dtype: torch.dtype) -> None:
    s = adversarial(150, dtype)
    for k in (1, 2, 20, 149, 150):
        assert_agrees_on(s, k, "uniform", tau, ragged=k == 2)


@pytest.mark.parametrize("weight", get_args(Weight))
@pytest.mark.parametrize("k", [1, 7, 149, 150])
def test_long_lists_agree_for_every_weight_and_cut_off(weight: Weight, k: int) -> None:
    for dtype in (torch.float32, torch.float64):
        for tau in (0.1, 1.0):
            assert_agrees_on(adversarial(150, dtype), k, weight, tau, ragged=k == 7)


@pytest.mark.parametrize("k", [1, 20, 500])
def test_very_long_lists_agree(k: int) -> None:
    for dtype in (torch.float32, torch.float64):
        assert_agrees_on(adversarial(1200, dtype)[[0, 2, 5, 6] if k < 100 else [0]], k, "uniform", 1.0)


def relaxed_ranks(s: NDArray[np.float64], k: int, tau: float) -> NDArray[np.float64]:
    """Return P_1 .. P_k [k, n] of a full list in float64."""
    R = np.maximum(0, s[None, :] - s[:, None]).sum(1)
    z = np.stack([-(2 * R + (2 * rank - 1) * s) / tau for rank in range(1, k + 1)])
    e = np.exp(z - z.max(1, keepdims=True))
    P: NDArray[np.float64] = e / e.sum(1, keepdims=True)
    return P


@pytest.mark.parametrize("k", [1, 3, 20])
def test_a_long_list_equals_its_active_items_alone(k: int) -> None:
    """Without the others the result is the same to rounding, in float64 too."""
    for s in adversarial(400, torch.float64).numpy():
        kept = active(s, k, 0.5)
        alone, full = relaxed_ranks(s[kept], k, 0.5), relaxed_ranks(s, k, 0.5)
        assert np.abs(full[:, kept] - alone).max() < 1e-14 * (1 + k * (s.max() - s[kept].min()))  # rounding of R
        assert (full[:, ~kept].sum(1) <= math.exp(-SURE64) * (1 + 1e-9)).all()


@given(
    st.lists(st.integers(-4000, 4000), min_size=2, max_size=120),
    st.integers(1, 120),
    st.sampled_from([1 / 64, 0.25, 1.0, 4.0, 64.0]),
    st.sampled_from([np.float32, np.float64]),
)
@settings(max_examples=300, deadline=None)
def test_items_that_are_not_active_have_a_negligible_probability(
    scores: list[int], k: int, tau: float, dtype: type
) -> None:
    """The bound itself. The scores are multiples of 1 / 64: the logits have no rounding errors."""
    s, k = np.array(scores, dtype) / dtype(64), min(k, len(scores))
    found = active(s, k, tau)
    T = (SURE32 if dtype == np.float32 else SURE64) + math.log(len(s))
    P = relaxed_ranks(s.astype(np.float64), k, tau)
    assert (P[:, ~found] <= math.exp(-T) * (1 + 1e-9)).all()
    ranking = np.sort(s)[::-1]
    assert found.sum() >= k
    assert found.sum() == (s >= ranking[found.sum() - 1]).sum()  # the top of the ranking, with its ties


@pytest.mark.parametrize(("k", "tau", "limit"), [(1, 0.5, 100), (1, 1.0, 100), (20, 1.0, 150)])
def test_few_items_of_a_long_list_are_active(k: int, tau: float, limit: int) -> None:
    rng = np.random.default_rng(0)
    for n in (1001, 16_384):
        counts = [active(rng.standard_normal(n).astype(np.float32), k, tau).sum() for _ in range(20)]
        assert max(counts) < limit


def test_every_item_may_be_active() -> None:
    x = np.linspace(-1, 1, 2 * ACTIVE_MIN, dtype=np.float32)
    assert active(x, len(x), 1.0).all()  # K = n
    assert active(x, 1, 1e6).all()
    assert active(x, 1, 1e38).all()
    assert active(np.zeros_like(x), 1, 1e-6).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_bad_score_makes_a_long_list_nan(bad: float) -> None:
    s, y, w, mask, q = case(9, 2, 2 * ACTIVE_MIN, 3, torch.float32)
    s[0, 0] = bad
    results = [cpu.soft_topk_forward(s, w, 1.0, mask), cpu.soft_topk_backward(s, w, 1.0, mask, q)]
    loss, ds = cpu.drm_lists(s, y, w, 1.0, mask)
    assert loss.isnan().tolist() == [True, False]
    for x in (*results, ds):
        assert x[0, mask[0]].isnan().all()
        assert x[1].isfinite().all()
        assert not x[~mask].any()


def test_exponential() -> None:
    @allocating
    def apply(x: Any) -> None:
        for j in range(x.size):
            x[j] = exp(x[j])

    x = -torch.logspace(-8, 1.93, 100_000)
    want = x.double().exp()
    apply(x.numpy())
    assert ((x - want).abs() / want).max() < 2 * 2.0**-23
    x = torch.tensor([0.0, -87.5, -1000.0, -float("inf")])
    apply(x.numpy())
    assert x.tolist() == [1.0, 0.0, 0.0, 0.0]
