"""Lists that are the whole catalogue: losses and gradients of every backend against their definition."""

from typing import get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from drm_triton import kernels
from drm_triton.errors import InputError
from drm_triton.kernels import catalogue, cpu
from drm_triton.kernels.catalogue import USERS_PER_TASK, CataloguePlan, user_blocks
from drm_triton.kernels.cpu.runtime.arrays import _kept
from drm_triton.kernels.cpu.runtime.threads import set_threads
from drm_triton.kernels.protocol import Backend, CatalogueBatch, Objective, Pool
from drm_triton.names import Score


@pytest.fixture(params=["reference", "cpu", "triton"])
def backend(request: pytest.FixtureRequest) -> Backend:
    reason = kernels.why_not(request.param)
    if reason:
        pytest.skip(reason)
    return kernels.get_backend(request.param)


def objective(score: Score = "dot", temperature: float = 0.3, at_k: bool = False) -> Objective:
    return Objective(1, score, k=3, tau=0.4, hinge=False, drm=False, softmax=True, temperature=temperature, at_k=at_k)


def case(seed: int, B: int, M: int, N: int, d: int) -> tuple[Tensor, Tensor, CatalogueBatch]:
    """Random factors, and B users with 1 to N - 1 items each."""
    draw = torch.Generator().manual_seed(seed)
    U, V = torch.randn(M, d, generator=draw) / d**0.5, torch.randn(N, d, generator=draw) / d**0.5
    users = torch.randperm(M, generator=draw)[:B].to(torch.int32)
    degrees = torch.randint(1, N, (B,), generator=draw)
    rows = [torch.randperm(N, generator=draw)[:n].sort().values for n in degrees.tolist()]
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), degrees.cumsum(0)])
    return U, V, CatalogueBatch(users, indptr, torch.cat(rows).to(torch.int32))


def definition(U: Tensor, V: Tensor, batch: CatalogueBatch, objective: Objective) -> tuple[Tensor, Tensor, Tensor]:
    """Losses, and gradients by autograd, one user, positive and negative at a time."""
    U, V = U.double().requires_grad_(), V.double().requires_grad_()
    losses = []
    for b, user in enumerate(batch.users.tolist()):
        items = batch.indices[batch.indptr[b] : batch.indptr[b + 1]].tolist()
        s = -(U[user] - V).square().sum(1) if objective.score == "l2" else V @ U[user]
        s = s if batch.prior is None else s + batch.prior
        last, ratio = (len(V), 1.0) if batch.pool is None else (batch.pool.n_negatives, batch.pool.ratio)
        others = torch.tensor([j for j in range(last) if j not in items], dtype=torch.int64)
        weights = torch.ones(len(V))
        if objective.at_k:
            rank = min(max(1, round(objective.K / ratio)), last)
            beta = s.detach()[:last].sort(descending=True).values[rank - 1]
            weights = 1 / (1 + ((beta - s.detach()) / objective.tau).exp())
        terms = [
            weights[i] * torch.log1p(ratio * ((s[others] - s[i]) / objective.temperature).exp().sum()) for i in items
        ]
        total = torch.stack(terms)
        if batch.weights is not None:
            total = total * batch.weights[batch.indptr[b] : batch.indptr[b + 1]]
        losses.append(total.sum() / len(items) ** 0.5)
    loss = torch.stack(losses)
    dU, dV = torch.autograd.grad(loss.sum(), (U, V))
    return loss.detach(), dU[batch.users.long()], dV


@pytest.mark.parametrize("score", get_args(Score))
@pytest.mark.parametrize(("B", "N", "d"), [(1, 2, 1), (3, 7, 5), (70, 40, 16), (5, 300, 64), (3, 1200, 20)])
def test_losses_and_gradients(backend: Backend, score: Score, B: int, N: int, d: int) -> None:
    U, V, batch = case(B, B, B + 3, N, d)
    got = backend.catalogue_gradients(U, V, batch, objective(score))
    for x, want in zip(got, definition(U, V, batch, objective(score)), strict=True):
        torch.testing.assert_close(x.double(), want, rtol=1e-4, atol=1e-5 * want.abs().max().item())
    fixed = backend.catalogue_gradients(U, V, batch, objective(score), fixed_items=True)
    assert torch.equal(fixed.softmax, got.softmax)
    assert torch.equal(fixed.user_grad, got.user_grad)
    assert fixed.item_grad.shape == (0, d)


