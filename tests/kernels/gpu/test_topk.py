"""Triton top-k against the reference in float64."""

import math
from unittest import mock

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is available on Linux only")

from drm_triton.kernels import gpu, reference
from drm_triton.kernels.gpu import filter, topk
from drm_triton.kernels.gpu.filter import BLOCK_M, GROUP, pack_queries, to_bytes
from drm_triton.names import Score
from tests.kernels.gpu.conftest import DEVICE, int32


def assert_top_k(
    queries: Tensor, V: Tensor, k: int, score: Score, seen_matrix: Tensor | None = None, exact: bool = False
) -> None:
    """Compare the k best items with those of the reference; `seen_matrix` is bool [m, N]."""
    seen = on_device = None
    if seen_matrix is not None:
        indptr = torch.cat([torch.zeros(1, dtype=torch.int64), seen_matrix.sum(1).cumsum(0)])
        # Three items of other rows come first, as in a slice of a larger matrix.
        seen = (indptr + 3, torch.cat([torch.zeros(3), seen_matrix.nonzero()[:, 1]]).to(torch.int32))
        on_device = (seen[0].to(DEVICE), seen[1].to(DEVICE))
    packed = gpu.pack_items(V.to(DEVICE), score)
    items, scores = (x.cpu() for x in gpu.top_k(queries.to(DEVICE), packed, k, on_device))
    expected_items, expected = reference.top_k(queries.double(), reference.pack_items(V.double(), score), k, seen)
    assert items.dtype == torch.int32
    assert items.shape == scores.shape == (len(queries), k)
    if exact:
        assert torch.equal(items, expected_items)
        assert torch.equal(scores.double(), expected)
        return
    found = expected_items >= 0
    assert found.any()
    assert torch.equal(items >= 0, found)
    assert (scores[~found] == -math.inf).all()
    # The right scores in the right order. Items whose scores are equal within rounding may change places.
    scale = (queries.norm(dim=1).max() + V.norm(dim=1).max()).item() ** 2
    assert (scores.double() - expected)[found].abs().max() <= 1e-6 * scale
    every = torch.arange(len(queries))
    again = reference.list_scores(queries.double(), V.double(), every, items.clamp(min=0), score)
    assert (again - expected)[found].abs().max() <= 1e-6 * scale
    for row, mine in zip(items, found, strict=True):
        assert len(set(row[mine].tolist())) == mine.sum()


@pytest.mark.parametrize(
    ("score", "m", "n_items", "d", "k"),
    [
        *((score, *sizes) for score in ("dot", "l2") for sizes in ((1, 5, 3, 2), (3, 64, 16, 64), (1, 40, 1, 100))),
        ("l2", 2, 500, 100, 10),
        pytest.param("dot", 65, 70, 20, 1, marks=pytest.mark.slow),
    ],
)
def test_top_k(score: Score, m: int, n_items: int, d: int, k: int) -> None:
    draw = torch.Generator().manual_seed(m)
    queries, V = torch.randn(m, d, generator=draw), torch.randn(n_items, d, generator=draw)
    seen = torch.rand(m, n_items, generator=draw) < torch.rand(m, 1, generator=draw)
    seen[0] = torch.arange(n_items) % 3 == 0
    seen[-1] |= m > 1  # the last of several queries has seen everything
    assert_top_k(queries, V, k, score)
    assert_top_k(queries, V, k, score, seen)


