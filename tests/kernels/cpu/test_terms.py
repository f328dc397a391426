"""`list_terms` against the float64 reference, which computes every gradient of every list."""

from dataclasses import replace
from functools import partial
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from drm_triton.errors import InputError
from drm_triton.kernels import cpu, reference
from drm_triton.kernels.batches import GroupedBatch, ListBatch
from drm_triton.kernels.cpu.active import ACTIVE_MIN
from drm_triton.kernels.cpu.runtime.simd import WIDTH
from drm_triton.kernels.cpu.runtime.threads import set_threads
from drm_triton.kernels.cpu.terms import SHARE_MIN, TILE
from drm_triton.kernels.protocol import Backend, GradientTerms, ListTerms, Objective
from drm_triton.names import LOSSES, Score, Weight
from tests.kernels.conftest import adversarial, share_negatives
from tests.kernels.cpu.conftest import EPS, THREAD_COUNTS, random_lists, random_shared_lists


def item_gradient(terms: GradientTerms, V: Tensor, score: Score) -> Tensor:
    """Add the terms up to the gradient of all items, in float64: [N, d]."""
    rows, V = terms.rows.long(), V.double()
    coefficients = terms.coefficients.double()
    totals = coefficients if terms.totals is None else terms.totals.double()
    x = coefficients[:, :, None] * terms.joined().vectors.double()[terms.sources.long()][:, None]
    if score == "l2":
        x = 2 * (x - totals[:, :, None] * V[rows])
    return torch.zeros_like(V).index_add_(0, rows.flatten(), x.flatten(0, 1))


def assert_terms(
    U: Tensor, V: Tensor, batch: ListBatch, objective: Objective, weights: Tensor | None = None
) -> ListTerms:
    """Compare losses and gradients of a batch with the reference."""
    got = cpu.list_terms(U, V, batch, objective, weights)
    alone = ListBatch(batch.users, batch.items)
    of_lists = None if weights is None else weights.double()
    want = reference.list_terms(U.double(), V.double(), alone, objective, of_lists)
    found = {**got.losses, "user_grad": got.user_grad, "items": item_gradient(got.items, V, objective.score)}
    expected = {**want.losses, "user_grad": want.user_grad, "items": item_gradient(want.items, V, objective.score)}
    assert list(got.losses) == list(want.losses) == ["loss", *LOSSES]
    for name, y in expected.items():
        bound = 64 * EPS * batch.items.shape[1] ** 0.5 * max(y.abs().max().item(), 1)
        torch.testing.assert_close(found[name].double(), y, rtol=0, atol=bound, msg=partial("{}: {}".format, name))
    return got


@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    seed=st.integers(0, 99),
    B=st.integers(1, 150),
    rho=st.integers(1, 4),
    eta=st.one_of(st.integers(1, ACTIVE_MIN), st.integers(ACTIVE_MIN, 200)),
    d=st.integers(1, 70),
    size=st.integers(1, 140),
    replaced=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    score=st.sampled_from(get_args(Score)),
    weighted=st.booleans(),
)
def test_results_are_those_of_the_reference(
    seed: int, B: int, rho: int, eta: int, d: int, size: int, replaced: float, score: Score, weighted: bool
) -> None:
    U, V, batch = random_shared_lists(seed, B, rho, eta, d, size, replaced)
    weights = torch.rand(B, generator=torch.Generator().manual_seed(seed)) if weighted else None
    assert_terms(U, V, batch, Objective(rho, score=score, tau=0.5, lam=0.7), weights)


@pytest.mark.parametrize("score", get_args(Score))
@pytest.mark.parametrize(
    ("B", "size"),
    [
        (2 * TILE + 50, TILE + 10),  # two tiles in a group, and a short last group
        (TILE + 20, TILE + 10),  # a last group with an empty tile
        (WIDTH + 1, 2**40),  # a group larger than the batch, scored in two parts
        (3 * SHARE_MIN, SHARE_MIN),
        (2 * SHARE_MIN, SHARE_MIN - 1),  # groups that are too small for tiles
    ],
)
@pytest.mark.parametrize("eta", [30, 70])
def test_groups_of_every_size(B: int, size: int, score: Score, eta: int) -> None:
    U, V, batch = random_shared_lists(5, B, 2, eta, 8, size, 0.05)
    assert_terms(U, V, batch, Objective(2, score=score, tau=0.5))


