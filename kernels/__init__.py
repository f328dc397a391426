"""Choice of a backend: `reference` (plain torch), `cpu` (Numba) or `triton` (NVIDIA and AMD GPUs).

`protocol` describes the operations. Nothing heavy is imported, and no GPU driver started, before a backend is chosen.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import TYPE_CHECKING, cast

from drm_triton.errors import InputError
from drm_triton.machine import use_threads
from drm_triton.names import BackendChoice

if TYPE_CHECKING:
    import torch

    from drm_triton.kernels import cpu, gpu, reference
    from drm_triton.kernels.protocol import Backend

    _CHECKED: tuple[Backend, ...] = (reference, cpu, gpu)  # mypy compares the modules with the protocol

LEAST_CAPABILITY = (7, 5)  # the oldest NVIDIA GPU for which the kernels are compiled in the tests
AMD_ARCHITECTURES = ("gfx90a", "gfx942")  # the AMD GPUs for which they are

BACKENDS = {
    "reference": "drm_triton.kernels.reference",
    "triton": "drm_triton.kernels.gpu",
    "cpu": "drm_triton.kernels.cpu",
}


def get_backend(name: str | None = None) -> Backend:
    """Return a backend.

    Parameters
    ----------
    name : reference, triton, cpu or auto (Triton if a GPU is usable, else CPU)
        None takes the name from the environment variable DRM_BACKEND. Without it, auto is used.

    Raises
    ------
    InputError
        If the name is unknown or the backend cannot be used on this machine. The message says why.

    Examples
    --------
    >>> get_backend("reference").name
    'reference'
    """
    chosen = name or os.environ.get("DRM_BACKEND") or "auto"
    origin = "backend" if name else "environment variable DRM_BACKEND"
    if chosen == "auto":
        # Triton's interpreter runs without a GPU, but far too slowly to be chosen: why_not("triton") is not enough.
        no_triton = why_no_gpu() or why_not("triton")
        chosen = "triton" if no_triton is None else "cpu"
        origin = f"backend auto (triton cannot be used: {no_triton})"
    elif chosen not in BACKENDS:
        raise InputError(f"{origin} must be auto, {', '.join(BACKENDS)}, got {chosen!r}")
    reason = why_not(chosen)
    if reason is not None:
        raise InputError(f"{origin}: {chosen} cannot be used: {reason}")
    return cast("Backend", importlib.import_module(BACKENDS[chosen]))


def use_backend(name: BackendChoice, threads: int | None = None) -> tuple[Backend, torch.device]:
    """Return a backend and its device, and set the number of CPU threads.

    Parameters
    ----------
    threads : number of threads of torch and, on the CPU backend, Numba. None means all cores.
    """
    import torch

    backend = get_backend(None if name == "auto" else name)
    use_threads("torch", threads, torch.get_num_threads, torch.set_num_threads)
    if backend.name == "cpu":
        from drm_triton.kernels.cpu.runtime.threads import n_threads, set_threads

        use_threads("numba", threads, n_threads, set_threads)
    on_gpu = backend.name == "triton" and torch.cuda.is_available()
    return backend, torch.device("cuda" if on_gpu else "cpu")


def backend_for(device: str) -> Backend:
    """Return the backend for tensors on a device of type `device` (cpu, cuda, mps, ...).

    The environment variable DRM_BACKEND decides. Without it, cuda tensors are served by Triton and cpu tensors by
    Numba. The reference serves other devices, and those two where their backend cannot be used.
    """
    chosen = os.environ.get("DRM_BACKEND") or "auto"
    if chosen == "auto":
        fast = {"cuda": "triton", "cpu": "cpu"}.get(device, "reference")
        return get_backend(fast if why_not(fast) is None else "reference")
    home = {"triton": device if _interpreted() else "cuda", "cpu": "cpu"}.get(chosen, device)
    module = get_backend()
    if device != home:
        raise InputError(
            f"environment variable DRM_BACKEND: {chosen} computes on {home} tensors, got {device} tensors; "
            "move them or unset the variable"
        )
    return module


def why_not(name: str) -> str | None:
    """Return why a backend cannot be used on this machine, or None if it can."""
    if name == "triton":
        if importlib.util.find_spec("triton") is None:
            return "Triton is not installed (pip install triton; it has wheels for Linux only)"
        reason = None if _interpreted() else why_no_gpu()
        if reason is not None:
            return reason
    if name == "cpu" and importlib.util.find_spec("numba") is None:
        return "Numba is not installed (pip install numba)"
    try:
        importlib.import_module(BACKENDS[name])
    except ImportError as error:  # installed but broken, as Numba is beside a NumPy too new for it
        return f"it fails to import: {error}"
    return None


def _interpreted() -> bool:
    """Return whether Triton's interpreter is on. It runs kernels on CPU tensors, for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def why_no_gpu() -> str | None:
    """Return why Triton has no GPU to run on, or None if it has one."""
    import torch

    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} is built without CUDA or ROCm; install a GPU build (pytorch.org)"
    if not torch.cuda.is_available():
        return "torch sees no GPU; check the driver (nvidia-smi or rocm-smi) and CUDA_VISIBLE_DEVICES"
    if torch.version.hip is not None:
        architecture = torch.cuda.get_device_properties(torch.cuda.current_device()).gcnArchName.split(":")[0]
        if architecture not in AMD_ARCHITECTURES:
            return f"the kernels need an AMD GPU of type {' or '.join(AMD_ARCHITECTURES)}, this one is {architecture}"
        return None
    capability = torch.cuda.get_device_capability()
    if capability < LEAST_CAPABILITY:
        needed, found = (".".join(map(str, pair)) for pair in (LEAST_CAPABILITY, capability))
        return f"the kernels need a GPU of compute capability {needed} or newer, this one has {found}"
    return None
