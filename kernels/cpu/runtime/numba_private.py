"""The private parts of Numba that the CPU kernels use, in one place; `pyproject.toml` bounds Numba's version.

- `numba.core.caching.FunctionCache` and its `_index_key`, and `Dispatcher._cache`: a cache on disk that notices changes
  in every file of the kernels.
- The options `_nrt`, `no_cpython_wrapper` and `no_cfunc_wrapper` of `njit`: code without Numba's runtime for memory
  and without the functions that Python and C call.
- `numba.core.codegen.CPUCodeLibrary`, `typed_passes.NativeLowering`, `compiler._LowerResult` and the builders of
  Numba's compiler passes: inlined functions get no machine code.
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
from numba.core.codegen import CPUCodeLibrary, get_host_cpu_features
from numba.core.compiler import CompilerBase, DefaultPassBuilder, _LowerResult
from numba.core.compiler_machinery import PassManager, register_pass
from numba.core.typed_passes import NativeLowering

VOID_POINTER = cgutils.voidptr_t


class _InlineLibrary(CPUCodeLibrary):
    """The LLVM code of an inlined function. Its callers take it from here; it has no machine code."""

    def finalize(self) -> None:
        """Make the code ready for the callers. Numba would now generate machine code."""
        for library in dict.fromkeys(self._linking_libraries):
            self._final_module.link_in(library._get_module_for_linking(), preserve=True)
        self._optimize_final_module()
        self._finalized = True

    def _finalize_specific(self) -> None: ...  # part of generating machine code, which `finalize` leaves out


@register_pass(mutates_CFG=True, analysis_only=False)
class _InlineLowering(NativeLowering):
    """Numba's generation of LLVM code, without that of machine code."""

    _name = "inline_lowering"

    def run_pass(self, state: Any) -> bool:
        state.library = _InlineLibrary(state.targetctx.codegen(), state.func_id.func_qualname)
        state.flags.no_compile = True
        super().run_pass(state)
        descriptor, call_helper, _, environment = state.cr
        # Numba identifies a compiled function by the built-in function that Python calls. This one is distinct for each
        # and raises KeyError if it is called.
        entry_point = dict[Any, Any]().popitem
        state.targetctx.insert_user_function(entry_point, descriptor, [state.library])
        state.cr = _LowerResult(descriptor, call_helper, cfunc=entry_point, env=environment)
        return True


class _InlineCompiler(CompilerBase):
    """Numba's compiler with `_InlineLowering`."""

    def define_pipelines(self) -> list[PassManager]:
        stages = (
            DefaultPassBuilder.define_untyped_pipeline,
            DefaultPassBuilder.define_typed_pipeline,
            DefaultPassBuilder.define_nopython_lowering_pipeline,
        )
        manager = PassManager("inline")
        for stage in stages:
            for step, description in stage(self.state).passes:
                manager.add_pass(_InlineLowering if step is NativeLowering else step, description)
        manager.finalize()
        return [manager]


# Options of a function that only compiled functions call, and that is always inlined.
#
# It takes views of arrays. With Numba's runtime for memory, each of them counts references, with an atomic operation.
# Without it (and with all functions inlined) training on lists with their own negatives was a fifth faster (AVX-512).
#
# It gets neither machine code nor the wrappers for Python and C, which no one would call. This saves a quarter of the
# time of compilation.
INLINE_OPTIONS = {
    "forceinline": True,
    "_nrt": False,
    "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
    "pipeline_class": _InlineCompiler,
}


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
