"""Sampling of the reference: Philox by its published answers, shuffles and draws by counting and chi-square."""

import itertools
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from drm_triton.errors import InputError
from drm_triton.kernels import reference, streams
from drm_triton.kernels.batches import SharedNegatives
from drm_triton.kernels.protocol import ListPlan
from drm_triton.names import UserSampling

SIGNIFICANCE = 1e-4  # seeds are fixed, so a test passes or fails for good; this is how rarely a good generator fails


def plan_of(rows: Any, n_items: int, **options: Any) -> ListPlan:
    indptr = torch.tensor([0, *itertools.accumulate(len(row) for row in rows)])
    indices = torch.tensor([item for row in rows for item in sorted(row)], dtype=torch.int32)
    return ListPlan(indptr, indices, n_items, **options)


def epoch_of(plan: ListPlan, epoch: int = 0) -> tuple[Tensor, Tensor, SharedNegatives | None]:
    batch = reference.sample_lists(plan, epoch, 0, plan.n_lists)
    return batch.users, batch.items, batch.shared


# ---------------------------------------------------------------------------------------------------------------
# Generator


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # from the known-answer file of Random123, philox4x32 with 10 rounds
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_gives_the_published_answers(counter: str, key: str, expected: str) -> None:
    c0, c1, c2, c3 = (int(word, 16) for word in counter.split())
    key0, key1 = (int(word, 16) for word in key.split())
    ident = torch.tensor([c2 | c3 << 32], dtype=torch.uint64).view(torch.int64)
    words = reference.philox(key0 | key1 << 32, c1 // 4, c1 % 4, ident, block=c0)
    assert [f"{word.item():08x}" for word in words] == expected.split()


def test_below_is_the_high_half_of_the_product() -> None:
    words = torch.tensor([0, 1, 2**16 - 1, 2**16, 2**31, 2**32 - 1])
    for size in (1, 2, 3, 1000, 2**31 - 1):
        assert reference.below(words, size).tolist() == [word * size >> 32 for word in words.tolist()]


def test_permute_is_a_permutation_for_every_size() -> None:
    for size in [*range(1, 201), 1023, 1024, 1025, 5000]:
        for ident in range(3):
            number = torch.arange(size)
            keys = reference.philox(7, 0, streams.ORDER, torch.full_like(number, ident))
            image = reference.permute(number, torch.full_like(number, size), keys)
            assert image.sort().values.tolist() == number.tolist()


@pytest.mark.parametrize("size", [2, 3, 5, 6, 7, 10])
def test_permute_shuffles_uniformly(size: int) -> None:
    """Images of the first three indices (as many as there are) over 60 000 keys: every ordered tuple equally often."""
    draws, length = 60_000, min(3, size)
    keys = reference.philox(1, 0, streams.POSITIVES, torch.arange(draws))
    sizes = torch.full((draws,), size)
    code = torch.zeros(draws, dtype=torch.int64)
    for index in range(length):
        code = code * size + reference.permute(torch.full_like(sizes, index), sizes, keys)
    counts = code.bincount(minlength=size**length)
    tuples = [
        sum(i * size ** (length - 1 - p) for p, i in enumerate(t)) for t in itertools.permutations(range(size), length)
    ]
    assert counts[tuples].sum() == draws
    assert chisquare(counts[tuples]).pvalue > SIGNIFICANCE


# ---------------------------------------------------------------------------------------------------------------
# Lists

ROWS = [  # of 12 items: users with none, one, a few, all but one, and all of them
    [],
    [5],
    [0, 11],
    [1, 4, 6, 7, 8, 9, 10],
    list(range(11)),
    list(range(12)),
    [2, 3, 5],
]


@pytest.mark.parametrize("user_sampling", ["proportional", "uniform"])
@pytest.mark.parametrize("rho", [1, 2, 3, 5])
@pytest.mark.parametrize("share", [1, 4])
def test_positives_are_the_users_own_and_negatives_never_are(rho: int, user_sampling: UserSampling, share: int) -> None:
    plan = plan_of(ROWS, 12, rho=rho, eta=6, user_sampling=user_sampling, share=share)
    for epoch in range(5):
        users, items, _ = epoch_of(plan, epoch)
        assert users.dtype == items.dtype == torch.int32
        assert items.shape == (plan.n_lists, rho + 6)
        for user, row in zip(users.tolist(), items.tolist(), strict=True):
            own = set(ROWS[user])
            positives, negatives = row[:rho], row[rho:]
            assert set(positives) <= own
            assert len(set(positives)) == min(rho, len(own))
            assert not set(negatives) & own
            assert all(0 <= item < 12 for item in negatives)


@pytest.mark.parametrize("rho", [1, 2, 3, 5])
def test_proportional_epoch_covers_every_interaction(rho: int) -> None:
    plan = plan_of(ROWS, 12, rho=rho, eta=2)
    users, items, _ = epoch_of(plan)
    for user, row in enumerate(ROWS):
        lists = items[users == user, :rho]
        if len(row) in (0, 12):  # nothing to prefer, or nothing to prefer it to
            assert len(lists) == 0
        else:
            assert len(lists) == -(-len(row) // rho)
            assert set(lists.flatten().tolist()) == set(row)


def test_last_negative_is_found() -> None:
    plan = plan_of([list(range(999))], 1000, rho=2, eta=3)
    _, items, _ = epoch_of(plan)
    assert (items[:, 2:] == 999).all()


@pytest.mark.parametrize("row", [[], [0], [1, 4, 6, 7, 8, 9, 10], [8, 9, 10, 11], [0, 1, 2, 11]])
@pytest.mark.parametrize("share", [1, 2])
def test_negatives_are_uniform(row: Tensor, share: int) -> None:
    plan = plan_of([row or [0]] * 1000, 12, rho=1, eta=40, seed=3, share=share)
    _, items, _ = epoch_of(plan)
    items = items[::share]  # those of different groups are independent
    others = [item for item in range(12) if item not in (row or [0])]
    counts = items[:, 1:].flatten().bincount(minlength=12)
    assert counts[others].sum() == len(items) * 40
    assert chisquare(counts[others]).pvalue > SIGNIFICANCE


@pytest.mark.parametrize("row", [[0], [1, 4, 6, 7, 8, 9, 10]])
def test_negatives_of_a_list_are_independent(row: Tensor) -> None:
    # Pairs of draws that follow each other are uniform over all pairs, whether shared or a list's own.
    plan = plan_of([row] * 1500, 12, rho=1, eta=2, seed=4, share=3)
    _, items, _ = epoch_of(plan)
    counts = (items[::3, 1] * 12 + items[::3, 2]).bincount(minlength=144).reshape(12, 12)
    others = [item for item in range(12) if item not in row]
    assert chisquare(counts[others][:, others].flatten()).pvalue > SIGNIFICANCE


def test_lists_share_the_draws_that_are_not_items_of_their_user() -> None:
    plan = plan_of(ROWS * 4, 12, rho=1, eta=30, share=4)
    users, items, shared = epoch_of(plan)
    assert shared is not None
    assert shared.size == 4
    assert shared.items.shape == (-(-plan.n_lists // 4), 30)
    drawn = shared.items.repeat_interleave(4, dim=0)[: plan.n_lists]
    for b, user in enumerate(users.tolist()):
        own = torch.tensor(ROWS[user % len(ROWS)], dtype=torch.int32)
        assert torch.equal(shared.replaced[b], torch.isin(drawn[b], own))
    assert torch.equal(items[:, 1:] == drawn, ~shared.replaced)
    assert shared.replaced.any()
    assert (shared.items[0] != shared.items[1]).any()


@pytest.mark.parametrize("user_sampling", ["proportional", "uniform"])
def test_positives_are_uniform(user_sampling: UserSampling) -> None:
    row = [1, 4, 6, 7, 9]
    plan = plan_of([row] * 4000, 12, rho=2, eta=1, seed=5, user_sampling=user_sampling)
    users, items, _ = epoch_of(plan)
    # One list of each user: lists of one user share its shuffle under proportional sampling.
    _, first = torch.unique(users, return_inverse=True)
    chosen = torch.full((len(first.unique()),), -1).scatter(0, first, torch.arange(len(first)))
    pairs = items[chosen, :2].sort(dim=1).values
    code = pairs[:, 0] * 12 + pairs[:, 1]
    counts = code.bincount(minlength=144)[[a * 12 + b for a, b in itertools.combinations(row, 2)]]
    assert counts.sum() == len(chosen)
    assert chisquare(counts).pvalue > SIGNIFICANCE


def test_uniform_sampling_draws_eligible_users_equally_often() -> None:
    plan = plan_of(ROWS * 300, 12, rho=1, eta=1, user_sampling="uniform")
    users, _, _ = epoch_of(plan)
    counts = torch.bincount(users % len(ROWS), minlength=len(ROWS))
    assert counts[[0, 5]].tolist() == [0, 0]
    assert chisquare(counts[[1, 2, 3, 4, 6]]).pvalue > SIGNIFICANCE


@pytest.mark.parametrize("user_sampling", ["proportional", "uniform"])
@pytest.mark.parametrize("share", [1, 4])
def test_a_list_does_not_depend_on_the_batch_it_is_drawn_in(user_sampling: UserSampling, share: int) -> None:
    plan = plan_of(ROWS, 12, rho=2, eta=5, user_sampling=user_sampling, share=share)
    users, items, _ = epoch_of(plan, epoch=3)
    for size in (share, 2 * share, 5 * share, share * plan.n_lists):
        batches = [
            reference.sample_lists(plan, 3, start, min(start + size, plan.n_lists))
            for start in range(0, plan.n_lists, size)
        ]
        assert torch.equal(torch.cat([batch.users for batch in batches]), users)
        assert torch.equal(torch.cat([batch.items for batch in batches]), items)


def test_epochs_and_seeds_differ_and_repeat() -> None:
    plan, other = (plan_of(ROWS * 20, 12, rho=2, eta=5, seed=seed) for seed in (0, 1))
    assert torch.equal(epoch_of(plan, 1)[1], epoch_of(plan, 1)[1])
    assert not torch.equal(epoch_of(plan, 1)[1], epoch_of(plan, 2)[1])
    assert not torch.equal(epoch_of(plan, 1)[1], epoch_of(other, 1)[1])


def test_data_without_a_single_list_is_refused() -> None:
    with pytest.raises(InputError, match="nothing to train on"):
        plan_of([[], [0, 1, 2]], 3, rho=1, eta=1)
