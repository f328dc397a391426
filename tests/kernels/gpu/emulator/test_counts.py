"""What a training step on lists costs a GPU, counted in the PTX emulator: a number that must not rise unnoticed."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is available on Linux only")

from drm_triton.bench.ptx import emulated
from drm_triton.kernels import gpu
from drm_triton.kernels.protocol import GradientTerms, ListPlan, Objective
from tests.kernels.gpu.conftest import factors, generator

LISTS, GROUP, RHO, ETA, D = 64, 32, 1, 45, 64
N_USERS, N_ITEMS, DEGREE = 400, 1000, 5
# Warp instructions a list. Change a number only if the change is meant, and the sum only downwards.
INSTRUCTIONS = {"sample_lists": 215, "list_gradients": 1695, "update of V": 806, "update of U": 133}
SLACK = 1.03  # another version of the compiler may need a little more


def test_a_step_costs_no_more_than_it_did() -> None:
    draw = generator("interactions")
    rows = [torch.randperm(N_ITEMS, generator=draw)[:DEGREE].sort().values for _ in range(N_USERS)]
    indptr = torch.arange(0, (N_USERS + 1) * DEGREE, DEGREE)
    plan = ListPlan(indptr, torch.cat(rows).int(), N_ITEMS, RHO, ETA, share=GROUP)
    U, V = factors(N_USERS, D, "U"), factors(N_ITEMS, D, "V")
    U_state, V_state = torch.ones_like(U), torch.ones_like(V)
    counts: dict[str, float] = {}
    with emulated() as emulation:

        def count(operation: str) -> None:
            counts[operation] = sum(kernel.total for kernel in emulation.statistics.values()) / LISTS
            emulation.statistics.clear()

        batch = gpu.sample_lists(plan, 0, 0, LISTS)
        count("sample_lists")
        gradients = gpu.list_gradients(U, V, batch, Objective(RHO))
        count("list_gradients")
        gpu.update_rows(V, V_state, GradientTerms.of_items(batch, gradients.g, U), 0.1, "dot")
        count("update of V")
        gpu.update_rows(U, U_state, GradientTerms.of_rows(batch.users, gradients.user_grad), 0.1, "dot")
        count("update of U")
    assert batch.shared is not None
    assert 0 < batch.shared.replaced.sum() < LISTS
    for operation, most in INSTRUCTIONS.items():
        assert counts[operation] <= SLACK * most, operation
    assert sum(counts.values()) <= 3000
    # At least, table and state of each row that takes a step are read once and written once.
    least = 4 * 4 * D * (len(batch.items.unique()) + len(batch.users.unique()))
    assert 32 * (len(emulation.read) + len(emulation.written)) <= 1.5 * least
