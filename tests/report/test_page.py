"""The page as a whole: self-contained, safe, accessible, reproducible; cards and the table of metrics."""

import itertools
import re
from pathlib import Path

from drm_triton import Dataset
from drm_triton.report.page import content_hash
from tests.report.conftest import (
    EVIL_RUN,
    EVIL_TITLE,
    EVIL_USER,
    Node,
    expected,
    external_id,
    metrics,
    report,
    section,
)


def test_the_page_loads_nothing(folder: Path, two: Node) -> None:
    text = (folder / "two" / "report.html").read_text("utf-8")
    assert not re.search(r"https?:|url\(|@import|src=|//[a-z]", text.replace(str(folder), "").replace("&quot;", '"'))
    targets = [node.attributes["href"] or "" for node in two.all() if "href" in node.attributes]
    ids = [node.attributes["id"] for node in two.all() if "id" in node.attributes]
    assert len(ids) == len(set(ids))
    assert targets
    assert all(target.startswith("#") and target[1:] in ids for target in targets)
    assert [path.name for path in (folder / "two").iterdir()] == ["report.html"]
    assert len(text) < 1_000_000


def test_text_of_the_data_is_escaped_and_exact(folder: Path, one: Node) -> None:
    assert len(one.all("script")) == 1
    assert not one.all("img")
    assert not [name for node in one.all() for name in node.attributes if name.startswith("on") or name == "style"]
    data = Dataset.load(folder / "songs")
    shown = {external_id(link) for link in section(one, "users").all("a")}
    assert shown <= {str(user).replace("\x00", "\\x00") for user in data.user_ids}  # HTML cannot contain NUL
    assert EVIL_USER in shown
    items = {external_id(item) for item in section(one, "users").all("ol")[1].all("li")}
    assert items <= set(data.item_ids)
    assert EVIL_TITLE in {bdi.text for bdi in section(one, "users").all("bdi")}


def test_the_policy_allows_only_the_script_and_style_of_the_page(one: Node) -> None:
    (policy,) = [node for node in one.all("meta") if node.attributes.get("http-equiv") == "Content-Security-Policy"]
    content = policy.attributes["content"] or ""
    assert content.startswith("default-src 'none'")
    assert f"script-src '{content_hash(one.all('script')[0].text)}'" in content
    assert f"style-src '{content_hash(one.all('style')[0].text)}'" in content


def test_the_page_is_accessible(two: Node) -> None:
    levels = [int(node.tag[1]) for node in two.all() if re.fullmatch("h[1-6]", node.tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    assert all(node.attributes.get("aria-label") or node.attributes.get("aria-hidden") for node in two.all("svg"))
    fields = {node.attributes["id"] for node in two.all("input")}
    assert fields == {node.attributes["for"] for node in two.all("label")}
    assert all(node.attributes.get("tabindex") == "0" for node in two.all("div", "scroll"))


def test_the_same_runs_give_the_same_bytes(folder: Path, one: Node, tmp_path: Path) -> None:
    report(tmp_path / "again", folder / "dot", "--users", 200)
    assert (tmp_path / "again" / "report.html").read_bytes() == (folder / "one" / "report.html").read_bytes()


def test_metrics_agree_with_evaluate(folder: Path, one: Node, tmp_path: Path) -> None:
    assert metrics(one) == expected(folder / "dot")
    valid = report(tmp_path / "valid", folder / "dot", "--on", "valid")
    assert metrics(valid) == expected(folder / "dot", "--on", "valid")
    assert metrics(valid) != metrics(one)


def test_runs_are_side_by_side_with_the_best_value_bold(folder: Path, two: Node) -> None:
    first, second = expected(folder / "dot"), expected(folder / EVIL_RUN)
    shown = metrics(two)
    assert shown == {name: [first[name][0], *second[name]] for name in first}
    (table,) = section(two, "metrics").all("table")
    for row in table.all("tbody")[0].all("tr"):
        values = shown[row.all("th")[0].text]
        bold = [bool(cell.all("strong")) for cell in row.all("td")]
        assert bold == [value == max(v for v in values if v is not None) for value in values]
    assert all(len(chart.all("path")) == 2 for chart in section(two, "learning").all("svg", "lines"))
    assert all(len(article.all("ol")) == 2 for article in section(two, "users").all("article"))


def test_runs_on_different_data_are_separate(folder: Path, tmp_path: Path) -> None:
    page = report(tmp_path / "page", folder / "dot", folder / "elsewhere")
    assert "trained on different data sets (songs, other)" in section(page, "overview").text
    first, second = expected(folder / "dot"), expected(folder / "elsewhere")
    assert metrics(page) == {name: [*first[name], *second[name]] for name in first}
    (table,) = section(page, "metrics").all("table")
    assert [head.text for head in table.all("tr")[0].all("th")] == ["songs", "other"]
    best = table.all("tbody")[0].all("tr")[0].all("strong")
    assert len(best) == 2  # one for each data set
    assert len(section(page, "activity").all("svg", "bars")) == 2
    assert len(section(page, "users").all("input")) == 2
