"""The configuration section: which options it shows first, and what it shows for options that are not set."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from drm_triton.config import TrainConfig
from drm_triton.report.facts import configuration_section
from tests.report.conftest import Node, Tree, section


def options(config: TrainConfig) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Return the rows of one run: options that differ from the defaults, and the others."""
    run: Any = SimpleNamespace(name="run", path=Path("run"), config=config, environment={})
    *different, equal, _ = Tree(configuration_section([run])).root.all("tbody")
    found = [
        {row.all("th")[0].text: [cell.text for cell in row.all("td")] for row in body.all("tr")}
        for body in (*different, equal)
    ]
    return (found[0] if different else {}), found[-1]


def test_one_run_is_compared_with_the_defaults(one: Node) -> None:
    changed = section(one, "configuration").all("table")[0]
    rows = {row.all("th")[0].text: [cell.text for cell in row.all("td")] for row in changed.all("tbody")[0].all("tr")}
    assert rows == {"factors": ["4", "64"], "epochs": ["3", "20"]}


def test_only_options_that_differ_are_highlighted(two: Node) -> None:
    (differ,) = section(two, "configuration").all("table", "differ")
    assert [row.all("th")[0].text for row in differ.all("tbody")[0].all("tr")] == ["score", "lr", "epochs"]


def test_an_option_that_is_not_set_shows_what_that_means() -> None:
    _, equal = options(TrainConfig())
    assert equal["threads"] == ["all cores"]
    assert equal["temperature"] == ["0.65 N^(-1/6) in a catalogue of N items"]
    assert equal["interaction_weight_cap"] == ["none"]
    assert equal["lambda"] == ["10.0"]


def test_defaults_that_follow_from_another_option_do_not_differ() -> None:
    different, equal = options(TrainConfig(objective="hinge+drm").resolved())
    assert different == {"objective": ["hinge+drm", "softmax"]}
    assert [equal[name] for name in ("score", "negatives", "batch_size")] == [["dot"], ["sampled"], ["2048"]]
    different, _ = options(TrainConfig(objective="hinge+drm", batch_size=64))
    assert different["batch_size"] == ["64", "2048, or 256 if negatives is all"]
