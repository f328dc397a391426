"""Torch tensors as NumPy arrays for compiled functions, with checks, and memory for results."""

import math
import sys
import threading
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from drm_triton.errors import InputError
from drm_triton.kernels.checks import check_tensor

FLOAT32 = (torch.float32,)


def view(
    function: str, name: str, tensor: Tensor, shape: tuple[int | None, ...], dtypes: tuple[torch.dtype, ...]
) -> NDArray[Any]:
    """Return `tensor` as a C-contiguous array, without a copy if it is one. None in `shape` leaves a size free."""
    if tensor.device.type != "cpu":
        raise InputError(f"{function}: {name} must be on the CPU, got device {tensor.device}")
    check_tensor(function, name, tensor, shape, dtypes)
    array: NDArray[Any] = tensor.detach().contiguous().numpy()
    return array


# The system hands out new memory page by page, on first use, which takes longer than many a kernel: with 1,000
# negatives per list, a third of the time of `list_gradients`; the scores of 256 users for 17,000 items are 4,200 pages.
# So the memory of large results is kept and used again.
LARGE = 1 << 20  # bytes; the allocator keeps smaller blocks by itself
KEPT = 6  # blocks: a training step has four large results

_kept: list[NDArray[np.uint8]] = []
_lock = threading.Lock()


def empty(dtype: torch.dtype, *shape: int) -> Tensor:
    """Return an uninitialised tensor. A large one has the memory of a former result that nobody uses any more."""
    size = math.prod(shape) * dtype.itemsize
    if size < LARGE:
        return torch.empty(shape, dtype=dtype)
    with _lock:
        block = _free_block(size)
        return torch.from_numpy(block[:size]).view(dtype).view(shape)


def _free_block(size: int) -> NDArray[np.uint8]:
    """Return a block of at least `size` bytes, and at most twice as many, that no tensor uses."""
    free = [i for i in range(len(_kept)) if sys.getrefcount(_kept[i]) == 2]  # the list's and that of the call
    fitting = [i for i in free if size <= _kept[i].size <= 2 * size]
    if fitting:
        return _kept[min(fitting, key=lambda i: _kept[i].size)]
    block: NDArray[np.uint8] = torch.empty(size, dtype=torch.uint8).numpy()
    if len(_kept) == KEPT and free:
        _kept.pop(free[0])  # the one that was added first
    if len(_kept) < KEPT:
        _kept.append(block)
    return block
