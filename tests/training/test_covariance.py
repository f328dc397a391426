"""Covariance regularisation: its gradient, and the step that carries it."""

import pytest
import torch

from drm_triton.kernels import get_backend
from drm_triton.kernels.protocol import GradientTerms
from drm_triton.names import CovForm
from drm_triton.training.covariance import covariance, covariance_gradient, covariance_loss


@pytest.mark.parametrize("form", ["printed", "decorrelate"])
def test_gradient_is_autograds(form: CovForm) -> None:
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
def test_equal_factors_give_no_nan(form: CovForm) -> None:
    for gradient in covariance_gradient(torch.ones(3, 2), torch.ones(4, 2), form):
        assert torch.equal(gradient, torch.zeros_like(gradient))


@pytest.mark.parametrize("form", ["printed", "decorrelate"])
def test_the_gradient_of_many_rows_survives_the_step(form: CovForm) -> None:
    """It is of size 1/T beside rows of size 1: a step that mixed the two would lose it to rounding."""
    generator = torch.Generator().manual_seed(0)
    U, V = (torch.randn(n, 16, generator=generator) / 4 for n in (20_000, 30_000))
    nothing = GradientTerms.of_rows(torch.zeros(0, dtype=torch.int32), torch.zeros(0, 16))
    dense = covariance_gradient(U, V, form)[1]
    table = V.clone()
    get_backend("cpu").update_rows(table, torch.full_like(V, 1e6), nothing, 1e9, "l2", dense)
    expected = covariance_gradient(U.double(), V.double(), form)[1]
    inside = (V.norm(dim=1) < 0.9) & (table.norm(dim=1) < 0.99)  # not projected
    moved = (V - table)[inside].double() * 1e3 / 1e9
    assert inside.sum() > 1000
    torch.testing.assert_close(moved, expected[inside], rtol=1e-3, atol=1e-3 * expected.abs().max().item())
