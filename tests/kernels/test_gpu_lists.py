"""Triton list gradients and soft top-K against the reference in float64, on a GPU or in the interpreter.

Scores of float32 tables are compared as float64 results of the same float32 inputs.
"""

import math
import zlib

import pytest
import torch

pytest.importorskip("triton", reason="Triton is available on Linux only")

from drm_triton.kernels import gpu, reference
from drm_triton.kernels.gpu import gradients, softsort
from drm_triton.kernels.protocol import Objective

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WEIGHTS = ("uniform", "precision", "recall", "ndcg", "ap")
EPS = {torch.float32: 2.0**-24, torch.float64: 2.0**-53}


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    """Fill fresh outputs with NaN, so that an entry a kernel does not write shows."""
    for name in ("empty", "empty_like"):
        make = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *a, _make=make, **k: fill_with_nan(_make(*a, **k)))
    make = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *a, **k: fill_with_nan(make(*a, **k)))


def fill_with_nan(x):
    return x.fill_(math.nan if x.is_floating_point() else -(2**31) + 1)


def generator(*key):
    return torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))


def tolerance(dtype, n, k, spread, tau):
    """Relative error allowed for results of lists whose scores lie within `spread`.

    Rounding the logits (2 R + (2k - 1) s) / tau, whose terms are of size up to 2 k * spread / tau where P_k is not 0,
    moves P by that share of eps; sums of n terms and ten operations add the rest. The terms of the reference itself, in
    float64, are of size n * spread / tau.
    """
    return EPS[dtype] * (10 + n**0.5 + 2 * k * spread / tau) + EPS[torch.float64] * n * spread / tau


def assert_close(actual, expected, allowed, what, floor=0.0):
    """Largest difference against the largest entry, or `floor`: single entries may cancel to nearly nothing."""
    assert torch.isfinite(actual).all(), f"{what}: not finite"
    error = (actual.double().cpu() - expected.cpu()).abs().max().item()
    scale = max(floor, expected.abs().max().item())
    assert error <= allowed * scale, f"{what}: error {error:.2e} of {scale:.2e}, allowed {allowed:.1e}"


# ---------------------------------------------------------------------------------------------------------------
# Soft top-K and DRM on given scores

