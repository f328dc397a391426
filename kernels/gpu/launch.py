"""How kernels are launched."""

from typing import Any

import torch
from torch import Tensor

from drm_triton.kernels.gpu.tuning import chosen


def launch(kernel: Any, grid: tuple[int, ...], *tensors: Tensor, **options: Any) -> None:
    """Launch a kernel on the device of its first tensor: Triton would take the current device, whatever it is.

    `options` are the other arguments of the kernel and options of the compiler, some of which `tuning` may replace.
    Multiplications are not fused with the additions that follow. In a sum over the lanes of a warp, each lane would
    fuse another term, and the copies of the sum that the lanes hold would differ in the last bit: an item would no
    longer tie with itself.
    """
    options |= chosen(kernel.fn.__name__, options, tensors)
    with torch.cuda.device_of(tensors[0]):
        kernel[grid](*tensors, **options, enable_fp_fusion=False)


def register_limit(limit: int) -> dict[str, int]:
    """Return the launch option that lets a thread use up to `limit` registers on NVIDIA GPUs.

    Without a limit, NVIDIA's assembler may spill a few values to fit one more block on a multiprocessor. With a limit
    it does not. AMD's compiler has no such option.
    """
    return {} if torch.version.hip else {"maxnreg": limit}
