"""What training changes, and what callbacks receive."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from drm_triton.errors import InputError
from drm_triton.names import HEADLINE_METRICS, LOSSES

LOSS_SUMS = ("loss", *LOSSES)
TENSORS = {"user_factors": "U", "item_factors": "V", "user_state": "U_state", "item_state": "V_state"}


@dataclass(kw_only=True)
class Progress:
    """What all models count while they are trained. A checkpoint holds these numbers beside the tensors."""

    epoch: int = 0  # completed epochs
    first_epoch: int = 0  # the completed epochs that an update began with, see `warm_start`
    position: int = 0  # completed lists of the current epoch
    step: int = 0
    seconds: float = 0.0  # spent on the current epoch, without validation
    sums: dict[str, float] = field(default_factory=dict)  # losses, summed over the current epoch
    best: float | None = None  # best value of the monitored metric
    best_epoch: int | None = None
    stale: int = 0  # validations since the best one

    def tensors(self) -> dict[str, Tensor]:
        """Return everything that training changes besides the counters, by the names in a checkpoint."""
        raise NotImplementedError

    def counters(self) -> dict[str, Any]:
        """Return the counters of a checkpoint."""
        return {one.name: getattr(self, one.name) for one in fields(Progress)}

    def start_epoch(self) -> None:
        """Reset what is counted within an epoch."""
        self.position, self.seconds, self.sums = 0, 0.0, dict.fromkeys(self.sums, 0.0)


def checked_counters(counters: Any, where: Any) -> dict[str, Any]:
    """Return the counters of a checkpoint. Raise if one of them is missing or has another type."""
    whole, number = (int,), (int, float)
    kinds: dict[str, tuple[type, ...]] = {
        "epoch": whole, "position": whole, "step": whole, "stale": whole, "seconds": number, "sums": (dict,),
        "best": (*number, type(None)), "best_epoch": (*whole, type(None)), "first_epoch": whole,
    }  # fmt: skip
    given = {"first_epoch": 0, **counters} if isinstance(counters, dict) else {}  # version 0.2 had no updates
    for name, kind in kinds.items():
        value = given.get(name, "missing")
        negative = isinstance(value, int) and value < 0
        if not isinstance(value, kind) or isinstance(value, bool) or (kind == whole and negative):
            raise InputError(f"{where} cannot be resumed: its counter {name} is {value!r}; start a new run")
    if given.keys() != kinds.keys() or not all(type(value) in number for value in given["sums"].values()):
        raise InputError(f"{where} cannot be resumed: its counters are not those of a training; start a new run")
    return given


@dataclass
class State(Progress):
    """Everything that the training of DRM changes. It continues from a saved state as if it had never stopped."""

    U: Tensor  # [M, d] user factors, bfloat16 on a GPU with `precision` bfloat16
    V: Tensor  # [N, d] item factors
    U_state: Tensor  # Adagrad's sums of squared gradients, shaped like U and V
    V_state: Tensor
    sums: dict[str, float] = field(default_factory=lambda: dict.fromkeys(LOSS_SUMS, 0.0), kw_only=True)
    unread: Tensor | None = None  # float64 [LOSS_SUMS]: what is still to be added to the sums, on a GPU

    @classmethod
    def of_checkpoint(cls, tensors: dict[str, Tensor], counters: dict[str, Any]) -> "State":
        """Return the state that a checkpoint holds."""
        return cls(*(tensors[name] for name in TENSORS), **counters)

    @staticmethod
    def layout(n_users: int, n_items: int, d: int) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint without content."""
        tables = [torch.empty(n, d, device="meta") for n in (n_users, n_items)]
        return dict(zip(TENSORS, tables * 2, strict=True))

    def tensors(self) -> dict[str, Tensor]:
        """Return the tables and Adagrad's sums."""
        return {name: getattr(self, place) for name, place in TENSORS.items()}

    def to(self, device: torch.device, tables: torch.dtype | None = None) -> "State":
        """Move the tensors to a device, and the factors to the type `tables`."""
        self.read_losses()
        self.unread = None
        for name in TENSORS.values():
            setattr(self, name, getattr(self, name).to(device, tables if name in ("U", "V") else None))
        return self

    def read_losses(self) -> None:
        """Add the losses that are still on the GPU to the sums. The host waits for the GPU."""
        if self.unread is not None:
            for name, value in zip(LOSS_SUMS, self.unread.tolist(), strict=True):
                self.sums[name] += value
            self.unread.zero_()


@dataclass(frozen=True, repr=False)
class EpochEnd:
    """What a callback receives after each epoch.

    Examples
    --------
    >>> EpochEnd({"epoch": 3, "loss": 1.25, "drm": 0.25, "seconds": 2.0, "valid/ndcg@10": 0.12345}, Progress(), True)
    EpochEnd(epoch=3, loss=1.25, valid/ndcg@10=0.1235, improved=True)
    """

    record: dict[str, Any]  # one line of metrics.jsonl
    state: Progress
    improved: bool  # the monitored metric is the best so far; always True if no metric is monitored

    def __repr__(self) -> str:
        shown = [name for name in ("epoch", "loss", *HEADLINE_METRICS) if name in self.record]
        values = "".join(f"{name}={self.record[name]:.4g}, " for name in shown)
        return f"EpochEnd({values}improved={self.improved})"


EpochCallback = Callable[[EpochEnd], bool | None]  # returns True to end the training
BatchCallback = Callable[[Progress, int], bool | None]  # (state, lists in an epoch); returns True to end the training
