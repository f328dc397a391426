"""The Triton kernels compiled to machine code for real GPUs, in a process in which the interpreter is off."""

import json
import re
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is available on Linux only")

from drm_triton.bench.gpus import GPUS
from tests.conftest import run_python
from tests.kernels.gpu.conftest import triton_kernels

SURVEY = """
import json, sys
from drm_triton.bench.gpu_static import GPUS, code_of, launches
rows = []
for name, case, launch in launches(quick=sys.argv[1] == "quick").values():
    for gpu in GPUS:
        if str(gpu.arch) in sys.argv[2:]:
            code, kernel = code_of(launch, gpu), launch.kernel.__name__
            rows.append([kernel, f"{name} ({case})", str(gpu.arch), code.spilled, code.shared, code.ttir])
print(json.dumps(rows))
"""
USUAL = ("90",)  # the others take minutes
ALL_LAUNCHES = ("75", "90", "gfx942")
LIMITS = {str(each.arch): each.shared_block for each in GPUS}
OTHERS = tuple(arch for arch in LIMITS if arch not in USUAL)


@pytest.fixture(
    scope="module",
    params=[
        ("quick", *USUAL),
        pytest.param(("quick", *OTHERS), marks=pytest.mark.slow),
        pytest.param(("all", *ALL_LAUNCHES), marks=pytest.mark.slow),
    ],
    ids=["usual", "others", "all launches"],
)
def survey(request: pytest.FixtureRequest) -> list[list[Any]]:
    """Compile every kernel for some GPUs, with one launch per operation and type, or with all of `bench.gpu_static`."""
    run = run_python("-c", SURVEY, *request.param, TRITON_INTERPRET=None)
    assert run.returncode == 0, run.stderr
    rows: list[list[Any]] = json.loads(run.stdout)
    assert {arch for _, _, arch, *_ in rows} == set(request.param[1:])
    return rows


def test_every_kernel_compiles_without_spills(survey: list[list[Any]]) -> None:
    for name, case, arch, spilled, shared, _ in survey:
        assert spilled == 0, f"{name} of {case} on {arch} spills {spilled} bytes"
        assert shared <= LIMITS[arch], f"{name} of {case} on {arch} needs {shared} bytes of shared memory"
    assert {name for name, *_ in survey} == triton_kernels()


# Arrays whose size grows with users, items or the batch. An int32 offset into them would overflow.
LARGE = (
    *(
        "U",
        "V",
        "table",
        "state",
        "dense",
        "vectors",
        "queries",
        "buffer",
        "estimates",
        "codes",
        "query_codes",
        "s",
        "g",
        "user_grad",
        "out",
        "seen",
    ),
    *("items", "indices", "shared", "replaced", "rows", "coefficients", "sums", "totals"),
)


def test_offsets_into_large_arrays_are_64_bit(survey: list[list[Any]]) -> None:
    checked = set()
    for name, *_, ttir in survey:
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
