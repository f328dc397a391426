"""Helpers of the tests of the CPU kernels and of the Triton kernels.

Import them with ``from tests.kernels.conftest import share_negatives``.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from drm_triton.exercises import before_rounding
from drm_triton.kernels import reference
from drm_triton.kernels.batches import SharedNegatives
from drm_triton.kernels.protocol import Backend, GradientTerms, Rounding
from drm_triton.names import Score


def share_negatives(
    own: Tensor, shared_items: Tensor, size: int, replaced: float, draw: torch.Generator
) -> tuple[Tensor, SharedNegatives]:
    """Put the shared items [groups, eta] into the last columns of lists in groups of `size`.

    A fraction `replaced` of these entries stays as it is in `own` [B, at least eta].
    """
    B, eta = len(own), shared_items.shape[1]
    kept = torch.rand(B, eta, generator=draw) < replaced
    items = own.clone()
    items[:, -eta:] = torch.where(kept, own[:, -eta:], shared_items[torch.arange(B) // size])
    return items, SharedNegatives(size, shared_items.contiguous(), kept)


def adversarial(n: int, dtype: torch.dtype) -> Tensor:
    """Return lists on which a wrong threshold would show."""
    g = torch.Generator().manual_seed(n)
    normal = torch.randn(n, generator=g, dtype=torch.float64)
    position = torch.arange(n, dtype=torch.float64)
    lists = {
        "normal": normal,
        "a narrow range": normal / 100,
        "ties": normal.round().clamp(-2, 2),
        "all equal": torch.full_like(normal, 0.25),
        "two values": (normal > 1).double(),
        "huge gaps": torch.where(position % 97 == 0, 4096 * normal.round(), normal),
        "two clusters": normal / 64 + torch.where(position % 3 == 0, 8, -8),
        "two close clusters": normal / 1024 + torch.where(position % 3 == 0, 0.5, 0.0),
        "one high outlier": torch.where(position == n // 2, 1024, normal),
        "one low outlier": torch.where(position == n // 2, -1024, normal),
        "ascending": position / n,
        "descending, wider and wider": -((position / 16) ** 2),
    }
    return torch.stack(list(lists.values())).to(dtype)


# T - log n of docs/objective.md. Not those of the kernels: a test fails if they change.
SURE32, SURE64 = 20.0, 40.0
LARGEST = float(np.finfo(np.float32).max)
# Scores of n items in the order of the catalogue. The sample of a long list is its first eighth.
SCORES: dict[str, Callable[[np.random.Generator, int], NDArray[Any]]] = {
    "normal": lambda g, n: g.standard_normal(n),
    "heavy tails": lambda g, n: g.standard_cauchy(n),
    "heavier tails": lambda g, n: np.clip(g.standard_cauchy(n) ** 5, -1e30, 1e30),
    "ties": lambda g, n: g.integers(-2, 3, n),
    "all equal": lambda g, n: np.full(n, g.choice([0, 0.1, -3, 1e30])),
    "all equal but one": lambda g, n: np.where(np.arange(n) == g.integers(n), g.choice([-5, 5]), 0),
    "tiny gaps": lambda g, n: np.float32(1) + g.integers(0, 9, n) * np.float32(2**-23),
    "tiny gaps of large scores": lambda g, n: np.float32(1e30) * (1 + g.integers(0, 9, n) * np.float32(2**-23)),
    "huge gaps": lambda g, n: np.where(g.random(n) < 0.05, 1e6 * g.standard_normal(n).round(), g.standard_normal(n)),
    "one huge gap": lambda g, n: g.standard_normal(n) + np.where(g.random(n) < 0.1, 1e4, 0),
    "subnormal": lambda g, n: g.standard_normal(n) * 1e-40,
    "subnormal ties": lambda g, n: g.integers(-3, 4, n) * 2.0**-149,
    "every size": lambda g, n: g.choice([-1, 1], n) * 10.0 ** g.uniform(-44, 38, n),
    "large": lambda g, n: g.uniform(-LARGEST, LARGEST, n),
    "large positive": lambda g, n: LARGEST * (1 - g.random(n) * g.choice([1e-6, 1e-2, 1])),
    "largest and smallest": lambda g, n: g.choice([-LARGEST, LARGEST], n),
    "descending": lambda g, n: -np.sort(g.standard_normal(n)),
    "descending, wider and wider": lambda g, n: -((np.arange(n) / g.uniform(4, 64)) ** 2),
    "ascending": lambda g, n: np.sort(g.standard_normal(n)),
    "a high sample": lambda g, n: g.standard_normal(n) + np.where(np.arange(n) < n // 8, g.choice([1, 30]), 0),
    "a low sample": lambda g, n: g.standard_normal(n) - np.where(np.arange(n) < n // 8, g.choice([1, 30]), 0),
    "a high sample of large scores": lambda g, n: np.where(np.arange(n) < n // 8, 2.0, g.random(n)) * 1e37,
}


def relaxed_rank(s: NDArray[np.float64], k: int, tau: float) -> NDArray[np.float64]:
    """Return P_k [n] of scores that descend, in float64.

    Its exponents are counted from that of item k. They are sums of gaps with factors that are positive on either side
    of k, f_k(j+1) - f_k(j) = (2 (j - k) + 1) (s_j - s_{j+1}), so that nothing cancels, whatever the scores.
    """
    s = s.astype(np.float64)
    rise = np.abs(2 * (np.arange(1, len(s)) - k) + 1) * -np.diff(s)  # entry i: between items i + 1 and i + 2
    above, below = rise[: k - 1][::-1].cumsum()[::-1], rise[k - 1 :].cumsum()
    e = np.exp(-np.concatenate([above, [0], below]) / tau)
    P: NDArray[np.float64] = e / e.sum()
    return P


def check_rounding(
    backend: Backend,
    tables: torch.dtype,
    score: Score,
    d: int,
    with_dense: bool,
    share: int = 1,
    device: str = "cpu",
    compiled: bool = False,
) -> tuple[Tensor, Tensor]:
    """Take a step with rounding; return the table and the state, in float32.

    It must be the step of the backend in float32, rounded with the bits of the reference.
    The result of the reference is the same where these steps are, and elsewhere at most one number of bfloat16 away.
    Kernels compiled for a GPU may add numbers of bfloat16 in another order than those of float32.
    """
    draw, rounding = torch.Generator().manual_seed(d), Rounding(2**62 + d, 2**30 + 5, 1)
    table = torch.nn.functional.normalize(torch.randn(40, d, generator=draw), dim=1)
    table = (table if score == "cosine" else 0.9 * table).bfloat16().float()
    rows, shared = torch.randint(38, (6, 5), generator=draw, dtype=torch.int32), None
    if share > 1:
        items = torch.randint(38, (-(-6 // share), 4), generator=draw, dtype=torch.int32)
        rows, shared = share_negatives(rows, items, share, 0.2, draw)
        shared = shared._replace(items=shared.items.to(device), replaced=shared.replaced.to(device))
    coefficients, vectors = torch.randn(6, 5, generator=draw), torch.randn(7, d, generator=draw).bfloat16().float()
    sources = torch.randint(7, (6,), generator=draw, dtype=torch.int32)
    terms = GradientTerms(rows.to(device), coefficients.to(device), vectors.to(device), sources.to(device), shared)
    dense = torch.randn(40, d, generator=draw).to(device) if with_dense else None

    def step(backend: Backend, dtype: torch.dtype, rounding: Rounding | None) -> tuple[Tensor, Tensor]:
        moved, state = table.to(device, dtype, copy=True), torch.full_like(table, 0.5, device=device)
        backend.update_rows(moved, state, terms._replace(vectors=terms.vectors.to(dtype)), 0.1, score, dense, rounding)
        assert moved.dtype == dtype
        return moved.float().cpu(), state.cpu()

    exact, exact_state = step(backend, torch.float32, None)
    rounded, state = step(backend, tables, rounding)
    touched = torch.arange(40) if with_dense else rows.unique().long()
    expected = table.clone()
    expected[touched] = reference.round_bfloat16(exact[touched], reference.rounding_bits(rounding, touched, d))
    if compiled:
        nearest = before_rounding(rounded, exact.double(), rounding)
        torch.testing.assert_close(nearest[touched], exact[touched].double(), rtol=0, atol=1e-6)
        torch.testing.assert_close(state, exact_state)
        exact = torch.where(rounded == expected, exact, torch.nan)  # not the same where it is rounded otherwise
    else:
        assert torch.equal(rounded, expected)
        assert torch.equal(state, exact_state)
    assert (rounded != exact).any(1)[touched].all() or d == 1

    true, same = step(reference, torch.bfloat16, rounding)[0], exact == step(reference, torch.float32, None)[0]
    assert same.any()
    assert torch.equal(rounded[same], true[same])
    assert ((rounded - true).abs() <= 2.0**-7 * torch.maximum(rounded.abs(), true.abs())).all()
    assert (rounded == true).double().mean() > 0.99
    return rounded, state


def awkward_numbers() -> Tensor:
    """Return numbers whose rounding may go wrong, with the lower half of the bits set: float32 [9]."""
    bits = [
        0x7FFFFFFF,  # NaN as GPUs compute it: a carry would make it -0
        0x7F800001,  # NaN whose upper half is infinity
        0xFF80FFFF,  # a negative one
        0x7F800000,
        0xFF800000,
        0x7F7FFFFF,  # the largest float32: a carry would make it infinity
        0xFF7F8000,
        0x0000FFFF,  # subnormal
        0x8000FFFF,
    ]
    return torch.tensor(bits).to(torch.int32).view(torch.float32)


def assert_awkward_numbers_survive(rounded: Tensor) -> None:
    """Check what `awkward_numbers` [*, 9] were rounded to."""
    assert rounded[:, :3].isnan().all()
    assert (rounded[:, 3:5] == torch.tensor([torch.inf, -torch.inf])).all()
    largest = torch.finfo(torch.bfloat16).max
    assert (rounded[:, 5:7] == torch.tensor([largest, -largest])).all()
    assert (rounded[:, 7:].abs() <= 2.0**-133).all()
    assert torch.equal(rounded.nan_to_num(), rounded.bfloat16().float().nan_to_num())
