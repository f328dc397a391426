"""The processes that train together, called ranks, and what they say to each other.

torchrun starts the ranks and restarts them when one dies; torch.distributed carries their messages, NCCL between GPUs
and Gloo between CPUs. Every message of a training goes through `World.exchange` or `World.gather`.
"""

from __future__ import annotations

import ctypes
import datetime
import json
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from drm_triton.errors import DrmError, InputError
from drm_triton.names import RANK_TIMEOUT

STORE_TIMEOUT = 5  # seconds that a rank which fails waits for torchrun's store, before it reports the error itself
ENVIRONMENT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")  # set by torchrun, besides MASTER_ADDR
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3  # of <malloc.h>

T = TypeVar("T")


class LostRankError(DrmError):
    """Another rank has ended, or does not answer.

    Attributes
    ----------
    ended : whether it has closed its connections
    """

    def __init__(self, message: str, ended: bool = False) -> None:
        super().__init__(message)
        self.ended = ended


class ToldError(DrmError):
    """Another rank has failed and reports it. This one ends with the exit code of the other, and says nothing."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True)
class Chosen:
    """Some rows of a table, to be copied from there into a message."""

    table: Tensor  # [R, ...]
    rows: Tensor  # integers [n]

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def dtype(self) -> torch.dtype:
        """Type of the numbers."""
        return self.table.dtype

    @property
    def shape(self) -> torch.Size:
        """Shape of the rows: [n, ...]."""
        return torch.Size([len(self.rows), *self.table.shape[1:]])

    def copied(self) -> Tensor:
        """Return the rows as a tensor of their own."""
        return self.table.index_select(0, self.rows)


class World:
    """The ranks of a training. A single process is a world of size 1, and exchanges nothing.

    Attributes
    ----------
    rank, size : this process, and the number of processes
    device : of the tensors that are exchanged
    sent : bytes that this rank has sent to others, since the start
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        store: dist.Store | None = None,
        local: int = 0,
        timeout: float = RANK_TIMEOUT,
    ) -> None:
        self.rank, self.size, self.store, self.local, self.timeout = rank, size, store, local, timeout
        self.device = torch.device("cpu")
        self.sent = 0

    @classmethod
    def joined(cls, timeout: float = RANK_TIMEOUT) -> World:
        """Join the world that torchrun has started, with the address and the numbers in its environment variables.

        Parameters
        ----------
        timeout : seconds after which a rank that does not answer is given up
        """
        try:
            rank, size, local, port = (int(os.environ[name]) for name in ENVIRONMENT)
            address = os.environ["MASTER_ADDR"]
        except (KeyError, ValueError) as error:
            raise InputError(f"torchrun did not start this process: environment variable {error}") from None
        patience = datetime.timedelta(seconds=timeout)
        # torchrun's agent keeps the store, so that it outlives the ranks. Each attempt has its own part of it.
        hosts = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        try:
            store = dist.TCPStore(address, port, None if hosts else size, is_master=hosts, timeout=patience)
            own = dist.PrefixStore(f"drm-triton/{attempt()}", store)
            # Before the options are read, nobody knows the device. NCCL starts with the first tensor on a GPU.
            backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
            dist.init_process_group(backend, store=own, rank=rank, world_size=size, timeout=patience)
        except (RuntimeError, ValueError) as error:
            raise LostRankError(
                f"rank {rank} of {size} cannot reach the others at {address}, port {port}, within {timeout:g} s "
                f"({str(error).splitlines()[0]})"
            ) from None
        return cls(rank, size, own, local, timeout)

    def use(self, device: torch.device) -> None:
        """Exchange tensors on a device from now on. A GPU is that of the local rank."""
        if device.type == "cuda":
            n_gpus = torch.cuda.device_count()
            if self.local >= n_gpus:
                raise InputError(
                    f"process {self.local + 1} of this machine has no GPU, there are {n_gpus}; start fewer"
                )
            device = torch.device("cuda", self.local)
            torch.cuda.set_device(device)
        else:
            keep_memory()
        self.device = device

    def leave(self) -> None:
        """Leave the world. The other ranks need not be alive."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def first_failure(self, exit_code: int) -> tuple[int, int]:
        """Say that this rank fails. Return the rank that said so first, which reports its error, and its exit code.

        When one rank fails, the others soon fail, too, because they miss it.
        """
        own = f"{self.rank} {exit_code}"
        answer = [own]  # unless the store says otherwise: it may be gone with its host, or with the network

        def ask() -> None:
            with suppress(RuntimeError):
                if self.store is not None:
                    answer.append(self.store.compare_set("failed", "", own).decode())

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(STORE_TIMEOUT)
        rank, code = answer[-1].split()
        return int(rank), int(code)

    @property
    def first(self) -> bool:
        """Whether this rank prints, and writes what is written once."""
        return self.rank == 0

    def exchange(
        self, parts: Sequence[Sequence[Tensor | Chosen]], sizes: Sequence[Sequence[int]] | None = None
    ) -> list[list[Tensor]]:
        """Send parts[q], some tensors, to each rank q; return what each rank sent to this one.

        Tensor number j of a part has the same type and the same shape but for its length on all ranks. The types of a
        part have one size.
        What this rank sends to itself stays where it is.

        Parameters
        ----------
        parts : for each rank, the tensors to send
        sizes : of what each rank q sends to this one, the length of each tensor, if they are known; see `lengths`
        """
        own = [one.copied() if isinstance(one, Chosen) else one for one in parts[self.rank]]
        if self.size == 1:
            return [own]
        if sizes is None:
            sizes = self.lengths([[len(one) for one in part] for part in parts])
        others = [q for q in range(self.size) if q != self.rank]
        kinds = [(one.dtype, one.shape[1:]) for one in own]

        def n_bytes(lengths: Sequence[int]) -> list[int]:
            return [n * shape.numel() * dtype.itemsize for n, (dtype, shape) in zip(lengths, kinds, strict=True)]

        leaving = [n_bytes([len(one) for one in part]) if q != self.rank else [] for q, part in enumerate(parts)]
        arriving = [n_bytes(lengths) if q != self.rank else [] for q, lengths in enumerate(sizes)]
        totals = [[sum(part) for part in counts] for counts in (arriving, leaving)]
        received, out = (torch.empty(sum(total), dtype=torch.uint8, device=self.device) for total in totals)
        spaces = iter(out.split([n for part in leaving for n in part]))
        for one in (one for q in others for one in parts[q]):
            space = next(spaces).view(one.dtype).reshape(one.shape)
            if isinstance(one, Chosen):
                torch.index_select(one.table, 0, one.rows, out=space)
            else:
                space.copy_(one)
        self.sent += len(out)
        self._call(dist.all_to_all_single, received, out, *totals)
        spaces = iter(received.split([n for part in arriving for n in part]))
        result = [own] * self.size
        for q in others:
            result[q] = [
                next(spaces).view(dtype).reshape(length, *shape)
                for length, (dtype, shape) in zip(sizes[q], kinds, strict=True)
            ]
        return result

    def lengths(self, leaving: Sequence[Sequence[int]]) -> list[list[int]]:
        """Tell each rank q the numbers leaving[q]; return those that each rank tells this one."""
        if self.size == 1:
            return [list(leaving[0])]
        out = torch.tensor([number for part in leaving for number in part], dtype=torch.int64, device=self.device)
        received = torch.empty_like(out)
        self.sent += 8 * len(out) * (self.size - 1) // self.size
        self._call(dist.all_to_all_single, received, out)
        return [list(part) for part in received.reshape(self.size, -1).tolist()]

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensor of every rank. They have one type and one shape."""
        if self.size == 1:
            return [tensor]
        gathered = [torch.empty_like(tensor) for _ in range(self.size)]
        self.sent += (self.size - 1) * tensor.numel() * tensor.element_size()
        self._call(dist.all_gather, gathered, tensor.contiguous())
        return gathered

    def gather_objects(self, value: Any) -> list[Any]:
        """Return the value of every rank: text, numbers, lists and dicts of them, as JSON."""
        if self.size == 1:
            return [value]
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(self.device)
        lengths = [int(length) for length in self.gather(torch.tensor([len(text)], device=self.device))]
        padded = torch.nn.functional.pad(text, (0, max(lengths) - len(text)))
        gathered = self.gather(padded)
        return [json.loads(bytes(one[:n].cpu().tolist())) for one, n in zip(gathered, lengths, strict=True)]

    def ordered_sum(self, own: Sequence[Tensor], zero: Tensor) -> Tensor:
        """Return the sum of the tensors of all ranks, one after the other. `zero` is like one of them."""
        most = max(int(n) for n in self.gather(torch.tensor([len(own)], device=self.device)))
        gathered = self.gather(torch.stack([*own, *[zero] * (most - len(own))]).double())
        return torch.stack(gathered).flatten(0, 1).cumsum(0)[-1].to(zero.dtype)

    def any(self, flag: bool) -> bool:
        """Return whether the flag of any rank is set."""
        return any(bool(one) for one in self.gather(torch.tensor([int(flag)], device=self.device)))

    def agree(self, what: dict[str, Any]) -> None:
        """Raise on all ranks if they differ in what they are about to do, by name."""
        first, *others = self.gather_objects(what)
        for rank, theirs in enumerate(others, 1):
            for name, value in first.items():
                if theirs.get(name) != value:
                    raise InputError(
                        f"rank {rank} has {name} {theirs.get(name)}, rank 0 has {value}; start all ranks with the same "
                        "command, data and versions"
                    )

    def _call(self, operation: Any, *arguments: Any) -> None:
        try:
            operation(*arguments)
        except RuntimeError as error:
            reason = str(error).splitlines()[0].rpartition("] ")[2].partition(". ")[0]  # without the place in Gloo
            ended = "closed by peer" in reason or "reset by peer" in reason or "Broken pipe" in reason
            what = "has ended" if ended else f"does not answer, waited {self.timeout:g} s"
            next_step = (
                "torchrun starts them again, and they go on from the last checkpoint"
                if attempt() < restarts()
                else "the run can be resumed from its last checkpoint"
            )
            raise LostRankError(
                f"rank {self.rank} of {self.size}: another rank {what} ({reason}); {next_step}", ended
            ) from None

    def together(self, action: Callable[[], T]) -> T:
        """Call a function on this rank; raise on all ranks if it raises on any. Return its result.

        The first rank on which it raises, raises its error. The others raise a `ToldError`.
        """
        result, error = None, None
        try:
            result = action()
        except Exception as caught:
            error = caught
        heard = self.gather_objects(None if error is None else [str(error), getattr(error, "exit_code", 1)])
        failed = [rank for rank, one in enumerate(heard) if one is not None]
        if not failed:
            return cast("T", result)
        text, code = heard[failed[0]]
        if error is None or failed[0] != self.rank:
            raise ToldError(f"rank {failed[0]}: {text}", code) from error
        if len({one and one[0] for one in heard}) > 1 and isinstance(error, (DrmError, OSError)):  # not on all alike
            raise (InputError if code == 2 else DrmError)(f"rank {self.rank}: {text}") from error
        raise error


def attempt() -> int:
    """Return how often torchrun has restarted the ranks."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def restarts() -> int:
    """Return how often torchrun may restart the ranks."""
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))


def keep_memory() -> None:
    """Tell the allocator to keep freed memory: a step allocates what the last one has freed.

    Otherwise the system hands out every page anew, which takes longer than to fill it. Other C libraries than glibc
    have no such setting.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return
    for option, value in ((M_MMAP_THRESHOLD, 1 << 30), (M_TRIM_THRESHOLD, (1 << 31) - 1), (M_TOP_PAD, 1 << 26)):
        mallopt(option, value)
