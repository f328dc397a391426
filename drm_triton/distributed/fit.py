"""A training on several ranks, from the data set to the run directory."""

from __future__ import annotations

import dataclasses
import os
import platform
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from drm_triton import atomic
from drm_triton._version import __version__
from drm_triton.config import TrainConfig
from drm_triton.data.csr import CSR
from drm_triton.data.dataset import Dataset
from drm_triton.distributed.engine import Distributed
from drm_triton.distributed.rows import Division
from drm_triton.distributed.start import held_rows, initial_shard
from drm_triton.distributed.world import LostRankError, World, attempt
from drm_triton.errors import InputError
from drm_triton.kernels.precision import table_type
from drm_triton.machine import versions
from drm_triton.model import DRM
from drm_triton.names import MAX_RANKS
from drm_triton.progress import Reporter
from drm_triton.training import checkpoint
from drm_triton.training.display import Display, announced_compilation, loading_kernels
from drm_triton.training.loop import can_validate, check_factors, interactions_to_fit, train
from drm_triton.training.run import Run, described_state, last_checkpoint, read_environment, vectors
from drm_triton.training.state import BatchCallback, EpochCallback, EpochEnd, State

LAUNCH = "launch"  # entry of env.json: by which a restarted rank recognises its own run
PROBE = ".shared-"  # a file that shows whether all ranks see a directory
STALE = 3600  # seconds after which a probe is what a killed process left


class Keeper:
    """Writes the run directory: metrics on rank 0, and the rows of each rank as shards of a checkpoint.

    As a callback of `loop.train` it records each epoch. All ranks call it, because they wait for each other.
    """

    def __init__(
        self, world: World, path: Path, config: TrainConfig, run: Run | None, rows: dict[str, slice], dataset: Dataset
    ) -> None:
        self.world, self.path, self.config, self.run = world, path, config.resolved(), run
        self.first = {name: own.start for name, own in rows.items()}
        self.total = {name: dataset.n_users if name.startswith("user") else dataset.n_items for name in rows}

    def __call__(self, end: EpochEnd) -> None:
        """Record an epoch: first its metrics, then the checkpoint."""
        if self.run is not None:
            self.run.records.append(end.record)
        self.world.together(lambda: self.run.write_metrics() if self.run is not None else None)
        assert isinstance(end.state, State)
        self.save(end.state, best=end.improved)

    def save(self, state: State, best: bool = False) -> None:
        """Write the rows of each rank to last/, then the manifest; and also to best/ if it is the best so far."""
        world, tensors = self.world, state.tensors()
        tag = f"e{state.epoch}-p{state.position}"
        last, also = (self.path / which / checkpoint.FILE for which in ("last", "best"))

        def write() -> None:
            if world.first:
                metadata = described_state(self.config, state)
                checkpoint.write_manifest(last, shards, metadata, also if best else None)

        world.together(lambda: self.run.lock.check(self.path) if self.run is not None else None)
        try:
            shard = world.together(
                lambda: checkpoint.write_shard(
                    last.parent, tag, world.rank, world.size, tensors, self.first, self.total
                )
            )
            shards = world.gather_objects(shard)
            world.together(write)
        except LostRankError:
            raise  # nobody knows whether that rank still writes
        except Exception:
            if world.first:
                for place in (last, also):
                    checkpoint.remove_leftovers(place)
            raise


def fit(
    world: World,
    model: DRM,
    dataset: Dataset,
    run: Path,
    resume: bool = False,
    callbacks: Sequence[EpochCallback] = (),
    on_batch: BatchCallback | None = None,
    reporter: Reporter | None = None,
    overwrite: bool = False,
) -> None:
    """Train with other ranks. The model is in the run directory afterwards; `DRM.load` reads it.

    Parameters
    ----------
    world : the ranks. All of them call this function with the same arguments, but for reporter and callbacks.
    run : directory of the run, which all ranks see
    resume, callbacks, on_batch, overwrite : see `DRM.fit`
    reporter : shows the progress on rank 0
    """
    config = model.config
    backend, device = world.together(model.backend)
    world.together(lambda: world.use(device))
    parts = interactions_to_fit(dataset, config)
    world.together(lambda: model.check_fit(dataset, parts))
    check_world(world, config, dataset, backend.name, resume)
    run = Path(world.gather_objects(str(run.absolute()))[0])  # ranks may have other working directories and clocks
    check_shared(world, run)
    users, items = Division(dataset.n_users, world.size), Division(dataset.n_items, world.size)
    rows = held_rows(world, users, items)
    shown = reporter if reporter is not None and world.first else Reporter(quiet=True)
    opened, stored = open_run(world, run, model, dataset, parts, rows, resume, overwrite)
    try:
        display = Display(shown, config, can_validate(config, dataset))
        with display, announced_compilation(shown):
            with loading_kernels(shown):
                one_by_one(world, model.warm_up)
            if stored is None:
                state = initial_shard(world, config, parts, users, items)
            else:
                state = State.of_checkpoint(*stored)
            state = state.to(world.device, table_type(config.precision, backend.name))
            engine = Distributed(world, state, users, items, config, dataset, parts, backend)
            keeper = Keeper(world, run, config, opened, rows, dataset)
            followers: list[EpochCallback] = [display.epoch_end, *callbacks, keeper]
            train(state, config, dataset, engine, followers, display.batches(on_batch))
            if state.position:  # stopped within an epoch
                world.together(lambda: check_factors(state, config))
                keeper.save(state)
        if opened is not None:
            opened.draw_curves()
    finally:
        if opened is not None:
            opened.lock.release()


