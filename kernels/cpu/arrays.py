"""From torch tensors to the NumPy views that compiled code takes, checked."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from drm_triton.errors import InputError

FLOAT32 = (torch.float32,)
FLOATS = (torch.float32, torch.float64)
INT32 = (torch.int32,)
INT64 = (torch.int64,)


def view(
    function: str,
    name: str,
    tensor: Tensor,
    shape: tuple[int | None, ...],
    dtypes: tuple[torch.dtype, ...],
    in_place: bool = False,
) -> NDArray:
    """Return `tensor` as a C-contiguous array, without a copy where it is one; None in `shape` leaves a size free."""
    if tensor.device.type != "cpu":
        raise InputError(f"{function}: {name} must be on the CPU, got device {tensor.device}")
    if tensor.dtype not in dtypes:
        allowed = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise InputError(f"{function}: {name} must be {allowed}, got {str(tensor.dtype).removeprefix('torch.')}")
    matches = tensor.ndim == len(shape) and all(
        want is None or want == size for want, size in zip(shape, tensor.shape, strict=True)
    )
    if not matches:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise InputError(f"{function}: {name} must have shape [{wanted}], got {list(tensor.shape)}")
    if in_place and not tensor.is_contiguous():
        raise InputError(
            f"{function}: {name} is changed in place and must be contiguous, got strides {tensor.stride()}"
        )
    array: NDArray = tensor.detach().contiguous().numpy()
    return array


def check_index(function: str, name: str, index: NDArray[np.int32], size: int) -> None:
    """Raise unless every element of `index` is in 0 .. size - 1: compiled code does not check."""
    if index.size and (index.min() < 0 or index.max() >= size):
        raise InputError(f"{function}: {name} must be in [0, {size}), got values {index.min()} to {index.max()}")


def empty(like: Tensor, *shape: int) -> Tensor:
    """Return an uninitialised tensor of the type of `like`."""
    return torch.empty(shape, dtype=like.dtype)
