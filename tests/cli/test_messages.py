"""Python names of options in messages become flags."""

import warnings

import pytest
import typer

from drm_triton.cli import app
from drm_triton.cli.messages import command_line, in_flags, select_command, wrapped
from drm_triton.errors import InputError
from tests.conftest import call


@pytest.mark.parametrize(
    ("arguments", "message", "printed"),
    [
        (["train"], "`lam` must be at least 0, got -1", "--lambda must be at least 0, got -1"),
        (["train"], "give another `run`, or `resume=x`", "give another --run, or --resume x"),
        # What the caller typed is what the message says.
        (["train", "--out=x"], "give another `run`", "give another --out"),
        (["train", "-o", "x"], "give another `run`", "give another --out"),
        (["train", "x"], "`dataset` is missing", "DATASET is missing"),
        (["train", "-d", "x"], "`dataset` is missing", "--dataset is missing"),
        (["export", "x", "y"], "`directory` exists", "DIR exists"),
        (["export", "x", "--out", "y"], "`directory` exists", "--out exists"),
        (["train", "-q"], "leave out `min_rating`", "leave out `min_rating`"),  # not an option of this command
        (["tune"], "`monitor` must be a metric", "--metric must be a metric"),
        (
            ["evaluate", "x"],
            "`run` holds no model; see `drm-triton doctor`",
            "RUN holds no model; see `drm-triton doctor`",
        ),
        (["recommend", "x"], 'try `unknown="skip"`', "try --unknown skip"),
        (["bench", "kernels"], "`only` is wrong", "--only is wrong"),
        (["nonsense"], "`lam` is wrong", "`lam` is wrong"),
    ],
)
def test_python_names_in_messages_become_flags(arguments: list[str], message: str, printed: str) -> None:
    select_command(typer.main.get_command(app), arguments)
    assert in_flags(message) == printed


def test_errors_and_warnings_are_printed_with_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(name: str) -> None:
        warnings.warn("`dataset` looks strange", UserWarning, stacklevel=1)
        raise InputError("`dataset` cannot be read")

    monkeypatch.setattr("drm_triton.data.find_dataset", found)
    printed = "warning: --dataset looks strange\nerror: --dataset cannot be read\n"
    assert call("train", "-d", "x") == (2, "", printed)


@pytest.mark.parametrize("after", ["", " and so on" * 20])
def test_a_command_in_a_message_is_not_wrapped(monkeypatch: pytest.MonkeyPatch, after: str) -> None:
    command = command_line("prepare", "table", "--raw", "a file/" * 12, "--columns", "user,item")
    message = "some words " * 20 + "give this command:" + command + after.replace(" ", "\n", 1)
    assert wrapped(message) == message  # not a terminal
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    lines = wrapped(message).splitlines()
    assert command.strip("\n") in lines
    assert max(len(line) for line in lines if "drm-triton" not in line) <= 80
