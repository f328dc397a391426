"""Launches of the Triton kernels: on the device of their tensors, and from one place."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is available on Linux only")

from drm_triton.kernels import gpu
from drm_triton.kernels.gpu import launch
from tests.kernels.gpu.conftest import DEVICE


def test_a_kernel_runs_on_the_device_of_its_first_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[Tensor] = []

    @contextmanager
    def device_of(tensor: Tensor) -> Iterator[None]:
        current.append(tensor)
        yield
        current.pop()

    class Kernel:
        def fn(self) -> None:
            """Stand in for the function of a kernel, of which only the name is read."""

        def __getitem__(self, grid: tuple[int, ...]) -> "Kernel":
            return self

        def __call__(self, *tensors: Tensor, **options: object) -> None:
            guarded.append(current[-1] is tensors[0])

    guarded: list[bool] = []
    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    launch.launch(Kernel(), (1,), torch.zeros(1), torch.ones(1), n=1)
    assert guarded == [True]
    assert not current


def test_every_kernel_is_launched_through_the_guard() -> None:
    folder = Path(gpu.__file__).parent
    sources = {path.name: path.read_text() for path in folder.glob("*.py")}
    assert [name for name, text in sources.items() if "_kernel[" in text] == []
    assert sum(text.count("launch(") for text in sources.values()) > 10


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_on_another_gpu_than_the_current_one() -> None:
    s = torch.randn(3, 20, device=DEVICE)
    w, mask = torch.ones(3, 2, device=DEVICE), torch.ones_like(s, dtype=torch.bool)
    here = gpu.soft_topk_forward(s, w, 1.0, mask)
    there = gpu.soft_topk_forward(s.to("cuda:1"), w.to("cuda:1"), 1.0, mask.to("cuda:1"))
    assert there.device.index == 1
    assert torch.equal(here.cpu(), there.cpu())
