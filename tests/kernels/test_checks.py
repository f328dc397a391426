"""What every backend promises about bad values and bad arguments: the same on the reference, the CPU and Triton."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from drm_triton.errors import InputError
from drm_triton.kernels import cpu, reference
from drm_triton.kernels.batches import ListBatch, SharedNegatives
from drm_triton.kernels.checks import can_rank
from drm_triton.kernels.protocol import GradientTerms, ListPlan, Objective
from drm_triton.names import Score, Weight

BACKENDS = {"reference": (reference, "cpu"), "cpu": (cpu, "cpu")}
try:
    from drm_triton.kernels import gpu

    BACKENDS["triton"] = (gpu, "cuda" if torch.cuda.is_available() else "cpu")
except ImportError:  # Triton is available on Linux only
    pass

LENGTHS = [9, 150]  # one program a list, and tiles, on Triton


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Any:
    """A backend whose operations are called with tensors of the CPU, moved to its device and back."""
    return OnDevice(*BACKENDS[request.param])


class OnDevice:
    def __init__(self, module: Any, device: str) -> None:
        self.module, self.device = module, device

    def __getattr__(self, operation: str) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            result = getattr(self.module, operation)(*move(args, self.device), **move(options, self.device))
            return move(result, "cpu")

        return call


def move(x: Any, device: str) -> Any:
    if isinstance(x, torch.Tensor):
        return x.to(device)
    if isinstance(x, dict):
        return {key: move(value, device) for key, value in x.items()}
    if isinstance(x, tuple):
        moved = (move(value, device) for value in x)
        return type(x)(*moved) if hasattr(x, "_fields") else tuple(moved)
    return x


def factors(rows: int, d: int, seed: int) -> Tensor:
    return torch.randn(rows, d, generator=torch.Generator().manual_seed(seed)) / d**0.5


def lists(n: int, B: int = 3) -> Any:
    """Factors, users and items of B lists that share no item."""
    U, V = factors(5, 4, 1), factors(B * n, 4, 2)
    users = torch.arange(B, dtype=torch.int32)
    return U, V, users, torch.arange(B * n, dtype=torch.int32).view(B, n)


def scores(n: int, B: int = 3) -> Any:
    """Scores, relevance, rank weights, mask and an upstream gradient of B lists, some entries masked."""
    draw = torch.Generator().manual_seed(n)
    s, q = torch.randn(B, n, generator=draw), torch.randn(B, n, generator=draw)
    y, mask = torch.randint(0, 2, (B, n), generator=draw).float(), torch.rand(B, n, generator=draw) < 0.8
    mask[:, 0] = True
    return s, y, torch.ones(B, 2), mask, q


# ---------------------------------------------------------------------------------------------------------------
# Scores that are not finite


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("n", LENGTHS)
def test_a_bad_score_shows(backend: Any, bad: float, n: int) -> None:
    """It spoils its whole list, and no other."""
    s, y, w, mask, q = scores(n)
    s[1, 0] = bad
    loss, ds = backend.drm_lists(s, y, w, 1.0, mask)
    assert loss.isnan().tolist() == [False, True, False]
    for x in (
        ds,
        backend.soft_topk_forward(s, w, 1.0, mask),
        backend.soft_topk_backward(s, w, 1.0, mask, q),
    ):
        assert x[1][mask[1]].isnan().all()
        assert (x[1][~mask[1]] == 0).all()
        assert x[[0, 2]].isfinite().all()


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize(
    ("parts", "position", "bad"),
    [
        *(((1, 1, 1), position, bad) for position in (0, -1) for bad in (math.nan, math.inf, -math.inf)),
        *(((1, 0, 0), position, bad) for position, bad in ((0, math.nan), (-1, math.inf), (0, -math.inf))),
        *(((0, 1, 0), position, bad) for position, bad in ((-1, math.nan), (0, math.inf), (-1, -math.inf))),
        *(((0, 0, 1), position, bad) for position, bad in ((0, math.nan), (-1, math.inf), (0, -math.inf))),
    ],
)
def test_a_bad_factor_shows_in_losses_and_gradients(
    backend: Any, bad: float, n: int, position: int, parts: tuple[int, int, int]
) -> None:
    U, V, users, items = lists(n)
    V[items[1, position].long(), 2] = bad
    on = dict(zip(("hinge", "drm", "mse"), map(bool, parts), strict=True))
    got = backend.list_gradients(U, V, ListBatch(users, items), Objective(2, **on))
    for name in ("loss", "g", "user_grad", *(part for part in on if on[part])):
        x = getattr(got, name)
        assert x[1].isnan().all(), name
        assert x[[0, 2]].isfinite().all(), name
    assert all((getattr(got, part) == 0).all() for part in on if not on[part])


# ---------------------------------------------------------------------------------------------------------------
# Training interactions


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def plan(
    indptr: Sequence[int] = (0, 2, 3),
    indices: Sequence[int] = (1, 3, 0),
    n_items: int = 6,
    rho: int = 2,
    eta: int = 3,
    **options: Any,
) -> ListPlan:
    return ListPlan(torch.tensor(indptr), int32(*indices), n_items, rho, eta, **options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"indptr": (0, 2, 5)}, r"indptr must go from 0 to 3, the length of indices, got ends \[0, 5\]"),
        ({"indptr": (1, 2, 3)}, r"indptr must go from 0 to 3, .* got ends \[1, 3\]"),
        ({"indptr": ()}, "indptr must be int64"),
        ({"indptr": (0, 4, 3)}, r"the indptr must ascend within \[0, 3\]"),
        ({"indices": (3, 1, 0)}, "the indices must ascend within each row, without repeats"),
        ({"indices": (1, 1, 0)}, "the indices must ascend within each row, without repeats"),
        ({"indices": (1, 6, 0)}, r"the indices must be in \[0, 6\), got values 0 to 6"),
        ({"indices": (-5, 3, 0)}, r"the indices must be in \[0, 6\), got values -5 to 3"),
        ({"n_items": 6.5}, "n_items must be an integer from 1 to 2147483647, got 6.5"),
        ({"n_items": 0}, "n_items must be an integer from 1"),
        ({"rho": 1.5}, "rho must be an integer from 1 to 2147483647, got 1.5"),
        ({"eta": 0}, "eta must be an integer from 1 to 2147483647, got 0"),
        ({"seed": -1}, "seed must be an integer from 0 .* got -1"),
        ({"user_sampling": "popular"}, "user_sampling must be one of proportional, uniform"),
    ],
)
def test_interactions_are_looked_through_when_a_plan_is_made(change: Any, message: str) -> None:
    with pytest.raises(InputError, match=f"^ListPlan: {message}"):
        plan(**change)


def test_interactions_of_the_wrong_shape_type_or_device() -> None:
    indptr, indices = torch.tensor([0, 2, 3]), int32(1, 3, 0)
    for args, message in (
        ((indptr[None], indices), r"indptr must have shape \[any\], got \[1, 3\]"),
        ((indptr[:0], indices), r"indptr must go from 0 to 3, .* got ends \[\]"),
        ((indptr.int(), indices), "indptr must be int64, got int32"),
        ((indptr, indices.long()), "indices must be int32, got int64"),
        ((indptr, indices.to("meta")), "indices must hold values, got a tensor on the meta device"),
        (([0, 2, 3], indices), "indptr must be a torch tensor, got list"),
    ):
        with pytest.raises(InputError, match=f"^ListPlan: {message}"):
            ListPlan(args[0], args[1], 6, 2, 3)


def test_rows_may_start_over_at_the_edge_of_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interactions are checked in chunks; a fall between two of them is seen once, like any other."""
    for chunk in (1, 2, 3, 4, 5):
        monkeypatch.setattr("drm_triton.kernels.checks.CSR_CHUNK", chunk)
        plan((0, 2, 2, 5, 6), (1, 3, 0, 2, 4, 4))
        with pytest.raises(InputError, match="ascend within each row"):
            plan((0, 2, 2, 5, 6), (1, 3, 0, 4, 2, 4))
        with pytest.raises(InputError, match="ascend within each row"):
            plan((0, 3, 3, 5, 6), (1, 3, 0, 2, 4, 4))


