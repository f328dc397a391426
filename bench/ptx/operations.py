"""Arithmetic instructions on 32 lanes, as functions of NumPy arrays.

Results are those of the PTX manual to the bit, with these exceptions. The approximate instructions (ex2, lg2, rcp,
rsqrt and sqrt with .approx, div with .approx or .full) give the correctly rounded result, from which a GPU may deviate
by a few units in the last place. The bits of a NaN are not those of a GPU.
"""

import ctypes
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from drm_triton.bench.ptx.access import ACCESSES, only
from drm_triton.bench.ptx.errors import EmulatorError
from drm_triton.bench.ptx.exchange import EXCHANGES
from drm_triton.bench.ptx.matrix import MATRICES
from drm_triton.bench.ptx.memory import Array, some
from drm_triton.bench.ptx.program import TYPES, Instruction, Register, Vector
from drm_triton.bench.ptx.warp import Builder, Slots, Step, Warp

Function = Callable[..., Any]

# ---------------------------------------------------------------------------------------------------------------------
# Floats


@lru_cache(maxsize=1)
def double_fma() -> Any:
    """Return `fma` of the C library, which rounds once, as a function of arrays."""
    function = ctypes.CDLL(None).fma
    function.restype, function.argtypes = ctypes.c_double, [ctypes.c_double] * 3
    return np.frompyfunc(function, 3, 1)


def fma(a: Array, b: Array, c: Array) -> Array:
    """Return a b + c with one rounding."""
    if a.dtype == np.float64:
        exact: Array = double_fma()(a, b, c).astype(np.float64)
        return exact
    # The product is exact in float64, but the sum is rounded to 53 bits and then to 24. The second rounding is wrong
    # only where the first has moved the sum to or from the middle of two float32 numbers.
    product = a.astype(np.float64) * b
    total = product + c
    bits = total.view(np.int64)
    middle = (bits & 0x1FFFFFFF == 0x10000000) | (np.abs(total) < 2.0**-125) & (total != 0)
    if some(middle):
        total = round_to_odd(product, c.astype(np.float64), total)
    return total.astype(np.float32)


def round_to_odd(x: Array, y: Array, total: Array) -> Array:
    """Return x + y, where inexact as the neighbour whose last bit is 1. Rounded again, it gives the right result."""
    back = total - x
    error = (x - (total - back)) + (y - back)
    bits = total.view(np.int64)
    inexact = np.isfinite(total) & (error != 0) & (bits & 1 == 0)
    # The neighbour on the side of the error: away from zero if both have the same sign.
    result: Array = np.where(inexact, bits + np.where((error > 0) == (total > 0), 1, -1), bits).view(np.float64)
    return result


def flush(x: Array) -> Array:
    """Replace subnormal float32 numbers by zeros of the same sign (.ftz)."""
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), x), x)


def in_double(function: Function) -> Function:
    """Compute a function of float32 in float64 and round."""
    return lambda x: function(x.astype(np.float64)).astype(x.dtype)


def extreme(ignoring: Function, propagating: Function, combine: Function) -> Callable[[bool], Function]:
    """Return min or max. A NaN loses against a number, with .NaN it wins. -0 is less than 0."""

    def choose(nan: bool) -> Function:
        function = propagating if nan else ignoring

        def run(a: Array, b: Array) -> Array:
            unsigned = np.dtype(f"u{a.dtype.itemsize}")
            # Equal numbers have equal bits but for the sign of zero.
            equal = combine(a.view(unsigned), b.view(unsigned)).view(a.dtype)
            result: Array = np.where(a == b, equal, function(a, b))
            return result

        return run

    return choose


MINIMUM = extreme(np.fmin, np.minimum, np.bitwise_or)
MAXIMUM = extreme(np.fmax, np.maximum, np.bitwise_and)

FLOATS: dict[str, Function] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "fma": fma,
    "abs": np.abs,
    "neg": np.negative,
    "sqrt": in_double(np.sqrt),
    "rsqrt": in_double(lambda x: 1 / np.sqrt(x)),
    "rcp": in_double(lambda x: 1 / x),
    "ex2": in_double(np.exp2),
    "lg2": in_double(np.log2),
}
ROUNDINGS = {"div": ("rn", "full", "approx"), "sqrt": ("rn", "approx"), "rcp": ("rn", "approx")}
ROUNDINGS |= dict.fromkeys(["rsqrt", "ex2", "lg2"], ("approx",)) | dict.fromkeys(["add", "sub", "mul", "fma"], ("rn",))


