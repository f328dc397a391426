"""The hot operations, with the same names on each backend (see `interface`), and the choice of backend.

`reference` is plain torch on any device, `triton` needs an NVIDIA or AMD GPU, `cpu` is Numba on all cores.
Nothing heavy is imported, and no GPU driver started, before a backend is asked for.
"""

import importlib
import importlib.util
import os
from types import ModuleType

from drm_triton.errors import InputError

BACKENDS = {
    "reference": "drm_triton.kernels.reference",
    "triton": "drm_triton.kernels.gpu",
    "cpu": "drm_triton.kernels.cpu",
}
OPERATIONS = (
    "sample_lists",
    "list_gradients",
    "update_rows",
    "pack_items",
    "top_k",
    "soft_topk_forward",
    "soft_topk_backward",
    "drm_lists",
)


def get_backend(name: str | None = None) -> ModuleType:
    """Return the module with the operations of a backend.

    Parameters
    ----------
    name : reference, triton, cpu or auto (Triton if a GPU is usable, else CPU).
        None asks the environment variable DRM_BACKEND, and without it means auto.

    Raises
    ------
    InputError
        If the name is unknown or the backend cannot be used here; the message says why.

    Examples
    --------
    >>> get_backend("reference").__name__
    'drm_triton.kernels.reference'
    """
    chosen = name or os.environ.get("DRM_BACKEND") or "auto"
    origin = "backend" if name else "environment variable DRM_BACKEND"
    if chosen == "auto":
        # Not merely why_not("triton"): the interpreter makes Triton run without a GPU, but far too slowly to be chosen.
        no_triton = why_no_gpu() or why_not("triton")
        chosen = "triton" if no_triton is None else "cpu"
        origin = f"backend auto (triton cannot be used: {no_triton})"
    elif chosen not in BACKENDS:
        raise InputError(f"{origin} must be auto, {', '.join(BACKENDS)}, got {chosen!r}")
    reason = why_not(chosen)
    if reason is not None:
        raise InputError(f"{origin}: {chosen} cannot be used: {reason}")
    return importlib.import_module(BACKENDS[chosen])


def backend_for(device: str) -> ModuleType:
    """Return the backend for tensors that already lie on a device of type `device` (cpu, cuda, mps, ...).

    DRM_BACKEND decides; without it cuda is served by Triton and cpu by Numba, or by the reference where those cannot
    be used, and any other device by the reference.
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
    """Say why a backend cannot be used on this machine; None if it can."""
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
    """Whether Triton's interpreter is on, which runs kernels on CPU tensors, for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def why_no_gpu() -> str | None:
    """Say why Triton has no GPU to run on; None if it has one."""
    import torch

    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} is built without CUDA or ROCm; install a GPU build (pytorch.org)"
    if not torch.cuda.is_available():
        return "torch sees no GPU; check the driver (nvidia-smi or rocm-smi) and CUDA_VISIBLE_DEVICES"
    capability = torch.cuda.get_device_capability()
    if torch.version.hip is None and capability < (7, 0):
        return f"Triton needs a GPU of compute capability 7.0 or newer, this one has {capability[0]}.{capability[1]}"
    return None
