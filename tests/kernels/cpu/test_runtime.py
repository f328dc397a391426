"""Threads and cache of the CPU kernels."""

import os
import threading

import pytest
import torch

from drm_triton.kernels import cpu
from tests.conftest import HANG, run_python


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


def test_without_a_writable_cache() -> None:
    """Without a directory for compiled code, each process compiles it again, here without AVX as Numba can be told."""
    program = """
import numba.core.caching as caching
caching.CacheImpl._locator_classes = []
import torch
from drm_triton.kernels import cpu
print(cpu.top_k(torch.ones(1, 2), cpu.pack_items(torch.ones(3, 2), "dot"), 2)[0].tolist())
"""
    done = run_python("-c", program, NUMBA_ENABLE_AVX="0")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[[0, 1]]"
