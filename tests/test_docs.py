"""The documentation is true: its commands and its code run, its options and files exist, its links lead somewhere."""

import ast
import contextlib
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
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import polars as pl
import pytest
import typer

from drm_triton import DRM, Dataset
from drm_triton.cli import app, main
from drm_triton.data.prepare.synthetic import Shape, generate

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    str(path.relative_to(ROOT)): path.read_text("utf-8")
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`]+)`")
# Extras, and what is not run where one is not installed.
OPTIONAL = {"faiss": "faiss", "hnswlib": "hnswlib", "fastapi": "drm-triton serve|^curl"}


# -- what is not run, why, and what is checked in its place ----------------------------------------------------------


def is_target(words: list[str]) -> None:
    """`make TARGET` installs packages, and `make test` would run these tests: the target exists."""
    makefile = (ROOT / "Makefile").read_text("utf-8")
    for target in (word for word in words[1:] if "=" not in word):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def is_extra(words: list[str]) -> None:
    """`pip install` needs the network: the extras it names exist."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    for extra in re.findall(r"\[([\w,]+)\]", " ".join(words)):
        assert set(extra.split(",")) <= project["optional-dependencies"].keys(), extra


def is_file(words: list[str]) -> None:
    """The suite runs itself, and tests/test_examples.py the examples: the files exist."""
    paths = [word for word in words if "/" in word and word.endswith(".py")]
    assert paths
    for path in paths:
        assert (ROOT / path).is_file(), path


def is_bench(words: list[str]) -> None:
    """A benchmark takes minutes to hours: its --help knows the options."""
    module = words[words.index("-m") + 1]
    out = io.StringIO()
    with mock.patch("sys.argv", [module, "--help"]), contextlib.redirect_stdout(out), pytest.raises(SystemExit) as end:
        runpy.run_module(f"drm_triton.{module}", run_name="__main__")
    assert end.value.code == 0
    for option in (word for word in words if word.startswith("--")):
        assert re.search(rf"{option}\b", out.getvalue()), f"{module} has no {option}"


def is_drm_bench(words: list[str]) -> None:
    """A benchmark again, as a command."""
    name = " ".join(words[:3])
    options = known_options()[name]
    assert {word for word in words if word.startswith("--")} <= options


def is_tested(words: list[str]) -> None:
    """`drm-triton doctor` takes a while, as it starts a Python for each backend: tests/test_doctor.py runs it."""
    assert words == ["drm-triton", "doctor"]


served: dict[str, Any] = {}  # the service that requests of the same page go to


def is_service(words: list[str]) -> None:
    """`drm-triton serve` runs until it is stopped: its options exist, and its service answers in this process."""
    from fastapi.testclient import TestClient

    from drm_triton.serving.app import create_app

    assert {word for word in words if word.startswith("--")} <= known_options()["drm-triton serve"]
    served["client"] = TestClient(create_app(DRM.load(words[2]), "test"))


def is_answered(words: list[str]) -> None:
    """A request to that service."""
    (url,) = (word for word in words if word.startswith("http://127.0.0.1:8000"))
    path = url.removeprefix("http://127.0.0.1:8000")
    if "--json" in words:
        answer = served["client"].post(path, json=json.loads(words[words.index("--json") + 1]))
    else:
        answer = served["client"].get(path)
    assert answer.status_code == 200, answer.text


def is_elsewhere(words: list[str]) -> None:
    """It makes or enters an environment, or needs the network."""


NOT_RUN: dict[str, Callable[[list[str]], None]] = {
    "make ": is_target,
    "pip install": is_extra,
    ".venv/bin/python -m pytest": is_file,
    "python examples/": is_file,
    "python -m bench.": is_bench,
    "drm-triton bench": is_drm_bench,
    "drm-triton doctor": is_tested,
    "drm-triton serve": is_service,
    "curl ": is_answered,
    "python3 -m venv": is_elsewhere,
    ". .venv/": is_elsewhere,
}
# What is run with fewer epochs and trials than the page says, for the sake of time.
SHORTER = {
    r"^(.*drm-triton train(?!.*(--epochs|--resume)).*)$": r"\1 --epochs 2",
    r"\bepochs=20\b": "epochs=2",
    r"\btrials([ =])20\b": r"trials\g<1>2",
}


# -- running ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The user's files that the pages speak of, and a data set and a run made from ratings.csv and train.json each."""
    folder = tmp_path_factory.mktemp("files")
    users, items = generate(Shape(users=120, items=80, interactions=2400), 0)
    order = np.random.default_rng(0).permutation(len(users))
    people = ["ann", "bob", *(f"user{u}" for u in range(2, 120))]
    pairs = pl.DataFrame({"user": [people[u] for u in users], "item": [f"item{i}" for i in items]})
    ratings = pairs.with_columns(rating=pl.Series(1 + order % 5), timestamp=pl.Series(1_600_000_000 + order))
    ratings.write_csv(folder / "ratings.csv")
    pairs.write_csv(folder / "plays.tsv", separator="\t", include_header=False)
    subprocess.run(["gzip", str(folder / "plays.tsv")], check=True)
    pl.DataFrame({"id": [f"item{i}" for i in range(80)], "title": [f"Item {i}" for i in range(80)]}).write_csv(
        folder / "names.csv"
    )
    baskets = pairs.group_by("user", maintain_order=True).agg("item")["item"]
    (folder / "baskets.txt").write_text("".join(" ".join(basket) + "\n" for basket in baskets))

    songs = [77, 1043, 2210, 5, 17, 42, *range(3000, 3074)]
    playlists = [{"id": u, "songs": [songs[i] for i in items[users == u]]} for u in range(120)]
    (folder / "train.json").write_text(json.dumps(playlists))
    (folder / "ids.txt").write_text("12\n99\n")
    (folder / "in-stock.txt").write_text("".join(f"{song}\n" for song in songs[:60]))
    (folder / "out-of-stock.txt").write_text("3001\n3002\n")
    (folder / "new-users.csv").write_text("user,item\ndora,77\ndora,1043\neve,2210\n")

    options = {"factors": 8, "epochs": 2}
    for name, frame in (
        ("ratings", pairs),
        ("melon", pl.DataFrame({"user": users, "item": [songs[i] for i in items]})),
    ):
        Dataset.from_frame(frame).save(folder / "data" / name)
        arguments = [f"--{key}={value}" for key, value in options.items()]
        made = folder / "runs" / name
        code, _, errors = call(["train", "-d", str(folder / "data" / name), "--run", str(made), "-q", *arguments])
        assert code == 0, errors
    return folder


