"""The search of options: the same for the same seed however it is cut up, and nothing of it is lost or hidden."""

import csv
import json
import math
from itertools import count, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import polars as pl
import pytest

from drm_triton import DRM, Dataset, TrainConfig
from drm_triton.data.prepare.synthetic import Shape, generate
from drm_triton.errors import DrmError, InputError
from drm_triton.lock import Lock
from drm_triton.training.tune import Study, draws, tune

TINY: dict[str, Any] = {"objective": "hinge+drm", "factors": 4, "epochs": 2, "init": "normal"}
FEW: dict[str, list[Any]] = {"lr": [0.1, 0.2, 0.4], "tau": [0.5, 1.0], "score": ["dot", "l2"]}


@pytest.fixture(scope="module")
def data() -> Dataset:
    users, items = generate(Shape(users=150, items=100, interactions=3000), 0)
    return Dataset.from_frame(pl.DataFrame({"user": users, "item": items}))


@pytest.fixture(scope="module")
def six(data: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Study:
    """An uninterrupted study of six trials."""
    return tune(data, tmp_path_factory.mktemp("studies") / "six", 6, space=FEW, **TINY)


def lines(study: Path) -> list[dict[str, Any]]:
    """Recorded trials without what differs from run to run."""
    found = [json.loads(line) for line in (study / "trials.jsonl").read_text().splitlines()]
    return [{name: value for name, value in record.items() if name != "seconds"} for record in found]


def test_draws_are_distinct_begin_with_the_defaults_and_follow_the_seed_alone() -> None:
    base = TrainConfig(seed=3)
    space = base.search_space()
    points = list(islice(draws(space, base), 40))
    assert points[0] == {name: base.to_dict().get(name) for name in space}
    assert points[:20] == list(islice(draws(space, base), 20))
    assert len({tuple(point.values()) for point in points}) == 40
    assert all(point[name] in space[name] for point in points[1:] for name in space)
    assert points[1:] != list(islice(draws(space, TrainConfig(seed=4)), 1, 40))


def test_draws_reach_every_point_once_and_end() -> None:
    space = {"lr": [0.1, 0.2], "tau": [0.5, 1.0, 3.0]}
    inside, outside = TrainConfig(lr=0.2, tau=1.0), TrainConfig(lr=0.3, tau=1.0)
    assert len({tuple(point.values()) for point in draws(space, inside)}) == len(list(draws(space, inside))) == 6
    assert len(list(draws(space, outside))) == 7


def test_draws_leave_out_combinations_that_cannot_be() -> None:
    space = {"eta": [2, 45], "k": [1, 20]}
    points = list(draws(space, TrainConfig(objective="drm")))
    assert {"eta": 2, "k": 20} not in points
    assert len(points) == 4  # the defaults and three of the four


def test_what_a_study_leaves(six: Study, data: Dataset) -> None:
    records = lines(six.path)
    assert [record["number"] for record in records] == list(range(6))
    assert records[0].items() >= {"status": "done", "lr": 0.2, "tau": 0.5, "score": None}.items()
    with open(six.path / "trials.csv") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["valid/ndcg@10"]) for row in rows] == [record["valid/ndcg@10"] for record in records]
    assert [float(row["lr"]) for row in rows] == [record["lr"] for record in records]
    environment = json.loads((six.path / "env.json").read_text())
    assert environment["data"]["checksum"] == data.checksum
    assert environment["base"] == {"model": "drm", **TrainConfig(**TINY).to_dict()}
    assert environment["space"] == FEW
    assert sorted(path.name for path in six.path.iterdir()) == [
        ".lock", "best.toml", "env.json", "space.toml", "trials.csv", "trials.jsonl"
    ]  # fmt: skip


def test_the_best_is_the_best_on_validation_and_not_below_the_defaults(six: Study) -> None:
    values = [record["valid/ndcg@10"] for record in lines(six.path)]
    assert six.best is not None
    assert six.best["valid/ndcg@10"] == max(values) >= values[0]
    assert len(set(values)) > 1


@pytest.mark.parametrize("schedule", ["linear", "constant"])
def test_best_toml_trains_the_model_that_was_evaluated(schedule: str, data: Dataset, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "objective": "hinge+drm",
        "eta": 45,
        "factors": 16,
        "epochs": 15,
        "init": "normal",
        "schedule": schedule,
    }
    study = tune(data, tmp_path, 2, space={"batch_size": [64]}, **options)
    best = study.best
    assert best is not None
    assert best["number"] == 1
    config = TrainConfig.from_toml(tmp_path / "best.toml")
    assert config == study.best_config
    if schedule == "linear":
        assert config.epochs == 15  # another number would be another schedule
    else:
        assert config.epochs == best["best_epoch"] < 15  # it overfits, so there is something to cut
    # without validations on the way, as in a training on train + valid
    model = DRM(TrainConfig.from_toml(tmp_path / "best.toml", {"eval_every": 0})).fit(data)
    assert model.evaluate(data.valid).means["ndcg@10"] == best["valid/ndcg@10"]


