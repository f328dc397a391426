"""Lists that share negatives: the hint changes neither gradients nor updates, whatever the lists really share."""

import numba
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from drm_triton.errors import InputError
from drm_triton.kernels import cpu, gpu, reference
from drm_triton.kernels.interface import Objective

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
    table, state = V.clone(), torch.ones_like(V)
    expected, expected_state = V.double(), torch.ones_like(V).double()
    cpu.update_rows(table, state, items.flatten(), got.g.flatten(), U, users, 0.1, score, share)
    reference.update_rows(
        expected, expected_state, items.flatten(), got.g.double().flatten(), U.double(), users, 0.1, score
    )
    torch.testing.assert_close(state.double(), expected_state, rtol=64 * EPS * B**0.5, atol=0)
    torch.testing.assert_close(table.double(), expected, rtol=0, atol=64 * EPS * B**0.5)


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
