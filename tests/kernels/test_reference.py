"""The reference against the printed formulas, written here a second time: full matrices, single lists, plain loops."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.special import softmax
from torch import Tensor

from drm_triton.kernels import reference
from drm_triton.kernels.weights import rank_weights
from drm_triton.names import Score, Weight

WEIGHTS = ("uniform", "precision", "recall", "ndcg", "ap")
EXACT = {"rtol": 1e-10, "atol": 1e-12}  # float64, sums of at most a few hundred terms


def random_lists(B: int, n: int, seed: int = 0, ragged: bool = True) -> Any:
    """Scores, binary relevance with a positive in each list, mask (first entry kept); float64."""
    random = torch.Generator().manual_seed(seed)
    s = torch.randn(B, n, generator=random, dtype=torch.float64)
    mask = torch.rand(B, n, generator=random) < (0.7 if ragged else 2)
    mask[:, 0] = True
    y = (torch.rand(B, n, generator=random) < 0.4).double() * mask
    y[:, 0] = 1
    return s, y, mask


def relaxed_permutation(s: Tensor, tau: float) -> Tensor:
    """NeuralSort as published, for one list: the n x n matrix softmax(((n + 1 - 2i) s - A_s 1) / tau)."""
    n = len(s)
    A = (s[:, None] - s[None, :]).abs()
    c = n + 1 - 2 * torch.arange(1, n + 1)
    return torch.softmax((c[:, None] * s[None, :] - A @ torch.ones(n, dtype=s.dtype)) / tau, dim=1)


def soft_topk_by_matrix(s: Tensor, w: Tensor, tau: float, mask: Tensor) -> Tensor:
    """Q by the full matrix of each list without its padding; differentiable by autograd."""
    Q = torch.zeros_like(s)
    for b in range(len(s)):
        P = relaxed_permutation(s[b][mask[b]], tau)
        K = min(w.shape[1], len(P))
        Q[b, mask[b]] = w[b, :K] @ P[:K]
    return Q


# ---------------------------------------------------------------------------------------------------------------
# The relaxed top-K


@pytest.mark.parametrize("n", [1, 2, 3, 8, 33])
@pytest.mark.parametrize("tau", [0.1, 1.0, 10.0])
def test_rows_are_those_of_the_published_matrix_and_sum_to_one(n: int, tau: float) -> None:
    s = np.random.default_rng(n).normal(size=n)
    A = np.abs(s[:, None] - s[None, :])
    matrix = softmax(((n + 1 - 2 * np.arange(1, n + 1))[:, None] * s[None, :] - A.sum(1)) / tau, axis=1)
    mask = torch.ones(1, n, dtype=torch.bool)
    rows = torch.cat([P for _, P in reference.neural_sort(torch.tensor(s)[None], n, tau, mask)])
    np.testing.assert_allclose(rows, matrix, **EXACT)
    np.testing.assert_allclose(rows.sum(1), 1, **EXACT)


@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize(("k", "tau"), [(1, 1.0), (3, 0.3), (9, 3.0), (None, 1.0)])
@pytest.mark.parametrize("ragged", [False, True])
def test_closed_form_gradients_equal_autograd_of_the_matrix_formula(
    weight: Weight, k: int | None, tau: float, ragged: bool
) -> None:
    s, y, mask = random_lists(6, 9, ragged=ragged)
    w = rank_weights(s, y, k, weight, mask)
    q = torch.randn(s.shape, dtype=s.dtype, generator=torch.Generator().manual_seed(1))

    leaf = s.clone().requires_grad_()
    Q = soft_topk_by_matrix(leaf, w, tau, mask)
    (ds,) = torch.autograd.grad(Q, leaf, q, retain_graph=True)
    torch.testing.assert_close(reference.soft_topk_forward(s, w, tau, mask), Q.detach(), **EXACT)
    torch.testing.assert_close(reference.soft_topk_backward(s, w, tau, mask, q), ds, **EXACT)

    losses = (y - Q).square().sum(1)
    (ds,) = torch.autograd.grad(losses.sum(), leaf)
    loss, gradient = reference.drm_lists(s, y, w, tau, mask)
    torch.testing.assert_close(loss, losses.detach(), **EXACT)
    torch.testing.assert_close(gradient, ds, **EXACT)


def test_soft_topk_passes_gradcheck() -> None:
    class SoftTopK(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, s: Tensor, w: Tensor, tau: float, mask: Tensor) -> Tensor:
            ctx.save_for_backward(s, w, mask)
            ctx.tau = tau
            return reference.soft_topk_forward(s, w, tau, mask)

        @staticmethod
        def backward(ctx: Any, q: Tensor) -> Any:
            s, w, mask = ctx.saved_tensors
            return reference.soft_topk_backward(s, w, ctx.tau, mask, q), None, None, None

    s, y, mask = random_lists(3, 7)
    for weight in WEIGHTS:
        w = rank_weights(s, y, 4, weight, mask)
        assert torch.autograd.gradcheck(SoftTopK.apply, (s.clone().requires_grad_(), w, 0.7, mask))


def test_gradient_agrees_with_finite_differences() -> None:
    s, y, mask = random_lists(4, 8)
    w = rank_weights(s, y, 3, "ndcg", mask)
    gradient = reference.drm_lists(s, y, w, 0.5, mask)[1]
    step = 1e-6
    for j in range(8):
        shift = torch.zeros(8, dtype=s.dtype)
        shift[j] = step
        up, down = (reference.drm_lists(s + sign * shift, y, w, 0.5, mask)[0] for sign in (1, -1))
        torch.testing.assert_close((up - down) / (2 * step), gradient[:, j], rtol=1e-6, atol=1e-8)


def test_ties_have_the_subgradient_of_autograd() -> None:
    s = torch.tensor([[1.0, 1.0, 0.0, 0.0, -1.0], [2.0, 2.0, 2.0, 2.0, 2.0]], dtype=torch.float64, requires_grad=True)
    y = torch.tensor([[0.0, 1, 0, 1, 0], [1, 1, 0, 0, 0]], dtype=torch.float64)
    mask, w = torch.ones_like(y, dtype=torch.bool), torch.ones(2, 2, dtype=torch.float64)
    (expected,) = torch.autograd.grad((y - soft_topk_by_matrix(s, w, 1.0, mask)).square().sum(), s)
    torch.testing.assert_close(reference.drm_lists(s.detach(), y, w, 1.0, mask)[1], expected, **EXACT)


@pytest.mark.parametrize("padding", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("weight", WEIGHTS)
def test_padding_may_hold_anything_and_has_no_gradient(padding: float, weight: Weight) -> None:
    s, y, mask = random_lists(5, 9)
    assert not mask.all()
    padded_s, padded_y = torch.where(mask, s, padding), torch.where(mask, y, padding)
    w = rank_weights(padded_s, padded_y, 3, weight, mask)
    torch.testing.assert_close(w, rank_weights(s, y, 3, weight, mask), **EXACT)
    loss, gradient = reference.drm_lists(padded_s, padded_y, w, 1.0, mask)
    expected_loss, expected_gradient = reference.drm_lists(s, y, w, 1.0, mask)
    torch.testing.assert_close(loss, expected_loss, **EXACT)
    torch.testing.assert_close(gradient, expected_gradient, **EXACT)
    assert (gradient[~mask] == 0).all()
    assert (reference.soft_topk_forward(padded_s, w, 1.0, mask)[~mask] == 0).all()


# ---------------------------------------------------------------------------------------------------------------
# Rank weights and metrics

HAND_S = torch.tensor([[9.0, 7.0, 5.0, 3.0, 1.0]], dtype=torch.float64)  # ranked as listed
HAND_Y = torch.tensor([[1.0, 0.0, 1.0, 0.0, 1.0]], dtype=torch.float64)  # hits at ranks 1, 3 and 5
LOG3 = 1 / math.log2(3)
HAND = {  # K = 2 and K = 4
    "precision": (1 / 2, 2 / 4),
    "recall": (1 / 3, 2 / 3),
    "ndcg": (1 / (1 + LOG3), (1 + 1 / 2) / (1 + LOG3 + 1 / 2)),
    "ap": ((1 / 1) / 2, (1 / 1 + 2 / 3) / 3),
}


@pytest.mark.parametrize("metric", HAND)
def test_relaxed_metrics_become_the_metrics_worked_by_hand(metric: str) -> None:
    mask = torch.ones_like(HAND_Y, dtype=torch.bool)
    for k, expected in zip((2, 4), HAND[metric], strict=True):
        w = rank_weights(HAND_S, HAND_Y, k, metric, mask)
        value = (reference.soft_topk_forward(HAND_S, w, 1e-3, mask) * HAND_Y).sum().item()
        assert value == pytest.approx(expected, abs=1e-12)


def hard_metric(s: Tensor, y: Tensor, k: int, metric: str) -> Any:
    """A metric of one list by its definition, counting down the hard ranking."""
    hits = [y[j] > 0 for j in sorted(range(len(s)), key=lambda j: -s[j])][:k]
    relevant = sum(value > 0 for value in y)
    if metric == "precision":
        return sum(hits) / k
    if metric == "recall":
        return sum(hits) / relevant
    if metric == "ndcg":
        ideal = sum(1 / math.log2(rank + 2) for rank in range(min(k, relevant)))
        return sum(1 / math.log2(rank + 2) for rank, hit in enumerate(hits) if hit) / ideal
    return sum(sum(hits[: rank + 1]) / (rank + 1) for rank, hit in enumerate(hits) if hit) / min(k, relevant)


@pytest.mark.parametrize("metric", HAND)
@pytest.mark.parametrize("k", [1, 4, 12])
def test_relaxed_metrics_become_the_metrics_on_random_ragged_lists(metric: str, k: int) -> None:
    s, y, mask = random_lists(20, 12)
    s = s.argsort().argsort().double()  # gaps of at least 1, so that tau = 1e-3 leaves less than e^-1000 elsewhere
    w = rank_weights(s, y, k, metric, mask)
    values = (reference.soft_topk_forward(s, w, 1e-3, mask) * y).sum(1)
    expected = [hard_metric(s[b][mask[b]].tolist(), y[b][mask[b]].tolist(), k, metric) for b in range(20)]
    np.testing.assert_allclose(values, expected, **EXACT)


def test_soft_topk_becomes_the_hard_top_k() -> None:
    s, y, mask = random_lists(20, 12, ragged=False)
    s = s.argsort().argsort().double()
    for k in range(1, 13):
        w = rank_weights(s, y, k, "uniform", mask)
        hard = torch.zeros_like(s).scatter(1, s.topk(k).indices, 1.0)
        torch.testing.assert_close(reference.soft_topk_forward(s, w, 1e-3, mask), hard, **EXACT)


def test_ndcg_weights_take_graded_relevance_as_gains() -> None:
    s = torch.tensor([[3.0, 2.0, 1.0]], dtype=torch.float64)
    y = torch.tensor([[1.0, 3.0, 2.0]], dtype=torch.float64)
    mask = torch.ones_like(y, dtype=torch.bool)
    w = rank_weights(s, y, 2, "ndcg", mask)
    value = (reference.soft_topk_forward(s, w, 1e-3, mask) * y).sum().item()
    assert value == pytest.approx((1 + 3 * LOG3) / (3 + 2 * LOG3), abs=1e-12)


def test_without_k_each_list_is_cut_at_its_own_number_of_positives() -> None:
    s, y, mask = random_lists(8, 6)
    y[3] = 0  # no positives: no ranks
    for weight in WEIGHTS:
        w = rank_weights(s, y, None, weight, mask)
        assert w.shape == (8, 6)
        for b, positives in enumerate(y.sum(1).int().tolist()):
            alone = rank_weights(s[b : b + 1], y[b : b + 1], max(positives, 1), weight, mask[b : b + 1])
            torch.testing.assert_close(w[b, :positives], alone[0, :positives], **EXACT)
            assert (w[b, positives:] == 0).all()


def test_lists_without_positives_or_shorter_than_k_have_zero_weights_there() -> None:
    s, y = torch.zeros(1, 4, dtype=torch.float64), torch.zeros(1, 4, dtype=torch.float64)
    mask = torch.tensor([[True, True, False, False]])
    for weight in ("recall", "ndcg", "ap"):
        assert (rank_weights(s, y, 3, weight, mask) == 0).all()
    assert rank_weights(s, y, 3, "uniform", mask).tolist() == [[1, 1, 0]]
    assert rank_weights(s, y, 3, "precision", mask).tolist() == [[1 / 3, 1 / 3, 0]]


# ---------------------------------------------------------------------------------------------------------------
# Symmetries

scores_of_a_list = st.lists(st.floats(-5, 5, width=32), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(scores_of_a_list, st.randoms(use_true_random=False), st.sampled_from(WEIGHTS), st.sampled_from([0.3, 1.0, 3.0]))
def test_permuting_a_list_permutes_its_gradient(scores: list[float], random: Any, weight: Weight, tau: float) -> None:
    order = list(range(len(scores)))
    random.shuffle(order)
    assume(weight != "ap" or len(set(scores)) == len(scores))  # its weights break ties by position
    s = torch.tensor([scores], dtype=torch.float64)
    y = torch.tensor([[float(random.random() < 0.5) for _ in scores]], dtype=torch.float64)
    mask = torch.ones_like(y, dtype=torch.bool)
    results = []
    for s_, y_ in ((s, y), (s[:, order], y[:, order])):
        w = rank_weights(s_, y_, max(1, len(scores) // 2), weight, mask)
        results.append(reference.drm_lists(s_, y_, w, tau, mask))
    (loss, gradient), (loss_permuted, gradient_permuted) = results
    torch.testing.assert_close(loss_permuted, loss, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(gradient_permuted, gradient[:, order], rtol=1e-9, atol=1e-9)


@settings(max_examples=60, deadline=None)
@given(scores_of_a_list, st.floats(-100, 100))
def test_adding_a_constant_to_a_list_changes_nothing(scores: list[float], constant: float) -> None:
    s = torch.tensor([scores], dtype=torch.float64)
    y, mask = (s > 0).double(), torch.ones_like(s, dtype=torch.bool)
    w = torch.ones(1, max(1, len(scores) // 2), dtype=s.dtype)
    loss, gradient = reference.drm_lists(s, y, w, 1.0, mask)
    shifted_loss, shifted_gradient = reference.drm_lists(s + constant, y, w, 1.0, mask)
    torch.testing.assert_close(shifted_loss, loss, rtol=1e-8, atol=1e-8)
    # A gap smaller than the rounding of s + constant may close, and sign() with it; the gradient sums to 0 either way.
    gaps = (s[0, :, None] - s[0, None, :]).abs()
    if gaps[gaps > 0].numel() == 0 or gaps[gaps > 0].min() > 1e-9:
        torch.testing.assert_close(shifted_gradient, gradient, rtol=1e-8, atol=1e-8)
    assert gradient.sum().item() == pytest.approx(0, abs=1e-9)


# ---------------------------------------------------------------------------------------------------------------
# Ranking all items


@pytest.mark.parametrize("score", ["dot", "l2"])
@pytest.mark.parametrize("k", [1, 5, 20, 30])
def test_top_k_equals_sorting_every_item(score: Score, k: int) -> None:
    rng = np.random.default_rng(k)
    queries, V = rng.integers(-2, 3, size=(7, 3)), rng.integers(-2, 3, size=(20, 3))  # small integers: many ties
    seen = [set(), {0}, set(range(19)), set(range(20)), {3, 4, 5}, {19}, set(range(0, 20, 2))]
    indptr = torch.tensor([0, *itertools.accumulate(len(items) for items in seen)])
    indices = torch.tensor([item for items in seen for item in sorted(items)], dtype=torch.int32)
    tables = torch.tensor(queries, dtype=torch.float64), torch.tensor(V, dtype=torch.float64)
    for mask, left_out in (((indptr, indices), seen), (None, [set()] * 7)):
        items, scores = reference.top_k(tables[0], reference.pack_items(tables[1], score), k, mask)
        assert items.dtype == torch.int32
        for row, query in enumerate(queries):
            values = V @ query if score == "dot" else -((V - query) ** 2).sum(1)
            best = sorted(set(range(20)) - left_out[row], key=lambda j: (-values[j], j))[:k]
            short = k - len(best)
            assert items[row].tolist() == best + [-1] * short
            assert scores[row].tolist() == [values[j] for j in best] + [-math.inf] * short


def test_top_k_of_a_block_of_rows_takes_a_slice_of_the_mask() -> None:
    queries, V = torch.ones(3, 1), torch.arange(4.0)[:, None]
    indptr, indices = torch.tensor([0, 1, 3, 4]), torch.tensor([0, 2, 3, 3], dtype=torch.int32)
    items, _ = reference.top_k(queries[1:], reference.pack_items(V, "dot"), 2, (indptr[1:], indices))
    assert items.tolist() == [[1, 0], [2, 1]]
