"""The deep check of `drm-triton doctor`: values, repeatability and speed of a backend over many sizes.

It is meant for the first run on a GPU, but runs on any backend. Values are compared with the reference in float64, and
every operation runs twice and has to give the same bits. Then it measures the latency of a launch, the bandwidth of the
memory, and the time of the operations beside their *floor*: the time to move every input once and every output once at
that bandwidth, as if the caches held everything else.
"""

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from drm_triton.bench.record import time_in_turns
from drm_triton.exercises import OPERATIONS, Case, Inputs, Outputs, distinct, exercise
from drm_triton.kernels.protocol import Backend

CASES = [
    Case(n, d, score, share, dtype, B=9 if n < 1000 else 5)
    for n in (18, 46, 80, 140, 1000)
    for d in (12, 64, 128, 256)
    for score in ("dot", "l2", "cosine")
    for share in (1, 4)
    for dtype in (torch.float32, torch.float64, torch.bfloat16)
]
TIMED_SIZES = [(18, 64), (46, 64), (80, 64), (140, 64), (1000, 64), (46, 12), (46, 128), (46, 256)]
TIMED = [Case(n, d, "dot", 32, B=4096 if n < 1000 else 512, n_users=4096, n_items=8192) for n, d in TIMED_SIZES]
TIMED_OPERATIONS = ("sample_lists", "list_gradients", "update_rows", "top_k")
COPIED = 1 << 28  # bytes of the copy that measures the bandwidth
CALLS = 200  # launches that measure the latency
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")  # of compute-sanitizer


def check(backend: Backend, device: torch.device, cases: list[Case]) -> Iterator[dict[str, Any]]:
    """Yield one row of findings for each operation and case."""
    for finding in exercise(backend, device, cases):
        yield {
            "operation": finding.operation,
            "case": str(finding.case),
            "difference": finding.difference,
            "repeatable": finding.repeatable,
            "problem": finding.problem,
        }


def measure(backend: Backend, device: torch.device, cases: list[Case]) -> Iterator[dict[str, Any]]:
    """Yield latency and bandwidth, then one row of times for each operation and case."""
    x = Inputs.of(Case(18, 12)).to(device, torch.float32)
    source = torch.ones(COPIED // 4, device=device)
    target = torch.empty_like(source)
    seconds = time_in_turns({"copy": lambda: target.copy_(source)}, seconds=1, least=1)["copy"]
    bandwidth = 2 * COPIED / seconds
    yield {
        "launch_us": latency(device, lambda: backend.soft_topk_forward(x.s, x.w, 1.0, x.mask)),
        "torch_launch_us": latency(device, lambda: x.s.add_(0)),
        "bandwidth_gb_s": bandwidth / 1e9,
    }
    for name, case in distinct(backend, cases):
        if name not in TIMED_OPERATIONS:
            continue
        inputs = Inputs.of(case).to(device, case.dtype)
        bytes_moved = least_bytes(name, inputs, OPERATIONS[name](backend, inputs))
        runner = partial(OPERATIONS[name], backend, inputs)
        seconds = time_in_turns({name: runner}, seconds=0.5, least=1)[name]
        count = case.n_users if name == "top_k" else case.B
        floor = bytes_moved / bandwidth
        yield {
            "operation": name,
            "case": str(case),
            "lists": count,
            "ns_per_list": 1e9 * seconds / count,
            "floor_ns": 1e9 * floor / count,
            "times_floor": seconds / floor,
        }


def latency(device: torch.device, call: Callable[[], object]) -> float:
    """Return the microseconds that the host takes for a call, without waiting for its result."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    call()  # compiles
    wait()
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    taken = time.perf_counter() - start
    wait()
    return 1e6 * taken / CALLS


def least_bytes(operation: str, x: Inputs, outputs: Outputs) -> int:
    """Return the bytes that an operation has to move: each input and each row of a table once, each output once."""

    def size(*tensors: Tensor) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    made, row = size(*outputs.values()), x.U[0].numel() * x.U.element_size()
    items, users = (len(torch.unique(ids)) for ids in (x.batch.items, x.batch.users))
    if operation == "sample_lists":
        return made
    if operation == "top_k":
        return size(x.U, x.V, x.plan.indptr, x.plan.indices) + made
    if operation == "update_rows":  # rows of table and state are read and written; items get the rows of users
        terms = size(x.batch.items, x.batch.users, x.g, x.user_grad) + users * row
        return terms + 4 * row * (items + users)
    return size(x.batch.items, x.batch.users) + row * (items + users) + made


def sanitize(command: list[str]) -> dict[str, str]:
    """Run a command under the tools of NVIDIA's compute-sanitizer, if it is installed; return what each tool found."""
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        return {"compute-sanitizer": "not installed"}
    found = {}
    for tool in TOOLS:
        done = subprocess.run(
            [sanitizer, "--tool", tool, "--error-exitcode", "99", *command],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},  # so that it sees the bounds of each tensor
        )
        errors = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("=========")]
        found[tool] = "no error" if done.returncode == 0 else "\n".join(errors[-20:]) or f"exit code {done.returncode}"
    return found
