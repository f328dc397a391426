"""The configuration section: which options it shows first."""

from tests.report.conftest import Node, section


def test_one_run_is_compared_with_the_defaults(one: Node) -> None:
    changed = section(one, "configuration").all("table")[0]
    rows = {row.all("th")[0].text: [cell.text for cell in row.all("td")] for row in changed.all("tbody")[0].all("tr")}
    assert rows == {"factors": ["4", "64"], "epochs": ["3", "20"]}


def test_only_options_that_differ_are_highlighted(two: Node) -> None:
    (differ,) = section(two, "configuration").all("table", "differ")
    assert [row.all("th")[0].text for row in differ.all("tbody")[0].all("tr")] == ["score", "lr", "epochs"]
