"""Data sets, runs and pages that the tests of the report share, and a strict HTML parser to read the pages."""

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from drm_triton import Dataset
from drm_triton.data.prepare.synthetic import Shape, generate
from tests.conftest import call

EVIL_TITLE = '</script><script>alert("1")</script>'
EVIL_USER = '"><img src=x onerror=alert(1)>  two  blanks'
EVIL_RUN = "l2 & <b onclick=x>"
VOID = {"meta", "input", "br", "img", "link", "hr", "mspace", "circle", "rect", "line", "path", "polygon"}
METRICS = {
    "NDCG": "ndcg", "MAP": "map", "Recall": "recall", "Precision": "precision", "Hit rate": "hit", "MRR": "mrr",
    "Coverage": "coverage",
}  # fmt: skip


class Node:
    """An HTML element."""

    def __init__(self, tag: str, attributes: dict[str, str | None], parent: "Node | None") -> None:
        self.tag, self.attributes, self.parent = tag, attributes, parent
        self.children: list[Node | str] = []

    def all(self, tag: str = "", kind: str = "") -> "list[Node]":
        """Return the descendants with a tag and a CSS class, in document order."""
        found = []
        for child in self.children:
            if isinstance(child, Node):
                if tag in ("", child.tag) and (not kind or kind in (child.attributes.get("class") or "").split()):
                    found.append(child)
                found += child.all(tag, kind)
        return found

    @property
    def text(self) -> str:
        return "".join(child if isinstance(child, str) else child.text for child in self.children)


class Tree(HTMLParser):
    """A strict parser: every element except the void ones must be closed, in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.root = self.current = Node("", {}, None)
        self.feed(text)
        self.close()
        assert self.current is self.root, f"<{self.current.tag}> is not closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len(dict(attrs)) == len(attrs), f"an attribute of <{tag}> is repeated"
        node = Node(tag, dict(attrs), self.current)
        self.current.children.append(node)
        if tag not in VOID:
            self.current = node

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in VOID, f"<{tag}/> closes itself"
        self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.current.tag == tag, f"</{tag}> closes <{self.current.tag}>"
        assert self.current.parent is not None
        self.current = self.current.parent

    def handle_data(self, data: str) -> None:
        self.current.children.append(data)


def read(page: Path) -> Node:
    return Tree(page.read_text("utf-8")).root


def report(out: Path, *arguments: object) -> Node:
    """Run `drm-triton report` and return the page."""
    code, _, errors = call("report", *arguments, "--out", out, "--quiet")
    assert (code, errors) == (0, "")
    return read(out / "report.html")


def train(data: Path, run: Path, *options: object) -> Path:
    code, _, errors = call("train", "-d", data, "--run", run, "--factors", 4, "--quiet", *options)
    assert code == 0, errors
    return run


def store(path: Path, seed: int, ratios: tuple[float, float, float] = (0.7, 0.1, 0.2)) -> Path:
    """Save a data set whose ids and titles contain markup, control characters and right-to-left text."""
    users, items = generate(Shape(users=120, items=90, interactions=2500), seed)
    names = {0: EVIL_USER, 1: "tab\tand\x00nought", 2: "שלום", 3: "x" * 300}
    frame = pl.DataFrame({"user": [names.get(u, f"u{u}") for u in users], "item": [f"song <{i}>" for i in items]})
    data = Dataset.from_frame(frame, ratios=ratios, seed=seed)
    titles = [None if i == 1 else EVIL_TITLE if i < 40 else f"Title & {i}" for i in range(data.n_items)]
    items_table = data.items.with_columns(title=pl.Series(titles, dtype=pl.String))
    Dataset(data.train, data.valid, data.test, data.users, items_table, data.meta).save(path)
    return path


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with two data sets (songs, other), two runs on the first and one (elsewhere) on the second."""
    folder = tmp_path_factory.mktemp("report")
    data, other = store(folder / "songs", 0), store(folder / "other", 1)
    train(data, folder / "dot", "--epochs", 3)
    train(data, folder / EVIL_RUN, "--epochs", 2, "--score", "l2", "--lr", 0.1)
    train(other, folder / "elsewhere", "--epochs", 1)
    return folder


@pytest.fixture(scope="session")
def one(folder: Path) -> Node:
    """Return the page of one run."""
    return report(folder / "one", folder / "dot", "--users", 200)


@pytest.fixture(scope="session")
def two(folder: Path) -> Node:
    """Return the page of two runs."""
    return report(folder / "two", folder / "dot", folder / EVIL_RUN)


def section(page: Node, name: str) -> Node:
    (found,) = [node for node in page.all("section") if node.attributes.get("id") == name]
    return found


def metrics(page: Node) -> dict[str, list[float | None]]:
    """Return the rows of the metrics table (NDCG@10 and so on) with all digits."""
    (table,) = section(page, "metrics").all("table")
    cells = {row.all("th")[0].text: row.all("td") for row in table.all("tbody")[0].all("tr")}
    return {
        name: [float(cell.all("data")[0].attributes["value"] or "") if cell.all("data") else None for cell in row]
        for name, row in cells.items()
    }


def evaluated(run: Path, *options: object) -> dict[str, Any]:
    """Return what `drm-triton evaluate --json` prints."""
    code, out, errors = call("evaluate", run, "--json", *options)
    assert code == 0, errors
    means: dict[str, Any] = json.loads(out)
    return means


def expected(run: Path, *options: object) -> dict[str, list[float | None]]:
    """Return the metrics that a page of `run` alone must show: the model's and popularity's, from `evaluate`."""
    means = evaluated(run, *options)
    baseline = means["popularity"]
    return {
        f"{title}@{k}": [means[f"{name}@{k}"], baseline[f"{name}@{k}"]]
        for title, name in METRICS.items()
        for k in (10, 50)
    }


def external_id(element: Node) -> str:
    """Return the first user or item id in an element."""
    return element.all("bdi", "id")[0].text
