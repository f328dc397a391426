"""Published figures of the GPUs for which the kernels are compiled. Estimates of time use these and no others.

One GPU stands for each target. The clock is the boost clock with which the maker computes the peak of float32
operations without matrix units, processors x lanes x 2 x clock; `tests/bench/test_gpu_static.py` compares the two.

Sources: data sheets of T4, A100, GeForce RTX 3090, 4090 and 5090, H100 SXM, B200 (HGX), Instinct MI250X and MI300X; the
limits of a multiprocessor are those of the table "technical specifications per compute capability" in NVIDIA's CUDA
programming guide and of AMD's instruction set guides of CDNA 2 and 3. An MI250X is two GPUs; the figures are of one.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """A GPU: peaks, and limits on the warps that a multiprocessor holds."""

    name: str
    backend: str  # cuda or hip
    arch: int | str
    warp: int  # threads
    processors: int  # multiprocessors or compute units, each issuing 4 warp instructions per cycle
    lanes: int  # float32 multiply-adds per processor and cycle
    clock: float  # Hz
    bandwidth: float  # bytes/s of the memory
    shared: int  # bytes per processor
    shared_block: int  # bytes that one program may use
    max_warps: int  # per processor
    max_blocks: int

    @property
    def flops(self) -> float:
        """Peak of float32 operations per second."""
        return self.processors * self.lanes * 2 * self.clock

    @property
    def issue(self) -> float:
        """Peak of warp instructions per second."""
        return self.processors * 4 * self.clock


KIB = 1 << 10
GPUS = [
    Gpu("T4", "cuda", 75, 32, 40, 64, 1.59e9, 0.32e12, 64 * KIB, 64 * KIB, 32, 16),
    Gpu("A100 SXM 80GB", "cuda", 80, 32, 108, 64, 1.41e9, 2.039e12, 164 * KIB, 163 * KIB, 64, 32),
    Gpu("RTX 3090", "cuda", 86, 32, 82, 128, 1.695e9, 0.936e12, 100 * KIB, 99 * KIB, 48, 16),
    Gpu("RTX 4090", "cuda", 89, 32, 128, 128, 2.52e9, 1.008e12, 100 * KIB, 99 * KIB, 48, 24),
    Gpu("H100 SXM", "cuda", 90, 32, 132, 128, 1.98e9, 3.35e12, 228 * KIB, 227 * KIB, 64, 32),
    Gpu("B200", "cuda", 100, 32, 148, 128, 1.98e9, 8.0e12, 228 * KIB, 227 * KIB, 64, 32),
    Gpu("RTX 5090", "cuda", 120, 32, 170, 128, 2.407e9, 1.792e12, 100 * KIB, 99 * KIB, 48, 24),
    Gpu("MI250X, one of two", "hip", "gfx90a", 64, 110, 64, 1.7e9, 1.638e12, 64 * KIB, 64 * KIB, 32, 32),
    Gpu("MI300X", "hip", "gfx942", 64, 304, 128, 2.1e9, 5.3e12, 64 * KIB, 64 * KIB, 32, 32),
]
