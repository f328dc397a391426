"""What is evaluated and how: data that moved or changed, saved models, missing parts, damaged runs, popularity."""

import shutil
from pathlib import Path

import pytest

from drm_triton import DRM
from drm_triton.errors import DrmError, InputError
from drm_triton.report.measure import measure_runs
from tests.report.conftest import expected, metrics, report, section, store, train


def test_runs_with_the_same_name_show_their_paths(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "dot", tmp_path / "dot")
    page = report(tmp_path / "page", folder / "dot", tmp_path / "dot", "--users", 1)
    heads = [node.text for node in section(page, "overview").all("h2")]
    assert heads == [str(folder / "dot"), str(tmp_path / "dot")]


def test_a_saved_model_has_no_curves_and_needs_its_data(folder: Path, tmp_path: Path) -> None:
    DRM.load(folder / "dot").save(tmp_path / "model")
    with pytest.raises(InputError, match="give the data set it was trained on in `datasets`"):
        measure_runs([tmp_path / "model"])
    page = report(tmp_path / "page", tmp_path / "model", "--dataset", folder / "songs")
    assert "No learning curves for model: a saved model has no training history" in section(page, "learning").text
    assert not page.all("svg", "lines")
    assert metrics(page) == expected(folder / "dot")


def test_data_that_was_moved(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "songs", tmp_path / "old")
    run = train(tmp_path / "old", tmp_path / "run", "--epochs", 1)
    shutil.move(tmp_path / "old", tmp_path / "new")
    with pytest.raises(InputError) as error:
        measure_runs([run])
    assert f"its data set is no longer at {tmp_path / 'old'}; give its new path in `datasets`" in str(error.value)
    with pytest.raises(InputError, match="and it was not trained on"):
        measure_runs([run], [folder / "other"])
    page = report(tmp_path / "page", run, folder / "elsewhere", "--dataset", tmp_path / "new")
    assert "new, other" in section(page, "overview").text


def test_data_that_was_prepared_again_differently(tmp_path: Path) -> None:
    data = store(tmp_path / "data", 0)
    run = train(data, tmp_path / "run", "--epochs", 1)
    shutil.rmtree(data)
    store(tmp_path / "data", 0, ratios=(0.6, 0.2, 0.2))
    with pytest.raises(InputError, match="was trained on other data than"):
        measure_runs([run])


def test_a_model_trained_on_all_data_is_not_evaluated(folder: Path, tmp_path: Path) -> None:
    run = train(folder / "songs", tmp_path / "run", "--epochs", 1, "--fit-on", "all")
    page = report(tmp_path / "page", folder / "dot", run)
    assert "it was trained on all, which includes the test part" in section(page, "metrics").text
    assert {name: row[0::2] for name, row in metrics(page).items()} == expected(folder / "dot")
    assert all(row[1] is None for row in metrics(page).values())
    alone = report(tmp_path / "alone", run)
    assert not section(alone, "metrics").all("table")
    assert section(alone, "users").all("article")


def test_popularity_counts_the_data_that_the_model_was_trained_on(folder: Path, tmp_path: Path) -> None:
    run = train(folder / "songs", tmp_path / "run", "--epochs", 1, "--fit-on", "train+valid")
    page = report(tmp_path / "page", folder / "dot", run)
    first, second = expected(folder / "dot"), expected(run)
    assert metrics(page) == {n: [first[n][0], second[n][0], first[n][1], second[n][1]] for n in first}
    assert "popularity of train+valid" in section(page, "metrics").text


def test_without_a_test_part_the_validation_part_is_used(tmp_path: Path) -> None:
    data = store(tmp_path / "data", 2, ratios=(0.8, 0.2, 0))
    run = train(data, tmp_path / "run", "--epochs", 1)
    page = report(tmp_path / "page", run)
    assert metrics(page) == expected(run, "--on", "valid")
    assert "(valid part)" in section(page, "metrics").text
    with pytest.raises(InputError, match="has no test part; leave out `on`"):
        measure_runs([run], on="test")


def test_without_a_held_out_part_the_other_sections_remain(tmp_path: Path) -> None:
    data = store(tmp_path / "data", 2, ratios=(1, 0, 0))
    run = train(data, tmp_path / "run", "--epochs", 1)
    page = report(tmp_path / "page", run, "--users", 3)
    assert "its data set has no held-out part" in section(page, "metrics").text
    assert len(section(page, "users").all("article")) == 3
    assert "Held out" not in section(page, "users").text


@pytest.mark.parametrize(
    ("runs", "datasets", "message"),
    [
        (["songs"], [], "there is no model"),
        (["nowhere"], [], "there is no model"),
        (["dot", "dot/"], [], "a run is given twice"),
        (["dot"], ["other"], "no run needs the data set .*other; leave it out of `datasets`"),
        (["dot"], ["nowhere"], "no data set at"),
    ],
)
def test_bad_input(runs: list[str], datasets: list[str], message: str, folder: Path) -> None:
    with pytest.raises(InputError, match=message):
        measure_runs([f"{folder}/{run}" for run in runs], [folder / name for name in datasets])


def test_a_run_without_a_checkpoint(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "dot", tmp_path / "run")
    for checkpoint in ("best", "last"):
        (tmp_path / "run" / checkpoint / "model.safetensors").unlink()
    with pytest.raises(InputError, match=r"has no checkpoint: .* resume the training of this run"):
        measure_runs([tmp_path / "run"])


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("env.json", "{"),
        ("env.json", "[]"),
        ("metrics.jsonl", '{"epoch": 1}\n'),
        ("metrics.jsonl", '{"epoch": 1, "loss": "x", "seconds": 1}\n'),
    ],
)
def test_damaged_records_are_reported(name: str, content: str, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "dot", tmp_path / "run")
    (tmp_path / "run" / name).write_text(content)
    with pytest.raises(DrmError, match=name):
        measure_runs([tmp_path / "run"])
