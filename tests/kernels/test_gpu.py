"""Triton sampling, row updates, top-k and whole steps against the reference, on a GPU or in the interpreter."""

import math

import pytest
import torch

pytest.importorskip("triton", reason="Triton is available on Linux only")

from drm_triton.kernels import gpu, reference
from drm_triton.kernels.gpu import topk, update
from drm_triton.kernels.protocol import ListPlan, Objective

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def random_plan(rho, eta, seed=0, user_sampling="proportional", users=23, items=50, share=1, device=DEVICE):
    """Users of every kind: none, one, nearly all and all items."""
    draw = torch.Generator().manual_seed(1)
    dense = torch.rand(users, items, generator=draw) < torch.rand(users, 1, generator=draw)
    dense[0], dense[1], dense[2], dense[2, 7] = False, True, True, False
    dense[3], dense[3, 11] = False, True
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), dense.sum(1).cumsum(0)])
    indices = dense.nonzero()[:, 1].to(torch.int32)
    return ListPlan(indptr.to(device), indices.to(device), items, rho, eta, seed, user_sampling, share)


# ---------------------------------------------------------------------------------------------------------------
# Sampling: bit for bit


@pytest.mark.parametrize("user_sampling", ["proportional", "uniform"])
@pytest.mark.parametrize(
    ("rho", "eta", "seed", "epoch"), [(3, 45, 0, 0), (1, 15, 2**62 + 12345, 1), (5, 75, 7, 2**30 + 1), (6, 3, 1, 16)]
)
@pytest.mark.parametrize("share", [1, 5])
def test_samples_are_those_of_the_reference(user_sampling, rho, eta, seed, epoch, share):
    plan = random_plan(rho, eta, seed, user_sampling, share=share)
    same = random_plan(rho, eta, seed, user_sampling, share=share, device="cpu")
    for start, stop in ((0, 33), (plan.n_lists - 1, plan.n_lists), (5, 5)):
        users, items = gpu.sample_lists(plan, epoch, start, stop)
        expected_users, expected_items = (
            reference.sample_lists(same, epoch, start, stop) if stop > start else (users, items)
        )
        assert users.dtype == items.dtype == torch.int32
        assert torch.equal(users.cpu(), expected_users.cpu())
        assert torch.equal(items.cpu(), expected_items.cpu())


def test_a_batch_does_not_change_the_lists():
    plan = random_plan(2, 5)
    whole = gpu.sample_lists(plan, 3, 10, 50)
    parts = [gpu.sample_lists(plan, 3, a, b) for a, b in ((10, 27), (27, 28), (28, 50))]
    assert torch.equal(whole[0], torch.cat([users for users, _ in parts]))
    assert torch.equal(whole[1], torch.cat([items for _, items in parts]))


# ---------------------------------------------------------------------------------------------------------------
# Row updates


@pytest.mark.parametrize("score", ["dot", "l2"])
@pytest.mark.parametrize(
    ("d", "batch", "n"), [(1, 1, 1), (3, 4, 9), (16, 3, 20), (50, 2, 17), (64, 5, 7), (100, 1, 40), (128, 2, 8)]
)
def test_update_rows(score, d, batch, n):
    draw = torch.Generator().manual_seed(d)
    table, X = torch.randn(11, d, generator=draw) / d**0.5, torch.randn(6, d, generator=draw) / d**0.5
    state = torch.rand(11, d, generator=draw)
    state[4] = 0
    rows = torch.randint(10, (batch * n,), generator=draw, dtype=torch.int32)  # row 10 is never touched
    coef = torch.randn(batch * n, generator=draw)
    coef[::3] = 0
    source = torch.randint(6, (batch,), generator=draw, dtype=torch.int32)
    expected, expected_state = table.double(), state.double()
    reference.update_rows(expected, expected_state, rows, coef.double(), X.double(), source, 0.1, score)
    first = None
    for _ in range(2):
        moved, new_state = table.clone().to(DEVICE), state.clone().to(DEVICE)
        rest = [x.to(DEVICE) for x in (rows, coef, X, source)]
        copies = [x.clone() for x in rest]
        gpu.update_rows(moved, new_state, *rest, 0.1, score)
        assert all(torch.equal(a, b) for a, b in zip(rest, copies, strict=True)), "an input changed"
        assert torch.allclose(moved.double().cpu(), expected, rtol=2e-5, atol=2e-6)
        assert torch.allclose(new_state.double().cpu(), expected_state, rtol=2e-5, atol=2e-6)
        assert torch.equal(moved[10].cpu(), table[10])
        first = moved if first is None else first
    assert torch.equal(first, moved), "a step must give the same bits each time"


