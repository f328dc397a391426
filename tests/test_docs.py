"""Test the documentation: commands and code blocks run, options and files exist, links resolve, the site builds."""

import ast
import contextlib
import doctest
import importlib.util
import io
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args
from unittest import mock

import numpy as np
import polars as pl
import pytest
import typer

from drm_triton import DRM, Dataset, __version__
from drm_triton.cli import app
from drm_triton.data.prepare.synthetic import Shape, generate
from drm_triton.names import Target
from tests.conftest import call, repository_root

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = repository_root()
TOP_PAGES = ("README.md", "CONTRIBUTING.md", "SECURITY.md")
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text("utf-8")
    for path in [*(ROOT / name for name in TOP_PAGES), *sorted((ROOT / "docs").glob("*.md"))]
}
LINKED = {**PAGES, "CHANGELOG.md": (ROOT / "CHANGELOG.md").read_text("utf-8")}  # old entries may name what is gone
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`]+)`")
# Optional packages, and the commands that need them.
OPTIONAL = {
    "faiss": "faiss",
    "hnswlib": "hnswlib",
    "fastapi": "drm-triton serve|^curl",
    "tensorboard": "tensorboard|TensorBoard",
}


# -- commands that are not run, and the checks that replace running them ---------------------------------------------


def check_make_target(words: list[str]) -> None:
    """Check that the target exists. `make TARGET` installs packages, and `make test` would run these tests."""
    makefile = (ROOT / "Makefile").read_text("utf-8")
    for target in (word for word in words[1:] if "=" not in word):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def check_extra(words: list[str]) -> None:
    """Check that the named extras exist. `pip install` needs the network."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    for extra in re.findall(r"\[([\w,]+)\]", " ".join(words)):
        assert set(extra.split(",")) <= project["optional-dependencies"].keys(), extra


def check_script(words: list[str]) -> None:
    """Check that the script exists. The suite runs the tests, and tests/test_examples.py the examples."""
    paths = [word for word in words if "/" in word and word.endswith(".py")]
    assert paths
    for path in paths:
        assert (ROOT / path).is_file(), path


def check_bench(words: list[str]) -> None:
    """Check that the benchmark has the options. Running it takes minutes to hours."""
    module = words[words.index("-m") + 1]
    out = io.StringIO()
    with mock.patch("sys.argv", [module, "--help"]), contextlib.redirect_stdout(out), pytest.raises(SystemExit) as end:
        runpy.run_module(f"drm_triton.{module}", run_name="__main__")
    assert end.value.code == 0
    for option in (word for word in words if word.startswith("--")):
        assert re.search(rf"{option}\b", out.getvalue()), f"{module} has no {option}"


def check_bench_command(words: list[str]) -> None:
    """Check that `drm-triton bench NAME` has the options."""
    name = " ".join(words[:3])
    options = known_options()[name]
    assert {word for word in words if word.startswith("--")} <= options


def check_reproduce(words: list[str]) -> None:
    """Check the name and the options. The trainings take minutes to days; tests/experiments runs them on tiny data."""
    assert words[2] in get_args(Target)
    assert {word for word in words if word.startswith("-")} <= known_options()["drm-triton reproduce"]


def check_doctor(words: list[str]) -> None:
    """Check that the command has the options. It starts a Python process per backend; tests/test_doctor.py runs it."""
    assert {word for word in words if word.startswith("--")} <= known_options()["drm-triton doctor"]


served: dict[str, Any] = {}  # client of the service that the current page started


def start_service(words: list[str]) -> None:
    """Check the options and start the service in this process. `drm-triton serve` runs until it is stopped."""
    from fastapi.testclient import TestClient

    from drm_triton.serving.app import create_app

    assert {word for word in words if word.startswith("--")} <= known_options()["drm-triton serve"]
    served["client"] = TestClient(create_app(DRM.load(words[2]), "test"))


def send_request(words: list[str]) -> None:
    """Send the request of a curl command to the service."""
    (url,) = (word for word in words if word.startswith("http://127.0.0.1:8000"))
    path = url.removeprefix("http://127.0.0.1:8000")
    if "--json" in words:
        answer = served["client"].post(path, json=json.loads(words[words.index("--json") + 1]))
    else:
        answer = served["client"].get(path)
    assert answer.status_code == 200, answer.text


def check_deployed(words: list[str]) -> None:
    """Check that the named file exists. tests/test_deploy.py runs what is in it."""
    (path,) = (word for word in words if word.startswith("deploy/"))
    assert (ROOT / path).is_file(), path


def skip(words: list[str]) -> None:
    """Accept a command that creates or activates an environment."""


NOT_RUN: dict[str, Callable[[list[str]], None]] = {
    "make ": check_make_target,
    "pip install": check_extra,
    ".venv/bin/python -m pytest": check_script,
    "python examples/": check_script,
    "python -m bench.": check_bench,
    "drm-triton bench": check_bench_command,
    "drm-triton reproduce": check_reproduce,
    "drm-triton doctor": check_doctor,
    "drm-triton serve": start_service,
    "curl ": send_request,
    "RUN=runs/ratings-final OUT=top50 sbatch": check_deployed,
    "kubectl apply": check_deployed,
    "torchrun ": skip,  # tests/distributed/test_processes.py starts several processes
    "drm-triton train ratings --devices": skip,
    "drm-triton train melon --devices": skip,
    "python3 -m venv": skip,
    ". .venv/": skip,
}
# Replacements that make the commands of a page faster: fewer epochs, trials and interactions.
SHORTER = {
    r"^drm-triton prepare synthetic$": "drm-triton prepare synthetic --users 300 --items 200 --interactions 6000",
    r"^(drm-triton compare .* --models .*) --trials \d --seeds \d$": r"\1 --trials 1 --seeds 2 --workers 1",
    r"^(.*drm-triton train(?!.*(--epochs|--resume|--model ease)).*)$": r"\1 --epochs 2",
    r"\bepochs=20\b": "epochs=2",
    r"\btrials([ =])20\b": r"trials\g<1>2",
}


# -- running ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create the input files that the pages name, and a data set and a run for each of `ratings` and `melon`."""
    folder = tmp_path_factory.mktemp("files")
    users, items = generate(Shape(users=120, items=80, interactions=2400), 0)
    order = np.random.default_rng(0).permutation(len(users))
    people = ["ann", "bob", *(f"user{u}" for u in range(2, 120))]
    pairs = pl.DataFrame({"user": [people[u] for u in users], "item": [f"item{i}" for i in items]})
    ratings = pairs.with_columns(rating=pl.Series(1 + order % 5), timestamp=pl.Series(1_600_000_000 + order))
    ratings.write_csv(folder / "ratings.csv")
    pairs.write_csv(folder / "plays.tsv", separator="\t", include_header=False)
    subprocess.run(["gzip", str(folder / "plays.tsv")], check=True)
    pairs.with_columns(plays=pl.Series(1 + order)).write_csv(folder / "plays.csv")
    pairs.with_columns(event=pl.Series(["view", "view", "buy"] * 800)).write_csv(folder / "events.csv")
    orders = [f"{user};{item};4,5;{k % 12 + 1:02}/04/2024 20:49\n" for k, (user, item) in enumerate(pairs.iter_rows())]
    (folder / "orders.csv").write_text(f"customer;product;rating;order_date\n{''.join(orders)};;;\n")
    pl.DataFrame({"id": [f"item{i}" for i in range(80)], "title": [f"Item {i}" for i in range(80)]}).write_csv(
        folder / "names.csv"
    )
    baskets = pairs.group_by("user", maintain_order=True).agg("item")["item"]
    (folder / "baskets.txt").write_text("".join(" ".join(basket) + "\n" for basket in baskets))

    (folder / "downloads" / "ml-1m-m1").mkdir(parents=True)
    for part, places in (("train", slice(2, None)), ("test", slice(2))):
        lists = "".join(f"{u} {' '.join(map(str, items[users == u][places]))}\n" for u in range(120))
        (folder / f"{part}.txt").write_text(lists)
        (folder / "downloads" / "ml-1m-m1" / f"{part}.txt").write_text(lists)

    songs = [77, 1043, 2210, 5, 17, 42, *range(3000, 3074)]
    playlists = [{"id": u, "songs": [songs[i] for i in items[users == u]]} for u in range(120)]
    (folder / "train.json").write_text(json.dumps(playlists))
    (folder / "ids.txt").write_text("12\n99\n")
    (folder / "in-stock.txt").write_text("".join(f"{song}\n" for song in songs[:60]))
    (folder / "out-of-stock.txt").write_text("3001\n3002\n")
    (folder / "items.csv").write_text("item,genre,price\n" + "".join(f"item{i},{'AB'[i % 2]},{i}\n" for i in range(80)))
    (folder / "bought-elsewhere.csv").write_text("user,item\n12,77\n99,1043\n")
    (folder / "new-users.csv").write_text("user,item\ndora,77\ndora,1043\neve,2210\n")

    songs_table = pl.DataFrame(
        {
            "id": songs,
            "genre": [("Pop", "Jazz", "Folk", "Rock")[i % 4] for i in range(80)],
            "price": [i % 25 for i in range(80)],
            "minutes": [2.5 + i % 3 for i in range(80)],
            "in_stock": [i % 5 > 0 for i in range(80)],
        }
    )
    options = {"factors": 8, "epochs": 2}
    for name, frame in (
        ("ratings", pairs),
        ("melon", pl.DataFrame({"user": users, "item": [songs[i] for i in items]})),
    ):
        data = Dataset.from_frame(frame)
        data.with_attributes(songs_table if name == "melon" else None).save(folder / "data" / name)
        arguments = [f"--{key}={value}" for key, value in options.items()]
        made = folder / "runs" / name
        code, _, errors = call("train", "-d", folder / "data" / name, "--run", made, "-q", *arguments)
        assert code == 0, errors
    shutil.copytree(folder / "runs" / "ratings", folder / "runs" / "ratings-final")  # as `refit` makes it
    return folder


