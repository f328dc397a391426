"""Comparisons of finished runs: the same figures as `evaluate`, the files, and runs that cannot be compared."""

import json
import re
import shutil
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from drm_triton import DRM, Dataset
from drm_triton.data.prepare.synthetic import Shape, generate
from drm_triton.errors import InputError
from drm_triton.experiments.runs import RunComparison, compare_runs, metric_columns
from drm_triton.experiments.significance import bootstrap_interval, paired_t, wilcoxon

EVIL = "l2 & <b>|$x_y$"


def store(path: Path, seed: int) -> Dataset:
    users, items = generate(Shape(users=150, items=100, interactions=3000), seed)
    data = Dataset.from_frame(pl.DataFrame({"user": users, "item": items}))
    data.save(path)
    return data


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the data sets songs and other, and runs on them."""
    folder = tmp_path_factory.mktemp("compare")
    songs, other = store(folder / "songs", 0), store(folder / "other", 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("drm_triton.training.run.Run.draw_curves", lambda run: None)
        DRM(factors=8, epochs=4).fit(songs, run=folder / "dot")
        DRM(factors=2, epochs=1).fit(songs, run=folder / EVIL)
        DRM(factors=4, epochs=1, fit_on="train+valid").fit(songs, run=folder / "both")
        DRM(factors=4, epochs=1).fit(other, run=folder / "elsewhere")
    return folder


@pytest.fixture(scope="module")
def comparison(folder: Path) -> RunComparison:
    return compare_runs([folder / "dot", folder / EVIL], ["ndcg@10", "recall"], [5, 20])


def test_figures_are_those_of_the_evaluations(folder: Path, comparison: RunComparison) -> None:
    data = Dataset.load(folder / "songs")
    seen = data.train.union(data.valid)
    frames = [DRM.load(folder / run).evaluate(data.test, seen, [5, 10, 20]).per_user for run in ("dot", EVIL)]
    assert [test.metric for test in comparison.tests] == ["ndcg@10", "recall@5", "recall@20"]
    assert comparison.users == len(frames[0])
    for test in comparison.tests:
        a, b = (frame[test.metric].to_numpy() for frame in frames)
        assert (test.a, test.b) == ("dot", EVIL)
        assert (test.mean_a, test.mean_b) == (a.mean(), b.mean())
        assert (test.t, test.p_t) == paired_t(a, b)
        assert (test.w, test.p_wilcoxon) == wilcoxon(a, b)
        assert (test.low, test.high) == tuple(bootstrap_interval(a, b))


def test_the_validation_part(folder: Path) -> None:
    data = Dataset.load(folder / "songs")
    compared = compare_runs([folder / "dot", folder / EVIL], ["recall@20"], on="valid", min_train=8)
    measured = DRM.load(folder / "dot").evaluate(data.valid, data.train, [20], min_train=8)
    assert compared.means[0].mean == measured.means["recall@20"]
    assert compared.users == len(measured.per_user)


def test_files(comparison: RunComparison, tmp_path: Path) -> None:
    out = tmp_path / "out"
    comparison.write(out)
    assert sorted(file.name for file in out.iterdir()) == [
        "compare.json", "compare.md", "compare.png", "compare.tex",
    ]  # fmt: skip
    content = json.loads((out / "compare.json").read_text())
    assert content["users"] == comparison.users
    assert [run["name"] for run in content["runs"]] == ["dot", EVIL]
    assert content["tests"][0]["p_t_holm"] == comparison.tests[0].p_t_holm
    assert (out / "compare.png").read_bytes().startswith(b"\x89PNG")

    text = (out / "compare.md").read_text()
    assert f"songs, test part, {comparison.users} users. Trained: dot on train, " in text
    assert r"## dot and l2 &amp; \<b>\|$x\_y$" in text
    tables = [line for line in text.splitlines() if line.startswith("|")]
    assert [len(re.findall(r"(?<!\\)\|", line)) - 1 for line in tables] == [4] * 4 + [9] * 5
    for test in comparison.tests:
        assert f"| {test.mean_a:.4f} | {test.mean_b:.4f} |" in re.sub(" +", " ", text)

    tex = (out / "compare.tex").read_text()
    assert r"l2 \& \textless{}b\textgreater{}\textbar{}\$x\_y\$" in tex
    assert tex.count(r"\begin{tabular}{lrrr}") == tex.count(r"\begin{tabular}{lrrrrrrrr}") == 1
    assert tex.count(r"\begin{table*}") == tex.count(r"\end{table*}") == 1
    rows = re.findall(r"^    (.*) \\\\$", tex, re.MULTILINE)
    assert [len(re.findall(r"(?<!\\)&", row)) + 1 for row in rows] == [4] * 3 + [9] * 4


def test_files_are_not_overwritten_unasked(comparison: RunComparison, tmp_path: Path) -> None:
    out = tmp_path / "out"
    comparison.write(out)
    before = (out / "compare.md").stat().st_ino
    with pytest.raises(InputError, match="already exists"):
        comparison.write(out)
    assert (out / "compare.md").stat().st_ino == before
    comparison.write(out, overwrite=True)
    assert (out / "compare.md").stat().st_ino != before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    with pytest.raises(InputError, match="was not made by this program"):
        comparison.write(tmp_path / "mine", overwrite=True)


def test_models_that_rank_alike_do_not_differ(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "dot", tmp_path / "dot")
    compared = compare_runs([folder / "dot", tmp_path / "dot"], ["ndcg@10"])
    (test,) = compared.tests
    assert (test.difference, test.low, test.high, test.p_t, test.p_wilcoxon) == (0, 0, 0, 1, 1)
    assert [run["name"] for run in compared.runs] == [str(folder / "dot"), str(tmp_path / "dot")]
    assert "**" in compared.to_markdown()  # both are the best, neither is marked as ahead
    assert r"\*" not in compared.to_markdown()


def test_an_infinite_statistic_is_null_in_json(comparison: RunComparison) -> None:
    infinite = replace(comparison, tests=[replace(comparison.tests[0], t=np.inf)])
    assert json.loads(infinite.to_json())["tests"][0]["t"] is None


def test_data_that_moved(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "songs", tmp_path / "moved")
    DRM.load(folder / "dot").save(tmp_path / "model")
    runs = [tmp_path / "model", folder / EVIL]
    with pytest.raises(InputError, match="does not record where its data set is; give `dataset`"):
        compare_runs(runs, ["ndcg@10"])
    assert compare_runs(runs, ["ndcg@10"], dataset=tmp_path / "moved").dataset == str(tmp_path / "moved")


def test_runs_trained_on_different_parts_are_compared_with_a_warning(folder: Path) -> None:
    with pytest.warns(UserWarning, match="trained on more of the data than others: dot on train, both on train"):
        compare_runs([folder / "dot", folder / "both"], ["ndcg@10"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compare_runs([folder / "dot", folder / EVIL], ["ndcg@10"])


@pytest.mark.parametrize(
    ("runs", "options", "message"),
    [
        ([], {}, "give two or more `runs` to compare, .* got 0"),
        (["dot"], {}, "give two or more `runs` to compare, .* got 1"),
        (["dot", "dot/"], {}, "dot and .*dot are the same run; give each run once"),
        (["dot", "dot/best"], {}, "are the same run"),
        (["dot", "nowhere"], {}, "nowhere: there is no model"),
        (["dot", "elsewhere"], {}, r"dot and .*elsewhere were trained on different data \(.*songs, .*other; checksums"),
        (
            ["dot", "both"],
            {"on": "valid"},
            r"both: the model was fitted on train\+valid, so it cannot be measured",
        ),
        (["dot", EVIL], {"on": "train"}, "`on` must be valid or test"),
        (["dot", EVIL], {"metrics": ["f1"]}, "`metrics`: 'f1' is not a metric of users"),
        (["dot", EVIL], {"metrics": ["coverage@10"]}, "`metrics`: 'coverage@10' is not a metric of users"),
    ],
)
def test_bad_input(runs: list[str], options: dict, message: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drm_triton.ranking.held_out.HeldOut.evaluate", lambda *_: pytest.fail("measured a run"))
    with pytest.raises(InputError, match=message):
        compare_runs([f"{folder}/{run}" for run in runs], **options)


def test_a_data_set_that_one_of_the_runs_was_not_trained_on(folder: Path) -> None:
    with pytest.raises(InputError, match=r"elsewhere: the model was not trained on .*songs; give the data set"):
        compare_runs([folder / "dot", folder / "elsewhere"], dataset=folder / "songs")


def test_names_of_metrics() -> None:
    assert metric_columns(["recall", "ndcg@10", "ndcg"], [10, 20]) == ["recall@10", "recall@20", "ndcg@10", "ndcg@20"]
    for name in ("ndcg@", "ndcg@0", "ndcg@1001", "ndcg@ten", "ndcg@10@20", ""):
        with pytest.raises(InputError, match="is not a metric of users"):
            metric_columns([name], [10])
    with pytest.raises(InputError, match="`metrics` and cut-offs are needed"):
        metric_columns([], [10])
