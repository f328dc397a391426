"""Helpers of the tests of the Triton kernels, which run on a GPU or in Triton's interpreter.

Import them with ``from tests.kernels.gpu.conftest import DEVICE``.
"""

import math
import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from drm_triton.kernels.protocol import ListPlan
from drm_triton.names import UserSampling

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = {torch.float32: 2.0**-24, torch.float64: 2.0**-53}  # relative error of one rounding


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill new tensors with NaN, so that an entry that a kernel does not write is noticed."""

    def poisoned(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def wrapper(*args: Any, **options: Any) -> Tensor:
            x = make(*args, **options)
            return x.fill_(math.nan if x.is_floating_point() else -(2**31) + 1)

        return wrapper

    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))


def generator(*key: object) -> torch.Generator:
    """Return a random generator with a seed that depends on `key`."""
    return torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))


def factors(rows: int, d: int, *key: object) -> Tensor:
    """Return random rows in the unit ball."""
    x = torch.randn(rows, d, generator=generator(rows, d, *key))
    x /= x.norm(dim=1, keepdim=True).clamp(min=1)
    return x


def int32(*values: object) -> Tensor:
    """Return an int32 tensor on the device."""
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def random_plan(
    rho: int,
    eta: int,
    seed: int = 0,
    user_sampling: UserSampling = "proportional",
    share: int = 1,
    device: str = DEVICE,
) -> ListPlan:
    """Return a plan of 23 users and 50 items, with users that have no, one, all but one and all items."""
    draw = torch.Generator().manual_seed(1)
    dense = torch.rand(23, 50, generator=draw) < torch.rand(23, 1, generator=draw)
    dense[0], dense[1], dense[2], dense[2, 7] = False, True, True, False
    dense[3], dense[3, 11] = False, True
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), dense.sum(1).cumsum(0)])
    indices = dense.nonzero()[:, 1].to(torch.int32)
    return ListPlan(indptr.to(device), indices.to(device), 50, rho, eta, seed, user_sampling, share)


def tolerance(dtype: torch.dtype, n: int, k: int, spread: float, tau: float) -> float:
    """Return the relative error allowed for results of lists whose scores lie within `spread`.

    The logits (2 R + (2k - 1) s) / tau have terms of size up to 2 k * spread / tau where P_k is not 0. Rounding them
    moves P by that many eps. Sums of n terms and ten operations add the rest. The terms of the reference, in float64,
    have size n * spread / tau.
    """
    return EPS[dtype] * (10 + math.sqrt(n) + 2 * k * spread / tau) + EPS[torch.float64] * n * spread / tau


def assert_close(actual: Tensor, expected: Tensor, allowed: float, name: str, scale: float | None = None) -> None:
    """Compare the largest difference with `scale`, by default the largest entry: single entries may cancel."""
    assert torch.isfinite(actual).all(), f"{name}: not finite"
    error = (actual.double().cpu() - expected.cpu()).abs().max().item()
    scale = expected.abs().max().item() if scale is None else scale
    assert error <= allowed * scale, f"{name}: error {error:.2e} of {scale:.2e}, allowed {allowed:.1e}"