# n, k, batch, tau, dtype; n = 2 .. 70 with k = 1, n or between, and around the tile sizes 16 .. 128 of the short kernel
SHORT = [
    (n, (1, n, (n + 1) // 2)[n % 3], 1 + n % 2, (0.1, 1.0, 10.0)[n % 3 - n % 2], torch.float32) for n in range(2, 71)
]
SHORT += [(n, min(n, 3), 2, 1.0, torch.float64) for n in (2, 16, 17, 33)]
SHORT += [(100, 100, 1, 3.0, torch.float32), (100, 1, 2, 0.3, torch.float64), (128, 5, 2, 1.0, torch.float32)]
LONG = [(129, 4, 2, 1.0, torch.float32), (256, 256, 1, 10.0, torch.float32), (256, 1, 1, 0.5, torch.float64)]
LONG += [(1000, 10, 1, 5.0, torch.float32), (1000, 1, 1, 1.0, torch.float32), (1000, 1000, 1, 10.0, torch.float32)]
# every K of 1, the middle and n at some lengths of the short kernel
SHORT += [(n, k, 1, 1.0, torch.float32) for n in (16, 48, 70) for k in (1, n // 2, n)]


def random_scores(n, batch, dtype, *key):
    return torch.randn(batch, n, generator=generator(n, batch, *key), dtype=torch.float64).to(dtype)


def check_softsort(s, k, tau, mask, key):
    batch, n = s.shape
    draw = generator("rest", key)
    w = torch.rand(batch, k, generator=draw, dtype=torch.float64).to(s.dtype)
    y = torch.randint(0, 3, (batch, n), generator=draw).to(s.dtype)
    q = torch.randn(batch, n, generator=draw, dtype=torch.float64).to(s.dtype)
    padded = torch.where(mask, s, math.nan)  # what lies under the mask must not matter
    inputs = [x.to(DEVICE) for x in (padded, w, y, q, mask)]
    before = [x.clone() for x in inputs]
    s_, w_, y_, q_, mask_ = inputs
    Q = gpu.soft_topk_forward(s_, w_, tau, mask_)
    ds = gpu.soft_topk_backward(s_, w_, tau, mask_, q_)
    loss, gradient = gpu.drm_lists(s_, y_, w_, tau, mask_)
    assert all(torch.equal(a, b) for a, b in zip(inputs[1:], before[1:], strict=True)), "an input changed"
    assert torch.equal(s_.isnan(), before[0].isnan())
    s64, w64, y64, q64 = (x.double() for x in (torch.where(mask, s, 0), w, y, q))
    live = s[mask].double()
    allowed = tolerance(s.dtype, n, k, (live.max() - live.min()).item(), tau)
    assert_close(Q, reference.soft_topk_forward(s64, w64, tau, mask), allowed, "Q")
    expected_loss, expected = reference.drm_lists(s64, y64, w64, tau, mask)
    assert_close(loss, expected_loss, allowed, "loss")
    # A gradient sums terms (1 - 2k) dz of either sign that may cancel: the scale is that of its terms.
    for actual, reference_, upstream, what in (
        (gradient, expected, 2 * (y64 - reference.soft_topk_forward(s64, w64, tau, mask)), "drm gradient"),
        (ds, reference.soft_topk_backward(s64, w64, tau, mask, q64), q64, "soft top-k gradient"),
    ):
        scale = max(1, min(k, n / 4)) * upstream.abs().max().item() * w64.sum(1).max().item() / tau
        error = (actual.double().cpu() - reference_).abs().max().item()
        assert error <= allowed * scale, f"{what}: error {error:.2e} of terms {scale:.2e}, allowed {allowed:.1e}"
        assert (actual.cpu()[~mask] == 0).all()
    assert (Q.cpu()[~mask] == 0).all()


@pytest.mark.parametrize(("n", "k", "batch", "tau", "dtype"), SHORT + LONG)
def test_soft_topk_and_drm(n, k, batch, tau, dtype):
    s = random_scores(n, batch, dtype, k)
    mask = torch.ones(batch, n, dtype=torch.bool)
    if n % 2:
        mask = torch.rand(batch, n, generator=generator("mask", n)) < 0.7
        mask[:, 0] = True
    check_softsort(s, k, tau, mask, (n, k))


def test_a_list_of_4096():
    s, w = random_scores(4096, 1, torch.float32), torch.ones(1, 3)
    y, mask = (s > 2).float(), torch.ones(1, 4096, dtype=torch.bool)
    loss, gradient = gpu.drm_lists(*(x.to(DEVICE) for x in (s, y, w)), 100.0, mask.to(DEVICE))
    expected_loss, expected = reference.drm_lists(s.double(), y.double(), w.double(), 100.0, mask)
    allowed = tolerance(torch.float32, 4096, 3, (s.max() - s.min()).item(), 100.0)
    assert_close(loss, expected_loss, allowed, "loss")
    assert_close(gradient, expected, allowed, "gradient")


@pytest.mark.parametrize("n", [9, 40, 140])
@pytest.mark.parametrize("kind", ["equal", "ties", "huge", "tiny"])
def test_hard_scores(n, kind):
    s = random_scores(n, 1, torch.float32, kind)
    tau = 1.0
    if kind == "equal":
        s[:] = 0.25
    elif kind == "ties":
        s = s.round()
    elif kind == "huge":
        s, tau = s * 1e6, 1e6
    else:
        s = s * 1e-30
    check_softsort(s, min(n, 5), tau, torch.ones(1, n, dtype=torch.bool), (n, kind))


@pytest.mark.parametrize("n", [48, 140])
def test_scores_with_a_common_offset(n):
    """The relaxation does not feel a constant: an offset of 1000 costs what rounding (2k - 1) * 1000 does."""
    s = random_scores(n, 2, torch.float32, "offset") + 1000
    y, w, mask = (s > 1001).float(), torch.ones(2, 3), torch.ones(2, n, dtype=torch.bool)
    want_loss, want = reference.drm_lists(s.double(), y.double(), w.double(), 0.5, mask)
    for backend, device in ((gpu, DEVICE), (reference, "cpu")):
        loss, gradient = backend.drm_lists(*(x.to(device) for x in (s, y, w)), 0.5, mask.to(device))
        allowed = 5 * 1000 * EPS[torch.float32] / 0.5
        assert_close(loss, want_loss, allowed, "loss")
        assert_close(gradient, want, allowed, "gradient")


def test_one_ranking_by_far_is_the_hard_one():
    s = torch.tensor([[3.0, -5.0, 100.0, 7.0]], device=DEVICE) * 1e4
    Q = gpu.soft_topk_forward(
        s, torch.ones(1, 2, device=DEVICE), 0.1, torch.ones(1, 4, dtype=torch.bool, device=DEVICE)
    )
    assert Q.tolist() == [[0.0, 0.0, 1.0, 1.0]]


def test_transposed_and_expanded_inputs():
    s = random_scores(6, 10, torch.float32, "t").to(DEVICE).T.contiguous().T
    w = torch.tensor([0.5, 2.0], device=DEVICE).expand(10, 2)
    mask = torch.ones(6, 10, dtype=torch.bool, device=DEVICE).T
    expected = reference.soft_topk_forward(s.double(), w.double(), 1.0, mask)
    assert_close(gpu.soft_topk_forward(s, w, 1.0, mask), expected, 1e-5, "Q")


@pytest.mark.parametrize("n", [5, 140])
def test_a_list_without_live_entries_is_zero(n):
    s, w = torch.full((2, n), math.nan, device=DEVICE), torch.ones(2, 3, device=DEVICE)
    mask = torch.zeros(2, n, dtype=torch.bool, device=DEVICE)
    mask[1], s[1] = True, 0.5
    loss, gradient = gpu.drm_lists(s, torch.ones_like(s), w, 1.0, mask)
    assert gpu.soft_topk_forward(s, w, 1.0, mask)[0].tolist() == [0.0] * n
    assert loss[0] == 0
    assert loss[1] > 0
    assert gradient[0].tolist() == [0.0] * n


def test_no_list_at_all():
    s, w = torch.zeros(0, 5, device=DEVICE), torch.zeros(0, 2, device=DEVICE)
    assert gpu.soft_topk_forward(s, w, 1.0, s > 0).shape == (0, 5)


# ---------------------------------------------------------------------------------------------------------------
# List gradients from the factors

# n, d, rho, k, weight, score, tau, parts: n and d in every size class, each weight with each score
PARTS = ({}, {"mse": True}, {"hinge": False}, {"drm": False}, {"hinge": False, "drm": False, "mse": True})
CASES = []
for i, n in enumerate([*range(2, 71), 80, 100]):
    d = (1, 3, 16, 50, 64, 100, 128)[i % 7]
    rho = max(1, min(n - 1, (n // 16, 1, 2, 5)[i % 4]))
    k = (None, 1, n, min(n, rho + 2))[i % 4 - i % 3]
    CASES.append(
        (n, d, rho, k, WEIGHTS[i % 5], ("dot", "l2")[i // 5 % 2], (0.1, 1.0, 10.0)[i % 3], PARTS[i % 5 - i % 2])
    )
CASES += [(150, 50, 9, None, "ap", "l2", 1.0, PARTS[1]), (256, 100, 16, None, "ndcg", "dot", 3.0, {})]
CASES += [(1000, 16, 3, 10, "recall", "dot", 10.0, {}), (300, 200, 4, None, "uniform", "l2", 1.0, PARTS[3])]


def factors(rows, d, *key):
    x = torch.randn(rows, d, generator=generator(rows, d, *key))
    return x / x.norm(dim=1, keepdim=True).clamp(min=1)


def check_gradients(U, V, users, items, objective):
    inputs = [x.to(DEVICE) for x in (U, V, users, items)]
    before = [x.clone() for x in inputs]
    result = gpu.list_gradients(*inputs, objective)
    assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True)), "an input changed"
    expected = reference.list_gradients(U.double(), V.double(), users, items, objective)
    n = items.shape[1]
    spread = (expected.scores.amax() - expected.scores.amin()).item()
    allowed = tolerance(torch.float32, n, objective.K, spread + 1, objective.tau)
    w = 1.0 if objective.weight in ("precision", "recall", "ndcg", "ap") else float(objective.K)
    term = (1 + objective.lam * n / 2 * (1 + w) * w / objective.tau * objective.drm) * max(1, math.log(1 + len(V)))
    for name in ("scores", "hinge", "drm", "mse", "loss"):
        assert_close(getattr(result, name), getattr(expected, name), allowed, name, floor=1.0)
    for name in ("g", "user_grad"):
        error = (getattr(result, name).double().cpu() - getattr(expected, name)).abs().max().item()
        assert error <= allowed * term, f"{name}: error {error:.2e}, terms {term:.2e}, allowed {allowed:.1e}"


@pytest.mark.parametrize(("n", "d", "rho", "k", "weight", "score", "tau", "parts"), CASES)
def test_list_gradients(n, d, rho, k, weight, score, tau, parts):
    U, V = factors(7, d, "U"), factors(90, d, "V")
    draw = generator("items", n, d)
    batch = 1 + n % 2
    users = torch.randint(7, (batch,), generator=draw, dtype=torch.int32)
    items = torch.randint(90, (batch, n), generator=draw, dtype=torch.int32)  # repeats among them: exact ties
    check_gradients(U, V, users, items, Objective(rho, score, k, tau, 0.5, weight, **parts))


@pytest.mark.parametrize("score", ["dot", "l2"])
def test_all_scores_equal(score):
    V = factors(1, 8, "one").expand(40, 8).contiguous()
    items = torch.arange(40, dtype=torch.int32)[None]
    check_gradients(
        factors(2, 8, "two"), V, torch.tensor([1], dtype=torch.int32), items, Objective(3, score, weight="ap")
    )


def test_the_first_of_equals_bears_the_hinge():
    V = torch.tensor([[0.5, 0.0], [0.1, 0.0], [0.1, 0.0], [0.3, 0.0], [0.3, 0.0], [0.2, 0.0]], device=DEVICE)
    U = torch.tensor([[1.0, 0.0]], device=DEVICE)
    items = torch.arange(6, dtype=torch.int32, device=DEVICE)[None]
    users = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    g = gpu.list_gradients(U, V, users, items, Objective(3, drm=False)).g[0].tolist()
    phi = math.log(1 + 6 / 3 * 3)
    assert g == pytest.approx([0, -phi, 0, phi, 0, 0])


def test_rows_beyond_the_tables_are_not_read():
    """The tables are the middle of larger ones whose other rows are NaN."""
    d, guard = 50, 4
    inside = factors(30, d, "guard")
    large = torch.full((30 + 2 * guard, d), math.nan)
    large[guard:-guard] = inside
    V = large.to(DEVICE)[guard:-guard]
    items = torch.tensor([[0, 29, 5, 29, 0]], dtype=torch.int32, device=DEVICE)
    users = torch.tensor([29], dtype=torch.int32, device=DEVICE)
    result = gpu.list_gradients(V, V, users, items, Objective(2))
    expected = gpu.list_gradients(inside.to(DEVICE), inside.to(DEVICE), users, items, Objective(2))
    assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True))


@pytest.mark.parametrize("n", [8, 140])
@pytest.mark.parametrize("score", ["dot", "l2"])
@pytest.mark.parametrize(("name", "value"), [("items", -1), ("items", 30), ("users", -2), ("users", 30)])
def test_ids_outside_the_tables_are_not_read_and_show(n, score, name, value, monkeypatch):
    """What a GPU does, where the host does not look at values: the rows beside the tables count as NaN, unread."""
    monkeypatch.setattr(gradients, "check_lists", lambda *_, **__: None)
    large = torch.full((34, 5), 0.1, device=DEVICE)  # finite on both sides: a read there would go unnoticed below
    table = large[2:-2]
    table.copy_(factors(30, 5, "inside"))
    ids = {
        "users": torch.arange(3, dtype=torch.int32, device=DEVICE),
        "items": (torch.arange(3 * n, dtype=torch.int32, device=DEVICE) % 30).view(3, n),
    }
    want = gpu.list_gradients(table, table, ids["users"], ids["items"], Objective(2, score))
    ids[name][1 if name == "users" else (1, 3)] = value
    got = gpu.list_gradients(table, table, ids["users"], ids["items"], Objective(2, score))
    assert got.scores[1].isnan().sum() == (n if name == "users" else 1)
    for x, y in zip(got, want, strict=True):
        assert torch.equal(x[[0, 2]], y[[0, 2]])
    assert all(x[1].isnan().all() for x in (got.hinge, got.drm, got.loss, got.g, got.user_grad))


def test_lists_around_the_longest_of_the_short_kernel_agree_with_the_tiled_one(monkeypatch):
    s, w = random_scores(100, 2, torch.float64, "both").to(DEVICE), torch.rand(2, 7, dtype=torch.float64, device=DEVICE)
    mask = torch.ones_like(s, dtype=torch.bool)
    short = gpu.drm_lists(s, (s > 0).double(), w, 2.0, mask)
    monkeypatch.setattr(softsort, "MAX_ITEMS", 50)
    tiled = gpu.drm_lists(s, (s > 0).double(), w, 2.0, mask)
    assert torch.allclose(short[0], tiled[0], rtol=1e-12)
    assert torch.allclose(short[1], tiled[1], rtol=1e-9, atol=1e-12)
