"""The private parts of Numba that the CPU kernels use, in one place; `pyproject.toml` bounds Numba's version.

- `numba.core.caching.FunctionCache` and its `_index_key`, and `Dispatcher._cache`: a cache on disk that notices changes
  in every file of the kernels.
- The option `_nrt` of `njit`: code without Numba's runtime for memory.
- `numba.core.codegen.get_host_cpu_features`, `config.CPU_NAME` and `config.CPU_FEATURES`: the vector extensions for
  which code is compiled.
- `numba.core.cgutils`, and of the target context `make_array` and `get_dummy_value`: the LLVM IR that the intrinsics
  build.
- `config.NUMBA_NUM_THREADS`: the largest number of threads.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from numba import config
from numba.core import cgutils
from numba.core.caching import FunctionCache
from numba.core.codegen import get_host_cpu_features

# An inlined function takes views of arrays. With Numba's runtime for memory, each of them counts references, with an
# atomic operation. Without it (and with all functions inlined) training on lists with their own negatives was a fifth
# faster (AVX-512).
INLINE_OPTIONS = {"forceinline": True, "_nrt": False}

VOID_POINTER = cgutils.voidptr_t


class _KeyedCache(FunctionCache):
    """Numba's cache on disk with one more key.

    Numba itself looks only at the file of the cached function. A change in another file whose functions it calls would
    go unnoticed.
    """

    def __init__(self, function: Callable[..., Any], key: str) -> None:
        super().__init__(function)
        self._key = key

    def _index_key(self, sig: Any, codegen: Any) -> tuple[Any, ...]:
        return (*super()._index_key(sig, codegen), self._key)


def use_cache(dispatcher: Any, function: Callable[..., Any], key: str) -> None:
    """Cache the compiled code of a function on disk under `key`.

    Without a writable directory, neither beside the file nor in the user's cache, each process compiles it again.
    """
    with suppress(RuntimeError):
        dispatcher._cache = _KeyedCache(function, key)


def target_features() -> set[str]:
    """Return the extensions of the processor that Numba compiles for, as far as they are known."""
    name, features = config.CPU_NAME, config.CPU_FEATURES  # type: ignore[attr-defined]
    if features is None:  # those of a processor other than this one are not known
        features = get_host_cpu_features() if name in (None, "host") else ""
    return {feature[1:] for feature in features.split(",") if feature.startswith("+")}


def max_threads() -> int:
    """Return the largest number of threads: NUMBA_NUM_THREADS, by default all cores."""
    return int(config.NUMBA_NUM_THREADS)  # type: ignore[attr-defined]


def data_pointer(context: Any, builder: Any, kind: Any, value: Any) -> Any:
    """Return the pointer to the first element of an array, an argument of an intrinsic."""
    return context.make_array(kind)(context, builder, value).data


def llvm_function(builder: Any, kind: Any, name: str) -> Any:
    """Return the LLVM intrinsic of this name."""
    return cgutils.get_or_insert_function(builder.module, kind, name)


def nothing(context: Any) -> Any:
    """Return the value of an intrinsic that returns None."""
    return context.get_dummy_value()
