"""What every model promises: one class of tests that all of them pass."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

from drm_triton import Dataset
from drm_triton.data.csr import CSR
from drm_triton.errors import InputError
from drm_triton.export import export
from drm_triton.models import MODELS, load, model_class
from drm_triton.models.configs import CONFIGS, config_class
from drm_triton.options import declaration
from drm_triton.ranking.evaluate import evaluate, popularity_ranker
from drm_triton.recommender import FactorRecommender, NotFittedError, Recommender
from drm_triton.training.checkpoint import FILE, read_tensors, write_tensors
from drm_triton.training.run import read_metrics

SMALL = {"factors": 8, "epochs": 3, "lr": 0.1, "neighbors": 20, "eta": 10, "batch_size": 64}
# Of models that learn less in an epoch: SQL-Rank takes a single step, and BPR plain gradient steps from small vectors.
EPOCHS = {"bpr": 10, "cdae": 10, "sqlrank": 20}


def untrained(name: str, **options: Any) -> Recommender[Any]:
    """Return a model with small options."""
    kind, small = config_class(name), SMALL | {"epochs": EPOCHS.get(name, SMALL["epochs"])}
    known = {option: value for option, value in {**small, **options}.items() if option in kind.fields()}
    return model_class(name)(kind.from_mapping(known))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Two groups of users, each with items of its own, so that a model has something to learn."""
    rng = np.random.default_rng(0)
    pairs = {(u, 2 * int(i) + u % 2) for u in range(60) for i in rng.choice(20, 10, replace=False)}
    frame = pl.DataFrame(sorted(pairs), schema=["user", "item"], orient="row")
    frame = frame.with_columns(user=pl.format("u{}", "user"), item=pl.format("i{}", "item"))
    prepared = Dataset.from_frame(frame, ratios=(7, 1, 2))
    folder = tmp_path_factory.mktemp("contract") / "data"
    prepared.save(folder)
    return Dataset.load(folder)


