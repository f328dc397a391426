"""The CPU backend against the float64 reference: sampling, list gradients, updates, whole steps."""

from itertools import pairwise
from typing import get_args

import numba
import numpy as np
import pytest
import torch
from torch import Tensor

from drm_triton.errors import InputError
from drm_triton.kernels import cpu, reference
from drm_triton.kernels.cpu.softsort import PAIRWISE_MAX
from drm_triton.kernels.protocol import ListPlan, Objective
from drm_triton.names import Weight

EPS = 2.0**-23


TWO = min(2, numba.config.NUMBA_NUM_THREADS)


@pytest.fixture(autouse=True)
def restore_threads():
    before = numba.get_num_threads()
    yield
    numba.set_num_threads(before)


@pytest.fixture(params=[1, 2], ids=["1-thread", "2-threads"])
def n_threads(request):
    if request.param > numba.config.NUMBA_NUM_THREADS:
        pytest.skip("needs two cores")
    numba.set_num_threads(request.param)


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    """Fill what torch.empty returns with NaN or a huge integer, so that an output left unwritten is seen."""
    empty = torch.empty

    def poisoned(*args, **kwargs):
        x = empty(*args, **kwargs)
        return x.fill_(float("nan") if x.is_floating_point() else torch.iinfo(x.dtype).max)

    monkeypatch.setattr(torch, "empty", poisoned)