def check_world(world: World, config: TrainConfig, dataset: Dataset, backend: str, resume: bool) -> None:
    """Raise on all ranks if they do not have the same program, options and data, or if there are too many of them."""
    if world.size > MAX_RANKS:
        raise InputError(f"a training has at most {MAX_RANKS} ranks, got {world.size}")
    options = dataclasses.replace(config.resolved(), threads=None).to_dict()
    world.agree(
        {
            "drm-triton": __version__,
            **{name: version for name, version in versions().items() if name in ("torch", "triton", "numba", "numpy")},
            "backend": backend,
            **({} if backend != "cpu" else vectors()),
            "data set": f"with checksum {dataset.checksum[:12]}",
            "resume": resume,
            **{f"`{name}`": value for name, value in options.items()},
        }
    )


def check_shared(world: World, path: Path) -> None:
    """Raise on all ranks, before anything is written, if not all of them see the directory of the run."""
    folder = path.absolute()
    while not folder.is_dir():
        folder = folder.parent
    probe = Path(world.gather_objects(str(folder / f"{PROBE}{secrets.token_hex(4)}{atomic.PARTIAL}"))[0])

    def write() -> None:
        if world.first:
            try:
                for left in probe.parent.glob(f"{PROBE}*{atomic.PARTIAL}"):
                    with suppress(FileNotFoundError):
                        if time.time() - left.stat().st_mtime > STALE:  # from a process that was killed
                            left.unlink()
                probe.touch()
            except OSError as error:
                raise InputError(
                    f"{path}: cannot create the run directory ({error.strerror}); give another `run`"
                ) from None

    def find() -> None:
        if not probe.exists():
            raise InputError(f"{path} is not shared: all machines must see the same directory of the run")

    world.together(write)
    try:
        world.together(find)
    finally:
        if world.first:
            probe.unlink(missing_ok=True)


def open_run(
    world: World,
    path: Path,
    model: DRM,
    dataset: Dataset,
    parts: CSR,
    rows: dict[str, slice],
    resume: bool,
    overwrite: bool,
) -> tuple[Run | None, Any]:
    """Create or open the run directory on rank 0; return it there, and on each rank its rows of the last checkpoint.

    A rank that torchrun has restarted opens the run that the same launch created.
    """
    config, layout = model.config, model.layout(dataset.n_users, dataset.n_items)
    resume = world.gather_objects(resume or (attempt() > 0 and created_here(path)))[0]

    def on_first() -> tuple[Run | None, Any]:
        if not world.first:
            return None, None
        if resume:
            return Run.open(path, dataset, config, layout, rows)
        created = Run.create(path, config, dataset, parts, overwrite, more={LAUNCH: launch_id()})
        return created, None

    opened, stored = world.together(on_first)

    begun = world.gather_objects(stored is not None)[0]  # what rank 0 has found, not what this one sees

    def on_others() -> Any:
        if not world.first and begun:
            return last_checkpoint(path, layout, rows)
        return stored

    return opened, world.together(on_others)


def launch_id() -> str:
    """Return what is the same before and after a restart, and differs between launches."""
    given = os.environ.get("TORCHELASTIC_RUN_ID", "none")  # torchrun's --rdzv-id
    return given if given != "none" else f"{platform.node()} {os.getppid()}"  # rank 0 and its torchrun


def created_here(path: Path) -> bool:
    """Return whether this launch has created the run before it was restarted."""
    try:
        return read_environment(path).get(LAUNCH) == launch_id()
    except InputError:
        return False


def one_by_one(world: World, action: Callable[[], None]) -> None:
    """Call a function on the first rank of each machine, and then on the others, which find what it has cached."""
    for turn in (True, False):
        world.together(lambda turn=turn: action() if (world.local == 0) is turn else None)  # type: ignore[misc]
