"""Triton sampling: the lists of the reference, to the bit."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is available on Linux only")

from drm_triton.kernels import gpu, reference
from drm_triton.kernels.batches import ListBatch
from drm_triton.kernels.gpu.sampling import sample_sizes
from drm_triton.names import UserSampling
from tests.kernels.gpu.conftest import DEVICE, random_plan


def assert_equal(batch: ListBatch, expected: ListBatch) -> None:
    """Compare two batches to the bit, with their shared negatives."""
    assert batch.users.dtype == batch.items.dtype == torch.int32
    assert torch.equal(batch.users.cpu(), expected.users)
    assert torch.equal(batch.items.cpu(), expected.items)
    assert (batch.shared is None) == (expected.shared is None)
    if batch.shared is not None and expected.shared is not None:
        assert batch.shared.size == expected.shared.size
        assert batch.shared.items.dtype == torch.int32
        assert torch.equal(batch.shared.items.cpu(), expected.shared.items)
        assert torch.equal(batch.shared.replaced.cpu(), expected.shared.replaced)


@pytest.mark.parametrize(
    ("user_sampling", "rho", "eta", "seed", "epoch", "share"),
    [
        ("proportional", 3, 45, 0, 0, 1),
        ("uniform", 1, 15, 2**62 + 12345, 1, 1),
        ("uniform", 6, 3, 1, 16, 5),
        ("proportional", 5, 75, 7, 2**30 + 1, 5),  # two blocks of positives and of negatives
        ("proportional", 1, 15, 2**62 + 12345, 1, 64),  # a group larger than the batch
    ],
)
def test_samples_are_those_of_the_reference(
    user_sampling: UserSampling, rho: int, eta: int, seed: int, epoch: int, share: int
) -> None:
    plan = random_plan(rho, eta, seed, user_sampling, share)
    same = random_plan(rho, eta, seed, user_sampling, share, device="cpu")
    last = (plan.n_lists - 1) // share * share
    for start, stop in ((0, 21), (last, plan.n_lists)):  # the last group is ragged
        assert_equal(gpu.sample_lists(plan, epoch, start, stop), reference.sample_lists(same, epoch, start, stop))


def test_no_list() -> None:
    batch = gpu.sample_lists(random_plan(2, 7, share=5), 0, 5, 5)
    users, items, shared = batch.users, batch.items, batch.shared
    assert shared is not None
    assert (users.shape, items.shape, shared.items.shape, shared.replaced.shape) == ((0,), (0, 9), (0, 7), (0, 7))


def test_a_batch_does_not_change_the_lists() -> None:
    plan = random_plan(2, 5)
    whole = gpu.sample_lists(plan, 3, 10, 28)
    batches = [gpu.sample_lists(plan, 3, start, stop) for start, stop in ((10, 27), (27, 28))]
    assert torch.equal(whole.users, torch.cat([batch.users for batch in batches]))
    assert torch.equal(whole.items, torch.cat([batch.items for batch in batches]))


@pytest.mark.parametrize(("rho", "eta", "epoch", "most"), [(1, 15, 0, 4), (6, 70, 3, 128)])
def test_lists_of_users_alone_are_those_of_the_reference(rho: int, eta: int, epoch: int, most: int) -> None:
    plan, same = random_plan(rho, eta), random_plan(rho, eta, device="cpu")
    seeds = torch.arange(23) * 2**40 + 11
    batch = gpu.sample_users(plan, seeds.to(DEVICE), epoch, most)
    assert len(batch.users) > 2 * sample_sizes(rho)["BLOCK_LISTS"]
    assert_equal(batch, reference.sample_users(same, seeds, epoch, most))