@pytest.mark.parametrize("score", get_args(Score))
def test_positives_weighted_by_their_place_in_the_top_k(backend: Backend, score: Score) -> None:
    U, V, batch = case(8, 20, 22, 40, 16)
    got = backend.catalogue_gradients(U, V, batch, objective(score, at_k=True))
    for x, want in zip(got, definition(U, V, batch, objective(score, at_k=True)), strict=True):
        torch.testing.assert_close(x.double(), want, rtol=1e-4, atol=1e-5 * want.abs().max().item())


@pytest.mark.parametrize("score", get_args(Score))
@pytest.mark.parametrize("at_k", [False, True])
@pytest.mark.parametrize("n_negatives", [1, 12, 40])
def test_a_pool_stands_for_the_catalogue(backend: Backend, score: Score, n_negatives: int, at_k: bool) -> None:
    U, V, batch = case(9, 20, 22, 40, 16)
    pool, at_place = Pool(torch.arange(40, dtype=torch.int32), n_negatives, 7.5), objective(score, at_k=at_k)
    got = backend.catalogue_gradients(U, V, batch._replace(pool=pool), at_place)
    for x, want in zip(got, definition(U, V, batch._replace(pool=pool), at_place), strict=True):
        torch.testing.assert_close(x.double(), want, rtol=1e-4, atol=1e-5 * max(want.abs().max().item(), 1e-3))


@pytest.mark.parametrize(("n_drawn", "K", "rank"), [(100, 20, 1), (1000, 20, 7), (1400, 200, 93), (700, 5000, 700)])
def test_the_threshold_of_a_pool_is_a_quantile_of_what_was_drawn(
    backend: Backend, n_drawn: int, K: int, rank: int
) -> None:
    """Against NumPy. A pool of 1,000 of 3,000 items has a third of the top 20: the threshold is its 7th score."""
    N, d, temperature, tau = 3000, 6, 0.5, 0.7
    U, V, batch = case(11, 9, 9, n_drawn + 60, d)  # V: the items drawn, and 60 positives of the batch beside them
    pool = Pool(torch.arange(len(V), dtype=torch.int32), n_drawn, N / n_drawn)
    objective = Objective(1, k=K, tau=tau, hinge=False, drm=False, softmax=True, temperature=temperature, at_k=True)
    got = backend.catalogue_gradients(U, V, batch._replace(pool=pool), objective)
    scores, bounds, items = (U[batch.users.long()] @ V.T).double().numpy(), batch.indptr.numpy(), batch.indices.numpy()
    for b, s in enumerate(scores):
        own = items[bounds[b] : bounds[b + 1]]
        beta = np.partition(s[:n_drawn], n_drawn - rank)[n_drawn - rank]  # the rank-th largest
        others = np.setdiff1d(np.arange(n_drawn), own)
        total = N / n_drawn * np.exp(s[others] / temperature).sum()
        terms = np.log1p(total * np.exp(-s[own] / temperature)) / (1 + np.exp((beta - s[own]) / tau))
        assert got.softmax[b].item() == pytest.approx(terms.sum() / len(own) ** 0.5, rel=1e-4)


