"""The instruction of tensor cores that multiplies matrices of bytes: mma."""

import numpy as np

from drm_triton.bench.ptx.errors import EmulatorError
from drm_triton.bench.ptx.program import Instruction, Operand, Vector
from drm_triton.bench.ptx.warp import Builder, Slots, Step, Warp

BYTES = ("sync", "aligned", "m16n8k32", "row", "col", "satfinite", "s32", "s8", "s8", "s32")
LIMITS = np.iinfo(np.int32)


def fragments(operand: Operand, count: int) -> tuple[Operand | None, ...]:
    """Return the registers that hold the part of a matrix that a lane has."""
    if not isinstance(operand, Vector) or len(operand.parts) != count:
        raise EmulatorError(f"{count} registers are expected: {operand}")
    return operand.parts


def multiply_matrices(instruction: Instruction, slots: Slots) -> Step:
    """`mma d, a, b, c`: d = a b + c, for a [16, 32] and b [32, 8] of bytes, and c and d [16, 8] of 32-bit integers.

    Lane 4 g + t has of a the bytes of rows g and g + 8 in columns 4 t .. 4 t + 3 and 16 more, of b those of column g in
    rows 4 t .. 4 t + 3 and 16 more, and of c and d the integers of rows g and g + 8 in columns 2 t and 2 t + 1.
    """
    if instruction.modifiers != BYTES:
        raise EmulatorError("only " + ".".join(("mma", *BYTES)))
    d, a, b, c = instruction.operands
    targets = [slots.target(part, "s32") for part in fragments(d, 4)]
    left = [slots.source(part, "b32") for part in fragments(a, 4)]
    right = [slots.source(part, "b32") for part in fragments(b, 2)]
    addends = [slots.source(part, "s32") for part in fragments(c, 4)]

    def step(warp: Warp) -> None:
        if warp.where is not True:
            raise EmulatorError("not all lanes are active")
        A = np.stack([warp.slots[slot] for slot in left]).view(np.int8).reshape(2, 2, 8, 4, 4)
        B = np.stack([warp.slots[slot] for slot in right]).view(np.int8).reshape(2, 8, 4, 4)
        C = np.stack([warp.slots[slot] for slot in addends]).reshape(2, 2, 8, 4).transpose(0, 2, 3, 1).reshape(16, 8)
        rows = A.transpose(1, 2, 0, 3, 4).reshape(16, 32).astype(np.int64)
        columns = B.transpose(0, 2, 3, 1).reshape(32, 8).astype(np.int64)
        result = np.clip(rows @ columns + C, LIMITS.min, LIMITS.max).astype(np.int32)
        parts = result.reshape(2, 8, 4, 2).transpose(0, 3, 1, 2).reshape(4, 32)
        for target, part in zip(targets, parts, strict=True):
            warp.put(target, part)

    return step


MATRICES: dict[str, Builder] = {"mma": multiply_matrices}
