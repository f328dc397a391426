"""Progress on stderr, with and without a terminal."""

import io
import os
import subprocess
import sys
import time
from types import SimpleNamespace
from unittest import mock

import pytest

from drm_triton import progress
from drm_triton.progress import Reporter


def test_plain_lines_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with Reporter().step("count", total=10, unit="things") as step:
        step.advance(4)
        step.note("done well")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("count: done well (")


def test_long_steps_report_now_and_then(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LINE_EVERY", 0.0)
    with Reporter().step("count", total=10, unit="things") as step:
        time.sleep(0.01)
        step.advance(4)
    assert "count: 4 things (40%)" in capsys.readouterr().err


def test_long_steps_report_the_time_left(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("drm_triton.progress.time.monotonic", lambda: now[0])
    with Reporter().step("count", total=10, unit="things") as step:
        for done, seconds in ((1, 60.0), (4, 15.0), (5, 11.0)):
            now[0] += seconds
            step.advance(done)
    assert capsys.readouterr().err.splitlines()[:3] == [
        "count: 1 things (10%), about 9 min left",
        "count: 5 things (50%), about 75 s left",
        "count: 10 things (100%)",
    ]


def test_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    with Reporter(quiet=True).step("count"):
        pass
    Reporter(quiet=True).line("hello")
    assert capsys.readouterr().err == ""


def test_a_failed_step_prints_no_result(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="no"), Reporter().step("count"):
        raise ValueError("no")
    assert capsys.readouterr().err == ""


SCRIPT = """
import time
from types import SimpleNamespace
from unittest import mock
from drm_triton import progress
progress.BAR_AFTER = 0.01
with progress.Reporter().step("slow work", total=10, unit="bytes") as step:
    while step._bar is None:
        time.sleep(0.01)
    step.advance(10)
progress.BAR_AFTER = 1000
with progress.Reporter().step("quick work", total=10):
    pass
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_a_terminal_shows_a_bar_for_slow_steps_only() -> None:
    import pty

    ours, theirs = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, "-c", SCRIPT], stderr=theirs, stdout=subprocess.PIPE, env=os.environ | {"TERM": "xterm"}
    )
    os.close(theirs)
    screen = io.BytesIO()
    try:
        while block := os.read(ours, 4096):
            screen.write(block)
    except OSError:
        pass  # Linux raises when the other side closes
    assert child.communicate()[0] == b""
    assert child.returncode == 0
    text = screen.getvalue().decode()
    assert "━" in text  # the bar
    assert text.count("slow work") > 1  # the bar and the final line
    assert text.count("quick work") == 1  # only its final line


def test_a_step_of_unknown_size_shows_a_clock_in_a_log(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "LINE_EVERY", 0.01)
    text = ""
    with Reporter().step("compile"):
        while "\n" not in text:
            text += capsys.readouterr().err
    assert text.startswith("compile: 0.")


def test_the_progress_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [Reporter.wanted(choice).quiet for choice in (None, True, False)] == [True, False, True]
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    assert [Reporter.wanted(choice).quiet for choice in (None, True, False)] == [False, False, True]


def test_a_notebook_shows_one_line_that_changes_and_no_errors(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = mock.Mock()
    display = mock.Mock(return_value=handle)
    shell = type("ZMQInteractiveShell", (), {})()
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=display))  # type: ignore[arg-type]
    monkeypatch.setattr(progress, "BAR_AFTER", 0.01)
    reporter = Reporter.wanted(None)
    assert not reporter.quiet
    with reporter.step("count", total=10, unit="things") as step:
        step.advance(4)
        while not handle.update.call_count:
            time.sleep(0.01)
    first = display.call_args.args[0]["text/plain"]
    assert first.startswith("count: 4 things (40%)")
    assert display.call_args.kwargs == {"raw": True, "display_id": True}
    assert display.call_count == 1
    assert handle.update.call_args == mock.call({"text/plain": ""}, raw=True)  # cleared
    captured = capsys.readouterr()
    assert captured.out.startswith("count (")
    assert captured.err == ""  # a notebook paints it red
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: None))  # type: ignore[arg-type]
    assert Reporter.wanted(None).quiet  # imported, but not a notebook