def test_interactions_need_not_be_contiguous(backend: Any) -> None:
    def strided(x: Tensor) -> Tensor:
        return torch.stack([x, torch.full_like(x, 9)], 1)[:, 0]

    indptr, indices = torch.tensor([0, 2, 3]), int32(1, 3, 0)
    whole = ListPlan(move(indptr, backend.device), move(indices, backend.device), 6, 2, 3)
    parts = ListPlan(strided(move(indptr, backend.device)), strided(move(indices, backend.device)), 6, 2, 3)
    got, want = (backend.sample_lists(plan, 0, 0, 2) for plan in (parts, whole))
    assert torch.equal(got.users, want.users)
    assert torch.equal(got.items, want.items)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((-1, 0, 1), "epoch must be an integer from 0 .* got -1"),
        ((1.5, 0, 1), "epoch must be an integer from 0 .* got 1.5"),
        ((0, -1, 1), "start must be an integer from 0 .* got -1"),
        ((0, 2, 1), "stop must be an integer from 2 .* got 1"),
        ((0, 0, 3), "an epoch has 2 lists, cannot draw number 2"),
    ],
)
def test_bad_arguments_of_sample_lists(backend: Any, args: Any, message: str) -> None:
    with pytest.raises(InputError, match=f"^sample_lists: {message}"):
        backend.module.sample_lists(plan(), *args)


