"""The private parts of Numba that the CPU kernels use, in one place; `pyproject.toml` bounds Numba's version.

- `numba.core.caching.FunctionCache` with its `_index_key`, the `pickle` and `dumps` of that module, `CompileResult` and
  `Dispatcher._cache`: a cache on disk that notices changes in every file of the kernels, and damage.
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

import functools
import glob
import hashlib
import os
import secrets
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numba
from llvmlite.binding import get_host_cpu_name
from numba import config
from numba.core import caching, cgutils
from numba.core.caching import FunctionCache
from numba.core.codegen import CPUCodeLibrary, get_host_cpu_features
from numba.core.compiler import CompilerBase, CompileResult, DefaultPassBuilder, _LowerResult
from numba.core.compiler_machinery import PassManager, register_pass
from numba.core.typed_passes import NativeLowering

from drm_triton.user_cache import private_directory

VOID_POINTER = cgutils.voidptr_t
DIGEST = 32  # bytes of a SHA-256


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


class _Cache(FunctionCache):
    """A cache of compiled code on disk, one file for each function, signature and processor.

    Numba's own looks only at the file of the cached function, so that a change in another file whose functions it calls
    goes unnoticed; it stops the program at a damaged file; and two processes that compile at once can mix its files.
    Here, a file begins with the SHA-256 of the rest. A file that is missing, cut off or changed is a miss, and so is
    one that cannot be read. If a file cannot be written, as on a full disk, the next process compiles again.
    """

    def __init__(self, function: Callable[..., Any], key: str, directory: Path) -> None:
        self._py_func, self._name, self._key = function, repr(function), key
        self._directory = self._cache_path = str(directory)
        self._base = f"{function.__module__}.{function.__qualname__}".replace("<", "").replace(">", "")
        self.enable()

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return the compiled code for a signature, None if it is not in the cache."""
        target_context.refresh()  # or it would not be ready to take the code
        if not self._enabled:
            return None
        try:
            content = self._file(sig, target_context.codegen()).read_bytes()
            digest, data = content[:DIGEST], content[DIGEST:]
            if hashlib.sha256(data).digest() != digest:
                return None
            return CompileResult._rebuild(target_context, *caching.pickle.loads(data))  # type: ignore[attr-defined]
        except Exception:  # whatever is wrong with the file: the code is compiled again
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Store compiled code, and remove that of other versions of the sources."""
        if not self._enabled or data.lifted or data.library.has_dynamic_globals:
            return
        file = self._file(sig, data.codegen)
        content = caching.dumps(data._reduce())  # type: ignore[attr-defined]
        temporary = file.with_name(f"{file.name}.{secrets.token_hex(4)}.tmp")
        try:
            temporary.write_bytes(hashlib.sha256(content).digest() + content)
            temporary.replace(file)
            for other in file.parent.glob(f"{glob.escape(self._base)}-*"):
                if not other.name.startswith(f"{self._base}-{self._key}-"):
                    other.unlink()
        except OSError:
            with suppress(OSError):
                temporary.unlink()

    def flush(self) -> None:
        """Forget the compiled code of this function."""
        for file in Path(self._directory).glob(f"{glob.escape(self._base)}-*"):
            file.unlink(missing_ok=True)

    def _file(self, sig: Any, codegen: Any) -> Path:
        options = numba.__version__, sys.version_info[:2], config.BOUNDSCHECK  # type: ignore[attr-defined]
        key = hashlib.sha256(repr((options, self._index_key(sig, codegen))).encode()).hexdigest()
        return Path(self._directory) / f"{self._base}-{self._key}-{key[:32]}.nbc"


@functools.cache
def _cache_directory() -> Path | None:
    """Return where compiled code is kept: `NUMBA_CACHE_DIR`, or else the user's cache; None if others can write there.

    There is a directory for each place that the package is installed in.
    """
    given: str = config.CACHE_DIR  # type: ignore[attr-defined]
    place = hashlib.sha256(os.fsencode(__file__)).hexdigest()[:16]
    directory = private_directory(f"kernels/{place}" if not given else f"drm-triton-{place}", given or None)
    if directory is None:
        warnings.warn(
            f"compiled kernels are not kept on disk, and each process compiles them again: "
            f"{given or 'the cache directory of the user'} is not a directory that only you can write to; set "
            "NUMBA_CACHE_DIR to one",
            stacklevel=2,
        )
    return directory


def use_cache(dispatcher: Any, function: Callable[..., Any], key: str) -> None:
    """Cache the compiled code of a function on disk under `key`.

    Without a directory that only this user can write to, each process compiles it again.
    """
    directory = _cache_directory()
    if directory is not None:
        dispatcher._cache = _Cache(function, key[:16], directory)


def target_features() -> set[str]:
    """Return the extensions of the processor that Numba compiles for, as far as they are known."""
    name, features = config.CPU_NAME, config.CPU_FEATURES  # type: ignore[attr-defined]
    if features is None:  # those of a processor other than this one are not known
        features = get_host_cpu_features() if name in (None, "host") else ""
    return {feature[1:] for feature in features.split(",") if feature.startswith("+")}


def target_name() -> str:
    """Return LLVM's name of the processor that Numba compiles for."""
    name: str | None = config.CPU_NAME  # type: ignore[attr-defined]
    return get_host_cpu_name() if name in (None, "host") else str(name)


def max_threads() -> int:
    """Return the largest number of threads: NUMBA_NUM_THREADS, by default all cores."""
    return int(config.NUMBA_NUM_THREADS)  # type: ignore[attr-defined]


def data_pointer(context: Any, builder: Any, kind: Any, value: Any) -> Any:
    """Return the pointer to the first element of an array, an argument of an intrinsic."""
    return context.make_array(kind)(context, builder, value).data


def array_shape(context: Any, builder: Any, kind: Any, value: Any) -> Any:
    """Return the shape of an array, an argument of an intrinsic."""
    return context.make_array(kind)(context, builder, value).shape


def llvm_function(builder: Any, kind: Any, name: str) -> Any:
    """Return the LLVM intrinsic of this name."""
    return cgutils.get_or_insert_function(builder.module, kind, name)


def nothing(context: Any) -> Any:
    """Return the value of an intrinsic that returns None."""
    return context.get_dummy_value()
