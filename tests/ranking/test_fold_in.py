"""Fold-in: vectors of new users depend on their items alone, and rank about as well as trained ones."""

import dataclasses
import random

import numpy as np
import polars as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drm_triton import DRM, Dataset
from drm_triton.data.prepare.synthetic import Shape, generate
from drm_triton.kernels import get_backend
from drm_triton.kernels.cpu.runtime.threads import set_threads
from drm_triton.ranking import fold_in
from drm_triton.ranking.evaluate import evaluate, factor_ranker
from drm_triton.training.step import objective_of
from tests.ranking.conftest import LikedItems

N_ITEMS = 90

ids = st.lists(st.integers(0, N_ITEMS - 1).map(lambda i: 10 * i), unique=True)
histories = st.lists(ids.filter(bool), min_size=1, max_size=6)


def known_only(model: DRM, lists: list[list[int]]) -> list[list[int]]:
    known = set(model.interactions.item_ids)
    return [kept for items in lists if (kept := [item for item in items if item in known])]


@settings(max_examples=30, deadline=None)
@given(score=st.sampled_from(["dot", "l2"]), lists=histories, chance=st.randoms())
def test_a_vector_depends_on_the_items_alone(
    score: str, lists: list[list[int]], chance: random.Random, models: dict[str, DRM]
) -> None:
    model = models[score]
    lists = known_only(model, lists)
    if not lists:
        return
    together = model.fold_in(lists)
    assert together.shape == (len(lists), 8)
    assert together.dtype == torch.float32
    assert torch.isfinite(together).all()
    assert (together.norm(dim=1) <= 1 + 1e-6).all()
    order = chance.sample(range(len(lists)), len(lists))
    mixed = [chance.sample(lists[p], len(lists[p])) + lists[p][:2] for p in order]  # shuffled, some items twice
    assert torch.equal(model.fold_in(mixed), together[order])
    assert torch.equal(torch.cat([model.fold_in([items]) for items in lists]), together)


def test_a_vector_does_not_depend_on_threads_or_batches(
    model: DRM, threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = model.interactions
    lists = [data.item_ids[data.train.row(u)].to_list() for u in range(data.n_users)] * 3
    vectors = []
    for number, batch in ((1, 512), (2, 512), (2, 50), (1, 1)):
        monkeypatch.setattr("drm_triton.ranking.fold_in.USERS_PER_BATCH", batch)
        set_threads(number)
        torch.set_num_threads(number)
        vectors.append(model.fold_in(lists))
    assert all(torch.equal(vectors[0], other) for other in vectors[1:])
    assert torch.equal(vectors[0][: data.n_users], vectors[0][-data.n_users :])


def test_fold_in_agrees_with_the_reference_backend(
    model: DRM, monkeypatch: pytest.MonkeyPatch, liked_items: LikedItems
) -> None:
    lists = [liked_items(model, f"u{u}") for u in range(1, 6)]
    # mse is smooth; with the other losses a last bit may decide which of two scores is larger and change the path
    config = dataclasses.replace(model.config, objective="mse")
    monkeypatch.setattr(model, "config", config)
    ours = model.fold_in(lists)
    monkeypatch.setattr(model, "config", dataclasses.replace(config, backend="reference"))
    torch.testing.assert_close(model.fold_in(lists), ours, rtol=1e-4, atol=1e-5)


OBJECTIVES = {
    "dot": {},
    "l2": {"score": "l2"},
    "cosine": {"score": "cosine", "objective": "softmax"},
    "catalogue": {"score": "cosine", "objective": "softmax", "negatives": "all"},
}


@pytest.fixture(scope="module")
def data() -> Dataset:
    users, items = generate(Shape(users=600, items=300, interactions=18000), 1)
    return Dataset.from_frame(pl.DataFrame({"user": users, "item": items}), split="per-user", ratios=(80, 0, 20))


@pytest.fixture(scope="module", params=OBJECTIVES)
def trained(request: pytest.FixtureRequest, data: Dataset) -> DRM:
    """A model of each objective."""
    return DRM(factors=16, epochs=10, **OBJECTIVES[request.param]).fit(data)


def test_fold_in_lowers_the_loss_of_training(trained: DRM) -> None:
    V, config, backend = trained.item_factors, trained.config, get_backend()
    matrix = trained.interactions.train.take(np.arange(40))
    start = fold_in.mean_direction(V, matrix)
    if config.score == "cosine":
        start = torch.nn.functional.normalize(start)

    def loss(U: torch.Tensor) -> float:
        if config.negatives == "all":
            batch = fold_in._catalogue(matrix, V.device)
            return float(backend.catalogue_gradients(U, V, batch, objective_of(config)).softmax[:40].mean())
        plan, seeds = fold_in._plan(matrix, config, V.device)
        lists = backend.sample_users(plan, seeds, 99, 1000)  # lists that fold-in has not sampled
        return float(backend.list_gradients(U, V, lists, objective_of(config)).loss.mean())

    assert loss(fold_in.fold_in(V, matrix, config, backend)) < 0.97 * loss(start)


def test_a_trained_user_folded_back_in_ranks_about_as_well(trained: DRM, data: Dataset) -> None:
    score = trained.config.score
    expected = trained.evaluate(data.test).means["ndcg@10"]
    vectors = trained.fold_in([data.item_ids[data.train.row(u)] for u in range(data.n_users)])
    if score == "cosine":
        torch.testing.assert_close(vectors.norm(dim=1), torch.ones(data.n_users), rtol=0, atol=1e-6)
    folded = evaluate(factor_ranker(get_backend(), vectors, trained.item_factors, score), data.train, data.test)
    assert folded.means["ndcg@10"] > 0.9 * expected


def test_a_vector_of_any_objective_depends_on_the_items_alone(trained: DRM) -> None:
    data = trained.interactions
    lists = [data.item_ids[data.train.row(u)] for u in range(70)]  # more than a block of products
    together = trained.fold_in(lists)
    assert torch.equal(trained.fold_in(lists[3:5]), together[3:5])
    assert torch.equal(trained.fold_in(lists[::-1]), together.flip(0))


def test_whole_catalogue_and_single_item(model: DRM) -> None:
    every = model.interactions.item_ids.to_list()
    vectors = model.fold_in([every, every[:1]])
    assert torch.isfinite(vectors).all()
    assert len(model.recommend_from([every])) == 0
    assert len(model.recommend_from([every], exclude_seen=False, k=4)) == 4
    best = model.recommend_from([every[:1]], exclude_seen=False, k=10)["item"].to_list()
    assert every[0] in best
