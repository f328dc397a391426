"""What training changes, and what callbacks receive."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from drm_triton.names import LOSSES

LOSS_SUMS = ("loss", *LOSSES)


@dataclass
class State:
    """Everything that training changes. Training continues from a saved state as if it had never been interrupted."""

    U: Tensor  # [M, d] user factors, bfloat16 on a GPU with `precision` bfloat16
    V: Tensor  # [N, d] item factors
    U_state: Tensor  # Adagrad's sums of squared gradients, shaped like U and V
    V_state: Tensor
    epoch: int = 0  # completed epochs
    position: int = 0  # completed lists of the current epoch
    step: int = 0
    seconds: float = 0.0  # spent on the current epoch, without validation
    sums: dict[str, float] = field(default_factory=lambda: dict.fromkeys(LOSS_SUMS, 0.0))  # over the current epoch
    unread: Tensor | None = None  # float64 [LOSS_SUMS]: what is still to be added to the sums, on a GPU
    best: float | None = None  # best value of the monitored metric
    best_epoch: int | None = None
    stale: int = 0  # validations since the best one

    def to(self, device: torch.device, tables: torch.dtype | None = None) -> "State":
        """Move the tensors to a device, and the factors to the type `tables`."""
        self.read_losses()
        self.unread = None
        for name in ("U", "V", "U_state", "V_state"):
            setattr(self, name, getattr(self, name).to(device, tables if name in ("U", "V") else None))
        return self

    def read_losses(self) -> None:
        """Add the losses that are still on the GPU to the sums. The host waits for the GPU."""
        if self.unread is not None:
            for name, value in zip(LOSS_SUMS, self.unread.tolist(), strict=True):
                self.sums[name] += value
            self.unread.zero_()

    def start_epoch(self) -> None:
        """Reset what is counted within an epoch."""
        self.position, self.seconds, self.sums = 0, 0.0, dict.fromkeys(LOSS_SUMS, 0.0)


@dataclass(frozen=True)
class EpochEnd:
    """What a callback receives after each epoch."""

    record: dict[str, Any]  # one line of metrics.jsonl
    state: State
    improved: bool  # the monitored metric is the best so far; always True if no metric is monitored


EpochCallback = Callable[[EpochEnd], bool | None]  # returns True to end the training
BatchCallback = Callable[[State, int], bool | None]  # (state, lists in an epoch); returns True to end the training
