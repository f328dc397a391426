"""Updates of rows on the CPU against the float64 reference, with terms, a dense gradient, or both."""

from collections.abc import Callable
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from drm_triton.errors import InputError
from drm_triton.kernels import cpu, reference
from drm_triton.kernels.batches import ListBatch
from drm_triton.kernels.cpu.runtime.threads import set_threads
from drm_triton.kernels.protocol import GradientTerms, Objective
from drm_triton.names import Score
from tests.kernels.cpu.conftest import EPS, THREAD_COUNTS, double


def random_terms(seed: int, R: int, d: int, B: int, m: int) -> tuple[Tensor, Tensor, GradientTerms]:
    """Return a table, its state and terms of which half name row 0."""
    g = torch.Generator().manual_seed(seed)
    table, state = torch.randn(R, d, generator=g) / d**0.5, torch.rand(R, d, generator=g)
    rows = torch.randint(0, R, (B, m), generator=g) * torch.randint(0, 2, (B, m), generator=g)
    coefficients, vectors = torch.randn(B, m, generator=g), torch.randn(9, d, generator=g) / d**0.5
    sources = torch.randint(0, 9, (B,), generator=g, dtype=torch.int32)
    return table, state, GradientTerms(rows.to(torch.int32), coefficients, vectors, sources)


def no_terms(d: int) -> GradientTerms:
    return random_terms(0, 1, d, 0, 1)[2]


def assert_update(
    table: Tensor, state: Tensor, terms: GradientTerms, score: Score, dense: Tensor | None = None
) -> None:
    """Update a copy of the table and compare with the reference; the arguments must not change."""
    arguments = [terms.rows, terms.coefficients, terms.vectors, terms.sources, *([] if dense is None else [dense])]
    before = [x.clone() for x in arguments]
    got, got_state, want, want_state = table.clone(), state.clone(), table.double(), state.double()
    cpu.update_rows(got, got_state, terms, 0.1, score, dense)
    assert all(torch.equal(x, y) for x, y in zip(arguments, before, strict=True))
    reference.update_rows(want, want_state, double(terms), 0.1, score, None if dense is None else dense.double())
    # The gradient of a row is a sum of up to E / 2 terms of size 1: its error grows with their number.
    E = max(1, terms.rows.numel())
    torch.testing.assert_close(got_state.double(), want_state, rtol=EPS * E**0.5 * 8, atol=EPS * E)
    torch.testing.assert_close(got.double(), want, rtol=0, atol=max(1e-5, 2 * EPS * E**0.5))
    assert got.norm(dim=1).max() <= max(1 + 4 * EPS, table.norm(dim=1).max())


@pytest.mark.parametrize(("R", "B", "m"), [(1, 1, 1), (1, 300, 3), (5, 4, 2), (70, 50, 48), (3000, 700, 48)])
@pytest.mark.parametrize("d", [1, 3, 64])
@pytest.mark.parametrize("score", get_args(Score))
@pytest.mark.usefixtures("n_threads")
def test_terms(R: int, B: int, m: int, d: int, score: Score) -> None:
    assert_update(*random_terms(R, R, d, B, m), score)


# 1 << 11 buckets at most: tables below, at and above powers of two have short, full and several rows per bucket.
@pytest.mark.parametrize("R", [1, 2, 127, 128, 129, 2047, 2048, 2049, 10_000])
@pytest.mark.parametrize("B", [0, 1, 30, 3000])
@pytest.mark.parametrize("score", get_args(Score))
@pytest.mark.usefixtures("n_threads")
def test_terms_and_a_dense_gradient(R: int, B: int, score: Score) -> None:
    table, state, terms = random_terms(R + B, R, 5, B, 4)
    dense = torch.randn(R, 5, generator=torch.Generator().manual_seed(R)) / 3
    assert_update(table, state, terms, score, dense)


@pytest.mark.usefixtures("n_threads")
def test_a_dense_gradient_steps_every_row() -> None:
    table, state, terms = random_terms(1, 500, 8, 3, 2)
    before = table.clone()
    cpu.update_rows(table, state, terms, 0.1, "dot", torch.ones(500, 8))
    assert (table != before).any(1).all()
    assert_update(before, torch.ones_like(state), no_terms(8), "dot", torch.ones(500, 8))


def test_the_last_rows_of_the_table() -> None:
    """Rows at the end of a table whose size is not a power of two, and so inside the last bucket in use."""
    table, state, terms = random_terms(2, 1025, 4, 2, 3)
    rows = torch.tensor([[1024, 1023, 0], [1024, 512, 511]], dtype=torch.int32)
    for dense in (None, torch.full((1025, 4), 0.25)):
        assert_update(table, state, terms._replace(rows=rows), "l2", dense)


def test_rows_that_do_not_appear_stay_as_they_are() -> None:
    table, state, terms = random_terms(1, 50, 8, 4, 2)
    table[10] *= 100  # outside the unit ball: not even projected
    before = table.clone(), state.clone()
    rows = torch.tensor([[3, 7], [3, 3], [49, 7], [3, 0]], dtype=torch.int32)
    cpu.update_rows(table, state, terms._replace(rows=rows), 0.1, "dot")
    others = torch.ones(50, dtype=torch.bool)
    others[rows.flatten().long()] = False
    assert torch.equal(table[others], before[0][others])
    assert torch.equal(state[others], before[1][others])
    assert (table[~others] != before[0][~others]).any(1).all()


