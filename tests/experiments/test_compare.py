"""Comparisons of models: the protocol, its files, and the result."""

import json
import os
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from drm_triton import Dataset
from drm_triton.errors import DrmError, InputError
from drm_triton.experiments.compare import METRICS, result_of
from drm_triton.experiments.entries import ENTRIES, PAPER_MODELS, Entry
from drm_triton.experiments.protocol import Comparison, Plan, _runner, run_task
from drm_triton.lock import Lock
from drm_triton.models import model_class
from drm_triton.models.configs import CONFIGS
from drm_triton.training import tune

NAMES = ("popularity", "small-softmax", "small-dot")


@pytest.fixture(scope="module", autouse=True)
def small_entries() -> Any:
    """Two entries that are trained in a moment."""
    tiny = {"factors": 4, "epochs": 2, "batch_size": 64}
    added = [
        Entry("small-softmax", "drm", tiny, {"lr": (0.1, 0.2)}),
        Entry("small-dot", "drm", {**tiny, "objective": "hinge+drm"}, {"lr": (0.1, 0.2)}, {"schedule": "constant"}),
    ]
    ENTRIES.update({entry.name: entry for entry in added})
    yield
    for entry in added:
        del ENTRIES[entry.name]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    users = [u for u in range(40) for _ in range(16)]
    items = [
        (u % 4 + 4 * (7 * u + i) % 17) % 50 if i % 3 else (5 * u + 3 * i) % 50 for u in range(40) for i in range(16)
    ]
    folder = tmp_path_factory.mktemp("compare") / "data"
    Dataset.from_frame(pl.DataFrame({"user": users, "item": items})).save(folder)
    return Dataset.load(folder)


