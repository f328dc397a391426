"""Compilation of the CPU kernels, and the cache of the compiled code."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba.extending
import numpy as np
from llvmlite import ir
from llvmlite.binding import get_process_triple
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


def prefetch_address(builder, address):
    """Build a prefetch of the cache line of an address."""
    i32 = ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [VOID_POINTER, i32, i32, i32])
    function = llvm_function(builder, kind, "llvm.prefetch.p0i8")
    # a read, into every level of the data cache
    builder.call(function, [builder.bitcast(address, VOID_POINTER), i32(0), i32(3), i32(1)])


@intrinsic
def prefetch(context, table, offset):
    """Prefetch the cache line of element `offset` of a C-contiguous array."""

    def build(context, builder, signature, args):
        table, offset = args
        prefetch_address(builder, builder.gep(data_pointer(context, builder, signature.args[0], table), [offset]))
        return nothing(context)

    return types.none(table, types.int64), build


@inline
def prefetch_row(table, row):
    """Prefetch a row of a float32 table."""
    d = table.shape[1]
    for column in range(0, d, CACHE_LINE):
        prefetch(table, np.int64(row) * d + column)


@intrinsic
def is_set_after_pause(context, flag):
    """Pause for a moment; then return whether the first element of an int32 array, which others may write, is not 0."""

    def build(context, builder, signature, args):
        if get_process_triple().startswith(("x86_64", "i686")):  # other processors wait less than 10 ns
            builder.call(llvm_function(builder, ir.FunctionType(ir.VoidType(), []), "llvm.x86.sse2.pause"), [])
        value = builder.load_atomic(data_pointer(context, builder, signature.args[0], args[0]), "acquire", 4)
        return builder.icmp_signed("!=", value, ir.IntType(32)(0))

    return types.boolean(flag), build
