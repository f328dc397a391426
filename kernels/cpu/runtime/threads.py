"""Threads of the CPU kernels: a pool of Python threads that run compiled code, which releases the GIL.

Numba's own parallel layers are not used. Depending on the platform, they abort the process when two Python threads
enter them at once, or after a fork. Even `numba.get_num_threads` is not called: it takes a semaphore that all processes
forked from one parent share, and a process that is killed while it holds the semaphore leaves the others waiting for
ever. `NUMBA_NUM_THREADS` is the largest number of threads, by default all cores.

A child may be forked while no kernel runs in another thread of the parent. It has a pool of its own.
"""

import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from drm_triton.kernels.cpu.runtime.numba_private import max_threads

# With four chunks per thread, a thread that another process slows down leaves work to the others.
CHUNKS_PER_THREAD = 4

_pool: ThreadPoolExecutor | None = None


def _forget_pool() -> None:
    global _pool
    _pool = None


if hasattr(os, "register_at_fork"):  # a forked child has the pool object, but none of its threads
    os.register_at_fork(after_in_child=_forget_pool)


_in_use = threading.local()  # `count`: threads that kernels called from this thread use


def set_threads(threads: int) -> None:
    """Use this number of threads for kernels that this thread calls, or fewer if there are not as many."""
    _in_use.count = max(1, min(threads, max_threads()))


def n_threads() -> int:
    """Return the number of threads in use."""
    return getattr(_in_use, "count", None) or max_threads()


def _start_thread() -> None:
    """Let torch use one thread within a thread of the pool, or its products would depend on which thread ran them.

    The number belongs to the thread that sets it, but threads that have not used torch yet begin with the last one that
    was set. So another thread sets it back.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    other = threading.Thread(target=torch.set_num_threads, args=(before,))
    other.start()
    other.join()


def _submit(task: Callable[[], None]) -> Future[None]:
    global _pool
    if _pool is None:
        _pool = ThreadPoolExecutor(max_threads(), thread_name_prefix="drm", initializer=_start_thread)
    return _pool.submit(task)


def run(tasks: Iterable[Callable[[], Any]]) -> None:
    """Run each task once, on all threads in use including the caller's; return when all are done."""
    tasks = list(tasks)
    if min(n_threads(), len(tasks)) == 1:
        for task in tasks:
            task()
        return
    waiting = iter(tasks)  # next() on a list iterator is atomic

    def work() -> None:
        for task in waiting:
            task()

    others = [_submit(work) for _ in range(min(n_threads(), len(tasks)) - 1)]
    try:
        work()
    finally:
        # An idle processor may take milliseconds to wake up. A thread that has not begun by now is not needed: no task
        # is left, or one has failed.
        begun = [other for other in others if not other.cancel()]
        wait(begun)
    for other in begun:
        other.result()


def split(kernel: Callable[..., None], size: int, grain: int, *args: Any) -> None:
    """Call kernel(start, stop, *args) on chunks of range(size) of at least `grain`, on all threads."""
    threads = n_threads()
    chunks = 1 if threads == 1 else max(1, min(CHUNKS_PER_THREAD * threads, size // grain))
    bounds = [size * i // chunks for i in range(chunks + 1)]
    run(partial(kernel, start, stop, *args) for start, stop in pairwise(bounds))
