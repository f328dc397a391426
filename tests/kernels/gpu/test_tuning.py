"""Stored launch options: what is used, what counts as no choice, and how they are chosen."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is available on Linux only")

from drm_triton.bench import kernels
from drm_triton.bench import tuning as search
from drm_triton.exercises import OPERATIONS, Case, Inputs
from drm_triton.kernels import gpu
from drm_triton.kernels.gpu import tuning
from drm_triton.names import CUT_OFFS
from tests.conftest import call
from tests.kernels.gpu.conftest import triton_kernels

CPU = torch.device("cpu")
CASE = Case(18, 12, "dot", 2, B=2, n_users=3, n_items=24)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep the cache of the user out of the tests."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tuning.stored.cache_clear()
    return tuning.cache_file()


def test_choices_are_stored_for_a_gpu(cache: Path) -> None:
    assert tuning.stored("A") == {}
    tuning.store("A", {"_step_kernel d=64": {"num_stages": 2}})
    tuning.store("A", {"_step_kernel d=32": {"maxnreg": 96}})
    tuning.store("B", {"_sample_kernel n=8": {"num_warps": 2}})
    assert tuning.stored("A") == {"_step_kernel d=64": {"num_stages": 2}, "_step_kernel d=32": {"maxnreg": 96}}
    assert tuning.stored("C") == {}
    assert json.loads(cache.read_text()).keys() == {"A", "B"}


@pytest.mark.parametrize(
    "content",
    [
        b"\xff\xfe",
        b"{",
        b"[]",
        b'{"A": 3}',
        b'{"A": {"": {"num_stages": 2}}}',
        b'{"A": {"_step_kernel d=64": {"num_warps": 2}}}',  # changes the rounding of a sum
        b'{"A": {"_step_kernel d=64": {"num_stages": 5}}}',
        b'{"A": {"_step_kernel d=64": {"num_stages": true}}}',
        b'{"A": {"_step_kernel d=64": {"BLOCK_D": 2}}}',
        b'{"A": {"_step_kernel d=64": [1]}}',
    ],
)
def test_a_bad_choice_is_none(cache: Path, content: bytes) -> None:
    cache.parent.mkdir()
    cache.write_bytes(content)
    assert tuning.stored("A") == {}
    tuning.store("A", {"_step_kernel d=32": {"maxnreg": 96}})
    assert tuning.stored("A") == {"_step_kernel d=32": {"maxnreg": 96}}


def tensors(device: torch.device, *types: torch.dtype) -> list[Any]:
    """Return what takes the place of tensors on a device that need not exist."""
    return [SimpleNamespace(device=device, dtype=dtype) for dtype in types]


def test_kernels_that_are_named_exist() -> None:
    assert {"_step_kernel", *tuning.INTEGER_KERNELS} <= triton_kernels()


def test_keys_of_top_k_have_its_sizes() -> None:
    with tuning.using({}) as launched:
        OPERATIONS["top_k"](gpu, Inputs.of(replace(CASE, score="l2", top=7)).to(CPU, torch.float32))
    assert set(launched) == {"_filter_kernel D=32 L2=True float32", "_rank_kernel d=12 k=7 L2=True float32"}


def test_launches_are_recorded_once() -> None:
    with tuning.using({}) as launched:
        for _ in range(3):
            OPERATIONS["sample_lists"](gpu, Inputs.of(CASE).to(CPU, torch.float32))
    assert len(launched) == 2


def test_a_launch_on_a_gpu_uses_the_stored_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "gpu_of", lambda device: "A")
    tuning.store("A", {"_step_kernel d=64 L2=True bfloat16 float32": {"num_stages": 2}})
    cuda, options = torch.device("cuda"), {"d": 64, "num_warps": 4, "L2": True}
    types = torch.bfloat16, torch.float32, torch.int32, torch.float32
    assert tuning.chosen("_step_kernel", options, tensors(cuda, *types)) == {"num_stages": 2}
    for other in ({"d": 65}, {"L2": False}):
        assert tuning.chosen("_step_kernel", options | other, tensors(cuda, *types)) == {}
    assert tuning.chosen("_step_kernel", options, tensors(cuda, torch.float32)) == {}
    assert tuning.chosen("_step_kernel", options, tensors(CPU, *types)) == {}


def test_the_faster_options_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of a run is made up: the sum of the options of its launches."""
    monkeypatch.setattr(search, "TUNED", ("sample_lists",))

    def time(run: Callable[[], object]) -> float:
        run()
        forced = tuning._forced or {}
        return sum(100 + forced.get(key, {}).get("num_stages", 3) for key in tuning._launched)

    monkeypatch.setattr(search, "GAIN", 0)
    choices = search.choose(gpu, CPU, CASE, time)
    assert {key.split()[0] for key in choices} == {"_sample_kernel", "_shared_kernel"}
    assert all(row == {"num_stages": 1} for row in choices.values())


def test_options_that_change_a_bit_are_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(search, "TUNED", ("sample_lists",))
    monkeypatch.setattr(search, "same_bits", lambda a, b: False)
    assert search.choose(gpu, CPU, CASE, lambda run: 1.0) == {}
    assert "num_stages 1 changes the results and is left out" in capsys.readouterr().out


def test_top_k_is_tuned_for_validation(monkeypatch: pytest.MonkeyPatch) -> None:
    cases: list[Case] = []
    monkeypatch.setattr(kernels, "why_no_gpu", lambda: None)
    monkeypatch.setattr(search, "tune", lambda backend, device, case: cases.append(case))
    kernels.run_tuning(kernels.Sizes(rho=2))
    assert [(case.top, case.rho) for case in cases] == [(max(CUT_OFFS), 2)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_tuning_is_refused() -> None:
    code, _, err = call("bench", "kernels", "--tune")
    assert code == 2
    assert "--tune needs a GPU: " in err
