"""What is installed here, which backend will run, and whether it computes what it should.

Everything that imports torch, Numba or Triton runs in a child process: an installation so broken that importing it
kills the interpreter (a wheel for another processor, say) is then a line of the report.
"""

import importlib
import importlib.util
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drm_triton._version import __version__
from drm_triton.machine import PACKAGES, cpu_limit, memory, processor, versions

if TYPE_CHECKING:
    import torch

    from drm_triton.names import Score

EXTRAS = {"faiss": ("faiss",), "hnswlib": ("hnswlib",), "serve": ("fastapi", "uvicorn")}
PATIENCE = 300  # seconds for one child: the CPU kernels compile at first use
TOLERANCE = 1e-4  # of float32 factors and scores against float64, all of size about 1


def examine() -> dict[str, Any]:
    """Return the whole report; `ok` is whether the backend that will run passes its self-test."""
    survey = _ask("survey", "")
    chosen, why_not = survey.get("chosen"), survey.get("why_not", {})
    backends = {}
    for name, reason in why_not.items():
        backends[name] = {"status": "not usable", "reason": reason} if reason else _ask("self_test", name)
        if name == "triton" and reason and reason == survey.get("no_gpu"):
            backends[name]["reason"] += "; with TRITON_INTERPRET=1 its self-test runs in Triton's interpreter"
    return {
        "drm_triton": {"version": __version__, "path": str(Path(__file__).parent)},
        "python": {"version": platform.python_version(), "path": sys.executable},
        "packages": {name: {"version": v, "error": _broken(name, survey)} for name, v in versions().items()},
        "machine": {
            "system": platform.platform(),
            "processor": _attempt(processor),
            "cores": os.cpu_count(),
            "cpu_limit": _attempt(cpu_limit),
            "threads": survey.get("threads"),
            "memory": _attempt(memory),
        },
        "data": _attempt(_data),
        "gpu": {"devices": survey.get("gpus", []), "driver": _attempt(_driver), "reason": survey.get("no_gpu")},
        "backend": {
            "chosen": chosen,
            "by": "DRM_BACKEND" if os.environ.get("DRM_BACKEND") else "auto",
            "reason": survey.get("no_backend") or survey.get("reason"),
        },
        "backends": backends,
        "extras": {extra: all(importlib.util.find_spec(name) for name in names) for extra, names in EXTRAS.items()},
        "ok": backends.get(chosen, {}).get("status") == "ok",
    }


# -- asked of a child process ------------------------------------------------------------------------------------------


def _ask(question: str, argument: str) -> dict[str, Any]:
    """Answer of `_answer` in a child; where that fails, what it had found by then, a status and the reason."""
    command = [sys.executable, "-c", CHILD, json.dumps(sys.path), question, argument]
    found: dict[str, Any] = {}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, stdin=subprocess.DEVNULL)
        output, reason = done.stdout, _end(done.returncode, done.stderr)
    except subprocess.TimeoutExpired as error:
        output, reason = (error.stdout or b"").decode(errors="replace"), f"it did not end within {PATIENCE} s"
    except OSError as error:
        output, reason = "", f"no process could be started: {error}"
    for line in output.splitlines():
        if line.startswith(ANSWER):
            found |= json.loads(line.removeprefix(ANSWER))
    return found if reason is None else found | {"status": "failed", "reason": reason}


