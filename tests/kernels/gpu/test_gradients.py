"""Triton list gradients against the reference in float64, from the same float32 factors."""

import math

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is available on Linux only")

from drm_triton.kernels import gpu, reference
from drm_triton.kernels.batches import ListBatch, SharedNegatives
from drm_triton.kernels.gpu import gradients
from drm_triton.kernels.protocol import Objective
from drm_triton.names import LOSSES, Score
from tests.kernels.conftest import share_negatives
from tests.kernels.gpu.conftest import DEVICE, assert_close, factors, generator, int32, tolerance

# n, d, objective: n and d of every size class, each weight with each score, each loss alone
CASES = [
    (2, 1, Objective(1, "dot", tau=0.1)),
    (3, 3, Objective(1, "dot", k=3, weight="precision", mse=True)),
    (5, 16, Objective(2, "l2", k=1, tau=10.0, weight="recall", hinge=False)),
    (9, 50, Objective(5, "l2", tau=0.1, weight="ndcg")),
    (15, 64, Objective(1, "l2", k=15, weight="ap", drm=False)),
    (16, 128, Objective(1, "dot", tau=10.0, weight="ap", hinge=False, drm=False, mse=True)),
    (17, 100, Objective(2, "dot", k=4, tau=0.1, weight="ndcg")),
    (31, 3, Objective(5, "dot", weight="ap")),
    (32, 16, Objective(2, "l2", weight="uniform", mse=True)),
    (33, 1, Objective(3, "l2", k=5, weight="precision", hinge=False)),
    (48, 64, Objective(3, "dot", weight="uniform")),
    (48, 128, Objective(3, "l2", tau=10.0, weight="ap")),
    (64, 100, Objective(4, "dot", k=64, tau=10.0, weight="recall", drm=False)),
    (70, 50, Objective(4, "l2", weight="recall")),
    (100, 64, Objective(5, "dot", k=7, weight="precision", mse=True)),
    (128, 16, Objective(8, "l2", weight="ndcg")),
    (150, 50, Objective(9, "l2", weight="ap", mse=True)),
    pytest.param(256, 100, Objective(16, "dot", tau=3.0, weight="ndcg"), marks=pytest.mark.slow),
    pytest.param(150, 130, Objective(4, "l2", weight="uniform", drm=False), marks=pytest.mark.slow),
    pytest.param(260, 16, Objective(3, "dot", k=10, tau=10.0, weight="recall"), marks=pytest.mark.slow),
    (20, 16, Objective(3, "cosine", hinge=False, drm=False, softmax=True, temperature=0.3)),
    (150, 16, Objective(2, "l2", softmax=True, mse=True)),
    (20, 16, Objective(3, "dot", hinge=False, drm=False, psl=True, temperature=0.3)),
    (150, 16, Objective(2, "l2", hinge=False, drm=False, psl=True, bpr=True, temperature=0.3)),
    *((11, 5, Objective(2, "dot", temperature=0.3, **{part: part == on for part in LOSSES})) for on in LOSSES),
]


def check_gradients(
    U: Tensor, V: Tensor, users: Tensor, items: Tensor, objective: Objective, shared: SharedNegatives | None = None
) -> None:
    """Compare losses and gradients with the reference, which ignores what lists share."""
    inputs = [x.to(DEVICE) for x in (U, V, users, items)]
    before = [x.clone() for x in inputs]
    if shared is not None:
        shared = SharedNegatives(shared.size, shared.items.to(DEVICE), shared.replaced.to(DEVICE))
    result = gpu.list_gradients(inputs[0], inputs[1], ListBatch(inputs[2], inputs[3], shared), objective)
    assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True)), "an input changed"
    expected = reference.list_gradients(U.double(), V.double(), ListBatch(users, items), objective)
    n = items.shape[1]
    spread = (expected.scores.amax() - expected.scores.amin()).item()
    allowed = tolerance(torch.float32, n, objective.K, spread + 1, objective.tau)
    for name in ("scores", *LOSSES, "loss"):
        right = getattr(expected, name)
        assert_close(getattr(result, name), right, allowed, name, max(1.0, right.abs().max().item()))
    w = float(objective.K) if objective.weight == "uniform" else 1.0
    drm = objective.lam * n / 2 * (1 + w) * w / objective.tau if objective.drm else 0.0
    terms = (1 + drm) * max(1, math.log(1 + len(V)))  # size of the terms of a gradient, which may cancel
    assert_close(result.g, expected.g, allowed, "g", terms)
    assert_close(result.user_grad, expected.user_grad, allowed, "user_grad", terms)


@pytest.mark.parametrize(("n", "d", "objective"), CASES)
def test_list_gradients(n: int, d: int, objective: Objective) -> None:
    U, V = factors(7, d, "U"), factors(90, d, "V")
    draw = generator("items", n, d)
    batch = 1 + n % 2
    users = torch.randint(7, (batch,), generator=draw, dtype=torch.int32)
    items = torch.randint(90, (batch, n), generator=draw, dtype=torch.int32)  # repeats among them: exact ties
    check_gradients(U, V, users, items, objective)


