import pytest
import torch

from drm_triton.covariance import covariance, covariance_gradient, covariance_loss


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
