"""Instructions by which the lanes of a warp exchange values."""

import numpy as np

from drm_triton.bench.ptx.errors import EmulatorError
from drm_triton.bench.ptx.memory import Array
from drm_triton.bench.ptx.program import Immediate, Instruction
from drm_triton.bench.ptx.warp import EVERY, LANE, Builder, Slots, Step, Warp

WHOLE_WARP = 0xFFFFFFFF


def members(warp: Warp, mask: int) -> Array:
    """Return the lanes that a member mask names, after checking that they are the active ones."""
    if warp.where is True and warp.slots[mask][0] == WHOLE_WARP:
        return EVERY
    named: Array = (warp.slots[mask][warp.active][0] >> LANE.astype(np.uint32)) & 1 == 1
    if not np.array_equal(named, warp.active):
        raise EmulatorError(f"the mask names lanes {np.flatnonzero(named)}, active are {np.flatnonzero(warp.active)}")
    return named


def sources(mode: str, b: Array | int, c: int) -> Array:
    """Return the lane from which each lane of a shuffle reads; out of its segment, a lane reads itself."""
    segment, clamp, distance = (c >> 8) & 31, c & 31, b & 31
    lowest = LANE & segment
    highest = lowest | clamp & ~segment
    if mode == "up":
        lane = LANE - distance
        inside = lane >= highest  # `up` passes the lower end of the segment as its clamp
    else:
        lane = {"down": LANE + distance, "bfly": LANE ^ distance, "idx": lowest | distance & ~segment}[mode]
        inside = lane <= highest
    result: Array = np.where(inside, lane, LANE)
    return result


def shuffle(instruction: Instruction, slots: Slots) -> Step:
    """`shfl.sync.mode.b32 d, a, b, c, mask`: read a of another lane."""
    _, mode, kind = instruction.modifiers
    d, a, b, c, mask = instruction.operands
    target, value, mask_slot = slots.target(d, kind), slots.source(a, kind), slots.source(mask, "u32")
    offset = slots.source(b, "u32")
    if not isinstance(c, Immediate):
        raise EmulatorError("bounds that are not a constant")
    bounds = c.value
    fixed = sources(mode, b.value, bounds) if isinstance(b, Immediate) else None

    def step(warp: Warp) -> None:
        members(warp, mask_slot)
        lane = sources(mode, warp.slots[offset].astype(np.int64), bounds) if fixed is None else fixed
        if warp.where is not True and not warp.active[lane[warp.active]].all():
            raise EmulatorError("a shuffle reads an inactive lane")
        warp.put(target, warp.slots[value][lane])

    return step


REDUCTIONS = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


def reduction(instruction: Instruction, slots: Slots) -> Step:
    """`redux.sync.op.type d, a, mask`: reduce a over the lanes of the mask."""
    _, name, kind = instruction.modifiers
    d, a, mask = instruction.operands
    target, value, mask_slot = slots.target(d, kind), slots.source(a, kind), slots.source(mask, "u32")
    function = REDUCTIONS[name]

    def step(warp: Warp) -> None:
        values = warp.slots[value]
        total = function.reduce(values[members(warp, mask_slot)], dtype=values.dtype)
        warp.put(target, np.full_like(values, total))

    return step


def warp_barrier(instruction: Instruction, slots: Slots) -> Step:
    """`bar.warp.sync mask`: all lanes have arrived, because the instruction begins a block."""
    if instruction.modifiers != ("warp", "sync"):
        raise EmulatorError("only bar.sync 0 and bar.warp.sync")
    mask = slots.source(instruction.operands[0], "u32")

    def step(warp: Warp) -> None:
        members(warp, mask)

    return step


EXCHANGES: dict[str, Builder] = {"shfl": shuffle, "redux": reduction, "bar": warp_barrier}
