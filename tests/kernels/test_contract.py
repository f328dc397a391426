"""What every backend promises about bad values and bad arguments: the same on the reference, the CPU and Triton."""

import math

import pytest
import torch

from drm_triton.kernels import cpu, reference
from drm_triton.kernels.interface import Objective

BACKENDS = {"reference": (reference, "cpu"), "cpu": (cpu, "cpu")}
try:
    from drm_triton.kernels import gpu

    BACKENDS["triton"] = (gpu, "cuda" if torch.cuda.is_available() else "cpu")
except ImportError:  # Triton is available on Linux only
    pass

LENGTHS = [9, 150]  # one program a list, and tiles, on Triton


@pytest.fixture(params=BACKENDS)
def backend(request):
    """A backend whose operations are called with tensors of the CPU, moved to its device and back."""
    return OnDevice(*BACKENDS[request.param])


class OnDevice:
    def __init__(self, module, device):
        self.module, self.device = module, device

    def __getattr__(self, operation):
        def call(*args, **options):
            result = getattr(self.module, operation)(*move(args, self.device), **move(options, self.device))
            return move(result, "cpu")

        return call


def move(x, device):
    if isinstance(x, torch.Tensor):
        return x.to(device)
    if isinstance(x, dict):
        return {key: move(value, device) for key, value in x.items()}
    if isinstance(x, tuple):
        moved = (move(value, device) for value in x)
        return type(x)(*moved) if hasattr(x, "_fields") else tuple(moved)
    return x


def factors(rows, d, seed):
    return torch.randn(rows, d, generator=torch.Generator().manual_seed(seed)) / d**0.5


def lists(n, B=3):
    """Factors, users and items of B lists that share no item."""
    U, V = factors(5, 4, 1), factors(B * n, 4, 2)
    users = torch.arange(B, dtype=torch.int32)
    return U, V, users, torch.arange(B * n, dtype=torch.int32).view(B, n)


def scores(n, B=3):
    """Scores, relevance, rank weights, mask and an upstream gradient of B lists, some entries masked."""
    draw = torch.Generator().manual_seed(n)
    s, q = torch.randn(B, n, generator=draw), torch.randn(B, n, generator=draw)
    y, mask = torch.randint(0, 2, (B, n), generator=draw).float(), torch.rand(B, n, generator=draw) < 0.8
    mask[:, 0] = True
    return s, y, torch.ones(B, 2), mask, q


# ---------------------------------------------------------------------------------------------------------------
# Scores that are not finite


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("n", LENGTHS)
def test_a_bad_score_shows(backend, bad, n):
    """It spoils its whole list, and no other."""
    s, y, w, mask, q = scores(n)
    s[1, 0] = bad
    loss, ds = backend.drm_lists(s, y, w, 1.0, mask)
    assert loss.isnan().tolist() == [False, True, False]
    for x in (
        ds,
        backend.soft_topk_forward(s, w, 1.0, mask),
        backend.soft_topk_backward(s, w, 1.0, mask, q),
    ):
        assert x[1][mask[1]].isnan().all()
        assert (x[1][~mask[1]] == 0).all()
        assert x[[0, 2]].isfinite().all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("position", [0, -1], ids=["positive", "negative"])
@pytest.mark.parametrize("parts", [(1, 1, 1), (1, 0, 0), (0, 1, 0), (0, 0, 1)])
def test_a_bad_factor_shows_in_losses_and_gradients(backend, bad, n, position, parts):
    U, V, users, items = lists(n)
    V[items[1, position].long(), 2] = bad
    on = dict(zip(("hinge", "drm", "mse"), map(bool, parts), strict=True))
    got = backend.list_gradients(U, V, users, items, Objective(2, **on))
    for name in ("loss", "g", "user_grad", *(part for part in on if on[part])):
        x = getattr(got, name)
        assert x[1].isnan().all(), name
        assert x[[0, 2]].isfinite().all(), name
    assert all((getattr(got, part) == 0).all() for part in on if not on[part])