@pytest.mark.parametrize("weight", get_args(Weight))
@pytest.mark.parametrize("k", [1, 5, 40])
@pytest.mark.parametrize("eta", [45, 150])
def test_every_weight_and_cut_off(weight: Weight, k: int, eta: int) -> None:
    U, V, batch = random_shared_lists(6, 40, 5, eta, 16, 20, 0.1)
    assert_terms(U, V, batch, Objective(5, k=k, weight=weight, tau=0.3))
    assert_terms(U, V, batch, Objective(5, k=k, weight=weight, tau=0.3, hinge=False))


@pytest.mark.parametrize("objective", [Objective(2, drm=False), *(Objective(2, **{part: True}) for part in LOSSES[2:])])
def test_other_objectives(objective: Objective) -> None:
    U, V, batch = random_shared_lists(7, 40, 2, 150, 16, 20, 0.1)
    assert_terms(U, V, batch, objective)


@pytest.mark.parametrize("values", ["equal", "ties", "gaps"])
@pytest.mark.parametrize("replaced", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("eta", [45, 200])
def test_adversarial_scores(values: str, replaced: float, eta: int) -> None:
    """All scores equal; many ties; gaps so large that the hardest negative is not active. All scores are exact."""
    U, V, batch = random_shared_lists(8, 40, 1, eta, 8, 20, replaced)
    U, V = (8 * U).round() / 8, (8 * V).round() / 8
    if values == "equal":
        V[:] = V[0]
    elif values == "ties":
        V[:] = V[:3].repeat(len(V), 1)[: len(V)]
    else:
        V[batch.items[:, 0].long()] *= 1000
    assert_terms(U, V, batch, Objective(1, tau=0.5))


LONG = 100  # items of the catalogue of adversarial lists


def adversarial_lists(seed: int) -> tuple[Tensor, Tensor, ListBatch]:
    """Return U, V and lists that have exactly the scores of `adversarial`: two lists of each kind, all in one tile.

    Component c of V is the scores of kind c, and user c is a unit vector. All items of the catalogue are negatives of
    each list. A tenth of them are replaced by others, and copies of a few are the positives.
    """
    V, g = adversarial(LONG, torch.float32).T.contiguous(), torch.Generator().manual_seed(seed)
    kinds = V.shape[1]
    own = torch.randint(LONG, (2 * kinds, 3 + LONG), generator=g, dtype=torch.int32)
    everything = torch.arange(LONG, dtype=torch.int32)[None]
    batch = ListBatch(
        torch.arange(2 * kinds, dtype=torch.int32) % kinds, *share_negatives(own, everything, 2 * kinds, 0.1, g)
    )
    return torch.eye(kinds), V, batch


def assert_adversarial_terms(objective: Objective, seed: int) -> None:
    """Compare losses and gradients with the reference. The tolerance follows the scores of each list."""
    U, V, batch = adversarial_lists(seed)
    got = cpu.list_terms(U, V, batch, objective)
    want = reference.list_terms(U.double(), V.double(), ListBatch(batch.users, batch.items), objective)
    n, kinds = batch.items.shape[1], len(U)
    size = V.abs().amax(0).clamp(min=8).double()  # of a kind; lists of equal scores have terms that cancel
    logits, exact = n**0.5 + 4 * objective.K * size / objective.tau, 2 * n * size / objective.tau
    bound = 4 * (EPS * logits + 2.0**-52 * exact)
    of_items, wanted = item_gradient(got.items, V, "dot"), item_gradient(want.items, V, "dot")
    allowed = bound * wanted.abs().amax(0).clamp(min=1)  # a column belongs to the lists of a kind
    assert ((of_items - wanted).abs() <= allowed).all(), "items"
    sums = allowed[batch.users.long()][:, None] * V.abs().sum(0)
    assert ((got.user_grad - want.user_grad).abs() <= sums).all(), "user_grad"
    for name in ("loss", "drm"):
        loss = want.losses[name].view(2, kinds)
        error = (got.losses[name].view(2, kinds) - loss).abs()
        assert (error <= bound * loss.abs().clamp(min=1)).all(), name


@pytest.mark.parametrize("weight", get_args(Weight))
@pytest.mark.parametrize("k", [1, 5, LONG + 2, LONG + 3])
def test_adversarial_lists_for_every_weight_and_cut_off(weight: Weight, k: int) -> None:
    for tau in (0.1, 1.0, 10.0):
        assert_adversarial_terms(Objective(3, k=k, weight=weight, tau=tau, hinge=tau == 1), k)


def test_lists_with_their_own_negatives() -> None:
    U, V, batch = random_lists(1, 30, 300, 16)
    assert_terms(U, V, batch, Objective(2, tau=0.5))


def test_terms_are_few() -> None:
    """Only items with a gradient have a term: a step reads and writes no other rows."""
    U, V, batch = random_shared_lists(9, 64, 1, 1000, 16, 32, 0.05)
    for lists in (batch, ListBatch(batch.users, batch.items)):
        got = assert_terms(U, V, lists, Objective(1, tau=0.05))
        touched = reference.list_gradients(U.double(), V.double(), lists, Objective(1, tau=0.05)).g.abs() > 1e-8
        rows = set(got.items.rows.flatten().tolist())
        assert set(batch.items[touched].tolist()) <= rows
        assert len(rows) < len(torch.unique(batch.items)) / 2


@pytest.mark.parametrize("eta", [45, 90])
def test_a_shared_negative_that_all_lists_replaced_has_no_term(eta: int) -> None:
    U, V, batch = random_shared_lists(3, 33, 1, eta, 16, 16, 0.0)
    assert batch.shared is not None
    batch.shared.replaced[:, 5] = True
    batch.items[:, 6] = torch.arange(33, dtype=torch.int32) % 20
    got = assert_terms(U, V, batch, Objective(1, tau=0.5))
    assert set(got.items.rows.flatten().tolist()) <= set(batch.items.flatten().tolist())
    assert not set(batch.shared.items[:, 5].tolist()) <= set(batch.items.flatten().tolist())


@pytest.mark.parametrize(("lowest", "tau"), [(-1e38, 0.5), (-1e37, 0.05), (-1e36, 0.01)])
def test_one_very_low_score_changes_nothing(lowest: float, tau: float) -> None:
    """Its logit overflows float32."""
    U, V, batch = random_shared_lists(3, 16, 5, 20, 1, 16, 0.0)
    U[:], V[:] = 1, torch.linspace(0, 2, len(V))[:, None]
    want = cpu.list_terms(U, V, ListBatch(batch.users, batch.items), Objective(5, tau=tau, hinge=False))
    V[batch.items[0, -1].long()] = lowest
    got = cpu.list_terms(U, V, batch, Objective(5, tau=tau, hinge=False))
    alone = cpu.list_terms(U, V, ListBatch(batch.users, batch.items), Objective(5, tau=tau, hinge=False))
    torch.testing.assert_close(got.losses["drm"], alone.losses["drm"])
    assert (got.losses["drm"] - want.losses["drm"]).abs().max() < 1


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("replaced", [0.0, 0.3])
@pytest.mark.parametrize("eta", [45, 90])
def test_a_bad_shared_item_spoils_only_the_lists_that_contain_it(bad: float, replaced: float, eta: int) -> None:
    U, V, batch = random_shared_lists(3, 48, 1, eta, 16, 16, replaced)
    assert batch.shared is not None
    item = batch.shared.items[1, 5]  # of lists 16 to 31
    V[item.long()] = bad
    got = cpu.list_terms(U, V, batch, Objective(1))
    hit = (batch.items == item).any(1)
    assert hit[16:32].any()
    for x in (got.losses["loss"], got.user_grad):
        assert x[hit].isnan().all()
        assert x[~hit].isfinite().all()
    gradient = item_gradient(got.items, torch.zeros_like(V), "dot")
    spoiled = torch.zeros(len(V), dtype=torch.bool)
    spoiled[batch.items[hit].long()] = True
    assert torch.equal(gradient.isnan().any(1), spoiled)


def test_a_user_who_is_not_finite_harms_no_other_group() -> None:
    """The block of the second group has fewer lists than lanes, and the others still hold the users of the first."""
    U, V, batch = random_shared_lists(3, WIDTH + 2, 1, 100, 16, WIDTH, 0.0)
    assert batch.shared is not None
    U, V = U.abs(), V.abs() + 0.01
    U[0] = float("inf")
    batch.users[:] = 1
    batch.users[WIDTH - 1] = 0
    shared = batch.shared._replace(items=batch.shared.items[1:], replaced=batch.shared.replaced[WIDTH:])
    alone = cpu.list_terms(U, V, ListBatch(batch.users[WIDTH:], batch.items[WIDTH:], shared), Objective(1, tau=0.05))
    together = cpu.list_terms(U, V, batch, Objective(1, tau=0.05))
    terms = together.items.joined()
    of_second = terms.sources >= len(terms.vectors) - 100  # sums of its negatives
    assert of_second.sum() == (alone.items.sources >= len(U)).sum()
    assert terms.vectors[terms.sources[of_second].long()].isfinite().all()


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("eta", [45, 130])
def test_threads_do_not_change_a_bit(eta: int) -> None:
    U, V, batch = random_shared_lists(10, 700, 2, eta, 24, 300, 0.05)
    runs = []
    for count in THREAD_COUNTS:
        set_threads(count)
        losses, user_grad, items = cpu.list_terms(U, V, batch, Objective(2, tau=0.5))
        runs.append([losses["loss"], user_grad, items.rows, items.coefficients, items.totals, items.sources])
        table, state = V / V.norm(dim=1, keepdim=True), torch.ones_like(V)
        cpu.update_rows(table, state, items, 0.1, "dot")
        runs[-1] += [table, state]
    assert all(torch.equal(a, b) for a, b in zip(runs[0], runs[-1], strict=True))


@pytest.mark.parametrize("what", ["users", "positives", "replaced", "shared"])
@pytest.mark.parametrize("value", [-1, 10**6])
def test_ids_out_of_range(what: str, value: int) -> None:
    U, V, batch = random_shared_lists(4, 32, 1, 80, 8, 16, 0.2)
    assert batch.shared is not None
    match what:
        case "users":
            batch.users[3] = value
        case "positives":
            batch.items[3, 0] = value
        case "replaced":
            batch.items[:, 1:][batch.shared.replaced] = value
        case _:
            batch.shared.items[1, 7] = value
    with pytest.raises(InputError, match="must be in"):
        cpu.list_terms(U, V, batch, Objective(1))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("places", 80, r"the places of own negatives must be in \[0, 80\)"),
        ("places", -3, r"the places of own negatives must be in \[0, 80\)"),
        ("items", 10**6, "the own negatives must be in"),
        ("first", 10**6, "the own negatives must be among the"),
        ("first", 2**63 - 1, "the own negatives must be among the"),
        ("counts", -1, "the counts of own negatives must be in"),
        ("counts", 2**62, "the counts of own negatives must be in"),
    ],
)
def test_own_negatives_out_of_range(name: str, value: int, message: str) -> None:
    U, V, batch = random_shared_lists(4, 32, 1, 80, 8, 16, 0.2)
    grouped = GroupedBatch.of(batch)
    getattr(grouped.own, name)[5] = value
    with pytest.raises(InputError, match=message):
        cpu.list_terms(U, V, grouped, Objective(1))