# ---------------------------------------------------------------------------------------------------------------
# Lists and updates


def on_host(backend: Any) -> None:
    """Skip where values lie on a GPU: there the kernels guard themselves, see the tests of Triton."""
    if backend.device != "cpu":
        pytest.skip("values on a GPU are not waited for")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"items": -1}, r"items must be in \[0, 27\), got values -1 to"),
        ({"items": 27}, r"items must be in \[0, 27\), got values .* to 27"),
        ({"users": -1}, r"users must be in \[0, 5\), got values -1 to"),
        ({"users": 5}, r"users must be in \[0, 5\), got values .* to 5"),
    ],
)
def test_ids_outside_the_tables(backend: Any, change: Any, message: str) -> None:
    on_host(backend)
    U, V, users, items = lists(9)
    tensors = {"users": users, "items": items}
    for name, value in change.items():
        tensors[name].view(-1)[1] = value
    with pytest.raises(InputError, match=f"^list_gradients: {message}"):
        backend.list_gradients(U, V, ListBatch(users, items), Objective(2))


def test_tables_without_rows_or_columns(backend: Any) -> None:
    U, V, users, items = lists(9)
    batch = ListBatch(users, items)
    for args, message in (
        ((U[:, :0], V[:, :0], batch), r"U must have at least one row and one column, got \[5, 0\]"),
        ((U, V[:0], batch), r"V must have at least one row and one column, got \[0, 4\]"),
    ):
        with pytest.raises(InputError, match=message):
            backend.list_gradients(*args, Objective(2))


@pytest.mark.parametrize("weight", ["uniform", "ndcg", "ap"])
def test_a_cut_off_beyond_the_list_does_not_matter_without_drm(backend: Any, weight: Weight) -> None:
    U, V, users, items = lists(9)
    batch = ListBatch(users, items)
    got = backend.list_gradients(U, V, batch, Objective(2, k=10, drm=False, weight=weight))
    want = backend.list_gradients(U, V, batch, Objective(2, drm=False))
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))
    with pytest.raises(InputError, match="list_gradients: k must be at most the list length 9, got 10"):
        backend.list_gradients(U, V, batch, Objective(2, k=10, weight=weight))