def interactions(seed: int, n_users: int, n_items: int) -> tuple[Tensor, Tensor]:
    """A random CSR, with users of 0, 1, all but one, and all items."""
    rng = np.random.default_rng(seed)
    degree = rng.integers(0, n_items // 2, n_users)
    degree[:4] = [0, 1, n_items - 1, n_items]
    rows = [np.sort(rng.choice(n_items, size, replace=False)) for size in degree]
    indptr = np.concatenate([[0], degree.cumsum()])
    return torch.from_numpy(indptr), torch.from_numpy(np.concatenate(rows).astype(np.int32))


def case(seed: int, B: int, n: int, d: int, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Factors with scores of about `scale`, users and items (repeats allowed) of B lists."""
    g = torch.Generator().manual_seed(seed)
    U, V = torch.randn(7, d, generator=g), torch.randn(2 * n, d, generator=g) * (scale / d**0.5)
    users = torch.randint(0, 7, (B,), generator=g, dtype=torch.int32)
    items = torch.stack([torch.randperm(2 * n, generator=g)[:n] for _ in range(B)]).to(torch.int32)
    return U, V, users, items


def assert_gradients(U: Tensor, V: Tensor, users: Tensor, items: Tensor, objective: Objective) -> None:
    """Compare with the reference in float64, and check that the arguments are left as they were."""
    before = [x.clone() for x in (U, V, users, items)]
    got = cpu.list_gradients(U, V, users, items, objective)
    assert all(torch.equal(x, y) for x, y in zip((U, V, users, items), before, strict=True))
    want = reference.list_gradients(U.double(), V.double(), users, items, objective)
    # Sums of n terms are off by about EPS sqrt(n). A score is off by EPS times its size, and the softmax multiplies
    # that by up to 4 K / tau: nothing of size n is left in the logits of the first K ranks.
    n, size = items.shape[1], want.scores.abs().max().item()
    error = 4 * EPS * (n**0.5 + (4 * objective.K * size / objective.tau if objective.drm else 0))
    for name, x, y in zip(got._fields, got, want, strict=True):
        bound = 8 * EPS if name == "scores" else error
        torch.testing.assert_close(
            x.double(), y, rtol=0, atol=bound * max(y.abs().max().item(), EPS), msg=lambda m, name=name: f"{name}: {m}"
        )


# ------------------------------------------------------------------------------------------------------ sampling


@pytest.mark.parametrize("user_sampling", ["proportional", "uniform"])
@pytest.mark.parametrize(("seed", "epoch"), [(0, 0), (2**33 + 5, 3), (2**63 - 1, 1000)])
@pytest.mark.parametrize(("rho", "eta"), [(1, 1), (3, 45), (5, 7)])
@pytest.mark.parametrize("share", [1, 2, 32])
def test_sampling_is_bit_identical_to_the_reference(user_sampling, seed, epoch, rho, eta, share, n_threads):
    indptr, indices = interactions(1, 60, 90)
    plan = ListPlan(indptr, indices, 90, rho, eta, seed, user_sampling, share)
    users, items = cpu.sample_lists(plan, epoch, 3, min(plan.n_lists, 200))
    want_users, want_items = reference.sample_lists(plan, epoch, 3, min(plan.n_lists, 200))
    assert torch.equal(users, want_users)
    assert torch.equal(items, want_items)


@pytest.mark.parametrize("share", [1, 32])
def test_sampling_does_not_depend_on_the_batches(share, n_threads):
    indptr, indices = interactions(2, 300, 400)
    plan = ListPlan(indptr, indices, 400, 3, 45, seed=9, share=share)
    users, items = cpu.sample_lists(plan, 2, 0, plan.n_lists)
    edges = [0, 1, 2, 65, 200, 201, plan.n_lists]
    parts = [cpu.sample_lists(plan, 2, a, b) for a, b in pairwise(edges)]
    assert torch.equal(torch.cat([part[0] for part in parts]), users)
    assert torch.equal(torch.cat([part[1] for part in parts]), items)


def test_sampling_nothing():
    indptr, indices = interactions(2, 30, 40)
    users, items = cpu.sample_lists(ListPlan(indptr, indices, 40, 2, 3), 0, 5, 5)
    assert users.shape == (0,)
    assert items.shape == (0, 5)


def test_sampling_beyond_the_epoch():
    plan = ListPlan(*interactions(2, 30, 40), 40, 2, 3)
    with pytest.raises(InputError, match=f"sample_lists: an epoch holds {plan.n_lists} lists"):
        cpu.sample_lists(plan, 0, 0, plan.n_lists + 1)
    with pytest.raises(InputError, match="sample_lists: stop must be an integer from 5"):
        cpu.sample_lists(plan, 0, 5, 4)


# ------------------------------------------------------------------------------------------------- list gradients


@pytest.mark.parametrize("n", [*range(2, 71), 100, 256, 1000])
def test_gradients_of_every_length(n):
    rho = min(3, n - 1)
    U, V, users, items = case(n, 4 if n < 256 else 1, n, 16)
    for k in sorted({1, rho, n}):
        assert_gradients(U, V, users, items, Objective(rho, k=k, score=("dot", "l2")[n % 2]))


@pytest.mark.parametrize("d", [1, 3, 16, 50, 64, 100, 128])
@pytest.mark.parametrize("score", ["dot", "l2"])
def test_gradients_of_every_dimension(d, score):
    assert_gradients(*case(d, 40, 48, d, scale=0.3), Objective(3, score=score))


@pytest.mark.parametrize("weight", get_args(Weight))
@pytest.mark.parametrize("score", ["dot", "l2"])
@pytest.mark.parametrize("k", [1, 2, 5, 11])
def test_gradients_of_every_weight(weight, score, k):
    assert_gradients(*case(3, 50, 11, 8), Objective(3, score=score, weight=weight, k=k, lam=0.7))


@pytest.mark.parametrize("tau", [0.1, 0.3, 1.0, 3.0, 10.0])
@pytest.mark.parametrize("scale", [1e-6, 0.1, 1.0, 100.0])
def test_gradients_of_every_temperature_and_size(tau, scale):
    assert_gradients(*case(4, 30, 32, 16, scale), Objective(2, tau=tau))


@pytest.mark.parametrize("parts", [(h, r, m) for h in (0, 1) for r in (0, 1) for m in (0, 1) if h or r or m])
def test_each_part_can_be_switched(parts):
    hinge, drm, mse = map(bool, parts)
    U, V, users, items = case(5, 20, 20, 8)
    objective = Objective(4, hinge=hinge, drm=drm, mse=mse, lam=2.5, margin=0.5)
    assert_gradients(U, V, users, items, objective)
    got = cpu.list_gradients(U, V, users, items, objective)
    assert [bool(x.any()) for x in (got.hinge, got.drm, got.mse)] == [hinge, drm, mse]


@pytest.mark.parametrize("weight", get_args(Weight))
@pytest.mark.parametrize("n", [12, PAIRWISE_MAX + 60])
def test_gradients_with_ties(weight, n):
    # Integer factors make exact ties, among the positives, the negatives and across.
    g = torch.Generator().manual_seed(6)
    U, V = torch.randint(-1, 2, (5, 4), generator=g).float(), torch.randint(-1, 2, (40, 4), generator=g).float()
    users = torch.arange(5, dtype=torch.int32)
    items = torch.randint(0, 40, (5, n), generator=g, dtype=torch.int32)
    assert_gradients(U, V, users, items, Objective(3, weight=weight, tau=2.0))
    assert_gradients(0 * U, V, users, items, Objective(3, weight=weight, mse=True))  # all scores equal


def test_one_list_and_none():
    U, V, users, items = case(7, 1, 48, 64)
    assert_gradients(U, V, users, items, Objective(3))
    got = cpu.list_gradients(U, V, users[:0], items[:0], Objective(3))
    assert [tuple(x.shape) for x in got] == [(0, 48), (0,), (0,), (0,), (0,), (0, 48), (0, 64)]


def test_arguments_need_not_be_contiguous():
    U, V, users, items = case(8, 6, 10, 8)
    strided = [torch.stack([x, x], dim=-1)[..., 0] for x in (U, V, users, items)]
    got, want = cpu.list_gradients(*strided, Objective(2)), cpu.list_gradients(U, V, users, items, Objective(2))
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("n", [8, PAIRWISE_MAX + 60])
def test_a_bad_score_shows_in_the_loss(bad, n):
    U, V, users, items = case(9, 3, n, 4)
    V[items[1, n // 2].long(), 2] = bad
    got = cpu.list_gradients(U, V, users, items, Objective(2, mse=True))
    hit = (items == items[1, n // 2]).any(1)
    for x in (got.hinge, got.drm, got.mse, got.loss, got.g, got.user_grad):
        assert x[hit].isnan().all()
        assert x[~hit].isfinite().all()


def test_gradients_do_not_depend_on_threads_or_batches():
    U, V, users, items = case(10, 300, 48, 64)
    runs = []
    for count in (1, TWO):
        numba.set_num_threads(count)
        runs.append(cpu.list_gradients(U, V, users, items, Objective(3, score="l2")))
    halves = [
        cpu.list_gradients(U, V, users[i:j], items[i:j], Objective(3, score="l2")) for i, j in [(0, 77), (77, 300)]
    ]
    for x, y, first, second in zip(*runs, *halves, strict=True):
        assert torch.equal(x, y)
        assert torch.equal(x, torch.cat([first, second]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda U, V, u, i: (U.double(), V, u, i), "list_gradients: U must be float32, got float64"),
        (lambda U, V, u, i: (U, V[:, :3], u, i), r"list_gradients: V must have shape \[any, 4\], got \[20, 3\]"),
        (lambda U, V, u, i: (U, V, u.long(), i), "list_gradients: users must be int32, got int64"),
        (lambda U, V, u, i: (U, V, u, i[:2]), r"list_gradients: items must have shape \[3, any\], got \[2, 10\]"),
        (lambda U, V, u, i: (U, V, u + 7, i), r"list_gradients: users must be in \[0, 7\)"),
        (lambda U, V, u, i: (U, V, u, i - 20), r"list_gradients: items must be in \[0, 20\)"),
        (lambda U, V, u, i: (U, V, u, i[:, :2]), "list_gradients: a list needs more than rho = 2 items"),
        (lambda U, V, u, i: (U, V, u, i[:, :4]), "list_gradients: k must be at most the list length 4, got 5"),
        (lambda U, V, u, i: (U.to("meta"), V, u, i), "list_gradients: U must be on the CPU, got device meta"),
    ],
)
def test_bad_arguments_of_list_gradients(change, message):
    with pytest.raises(InputError, match=message):
        cpu.list_gradients(*change(*case(11, 3, 10, 4)), Objective(2, k=5))


# --------------------------------------------------------------------------------------------------------- updates


def entries(seed: int, R: int, d: int, B: int, group: int) -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(seed)
    table, state = torch.randn(R, d, generator=g) / d**0.5, torch.rand(R, d, generator=g)
    popular = torch.randint(0, R, (B * group,), generator=g) * torch.randint(0, 2, (B * group,), generator=g)
    coef, X = torch.randn(B * group, generator=g), torch.randn(9, d, generator=g) / d**0.5
    source = torch.randint(0, 9, (B,), generator=g, dtype=torch.int32)
    return table, state, popular.to(torch.int32), coef, X, source


@pytest.mark.parametrize(("R", "B", "group"), [(1, 1, 1), (1, 300, 3), (5, 4, 2), (70, 50, 48), (3000, 700, 48)])
@pytest.mark.parametrize("d", [1, 3, 64])
@pytest.mark.parametrize("score", ["dot", "l2"])
def test_update_against_the_reference(R, B, group, d, score, n_threads):
    table, state, rows, coef, X, source = entries(R, R, d, B, group)
    want_table, want_state = table.double(), state.double()
    kept = [x.clone() for x in (rows, coef, X, source)]
    cpu.update_rows(table, state, rows, coef, X, source, 0.1, score)
    assert all(torch.equal(x, y) for x, y in zip((rows, coef, X, source), kept, strict=True))
    reference.update_rows(want_table, want_state, rows, coef.double(), X.double(), source, 0.1, score)
    # A row's gradient is a sum of up to B * group / 2 terms of size 1: its error grows with their number.
    torch.testing.assert_close(state.double(), want_state, rtol=EPS * (B * group) ** 0.5 * 8, atol=EPS * B * group)
    torch.testing.assert_close(table.double(), want_table, rtol=0, atol=1e-5)
    assert table.norm(dim=1).max() <= max(1 + 4 * EPS, entries(R, R, d, B, group)[0].norm(dim=1).max())


def test_rows_not_named_stay_as_they_are():
    table, state, _, coef, X, source = entries(1, 50, 8, 4, 2)
    before = table.clone(), state.clone()
    rows = torch.tensor([3, 7, 3, 3, 49, 7, 3, 0], dtype=torch.int32)
    cpu.update_rows(table, state, rows, coef, X, source, 0.1, "dot")
    others = torch.ones(50, dtype=torch.bool)
    others[rows.long()] = False
    assert torch.equal(table[others], before[0][others])
    assert torch.equal(state[others], before[1][others])
    assert (table[~others] != before[0][~others]).any(1).all()


def test_update_does_not_depend_on_threads():
    results = []
    for count in (1, TWO):
        numba.set_num_threads(count)
        table, state, *rest = entries(2, 5000, 64, 2000, 48)
        cpu.update_rows(table, state, *rest, 0.1, "l2")
        results.append((table, state))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_update_of_nothing():
    table, state, rows, coef, X, source = entries(3, 5, 4, 2, 1)
    before = table.clone()
    cpu.update_rows(table, state, rows[:0], coef[:0], X, source[:0], 0.1, "dot")
    assert torch.equal(table, before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a | {"rows": a["rows"] + 5}, r"update_rows: rows must be in \[0, 5\)"),
        (lambda a: a | {"source": a["source"] + 9}, r"update_rows: source must be in \[0, 9\)"),
        (lambda a: a | {"source": torch.zeros(3, dtype=torch.int32)}, "update_rows: the length of source must divide"),
        (lambda a: a | {"lr": float("nan")}, "update_rows: lr must be finite and at least 0, got nan"),
        (lambda a: a | {"score": "cosine"}, "update_rows: score must be one of dot, l2, got 'cosine'"),
        (lambda a: a | {"table": a["table"].T.contiguous().T}, "update_rows: table is changed in place and must be"),
        (lambda a: a | {"X": a["table"]}, "update_rows: X must not be, or overlap, the table"),
    ],
)
def test_bad_arguments_of_update_rows(change, message):
    names = ("table", "state", "rows", "coef", "X", "source")
    arguments = dict(zip(names, entries(4, 5, 4, 4, 2), strict=True)) | {"lr": 0.1, "score": "dot"}
    with pytest.raises(InputError, match=message):
        cpu.update_rows(**change(arguments))


def test_tables_beyond_int32_offsets():
    """Rows whose offset passes 2^31 elements; the zeros take no memory before they are written."""
    R, d = 2**31 // 64 + 1000, 64
    try:
        table, state = (torch.from_numpy(np.zeros((R, d), np.float32)) for _ in range(2))
    except MemoryError:
        pytest.skip("this system does not lend memory that is not there")
    rows = torch.tensor([R - 700, 0, R - 1, 5, R - 1], dtype=torch.int32)
    g = torch.Generator().manual_seed(0)
    table[rows.long()] = torch.randn(5, d, generator=g) / 10
    X, coef, source = torch.randn(5, d, generator=g), torch.randn(5, generator=g), torch.arange(5, dtype=torch.int32)
    names, compact = rows.unique(return_inverse=True)
    want, want_state = table[names.long()].double(), torch.zeros(len(names), d, dtype=torch.float64)

    lists = cpu.list_gradients(X, table, source[:1], names[None], Objective(1, drm=False, mse=True))
    torch.testing.assert_close(lists.scores[0].double(), want @ X[0].double(), rtol=0, atol=8 * EPS)

    cpu.update_rows(table, state, rows, coef, X, source, 0.1, "dot")
    reference.update_rows(want, want_state, compact.int(), coef.double(), X.double(), source, 0.1, "dot")
    torch.testing.assert_close(table[names.long()].double(), want, rtol=0, atol=8 * EPS)
    torch.testing.assert_close(state[names.long()].double(), want_state, rtol=8 * EPS, atol=0)


# ------------------------------------------------------------------------------------------------------ whole steps


@pytest.mark.parametrize("score", ["dot", "l2"])
def test_fifty_steps(score, n_threads):
    """Sample, gradients, update, fifty times over: as near to a float64 run as the reference is in float32.

    The factors then differ by 2e-7 under dot and by 1e-5 under l2. Adagrad's state begins at 1: at 0 the first step
    is lr times the gradient's sign, even where the gradient is rounding noise.
    """
    indptr, indices = interactions(12, 40, 60)
    plan = ListPlan(indptr, indices, 60, 3, 12, seed=4)
    objective = Objective(3, score=score)
    g = torch.Generator().manual_seed(1)
    U, V = torch.randn(40, 16, generator=g) / 4, torch.randn(60, 16, generator=g) / 4
    runs = []
    for backend, dtype in ((cpu, torch.float32), (reference, torch.float32), (reference, torch.float64)):
        users_table, items_table = U.to(dtype, copy=True), V.to(dtype, copy=True)
        users_state, items_state = torch.ones_like(users_table), torch.ones_like(items_table)
        B, losses = 8, []
        for step in range(50):
            start = step * B % (plan.n_lists - B)
            users, items = backend.sample_lists(plan, step // 10, start, start + B)
            x = backend.list_gradients(users_table, items_table, users, items, objective)
            old = users_table.clone()
            own, one = torch.arange(B, dtype=torch.int32), torch.ones(B, dtype=dtype)
            backend.update_rows(users_table, users_state, users, one, x.user_grad, own, 0.1, "dot")
            backend.update_rows(items_table, items_state, items.flatten(), x.g.flatten(), old, users, 0.1, score)
            losses.append(x.loss.sum())
        runs.append((users_table.double(), items_table.double(), torch.stack(losses).double()))
    for got, rounded, want in zip(*runs, strict=True):
        assert (got - want).abs().max() <= 4 * (rounded - want).abs().max()
    assert max((x - y).abs().max().item() for x, y in zip(runs[0][:2], runs[2][:2], strict=True)) < 5e-5
    assert runs[0][2][-10:].mean() < runs[0][2][:10].mean()
