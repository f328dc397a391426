"""Rounding of factors to bfloat16, at random, by the reference."""

import itertools

import pytest
import torch

from drm_triton.errors import InputError
from drm_triton.kernels import reference
from drm_triton.kernels.batches import ListBatch
from drm_triton.kernels.protocol import GradientTerms, Objective, Rounding
from drm_triton.kernels.streams import ORDER
from drm_triton.names import Score
from tests.kernels.conftest import assert_awkward_numbers_survive, awkward_numbers


def test_rounding_is_to_neighbours_and_right_on_average() -> None:
    x, n = torch.tensor([1.001, -0.3, 3e-5, 1e-40, 0.5, 0.0, -1.0]), 20_000
    bits = reference.rounding_bits(Rounding(0, 1, 0), torch.arange(n), len(x))
    rounded = reference.round_bfloat16(x.expand(n, -1), bits)
    assert torch.equal(rounded, rounded.bfloat16().float())
    truncated = (x.view(torch.int32) & ~0xFFFF).view(torch.float32)
    step = ((x.view(torch.int32) & ~0xFFFF) + 0x10000).view(torch.float32) - truncated
    assert ((rounded == truncated) | (rounded == truncated + step)).all()
    # A mean of n roundings has a standard deviation of at most half a step / sqrt(n).
    assert ((rounded.double().mean(0) - x).abs() <= 4 * step.abs() / 2 / n**0.5).all()
    assert torch.equal(rounded[:, 4:], x[4:].expand(n, -1))  # these are numbers of bfloat16 already
    assert not torch.equal(rounded[0], rounded[1])


def test_rounding_keeps_what_is_not_finite_and_what_is() -> None:
    bits = reference.rounding_bits(Rounding(0, 0, 0), torch.arange(100), 9)
    assert_awkward_numbers_survive(reference.round_bfloat16(awkward_numbers().expand(100, -1), bits))


def test_rounding_bits_are_uniform_and_depend_on_seed_step_table_row_and_factor() -> None:
    rows, key = torch.arange(2000), Rounding(5, 7, 0)
    first = reference.rounding_bits(key, rows, 20)
    assert first.shape == (2000, 20)
    assert (first >> 16 == 0).all()
    ones = (first[:, :, None] >> torch.arange(16) & 1).double().mean(0)  # of each factor and bit
    assert ((ones - 0.5).abs() < 5 * 0.5 / 2000**0.5).all()
    assert torch.equal(first[7:9], reference.rounding_bits(key, rows[7:9], 20))
    assert torch.equal(first[:, :3], reference.rounding_bits(key, rows, 3))
    others = [key._replace(seed=6), key._replace(seed=5 + 2**40), key._replace(step=8), key._replace(table=1)]
    draws = [first, first.roll(1, 0), first.roll(1, 1), *(reference.rounding_bits(other, rows, 20) for other in others)]
    for a, b in itertools.combinations(draws, 2):
        assert (a == b).double().mean() < 1e-3  # of independent bits, one in 65,536 is the same


def test_rounding_bits_are_none_of_the_sampler() -> None:
    """Same seed, epoch and step: without blocks of their own, row 0 would be rounded with the key of the shuffle."""
    words = torch.stack(reference.philox(5, 7, ORDER, torch.arange(50)), dim=1)
    halves = torch.stack([words & 0xFFFF, words >> 16], dim=-1).flatten(1)
    assert (reference.rounding_bits(Rounding(5, 7, 0), torch.arange(50), 8) == halves).double().mean() < 0.01


def test_a_small_step_survives_on_average() -> None:
    """A hundred steps of a tenth of the step between two numbers: to nearest, the row would never move."""
    table, state = torch.full((400, 2), 0.5).bfloat16(), torch.ones(400, 2)
    terms = GradientTerms.of_rows(torch.arange(400, dtype=torch.int32), torch.full((400, 2), 1e-3))
    for number in range(100):
        reference.update_rows(table, state, terms, 0.4, "dot", rounding=Rounding(0, number, 0))
    moved = 0.5 - table.float().mean().item()
    assert moved == pytest.approx(100 * 0.4 * 1e-3, rel=0.02)


def test_a_table_of_bfloat16_needs_rounding() -> None:
    table, state = torch.zeros(1, 2).bfloat16(), torch.zeros(1, 2)
    with pytest.raises(InputError, match=r"^update_rows: a table of bfloat16 needs rounding"):
        reference.update_rows(table, state, GradientTerms.none(table), 0.1, "dot")


@pytest.mark.parametrize(
    ("rounding", "message"),
    [
        (Rounding(-1, 0, 0), "the seed of rounding must be an integer from 0 to 9223372036854775807, got -1"),
        (Rounding(0, -1, 0), "the step of rounding must be an integer of at least 0, got -1"),
        (Rounding(0, 0, 2), "the table of rounding must be an integer from 0 to 1, got 2"),
        (Rounding(0, torch.zeros(()), 0), "the step of rounding must be int64, got float32"),
        (Rounding(0, torch.zeros(1, dtype=torch.int64), 0), r"the step of rounding must have shape \[\], got \[1\]"),
    ],
)
def test_bad_roundings(rounding: Rounding, message: str) -> None:
    table, state = torch.zeros(1, 2), torch.zeros(1, 2)
    with pytest.raises(InputError, match=f"^update_rows: {message}"):
        reference.update_rows(table, state, GradientTerms.none(table), 0.1, "dot", rounding=rounding)


@pytest.mark.parametrize("score", ["dot", "l2", "cosine"])
def test_gradients_of_bfloat16_are_those_of_their_values_in_float32(score: Score) -> None:
    draw = torch.Generator().manual_seed(0)
    U, V = (torch.randn(rows, 5, generator=draw).bfloat16() for rows in (4, 20))
    batch = ListBatch(torch.tensor([3, 0]).int(), torch.randint(20, (2, 7), generator=draw).int())
    objective = Objective(2, score)
    got = reference.list_gradients(U, V, batch, objective)
    want = reference.list_gradients(U.float(), V.float(), batch, objective)
    assert all(torch.equal(a, b) and a.dtype == torch.float32 for a, b in zip(got, want, strict=True))
    ranked = reference.top_k(U, reference.pack_items(V, score), 3)
    assert all(map(torch.equal, ranked, reference.top_k(U.float(), reference.pack_items(V.float(), score), 3)))
    assert ranked[1].dtype == torch.float32