def update(backend: Any, **change: Any) -> Any:
    arguments: dict[str, Any] = {
        "table": factors(6, 4, 3), "state": torch.ones(6, 4), "lr": 0.1, "score": "dot", "dense": None,
        "rows": int32(0, 1, 1, 5), "coefficients": torch.ones(2, 2),
        "vectors": factors(3, 4, 4), "sources": int32(0, 2),
    } | change  # fmt: skip
    rows, coefficients, vectors, sources = (arguments.pop(name) for name in GradientTerms._fields[:4])
    backend.update_rows(**arguments, terms=GradientTerms(rows.view(2, 2), coefficients, vectors, sources))
    return arguments["table"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": int32(0, -1, 1, 5)}, r"rows must be in \[0, 6\), got values -1 to 5"),
        ({"rows": int32(0, 1, 6, 5)}, r"rows must be in \[0, 6\), got values 0 to 6"),
        ({"sources": int32(-1, 2)}, r"sources must be in \[0, 3\), got values -1 to 2"),
        ({"sources": int32(0, 3)}, r"sources must be in \[0, 3\), got values 0 to 3"),
    ],
)
def test_entries_outside_the_tables(backend: Any, change: Any, message: str) -> None:
    on_host(backend)
    with pytest.raises(InputError, match=f"^update_rows: {message}"):
        update(backend, **change)


def test_an_update_needs_something_to_add(backend: Any) -> None:
    with pytest.raises(InputError, match=r"^update_rows: vectors must have at least one row and one column"):
        update(backend, vectors=torch.ones(0, 4))


def test_terms_that_are_summed_already_have_no_shared_ones(backend: Any) -> None:
    shared = SharedNegatives(2, int32(0, 1).view(1, 2), torch.zeros(2, 2, dtype=torch.bool))
    rows = int32(5, 0, 1, 4, 0, 1).view(2, 3)
    terms = GradientTerms(rows, torch.ones(2, 3), factors(2, 4, 1), int32(0, 1), shared)
    for more in ({"totals": torch.ones(2, 3)}, {"sums": torch.ones(1, 4)}):
        with pytest.raises(InputError, match="cannot have shared ones"):
            backend.update_rows(factors(6, 4, 5), torch.ones(6, 4), terms._replace(**more), 0.1, "dot")


def test_an_update_must_not_read_the_table_it_writes(backend: Any) -> None:
    on_host(backend)  # moving to a device would part them
    both = factors(12, 4, 5)
    for vectors in (both[:6], both[1:4], both[5:8], both.flatten()[8:20].view(3, 4)):
        with pytest.raises(InputError, match=r"^update_rows: vectors must not be, or overlap, the table"):
            update(backend, table=both[:6], vectors=vectors)
    with pytest.raises(InputError, match=r"^update_rows: dense must not be, or overlap, the table"):
        update(backend, table=both[:6], dense=both[3:9])
    update(backend, table=both[:6], vectors=both[6:9])  # side by side is fine


def test_a_dense_gradient_must_fit_the_table(backend: Any) -> None:
    with pytest.raises(InputError, match=r"^update_rows: dense must have shape \[6, 4\], got \[5, 4\]"):
        update(backend, dense=torch.ones(5, 4))


def test_a_dense_gradient_steps_every_row(backend: Any) -> None:
    """It adds to the gradient of the terms, and moves rows without any."""
    dense = factors(6, 4, 8)
    got = update(backend, dense=dense)
    table, grad = factors(6, 4, 3), dense.clone()
    vectors = factors(3, 4, 4)
    for row, source in ((0, 0), (1, 0), (1, 2), (5, 2)):
        grad[row] += vectors[source]
    want = table - 0.1 * grad / (1 + grad.square()).sqrt()
    torch.testing.assert_close(got.cpu(), want / want.norm(dim=1, keepdim=True).clamp(min=1))


