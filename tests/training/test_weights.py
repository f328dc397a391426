"""Weights of interactions in training: transforms, the loss of a list, and what must not change."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

from drm_triton import DRM, Dataset, TrainConfig
from drm_triton.data.csr import CSR
from drm_triton.data.prepare.synthetic import Shape, generate
from drm_triton.errors import InputError
from drm_triton.kernels import get_backend
from drm_triton.kernels.batches import ListBatch
from drm_triton.kernels.protocol import ListPlan
from drm_triton.training.loop import initial_state, interactions_to_fit
from drm_triton.training.run import Run
from drm_triton.training.step import objective_of, train_step
from drm_triton.training.tune import Study
from drm_triton.training.weights import training_weights

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {"factors": 8, "epochs": 2, "batch_size": 256, "eval_every": 0}


def planted(weight: pl.Expr | None = None) -> Dataset:
    """600 users with planted tastes; an expression of user and item gives the weights."""
    users, items = generate(Shape(users=600, items=400, interactions=12_000), 0)
    frame = pl.DataFrame({"user": users, "item": items})
    if weight is None:
        return Dataset.from_frame(frame)
    return Dataset.from_frame(frame.with_columns(n=weight), weight="n")


@pytest.fixture(scope="module")
def played() -> Dataset:
    """Each user has played an item 1 to 1000 times."""
    return planted((pl.col("user") * 7919 + pl.col("item") * 104_729) % 1000 + 1)


def matrix(weights: list[float]) -> CSR:
    """User 0 has items 0 and 1, user 1 has item 1, user 2 none."""
    rows, columns = np.array([0, 0, 1]), np.array([0, 1, 1])
    return CSR.from_pairs(rows, columns, (3, 2), np.array(weights, dtype=np.float32))


def transformed(weights: list[float], transform: Any, cap: float | None = None) -> list[float]:
    config = TrainConfig(interaction_weights=transform, interaction_weight_cap=cap)
    found = training_weights(config, matrix(weights), CPU)
    assert found is not None
    assert found.dtype == torch.float32
    return found.tolist()


def test_transforms_by_hand() -> None:
    assert training_weights(TrainConfig(), matrix([1, 2, 3]), CPU) is None
    assert transformed([1, 2, 6], "raw") == pytest.approx([1 / 3, 2 / 3, 2])
    logs = [math.log(2), math.log(3), math.log(7)]
    assert transformed([1, 2, 6], "log") == pytest.approx([3 * x / sum(logs) for x in logs])
    # Lengths 3 and 6 of users 0 and 1, mean 4.5; item 0 has one user of three, item 1 two.
    rare, common = math.log(1 + 2.5 / 1.5), math.log(1 + 1.5 / 2.5)
    short, long = 100 * (0.2 + 0.8 * 3 / 4.5), 100 * (0.2 + 0.8 * 6 / 4.5)
    bm25 = [rare * 1 / (short + 1), common * 2 / (short + 2), common * 6 / (long + 6)]
    assert transformed([1, 2, 6], "bm25") == pytest.approx([3 * x / sum(bm25) for x in bm25])


def test_a_cap_is_a_multiple_of_the_mean_and_the_mean_stays_1() -> None:
    # 1/3, 2/3, 2 become 1/3, 2/3, 1 with mean 2/3.
    assert transformed([1, 2, 6], "raw", 1.0) == pytest.approx([0.5, 1, 1.5])
    assert transformed([1, 2, 6], "raw", 5.0) == transformed([1, 2, 6], "raw")
    assert transformed([100, 200, 600], "raw", 1.0) == transformed([1, 2, 6], "raw", 1.0)  # whatever the unit


@pytest.mark.parametrize("transform", ["raw", "log"])
def test_equal_weights_become_exactly_1(transform: str) -> None:
    for weight in (1.0, 0.1, 3.7e19, 1e-20):
        ones = CSR.from_pairs(np.zeros(1001, int), np.arange(1001), (1, 2000), np.full(1001, weight, dtype=np.float32))
        found = training_weights(TrainConfig(interaction_weights=transform), ones, CPU)  # type: ignore[arg-type]
        assert found is not None
        assert (found == 1).all()


def test_the_weight_of_a_list_is_the_mean_of_its_positives() -> None:
    users, items = generate(Shape(users=50, items=40, interactions=500), 1)
    data = Dataset.from_frame(pl.DataFrame({"user": users, "item": items, "n": users * 100 + items + 1}), weight="n")
    fit = interactions_to_fit(data, TrainConfig(fit_on="all"))
    assert fit.weights is not None
    plan = ListPlan(*fit.tensors(CPU), 40, rho=3, eta=5, share=2, weights=torch.from_numpy(fit.weights))
    batch = get_backend("cpu").sample_lists(plan, 0, 0, plan.n_lists)
    found = plan.list_weights(batch)
    assert found is not None
    positives = data.item_ids.to_numpy()[batch.items[:, :3].numpy()]
    expected = (data.user_ids.to_numpy()[batch.users.numpy()][:, None] * 100 + positives + 1).mean(1)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-6)
    assert dataclasses.replace(plan, weights=None).list_weights(batch) is None


def test_a_plan_checks_its_weights() -> None:
    indptr, indices = torch.tensor([0, 1]), torch.tensor([0], dtype=torch.int32)
    for weights in (torch.ones(2), torch.ones(1, dtype=torch.float64)):
        with pytest.raises(InputError, match="ListPlan: weights must"):
            ListPlan(indptr, indices, 3, 1, 1, weights=weights)


@pytest.mark.parametrize("score", ["dot", "l2"])
@pytest.mark.parametrize("objective", ["hinge+drm", "mse", "softmax+drm"])
def test_a_weight_of_2_doubles_the_gradient_of_a_list(score: Any, objective: Any) -> None:
    """One Adagrad step from a large state is linear in the gradient. A list of weight 2 equals the same list twice."""
    config = TrainConfig(score=score, objective=objective, factors=6, init="normal")
    users, items = torch.tensor([0, 1], dtype=torch.int32), torch.arange(16, dtype=torch.int32).reshape(2, 8)
    states = []
    for repeats, weights in (([1, 1], torch.tensor([1.0, 2.0])), ([1, 2], None), ([1, 1], None)):
        state = initial_state(config, CSR.empty((2, 16)), CPU)
        for table in (state.U_state, state.V_state):
            table.fill_(1e6)
        times = torch.tensor(repeats)
        batch = ListBatch(users.repeat_interleave(times), items.repeat_interleave(times, 0))
        train_step(state, batch, config, objective_of(config, 16), get_backend("cpu"), 100.0, weights)
        states.append(state)
    weighted, twice, once = states
    for name in ("U", "V"):
        torch.testing.assert_close(getattr(weighted, name), getattr(twice, name), rtol=0, atol=1e-6)
        assert (getattr(weighted, name) - getattr(once, name)).abs().max() > 1e-4
    assert weighted.sums == pytest.approx(twice.sums)
    assert weighted.sums["loss"] > once.sums["loss"]


DRM_OPTIONS = [{"objective": "hinge+drm", **options} for options in ({}, {"rho": 3, "score": "l2"}, {"share": 1})]


@pytest.mark.parametrize("options", [{}, {"pool": 30}, *DRM_OPTIONS])
@pytest.mark.parametrize("transform", ["raw", "log"])
def test_weights_of_1_give_the_bits_of_none(options: dict[str, Any], transform: Any) -> None:
    plain = DRM(**SMALL, **options).fit(planted())
    for weight, cap in ((1.0, None), (0.3, 0.5)):
        ones = DRM(**SMALL, **options, interaction_weights=transform, interaction_weight_cap=cap)
        ones.fit(planted(pl.lit(weight)))
        assert torch.equal(ones.user_factors, plain.user_factors)
        assert torch.equal(ones.item_factors, plain.item_factors)


@pytest.mark.parametrize("others", [{}, {"fit_on": "train+valid"}, {"objective": "hinge+drm"}])
def test_weights_count_only_if_they_are_on(played: Dataset, others: dict[str, Any]) -> None:
    options = {**SMALL, **others}
    plain = DRM(**options).fit(planted())
    assert torch.equal(DRM(**options).fit(played).user_factors, plain.user_factors)
    factors = [
        DRM(**options, interaction_weights=transform, threads=threads).fit(played).user_factors
        for transform in ("raw", "log", "bm25")
        for threads in (1, 2)
    ]
    for one, two in zip(factors[::2], factors[1::2], strict=True):
        assert torch.equal(one, two)
    assert len({hash(table.numpy().tobytes()) for table in [plain.user_factors, *factors]}) == 4


def test_items_played_more_rank_higher() -> None:
    """Everybody has all items but one. Those of one half count a hundred times as much, so they score higher."""
    users, items = np.nonzero(np.arange(40)[:, None] != np.arange(40))
    frame = pl.DataFrame({"user": users, "item": items, "n": np.where(items < 20, 100, 1)})
    data = Dataset.from_frame(frame, weight="n", ratios=(1, 0, 0))
    model = DRM(factors=4, epochs=20, init="normal", interaction_weights="raw", batch_size=32).fit(data)
    scores = (model.user_factors @ model.item_factors.T).mean(0)
    assert scores[:20].mean() > scores[20:].mean()


@pytest.mark.usefixtures("no_curves")
def test_a_stopped_run_resumes_to_the_same_bits_and_only_with_the_same_weights(played: Dataset, tmp_path: Path) -> None:
    options = {**SMALL, "interaction_weights": "log", "interaction_weight_cap": 2.0}
    whole = DRM(**options).fit(played)
    DRM(**options).fit(played, run=tmp_path / "run", on_batch=lambda state, n_lists: state.step == 5)
    resumed = DRM(**options).fit(played, run=tmp_path / "run", resume=True)
    assert torch.equal(resumed.user_factors, whole.user_factors)
    assert torch.equal(resumed.item_factors, whole.item_factors)
    assert DRM.load(tmp_path / "run").config.interaction_weights == "log"
    assert resumed.was_fit_on(planted())
    with pytest.raises(InputError, match="was trained on other data"):
        Run.open(tmp_path / "run", planted(pl.lit(1.0)), TrainConfig(**options))
    with pytest.raises(InputError, match="a resumed run cannot change `interaction_weight_cap`"):
        Run.open(tmp_path / "run", played, TrainConfig(**{**options, "interaction_weight_cap": 3.0}))


def test_a_data_set_without_weights_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    message = "`interaction_weights` log needs weights, which the data set does not have: prepare it with .* --weight"
    with pytest.raises(InputError, match=message):
        DRM(interaction_weights="log").fit(planted(), run=tmp_path / "run")
    with pytest.raises(InputError, match=message):
        Study(tmp_path / "study", planted(), {"interaction_weights": ["off", "log"]}, {})
    with pytest.raises(InputError, match=message):
        Study(tmp_path / "study", planted(), {"lr": [0.1, 0.2]}, {"interaction_weights": "log"})
    assert list(tmp_path.iterdir()) == []


def test_tune_searches_the_weights(played: Dataset, tmp_path: Path) -> None:
    space = {"interaction_weights": ["off", "log"], "interaction_weight_cap": [1.5, 3.0]}
    study = Study(tmp_path, played, space, {"factors": 4, "epochs": 1})
    study.run(3)
    assert [record["status"] for record in study.records] == ["done"] * 3
    assert (study.records[0]["interaction_weights"], study.records[0]["interaction_weight_cap"]) == ("off", None)
