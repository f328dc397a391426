"""Check the installation: versions, machine, which backend runs, and whether its results are correct.

Everything that imports torch, Numba or Triton runs in a child process. If an import kills the interpreter, for example
because a wheel was built for another processor, the report contains this as one line.
"""

import dataclasses
import importlib
import importlib.util
import itertools
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

    from drm_triton.config import TrainConfig
    from drm_triton.kernels.protocol import Backend

EXTRAS = {
    "faiss": ("faiss",),
    "hnswlib": ("hnswlib",),
    "mlflow": ("mlflow",),
    "serve": ("fastapi", "uvicorn"),
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
}
TIMEOUT = 300  # seconds for one child process, which may have to compile the CPU kernels
FINE = ("no error", "not installed")  # what `deep.sanitize` says of a tool that found nothing
TOLERANCE = 1e-4  # for float32 factors and scores of magnitude 1 against float64


def examine(deep: bool = False) -> dict[str, Any]:
    """Return the whole report. `ok` is True if the backend that runs by default passes its self-test.

    With `deep`, the report contains the deep check of the GPU backend if it can run, and of the default otherwise. `ok`
    is False if that check fails.
    """
    found = _run_child("inspect", "")
    chosen, why_not = found.get("chosen"), found.get("why_not", {})
    backends = {}
    for name, reason in why_not.items():
        backends[name] = {"status": "not usable", "reason": reason} if reason else _run_child("self_test", name)
        if name == "triton" and reason and reason == found.get("no_gpu"):
            backends[name]["reason"] += "; with TRITON_INTERPRET=1 the self-test runs in Triton's interpreter"
    report = {
        "drm_triton": {"version": __version__, "path": str(Path(__file__).parent)},
        "python": {"version": platform.python_version(), "path": sys.executable},
        "packages": {name: {"version": v, "error": _import_error(name, found)} for name, v in versions().items()},
        "machine": {
            "system": platform.platform(),
            "processor": _attempt(processor),
            "cores": os.cpu_count(),
            "cpu_limit": _attempt(cpu_limit),
            "threads": found.get("threads"),
            "memory": _attempt(memory),
        },
        "data": _attempt(_data),
        "gpu": {"devices": found.get("gpus", []), "driver": _attempt(_driver), "reason": found.get("no_gpu")},
        "backend": {
            "chosen": chosen,
            "by": "DRM_BACKEND" if os.environ.get("DRM_BACKEND") else "auto",
            "reason": found.get("no_backend") or found.get("reason"),
        },
        "backends": backends,
        "extras": {extra: all(importlib.util.find_spec(name) for name in names) for extra, names in EXTRAS.items()},
        "ok": backends.get(chosen, {}).get("status") == "ok",
    }
    if deep:
        # Triton's interpreter is never the default, but who switches it on wants it to be tested.
        name = "triton" if why_not.get("triton", "absent") is None else chosen
        report["deep"] = _examine_deeply(name) if name else {"problems": ["no backend can run"]}
        report["ok"] = report["ok"] and not report["deep"]["problems"]
    return report


def _examine_deeply(name: str) -> dict[str, Any]:
    """Return the findings of `deep` about a backend. What it found before a crash is part of them."""
    found = _run_child("deep", name, timeout=None)
    rows = [row for row in found.values() if isinstance(row, dict)]
    checks, times = ([row for row in rows if key in row] for key in ("difference", "ns_per_list"))
    problems = [row["problem"] for row in checks if row["problem"]]
    if found.get("status") == "failed":
        last = f" after {checks[-1]['operation']} ({checks[-1]['case']})" if checks else ""
        problems.append(f"the check ended{last}: {found['reason']}")
    sanitizer = found.get("sanitizer", {})
    problems += [f"compute-sanitizer, {tool}: {text}" for tool, text in sanitizer.items() if text not in FINE]
    return {
        "backend": name,
        "place": found.get("place"),
        "problems": problems,
        "checks": checks,
        "largest_difference": {
            dtype: max((row["difference"] for row in checks if row["case"].endswith(dtype)), default=None)
            for dtype in ("float32", "float64", "bfloat16")
        },
        "machine": next((row for row in rows if "bandwidth_gb_s" in row), None),
        "times": times,
        "sanitizer": sanitizer,
    }


# -- in a child process ------------------------------------------------------------------------------------------------


def _run_child(task: str, argument: str, timeout: float | None = TIMEOUT) -> dict[str, Any]:
    """Run `_child` in a new process and return its findings.

    If the process fails, the result contains the findings up to then, a status and the reason.
    """
    command = _command(task, argument)
    found: dict[str, Any] = {}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL)
        output, reason = done.stdout, _exit_reason(done.returncode, done.stderr)
    except subprocess.TimeoutExpired as error:
        output, reason = (error.stdout or b"").decode(errors="replace"), f"no result after {timeout} s"
    except OSError as error:
        output, reason = "", f"cannot start a process: {error}"
    for line in output.splitlines():
        if line.startswith(PREFIX):
            found |= json.loads(line.removeprefix(PREFIX))
    return found if reason is None else found | {"status": "failed", "reason": reason}