@pytest.fixture
def workplace(request: pytest.FixtureRequest, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with those files, without what the page's own commands make."""
    folder = tmp_path / "work"
    shutil.copytree(files, folder)
    text = PAGES[request.node.callspec.params["page"]]
    for place in ("data/ratings", "data/melon", "runs/ratings", "runs/melon"):
        made_there = f"--out {place}" in text or f"--run {place}" in text or f"prepare {place[5:]} " in text
        if made_there:
            shutil.rmtree(folder / place)
    monkeypatch.chdir(folder)
    monkeypatch.delenv("DRM_DATA", raising=False)
    return folder


def call(arguments: list[str]) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the command, run in this process."""
    out, err = io.StringIO(), io.StringIO()
    code = 0
    with (
        mock.patch("sys.argv", ["drm-triton", *arguments]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
    return code, out.getvalue(), err.getvalue()


def commands(block: str) -> Iterator[str]:
    """Lines of a block, without comments."""
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
    assert words[0] == "drm-triton", f"how is this to be tested? {line}"
    place = None
    if ">" in words:
        words, place = words[: words.index(">")], words[-1]
    with mock.patch.dict(os.environ, environment):
        code, out, errors = call(words[1:])
    assert code == 0, f"{line}\n{errors}"
    if place is not None:
        Path(place).write_text(out, "utf-8")


def lacking(code: str) -> str | None:
    """An optional package that is named and not installed."""
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
    """Options of each subcommand; under "" those of all."""
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
    """Inline code of a page, line breaks removed."""
    return [" ".join(span.split()) for span in SPAN.findall(FENCE.sub("", text))]


@pytest.mark.parametrize("page", PAGES)
def test_every_option_and_command_in_running_text_exists(page: str) -> None:
    options = known_options()
    for span in spans(PAGES[page]):
        if span.startswith("python -m bench."):
            is_bench(span.split())
        elif span.startswith("make "):
            is_target(span.split())
        elif span.startswith("pip install"):
            is_extra(span.split())
        elif span.startswith("drm-triton "):
            words = [word for word in span.split()[1:] if re.fullmatch(r"[a-z]+", word)]
            names = [f"drm-triton {' '.join(words[:n])}" for n in (2, 1) if len(words) >= n]
            name = next((name for name in names if name in options), None)
            assert name or not words, f"{page}: no such command: {span}"
            asked = set(re.findall(r"(?<!\S)--[\w-]+", span))
            assert asked <= options.get(name or "", options[""]) | {"--help", "--version"}, f"{page}: {span}"
        else:
            for option in re.findall(r"(?<![\w-])--[a-z][\w-]*", span):
                assert option in options[""] or span.startswith(("ruff ", "curl ")), f"{page}: {option}"


@pytest.mark.parametrize("page", PAGES)
def test_commands_stand_in_blocks_that_are_run(page: str) -> None:
    for language, block in FENCE.findall(PAGES[page]):
        if language not in ("sh", "python"):
            assert not re.search(r"^\s*(\$ |drm-triton |python |pip |make )", block, re.MULTILINE), (page, block)


@pytest.mark.parametrize("page", PAGES)
def test_every_file_named_exists(page: str) -> None:
    for span in spans(PAGES[page]):
        if re.fullmatch(r"(drm_triton|kernels|cli|bench|tests|docs|examples)/[\w./-]*", span):
            assert (ROOT / span).exists(), f"{page}: {span}"


def anchors(text: str) -> set[str]:
    """Anchors of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)|(?:src|srcset)=\"([^\"]+)\"", FENCE.sub("", PAGES[page])):
        link = "".join(target)
        if re.match(r"https?://", link):
            continue
        path, _, anchor = link.partition("#")
        file = (ROOT / page).parent / path if path else ROOT / page
        assert file.exists(), f"{page}: {link}"
        if anchor:
            assert anchor in anchors(file.read_text("utf-8")), f"{page}: {link}"


def test_every_page_is_in_the_index() -> None:
    index = PAGES["docs/README.md"]
    for page in (Path(page) for page in PAGES):
        if page.parent.name == "docs" and page.name != "README.md":
            assert f"({page.name})" in index, page


def test_every_command_is_documented() -> None:
    text = " ".join(PAGES.values())
    for name in known_options():
        if name:
            assert re.search(rf"{name}\b", text) or " " not in name, f"no page speaks of {name}"


# -- promises --------------------------------------------------------------------------------------------------------


def functions(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.FunctionDef)}


def test_every_promise_names_tests_that_exist() -> None:
    rows = re.findall(r"^\| (A\d+) \|(.*)\|$", PAGES["docs/promises.md"], re.MULTILINE)
    assert [name for name, _ in rows] == [f"A{n}" for n in range(1, 26)]
    for name, row in rows:
        proofs = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row)
        assert proofs or "bench/" in row or "Not offered" in row, f"{name} has neither test nor benchmark"
        for file, function in proofs:
            assert function in functions(ROOT / file), f"{name}: {file}::{function}"
