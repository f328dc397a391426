"""What all commands have in common: help with examples, exit codes, errors on stderr without a traceback."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import typer

from drm_triton import DRM, Dataset, doctor
from drm_triton import __version__ as version
from drm_triton.cli import app
from tests.conftest import call, environment, on_terminal, run_python

# For each command, arguments that name something that is not there or cannot be: exit code 2.
BAD_INPUT = {
    "prepare": ["prepare", "nonsense"],
    "info": ["info", "nowhere"],
    "train": ["train", "--dataset", "nowhere"],
    "tune": ["tune", "--dataset", "nowhere"],
    "evaluate": ["evaluate", "nowhere"],
    "compare": ["compare", "nowhere", "elsewhere"],
    "reproduce": ["reproduce", "table3", "--dataset", "nowhere"],
    "refit": ["refit", "nowhere"],
    "recommend": ["recommend", "nowhere", "--all"],
    "similar": ["similar", "nowhere", "--item", "x"],
    "export": ["export", "nowhere", "out"],
    "report": ["report", "nowhere", "--out", "out"],
    "serve": ["serve", "nowhere"],
    "bench kernels": ["bench", "kernels", "--only", "nonsense"],
    "doctor": ["doctor", "surplus"],  # it takes no input
}
# Commands that fail for no fault of what was typed: exit code 1.
FAILURE = {
    "train": ["train", "--resume", "run"],  # one with a damaged file
    "doctor": ["doctor"],  # of an installation that gives no answer
}


def commands() -> list[str]:
    def walk(command: Any, path: list[str]) -> Iterator[str]:
        inside = getattr(command, "commands", None)
        if inside is None:
            yield " ".join(path)
        for name, one in (inside or {}).items():
            yield from walk(one, [*path, name])

    return list(walk(typer.main.get_command(app), []))


@pytest.fixture(autouse=True)
def _somewhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("DRM_DATA", raising=False)


def one_paragraph(text: str) -> bool:
    return text.startswith("error: ") and text.count("\n") == 1


@pytest.mark.parametrize("command", commands())
def test_help_has_examples(command: str) -> None:
    code, out, err = call(*command.split(), "--help")
    assert (code, err) == (0, "")
    assert "Examples:" in out
    assert f"drm-triton {command}" in out.split("Examples:")[1]
    assert "<bool>" not in out  # a flag has no value


@pytest.mark.parametrize(
    "command", ["prepare", "train", "refit", "tune", "compare", "recommend", "similar", "export", "report"]
)
def test_what_is_written_is_called_out_and_replaced_with_overwrite(command: str) -> None:
    out = call(command, "--help")[1]
    assert "--out" in out
    assert "--overwrite" in out
    assert "--quiet" in out


@pytest.mark.parametrize("command", ["info", "train", "tune"])
def test_a_data_set_is_the_first_argument(command: str) -> None:
    for line in ([command, "nowhere"], [command, "--dataset", "nowhere"], [command, "-d", "nowhere"]):
        code, _, err = call(*line)
        assert (code, err.startswith("error: no data set at nowhere")) == (2, True), line
    assert call(command)[2].startswith("error: DATASET is missing")


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_the_first_word_comes_before_torch(tmp_path: Path) -> None:
    # Importing torch fails, so that only what comes before it can be seen.
    code = "import sys; sys.modules['torch'] = None; from drm_triton.cli import main; main()"
    exit_code, screen = on_terminal(sys.executable, "-c", code, "evaluate", "run", cwd=tmp_path)
    assert exit_code == 1
    first, then = screen.split("\x1b[K")  # the word is erased
    assert first == "starting ...\r"
    assert then.startswith("error: ")


def test_every_command_speaks_before_heavy_imports(tmp_path: Path) -> None:
    # Heavy imports fail, so that only what comes before them is printed, here to a pipe.
    code = """
import contextlib, io, json, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name in ("polars", "torch", "numba", "scipy"):
            raise ImportError(name)

sys.meta_path.insert(0, Refuse())
from drm_triton.cli import main

printed = {}
for name, words in json.loads(sys.argv[1]).items():
    sys.argv = ["drm-triton", *words]
    with contextlib.redirect_stderr(io.StringIO()) as err, contextlib.suppress(SystemExit):
        main()
    printed[name] = err.getvalue()
