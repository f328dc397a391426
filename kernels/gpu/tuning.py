"""Launch options that `drm-triton bench kernels --tune` chose on this GPU.

Only options that cannot change a bit of a result are offered. `num_stages` says how many iterations of a loop have
their loads under way, and `maxnreg` how many registers a thread may have: neither touches the order of operations.
`num_warps` divides sums among threads and so decides their rounding. It is offered for the kernels that add integers
only. All other sizes are those of the functions beside the kernels.

The choices are in a JSON file in the user's cache directory, for each GPU and version of drm-triton and Triton, by
kernel, sizes, score and types. Whatever is wrong in the file counts as no choice.
"""

import functools
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drm_triton import atomic
from drm_triton._version import __version__
from drm_triton.errors import DrmError

Choices = dict[str, dict[str, int]]  # launch options by `key_of`
Launches = dict[str, tuple[str, dict[str, Any]]]  # kernel and options by `key_of`

NEUTRAL = {"num_stages": (1, 2, 3, 4), "maxnreg": (64, 96, 128, 168, 255)}  # of every kernel
WARPS = {"num_warps": (2, 4, 8)}  # with 1, sampling keeps arrays in memory
INTEGER_KERNELS = ("_sample_kernel", "_shared_kernel", "_users_kernel")

_forced: Choices | None = None  # by `using`
_launched: Launches = {}  # the first launch of each key under `using`


def knobs_of(kernel: str) -> dict[str, tuple[int, ...]]:
    """Return the options that may be chosen for a kernel, with their values."""
    neutral = {name: values for name, values in NEUTRAL.items() if name != "maxnreg" or not torch.version.hip}
    return neutral | WARPS if kernel in INTEGER_KERNELS else neutral


def key_of(kernel: str, options: dict[str, Any], tensors: Sequence[Tensor]) -> str:
    """Return the name of a choice: the kernel with its sizes and score, as far as it has them, and types of floats.

    The types are those of its tensors in their order, each once. One of them is that of the factors.
    """
    sizes = (f"{name}={options[name]}" for name in ("n", "eta", "d", "D", "K", "k", "L2") if name in options)
    types = dict.fromkeys(str(x.dtype).removeprefix("torch.") for x in tensors if x.dtype.is_floating_point)
    return " ".join([kernel, *sizes, *types])


def chosen(kernel: str, options: dict[str, Any], tensors: Sequence[Tensor]) -> dict[str, int]:
    """Return the options that replace those of a launch, on the device of the first tensor."""
    if _forced is not None:
        key = key_of(kernel, options, tensors)
        _launched.setdefault(key, (kernel, options))
        return _forced.get(key, {})
    device = tensors[0].device
    choices = stored(gpu_of(device)) if device.type == "cuda" else {}
    return choices.get(key_of(kernel, options, tensors), {}) if choices else {}


@contextmanager
def using(choices: Choices) -> Iterator[Launches]:
    """Replace the stored choices, on any device; yield the launches in the block, the first one of each key."""
    global _forced, _launched
    before = _forced, _launched
    _forced, _launched = choices, {}
    try:
        yield _launched
    finally:
        _forced, _launched = before


@functools.cache
def gpu_of(device: torch.device) -> str:
    """Return the name under which the choices for a GPU are stored."""
    import triton

    return f"{torch.cuda.get_device_name(device)}, drm-triton {__version__}, Triton {triton.__version__}"


def cache_file() -> Path:
    """Return the file of the choices."""
    folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(folder) / "drm-triton" / "tuning.json"


@functools.cache
def stored(gpu: str) -> Choices:
    """Return the stored choices for a GPU. They are read once in a process."""
    rows = _read().get(gpu)
    return {key: row for key, row in rows.items() if _allowed(key, row)} if isinstance(rows, dict) else {}


def _read() -> dict[str, Any]:
    try:
        content = json.loads(cache_file().read_text("utf-8"))
    except (OSError, ValueError, RuntimeError):  # RuntimeError: no home directory
        return {}
    return content if isinstance(content, dict) else {}


def _allowed(key: str, row: Any) -> bool:
    """Return whether a stored choice has only options and values that are offered."""
    knobs = knobs_of(key.split()[0]) if key.split() else {}
    return isinstance(row, dict) and all(
        isinstance(value, int) and not isinstance(value, bool) and value in knobs.get(name, ())
        for name, value in row.items()
    )


def store(gpu: str, choices: Choices) -> Path:
    """Add choices for a GPU to the file, and use them from now on."""
    file, content = cache_file(), _read()
    rows = content.get(gpu)
    content[gpu] = (rows if isinstance(rows, dict) else {}) | choices
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DrmError(f"cannot create {file.parent}: {error.strerror}") from None
    atomic.write_text(file, json.dumps(content, indent=1) + "\n")
    stored.cache_clear()
    return file


def in_force() -> dict[str, Any] | None:
    """Return the current GPU and the choices stored for it, None without a GPU."""
    if not torch.cuda.is_available():
        return None
    gpu = gpu_of(torch.device("cuda", torch.cuda.current_device()))
    return {"gpu": gpu, "choices": stored(gpu)}
