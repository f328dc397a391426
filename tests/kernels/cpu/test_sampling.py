"""Sampling on the CPU: the lists of the reference, to the bit."""

from itertools import pairwise

import pytest
import torch

from drm_triton.errors import InputError
from drm_triton.kernels import cpu, reference
from drm_triton.kernels.batches import ListBatch
from drm_triton.kernels.cpu.permutation import PermutationBuffers, first_permutations, permutation_buffers, permute
from drm_triton.kernels.cpu.runtime.jit import kernel
from drm_triton.kernels.cpu.sampling import FILTER_BITS, FILTER_LOAD
from drm_triton.kernels.protocol import ListPlan
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


@pytest.mark.parametrize("share", [1, 32, 256])
@pytest.mark.parametrize(
    ("n_items", "eta"),
    [
        (2, 3),  # users with one item and with none
        (40, 1000),  # each item is drawn often, and every list replaces many draws
        (5000, 5),  # users with more than SEARCH_ABOVE * eta items
        (3 * FILTER_BITS, 45),  # items that have a bit of the bitmap in common
        (70_000, FILTER_BITS // FILTER_LOAD + 1),  # a longer bitmap
    ],
)
def test_catalogues_of_all_sizes(n_items: int, eta: int, share: int) -> None:
    plan = ListPlan(*interactions(3, 12, n_items), n_items, 2, eta, seed=7, user_sampling="uniform", share=share)
    start, stop = 2**40 * share, 2**40 * share + 300  # the last group is not whole
    got, want = (backend.sample_lists(plan, 1, start, stop) for backend in (cpu, reference))
    assert_equal(got, want)
    if got.shared is not None:
        assert got.shared.replaced.any()


def test_users_with_fewer_items_than_a_list_has_positives() -> None:
    indptr = torch.tensor([0, 1, 3, 6, 13])
    indices = torch.tensor([7, 0, 9, 1, 2, 8, 0, 1, 2, 3, 4, 5, 6], dtype=torch.int32)
    for rho in range(1, 9):
        plan = ListPlan(indptr, indices, 10, rho, 3)
        batches = [backend.sample_lists(plan, 0, 0, plan.n_lists) for backend in (cpu, reference)]
        assert_equal(*batches)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000, 2**20 + 1, 2**31 - 1, 2**33 + 5, 2**40 - 3])
def test_permutations_are_those_of_the_reference(size: int) -> None:
    """A long epoch may have more lists than there are 32-bit numbers."""
    lists = 50
    index = torch.randint(size, (lists,), generator=torch.Generator().manual_seed(0))
    keys = torch.randint(2**32, (4, lists), generator=torch.Generator().manual_seed(1))
    buffers = first_permutations.py_func(permutation_buffers.py_func(lists), lists)
    buffers.image[:], buffers.size[:], buffers.keys[:] = index, size, keys
    permute_compiled(buffers)
    want = reference.permute(index, torch.full_like(index, size), list(keys))
    assert buffers.image.tolist() == want.tolist()


@kernel
def permute_compiled(buffers: PermutationBuffers) -> None:
    permute(buffers)


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