@pytest.fixture(scope="module", params=MODELS)
def name(request: pytest.FixtureRequest) -> str:
    """The name of a model."""
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def run(name: str, data: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of a trained model."""
    place = tmp_path_factory.mktemp("runs") / "run"
    untrained(name).fit(data, run=place)
    return place


@pytest.fixture(scope="module")
def model(run: Path) -> Recommender[Any]:
    """A trained model."""
    return load(run)


class TestContract:
    """What every model promises."""

    def test_registry(self, name: str) -> None:
        assert MODELS.keys() == CONFIGS.keys()
        assert model_class(name).Config is config_class(name)
        assert config_class(name).model == name

    def test_an_untrained_model_says_so(self, name: str) -> None:
        with pytest.raises(NotFittedError, match="call fit or load first"):
            untrained(name).recommend()

    def test_recommendations_are_unseen_and_ranked(self, model: Recommender[Any], data: Dataset) -> None:
        frame = model.recommend(k=5)
        users, items = data.encode_users(frame["user"].unique(maintain_order=True)), data.item_ids
        assert len(users) == 60
        assert all(size <= 5 for size in frame.group_by("user").len()["len"])
        for user in users:
            rows = frame.filter(pl.col("user") == data.user_ids[int(user)])
            assert rows["rank"].to_list() == list(range(1, len(rows) + 1))
            assert rows["score"].to_list() == sorted(rows["score"], reverse=True)
            assert not set(rows["item"]) & set(items[data.owned.row(int(user))])

    def test_scores_of_pairs(self, model: Recommender[Any]) -> None:
        frame = model.recommend(k=3).sample(fraction=1.0, shuffle=True, seed=0)
        np.testing.assert_allclose(model.score(frame["user"], frame["item"]), frame["score"], rtol=1e-4, atol=1e-5)

    def test_refit_learns_from_all_interactions(self, model: Recommender[Any], name: str, data: Dataset) -> None:
        final, epoch = model.refit(data), model.untrained_final().config.last_epoch
        assert final.interactions.train.nnz == data.n_interactions
        again = untrained(name, fit_on="all", eval_every=0).fit(data, [lambda end: end.record["epoch"] == epoch])
        assert final.recommend(k=3).equals(again.recommend(k=3))

    def test_one_user_as_in_a_batch(self, model: Recommender[Any]) -> None:
        everyone = model.recommend(k=3)
        for user in ("u0", "u17"):
            alone = model.recommend([user], k=3)
            assert alone["item"].to_list() == everyone.filter(pl.col("user") == user)["item"].to_list()

    def test_only_and_without(self, model: Recommender[Any], data: Dataset) -> None:
        only = data.item_ids.head(10).to_list()
        assert set(model.recommend(["u0"], k=40, only=only)["item"]) <= set(only)
        assert not set(model.recommend(["u0"], k=40, without=only)["item"]) & set(only)

    def test_it_learns_the_groups(self, model: Recommender[Any], name: str, data: Dataset) -> None:
        if name == "popularity":
            pytest.skip("popularity is the same for everyone")
        best = model.ranker()(np.arange(data.n_users), data.train, 5)
        users, items = (ids.str.slice(1).cast(int).to_numpy() % 2 for ids in (data.user_ids, data.item_ids))
        assert (items[best] == users[:, None]).mean() > 0.7
        ours = model.evaluate(data.valid, min_train=1).means["ndcg@10"]
        popularity = evaluate(popularity_ranker(data.train), data.train, data.valid, min_train=1).means["ndcg@10"]
        assert ours > popularity

    def test_new_users(self, model: Recommender[Any], name: str) -> None:
        liked = ["i0", "i2", "i4", "i6"]
        frame = model.recommend_from({"new": liked, "other": ["i1", "i3", "i5"]}, k=5)
        assert frame["user"].unique(maintain_order=True).to_list() == ["new", "other"]
        found = frame.filter(pl.col("user") == "new")
        assert not set(found["item"]) & set(liked)
        alone = model.recommend_from({"new": liked[::-1]}, k=5)
        assert alone["item"].to_list() == found["item"].to_list()
        assert alone["score"].to_list() == found["score"].to_list()
        if name != "popularity":
            assert sum(int(item[1:]) % 2 == 0 for item in found["item"]) >= 3

    def test_similar_items(self, model: Recommender[Any], name: str) -> None:
        if name == "popularity":
            with pytest.raises(InputError, match="does not compare items"):
                model.similar_items(["i0"])
            return
        frame = model.similar_items(["i0", "i1"], k=3)
        assert frame.columns == ["item", "rank", "similar", "score"]
        assert not (frame["item"] == frame["similar"]).any()
        assert frame.filter(pl.col("item") == "i0")["score"].is_sorted(descending=True)

    def test_save_and_load(self, model: Recommender[Any], tmp_path: Path) -> None:
        model.save(tmp_path / "model")
        again = load(tmp_path / "model")
        assert type(again) is type(model)
        assert again.config == model.config.resolved()
        assert again.recommend(k=5).equals(model.recommend(k=5))
        assert again.recommend_from({"new": ["i3", "i5"]}).equals(model.recommend_from({"new": ["i3", "i5"]}))

    def test_a_file_without_one_of_its_tensors_is_refused(self, model: Recommender[Any], tmp_path: Path) -> None:
        if not isinstance(model, FactorRecommender):
            pytest.skip("weights between items have no fixed parts")
        model.save(tmp_path / "model")
        file = tmp_path / "model" / FILE
        tensors, metadata = read_tensors(file)
        for lost in tensors:
            kept = {name: tensor for name, tensor in tensors.items() if name != lost}
            write_tensors(file, kept, {name: metadata[name] for name in ("model", "config")})
            with pytest.raises(InputError, match=lost):
                load(tmp_path / "model")

    def test_another_class_refuses_the_file(self, run: Path, name: str) -> None:
        other = next(one for one in MODELS if one != name)
        with pytest.raises(InputError, match=r"load it with drm_triton\.models\.load"):
            model_class(other).load(run)

    def test_same_seed_same_bits_whatever_the_threads(self, name: str, data: Dataset) -> None:
        one, two = (untrained(name, threads=threads, eval_every=0).fit(data) for threads in (1, 2))
        assert one.tensors.keys() == two.tensors.keys()
        assert all(torch.equal(one.tensors[key], two.tensors[key]) for key in one.tensors)

    def test_a_resumed_run_has_the_same_bits(self, run: Path, name: str, data: Dataset, tmp_path: Path) -> None:
        if "epochs" not in config_class(name).fields():
            pytest.skip("a single epoch")
        untrained(name).fit(data, [lambda end: end.record["epoch"] == 1], run=tmp_path / "run")
        assert len(read_metrics(tmp_path / "run")) == 1
        untrained(name).fit(data, run=tmp_path / "run", resume=True)
        stopped, whole = ((place / "last" / "model.safetensors").read_bytes() for place in (tmp_path / "run", run))
        first, second = (load(place / "last") for place in (tmp_path / "run", run))
        assert all(torch.equal(first.tensors[key], second.tensors[key]) for key in first.tensors)
        assert len(stopped) == pytest.approx(len(whole), abs=200)  # the metadata holds seconds

    def test_run_directory(self, run: Path, name: str) -> None:
        assert f'model = "{name}"' in (run / "config.toml").read_text()
        assert json.loads((run / "env.json").read_text())["data"]["users"] == 60
        assert {"best", "last", "curves.png", "metrics.csv"} <= {place.name for place in run.iterdir()}
        assert "valid/ndcg@10" in read_metrics(run)[-1]

    def test_users_and_items_without_interactions(self, name: str) -> None:
        train = CSR.from_pairs(np.array([0, 0, 1, 1, 3, 3]), np.array([0, 1, 0, 1, 1, 3]), (5, 6))
        model = untrained(name).fit(Dataset.from_csr(train.to_scipy()))
        frame = model.recommend(k=3)
        assert set(frame["user"]) == {0, 1, 3}
        assert all(np.isfinite(frame["score"].to_numpy()))

    def test_a_user_who_has_everything(self, name: str) -> None:
        train = CSR.from_pairs(np.array([0, 0, 0, 1]), np.array([0, 1, 2, 1]), (2, 3))
        model = untrained(name).fit(Dataset.from_csr(train.to_scipy()))
        assert model.recommend([0]).is_empty()
        assert len(model.recommend([1])) == 2

    def test_export(self, model: Recommender[Any], tmp_path: Path) -> None:
        manifest = export(model, tmp_path / "out", "npz")
        assert manifest["model"] == model.config.model
        file, owned = manifest["files"]
        assert owned == "owned.npz"
        with np.load(tmp_path / "out" / file, allow_pickle=False) as arrays:
            assert len(arrays["item_ids"]) == model.interactions.n_items
        if not isinstance(model, FactorRecommender):
            with pytest.raises(InputError, match="needs factors"):
                export(model, tmp_path / "faiss", "faiss")

    def test_memory_is_stated(self, name: str, data: Dataset) -> None:
        estimate = untrained(name).memory_estimate(data)
        assert all(size >= 0 for size in estimate.values())
        assert estimate["interactions"] > 0

    def test_options_are_declared(self, name: str) -> None:
        for field in config_class(name).fields().values():
            help = declaration(field).help
            assert help[0].isupper()
            assert help.endswith(".")

    def test_unknown_options(self, name: str) -> None:
        with pytest.raises(InputError, match="unknown option `facters`"):
            model_class(name)(facters=3)  # type: ignore[call-arg]


def test_an_option_means_the_same_in_all_models() -> None:
    kinds: dict[str, Any] = {}
    for config in CONFIGS.values():
        for name, field in config.fields().items():
            assert kinds.setdefault(name, field.type) == field.type, (config.model, name)
