"""What all models can do besides recommending: refit, measure, score pairs, and parameters as in scikit-learn."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import scipy.sparse
import torch

from drm_triton import DRM, Dataset, TrainConfig
from drm_triton.errors import HeldOutWarning, InputError
from drm_triton.models import EASE
from drm_triton.names import Schedule
from drm_triton.training.run import best_record, read_metrics
from drm_triton.training.state import EpochEnd


def small_data(seed: int = 0) -> Dataset:
    """Return 60 users of two kinds with 12 to 20 of 40 items each."""
    rng = np.random.default_rng(seed)
    rows = [
        (user, int(item))
        for user in range(60)
        for item in rng.permutation(24)[: rng.integers(12, 20)] + (user % 2) * 16
    ]
    return Dataset.from_frame(pl.DataFrame(rows, ["user", "item"], orient="row"))


# -- held-out interactions ---------------------------------------------------------------------------------------------


RATED = pl.DataFrame({"user": [1, 1, 2, 2], "item": [1, 2, 1, 3], "rating": [5, 0, 4, 4]})
WARNED: dict[str, Callable[[], object]] = {  # each in one line, to which the warning must point
    "fit": lambda: DRM(factors=2, epochs=1).fit(RATED),
    "fit a matrix": lambda: DRM(factors=2, epochs=1).fit(scipy.sparse.csr_matrix([[1, -1], [1, 0]])),
    "partial_fit": lambda: DRM(factors=2, epochs=1).fit(RATED[["user", "item"]]).partial_fit(RATED),
    "from_frame": lambda: Dataset.from_frame(RATED, ratios=(1, 0, 0)),
    "skip": lambda: Dataset.from_frame(pl.DataFrame({"user": [1, None], "item": [1, 2]}), skip_bad_rows=True),
    "unvalidated": lambda: DRM(factors=2, epochs=1).fit(Dataset.from_csr(([0, 1], [0]), ([0, 1], [1]), n_items=2)),
}


@pytest.mark.parametrize("name", WARNED)
def test_a_warning_points_to_the_line_of_the_caller(name: str) -> None:
    with pytest.warns(UserWarning, match="left out|no user has") as warned:
        WARNED[name]()
    assert {Path(warning.filename) for warning in warned} == {Path(__file__)}


def test_a_model_that_has_not_learned_from_all_says_so_once() -> None:
    model = DRM(factors=2, epochs=1).fit(small_data())
    with pytest.warns(HeldOutWarning, match=r"has learned from 70% of the interactions.*`model\.refit\(\)`") as warned:
        model.recommend([1])
    assert [Path(warning.filename) for warning in warned] == [Path(__file__)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.recommend([1])
        model.recommend_from([[1, 2]])
        model.refit().recommend([1])
        DRM(factors=2, epochs=1).fit(pl.DataFrame({"user": [1, 1, 2], "item": [1, 2, 1]})).recommend([2])


# -- the final model ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["linear", "constant"])
def test_refit_trains_the_same_options_on_all_interactions_until_the_best_epoch(
    schedule: Schedule, tmp_path: Path
) -> None:
    data = small_data()
    options: dict[str, Any] = {"factors": 8, "epochs": 12, "lr": 1.0, "schedule": schedule, "init": "normal"}
    model = DRM(**options).fit(data, run=tmp_path / "run")
    record = best_record(read_metrics(tmp_path / "run"), model.config.monitor)
    assert 1 < record["epoch"] < 12  # otherwise the test shows nothing

    def until_best(end: EpochEnd) -> bool:
        return end.record["epoch"] == record["epoch"]

    expected = DRM(**options, fit_on="all", eval_every=0).fit(data, [until_best])
    in_memory = DRM(**options).fit(data)
    in_memory.save(tmp_path / "saved")
    for again in (model, DRM.load(tmp_path / "run"), in_memory, DRM.load(tmp_path / "saved")):
        final = again.refit()
        assert torch.equal(final.item_factors, expected.item_factors)
        assert torch.equal(final.user_factors, expected.user_factors)
        assert final.interactions.train.nnz == data.n_interactions
    stored = model.refit(data, run=tmp_path / "final")
    assert torch.equal(stored.item_factors, expected.item_factors)
    with pytest.raises(InputError, match="has learned from all interactions already"):
        stored.refit()
    with pytest.raises(InputError, match="was not trained on this `dataset`"):
        model.refit(small_data(seed=1))


def test_refit_save_and_evaluate_take_the_options_of_the_training(tmp_path: Path) -> None:
    data = small_data()
    model = DRM(factors=8, epochs=5).fit(data)
    expected, means = model.refit(), model.evaluate(data).means
    model.set_params(factors=4, epochs=2, fit_on="all")
    final = model.refit()
    assert final.config == expected.config
    assert torch.equal(final.item_factors, expected.item_factors)
    assert model.evaluate(data).means == means
    model.save(tmp_path / "model")
    loaded = DRM.load(tmp_path / "model")
    assert (loaded.config.factors, loaded.config.epochs, loaded.config.fit_on) == (8, 5, "train")
    assert model.fit(data).fitted_config == model.config


def test_a_stopped_refit_resumes_to_the_same_bits(tmp_path: Path) -> None:
    data = small_data()
    model = DRM(factors=8, epochs=6, stop_after=3, eval_every=0).fit(data)
    expected = model.refit()
    model.refit(data, run=tmp_path / "final", on_batch=lambda state, n_lists: state.epoch == 1)
    resumed = DRM(TrainConfig.from_toml(tmp_path / "final" / "config.toml"))
    resumed.fit(data, run=tmp_path / "final", resume=True)
    assert torch.equal(resumed.item_factors, expected.item_factors)
    assert [record["epoch"] for record in read_metrics(tmp_path / "final")] == [1, 2, 3]


# -- measuring and scoring ---------------------------------------------------------------------------------------------


def test_the_users_of_an_evaluation_have_their_ids() -> None:
    frame = pl.DataFrame([(f"u{u}", i) for u in range(9) for i in range(u % 3, 12)], ["user", "item"], orient="row")
    data = Dataset.from_frame(frame)
    found = DRM(factors=4, epochs=1).fit(data).evaluate(data).per_user
    assert 0 < len(found) == len(set(found["user"]))
    assert set(found["user"]) <= {f"u{u}" for u in range(9)}


def test_evaluate_takes_the_data_set() -> None:
    data = small_data()
    model = DRM(factors=4, epochs=2).fit(data)
    found = model.evaluate(data)
    assert found.means == model.evaluate(data.test, data.train.union(data.valid)).means
    assert model.evaluate(data, on="valid").means == model.evaluate(data.valid).means
    measured = len(found.per_user)
    assert measured + sum(found.left_out.values()) == data.n_users
    for bad, message in [
        ({"held_out": small_data(seed=1)}, "was not trained on"),
        ({"held_out": data, "seen": data.train}, "a data set or `seen`, not both"),
        ({"held_out": data, "on": "train"}, "`on` must be valid or test"),
    ]:
        with pytest.raises(InputError, match=message):
            model.evaluate(**bad)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options", [{}, {"objective": "hinge+drm", "score": "dot"}, {"objective": "drm", "score": "l2"}]
)
def test_scores_of_pairs_are_those_of_recommend(options: dict[str, Any]) -> None:
    model = DRM(factors=4, epochs=2, **options).fit(small_data())
    frame = model.recommend(k=7)
    np.testing.assert_allclose(model.score(frame["user"], frame["item"]), frame["score"], rtol=1e-5, atol=1e-6)
    assert model.score([], []).shape == (0,)
    with pytest.raises(InputError, match="2 users but 1 items"):
        model.score(frame["user"][:2], frame["item"][:1])
    with pytest.raises(InputError, match="unknown item id"):
        model.score(frame["user"][:1], ["nothing"])


def test_parameters_as_in_scikit_learn() -> None:
    base = pytest.importorskip("sklearn.base")
    model = DRM(factors=4, lam=3.0, objective="hinge+drm")
    copy = base.clone(model)
    assert copy.config == model.config
    assert copy is not model
    assert model.get_params()["lam"] == 3.0
    assert model.set_params(factors=8, **{"lambda": 2.0}) is model
    assert (model.config.factors, model.config.lam) == (8, 2.0)
    with pytest.raises(InputError, match="did you mean `factors`"):
        model.set_params(facters=8)
    other = EASE(regularization=7.0)
    assert base.clone(other).config == other.config
