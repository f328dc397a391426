"""Lists that share negatives against the float64 reference, which reads every list alone."""

from functools import partial
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from drm_triton.errors import InputError
from drm_triton.kernels import cpu, reference
from drm_triton.kernels.batches import ListBatch, SharedNegatives
from drm_triton.kernels.cpu.active import ACTIVE_MIN
from drm_triton.kernels.cpu.gradients import TILE
from drm_triton.kernels.cpu.runtime.threads import set_threads
from drm_triton.kernels.cpu.tiles import divide, tile_bounds
from drm_triton.kernels.protocol import GradientTerms, Objective
from drm_triton.names import Score
from tests.kernels.conftest import share_negatives
from tests.kernels.cpu.conftest import EPS, THREAD_COUNTS, double, random_shared_lists


def assert_gradients(U: Tensor, V: Tensor, batch: ListBatch, objective: Objective) -> Tensor:
    """Compare the gradients of a batch with the reference; return those to the scores."""
    got = cpu.list_gradients(U, V, batch, objective)
    want = reference.list_gradients(U.double(), V.double(), ListBatch(batch.users, batch.items), objective)
    for name, x, y in zip(got._fields, got, want, strict=True):
        bound = 64 * EPS * batch.items.shape[1] ** 0.5 * max(y.abs().max().item(), 1)
        torch.testing.assert_close(x.double(), y, rtol=0, atol=bound, msg=partial("{}: {}".format, name))
    return got.g


def assert_update(table: Tensor, terms: GradientTerms, score: Score, dense: Tensor | None = None) -> None:
    """Compare one step of a table with the reference."""
    state = torch.ones_like(table)
    want, want_state = table.double(), state.double()
    reference.update_rows(want, want_state, double(terms), 0.1, score, None if dense is None else dense.double())
    got = table.clone()
    cpu.update_rows(got, state, terms, 0.1, score, dense)
    rounding = EPS * max(1, len(terms.rows)) ** 0.5
    torch.testing.assert_close(state.double(), want_state, rtol=64 * rounding, atol=0)
    torch.testing.assert_close(got.double(), want, rtol=0, atol=64 * rounding)


def assert_same(
    seed: int, B: int, rho: int, eta: int, d: int, size: int, replaced: float, score: Score, dense: bool = False
) -> None:
    U, V, batch = random_shared_lists(seed, B, rho, eta, d, size, replaced)
    g = assert_gradients(U, V, batch, Objective(rho, score=score, tau=2.0, mse=True))
    assert_update(V, GradientTerms.of_items(batch, g, U), score, V.roll(1, 0) if dense else None)


# Always the same examples: in a few of all possible ones, two scores of a list differ by less than their rounding, and
# the gradient depends on their order.
@settings(deadline=None, max_examples=80, derandomize=True)
@given(
    seed=st.integers(0, 99),
    B=st.integers(1, 150),
    rho=st.integers(1, 4),
    eta=st.integers(1, 50),
    d=st.integers(1, 70),
    size=st.integers(1, 140),
    replaced=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    score=st.sampled_from(get_args(Score)),
    dense=st.booleans(),
)
def test_results_are_those_of_the_reference(
    seed: int, B: int, rho: int, eta: int, d: int, size: int, replaced: float, score: Score, dense: bool
) -> None:
    assert_same(seed, B, rho, eta, d, size, replaced, score, dense)


@pytest.mark.parametrize("score", get_args(Score))
@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize(
    ("B", "size", "replaced"),
    [
        (70, 32, 0.05),  # a short last group
        (10, 1, 0.1),  # groups of one list
        (300, 100, 0.05),  # two tiles per group
        (150, 100, 0.05),  # a last group with a full and a short tile
        (130, 100, 0.05),  # a last group with an empty tile
        (40, 8, 0.0),  # nothing replaced
        (40, 8, 1.0),  # everything replaced
        (10, 2**40, 0.1),  # a group larger than the batch
    ],
)
@pytest.mark.usefixtures("n_threads")
def test_groups_of_every_size(B: int, size: int, replaced: float, score: Score, dense: bool) -> None:
    assert_same(5, B, 2, 9, 8, size, replaced, score, dense)


