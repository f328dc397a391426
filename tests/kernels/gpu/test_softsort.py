"""Triton soft top-K and DRM of given scores against the reference in float64."""

import math
from typing import get_args
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton", reason="Triton is available on Linux only")

from drm_triton.kernels import gpu, reference
from drm_triton.kernels.gpu import softsort, softsort_tiled
from drm_triton.kernels.weights import rank_weights
from drm_triton.names import TAU_RANGE, Weight
from tests.kernels.conftest import LARGEST, SCORES, SURE32, SURE64, adversarial, relaxed_rank
from tests.kernels.gpu.conftest import DEVICE, EPS, assert_close, generator, tolerance

# n, k, batch, tau, dtype: n below, at and above the tile sizes 16 .. 128; k = 1, n or between
F32, F64 = torch.float32, torch.float64
SHORT = [
    *[(2, 1, 1, 1.0, F32), (2, 2, 2, 0.1, F64), (3, 2, 2, 10.0, F32), (5, 5, 2, 0.1, F32), (9, 1, 1, 0.1, F32)],
    *[(15, 8, 2, 1.0, F32), (16, 16, 1, 0.1, F32), (17, 3, 2, 1.0, F64), (31, 31, 2, 10.0, F32), (32, 1, 1, 0.1, F32)],
    *[(33, 17, 2, 0.1, F32), (48, 24, 1, 1.0, F32), (48, 3, 2, 1.0, F32), (64, 64, 1, 1.0, F32), (65, 9, 2, 1.0, F32)],
    *[(70, 35, 1, 10.0, F32), (100, 1, 2, 0.3, F64), (127, 100, 1, 3.0, F32), (128, 5, 2, 1.0, F32)],
]
LONG = [
    *[(129, 4, 2, 1.0, F32), (200, 200, 1, 10.0, F32), (257, 1, 1, 0.5, F64), (600, 18, 1, 5.0, F32)],
]


def random_scores(n: int, batch: int, dtype: torch.dtype, *key: object) -> Tensor:
    """Return scores [batch, n] from a normal distribution."""
    return torch.randn(batch, n, generator=generator(n, batch, *key), dtype=torch.float64).to(dtype)


def check_operations(s: Tensor, k: int, tau: float, mask: Tensor, *key: object) -> None:
    """Compare the three operations with the reference, for random weights, relevance and upstream gradient."""
    batch, n = s.shape
    draw = generator("rest", *key)
    w = torch.rand(batch, k, generator=draw, dtype=torch.float64).to(s.dtype)
    y = torch.randint(0, 3, (batch, n), generator=draw).to(s.dtype)
    q = torch.randn(batch, n, generator=draw, dtype=torch.float64).to(s.dtype)
    padded = torch.where(mask, s, math.nan)  # masked scores must not matter
    inputs = [x.to(DEVICE) for x in (padded, w, y, q, mask)]
    before = [x.clone() for x in inputs]
    on_device, w_, y_, q_, mask_ = inputs
    Q = gpu.soft_topk_forward(on_device, w_, tau, mask_)
    ds = gpu.soft_topk_backward(on_device, w_, tau, mask_, q_)
    loss, gradient = gpu.drm_lists(on_device, y_, w_, tau, mask_)
    assert all(torch.equal(a, b) for a, b in zip(inputs[1:], before[1:], strict=True)), "an input changed"
    assert torch.equal(on_device.isnan(), before[0].isnan())

    s64, w64, y64, q64 = (x.double() for x in (torch.where(mask, s, 0), w, y, q))
    live = s[mask].double()
    allowed = tolerance(s.dtype, n, k, (live.max() - live.min()).item(), tau)
    expected_Q = reference.soft_topk_forward(s64, w64, tau, mask)
    expected_loss, expected_gradient = reference.drm_lists(s64, y64, w64, tau, mask)
    expected_ds = reference.soft_topk_backward(s64, w64, tau, mask, q64)
    assert_close(Q, expected_Q, allowed, "Q")
    assert_close(loss, expected_loss, allowed, "loss")
    # A gradient sums terms (1 - 2k) dz of either sign, which may cancel. The scale is that of the terms.
    terms = max(1, min(k, n / 4)) * w64.sum(1).max().item() / tau
    assert_close(ds, expected_ds, allowed, "soft top-k gradient", terms * q64.abs().max().item())
    assert_close(
        gradient, expected_gradient, allowed, "DRM gradient", 2 * terms * (y64 - expected_Q).abs().max().item()
    )
    assert all((x.cpu()[~mask] == 0).all() for x in (Q, ds, gradient))