print(json.dumps(printed))
"""
    given = {name: BAD_INPUT[name] for name in commands() if name != "doctor"}  # whose children import what is heavy
    done = run_python("-c", code, json.dumps(given), cwd=tmp_path)
    printed = json.loads(done.stdout.splitlines()[-1])
    assert {name: text.split("\n")[0] for name, text in printed.items()} == dict.fromkeys(given, "starting ...")
    quiet = {name: [*words, "-q"] for name, words in given.items() if name != "bench kernels"}
    printed = json.loads(run_python("-c", code, json.dumps(quiet), cwd=tmp_path).stdout.splitlines()[-1])
    assert not any("starting" in text or "No such option" in text for text in printed.values()), printed


@pytest.mark.parametrize(
    "command", ["evaluate", "compare", "refit", "recommend", "similar", "export", "report", "serve"]
)
def test_a_run_is_called_run(command: str) -> None:
    usage = call(command, "--help")[1].split("Usage:")[1].splitlines()[0]
    assert re.search(r"\bRUN\b", usage)


@pytest.mark.parametrize("command", commands())
def test_a_wrong_option_is_a_usage_error(command: str) -> None:
    code, out, err = call(*command.split(), "--no-such-option")
    assert (code, out) == (2, "")
    assert "No such option" in err
    assert "Traceback" not in err


@pytest.mark.parametrize("command", commands())
def test_bad_input_is_exit_code_2(command: str, tmp_path: Path) -> None:
    code, out, err = call(*BAD_INPUT[command])
    assert (code, out) == (2, ""), err
    assert "Traceback" not in err
    assert one_paragraph(err) or "Usage:" in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", FAILURE)
def test_failure_is_exit_code_1(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = Dataset.from_csr(([0, 1, 2], [0, 1]), n_items=20)
    data.save("data")
    DRM(factors=2, epochs=1).fit(data, run="run")
    Path("run/metrics.jsonl").write_text("{\n")
    monkeypatch.setattr(doctor, "_run_child", lambda *task: {})
    code, out, err = call(*FAILURE[command])
    assert code == 1
    assert "is damaged" in err or "No backend can run on this machine" in out
    assert "Traceback" not in err


@pytest.mark.parametrize("line", ["--debug info nowhere", "info --debug nowhere", "info nowhere --debug"])
def test_debug_shows_the_traceback_wherever_it_stands(line: str) -> None:
    code, out, err = call(*line.split())
    assert (code, out) == (2, "")  # as without it
    assert err.startswith("Traceback")
    assert err.splitlines()[-1].startswith("error: no data set at nowhere")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (KeyError("no such key"), "error: KeyError: 'no such key' (unexpected; --debug shows the traceback)\n"),
        (PermissionError(13, "Permission denied", "a/file"), "error: a/file: Permission denied\n"),
        (MemoryError(), "error: not enough memory: try smaller data or fewer factors\n"),
        (ImportError("libtorch.so"), "error: ImportError: libtorch.so (`drm-triton doctor` checks the "),
    ],
)
def test_what_nobody_foresaw_is_a_paragraph_too(
    error: Exception, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drm_triton.data.find_dataset", mock.Mock(side_effect=error))
    code, out, err = call("info", "x")
    assert (code, out) == (1, "")
    assert err.startswith(message)
    assert err.count("\n") == 1


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys\nfrom drm_triton.cli import main\ntry: main()\nexcept SystemExit: pass\n"
        "print([m for m in 'torch triton numba polars scipy numpy'.split() if m in sys.modules])"
    )
    for command in ("train", "tune"):
        assert run_python("-c", code, command, "--help").stdout.splitlines()[-1] == "[]"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("arguments", [["--version"], ["prepare", "--list"]])
def test_output_that_cannot_be_written_is_exit_code_1(arguments: list[str], tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", "from drm_triton.cli import main; main()", *arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            env=environment(),
        )
    assert done.returncode == 1
    assert done.stderr == "error: cannot write the output: No space left on device\n"


def test_version_and_no_command() -> None:
    assert call("--version") == (0, f"drm-triton {version}\n", "")
    code, out, err = call()
    assert code == 2
    assert "Usage:" in out + err
    code, out, err = call("no-such-command")
    assert (code, out) == (2, "")
    assert "No such command" in err
