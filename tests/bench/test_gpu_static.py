"""The published figures of GPUs agree with each other, and estimates follow from counts."""

import pytest

pytest.importorskip("triton", reason="Triton is available on Linux only")

from drm_triton.bench.gpu_counts import ITEMS, long_table, nanoseconds, table
from drm_triton.bench.gpu_static import resident_warps
from drm_triton.bench.gpus import GPUS

# Published peaks of float32 without matrix units, in teraflops.
PEAKS = {
    "T4": 8.1,
    "A100 SXM 80GB": 19.5,
    "RTX 3090": 35.6,
    "RTX 4090": 82.6,
    "H100 SXM": 67,
    "B200": 75,
    "RTX 5090": 104.8,
    "MI250X, one of two": 47.9 / 2,
    "MI300X": 163.4,
}
BY_NAME = {gpu.name: gpu for gpu in GPUS}


def test_clock_and_processors_give_the_published_peak() -> None:
    assert {gpu.name for gpu in GPUS} == set(PEAKS)
    for gpu in GPUS:
        assert gpu.flops / 1e12 == pytest.approx(PEAKS[gpu.name], rel=0.01), gpu.name


def test_an_estimate_is_the_longer_of_two_times() -> None:
    counts = {"instructions": 6000.0, "requested": 9e9, "touched": 1000.0}
    assert nanoseconds(counts, bandwidth=1e12, issue=1e12) == pytest.approx(6)
    assert nanoseconds(counts, bandwidth=1e11, issue=1e12) == pytest.approx(10)


def test_the_table_adds_up_a_step_and_has_no_gpu_whose_code_was_not_counted() -> None:
    row = {"instructions": 1000.0, "requested": 10.0, "touched": 10.0}
    text = table({"sample_lists": row, "list_gradients": row, "top_k": row}, "Triton")
    assert "| all of a step | 2,000 | 20 | 20 |" in text
    assert "| H100 SXM | 1.9 | 0.0 |" in text  # 2000 instructions at 132 * 4 * 1.98 GHz
    assert "MI300X" not in text


def test_the_table_of_long_lists() -> None:
    gradients, update = {"instructions": 5000.0}, {"instructions": 1000.0, "requested": 20.0, "touched": 10.0}
    text = long_table({"hinge": {"items with a gradient": 2.0, "list_gradients": gradients, ITEMS: update}})
    assert "| hinge | 2 | 5,000 | 1,000 | 20 | 10 |" in text


@pytest.mark.parametrize(
    ("name", "registers", "shared", "block_warps", "warps"),
    [
        ("H100 SXM", 32, 0, 4, 64),  # 2048 threads
        ("H100 SXM", 128, 0, 4, 16),  # 65536 registers
        ("H100 SXM", 32, 100 << 10, 4, 8),  # two programs in 228 KiB
        ("H100 SXM", 32, 0, 1, 32),  # 32 programs
        ("MI300X", 128, 0, 4, 16),  # 512 registers for each of 4 units
    ],
)
def test_resident_warps(name: str, registers: int, shared: int, block_warps: int, warps: int) -> None:
    assert resident_warps(BY_NAME[name], registers, shared, block_warps) == warps
