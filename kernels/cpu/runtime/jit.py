"""How the functions here are compiled, and where the result is kept between processes."""

import hashlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.core.caching import FunctionCache
from numba.extending import intrinsic

# reassoc and contract allow vector sums and fused multiply-add; NaN and infinity keep their meaning.
FASTMATH = {"reassoc", "contract", "nsz", "arcp"}

_KERNELS = Path(__file__).parents[2]
_SOURCES = hashlib.sha256(
    b"".join(path.read_bytes() for path in sorted([*_KERNELS.glob("*.py"), *_KERNELS.glob("cpu/**/*.py")]))
).hexdigest()


class _Cache(FunctionCache):
    """Numba's cache on disk, keyed by every source file of the CPU kernels and of what the backends share.

    Numba itself looks only at the file of the cached function: a change in another file whose functions it calls
    would go unnoticed.
    """

    def _index_key(self, sig: Any, codegen: Any) -> tuple:
        return (*super()._index_key(sig, codegen), _SOURCES)


def inline(function: Callable) -> Any:
    """Compile a function that only other compiled functions call, and that allocates nothing.

    It is always inlined, and without Numba's run time for memory: otherwise every view of an array that it takes counts
    references, atomically, which was a fifth of the time of short lists.
    """
    return _compiled(function, forceinline=True, _nrt=False)


def allocating(function: Callable) -> Any:
    """Compile a function that may allocate arrays."""
    return _compiled(function)


def _compiled(function: Callable, **options: Any) -> Any:
    return njit(nogil=True, fastmath=FASTMATH, error_model="numpy", **options)(function)


def kernel(function: Callable) -> Any:
    """Compile a function that Python calls: without the GIL, and cached where a writable place is found for it."""
    dispatcher = allocating(function)
    with suppress(RuntimeError):  # no place beside this file nor in the user's cache folder: compiled in each process
        dispatcher._cache = _Cache(function)
    return dispatcher


@intrinsic
def prefetch(context, table, offset):
    """Ask for the cache line of element `offset` of a C-contiguous array, to be read soon."""

    def build(context, builder, signature, args):
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        address = builder.bitcast(builder.gep(data, [args[1]]), cgutils.voidptr_t)
        i32 = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, i32, i32, i32])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        builder.call(function, [address, i32(0), i32(3), i32(1)])  # a read, into every level, of data
        return context.get_dummy_value()

    return types.none(table, types.int64), build


@inline
def prefetch_row(table, row):
    """Ask for all cache lines of a row of a float32 table."""
    d = table.shape[1]
    for column in range(0, d, 16):
        prefetch(table, np.int64(row) * d + column)