def float_function(instruction: Instruction) -> Function:
    """Return the function of an arithmetic instruction on floats."""
    name = instruction.name
    only(instruction, "ftz", *ROUNDINGS.get(name, ()), *(["NaN"] if name in ("min", "max") else []))
    if name in ("min", "max"):
        function = (MINIMUM if name == "min" else MAXIMUM)("NaN" in instruction.modifiers)
    else:
        function = FLOATS[name]
    if "ftz" not in instruction.modifiers:
        return function
    return lambda *arguments: flush(function(*map(flush, arguments)))


# ---------------------------------------------------------------------------------------------------------------------
# Integers


def quotient(a: Array, b: Array) -> Array:
    """Return a / b rounded towards zero; b is not 0."""
    unsigned = np.dtype(f"u{a.dtype.itemsize}")
    size: Array = np.abs(a).view(unsigned) // np.abs(b).view(unsigned)
    result = size.view(a.dtype)
    return np.where((a < 0) != (b < 0), np.negative(result), result)


def high_half(a: Array, b: Array) -> Array:
    """Return the upper half of the product."""
    bits = 8 * a.dtype.itemsize
    if bits == 64:  # NumPy has no wider type
        return np.array([x * y >> bits for x, y in zip(a.tolist(), b.tolist(), strict=True)], dtype=a.dtype)
    wide = np.dtype(f"{a.dtype.kind}{2 * a.dtype.itemsize}")
    product: Array = a.astype(wide) * b.astype(wide) >> bits
    return product.astype(a.dtype)


def shift_left(a: Array, amount: Array) -> Array:
    """Return a << amount; NumPy gives 0 for an amount of all bits, as PTX does for that and more."""
    result: Array = a << np.minimum(amount, 8 * a.dtype.itemsize).astype(a.dtype)
    return result


def shift_right(a: Array, amount: Array) -> Array:
    """Return a >> amount, filled with the sign if a is signed."""
    result: Array = a >> np.minimum(amount, 8 * a.dtype.itemsize).astype(a.dtype)
    return result


def extract(a: Array, position: Array, length: Array) -> Array:
    """Return `length` bits of a 32-bit value from `position`, extended by their sign if a is signed (bfe)."""
    position, length = position & 0xFF, length & 0xFF
    wide = a.astype(np.int64) >> np.minimum(position, 63).astype(np.int64)
    unused = 64 - np.minimum(length, 32).astype(np.int64)
    if a.dtype.kind == "u":
        wide, unused = wide.view(np.uint64), unused.view(np.uint64)
    return np.where(length == 0, 0, wide << unused >> unused).astype(a.dtype)


def permute_bytes(a: Array, b: Array, selector: Array) -> Array:
    """Return four of the eight bytes of a and b, or copies of their sign (prmt)."""
    octets = np.stack([a, b], axis=1).view(np.uint8)
    result = np.empty((len(a), 4), np.uint8)
    for place in range(4):
        choice = selector >> np.uint32(4 * place)
        octet = np.take_along_axis(octets, (choice & 7).astype(np.int64)[:, None], axis=1)[:, 0]
        result[:, place] = np.where(choice & 8 != 0, (octet.view(np.int8) >> 7).view(np.uint8), octet)
    return result.view(np.uint32)[:, 0]


INTEGERS: dict[str, Function] = {
    "add": np.add,
    "sub": np.subtract,
    "min": np.minimum,
    "max": np.maximum,
    "abs": np.abs,
    "neg": np.negative,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.bitwise_not,
    "popc": lambda x: np.bitwise_count(x).astype(x.dtype),
}
# Instructions some of whose operands are always 32-bit numbers.
SPECIAL_OPERANDS: dict[str, tuple[Function, tuple[str | None, ...]]] = {
    "shl": (shift_left, (None, "u32")),
    "shr": (shift_right, (None, "u32")),
    "bfe": (extract, (None, "u32", "u32")),
    "prmt": (permute_bytes, (None, None, "u32")),
}

# ---------------------------------------------------------------------------------------------------------------------
# From functions to steps


def elementwise(function: Function, target: int, sources: list[int]) -> Step:
    """Return the step that applies a function to slots."""
    if isinstance(function, np.ufunc):  # writes the active lanes itself
        ufunc: Any = function
        if len(sources) == 1:
            (a,) = sources
            return lambda warp: ufunc(warp.slots[a], out=warp.slots[target], where=warp.where)
        a, b = sources
        return lambda warp: ufunc(warp.slots[a], warp.slots[b], out=warp.slots[target], where=warp.where)
    return lambda warp: warp.put(target, function(*[warp.slots[slot] for slot in sources]))


