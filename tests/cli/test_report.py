"""`report`: what is on the page, that it stands alone, and that nothing of it is made up."""

import itertools
import json
import re
import shutil
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from unittest import mock

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drm_triton import DRM, Dataset
from drm_triton.data.prepare.synthetic import Shape, generate
from drm_triton.report import svg, write_report
from tests.conftest import call

EVIL_TITLE = '</script><script>alert("1")</script>'
EVIL_USER = '"><img src=x onerror=alert(1)>  two  blanks'
VOID = {"meta", "input", "br", "img", "link", "hr", "mspace", "circle", "rect", "line", "path", "polygon"}
NAMES = {"NDCG": "ndcg", "MAP": "map", "Recall": "recall", "Precision": "precision", "Hit rate": "hit", "MRR": "mrr"}


class Node:
    def __init__(self, tag: str, attributes: dict[str, str | None], parent: "Node | None") -> None:
        self.tag, self.attributes, self.parent = tag, attributes, parent
        self.children: list[Node | str] = []

    def all(self, tag: str = "", kind: str = "") -> "list[Node]":
        """Nodes below this one, in order, by tag and by style class."""
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
    """A strict reader: every element but the void ones must be closed, in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.root = self.at = Node("", {}, None)
        self.feed(text)
        self.close()
        assert self.at is self.root, f"<{self.at.tag}> is not closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len(dict(attrs)) == len(attrs), f"an attribute of <{tag}> is repeated"
        node = Node(tag, dict(attrs), self.at)
        self.at.children.append(node)
        if tag not in VOID:
            self.at = node

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in VOID, f"<{tag}/> closes itself"
        self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.at.tag == tag, f"</{tag}> closes <{self.at.tag}>"
        assert self.at.parent is not None
        self.at = self.at.parent

    def handle_data(self, data: str) -> None:
        self.at.children.append(data)


def read(page: Path) -> Node:
    return Tree(page.read_text("utf-8")).root


def report(out: Path, *arguments: object) -> Node:
    code, _, errors = call("report", *arguments, "--out", out, "--quiet")
    assert (code, errors) == (0, "")
    return read(out / "report.html")


def train(data: Path, run: Path, *options: object) -> Path:
    code, _, errors = call("train", "-d", data, "--run", run, "--factors", 4, "--quiet", *options)
    assert code == 0, errors
    return run


def store(path: Path, seed: int, ratios: tuple[float, float, float] = (0.7, 0.1, 0.2)) -> Path:
    """Data whose ids and titles are as unpleasant as text can be."""
    users, items = generate(Shape(users=120, items=90, interactions=2500), seed)
    names = {0: EVIL_USER, 1: "tab\tand\x00nought", 2: "שלום", 3: "x" * 300}
    frame = pl.DataFrame({"user": [names.get(u, f"u{u}") for u in users], "item": [f"song <{i}>" for i in items]})
    data = Dataset.from_frame(frame, ratios=ratios, seed=seed)
    titles = [None if i == 1 else EVIL_TITLE if i < 40 else f"Title & {i}" for i in range(data.n_items)]
    items_table = data.items.with_columns(title=pl.Series(titles, dtype=pl.String))
    Dataset(data.train, data.valid, data.test, data.users, items_table, data.meta).save(path)
    return path


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two data sets, and trained on the first a dot and an l2 run."""
    folder = tmp_path_factory.mktemp("report")
    data, other = store(folder / "songs", 0), store(folder / "other", 1)
    train(data, folder / "dot", "--epochs", 3)
    train(data, folder / "l2 & <b onclick=x>", "--epochs", 2, "--score", "l2", "--lr", 0.1)
    train(other, folder / "elsewhere", "--epochs", 1)
    return folder


@pytest.fixture(scope="module")
def one(place: Path) -> Node:
    return report(place / "one", place / "dot", "--users", 200)


@pytest.fixture(scope="module")
def two(place: Path) -> Node:
    return report(place / "two", place / "dot", place / "l2 & <b onclick=x>")


