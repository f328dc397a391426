"""Commands in several processes: start them, and do the work of one of them."""

import ctypes
import logging
import os
import signal
import sys
import tempfile
import uuid
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from drm_triton.cli.messages import print_error
from drm_triton.errors import InputError
from drm_triton.names import MAX_RANKS, RANK_TIMEOUT, LogTo

if TYPE_CHECKING:
    from drm_triton.data.dataset import Dataset
    from drm_triton.distributed.world import World
    from drm_triton.progress import Reporter
    from drm_triton.recommender import Recommender

TIMEOUTS = 1, 86_400  # least and most seconds that processes wait for each other
LAUNCHER = "DRM_TRITON_LAUNCHER"  # set by `launch`, which reports processes that were killed
SAVING = "300"  # seconds that processes have to save their work after Ctrl-C; torchrun gives them 30


def launched() -> bool:
    """Return whether torchrun, or `launch`, has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ and "WORLD_SIZE" in os.environ


def is_first() -> bool:
    """Return whether this process prints: it is alone, or rank 0."""
    return not launched() or os.environ.get("RANK") == "0"


def check_options(devices: int | None, timeout: float) -> None:
    """Raise if the options of several processes cannot be used."""
    if not TIMEOUTS[0] <= timeout <= TIMEOUTS[1]:
        raise InputError(f"`timeout` must be from {TIMEOUTS[0]} to {TIMEOUTS[1]:,} seconds, got {timeout:g}")
    if devices is not None and not 1 <= devices <= MAX_RANKS:
        raise InputError(f"`devices` must be from 1 to {MAX_RANKS}, got {devices}")
    if devices is not None and launched() and devices != int(os.environ["WORLD_SIZE"]):
        raise InputError(f"torchrun has started {os.environ['WORLD_SIZE']} processes; leave out `devices`")


# -- the process that starts the others --------------------------------------------------------------------------------


def launch(devices: int) -> None:
    """Run this command in several processes on this machine, as torchrun does, and exit as they do."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores() // devices)))
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", SAVING)
    os.environ[LAUNCHER] = str(devices)
    for name in ["torch.distributed", *logging.root.manager.loggerDict]:  # our own message says what failed
        if name.startswith("torch."):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # some have a level of their own
    with tempfile.TemporaryDirectory(prefix="drm-triton-") as logs:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=devices,
            logs_specs=DefaultLogsSpecs(log_dir=logs),
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=0,
        )
        try:
            elastic_launch(config, sys.executable)("-m", "drm_triton", *sys.argv[1:])
        except ChildFailedError as error:
            raise typer.Exit(_exit_code(error.failures)) from None
        except SignalException as error:  # the processes have had the same signal, and ended
            raise typer.Exit(128 + error.sigval) from None
    raise typer.Exit


def _exit_code(failures: dict[int, Any]) -> int:
    """Return the exit code of the process that failed first, by rank. If a signal killed it, say so."""
    began = min(failure.timestamp for failure in failures.values())
    first = {rank: failure for rank, failure in failures.items() if failure.timestamp == began}
    for rank, failure in first.items():
        # One that has not begun to handle SIGTERM is ended by it when another fails.
        if failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM:
            memory = ", perhaps because memory was short" if failure.exitcode == -signal.SIGKILL else ""
            print_error(
                f"process {rank} of {os.environ[LAUNCHER]} was killed ({failure.signal_name()}{memory}); the run can "
                "be resumed from its last checkpoint with `resume`"
            )
            return 128 - int(failure.exitcode)
    if all(failure.exitcode == -signal.SIGTERM for failure in first.values()):
        print_error(
            "the processes were ended (SIGTERM) while they started; nothing was trained since the last checkpoint"
        )
        return 128 + signal.SIGTERM
    return max(1, *(int(failure.exitcode) for failure in first.values()))


# -- one of the processes ----------------------------------------------------------------------------------------------


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def settle() -> None:
    """Share the cores of this machine with its other processes, and stop when the one that started them is killed.

    To be called before torch and the CPU kernels are imported.
    """
    # A process that ends would be a warning with a stack, besides our error.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    own = max(1, cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    os.environ.setdefault("NUMBA_NUM_THREADS", str(own))
    if sys.platform == "linux":
        set_parent_death_signal = 1
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)


def use_own_gpu() -> None:
    """Make the GPU of this process the current one, if there are GPUs. The processes of a machine take them in turn."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())


def announce_restart(reporter: "Reporter", run: Path | None) -> None:
    """Say whether torchrun has started the processes again. Raise if it may do so and cannot find the run again."""
    from drm_triton.distributed.world import attempt, restarts

    if restarts() > 0 and run is None:
        raise InputError("give --out: after a restart, the processes must find the directory of the run again")
    if attempt() > 0:
        reporter.line(f"restart {attempt()} of {restarts()}")


@contextmanager
def in_world(devices: int | None = None, timeout: float = RANK_TIMEOUT) -> Iterator["World | None"]:
    """Join the other processes if there are some, and leave them at the end. If several fail, one of them says why.

    Yield None in a single process.
    """
    try:
        check_options(devices, timeout)
    except InputError as error:
        if not is_first():  # all have the same options
            raise typer.Exit(error.exit_code) from None
        raise
    if not launched():
        yield None
        return
    settle()
    from drm_triton.distributed.world import LostRankError, ToldError, World

    world = World.joined(timeout)
    try:
        yield world
    except (typer.Exit, typer.Abort):
        raise
    except KeyboardInterrupt:  # before or after the training, which handles it
        if world.first:
            raise
        raise typer.Exit(128 + signal.SIGINT) from None
    except ToldError as error:
        raise typer.Exit(error.exit_code) from None
    except Exception as error:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun sends it when a process fails; this one reports why
        code = getattr(error, "exit_code", 1)
        if LAUNCHER in os.environ and isinstance(error, LostRankError) and error.ended:
            raise typer.Exit(code) from None  # it has said why, or else the launcher does
        rank, first_code = world.first_failure(code)
        if rank == world.rank:
            raise
        raise typer.Exit(first_code) from None
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        world.leave()


def train_together(
    world: "World",
    model: "Recommender[Any]",
    data: "Dataset",
    place: Path,
    resume: bool,
    reporter: "Reporter",
    overwrite: bool,
    as_json: bool,
    log: LogTo | None,
) -> None:
    """Train in one of several processes. The parameters are those of `train`."""
    from drm_triton.cli.train import Interrupt, show_training
    from drm_triton.distributed.fit import fit
    from drm_triton.model import DRM

    assert isinstance(model, DRM)
    interrupt = Interrupt(reporter)

    def train(callbacks: Any, on_batch: Any) -> None:
        fit(world, model, data, place, resume, callbacks, on_batch, reporter, overwrite)
        interrupt.signal = max(world.gather_objects(interrupt.signal))  # one process may have heard it before others

    if world.first:
        show_training(train, model.config, place, reporter, as_json, log, interrupt)
        return
    with interrupt, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the first process prints them
        train([interrupt.epoch_end], interrupt.batch_end)
    if interrupt.signal:
        raise typer.Exit(128 + interrupt.signal)
