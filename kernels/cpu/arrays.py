"""From torch tensors to the NumPy views that compiled code takes, checked."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from drm_triton.errors import InputError
from drm_triton.kernels.interface import check_tensor

FLOAT32 = (torch.float32,)


def view(
    function: str, name: str, tensor: Tensor, shape: tuple[int | None, ...], dtypes: tuple[torch.dtype, ...]
) -> NDArray:
    """Return `tensor` as a C-contiguous array, without a copy where it is one; None in `shape` leaves a size free."""
    if tensor.device.type != "cpu":
        raise InputError(f"{function}: {name} must be on the CPU, got device {tensor.device}")
    check_tensor(function, name, tensor, shape, dtypes)
    array: NDArray = tensor.detach().contiguous().numpy()
    return array


def check_index(function: str, name: str, index: NDArray[np.int32], size: int) -> None:
    """Raise unless every element of `index` is in 0 .. size - 1: compiled code does not check."""
    if index.size and (index.min() < 0 or index.max() >= size):
        raise InputError(f"{function}: {name} must be in [0, {size}), got values {index.min()} to {index.max()}")


def empty(like: Tensor, *shape: int) -> Tensor:
    """Return an uninitialised tensor of the type of `like`."""
    return torch.empty(shape, dtype=like.dtype)