@pytest.mark.parametrize(("n", "k", "batch", "tau", "dtype"), SHORT + LONG)
def test_soft_topk_and_drm(n: int, k: int, batch: int, tau: float, dtype: torch.dtype) -> None:
    s = random_scores(n, batch, dtype, k)
    mask = torch.ones(batch, n, dtype=torch.bool)
    if n % 2:
        mask = torch.rand(batch, n, generator=generator("mask", n)) < 0.7
        mask[:, 0] = True
    check_operations(s, k, tau, mask, n, k)


def test_a_list_of_1100() -> None:
    s, w = random_scores(1100, 1, torch.float32), torch.ones(1, 3)
    y, mask = (s > 2).float(), torch.ones(1, 1100, dtype=torch.bool)
    loss, gradient = gpu.drm_lists(s.to(DEVICE), y.to(DEVICE), w.to(DEVICE), 100.0, mask.to(DEVICE))
    expected_loss, expected = reference.drm_lists(s.double(), y.double(), w.double(), 100.0, mask)
    allowed = tolerance(torch.float32, 1100, 3, (s.max() - s.min()).item(), 100.0)
    assert_close(loss, expected_loss, allowed, "loss")
    assert_close(gradient, expected, allowed, "gradient")


@pytest.mark.parametrize("n", [40, 140])
@pytest.mark.parametrize("kind", ["equal", "ties", "huge", "tiny"])
def test_hard_scores(n: int, kind: str) -> None:
    s = random_scores(n, 1, torch.float32, kind)
    tau = 1.0
    if kind == "equal":
        s[:] = 0.25
    elif kind == "ties":
        s = s.round()
    elif kind == "huge":
        s, tau = s * 1e6, 1e6
    else:
        s = s * 1e-30
    check_operations(s, 5, tau, torch.ones(1, n, dtype=torch.bool), n, kind)


@pytest.mark.parametrize("n", [48, 140])
def test_scores_with_a_common_offset(n: int) -> None:
    """The relaxation is invariant to a constant. An offset of 1000 costs the rounding of (2k - 1) * 1000."""
    s = random_scores(n, 2, torch.float32, "offset") + 1000
    y, w, mask = (s > 1001).float(), torch.ones(2, 3), torch.ones(2, n, dtype=torch.bool)
    expected_loss, expected = reference.drm_lists(s.double(), y.double(), w.double(), 0.5, mask)
    loss, gradient = gpu.drm_lists(s.to(DEVICE), y.to(DEVICE), w.to(DEVICE), 0.5, mask.to(DEVICE))
    allowed = 5 * 1000 * EPS[torch.float32] / 0.5
    assert_close(loss, expected_loss, allowed, "loss")
    assert_close(gradient, expected, allowed, "gradient")


def test_scores_far_apart_are_ranked_as_by_sorting() -> None:
    s = torch.tensor([[3.0, -5.0, 100.0, 7.0]], device=DEVICE) * 1e4
    mask = torch.ones_like(s, dtype=torch.bool)
    assert gpu.soft_topk_forward(s, torch.ones(1, 2, device=DEVICE), 0.1, mask).tolist() == [[0.0, 0.0, 1.0, 1.0]]


