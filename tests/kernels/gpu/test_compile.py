"""The Triton kernels compiled to machine code for real GPUs, in a process in which the interpreter is off."""

import json
import re
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is available on Linux only")

from tests.conftest import run_python

SURVEY = """
import json
from drm_triton.bench.gpu_static import GPUS, cases, compile_case
rows = []
for case in cases(quick=True):
    for gpu in GPUS:
        code = compile_case(case, gpu)
        name, limit = case.kernel.__name__, gpu.shared_block
        rows.append([name, str(gpu.arch), code.spilled, code.shared, limit, code.warps, code.ttir])
print(json.dumps(rows))
"""


@pytest.fixture(scope="module")
def survey() -> list[list[Any]]:
    """Compile every kernel for every GPU."""
    run = run_python("-c", SURVEY, TRITON_INTERPRET=None)
    assert run.returncode == 0, run.stderr
    rows: list[list[Any]] = json.loads(run.stdout)
    return rows


def test_nothing_spills_and_shared_memory_is_in_bounds(survey: list[list[Any]]) -> None:
    for name, arch, spilled, shared, limit, warps, _ in survey:
        assert spilled == 0, f"{name} on {arch} spills {spilled} bytes"
        assert shared <= limit, f"{name} on {arch} needs {shared} bytes of shared memory"
        assert warps >= 8, f"{name} on {arch}: {warps} warps per multiprocessor"


def test_every_kernel_is_compiled_for_every_gpu(survey: list[list[Any]]) -> None:
    from drm_triton.kernels.gpu import gradients, sampling, softsort, softsort_tiled, topk, update

    modules = (gradients, sampling, softsort, softsort_tiled, topk, update)
    kernels = {name for module in modules for name in vars(module) if re.fullmatch(r"_\w+_kernel", name)}
    assert {row[0] for row in survey} == kernels
    assert {row[1] for row in survey} == {"80", "90", "100", "gfx942"}


# Arrays whose size grows with users, items or the batch. An int32 offset into them would overflow.
LARGE = (
    *("U", "V", "table", "state", "dense", "vectors", "queries", "buffer", "s", "g", "user_grad", "out", "seen"),
    *("items", "indices", "shared", "replaced", "rows", "coefficients", "keys", "vector_sums", "coefficient_sums"),
)


def test_offsets_into_large_arrays_are_64_bit(survey: list[list[Any]]) -> None:
    checked = set()
    for name, arch, *_, ttir in survey:
        if arch != "90":
            continue
        for array in LARGE:
            types = offset_types(ttir, f"%{array}_ptr")
            assert all(kind == "i64" for kind in types), f"{name}: {array} is addressed by {types}"
            if types:
                checked.add(array)
    assert checked == set(LARGE)


def offset_types(ttir: str, pointer: str) -> list[str]:
    """Return the integer types by which a kernel offsets a pointer argument or a splat of it."""
    bases = {pointer} | set(re.findall(rf"(%\w+) = tt\.splat {pointer} ", ttir))
    additions = re.findall(r"tt\.addptr (%\w+), %\w+ : [^,]+, (?:tensor<(?:\d+x)+(i\d+)|(i\d+))", ttir)
    return [tensor or scalar for base, tensor, scalar in additions if base in bases]