@pytest.mark.parametrize("score", ["dot", "cosine"])
def test_a_dense_gradient_may_be_all_there_is(backend: Any, score: Any) -> None:
    """As in a step on the whole catalogue, whose gradient of the items has no terms."""
    table, dense = torch.nn.functional.normalize(factors(6, 4, 3)), factors(6, 4, 8)
    grad = dense - (dense * table).sum(1, keepdim=True) * table if score == "cosine" else dense
    want = table - 0.1 * grad / (1 + grad.square()).sqrt()
    lengths = want.norm(dim=1, keepdim=True)
    got, state = table.to(backend.device), torch.ones(6, 4, device=backend.device)
    backend.module.update_rows(got, state, GradientTerms.none(got), 0.1, score, dense.to(backend.device))
    torch.testing.assert_close(got.cpu(), want / (lengths if score == "cosine" else lengths.clamp(min=1)))


SHARED = SharedNegatives(2, int32(*range(21)).view(-1, 7)[:2], torch.zeros(3, 7, dtype=torch.bool))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"size": 0}, "the size of shared must be an integer of at least 1, got 0"),
        ({"size": 3}, r"the items of shared must have shape \[1, any\], got \[2, 7\]"),
        ({"items": SHARED.items.long()}, "the items of shared must be int32, got int64"),
        ({"replaced": SHARED.replaced[:2]}, r"replaced of shared must have shape \[3, 7\], got \[2, 7\]"),
        ({"replaced": SHARED.replaced.int()}, "replaced of shared must be bool, got int32"),
        ({"items": SHARED.items + 20}, r"the items of shared must be in \[0, 27\), got values 20 to 33"),
    ],
)
def test_bad_shared_negatives(backend: Any, change: Any, message: str) -> None:
    if "values" in message:
        on_host(backend)
    U, V, users, items = lists(9)
    batch = ListBatch(users, items, SHARED._replace(**change))
    with pytest.raises(InputError, match=f"^list_gradients: {message}"):
        backend.list_gradients(U, V, batch, Objective(2))
    with pytest.raises(InputError, match=f"^update_rows: {message}"):
        backend.update_rows(V, torch.ones_like(V), GradientTerms.of_items(batch, torch.ones(3, 9), U), 0.1, "dot")


def test_shared_negatives_are_all_negatives(backend: Any) -> None:
    U, V, users, items = lists(9)
    with pytest.raises(InputError, match="the items of shared must have 6 columns, the negatives, got 7"):
        backend.list_gradients(U, V, ListBatch(users, items, SHARED), Objective(3))


def test_a_batch_begins_with_a_group(backend: Any) -> None:
    with pytest.raises(InputError, match=r"^sample_lists: start must be a multiple of share = 2, .* got 1"):
        backend.module.sample_lists(plan(share=2), 0, 1, 2)


def test_a_table_that_requires_grad_is_updated(backend: Any) -> None:
    on_host(backend)
    want = update(backend)
    assert torch.equal(update(backend, table=factors(6, 4, 3).requires_grad_()).detach(), want)


@pytest.mark.parametrize("lr", [-0.1, math.nan, math.inf, None, "fast"])
def test_bad_learning_rates(backend: Any, lr: str | float | None) -> None:
    with pytest.raises(InputError, match=f"^update_rows: lr must be finite and at least 0, got {lr!r}"):
        update(backend, lr=lr)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rho": 2.5}, "rho must be an integer of at least 1, got 2.5"),
        ({"rho": None}, "rho must be an integer of at least 1, got None"),
        ({"k": 2.5}, "k must be an integer of at least 1, got 2.5"),
        ({"k": 0}, "k must be an integer of at least 1, got 0"),
        ({"tau": None}, "tau must be finite and at least 1e-32, at most 1e[+]32, got None"),
        ({"tau": "1"}, "tau must be finite .* got '1'"),
        ({"tau": 0.0}, "tau must be finite .* got 0.0"),
        ({"tau": 1e-40}, "tau must be finite .* got 1e-40"),
        ({"lam": -1.0}, "lam must be finite and at least 0, got -1.0"),
        ({"margin": math.nan}, "margin must be finite, got nan"),
        ({"margin": math.inf}, "margin must be finite, got inf"),
    ],
)
def test_bad_objectives(change: Any, message: str) -> None:
    with pytest.raises(InputError, match=f"^Objective: {message}"):
        Objective(**{"rho": 2, **change})