def section(page: Node, name: str) -> Node:
    (found,) = [node for node in page.all("section") if node.attributes.get("id") == name]
    return found


def metrics(page: Node) -> dict[str, list[float | None]]:
    """Rows of the metrics table: NDCG@10 and so on, to all digits."""
    (table,) = section(page, "metrics").all("table")
    cells = {row.all("th")[0].text: row.all("td") for row in table.all("tbody")[0].all("tr")}
    return {
        name: [float(cell.all("data")[0].attributes["value"] or "") if cell.all("data") else None for cell in row]
        for name, row in cells.items()
    }


def evaluated(run: Path, *options: object) -> dict[str, float]:
    code, out, errors = call("evaluate", run, "--json", *options)
    assert code == 0, errors
    return json.loads(out)


def expected(run: Path, *options: object) -> dict[str, list[float]]:
    """What a page about `run` alone must show: the model and popularity, by `evaluate`."""
    means = evaluated(run, *options)
    names = {**NAMES, "Coverage": "coverage"}
    baseline = means["popularity"]
    return {f"{shown}@{k}": [means[f"{n}@{k}"], baseline[f"{n}@{k}"]] for shown, n in names.items() for k in (10, 50)}


def codes(item: Node) -> str:
    return item.all("bdi", "id")[0].text


# -- the page itself ---------------------------------------------------------------------------------------------


def test_nothing_is_loaded_from_elsewhere(place: Path, two: Node) -> None:
    text = (place / "two" / "report.html").read_text("utf-8")
    assert not re.search(r"https?:|url\(|@import|src=|//[a-z]", text.replace(str(place), "").replace("&quot;", '"'))
    targets = [node.attributes["href"] or "" for node in two.all() if "href" in node.attributes]
    ids = [node.attributes["id"] for node in two.all() if "id" in node.attributes]
    assert len(ids) == len(set(ids))
    assert targets
    assert all(target.startswith("#") and target[1:] in ids for target in targets)
    assert [path.name for path in (place / "two").iterdir()] == ["report.html"]
    assert len(text) < 1_000_000


def test_text_of_the_data_is_inert_and_exact(place: Path, one: Node) -> None:
    assert len(one.all("script")) == 1
    assert not one.all("img")
    assert not [name for node in one.all() for name in node.attributes if name.startswith("on") or name == "style"]
    data = Dataset.load(place / "songs")
    shown = {codes(link) for link in section(one, "users").all("a")}
    assert shown <= {str(user).replace("\x00", "\\x00") for user in data.user_ids}  # HTML cannot hold a nought
    assert EVIL_USER in shown
    items = {codes(item) for item in section(one, "users").all("ol")[1].all("li")}
    assert items <= set(data.item_ids)
    assert EVIL_TITLE in {bdi.text for bdi in section(one, "users").all("bdi")}


def test_the_policy_admits_the_script_and_the_style_of_the_page_only(one: Node) -> None:
    (policy,) = [node for node in one.all("meta") if node.attributes.get("http-equiv") == "Content-Security-Policy"]
    content = policy.attributes["content"] or ""
    from drm_triton.report.page import _digest

    assert content.startswith("default-src 'none'")
    assert f"script-src '{_digest(one.all('script')[0].text)}'" in content
    assert f"style-src '{_digest(one.all('style')[0].text)}'" in content


