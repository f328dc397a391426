"""The update that `bench.precision` measures: that of the reference, its sums by row, and its rounding to nearest."""

import pytest
import torch

from drm_triton.bench import precision
from drm_triton.kernels import reference
from drm_triton.kernels.protocol import GradientTerms, Rounding
from drm_triton.names import Score

ROUNDING = Rounding(seed=3, step=7, table=1)


def random_step(seed: int) -> tuple[torch.Tensor, GradientTerms, torch.Tensor]:
    """Return a table [9, 6] of numbers of bfloat16, terms for some of its rows, and a dense gradient."""
    draw = torch.Generator().manual_seed(seed)
    table = torch.nn.functional.normalize(torch.randn(9, 6, generator=draw)).bfloat16().float()
    rows = torch.randint(7, (4, 3), generator=draw, dtype=torch.int32)
    sources = torch.tensor([2, 0, 0, 1], dtype=torch.int32)
    terms = GradientTerms(rows, torch.randn(4, 3, generator=draw), torch.randn(3, 6, generator=draw), sources)
    return table, terms, torch.randn(9, 6, generator=draw)


@pytest.mark.parametrize("score", ["dot", "cosine"])
@pytest.mark.parametrize("with_dense", [False, True])
@pytest.mark.parametrize("rounding", [None, ROUNDING])
def test_without_a_variant_the_update_is_that_of_the_reference(
    score: Score, with_dense: bool, rounding: Rounding | None
) -> None:
    table, terms, dense = random_step(1)
    moved, expected = table.clone(), table.clone()
    state, expected_state = torch.ones_like(table), torch.ones_like(table)
    extra = dense if with_dense else None
    precision.update_rows(moved, state, terms, 0.1, score, extra, rounding)
    reference.update_rows(expected, expected_state, terms, 0.1, score, extra, rounding)
    torch.testing.assert_close(moved, expected)
    torch.testing.assert_close(state, expected_state)
    assert not torch.equal(moved, table)


def test_one_sum_for_each_row() -> None:
    """Worked by hand: the mean square of the gradient (3, 4, 0, 0, 0, 0) is 25 / 6."""
    table, state = torch.zeros(2, 6), torch.ones(2, 1)
    gradient = torch.tensor([[3.0, 4, 0, 0, 0, 0]])
    terms = GradientTerms.of_rows(torch.tensor([1], dtype=torch.int32), gradient)
    precision.update_rows(table, state, terms, 0.1, "dot")
    assert state.tolist() == [[1], [pytest.approx(1 + 25 / 6)]]
    torch.testing.assert_close(table, torch.cat([torch.zeros(1, 6), -0.1 * gradient / (1 + 25 / 6) ** 0.5]))


def test_rounding_to_nearest() -> None:
    table, terms, _ = random_step(2)
    rounded, exact = table.clone(), table.clone()
    precision.update_rows(rounded, torch.ones_like(table), terms, 0.1, "dot", rounding=ROUNDING, nearest=True)
    precision.update_rows(exact, torch.ones_like(table), terms, 0.1, "dot")
    assert torch.equal(rounded, exact.bfloat16().float())
    assert not torch.equal(rounded, table)
