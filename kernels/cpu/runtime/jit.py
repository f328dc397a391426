"""Compilation of the CPU kernels, and the cache of the compiled code."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba.extending
import numpy as np
from llvmlite import ir
from numba import njit, types

from drm_triton.kernels.cpu.runtime.numba_private import (
    INLINE_OPTIONS,
    VOID_POINTER,
    data_pointer,
    llvm_function,
    nothing,
    use_cache,
)

# reassoc and contract allow vector sums and fused multiply-add. NaN and infinity keep their meaning.
FASTMATH = {"reassoc", "contract", "nsz", "arcp"}
CACHE_LINE = 16  # float32 numbers in a cache line

_KERNELS = Path(__file__).parents[2]
_SOURCES = hashlib.sha256(
    b"".join(path.read_bytes() for path in sorted([*_KERNELS.glob("*.py"), *_KERNELS.glob("cpu/**/*.py")]))
).hexdigest()


def inline(function: Callable[..., Any]) -> Any:
    """Compile a function that only other compiled functions call, and that allocates nothing. It is always inlined."""
    return _compile(function, **INLINE_OPTIONS)


def allocating(function: Callable[..., Any]) -> Any:
    """Compile a function that allocates arrays. It must not do arithmetic with floats.

    It is not always inlined. A process that compiles it beside a kernel may run it as compiled by itself, and a process
    that loads the kernel from the cache as compiled with the kernel, which may round differently.
    """
    return _compile(function)


def _compile(function: Callable[..., Any], **options: Any) -> Any:
    return njit(nogil=True, fastmath=FASTMATH, error_model="numpy", **options)(function)


def kernel(function: Callable[..., Any]) -> Any:
    """Compile a function that Python calls. It runs without the GIL and is cached on disk.

    The key of the cache contains every source file of the CPU kernels and of what all backends share.
    """
    dispatcher = _compile(function)
    use_cache(dispatcher, function, _SOURCES)
    return dispatcher


def intrinsic(function: Callable[..., Any]) -> Any:
    """Define a compiled function by its LLVM IR. Type checkers would otherwise expect the arguments of `function`."""
    return numba.extending.intrinsic(function)


@intrinsic
def prefetch(context, table, offset):
    """Prefetch the cache line of element `offset` of a C-contiguous array."""

    def build(context, builder, signature, args):
        table, offset = args
        data = data_pointer(context, builder, signature.args[0], table)
        address = builder.bitcast(builder.gep(data, [offset]), VOID_POINTER)
        i32 = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [VOID_POINTER, i32, i32, i32])
        function = llvm_function(builder, kind, "llvm.prefetch.p0i8")
        builder.call(function, [address, i32(0), i32(3), i32(1)])  # a read, into every level of the data cache
        return nothing(context)

    return types.none(table, types.int64), build


@inline
def prefetch_row(table, row):
    """Prefetch a row of a float32 table."""
    d = table.shape[1]
    for column in range(0, d, CACHE_LINE):
        prefetch(table, np.int64(row) * d + column)
