"""Kernels with a bug of each kind, which the PTX emulator must report in every order of warps and programs."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is available on Linux only")

from drm_triton.bench.ptx import EmulatorError, emulated
from tests.kernels.gpu.emulator.conftest import aligned, emulate, fails, run_ptx
from tests.kernels.gpu.faulty import copy_kernel, count_kernel, exchange_kernel, scatter_kernel, sum_kernel


def launch_copy(x: torch.Tensor, y: torch.Tensor, n: int, shift: int = 0, warps: int = 1) -> list[torch.Tensor]:
    copy_kernel[(-(-n // 64),)](x, y, n, shift, BLOCK=64, num_warps=warps)
    return [y]


def test_a_right_kernel_raises_nothing() -> None:
    x = torch.randn(150)
    (y,), statistics = emulate(lambda: launch_copy(x, torch.zeros(150), 150, warps=2))
    assert torch.equal(x, y)
    one = statistics["copy_kernel"]
    assert (one.launches, one.programs) == (1, 3)
    assert one.bytes_read == one.bytes_written == 600
    assert one.sectors_read == one.sectors_written == 19
    assert one.bytes_touched == 1200
    assert one.instructions["load"] == one.instructions["store"] == 6


def test_read_out_of_bounds() -> None:
    x = torch.zeros(200)[20:170]  # the bytes on both sides belong to a larger tensor, but not to the argument
    message = fails(lambda: launch_copy(x, torch.zeros(150), 150, 1))
    assert "4 bytes after x_ptr: out of bounds" in message
    assert "faulty.py:10: " in message
    assert "before x_ptr: out of bounds" in fails(lambda: launch_copy(x, torch.zeros(150), 150, -1))


def test_write_out_of_bounds() -> None:
    assert "write of 4 bytes" in fails(lambda: launch_copy(torch.zeros(150), torch.zeros(149), 150))


def test_an_empty_argument_may_not_be_read() -> None:
    assert "out of bounds" in fails(lambda: launch_copy(torch.zeros(0), torch.zeros(10), 10))


def test_two_programs_write_one_address() -> None:
    message = fails(lambda: sum_kernel[(2,)](torch.ones(128), torch.zeros(1), BLOCK=64))
    assert "write to out_ptr that was written by another program" in message


def test_a_program_reads_what_another_writes() -> None:
    x = torch.zeros(300)
    message = fails(lambda: launch_copy(x[1:], x[:-1], 200))  # shifts in place: a program needs the next one's entries
    assert "y_ptr" in message
    assert "by another program" in message


def test_warps_exchange_values_in_global_memory_without_a_barrier() -> None:
    x, y = torch.zeros(128, dtype=torch.int32), torch.zeros(128, dtype=torch.int32)
    message = fails(lambda: exchange_kernel[(1,)](x, y, BARRIER=False, num_warps=4))
    assert "x_ptr" in message
    assert "by another warp, with no barrier between" in message
    emulate(lambda: [exchange_kernel[(1,)](x, y, BARRIER=True, num_warps=4)][:0])
    assert y.tolist() == list(range(127, -1, -1))


def test_a_counter_is_used_otherwise_in_the_launch_that_counts() -> None:
    count, out = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    emulate(lambda: [count_kernel[(3,)](count, out, THEN="")][:0], seeds=[0])
    assert count.tolist() == [3]
    message = fails(lambda: count_kernel[(1,)](count, out, THEN="load"))
    # Triton 3.7 puts the read before the addition, and later versions after it.
    found = "read of count_ptr in a launch with atomic additions", "addition to count_ptr that the launch also reads"
    assert any(text in message for text in found)
    assert "write to count_ptr in a launch with" in fails(lambda: count_kernel[(1,)](count, out, THEN="store"))


def test_a_sector_is_counted_once_for_all_launches() -> None:
    x, y = (torch.from_numpy(aligned(np.zeros(64, "f4"))) for _ in range(2))
    with emulated() as emulation:
        launch_copy(x, y, 60)
        launch_copy(y, x, 60)  # what it reads has been written
    assert (len(emulation.read), len(emulation.written)) == (8, 16)


def test_lanes_write_different_values_to_one_address() -> None:
    index, out = torch.arange(32) // 2, torch.zeros(16, dtype=torch.int32)
    message = fails(lambda: scatter_kernel[(1,)](index, out, num_warps=1))
    assert "lanes of a warp write different values to one address of out_ptr" in message


def test_specialization_is_that_of_triton() -> None:
    """A pointer that is not a multiple of 16 bytes gets another kernel, without wide loads, and is right."""
    x = torch.randn(161)
    for start, loads in ((0, 2), (1, 8)):
        y = torch.zeros(160)
        with emulated() as emulation:
            copy_kernel[(1,)](x[start : start + 160], y, 160, 0, BLOCK=256, num_warps=1)
        assert torch.equal(y, x[start : start + 160])
        assert emulation.statistics["copy_kernel"].instructions["load"] == loads


def test_the_launcher_is_restored() -> None:
    from triton.runtime.jit import JITFunction

    before = JITFunction.run
    with emulated():
        assert JITFunction.run is not before
    assert JITFunction.run is before
    fails(lambda: launch_copy(torch.zeros(5), torch.zeros(5), 9))
    assert JITFunction.run is before


# ---------------------------------------------------------------------------------------------------------------------
# Bugs that a compiler would have to make

ADDRESS = "shl.b32 %r10, %r0, 2;\nxor.b32 %r11, %r10, 128;\nmad.wide.u32 %rd10, %r0, 4, %rd1;\n"
STORE, LOAD, OUT = "st.shared.b32 [%r10], %r0;\n", "ld.shared.b32 %r12, [%r11];\n", "st.global.b32 [%rd10], %r12;\n"


def ptx_fails(body: str, **options: int) -> str:
    """Return the message of the error that instructions give in every order."""
    messages = []
    for seed in range(5):
        with pytest.raises(EmulatorError) as caught:
            run_ptx(body, np.zeros(64, "u4"), seed=seed, **options)
        messages.append(str(caught.value))
    return messages[0]


def test_a_missing_barrier() -> None:
    run_ptx(ADDRESS + STORE + "bar.sync 0;\n" + LOAD + OUT, np.zeros(64, "u4"), warps=2, shared=256)
    own = ADDRESS + STORE + LOAD.replace("%r11", "%r10") + OUT  # a warp may read what it wrote itself
    run_ptx(own, np.zeros(64, "u4"), warps=2, shared=256)
    before = ADDRESS + "mov.b32 %r13, 0;\nst.shared.b32 [%r10], %r13;\nbar.sync 0;\n"
    message = ptx_fails(before + STORE + LOAD + OUT, warps=2, shared=256)
    assert "shared memory" in message
    assert "by another warp, with no barrier between" in message


def test_a_missing_barrier_after_a_read() -> None:
    body = ADDRESS + STORE + "bar.sync 0;\n" + LOAD + "add.s32 %r13, %r0, 1;\nst.shared.b32 [%r10], %r13;\n" + OUT
    assert "with no barrier between" in ptx_fails(body, warps=2, shared=256)


def test_shared_memory_that_nobody_wrote() -> None:
    assert "shared memory that nobody wrote" in ptx_fails(ADDRESS + LOAD.replace("%r11", "%r10") + OUT, shared=256)


def test_shared_memory_out_of_bounds() -> None:
    assert "shared memory at 124 of 124 bytes: out of bounds" in ptx_fails(ADDRESS + STORE, shared=124)


def test_a_misaligned_access() -> None:
    assert "misaligned" in ptx_fails(ADDRESS + "st.global.b32 [%rd10+2], %r0;")
    assert "misaligned" in ptx_fails(ADDRESS + "ld.global.v2.b32 {%r12, %r13}, [%rd10];")
    assert "misaligned" in ptx_fails(ADDRESS + "st.shared.b64 [%r10], %rd10;", shared=512)


COPY = "cp.async.ca.shared.global [%r10], [%rd10], 4;\ncp.async.commit_group;\n"


def test_an_asynchronous_copy_is_not_waited_for() -> None:
    wait, own = "cp.async.wait_group 0;\n", LOAD.replace("%r11", "%r10")
    run_ptx(ADDRESS + COPY + wait + own + OUT, np.zeros(64, "u4"), shared=256)
    assert "asynchronous copy" in ptx_fails(ADDRESS + COPY + own + OUT, shared=256)
    assert "asynchronous copy" in ptx_fails(ADDRESS + COPY + STORE, shared=256)
    late = ADDRESS + COPY + COPY.replace("%r10", "%r11") + "cp.async.wait_group 1;\n"
    assert "asynchronous copy" in ptx_fails(late + LOAD + OUT, shared=256)


def test_a_divergent_barrier() -> None:
    half = "setp.lt.u32 %p1, %r0, 16;\n@%p1 bra $L_other;\nbar.sync 0;\nbra $L_end;\n$L_other:\nbar.sync 0;\n$L_end:\n"
    assert "divergent lanes wait for each other" in ptx_fails(half)
    of_warps = half.replace("16", "32")  # lanes of a warp agree, but warps do not
    assert "waits at another barrier" in ptx_fails(of_warps, warps=2)
    ended = "setp.lt.u32 %p1, %r0, 32;\n@%p1 bra $L_end;\nbar.sync 0;\n$L_end:\n"
    assert "have ended that a barrier waits for" in ptx_fails(ended, warps=2)


def test_a_shuffle_of_lanes_that_have_ended() -> None:
    body = "setp.lt.u32 %p1, %r0, 16;\n@%p1 ret;\nshfl.sync.bfly.b32 %r10, %r0, 16, 31, -1;"
    assert "the mask names lanes" in ptx_fails(body)


def test_a_shuffle_reads_an_inactive_lane() -> None:
    body = "setp.lt.u32 %p1, %r0, 16;\nmov.b32 %r9, 0xFFFF;\n@%p1 shfl.sync.bfly.b32 %r10, %r0, 16, 31, %r9;"
    assert "reads an inactive lane" in ptx_fails(body)


def test_integer_division_by_zero() -> None:
    assert "by zero" in ptx_fails("div.s32 %r10, %r0, %r0;")


def test_an_endless_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drm_triton.bench.ptx.machine.LIMIT", 10_000)
    assert "does not end" in ptx_fails("$L_loop:\nbra $L_loop;")
