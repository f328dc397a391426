"""Threads of the CPU kernels: Python threads that run compiled code, which releases the GIL.

Numba's own parallel layers are not used. Depending on the platform, they abort the process when two Python threads
enter them at once, or after a fork. Even `numba.get_num_threads` is not called: it takes a semaphore that all processes
forked from one parent share, and a process that is killed while it holds the semaphore leaves the others waiting for
ever. `NUMBA_NUM_THREADS` is the largest number of threads, by default all cores.

A thread that waits for work, or for the others, stays awake for a fraction of a millisecond. A training step calls
kernels a dozen times, and a processor that sleeps takes up to 0.1 ms to wake up: on two processors, steps of 4,096
lists took 1.1 times as long when threads slept at once.

A child may be forked while no kernel runs in another thread of the parent. It has threads of its own.
"""

import atexit
import os
import threading
from collections.abc import Callable, Iterable
from functools import partial
from itertools import pairwise
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch

from drm_triton.kernels.cpu.runtime.jit import is_set_after_pause, kernel
from drm_triton.kernels.cpu.runtime.numba_private import max_threads

# With four chunks per thread, a thread that another process slows down leaves work to the others.
CHUNKS_PER_THREAD = 4
AWAKE = 20_000  # pauses before a thread sleeps: 0.4 ms on a processor with AVX-512


@kernel
def stay_awake(flag):
    """Wait until `flag` is set, or for AWAKE pauses."""
    for _ in range(AWAKE):
        if is_set_after_pause(flag):
            return


class _Channel:
    """A queue from which one thread gets. If it is empty, the thread stays awake for a short time."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Any] = SimpleQueue()
        self._flag = np.zeros(1, np.int32)  # set when something is put, so that compiled code sees it without the GIL

    def put(self, item: Any) -> None:
        self._queue.put(item)
        self._flag[0] = 1

    def get(self) -> Any:
        if self._queue.empty():
            stay_awake(self._flag)
        self._flag[0] = 0
        return self._queue.get()


class _Job:
    """Work for another thread. The error that it raises, or None, is put into `done`."""

    def __init__(self, work: Callable[[], None], done: _Channel) -> None:
        self._work, self._done, self._claimed = work, done, threading.Lock()

    def claim(self) -> bool:
        """Return whether nobody has claimed the job before: the thread that is to do it, or the one that wanted it."""
        return self._claimed.acquire(blocking=False)

    def do(self) -> None:
        """Do the work unless it has been claimed."""
        if not self.claim():
            return
        error = None
        try:
            self._work()
        except BaseException as raised:
            error = raised
        self._done.put(error)


class _Worker(threading.Thread):
    """A thread that does one job after the other."""

    def __init__(self, number: int) -> None:
        super().__init__(name=f"drm_{number}", daemon=True)
        self.jobs = _Channel()
        self.start()

    def run(self) -> None:
        """Do jobs until there is None."""
        _use_one_torch_thread()
        while (job := self.jobs.get()) is not None:
            job.do()
            del job  # it refers to the arguments of kernels


def _use_one_torch_thread() -> None:
    """Let torch use one thread within this one, or its products would depend on which thread ran them.

    The number belongs to the thread that sets it, but threads that have not used torch yet begin with the last one that
    was set. So another thread sets it back.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    other = threading.Thread(target=torch.set_num_threads, args=(before,))
    other.start()
    other.join()


_workers: list[_Worker] = []
_starting = threading.Lock()


def _start_workers(count: int) -> None:
    with _starting:
        while len(_workers) < count:
            _workers.append(_Worker(len(_workers)))


@atexit.register
def _stop_workers() -> None:
    """End the threads before the interpreter does, which stops a thread wherever it is."""
    for worker in _workers:
        worker.jobs.put(None)
    for worker in _workers:
        worker.join()
    _workers.clear()


def _forget_workers() -> None:
    global _starting
    _workers.clear()
    _starting = threading.Lock()


if hasattr(os, "register_at_fork"):  # a forked child has the list, but none of the threads
    os.register_at_fork(after_in_child=_forget_workers)


_in_use = threading.local()  # `count`: threads that kernels called from this thread use


def set_threads(threads: int) -> None:
    """Use this number of threads for kernels that this thread calls, or fewer if there are not as many."""
    _in_use.count = max(1, min(threads, max_threads()))


def n_threads() -> int:
    """Return the number of threads in use."""
    return getattr(_in_use, "count", None) or max_threads()


def run(tasks: Iterable[Callable[[], Any]]) -> None:
    """Run each task once, on all threads in use including the caller's; return when all are done."""
    tasks = list(tasks)
    others = min(n_threads(), len(tasks)) - 1
    if others < 1:
        for task in tasks:
            task()
        return
    waiting = iter(tasks)  # next() on a list iterator is atomic

    def work() -> None:
        for task in waiting:
            task()

    if len(_workers) < others:
        _start_workers(others)
    done = _Channel()
    jobs = [_Job(work, done) for _ in range(others)]
    for worker, job in zip(_workers, jobs, strict=False):
        worker.jobs.put(job)
    try:
        work()
    except BaseException:
        for _ in waiting:  # the other threads need not do what is left
            pass
        raise
    finally:
        # A thread may be busy, or take milliseconds to wake up. One that has not begun by now is not needed: no task is
        # left, or one has failed.
        begun = sum(not job.claim() for job in jobs)
        errors = [done.get() for _ in range(begun)]
    for error in errors:
        if error is not None:
            raise error


def split(kernel: Callable[..., None], size: int, grain: int, *args: Any) -> None:
    """Call kernel(start, stop, *args) on chunks of range(size) of at least `grain`, on all threads."""
    threads = n_threads()
    chunks = 1 if threads == 1 else max(1, min(CHUNKS_PER_THREAD * threads, size // grain))
    bounds = [size * i // chunks for i in range(chunks + 1)]
    run(partial(kernel, start, stop, *args) for start, stop in pairwise(bounds))
