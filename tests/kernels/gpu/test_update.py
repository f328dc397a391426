"""Triton row updates and whole training steps against the reference in float64."""

from typing import NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton", reason="Triton is available on Linux only")

from drm_triton.kernels import gpu, reference
from drm_triton.kernels.batches import ListBatch, SharedNegatives
from drm_triton.kernels.gpu import update
from drm_triton.kernels.protocol import Backend, GradientTerms, ListPlan, Objective
from drm_triton.names import Score
from tests.kernels.conftest import share_negatives
from tests.kernels.gpu.conftest import DEVICE, int32, random_plan, with_gradient

N_ROWS = 40  # rows of the tables; the terms name all but the last two


class Groups(NamedTuple):
    """How lists share negatives: how many, the lists of a group, and the fraction that is replaced."""

    eta: int
    size: int
    replaced: float


def random_terms(
    seed: int, B: int, m: int, d: int, dtype: torch.dtype = torch.float32, groups: Groups | None = None
) -> GradientTerms:
    """Return B lists of m terms, a third of them 0; with `groups`, the last columns are shared."""
    draw = torch.Generator().manual_seed(seed)
    rows, shared = torch.randint(N_ROWS - 2, (B, m), generator=draw, dtype=torch.int32), None
    if groups is not None:
        shape = (-(-B // groups.size), groups.eta)
        items = torch.randint(N_ROWS - 2, shape, generator=draw, dtype=torch.int32)
        rows, shared = share_negatives(rows, items, groups.size, groups.replaced, draw)
    coefficients = torch.randn(B, m, generator=draw, dtype=torch.float64).to(dtype)
    coefficients[:, ::3] = 0
    vectors = torch.randn(6, d, generator=draw, dtype=torch.float64).to(dtype) / d**0.5
    return GradientTerms(rows, coefficients, vectors, torch.randint(6, (B,), generator=draw, dtype=torch.int32), shared)


def random_table(seed: int, d: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Return a table with rows on both sides of the unit sphere, its state, and a dense gradient."""
    draw = torch.Generator().manual_seed(seed + 2)
    table, dense = (torch.randn(N_ROWS, d, generator=draw, dtype=torch.float64).to(dtype) for _ in range(2))
    return table / d**0.5, torch.rand(N_ROWS, d, generator=draw).to(dtype) + 0.1, dense


def on_device(terms: GradientTerms) -> GradientTerms:
    """Return copies of the terms on the device."""
    rows, coefficients, vectors, sources = (x.clone().to(DEVICE) for x in terms[:4])
    shared = terms.shared
    if shared is not None:
        shared = SharedNegatives(shared.size, shared.items.to(DEVICE), shared.replaced.to(DEVICE))
    return GradientTerms(rows, coefficients, vectors, sources, shared)


def step(table: Tensor, state: Tensor, terms: GradientTerms, score: Score, dense: Tensor | None) -> list[Tensor]:
    """Return the new table and state of one step on the device."""
    moved, moved_state = table.clone().to(DEVICE), state.clone().to(DEVICE)
    gpu.update_rows(moved, moved_state, on_device(terms), 0.1, score, None if dense is None else dense.to(DEVICE))
    return [moved.cpu(), moved_state.cpu()]


def assert_update(
    table: Tensor, state: Tensor, terms: GradientTerms, score: Score, dense: Tensor | None = None
) -> list[Tensor]:
    """Compare one step with the float64 reference, which ignores what lists share; return the new table and state."""
    expected, expected_state = (x.to(torch.float64, copy=True) for x in (table, state))
    live = with_gradient(terms)
    reference.update_rows(expected, expected_state, live, 0.1, score, None if dense is None else dense.double())
    moved, moved_state = step(table, state, terms, score, dense)
    rounding = 32 * torch.finfo(table.dtype).eps * max(1, terms.rows.numel()) ** 0.5
    torch.testing.assert_close(moved_state.double(), expected_state, rtol=rounding, atol=rounding)
    torch.testing.assert_close(moved.double(), expected, rtol=0, atol=rounding)
    if dense is None:
        untouched = torch.ones(len(table), dtype=torch.bool)
        untouched[live.rows.long()] = False
        assert torch.equal(moved[untouched], table[untouched])
        assert torch.equal(moved_state[untouched], state[untouched])
    return [moved, moved_state]


@pytest.mark.parametrize("score", ["dot", "l2"])
@pytest.mark.parametrize(
    ("d", "B", "m"), [(1, 1, 1), (3, 4, 9), (16, 3, 20), (50, 2, 17), (64, 5, 7), (100, 1, 40), (128, 2, 8)]
)
def test_update_rows(score: Score, d: int, B: int, m: int) -> None:
    table, state, _ = random_table(d, d)
    assert_update(table, state, random_terms(d, B, m, d), score)


@pytest.mark.parametrize(("score", "merged"), [("dot", True), ("l2", False)])
def test_a_step_has_the_same_bits_each_time_and_changes_no_input(score: Score, merged: bool) -> None:
    groups = Groups(5, 3, 0.2) if merged else None
    terms, (table, state, dense) = on_device(random_terms(1, 8, 7, 16, groups=groups)), random_table(1, 16)
    before = [x.clone() for x in (*terms[:4], dense)]
    first, second = (step(table, state, terms, score, dense) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
    assert all(torch.equal(x, y) for x, y in zip((*terms[:4], dense), before, strict=True))


@pytest.mark.parametrize(
    ("B", "rho", "eta", "d", "size", "replaced", "score", "dense"),
    [
        (1, 1, 3, 1, 2, 0.0, "dot", False),
        (7, 2, 15, 50, 3, 0.1, "l2", False),  # more than a tile of columns; a last group of one list
        (40, 1, 5, 16, 32, 0.1, "dot", False),  # more than a tile of lists; a ragged last group
        (5, 1, 6, 100, 2**40, 0.5, "l2", True),  # one group, larger than the batch; more than a tile of factors
        (6, 2, 8, 16, 2, 1.0, "l2", False),  # all replaced
        (6, 1, 8, 16, 3, 0.0, "dot", True),  # none replaced
        (6, 1, 8, 16, 1, 0.3, "l2", False),  # groups of one list
        (150, 1, 3, 8, 100, 0.1, "l2", False),  # groups of two tiles; the second one of the last group is empty
        (6, 0, 4, 8, 3, 0.3, "dot", False),  # all columns are shared
        (7, 2, 15, 50, 3, 0.1, "cosine", False),
        (6, 1, 8, 16, 3, 0.0, "cosine", True),
    ],
)
def test_shared_negatives(
    B: int, rho: int, eta: int, d: int, size: int, replaced: float, score: Score, dense: bool
) -> None:
    terms = random_terms(B, B, rho + eta, d, groups=Groups(eta, size, replaced))
    table, state, gradient = random_table(B, d)
    assert_update(table, state, terms, score, gradient if dense else None)


@settings(deadline=None, max_examples=12, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 99),
    B=st.integers(1, 12),
    rho=st.integers(0, 3),
    eta=st.integers(1, 18),
    d=st.integers(1, 20),
    size=st.integers(1, 14),
    replaced=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    score=st.sampled_from(["dot", "l2"]),
    dense=st.booleans(),
)
def test_any_shared_negatives(
    seed: int, B: int, rho: int, eta: int, d: int, size: int, replaced: float, score: Score, dense: bool
) -> None:
    terms = random_terms(seed, B, rho + eta, d, groups=Groups(eta, size, replaced))
    table, state, gradient = random_table(seed, d)
    assert_update(table, state, terms, score, gradient if dense else None)


def long_terms(
    B: int, eta: int, d: int, size: int, dtype: torch.dtype = torch.float32, replaced: float = 0.1
) -> GradientTerms:
    """Return lists of one positive and eta shared negatives. Half of the rows have no gradient in any list.

    Of the shared negatives, those of two tiles have none, those of another have one in each list, others in few.
    """
    terms = random_terms(B, B, 1 + eta, d, dtype, Groups(eta, size, replaced))
    few = torch.rand(B, 1 + eta, generator=torch.Generator().manual_seed(eta)) < 0.1
    few[:, 17:49] = False
    few[:, 81:97] = True
    coefficients = terms.coefficients.abs() + 1  # not 0
    return terms._replace(coefficients=torch.where(few & (terms.rows < N_ROWS // 2), coefficients, 0.0))


@pytest.mark.parametrize(
    ("B", "d", "size", "score", "dense", "dtype"),
    [
        (40, 16, 32, "dot", False, torch.float32),  # a last group of fewer lists
        (20, 70, 20, "l2", False, torch.float32),  # more than a tile of factors
        (12, 5, 2**40, "l2", True, torch.float32),
        (100, 8, 100, "cosine", False, torch.float32),  # a group of two tiles
        (16, 40, 16, "l2", False, torch.float64),
        (3, 8, 2, "dot", False, torch.float32),  # groups of two lists and of one
    ],
)
def test_long_lists_with_few_gradients(
    B: int, d: int, size: int, score: Score, dense: bool, dtype: torch.dtype
) -> None:
    table, state, gradient = random_table(B, d, dtype)
    terms = long_terms(B, 130, d, size, dtype)
    moved, _ = assert_update(table, state, terms, score, gradient if dense else None)
    assert ((moved != table).any(1).sum() <= N_ROWS // 2) != dense


@pytest.mark.parametrize(("eta", "size"), [(130, 4), (5, 4), (5, 1)])
@pytest.mark.parametrize("score", ["dot", "l2", "cosine"])
def test_rows_without_a_gradient_keep_their_bits(eta: int, size: int, score: Score) -> None:
    """Even rows outside the unit ball, and whatever the vectors are."""
    terms, (table, state, _) = random_terms(1, 8, 1 + eta, 6, groups=Groups(eta, size, 0.3)), random_table(1, 6)
    table[0], table[1], state[2] = float("nan"), float("inf"), float("nan")
    terms = terms._replace(coefficients=terms.coefficients * 0, vectors=terms.vectors * float("nan"))
    moved, moved_state = step(table, state, terms, score, None)
    assert torch.equal(moved.view(torch.int32), table.view(torch.int32))
    assert torch.equal(moved_state.view(torch.int32), state.view(torch.int32))


def test_shared_negatives_in_double_precision() -> None:
    terms = random_terms(6, 6, 9, 16, torch.float64, Groups(8, 3, 0.2))
    table, state, dense = random_table(6, 16, torch.float64)
    assert_update(table, state, terms, "l2", dense)


def test_a_shared_item_that_all_lists_replaced_is_not_updated() -> None:
    """Row 3 has no term. Even its norm, above 1, stays as it is."""
    shared = SharedNegatives(2, int32([3, 1]), torch.tensor([[True, False], [True, False]], device=DEVICE))
    rows, ones = int32([0, 2, 1], [0, 4, 1]), torch.ones(2, 3, device=DEVICE)
    table, state = torch.full((5, 4), 0.9, device=DEVICE), torch.ones(5, 4, device=DEVICE)
    gpu.update_rows(
        table, state, GradientTerms(rows, ones, torch.ones(2, 4, device=DEVICE), int32(0, 1), shared), 0.1, "dot"
    )
    assert (table[3] == 0.9).all()
    assert (state[3] == 1).all()
    assert (table[[0, 1, 2, 4]] != 0.9).all()


@pytest.mark.parametrize("score", ["dot", "l2"])
@pytest.mark.parametrize("lists", [0, 3])
def test_every_row_takes_the_step_of_a_dense_gradient(score: Score, lists: int) -> None:
    """Rows with and without terms, and a batch without any term."""
    table, state, dense = random_table(lists, 12)
    terms = random_terms(lists, lists, 9, 12)
    moved, _ = assert_update(table, state, terms, score, dense)
    assert (moved != table).any(1).all()
    assert (moved.norm(dim=1) <= 1 + 1e-6).all()


def test_a_dense_gradient_without_lists_of_shared_negatives() -> None:
    table, state, dense = random_table(3, 8)
    assert_update(table, state, random_terms(3, 0, 5, 8, groups=Groups(3, 4, 0.0)), "dot", dense)


def test_a_row_with_many_terms_and_no_term_at_all() -> None:
    table, state = torch.full((2, 4), 0.1, device=DEVICE), torch.zeros(2, 4, device=DEVICE)
    ones, source = torch.ones(1, 4, device=DEVICE), int32(0)
    none = GradientTerms(int32(0)[:0, None], ones[:0, :1], ones, source[:0])
    gpu.update_rows(table, state, none, 1.0, "dot")
    assert (table == 0.1).all()
    many = GradientTerms(int32([1] * 200), torch.full((1, 200), 0.5, device=DEVICE), ones, source)
    gpu.update_rows(table, state, many, 1.0, "dot")
    assert state.tolist() == [[0.0] * 4, [10000.0] * 4]
    # 0.1 - 1 = -0.9 in each of 4 factors, then onto the unit ball
    assert table[1].tolist() == pytest.approx([-0.5] * 4)


# ---------------------------------------------------------------------------------------------------------------
# Bad values. On a GPU the host does not check them: sources outside make their rows NaN, rows outside raise.


@pytest.mark.parametrize("merged", ["no", "as a product", "one by one"])
@pytest.mark.parametrize("bad", ["source", "vector", "coefficient"])
@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_a_bad_value_makes_only_its_rows_nan(bad: str, merged: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """List 1 is bad. Its coefficient at row 4 is 0, and it replaces the shared row 6."""
    monkeypatch.setattr(update, "check_update", lambda *_, **__: None)
    rows = int32([0, 2, 4, 6], [1, 2, 4, 1], [0, 2, 4, 6])
    vectors, sources = torch.full((3, 4), 0.25, device=DEVICE), int32(0, 1, 2)
    coefficients = torch.ones(3, 4, device=DEVICE)
    coefficients[1, 2] = 0
    if bad == "source":
        sources[1] = 3
    elif bad == "vector":
        vectors[1, 2] = float("inf")
    else:
        coefficients[1, :2] = float("nan")
    replaced = torch.zeros(3, 3, dtype=torch.bool, device=DEVICE)
    replaced[1, 2] = True
    terms = GradientTerms(rows, coefficients, vectors, sources)
    if merged == "as a product":
        terms = terms._replace(shared=SharedNegatives(3, int32([2, 4, 6]), replaced))
    elif merged == "one by one":
        terms = among_many(terms, int32([2, 4, 6]), replaced)
    large, large_state = torch.full((10, 4), 0.1, device=DEVICE), torch.ones(10, 4, device=DEVICE)
    table, state = large[1:9], large_state[1:9]  # the middle of larger tables
    gpu.update_rows(table, state, terms, 0.1, "dot")
    assert table.isnan().any(1).tolist() == [False, True, True, False, False, False, False, False]
    assert (table[[0, 4, 6]] != 0.1).all()
    assert (table[[3, 5, 7]] == 0.1).all()
    assert (large[[0, 9]] == 0.1).all()


def among_many(terms: GradientTerms, items: Tensor, replaced: Tensor) -> GradientTerms:
    """Return the terms of long lists in a large group: further lists and negatives have coefficient 0, at row 7."""
    pad, more = torch.nn.functional.pad, (0, 130, 0, 17)
    rows, coefficients = pad(terms.rows, more, value=7), pad(terms.coefficients, more)
    rows[len(terms.rows) :, -130 - items.shape[1] : -130] = items
    shared = SharedNegatives(20, pad(items, (0, 130), value=7), pad(replaced, more))
    return GradientTerms(rows, coefficients, terms.vectors, pad(terms.sources, (0, 17)), shared)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a failed assertion on a GPU ends its use in the process")
@pytest.mark.parametrize("row", [-(2**31), -2, -1, 4, 2**31 - 1])
@pytest.mark.parametrize("place", ["unshared", "positive", "shared", "replaced"])
def test_rows_outside_the_table_raise(row: int, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(update, "check_update", lambda *_, **__: None)
    rows, shared_items = torch.tensor([[0, 1, 3], [0, 1, 2]], dtype=torch.int32), int32([1, 3])
    replaced = torch.tensor([[False, False], [False, True]])
    if place == "shared":
        rows[:, 1] = shared_items[0, 0] = row
    else:
        rows[1, 2 if place == "replaced" else 0] = row
    shared = None if place == "unshared" else SharedNegatives(2, shared_items, replaced)
    large = torch.full((8, 4), 0.5)  # the table is the middle of a larger one
    terms = GradientTerms(rows, torch.ones(2, 3), torch.ones(2, 4), int32(0, 1), shared)
    with pytest.raises(RuntimeError, match=r"update_rows: rows must be in \[0, 4\)"):
        gpu.update_rows(large[2:6], torch.ones(4, 4), terms, 0.1, "dot")
    assert (large[[0, 1, 6, 7]] == 0.5).all()


# ---------------------------------------------------------------------------------------------------------------
# Whole steps


@pytest.mark.parametrize(("score", "share"), [("l2", 2), pytest.param("dot", 1, marks=pytest.mark.slow)])
def test_training_steps(score: Score, share: int) -> None:
    """Sample, gradients, both updates, 5 times: within 1e-4 of the reference in float64.

    The Adagrad state starts at 0.01. From 0, the first step moves a factor by lr however small its gradient is, and
    rounding decides the direction if the gradient vanishes.
    """
    plan, same = random_plan(2, 6, share=share), random_plan(2, 6, share=share, device="cpu")
    objective = Objective(2, score, tau=0.5, lam=0.5, weight="ndcg")
    draw = torch.Generator().manual_seed(5)
    U, V = torch.randn(23, 8, generator=draw) / 3, torch.randn(50, 8, generator=draw) / 3
    tables = (U, torch.full_like(U, 0.01), V, torch.full_like(V, 0.01))
    trained, expected = [x.clone().to(DEVICE) for x in tables], [x.double() for x in tables]
    batch_size = 4
    for number in range(5):
        epoch, batch = divmod(number, plan.n_lists // batch_size)
        train_step(gpu, plan, epoch, batch * batch_size, trained, objective)
        train_step(reference, same, epoch, batch * batch_size, expected, objective)
    for actual, right in zip(trained, expected, strict=True):
        assert (actual.double().cpu() - right).abs().max() <= 1e-4 * right.abs().max()


def train_step(
    backend: Backend, plan: ListPlan, epoch: int, start: int, tables: list[Tensor], objective: Objective
) -> None:
    """Train on four lists. `tables` are U, its state, V and its state."""
    U, U_state, V, V_state = tables
    batch = backend.sample_lists(plan, epoch, start, start + 4)
    result = backend.list_gradients(U, V, batch, objective)
    backend.update_rows(V, V_state, GradientTerms.of_items(batch, result.g, U), 0.05, objective.score)
    backend.update_rows(U, U_state, GradientTerms.of_rows(batch.users, result.user_grad), 0.05, "dot")


def test_offsets_beyond_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last rows of a table of 2^31 + 512 elements. The memory of the other rows is reserved but not touched."""
    if DEVICE == "cpu":
        from triton.runtime.interpreter import GridExecutor

        # The interpreter copies every argument back onto itself, which would touch all 8 GiB.
        monkeypatch.setattr(GridExecutor, "_restore_args_dev", lambda *_: None)
    elif torch.cuda.get_device_properties(0).total_memory < 20 << 30:
        pytest.skip("needs 18 GiB of GPU memory")
    d, n_rows, far = 64, 2**25 + 8, 2**25
    small = torch.randn(8, d, generator=torch.Generator().manual_seed(0)).to(DEVICE) / 10
    table, state = torch.empty(n_rows, d, device=DEVICE), torch.empty(n_rows, d, device=DEVICE)
    table[-8:], state[-8:] = small, 1.0
    users, items = int32(3), int32([0, 7, 2, 5, 5])
    large = gpu.list_gradients(table, table, ListBatch(users + far, items + far), Objective(2, hinge=False))
    near = gpu.list_gradients(small, small, ListBatch(users, items), Objective(2, hinge=False))
    assert torch.equal(large.scores, near.scores)
    assert torch.equal(large.user_grad, near.user_grad)
    moved, moved_state = small.clone(), torch.ones_like(small)
    gpu.update_rows(moved, moved_state, GradientTerms(items, near.g, small, users), 0.1, "l2")
    gpu.update_rows(table, state, GradientTerms(items + far, near.g, small, users), 0.1, "l2")
    assert torch.equal(table[-8:], moved)
    assert torch.equal(state[-8:], moved_state)