def test_the_threshold_of_a_pool_estimates_that_of_the_catalogue() -> None:
    """The mean rank of the threshold, in the whole catalogue, is K."""
    N, K, n_pools = 3000, 20, 400
    indptr, indices = torch.tensor([0, 1, 2]), torch.tensor([0, 1], dtype=torch.int32)
    plan = CataloguePlan(indptr, indices, N, seed=2, pool=600)
    scores = torch.randn(N, generator=torch.Generator().manual_seed(3))
    ranks = []
    for epoch in range(n_pools):
        pool = plan.batch(epoch, 0, 2).pool
        assert pool is not None
        best = scores[pool.items[: pool.n_negatives].long()].sort(descending=True).values
        beta = best[catalogue.threshold_rank(Objective(1, k=K), pool, len(pool.items)) - 1]
        ranks.append(int((scores >= beta).sum()))
    # The r-th best of n has mean rank r (N + 1) / (n + 1), with standard deviation about K / sqrt(r), r = 4.
    assert np.mean(ranks) == pytest.approx(K, abs=4 * K / 2 / n_pools**0.5)


@pytest.mark.parametrize("at_k", [False, True])
@pytest.mark.parametrize("n_negatives", [3, 600, 1024, 1200])
def test_scores_that_rise_along_the_catalogue(backend: Backend, n_negatives: int, at_k: bool) -> None:
    """The largest score is that of the last items, and a pool may end anywhere."""
    U, V, batch = case(5, 3, 4, 1200, 8)
    V = V * torch.linspace(0.1, 4, 1200)[:, None]
    batch = batch._replace(pool=Pool(torch.arange(1200, dtype=torch.int32), n_negatives, 2.0))
    got = backend.catalogue_gradients(U, V, batch, objective("dot", 0.1, at_k))
    for x, want in zip(got, definition(U, V, batch, objective("dot", 0.1, at_k)), strict=True):
        torch.testing.assert_close(x.double(), want, rtol=1e-4, atol=2e-5 * want.abs().max().item())


def test_a_user_has_the_same_bits_in_every_batch() -> None:
    U, V, batch = case(7, 70, 80, 600, 12)
    whole = cpu.catalogue_gradients(U, V, batch, objective())
    begin, end = batch.indptr[40].item(), batch.indptr[43].item()
    some = CatalogueBatch(batch.users[40:43], batch.indptr[40:44] - begin, batch.indices[begin:end])
    got = cpu.catalogue_gradients(U, V, some, objective())
    assert torch.equal(got.softmax, whole.softmax[40:43])
    assert torch.equal(got.user_grad, whole.user_grad[40:43])


def test_a_user_who_has_the_whole_pool_learns_nothing(backend: Backend) -> None:
    U, V = torch.randn(1, 4), torch.randn(5, 4)
    pool = Pool(torch.arange(5, dtype=torch.int32), 2, 3.0)
    batch = CatalogueBatch(
        torch.zeros(1, dtype=torch.int32), torch.tensor([0, 3]), torch.tensor([0, 1, 4], dtype=torch.int32), pool=pool
    )
    assert not any(x.any() for x in backend.catalogue_gradients(U, V, batch, objective()))


@pytest.mark.parametrize("at_k", [False, True])
def test_a_user_without_items_has_no_loss(backend: Backend, at_k: bool) -> None:
    U, V, batch = case(2, 9, 9, 30, 8)
    batch = batch._replace(indices=batch.indices[: batch.indptr[-2]])  # without those of the last user
    empty = batch._replace(users=batch.users.roll(1), indptr=torch.cat([batch.indptr[:1], batch.indptr[:-1]]))
    got = backend.catalogue_gradients(U, V, empty, objective(at_k=at_k))
    rest = batch._replace(users=batch.users[:-1], indptr=batch.indptr[:-1])
    want = backend.catalogue_gradients(U, V, rest, objective(at_k=at_k))
    assert got.softmax[0] == 0
    assert not got.user_grad[0].any()
    torch.testing.assert_close(got.softmax[1:], want.softmax)
    torch.testing.assert_close(got.user_grad[1:], want.user_grad)
    torch.testing.assert_close(got.item_grad, want.item_grad)


