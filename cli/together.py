"""`drm-triton train` in several processes: start them, and train in one of them."""

import logging
import os
import sys
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from drm_triton.errors import DrmError, InputError
from drm_triton.names import LogTo

if TYPE_CHECKING:
    from drm_triton.data.dataset import Dataset
    from drm_triton.progress import Reporter
    from drm_triton.recommender import Recommender


def launched() -> bool:
    """Return whether torchrun, or `launch`, has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ and "WORLD_SIZE" in os.environ


def is_first() -> bool:
    """Return whether this process prints: it is alone, or rank 0."""
    return not launched() or os.environ.get("RANK") == "0"


def launch(devices: int) -> None:
    """Run this command in several processes on this machine, as torchrun does, and exit as they do."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    if devices < 1:
        raise InputError(f"`devices` must be at least 1, got {devices}")
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores() // devices)))
    for name in ("torch.distributed", "torch.multiprocessing"):  # our own message says what failed
        logging.getLogger(name).setLevel(logging.CRITICAL)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=devices,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
    )
    try:
        elastic_launch(config, sys.executable)("-m", "drm_triton", *sys.argv[1:])
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        raise typer.Exit(failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode) from None
    raise typer.Exit


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def share_cores() -> None:
    """Let the processes on this machine share its cores. To be called before the CPU kernels are imported."""
    own = max(1, cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    os.environ.setdefault("NUMBA_NUM_THREADS", str(own))


def train_together(
    model: "Recommender[Any]",
    data: "Dataset",
    place: Path,
    resume: bool,
    reporter: "Reporter",
    overwrite: bool,
    timeout: float,
    as_json: bool,
    log: LogTo | None,
) -> None:
    """Train in one of several processes. The parameters are those of `train`."""
    from drm_triton.cli.train import Interrupt, show_training
    from drm_triton.distributed.fit import fit
    from drm_triton.distributed.world import World
    from drm_triton.model import DRM

    if not isinstance(model, DRM):
        raise InputError(f"several processes train `model` drm only, not {model.config.model}")
    world = World.joined(model.backend()[1], timeout)

    def train(callbacks: Any, on_batch: Any) -> None:
        fit(world, model, data, place, resume, callbacks, on_batch, reporter, overwrite)

    try:
        if world.first:
            show_training(train, model.config, place, reporter, as_json, log)
        else:
            with Interrupt(reporter) as interrupt:
                train([interrupt.epoch_end], interrupt.batch_end)
            if interrupt.signal:
                raise typer.Exit(128 + interrupt.signal)
    except (DrmError, OSError) as error:
        if world.speaks():
            raise
        raise typer.Exit(getattr(error, "exit_code", 1)) from None
    finally:
        world.leave()