def arithmetic(instruction: Instruction, slots: Slots) -> Step:
    """Instructions whose operands all have the type of the instruction, or that of SPECIAL_OPERANDS."""
    kind = instruction.type
    d, *operands = instruction.operands
    kinds: tuple[str | None, ...] = (None,) * len(operands)
    if kind in ("f32", "f64"):
        function = float_function(instruction)
    else:
        only(instruction)
        if instruction.name in SPECIAL_OPERANDS:
            function, kinds = SPECIAL_OPERANDS[instruction.name]
            if instruction.name in ("bfe", "prmt") and TYPES[kind].itemsize != 4:
                raise EmulatorError("only 32 bits")
        else:
            function = INTEGERS[instruction.name]
    sources = [slots.source(operand, own or kind) for operand, own in zip(operands, kinds, strict=True)]
    return elementwise(function, slots.target(d, kind), sources)


def multiply(instruction: Instruction, slots: Slots) -> Step:
    """`mul` and `mad`: the low or high half of the product, or all of it (.wide), plus an addend."""
    kind = instruction.type
    if kind in ("f32", "f64"):
        return arithmetic(instruction, slots)
    only(instruction, "lo", "hi", "wide")
    half = instruction.modifiers[0]
    dtype, result = TYPES[kind], kind
    if half == "wide":
        result = f"{kind[0]}{16 * dtype.itemsize}"
    d, a, b, *addend = instruction.operands
    first, second, target = slots.source(a, kind), slots.source(b, kind), slots.target(d, result)
    third = slots.source(addend[0], result) if addend else None
    wide = TYPES[result]
    products: dict[str, Function] = {
        "lo": np.multiply,
        "hi": high_half,
        "wide": lambda x, y: x.astype(wide) * y.astype(wide),
    }
    product = products[half]

    def step(warp: Warp) -> None:
        value = product(warp.slots[first], warp.slots[second])
        warp.put(target, value if third is None else value + warp.slots[third])

    return step


def divide(instruction: Instruction, slots: Slots) -> Step:
    """`div` and `rem`. A GPU gives any number for a division of integers by zero, so it is an error here."""
    kind = instruction.type
    if kind in ("f32", "f64"):
        return arithmetic(instruction, slots)
    only(instruction)
    d, a, b = instruction.operands
    target, first, second = slots.target(d, kind), slots.source(a, kind), slots.source(b, kind)
    remainder = instruction.name == "rem"

    def step(warp: Warp) -> None:
        x, y = warp.slots[first], warp.slots[second]
        zero = y == 0
        if some(zero & warp.active):
            raise EmulatorError("division of integers by zero")
        y = np.where(zero, 1, y).astype(y.dtype)
        ratio = quotient(x, y)
        warp.put(target, x - ratio * y if remainder else ratio)

    return step


COMPARISONS: dict[str, Function] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}


def comparison(name: str, floats: bool) -> Function:
    """Return a comparison. Those of floats are false for a NaN, and true if their name ends in u."""
    if not floats:
        return COMPARISONS[name]
    if name in ("num", "nan"):
        return lambda a, b: (np.isnan(a) | np.isnan(b)) ^ (name == "num")
    if name in COMPARISONS:
        return COMPARISONS[name] if name != "ne" else lambda a, b: (a < b) | (a > b)
    ordered = COMPARISONS[name.removesuffix("u")]
    return lambda a, b: ordered(a, b) | np.isnan(a) | np.isnan(b)


def compare(instruction: Instruction, slots: Slots) -> Step:
    """`setp.cmp.type p, a, b`."""
    name, kind = instruction.modifiers  # neither .ftz nor a combination with another predicate
    p, a, b = instruction.operands
    function = comparison(name, TYPES[kind].kind == "f")
    return elementwise(function, slots.target(p, "pred"), [slots.source(a, kind), slots.source(b, kind)])


def select(instruction: Instruction, slots: Slots) -> Step:
    """`selp.type d, a, b, p`: a where p holds, else b."""
    only(instruction)
    kind = instruction.type
    d, a, b, p = instruction.operands
    sources = [slots.source(p, "pred"), slots.source(a, kind), slots.source(b, kind)]
    return elementwise(np.where, slots.target(d, kind), sources)


def move(instruction: Instruction, slots: Slots) -> Step:
    """`mov`: copy a register, split it into {parts}, or put {parts} together."""
    only(instruction)
    kind = instruction.type
    d, a = instruction.operands
    if isinstance(d, Vector):
        part = f"b{8 * TYPES[kind].itemsize // len(d.parts)}"
        targets = [(n, slots.target(x, part)) for n, x in enumerate(d.parts) if x is not None]
        whole = slots.source(a, kind)

        def split(warp: Warp) -> None:
            parts = np.ascontiguousarray(warp.slots[whole]).view(TYPES[part]).reshape(-1, len(d.parts))
            for number, target in targets:
                warp.put(target, parts[:, number])

        return split
    target = slots.target(d, kind)
    if isinstance(a, Vector):
        part = f"b{8 * TYPES[kind].itemsize // len(a.parts)}"
        sources = [slots.source(x, part) for x in a.parts]
        dtype = TYPES[kind]
        return lambda warp: warp.put(target, np.stack([warp.slots[x] for x in sources], axis=1).view(dtype)[:, 0])
    source = slots.source(a, kind)
    return lambda warp: warp.put(target, warp.slots[source])


