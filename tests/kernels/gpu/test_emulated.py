"""The tests in `emulator/`, in a process in which Triton compiles kernels instead of interpreting them."""

from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is available on Linux only")

from tests.conftest import run_python

FOLDER = Path(__file__).parent / "emulator"


PROCESSES = [
    ("test_instructions.py", "test_matrix.py", "test_problems.py", "test_tuning.py"),
    ("test_kernels.py",),
    ("test_training.py", "test_counts.py"),
]


def test_no_file_is_left_out() -> None:
    assert sorted(name for names in PROCESSES for name in names) == sorted(x.name for x in FOLDER.glob("test_*.py"))


@pytest.mark.parametrize("names", PROCESSES)
def test_emulated(names: tuple[str, ...], pytestconfig: pytest.Config) -> None:
    files = ["-c", pytestconfig.inipath, "--rootdir", pytestconfig.rootpath] if pytestconfig.inipath else []
    run = run_python(
        "-m", "pytest", *files, "-p", "no:cacheprovider", *(FOLDER / name for name in names), TRITON_INTERPRET="0"
    )
    assert run.returncode == 0, run.stdout + run.stderr
