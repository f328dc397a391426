"""Helpers of the tests of pair models: the test case of the vectors, and small data with a structure to learn."""

import numpy as np

from drm_triton.data.csr import CSR
from drm_triton.data.dataset import Dataset
from drm_triton.kernels.cpu.pairs import Tables, Task

U = np.array([[-0.5, 0.25], [0, -0.5], [0.5, 0], [-0.25, 0.5]], np.float32)
V = np.array([[-0.75, -0.25], [0.5, -0.75], [0, 0.5], [-0.5, 0], [0.75, -0.5]], np.float32)
GROUPS = 10


def tables(bias: list[float], states: bool) -> Tables:
    """Return fresh tables of the test case."""
    b = np.array(bias, np.float32)
    state = np.ones_like if states else lambda x: np.empty((0,) * x.ndim, np.float32)
    return Tables(U.copy(), V.copy(), b, state(U), state(V), state(b))


def task(pairs: list[tuple[int, int]], candidates: list[int], liked: list[list[int]], seed: int = 0) -> Task:
    """Return a task on given pairs; `liked` are the items of each user."""
    matrix = CSR.from_pairs(
        np.repeat(np.arange(len(liked)), [len(row) for row in liked]), np.concatenate(liked), (4, 5)
    )
    packed = np.array([user << 32 | item for user, item in pairs])
    return Task(np.uint64(seed), np.uint64(0), 0, packed, np.array(candidates), matrix.indptr, matrix.indices)


def clusters(n_users: int = 400, n_items: int = 300, noise: float = 0.25) -> Dataset:
    """Return users who mostly have items of their group; a fifth of the interactions is the test part."""
    rng = np.random.default_rng(0)
    rows = []
    for user in range(n_users):
        own = np.flatnonzero(np.arange(n_items) % GROUPS == user % GROUPS)
        count = rng.integers(10, 20)
        random = rng.random(count) < noise
        rows.append(np.unique(np.where(random, rng.integers(0, n_items, count), rng.choice(own, count))))
    pairs = np.repeat(np.arange(n_users), [len(row) for row in rows]), np.concatenate(rows)
    train = rng.random(len(pairs[0])) < 0.8
    parts = [CSR.from_pairs(pairs[0][part], pairs[1][part], (n_users, n_items)) for part in (train, ~train)]
    return Dataset.from_csr(parts[0].to_scipy(), test=parts[1].to_scipy(), n_items=n_items)


def welch(a: list[float], b: list[float]) -> float:
    """Return the t statistic of the difference of two means."""
    x, y = np.array(a), np.array(b)
    return float((x.mean() - y.mean()) / np.sqrt(x.var(ddof=1) / len(x) + y.var(ddof=1) / len(y)))