def test_transposed_and_expanded_inputs() -> None:
    s = random_scores(6, 10, torch.float32, "t").to(DEVICE).T.contiguous().T
    w = torch.tensor([0.5, 2.0], device=DEVICE).expand(10, 2)
    mask = torch.ones(6, 10, dtype=torch.bool, device=DEVICE).T
    expected = reference.soft_topk_forward(s.double(), w.double(), 1.0, mask)
    assert_close(gpu.soft_topk_forward(s, w, 1.0, mask), expected, 1e-5, "Q")


@pytest.mark.parametrize("n", [5, 140])
def test_a_list_without_live_entries_is_zero(n: int) -> None:
    s, w = torch.full((2, n), math.nan, device=DEVICE), torch.ones(2, 3, device=DEVICE)
    mask = torch.zeros(2, n, dtype=torch.bool, device=DEVICE)
    mask[1], s[1] = True, 0.5
    loss, gradient = gpu.drm_lists(s, torch.ones_like(s), w, 1.0, mask)
    assert gpu.soft_topk_forward(s, w, 1.0, mask)[0].tolist() == [0.0] * n
    assert loss[0] == 0
    assert loss[1] > 0
    assert gradient[0].tolist() == [0.0] * n


def test_no_list() -> None:
    s, w = torch.zeros(0, 5, device=DEVICE), torch.zeros(0, 2, device=DEVICE)
    assert gpu.soft_topk_forward(s, w, 1.0, s > 0).shape == (0, 5)