def test_a_row_with_many_entries_and_no_entry_at_all():
    table, state = torch.full((2, 4), 0.1, device=DEVICE), torch.zeros(2, 4, device=DEVICE)
    X, source = torch.ones(1, 4, device=DEVICE), torch.zeros(1, dtype=torch.int32, device=DEVICE)
    gpu.update_rows(table, state, torch.empty(0, dtype=torch.int32, device=DEVICE), X[0, :0], X, source[:0], 1.0, "dot")
    assert (table == 0.1).all()
    rows = torch.ones(1000, dtype=torch.int32, device=DEVICE)
    gpu.update_rows(table, state, rows, torch.full((1000,), 0.5, device=DEVICE), X, source, 1.0, "dot")
    assert state.tolist() == [[0.0] * 4, [250000.0] * 4]
    # 0.1 - 1 = -0.9 in each of 4 factors, then onto the unit ball
    assert table[1].tolist() == pytest.approx([-0.5] * 4)


def test_entries_outside_the_tables_reach_no_memory_but_theirs(monkeypatch):
    """What a GPU does, where the host does not look at values: NaN for an unknown source, an assertion for a row."""
    monkeypatch.setattr(update, "check_update", lambda *_, **__: None)
    large = torch.full((6, 4), 0.5, device=DEVICE)  # the table and its state are the middle of larger ones
    large_state, X = torch.ones_like(large), torch.full((2, 4), 0.25, device=DEVICE)
    coef = torch.ones(3, device=DEVICE)

    def step(rows, source):
        ids = [torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in (rows, source)]
        gpu.update_rows(large[2:4], large_state[2:4], ids[0], coef, X, ids[1], 0.1, "dot")

    step([0, 1, 1], [0, 2, 1])
    assert large.isnan().any(1).tolist() == [False, False, False, True, False, False]
    large.fill_(0.5)
    if DEVICE == "cpu":  # on a GPU a failed assertion ends the process's use of it
        for row in (-1, 2):
            with pytest.raises(RuntimeError, match=r"update_rows: rows must be in \[0, 2\)"):
                step([0, row, 0], [0, 1, 1])
        assert (large[[0, 1, 3, 4, 5]] == 0.5).all()


# ---------------------------------------------------------------------------------------------------------------
# Top-k


def check_top_k(queries, V, k, score, seen_dense=None, exact=False):
    seen = None
    if seen_dense is not None:
        indptr = torch.cat([torch.zeros(1, dtype=torch.int64), seen_dense.sum(1).cumsum(0)])
        # Offset by rows of others, as in a slice of a larger mask.
        seen = (indptr + 3, torch.cat([torch.zeros(3), seen_dense.nonzero()[:, 1]]).to(torch.int32))
    on_device = None if seen is None else tuple(x.to(DEVICE) for x in seen)
    items, scores = gpu.top_k(queries.to(DEVICE), V.to(DEVICE), k, score, on_device)
    items, scores = items.cpu(), scores.cpu()
    expected_items, expected = reference.top_k(queries.double(), V.double(), k, score, seen)
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
    # The right scores in the right order: items of equal score within rounding may change places.
    scale = (queries.norm(dim=1).max() + V.norm(dim=1).max()).item() ** 2
    assert (scores.double() - expected)[found].abs().max() <= 1e-6 * scale
    full = reference.list_scores(queries.double(), V.double(), torch.arange(len(queries)), items.clamp(min=0), score)
    assert (full - expected)[found].abs().max() <= 1e-6 * scale
    for row, mine in zip(items, found, strict=True):
        assert len(set(row[mine].tolist())) == mine.sum()


@pytest.mark.parametrize("score", ["dot", "l2"])
@pytest.mark.parametrize(
    ("m", "n_items", "d", "k"), [(1, 5, 3, 2), (3, 64, 16, 64), (65, 200, 50, 1), (2, 700, 100, 10), (1, 40, 1, 100)]
)
def test_top_k(score, m, n_items, d, k):
    draw = torch.Generator().manual_seed(m)
    queries, V = torch.randn(m, d, generator=draw), torch.randn(n_items, d, generator=draw)
    dense = torch.rand(m, n_items, generator=draw) < torch.rand(m, 1, generator=draw)
    dense[0] = torch.arange(n_items) % 3 == 0
    dense[-1] |= m > 1  # nothing left for the last of several
    check_top_k(queries, V, k, score)
    check_top_k(queries, V, k, score, dense)