@pytest.fixture(scope="module")
def finished(data: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    comparison = Comparison(tmp_path_factory.mktemp("comparison"), data, Plan(NAMES, trials=3, seeds=2))
    comparison.run(workers=1)
    return comparison


def rows(comparison: Comparison) -> list[dict[str, Any]]:
    lines = (comparison.path / "outcomes.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in lines]


def test_every_training_is_an_outcome(finished: Comparison) -> None:
    stages = [(row["model"], row["stage"]) for row in rows(finished)]
    assert {pair: stages.count(pair) for pair in stages} == {
        ("popularity", "tune"): 1,
        ("popularity", "test"): 1,
        **{(name, stage): count for name in NAMES[1:] for stage, count in (("tune", 3), ("test", 2))},
    }


def test_the_best_trial_is_trained_on_train_and_validation(finished: Comparison, data: Dataset) -> None:
    trials = [row for row in rows(finished) if (row["model"], row["stage"]) == ("small-softmax", "tune")]
    best = max(trials, key=lambda row: row["recall@50"])
    final = finished.finals("small-softmax")
    assert [outcome["seed"] for outcome in final] == [1, 2]
    assert final[0]["options"] == {**best["options"], "epochs": best["best_epoch"]}
    options = {name: value for name, value in final[0]["options"].items() if name != "model"}
    model = model_class("drm")(CONFIGS["drm"].from_mapping({**options, "seed": 1, "fit_on": "train+valid"})).fit(data)
    means = model.evaluate(data.test, data.train.union(data.valid)).means
    assert final[0]["ndcg@10"] == means["ndcg@10"]


def test_a_comparison_continues_where_it_stopped(finished: Comparison, data: Dataset, tmp_path: Path) -> None:
    lines = (finished.path / "outcomes.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "plan.json").write_bytes((finished.path / "plan.json").read_bytes())
    (tmp_path / "outcomes.jsonl").write_text("".join(lines[:4]) + lines[4][:20])  # a crash cut the fifth line
    again = Comparison(tmp_path, data, finished.plan)
    assert len(again.outcomes) == 4
    again.run(workers=1)
    key = json.dumps
    assert sorted(rows(again), key=key) == sorted(rows(finished), key=key)


def test_options_that_are_added_later_repeat_no_training(finished: Comparison, data: Dataset, tmp_path: Path) -> None:
    """An outcome of a version without an option is one with its default."""
    (tmp_path / "plan.json").write_bytes((finished.path / "plan.json").read_bytes())
    older = [row | {"options": {k: v for k, v in row["options"].items() if k != "cov"}} for row in rows(finished)]
    assert older != rows(finished)
    (tmp_path / "outcomes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in older))
    again = Comparison(tmp_path, data, finished.plan)
    assert not again.unfinished([*again.tuning_tasks(), *again.final_tasks()])


def test_two_processes_cannot_work_in_one_directory(finished: Comparison, data: Dataset, tmp_path: Path) -> None:
    one = Comparison(tmp_path, data, finished.plan)
    with Lock(tmp_path, "comparison"), pytest.raises(InputError, match="another process works on this comparison"):
        one.run(workers=1)
    # What another process has finished since this one was opened is neither done again nor lost.
    (tmp_path / "outcomes.jsonl").write_bytes((finished.path / "outcomes.jsonl").read_bytes())
    one.run(workers=1)
    assert rows(one) == rows(finished)
    assert (tmp_path / "outcomes.jsonl").read_bytes() == (finished.path / "outcomes.jsonl").read_bytes()


def test_reading_leaves_a_line_that_another_process_is_writing(
    finished: Comparison, data: Dataset, tmp_path: Path
) -> None:
    (tmp_path / "plan.json").write_bytes((finished.path / "plan.json").read_bytes())
    half = (finished.path / "outcomes.jsonl").read_bytes()[:-20]
    (tmp_path / "outcomes.jsonl").write_bytes(half)
    assert len(Comparison(tmp_path, data, finished.plan).outcomes) == len(finished.outcomes) - 1
    assert (tmp_path / "outcomes.jsonl").read_bytes() == half


def test_two_processes_give_the_same_outcomes(finished: Comparison, data: Dataset, tmp_path: Path) -> None:
    plan = Plan(("popularity", "drm"), trials=1, seeds=1)
    one, two = (Comparison(tmp_path / str(workers), data, plan) for workers in (1, 2))
    for workers, comparison in ((1, one), (2, two)):
        comparison.run(workers)
    assert sorted(rows(one), key=json.dumps) == sorted(rows(two), key=json.dumps)


def test_result(finished: Comparison, tmp_path: Path) -> None:
    result = result_of(finished)
    assert [row["model"] for row in result.rows()] == list(NAMES)
    final = finished.finals("small-dot")
    assert result.rows()[2]["ndcg@10"] == pytest.approx((final[0]["ndcg@10"] + final[1]["ndcg@10"]) / 2)
    assert len(result.welch) == len(result.paired) == 3 * len(METRICS)
    by_users = next(mean for mean in result.means if (mean.model, mean.metric) == ("small-dot", "ndcg@10"))
    assert by_users.mean == pytest.approx(result.rows()[2]["ndcg@10"])  # the mean over users of means over seeds
    result.write(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {
        f"compare.{ending}" for ending in ("md", "tex", "json", "png")
    }
    assert "small-dot" in (tmp_path / "compare.md").read_text()
    assert json.loads((tmp_path / "compare.json").read_text())["models"].keys() == set(NAMES)


def test_a_failed_training_is_an_outcome(finished: Comparison, monkeypatch: pytest.MonkeyPatch) -> None:
    task = finished.tuning_tasks()[1]
    monkeypatch.setattr("drm_triton.model.DRM.train", lambda *_: (_ for _ in ()).throw(RuntimeError("out of memory")))
    outcome = run_task(task)
    assert (outcome["status"], outcome["error"]) == ("failed", "out of memory")


def test_failed_trainings_are_repeated_on_request(
    data: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    comparison = Comparison(tmp_path, data, Plan(("popularity",), trials=1, seeds=1))
    with monkeypatch.context() as patch:
        patch.setattr("drm_triton.models.Popularity.train", lambda *_: (_ for _ in ()).throw(RuntimeError("no memory")))
        comparison.run(workers=1)
    assert [outcome["status"] for outcome in comparison.outcomes] == ["failed"]
    comparison.run(workers=1)
    assert [outcome["status"] for outcome in comparison.outcomes] == ["failed"]
    comparison.run(workers=1, retry_failed=True)
    assert [outcome["status"] for outcome in comparison.outcomes] == ["done", "done"]
    again = Comparison(tmp_path, data, comparison.plan)
    assert again.outcomes == comparison.outcomes  # the failure is in the file, and counts no more
    assert result_of(again).trials == {"popularity": (1, 0, again.outcomes[0]["seconds"])}


def test_a_configuration_of_a_grid_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made, replaced = [], tune.replaced
    monkeypatch.setattr(tune, "replaced", lambda *args, **options: made.append(options) or replaced(*args, **options))
    grid = ENTRIES["sqlrank"].settings("paper", "recall@50", None)
    assert len(made) == len(grid) == 28


def test_the_space_of_the_paper() -> None:
    for name in ("drm-dot", "drm-l2"):
        entry = ENTRIES[name]
        for config in entry.settings("paper", "recall@50", 5):
            options = config.to_dict()
            assert all(options[key] in values for key, values in entry.paper.items())
            assert options["eta"] == 15 * options["rho"]
            assert options["schedule"] == "constant"
    assert set(PAPER_MODELS) <= {"slim", "cdae", "bpr", "wmf", "warp", "cml", "sqlrank", "srrmf"}
    with pytest.raises(InputError, match="the paper does not have popularity"):
        Plan(("popularity",), space="paper")


def test_fixed_options_are_not_searched() -> None:
    for space in ("ours", "paper"):
        plan = Plan(("ease", "wmf")[space == "paper" :], space, fixed={"factors": 7})
        (wmf,) = (entry for entry in plan.entries() if entry.name == "wmf")
        found = [config.to_dict() for config in wmf.settings(space, "recall@50", 5)]
        assert {options["factors"] for options in found} == {7}
        assert len({options["regularization"] for options in found}) > 1
    (sqlrank,) = Plan(("sqlrank",), "paper", fixed={"epochs": 3}).entries()
    assert sqlrank.settings("paper", "recall@50", 1)[0].epochs == 3  # the paper's own number gives way


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"models": ("nothing",)}, "got nothing"),
        ({"models": ()}, "got none"),
        ({"models": ("drm", "drm")}, "names a model twice"),
        ({"models": ("drm",), "trials": 0}, "`trials` must be at least 1"),
        ({"models": ("drm",), "seeds": 0}, "`seeds` must be at least 1"),
    ],
)
def test_bad_plans(options: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        Plan(**options)


def test_another_directory_is_refused(finished: Comparison, data: Dataset, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InputError, match=r"cannot be the directory of a comparison|is not a comparison"):
        Comparison(tmp_path, data, finished.plan)
    with pytest.raises(InputError, match="holds a comparison with metric recall@50"):
        Comparison(finished.path, data, Plan(NAMES, metric="ndcg@10"))


def test_a_public_split_has_its_own_protocol(data: Dataset, tmp_path: Path) -> None:
    public = Dataset(
        data.train, data.valid, data.test, data.users, data.items, {**data.meta, "public_split": "gowalla"}
    )
    public.save(tmp_path / "data")
    plan = Plan(("popularity", "small-softmax"), trials=1, seeds=2)
    comparison = Comparison(tmp_path / "out", Dataset.load(tmp_path / "data"), plan)
    comparison.run(workers=1)
    result = result_of(comparison)
    assert result.table()[0] == ["model", "recall@20", "ndcg@20", "seeds"]
    model = model_class("popularity")(CONFIGS["popularity"].from_mapping({"fit_on": "train+valid"})).fit(public)
    everyone = model.evaluate(public.test, public.train.union(public.valid), (20,), min_train=1)
    assert comparison.finals("popularity")[0]["recall@20"] == pytest.approx(everyone.means["recall@20"])
    assert "LightGCN" in result.summary()
    assert "(published)" in result.summary()


def test_a_process_that_dies_is_reported(data: Dataset, tmp_path: Path) -> None:
    comparison = Comparison(tmp_path / "out", data, Plan(("popularity", "drm"), trials=1, seeds=1))
    with pytest.raises(DrmError, match="a process died during a training"), _runner(2) as run:
        list(run(os._exit, [1, 1]))
    comparison.run(workers=1)  # nothing is lost
    assert len(comparison.outcomes) == 4
