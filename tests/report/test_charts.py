"""Learning curves and quality by activity: the charts show what the run recorded and what `evaluate` computes."""

import json
import re
from collections import Counter
from pathlib import Path

from tests.conftest import call
from tests.report.conftest import EVIL_RUN, Node, section


def test_curves_agree_with_the_records_of_the_run(folder: Path, one: Node) -> None:
    records = [json.loads(line) for line in (folder / "dot" / "metrics.jsonl").read_text().splitlines()]
    learning = section(one, "learning")
    charts = learning.all("svg", "lines")
    assert len(charts) == 8  # loss and three metrics, over epochs and over seconds
    assert all(len(chart.all("path")) == 1 for chart in charts)
    assert (charts[0].all("path")[0].attributes["d"] or "").count("L") == len(records) - 1
    (table,) = learning.all("table")
    losses = [row.all("data")[0].attributes["value"] for row in table.all("tbody")[0].all("tr")]
    assert losses == [repr(record["loss"]) for record in records]
    best = max(records, key=lambda record: record["valid/ndcg@10"])
    assert f"{best['epoch']} (best)" in table.text


def test_activity_agrees_with_evaluate(folder: Path, one: Node) -> None:
    code, out, _ = call("evaluate", folder / "dot", "--by-activity", "--quiet")
    assert code == 0
    lines = re.findall(r"^ +(\d+) – (\d+) +(\d+) users +([\d.]+)$", out, re.M)
    assert len(lines) == 5
    (chart,) = section(one, "activity").all("svg", "bars")
    groups = [node.text for node in chart.all("text", "group")]
    spans = [f"{low}–{high}" if high != low else low for low, high, _, _ in lines]
    assert groups == [f"{span} interactions ({n} users)" for span, (_, _, n, _) in zip(spans, lines, strict=True)]
    tooltips = [title.text for title in chart.all("title")]
    assert tooltips[::2] == [f"dot: {mean}" for *_, mean in lines]  # every second bar is popularity's


def test_a_run_has_one_colour_everywhere(two: Node) -> None:
    labels = [node for node in two.all("bdi", "name") if node.text == EVIL_RUN]
    classes: Counter[str | None] = Counter()
    for node in labels:
        assert node.parent is not None
        siblings = [child for child in node.parent.children if isinstance(child, Node)]
        classes[siblings[siblings.index(node) - 1].attributes["class"]] += 1
    assert classes.keys() == {"swatch r2"}
    assert classes.total() > 50
    for chart in section(two, "learning").all("svg", "lines"):
        assert [group.attributes["class"] for group in chart.all("g") if "class" in group.attributes] == ["r1", "r2"]
