"""Programs of a grid, one after the other in random order, their warps in a random interleaving."""

import itertools
import random
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from drm_triton.bench.ptx.errors import EmulatorError
from drm_triton.bench.ptx.memory import GlobalMemory, SharedMemory
from drm_triton.bench.ptx.warp import Code, Warp, instruction_mix

LIMIT = 20_000_000  # blocks that a program executes before it counts as endless
TURNS = (1, 3, 10, 100, 1000)  # blocks that a warp executes before another may have its turn


@dataclass
class Statistics:
    """What the launches of a kernel did.

    Attributes
    ----------
    instructions : warp instructions by class: float, special (division, exponential, ...), integer, move, load and
        store (global memory), shared, shuffle, barrier, branch, matrix (tensor cores)
    sectors_read, sectors_written : pieces of 32 bytes of global memory, counted once for each instruction of a warp
    bytes_touched : bytes of global memory that a launch reads, and bytes that it writes, each counted once
    """

    launches: int = 0
    programs: int = 0
    instructions: Counter[str] = field(default_factory=Counter)
    sectors_read: int = 0
    sectors_written: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    bytes_touched: int = 0

    @property
    def total(self) -> int:
        """All warp instructions."""
        return self.instructions.total()


class Grid:
    """One launch.

    Attributes
    ----------
    named : bits of the parameters, and the size of the grid
    place : coordinates of the running program
    interval : number of barriers and programs before, see `memory`
    first_interval : the interval in which the running program began
    """

    def __init__(
        self,
        code: Code,
        shape: tuple[int, int, int],
        warps: int,
        shared_size: int,
        parameters: list[int],
        memory: GlobalMemory,
        order: random.Random,
        statistics: Statistics,
    ) -> None:
        self.code, self.shape, self.warps, self.memory, self.statistics = code, shape, warps, memory, statistics
        names = list(code.program.parameters)
        if len(parameters) > len(names):
            raise EmulatorError(f"{code.program.name}: {len(parameters)} arguments for {len(names)} parameters")
        self.named = dict(zip(names, parameters, strict=False))  # the last ones are scratch memory, which is absent
        self.named |= {f"%nctaid.{axis}": size for axis, size in zip("xyz", shape, strict=True)}
        self._order, self._shared_size = order, shared_size
        self.place, self.interval, self.first_interval = (0, 0, 0), 0, 0
        self.shared = SharedMemory(shared_size, order)

    def run(self) -> None:
        """Run all programs."""
        x, y, z = (range(size) for size in self.shape)
        places = list(itertools.product(x, y, z))
        self._order.shuffle(places)
        if not places:
            return
        self.place = places[0]
        warps = [Warp(self.code, number, self) for number in range(self.warps)]
        with np.errstate(all="ignore"):
            for self.place in places:
                self.interval += 1
                self.first_interval = self.interval
                self.shared = SharedMemory(self._shared_size, self._order)
                for warp in warps:
                    warp.begin()
                self._run_program(warps)
        self.statistics.launches += 1
        self.statistics.programs += len(places)
        self.statistics.instructions += instruction_mix(warps)
        self.statistics.bytes_touched += self.memory.bytes_touched()

    def shuffled(self, n: int) -> list[int]:
        """Return 0 .. n - 1 in random order."""
        return self._order.sample(range(n), n)

    def _run_program(self, warps: list[Warp]) -> None:
        executed = 0
        while any(not warp.done for warp in warps):
            ready = [warp for warp in warps if warp.barrier is None and not warp.done]
            if not ready:
                self._release(warps)
                continue
            warp = self._order.choice(ready)
            turn = self._order.choice(TURNS)
            for _ in range(turn):
                warp.advance()
                if warp.barrier is not None or warp.done:
                    break
            executed += turn
            if executed > LIMIT:
                raise EmulatorError(f"{self.code.program.name}: program {self.place} does not end")

    def _release(self, warps: list[Warp]) -> None:
        """Let all warps pass the barrier at which they wait."""
        instructions = [warp.barrier for warp in warps]
        first = next(instruction for instruction in instructions if instruction is not None)
        if any(instruction is None for instruction in instructions):
            raise first.fail(f"warps of program {self.place} have ended that a barrier waits for")
        others = [other for other in instructions if other is not None and other is not first]
        if others:
            raise first.fail(f"another warp of program {self.place} waits at another barrier, in {others[0].place}")
        self.interval += 1
        for warp in warps:
            warp.pass_barrier()
