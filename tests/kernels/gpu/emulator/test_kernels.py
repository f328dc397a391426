"""Every Triton kernel, compiled for sm_90 and launched as on a GPU, in the PTX emulator against the reference.

Most cases run in three orders of warps and programs, and have to give the same bits.
"""

import re

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is available on Linux only")

from drm_triton.bench.ptx import launch
from drm_triton.kernels import devices, gpu, reference
from drm_triton.kernels.batches import ListBatch, SharedNegatives
from drm_triton.kernels.gpu import buckets, filter, gradients, sampling, softsort, softsort_tiled, topk, update, users
from drm_triton.kernels.protocol import GradientTerms, Objective
from drm_triton.names import LOSSES, Score, UserSampling
from tests.kernels.conftest import check_rounding, share_negatives
from tests.kernels.gpu.conftest import assert_close, factors, generator, random_plan, with_gradient
from tests.kernels.gpu.emulator.conftest import SEEDS, emulate

slow = pytest.mark.slow
CLOSE = 1e-5  # of the largest entry

# Kernels that the operations launch.
SAMPLE = {"_shared_kernel", "_sample_kernel"}
SAMPLE_USERS = {"_users_kernel"}
GRADIENTS = {"_scores_kernel", "_losses_kernel", "_user_gradient_kernel"}
SOFT_TOP_K = {"_lists_kernel"}
LONG_SOFT_TOP_K = {"_pack_kernel", "_pairs_kernel", "_ranks_kernel", "_items_kernel"}
UPDATE = {"_collect_kernel", "_arrive_kernel", "_order_kernel", "_fold_kernel", "_step_kernel"}
MERGE = {"_merge_kernel"}
TOP_K = {"_filter_kernel", "_rank_kernel"}


def test_no_kernel_is_left_out() -> None:
    modules = (buckets, filter, gradients, sampling, softsort, softsort_tiled, topk, update, users)
    kernels = {name for module in modules for name in vars(module) if re.fullmatch(r"_\w+_kernel", name)}
    assert kernels == SAMPLE | SAMPLE_USERS | GRADIENTS | SOFT_TOP_K | LONG_SOFT_TOP_K | MERGE | UPDATE | TOP_K


@pytest.mark.parametrize(
    ("user_sampling", "rho", "eta", "seed", "epoch", "share", "start", "stop"),
    [
        ("proportional", 3, 13, 7, 2**30 + 1, 5, 5, 25),
        ("uniform", 1, 4, 2**62 + 12345, 1, 1, 0, 20),
        pytest.param("proportional", 6, 70, 0, 0, 1, 3, 20, marks=slow),  # two blocks of positives and of negatives
        pytest.param("uniform", 6, 70, 1, 16, 64, 0, 20, marks=slow),  # a group larger than the batch
    ],
)
def test_sample_lists(
    user_sampling: UserSampling, rho: int, eta: int, seed: int, epoch: int, share: int, start: int, stop: int
) -> None:
    plan = random_plan(rho, eta, seed, user_sampling, share, device="cpu")

    def draw() -> list[Tensor]:
        batch = gpu.sample_lists(plan, epoch, start, stop)
        return [batch.users, batch.items, *(batch.shared[1:] if batch.shared else ())]

    drawn, statistics = emulate(draw)
    expected = reference.sample_lists(plan, epoch, start, stop)
    for actual, right in zip(drawn, [expected.users, expected.items, *(expected.shared or ())[1:]], strict=True):
        assert torch.equal(actual, right)
    if expected.shared is not None:
        assert expected.shared.replaced.any()
    assert set(statistics) == (SAMPLE if share > 1 else {"_sample_kernel"})


@pytest.mark.parametrize(("rho", "eta"), [(3, 13), pytest.param(6, 70, marks=slow)])
def test_sample_users(rho: int, eta: int) -> None:
    plan, seeds = random_plan(rho, eta, device="cpu"), torch.arange(23) * 2**40 + 11

    def drawn() -> tuple[Tensor, Tensor]:
        batch = gpu.sample_users(plan, seeds, 3, 2)
        return batch.users, batch.items

    (users, items), statistics = emulate(drawn)
    expected = reference.sample_users(plan, seeds, 3, 2)
    assert torch.equal(users, expected.users)
    assert torch.equal(items, expected.items)
    assert set(statistics) == SAMPLE_USERS


