"""Choice of backend: the chosen one, or the reason why it cannot be used."""

import importlib
import importlib.util
import inspect
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from drm_triton import kernels
from drm_triton.bench.gpus import GPUS
from drm_triton.errors import InputError
from drm_triton.kernels import backend_for, get_backend, reference, why_no_gpu, why_not
from drm_triton.kernels.protocol import Backend

OPERATIONS = [name for name, value in vars(Backend).items() if inspect.isfunction(value) and not name.startswith("_")]


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DRM_BACKEND", raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.fixture
def stub_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every backend usable and importing it give its name, so that only the choice is tested."""
    monkeypatch.setattr(kernels, "why_not", lambda name: None)
    monkeypatch.setattr(importlib, "import_module", lambda name: name)


def hide(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find_spec(name))


def pretend_gpu(monkeypatch: pytest.MonkeyPatch, available: bool = True, capability: tuple[int, int] = (9, 0)) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.version, "hip", None, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)


def test_reference_is_always_usable_and_whole() -> None:
    assert why_not("reference") is None
    assert get_backend("reference") is reference


def test_the_protocol_has_the_operations() -> None:
    assert {"list_gradients", "catalogue_gradients", "update_rows"} < set(OPERATIONS)


@pytest.mark.parametrize("name", ["reference", "cpu", "triton"])
def test_backends_offer_every_operation_or_say_what_is_missing(name: str) -> None:
    reason = why_not(name)
    if reason is None:
        backend = get_backend(name)
        assert backend.name == name
        assert all(callable(getattr(backend, operation)) for operation in OPERATIONS)
    else:
        with pytest.raises(InputError, match="cannot be used"):
            get_backend(name)


def test_argument_beats_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRM_BACKEND", "triton")
    assert get_backend("reference") is reference
    monkeypatch.setenv("DRM_BACKEND", "reference")
    assert get_backend() is reference
    monkeypatch.setenv("DRM_BACKEND", "")
    assert backend_for("mps") is reference


@pytest.mark.usefixtures("stub_backends")
def test_auto_is_triton_with_a_gpu_and_cpu_without(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu(monkeypatch, available=False)
    assert get_backend("auto") == get_backend() == kernels.BACKENDS["cpu"]
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # a tool for tests, never chosen by itself
    assert get_backend("auto") == kernels.BACKENDS["cpu"]
    pretend_gpu(monkeypatch)
    assert get_backend("auto") == kernels.BACKENDS["triton"]


@pytest.mark.usefixtures("stub_backends")
def test_tensors_are_served_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [backend_for(device) for device in ("cuda", "cpu", "mps")] == list(
        map(kernels.BACKENDS.get, ("triton", "cpu", "reference"))
    )
    monkeypatch.setenv("DRM_BACKEND", "cpu")
    with pytest.raises(InputError, match="cpu computes on cpu tensors, got cuda tensors"):
        backend_for("cuda")
    monkeypatch.setenv("DRM_BACKEND", "triton")
    with pytest.raises(InputError, match="triton computes on cuda tensors, got cpu tensors"):
        backend_for("cpu")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert backend_for("cpu") == kernels.BACKENDS["triton"]


def test_unusable_fast_backend_leaves_tensors_to_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "why_not", lambda name: None if name == "reference" else "broken")
    assert backend_for("cuda") is backend_for("cpu") is reference


def test_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.version.cuda is None and torch.version.hip is None:
        assert "built without CUDA or ROCm" in str(why_not("triton"))
    pretend_gpu(monkeypatch, available=False)
    assert "torch sees no GPU" in str(why_not("triton"))
    pretend_gpu(monkeypatch, capability=(6, 1))
    assert "this one has 6.1" in str(why_not("triton"))
    hide(monkeypatch, "triton")
    assert "Triton is not installed" in str(why_not("triton"))
    hide(monkeypatch, "numba")
    assert "Numba is not installed" in str(why_not("cpu"))


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [
        ("gfx90a:sramecc+:xnack-", None),
        ("gfx942", None),
        ("gfx1100", "the kernels need an AMD GPU of type gfx90a or gfx942, this one is gfx1100"),
    ],
)
def test_amd_gpus_that_are_not_compiled_for_are_refused(
    monkeypatch: pytest.MonkeyPatch, architecture: str, reason: str | None
) -> None:
    pretend_gpu(monkeypatch, capability=(11, 0))
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    properties = SimpleNamespace(gcnArchName=architecture)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert why_no_gpu() == reason


def test_amd_gpus_are_those_of_the_static_checks() -> None:
    assert [gpu.arch for gpu in GPUS if gpu.backend == "hip"] == list(kernels.AMD_ARCHITECTURES)


def test_backend_that_fails_to_import_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise ImportError("Numba needs NumPy 2.3 or less")

    monkeypatch.setattr(importlib, "import_module", fail)
    assert why_not("cpu") == "it fails to import: Numba needs NumPy 2.3 or less"


def test_unusable_or_unknown_choice_says_why_and_where_it_came_from(monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, "triton")
    with pytest.raises(InputError, match=r"^backend: triton cannot be used: Triton is not installed"):
        get_backend("triton")
    with pytest.raises(InputError, match=r"^backend must be auto, reference, triton, cpu, got 'cuda'"):
        get_backend("cuda")
    monkeypatch.setenv("DRM_BACKEND", "gpu")
    with pytest.raises(InputError, match=r"^environment variable DRM_BACKEND must be .* got 'gpu'"):
        get_backend()
    with pytest.raises(InputError, match=r"^environment variable DRM_BACKEND must be"):
        backend_for("cpu")


def test_auto_without_any_backend_blames_no_choice_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu(monkeypatch, available=False)
    hide(monkeypatch, "numba")
    for ask in (lambda: get_backend(), lambda: get_backend("auto")):
        with pytest.raises(
            InputError, match=r"^backend auto \(triton .*: torch sees no GPU.*\): cpu .*: Numba is not inst"
        ):
            ask()


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = "import sys, drm_triton.kernels; print([m for m in ('torch', 'triton', 'numba') if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ)
    assert run.stdout.strip() == "[]"
