"""Tables of bfloat16 on Triton: read exactly, and rounded to the bit as by the reference."""

from typing import get_args

import pytest
import torch

pytest.importorskip("triton", reason="Triton is available on Linux only")

import triton
import triton.language as tl

from drm_triton.kernels import gpu
from drm_triton.kernels.batches import ListBatch
from drm_triton.kernels.gpu.launch import launch
from drm_triton.kernels.gpu.rounding import rounded, rounding_bits, widened
from drm_triton.kernels.protocol import GradientTerms, Objective, Rounding
from drm_triton.names import Score
from tests.kernels.conftest import assert_awkward_numbers_survive, awkward_numbers, check_rounding
from tests.kernels.gpu.conftest import DEVICE, INTERPRETED, factors, int32


@pytest.mark.parametrize(
    ("d", "score", "with_dense", "share", "tables"),
    [
        *((d, score, False, 1, torch.bfloat16) for d in (1, 7, 16) for score in get_args(Score)),
        (20, "dot", True, 1, torch.bfloat16),
        (16, "l2", False, 4, torch.bfloat16),
        (70, "cosine", True, 2, torch.bfloat16),
        (9, "cosine", False, 2, torch.float32),  # which may hold numbers of bfloat16 too
    ],
)
def test_update_rows(d: int, score: Score, with_dense: bool, share: int, tables: torch.dtype) -> None:
    check_rounding(gpu, tables, score, d, with_dense, share, DEVICE, compiled=not INTERPRETED)


def test_the_step_may_be_a_number_on_the_device() -> None:
    results = []
    for step in (9, torch.tensor(9, device=DEVICE), 10):
        table, state = torch.full((3, 8), 0.3, device=DEVICE).bfloat16(), torch.ones(3, 8, device=DEVICE)
        terms = GradientTerms.of_rows(int32(0, 2), torch.full((2, 8), 1e-3, device=DEVICE))
        gpu.update_rows(table, state, terms, 0.7, "dot", rounding=Rounding(4, step, 0))
        results.append(table)
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


@triton.jit
def rounding_test(x_ptr, wide_ptr, narrow_ptr, step_ptr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Round the rows of a float32 table [BLOCK, 16] to bfloat16, and read them again."""
    row = tl.arange(0, BLOCK)
    offset = row[:, None] * 16 + tl.arange(0, 16)[None, :]
    random = rounding_bits(tl.full((), 3, tl.int64), tl.load(step_ptr), 1, row, 16)
    x = rounded(tl.load(x_ptr + offset), random, narrow_ptr.dtype.element_ty)
    tl.store(narrow_ptr + offset, x)
    tl.store(wide_ptr + offset, widened(x))


def test_numbers_that_are_not_finite_or_might_overflow() -> None:
    x = torch.full((64, 16), 1.001, device=DEVICE)
    x[:, :9] = awkward_numbers().to(DEVICE)
    wide, narrow = torch.empty_like(x), torch.empty_like(x, dtype=torch.bfloat16)
    launch(rounding_test, (1,), x, wide, narrow, torch.tensor(5, device=DEVICE), BLOCK=64)
    assert_awkward_numbers_survive(narrow[:, :9].float().cpu())
    assert torch.equal(wide.nan_to_num(), narrow.float().nan_to_num())
    assert set(narrow[:, 9:].flatten().tolist()) == {1.0, 1.0078125}


@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_a_row_that_becomes_nan_stays_nan() -> None:
    table, state = torch.zeros(4, 8, device=DEVICE).bfloat16(), torch.ones(4, 8, device=DEVICE)
    gradient = torch.ones(1, 8, device=DEVICE)
    gradient[0, 3] = torch.nan
    gpu.update_rows(table, state, GradientTerms.of_rows(int32(1), gradient), 0.1, "dot", rounding=Rounding(0, 0, 0))
    assert table.isnan().any(1).tolist() == [False, True, False, False]


@pytest.mark.parametrize("score", get_args(Score))
def test_gradients_and_ranks_of_bfloat16_are_those_of_their_values_in_float32(score: Score) -> None:
    U, V = (factors(rows, 12, "bfloat16").to(DEVICE).bfloat16() for rows in (4, 40))
    items = torch.arange(3 * 9, dtype=torch.int32, device=DEVICE).view(3, 9)
    batch, objective = ListBatch(int32(0, 3, 1), items), Objective(2, score)
    got = gpu.list_gradients(U, V, batch, objective)
    want = gpu.list_gradients(U.float(), V.float(), batch, objective)
    for a, b in zip(got, want, strict=True):  # compiled kernels may add in another order
        torch.testing.assert_close(a, b, rtol=0, atol=0 if INTERPRETED else 1e-5)
    ranked = gpu.top_k(U, gpu.pack_items(V, score), 3)
    assert all(map(torch.equal, ranked, gpu.top_k(U.float(), gpu.pack_items(V.float(), score), 3)))
