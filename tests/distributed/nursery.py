"""Ranks as processes that are forked from one that has imported the library: real ones, without the time to start them.

`python -m tests.distributed.nursery` reads jobs, a JSON object on each line, and answers each with its result. A job
has

    ranks        the arguments of `drm-triton` for each rank
    alone        whether it is a command in a single process, without torchrun's variables
    variables    environment variables, besides those that torchrun sets
    fault        name, rank and step: what happens on this rank before this step, see FAULTS
    interfaces   for each rank, a network namespace and the name of its interface there
    address      of rank 0
    private      a directory at which rank 1 has a file system of its own

The result has `codes`, the exit codes of the ranks, and `said`, what they wrote. Nobody ends a rank because another has
failed. One that has stopped is killed when the others have ended.
"""

import ctypes
import io
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

Job = dict[str, Any]


class Nursery:
    """The process that forks. A context manager."""

    def __init__(self, environment: dict[str, str], folder: Path) -> None:
        words = [sys.executable, "-m", "tests.distributed.nursery"]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(words, stdin=pipe, stdout=pipe, env=environment, cwd=folder, text=True)

    def __enter__(self) -> "Nursery":
        return self

    def __exit__(self, *error: object) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()

    def together(self, size: int, *arguments: object, **job: Any) -> tuple[list[int], list[str]]:
        """Run a command on some ranks; return the exit codes and what each wrote."""
        return self.run(ranks=[list(map(str, arguments))] * size, **job)

    def alone(self, *arguments: object, **job: Any) -> tuple[int, str]:
        """Run a command in a single process."""
        (code,), (said,) = self.run(ranks=[list(map(str, arguments))], alone=True, **job)
        return code, said

    def run(self, **job: Any) -> tuple[list[int], list[str]]:
        """Do a job."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps(job), file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        assert answer, "the nursery has ended"
        result = json.loads(answer)
        return result["codes"], result["said"]


# -- what can happen to a rank -----------------------------------------------------------------------------------------


def spoil_sums(engine: Any) -> None:
    """Make Adagrad's sums overflow on this rank only, as a gradient that is too large does."""
    engine.state.U_state[0] = float("inf")


def run_out_of_memory(engine: Any) -> None:
    """Fail as an allocation does."""
    raise MemoryError


def fill_disk(engine: Any) -> None:
    """Let no file of this rank become as large as a shard."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (1500, resource.RLIM_INFINITY))


def cut_link(engine: Any) -> None:
    """Take the network away."""
    subprocess.run(["ip", "link", "set", os.environ["GLOO_SOCKET_IFNAME"], "down"], check=True)


def send(number: int) -> Callable[[Any], None]:
    """Return a fault that is a signal."""
    return lambda engine: os.kill(os.getpid(), number)


FAULTS: dict[str, Callable[[Any], None]] = {
    "hang": send(signal.SIGSTOP),
    "kill": send(signal.SIGKILL),
    "interrupt": send(signal.SIGINT),
    "terminate": send(signal.SIGTERM),
    "overflow": spoil_sums,
    "memory": run_out_of_memory,
    "full": fill_disk,
    "cut": cut_link,
}


def install(fault: dict[str, Any], rank: int) -> None:
    """Let a fault happen on this rank."""
    from drm_triton.distributed import fit
    from drm_triton.distributed.engine import Distributed

    if rank != fault["rank"]:
        return
    if fault["name"] == "version":
        fit.__version__ = "0.0.1"  # type: ignore[attr-defined]
        return
    step = Distributed.step

    def faulty(engine: Distributed, stop: int, lr: float) -> None:
        if engine.state.step == fault["step"]:
            FAULTS[fault["name"]](engine)
        step(engine, stop, lr)

    setattr(Distributed, "step", faulty)  # noqa: B010 (mypy refuses an assignment)


# -- in the process that forks -----------------------------------------------------------------------------------------


def enter_namespace(name: str) -> None:
    """Move this process to a network namespace."""
    with open(f"/run/netns/{name}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0):
            raise OSError(ctypes.get_errno(), f"setns {name}")


def child(job: Job, rank: int, port: int, output: io.BufferedRandom) -> int:
    """Run a rank, in a process of its own."""
    from drm_triton.cli import main

    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    size = len(job["ranks"])
    if not job.get("alone"):
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
        os.environ.update({name: str(number) for name, number in numbers.items()})
        os.environ.update({"MASTER_ADDR": job.get("address", "127.0.0.1"), "TORCHELASTIC_RUN_ID": f"job {port}"})
    os.environ.update(job.get("variables", {}))
    if "interfaces" in job:
        namespace, interface = job["interfaces"][rank]
        enter_namespace(namespace)
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    if "private" in job and rank == 1:
        libc, new_mounts = ctypes.CDLL(None), 0x20000
        if libc.unshare(new_mounts):
            raise OSError("unshare")
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
        subprocess.run(["mount", "-t", "tmpfs", "none", job["private"]], check=True)
    if "fault" in job:
        install(job["fault"], rank)
    sys.argv = ["drm-triton", *job["ranks"][rank]]
    try:
        main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def do(job: Job) -> dict[str, Any]:
    """Fork the ranks of a job and wait for them."""
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    outputs = [tempfile.TemporaryFile() for _ in job["ranks"]]  # noqa: SIM115 (closed below)
    running = {}
    for rank, output in enumerate(outputs):
        pid = os.fork()
        if pid == 0:
            code = 70
            try:
                code = child(job, rank, port, output)
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        running[pid] = rank
    codes, stopped = [0] * len(outputs), set()
    while running:
        for pid, rank in list(running.items()):
            found, status = os.waitpid(pid, os.WNOHANG | os.WUNTRACED)
            if found and os.WIFSTOPPED(status):
                stopped.add(pid)
            elif found:
                codes[rank] = os.waitstatus_to_exitcode(status)
                del running[pid]
        if running and stopped >= running.keys():
            for pid in running:
                os.kill(pid, signal.SIGKILL)
            stopped.clear()
        time.sleep(0.02)
    said = []
    for output in outputs:
        output.seek(0)
        said.append(output.read().decode())
        output.close()
    return {"codes": codes, "said": said}


def main() -> None:
    """Read jobs and do them."""
    import polars  # noqa: F401 (once, before the forks)

    import drm_triton.cli
    import drm_triton.distributed.fit
    import drm_triton.kernels.cpu
    import drm_triton.models  # noqa: F401
    from drm_triton.training.run import Run

    # Curves take longer than most trainings of the tests.
    setattr(Run, "draw_curves", lambda run: None)  # noqa: B010
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        print(json.dumps(do(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