def _command(task: str, argument: str) -> list[str]:
    """Return the command that runs `_child` in a new process."""
    return [sys.executable, "-c", CHILD, json.dumps(sys.path), task, argument]


# The child gets the search path of this process, so it finds the same packages in any working directory.
CHILD = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from drm_triton import doctor
doctor._child(*sys.argv[2:])
"""
PREFIX = "drm-triton doctor: "  # of the lines with findings; libraries may print other lines


def _child(task: str, argument: str) -> None:
    """Run a task in the child process. Print each finding at once, so that a crash does not lose it."""

    def emit(**findings: Any) -> None:
        print(PREFIX + json.dumps(findings), flush=True)

    if task == "inspect":
        _inspect(emit)
    elif task == "deep":
        _deep(argument, emit)
    else:
        emit(**self_test(argument))


def _exit_reason(code: int, errors: str) -> str | None:
    """Return why a process failed, None if it succeeded."""
    if code == 0:
        return None
    if code < 0:
        return f"the process was killed by {signal.Signals(-code).name}"
    return (errors.strip().splitlines() or [f"exit code {code}"])[-1]


def _inspect(emit: Callable[..., None]) -> None:
    """Import the packages, choose a backend, and list GPUs and thread counts."""
    for name in PACKAGES:
        emit(importing=name)
        try:
            importlib.import_module(name)
        except Exception as error:  # a broken package can raise anything
            emit(**{f"error in {name}": f"{type(error).__name__}: {error}"})
    emit(importing=None)
    from drm_triton import kernels

    emit(why_not={name: _attempt(kernels.why_not, name, failure=True) for name in kernels.BACKENDS})
    emit(no_gpu=_attempt(kernels.why_no_gpu, failure=True))
    try:
        emit(chosen=kernels.get_backend().name)
    except Exception as error:
        emit(no_backend=str(error))
    emit(gpus=_attempt(_gpus) or [])
    import torch

    from drm_triton.kernels.cpu.runtime.threads import n_threads

    emit(threads={"torch": torch.get_num_threads(), "numba": n_threads()})


def _gpus() -> list[dict[str, Any]]:
    import torch

    found = []
    for number in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        device = torch.cuda.get_device_properties(number)
        found.append(
            {"name": device.name, "capability": f"{device.major}.{device.minor}", "memory": device.total_memory}
        )
    return found


def _deep(name: str, emit: Callable[..., None]) -> None:
    """Run the deep check of a backend. Findings have numbers as names."""
    from drm_triton import deep
    from drm_triton.exercises import SMALL
    from drm_triton.kernels import get_backend

    backend, (device, place) = get_backend(name), _place(name)
    emit(place=place)
    interpreted = name == "triton" and device.type == "cpu"
    rows = deep.check(backend, device, SMALL if interpreted else deep.CASES)
    if not interpreted:
        rows = itertools.chain(rows, deep.measure(backend, device, deep.TIMED))
    for number, row in enumerate(rows):
        emit(**{str(number): row})
    if device.type == "cuda":
        emit(sanitizer=deep.sanitize(_command("self_test", name)))


def _place(name: str) -> "tuple[torch.device, str]":
    """Return the device on which a backend runs here, and its name for a reader."""
    import torch

    if name == "triton" and torch.cuda.is_available():
        return torch.device("cuda"), f"cuda, {torch.cuda.get_device_name()}"
    return torch.device("cpu"), "Triton's interpreter" if name == "triton" else "cpu"


def self_test(name: str) -> dict[str, Any]:
    """Train and rank on toy data with a backend in float32, and compare with the reference in float64.

    Then run each operation (`exercises`), on a GPU with sizes for which the kernels have several warps.

    Returns
    -------
    dict
        status (ok or failed), reason (if it failed), difference (the largest), seconds (with compilation) and place
        (the device).
    """
    import torch

    from drm_triton.config import TrainConfig
    from drm_triton.exercises import SEVERAL_WARPS, SMALL, exercise
    from drm_triton.kernels import get_backend, reference

    began = time.perf_counter()
    backend, (device, place) = get_backend(name), _place(name)
    difference, same_lists = 0.0, True
    default = TrainConfig(factors=FACTORS, batch_size=BATCH)
    sampled = dataclasses.replace(default, objective="hinge+drm", eta=ETA, share=SHARE)
    for config in (default, sampled, dataclasses.replace(sampled, score="l2")):
        lists, factors, items, scores = _toy(backend, device, torch.float32, config)
        true_lists, true_factors, _, true_scores = _toy(reference, torch.device("cpu"), torch.float64, config)
        same_lists &= torch.equal(lists, true_lists)
        # Items with nearly equal scores may be in either order, so compare the reference scores of the ranked items.
        U, V = true_factors[:N_USERS], true_factors[N_USERS:]
        table = -(torch.cdist(U, V) ** 2) if config.score_in_force == "l2" else U @ V.T
        ranked = table.gather(1, items.long())
        for ours, true in ((factors, true_factors), (scores, true_scores), (ranked, true_scores)):
            difference = max(difference, (ours.double() - true).abs().max().nan_to_num(float("inf")).item())
    findings = list(exercise(backend, device, SEVERAL_WARPS if device.type == "cuda" else SMALL))
    difference = max([difference, *(finding.difference for finding in findings)])
    found = {"difference": difference, "seconds": time.perf_counter() - began, "place": place}
    problems = [finding.problem for finding in findings if finding.problem]
    if not same_lists:
        problems.insert(0, "its lists differ from those of the reference")
    if difference > TOLERANCE:
        problems.append(f"its results differ from the reference by {difference:.1e}")
    return {"status": "failed", "reason": problems[0], **found} if problems else {"status": "ok", **found}


# Small, because Triton's interpreter is slow.
N_USERS, N_ITEMS, FACTORS, ETA, SHARE, BATCH, K = 20, 40, 12, 17, 4, 8, 5


def _toy(
    backend: "Backend", device: "torch.device", dtype: "torch.dtype", config: "TrainConfig"
) -> "tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]":
    """Take one step on toy data; return the sampled lists, factors, top items and their scores, all on the CPU."""
    import numpy as np
    import torch
    from torch.nn.functional import normalize

    from drm_triton.data.csr import CSR
    from drm_triton.kernels.protocol import ListPlan
    from drm_triton.training.state import State
    from drm_triton.training.step import catalogue_step, objective_of, train_step, training_plan

    random = np.random.default_rng(0)
    users, items = np.nonzero(random.random((N_USERS, N_ITEMS)) < 0.2)
    interactions = CSR.from_pairs(users, items, (N_USERS, N_ITEMS))
    start = random.normal(scale=1 / FACTORS, size=(N_USERS + N_ITEMS, FACTORS)).astype(np.float32)
    factors = torch.from_numpy(start).to(device, dtype)
    U, V = (normalize(factors) if config.score_in_force == "cosine" else factors).split([N_USERS, N_ITEMS])
    # Adagrad's sums start above 0. From 0 the first step is the sign of the gradient, which amplifies rounding.
    state = State(U, V, torch.full_like(U, 0.1), torch.full_like(V, 0.1))
    plan, objective, lists = training_plan(config, interactions, device), objective_of(config, N_ITEMS), torch.empty(0)
    if isinstance(plan, ListPlan):
        batch = backend.sample_lists(plan, 0, 0, BATCH)
        lists = torch.cat([batch.users[:, None], batch.items], 1).cpu()
        train_step(state, batch, config, objective, backend, config.lr)
    else:  # the lists are the whole catalogue: the backend draws nothing
        catalogue_step(state, plan.batch(0, 0, BATCH), config, objective, backend, config.lr)
    packed = backend.pack_items(state.V, config.score_in_force)
    top, scores = backend.top_k(state.U, packed, K, interactions.tensors(device))
    return lists, torch.cat([state.U, state.V]).cpu(), top.cpu(), scores.cpu()


# -- in this process ---------------------------------------------------------------------------------------------------


def _attempt(function: Callable[..., Any], *arguments: Any, failure: bool = False) -> Any:
    """Call a function; return None if it raises, or with `failure` the reason."""
    try:
        return function(*arguments)
    except Exception as error:  # an incomplete report is better than none
        return f"{type(error).__name__}: {error}" if failure else None


def _import_error(name: str, found: dict[str, Any]) -> str | None:
    """Return why an installed package cannot be imported, None if it can."""
    if found.get("importing") == name:  # the last finding of the child
        return f"importing it ends the program: {found.get('reason')}"
    error: str | None = found.get(f"error in {name}")
    return None if error == f"ModuleNotFoundError: No module named '{name}'" else error


def _data() -> dict[str, Any]:
    """Return the default data directory and its free space in bytes."""
    from drm_triton.data import data_dir

    directory = data_dir().absolute()
    existing = next(folder for folder in (directory, *directory.parents) if folder.exists())
    by = "DRM_DATA" if os.environ.get("DRM_DATA") else "the working directory"
    return {
        "directory": str(directory),
        "by": by,
        "exists": directory.exists(),
        "free": shutil.disk_usage(existing).free,
    }


def _driver() -> str | None:
    """Return what nvidia-smi or rocm-smi reports about driver and device, None if neither is installed."""
    for tool, options in (
        ("nvidia-smi", ["--query-gpu=name,driver_version", "--format=csv,noheader"]),
        ("rocm-smi", ["--showdriverversion"]),
    ):
        path = shutil.which(tool)
        if path:
            done = subprocess.run([path, *options], capture_output=True, text=True, timeout=20)
            return f"{tool}: {' '.join((done.stdout or done.stderr).split())}"
    return None
