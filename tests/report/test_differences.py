"""The section of differences agrees with `compare`, which tests the same runs over the same users."""

import json
from pathlib import Path

import pytest

from drm_triton.experiments.tables import p_text
from tests.conftest import call
from tests.report.conftest import EVIL_RUN, Node, report, section, store, train

TITLES = {"ndcg@10": "NDCG@10", "map@10": "MAP@10", "recall@50": "Recall@50"}


def compared(*runs: Path) -> dict[str, list[dict[str, float]]]:
    code, out, errors = call("compare", *runs, "--metrics", ",".join(TITLES), "--json")
    assert code == 0, errors
    return json.loads(out)


def test_tests_and_intervals_are_those_of_compare(folder: Path, two: Node) -> None:
    expected = compared(folder / "dot", folder / EVIL_RUN)
    differences = section(two, "differences")
    first, *others = differences.all("table")
    assert len(others) == 2  # each run against popularity, folded away
    assert len(differences.all("details")[0].all("table")) == 2
    heading = differences.all("h3", "pair")[0].text
    assert heading == f"dot against {EVIL_RUN}"
    for row, test in zip(first.all("tbody")[0].all("tr"), expected["tests"], strict=True):
        title, (verdict, difference, interval, _, _) = row.all("th")[0].text, row.all("td")
        assert title == TITLES[str(test["metric"])]
        assert float(difference.all("data")[0].attributes["value"] or "") == test["difference"]
        assert interval.text == f"{test['low']:+.4f} to {test['high']:+.4f}"
        # Holm corrects for the comparisons with popularity too, so that a p-value is not below the one of `compare`.
        assert verdict.text in ("no difference shown", f"{'dot' if test['difference'] > 0 else EVIL_RUN} is ahead")
    cells = {
        row.all("th")[0].text: [cell.all("small") for cell in row.all("td")]
        for row in section(two, "metrics").all("tbody")[0].all("tr")
    }
    for name, title in TITLES.items():
        means = [mean for mean in expected["means"] if mean["metric"] == name]
        shown = [small[0].text for small in cells[title][:2]]
        assert shown == [f"{mean['low']:.4f}–{mean['high']:.4f}" for mean in means]
    assert not any(cells["Coverage@10"])


def test_one_run_is_compared_with_popularity(folder: Path, one: Node) -> None:
    (table,) = section(one, "differences").all("table")
    assert section(one, "differences").all("h3", "pair")[0].text == "dot against popularity"
    assert not section(one, "differences").all("details")
    for row in table.all("tbody")[0].all("tr"):
        verdict, difference, _, p, _ = row.all("td")
        corrected = 0.0 if p.text == "< 0.0001" else float(p.text)
        assert p.text == p_text(corrected)
        ahead = "dot" if float(difference.all("data")[0].attributes["value"] or "") > 0 else "popularity"
        assert verdict.text == (f"{ahead} is ahead" if corrected <= 0.05 else "no difference shown")


def test_runs_on_different_data_are_not_compared(folder: Path, tmp_path: Path) -> None:
    page = report(tmp_path / "page", folder / "dot", folder / "elsewhere")
    headings = [heading.text for heading in section(page, "differences").all("h3")]
    assert headings == ["On songs", "dot against popularity", "On other", "elsewhere against popularity"]


@pytest.mark.parametrize("model", ["ease", "wmf"])
def test_other_models(model: str, folder: Path, tmp_path: Path) -> None:
    options = ["--model", model, "--quiet", "--out", tmp_path / model]
    assert call("train", folder / "songs", *options)[0] == 0
    page = report(tmp_path / "page", tmp_path / model, folder / "dot")
    assert f"{model} against dot" in section(page, "differences").text
    assert ("trained in" in section(page, "overview").text) == (model == "ease")  # it has no epochs to speak of


def test_without_an_evaluation_there_is_nothing_to_compare(tmp_path: Path) -> None:
    run = train(store(tmp_path / "data", 2, ratios=(1, 0, 0)), tmp_path / "run", "--epochs", 1)
    page = report(tmp_path / "page", run, "--users", 1)
    assert "There is nothing to compare" in section(page, "differences").text
