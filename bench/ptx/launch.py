"""Triton's launcher, replaced: every launch is compiled for a GPU and run in the emulator."""

import random
import struct
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from drm_triton.bench.ptx.errors import EmulatorError
from drm_triton.bench.ptx.machine import Grid, Statistics
from drm_triton.bench.ptx.memory import GlobalMemory
from drm_triton.bench.ptx.operations import OPERATIONS
from drm_triton.bench.ptx.program import Program
from drm_triton.bench.ptx.warp import Code

_compiled: dict[tuple[object, ...], tuple[Any, dict[str, str], Code]] = {}  # of all emulations in the process


class Emulation:
    """The launches in a block of `emulated`.

    Attributes
    ----------
    statistics : by name of the kernel
    read, written : sectors (pieces of 32 bytes) that launches read before any of them wrote them, and that they wrote.
        HBM moves these if the caches hold all that the launches use.
    """

    def __init__(self, seed: int, target: int) -> None:
        from triton.backends.compiler import GPUTarget
        from triton.compiler import make_backend

        self._order = random.Random(seed)
        self.statistics: defaultdict[str, Statistics] = defaultdict(Statistics)
        self.read: set[int] = set()
        self.written: set[int] = set()
        self._target = GPUTarget("cuda", target, 32)
        self._backend = make_backend(self._target)
        self._binders: dict[Any, Any] = {}

    def launch(self, function: Any, *arguments: Any, grid: Any, warmup: bool = False, **options: Any) -> Any:
        """Run a kernel, as `JITFunction.run` does; return what Triton compiled."""
        bound, specialization, _ = self._binder(function)(*arguments, **options)
        compiled, signature, code = self._compile(function, bound, specialization, options)
        shape = tuple(grid(bound) if callable(grid) else grid)
        if not warmup:
            x, y, z = (*shape, 1, 1, 1)[:3]
            self._run(compiled, code, signature, bound, (x, y, z))
        return compiled

    def _binder(self, function: Any) -> Any:
        """Return the function by which Triton itself decides what to specialize a kernel on."""
        from triton.runtime.jit import create_function_from_signature

        if function not in self._binders:
            self._binders[function] = create_function_from_signature(function.signature, function.params, self._backend)
        return self._binders[function]

    def _compile(
        self, function: Any, bound: dict[str, Any], specialization: list[Any], options: dict[str, Any]
    ) -> tuple[Any, dict[str, str], Code]:
        """Return the compiled kernel, the types of its parameters, and its code."""
        import triton
        from triton.compiler import ASTSource

        key = (function, self._target.arch, str(specialization), str(sorted(options.items())))
        if key not in _compiled:
            parsed, signature, constants, attributes = function._pack_args(
                self._backend, options, bound, specialization, None
            )
            source = ASTSource(function, signature, constants, attributes)
            compiled = triton.compile(source, target=self._target, options=parsed.__dict__)
            if compiled.metadata.num_ctas != 1 or compiled.metadata.global_scratch_size:
                raise EmulatorError(f"{function.__name__}: clusters and scratch memory are not emulated")
            _compiled[key] = compiled, signature, Code(Program(compiled.asm["ptx"]), OPERATIONS)
        return _compiled[key]

    def _run(
        self,
        compiled: Any,
        code: Code,
        signature: dict[str, str],
        bound: dict[str, Any],
        shape: tuple[int, int, int],
    ) -> None:
        passed = {name: value for name, value in bound.items() if signature[name] != "constexpr"}
        spans = [(name, *span(value)) for name, value in passed.items() if isinstance(value, Tensor)]
        memory = GlobalMemory(spans)
        parameters = [
            memory.address(value.data_ptr()) if isinstance(value, Tensor) else bits_of(value, signature[name])
            for name, value in passed.items()
        ]
        metadata, statistics = compiled.metadata, self.statistics[code.program.name]
        Grid(code, shape, metadata.num_warps, metadata.shared, parameters, memory, self._order, statistics).run()
        read, written = memory.sectors()
        self.read |= read - self.written
        self.written |= written


def span(tensor: Tensor) -> tuple[int, int]:
    """Return address and length in bytes of the memory from the first to the last element of a tensor."""
    if tensor.numel() == 0:
        return tensor.data_ptr(), 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), (last + 1) * tensor.element_size()


def bits_of(value: Any, kind: str) -> int:
    """Return the bits of a number that is passed as a Triton type."""
    formats = {"fp32": ("<f", "<I"), "fp64": ("<d", "<Q")}
    if kind in formats:
        as_float, as_integer = formats[kind]
        (bits,) = struct.unpack(as_integer, struct.pack(as_float, value))
        return int(bits)
    if kind[:1] in "iu":
        return int(value)  # a slot keeps the bits of its own width
    raise EmulatorError(f"a parameter of type {kind} is not emulated")


@contextmanager
def emulated(seed: int = 0, target: int = 90) -> Iterator[Emulation]:
    """Run every launch of a Triton kernel in the emulator, on tensors of the CPU.

    A kernel that reads or writes out of bounds, races or diverges at a barrier raises an `EmulatorError`.

    Parameters
    ----------
    seed : of the order of programs and warps, and of the contents of shared memory before it is written
    target : compute capability, 90 for sm_90
    """
    from triton import knobs
    from triton.runtime.jit import JITFunction

    if knobs.runtime.interpret:
        raise EmulatorError("with TRITON_INTERPRET, kernels are not compiled: unset it before they are imported")
    emulation = Emulation(seed, target)
    original = JITFunction.run

    def run(function: Any, *arguments: Any, **options: Any) -> Any:
        return emulation.launch(function, *arguments, **options)

    JITFunction.run = run
    try:
        yield emulation
    finally:
        JITFunction.run = original