# n, d, lists, lists of a group, fraction replaced, objective: short and long lists, small, large and single groups
SHARED_CASES = [
    (46, 64, 5, 32, 0.05, Objective(1, "dot")),
    (20, 16, 21, 18, 0.1, Objective(3, "l2", weight="ap", mse=True)),
    (18, 70, 7, 3, 0.0, Objective(2, "cosine", weight="ndcg", k=5)),
    (33, 3, 4, 2, 1.0, Objective(4, "l2", hinge=False, drm=False, softmax=True, psl=True, bpr=True)),
    (12, 16, 3, 1, 0.5, Objective(2, "dot")),
    (150, 20, 3, 2, 0.1, Objective(2, "dot", tau=0.1)),
]


@pytest.mark.parametrize(("n", "d", "lists", "size", "replaced", "objective"), SHARED_CASES)
def test_shared_negatives(n: int, d: int, lists: int, size: int, replaced: float, objective: Objective) -> None:
    draw = generator("shared", n, d, size)
    U, V = factors(7, d, "U"), factors(400, d, "V")
    users = torch.randint(7, (lists,), generator=draw, dtype=torch.int32)
    groups = -(-lists // size)
    # The items that lists have alone and those that they share are different ones: the scores of an item that were
    # computed in two ways would not tie.
    own = 200 + torch.randint(200, (lists, n), generator=draw, dtype=torch.int32)
    items = torch.randint(200, (groups, n - objective.rho), generator=draw, dtype=torch.int32)
    items, shared = share_negatives(own, items, size, replaced, draw)
    check_gradients(U, V, users, items, objective, shared)


def test_a_shared_row_that_is_not_finite_harms_only_lists_that_have_it() -> None:
    U, V = factors(2, 8, "U").to(DEVICE), factors(9, 8, "V").to(DEVICE)
    V[4, 3] = math.inf
    items = int32([0, 3, 4, 5], [1, 3, 6, 5])
    shared = SharedNegatives(2, int32([3, 4, 5]), torch.tensor([[False] * 3, [False, True, False]], device=DEVICE))
    result = gpu.list_gradients(U, V, ListBatch(int32(0, 1), items, shared), Objective(1))
    expected = gpu.list_gradients(U, V, ListBatch(int32(1), items[1:]), Objective(1))
    assert all(x[0].isnan().all() for x in (result.loss, result.g, result.user_grad))
    for name in ("loss", "g", "user_grad"):
        torch.testing.assert_close(getattr(result, name)[1:], getattr(expected, name))


@pytest.mark.parametrize("score", ["dot", "l2"])
def test_all_scores_equal(score: Score) -> None:
    V = factors(1, 8, "one").expand(40, 8).contiguous()
    users, items = torch.ones(1, dtype=torch.int32), torch.arange(40, dtype=torch.int32)[None]
    check_gradients(factors(2, 8, "two"), V, users, items, Objective(3, score, weight="ap"))


def test_the_first_of_equals_receives_the_hinge() -> None:
    V = torch.tensor([[0.5, 0.0], [0.1, 0.0], [0.1, 0.0], [0.3, 0.0], [0.3, 0.0], [0.2, 0.0]], device=DEVICE)
    U = torch.tensor([[1.0, 0.0]], device=DEVICE)
    g = gpu.list_gradients(U, V, ListBatch(int32(0), int32(range(6))), Objective(3, drm=False)).g[0].tolist()
    phi = math.log(1 + 6 / 3 * 3)
    assert g == pytest.approx([0, -phi, 0, phi, 0, 0])


def test_rows_beyond_the_tables_are_not_read() -> None:
    """The tables are the middle of larger ones whose other rows are NaN."""
    inside = factors(30, 50, "guard").to(DEVICE)
    large = torch.full((38, 50), math.nan, device=DEVICE)
    large[4:-4] = inside
    batch = ListBatch(int32(29), int32([0, 29, 5, 29, 0]))
    result = gpu.list_gradients(large[4:-4], large[4:-4], batch, Objective(2))
    expected = gpu.list_gradients(inside, inside, batch, Objective(2))
    assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True))


@pytest.mark.parametrize(
    ("n", "score", "name", "value"),
    [
        *((8, "dot", name, value) for name, value in (("items", -1), ("items", 30), ("users", -2), ("users", 30))),
        *[(8, "l2", "items", 30), (8, "l2", "users", -2), (140, "dot", "items", -1), (140, "dot", "users", 30)],
    ],
)
def test_ids_outside_the_tables_make_their_list_nan(
    n: int, score: Score, name: str, value: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU the host does not check ids. The kernels do not read such rows and return NaN."""
    monkeypatch.setattr(gradients, "check_lists", lambda *_, **__: None)
    large = torch.full((34, 5), 0.1, device=DEVICE)  # finite beyond the table: a read there would not give NaN
    table = large[2:-2]
    table.copy_(factors(30, 5, "inside"))
    users = torch.arange(3, dtype=torch.int32, device=DEVICE)
    items = (torch.arange(3 * n, dtype=torch.int32, device=DEVICE) % 30).view(3, n)
    expected = gpu.list_gradients(table, table, ListBatch(users, items), Objective(2, score))
    if name == "users":
        users[1] = value
    else:
        items[1, 3] = value
    result = gpu.list_gradients(table, table, ListBatch(users, items), Objective(2, score))
    assert result.scores[1].isnan().sum() == (n if name == "users" else 1)
    for x, y in zip(result, expected, strict=True):
        assert torch.equal(x[[0, 2]], y[[0, 2]])
    assert all(x[1].isnan().all() for x in (result.hinge, result.drm, result.loss, result.g, result.user_grad))
