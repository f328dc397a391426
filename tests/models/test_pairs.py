"""Division of an epoch into tasks, and what BPR and WARP have in common."""

import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from drm_triton import Dataset
from drm_triton.data.csr import CSR
from drm_triton.kernels import get_backend
from drm_triton.kernels.cpu.runtime.threads import set_threads
from drm_triton.models import BPR, WARP, load
from drm_triton.models import pairs as module
from drm_triton.models.pairs import PairModel, divide, n_blocks, pair_epoch
from drm_triton.ranking.evaluate import evaluate, factor_ranker
from tests.models.clusters import GROUPS, clusters

MODELS: list[tuple[type[PairModel[Any]], dict[str, Any]]] = [
    (BPR, {"negative_sampling": "uniform"}),
    (BPR, {"negative_sampling": "popularity"}),
    (WARP, {"max_sampled": 12}),
]


def test_the_division_holds_each_interaction_once() -> None:
    fit, P = clusters().train, 4
    division = divide(fit, seed=3, epoch=2, blocks=P)
    assert division.counts.sum() == fit.nnz
    assert sorted(division.items) == list(range(fit.shape[1]))
    users, items = division.pairs >> 32, division.pairs & 0xFFFFFFFF
    assert np.array_equal(np.sort(users * fit.shape[1] + items), fit.keys())
    blocks = [set(part) for part in np.split(division.items, division.item_bounds[1:-1])]
    assert {len(block) for block in blocks} == {fit.shape[1] // P}
    owner: dict[int, int] = {}
    for k in range(P):
        for block in range(P):
            cell = slice(division.begin[k, block], division.begin[k, block] + division.counts[k, block])
            assert set(items[cell]) <= blocks[block]
            assert all(owner.setdefault(user, k) == k for user in users[cell])


def test_the_division_is_new_in_each_epoch_and_for_each_seed() -> None:
    fit = clusters().train
    pairs = [divide(fit, seed, epoch, 2).pairs for seed, epoch in ((0, 0), (0, 1), (1, 0))]
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert (pairs[a] == pairs[b]).mean() < 0.05
    assert np.array_equal(pairs[0], divide(fit, 0, 0, 2).pairs)


def test_the_order_of_interactions_is_uniform() -> None:
    fit = CSR.from_pairs(np.zeros(4, np.int64), np.arange(4), (1, 4))
    orders = Counter(tuple(divide(fit, 0, epoch, 1).pairs) for epoch in range(4800))
    assert len(orders) == 24
    deviations = np.array(list(orders.values())) - 200
    assert (deviations**2).sum() / 200 < 49.7  # chi-square with 23 degrees of freedom, p = 0.001


@pytest.mark.parametrize("popularity", [False, True])
def test_tasks_at_the_same_time_share_no_row_and_together_are_the_epoch(popularity: bool, threads: None) -> None:
    fit, lock = clusters().train, threading.Lock()
    active: list[set[tuple[str, int]]] = []
    seen: list[int] = []

    def kernel(task: Any, tables: Any, passes: int, fixed: bool, result: Any) -> None:
        items = set((task.pairs & 0xFFFFFFFF).tolist()) | set((task.candidates & 0xFFFFFFFF).tolist())
        rows = {("user", user) for user in (task.pairs >> 32).tolist()} | {("item", item) for item in items}
        with lock:
            assert not any(rows & others for others in active)
            active.append(rows)
            assert list(task.pairs) == list(division.pairs[task.first : task.first + len(task.pairs)])
            seen.extend(task.pairs.tolist())
        threading.Event().wait(0.001)
        with lock:
            active.remove(rows)
        result[:] = len(task.pairs), 1

    division = divide(fit, 0, 0, 4)
    set_threads(2)
    loss, trained = pair_epoch(kernel, fit, 0, 0, popularity, None, blocks=4)  # type: ignore[arg-type]
    assert (loss, trained) == (fit.nnz, 4 * 4 * module.SLICES)
    assert sorted(seen) == sorted(division.pairs.tolist())


def test_a_task_that_fails_does_not_block_the_others(threads: None) -> None:
    def kernel(*arguments: object) -> None:
        raise ValueError("no")

    set_threads(2)
    with pytest.raises(ValueError, match="no"):
        pair_epoch(kernel, clusters().train, 0, 0, False, None, blocks=4)  # type: ignore[arg-type]


@pytest.mark.parametrize(("model", "options"), MODELS)
@pytest.mark.parametrize("blocks", [1, 4])
def test_bits_do_not_depend_on_threads(
    model: type[PairModel[Any]], options: dict[str, Any], blocks: int, threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "n_blocks", lambda nnz, n_items: blocks)
    data = clusters()
    one, two = (model(factors=9, epochs=3, threads=number, **options).fit(data) for number in (1, 2))
    for name, tensor in one.tensors.items():
        assert torch.equal(tensor, two.tensors[name])
    liked = data.test.take(np.arange(50))
    assert torch.equal(one.fold_in_items(liked), two.fold_in_items(liked))


def test_the_number_of_blocks_grows_with_the_data() -> None:
    assert n_blocks(0, 0) == 1
    assert [n_blocks(nnz, 10**6) for nnz in (10**4, 10**5, 10**6, 10**7, 10**9)] == [1, 2, 8, 32, 32]
    assert n_blocks(10**9, 1024) == 4


@pytest.mark.parametrize(("model", "options"), MODELS)
def test_new_users_rank_nearly_as_well_as_trained_ones(model: type[PairModel[Any]], options: dict[str, Any]) -> None:
    data = clusters(n_users=1600)
    known, new = np.arange(800), np.arange(800, 1600)  # of the same groups
    options = {"factors": 16, "lr": 0.1 if model is BPR else 0.05, "epochs": 20, **options}
    fitted = model(**options).fit(Dataset.from_csr(data.train.take(known).to_scipy()))
    vectors = fitted.fold_in_items(data.train.take(new))

    def ndcg(users: NDArray[np.int64], U: Tensor, V: Tensor) -> float:
        rank = factor_ranker(get_backend("cpu"), U, V, "dot")
        return evaluate(rank, data.train.take(users), data.test.take(users)).means["ndcg@10"]

    groups, V = torch.eye(GROUPS), fitted.item_factors
    best = ndcg(new, groups[new % GROUPS], groups[np.arange(len(V)) % GROUPS])
    assert ndcg(known, fitted.user_factors, V) > 0.85 * best
    assert ndcg(new, vectors, V) > 0.85 * best
    assert ndcg(new, vectors.roll(1, 0), V) < 0.3 * best


@pytest.mark.parametrize(("model", "options"), MODELS)
def test_a_new_user_does_not_depend_on_the_others(model: type[PairModel[Any]], options: dict[str, Any]) -> None:
    data = clusters()
    fitted = model(factors=8, epochs=2, **options).fit(data)
    V, together = fitted.item_factors.clone(), fitted.fold_in_items(data.test)
    alone = [fitted.fold_in_items(data.test.take(np.array([user]))) for user in (0, 7, 399)]
    assert torch.equal(together[[0, 7, 399]], torch.cat(alone))
    assert torch.equal(V, fitted.item_factors)
    assert torch.equal(fitted.fold_in([[5, 2, 9]]), fitted.fold_in([[9, 5, 2]]))


@pytest.mark.parametrize(("model", "options"), MODELS)
def test_users_and_items_without_interactions(model: type[PairModel[Any]], options: dict[str, Any]) -> None:
    # User 0 has nothing, user 1 everything that anyone has, user 3 the whole catalogue; nobody else has item 2.
    data = Dataset.from_csr(([0, 0, 2, 3, 6], [0, 1, 1, 0, 1, 2]), n_items=3)
    fitted = model(factors=3, epochs=4, eval_every=0, **options).fit(data)
    assert torch.isfinite(fitted.user_factors).all()
    assert (fitted.tensors["user_factors"][0] == 0).all()
    whole = data.train.take(np.array([0, 3]))
    assert torch.equal(fitted.fold_in_items(whole), torch.tensor([[0.0, 0, 0, 1]] * 2))  # nothing to compare


@pytest.mark.parametrize(("model", "options"), MODELS)
def test_one_item_and_no_interactions(model: type[PairModel[Any]], options: dict[str, Any]) -> None:
    for indptr, indices in (([0, 1, 2], [0, 0]), ([0, 0, 0], [])):
        fitted = model(factors=2, epochs=2, eval_every=0, **options).fit(
            Dataset.from_csr((indptr, np.array(indices, np.int64)), n_items=1)
        )
        assert fitted.item_factors.shape == (1, 3)
        assert torch.equal(fitted.fold_in([[0]]), torch.tensor([[0.0, 0, 1]]))


@pytest.mark.parametrize(("model", "options"), MODELS)
def test_resumed_runs_have_the_same_bits(
    model: type[PairModel[Any]], options: dict[str, Any], tmp_path: Path, no_curves: None
) -> None:
    data = clusters()
    whole = model(factors=4, epochs=4, **options).fit(data)
    model(factors=4, epochs=4, **options).fit(data, callbacks=[lambda end: end.state.epoch == 2], run=tmp_path / "run")
    model(factors=4, epochs=4, **options).fit(data, run=tmp_path / "run", resume=True)
    resumed = load(tmp_path / "run")
    assert type(resumed) is model
    assert all(torch.equal(resumed.tensors[name], tensor) for name, tensor in whole.tensors.items())


def test_memory_is_that_of_the_tensors() -> None:
    fit = clusters().train
    for model in (BPR(factors=8), WARP(factors=8)):
        needed = model.memory(*fit.shape, fit.nnz, 0)
        held = sum(tensor.numel() * 4 for tensor in model.start(fit).values())
        assert sum(needed.values()) - needed["order of an epoch"] == held
