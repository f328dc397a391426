"""Instructions that access memory: ld, st, atom, red, cp.async, ldmatrix and stmatrix."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from drm_triton.bench.ptx.errors import EmulatorError
from drm_triton.bench.ptx.memory import SECTOR_BITS, Array
from drm_triton.bench.ptx.program import TYPES, Address, Immediate, Instruction, Label, Operand, Register, Vector
from drm_triton.bench.ptx.warp import LANES, Builder, Slots, Step, Warp


def address_of(operand: Operand, slots: Slots, kind: str) -> tuple[int, int]:
    """Return the slot of the base of an address, and the offset."""
    if not isinstance(operand, Address):
        raise EmulatorError(f"an address is expected: {operand}")
    return slots.source(operand.base, kind), operand.offset


def addresses(warp: Warp, place: tuple[int, int]) -> Array:
    """Return the addresses of the active lanes: int64 [lanes]."""
    base, offset = place
    result: Array = warp.slots[base][warp.lanes].astype(np.int64) + offset
    return result


def count_read(warp: Warp, where: Array, n_bytes: int) -> None:
    """Count the traffic of one instruction that reads global memory."""
    statistics = warp.grid.statistics
    statistics.sectors_read += len(set((where >> SECTOR_BITS).tolist()))
    statistics.bytes_read += n_bytes


def count_written(warp: Warp, where: Array, n_bytes: int) -> None:
    """Count the traffic of one instruction that writes global memory."""
    statistics = warp.grid.statistics
    statistics.sectors_written += len(set((where >> SECTOR_BITS).tolist()))
    statistics.bytes_written += n_bytes


def parts_of(operand: Operand, instruction: Instruction) -> list[Register | Immediate]:
    """Return the registers of a transfer, checked against .v2 or .v4."""
    parts = operand.parts if isinstance(operand, Vector) else (operand,)
    expected = next((int(modifier[1:]) for modifier in instruction.modifiers if modifier in ("v2", "v4")), 1)
    known = [part for part in parts if isinstance(part, Register | Immediate)]
    if len(known) != expected or len(parts) != expected:
        raise EmulatorError("the registers do not match the vector size")
    return known


def only(instruction: Instruction, *allowed: str) -> None:
    """Raise if an instruction has a modifier that is not among those allowed."""
    rest = set(instruction.modifiers) - set(allowed) - set(TYPES)
    if rest:
        raise EmulatorError(f"modifiers {sorted(rest)}")


def whole_registers(operands: Sequence[Operand], slots: Slots) -> tuple[list[int], list[np.dtype[Any]]]:
    """Return slots and types of registers as their class has them. They may be wider than what is loaded."""
    classes = [operand.type if isinstance(operand, Register) else None for operand in operands]
    targets = [slots.target(operand, kind or "") for operand, kind in zip(operands, classes, strict=True)]
    return targets, [TYPES[kind or ""] for kind in classes]


def load(instruction: Instruction, slots: Slots) -> Step:
    """`ld.space.type`: parameters, global or shared memory to registers. Narrow values are extended."""
    space, kind = instruction.modifiers[0], instruction.type
    destination, source = instruction.operands
    if space == "param":
        only(instruction, "param")
        assert isinstance(source, Address)
        assert isinstance(source.base, Label)
        (target,), (width,) = whole_registers([destination], slots)
        parameter = slots.named(source.base.name, kind)
        return lambda warp: warp.put(target, warp.slots[parameter].astype(width))
    only(instruction, "global", "shared", "v2", "v4")
    dtype = TYPES[kind]
    targets, widths = whole_registers(parts_of(destination, instruction), slots)
    place = address_of(source, slots, "u64" if space == "global" else "u32")
    size = dtype.itemsize * len(targets)

    def step(warp: Warp) -> None:
        where = addresses(warp, place)
        if space == "global":
            values = warp.grid.memory.load(where, size, warp.me)
            count_read(warp, where, values.size)
        else:
            values = warp.shared.load(where, size, warp.me)
        columns = values.view(dtype)
        lanes = warp.lanes
        for number, (target, width) in enumerate(zip(targets, widths, strict=True)):
            # A signed value is extended by its sign, then its bits are kept as the register holds them.
            warp.slots[target][lanes] = columns[:, number].astype(width)

    return step


def store(instruction: Instruction, slots: Slots) -> Step:
    """`st.space.type`: registers to global or shared memory. Of a wider register, the low bits are stored."""
    only(instruction, "global", "shared", "v2", "v4")
    space, kind = instruction.modifiers[0], instruction.type
    destination, source = instruction.operands
    sources = [slots.source(register, kind) for register in parts_of(source, instruction)]
    place = address_of(destination, slots, "u64" if space == "global" else "u32")

    def step(warp: Warp) -> None:
        lanes = warp.lanes
        where = addresses(warp, place)
        values = np.stack([warp.slots[slot][lanes] for slot in sources], axis=1).view(np.uint8)
        if space == "global":
            warp.grid.memory.store(where, values, warp.me)
            count_written(warp, where, values.size)
        else:
            warp.shared.store(where, values, warp.me)

    return step


def atomic(instruction: Instruction, slots: Slots) -> Step:
    """`atom.global.add` of integers, or `red`, which returns nothing. Lanes take their turns in random order."""
    only(instruction, "global", "gpu", "acq_rel", "relaxed", "add")
    kind = instruction.type
    if "add" not in instruction.modifiers or kind[0] not in "us":
        raise EmulatorError("only additions of integers to global memory are atomic here")
    *destination, where, value = instruction.operands
    targets, source = [slots.target(register, kind) for register in destination], slots.source(value, kind)
    place = address_of(where, slots, "u64")

    def step(warp: Warp) -> None:
        where, values = addresses(warp, place), warp.slots[source][warp.lanes]
        turns = warp.grid.shuffled(len(values))
        found = np.empty_like(values)
        found[turns] = warp.grid.memory.add(where[turns], values[turns])
        for target in targets:
            warp.slots[target][warp.lanes] = found
        count_read(warp, where, values.nbytes)
        count_written(warp, where, values.nbytes)

    return step


def copy(instruction: Instruction, slots: Slots) -> Step:
    """`cp.async`: from global to shared memory. The data arrive when the group of the copy is waited for.

    A copy with a source size fills the rest with zeros.
    """
    if instruction.modifiers == ("async", "commit_group"):
        return lambda warp: warp.copies.append([])
    if instruction.modifiers == ("async", "wait_group"):
        (allowed,) = instruction.operands
        assert isinstance(allowed, Immediate)
        return lambda warp: wait(warp, allowed.value)
    if instruction.modifiers[:2] not in (("async", "ca"), ("async", "cg")):
        raise EmulatorError("only cp.async.ca, .cg, .commit_group and .wait_group")
    destination, source, copied, *rest = instruction.operands
    assert isinstance(copied, Immediate)
    size = copied.value
    into, out_of = address_of(destination, slots, "u32"), address_of(source, slots, "u64")
    source_size = slots.source(rest[0] if rest else copied, "u32")

    def step(warp: Warp) -> None:
        targets, origins = addresses(warp, into), addresses(warp, out_of)
        lengths = warp.slots[source_size][warp.lanes]
        values = np.zeros((len(targets), size), np.uint8)
        for length in set(lengths.tolist()) - {0}:
            mine = lengths == length
            values[mine, :length] = warp.grid.memory.load(origins[mine], length, warp.me)
        count_read(warp, origins[lengths > 0], int(lengths.sum()))
        warp.shared.expect(targets, size, warp.me)
        warp.copies[-1].append((targets, values))

    return step


def wait(warp: Warp, allowed: int) -> None:
    """Let all groups of copies arrive but the last `allowed` ones."""
    complete = len(warp.copies) - 1  # the last group is still open
    for group in warp.copies[: max(0, complete - allowed)]:
        for targets, values in group:
            warp.shared.arrive(targets, values, warp.me)
    del warp.copies[: max(0, complete - allowed)]


def matrix_parts(instruction: Instruction, registers: Operand) -> list[Register | Immediate]:
    """Return the registers of ldmatrix or stmatrix, one for each 8 x 8 matrix of 16-bit values."""
    sync, aligned, shape, count, *layout = instruction.modifiers
    parts = registers.parts if isinstance(registers, Vector) else ()
    known = [part for part in parts if isinstance(part, Register | Immediate)]
    if (sync, aligned, shape, layout) != ("sync", "aligned", "m8n8", ["shared", "b16"]) or count != f"x{len(known)}":
        raise EmulatorError("only m8n8 without transposition")
    return known


# A row of a matrix has 16 bytes. Lanes 8 i .. 8 i + 7 hold the addresses of the rows of matrix i. Lane t holds bytes
# 4 (t % 4) .. 4 (t % 4) + 3 of row t // 4 of each matrix.
ROWS, ROW_BYTES = 8, 16


def row_addresses(warp: Warp, place: tuple[int, int]) -> Array:
    """Return the addresses of the rows of matrices, after checking that all lanes are active."""
    where = addresses(warp, place)
    if len(where) != LANES:
        raise EmulatorError("not all lanes are active")
    return where


def load_matrix(instruction: Instruction, slots: Slots) -> Step:
    """`ldmatrix`: matrices from shared memory to one register of all lanes each."""
    registers, source = instruction.operands
    targets = [slots.target(register, "b32") for register in matrix_parts(instruction, registers)]
    place = address_of(source, slots, "u32")

    def step(warp: Warp) -> None:
        where = row_addresses(warp, place)
        for number, target in enumerate(targets):
            rows = warp.shared.load(where[ROWS * number : ROWS * (number + 1)], ROW_BYTES, warp.me)
            warp.put(target, rows.reshape(LANES, 4).view(np.uint32)[:, 0])

    return step


def store_matrix(instruction: Instruction, slots: Slots) -> Step:
    """`stmatrix`: matrices from one register of all lanes each to shared memory."""
    destination, registers = instruction.operands
    sources = [slots.source(register, "b32") for register in matrix_parts(instruction, registers)]
    place = address_of(destination, slots, "u32")

    def step(warp: Warp) -> None:
        where = row_addresses(warp, place)
        for number, source in enumerate(sources):
            rows = warp.slots[source].copy().view(np.uint8).reshape(ROWS, ROW_BYTES)
            warp.shared.store(where[ROWS * number : ROWS * (number + 1)], rows, warp.me)

    return step


ACCESSES: dict[str, Builder] = {
    "ld": load,
    "st": store,
    "atom": atomic,
    "red": atomic,
    "cp": copy,
    "ldmatrix": load_matrix,
    "stmatrix": store_matrix,
}
