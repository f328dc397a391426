"""Short runs of the fault injection and of the kills at random moments."""

import re
import shutil
import sys

import pytest

from tests.conftest import repository_root, run_python

ROOT = repository_root()  # the bench is not in a wheel


@pytest.mark.skipif(sys.platform != "linux" or shutil.which("cc") is None, reason="needs Linux and a C compiler")
def test_faults_lose_nothing() -> None:
    """A few changes of each command, spoiled in each way."""
    done = run_python("-m", "bench.faults", "--every", 53, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" 0 lost") == 7 * 5
    assert sum(map(int, re.findall(r"(\d+) faults", done.stdout))) >= 40


@pytest.mark.skipif(sys.platform != "linux", reason="needs fork")
def test_kills_at_random_moments_lose_nothing() -> None:
    done = run_python("-m", "bench.kills", "--kills", 10, "--resumes", 3, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sum(map(int, re.findall(r"(\d+) kills", done.stdout))) == 10
    assert "killed and resumed 3 times: equal" in done.stdout
