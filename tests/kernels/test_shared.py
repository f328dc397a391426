"""Lists that share negatives: the hint changes neither gradients nor updates, whatever the lists really share."""

from types import ModuleType

import numba
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from drm_triton.errors import InputError
from drm_triton.kernels import cpu, gpu, reference
from drm_triton.kernels.gpu import update
from drm_triton.kernels.protocol import Objective

EPS = 2.0**-23


def lists(seed: int, B: int, rho: int, eta: int, d: int, share: int, differing: float) -> tuple[Tensor, ...]:
    """Factors, users and items of B lists; a part `differing` of the negatives is a list's own.

    No item comes twice in a list: computed in two ways, its scores might differ in the last bit and not be tied.
    """
    g = torch.Generator().manual_seed(seed)
    N = 2 * (rho + 2 * eta)
    U, V = (torch.randn(rows, d, generator=g) * d**-0.5 for rows in (9, N))
    users = torch.randint(0, 9, (B,), generator=g, dtype=torch.int32)
    shuffled = torch.stack([torch.randperm(N // 2, generator=g) for _ in range(B)]).to(torch.int32)
    leading = N // 2 + shuffled[torch.arange(B) // share * share]
    own = torch.rand(B, eta, generator=g) < differing
    negatives = torch.where(own, shuffled[:, rho : rho + eta], leading[:, :eta])
    return U, V, users, torch.cat([shuffled[:, :rho], negatives], dim=1)


def assert_same(seed: int, B: int, rho: int, eta: int, d: int, share: int, differing: float, score: str) -> None:
    """Gradients and updated tables with the hint are those of the float64 reference, which does not use it."""
    U, V, users, items = lists(seed, B, rho, eta, d, share, differing)
    objective = Objective(rho, score=score, tau=2.0, mse=True)
    got = cpu.list_gradients(U, V, users, items, objective, share)
    want = reference.list_gradients(U.double(), V.double(), users, items, objective)
    for name, x, y in zip(got._fields, got, want, strict=True):
        bound = 64 * EPS * (rho + eta) ** 0.5 * max(y.abs().max().item(), 1)
        torch.testing.assert_close(x.double(), y, rtol=0, atol=bound, msg=lambda m, name=name: f"{name}: {m}")
    assert_same_update(cpu, U, V, users, items, got.g, score, share)


def assert_same_update(
    backend: ModuleType, U: Tensor, V: Tensor, users: Tensor, items: Tensor, g: Tensor, score: str, share: int
) -> None:
    """One step of the items' table is that of the float64 reference."""
    expected, expected_state = (x.to(torch.float64, copy=True) for x in (V, torch.ones_like(V)))
    reference.update_rows(
        expected, expected_state, items.flatten(), g.double().flatten(), U.double(), users, 0.1, score
    )
    device = "cuda" if backend is gpu and torch.cuda.is_available() else "cpu"
    table, state, rows, coef, X, source = (x.clone().to(device) for x in (V, torch.ones_like(V), items, g, U, users))
    backend.update_rows(table, state, rows.flatten(), coef.flatten(), X, source, 0.1, score, share)
    rounding = torch.finfo(V.dtype).eps * len(users) ** 0.5
    torch.testing.assert_close(state.double().cpu(), expected_state, rtol=64 * rounding, atol=0)
    torch.testing.assert_close(table.double().cpu(), expected, rtol=0, atol=64 * rounding)


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 99),
    B=st.integers(1, 70),
    rho=st.integers(1, 4),
    eta=st.integers(1, 50),
    d=st.integers(1, 70),
    share=st.integers(2, 40),
    differing=st.sampled_from([0.0, 0.05, 1.0]),
    score=st.sampled_from(["dot", "l2"]),
)
def test_sharing_is_only_a_hint(seed, B, rho, eta, d, share, differing, score):
    assert_same(seed, B, rho, eta, d, share, differing, score)


def test_a_group_may_be_larger_than_the_batch():
    assert_same(5, 10, 1, 9, 8, 2**40, 0.1, "dot")


@pytest.mark.parametrize("d", [1, 8, 16, 64, 100, 128])
@pytest.mark.parametrize("score", ["dot", "l2"])
def test_every_dimension(d, score):
    assert_same(1, 100, 1, 45, d, 32, 0.02, score)


@pytest.mark.parametrize("score", ["dot", "l2"])
@pytest.mark.parametrize(
    ("B", "rho", "eta", "d", "share", "differing"),
    [
        (1, 1, 3, 1, 2, 0.0),
        (7, 2, 15, 50, 3, 0.1),  # 17 items: more than a tile of positions; a last group of one list
        (40, 1, 5, 16, 32, 0.1),  # more than a tile of lists
        (5, 1, 6, 100, 9, 0.5),  # fewer lists than a group has; more than a tile of factors
        (6, 1, 8, 16, 2, 1.0),  # nothing is shared
    ],
)
def test_gpu_updates(B, rho, eta, d, share, differing, score):
    U, V, users, items = lists(5, B, rho, eta, d, share, differing)
    g = torch.randn(B, rho + eta, generator=torch.Generator().manual_seed(B))
    g[:, ::3] = 0  # as a hinge leaves many
    assert_same_update(gpu, U, V, users, items, g, score, share)


def test_gpu_updates_in_double_precision():
    U, V, users, items = lists(6, 6, 1, 8, 16, 3, 0.2)
    g = torch.randn(6, 9, generator=torch.Generator().manual_seed(6)).double()
    assert_same_update(gpu, U.double(), V.double(), users, items, g, "l2", 3)


def test_gpu_updates_of_lists_that_repeat_rows():
    """The same row at several positions, in some lists where the first list has another."""
    g = torch.Generator().manual_seed(7)
    U, V = torch.randn(4, 8, generator=g), torch.randn(3, 8, generator=g) / 8
    items, users = (
        torch.randint(0, high, size, generator=g, dtype=torch.int32) for high, size in ((3, (9, 5)), (4, (9,)))
    )
    assert_same_update(gpu, U, V, users, items, torch.randn(9, 5, generator=g), "l2", 4)


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("spoil", ["source", "X", "coef"])
def test_gpu_updates_spoil_only_rows_that_a_bad_entry_names(spoil, monkeypatch):
    """What a GPU does, where the host does not look at values, with groups: list 1 is bad, and differs from list 0."""
    monkeypatch.setattr(update, "check_update", lambda *_, **__: None)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = torch.tensor([[0, 2, 4], [1, 2, 4], [0, 2, 5]], dtype=torch.int32, device=device)
    X, source = torch.full((3, 4), 0.25, device=device), torch.arange(3, dtype=torch.int32, device=device)
    coef = torch.ones(3, 3, device=device)
    coef[1, 2] = 0  # so row 4 gets nothing from list 1
    if spoil == "source":
        source[1] = 3
    elif spoil == "X":
        X[1, 2] = float("inf")
    else:
        coef[1, :2] = float("nan")
    table, state = torch.full((7, 4), 0.1, device=device), torch.ones(7, 4, device=device)
    update.update_rows(table, state, rows.flatten(), coef.flatten(), X, source, 0.1, "dot", 3)
    assert table.isnan().any(1).tolist() == [False, True, True, False, False, False, False]
    assert (table[[0, 4, 5]] != 0.1).all()
    assert (table[[3, 6]] == 0.1).all()


@pytest.mark.skipif(torch.cuda.is_available(), reason="a failed assertion on a GPU ends the process's use of it")
@pytest.mark.parametrize("row", [-(2**31), -2, -1, 4, 2**31 - 1])
@pytest.mark.parametrize("place", [0, 1, 4])  # named by the whole group, by its first list, by another one
def test_gpu_updates_tell_of_rows_outside_the_table(row, place, monkeypatch):
    monkeypatch.setattr(update, "check_update", lambda *_, **__: None)
    rows = torch.tensor([[0, 1], [0, 2], [0, 3]], dtype=torch.int32)
    rows[:, 0] = row if place == 0 else 0
    rows.view(-1)[place] = row
    large = torch.full((8, 4), 0.5)  # the table is the middle of a larger one
    X, source, coef = torch.ones(3, 4), torch.arange(3, dtype=torch.int32), torch.ones(6)
    with pytest.raises(RuntimeError, match=r"update_rows: rows must be in \[0, 4\)"):
        update.update_rows(large[2:6], torch.ones(4, 4), rows.flatten(), coef, X, source, 0.1, "dot", 3)
    assert (large[[0, 1, 6, 7]] == 0.5).all()


@pytest.mark.parametrize("score", ["dot", "l2"])
def test_groups_do_not_depend_on_threads(score):
    if numba.config.NUMBA_NUM_THREADS < 2:
        pytest.skip("needs two cores")
    before, results = numba.get_num_threads(), []
    U, V, users, items = lists(2, 700, 2, 45, 64, 16, 0.05)
    try:
        for threads in (1, 2):
            numba.set_num_threads(threads)
            gradients = cpu.list_gradients(U, V, users, items, Objective(2, score=score), 16)
            table, state = V.clone(), torch.ones_like(V)
            cpu.update_rows(table, state, items.flatten(), gradients.g.flatten(), U, users, 0.1, score, 16)
            results.append((*gradients, table, state))
    finally:
        numba.set_num_threads(before)
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


def test_a_bad_shared_item_spoils_its_lists_only():
    U, V, users, items = lists(3, 48, 1, 20, 16, 16, 0.0)
    V[items[16, 5].long()] = float("nan")  # shared by the lists 16 to 31
    got = cpu.list_gradients(U, V, users, items, Objective(1), 16)
    hit = (items == items[16, 5]).any(1)
    assert hit[16:32].all()
    assert got.loss[hit].isnan().all()
    assert got.g[hit].isnan().all()
    assert got.user_grad[hit].isnan().all()
    assert all(x[~hit].isfinite().all() for x in (got.loss, got.g, got.user_grad))


@pytest.mark.parametrize("backend", [reference, cpu, gpu])
def test_share_must_be_positive(backend):
    U, V, users, items = lists(4, 4, 1, 5, 8, 2, 0.0)
    with pytest.raises(InputError, match="list_gradients: share must be an integer of at least 1, got 0"):
        backend.list_gradients(U, V, users, items, Objective(1), 0)
    state, coef = torch.ones_like(V), torch.ones(items.numel())
    with pytest.raises(InputError, match="update_rows: share must be an integer of at least 1, got 0"):
        backend.update_rows(V, state, items.flatten(), coef, U, users, 0.1, "dot", 0)
