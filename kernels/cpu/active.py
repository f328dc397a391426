"""The active items of a long list: those that take part in its relaxed top K.

Sort the scores, s_1 >= s_2 >= ... With D(theta) = (s_K - theta) + 2 sum_{l > K} max(0, s_l - theta), an item with a
score of at most theta has P_k <= exp(-D(theta) / tau) for each rank k <= K. With D(theta) = T tau, all items that take
part are above theta, and the relaxed top K of the list is that of these items alone. docs/objective.md has the proof.

The list is not sorted. A heap finds s_K, and Newton's method finds theta with a few passes over the scores. D is convex
and falls with theta, so a step from either side leads below: theta may be too low, so that some items are kept
that take no part, but is never too high. The first step starts from the theta of a sample of the scores.
"""

import math

import numpy as np

from drm_triton.kernels.cpu.runtime.bits import count_at_least
from drm_triton.kernels.cpu.runtime.jit import inline
from drm_triton.kernels.cpu.runtime.simd import LANES, between, largest
from drm_triton.kernels.protocol import FLOAT32_MARGIN, FLOAT64_MARGIN

ACTIVE_MIN = 64  # shortest list whose active items are found; in shorter ones, nearly all items are active
SCAN_BLOCK = 4 * LANES  # entries that are skipped at once if none of them is large enough
SAMPLE, SAMPLE_MIN = 8, 512  # lists from SAMPLE_MIN on have a sample: about the first one of SAMPLE parts
AIM = 0.01  # part of the target by which steps stay below its theta
WORTHWHILE = 0.9  # a step of Newton's method is followed by another one if it drops a tenth of the items


@inline
def kth_largest(x, K, heap):
    """Return the K-th largest number of x. `heap` [K] is filled with the K largest, the smallest of them first."""
    for j in range(K):
        heap[j] = x[j]
    for start in range(K // 2 - 1, -1, -1):
        sift(heap, K, start)
    for start in range(K, x.size, SCAN_BLOCK):
        block = x[start : start + SCAN_BLOCK]
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
def excess(x, theta, kth, ties, copies):
    """Return D(theta) and minus its slope. `ties` items after the K-th have its score; x counts `copies` times."""
    total, number = between(x, theta, kth)
    return (1 + 2 * ties) * np.float64(kth - theta) + 2 * copies * np.float64(total), 1 + 2 * ties + 2 * copies * number


@inline
def step(theta, reached, slope, target):
    """Return the next theta of Newton's method. It aims above the target, which rounding could miss otherwise."""
    return theta + (reached - (1 + AIM) * target) / slope


@inline
def climb(x, theta, kth, ties, copies, target, found):
    """Return the last theta of Newton's method with D(theta) >= target, or `found` if there is none.

    It begins with a theta that is not too high, and ends if a step drops few items.
    """
    kept = np.inf
    while True:
        reached, slope = excess(x, theta, kth, ties, copies)
        if reached < target:  # only rounding can bring a step here
            return found
        found = theta
        if slope >= WORTHWHILE * kept:
            return found
        kept, theta = slope, x.dtype.type(step(theta, reached, slope, target))


@inline
def active_threshold(x, n, K, tau, heap):
    """Return a score such that only items with at least this score take part in the first K ranks.

    x : scores of the n items of the list, and any number of entries -inf
    heap : buffer of K numbers
    """
    real, info = x.dtype.type, np.finfo(x.dtype)
    lowest = real(info.min)
    if n <= K:
        return lowest
    kth = largest(x) if K == 1 else kth_largest(x, K, heap)
    ties = count_at_least(x, kth) - K
    margin = FLOAT32_MARGIN if x.itemsize == 4 else FLOAT64_MARGIN
    target = (margin + math.log(n)) * tau * (1 + (n + 8) * info.eps)  # the last factor is for the rounding of D
    theta = max(real(kth - target - 4 * info.eps * abs(kth)), lowest)
    if x.size >= SAMPLE_MIN:
        size = x.size // (SAMPLE * SCAN_BLOCK) * SCAN_BLOCK  # whole vectors
        guess = climb(x[:size], theta, kth, ties, x.size / size, target, theta)
        reached, slope = excess(x, guess, kth, ties, 1)
        theta = max(theta, real(step(guess, reached, slope, target)))
    return climb(x, theta, kth, ties, 1, target, lowest)


@inline
def gather(x, positions, packed):
    """Copy the entries at `positions`."""
    for i in range(positions.size):
        packed[i] = x[positions[i]]


@inline
def scatter(packed, positions, x):
    """Copy to the entries at `positions`; the others become 0."""
    x[:] = 0
    for i in range(positions.size):
        x[positions[i]] = packed[i]