@pytest.mark.parametrize("score", get_args(Score))
def test_weights_multiply_the_terms_of_the_positives(backend: Backend, score: Score) -> None:
    U, V, batch = case(4, 70, 80, 40, 16)
    weights = torch.rand(len(batch.indices), generator=torch.Generator().manual_seed(0)) * 3
    weighted = batch._replace(weights=weights)
    got = backend.catalogue_gradients(U, V, weighted, objective(score))
    for x, want in zip(got, definition(U, V, weighted, objective(score)), strict=True):
        torch.testing.assert_close(x.double(), want, rtol=1e-4, atol=1e-5 * want.abs().max().item())
    ones = batch._replace(weights=torch.ones_like(weights))
    results = [backend.catalogue_gradients(U, V, given, objective(score)) for given in (batch, ones)]
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))
    with pytest.raises(InputError, match="the weights of batch"):
        backend.catalogue_gradients(U, V, batch._replace(weights=weights[1:]), objective(score))


@pytest.mark.parametrize("score", get_args(Score))
@pytest.mark.parametrize("at_k", [False, True])
def test_a_prior_is_added_to_the_scores(backend: Backend, score: Score, at_k: bool) -> None:
    U, V, batch = case(6, 70, 80, 40, 16)
    prior = torch.randn(40, generator=torch.Generator().manual_seed(0))
    got = backend.catalogue_gradients(U, V, batch._replace(prior=prior), objective(score, at_k=at_k))
    for x, want in zip(got, definition(U, V, batch._replace(prior=prior), objective(score, at_k=at_k)), strict=True):
        torch.testing.assert_close(x.double(), want, rtol=1e-4, atol=1e-5 * want.abs().max().item())
    with pytest.raises(InputError, match="the prior of batch"):
        backend.catalogue_gradients(U, V, batch._replace(prior=prior[1:]), objective(score))


def test_the_prior_of_a_pool_is_that_of_its_items() -> None:
    prior = torch.rand(40, generator=torch.Generator().manual_seed(0))
    indptr, indices = torch.tensor([0, 1, 2]), torch.tensor([0, 1], dtype=torch.int32)
    batch = CataloguePlan(indptr, indices, 40, seed=3, pool=10, prior=prior).batch(0, 0, 2)
    assert batch.pool is not None
    assert batch.prior is not None
    assert torch.equal(batch.prior, prior[batch.pool.items.long()])


@pytest.mark.parametrize("temperature", [0.01, 100.0])
def test_extreme_temperatures(backend: Backend, temperature: float) -> None:
    U, V, batch = case(0, 6, 8, 30, 8)
    got = backend.catalogue_gradients(U, V, batch, objective(temperature=temperature))
    for x, want in zip(got, definition(U, V, batch, objective(temperature=temperature)), strict=True):
        torch.testing.assert_close(x.double(), want, rtol=1e-3, atol=1e-4 * want.abs().max().item())