# n, d, lists of a group, objective
GRADIENT_CASES = [
    (20, 16, 3, Objective(3, "l2", k=4, tau=0.5, lam=0.7, weight="ndcg")),
    (18, 16, 1, Objective(2, "dot", weight="ap", mse=True)),
    (17, 16, 2, Objective(2, "cosine", hinge=False, drm=False, softmax=True, psl=True, bpr=True, temperature=0.3)),
    (130, 16, 3, Objective(2, "l2", weight="ap", mse=True)),
    *(
        pytest.param(20, 16, 1, Objective(2, "dot", **{**dict.fromkeys(LOSSES, False), loss: True}), marks=slow)
        for loss in LOSSES
    ),
    pytest.param(18, 20, 1, Objective(2, "dot"), marks=slow),
    pytest.param(46, 64, 32, Objective(1, "dot"), marks=slow),
    pytest.param(48, 128, 1, Objective(3, "l2", tau=10.0, weight="ap"), marks=slow),
    pytest.param(70, 50, 2, Objective(4, "l2", k=7, weight="recall"), marks=slow),
    pytest.param(128, 100, 3, Objective(8, "dot", weight="precision", mse=True), marks=slow),
    pytest.param(200, 70, 1, Objective(3, "dot", k=20, tau=3.0, softmax=True, psl=True, bpr=True), marks=slow),
]


