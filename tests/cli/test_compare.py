"""`compare` from the command line. tests/experiments tests the figures."""

import json
from pathlib import Path

import pytest

from drm_triton.lock import Lock
from tests.conftest import call


@pytest.fixture(scope="module")
def second(stored: Path, run: Path) -> Path:
    path = run.parent / "second"
    code, _, errors = call("train", "-d", stored, "--run", path, "--factors", 2, "--epochs", 1, "-q")
    assert code == 0, errors
    return path


def test_tables_and_files(run: Path, second: Path, tmp_path: Path) -> None:
    out = tmp_path / "compared"
    code, printed, errors = call("compare", run, second, "--k", "10", "--out", out)
    assert code == 0, errors
    written = (out / "compare.md").read_text()
    assert "## songs and second" in written
    assert "\nsongs - second\n" in printed
    assert max(map(len, printed.splitlines())) <= 80
    tests = json.loads((out / "compare.json").read_text())["tests"]
    assert [test["metric"] for test in tests] == ["ndcg@10", "map@10", "recall@10"]
    for test in tests:
        assert f"\n| {test['metric']}" in written
        assert f"{test['low']:.4f} to {test['high']:.4f}" in printed
    assert "bootstrap over users" in errors  # progress
    assert sorted(file.name for file in out.iterdir()) == [
        "compare.json", "compare.md", "compare.png", "compare.tex",
    ]  # fmt: skip


def test_json_is_all_that_is_printed(run: Path, second: Path) -> None:
    code, printed, errors = call(
        "compare", run, second, "--on", "valid", "--metrics", "hit@5,mrr", "--k", "7", "--json"
    )
    assert (code, errors) == (0, "")
    content = json.loads(printed)
    assert content["on"] == "valid"
    assert [test["metric"] for test in content["tests"]] == ["hit@5", "mrr@7"]
    means = json.loads(call("evaluate", run, "--on", "valid", "--k", "5,7", "--json")[1])
    assert [test["mean_a"] for test in content["tests"]] == [means["hit@5"], means["mrr@7"]]
    assert content["users"] == means["users"]


def test_an_existing_directory_is_refused_before_any_work(
    run: Path, second: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drm_triton.model.DRM.load", lambda path: pytest.fail("came as far as the model"))
    code, _, errors = call("compare", run, second, "--out", tmp_path)
    assert code == 2
    assert f"{tmp_path} already exists; give another, or use --overwrite to replace it" in errors


def test_a_comparison_at_work_is_not_overwritten(stored: Path, tmp_path: Path) -> None:
    arguments = ("compare", stored, "--models", "popularity", "--seeds", "1", "--out", tmp_path / "out", "-q")
    assert call(*arguments, "--workers", 1)[0] == 0
    with Lock(tmp_path / "out", "comparison"):
        code, _, errors = call(*arguments, "--overwrite")
    assert code == 2
    assert "another process works on this directory" in errors
    assert (tmp_path / "out" / "outcomes.jsonl").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{run}", "{second}", "--models", "ease"], "give runs, or a data set and --models"),
        (["--models", "ease"], "--dataset is missing"),
        (["nowhere", "--models", "ease"], "no data set at nowhere"),
        ([], "give two or more RUN to compare, for example runs/a runs/b; got 0"),
        (["{run}"], "give two or more RUN to compare, for example runs/a runs/b; got 1"),
        (["{run}", "{run}"], "are the same run; give each run once"),
        (["{run}", "{data}"], "there is no model"),
        (["{run}", "{second}", "--on", "train"], "--on must be valid or test"),
        (["{run}", "{second}", "--metrics", "ndcg,f1"], "--metrics: 'f1' is not a metric of users"),
        (["{run}", "{second}", "--k", "0"], "--k must be cut-offs from 1 to 1000"),
        (["{run}", "{second}", "--min-train", "-1"], "--min-train must be at least 0"),
        (["{run}", "{second}", "--dataset", "nowhere"], "no data set at"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, stored: Path, run: Path, second: Path
) -> None:
    code, printed, errors = call("compare", *(a.format(data=stored, run=run, second=second) for a in arguments))
    assert (code, printed) == (2, "")
    assert errors.startswith("error: ")
    assert message in errors
    assert errors.count("\n") == 1
