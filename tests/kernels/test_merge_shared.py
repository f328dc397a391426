"""Terms that are merged before they are sent, and rows of a shard."""

import pytest
import torch

from drm_triton.kernels import cpu, reference
from drm_triton.kernels.batches import ListBatch
from drm_triton.kernels.protocol import Backend, GradientTerms, ListPlan, Objective, Rounding
from drm_triton.kernels.streams import USER_TABLE

SCORES = ("dot", "l2", "cosine")


def some_batch(share: int, eta: int = 20) -> tuple[ListPlan, ListBatch]:
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(40, 60, generator=generator) < 0.3
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), mask.sum(1).cumsum(0)])
    plan = ListPlan(indptr, mask.nonzero()[:, 1].int(), 60, rho=2, eta=eta, share=share)
    return plan, cpu.sample_lists(plan, 0, 0, 150)


def some_terms(share: int, eta: int = 20) -> GradientTerms:
    _, batch = some_batch(share, eta)
    generator = torch.Generator().manual_seed(1)
    g = torch.randn(batch.items.shape, generator=generator)
    return GradientTerms.of_items(batch, g, torch.randn(40, 8, generator=generator))


def table() -> tuple[torch.Tensor, torch.Tensor]:
    V = torch.randn(60, 8, generator=torch.Generator().manual_seed(2))
    return V / V.norm(dim=1, keepdim=True), torch.full((60, 8), 0.5)


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize(("share", "eta"), [(1, 20), (32, 20), (300, 20), (128, 300)])
def test_merged_terms_give_the_same_step_to_the_bit(score: str, share: int, eta: int) -> None:
    terms = some_terms(share, eta)
    merged = cpu.merge_shared(terms)
    assert merged.shared is None
    assert merged.rows.shape[1] == 1
    if share > 1:
        assert len(merged.rows) < terms.rows.numel() / 2
    results = []
    for one in (terms, merged):
        V, state = table()
        cpu.update_rows(V, state, one, 0.1, score)
        results.append((V, state))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("score", SCORES)
def test_the_reference_takes_merged_terms(score: str) -> None:
    terms = some_terms(32)
    results = []
    for one in (terms, cpu.merge_shared(terms), reference.merge_shared(terms)):
        V, state = table()
        reference.update_rows(V, state, one, 0.1, score)
        results.append(V)
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(results[2], results[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", [cpu, reference])
def test_a_part_of_the_items_with_the_size_of_the_catalogue(backend: Backend) -> None:
    _, batch = some_batch(32)
    assert batch.shared is not None
    U, V = torch.randn(40, 8) / 4, torch.randn(60, 8) / 4
    objective = Objective(2, hinge=True)
    whole = backend.list_gradients(U, V, batch, objective)
    found, places = torch.cat([batch.items.flatten(), batch.shared.items.flatten()]).unique(return_inverse=True)
    n = batch.items.numel()
    local = ListBatch(
        batch.users,
        places[:n].reshape(batch.items.shape).int(),
        batch.shared._replace(items=places[n:].reshape(batch.shared.items.shape).int()),
    )
    part = backend.list_gradients(U, V[found.long()], local, objective, 60)
    assert torch.equal(part.g, whole.g)
    assert torch.equal(part.user_grad, whole.user_grad)
    other = backend.list_gradients(U, V[found.long()], local, objective, 6000)
    assert not torch.equal(other.hinge, whole.hinge)  # the weight of the hinge depends on the number of items


@pytest.mark.parametrize("backend", [cpu, reference])
def test_rounding_knows_the_row_in_the_whole_table(backend: Backend) -> None:
    V, state = table()
    rows = torch.arange(60, dtype=torch.int32)
    gradients = torch.randn(60, 8)
    whole = V.clone()
    backend.update_rows(
        whole, state.clone(), GradientTerms.of_rows(rows, gradients), 0.1, "dot", None, Rounding(5, 7, USER_TABLE)
    )
    part = V[20:].clone()
    terms = GradientTerms.of_rows(rows[:40], gradients[20:])
    backend.update_rows(part, state[20:].clone(), terms, 0.1, "dot", None, Rounding(5, 7, USER_TABLE, first_row=20))
    assert torch.equal(part, whole[20:])
