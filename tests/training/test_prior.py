"""The popularity prior: in training, in rankings, for new users, and where it must have no effect."""

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from numpy.typing import NDArray

from drm_triton import DRM, Dataset
from drm_triton.data.prepare.synthetic import Shape, generate
from drm_triton.export import export
from drm_triton.ranking.evaluate import evaluate, popularity_ranker
from drm_triton.training.state import EpochEnd

SMALL: dict[str, Any] = {"factors": 8, "epochs": 2, "temperature": 0.2}


@pytest.fixture(scope="module")
def data() -> Dataset:
    users, items = generate(Shape(users=300, items=200, interactions=6_000), 0)
    return Dataset.from_frame(pl.DataFrame({"user": users, "item": items}))


@pytest.fixture(scope="module")
def model(data: Dataset) -> DRM:
    return DRM(**SMALL, popularity=0.5).fit(data)


def prior_of(data: Dataset) -> NDArray[np.float64]:
    return 0.2 * 0.5 * np.log(np.maximum(data.train.popularity(), 1))


def test_scores_are_cosines_plus_the_prior(data: Dataset, model: DRM) -> None:
    U, V = (model.tensors[name].double().numpy() for name in ("user_factors", "item_factors"))
    assert (U.shape[1], V.shape[1]) == (8, 8)
    users, items = np.arange(50), np.arange(50) + 7
    want = (U[users] * V[items]).sum(1) + prior_of(data)[items]
    got = model.score(data.user_ids[users], data.item_ids[items])
    np.testing.assert_allclose(got, want, atol=1e-6)


def test_validation_ranks_as_the_model_does(data: Dataset) -> None:
    ends: list[EpochEnd] = []
    model = DRM(**SMALL, popularity=0.5).fit(data, callbacks=[ends.append])
    best = max(end.record["valid/ndcg@10"] for end in ends)
    assert model.evaluate(data, on="valid").means["ndcg@10"] == best


def test_a_large_exponent_ranks_by_popularity(data: Dataset) -> None:
    model = DRM(**SMALL, popularity=1e4).fit(data)
    found = model.evaluate(data, on="valid").means
    assert found["ndcg@10"] == pytest.approx(
        evaluate(popularity_ranker(data.train), data.train, data.valid).means["ndcg@10"], abs=1e-3
    )


@pytest.mark.parametrize("pool", [50, 1000])
def test_the_prior_changes_what_is_learned(data: Dataset, pool: int) -> None:
    plain, prior = (DRM(**SMALL, pool=pool, popularity=a).fit(data).tensors["item_factors"] for a in (0.0, 0.5))
    assert not torch.allclose(plain, prior, atol=1e-3)


def test_similar_items_are_compared_without_their_popularity(data: Dataset, model: DRM) -> None:
    V = torch.nn.functional.normalize(model.tensors["item_factors"])
    found = model.similar_items(data.item_ids[:1], k=5)
    codes = data.encode_items(found["similar"])
    np.testing.assert_allclose(found["score"], (V[codes] @ V[0]).numpy(), atol=1e-6)
    assert torch.equal(torch.from_numpy(model.diversity_factors()), model.tensors["item_factors"])


def test_new_users_are_fitted_with_the_prior(data: Dataset, model: DRM) -> None:
    liked = {"new": data.item_ids[[1, 5, 9]]}
    vector = model.fold_in(liked)[0]
    assert vector[-1] == 1
    assert vector[:-1].norm().item() == pytest.approx(1, abs=1e-6)
    plain = DRM(**SMALL)._become(model)
    assert not torch.allclose(plain.fold_in(liked)[0], vector[:-1], atol=1e-4)


def test_stored_and_updated_models_keep_the_prior(data: Dataset, model: DRM, tmp_path: Path) -> None:
    model.save(tmp_path / "model")
    loaded = DRM.load(tmp_path / "model")
    users = data.user_ids[:20]
    assert loaded.recommend(users, k=5).equals(model.recommend(users, k=5))
    new = pl.DataFrame({"user": [1000] * 3, "item": data.item_ids[[1, 5, 9]]})
    updated = loaded.partial_fit(new)
    assert updated.user_factors.shape == (len(data.user_ids) + 1, 9)
    assert updated.recommend([1000], k=5).height == 5


def test_exported_factors_rank_as_the_model_does(data: Dataset, model: DRM, tmp_path: Path) -> None:
    manifest = export(model, tmp_path / "out")
    assert (manifest["score"], manifest["dimension"]) == ("dot", 9)
    found = np.load(tmp_path / "out" / "factors.npz", allow_pickle=False)
    scores = found["user_factors"] @ found["item_factors"].T
    np.testing.assert_allclose(scores[:5, 3], model.score(data.user_ids[:5], data.item_ids[[3] * 5]), atol=1e-6)