@pytest.mark.parametrize("kind", ["equal", "ascending", "descending", "zeros"])
def test_top_k_of_whole_numbers_is_exact(kind: str) -> None:
    """Ties go to the lower index. In ascending order every item passes the threshold, which is the most work.

    514 items are not seen, more than a buffer holds.
    """
    index = torch.arange(600)
    value = {
        "equal": torch.ones(600),
        "ascending": index // 3,
        "descending": -(index // 3),
        "zeros": torch.where(index % 2 == 0, -0.0, 0.0),
    }[kind]
    V = value.float()[:, None] * torch.tensor([[1.0, 0.0]])
    seen = (index % 7 == 1)[None].expand(2, -1)
    assert_top_k(torch.ones(2, 2), V, 5, "dot", seen, exact=True)


def test_several_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = torch.Generator().manual_seed(0)
    queries = torch.randint(-3, 4, (BLOCK_M + 1, 4), generator=draw).float()
    V = torch.randint(-3, 4, (70, 4), generator=draw).float()
    monkeypatch.setattr(topk, "BUFFER_BYTES", 1)
    assert_top_k(queries, V, 9, "l2", torch.rand(len(queries), len(V), generator=draw) < 0.2, exact=True)


def test_several_blocks_of_groups() -> None:
    draw = torch.Generator().manual_seed(0)
    queries = torch.randint(-3, 4, (2, 4), generator=draw).float()
    V = torch.randint(-3, 4, (2100, 4), generator=draw).float()
    assert_top_k(queries, V, 9, "l2", torch.rand(2, 2100, generator=draw) < 0.05, exact=True)


def test_top_k_of_a_thousand() -> None:
    draw = torch.Generator().manual_seed(0)
    queries, V = torch.randn(2, 8, generator=draw), torch.randn(1200, 8, generator=draw)
    assert_top_k(queries, V, 1000, "dot")


def adversarial(kind: str, rows: int, d: int, seed: int) -> Tensor:
    """Return rows whose scores are hard to tell apart by estimates."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, d, generator=draw)
    if kind == "norms":  # from tiny to huge, next to each other
        return x * 10.0 ** torch.randint(-18, 18, (rows, 1), generator=draw)
    if kind == "denormal":
        return x * 1e-40
    if kind == "tiny":  # products are denormal, or 0
        return x * 10.0 ** torch.randint(-25, -18, (rows, 1), generator=draw)
    if kind == "huge":  # squares are near the largest float
        return x * 1e17
    if kind == "close":  # equal but for the last bits
        return torch.ones(rows, d) * x[:1] + 1e-6 * x
    if kind == "outlier":  # one factor is so large that the bytes of the others are 0
        x[:, 0] = 1000.0
    if kind == "ties":
        return torch.randint(-1, 2, (rows, d), generator=draw).float()
    if kind == "zeros":
        x[::3] = 0
    return x


KINDS = ["normal", "norms", "denormal", "tiny", "huge", "close", "outlier", "ties", "zeros"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_filter_misses_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits as when every item is scored."""
    scores_of: tuple[Score, ...] = ("dot", "l2")
    for score in scores_of:
        queries, V = adversarial(kind, 3, 12, 0).to(DEVICE), adversarial(kind, 300, 12, 1).to(DEVICE)
        packed, seen = gpu.pack_items(V, score), (torch.tensor([0, 2, 2, 3], device=DEVICE), int32(7, 150, 299))
        items, scores = gpu.top_k(queries, packed, 5, seen)
        with monkeypatch.context() as patched:
            patched.setattr(topk, "pack_queries", lambda rows, _: pack_queries(rows, math.inf))
            every_item, every_score = gpu.top_k(queries, packed, 5, seen)
        assert torch.equal(items, every_item)
        assert torch.equal(scores, every_score)


@pytest.mark.parametrize("d", [5, 16, 40, 150])
@pytest.mark.parametrize("score", ["dot", "cosine", "l2"])
def test_the_filter_for_sm_75_finds_the_same(score: Score, d: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It multiplies bytes as floats, whose sums are exact for so few factors."""
    queries, V = adversarial("normal", 3, d, 0).to(DEVICE), adversarial("normal", 150, d, 1).to(DEVICE)
    if score == "cosine":
        V = torch.nn.functional.normalize(V, dim=1)
    packed, seen = gpu.pack_items(V, score), (torch.tensor([0, 2, 2, 3], device=DEVICE), int32(7, 100, 149))
    estimates: list[Tensor] = []

    def kept(rounded: filter.ByteRows, items: filter.ItemLayout, score: Score, out: Tensor) -> None:
        filter.estimate_groups(rounded, items, score, out)
        estimates.append(out.clone())

    monkeypatch.setattr(topk, "estimate_groups", kept)
    items, scores = gpu.top_k(queries, packed, 5, seen)
    asked = mock.Mock(return_value=False)
    monkeypatch.setattr(filter, "multiplies_bytes", asked)
    items_of_floats, scores_of_floats = gpu.top_k(queries, packed, 5, seen)
    asked.assert_called_once()
    assert torch.equal(items, items_of_floats)
    assert torch.equal(scores, scores_of_floats)
    assert torch.equal(*estimates)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("score", ["dot", "l2"])
def test_no_score_differs_from_its_estimate_by_more_than_the_slack(kind: str, score: str) -> None:
    """The bound of `filter`, for scores and estimates in float32."""
    d, c = 24, 2 if score == "l2" else 1
    queries, V = adversarial(kind, 40, d, 0), adversarial(kind, 400, d, 1)
    items, rounded = to_bytes(V, GROUP), pack_queries(queries, V.double().norm(dim=1).max().item())
    unit = c * rounded.scale[:, None] * items.scale.repeat_interleave(GROUP)[None, :]
    estimate = (rounded.codes.double() @ items.codes.double().T).float() * unit
    exact = queries @ V.T
    if score == "l2":
        exact = -(queries[:, None] - V[None]).square().sum(2)
        estimate = estimate - V.square().sum(1) - queries.square().sum(1)[:, None]
    error, norm = (x.double().repeat_interleave(GROUP)[None, :] for x in (items.error, items.norm))
    query_error, query_norm = rounded.error.double()[:, None], rounded.norm.double()[:, None]
    size = (query_norm + norm + error) ** 2 if score == "l2" else query_norm * (norm + error)
    slack = c * (query_norm * error + query_error * norm) + (d + 16) * (2.0**-21 * size + 1e-33)
    difference = (exact.double() - estimate.double()).abs()
    filtered = (query_error < math.inf).expand_as(difference)
    assert filtered.any()
    assert (difference <= slack)[filtered].all()
    if kind == "normal":  # rounding to bytes is much of the slack, and estimates are of use
        assert difference.max() > 0.1 * slack.max()
        assert slack.max() < exact.abs().max() / 4