def test_it_can_be_heard(two: Node) -> None:
    levels = [int(node.tag[1]) for node in two.all() if re.fullmatch("h[1-6]", node.tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    assert all(node.attributes.get("aria-label") or node.attributes.get("aria-hidden") for node in two.all("svg"))
    fields = {node.attributes["id"] for node in two.all("input")}
    assert fields == {node.attributes["for"] for node in two.all("label")}
    assert all(node.attributes.get("tabindex") == "0" for node in two.all("div", "scroll"))


def test_the_same_runs_give_the_same_bytes(place: Path, one: Node, tmp_path: Path) -> None:
    report(tmp_path / "again", place / "dot", "--users", 200)
    assert (tmp_path / "again" / "report.html").read_bytes() == (place / "one" / "report.html").read_bytes()


# -- what it says ------------------------------------------------------------------------------------------------


def test_metrics_are_those_of_evaluate(place: Path, one: Node, tmp_path: Path) -> None:
    assert metrics(one) == expected(place / "dot")
    valid = report(tmp_path / "valid", place / "dot", "--on", "valid")
    assert metrics(valid) == expected(place / "dot", "--on", "valid")
    assert metrics(valid) != metrics(one)


def test_curves_are_those_of_the_run(place: Path, one: Node) -> None:
    records = [json.loads(line) for line in (place / "dot" / "metrics.jsonl").read_text().splitlines()]
    learning = section(one, "learning")
    charts = learning.all("svg", "lines")
    assert len(charts) == 8  # loss and three metrics, over epochs and over seconds
    assert all(len(chart.all("path")) == 1 for chart in charts)
    assert charts[0].all("path")[0].attributes["d"].count("L") == len(records) - 1  # type: ignore[union-attr]
    (table,) = learning.all("table")
    losses = [row.all("data")[0].attributes["value"] for row in table.all("tbody")[0].all("tr")]
    assert losses == [repr(record["loss"]) for record in records]
    best = max(records, key=lambda record: record["valid/ndcg@10"])
    assert f"{best['epoch']} (best)" in table.text


def test_activity_is_that_of_evaluate(place: Path, one: Node) -> None:
    code, out, _ = call("evaluate", place / "dot", "--by-activity", "--quiet")
    assert code == 0
    lines = re.findall(r"^ +(\d+) – (\d+) +(\d+) users +([\d.]+)$", out, re.M)
    assert len(lines) == 5
    (chart,) = section(one, "activity").all("svg", "bars")
    groups = [node.text for node in chart.all("text", "group")]
    spans = [f"{low}–{high}" if high != low else low for low, high, _, _ in lines]
    assert groups == [f"{span} interactions ({n} users)" for span, (_, _, n, _) in zip(spans, lines, strict=True)]
    said = [title.text for title in chart.all("title")]
    assert said[::2] == [f"dot: {mean}" for *_, mean in lines]  # every other bar is popularity's


def test_users_lists_hold_nothing_seen_and_mark_every_hit(place: Path, one: Node, tmp_path: Path) -> None:
    data = Dataset.load(place / "songs")
    seen, held_out = data.train.union(data.valid), data.test
    per_user = tmp_path / "users.parquet"
    evaluated(place / "dot", "--per-user", per_user)
    measured = dict(pl.read_parquet(per_user).select("user", "precision@10").iter_rows())
    articles = section(one, "users").all("article")
    assert len(articles) == len(measured)  # 200 were asked for, so all who are measured
    for article in articles:
        name = codes(article)
        user = data.user_ids.to_list().index(name.replace("\\x00", "\x00"))
        mine, wanted = (set(data.item_ids[part.row(user)]) for part in (seen, held_out))
        (top,) = article.all("ol")
        ranked = {codes(item): bool(item.all("span", "mark")) for item in top.all("li")}
        assert len(ranked) == 10
        assert not ranked.keys() & mine
        assert {item for item, marked in ranked.items() if marked} == ranked.keys() & wanted
        assert round(10 * measured[data.user_ids[user]]) == sum(ranked.values())
        lists = {part.all("h4")[0].text.split()[0]: part.all("li") for part in article.all("section", "own")}
        assert {codes(item) for item in lists["History"]} <= mine
        assert len(lists["History"]) == min(len(mine), 30)
        found = {codes(item) for item in lists["Held"] if item.all("svg")}
        assert found == ranked.keys() & wanted


def test_the_sample_is_spread_over_activity(place: Path, two: Node) -> None:
    data = Dataset.load(place / "songs")
    sizes = [int(link.all("span")[0].text) for link in section(two, "users").all("a")]
    measured = (data.train.degrees() + data.valid.degrees())[data.test.degrees() > 0]
    measured = sorted(measured[measured >= 5].tolist())
    assert sizes == sorted(sizes)
    assert len(sizes) == 50
    assert (sizes[0], sizes[-1]) == (measured[0], measured[-1])
    assert abs(sizes[25] - measured[len(measured) // 2]) <= 2


def test_configuration_that_is_not_the_default(place: Path, one: Node) -> None:
    changed = section(one, "configuration").all("table")[0]
    rows = {row.all("th")[0].text: [cell.text for cell in row.all("td")] for row in changed.all("tbody")[0].all("tr")}
    assert rows == {"factors": ["4", "64"], "epochs": ["3", "20"]}


# -- several runs ------------------------------------------------------------------------------------------------


def test_runs_stand_side_by_side_with_the_best_in_bold(place: Path, two: Node) -> None:
    first, second = expected(place / "dot"), expected(place / "l2 & <b onclick=x>")
    shown = metrics(two)
    assert shown == {name: [first[name][0], *second[name]] for name in first}
    (table,) = section(two, "metrics").all("table")
    for row in table.all("tbody")[0].all("tr"):
        values = shown[row.all("th")[0].text]
        bold = [bool(cell.all("strong")) for cell in row.all("td")]
        assert bold == [value == max(v for v in values if v is not None) for value in values]
    assert all(len(chart.all("path")) == 2 for chart in section(two, "learning").all("svg", "lines"))
    assert all(len(article.all("ol")) == 2 for article in section(two, "users").all("article"))


def test_a_run_keeps_its_colour_throughout(two: Node) -> None:
    named = [node for node in two.all("bdi", "name") if node.text == "l2 & <b onclick=x>"]
    classes = Counter()
    for node in named:
        assert node.parent is not None
        before = [child for child in node.parent.children if isinstance(child, Node)]
        classes[before[before.index(node) - 1].attributes["class"]] += 1
    assert classes.keys() == {"swatch r2"}
    assert classes.total() > 50
    for chart in section(two, "learning").all("svg", "lines"):
        assert [group.attributes["class"] for group in chart.all("g") if "class" in group.attributes] == ["r1", "r2"]


def test_only_options_that_differ_are_highlighted(two: Node) -> None:
    (differ,) = section(two, "configuration").all("table", "differ")
    assert [row.all("th")[0].text for row in differ.all("tbody")[0].all("tr")] == ["score", "lr", "epochs"]


def test_runs_on_different_data_are_shown_and_told_apart(place: Path, tmp_path: Path) -> None:
    page = report(tmp_path / "page", place / "dot", place / "elsewhere")
    assert "trained on different data sets (songs, other)" in section(page, "overview").text
    first, second = expected(place / "dot"), expected(place / "elsewhere")
    assert metrics(page) == {name: [*first[name], *second[name]] for name in first}
    (table,) = section(page, "metrics").all("table")
    assert [head.text for head in table.all("tr")[0].all("th")] == ["songs", "other"]
    best = table.all("tbody")[0].all("tr")[0].all("strong")
    assert len(best) == 2  # one of each data set
    assert len(section(page, "activity").all("svg", "bars")) == 2
    assert len(section(page, "users").all("input")) == 2


def test_runs_of_one_name_are_told_apart_by_their_paths(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "dot", tmp_path / "dot")
    page = report(tmp_path / "page", place / "dot", tmp_path / "dot", "--users", 1)
    heads = [node.text for node in section(page, "overview").all("h2")]
    assert heads == [str(place / "dot"), str(tmp_path / "dot")]


# -- less than a whole run ---------------------------------------------------------------------------------------


def test_a_saved_model_has_no_curves_and_needs_its_data(place: Path, tmp_path: Path) -> None:
    DRM.load(place / "dot").save(tmp_path / "model")
    code, _, errors = call("report", tmp_path / "model", "--out", tmp_path / "page")
    assert code == 2
    assert "give the data set it was fit on with --dataset PATH" in errors
    page = report(tmp_path / "page", tmp_path / "model", "--dataset", place / "songs")
    assert "No learning curves of model: a saved model keeps no record" in section(page, "learning").text
    assert not page.all("svg", "lines")
    assert metrics(page) == expected(place / "dot")


def test_data_that_was_moved(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "songs", tmp_path / "was")
    run = train(tmp_path / "was", tmp_path / "run", "--epochs", 1)
    shutil.move(tmp_path / "was", tmp_path / "is")
    code, _, errors = call("report", run, "--out", tmp_path / "page")
    assert code == 2
    assert f"its data set is no longer at {tmp_path / 'was'}; say where it is with --dataset PATH" in errors
    code, _, errors = call("report", run, "--out", tmp_path / "page", "--dataset", place / "other")
    assert code == 2
    assert "is other data" in errors
    page = report(tmp_path / "page", run, place / "elsewhere", "--dataset", tmp_path / "is")
    assert "is, other" in section(page, "overview").text


def test_data_prepared_anew_is_not_taken_for_the_old(place: Path, tmp_path: Path) -> None:
    data = store(tmp_path / "data", 0)
    run = train(data, tmp_path / "run", "--epochs", 1)
    shutil.rmtree(data)
    store(tmp_path / "data", 0, ratios=(0.6, 0.2, 0.2))
    code, _, errors = call("report", run, "--out", tmp_path / "page")
    assert code == 2
    assert "was fit on other data than" in errors


def test_a_model_that_has_seen_everything_is_not_measured(place: Path, tmp_path: Path) -> None:
    run = train(place / "songs", tmp_path / "run", "--epochs", 1, "--fit-on", "all")
    page = report(tmp_path / "page", place / "dot", run)
    assert "it was fit on all, so it has seen what it would be measured on" in section(page, "metrics").text
    assert {name: row[0::2] for name, row in metrics(page).items()} == expected(place / "dot")
    assert all(row[1] is None for row in metrics(page).values())
    alone = report(tmp_path / "alone", run)
    assert not section(alone, "metrics").all("table")
    assert section(alone, "users").all("article")


def test_each_popularity_is_counted_on_what_its_model_was_fit_on(place: Path, tmp_path: Path) -> None:
    run = train(place / "songs", tmp_path / "run", "--epochs", 1, "--fit-on", "train+valid")
    page = report(tmp_path / "page", place / "dot", run)
    first, second = expected(place / "dot"), expected(run)
    assert metrics(page) == {n: [first[n][0], second[n][0], first[n][1], second[n][1]] for n in first}
    assert "popularity of train+valid" in section(page, "metrics").text


def test_without_a_test_part_the_validation_part_is_measured(tmp_path: Path) -> None:
    data = store(tmp_path / "data", 2, ratios=(0.8, 0.2, 0))
    run = train(data, tmp_path / "run", "--epochs", 1)
    page = report(tmp_path / "page", run)
    assert metrics(page) == expected(run, "--on", "valid")
    assert "(valid part)" in section(page, "metrics").text


def test_without_any_held_out_part_the_rest_is_still_shown(tmp_path: Path) -> None:
    data = store(tmp_path / "data", 2, ratios=(1, 0, 0))
    run = train(data, tmp_path / "run", "--epochs", 1)
    page = report(tmp_path / "page", run, "--users", 3)
    assert "holds nothing out" in section(page, "metrics").text
    assert len(section(page, "users").all("article")) == 3
    assert "Held out" not in section(page, "users").text


def test_no_users_at_all_may_be_asked_for(place: Path, tmp_path: Path) -> None:
    page = report(tmp_path / "page", place / "dot", "--users", 0)
    assert not section(page, "users").all("article")


# -- files and errors --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{place}/songs"], "no model there"),
        (["{place}/nowhere"], "no model there"),
        (["{place}/dot", "{place}/dot/"], "a run is given twice"),
        (["{place}/dot", "--dataset", "{place}/other"], "none of the runs needs it"),
        (["{place}/dot", "--dataset", "{place}/nowhere"], "no data set at"),
        (["{place}/dot", "--out", "{place}/songs"], "already exists"),
        (["{place}/dot", "--out", "{place}/songs", "--overwrite"], "was not made by this program"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments: list[str], message: str, place: Path, tmp_path: Path) -> None:
    before = sorted((place / "songs").iterdir())
    code, _, errors = call("report", "--out", tmp_path / "page", *(a.format(place=place) for a in arguments))
    assert code == 2
    assert errors.startswith("error: ")
    assert message in errors
    assert errors.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
    assert sorted((place / "songs").iterdir()) == before


def test_a_run_without_a_checkpoint(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "dot", tmp_path / "run")
    for part in ("best", "last"):
        (tmp_path / "run" / part / "model.safetensors").unlink()
    code, _, errors = call("report", tmp_path / "run", "--out", tmp_path / "page")
    assert code == 2
    assert f"take it up again with drm-triton train --resume {tmp_path / 'run'}" in errors


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("env.json", "{"),
        ("env.json", "[]"),
        ("metrics.jsonl", '{"epoch": 1}\n'),
        ("metrics.jsonl", '{"epoch": 1, "loss": "x", "seconds": 1}\n'),
    ],
)
def test_damaged_records_are_told(name: str, content: str, place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "dot", tmp_path / "run")
    (tmp_path / "run" / name).write_text(content)
    code, _, errors = call("report", tmp_path / "run", "--out", tmp_path / "page", "--quiet")
    assert code == 2
    assert name in errors
    assert not (tmp_path / "page").exists()


def test_a_failure_leaves_what_was_there(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "page"
    report(out, place / "dot")
    before = (out / "report.html").read_bytes()
    assert call("report", place / "elsewhere", "--out", out, "--quiet")[0] == 2
    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", mock.Mock(side_effect=OSError(28, "No space left on device")))
        code, _, errors = call("report", place / "elsewhere", "--out", out, "--overwrite", "--quiet")
    assert code == 2
    assert "No space left" in errors
    assert [path.name for path in tmp_path.iterdir()] == ["page"]
    assert (out / "report.html").read_bytes() == before
    report(out, place / "elsewhere", "--overwrite")
    assert (out / "report.html").read_bytes() != before


def test_from_python(place: Path, tmp_path: Path) -> None:
    assert write_report([place / "dot"], tmp_path / "page", users=2, k=3) == tmp_path / "page" / "report.html"
    assert len(read(tmp_path / "page" / "report.html").all("ol")[-1].all("li")) == 3


def test_help_has_examples() -> None:
    code, out, _ = call("report", "--help")
    assert code == 0
    assert "drm-triton report runs/melon --out reports/melon" in out


# -- charts ------------------------------------------------------------------------------------------------------

finite = st.floats(-1e6, 1e6, allow_nan=False)


@given(low=finite, high=finite, whole=st.booleans())
def test_ticks_cover_the_range_with_few_round_numbers(low: float, high: float, whole: bool) -> None:
    low, high = min(low, high), max(low, high)
    marks = svg.ticks(low, high, whole=whole)
    slack = 1e-8 * (marks[-1] - marks[0])  # less than a hair's breadth on any screen
    assert marks[0] <= low + slack
    assert high - slack <= marks[-1]
    assert 2 <= len(marks) <= 7
    assert all(a < b for a, b in itertools.pairwise(marks))


@given(st.lists(st.tuples(st.integers(1, 100), st.floats(0, 1e4)), min_size=1, max_size=40, unique_by=lambda p: p[0]))
def test_points_lie_inside_the_chart(points: list[tuple[int, float]]) -> None:
    chart = Tree(svg.lines("Loss", "epochs", [svg.Curve("<a>", 1, sorted(points))], whole=True)).root
    (path,) = chart.all("path")
    numbers = [float(n) for n in re.findall(r"[-\d.]+", path.attributes["d"] or "")]
    assert all(svg.LEFT - 0.1 <= x <= svg.WIDTH - svg.RIGHT + 0.1 for x in numbers[::2])
    assert all(svg.TOP - 0.1 <= y <= svg.HEIGHT - svg.BOTTOM + 0.1 for y in numbers[1::2])


def test_more_runs_than_colours_are_told_apart() -> None:
    looks = {(svg.colour(run), svg.marker(run, 0, 0)) for run in range(1, 33)}
    assert len(looks) == 32
