"""The processes of the service: one that serves, or several workers that share one socket and one that watches them."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection as Pipe
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import uvicorn
from numpy.typing import NDArray

from drm_triton.errors import DrmError
from drm_triton.recommender import Recommender
from drm_triton.serving.app import create_app
from drm_triton.serving.connections import Limits
from drm_triton.serving.loading import load_in_memory
from drm_triton.serving.metrics import CELLS, Metrics
from drm_triton.serving.middleware import LogLevel
from drm_triton.serving.rounds import Member, Rounds
from drm_triton.serving.service import Service

BACKLOG = 1024  # connections that the system holds until they are accepted
ACCEPTED = 8  # connections that are accepted at a time; several times as many fit into `KEPT_DESCRIPTORS`
SHUTDOWN_SECONDS = 5  # time for running requests to finish when the service stops
RESTART_SECONDS = 1.0  # pause before a worker that ended is started again
HUP = getattr(signal, "SIGHUP", None)  # Windows has none

log = logging.getLogger("drm_triton.serving")


@dataclass(frozen=True)
class Settings:
    """What a process of the service must know. `load_in_memory`, `create_app` and `Limits` describe the fields."""

    run: Path
    max_k: int = 100
    max_liked: int = 1000
    max_exclude: int = 10_000
    token: str | None = None
    host_names: tuple[str, ...] | None = None
    log: LogLevel = "errors"
    max_connections: int = 1000
    request_seconds: float = 10.0
    drain_seconds: float = 0.0
    verify: bool = False


class Server(uvicorn.Server):
    """A uvicorn server that limits its connections, reloads the model when asked to, and announces its end."""

    def __init__(self, config: uvicorn.Config, service: Service, limits: Limits, drain_seconds: float) -> None:
        super().__init__(config)
        self.service, self.limits, self.drain_seconds = service, limits, drain_seconds
        self.stop_at = float("inf")  # when draining ends
        self.parent = os.getppid()
        self.is_worker = False
        self.on_start: Callable[[], None] = lambda: None
        self._reload: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections."""
        await super().startup(sockets)
        for listener in sockets or []:
            # asyncio accepts as many connections at a time as it lets wait, before it looks at the first of them. So
            # the server accepts a few at a time, or it could run out of descriptors, and lets more wait.
            listener.listen(BACKLOG)
        self.on_start()

    async def on_tick(self, counter: int) -> bool:
        """Do, ten times a second, what is due; return whether to stop."""
        if counter % 10 == 0:
            self.limits.end_late(self.server_state.connections)  # type: ignore[arg-type]
        if self._reload is None or self._reload.done():
            self._reload = asyncio.create_task(self.service.follow())
        orphaned = self.is_worker and os.getppid() != self.parent
        return await super().on_tick(counter) or orphaned or time.monotonic() >= self.stop_at

    def handle_exit(self, number: int, frame: FrameType | None) -> None:
        """Stop: at once, or after a time in which `/ready` says so. A second Ctrl-C does not wait for anything."""
        if number == signal.SIGINT and self.service.draining:
            self.should_exit = self.force_exit = True
        elif not self.service.draining:
            self.service.draining = True
            self.stop_at = time.monotonic() + self.drain_seconds


def make_server(settings: Settings, model: Recommender[Any], metrics: Metrics, member: Member | None = None) -> Server:
    """Create the server of one process."""
    app = create_app(
        model,
        settings.run.resolve().name,
        settings.max_k,
        settings.max_liked,
        settings.max_exclude,
        settings.token,
        settings.host_names,
        settings.log,
        partial(load_in_memory, settings.run, settings.verify),
        metrics,
        member,
    )
    app.state.service.after_load = set_aside
    set_aside()
    limits = Limits(settings.max_connections, settings.request_seconds, metrics)
    config = uvicorn.Config(
        app,
        http=limits.protocol,  # type: ignore[arg-type]
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=ACCEPTED,
        timeout_keep_alive=max(1, round(settings.request_seconds)),
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
    )
    return Server(config, app.state.service, limits, settings.drain_seconds)


