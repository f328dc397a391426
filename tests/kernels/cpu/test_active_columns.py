"""`find_active`: the active items of WIDTH lists at once, against the relaxed ranks in float64."""

import math
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from drm_triton.kernels.cpu.active import ACTIVE_MIN, SAMPLE_MIN
from drm_triton.kernels.cpu.active_columns import TOGETHER, active_buffers, find_active
from drm_triton.kernels.cpu.columns import column_buffers
from drm_triton.kernels.cpu.runtime.bits import BITS
from drm_triton.kernels.cpu.runtime.jit import allocating, kernel
from drm_triton.kernels.cpu.runtime.simd import WIDTH
from drm_triton.names import TAU_RANGE
from tests.kernels.conftest import LARGEST, SCORES, SURE32, relaxed_rank


class Found(NamedTuple):
    """What `find_active` found. L is WIDTH."""

    rows: int
    size: NDArray[np.int64]  # [L]
    s: NDArray[np.float32]  # [rows, L]
    order: NDArray[np.int32]  # [rows, L]


@allocating
def finder_buffers(n: int, ranks: int) -> Any:
    return active_buffers(n, ranks), column_buffers(n + TOGETHER, 1)


@kernel
def find(s: Any, n: int, top: Any, taken: Any, tau: float, buffers: Any, columns: Any) -> Any:
    return find_active(s, n, top, taken, tau, buffers, columns)


def found_in(lists: NDArray[np.float32], K: int, tau: float, taken: NDArray[np.bool_] | None = None) -> Found:
    """Find the active items of lists [n, L]."""
    n = len(lists)
    s = np.full((-(-n // BITS) * BITS, WIDTH), -np.inf, np.float32)
    s[:n] = lists
    buffers, columns = finder_buffers(n, K)
    taken = np.ones(WIDTH, np.bool_) if taken is None else taken
    rows = find(s, n, s[:n].max(0), taken, tau, buffers, columns)
    return Found(rows, columns.size.astype(np.int64), columns.s[:rows], columns.order[:rows])


def assert_sure(lists: NDArray[np.float32], K: int, tau: float) -> None:
    """Check the bound for each list, and what the columns contain."""
    n, found = len(lists), found_in(lists, K, tau)
    limit = math.exp(-SURE32 - math.log(n)) * (1 + 1e-9)
    assert found.rows == found.size.max() <= n
    for t in range(WIDTH):
        s, size = lists[:, t], found.size[t]
        kept = found.order[:size, t]
        assert size >= min(K, n)
        assert (np.diff(kept) > 0).all()
        assert np.array_equal(found.s[:size, t], s[kept])
        assert np.array_equal(kept, np.flatnonzero(s >= s[kept].min()))  # the top of the ranking, with its ties
        assert (found.s[size:, t] == -np.inf).all()
        assert (found.order[size:, t] == n).all()
        if size < n:
            ranking = np.sort(s)[::-1]
            for rank in {1, 2, 3, K // 2, K - 1, K} & set(range(1, K + 1)):
                assert relaxed_rank(ranking, rank, tau)[size:].max() <= limit, f"list {t}, rank {rank}"


TAUS = [TAU_RANGE[0], 1e-30, 1e-6, 1e-3, 0.1, 0.5, 1.0, 10.0, 1e3, 1e6, 1e30, 1e34, 1e36, TAU_RANGE[1]]


@given(
    seed=st.integers(0, 2**32),
    n=st.one_of(st.integers(ACTIVE_MIN, 200), st.integers(SAMPLE_MIN - 2, SAMPLE_MIN + 2), st.integers(500, 4000)),
    K=st.sampled_from([1, 1, 2, 5, 20, 0.5, -1, 0]),
    tau=st.sampled_from(TAUS),
    kinds=st.lists(st.sampled_from(list(SCORES)), min_size=1, max_size=4),
    values=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=100),
    relative=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_no_item_that_takes_part_is_missed(
    seed: int, n: int, K: float, tau: float, kinds: list[str], values: list[float], relative: bool
) -> None:
    """Lists of one kind or of several, and one of the values that Hypothesis chooses, repeated.

    K below 1 is a share of n, or n + K. A relative tau is multiplied by the size of the scores.
    """
    g = np.random.default_rng(seed)
    with np.errstate(over="ignore"):
        columns = [np.clip(SCORES[kind](g, n), -LARGEST, LARGEST).astype(np.float32) for kind in kinds]
    columns += [np.resize(np.array(values, np.float32), n)] if values else []
    lists = np.stack([columns[t % len(columns)] for t in range(WIDTH)], axis=1)
    if relative:
        tau = float(np.clip(tau * np.abs(lists).mean(dtype=np.float64), *TAU_RANGE))
    assert_sure(lists, int(K) if K >= 1 else n + int(K) if K <= 0 else int(K * n), tau)


@pytest.mark.parametrize("tau", [0.5 + i / 78 for i in (5, 37, 49)])
def test_a_step_that_rounding_leads_above_the_largest_scores_keeps_all_items(tau: float) -> None:
    """3,000 equal scores are the K largest, and all others are just below them.

    The sum of their distances to a low theta is off by more than the last of them is from theta. The step then leads
    above s_K, where D is negative, but where the number of ties, which is counted above theta, would be so too.
    """
    n, K = 30_000, 3000
    lists = np.full((n, WIDTH), -1e-7, np.float32) * np.arange(1, WIDTH + 1, dtype=np.float32)
    lists[n // 8 : n // 8 + K] = 0  # not in the sample
    assert (found_in(lists, K, tau).size == n).all()


def test_lists_are_found_alone() -> None:
    """What is found in a list does not depend on the others of a tile; nothing is in a list that is not taken."""
    g = np.random.default_rng(0)
    n, K = 700, 5
    kinds = [np.clip(draw(g, n), -LARGEST, LARGEST).astype(np.float32) for draw in SCORES.values()]
    lists = np.stack([kinds[t % len(kinds)] for t in range(WIDTH)], axis=1)
    together = found_in(lists, K, 0.5)
    taken = np.arange(WIDTH) % 3 != 0
    lists[1, ~taken] = np.nan
    some = found_in(lists, K, 0.5, taken)
    assert np.array_equal(some.size, np.where(taken, together.size, 0))
    for t in np.flatnonzero(taken):
        alone = found_in(np.repeat(lists[:, [t]], WIDTH, axis=1), K, 0.5)
        kept = together.order[: together.size[t], t]
        assert np.array_equal(some.order[: some.size[t], t], kept)
        assert np.array_equal(alone.order[: alone.size[0], 0], kept)
    assert found_in(lists, K, 0.5, np.zeros(WIDTH, np.bool_)).rows == 0
