"""Helpers of the tests that run compiled kernels in the PTX emulator.

Without a GPU, the other tests run kernels in Triton's interpreter, and Triton can do only one of the two in a process.
So these tests are left out there, and `tests/kernels/gpu/test_emulated.py` runs them in another process.
"""

import os
import random
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
from torch import Tensor

from drm_triton.bench.ptx import EmulatorError, Statistics, emulated
from drm_triton.bench.ptx.machine import Grid
from drm_triton.bench.ptx.memory import Array, GlobalMemory
from drm_triton.bench.ptx.operations import OPERATIONS
from drm_triton.bench.ptx.program import Program
from drm_triton.bench.ptx.warp import Code

collect_ignore_glob = ["test_*.py"] if os.environ.get("TRITON_INTERPRET") == "1" else []

SEEDS = (0, 1, 2)


def run_ptx(body: str, *arrays: Array, warps: int = 1, shared: int = 0, programs: int = 1, seed: int = 0) -> Statistics:
    """Run instructions. %rd1, %rd2, ... hold the addresses of the arrays, %r0 the thread and %r1 the program."""
    parameters = ",\n".join(f".param .u64 kernel_param_{number}" for number in range(len(arrays)))
    loads = "\n".join(f"ld.param.b64 %rd{number + 1}, [kernel_param_{number}];" for number in range(len(arrays)))
    code = f"""
.visible .entry kernel(
{parameters}
)
{{
.reg .pred %p<20>;
.reg .b16 %rs<20>;
.reg .b32 %r<40>;
.reg .b64 %rd<40>;
{loads}
mov.u32 %r0, %tid.x;
mov.u32 %r1, %ctaid.x;
{body}
ret;
}}
"""
    spans = [(f"array {number}", array.ctypes.data, array.nbytes) for number, array in enumerate(arrays)]
    memory = GlobalMemory(spans)
    addresses = [memory.address(array.ctypes.data) for array in arrays]
    statistics, order = Statistics(), random.Random(seed)
    Grid(Code(Program(code), OPERATIONS), (programs, 1, 1), warps, shared, addresses, memory, order, statistics).run()
    return statistics


def aligned(x: Array) -> Array:
    """Return a copy that begins at a multiple of 32 bytes, where a sector begins."""
    memory = np.empty(x.nbytes + 32, np.uint8)
    start = -memory.ctypes.data % 32
    copy = memory[start : start + x.nbytes].view(x.dtype)
    copy[:] = x
    return copy


def compute(instruction: str, *inputs: Array, out: Any) -> Array:
    """Return what an instruction gives for 32 lanes.

    `{d}` in it stands for its result, of the NumPy type `out`, and `{a}`, `{b}`, `{c}` for the inputs [32].
    """
    classes = {1: ("rs", "b8"), 2: ("rs", "b16"), 4: ("r", "b32"), 8: ("rd", "b64")}
    result = np.zeros(32, out)
    lines, names = [], {}
    for number, (name, array) in enumerate([("d", result), *zip("abc", inputs, strict=False)]):
        prefix, kind = classes[array.dtype.itemsize]
        names[name] = f"%{prefix}{10 + number}"
        lines += [f"mad.wide.u32 %rd{20 + number}, %r0, {array.dtype.itemsize}, %rd{number + 1};"]
        if name != "d":
            lines += [f"ld.global.{kind} {names[name]}, [%rd{20 + number}];"]
    lines += [instruction.format(**names), f"st.global.{classes[result.dtype.itemsize][1]} [%rd20], {names['d']};"]
    run_ptx("\n".join(lines), result, *inputs)
    return result


def fails(function: Callable[[], object]) -> str:
    """Return the message of the `EmulatorError` that a function raises in every order."""
    messages = []
    for seed in SEEDS:
        try:
            with emulated(seed):
                function()
        except EmulatorError as error:
            messages.append(str(error))
    assert len(messages) == len(SEEDS), "no error"
    return messages[0]


def emulate(
    function: Callable[[], Collection[Tensor]], seeds: Collection[int] = SEEDS
) -> tuple[list[Tensor], dict[str, Statistics]]:
    """Run a function in several orders of programs and warps; return its results, and the statistics of one run.

    The results must have the same bits each time.
    """
    first: list[Tensor] = []
    for seed in seeds:
        with emulated(seed) as emulation:
            results = list(function())
        first = first or results
        assert [x.numpy().tobytes() for x in results] == [x.numpy().tobytes() for x in first]
        for name, statistics in emulation.statistics.items():
            assert statistics.launches > 0, name
            assert statistics.programs > 0, name
            assert statistics.total > 0, name
        assert any(statistics.sectors_written > 0 for statistics in emulation.statistics.values())
    return first, emulation.statistics