@pytest.mark.parametrize("kind", ["equal", "ascending", "descending", "zeros"])
def test_top_k_of_whole_numbers_is_exact(kind):
    """Exact ties go to the lower index; items in ascending order are the most work: every one passes the threshold."""
    n_items = 600
    value = {
        "equal": torch.ones(n_items),
        "ascending": torch.arange(n_items) // 3,
        "descending": -(torch.arange(n_items) // 3),
        "zeros": torch.where(torch.arange(n_items) % 2 == 0, -0.0, 0.0),
    }[kind]
    V = value.float()[:, None] * torch.tensor([[1.0, 0.0]])
    dense = (torch.arange(n_items) % 7 < 2)[None].expand(2, -1)
    check_top_k(torch.ones(2, 2), V, 5, "dot", dense, exact=True)


def test_top_k_in_turns_and_splits(monkeypatch):
    """Little scratch memory makes the queries wait in turns; few queries split the items."""
    draw = torch.Generator().manual_seed(0)
    queries = torch.randint(-3, 4, (130, 4), generator=draw).float()
    V = torch.randint(-3, 4, (300, 4), generator=draw).float()
    dense = torch.rand(130, 300, generator=draw) < 0.2
    monkeypatch.setattr(topk, "SCRATCH", 1)
    check_top_k(queries, V, 9, "dot", dense, exact=True)
    many = torch.randint(-3, 4, (2500, 4), generator=draw).float()
    check_top_k(queries[:2], many, 9, "l2", torch.rand(2, 2500, generator=draw) < 0.3, exact=True)


def test_top_k_of_a_thousand():
    draw = torch.Generator().manual_seed(0)
    queries, V = torch.randn(2, 8, generator=draw), torch.randn(1500, 8, generator=draw)
    check_top_k(queries, V, 1000, "dot")


# ---------------------------------------------------------------------------------------------------------------
# Whole steps


@pytest.mark.parametrize("score", ["dot", "l2"])
def test_fifty_steps(score):
    """Sample, gradients, both updates, 50 times: within 1e-4 of the reference in float64.

    The Adagrad state starts at 0.01: from 0, the first step moves a factor by lr however small its gradient, and
    rounding decides the direction of those that vanish.
    """
    plan, same = random_plan(2, 6), random_plan(2, 6, device="cpu")
    objective = Objective(2, score, tau=0.5, lam=0.5, weight="ndcg")
    draw = torch.Generator().manual_seed(5)
    U, V = torch.randn(23, 8, generator=draw) / 3, torch.randn(50, 8, generator=draw) / 3
    start = (U, torch.full_like(U, 0.01), V, torch.full_like(V, 0.01))
    tables, expected = [x.clone().to(DEVICE) for x in start], [x.double() for x in start]
    batch = 4
    losses = []
    for number in range(50):
        epoch, part = divmod(number, plan.n_lists // batch)
        bounds = (epoch, part * batch, (part + 1) * batch)
        losses.append(step(gpu, plan, *bounds, *tables, objective))
        step(reference, same, *bounds, *expected, objective)
    for actual, right in zip(tables, expected, strict=True):
        assert (actual.double().cpu() - right).abs().max() <= 1e-4 * right.abs().max()
    assert sum(losses[-10:]) < 0.9 * sum(losses[:10]), "and it learns"


def step(backend, plan, epoch, start, stop, U, U_state, V, V_state, objective):
    users, items = backend.sample_lists(plan, epoch, start, stop)
    result = backend.list_gradients(U, V, users, items, objective)
    backend.update_rows(V, V_state, items.flatten(), result.g.flatten(), U, users, 0.05, objective.score)
    own = torch.arange(len(users), dtype=torch.int32, device=users.device)
    backend.update_rows(U, U_state, users, torch.ones_like(result.loss), result.user_grad, own, 0.05, "dot")
    return result.loss.mean().item()


# ---------------------------------------------------------------------------------------------------------------
# Tables of more than 2^31 elements


def test_offsets_beyond_32_bits(monkeypatch):
    """The last rows of a table of 2^31 + 512 elements; untouched, its memory is only reserved."""
    if DEVICE == "cpu":
        from triton.runtime.interpreter import GridExecutor

        # The interpreter copies every argument back onto itself, which would touch all 8 GiB.
        monkeypatch.setattr(GridExecutor, "_restore_args_dev", lambda *_: None)
    elif torch.cuda.get_device_properties(0).total_memory < 20 << 30:
        pytest.skip("needs 18 GiB of GPU memory")
    d, rows = 64, 2**25 + 8
    small = torch.randn(8, d, generator=torch.Generator().manual_seed(0)).to(DEVICE) / 10
    table, state = torch.empty(rows, d, device=DEVICE), torch.empty(rows, d, device=DEVICE)
    table[-8:], state[-8:] = small, 1.0
    users = torch.tensor([3], dtype=torch.int32, device=DEVICE)
    items = torch.tensor([[0, 7, 2, 5, 5]], dtype=torch.int32, device=DEVICE)
    far = 2**25
    large = gpu.list_gradients(table, table, users + far, items + far, Objective(2, hinge=False))
    near = gpu.list_gradients(small, small, users, items, Objective(2, hinge=False))
    assert torch.equal(large.scores, near.scores)
    assert torch.equal(large.user_grad, near.user_grad)
    moved, moved_state = small.clone(), torch.ones_like(small)
    gpu.update_rows(moved, moved_state, items.flatten(), near.g.flatten(), small, users, 0.1, "l2")
    gpu.update_rows(table, state, items.flatten() + far, near.g.flatten(), small, users, 0.1, "l2")
    assert torch.equal(table[-8:], moved)
    assert torch.equal(state[-8:], moved_state)
