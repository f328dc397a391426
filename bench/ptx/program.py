"""PTX text as instructions: operands, types and basic blocks, parsed once for all warps.

Only what LLVM's NVPTX back end writes for one kernel is understood: one entry function without calls, registers that
are declared by class (%p, %rs, %r, %rd), and dynamic shared memory that begins at the symbol `global_smem`.
"""

import re
from collections import Counter
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from drm_triton.bench.ptx.errors import EmulatorError

# Types of PTX. `bf16` has no NumPy type: its bits are handled as `b16`.
TYPES: dict[str, np.dtype[np.generic]] = {
    **{f"{kind}{bits}": np.dtype(f"u{bits // 8}") for kind in "bu" for bits in (8, 16, 32, 64)},
    **{f"s{bits}": np.dtype(f"i{bits // 8}") for bits in (8, 16, 32, 64)},
    **{f"f{bits}": np.dtype(f"f{bits // 8}") for bits in (16, 32, 64)},
    "pred": np.dtype(bool),
}
# Register classes by the letters of their names.
CLASSES = {"p": "pred", "rs": "b16", "r": "b32", "rd": "b64"}
SHARED_SYMBOL = "global_smem"


@dataclass(frozen=True)
class Register:
    """A register, `%r12`, or a special one, `%tid.x`."""

    name: str
    type: str | None = None  # class of the register, None for special registers
    number: int = 0  # within its class


@dataclass(frozen=True)
class Immediate:
    """A constant: an integer, or the bits of a float (`0f3F800000`)."""

    value: int


@dataclass(frozen=True)
class Label:
    """The target of a branch, or a symbol."""

    name: str


@dataclass(frozen=True)
class Address:
    """`[%rd1+16]`, or `[name]` for parameters and symbols."""

    base: Register | Immediate | Label
    offset: int


@dataclass(frozen=True)
class Vector:
    """`{%r1, %r2}`; None is the sink `_`, which receives a part that nobody reads."""

    parts: tuple[Register | Immediate | None, ...]


Operand = Register | Immediate | Address | Label | Vector


@dataclass(frozen=True)
class Guard:
    """`@%p1` or `@!%p1`: the lanes in which an instruction takes effect."""

    register: Register | Immediate
    negated: bool


@dataclass(frozen=True)
class Instruction:
    """One instruction. `name` is what precedes the first dot; `modifiers` are the parts that follow."""

    name: str
    modifiers: tuple[str, ...]
    operands: tuple[Operand, ...]
    guard: Guard | None
    text: str
    place: str  # source line, as in topk.py:135

    @property
    def type(self) -> str:
        """The last modifier, the type of an arithmetic instruction."""
        return self.modifiers[-1] if self.modifiers else ""

    @property
    def synchronizes(self) -> bool:
        """Whether all lanes of the warp have to execute it together."""
        return "sync" in self.modifiers

    @property
    def ends_block(self) -> bool:
        """Whether it is a branch, a return or a barrier of all warps."""
        return self.name in ("bra", "ret") or (self.name == "bar" and "warp" not in self.modifiers)

    def fail(self, what: str) -> EmulatorError:
        """Return the error for this instruction."""
        return EmulatorError(f"{self.place}: {what}: {self.text}")

    @property
    def kind(self) -> str:
        """Class of the instruction in the statistics."""
        if self.name in ("ld", "st", "atom", "red", "cp", "ldmatrix", "stmatrix"):
            if "global" in self.modifiers:
                return "store" if self.name in ("st", "atom", "red") else "load"
            return "shared" if "shared" in self.modifiers else "barrier" if self.name == "cp" else "move"
        if self.type in ("f32", "f64") and self.name not in ("cvt", "selp"):
            return "special" if self.name in SPECIAL else "float"
        return KINDS.get(self.name, "integer")


SPECIAL = {"ex2", "lg2", "rcp", "sqrt", "rsqrt", "div"}  # floats that the special function unit computes or begins
KINDS = {"mov": "move", "shfl": "shuffle", "redux": "shuffle", "bar": "barrier", "bra": "branch", "ret": "branch"}
KINDS["mma"] = "matrix"


@dataclass
class Block:
    """Instructions that a warp executes without a jump.

    The last one may be a branch, a return or a barrier. An instruction that synchronizes begins a block, so that lanes
    which have diverged can wait for each other there.
    """

    instructions: list[Instruction] = field(default_factory=list)

    @property
    def synchronizes(self) -> bool:
        """Whether all lanes have to enter the block together."""
        return bool(self.instructions) and self.instructions[0].synchronizes

    @property
    def mix(self) -> Counter[str]:
        """Number of instructions of each class."""
        return Counter(instruction.kind for instruction in self.instructions)


