"""A warp: registers of 32 lanes, the lanes that are active, and the way through the blocks of a program.

Every operand is a *slot*, an index into the list `Warp.slots` of arrays of 32 lanes. Registers of a class are rows of
one array. A slot is a view of a row as the type of the instruction, so reading and writing need no conversion.
Constants, parameters and special registers are slots too. Instructions are decoded once, to functions of a warp
(`Step`).
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from drm_triton.bench.ptx.errors import EmulatorError
from drm_triton.bench.ptx.memory import Array, Visitor, some
from drm_triton.bench.ptx.program import (
    SHARED_SYMBOL,
    TYPES,
    Guard,
    Immediate,
    Instruction,
    Label,
    Operand,
    Program,
    Register,
)

if TYPE_CHECKING:
    from drm_triton.bench.ptx.machine import Grid

LANES = 32
LANE = np.arange(LANES)
EVERY = np.ones(LANES, bool)


class RegisterSlot(NamedTuple):
    """A register as a type that is as wide or narrower."""

    register_class: str
    type: str
    number: int


class NamedSlot(NamedTuple):
    """A parameter or special register as a type."""

    name: str
    type: str


class ConstantSlot(NamedTuple):
    """A constant, by its bits, as a type."""

    bits: int
    type: str


Slot = RegisterSlot | NamedSlot | ConstantSlot


class Slots:
    """The slots that a program uses."""

    def __init__(self) -> None:
        self.numbers: dict[Slot, int] = {}

    def _number(self, slot: Slot) -> int:
        return self.numbers.setdefault(slot, len(self.numbers))

    def source(self, operand: Operand | None, kind: str) -> int:
        """Return the slot of an operand that is read as type `kind`."""
        if isinstance(operand, Immediate):
            return self._number(ConstantSlot(operand.value, kind))
        if isinstance(operand, Label) and operand.name == SHARED_SYMBOL:
            return self._number(ConstantSlot(0, kind))
        if isinstance(operand, Register):
            if operand.type is None:
                return self.named(operand.name, kind)
            return self._number(RegisterSlot(operand.type, kind, operand.number))
        raise EmulatorError(f"unknown operand: {operand}")

    def target(self, operand: Operand | None, kind: str) -> int:
        """Return the slot of a register that is written as type `kind`, which fills it."""
        if not isinstance(operand, Register) or operand.type is None:
            raise EmulatorError(f"a register is expected: {operand}")
        if TYPES[operand.type].itemsize != TYPES[kind].itemsize:
            raise EmulatorError(f"{operand.name} is not a register for {kind}")
        return self._number(RegisterSlot(operand.type, kind, operand.number))

    def named(self, name: str, kind: str) -> int:
        """Return the slot of a parameter or special register."""
        return self._number(NamedSlot(name, kind))

    def arrays(self, files: dict[str, Array], named: dict[str, int]) -> list[Array]:
        """Return arrays of 32 lanes for all slots.

        Parameters
        ----------
        files : registers [count, 32] by their class, which the arrays view
        named : bits of parameters and special registers
        """
        rows: dict[tuple[str, str], list[Array]] = {}
        result: list[Array] = []
        for slot in self.numbers:
            if isinstance(slot, RegisterSlot):
                key = (slot.register_class, slot.type)
                if key not in rows:
                    rows[key] = list(low_part(files[slot.register_class], slot.type))
                result.append(rows[key][slot.number])
            else:
                bits = slot.bits if isinstance(slot, ConstantSlot) else named.get(slot.name, 0)
                result.append(constant(bits, slot.type))
        return result


def low_part(file: Array, kind: str) -> Array:
    """View registers [count, 32] as a type of the same width, or their low bits as a narrower one."""
    dtype = TYPES[kind]
    if file.dtype.itemsize < dtype.itemsize or (file.dtype.kind == "b") != (dtype.kind == "b"):
        raise EmulatorError(f"a register of {file.dtype.itemsize} bytes is used as {kind}")
    parts = file.view(dtype).reshape(*file.shape, file.dtype.itemsize // dtype.itemsize)
    result: Array = parts[..., 0]
    return result


def constant(bits: int, kind: str) -> Array:
    """Return 32 lanes of a value given by its bits."""
    dtype = TYPES[kind]
    if dtype.kind == "b":
        return np.full(LANES, bool(bits))
    unsigned = np.dtype(f"u{dtype.itemsize}")
    return np.full(LANES, bits & int(np.iinfo(unsigned).max), unsigned).view(dtype)


Step = Callable[["Warp"], None]
Builder = Callable[[Instruction, Slots], Step]


@dataclass
class Path:
    """Lanes that are at the same block."""

    block: int
    lanes: Array  # bool [32]

    @property
    def where(self) -> Array | bool:
        """The lanes as `Warp.where`."""
        return True if self.lanes is EVERY or self.lanes.all() else self.lanes


class Exit(NamedTuple):
    """How a block ends: with a jump to `target`, a return, a barrier, or (None) by continuing with the next."""

    kind: str | None = None
    guard: int | None = None  # slot of the predicate
    negated: bool = False
    target: int = 0
    instruction: Instruction | None = None


class DecodedBlock(NamedTuple):
    """A block as functions of a warp."""

    steps: tuple[Step, ...]
    exit: Exit
    synchronizes: Instruction | None  # the first instruction, if all lanes have to execute it together
    mix: Counter[str]


class Code:
    """A program whose instructions are functions, and the slots of their operands."""

    def __init__(self, program: Program, operations: dict[str, Builder]) -> None:
        self.program, self.slots = program, Slots()
        self.blocks = [self._decode(block.instructions, block.mix, operations) for block in program.blocks]

    def _decode(self, block: list[Instruction], mix: Counter[str], operations: dict[str, Builder]) -> DecodedBlock:
        steps, last = [], Exit()
        for instruction in block:
            if instruction.ends_block:
                last = self._exit(instruction)
                continue
            if instruction.name not in operations:
                raise instruction.fail("unknown instruction")
            try:
                step = operations[instruction.name](instruction, self.slots)
            except (EmulatorError, ValueError, KeyError) as error:
                raise instruction.fail(f"unknown form of an instruction ({error})") from error
            steps.append(located(guarded(step, instruction.guard, self.slots), instruction))
        first = block[0] if block and block[0].synchronizes else None
        return DecodedBlock(tuple(steps), last, first, mix)

    def _exit(self, instruction: Instruction) -> Exit:
        guard, negated, target = None, False, 0
        if instruction.guard is not None:
            guard = self.slots.source(instruction.guard.register, "pred")
            negated = instruction.guard.negated
        if instruction.name == "bra":
            (label,) = instruction.operands
            assert isinstance(label, Label)
            target = self.program.labels[label.name]
        if instruction.name == "bar" and (instruction.text != "bar.sync 0" or guard is not None):
            raise instruction.fail("unknown form of a barrier")
        return Exit(instruction.name, guard, negated, target, instruction)


def guarded(step: Step, guard: Guard | None, slots: Slots) -> Step:
    """Let a step take effect only in the lanes in which its guard holds."""
    if guard is None:
        return step
    predicate, negated = slots.source(guard.register, "pred"), guard.negated

    def run(warp: Warp) -> None:
        outer = warp.where
        inner = warp.active & (warp.slots[predicate] ^ negated)
        if some(inner):
            warp.where = inner
            step(warp)
            warp.where = outer

    return run


CAN_FAIL = {"ld", "st", "atom", "red", "cp", "ldmatrix", "stmatrix", "mma", "shfl", "redux", "div", "rem"}


def located(step: Step, instruction: Instruction) -> Step:
    """Add the source line to the errors of a step."""
    if instruction.name not in CAN_FAIL:
        return step

    def run(warp: Warp) -> None:
        try:
            step(warp)
        except EmulatorError as error:
            raise instruction.fail(f"{error} ({warp.label})") from error

    return run


class Warp:
    """A warp of the program that runs on a multiprocessor.

    Attributes
    ----------
    slots : arrays of 32 lanes
    where : the active lanes, bool [32], or True for all. As NumPy's argument of this name
    copies : asynchronous copies that have not arrived, in groups; the last group is open
    me : who the warp is to memory, until the next barrier
    """

    def __init__(self, code: Code, number: int, grid: "Grid") -> None:
        self.code, self.number, self.grid = code, number, grid
        special = {"%tid.x": 0, "%ntid.x": LANES * grid.warps, **grid.named}
        counts = code.program.registers
        self._registers = {name: np.zeros((count, LANES), TYPES[name]) for name, count in counts.items()}
        self.slots = code.slots.arrays(self._registers, special)
        self._special = {
            slot.name: self.slots[index] for slot, index in code.slots.numbers.items() if isinstance(slot, NamedSlot)
        }
        if "%tid.x" in self._special:
            self._special["%tid.x"][:] = LANE + LANES * number
        self.shared = grid.shared
        self.executed = [0] * len(code.blocks)
        self.begin()

    def begin(self) -> None:
        """Begin the program of the grid that comes next."""
        for name, file in self._registers.items():  # 0xAAAA: not a value that a kernel would want
            file[:] = False if name == "pred" else np.iinfo(file.dtype).max // 3 * 2
        for axis, place in zip("xyz", self.grid.place, strict=True):
            if (name := f"%ctaid.{axis}") in self._special:
                self._special[name][:] = place
        self.shared = self.grid.shared
        self.paths = [Path(0, EVERY)]
        self.copies: list[list[tuple[Array, Array]]] = [[]]
        self.barrier: Instruction | None = None  # the one at which it waits
        self.where: Array | bool = True
        self.pass_barrier()

    def pass_barrier(self) -> None:
        """Go on after a barrier."""
        self.barrier = None
        self.me = Visitor.of(self.grid.interval, self.grid.first_interval, self.number)

    @property
    def label(self) -> str:
        """The place of the warp in the grid, for messages."""
        return f"program {self.grid.place}, warp {self.number}"

    @property
    def done(self) -> bool:
        """Whether all lanes have returned."""
        return not self.paths

    @property
    def active(self) -> Array:
        """The active lanes as an array."""
        return EVERY if self.where is True else np.asarray(self.where)

    @property
    def lanes(self) -> Array | slice:
        """The active lanes as an index."""
        return slice(None) if self.where is True else np.flatnonzero(self.where)

    def put(self, slot: int, values: Array) -> None:
        """Write values to the active lanes."""
        np.copyto(self.slots[slot], values, where=self.where, casting="no")

    def advance(self) -> None:
        """Execute one block."""
        path = self.paths[0] if len(self.paths) == 1 else self._next_path()
        self.where = path.where
        block = self.code.blocks[path.block]
        for step in block.steps:
            step(self)
        self.executed[path.block] += 1
        self._leave(path, block.exit)

    def _next_path(self) -> Path:
        """Return the path that goes on while lanes have diverged.

        It is the one that is furthest behind in the program, so that lanes meet again where branches join. A path at an
        instruction that all lanes have to execute together waits for the others.
        """
        self.paths.sort(key=lambda path: path.block)
        waiting = [self.code.blocks[path.block].synchronizes for path in self.paths]
        for path, instruction in zip(self.paths, waiting, strict=True):
            if instruction is None:
                return path
        texts = [instruction.text for instruction in waiting if instruction is not None]
        assert waiting[0] is not None
        raise waiting[0].fail(f"divergent lanes wait for each other at {' and '.join(texts)} ({self.label})")

    def _leave(self, path: Path, leave: Exit) -> None:
        """Move the lanes of a path on to the blocks that follow."""
        following = path.block + 1
        if leave.kind is None:
            self._move(path, following)
            return
        if leave.kind == "bar":
            self._move(path, following)
            self.barrier = leave.instruction
            return
        taken = path.lanes
        if leave.guard is not None:
            taken = path.lanes & (self.slots[leave.guard] ^ leave.negated)
        if not some(taken):
            self._move(path, following)
            return
        if taken is not path.lanes and some(rest := path.lanes & ~taken):
            self.paths.append(rest_path := Path(path.block, rest))
            path.lanes = taken
            self._move(rest_path, following)
        if leave.kind == "bra":
            self._move(path, leave.target)
        else:
            self.paths.remove(path)

    def _move(self, path: Path, block: int) -> None:
        """Move a path to a block, and join it with a path that is there."""
        path.block = block
        if len(self.paths) > 1:
            for other in self.paths:
                if other is not path and other.block == block:
                    joined = other.lanes | path.lanes
                    other.lanes = EVERY if joined.all() else joined
                    self.paths = [kept for kept in self.paths if kept is not path]
                    return


def instruction_mix(warps: Iterable[Warp]) -> Counter[str]:
    """Return how many instructions of each class warps have executed, a divergent one once for each path."""
    total: Counter[str] = Counter()
    for warp in warps:
        for times, block in zip(warp.executed, warp.code.blocks, strict=True):
            if times:
                for kind, count in block.mix.items():
                    total[kind] += times * count
    return total
