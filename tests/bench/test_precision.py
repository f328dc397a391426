"""The update that `bench.precision` measures: that of the reference in float32, and its rounding to bfloat16."""

import pytest
import torch

from drm_triton.bench import precision
from drm_triton.kernels import reference
from drm_triton.kernels.protocol import GradientTerms
from drm_triton.names import Score


def random_step(seed: int) -> tuple[torch.Tensor, GradientTerms, torch.Tensor]:
    """Return a table [9, 6], terms for some of its rows, and a dense gradient."""
    draw = torch.Generator().manual_seed(seed)
    table = torch.nn.functional.normalize(torch.randn(9, 6, generator=draw))
    rows = torch.randint(7, (4, 3), generator=draw, dtype=torch.int32)
    sources = torch.tensor([2, 0, 0, 1], dtype=torch.int32)
    terms = GradientTerms(rows, torch.randn(4, 3, generator=draw), torch.randn(3, 6, generator=draw), sources)
    return table, terms, torch.randn(9, 6, generator=draw)


@pytest.mark.parametrize("score", ["dot", "cosine"])
@pytest.mark.parametrize("with_dense", [False, True])
def test_without_savings_the_update_is_that_of_the_reference(score: Score, with_dense: bool) -> None:
    table, terms, dense = random_step(1)
    moved, expected = table.clone(), table.clone()
    state, expected_state = torch.ones_like(table), torch.ones_like(table)
    extra = dense if with_dense else None
    precision.Update(0, None)(moved, state, terms, 0.1, score, extra)
    reference.update_rows(expected, expected_state, terms, 0.1, score, extra)
    torch.testing.assert_close(moved, expected)
    torch.testing.assert_close(state, expected_state)
    assert not torch.equal(moved, table)


def test_one_sum_for_each_row() -> None:
    """Worked by hand: the mean square of the gradient (3, 4, 0, 0, 0, 0) is 25 / 6."""
    table, state = torch.zeros(2, 6), torch.ones(2, 1)
    gradient = torch.tensor([[3.0, 4, 0, 0, 0, 0]])
    terms = GradientTerms.of_rows(torch.tensor([1], dtype=torch.int32), gradient)
    precision.Update(0, None)(table, state, terms, 0.1, "dot")
    assert state.tolist() == [[1], [pytest.approx(1 + 25 / 6)]]
    torch.testing.assert_close(table, torch.cat([torch.zeros(1, 6), -0.1 * gradient / (1 + 25 / 6) ** 0.5]))


def test_rounding_is_to_neighbours_and_right_on_average() -> None:
    x = torch.tensor([1.001, -0.3, 3e-5, 0.5, 0.0, -1.0])
    random = precision.random_bits(0, 1, 0, torch.arange(20_000), len(x))
    rounded = precision.round_bfloat16(x.expand(20_000, -1), random)
    assert torch.equal(rounded, rounded.to(torch.bfloat16).float())
    step = x.abs() * 2.0**-7
    assert ((rounded - x).abs() < step).logical_or(rounded == x).all()
    assert ((rounded.mean(0) - x).abs() <= 0.03 * step).all()
    assert torch.equal(rounded[:, 3:], x[3:].expand(20_000, -1))  # these are bfloat16 already


def test_random_bits_depend_on_seed_step_table_and_row() -> None:
    rows = torch.tensor([4, 9])
    first = precision.random_bits(5, 7, 0, rows, 20)
    assert first.shape == (2, 20)
    assert (first >= 0).all()
    assert (first < 1 << 16).all()
    assert torch.equal(first, precision.random_bits(5, 7, 0, rows, 20))
    assert torch.equal(first[1:], precision.random_bits(5, 7, 0, rows[1:], 20))
    for other in (precision.random_bits(6, 7, 0, rows, 20), precision.random_bits(5, 8, 0, rows, 20)):
        assert (other != first).all(1).any()
    assert not torch.equal(first, precision.random_bits(5, 7, 1, rows, 20))
    assert not torch.equal(first[0], first[1])


def test_rounded_tables_stay_bfloat16_and_a_seed_gives_the_same_bits() -> None:
    table, terms, _ = random_step(2)
    start = precision.round_bfloat16(table, None)
    results = []
    for seed in (3, 3, 4):
        moved, state, update = start.clone(), torch.ones_like(table), precision.Update(seed, "stochastic")
        for _ in range(4):
            update(moved, state, terms, 0.1, "dot")
        assert torch.equal(moved, moved.to(torch.bfloat16).float())
        results.append(moved)
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])
    assert torch.equal(results[0][7:], start[7:])  # rows without terms