# With this process's own search path, so that the child finds the same packages whatever the working directory.
CHILD = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from drm_triton import doctor
doctor._answer(*sys.argv[2:])
"""
ANSWER = "drm-triton doctor: "  # libraries may print lines of their own


def _answer(question: str, argument: str) -> None:
    """In the child: print findings as they are made, so that a crash does not take them along."""

    def tell(**found: Any) -> None:
        print(ANSWER + json.dumps(found), flush=True)

    if question == "survey":
        _survey(tell)
    else:
        tell(**self_test(argument))


def _end(code: int, errors: str) -> str | None:
    if code == 0:
        return None
    if code < 0:
        return f"the process was killed by {signal.Signals(-code).name}"
    return (errors.strip().splitlines() or [f"exit code {code}"])[-1]


def _survey(tell: Callable[..., None]) -> None:
    for name in PACKAGES:
        tell(importing=name)
        try:
            importlib.import_module(name)
        except Exception as error:  # a broken package may raise anything
            tell(**{f"error in {name}": f"{type(error).__name__}: {error}"})
    tell(importing=None)
    from drm_triton import kernels

    tell(why_not={name: _attempt(kernels.why_not, name, failure=True) for name in kernels.BACKENDS})
    tell(no_gpu=_attempt(kernels.why_no_gpu, failure=True))
    try:
        tell(chosen=kernels.get_backend().name)
    except Exception as error:
        tell(no_backend=str(error))
    tell(gpus=_attempt(_gpus) or [])
    import torch

    from drm_triton.kernels.cpu.runtime.threads import n_threads

    tell(threads={"torch": torch.get_num_threads(), "numba": n_threads()})


def _gpus() -> list[dict[str, Any]]:
    import torch

    found = []
    for number in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        device = torch.cuda.get_device_properties(number)
        found.append(
            {"name": device.name, "capability": f"{device.major}.{device.minor}", "memory": device.total_memory}
        )
    return found


def self_test(name: str) -> dict[str, Any]:
    """Train a little and rank on a backend, in float32, and compare with the reference in float64.

    Returns
    -------
    dict with status (ok or failed), difference (the largest found) and seconds, compilation included
    """
    import torch

    from drm_triton.kernels import get_backend, reference

    began = time.perf_counter()
    ops = get_backend(name)
    device = torch.device("cuda" if name == "triton" and torch.cuda.is_available() else "cpu")
    difference, same_lists = 0.0, True
    for score in ("dot", "l2"):
        lists, factors, items, scores = _toy(ops, device, torch.float32, score)
        true_lists, true_factors, _, true_scores = _toy(reference, torch.device("cpu"), torch.float64, score)
        same_lists &= torch.equal(lists, true_lists)
        # By the scores that the reference gives to the items found: near ties may come in either order.
        U, V = true_factors[:N_USERS], true_factors[N_USERS:]
        table = U @ V.T if score == "dot" else -(torch.cdist(U, V) ** 2)
        ranked = table.gather(1, items.long())
        for ours, true in ((factors, true_factors), (scores, true_scores), (ranked, true_scores)):
            difference = max(difference, (ours.double() - true).abs().max().nan_to_num(float("inf")).item())
    place = "Triton's interpreter" if name == "triton" and device.type == "cpu" else device.type
    found = {"difference": difference, "seconds": time.perf_counter() - began, "place": place}
    if not same_lists:
        return {"status": "failed", "reason": "it samples other lists than the reference", **found}
    if difference > TOLERANCE:
        return {"status": "failed", "reason": f"it differs from the reference by {difference:.1e}", **found}
    return {"status": "ok", **found}


N_USERS, N_ITEMS, FACTORS, ETA, BATCH, STEPS, K = 20, 40, 12, 17, 10, 2, 5  # small, for Triton's interpreter


def _toy(
    ops: Any, device: "torch.device", dtype: "torch.dtype", score: "Score"
) -> "tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]":
    """Lists sampled, all factors after a few steps, and the top items with their scores, on the CPU."""
    import numpy as np
    import torch

    from drm_triton.config import TrainConfig
    from drm_triton.data.csr import CSR
    from drm_triton.training.state import State
    from drm_triton.training.step import list_plan, objective_of, train_step

    random = np.random.default_rng(0)
    users, items = np.nonzero(random.random((N_USERS, N_ITEMS)) < 0.2)
    interactions = CSR.from_pairs(users, items, (N_USERS, N_ITEMS))
    start = random.normal(scale=1 / FACTORS, size=(N_USERS + N_ITEMS, FACTORS)).astype(np.float32)
    U, V = (torch.from_numpy(part).to(device, dtype) for part in (start[:N_USERS], start[N_USERS:]))
    # Adagrad's sums start above 0: from 0 its first step is the sign of the gradient, and turns rounding into steps.
    state = State(U, V, torch.full_like(U, 0.1), torch.full_like(V, 0.1))
    config = TrainConfig(factors=FACTORS, score=score, eta=ETA)
    plan = list_plan(config, interactions, device)
    batches = []
    for step in range(STEPS):
        batch = ops.sample_lists(plan, 0, step * BATCH, (step + 1) * BATCH)
        train_step(state, batch, config, objective_of(config), ops, config.lr)
        batches.append(torch.cat([batch.users[:, None], batch.items], 1))
    top, scores = ops.top_k(state.U, ops.pack_items(state.V, score), K, interactions.tensors(device))
    return torch.cat(batches).cpu(), torch.cat([state.U, state.V]).cpu(), top.cpu(), scores.cpu()


# -- found out here ----------------------------------------------------------------------------------------------------


def _attempt(question: Callable[..., Any], *arguments: Any, failure: bool = False) -> Any:
    """Answer of a question; None where it cannot be answered, or with `failure` the reason."""
    try:
        return question(*arguments)
    except Exception as error:  # a report with a gap is better than none
        return f"{type(error).__name__}: {error}" if failure else None


def _broken(name: str, survey: dict[str, Any]) -> str | None:
    """Say what is wrong with a package that is there."""
    if survey.get("importing") == name:  # the last thing the child said
        return f"importing it ends the program: {survey.get('reason')}"
    error: str | None = survey.get(f"error in {name}")
    return None if error == f"ModuleNotFoundError: No module named '{name}'" else error


def _data() -> dict[str, Any]:
    """Return where data goes by default, and the bytes free there."""
    from drm_triton.data import data_dir

    directory = data_dir().absolute()
    place = next(folder for folder in (directory, *directory.parents) if folder.exists())
    by = "DRM_DATA" if os.environ.get("DRM_DATA") else "the working directory"
    return {"directory": str(directory), "by": by, "exists": directory.exists(), "free": shutil.disk_usage(place).free}


def _driver() -> str | None:
    """What the GPU's own tool says of driver and device; None without such a tool."""
    for tool, options in (
        ("nvidia-smi", ["--query-gpu=name,driver_version", "--format=csv,noheader"]),
        ("rocm-smi", ["--showdriverversion"]),
    ):
        path = shutil.which(tool)
        if path:
            done = subprocess.run([path, *options], capture_output=True, text=True, timeout=20)
            return f"{tool}: {' '.join((done.stdout or done.stderr).split())}"
    return None
