"""The recorder finds a fault of each kind in kernels that have one, and none in kernels that are right.

The fixture `launches` in conftest.py lets it watch all tests of this folder, these too.
"""

import os
from collections import Counter

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is available on Linux only")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("the recorder watches Triton's interpreter", allow_module_level=True)

from drm_triton.kernels import gpu
from tests.kernels.gpu.faulty import choice_kernel, copy_kernel, count_kernel, scatter_kernel, sum_kernel
from tests.kernels.gpu.recorder import FaultError


def copy(x: Tensor, y: Tensor, n: int, shift: int = 0) -> Tensor:
    copy_kernel[(-(-n // 16),)](x, y, n, shift, BLOCK=16)
    return y


def test_right_kernels_raise_nothing_and_are_counted(launches: Counter[str]) -> None:
    x = torch.randn(50)
    assert torch.equal(copy(x, torch.empty(50), 50), x)
    copy(x, x, 50)  # each program reads and writes entries of its own
    assert launches == {"copy_kernel": 2}
    gpu.soft_topk_forward(torch.randn(2, 5), torch.ones(2, 1), 1.0, torch.ones(2, 5, dtype=torch.bool))
    assert sum(launches.values()) > 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int32, torch.int64, torch.bfloat16, torch.bool])
def test_load_out_of_bounds(dtype: torch.dtype) -> None:
    x, y = torch.zeros(80, dtype=dtype)[20:70], torch.zeros(50, dtype=dtype)  # around x is memory of a larger tensor
    with pytest.raises(FaultError, match=r"copy_kernel, program \(3, 0, 0\): load out of bounds: x_ptr\[50\], of 50"):
        copy(x, y, 50, shift=1)
    with pytest.raises(FaultError, match=r"program \(0, 0, 0\): load out of bounds: x_ptr\[-1\], of 50 elements"):
        copy(x, y, 50, shift=-1)


def test_store_out_of_bounds() -> None:
    with pytest.raises(FaultError, match=r"store out of bounds: y_ptr\[49\], of 49 elements"):
        copy(torch.zeros(50), torch.zeros(49), 50)


def test_another_argument_is_out_of_bounds_too() -> None:
    """The entries meant are in a tensor that is an argument, but not that of the pointer."""
    both = torch.zeros(100)
    with pytest.raises(FaultError, match=r"load out of bounds: x_ptr\[50\]"):
        copy(both[:50], both[50:], 50, shift=1)


def test_an_empty_tensor_has_no_entries() -> None:
    with pytest.raises(FaultError, match=r"load out of bounds: x_ptr\[0\], of 0 elements"):
        copy(torch.zeros(0), torch.zeros(10), 10)


def test_a_column_ends_with_its_last_entry() -> None:
    column = torch.zeros(10, 4)[:, 1]  # entries 0, 4, ..., 36
    copy(column, torch.zeros(37), 37)
    with pytest.raises(FaultError, match=r"x_ptr\[37\], of 37 elements"):
        copy(column, torch.zeros(38), 38)


def test_two_programs_store_to_one_address() -> None:
    with pytest.raises(FaultError, match=r"sum_kernel, program .*: store to memory that another program changes: out"):
        sum_kernel[(2,)](torch.ones(32), torch.zeros(1), BLOCK=16)
    sum_kernel[(1,)](torch.ones(32), torch.zeros(1), BLOCK=16)


@pytest.mark.parametrize("shift", [1, -1])
def test_a_program_loads_what_another_one_stores(shift: int) -> None:
    """Shifts in place: a program needs entries of the next one, which would come later here, or of the previous one."""
    x = torch.zeros(52)
    with pytest.raises(FaultError, match="load of memory that another program changes: x_ptr"):
        copy(x[1:], x[1:51], 50, shift) if shift > 0 else copy(x, x[1:], 50, 0)


def test_atomics_of_several_programs_are_right() -> None:
    count, out = torch.zeros(2, 1, dtype=torch.int32)
    count_kernel[(3,)](count, out, THEN="end")
    assert count.item() == 3


@pytest.mark.parametrize(("then", "what"), [("load", "load of"), ("store", "store to")])
def test_an_atomic_beside_a_plain_access(then: str, what: str) -> None:
    count, out = torch.zeros(2, 1, dtype=torch.int32)
    with pytest.raises(FaultError, match=f"{what} memory that another program changes: count_ptr"):
        count_kernel[(3,)](count, out, THEN=then)
    count_kernel[(1,)](count, out, THEN=then)


def test_an_atomic_out_of_bounds_and_on_memory_that_nobody_wrote() -> None:
    with pytest.raises(FaultError, match="atomic access out of bounds: count_ptr"):
        count_kernel[(1,)](torch.zeros(0, dtype=torch.int32), torch.zeros(1, dtype=torch.int32), THEN="end")
    with pytest.raises(FaultError, match="load of memory that nobody wrote: count_ptr"):
        count_kernel[(1,)](torch.empty(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32), THEN="end")


def test_lanes_store_different_values_to_one_address() -> None:
    out = torch.zeros(32, dtype=torch.int32)
    with pytest.raises(FaultError, match=r"scatter_kernel, program .*: lanes store different values to one address"):
        scatter_kernel[(1,)](torch.arange(32) // 2, out)
    scatter_kernel[(1,)](torch.arange(32).flip(0), out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int32, torch.int64, torch.bfloat16, torch.bool])
def test_memory_that_nobody_wrote(dtype: torch.dtype) -> None:
    y = torch.zeros(50, dtype=dtype)
    for x in (torch.empty(50, dtype=dtype), torch.empty_like(y), y.new_empty(50)):
        x[:31] = 0
        copy(x, y, 31)
        with pytest.raises(FaultError, match=r"program \(1, 0, 0\): load of memory that nobody wrote: x_ptr\[31\]"):
            copy(x, y, 32)


def test_what_a_kernel_wrote_may_be_read() -> None:
    x, y = torch.randn(50), torch.empty(50)
    copy(x, y, 50)
    assert torch.equal(copy(y, torch.empty(50), 50), x)


def test_one_load_from_two_tensors() -> None:
    x, y, out = torch.randn(16), torch.randn(16), torch.empty(16)
    choice_kernel[(1,)](x, y, out, BLOCK=16)
    assert torch.equal(out, torch.where(torch.arange(16) % 2 == 0, x, y))
    with pytest.raises(FaultError, match=r"y_ptr\[15\], of 15 elements"):
        choice_kernel[(1,)](x, y[:15], out, BLOCK=16)
    y = torch.empty(16)
    with pytest.raises(FaultError, match=r"nobody wrote: y_ptr\[1\]"):
        choice_kernel[(1,)](x, y, out, BLOCK=16)
