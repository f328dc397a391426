"""Products of matrices on tensor cores, against NumPy."""

import numpy as np
import pytest

pytest.importorskip("triton", reason="Triton is available on Linux only")

from drm_triton.bench.ptx import EmulatorError
from tests.kernels.gpu.emulator.conftest import run_ptx

MMA = "mma.sync.aligned.m16n8k32.row.col.satfinite.s32.s8.s8.s32"


def multiply(a: np.ndarray, b: np.ndarray, c: np.ndarray, instruction: str = MMA) -> np.ndarray:
    """Return what an instruction gives for a [16, 32], b [32, 8] and c [16, 8].

    The places of their elements are those of the manual of PTX, section "Matrix Fragments for mma.m16n8k32".
    """
    left, right = np.zeros((32, 16), np.int8), np.zeros((32, 8), np.int8)
    addend, result = np.zeros((32, 4), np.int32), np.zeros((32, 4), np.int32)
    places = {}
    for lane in range(32):
        group, thread = lane >> 2, lane % 4
        for i in range(16):
            row = group if i < 4 or 8 <= i < 12 else group + 8
            left[lane, i] = a[row, thread * 4 + (i & 3) + (0 if i < 8 else 16)]
        for i in range(8):
            right[lane, i] = b[thread * 4 + (i & 3) + (0 if i < 4 else 16), group]
        for i in range(4):
            places[lane, i] = (group if i < 2 else group + 8, thread * 2 + (i & 1))
            addend[lane, i] = c[places[lane, i]]
    run_ptx(
        f"""
mad.wide.u32 %rd10, %r0, 16, %rd1;
mad.wide.u32 %rd11, %r0, 8, %rd2;
mad.wide.u32 %rd12, %r0, 16, %rd3;
mad.wide.u32 %rd13, %r0, 16, %rd4;
ld.global.v4.b32 {{%r10, %r11, %r12, %r13}}, [%rd10];
ld.global.v2.b32 {{%r14, %r15}}, [%rd11];
ld.global.v4.b32 {{%r16, %r17, %r18, %r19}}, [%rd12];
{instruction} {{%r16, %r17, %r18, %r19}}, {{%r10, %r11, %r12, %r13}}, {{%r14, %r15}}, {{%r16, %r17, %r18, %r19}};
st.global.v4.b32 [%rd13], {{%r16, %r17, %r18, %r19}};
""",
        left.view(np.int32).reshape(-1),
        right.view(np.int32).reshape(-1),
        addend.reshape(-1),
        result.reshape(-1),
    )
    matrix = np.zeros((16, 8), np.int64)
    for (lane, i), place in places.items():
        matrix[place] = result[lane, i]
    return matrix


def test_bytes() -> None:
    draw = np.random.default_rng(0)
    a, b = (draw.integers(-128, 128, shape, dtype=np.int8) for shape in ((16, 32), (32, 8)))
    c = draw.integers(-(10**6), 10**6, (16, 8), dtype=np.int32)
    assert np.array_equal(multiply(a, b, c), a.astype(np.int64) @ b.astype(np.int64) + c)


def test_sums_beyond_the_range_give_its_ends() -> None:
    a, b = np.full((16, 32), 127, np.int8), np.full((32, 8), 127, np.int8)
    a[8:] = -127
    limits = np.iinfo(np.int32)
    c = np.where(np.arange(16)[:, None] < 8, limits.max, limits.min) * np.ones((1, 8), np.int64)
    assert np.array_equal(multiply(a, b, c.astype(np.int32)), c)


def test_another_shape_is_unknown() -> None:
    zeros = np.zeros((16, 32), np.int8), np.zeros((32, 8), np.int8), np.zeros((16, 8), np.int32)
    with pytest.raises(EmulatorError, match=r"only mma\.sync\.aligned\.m16n8k32"):
        multiply(*zeros, instruction=MMA.replace("m16n8k32", "m16n8k16"))