def test_both_kernels_agree_around_the_longest_short_list(monkeypatch: pytest.MonkeyPatch) -> None:
    s, w = random_scores(100, 2, torch.float64, "both").to(DEVICE), torch.rand(2, 7, dtype=torch.float64, device=DEVICE)
    mask = torch.ones_like(s, dtype=torch.bool)
    short = gpu.drm_lists(s, (s > 0).double(), w, 2.0, mask)
    monkeypatch.setattr(softsort, "MAX_ITEMS", 50)
    tiled = gpu.drm_lists(s, (s > 0).double(), w, 2.0, mask)
    assert torch.allclose(short[0], tiled[0], rtol=1e-12)
    assert torch.allclose(short[1], tiled[1], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("k", [1, *(pytest.param(k, marks=pytest.mark.slow) for k in (17, 140))])
def test_adversarial_lists(k: int) -> None:
    """A threshold that is too high would drop items that take part."""
    for s in adversarial(140, torch.float32):
        check_operations(s[None], k, 1.0, torch.ones(1, 140, dtype=torch.bool), k)


@pytest.mark.parametrize("weight", get_args(Weight))
def test_adversarial_lists_for_every_weight(weight: Weight) -> None:
    """All ranks of lists that are just too long for the kernel of short lists."""
    s = adversarial(132, torch.float32)
    s = s[list(get_args(Weight)).index(weight) :: 5]  # two or three of the lists for each weight
    y, mask = (torch.arange(132) % 9 == 0).float().expand(s.shape), torch.ones_like(s, dtype=torch.bool)
    w = rank_weights(s.double(), y.double(), 132, weight, mask)
    on_device, y_, w_, mask_ = (x.to(DEVICE) for x in (s, y, w.float(), mask))
    loss, gradient = gpu.drm_lists(on_device, y_, w_, 1.0, mask_)
    expected_loss, expected = reference.drm_lists(s.double(), y.double(), w.float().double(), 1.0, mask)
    for b in range(len(s)):
        allowed = tolerance(torch.float32, 132, 132, (s[b].max() - s[b].min()).item(), 1.0)
        assert_close(loss[b], expected_loss[b], allowed, "loss", max(1, expected_loss[b].item()))
        terms = 2 * 132 / 4 * w[b].sum().item() * max(1, expected_loss[b].item() ** 0.5)
        assert_close(gradient[b], expected[b], allowed, "gradient", terms)


@given(
    seed=st.integers(0, 2**32),
    n=st.integers(130, 600),
    k=st.sampled_from([1, 1, 5, 40, -1, 0]),  # n + k, if it is not positive
    tau=st.sampled_from([1e-30, 1e-3, 0.5, 1.0, 10.0, 1e3, 1e30]),
    kinds=st.lists(st.sampled_from(list(SCORES)), min_size=1, max_size=3),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    relative=st.booleans(),
)
@settings(max_examples=20)
def test_no_item_that_takes_part_is_missed(
    seed: int, n: int, k: int, tau: float, kinds: list[str], dtype: torch.dtype, relative: bool
) -> None:
    """The bound itself. A relative tau is multiplied by the size of the scores."""
    g = np.random.default_rng(seed)
    with np.errstate(over="ignore"):
        lists = np.stack([np.clip(SCORES[kind](g, n), -LARGEST, LARGEST).astype(np.float32) for kind in kinds])
    s, mask = torch.from_numpy(lists).to(dtype), torch.from_numpy(g.random(lists.shape) < 0.9)
    if relative:
        tau = float(np.clip(tau * np.abs(lists).mean(dtype=np.float64), *TAU_RANGE))
    k = k if k > 0 else n + k
    with patch.object(softsort_tiled._ActiveLists, "_pairs"):
        found = softsort_tiled._ActiveLists(s.to(DEVICE), torch.ones(len(s), k, device=DEVICE), tau, mask.to(DEVICE))
    T = (SURE32 if dtype == torch.float32 else SURE64) + math.log(n)
    for b, size in enumerate(found.count.tolist()):
        live = mask[b].nonzero()[:, 0]
        if found.bad[b].any():  # the sum of the scores overflows
            assert size == 0
            continue
        kept, packed = found.position[b, :size].long().cpu(), found.s[b, :size].cpu()
        assert size >= min(k, len(live))
        assert torch.equal(packed, s[b, kept])
        assert torch.equal(kept, live[s[b, live] >= packed.min()])  # the top of the ranking, with its ties
        if size < len(live):
            ranking = np.sort(s[b, live].double().numpy())[::-1]
            for rank in {1, k // 2, k} - {0}:
                assert relaxed_rank(ranking, rank, tau)[size:].max() <= math.exp(-T) * (1 + 1e-9)


@pytest.mark.parametrize("k", [1, 20])
def test_few_items_of_a_long_list_are_active(k: int) -> None:
    s = random_scores(1001, 2, torch.float32, "active").to(DEVICE)
    lists = softsort_tiled._ActiveLists(s, torch.ones(2, k, device=DEVICE), 0.5, torch.ones_like(s, dtype=torch.bool))
    assert (lists.count < 150).all()
    for b in range(2):
        kept, packed = lists.position[b, : lists.count[b]].long(), lists.s[b, : lists.count[b]]
        assert torch.equal(packed, s[b, kept])
        assert torch.equal(kept, (s[b] >= packed.min()).nonzero()[:, 0])  # the top of the ranking


def test_every_item_may_be_active() -> None:
    s = torch.linspace(-1, 1, 140, device=DEVICE)[None]
    mask = torch.ones_like(s, dtype=torch.bool)
    for scores, k, tau in ((s, 140, 1.0), (s, 1, 1e6), (s, 1, 1e37), (torch.zeros_like(s), 1, 1e-6)):
        assert softsort_tiled._ActiveLists(scores, torch.ones(1, k, device=DEVICE), tau, mask).count.item() == 140


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_bad_score_makes_a_long_list_nan(bad: float) -> None:
    s, w = random_scores(140, 2, torch.float32, "bad").to(DEVICE), torch.ones(2, 3, device=DEVICE)
    mask = torch.rand(2, 140, generator=generator("bad")).to(DEVICE) < 0.8
    mask[:, 0], s[0, 0] = True, bad
    loss, ds = gpu.drm_lists(s, (s > 0).float(), w, 1.0, mask)
    assert loss.isnan().tolist() == [True, False]
    for x in (gpu.soft_topk_forward(s, w, 1.0, mask), gpu.soft_topk_backward(s, w, 1.0, mask, s.nan_to_num()), ds):
        assert x[0, mask[0]].isnan().all()
        assert x[1].isfinite().all()
        assert not x[~mask].any()