def test_a_group_without_lists() -> None:
    grouped = GroupedBatch.of(random_shared_lists(4, 32, 1, 80, 8, 16, 0.2)[2])
    with pytest.raises(InputError, match="size must be"):
        GroupedBatch(grouped.users, grouped.of_lists, 0, grouped.of_groups, grouped.own)


def test_the_padding_of_a_list_violates_no_margin() -> None:
    """The least positive minus the margin is -inf in float32, which the padding is not below."""
    U, V, batch = random_shared_lists(4, 32, 1, 66, 8, 16, 0.2)
    V[batch.items[:, 0].long()] = -1e37
    U, objective = U.abs(), Objective(1, margin=3.4e38, drm=False)
    got = item_gradient(cpu.list_terms(U, V, batch, objective).items, V, "dot")
    g = cpu.list_gradients(U, V, batch, objective).g
    want = item_gradient(GradientTerms.of_items(ListBatch(batch.users, batch.items), g, U), V, "dot")
    assert 0 < want.abs().max() < 1000
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("backend", [cpu, reference])
def test_bad_weights(backend: Backend, shared: bool) -> None:
    U, V, batch = random_shared_lists(4, 32, 1, 80, 8, 16, 0.2)
    batch = batch if shared else ListBatch(batch.users, batch.items)
    for weights, message in (
        (torch.ones(31), r"weights must have shape \[32\]"),
        (torch.ones(32, 1), r"weights must have shape \[32\]"),
        (torch.ones(32).double(), "weights must be float32"),
    ):
        with pytest.raises(InputError, match=message):
            backend.list_terms(U, V, batch, Objective(1), weights)


def test_an_empty_batch() -> None:
    U, V, batch = random_shared_lists(4, 32, 1, 80, 8, 16, 0.2)
    assert batch.shared is not None
    shared = batch.shared._replace(items=batch.shared.items[:0], replaced=batch.shared.replaced[:0])
    none = ListBatch(batch.users[:0], batch.items[:0], shared)
    assert cpu.list_terms(U, V, none, Objective(1)).losses["loss"].shape == (0,)
    assert len(cpu.list_terms(U, V, none, replace(Objective(1), score="l2")).items.rows) == 0
