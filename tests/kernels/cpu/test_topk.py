"""Top-K on the CPU against the reference."""

from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from drm_triton.errors import InputError
from drm_triton.kernels import cpu, reference
from drm_triton.kernels.cpu import filter as panels
from drm_triton.kernels.cpu import topk
from drm_triton.kernels.cpu.runtime.threads import set_threads
from drm_triton.kernels.protocol import SeenItems
from drm_triton.names import Score
from tests.kernels.cpu.conftest import THREAD_COUNTS


def case(seed: int, m: int, N: int, d: int, most_seen: int = 20) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Small integers: scores are exact in float32, and ties abound."""
    g = torch.Generator().manual_seed(seed)
    queries, V = torch.randint(-3, 4, (m, d), generator=g).float(), torch.randint(-3, 4, (N, d), generator=g).float()
    degree = torch.randint(0, min(N, most_seen) + 1, (m,), generator=g)
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), degree.cumsum(0)])
    rows = [torch.randperm(N, generator=g)[:size].sort().values.int() for size in degree.tolist()]
    return queries, V, (indptr, torch.cat([*rows, torch.zeros(0, dtype=torch.int32)]))


def rank(queries: Tensor, V: Tensor, k: int, score: Score, seen: SeenItems | None = None) -> tuple[Tensor, Tensor]:
    """Pack the items and rank them on the CPU."""
    return cpu.top_k(queries, cpu.pack_items(V, score), k, seen)


def expected(queries: Tensor, V: Tensor, k: int, score: Score, seen: SeenItems | None = None) -> tuple[Tensor, Tensor]:
    """Return the ranking of the reference."""
    return reference.top_k(queries, reference.pack_items(V, score), k, seen)


@pytest.mark.parametrize("score", get_args(Score))
@pytest.mark.parametrize(
    ("m", "N", "d", "k"),
    [
        (0, 5, 3, 2),
        (1, 1, 1, 1),
        (5, 7, 3, 2),
        (70, 48, 5, 48),
        (70, 97, 5, 100),
        (9, 200, 1, 199),
        (130, 1000, 16, 50),
        (3, 5000, 64, 1000),
        (64, 3000, 50, 20),
    ],
)
def test_top_k_is_that_of_the_reference(m: int, N: int, d: int, k: int, score: Score) -> None:
    queries, V, seen = case(m + N, m, N, d)
    for mask in (None, seen):
        items, scores = rank(queries, V, k, score, mask)
        want_items, want_scores = expected(queries, V, k, score, mask)
        assert torch.equal(items, want_items)
        assert torch.equal(scores, want_scores)


@pytest.fixture(params=[True, False], ids=["bytes", "floats"])
def panels_of(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test panels of bytes, if the processor multiplies them, and of floats."""
    if request.param and not panels.BYTES:
        pytest.skip("this processor does not multiply bytes")
    monkeypatch.setattr(panels, "BYTES", request.param)


@pytest.mark.parametrize("score", get_args(Score))
@pytest.mark.parametrize(("N", "d", "k"), [(40, 3, 40), (3000, 4, 1), (3000, 4, 50), (20_000, 3, 50), (5000, 5, 400)])
@pytest.mark.usefixtures("panels_of")
def test_no_item_is_missed(N: int, d: int, k: int, score: Score) -> None:
    """Whole numbers that bytes cannot hold, but whose scores are exact in float32 and differ by little."""
    g = torch.Generator().manual_seed(N)
    queries, V = (torch.randint(-700, 701, (rows, d), generator=g).float() for rows in (40, N))
    V[::7] /= 128  # short rows too
    V[::7] = V[::7].round()
    items, scores = rank(queries, V, k, score)
    want_items, want_scores = expected(queries, V, k, score)
    assert torch.equal(scores, want_scores)
    assert torch.equal(items, want_items)


@pytest.mark.parametrize("score", get_args(Score))
@pytest.mark.usefixtures("panels_of")
def test_a_sample_that_is_better_than_the_rest(score: Score) -> None:
    """The best items all lie in the panels that are looked at first: the threshold they give lets too few pass."""
    N, k, width = 200 * panels.WIDTH, 50, panels.WIDTH
    V = torch.zeros(N, 2)
    V[:, 0] = torch.arange(N).flip(0) * 2.0**-14 - 30
    sampled = torch.arange(N) // width % topk.SAMPLE_STRIDE == 0
    V[sampled, 0] = 1
    V[torch.nonzero(sampled)[: k - 1], 0] = 2
    queries = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
    items, scores = rank(queries, V, k, score)
    want_items, want_scores = expected(queries, V, k, score)
    assert torch.equal(items, want_items)
    assert torch.equal(scores, want_scores)


@pytest.mark.parametrize(
    ("of_queries", "of_V"), [(1, 2.0**-73), (2.0**-73, 1), (2.0**-60, 2.0**-60), (2.0**20, 2.0**24)]
)
@pytest.mark.usefixtures("panels_of")
def test_sizes_of_factors(of_queries: float, of_V: float) -> None:
    """A power of two changes no ranking, however small or large; one factor of each row is far above the others."""
    g = torch.Generator().manual_seed(5)
    queries, V = (torch.randint(-60, 61, (rows, 16), generator=g).float() for rows in (20, 3000))
    queries[:, 3] *= 100
    V[:, 7] *= 100
    V[5] = 0
    queries[3] = 0
    items, scores = rank(queries * of_queries, V * of_V, 30, "dot")
    want_items, want_scores = expected(queries, V, 30, "dot")
    assert torch.equal(items, want_items)
    assert torch.equal(scores, want_scores * (of_queries * of_V))


