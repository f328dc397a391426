"""Threads and cache of the CPU kernels."""

import hashlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest
import torch

from drm_triton.kernels import cpu
from drm_triton.kernels.cpu.runtime import threads
from drm_triton.kernels.cpu.runtime.arrays import KEPT, LARGE, _kept, empty
from drm_triton.kernels.cpu.runtime.numba_private import max_threads
from tests.conftest import HANG, ROOT, environment, run_python


def test_python_threads_may_call_at_once() -> None:
    g = torch.Generator().manual_seed(6)
    queries, V = torch.randn(500, 8, generator=g), torch.randn(500, 8, generator=g)
    items = cpu.pack_items(V, "dot")
    want, results = cpu.top_k(queries, items, 5)[0], []
    workers = [threading.Thread(target=lambda: results.append(cpu.top_k(queries, items, 5)[0])) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=HANG)
    assert len(results) == 4
    assert all(torch.equal(result, want) for result in results)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_can_compute_and_torch_keeps_its_threads() -> None:
    program = """
import os, torch
from drm_triton.kernels import cpu
queries, items = torch.ones(500, 4), cpu.pack_items(torch.ones(50, 4), "dot")
cpu.top_k(queries, items, 5)
assert torch.get_num_threads() == 1
child = os.fork()
if child == 0:
    os._exit(0 if cpu.top_k(queries, items, 5)[0][0].tolist() == [0, 1, 2, 3, 4] else 1)
assert os.waitpid(child, 0)[1] == 0
"""
    done = run_python("-c", program, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr


def test_large_memory_is_used_again_once_nobody_refers_to_it() -> None:
    _kept.clear()  # of other tests
    size = LARGE // 4
    first, second = empty(torch.float32, 2, size), empty(torch.float32, 2, size)
    address, part = first.data_ptr(), first[1].numpy()
    assert second.data_ptr() != address
    del first
    third = empty(torch.int32, size, 2)
    assert third.dtype == torch.int32
    assert third.shape == (size, 2)
    assert third.data_ptr() != address  # `part` still refers to that memory
    del part
    assert empty(torch.float32, size + 1).data_ptr() == address
    assert empty(torch.float32, size - 1).nbytes < LARGE  # small memory is not kept


def test_memory_beyond_what_is_kept() -> None:
    _kept.clear()  # of other tests
    tensors = [empty(torch.float32, LARGE) for _ in range(KEPT + 2)]
    assert len({tensor.data_ptr() for tensor in tensors}) == KEPT + 2
    del tensors
    large = empty(torch.bool, 64 * LARGE)  # no block fits: it takes the place of a free one
    assert len(_kept) == KEPT
    assert any(block.size == large.nbytes for block in _kept)


@pytest.mark.skipif(max_threads() < 2, reason="one thread")
def test_a_thread_that_has_not_begun_is_not_waited_for() -> None:
    threads.set_threads(2)
    begun, busy, done = threading.Barrier(3, timeout=HANG), threading.Event(), []

    def keep_busy() -> None:
        threads.set_threads(2)
        threads.run([lambda: (begun.wait(), busy.wait(HANG))] * 2)

    other = threading.Thread(target=keep_busy)  # with the thread that the next call would use
    other.start()
    try:
        begun.wait()
        threads.run([lambda: done.append(1)] * 5)
        assert len(done) == 5
    finally:
        busy.set()
        other.join()


@pytest.mark.skipif(max_threads() < 2, reason="one thread")
def test_an_error_is_raised_when_all_begun_tasks_are_done() -> None:
    threads.set_threads(2)
    begun, done = threading.Barrier(2, timeout=HANG), []

    def fail() -> None:
        begun.wait()
        raise ValueError("one")

    def finish() -> None:
        begun.wait()
        time.sleep(0.05)
        done.append(1)

    for tasks in ([fail, finish], [finish, fail]):
        done.clear()
        with pytest.raises(ValueError, match="one"):
            threads.run(tasks)
        assert done == [1]


def test_torch_has_one_thread_in_each_thread_of_the_pool() -> None:
    """If it had more, a product would have other bits than one that the calling thread computes."""
    program = """
import threading, torch
from drm_triton.kernels.cpu.runtime import threads
barrier, found = threading.Barrier(2), {}
def task():
    barrier.wait()  # so that both threads take one
    found[threading.current_thread().name] = torch.get_num_threads()
threads.run([task, task])
assert found.pop("MainThread") == 2
assert list(found.values()) == [1]
new = threading.Thread(target=lambda: found.update(new=torch.get_num_threads()))
new.start()
new.join()
assert found["new"] == torch.get_num_threads() == 2  # threads of others are left alone
"""
    done = run_python("-c", program, OMP_NUM_THREADS="2", NUMBA_NUM_THREADS="2")
    assert done.returncode == 0, done.stderr


def test_products_have_the_same_bits_on_every_thread() -> None:
    program = """
import torch
from tests.kernels.test_catalogue import case, objective
from drm_triton.kernels import cpu
from drm_triton.kernels.cpu.runtime.arrays import KEPT, LARGE, _kept, empty
U, V, batch = case(4, 70, 80, 40, 16)
first = cpu.catalogue_gradients(U, V, batch, objective())
for _ in range(2000):
    assert all(map(torch.equal, cpu.catalogue_gradients(U, V, batch, objective()), first))
"""
    done = run_python("-c", program, OMP_NUM_THREADS="2", NUMBA_NUM_THREADS="2", PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr


def test_without_a_writable_cache(tmp_path: Path) -> None:
    """Without a directory for compiled code, each process compiles it again, here without AVX as Numba can be told."""
    (tmp_path / "file").touch()
    program = """
import torch
from drm_triton.kernels import cpu
print(cpu.top_k(torch.ones(1, 2), cpu.pack_items(torch.ones(3, 2), "dot"), 2)[0].tolist())
"""
    done = run_python("-c", program, NUMBA_ENABLE_AVX="0", NUMBA_CACHE_DIR=str(tmp_path / "file"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[[0, 1]]"
    assert "each process compiles them again" in done.stderr


# A kernel whose code is compiled in no time, and whether it came from the cache.
CACHED = """
import sys, numpy as np
from drm_triton.kernels.cpu.runtime import jit
sys.path.insert(0, sys.argv[1])
from small import twice
print(twice(np.float32(4)), sum(twice.stats.cache_hits.values()))
"""
SMALL = """
from drm_triton.kernels.cpu.runtime.jit import kernel

@kernel
def twice(x):
    return 2 * x
"""


def run_cached(folder: Path, cache: Path, **changes: str) -> str:
    """Run the small kernel in a new process; return its result and the number of hits."""
    (folder / "small.py").write_text(SMALL)
    done = run_python("-c", CACHED, folder, NUMBA_CACHE_DIR=str(cache), **changes)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# The same for each line that it reads, in a process that is forked from one that has imported everything else.
FORKED = """
import os, sys, numba, numpy as np
from drm_triton.kernels.cpu.runtime import jit
sys.path.insert(0, sys.argv[1])
numba.njit(lambda x: 3 * x)(np.float32(4))  # lets Numba prepare what it compiles with, not in the cache
for line in sys.stdin:
    if os.fork() == 0:
        from small import twice
        print(twice(np.float32(4)), sum(twice.stats.cache_hits.values()), flush=True)
        os._exit(0)
    os.wait()
"""


@contextmanager
def cached_runs(folder: Path, cache: Path, **changes: str) -> Iterator[Callable[[], str]]:
    """Yield what does the same as `run_cached`, without the time to start Python where processes can be forked."""
    if not hasattr(os, "fork"):
        yield lambda: run_cached(folder, cache, **changes)
        return
    (folder / "small.py").write_text(SMALL)
    words, variables = [sys.executable, "-c", FORKED, str(folder)], environment(NUMBA_CACHE_DIR=str(cache), **changes)
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=variables) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def run(to: IO[str] = process.stdin, answers: IO[str] = process.stdout) -> str:
            print(file=to, flush=True)
            return answers.readline().strip()

        yield run


def flipped(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


def test_damaged_files_of_the_cache_are_compiled_again(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with cached_runs(tmp_path, cache) as run:
        assert run() == "8.0 0"
        assert run() == "8.0 1"
        (file,) = cache.rglob("*.nbc")
        whole = file.read_bytes()
        for damaged in (b"", whole[: len(whole) // 2], flipped(whole), b"x" * 100, hashlib.sha256(b"").digest()):
            file.write_bytes(damaged)
            assert run() == "8.0 0", damaged[:20]
            assert file.read_bytes()[32:] != damaged[32:]
            assert run() == "8.0 1"
    assert [path.suffix for path in cache.rglob("*") if path.is_file()] == [".nbc"]


def test_a_cache_on_a_full_disk_is_no_error(tmp_path: Path) -> None:
    full = "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
    full += "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
    (tmp_path / "small.py").write_text(SMALL)
    done = run_python("-c", full + CACHED, tmp_path, NUMBA_CACHE_DIR=str(tmp_path / "cache"))
    assert (done.returncode, done.stdout, done.stderr) == (0, "8.0 0\n", "")
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


@pytest.mark.skipif(os.name == "nt", reason="permission bits")
def test_a_cache_that_others_can_write_to_is_not_used(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    cache.chmod(0o777)
    assert run_cached(tmp_path, cache) == "8.0 0"
    assert not list(cache.rglob("*.nbc"))
    cache.chmod(0o755)
    with cached_runs(tmp_path, cache) as run:
        assert run() == "8.0 0"
        assert run() == "8.0 1"


def test_code_with_bounds_checks_is_kept_apart(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with cached_runs(tmp_path, cache, NUMBA_BOUNDSCHECK="0") as run:  # also where the tests run with them
        run()
        assert run_cached(tmp_path, cache, NUMBA_BOUNDSCHECK="1") == "8.0 0"
        assert run() == "8.0 1"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_forked_workers_survive_the_kill_of_others() -> None:
    """Numba has a lock between the processes of one parent; a worker that is killed could hold it for ever."""
    program = """
import os, signal, time, torch
import numba, numba.np.ufunc.parallel as parallel
from drm_triton.kernels import cpu
from drm_triton.kernels.cpu.runtime.threads import n_threads, set_threads
queries, items = torch.ones(500, 4), cpu.pack_items(torch.ones(50, 4), "dot")
cpu.top_k(queries, items, 5)
numba.get_num_threads()  # as other libraries do: this makes the lock
children = []
for number in range(4):
    children.append(os.fork())
    if children[-1] == 0:
        signal.alarm(300)  # a worker that hangs dies by this signal
        if number == 0:  # dies with the lock of Numba, as a worker does that is killed at the wrong moment
            parallel._backend_init_process_lock.acquire()
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.5)
        set_threads(2)
        for _ in range(20):
            assert cpu.top_k(queries, items, 5)[0][0].tolist() == [0, 1, 2, 3, 4]
        os._exit(n_threads() - 2)
codes = [os.waitpid(child, 0)[1] for child in children]
print(codes)
"""
    done = run_python("-c", program, OMP_NUM_THREADS="1", NUMBA_NUM_THREADS="2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[9, 0, 0, 0]"
