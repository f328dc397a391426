"""Sums, parts and divisions: they do not depend on the number of ranks."""

from itertools import pairwise

import numpy as np
import polars as pl
import pytest
import torch

from drm_triton.config import TrainConfig
from drm_triton.data.csr import CSR
from drm_triton.distributed import start
from drm_triton.distributed.measure import gather_measured
from drm_triton.distributed.parts import parts_of, unit_of
from drm_triton.distributed.rows import Division, Wanted, fetch, whole_table
from drm_triton.distributed.spectral import spectral_rows
from drm_triton.distributed.sums import Subtree, TreeSum, subtrees_of, total_of_ranks
from drm_triton.distributed.world import World
from drm_triton.errors import DrmError, InputError
from drm_triton.ranking.evaluate import average, evaluate, evaluate_users, popularity_ranker
from drm_triton.training.initialize import initial_factors, spectral
from tests.distributed.thread_world import run_ranks

SIZES = (1, 2, 3, 4, 7)


def interactions(n_users: int = 300, n_items: int = 130) -> CSR:
    rng = np.random.default_rng(0)
    return CSR.from_mask(rng.random((n_users, n_items)) < np.linspace(0.3, 0.02, n_items))


@pytest.mark.parametrize("n", [1, 2, 5, 16, 23])
def test_a_tree_sum_does_not_depend_on_who_has_the_leaves(n: int) -> None:
    leaves = torch.randn(n, 3, 4, generator=torch.Generator().manual_seed(n))
    results = []
    for size in SIZES:
        edges = [n * rank // size for rank in range(size + 1)]
        arrived = []
        for first, last in pairwise(edges):
            own = TreeSum()
            for number in range(first, last):
                own.add(Subtree(0, number, leaves[number].clone()))
            assert [(one.level, one.place) for one in own.subtrees] == subtrees_of(first, last)
            arrived.append(torch.cat([leaves[0, :0], *(one.sum for one in own.subtrees)]))
        results.append(total_of_ranks(arrived, list(pairwise(edges)), 3))
    torch.testing.assert_close(results[0], leaves.sum(0))
    assert all(torch.equal(results[0], one) for one in results)


@pytest.mark.parametrize("share", [1, 7, 32, 40, 256])
def test_groups_of_lists_are_never_divided(share: int) -> None:
    config = TrainConfig(objective="hinge", share=share, batch_size=share * 12)
    for size in SIZES:
        parts = parts_of(10 * share, 10 * share + share * 12 - 1, unit_of(config), size)
        assert parts[0].start == 10 * share
        assert parts[-1].stop == 10 * share + share * 12 - 1
        for part, following in pairwise(parts):
            assert part.stop == following.start
            assert part.stop % share == 0 or part.stop == parts[-1].stop


@pytest.mark.parametrize("n_rows", [0, 1, 63, 64, 1000])
def test_leaves_do_not_depend_on_the_ranks(n_rows: int) -> None:
    of_one = [(leaf.start, leaf.stop) for leaf in Division(n_rows, 1).leaves(0)]
    assert (of_one[0][0], of_one[-1][1]) == (0, n_rows)
    for size in SIZES:
        division = Division(n_rows, size)
        leaves = [
            (division.bounds[rank] + leaf.start, division.bounds[rank] + leaf.stop)
            for rank in range(size)
            for leaf in division.leaves(rank)
        ]
        assert leaves == of_one


def test_rows_are_fetched_from_the_ranks_that_hold_them() -> None:
    users, items = torch.randn(50, 3), torch.randn(20, 3)

    def rank(world: World) -> None:
        divisions = Division(50, world.size), Division(20, world.size)
        own = [table[division.rows(world.rank)] for table, division in zip((users, items), divisions, strict=True)]
        wanted = [torch.arange(world.rank, 50, 7).int(), torch.tensor([], dtype=torch.int32)]
        if world.rank == 1:
            wanted[1] = torch.tensor([0, 3, 19], dtype=torch.int32)
        tables = zip(wanted, divisions, own, strict=True)
        found = fetch(world, [Wanted.ascending(rows, division, held, world.rank) for rows, division, held in tables])
        assert torch.equal(found[0], users[wanted[0].long()])
        assert torch.equal(found[1], items[wanted[1].long()])
        assert torch.equal(whole_table(world, own[0]), users)
        # Each rank wants all items in an order of its own, and knows that the others do.
        order = [torch.randperm(20, generator=torch.Generator().manual_seed(q)).int() for q in range(world.size)]
        places = [divisions[1].positions(rows) for rows in order]
        mine = places[world.rank]
        (found_items,) = fetch(
            world,
            [Wanted(own[1], divisions[1].bounds[world.rank], [order[world.rank][at] for at in mine], mine)],
            [[rows[at[world.rank]]] for rows, at in zip(order, places, strict=True)],
        )
        assert torch.equal(found_items, items[order[world.rank].long()])

    run_ranks(3, rank)


@pytest.mark.parametrize("init", ["normal", "spectral", "divided"])
def test_the_start_does_not_depend_on_the_ranks(init: str, monkeypatch: pytest.MonkeyPatch) -> None:
    train = interactions()
    if init == "divided":
        monkeypatch.setattr(start, "WHOLE_START", 0)
    config = TrainConfig(init="normal" if init == "normal" else "spectral", factors=8)
    whole = []
    for size in SIZES:

        def rank(world: World) -> list[torch.Tensor]:
            users, items = Division(train.shape[0], world.size), Division(train.shape[1], world.size)
            state = start.initial_shard(world, config, train, users, items)
            return [state.U, state.V]

        parts = run_ranks(size, rank)
        whole.append([torch.cat([part[number] for part in parts]) for number in range(2)])
    assert all(torch.equal(whole[0][number], one[number]) for one in whole for number in range(2))
    if init != "divided":
        alone = initial_factors(config, train)[:2]
        unit = [torch.nn.functional.normalize(table) for table in alone]  # cosine scores
        assert all(torch.equal(a, b) for a, b in zip(whole[0], unit, strict=True))


def test_a_divided_spectral_start_spans_what_the_whole_one_spans() -> None:
    train = interactions()
    users, items = Division(train.shape[0], 1), Division(train.shape[1], 1)
    U, V = spectral_rows(World(), train, users, items, 8, 0)
    alone = spectral(train, 8, 0)
    torch.testing.assert_close(U @ V.T, alone[0] @ alone[1].T, rtol=1e-3, atol=1e-4)


def test_metrics_of_all_ranks_are_averaged_over_the_users_at_once() -> None:
    train = interactions()
    rng = np.random.default_rng(1)
    held_out = CSR.from_mask(rng.random(train.shape) < 0.05)
    ranker = popularity_ranker(train)
    alone = evaluate(ranker, train, held_out, (5, 10))
    for size in SIZES:

        def rank(world: World) -> dict[str, float]:
            own = Division(train.shape[0], world.size).rows(world.rank)
            measured = evaluate_users(ranker, train, held_out, range(own.start, own.stop), (5, 10))
            together = average(gather_measured(world, measured))
            assert together.per_user.equals(alone.per_user)
            assert together.per_user.schema == pl.Schema(alone.per_user.schema)
            return together.means

        assert all(means == alone.means for means in run_ranks(size, rank))


def test_an_error_of_one_rank_is_raised_on_all() -> None:
    def rank(world: World) -> str:
        def action() -> None:
            if world.rank == 1:
                raise InputError("the disk is full")

        with pytest.raises(DrmError) as error:
            world.together(action)
        return str(error.value)

    assert run_ranks(3, rank) == ["rank 1: the disk is full"] * 3


def test_ranks_that_differ_are_refused() -> None:
    def rank(world: World) -> None:
        world.agree({"torch": "2.13", "data set": "a" if world.rank < 2 else "b"})

    with pytest.raises(InputError, match="rank 2 has data set b, rank 0 has a; start all ranks with the same"):
        run_ranks(3, rank)
