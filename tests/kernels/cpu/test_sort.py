"""Sorting of columns."""

import numpy as np
import pytest

from drm_triton.kernels.cpu.runtime.jit import allocating
from drm_triton.kernels.cpu.runtime.simd import WIDTH
from drm_triton.kernels.cpu.runtime.sort import rows_to_sort, sort_columns


@allocating
def call(s, order, n):  # type: ignore[no-untyped-def]
    sort_columns(s, order, n)


@pytest.mark.parametrize("n", [*range(1, 68), 100, 127, 128, 129, 165, 255, 256, 257, 511, 600, 1001, 2048, 5000])
@pytest.mark.parametrize("values", ["distinct", "few", "zeros and ones", "sorted", "reversed", "absent"])
def test_columns_descend_and_each_number_keeps_its_place(n: int, values: str) -> None:
    rng = np.random.default_rng(n)
    s, order = np.full((rows_to_sort(n), WIDTH), np.nan, np.float32), np.full((rows_to_sort(n), WIDTH), -1, np.int32)
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
    before = numbers.astype(np.float32)
    s[:n], order[:n] = before, np.arange(n)[:, None]
    call(s, order, n)
    np.testing.assert_array_equal(s[:n], -np.sort(-before, axis=0))
    np.testing.assert_array_equal(np.sort(order[:n], axis=0), np.arange(n)[:, None].repeat(WIDTH, 1))
    np.testing.assert_array_equal(np.take_along_axis(before, order[:n], 0), s[:n])
