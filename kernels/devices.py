"""Where tensors are, and how they get there without a wait for a GPU."""

import torch
from torch import Tensor


def on_host(tensor: Tensor) -> bool:
    """Return whether the host can read the values of a tensor without waiting for a GPU."""
    return tensor.device.type == "cpu"


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of the host to a device. The host does not wait: a GPU copies from pinned memory."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