# ---------------------------------------------------------------------------------------------------------------
# Top-K


SEEN = torch.tensor([0, 2, 2, 4])
BAD_VALUES_OF_TOP_K: list[tuple[dict[str, Any], str]] = [
    ({"queries": torch.full((3, 4), math.inf)}, "queries holds values that are not finite"),
    ({"V": torch.full((20, 4), 1e30)}, r"scores overflow: .* norms up to .* and (inf|2e\+30)"),
    ({"queries": torch.full((3, 4), -1e30)}, "scores overflow"),
    ({"seen": (SEEN, int32(-1, 3, 0, 19))}, r"the indices of seen must be in \[0, 20\)"),
    ({"seen": (SEEN, int32(1, 3, 0, 20))}, r"the indices of seen must be in \[0, 20\)"),
    ({"seen": (SEEN, int32(3, 1, 0, 19))}, "the indices of seen must ascend within each row"),
    ({"seen": (SEEN, int32(1, 1, 0, 19))}, "the indices of seen must ascend within each row"),
    ({"seen": (torch.tensor([0, 2, 2, 5]), int32(1, 3, 0, 19))}, "the indptr of seen must ascend within"),
    ({"seen": (torch.tensor([0, 3, 2, 4]), int32(1, 3, 0, 19))}, "the indptr of seen must ascend within"),
]


def call_of_top_k(change: dict[str, Any]) -> dict[str, Any]:
    return {"queries": factors(3, 4, 6), "V": factors(20, 4, 7), "k": 3, "seen": None} | change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": 0}, "k must be an integer of at least 1, got 0"),
        ({"k": 2.5}, "k must be an integer of at least 1, got 2.5"),
        ({"queries": torch.ones(3, 5)}, r"queries must have shape \[any, 4\], got \[3, 5\]"),
        ({"seen": (torch.tensor([0, 2, 4]), int32(1, 3, 0, 19))}, r"the indptr of seen must have shape \[4\]"),
        *BAD_VALUES_OF_TOP_K,
    ],
)
def test_bad_arguments_of_top_k(backend: Any, change: Any, message: str) -> None:
    arguments = call_of_top_k(change)
    items = backend.module.pack_items(move(arguments.pop("V"), backend.device), "dot")
    if backend.device != "cpu" and (change, message) in BAD_VALUES_OF_TOP_K:
        assert backend.top_k(items=items, **arguments)[1].isnan().any()
        return
    with pytest.raises(InputError, match=f"^top_k: {message}"):
        backend.top_k(items=items, **arguments)


@pytest.mark.parametrize("change", [change for change, _ in BAD_VALUES_OF_TOP_K])
def test_bad_values_are_found_without_reading_them(change: dict[str, Any]) -> None:
    arguments = call_of_top_k(change)
    items = reference.pack_items(arguments["V"], "dot")
    assert not can_rank(arguments["queries"], items, arguments["seen"]).any()


def test_good_values_are_found_without_reading_them() -> None:
    items = reference.pack_items(factors(20, 4, 7), "dot")
    queries = factors(3, 4, 6)
    for seen in (None, (SEEN, int32(1, 3, 0, 19)), (SEEN + 1, int32(7, 1, 3, 0, 19, 2, -1))):
        assert can_rank(queries, items, seen).all()
    queries[1, 2] = math.nan
    assert can_rank(queries, items, None).tolist() == [True, False, True]


