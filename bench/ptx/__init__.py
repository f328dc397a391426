"""A PTX emulator: runs what Triton compiles for an NVIDIA GPU, without one, behind the launchers of the kernels.

    with emulated(seed=0) as emulation:
        gpu.list_gradients(U, V, batch, objective)  # tensors on the CPU
    print(emulation.statistics["_losses_kernel"])

`program` parses PTX, `operations` and `access` turn instructions into functions of a warp, `warp` executes them on 32
lanes, `machine` schedules warps and programs, `memory` watches every access, and `launch` takes the place of Triton's
launcher. The emulator models results, order and memory, not time.
"""

from drm_triton.bench.ptx.errors import EmulatorError
from drm_triton.bench.ptx.launch import Emulation, emulated
from drm_triton.bench.ptx.machine import Statistics

__all__ = ["Emulation", "EmulatorError", "Statistics", "emulated"]
