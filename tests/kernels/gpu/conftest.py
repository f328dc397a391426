"""Helpers of the tests of the Triton kernels, which run on a GPU or in Triton's interpreter.

Import them with ``from tests.kernels.gpu.conftest import DEVICE``.
"""

import importlib
import math
import os
import pkgutil
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from drm_triton.kernels.protocol import GradientTerms, ListPlan
from drm_triton.names import UserSampling
from tests.kernels.gpu.recorder import poisoned, recorded

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
EPS = {torch.float32: 2.0**-24, torch.float64: 2.0**-53}  # relative error of one rounding


@pytest.fixture(autouse=True)
def launches() -> Iterator[Counter[str]]:
    """Let the test fail if a kernel in Triton's interpreter has a race, leaves its tensors or reads what nobody wrote.

    New tensors are filled with NaN or a huge integer, on a GPU too, so that an entry that no kernel writes is noticed.
    The value is how often each kernel was launched in the interpreter.
    """
    with poisoned(), recorded() if INTERPRETED else nullcontext(Counter[str]()) as counts:
        yield counts


def triton_kernels() -> set[str]:
    """Return the names of all Triton kernels."""
    from drm_triton.kernels import gpu

    modules = [
        importlib.import_module(f"{gpu.__name__}.{module.name}") for module in pkgutil.iter_modules(gpu.__path__)
    ]
    return {name for module in modules for name in vars(module) if re.fullmatch(r"_\w+_kernel", name)}


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


def with_gradient(terms: GradientTerms) -> GradientTerms:
    """Return the terms whose coefficients are not 0, in float64: the others leave their rows as they are."""
    b, j = (terms.coefficients != 0).nonzero(as_tuple=True)
    rows, coefficients = terms.rows[b, j][:, None], terms.coefficients[b, j][:, None].double()
    return GradientTerms(rows, coefficients, terms.vectors.double(), terms.sources[b])


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
