"""Torch tensors as NumPy arrays for compiled functions, with checks."""

from typing import Any

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


def empty(like: Tensor, *shape: int) -> Tensor:
    """Return an uninitialised tensor of the type of `like`."""
    return torch.empty(shape, dtype=like.dtype)
