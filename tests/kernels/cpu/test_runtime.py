"""Threads and cache of the CPU kernels."""

import os
import threading

import pytest
import torch

from drm_triton.kernels import cpu
from drm_triton.kernels.cpu.runtime.arrays import KEPT, LARGE, _kept, empty
from tests.conftest import HANG, ROOT, run_python


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
from drm_triton.kernels.cpu.runtime.arrays import KEPT, LARGE, _kept, empty
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


def test_without_a_writable_cache() -> None:
    """Without a directory for compiled code, each process compiles it again, here without AVX as Numba can be told."""
    program = """
import numba.core.caching as caching
caching.CacheImpl._locator_classes = []
import torch
from drm_triton.kernels import cpu
from drm_triton.kernels.cpu.runtime.arrays import KEPT, LARGE, _kept, empty
print(cpu.top_k(torch.ones(1, 2), cpu.pack_items(torch.ones(3, 2), "dot"), 2)[0].tolist())
"""
    done = run_python("-c", program, NUMBA_ENABLE_AVX="0")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[[0, 1]]"
