import io
import os
import subprocess
import sys
import time

import pytest

from drm_triton import progress
from drm_triton.progress import Reporter


def test_plain_lines_without_a_terminal(capsys):
    with Reporter().step("count", total=10, unit="things") as step:
        step.advance(4)
        step.note("done well")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("count: done well (")


def test_long_steps_report_now_and_then(capsys, monkeypatch):
    monkeypatch.setattr(progress, "LINE_EVERY", 0.0)
    with Reporter().step("count", total=10, unit="things") as step:
        time.sleep(0.01)
        step.advance(4)
    assert "count: 4 things (40%)" in capsys.readouterr().err


def test_quiet(capsys):
    with Reporter(quiet=True).step("count"):
        pass
    Reporter(quiet=True).line("hello")
    assert capsys.readouterr().err == ""


def test_a_failed_step_does_not_claim_success(capsys):
    with pytest.raises(ValueError, match="no"), Reporter().step("count"):
        raise ValueError("no")
    assert capsys.readouterr().err == ""


SCRIPT = """
import time
from drm_triton import progress
progress.BAR_AFTER = 0.2
with progress.Reporter().step("slow work", total=10, unit="bytes") as step:
    for _ in range(10):
        time.sleep(0.08)
        step.advance()
with progress.Reporter().step("quick work", total=10):
    pass
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_a_bar_on_a_terminal_for_slow_work_only():
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
        pass  # Linux says so when the other side closes
    assert child.communicate()[0] == b""
    assert child.returncode == 0
    text = screen.getvalue().decode()
    assert "━" in text  # the bar
    assert text.count("slow work") > 2  # redrawn
    assert text.count("quick work") == 1  # its line only
