"""Helpers of the tests of the CPU kernels.

Import them with ``from tests.kernels.cpu.conftest import EPS``.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from drm_triton.kernels.batches import ListBatch
from drm_triton.kernels.cpu.runtime import threads
from drm_triton.kernels.cpu.runtime.numba_private import max_threads
from drm_triton.kernels.protocol import GradientTerms
from tests.kernels.conftest import share_negatives

EPS = 2.0**-23
THREAD_COUNTS = (1, min(2, max_threads()))


@pytest.fixture(autouse=True)
def restore_threads() -> Iterator[None]:
    """Restore the number of threads after the test."""
    before = threads.n_threads()
    yield
    threads.set_threads(before)


@pytest.fixture(params=[1, 2], ids=["1-thread", "2-threads"])
def n_threads(request: pytest.FixtureRequest) -> None:
    """Run the test on one thread and on two."""
    if request.param > max_threads():
        pytest.skip("needs two cores")
    threads.set_threads(request.param)


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill the result of torch.empty with NaN or a huge integer, so that an output that is not written is noticed."""
    empty = torch.empty

    def poisoned(*args: Any, **options: Any) -> Tensor:
        x = empty(*args, **options)
        if x.dtype == torch.bool:
            return x.fill_(True)
        return x.fill_(float("nan") if x.is_floating_point() else torch.iinfo(x.dtype).max)

    monkeypatch.setattr(torch, "empty", poisoned)


def interactions(seed: int, n_users: int, n_items: int) -> tuple[Tensor, Tensor]:
    """Return a random CSR with users of 0, 1, all but one, and all items."""
    rng = np.random.default_rng(seed)
    degree = rng.integers(0, n_items // 2, n_users)
    degree[:4] = [0, 1, n_items - 1, n_items]
    rows = [np.sort(rng.choice(n_items, size, replace=False)) for size in degree]
    indptr = np.concatenate([[0], degree.cumsum()])
    return torch.from_numpy(indptr), torch.from_numpy(np.concatenate(rows).astype(np.int32))


def random_lists(seed: int, B: int, n: int, d: int, scale: float = 1.0) -> tuple[Tensor, Tensor, ListBatch]:
    """Return factors U and V with scores of about `scale`, and B lists with their own negatives."""
    g = torch.Generator().manual_seed(seed)
    U, V = torch.randn(7, d, generator=g), torch.randn(2 * n, d, generator=g) * (scale / d**0.5)
    users = torch.randint(0, 7, (B,), generator=g, dtype=torch.int32)
    items = torch.stack([torch.randperm(2 * n, generator=g)[:n] for _ in range(B)]).to(torch.int32)
    return U, V, ListBatch(users, items)


def random_shared_lists(
    seed: int, B: int, rho: int, eta: int, d: int, size: int, replaced_share: float
) -> tuple[Tensor, Tensor, ListBatch]:
    """Return factors U and V, and B lists in groups of `size` that replace a share of the shared negatives.

    No item occurs twice in a list: computed in two ways, its scores may differ in the last bit and break a tie.
    """
    g = torch.Generator().manual_seed(seed)
    N = 2 * (rho + 2 * eta)
    U, V = (torch.randn(rows, d, generator=g) * d**-0.5 for rows in (9, N))
    users = torch.randint(0, 9, (B,), generator=g, dtype=torch.int32)
    groups = -(-B // size)
    shuffled = torch.stack([torch.randperm(N // 2, generator=g) for _ in range(B + groups)]).to(torch.int32)
    own, shared_items = shuffled[:B, : rho + eta], N // 2 + shuffled[B:, :eta]
    return U, V, ListBatch(users, *share_negatives(own, shared_items, size, replaced_share, g))


def double(terms: GradientTerms) -> GradientTerms:
    """Return terms in float64, without shared negatives, for the reference."""
    return GradientTerms(terms.rows, terms.coefficients.double(), terms.vectors.double(), terms.sources)