def test_blocks_of_users_add_up(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    U, V, batch = case(1, 150, 160, 90, 8)
    whole = backend.catalogue_gradients(U, V, batch, objective())
    monkeypatch.setattr(catalogue, "BLOCK_SCORES", 64 * 90)
    for x, want in zip(backend.catalogue_gradients(U, V, batch, objective()), whole, strict=True):
        torch.testing.assert_close(x, want, rtol=1e-5, atol=1e-5)


def test_a_step_uses_the_memory_of_the_last_one_again() -> None:
    """New memory would be handed out page by page, 4,200 pages for 256 users and 17,000 items."""
    U, V, batch = case(0, 90, 90, 3000, 2)
    _kept.clear()  # of other tests
    first = cpu.catalogue_gradients(U, V, batch, objective())
    sizes = [block.size for block in _kept]
    assert max(sizes, default=0) >= 4 * len(batch.users) * len(V)
    second = cpu.catalogue_gradients(U, V, batch, objective())
    assert [block.size for block in _kept] == sizes
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


def test_blocks_cover_all_users_once() -> None:
    for n_users, n_items in ((1, 1), (1000, 10**6), (1000, 10**9), (300, 50)):
        blocks = user_blocks(n_users, n_items)
        assert [i for block in blocks for i in range(block.start, block.stop)] == list(range(n_users))
        assert all((block.stop - block.start) % USERS_PER_TASK == 0 for block in blocks[:-1])


def test_bits_do_not_depend_on_threads(threads: None) -> None:
    backend = kernels.get_backend("cpu")
    U, V, batch = case(2, 300, 400, 5000, 32)
    results = []
    for n in (1, 2, 1):
        set_threads(n)
        torch.set_num_threads(n)
        results.append(backend.catalogue_gradients(U, V, batch, objective()))
    for other in results[1:]:
        assert all(torch.equal(x, y) for x, y in zip(other, results[0], strict=True))


def test_a_bad_factor_shows(backend: Backend) -> None:
    U, V, batch = case(3, 4, 6, 20, 4)
    U[batch.users[1].long(), 2] = float("nan")
    got = backend.catalogue_gradients(U, V, batch, objective())
    assert got.softmax.isnan().tolist() == [False, True, False, False]
    assert got.user_grad[1].isnan().all()
    assert got.item_grad.isnan().all()


def test_a_bad_score_shows_whatever_the_user_has() -> None:
    U, V, batch = case(3, 4, 6, 20, 4)
    U[batch.users[1].long(), 2] = float("nan")
    nothing = torch.zeros(5, dtype=torch.int64)
    got = cpu.catalogue_gradients(U, V, batch._replace(indptr=nothing, indices=batch.indices[:0]), objective())
    assert got.softmax.isnan().tolist() == [False, True, False, False]
    U, V, batch = case(3, 4, 6, 20, 4)
    prior = torch.zeros(20)
    prior[3] = -float("inf")
    assert cpu.catalogue_gradients(U, V, batch._replace(prior=prior), objective()).softmax.isnan().all()


def test_large_scores_are_finite(backend: Backend) -> None:
    U, V, batch = case(4, 5, 6, 1200, 8)
    got = backend.catalogue_gradients(U * 1e18, V * 3e17, batch, objective(temperature=1e36))
    assert all(x.isfinite().all() for x in got)


@pytest.mark.parametrize("temperature", [0.05, 1.0, 10.0])
@pytest.mark.parametrize("score", get_args(Score))
def test_rounding_does_not_add_up_along_the_catalogue(score: Score, temperature: float) -> None:
    U, V, batch = case(6, 8, 10, 4000, 32)
    U, V = U / U.norm(dim=1, keepdim=True), V / V.norm(dim=1, keepdim=True)
    want = catalogue.catalogue_gradients(U.double(), V.double(), batch, objective(score, temperature))
    got = cpu.catalogue_gradients(U, V, batch, objective(score, temperature))
    for x, exact in zip(got, want, strict=True):
        assert (x.double() - exact).abs().max() < 2e-5 * exact.abs().max()


def test_equal_scores_of_a_large_catalogue() -> None:
    U, V = torch.full((2, 4), 0.5), torch.full((200_000, 4), 0.35)
    V[0] = 0.6
    users, indptr = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([0, 1, 2])
    batch = CatalogueBatch(users, indptr, torch.tensor([5, 7], dtype=torch.int32))
    want = catalogue.catalogue_gradients(U.double(), V.double(), batch, objective(temperature=1.0)).softmax
    got = cpu.catalogue_gradients(U, V, batch, objective(temperature=1.0)).softmax
    torch.testing.assert_close(got.double(), want, rtol=2e-6, atol=0)


def test_every_user_once_in_an_order_of_the_epoch() -> None:
    indptr = torch.tensor([0, 2, 2, 3, 6, 7])  # user 1 has no item, user 3 all of them
    indices = torch.tensor([0, 2, 1, 0, 1, 2, 2], dtype=torch.int32)
    plan = CataloguePlan(indptr, indices, 3, seed=5, pool=3, weights=torch.arange(7.0))
    assert plan.n_lists == 3
    orders = [plan.order(epoch).tolist() for epoch in range(20)]
    assert all(sorted(order) == [0, 2, 4] for order in orders)
    assert len({tuple(order) for order in orders}) > 1
    assert plan.order(3).tolist() == orders[3]  # a resumed run draws the same
    batch = plan.batch(3, 1, 3)
    assert batch.users.tolist() == orders[3][1:]
    for b, user in enumerate(batch.users.tolist()):
        row = batch.indices[batch.indptr[b] : batch.indptr[b + 1]]
        assert row.tolist() == indices[indptr[user] : indptr[user + 1]].tolist()
        assert batch.weights is not None
        assert batch.weights[batch.indptr[b] : batch.indptr[b + 1]].tolist() == [*range(indptr[user], indptr[user + 1])]


def test_a_plan_draws_a_pool_for_each_step() -> None:
    degrees = torch.tensor([3, 0, 10, 1])
    rows = [torch.randperm(50)[:n].sort().values for n in degrees.tolist()]
    indptr, indices = torch.cat([torch.zeros(1, dtype=torch.int64), degrees.cumsum(0)]), torch.cat(rows).int()
    plan = CataloguePlan(indptr, indices, 50, seed=1, pool=20, weights=indices.float())
    pools = []
    for epoch in range(3):
        for start in range(2):
            batch = plan.batch(epoch, start, start + 2)
            assert batch.pool is not None
            items, drawn = batch.pool.items, batch.pool.items[:20]
            assert (batch.pool.n_negatives, batch.pool.ratio) == (20, 2.5)
            assert len(items.unique()) == len(items)
            for b, user in enumerate(batch.users.tolist()):
                columns = batch.indices[batch.indptr[b] : batch.indptr[b + 1]]
                assert (columns.diff() > 0).all()
                assert items[columns.long()].sort().values.tolist() == rows[user].tolist()
            assert batch.weights is not None
            assert torch.equal(batch.weights, items[batch.indices.long()].float())
            positives = torch.cat([rows[user] for user in batch.users.tolist()])
            assert set(items[20:].tolist()) == set(positives.tolist()) - set(drawn.tolist())
            pools.append(tuple(drawn.tolist()))
    assert len(set(pools)) == len(pools)
    again = plan.batch(2, 1, 3).pool  # a resumed run draws the same
    assert again is not None
    assert tuple(again.items[:20].tolist()) == pools[-1]


def test_every_item_is_drawn_equally_often() -> None:
    plan = CataloguePlan(torch.tensor([0, 1, 2]), torch.tensor([0, 1], dtype=torch.int32), 40, seed=3, pool=10)
    counts = torch.zeros(40)
    for epoch in range(2000):
        pool = plan.batch(epoch, 0, 2).pool
        assert pool is not None
        counts[pool.items[:10].long()] += 1
    assert (counts - 500).abs().max() < 6 * (500 * 0.75) ** 0.5


def test_bad_arguments() -> None:
    U, V, batch = case(3, 4, 6, 20, 4)
    with pytest.raises(InputError, match="the objective must be softmax alone"):
        catalogue.catalogue_gradients(U, V, batch, Objective(1, softmax=True))
    pool = Pool(torch.arange(9, dtype=torch.int32), 5, 2.0)
    with pytest.raises(InputError, match="V must hold the 9 items of the pool, got 20 rows"):
        catalogue.catalogue_gradients(U, V, batch._replace(pool=pool), objective())
    with pytest.raises(InputError, match="users must be in"):
        catalogue.catalogue_gradients(U[:2], V, batch, objective())
    with pytest.raises(InputError, match="indices of batch"):
        catalogue.catalogue_gradients(U, V[:5], batch, objective())
    with pytest.raises(InputError, match="V must have at least one row and one column"):
        catalogue.catalogue_gradients(U[:, :0], V[:, :0], batch, objective())
    with pytest.raises(InputError, match="no user has both a positive and a negative"):
        CataloguePlan(torch.tensor([0, 1]), torch.zeros(1, dtype=torch.int32), 1, seed=0, pool=1)