@pytest.mark.parametrize(("n", "d", "size", "objective"), GRADIENT_CASES)
def test_list_gradients(n: int, d: int, size: int, objective: Objective) -> None:
    U, V, draw = factors(7, d, "U"), factors(600, d, "V"), generator(n, d)
    B = size + 1 if n <= softsort.MAX_ITEMS else 1
    users = torch.randint(7, (B,), generator=draw, dtype=torch.int32)
    items, shared = 300 + torch.randint(300, (B, n), generator=draw, dtype=torch.int32), None
    if size > 1:
        items_of_groups = torch.randint(300, (-(-B // size), n - objective.rho), generator=draw, dtype=torch.int32)
        items, shared = share_negatives(items, items_of_groups, size, 0.1, draw)
    batch = ListBatch(users, items, shared)
    results, statistics = emulate(lambda: gpu.list_gradients(U, V, batch, objective))
    expected = reference.list_gradients(U.double(), V.double(), batch, objective)
    for name, actual, right in zip(expected._fields, results, expected, strict=True):
        assert_close(actual, right, CLOSE, name, max(1.0, right.abs().max().item()))
    tiled = LONG_SOFT_TOP_K if objective.drm and n > softsort.MAX_ITEMS else set()
    assert set(statistics) == GRADIENTS | tiled


@pytest.mark.parametrize(("n", "d", "score"), [(18, 16, "l2"), pytest.param(46, 64, "dot", marks=slow)])
def test_list_gradients_of_bfloat16(n: int, d: int, score: Score) -> None:
    U, V, draw = factors(7, d, "U").bfloat16(), factors(600, d, "V").bfloat16(), generator(n, d)
    own, negatives = (torch.randint(300, shape, generator=draw, dtype=torch.int32) for shape in ((3, n), (2, n - 2)))
    items, shared = share_negatives(300 + own, negatives, 2, 0.1, draw)
    batch = ListBatch(torch.tensor([6, 0, 3], dtype=torch.int32), items, shared)
    results, statistics = emulate(lambda: gpu.list_gradients(U, V, batch, Objective(2, score)))
    expected = reference.list_gradients(U.double(), V.double(), batch, Objective(2, score))
    for name, actual, right in zip(expected._fields, results, expected, strict=True):
        assert actual.dtype == torch.float32
        assert_close(actual, right, CLOSE, name, max(1.0, right.abs().max().item()))
    assert set(statistics) == GRADIENTS


def test_a_list_with_an_id_outside_its_table_is_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel must not read the row: here that would be out of bounds."""
    monkeypatch.setattr(gradients, "check_lists", lambda *_, **__: None)
    U, V = factors(3, 16, "U"), factors(9, 16, "V")
    items = torch.arange(40, dtype=torch.int32).view(2, 20) % 9
    items[1, 5], items[1, 6] = 9, -1
    results, _ = emulate(lambda: gpu.list_gradients(U, V, ListBatch(items[:, 0], items), Objective(2)), seeds=[0])
    assert not any(x[0].isnan().any() for x in results[:1])
    assert results[0][1].isnan().sum() == 2


@pytest.mark.parametrize(
    ("n", "k", "dtype"),
    [
        (20, 3, torch.float32),
        (17, 2, torch.float64),
        pytest.param(128, 9, torch.float32, marks=slow),
        pytest.param(48, 5, torch.float32, marks=slow),
        pytest.param(140, 3, torch.float64, marks=slow),
    ],
)
def test_soft_topk(n: int, k: int, dtype: torch.dtype) -> None:
    draw = generator(n, k)
    s, q = torch.randn(2, 2, n, generator=draw, dtype=torch.float64)
    mask, w = torch.rand(2, n, generator=draw) < 0.8, torch.rand(2, k, generator=draw, dtype=torch.float64)
    s, q, w, y = (x.to(dtype) for x in (s, q, w, s > 1))

    def run() -> list[Tensor]:
        drm = gpu.drm_lists(s, y, w, 0.8, mask)
        return [gpu.soft_topk_forward(s, w, 0.8, mask), gpu.soft_topk_backward(s, w, 0.8, mask, q), *drm]

    seeds = SEEDS[:1] if softsort.tiled(s) else SEEDS
    results, statistics = emulate(run, seeds)
    x, q, w, y = (x.double() for x in (s, q, w, y))
    expected = [reference.soft_topk_forward(x, w, 0.8, mask), reference.soft_topk_backward(x, w, 0.8, mask, q)]
    expected += reference.drm_lists(x, y, w, 0.8, mask)
    for name, actual, right in zip(("Q", "ds", "loss", "drm"), results, expected, strict=True):
        assert_close(actual, right, CLOSE if dtype == torch.float32 else 1e-13, name)
    assert set(statistics) == (LONG_SOFT_TOP_K if softsort.tiled(s) else SOFT_TOP_K)


@pytest.mark.parametrize(
    ("score", "d", "size", "dense"),
    [
        ("dot", 16, 1, False),
        ("l2", 20, 3, True),
        ("cosine", 16, 3, False),
        pytest.param("l2", 128, 64, False, marks=slow),
        pytest.param("dot", 256, 5, True, marks=slow),
        pytest.param("cosine", 64, 1, True, marks=slow),
    ],
)
def test_update_rows(score: Score, d: int, size: int, dense: bool) -> None:
    draw = generator(score, d, size)
    B, m, n_rows = 7, 12, 40
    rows, shared = torch.randint(n_rows - 2, (B, m), generator=draw, dtype=torch.int32), None
    if size > 1:
        items = torch.randint(n_rows - 2, (-(-B // size), 10), generator=draw, dtype=torch.int32)
        rows, shared = share_negatives(rows, items, size, 0.2, draw)
    coefficients = torch.randn(B, m, generator=draw)
    coefficients[:, ::3] = 0
    vectors, sources = torch.randn(6, d, generator=draw) / d**0.5, torch.randint(6, (B,), generator=draw).int()
    table, state = factors(n_rows, d, "table"), torch.rand(n_rows, d, generator=draw) + 0.1
    extra = torch.randn(n_rows, d, generator=draw) if dense else None

    def run() -> list[Tensor]:
        moved, moved_state = table.clone(), state.clone()
        terms = GradientTerms(rows, coefficients, vectors, sources, shared)
        gpu.update_rows(moved, moved_state, terms, 0.1, score, extra)
        return [moved, moved_state]

    results, statistics = emulate(run)
    expected, expected_state = table.double(), state.double()
    terms = with_gradient(GradientTerms(rows, coefficients, vectors, sources))
    reference.update_rows(expected, expected_state, terms, 0.1, score, None if extra is None else extra.double())
    assert_close(results[0], expected, CLOSE, "table")
    assert_close(results[1], expected_state, CLOSE, "state")
    if not dense:
        assert torch.equal(results[0][-2:], table[-2:])
    assert set(statistics) == (UPDATE | MERGE if size > 1 else UPDATE)


@pytest.mark.parametrize(("score", "d", "B"), [("dot", 16, 20), pytest.param("l2", 70, 70, marks=slow)])
def test_an_update_of_long_lists_with_few_gradients(
    score: Score, d: int, B: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some tiles have no gradient, some are added one by one, and some as a product. The product gives the same."""
    draw = generator(score, d, B)
    eta, n_rows = 144, 300
    items = torch.randint(n_rows // 2, (1, eta), generator=draw, dtype=torch.int32)
    rows, shared = torch.randint(n_rows // 2, (B, 1 + eta), generator=draw, dtype=torch.int32), None
    rows, shared = share_negatives(rows, items, 80, 0.05, draw)
    density = torch.full((1 + eta,), 0.05)
    density[17:49], density[65:81] = 0, 0.9
    coefficients = torch.randn(B, 1 + eta, generator=draw) * (torch.rand(B, 1 + eta, generator=draw) < density)
    vectors, sources = factors(6, d, "x"), torch.randint(6, (B,), generator=draw).int()
    table, state = factors(n_rows, d, "table"), torch.rand(n_rows, d, generator=draw) + 0.1
    terms = GradientTerms(rows, coefficients, vectors, sources, shared)

    def run() -> list[Tensor]:
        moved, moved_state = table.clone(), state.clone()
        gpu.update_rows(moved, moved_state, terms, 0.1, score)
        return [moved, moved_state]

    (moved, moved_state), _ = emulate(run)
    expected, expected_state, live = table.double(), state.double(), with_gradient(terms)
    reference.update_rows(expected, expected_state, live, 0.1, score)
    assert_close(moved, expected, CLOSE, "table")
    assert_close(moved_state, expected_state, CLOSE, "state")
    changed = torch.zeros(n_rows, dtype=torch.bool)
    changed[live.rows.long()] = True
    assert torch.equal((moved != table).any(1), changed)
    assert torch.equal((moved_state != state).any(1), changed)
    sizes = update.merge_sizes
    monkeypatch.setattr(update, "merge_sizes", lambda *args: sizes(*args) | {"LONG": False, "num_warps": 4})
    product, _ = emulate(run, SEEDS[:1])
    if score == "dot":  # under l2, the totals are added in another order
        assert torch.equal(product[0], moved)
        assert torch.equal(product[1], moved_state)


@pytest.mark.parametrize(
    ("score", "d", "size", "dense"),
    [
        ("cosine", 16, 3, False),
        pytest.param("dot", 5, 1, True, marks=slow),
        pytest.param("l2", 64, 4, False, marks=slow),
        pytest.param("cosine", 256, 2, True, marks=slow),
    ],
)
def test_update_rows_of_bfloat16(score: Score, d: int, size: int, dense: bool) -> None:
    _, statistics = emulate(lambda: check_rounding(gpu, torch.bfloat16, score, d, dense, size, compiled=True))
    assert set(statistics) == (UPDATE | MERGE if size > 1 else UPDATE)


@pytest.mark.parametrize("score", ["dot", "l2"])
def test_a_popular_row_is_summed_in_chunks(score: Score) -> None:
    """Row 2 has two full chunks and a rest, row 5 one full chunk."""
    draw = generator("popular")
    rows = torch.tensor([2] * 37 + [5] * 16 + [0, 7, 0], dtype=torch.int32)[torch.randperm(56, generator=draw)]
    table, vectors = factors(8, 16, "table"), torch.randn(28, 16, generator=draw) / 4
    terms = GradientTerms(rows.view(28, 2), torch.randn(28, 2, generator=draw), vectors, torch.arange(28).int())

    def run() -> list[Tensor]:
        moved, state = table.clone(), torch.ones_like(table)
        gpu.update_rows(moved, state, terms, 0.1, score)
        return [moved, state]

    (moved, state), _ = emulate(run)
    expected, expected_state = table.double(), torch.ones_like(table).double()
    in_double = terms._replace(coefficients=terms.coefficients.double(), vectors=vectors.double())
    reference.update_rows(expected, expected_state, in_double, 0.1, score)
    assert_close(moved, expected, CLOSE, "table")
    assert_close(state, expected_state, CLOSE, "state")


def test_a_group_of_one_list_and_replaced_negatives_only() -> None:
    """Nothing of the second list is merged: it has replaced both shared negatives."""
    rows = torch.tensor([[0, 3, 4], [1, 5, 6]], dtype=torch.int32)
    replaced = torch.tensor([[False, False], [True, True]])
    shared = SharedNegatives(2, torch.tensor([[3, 4]], dtype=torch.int32), replaced)
    table, vectors, sources = factors(8, 16, "table"), factors(2, 16, "x"), torch.tensor([0, 1], dtype=torch.int32)

    def run() -> list[Tensor]:
        moved, state = table.clone(), torch.ones_like(table)
        gpu.update_rows(moved, state, GradientTerms(rows, torch.ones(2, 3), vectors, sources, shared), 0.1, "l2")
        return [moved, state]

    (moved, _), _ = emulate(run)
    expected, state = table.double(), torch.ones_like(table).double()
    terms = GradientTerms(rows, torch.ones(2, 3).double(), vectors.double(), sources)
    reference.update_rows(expected, state, terms, 0.1, "l2")
    assert_close(moved, expected, CLOSE, "table")


def seen_rows(m: int, n_items: int, *key: object) -> tuple[Tensor, Tensor]:
    """Return items that queries have seen, one in ten."""
    dense = torch.rand(m, n_items, generator=generator(m, n_items, *key)) < 0.1
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), dense.sum(1).cumsum(0)])
    return indptr, dense.nonzero()[:, 1].to(torch.int32)


@pytest.mark.parametrize(
    ("m", "d", "n_items", "k", "score", "seen"),
    [
        (3, 16, 40, 3, "dot", True),
        pytest.param(3, 20, 70, 5, "l2", True, marks=slow),
        pytest.param(66, 8, 600, 2, "cosine", True, marks=slow),  # two blocks of queries, two of the items
        pytest.param(2, 33, 5, 9, "l2", False, marks=slow),  # fewer items than k
        pytest.param(2, 200, 300, 100, "dot", True, marks=slow),  # two blocks of factors, a buffer that is pruned
    ],
)
def test_top_k(m: int, d: int, n_items: int, k: int, score: Score, seen: bool) -> None:
    draw = generator(m, d, n_items)
    queries, V = torch.randn(m, d, generator=draw), torch.randn(n_items, d, generator=draw)
    if score == "cosine":
        V /= V.norm(dim=1, keepdim=True)
    rows = seen_rows(m, n_items) if seen else None
    (items, scores), statistics = emulate(
        lambda: gpu.top_k(queries, gpu.pack_items(V, score), k, rows),
        seeds=SEEDS if n_items < 100 else SEEDS[:1],
    )
    right, right_scores = reference.top_k(queries.double(), reference.pack_items(V.double(), score), k, rows)
    assert torch.equal(items, right)
    there = right >= 0
    assert torch.equal(scores[~there], right_scores[~there].float())
    assert_close(scores[there], right_scores[there], CLOSE, "scores")
    assert set(statistics) == TOP_K
    texts = {code.program.name: compiled.asm["ptx"] for compiled, _, code in launch._compiled.values()}
    assert not any(".ftz" in texts[name] for name in TOP_K)  # the bound of the filter needs subnormal numbers


@pytest.mark.parametrize("indptr", [[0, 2, 3, 4], [-9, 70, 3, 1000]])
def test_top_k_of_values_that_nobody_has_checked(indptr: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: no access out of bounds, and NaN where there is no ranking."""
    monkeypatch.setattr(devices, "on_host", lambda _: False)
    queries, V = factors(3, 16, "U"), factors(40, 16, "V")
    packed, seen = gpu.pack_items(V, "dot"), (torch.tensor(indptr), torch.tensor([5, 7, 1, 9], dtype=torch.int32))
    expected, _ = reference.top_k(queries, packed, 3, (torch.tensor([0, 2, 3, 4]), seen[1]))
    queries[1, 3] = torch.nan
    (items, scores), _ = emulate(lambda: gpu.top_k(queries, packed, 3, seen), seeds=[0])
    ranked = torch.tensor([indptr[0] == 0, False, indptr[0] == 0])
    assert torch.equal(items[ranked], expected[ranked])
    assert torch.equal(scores.isnan(), ~ranked[:, None].expand(3, 3))
    assert (items[~ranked] == -1).all()


@slow
@pytest.mark.parametrize("score", ["dot", "l2"])
def test_instructions_of_top_k(score: Score) -> None:
    """Without the filter, a query took more than 22,000 instructions and 13,000 sectors."""
    m, n_items, draw = 64, 2048, generator(0)
    queries, V = torch.randn(m, 64, generator=draw), torch.randn(n_items, 64, generator=draw)
    rows = seen_rows(m, n_items // 10)
    packed = gpu.pack_items(V, score)
    _, statistics = emulate(lambda: gpu.top_k(queries, packed, 10, rows), seeds=[0])
    assert sum(x.total for x in statistics.values()) <= 7_100 * m
    assert statistics["_filter_kernel"].total <= 650 * m
    assert sum(x.sectors_read + x.sectors_written for x in statistics.values()) <= 4_200 * m
