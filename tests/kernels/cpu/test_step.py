"""Whole training steps on the CPU: sampling, gradients and updates together."""

from typing import Any

import pytest
import torch

from drm_triton.kernels import cpu, reference
from drm_triton.kernels.protocol import GradientTerms, ListPlan, Objective
from drm_triton.names import Score
from tests.kernels.cpu.conftest import interactions


@pytest.mark.parametrize(
    ("score", "share"),
    [
        *[("dot", 1), ("l2", 4), ("cosine", 4)],
        *(pytest.param(*more, marks=pytest.mark.slow) for more in (("dot", 4), ("l2", 1), ("cosine", 1))),
    ],
)
def test_fifty_steps(score: Score, share: int) -> None:
    """Fifty steps are as near to a float64 run as the reference is in float32.

    The factors then differ by 2e-7 under dot and by 1e-5 under l2. Adagrad's state begins at 1: at 0 the first step
    is lr times the sign of the gradient, even where the gradient is rounding noise.
    """
    plan = ListPlan(*interactions(12, 40, 60), 60, 3, 12, seed=4, share=share)
    objective = Objective(3, score=score)
    g = torch.Generator().manual_seed(1)
    U0, V0 = torch.randn(40, 16, generator=g) / 4, torch.randn(60, 16, generator=g) / 4
    runs: list[tuple[torch.Tensor, ...]] = []
    backends: list[tuple[Any, torch.dtype]] = [
        (cpu, torch.float32),
        (reference, torch.float32),
        (reference, torch.float64),
    ]
    for backend, dtype in backends:
        U, V = U0.to(dtype, copy=True), V0.to(dtype, copy=True)
        U_state, V_state = torch.ones_like(U), torch.ones_like(V)
        B, losses = 8, []
        for step in range(50):
            start = step * B % (plan.n_lists // B * B - B)
            batch = backend.sample_lists(plan, step // 10, start, start + B)
            x = backend.list_gradients(U, V, batch, objective)
            backend.update_rows(V, V_state, GradientTerms.of_items(batch, x.g, U), 0.1, score)
            backend.update_rows(U, U_state, GradientTerms.of_rows(batch.users, x.user_grad), 0.1, "dot")
            losses.append(x.loss.sum())
        runs.append((U.double(), V.double(), torch.stack(losses).double()))
    for got, rounded, want in zip(*runs, strict=True):
        assert (got - want).abs().max() <= 4 * (rounded - want).abs().max()
    assert max((x - y).abs().max().item() for x, y in zip(runs[0][:2], runs[2][:2], strict=True)) < 5e-5
    assert runs[0][2][-10:].mean() < runs[0][2][:10].mean()