@pytest.mark.parametrize("d", [1, 8, 16, 64, 100, 128])
@pytest.mark.parametrize("score", get_args(Score))
def test_every_dimension(d: int, score: Score) -> None:
    assert_same(1, 100, 1, 45, d, 32, 0.02, score)


@pytest.mark.parametrize("score", get_args(Score))
@pytest.mark.parametrize("eta", [ACTIVE_MIN - 1, ACTIVE_MIN, 129, 1000])
@pytest.mark.parametrize("replaced", [0.0, 0.05, 1.0])
def test_long_lists_with_few_gradients(eta: int, score: Score, replaced: float) -> None:
    U, V, batch = random_shared_lists(eta, 14, 2, eta, 16, 6, replaced)
    g = assert_gradients(U, V, batch, Objective(2, score=score, tau=0.5))
    assert eta < 1000 or (g != 0).float().mean() < 0.25
    for dense in (None, V.roll(1, 0)):
        assert_update(V / V.norm(dim=1, keepdim=True), GradientTerms.of_items(batch, g, U), score, dense)


@pytest.mark.parametrize(("B", "size"), [(2048, 32), (1, 1), (5, 2), (200, 64), (200, 65), (500, 129), (9000, 4161)])
def test_tiles_cover_every_list_once(B: int, size: int) -> None:
    tiles = divide(size, B, TILE)
    lists: list[int] = []
    for tile in range(tiles.n_tiles):
        group, start, stop = tile_bounds.py_func(tile, tiles)
        assert stop - start <= TILE
        assert {b // size for b in range(start, stop)} <= {group}
        lists += range(start, stop)
    assert lists == list(range(B))


def test_no_lists() -> None:
    U, V, batch = random_shared_lists(0, 8, 1, 3, 4, 4, 0.1)
    assert batch.shared is not None
    none = ListBatch(
        batch.users[:0], batch.items[:0], SharedNegatives(4, batch.shared.items[:0], torch.empty(0, 3) > 0)
    )
    assert cpu.list_gradients(U, V, none, Objective(1)).loss.shape == (0,)
    before = V.clone()
    cpu.update_rows(V, torch.ones_like(V), GradientTerms.of_items(none, torch.empty(0, 4), U), 0.1, "dot")
    assert torch.equal(V, before)
    assert_update(V, GradientTerms.of_items(none, torch.empty(0, 4), U), "l2", V.roll(1, 0))


def test_terms_may_consist_of_shared_rows_alone() -> None:
    """`update_rows` takes any number of columns before the shared ones, none included."""
    U, V, batch = random_shared_lists(8, 50, 1, 6, 8, 16, 0.1)
    g = torch.randn(50, 6, generator=torch.Generator().manual_seed(8))
    assert_update(V, GradientTerms(batch.items[:, 1:].contiguous(), g, U, batch.users, batch.shared), "l2")


def test_the_same_row_at_several_positions() -> None:
    g = torch.Generator().manual_seed(7)
    U, V = torch.randn(4, 8, generator=g), torch.randn(3, 8, generator=g) / 8
    users = torch.randint(0, 4, (9,), generator=g, dtype=torch.int32)
    shared_items, own = (torch.randint(0, 3, (rows, 5), generator=g, dtype=torch.int32) for rows in (3, 9))
    rows, shared = share_negatives(own, shared_items, 4, 0.3, g)
    terms = GradientTerms(rows, torch.randn(9, 5, generator=g), U, users, shared)
    assert_update(V, terms, "l2")


def test_a_shared_item_that_every_list_replaced_stays_as_it_is() -> None:
    U, V, batch = random_shared_lists(4, 6, 1, 5, 8, 3, 0.0)
    assert batch.shared is not None
    items, replaced = batch.items.clone(), batch.shared.replaced.clone()
    items[:3, 2], replaced[:3, 1] = 0, True
    dropped = batch.shared.items[0, 1].long()
    V[dropped] *= 100  # outside the unit ball: not even projected
    terms = GradientTerms(items, torch.ones(6, 6), U, batch.users, batch.shared._replace(replaced=replaced))
    appears = (items == dropped).any()
    before = V[dropped].clone()
    cpu.update_rows(V, torch.ones_like(V), terms, 0.1, "dot")
    assert not appears
    assert torch.equal(V[dropped], before)


@pytest.mark.parametrize("score", get_args(Score))
def test_results_do_not_depend_on_threads(score: Score) -> None:
    results = []
    for threads in THREAD_COUNTS:
        set_threads(threads)
        U, V, batch = random_shared_lists(2, 700, 2, 45, 64, 16, 0.05)
        gradients = cpu.list_gradients(U, V, batch, Objective(2, score=score))
        state = torch.ones_like(V)
        cpu.update_rows(V, state, GradientTerms.of_items(batch, gradients.g, U), 0.1, score)
        results.append((*gradients, V, state))
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("replaced", [0.0, 0.3])
def test_a_bad_shared_item_spoils_only_the_lists_that_contain_it(bad: float, replaced: float) -> None:
    U, V, batch = random_shared_lists(3, 48, 1, 20, 16, 16, replaced)
    assert batch.shared is not None
    item = batch.shared.items[1, 5]  # of lists 16 to 31
    V[item.long()] = bad
    got = cpu.list_gradients(U, V, batch, Objective(1))
    hit = (batch.items == item).any(1)
    assert hit[16:32].any()
    assert hit[16:32].all() == (replaced == 0)
    for x in (got.loss, got.g, got.user_grad):
        assert x[hit].isnan().all()
        assert x[~hit].isfinite().all()


@pytest.mark.parametrize("bad", ["vector", "coefficient"])
def test_a_bad_term_spoils_only_its_row(bad: str) -> None:
    U, V, batch = random_shared_lists(3, 12, 1, 6, 8, 6, 0.4)
    U = U[batch.users.long()]  # a vector for each list
    terms = GradientTerms(batch.items, torch.ones(12, 7), U, torch.arange(12).int(), batch.shared)
    if bad == "vector":
        U[8] = float("inf")
        hit = batch.items[8]
    else:
        terms.coefficients[8, :3] = float("nan")
        hit = batch.items[8, :3]
    cpu.update_rows(V, torch.ones_like(V), terms, 0.1, "dot")
    assert V.isfinite().all(1).logical_not().nonzero().flatten().tolist() == sorted(set(hit.tolist()))


def test_bad_shared_negatives() -> None:
    U, V, batch = random_shared_lists(4, 4, 1, 5, 8, 2, 0.0)
    assert batch.shared is not None
    for shared, message in [
        (batch.shared._replace(size=0), "the size of shared must be an integer of at least 1, got 0"),
        (batch.shared._replace(size=1), r"the items of shared must have shape \[4, any\]"),
        (batch.shared._replace(items=batch.shared.items[:1]), r"the items of shared must have shape \[2, any\]"),
        (batch.shared._replace(items=batch.shared.items + len(V)), r"the items of shared must be in \[0, "),
        (batch.shared._replace(replaced=batch.shared.replaced[:, :4]), r"replaced of shared must have shape \[4, 5\]"),
    ]:
        changed = ListBatch(batch.users, batch.items, shared)
        with pytest.raises(InputError, match="list_gradients: " + message):
            cpu.list_gradients(U, V, changed, Objective(1))
        with pytest.raises(InputError, match="update_rows: " + message):
            cpu.update_rows(V, torch.ones_like(V), GradientTerms.of_items(changed, torch.ones(4, 6), U), 0.1, "dot")
