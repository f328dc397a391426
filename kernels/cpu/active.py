"""The active items of a long list: those that take part in its relaxed top K.

Sort the scores, s_1 >= s_2 >= ... With D(theta) = (s_K - theta) + 2 sum_{l > K} max(0, s_l - theta), an item with a
score of at most theta has P_k <= exp(-D(theta) / tau) for each rank k <= K. With D(theta) = T tau, all items that take
part are above theta, and the relaxed top K of the list is that of these items alone. docs/objective.md has the proof.

The list is not sorted. A heap finds s_K, and Newton's method finds theta with a few passes over the scores. D is convex
and falls with theta, so all steps from below stay below: theta is too low, and some items are kept in vain, but never
too high.
"""

import math

import numpy as np

from drm_triton.kernels.cpu.runtime.jit import inline
from drm_triton.kernels.cpu.runtime.simd import LANES, between, largest

ACTIVE_MIN = 64  # shortest list whose active items are found; in shorter ones, nearly all items are active
BLOCK = 4 * LANES  # entries that are skipped at once if none of them is large enough
FLOAT32_MARGIN, FLOAT64_MARGIN = 30.0, 40.0  # T - log n; n exp(-T) is below the rounding of one operation


@inline
def kth_largest(x, K, heap):
    """Return the K-th largest number of x. `heap` [K] is filled with the K largest, the smallest of them first."""
    for j in range(K):
        heap[j] = x[j]
    for start in range(K // 2 - 1, -1, -1):
        sift(heap, K, start)
    for start in range(K, x.size, BLOCK):
        block = x[start : start + BLOCK]
        if largest(block) > heap[0]:
            for j in range(block.size):
                if block[j] > heap[0]:
                    heap[0] = block[j]
                    sift(heap, K, 0)
    return heap[0]


@inline
def sift(heap, K, start):
    """Move the entry at `start` down to its place in the heap."""
    value, hole, child = heap[start], start, 2 * start + 1
    while child < K:
        if child + 1 < K and heap[child + 1] < heap[child]:
            child += 1
        if heap[child] >= value:
            break
        heap[hole] = heap[child]
        hole, child = child, 2 * child + 1
    heap[hole] = value


@inline
def active_threshold(x, n, K, tau, heap):
    """Return a score such that only items with at least this score take part in the first K ranks.

    x : scores of the n items of the list, and any number of entries -inf
    heap : buffer of K numbers
    """
    real, info = x.dtype.type, np.finfo(x.dtype)
    found = real(info.min)
    if n <= K:
        return found
    kth = kth_largest(x, K, heap)
    _, number = between(x, -real(np.inf), kth)
    ties = n - K - np.int64(number) if n < 2**24 else 0  # items after the K-th with its score; float32 counts so far
    margin = FLOAT32_MARGIN if x.itemsize == 4 else FLOAT64_MARGIN
    target = (margin + math.log(n)) * tau * (1 + (n + 8) * info.eps)  # the last factor is for the rounding of D
    theta, kept = max(real(kth - target - 4 * info.eps * abs(kth)), found), real(np.inf)
    while True:
        total, number = between(x, theta, kth)
        reached = (1 + 2 * ties) * np.float64(kth - theta) + 2 * np.float64(total)  # D(theta)
        if reached < target:  # only rounding can bring a step here
            return found
        found = theta
        if number >= real(0.9) * kept:  # also if both are 0
            return found
        kept, theta = number, real(theta + (reached - target) / (1 + 2 * ties + 2 * number))


@inline
def find_active(x, theta, positions):
    """Write the positions of the items with a score of at least theta to `positions`; return their number."""
    m = 0
    for start in range(0, x.size, BLOCK):
        block = x[start : start + BLOCK]
        if largest(block) >= theta:
            for j in range(block.size):
                positions[m] = start + j
                m += block[j] >= theta
    return m


@inline
def gather(x, positions, packed):
    """Copy the entries at `positions`, which ascend. `packed` may be x."""
    for i in range(positions.size):
        packed[i] = x[positions[i]]


@inline
def scatter(packed, positions, x):
    """Copy to the entries at `positions`; the others become 0."""
    x[:] = 0
    for i in range(positions.size):
        x[positions[i]] = packed[i]