def test_more_trials_later_equal_all_at_once(six: Study, data: Dataset, tmp_path: Path) -> None:
    tune(data, tmp_path, 2, space=FEW, **TINY)
    assert lines(tmp_path) == lines(six.path)[:2]
    # the order of a space's options is nobody's business
    tune(data, tmp_path, 6, space=dict(reversed(FEW.items())), **TINY)
    assert lines(tmp_path) == lines(six.path)
    assert (tmp_path / "best.toml").read_text() == (six.path / "best.toml").read_text()


def test_interrupted_within_a_trial_and_resumed_equals_uninterrupted(six: Study, data: Dataset, tmp_path: Path) -> None:
    study = tune(data, tmp_path, 3, space=FEW, **TINY)

    def interrupt() -> None:
        raise KeyboardInterrupt

    number, options = next(study.remaining(6))
    with pytest.raises(KeyboardInterrupt):
        study.attempt(number, options, interrupt)
    assert len(lines(tmp_path)) == 3
    (tmp_path / "trials.csv").unlink()  # as if killed between one file and the next
    tune(data, tmp_path, 6, space=FEW, **TINY)
    assert lines(tmp_path) == lines(six.path)


def test_two_processes_cannot_work_on_one_study(six: Study, data: Dataset, tmp_path: Path) -> None:
    study = Study(tmp_path, data, FEW, TINY)
    with Lock(tmp_path, "study"), pytest.raises(InputError, match="another process works on this study"):
        study.run(6)
    (tmp_path / "trials.jsonl").write_bytes((six.path / "trials.jsonl").read_bytes())  # by another process
    study.run(6)
    assert lines(tmp_path) == lines(six.path)


def test_a_study_that_was_replaced_is_left_alone(data: Dataset, tmp_path: Path) -> None:
    place = tmp_path / "study"
    first = Study(place, data, FEW, TINY)
    place.rename(tmp_path / "old")
    second = Study(place, data, FEW, {**TINY, "seed": 9})
    with pytest.raises(InputError, match="holds a study with seed 9"):
        first.run(1)

    def replaced(number: int, point: dict[str, Any], on_epoch: object) -> dict[str, Any]:
        place.rename(tmp_path / "older")
        Study(place, data, FEW, TINY)
        return {}

    second.attempt = replaced  # type: ignore[method-assign, assignment]
    with pytest.raises(DrmError, match="study was moved, removed or replaced"):
        second.run(1)
    assert not (place / "trials.jsonl").exists()


def test_a_study_removes_what_a_killed_process_left(six: Study, data: Dataset) -> None:
    left = six.path / ".best.toml.cc35c411.partial"
    left.touch()
    tune(data, six.path, 6, space=FEW, **TINY)
    assert not left.exists()


def test_a_finished_study_trains_nothing(six: Study, data: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DRM, "fit", lambda *_: pytest.fail("trained"))
    before = (six.path / "trials.jsonl").read_bytes()
    assert tune(data, six.path, 6, space=FEW, **TINY).best == six.best
    assert (six.path / "trials.jsonl").read_bytes() == before


