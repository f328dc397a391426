"""Threads for the CPU kernels: compiled code that releases the GIL, run in parts by a pool of Python threads.

Numba's own parallel layers are not used: depending on the platform they abort the process when two Python threads
enter them at once, or after a fork. The number of threads is Numba's (`NUMBA_NUM_THREADS`, `numba.set_num_threads`).
"""

import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from typing import Any

import numba

_pool: ThreadPoolExecutor | None = None


def _forget_pool() -> None:
    global _pool
    _pool = None


if hasattr(os, "register_at_fork"):  # a forked child has the pool object, but none of its threads
    os.register_at_fork(after_in_child=_forget_pool)


def set_threads(threads: int) -> None:
    """Use so many threads, or as many as there are."""
    numba.set_num_threads(min(threads, int(numba.config.NUMBA_NUM_THREADS)))  # type: ignore[attr-defined]


def n_threads() -> int:
    """Threads in use."""
    return int(numba.get_num_threads())


def _submit(task: Callable[[], None]) -> Future:
    global _pool
    if _pool is None:
        _pool = ThreadPoolExecutor(int(numba.config.NUMBA_NUM_THREADS), thread_name_prefix="drm")  # type: ignore[attr-defined]
    return _pool.submit(task)


def run(tasks: Iterable[Callable[[], Any]]) -> None:
    """Run each task once, on as many threads as are in use, this one included; return when all are done."""
    tasks = list(tasks)
    waiting = iter(tasks)  # next() on a list iterator is atomic

    def work() -> None:
        for task in waiting:
            task()

    others = [_submit(work) for _ in range(min(n_threads(), len(tasks)) - 1)]
    try:
        work()
    finally:
        for other in others:
            other.result()


def split(kernel: Callable[..., None], size: int, grain: int, *args: Any) -> None:
    """Call kernel(start, stop, *args) on parts of range(size) of at least `grain`, on all threads."""
    threads = n_threads()
    # Four parts per thread even out what a busy machine does to one of them.
    parts = 1 if threads == 1 else max(1, min(4 * threads, size // grain))
    bounds = [size * i // parts for i in range(parts + 1)]
    run(partial(kernel, start, stop, *args) for start, stop in pairwise(bounds))
