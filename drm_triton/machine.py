"""What is installed here, what the system tells of itself, and its threads, by the standard library alone."""

import os
import platform
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("torch", "triton", "numba", "numpy", "scipy", "polars", "safetensors")


def versions() -> dict[str, str | None]:
    """Versions of the packages that results depend on; None for one that is not installed."""
    found: dict[str, str | None] = dict.fromkeys(PACKAGES)
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def processor() -> str:
    """Name of the processor, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def cpu_limit() -> float | None:
    """Cores that a container may use; None without a limit."""
    limits = []
    for folder in _cgroups():
        quota, period = (_text(folder / "cpu.max") or "max 1").split()  # version 2
        if quota != "max":
            limits.append(int(quota) / int(period))
    old = Path("/sys/fs/cgroup/cpu")
    if int(_text(old / "cpu.cfs_quota_us") or -1) > 0:
        limits.append(int(_text(old / "cpu.cfs_quota_us") or 0) / int(_text(old / "cpu.cfs_period_us") or 1))
    if hasattr(os, "sched_getaffinity") and len(os.sched_getaffinity(0)) < (os.cpu_count() or 1):
        limits.append(len(os.sched_getaffinity(0)))
    return min(limits, default=None)


def memory() -> dict[str, int | None]:
    """Bytes: in all, free for use, and the limit of a container if there is one."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    total, free = (1024 * int(fields[name].split()[0]) for name in ("MemTotal", "MemAvailable"))
    limit = None
    for folder in [*_cgroups(), Path("/sys/fs/cgroup/memory")]:
        for maximum, current in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            text = _text(folder / maximum)
            if text and text != "max" and int(text) < total:
                limit = min(limit or total, int(text))
                free = min(free, int(text) - int(_text(folder / current) or 0))
    return {"total": total, "free": free, "limit": limit}


def _cgroups() -> list[Path]:
    """Folders of this process's control group (version 2) and those above it."""
    root = Path("/sys/fs/cgroup")
    own = next((line[3:] for line in (_text(Path("/proc/self/cgroup")) or "").splitlines() if line[:3] == "0::"), "/")
    place = root / own.strip("/")
    return [folder for folder in (place, *place.parents) if folder.is_relative_to(root)]


def _text(file: Path) -> str | None:
    try:
        return file.read_text().strip()
    except OSError:
        return None


_changed_threads: dict[str, tuple[int, int]] = {}  # of a library: before a configuration changed them, and since


def use_threads(
    library: str, threads: int | None, get_threads: Callable[[], int], set_threads: Callable[[int], None]
) -> None:
    """Set a library's number of threads; None undoes what another configuration set, and else leaves it alone."""
    if threads == get_threads():
        return
    if library in _changed_threads and get_threads() == _changed_threads[library][1]:
        set_threads(_changed_threads.pop(library)[0])
    if threads is not None:
        before = get_threads()
        set_threads(threads)
        _changed_threads[library] = before, get_threads()
