import random
from collections.abc import Callable, Iterable

import numpy as np
import pytest
import scipy.sparse
import scipy.sparse.linalg
import torch

from drm_triton.config import TrainConfig
from drm_triton.data.dataset import CSR
from drm_triton.kernels.cpu.runtime import threads
from drm_triton.training import initialize
from drm_triton.training.initialize import initial_factors, spectral


def blocks(users: int = 30, items: int = 20) -> CSR:
    rng = np.random.default_rng(0)
    same = np.arange(users)[:, None] % 3 == np.arange(items) % 3
    rows, columns = np.nonzero(rng.random((users, items)) < np.where(same, 0.8, 0.05))
    return CSR.from_pairs(rows, columns, (users, items))


def test_spectral_scores_are_those_of_the_truncated_svd() -> None:
    train, d = blocks(), 3
    U, V = spectral(train, d, seed=0)
    R = train.to_scipy(np.float64)
    scale = [scipy.sparse.diags(1 / np.sqrt(np.maximum(np.asarray(R.sum(axis)).ravel(), 1))) for axis in (1, 0)]
    P, S, Qt = np.linalg.svd((scale[0] @ R @ scale[1]).toarray())
    for ours, exact in ((U, P[:, :d] * np.sqrt(S[:d])), (V, Qt[:d].T * np.sqrt(S[:d]))):
        exact = 0.9 * exact / np.linalg.norm(exact, axis=1, keepdims=True)
        # singular vectors are known up to their sign, so compare inner products
        np.testing.assert_allclose(ours.numpy() @ ours.numpy().T, exact @ exact.T, atol=1e-3)


def test_spectral_does_not_depend_on_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads share the blocks of a table; one thread and blocks in any order give the same bits."""
    monkeypatch.setattr(initialize, "BLOCK_ROWS", 128)
    monkeypatch.setattr(initialize, "BLOCKS_AT_ONCE", 3)
    tasks_of_calls: list[int] = []
    run = threads.run

    def count(tasks: Iterable[Callable[[], object]]) -> None:
        shuffled = random.sample(tasks := list(tasks), len(tasks))
        tasks_of_calls.append(len(tasks))
        run(shuffled)

    monkeypatch.setattr(threads, "run", count)
    before, results = threads.n_threads(), []
    try:
        for number in (2, 1, 2):
            threads.set_threads(number)
            torch.set_num_threads(number)
            results.append(spectral(blocks(1000, 700), 16, seed=0))
            assert torch.get_num_threads() == number
    finally:
        threads.set_threads(before)
    assert max(tasks_of_calls) == 8  # all blocks of a product of 1,000 rows
    for U, V in results[1:]:
        assert torch.equal(U, results[0][0])
        assert torch.equal(V, results[0][1])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_spectral_on_a_gpu() -> None:
    train = blocks(1000, 700)
    for ours, on_cpu in zip(spectral(train, 16, 0, torch.device("cuda")), spectral(train, 16, 0), strict=True):
        assert ours.is_cuda
        torch.testing.assert_close(ours.cpu() @ ours.cpu().T, on_cpu @ on_cpu.T, atol=1e-3, rtol=0)


def test_more_factors_than_rank_and_empty_rows() -> None:
    train = CSR.from_pairs(np.array([0, 0, 2]), np.array([0, 1, 1]), (4, 3))
    U, V = spectral(train, 8, seed=0)
    assert U.shape == (4, 8)
    assert V.shape == (3, 8)
    np.testing.assert_allclose(U.norm(dim=1), [0.9, 0, 0.9, 0], atol=1e-6)
    assert torch.isfinite(V).all()


def test_normal_factors_are_small_and_seeded() -> None:
    train = blocks()
    U, V, start = initial_factors(TrainConfig(init="normal", factors=64), train)
    assert start == 0
    assert 0.05 < U.norm(dim=1).mean() < 0.15
    again, _, _ = initial_factors(TrainConfig(init="normal", factors=64), train)
    other, _, _ = initial_factors(TrainConfig(init="normal", factors=64, seed=1), train)
    assert torch.equal(U, again)
    assert not torch.equal(U, other)
    assert V.shape == (20, 64)