def test_a_time_limit_starts_no_further_trial(data: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = count()  # a clock that advances by a second whenever it is read
    clock = SimpleNamespace(monotonic=lambda: next(ticks), perf_counter=lambda: 0.0)
    monkeypatch.setattr("drm_triton.training.tune.time", clock)
    assert tune(data, tmp_path, 6, seconds=0, space=FEW, **TINY).records == []
    assert not (tmp_path / "best.toml").exists()
    assert len(tune(data, tmp_path, 6, seconds=2.5, space=FEW, **TINY).records) == 2


def test_a_trial_that_diverges_is_recorded_and_the_study_goes_on(data: Dataset, tmp_path: Path) -> None:
    space = {"lr": [3e38, 0.1], "lambda": [3.0, 10.0]}
    study = tune(data, tmp_path, 4, space=space, **TINY)
    failed = [record for record in lines(tmp_path) if record["status"] == "failed"]
    assert [record["lr"] for record in failed] == [3e38, 3e38]
    assert "with a lower `lr` or a higher `tau`" in failed[0]["error"]
    assert {record["lr"] for record in study.ranked} == {0.1, 0.2}  # 0.2 is the default, trial 0
    assert math.isfinite(study.ranked[-1]["valid/ndcg@10"])
    with open(tmp_path / "trials.csv") as file:
        assert [row["status"] for row in csv.DictReader(file)].count("failed") == 2
    # a failed trial is finished: it is not tried again
    assert len(list(study.remaining(4))) == 0


def test_a_trial_without_the_memory_is_recorded(data: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(*_: object, **__: object) -> None:
        raise RuntimeError("can't allocate memory")

    monkeypatch.setattr(DRM, "fit", exhausted)
    study = tune(data, tmp_path, 1, space=FEW, **TINY)
    assert study.best is None
    assert study.records[0]["error"] == "can't allocate memory"


def test_fixed_options_leave_the_space(data: Dataset, tmp_path: Path) -> None:
    study = Study(tmp_path, data, None, {"objective": "hinge+drm", "lam": 5.0, "score": "l2", "cov": 0.5})
    assert study.space.keys() == TrainConfig(objective="hinge+drm").search_space().keys() - {"lambda", "score"}
    options = next(islice(draws(study.space, study.base), 1, 2))
    config = study.config(options).to_dict()
    assert (config["lambda"], config["cov"]) == (5.0, 0.5)


def test_a_space_with_options_that_need_each_other(data: Dataset, tmp_path: Path) -> None:
    study = Study(tmp_path, data, {"score": ["l2"], "cov": [1, 3.0, 1.0]}, {})
    assert study.space == {"cov": [1.0, 3.0], "score": ["l2"]}


@pytest.mark.parametrize(
    ("space", "fixed", "message"),
    [
        ({"facters": [8]}, {}, "unknown option `facters`; did you mean `factors`?"),
        ({"lr": [0.1, 0.0]}, {}, "`lr` must be positive, got 0.0"),
        ({"factors": [8, "many"]}, {}, "`factors` must be int, got 'many'"),
        ({"factors": 8}, {}, "a space gives each option a list of values; `factors` is 8"),
        ({"factors": []}, {}, "a space gives each option a list of values"),
        ({"seed": [1, 2]}, {}, "`seed` cannot be searched"),
        ({"lr": [0.1]}, {"lr": 0.2}, "nothing is left to search"),
        ({}, {}, "nothing is left to search"),
        ({"epochs": [0, 1]}, {}, "`epochs` must be at least 1"),
        (None, {"fit_on": "all"}, "`fit_on` must be train, got all"),
        (None, {"monitor": "auc@10"}, "must be a metric such as ndcg@10"),
        (None, {"facters": 8}, "did you mean `factors`?"),
        (None, {"lambda_": 8}, "unknown option `lambda_`; did you mean `lam`?"),
        (None, {"negatives": "sampled", "batch_size": 100}, "`batch_size` 100 is not a multiple of `share` 32"),
    ],
)
def test_refusals(data: Dataset, tmp_path: Path, space: Any, fixed: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as refused:
        tune(data, tmp_path / "study", 1, space=space, **fixed)
    assert message in str(refused.value)
    assert not (tmp_path / "study").exists()


def test_data_without_a_validation_part_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no validation part"):
        tune(Dataset.from_csr(([0, 1, 2], [0, 1]), n_items=3), tmp_path)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"monitor": "recall@50"}, "metric ndcg@10, and now it is recall@50"),
        ({"seed": 1}, "seed 0, and now it is 1"),
        ({"factors": 8}, "factors 4, and now it is 8"),
        ({"eta": 45}, "eta not given, and now it is 45"),
        ({"space": {"lr": [0.1]}}, "values of lr [0.1, 0.2, 0.4], and now it is [0.1]"),
        ({"score": "dot"}, "values of score ['dot', 'l2'], and now it is not given"),
    ],
)
def test_another_study_in_the_same_place_is_refused(
    six: Study, data: Dataset, changed: dict[str, Any], message: str
) -> None:
    before = (six.path / "trials.jsonl").read_bytes()
    with pytest.raises(InputError) as refused:
        tune(data, six.path, **{"space": FEW, **TINY, **changed})
    assert message in str(refused.value)
    assert (six.path / "trials.jsonl").read_bytes() == before


def test_other_data_and_other_directories_are_refused(six: Study, data: Dataset, tmp_path: Path) -> None:
    users, items = generate(Shape(users=150, items=100, interactions=3000), 1)
    other = Dataset.from_frame(pl.DataFrame({"user": users, "item": items}))
    with pytest.raises(InputError, match=f"data of checksum {data.checksum[:12]}, and now it is {other.checksum[:12]}"):
        tune(other, six.path, space=FEW, **TINY)
    (tmp_path / "notes.txt").touch()
    with pytest.raises(InputError, match="exists and is not a study"):
        tune(data, tmp_path, space=FEW, **TINY)
    with pytest.raises(InputError, match="cannot be a study directory"):
        tune(data, tmp_path / "notes.txt", space=FEW, **TINY)


def test_threads_and_backend_may_change_between_sessions(six: Study, data: Dataset) -> None:
    assert tune(data, six.path, 6, space=FEW, **TINY, threads=1).best == six.best