# ---------------------------------------------------------------------------------------------------------------------
# Conversions

INTEGRAL: dict[str, Function] = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def to_integer(x: Array, dtype: np.dtype[Any], rounding: Function) -> Array:
    """Round floats to integers. Numbers beyond the range give its ends, NaN gives 0."""
    limits = np.iinfo(dtype)
    whole = rounding(x.astype(np.float64))
    # The largest number of 64 bits is not a float64, but the next one is.
    above, below = whole >= float(limits.max) + (limits.bits < 64), whole <= float(limits.min)
    inside = np.where(above | below | np.isnan(whole), 0, whole).astype(dtype)
    return np.where(above, limits.max, np.where(below, limits.min, inside)).astype(dtype)


def saturate(x: Array, dtype: np.dtype[Any]) -> Array:
    """Convert integers, the ends of the range for numbers beyond it."""
    limits = np.iinfo(dtype)
    clipped = [min(max(value, int(limits.min)), int(limits.max)) for value in x.tolist()]
    return np.array(clipped, dtype=dtype)


def to_bfloat(x: Array) -> Array:
    """Round float32 to the nearest bfloat16, ties to even: uint16 bits."""
    bits = x.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(x), 0x7FFF, rounded).astype(np.uint16)


def from_bfloat(bits: Array) -> Array:
    """Return the float32 numbers of bfloat16 bits."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def conversion(modifiers: list[str], target: str, source: str) -> Function:
    """Return the function of `cvt` without .ftz."""
    mode, saturated = [name for name in modifiers if name != "sat"], "sat" in modifiers
    if "bf16" in (target, source):
        known = {("bf16", "f32", "rn"): to_bfloat, ("f32", "bf16", ""): from_bfloat}
        return known[target, source, "".join(modifiers)]
    to, floats = TYPES[target], (TYPES[target].kind == "f", TYPES[source].kind == "f")
    if floats == (False, True):
        rounding = INTEGRAL["".join(mode)]
        return lambda x: to_integer(x, to, rounding)
    if floats == (True, True) and mode and mode[0] in INTEGRAL:
        rounding = INTEGRAL["".join(mode)]
        convert: Function = lambda x: rounding(x).astype(to)  # noqa: E731
    elif floats[0] and mode in ([], ["rn"]):
        convert = lambda x: x.astype(to)  # noqa: E731
    elif not any(floats) and not mode:
        return (lambda x: saturate(x, to)) if saturated else (lambda x: x.astype(to))
    else:
        raise EmulatorError(f"rounding {mode}")
    if saturated:  # floats to [0, 1], NaN to 0
        return lambda x: np.fmin(np.fmax(convert(x), to.type(0)), to.type(1))
    return convert


def convert(instruction: Instruction, slots: Slots) -> Step:
    """`cvt.target.source d, a`; the register may be wider than the target type."""
    *modifiers, target, source = instruction.modifiers
    d, a = instruction.operands
    function = conversion([name for name in modifiers if name != "ftz"], target, source)
    if "ftz" in modifiers:
        inner = function
        function = lambda x: inner(flush(x) if x.dtype == np.float32 else x)  # noqa: E731
        if target == "f32":
            unflushed = function
            function = lambda x: flush(unflushed(x))  # noqa: E731
    bits = {"bf16": "b16"}
    if not isinstance(d, Register) or d.type is None:
        raise EmulatorError("a register is expected")
    width, exact = TYPES[d.type], slots.target(d, d.type)
    value = slots.source(a, bits.get(source, source))

    def step(warp: Warp) -> None:
        result = function(warp.slots[value])
        if result.dtype.itemsize < width.itemsize:  # extended by the sign if the target type has one
            result = result.astype(f"{'i' if result.dtype.kind == 'i' else 'u'}{width.itemsize}")
        warp.put(exact, np.ascontiguousarray(result).view(width))

    return step


ARITHMETIC = {*FLOATS, *INTEGERS, *SPECIAL_OPERANDS, "min", "max"} - {"mul", "div"}
OPERATIONS: dict[str, Builder] = {
    **dict.fromkeys(sorted(ARITHMETIC), arithmetic),
    "mul": multiply,
    "mad": multiply,
    "div": divide,
    "rem": divide,
    "setp": compare,
    "selp": select,
    "mov": move,
    "cvt": convert,
    **ACCESSES,
    **EXCHANGES,
    **MATRICES,
}
