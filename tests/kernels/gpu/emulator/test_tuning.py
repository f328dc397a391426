"""The launch options that `tuning` offers change no bit of a result of the compiled kernels."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is available on Linux only")

from drm_triton.bench.ptx import emulated
from drm_triton.exercises import OPERATIONS, Case, Inputs, Outputs, same_bits
from drm_triton.kernels import gpu
from drm_triton.kernels.gpu.tuning import Choices, knobs_of, using
from tests.kernels.gpu.conftest import triton_kernels

SMALL = Case(18, 12, "l2", 2, B=3, n_users=4, n_items=24)
LONG = Case(130, 12, "dot", 1, B=1, n_users=4, n_items=150)
# Operations that together launch every kernel.
CASES = [("sample_lists", SMALL)]
MORE_CASES = [
    ("update_rows", SMALL),
    ("sample_users", SMALL),
    ("all_losses", SMALL),
    ("soft_topk", SMALL),
    ("top_k", SMALL),
    ("all_losses", LONG),
]


def run(name: str, case: Case, choices: Choices) -> tuple[Outputs, dict[str, str]]:
    """Run an operation in the emulator; return its results, and the kernel of each key."""
    with emulated(), using(choices) as launched:
        results = OPERATIONS[name](gpu, Inputs.of(case).to(torch.device("cpu"), case.dtype))
    return results, {key: kernel for key, (kernel, _) in launched.items()}


@pytest.mark.parametrize(
    ("name", "case"), [*CASES, *(pytest.param(*each, marks=pytest.mark.slow) for each in MORE_CASES)]
)
def test_options_are_neutral(name: str, case: Case) -> None:
    expected, kernels = run(name, case, {})
    assert kernels
    # All kernels get the smallest values at once, then the largest.
    for end in (0, -1):
        choices = {
            key: {knob: values[end] for knob, values in knobs_of(kernel).items()} for key, kernel in kernels.items()
        }
        results, _ = run(name, case, choices)
        for output in expected:
            assert same_bits(results[output], expected[output]), (name, output, end)


@pytest.mark.slow
def test_no_kernel_is_left_out() -> None:
    found = {kernel for each in (*CASES, *MORE_CASES) for kernel in run(*each, {})[1].values()}
    assert found == triton_kernels()
