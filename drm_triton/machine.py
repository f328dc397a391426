"""Versions of packages, facts about the machine, and thread counts. It imports only the standard library."""

import os
import platform
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("torch", "triton", "numba", "numpy", "scipy", "polars", "safetensors")


def versions() -> dict[str, str | None]:
    """Return the versions of the packages that results depend on, None for a package that is not installed."""
    found: dict[str, str | None] = dict.fromkeys(PACKAGES)
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def processor() -> str:
    """Return the name of the processor, as far as the system reports it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def cpu_limit() -> float | None:
    """Return the number of cores that this process may use, None without a limit."""
    limits = []
    for folder in _cgroups():
        quota, period = (_text(folder / "cpu.max") or "max 1").split()  # control groups version 2
        if quota != "max":
            limits.append(int(quota) / int(period))
    old = Path("/sys/fs/cgroup/cpu")
    if int(_text(old / "cpu.cfs_quota_us") or -1) > 0:
        limits.append(int(_text(old / "cpu.cfs_quota_us") or 0) / int(_text(old / "cpu.cfs_period_us") or 1))
    if hasattr(os, "sched_getaffinity") and len(os.sched_getaffinity(0)) < (os.cpu_count() or 1):
        limits.append(len(os.sched_getaffinity(0)))
    return min(limits, default=None)


def memory() -> dict[str, int | None]:
    """Return the bytes of memory: total, free, and the limit of a container if there is one; only Linux says so."""
    fields = dict(line.split(":") for line in (_text(Path("/proc/meminfo")) or "").splitlines())
    if not fields:
        return {"total": None, "free": None, "limit": None}
    total, free = (1024 * int(fields[name].split()[0]) for name in ("MemTotal", "MemAvailable"))
    limit = None
    for folder in [*_cgroups(), Path("/sys/fs/cgroup/memory")]:
        for maximum, current in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            text = _text(folder / maximum)
            if text and text != "max" and int(text) < total:
                limit = min(limit or total, int(text))
                free = min(free, int(text) - int(_text(folder / current) or 0) + _cached_files(folder))
    return {"total": total, "free": free, "limit": limit}


def _cgroups() -> list[Path]:
    """Return the folders of the control group (version 2) of this process and of its parents."""
    root = Path("/sys/fs/cgroup")
    group = next((line[3:] for line in (_text(Path("/proc/self/cgroup")) or "").splitlines() if line[:3] == "0::"), "/")
    folder_of_process = root / group.strip("/")
    return [folder for folder in (folder_of_process, *folder_of_process.parents) if folder.is_relative_to(root)]


def _cached_files(folder: Path) -> int:
    """Return the bytes of files that a control group holds in memory. They count as used, and give way if need be."""
    lines = [line.split() for line in (_text(folder / "memory.stat") or "").splitlines()]
    return sum(int(size) for name, size in lines if name in ("active_file", "inactive_file"))


def _text(file: Path) -> str | None:
    try:
        return file.read_text().strip()
    except OSError:
        return None


_changed_threads: dict[str, tuple[int, int]] = {}  # library -> threads before and after `use_threads` set them


def use_threads(
    library: str, threads: int | None, get_threads: Callable[[], int], set_threads: Callable[[int], None]
) -> None:
    """Set the number of threads of a library. None restores the number from before an earlier call, if any."""
    if threads == get_threads():
        return
    if library in _changed_threads and get_threads() == _changed_threads[library][1]:
        set_threads(_changed_threads.pop(library)[0])
    if threads is not None:
        before = get_threads()
        set_threads(threads)
        _changed_threads[library] = before, get_threads()