def set_aside() -> None:
    """Keep what exists now out of garbage collections. Each would visit all of it, and hold up requests for 0.15 s."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def log_to_stderr() -> None:
    """Write the log of the service to stderr, with times in UTC; of uvicorn, only errors, as clients cause the rest."""
    handler = logging.StreamHandler(sys.stderr)
    form = logging.Formatter("%(asctime)s.%(msecs)03dZ %(message)s", "%Y-%m-%dT%H:%M:%S")
    form.converter = time.gmtime
    handler.setFormatter(form)
    for name, level in (("drm_triton.serving", logging.INFO), ("uvicorn", logging.ERROR), ("asyncio", logging.ERROR)):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)


# -- one process -------------------------------------------------------------------------------------------------------


def serve_alone(
    settings: Settings, model: Recommender[Any], listener: socket.socket, start: Callable[[], None]
) -> None:
    """Serve in this process until a signal ends it. SIGHUP reloads the model. `start` is called when all is ready."""
    log_to_stderr()
    metrics = Metrics()
    server = make_server(settings, model, metrics)
    start()
    if HUP is not None:
        signal.signal(HUP, lambda *_: metrics.count("reload_requested"))
    server.run(sockets=[listener])


# -- several workers ---------------------------------------------------------------------------------------------------


def serve_in_workers(settings: Settings, workers: int, listener: socket.socket, start: Callable[[], None]) -> None:
    """Start workers that share a socket, and start each again if it ends, until a signal ends them all.

    Workers are started anew ("spawn"), not forked: the threads of the compiled kernels do not survive a fork.
    """
    log_to_stderr()
    supervisor = Supervisor(settings, workers, listener)
    signals = [signal.SIGINT, signal.SIGTERM, *([HUP] if HUP is not None else [])]
    before = {number: signal.signal(number, supervisor.on_signal) for number in signals}
    try:
        supervisor.start()
        start()
        supervisor.watch()
    finally:
        supervisor.stop()
        for number, handler in before.items():
            signal.signal(number, handler)


class Supervisor:
    """Starts the workers of a service, watches and ends them."""

    def __init__(self, settings: Settings, workers: int, listener: socket.socket) -> None:
        self.settings, self.listener, self.stopping = settings, listener, False
        self._context = multiprocessing.get_context("spawn")
        self._cells = self._context.RawArray(ctypes.c_double, (workers + 1) * CELLS)
        self._metrics = Metrics(as_cells(self._cells), workers)
        self._agreed = self._context.RawArray(ctypes.c_int64, workers + 2)
        self._rounds, self._requested = as_rounds(self._agreed), 0
        self._workers: list[SpawnProcess | None] = [None] * workers
        for variable in ("NUMBA_NUM_THREADS", "OMP_NUM_THREADS"):  # workers divide the cores among them
            os.environ.setdefault(variable, str(max(1, (os.cpu_count() or 1) // workers)))

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Reload on SIGHUP, stop on every other signal."""
        if number == HUP:
            self._metrics.count("reload_requested")
        else:
            self.stopping = True

    def start(self) -> None:
        """Start all workers, and wait until they answer."""
        ready = [self._start(row) for row in range(len(self._workers))]
        for pipe in ready:
            while not self.stopping and not pipe.poll(0.1):
                pass
            try:
                if not self.stopping:
                    pipe.recv_bytes()
            except EOFError:  # it ended instead
                raise DrmError("a worker of the service did not start; its message is above") from None

    def watch(self) -> None:
        """Start workers that end again, and lead reloads, until a signal says to stop."""
        while not self.stopping:
            wait([worker.sentinel for worker in self._workers if worker is not None], timeout=0.2)
            for row, worker in enumerate(self._workers):
                if worker is not None and not worker.is_alive() and not self.stopping:
                    log.error("worker %d ended with code %s; starting another", row, worker.exitcode)
                    if worker.exitcode and worker.exitcode > 0:  # it could not load the model
                        self._rounds.give_up()
                    time.sleep(RESTART_SECONDS)
                    self._start(row)
            self._rounds.decide()
            requested = self._metrics.total("reload_requested")
            if requested != self._requested and not self._rounds.is_open:
                self._requested = requested
                self._rounds.begin()

    def stop(self) -> None:
        """End all workers, and wait for their last requests."""
        self.stopping = True
        alive = [worker for worker in self._workers if worker is not None and worker.is_alive()]
        for worker in alive:
            worker.terminate()
        deadline = time.monotonic() + self.settings.drain_seconds + 2 * SHUTDOWN_SECONDS
        for worker in alive:
            worker.join(max(0.0, deadline - time.monotonic()))
            if worker.is_alive():
                worker.kill()
                worker.join()

    def _start(self, row: int) -> Pipe:
        """Start a worker; return the pipe in which it says that it is ready."""
        ready, its_end = self._context.Pipe(duplex=False)
        arguments = (self.settings, self.listener, self._cells, self._agreed, row, its_end)
        worker = self._context.Process(target=work, args=arguments, name=f"worker {row}")
        worker.start()
        its_end.close()
        self._workers[row] = worker
        return ready


def work(settings: Settings, listener: socket.socket, cells: Any, agreed: Any, row: int, ready: Pipe) -> None:
    """Serve in a worker."""
    if HUP is not None:
        signal.signal(HUP, signal.SIG_IGN)  # the supervisor passes it on in the shared counts
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    log_to_stderr()
    metrics = Metrics(as_cells(cells), row)
    metrics.forget_connections()
    member = Member(as_rounds(agreed), row)
    try:
        server = make_server(settings, load_in_memory(settings.run, settings.verify), metrics, member)
    except DrmError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    server.is_worker = True

    def say() -> None:
        ready.send_bytes(b"ready")
        ready.close()

    server.on_start = say
    server.run(sockets=[listener])


def as_cells(shared: Any) -> NDArray[np.float64]:
    """Return a shared array as the cells of `Metrics`."""
    return np.frombuffer(shared, dtype=np.float64).reshape(-1, CELLS)


def as_rounds(shared: Any) -> Rounds:
    """Return what a shared array of integers says about the rounds."""
    return Rounds(np.frombuffer(shared, dtype=np.int64))