@pytest.mark.usefixtures("panels_of")
def test_l2_near_the_largest_numbers() -> None:
    V = torch.linspace(1, 1e19, 300)[:, None]
    items, scores = rank(torch.ones(1, 1), V, 5, "l2")
    assert items.tolist() == [[0, 1, 2, 3, 4]]
    assert scores.isfinite().all()


@pytest.mark.parametrize("score", get_args(Score))
def test_packed_items_serve_any_number_of_calls(score: Score) -> None:
    queries, V, seen = case(7, 70, 1000, 16)
    packed = cpu.pack_items(V, score)
    want = rank(queries, V, 9, score, seen)
    V.zero_()  # what is packed stays
    for _ in range(2):
        assert all(torch.equal(x, y) for x, y in zip(cpu.top_k(queries, packed, 9, seen), want, strict=True))
    alone = [cpu.top_k(queries[i : i + 1], packed, 9, (seen[0][i : i + 2], seen[1])) for i in range(70)]
    assert all(torch.equal(torch.cat(x), y) for x, y in zip(zip(*alone, strict=True), want, strict=True))


def test_packed_items_are_checked() -> None:
    queries, V, _ = case(8, 3, 10, 4)
    with pytest.raises(InputError, match="pack_items: V holds values that are not finite"):
        cpu.pack_items(V / 0, "dot")
    with pytest.raises(InputError, match="pack_items: score must be one of dot, l2"):
        cpu.pack_items(V, "hamming")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="pack_items: V must be float32, got float64"):
        cpu.pack_items(V.double(), "dot")
    with pytest.raises(InputError, match=r"top_k: queries must have shape \[any, 2\], got \[3, 4\]"):
        cpu.top_k(queries, cpu.pack_items(V[:, :2], "dot"), 2)


def test_everything_seen() -> None:
    queries, V, _ = case(1, 3, 10, 4)
    indptr, indices = torch.tensor([0, 10, 19, 19]), torch.cat([torch.arange(10), torch.arange(1, 10)]).int()
    items, scores = rank(queries, V, 3, "dot", (indptr, indices))
    assert items[:2].tolist() == [[-1, -1, -1], [0, -1, -1]]
    assert scores[0].tolist() == [-float("inf")] * 3


def test_a_slice_of_a_larger_mask_serves() -> None:
    queries, V, (indptr, indices) = case(2, 40, 100, 8)
    whole = rank(queries, V, 7, "dot", (indptr, indices))
    part = rank(queries[10:30], V, 7, "dot", (indptr[10:31], indices))
    assert torch.equal(part[0], whole[0][10:30])


def test_negative_zero_ties_with_zero() -> None:
    items, _ = rank(torch.tensor([[-1.0]]), torch.tensor([[0.0], [-0.0], [0.0]]), 3, "dot")
    assert items.tolist() == [[0, 1, 2]]


@pytest.mark.parametrize("score", get_args(Score))
def test_real_valued_scores(score: Score) -> None:
    """Rounding may swap near ties, so the scores are compared, and the items looked up by theirs."""
    g = torch.Generator().manual_seed(3)
    queries, V = torch.randn(50, 64, generator=g) / 8, torch.randn(2000, 64, generator=g) / 8
    items, scores = rank(queries, V, 50, score)
    want = expected(queries.double(), V.double(), 50, score)[1]
    torch.testing.assert_close(scores.double(), want, rtol=0, atol=1e-6)
    everything = expected(queries.double(), V.double(), 2000, score)
    exact = torch.empty(50, 2000, dtype=torch.float64).scatter_(1, everything[0].long(), everything[1])
    torch.testing.assert_close(exact.gather(1, items.long()), want, rtol=0, atol=1e-6)
    assert (scores.diff(dim=1) <= 0).all()


def test_threads_give_the_same_bits() -> None:
    g = torch.Generator().manual_seed(4)
    queries, V = torch.randn(300, 64, generator=g), torch.randn(1000, 64, generator=g)
    results = []
    for count in THREAD_COUNTS:
        set_threads(count)
        results.append(rank(queries, V, 10, "l2"))
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a | {"k": 0}, "top_k: k must be an integer of at least 1, got 0"),
        (lambda a: a | {"queries": a["queries"][:, :2]}, r"top_k: queries must have shape \[any, 4\], got \[3, 2\]"),
        (lambda a: a | {"queries": a["queries"].double()}, "top_k: queries must be float32, got float64"),
        (lambda a: a | {"seen": (a["seen"][0][1:], a["seen"][1])}, r"top_k: the indptr of seen must have shape \[4\]"),
    ],
)
def test_bad_arguments(change: Callable[[dict[str, Any]], dict[str, Any]], message: str) -> None:
    queries, V, seen = case(5, 3, 10, 4)
    with pytest.raises(InputError, match=message):
        cpu.top_k(**change({"queries": queries, "items": cpu.pack_items(V, "dot"), "k": 2, "seen": seen}))
