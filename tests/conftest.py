"""Set up before any test module is imported: without a GPU, Triton kernels run in its interpreter on the CPU."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is decorated; later is too late


@pytest.fixture(scope="session")
def shared_data() -> Callable[[str], Path]:
    """Find a real data set, or skip the test where it is absent."""

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


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of this suite."""
    parser.addoption("--record-bits", action="store_true", help="write tests/bits.json anew instead of comparing")
