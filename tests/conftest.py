"""Fixtures and helpers that several test files share, and the set-up that must precede every import of the library.

Import a helper with ``from tests.conftest import call``: pytest loads this file as the module ``tests.conftest``.
"""

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import HealthCheck, settings

if "PYTEST_XDIST_WORKER" in os.environ:
    # The workers of pytest-xdist occupy all cores. Idle OpenMP threads spin and would take them from other workers.
    # A test that needs two threads asks for them with `torch.set_num_threads` or `DRM(threads=2)`.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from tests.interpreter import hasten

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared" / "data"

# Seconds after which a process counts as hanging. No test expects a process to be faster than that.
HANG = 1800

# Hypothesis measures the time of each example. A busy machine must not fail a test.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

if not torch.cuda.is_available():
    # Without a GPU, Triton kernels run in the interpreter. Triton reads the variable when it decorates a kernel.
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of this suite."""
    parser.addoption("--record-bits", action="store_true", help="write tests/bits.json anew instead of comparing")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Compile the CPU kernels into Numba's cache before the workers of pytest-xdist start, or each would do it."""
    if session.config.getoption("numprocesses", None):
        programs = [COMPILE_LOSSES + COMPILE_CATALOGUE, COMPILE_LISTS + COMPILE_PAIRS]
        with ThreadPoolExecutor() as pool:
            for done in pool.map(lambda program: run_python("-c", program), programs):
                if done.returncode:
                    raise pytest.UsageError(f"the CPU kernels cannot be compiled:\n{done.stderr}")


def pytest_collection_finish() -> None:
    """Make Triton's interpreter faster."""
    hasten()


# Programs that run the operations which most tests use once, on toy data. They take about the same time.
COMPILE_LOSSES = """
import torch
from drm_triton import drm_loss, soft_topk
for dtype in (torch.float32, torch.float64):
    scores = torch.zeros(1, 3, dtype=dtype, requires_grad=True)
    (drm_loss(scores, torch.tensor([[1, 0, 0]]).to(dtype)) + soft_topk(scores, 2).sum()).backward()
"""
COMPILE_CATALOGUE = """
from drm_triton import DRM, Dataset
data = Dataset.from_csr(([0, 2, 3], [1, 0, 1]), n_items=3)
DRM(factors=4, epochs=1, backend="cpu").fit(data).recommend(k=1)
"""
COMPILE_LISTS = """
from drm_triton import DRM, Dataset
data = Dataset.from_csr(([0, 2, 3], [1, 0, 1]), n_items=3)
for share in (1, 2):
    DRM(factors=4, epochs=1, objective="hinge+drm", share=share, batch_size=2, backend="cpu").fit(data)
"""
COMPILE_PAIRS = """
from drm_triton.models import BPR, WARP
for model in (BPR, WARP):
    model(factors=4, epochs=1, backend="cpu").fit(data)
"""


def repository_root() -> Path:
    """Return the root of the repository; skip the calling test, fixture or module if the tests run without it."""
    if not (ROOT / "pyproject.toml").is_file():
        pytest.skip("needs the repository, and these tests run outside it", allow_module_level=True)
    return ROOT


@pytest.fixture(scope="session")
def repository() -> Path:
    """Return the root of the repository, or skip the test if the tests run against an installed wheel."""
    return repository_root()


@pytest.fixture(scope="session")
def shared_data() -> Callable[[str], Path]:
    """Return a function that finds a real data set, or skips the test where it is absent."""

    def find(name: str) -> Path:
        if not (SHARED / name).is_dir():
            pytest.skip(f"real data set {name} is not at {SHARED}")
        return SHARED / name

    return find


@pytest.fixture
def threads() -> Iterator[None]:
    """Restore the numbers of threads of Numba and torch after the test."""
    from drm_triton.kernels.cpu.runtime.threads import n_threads, set_threads

    before, torch_before = n_threads(), torch.get_num_threads()
    yield
    set_threads(before)
    torch.set_num_threads(torch_before)


@pytest.fixture
def no_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not draw the learning curves of runs, which takes longer than most trainings of the tests."""
    monkeypatch.setattr("drm_triton.training.run.Run.draw_curves", lambda run: None)


def call(*arguments: object) -> tuple[int, str, str]:
    """Run a command of `drm-triton` in this process; return its exit code, stdout and stderr."""
    from drm_triton.cli import main

    out, err = io.StringIO(), io.StringIO()
    code = 0
    with (
        mock.patch("sys.argv", ["drm-triton", *map(str, arguments)]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
    return code, out.getvalue(), err.getvalue()


def rot(store: Path) -> None:
    """Change one interaction of a stored data set without a trace, as a failing disk does.

    The structure stays sound, and so do size and time of the file. Only a disk can keep the time of the change of the
    inode, so the stamp of the data set is made anew.
    """
    import numpy as np

    from drm_triton.data import verify

    file = store / "train.indices.npy"
    status = file.stat()
    indices = np.load(file)
    starts = np.load(store / "train.indptr.npy")[:-1]
    first = next(start for start in starts if indices[start] > 0)
    with file.open("r+b") as handle:
        handle.seek(first * 4 - indices.nbytes, os.SEEK_END)
        handle.write((indices[first] - 1).tobytes())
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (status.st_size, status.st_mtime_ns)
    verify.remember(store, verify.stamp(store))


def environment(**changes: str | None) -> dict[str, str]:
    """Return this process's environment for a child, with `changes`; a variable that is None is removed.

    The child finds the package that is under test here, in whatever directory it runs.
    """
    path = [str(ROOT)] if (ROOT / "drm_triton").is_dir() else []
    variables = {"PYTHONPATH": os.pathsep.join([*path, os.environ.get("PYTHONPATH", "")]).strip(os.pathsep), **changes}
    return {name: value for name, value in (os.environ | variables).items() if value is not None}


def on_terminal(*words: str, cwd: Path | None = None) -> tuple[int, str]:
    """Run a program on a pseudo-terminal. Return its exit code and all that it wrote there."""
    import pty

    ours, theirs = pty.openpty()
    with subprocess.Popen(words, stderr=theirs, stdout=theirs, cwd=cwd, env=environment()) as child:
        os.close(theirs)
        screen = b""
        try:
            while block := os.read(ours, 4096):
                screen += block
        except OSError:
            pass  # Linux raises when the other side closes
    return child.returncode, screen.decode()


def run_python(
    *arguments: object, cwd: Path | None = None, input: str | None = None, **changes: str | None
) -> subprocess.CompletedProcess[str]:
    """Run a new Python process to its end, in the environment of `environment(**changes)`; `input` is its stdin."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        input=input,
        env=environment(**changes),
        capture_output=True,
        text=True,
        timeout=HANG,
    )
