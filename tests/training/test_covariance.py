import pytest
import torch

from drm_triton.config import TrainConfig
from drm_triton.kernels import get_backend
from drm_triton.training.covariance import covariance, covariance_gradient, covariance_loss
from drm_triton.training.loop import with_covariance
from drm_triton.training.state import State


@pytest.mark.parametrize("form", ["printed", "decorrelate"])
def test_gradient_is_autograds(form: str) -> None:
    generator = torch.Generator().manual_seed(0)
    U, V = (torch.randn(n, 4, dtype=torch.float64, generator=generator, requires_grad=True) for n in (7, 5))
    covariance_loss(U, V, form).backward()
    for ours, theirs in zip(covariance_gradient(U.detach(), V.detach(), form), (U.grad, V.grad), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_covariance_is_numpys() -> None:
    X = torch.randn(12, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    _, C = covariance(X[:5], X[5:])
    torch.testing.assert_close(C, torch.cov(X.T, correction=0))


@pytest.mark.parametrize("form", ["printed", "decorrelate"])
def test_equal_factors_give_no_nan(form: str) -> None:
    for gradient in covariance_gradient(torch.ones(3, 2), torch.ones(4, 2), form):
        assert torch.equal(gradient, torch.zeros_like(gradient))


@pytest.mark.parametrize("form", ["printed", "decorrelate"])
def test_the_gradient_of_many_rows_survives_the_step(form: str) -> None:
    """It is of size 1/T beside rows of size 1, and under l2 it travels as a difference to the row."""
    generator = torch.Generator().manual_seed(0)
    U, V = (torch.randn(n, 16, generator=generator) / 4 for n in (20_000, 30_000))
    config = TrainConfig(score="l2", factors=16, cov=1.0, cov_form=form)
    state = State(U, V, torch.ones_like(U), torch.ones_like(V))
    row = torch.zeros(1, dtype=torch.int32)
    nothing = (row, torch.zeros(1), U, row)
    _, (rows, coef, X, source) = with_covariance(state, config, nothing, nothing)
    table = V.clone()
    get_backend("cpu").update_rows(table, torch.full_like(V, 1e6), rows, coef, X, source, 1e8, "l2")
    expected = 10 * covariance_gradient(U.double(), V.double(), form)[1]
    inside = (V.norm(dim=1) < 0.9) & (table.norm(dim=1) < 0.99)  # not projected
    moved = (V - table)[inside].double() * 1e3 / 1e8
    step = 1e8 / 1e3 * expected[inside].abs().max().item()
    assert inside.sum() > 1000, step
    torch.testing.assert_close(moved, expected[inside], rtol=1e-3, atol=1e-3 * expected.abs().max().item())
