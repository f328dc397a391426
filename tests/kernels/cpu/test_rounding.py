"""Rounding of rows to bfloat16 by the CPU kernels, to the bit that of the reference."""

from typing import get_args

import numpy as np
import pytest
import torch

from drm_triton.errors import InputError
from drm_triton.kernels import cpu, reference
from drm_triton.kernels.cpu.rounding import round_rows
from drm_triton.kernels.cpu.runtime.threads import set_threads
from drm_triton.kernels.protocol import GradientTerms, Rounding
from drm_triton.names import Score
from tests.kernels.conftest import assert_awkward_numbers_survive, awkward_numbers, check_rounding
from tests.kernels.cpu.conftest import THREAD_COUNTS


@pytest.mark.parametrize("score", get_args(Score))
@pytest.mark.parametrize("with_dense", [False, True])
@pytest.mark.parametrize(("d", "share"), [(1, 1), (7, 2), (8, 1), (21, 4)])
def test_update_rows(score: Score, with_dense: bool, d: int, share: int) -> None:
    check_rounding(cpu, torch.float32, score, d, with_dense, share)


def test_rounding_is_that_of_the_reference_and_leaves_other_rows() -> None:
    table = torch.randn(500, 13, generator=torch.Generator().manual_seed(1))
    table[:4, :9] = awkward_numbers()
    rows, rounding = torch.arange(0, 500, 2), Rounding(2**63 - 1, 2**40 + 3, 1)
    expected = table.clone()
    bits = reference.rounding_bits(rounding, rows, 13)
    expected[rows] = reference.round_bfloat16(table[rows], bits)
    round_rows(table.numpy(), rows.to(torch.int32).numpy(), rounding)
    assert torch.equal(table.view(torch.int32), expected.view(torch.int32))
    assert_awkward_numbers_survive(table[:4:2, :9])


def test_rounding_is_right_on_average() -> None:
    x, n = torch.tensor([1.001, -0.3, 3e-5]), 20_000
    table = x.repeat(n, 1)
    round_rows(table.numpy(), np.arange(n, dtype=np.int32), Rounding(0, 3, 0))
    step = x.abs() * 2.0**-7  # at least that between two numbers of bfloat16
    assert ((table.double().mean(0) - x).abs() <= 4 * step / 2 / n**0.5).all()


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.usefixtures("threads")
def test_results_do_not_depend_on_threads(dense: bool) -> None:
    results = []
    for count in THREAD_COUNTS:
        set_threads(count)
        draw = torch.Generator().manual_seed(2)
        table = (torch.randn(3000, 20, generator=draw) / 5).bfloat16().float()
        rows = torch.randint(2000, (500, 8), generator=draw, dtype=torch.int32)
        vectors, sources = torch.randn(9, 20, generator=draw), torch.randint(9, (500,), generator=draw).int()
        terms = GradientTerms(rows, torch.randn(500, 8, generator=draw), vectors, sources)
        cpu.update_rows(
            table, torch.ones_like(table), terms, 0.1, "dot", table / 2 if dense else None, Rounding(1, 2, 0)
        )
        results.append(table)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[0].bfloat16().float())


def test_a_row_that_becomes_nan_stays_nan() -> None:
    table, state = torch.zeros(2, 3), torch.ones(2, 3)
    terms = GradientTerms.of_rows(torch.tensor([1], dtype=torch.int32), torch.tensor([[1.0, torch.nan, 1.0]]))
    cpu.update_rows(table, state, terms, 0.1, "dot", rounding=Rounding(0, 0, 0))
    assert table.isnan().any(1).tolist() == [False, True]


def test_tables_of_bfloat16_are_refused() -> None:
    table, state = torch.zeros(2, 3).bfloat16(), torch.ones(2, 3)
    with pytest.raises(InputError, match=r"^update_rows: table must be float32, got bfloat16"):
        cpu.update_rows(table, state, GradientTerms.none(table), 0.1, "dot", torch.ones(2, 3), Rounding(0, 0, 0))
