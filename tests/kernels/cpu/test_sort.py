"""Sorting of columns."""

import numpy as np
import pytest

from drm_triton.kernels.cpu.runtime.jit import allocating
from drm_triton.kernels.cpu.runtime.simd import WIDTH
from drm_triton.kernels.cpu.runtime.sort import sort_buffers, sort_columns


@allocating
def call(size, s, order):  # type: ignore[no-untyped-def]
    sort_columns(size, s, order, sort_buffers(s.shape[0]))


@pytest.mark.parametrize("n", [*range(1, 68), 100, 127, 128, 129, 165, 255, 256, 257, 511, 600, 1001, 2048, 5000])
@pytest.mark.parametrize("values", ["distinct", "few", "zeros and ones", "sorted", "reversed", "absent"])
def test_columns_descend_and_each_number_keeps_its_place(n: int, values: str) -> None:
    rng = np.random.default_rng(n)
    numbers = rng.standard_normal((n, WIDTH))
    match values:
        case "few":
            numbers = rng.integers(-2, 3, (n, WIDTH)).astype(np.float64)
        case "zeros and ones":  # a network that sorts all of these sorts everything
            numbers = (rng.random((n, WIDTH)) < np.linspace(0, 1, WIDTH)).astype(np.float64)
        case "sorted":
            numbers = -np.sort(-numbers, axis=0)
        case "reversed":
            numbers = np.sort(numbers, axis=0)
        case "absent":
            numbers[rng.random((n, WIDTH)) < 0.3] = -np.inf
    before, order = numbers.astype(np.float32), np.arange(n, dtype=np.int32)[:, None].repeat(WIDTH, 1)
    s = before.copy()
    call(np.full(WIDTH, n, np.float32), s, order)
    np.testing.assert_array_equal(s, -np.sort(-before, axis=0))
    np.testing.assert_array_equal(np.sort(order, axis=0), np.arange(n)[:, None].repeat(WIDTH, 1))
    np.testing.assert_array_equal(np.take_along_axis(before, order, 0), s)


def test_columns_of_different_lengths() -> None:
    size = np.arange(WIDTH).astype(np.float32)
    size[WIDTH // 2 :] = 0
    s, order = np.full((WIDTH, WIDTH), -np.inf, np.float32), np.full((WIDTH, WIDTH), -1, np.int32)
    for t in range(WIDTH // 2):
        s[:t, t], order[:t, t] = np.arange(t), np.arange(t)
    call(size, s, order)
    for t in range(WIDTH):
        n = int(size[t])
        np.testing.assert_array_equal(s[:, t], [*range(n)][::-1] + [-np.inf] * (WIDTH - n))
        np.testing.assert_array_equal(order[:, t], [*range(n)][::-1] + [-1] * (WIDTH - n))