@pytest.mark.parametrize("dense", [False, True])
def test_results_do_not_depend_on_threads(dense: bool) -> None:
    results = []
    for count in THREAD_COUNTS:
        set_threads(count)
        table, state, terms = random_terms(2, 5000, 64, 2000, 48)
        cpu.update_rows(table, state, terms, 0.1, "l2", table / 2 if dense else None)
        results.append((table, state))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("score", ["dot", "l2"])
@pytest.mark.parametrize("d", [3, 64, 90])
@pytest.mark.parametrize("first", [1, 4, 9])
def test_further_vectors(score: str, d: int, first: int) -> None:
    """Sources from `first` on refer to `sums`; the step is the same to the bit."""
    table, state, terms = random_terms(5, 300, d, 200, 3)
    other_table, other_state = table.clone(), state.clone()
    cpu.update_rows(table, state, terms, 0.1, score)
    parts = terms._replace(vectors=terms.vectors[:first], sums=terms.vectors[first:])
    cpu.update_rows(other_table, other_state, parts, 0.1, score)
    assert torch.equal(table, other_table)
    assert torch.equal(state, other_state)


def test_no_terms_and_no_dense_gradient() -> None:
    table, state, _ = random_terms(3, 5, 4, 2, 1)
    before = table.clone()
    cpu.update_rows(table, state, no_terms(4), 0.1, "dot")
    assert torch.equal(table, before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: {"terms": t._replace(rows=t.rows + 5)}, r"update_rows: rows must be in \[0, 5\)"),
        (lambda t: {"terms": t._replace(sources=t.sources + 9)}, r"update_rows: sources must be in \[0, 9\)"),
        (lambda t: {"terms": t._replace(sources=t.sources[:3])}, r"update_rows: sources must have shape \[4\]"),
        (lambda t: {"lr": float("nan")}, "update_rows: lr must be finite and at least 0, got nan"),
        (lambda t: {"score": "hamming"}, "update_rows: score must be one of dot, l2, cosine, got 'hamming'"),
        (lambda t: {"table": torch.ones(4, 5).T}, "update_rows: table is changed in place and must be"),
        (lambda t: {"table": t.vectors[:5]}, "update_rows: vectors must not be, or overlap, the table"),
        (lambda t: {"terms": t._replace(sums=torch.ones(2, 3))}, r"update_rows: sums must have shape \[any, 4\]"),
        (lambda t: {"terms": t._replace(sources=t.sources + 9, sums=torch.ones(2, 4))}, r"must be in \[0, 11\)"),
        (
            lambda t: {"table": (sums := torch.ones(5, 4)), "terms": t._replace(sums=sums)},
            "sums must not be, or overlap",
        ),
        (lambda t: {"dense": torch.ones(4, 4)}, r"update_rows: dense must have shape \[5, 4\], got \[4, 4\]"),
    ],
)
def test_bad_arguments(change: Callable[[GradientTerms], dict[str, Any]], message: str) -> None:
    table, state, terms = random_terms(4, 5, 4, 4, 2)
    arguments = {"table": table, "state": state, "terms": terms, "lr": 0.1, "score": "dot"}
    with pytest.raises(InputError, match=message):
        cpu.update_rows(**{**arguments, **change(terms)})


def test_tables_beyond_int32_offsets() -> None:
    """Rows whose offset passes 2^31 elements; zeros take no memory before they are written."""
    R, d = 2**31 // 64 + 1000, 64
    try:
        table, state = (torch.from_numpy(np.zeros((R, d), np.float32)) for _ in range(2))
    except MemoryError:
        pytest.skip("this system does not overcommit memory")
    rows = torch.tensor([R - 700, 0, R - 1, 5, R - 1], dtype=torch.int32)
    g = torch.Generator().manual_seed(0)
    table[rows.long()] = torch.randn(5, d, generator=g) / 10
    vectors, coefficients = torch.randn(5, d, generator=g), torch.randn(5, 1, generator=g)
    sources = torch.arange(5, dtype=torch.int32)
    terms = GradientTerms(rows[:, None], coefficients, vectors, sources)
    named, compact = rows.unique(return_inverse=True)
    want, want_state = table[named.long()].double(), torch.zeros(len(named), d, dtype=torch.float64)

    batch = ListBatch(sources[:1], named[None])
    got = cpu.list_gradients(vectors, table, batch, Objective(1, drm=False, mse=True))
    torch.testing.assert_close(got.scores[0].double(), want @ vectors[0].double(), rtol=0, atol=8 * EPS)

    cpu.update_rows(table, state, terms, 0.1, "dot")
    reference.update_rows(want, want_state, double(terms._replace(rows=compact.int()[:, None])), 0.1, "dot")
    torch.testing.assert_close(table[named.long()].double(), want, rtol=0, atol=8 * EPS)
    torch.testing.assert_close(state[named.long()].double(), want_state, rtol=8 * EPS, atol=0)
