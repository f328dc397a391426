"""Sampling on the CPU: the lists of the reference, to the bit."""

from itertools import pairwise

import pytest
import torch

from drm_triton.errors import InputError
from drm_triton.kernels import cpu, reference
from drm_triton.kernels.protocol import ListBatch, ListPlan
from drm_triton.names import UserSampling
from tests.kernels.cpu.conftest import interactions

pytestmark = pytest.mark.usefixtures("poison")


def assert_equal(got: ListBatch, want: ListBatch) -> None:
    assert torch.equal(got.users, want.users)
    assert torch.equal(got.items, want.items)
    assert (got.shared is None) == (want.shared is None)
    if got.shared is not None and want.shared is not None:
        assert got.shared.size == want.shared.size
        assert torch.equal(got.shared.items, want.shared.items)
        assert torch.equal(got.shared.replaced, want.shared.replaced)


@pytest.mark.parametrize("user_sampling", ["proportional", "uniform"])
@pytest.mark.parametrize(("seed", "epoch"), [(0, 0), (2**33 + 5, 3), (2**63 - 1, 1000)])
@pytest.mark.parametrize(("rho", "eta"), [(1, 1), (3, 45), (5, 7)])
@pytest.mark.parametrize("share", [1, 2, 32])
@pytest.mark.usefixtures("n_threads")
def test_lists_are_those_of_the_reference(
    user_sampling: UserSampling, seed: int, epoch: int, rho: int, eta: int, share: int
) -> None:
    plan = ListPlan(*interactions(1, 60, 90), 90, rho, eta, seed, user_sampling, share)
    start, stop = 2 * share, min(plan.n_lists, 200)
    assert_equal(cpu.sample_lists(plan, epoch, start, stop), reference.sample_lists(plan, epoch, start, stop))


@pytest.mark.parametrize("share", [1, 3, 32, 100])
@pytest.mark.usefixtures("n_threads")
def test_lists_do_not_depend_on_the_batches(share: int) -> None:
    plan = ListPlan(*interactions(2, 300, 400), 400, 3, 45, seed=9, share=share)
    whole = cpu.sample_lists(plan, 2, 0, plan.n_lists)
    edges = [0, share, 2 * share, 7 * share, plan.n_lists]
    batches = [cpu.sample_lists(plan, 2, start, stop) for start, stop in pairwise(edges)]
    assert torch.equal(torch.cat([batch.users for batch in batches]), whole.users)
    assert torch.equal(torch.cat([batch.items for batch in batches]), whole.items)
    shared = [batch.shared for batch in batches if batch.shared is not None]
    if whole.shared is not None:
        assert torch.equal(torch.cat([x.items for x in shared]), whole.shared.items)
        assert torch.equal(torch.cat([x.replaced for x in shared]), whole.shared.replaced)


@pytest.mark.parametrize("share", [1, 4])
def test_sampling_nothing(share: int) -> None:
    batch = cpu.sample_lists(ListPlan(*interactions(2, 30, 40), 40, 2, 3, share=share), 0, 4, 4)
    assert batch.users.shape == (0,)
    assert batch.items.shape == (0, 5)


def test_sampling_beyond_the_epoch() -> None:
    plan = ListPlan(*interactions(2, 30, 40), 40, 2, 3)
    with pytest.raises(InputError, match=f"sample_lists: an epoch has {plan.n_lists} lists"):
        cpu.sample_lists(plan, 0, 0, plan.n_lists + 1)
    with pytest.raises(InputError, match="sample_lists: stop must be an integer from 5"):
        cpu.sample_lists(plan, 0, 5, 4)


def test_a_batch_that_would_cut_a_group_is_refused() -> None:
    plan = ListPlan(*interactions(2, 30, 40), 40, 2, 3, share=4)
    with pytest.raises(InputError, match="sample_lists: start must be a multiple of share = 4"):
        cpu.sample_lists(plan, 0, 2, 8)


@pytest.mark.parametrize(("rho", "most"), [(1, 128), (3, 2)])
@pytest.mark.usefixtures("n_threads")
def test_lists_of_users_alone_are_those_of_the_reference(rho: int, most: int) -> None:
    indptr, indices = interactions(5, 40, 90)
    indptr = torch.cat([indptr, indptr[-1:], indptr[-1:] + 90])  # a user without items, and one with all
    indices = torch.cat([indices, torch.arange(90, dtype=torch.int32)])
    plan = ListPlan(indptr, indices, 90, rho, eta=7)
    seeds = torch.arange(42) * 2**40 + 11
    for epoch in (0, 3):
        got, want = (backend.sample_users(plan, seeds, epoch, most) for backend in (cpu, reference))
        assert_equal(got, want)
        user = int(got.users[-1])
        row = indices[indptr[user] : indptr[user + 1]]
        alone = ListPlan(torch.tensor([0, len(row)]), row, 90, rho, 7)
        assert torch.equal(cpu.sample_users(alone, seeds[[user]], epoch, most).items, got.items[got.users == user])


def test_users_alone_do_not_share() -> None:
    plan = ListPlan(*interactions(5, 4, 90), 90, rho=1, eta=7, share=4)
    with pytest.raises(InputError, match="sample_users: the plan must have share 1"):
        cpu.sample_users(plan, torch.arange(4), 0, 9)
