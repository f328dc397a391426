"""Kernels that are wrong for some arguments."""

import triton
import triton.language as tl


@triton.jit
def copy_kernel(x_ptr, y_ptr, n: tl.int32, shift: tl.int32, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + offs, tl.load(x_ptr + offs + shift, mask=offs < n), mask=offs < n)


@triton.jit
def sum_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr, tl.sum(tl.load(x_ptr + offs), axis=0))


@triton.jit
def exchange_kernel(x_ptr, y_ptr, BARRIER: tl.constexpr):
    offs = tl.arange(0, 128)
    tl.store(x_ptr + offs, offs)
    if BARRIER:
        tl.debug_barrier()
    tl.store(y_ptr + offs, tl.load(x_ptr + 127 - offs))


@triton.jit
def scatter_kernel(index_ptr, out_ptr):
    offs = tl.arange(0, 32)
    tl.store(out_ptr + tl.load(index_ptr + offs), offs)


@triton.jit
def count_kernel(count_ptr, out_ptr, THEN: tl.constexpr):
    tl.atomic_add(count_ptr, 1)
    if tl.program_id(0) == tl.num_programs(0) - 1:
        if THEN == "load":
            tl.store(out_ptr, tl.load(count_ptr))
        if THEN == "store":
            tl.store(count_ptr, 0)


@triton.jit
def choice_kernel(x_ptr, y_ptr, out_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.store(out_ptr + offs, tl.load(tl.where(offs % 2 == 0, x_ptr + offs, y_ptr + offs)))