@pytest.fixture
def workplace(request: pytest.FixtureRequest, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copy the files to a working directory, without the data sets and runs that the page creates itself."""
    folder = tmp_path / "work"
    shutil.copytree(files, folder)
    text = PAGES[request.node.callspec.params["page"]]
    for place in ("data/ratings", "data/melon", "runs/ratings", "runs/melon", "runs/ratings-final"):
        made_there = f"--out {place}" in text or f"--run {place}" in text or f"prepare {place[5:]} " in text
        if made_there or (place.endswith("-final") and f"refit {place.removesuffix('-final')}" in text):
            shutil.rmtree(folder / place)
    monkeypatch.chdir(folder)
    monkeypatch.delenv("DRM_DATA", raising=False)
    return folder


def commands(block: str) -> Iterator[str]:
    """Yield the commands of a shell block, without comments."""
    for line in block.replace("\\\n", " ").splitlines():
        command = re.sub(r"(^|\s+)#.*", "", line).strip()
        if command:
            yield command


def shortened(code: str) -> str:
    for long, short in SHORTER.items():
        code = re.sub(long, short, code, flags=re.MULTILINE)
    return code


def run_command(line: str) -> None:
    check = next((check for start, check in NOT_RUN.items() if line.startswith(start)), None)
    words = shlex.split(line)
    if check is not None:
        check(words)
        return
    environment = {}
    while re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        name, _, value = words.pop(0).partition("=")
        environment[name] = value
    assert words[0] == "drm-triton", f"no rule for testing this command: {line}"
    place = None
    if ">" in words:
        words, place = words[: words.index(">")], words[-1]
    with mock.patch.dict(os.environ, environment):
        code, out, errors = call(*words[1:])
    assert code == 0, f"{line}\n{errors}"
    if place is not None:
        Path(place).write_text(out, "utf-8")


def lacking(code: str) -> str | None:
    """Return the optional package that a command or block needs and that is not installed."""
    absent = (name for name in OPTIONAL if importlib.util.find_spec(name) is None)
    return next((name for name in absent if re.search(OPTIONAL[name], code) and not code.startswith("pip ")), None)


@pytest.mark.parametrize("page", PAGES)
def test_every_command_and_every_python_block_runs(page: str, workplace: Path) -> None:
    space: dict[str, object] = {"__name__": "__main__"}
    for language, block in FENCE.findall(PAGES[page]):
        for code in [block] if language == "python" else commands(block) if language == "sh" else []:
            if (package := lacking(code)) is not None:
                warnings.warn(f"{page}: not run, {package} is not installed: {code.splitlines()[0]}", stacklevel=1)
            elif language == "sh":
                run_command(shortened(code))
            else:
                with contextlib.redirect_stdout(io.StringIO()):
                    exec(compile(shortened(block), f"{page}, a python block", "exec"), space)


# -- reading ---------------------------------------------------------------------------------------------------------


def known_options() -> dict[str, set[str]]:
    """Return the options of each subcommand, and of all of them under ""."""
    found: dict[str, set[str]] = {"": {"--help", "-h"}}

    def visit(command: object, name: str) -> None:
        options = {o for p in command.params for o in (*p.opts, *p.secondary_opts) if o.startswith("-")}  # type: ignore[attr-defined]
        found[name] = options
        found[""] |= options
        for child, inner in getattr(command, "commands", {}).items():
            visit(inner, f"{name} {child}".strip())

    visit(typer.main.get_command(app), "drm-triton")
    return found


def spans(text: str) -> list[str]:
    """Return the inline code of a page, with line breaks replaced by spaces."""
    return [" ".join(span.split()) for span in SPAN.findall(FENCE.sub("", text))]


@pytest.mark.parametrize("page", PAGES)
def test_every_option_and_command_in_running_text_exists(page: str) -> None:
    options = known_options()
    for span in spans(PAGES[page]):
        if span.startswith("python -m bench."):
            check_bench(span.split())
        elif span.startswith("make "):
            check_make_target(span.split())
        elif span.startswith("pip install"):
            check_extra(span.split())
        elif span.startswith("drm-triton "):
            words = [word for word in span.split()[1:] if re.fullmatch(r"[a-z]+", word)]
            names = [f"drm-triton {' '.join(words[:n])}" for n in (2, 1) if len(words) >= n]
            name = next((name for name in names if name in options), None)
            assert name or not words, f"{page}: no such command: {span}"
            used = set(re.findall(r"(?<!\S)--[\w-]+", span))
            assert used <= options.get(name or "", options[""]) | {"--help", "--version"}, f"{page}: {span}"
        else:
            for option in re.findall(r"(?<![\w-])--[a-z][\w-]*", span):
                assert option in options[""] or span.startswith(("ruff ", "curl ", "torchrun ")), f"{page}: {option}"


@pytest.mark.parametrize("page", PAGES)
def test_commands_are_in_blocks_that_are_run(page: str) -> None:
    for language, block in FENCE.findall(PAGES[page]):
        if language not in ("sh", "python"):
            assert not re.search(r"^\s*(\$ |drm-triton |python |pip |make )", block, re.MULTILINE), (page, block)


@pytest.mark.parametrize("page", PAGES)
def test_every_file_named_exists(page: str) -> None:
    for span in spans(PAGES[page]):
        if re.fullmatch(r"(drm_triton|kernels|cli|bench|tests|docs|examples)/[\w./-]*", span):
            assert (ROOT / span).exists(), f"{page}: {span}"


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/kernels.md"])
def test_every_name_in_an_item_about_a_file_is_in_it(page: str) -> None:
    """A list item that names Python files, the first with its folder, may name only what is in one of them."""
    for item in re.findall(r"^(?:\d+\.|-) .*(?:\n +.*)*", FENCE.sub("", PAGES[page]), re.MULTILINE):
        found = spans(item)
        files = [ROOT / span for span in found if re.fullmatch(r"[\w/]+/\w+\.py", span)]
        files += [files[0].parent / span for span in found if files and re.fullmatch(r"\w+\.py", span)]
        texts = "".join(file.read_text("utf-8") for file in files if file.is_file())
        for name in (span for span in found if texts and re.fullmatch(r"[A-Za-z_]\w*", span)):
            assert re.search(rf"\b{name}\b", texts), f"{page}: {name} is not in {', '.join(map(str, files))}"


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub gives to the headings."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", LINKED)
def test_every_relative_link_and_anchor_resolves(page: str) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)|(?:src|srcset|href)=\"([^\"]+)\"", FENCE.sub("", LINKED[page])):
        link = "".join(target)
        if re.match(r"https?://|mailto:", link):
            continue
        path, _, anchor = link.partition("#")
        file = (ROOT / page).parent / path if path else ROOT / page
        assert file.exists(), f"{page}: {link}"
        if anchor:
            assert anchor in anchors(file.read_text("utf-8")), f"{page}: {link}"


@pytest.mark.parametrize("page", LINKED)
def test_the_paper_is_a_link_wherever_it_is_mentioned(page: str) -> None:
    text = FENCE.sub("", LINKED[page])
    for mention in re.finditer(r"\bthe (DRM )?paper\b", text, re.IGNORECASE):
        line = text[: mention.start()].count("\n") + 1
        assert text[: mention.start()].endswith("["), f"{page}, about line {line}: {mention[0]} is not a link"


def test_every_page_is_in_the_index_and_in_the_navigation() -> None:
    index, navigation = PAGES["docs/README.md"], (ROOT / "mkdocs.yml").read_text("utf-8")
    for page in (Path(page) for page in PAGES):
        if page.parent.name == "docs" and page.name != "README.md":
            assert f"({page.name})" in index, page
            assert re.search(rf"^ +- .*\b{page.name}$", navigation, re.MULTILINE), page


@pytest.mark.slow  # `make docs` is quicker
def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="the site needs MkDocs: pip install 'drm-triton[docs]'")
    pytest.importorskip("mkdocstrings", reason="the API reference needs mkdocstrings: pip install 'drm-triton[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    reference = (tmp_path / "site" / "api.html").read_text("utf-8")
    for name in re.findall(r"^::: ([\w.]+)$", PAGES["docs/api.md"], re.MULTILINE):
        assert f'id="{name}"' in reference, f"{name} is not in the API reference"
    for file in (tmp_path / "site").rglob("*.html"):
        fetched = re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=\"?(https?://[^\s\">]+)", file.read_text("utf-8"))
        assert not fetched, f"{file.name} loads {fetched} from the network"


def test_docstrings_are_read_with_their_descriptions() -> None:
    pytest.importorskip("griffe", reason="the API reference needs Griffe: pip install 'drm-triton[docs]'")
    module = types.ModuleType("docstrings", None)
    exec(compile((ROOT / "docs" / "docstrings.py").read_text("utf-8"), "docs/docstrings.py", "exec"), module.__dict__)
    assert doctest.testmod(module).failed == 0
    text = module.rewritten("Returns\n-------\nitems : int32 [m, k]\nscores : [m, k]\n    best first\n")
    assert text == "Returns\n-------\nitems :\n    int32 [m, k]\nscores :\n    [m, k] best first\n\n"


def test_the_citation_file_has_the_version_and_the_references() -> None:
    citation = (ROOT / "CITATION.cff").read_text("utf-8")
    assert re.search(r"^cff-version: 1\.2\.0$", citation, re.MULTILINE)
    assert re.search(rf'^version: "?{re.escape(__version__)}"?$', citation, re.MULTILINE)
    assert "2008.13141" in citation
    assert "9514867" in citation


def test_the_changelog_begins_with_the_version() -> None:
    versions = re.findall(r"^## \[?([\w.]+)\]?", LINKED["CHANGELOG.md"], re.MULTILINE)
    assert next(version for version in versions if version != "Unreleased") == __version__


def test_every_command_is_documented() -> None:
    text = " ".join(PAGES.values())
    for name in known_options():
        if name:
            assert re.search(rf"{name}\b", text) or " " not in name, f"no page describes {name}"


# -- promises --------------------------------------------------------------------------------------------------------


def functions(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.FunctionDef)}


def test_every_promise_names_tests_that_exist() -> None:
    rows = re.findall(r"^\| ([A-Z]\d+) \|(.*)\|$", PAGES["docs/promises.md"], re.MULTILINE)
    letters = {
        letter: [name for name, _ in rows if name[0] == letter] for letter in sorted({name[0] for name, _ in rows})
    }
    assert len(letters["A"]) >= 25
    assert all(names == [f"{letter}{n + 1}" for n in range(len(names))] for letter, names in letters.items())
    for name, row in rows:
        proofs = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row)
        assert proofs or "bench/" in row or "Not offered" in row, f"{name} has neither test nor benchmark"
        for file, function in proofs:
            assert function in functions(ROOT / file), f"{name}: {file}::{function}"