class Program:
    """An entry function of a PTX module.

    Attributes
    ----------
    name : of the kernel
    parameters : names of the parameters, with their types
    registers : number of registers of each class
    blocks : in the order of the text, so that a block without a jump continues with the next
    labels : number of the block that begins at each label
    """

    def __init__(self, ptx: str) -> None:
        head = re.search(r"\.entry\s+(\w+)\s*\((.*?)\)(.*?)\{", ptx, flags=re.S)
        if head is None:
            raise EmulatorError("PTX without an entry function")
        self.name = head[1]
        self.parameters = {name: kind for kind, name in re.findall(r"\.param\s+\.(\w+)[^,]*?(\w+)\s*(?:,|$)", head[2])}
        self.registers: dict[str, int] = {}
        self.blocks = [Block()]
        self.labels: dict[str, int] = {}
        self._parse(ptx[head.end() :])

    def _parse(self, body: str) -> None:
        place, depth = self.name, 1
        for raw in body.splitlines():
            code, _, comment = raw.partition("//")
            # LLVM splits a register in a scope of its own, `{ .reg .b32 tmp; mov.b64 {%r1, tmp}, %rd1; }`.
            line = re.sub(r"\{ \.reg \.b32 tmp; (.*)\btmp\b(.*;) \}", r"\1_\2", code.strip())
            if line in ("{", "}"):
                depth += 1 if line == "{" else -1
                if depth == 0:
                    return
            elif line.startswith(".loc"):
                place = re.sub(r":\d+$", "", comment.strip()) or place
            elif line.startswith(".reg"):
                self._declare(line)
            elif match := re.fullmatch(r"(\$?\w+):", line):
                self.labels[match[1]] = self._begin()
            elif line and not line.startswith("."):
                for text in filter(None, map(str.strip, line.split(";"))):
                    self._append(parse_instruction(re.sub(r"\s+", " ", text), place))
        raise EmulatorError(f"{self.name}: the entry function does not end")

    def _declare(self, line: str) -> None:
        match = re.fullmatch(r"\.reg\s+\.(\w+)\s+%([a-z]+)<(\d+)>;", line)
        if match is None or CLASSES.get(match[2]) != match[1]:
            raise EmulatorError(f"{self.name}: unknown declaration: {line}")
        self.registers[match[1]] = int(match[3])

    def _begin(self) -> int:
        """Begin a block, unless the last one is empty; return its number."""
        if self.blocks[-1].instructions:
            self.blocks.append(Block())
        return len(self.blocks) - 1

    def _append(self, instruction: Instruction) -> None:
        if instruction.synchronizes:
            self._begin()
        self.blocks[-1].instructions.append(instruction)
        if instruction.ends_block:
            self._begin()


def parse_instruction(text: str, place: str) -> Instruction:
    """Parse `@%p1 add.s32 %r1, %r2, 3`."""
    guard = None
    code = text
    if match := re.match(r"@(!?)(%\w+) (.*)", text):
        guard, code = Guard(parse_scalar(match[2]), bool(match[1])), match[3]
    opcode, _, rest = code.partition(" ")
    name, *modifiers = opcode.replace("shared::cta", "shared").split(".")  # two names for the memory of a program
    # A comma inside braces or brackets does not separate operands.
    operands = re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|[^,{\[])+", rest)
    parsed = tuple(parse_operand(operand.strip()) for operand in operands if operand.strip())
    return Instruction(name, tuple(modifiers), parsed, guard, text, place)


def parse_operand(text: str) -> Operand:
    """Parse one operand."""
    if text.startswith("{"):
        parts = [part.strip() for part in text.strip("{} ").split(",")]
        return Vector(tuple(None if part == "_" else parse_scalar(part) for part in parts))
    if text.startswith("["):
        base, _, offset = text.strip("[] ").partition("+")
        base, offset = base.strip(), offset.strip()
        return Address(parse_scalar(base) if base.startswith("%") else Label(base), int(offset or "0", 0))
    if re.match(r"[$A-Za-z_]", text):
        return Label(text)
    return parse_scalar(text)


@cache
def parse_scalar(text: str) -> Register | Immediate:
    """Parse a register or a constant."""
    if match := re.fullmatch(r"%([a-z]+)(\d+)", text):
        return Register(text, CLASSES[match[1]], int(match[2]))
    if text.startswith("%"):
        return Register(text)
    if match := re.fullmatch(r"0[fFdD]([0-9A-Fa-f]+)", text):
        return Immediate(int(match[1], 16))
    return Immediate(int(text.rstrip("U"), 0))