@pytest.mark.parametrize(
    ("V", "score", "message"),
    [
        (torch.full((20, 4), math.nan), "dot", r"V holds values that are not finite \(NaN or infinity\)"),
        (torch.ones(20, 0), "dot", r"V must have at least one column, got \[20, 0\]"),
        (torch.ones(20), "dot", r"V must have shape \[any, any\], got \[20\]"),
        (torch.ones(20, 4), "hamming", "score must be one of dot, l2, cosine, got 'hamming'"),
    ],
)
def test_bad_arguments_of_pack_items(backend: Any, V: Tensor, score: Score, message: str) -> None:
    with pytest.raises(InputError, match=f"^pack_items: {message}"):
        backend.pack_items(V, score)


def top_k(
    backend: Any, queries: Tensor, V: Tensor, k: int, score: Score, seen: tuple[Tensor, Tensor] | None = None
) -> Any:
    queries, V = move((queries, V), backend.device)
    return move(backend.module.top_k(queries, backend.module.pack_items(V, score), k, seen), "cpu")


@pytest.mark.parametrize("score", ["dot", "l2"])
def test_large_factors_are_ranked_as_long_as_no_score_overflows(backend: Any, score: Score) -> None:
    queries, V = factors(3, 4, 6), factors(20, 4, 7)
    scale = 2.0**60  # scores of about 2^120, exactly the ranking of the others
    items, values = top_k(backend, queries * scale, V * scale, 20, score)
    want_items, want = top_k(backend, queries, V, 20, score)
    assert torch.equal(items, want_items)
    assert torch.equal(values, want * scale * scale)


def test_seen_items_need_not_be_contiguous(backend: Any) -> None:
    indptr, indices = move((torch.tensor([0, 2, 2, 4]), int32(1, 3, 0, 19)), backend.device)
    queries, V = factors(3, 4, 6), factors(20, 4, 7)
    strided = tuple(torch.stack([x, torch.zeros_like(x)], 1)[:, 0] for x in (indptr, indices))
    got, want = (top_k(backend, queries, V, 5, "dot", seen)[0] for seen in (strided, (indptr, indices)))
    assert torch.equal(got, want)


# ---------------------------------------------------------------------------------------------------------------
# Relaxed top-K


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a | {"tau": 0.0}, "tau must be finite and at least 1e-32, at most 1e[+]32, got 0.0"),
        (lambda a: a | {"tau": -1.0}, "tau must be finite .* got -1.0"),
        (lambda a: a | {"s": a["s"].half()}, "s must be float32 or float64, got float16"),
        (lambda a: a | {"s": a["s"][0]}, r"s must have shape \[any, any\]"),
        (lambda a: a | {"x": a["x"].double()}, "[yq] must be float32, got float64"),
        (lambda a: a | {"x": a["x"][:1]}, r"[yq] must have shape \[3, \d+\], got \[1, \d+\]"),
        (lambda a: a | {"mask": a["mask"].int()}, "mask must be bool, got int32"),
        (lambda a: a | {"mask": a["mask"][:, :4]}, r"mask must have shape \[3, \d+\], got \[3, 4\]"),
        (lambda a: a | {"w": a["w"][:2]}, r"w must have shape \[3, any\], got \[2, 2\]"),
        (lambda a: a | {"w": torch.ones(3, 151)}, r"k must be from 1 to n, got 151 rank weights for lists of \d+"),
        (lambda a: a | {"w": torch.ones(3, 0)}, "k must be from 1 to n, got 0 rank weights"),
    ],
)
def test_bad_arguments_of_the_relaxation(backend: Any, n: int, change: Any, message: str) -> None:
    s, y, w, mask, _ = scores(n)
    a = change({"s": s, "x": y, "w": w, "tau": 1.0, "mask": mask})
    with pytest.raises(InputError, match=f"^drm_lists: {message}"):
        backend.drm_lists(a["s"], a["x"], a["w"], a["tau"], a["mask"])
    with pytest.raises(InputError, match=f"^soft_topk_backward: {message}"):
        backend.soft_topk_backward(a["s"], a["w"], a["tau"], a["mask"], a["x"])
    if a["x"] is y:
        with pytest.raises(InputError, match=f"^soft_topk_forward: {message}"):
            backend.soft_topk_forward(a["s"], a["w"], a["tau"], a["mask"])
