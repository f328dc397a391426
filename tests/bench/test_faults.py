"""A short run of the fault injection."""

import shutil
import sys

import pytest

from tests.conftest import repository_root, run_python

ROOT = repository_root()  # the bench is not in a wheel


@pytest.mark.skipif(sys.platform != "linux" or shutil.which("cc") is None, reason="needs Linux and a C compiler")
@pytest.mark.parametrize("command", ["prepare", "train", "overwrite"])
def test_faults_lose_nothing(command: str) -> None:
    every = {"prepare": 17, "train": 53, "overwrite": 9}[command]  # a few changes of each kind
    done = run_python("-m", "bench.faults", "--command", command, "--every", every, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" 0 lost") == 4  # each way to fail
