"""Instructions of the PTX emulator against exact arithmetic of Python."""

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest

from drm_triton.bench.ptx import EmulatorError
from drm_triton.bench.ptx.memory import Array
from tests.kernels.gpu.emulator.conftest import aligned, compute, run_ptx

TYPES = {"s16": "i2", "u16": "u2", "s32": "i4", "u32": "u4", "s64": "i8", "u64": "u8", "f32": "f4", "f64": "f8"}
TYPES |= {"b16": "u2", "b32": "u4", "b64": "u8"}


def integers(kind: str, seed: int, small: bool = False) -> Array:
    """Return 32 integers, the ends of the range among them."""
    dtype, draw = np.dtype(TYPES[kind]), np.random.default_rng(seed)
    limits = np.iinfo(dtype)
    x = draw.integers(limits.min, limits.max, 32, dtype, endpoint=True)
    if small:
        x = draw.integers(1, 100, 32).astype(dtype)
    x[:4] = np.roll(np.array([limits.min, limits.max, 1, limits.max // 2], dtype), seed)
    return x


def floats(kind: str, seed: int) -> Array:
    """Return 32 floats of all sizes, with zeros, infinities, NaN and subnormal numbers among them."""
    dtype, draw = np.dtype(TYPES[kind]), np.random.default_rng(seed)
    x = (draw.standard_normal(32) * 2.0 ** draw.integers(-20, 20, 32)).astype(dtype)
    tiny = np.finfo(dtype).smallest_subnormal
    x[:8] = np.roll(np.array([0, -0.0, np.inf, -np.inf, np.nan, 3 * tiny, -tiny, 1], dtype), seed)
    return x


def wrap(value: int, kind: str) -> int:
    """Return an integer modulo 2^bits, as the type has it."""
    bits = int(kind[1:])
    value %= 1 << bits
    return value - (1 << bits) if kind[0] == "s" and value >> bits - 1 else value


def truncated(a: int, b: int) -> int:
    """Divide towards zero."""
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


@pytest.mark.parametrize("kind", ["s32", "u32", "s64", "u64"])
@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("add", lambda a, b: a + b),
        ("sub", lambda a, b: a - b),
        ("mul.lo", lambda a, b: a * b),
        ("mul.hi", None),
        ("div", truncated),
        ("rem", lambda a, b: a - truncated(a, b) * b),
        ("min", min),
        ("max", max),
    ],
)
def test_integers(name: str, function: Callable[[int, int], int] | None, kind: str) -> None:
    a, b = integers(kind, 0), integers(kind, 1)
    b[b == 0] = 1
    exact = function or (lambda x, y: x * y >> int(kind[1:]))
    result = compute(f"{name}.{kind} {{d}}, {{a}}, {{b}};", a, b, out=a.dtype)
    assert result.tolist() == [wrap(exact(x, y), kind) for x, y in zip(a.tolist(), b.tolist(), strict=True)]


@pytest.mark.parametrize(("kind", "wide"), [("s32", "s64"), ("u32", "u64"), ("s16", "s32"), ("u16", "u32")])
def test_wide_products_and_sums(kind: str, wide: str) -> None:
    a, b, c = integers(kind, 0), integers(kind, 1), integers(wide, 2)
    triples = list(zip(a.tolist(), b.tolist(), c.tolist(), strict=True))
    product = compute(f"mul.wide.{kind} {{d}}, {{a}}, {{b}};", a, b, out=c.dtype)
    assert product.tolist() == [x * y for x, y, _ in triples]
    total = compute(f"mad.wide.{kind} {{d}}, {{a}}, {{b}}, {{c}};", a, b, c, out=c.dtype)
    assert total.tolist() == [wrap(x * y + z, wide) for x, y, z in triples]
    low = compute(f"mad.lo.{wide} {{d}}, {{a}}, {{b}}, {{c}};", c, c[::-1].copy(), c, out=c.dtype)
    assert low.tolist() == [wrap(x * y + x, wide) for x, y in zip(c.tolist(), c[::-1].tolist(), strict=True)]


def test_signs() -> None:
    a = integers("s32", 0)
    assert compute("neg.s32 {d}, {a};", a, out="i4").tolist() == [wrap(-x, "s32") for x in a.tolist()]
    assert compute("abs.s32 {d}, {a};", a, out="i4").tolist() == [wrap(abs(x), "s32") for x in a.tolist()]
    x = floats("f32", 0)
    assert compute("neg.f32 {d}, {a};", x, out="f4").tobytes() == (-x).tobytes()
    assert compute("abs.f32 {d}, {a};", x, out="f4").tobytes() == np.abs(x).tobytes()


@pytest.mark.parametrize("kind", ["b16", "b32", "b64"])
def test_bits(kind: str) -> None:
    a, b = integers(kind, 0), integers(kind, 1)
    pairs = list(zip(a.tolist(), b.tolist(), strict=True))
    assert compute(f"and.{kind} {{d}}, {{a}}, {{b}};", a, b, out=a.dtype).tolist() == [x & y for x, y in pairs]
    assert compute(f"or.{kind} {{d}}, {{a}}, {{b}};", a, b, out=a.dtype).tolist() == [x | y for x, y in pairs]
    assert compute(f"xor.{kind} {{d}}, {{a}}, {{b}};", a, b, out=a.dtype).tolist() == [x ^ y for x, y in pairs]
    unsigned = f"u{kind[1:]}"
    assert compute(f"not.{kind} {{d}}, {{a}};", a, out=a.dtype).tolist() == [wrap(~x, unsigned) for x, _ in pairs]
    if kind == "b32":
        assert compute("popc.b32 {d}, {a};", a, out="u4").tolist() == [wrap(x, "u32").bit_count() for x, _ in pairs]


@pytest.mark.parametrize("right", ["s32", "u32", "s64", "u64", "s16"])
def test_shifts_clamp_their_amount(right: str) -> None:
    a, bits, left = integers(right, 0), int(right[1:]), f"b{right[1:]}"
    amount = np.arange(32, dtype="u4") * 3
    amount[-1] = 2**32 - 1
    pairs = list(zip(a.tolist(), amount.tolist(), strict=True))
    shifted = compute(f"shl.{left} {{d}}, {{a}}, {{b}};", a, amount, out=a.dtype)
    assert shifted.tolist() == [wrap(x << min(n, bits), right) for x, n in pairs]
    shifted = compute(f"shr.{right} {{d}}, {{a}}, {{b}};", a, amount, out=a.dtype)
    assert shifted.tolist() == [x >> min(n, bits) for x, n in pairs]


@pytest.mark.parametrize(("position", "length"), [(0, 32), (4, 8), (31, 1), (24, 20), (3, 0), (40, 3)])
def test_bit_fields(position: int, length: int) -> None:
    for kind in ("u32", "s32"):
        a = integers(kind, 0)
        result = compute(f"bfe.{kind} {{d}}, {{a}}, {position}, {length};", a, out=a.dtype).tolist()
        for x, field in zip(a.tolist(), result, strict=True):
            filled = x if kind == "s32" else x & 0xFFFFFFFF  # beyond bit 31, the sign or 0
            value = filled >> position & (1 << length) - 1
            if kind == "s32" and length and filled >> min(position + length - 1, 31) & 1:
                value |= -1 << length
            assert field == (wrap(value, kind) if length else 0)


def test_bytes_are_permuted() -> None:
    a, b = integers("u32", 0), integers("u32", 1)
    selected = compute("prmt.b32 {d}, {a}, {b}, 0x3340U;", a, b, out="u4")
    octets = np.stack([a, b], 1).view("u1")
    assert selected.tolist() == octets[:, [0, 4, 3, 3]].copy().view("u4")[:, 0].tolist()
    signs = compute("prmt.b32 {d}, {a}, {b}, 0xB;", a, b, out="u4") & 0xFF
    assert signs.tolist() == [0xFF if octet >> 7 else 0 for octet in octets[:, 3].tolist()]


# ---------------------------------------------------------------------------------------------------------------------
# Floats


def nearest_single(x: Fraction) -> float:
    """Round to the nearest float32, ties to even."""
    start = np.float32(float(x))
    near = [start, np.nextafter(start, np.float32(np.inf)), np.nextafter(start, np.float32(-np.inf))]
    return float(min(near, key=lambda y: (abs(Fraction(float(y)) - x), int(y.view(np.uint32)) & 1)))


def test_fma_rounds_once() -> None:
    draw = np.random.default_rng(0)
    for kind, rounded in (("f32", nearest_single), ("f64", float)):
        dtype = np.dtype(TYPES[kind])
        a, b = draw.standard_normal((2, 32)).astype(dtype)
        c = (-a * b * (1 + draw.integers(-2, 3, 32) * np.finfo(dtype).eps)).astype(dtype)  # cancels
        c[::2] = draw.standard_normal(16)
        result = compute(f"fma.rn.{kind} {{d}}, {{a}}, {{b}}, {{c}};", a, b, c, out=dtype)
        exact = [
            Fraction(x) * Fraction(y) + Fraction(z) for x, y, z in zip(a.tolist(), b.tolist(), c.tolist(), strict=True)
        ]
        assert result.tolist() == [rounded(x) for x in exact]


def test_fma_where_two_roundings_differ() -> None:
    """a b + c lies just beside the middle of two float32 numbers; float64 rounds it to the middle."""
    a, b, c = (np.full(32, x, np.float32) for x in (1 + 2.0**-12, 1 + 2.0**-12, 2.0**-60))
    c[16:] = -(2.0**-60)
    middle = (a.astype(np.float64) * b)[0]
    assert middle + 2.0**-60 == middle
    assert np.float32(middle) != np.nextafter(np.float32(middle), np.float32(2)), "a middle of two numbers"
    result = compute("fma.rn.f32 {d}, {a}, {b}, {c};", a, b, c, out="f4")
    exact = [Fraction(middle) + Fraction(float(z)) for z in c]
    assert result.tolist() == [nearest_single(x) for x in exact]
    assert result[0] != result[-1]


@pytest.mark.parametrize("kind", ["f32", "f64"])
def test_float_arithmetic(kind: str) -> None:
    a, b = floats(kind, 0), floats(kind, 3)
    with np.errstate(all="ignore"):
        for name, expected in (("add", a + b), ("sub", a - b), ("mul", a * b), ("div.rn", a / b)):
            result = compute(f"{name}.{kind} {{d}}, {{a}}, {{b}};", a, b, out=a.dtype)
            np.testing.assert_array_equal(result, expected)


def test_approximations() -> None:
    x = np.abs(floats("f32", 1))
    with np.errstate(all="ignore"):
        for name, function in (
            ("ex2.approx", np.exp2),
            ("lg2.approx", np.log2),
            ("rcp.approx", np.reciprocal),
            ("sqrt.approx", np.sqrt),
            ("sqrt.rn", np.sqrt),
            ("rsqrt.approx", lambda y: 1 / np.sqrt(y)),
        ):
            result = compute(f"{name}.f32 {{d}}, {{a}};", x, out="f4")
            np.testing.assert_array_max_ulp(result, function(x.astype("f8")).astype("f4"), 1)
        result = compute("div.full.f32 {d}, {a}, {b};", x, x[::-1].copy(), out="f4")
        np.testing.assert_array_equal(result, x / x[::-1])


def test_subnormal_numbers_are_flushed_under_ftz() -> None:
    tiny = np.float32(1e-40)
    a, b = np.full(32, tiny), np.ones(32, np.float32)
    a[1] = -tiny
    assert compute("add.f32 {d}, {a}, {b};", a, -a, out="f4").tolist() == [0] * 32
    flushed = compute("mul.ftz.f32 {d}, {a}, {b};", a, b, out="f4")
    assert flushed.tolist() == [0] * 32
    assert np.signbit(flushed).tolist() == [False, True] + [False] * 30
    assert compute("mul.f32 {d}, {a}, {b};", a, b, out="f4").tolist() == a.tolist()
    assert compute("sqrt.approx.ftz.f32 {d}, {a};", a, out="f4").tolist() == [0] * 32


@pytest.mark.parametrize("kind", ["f32", "f64"])
def test_min_and_max(kind: str) -> None:
    a = np.tile(np.array([1, -0.0, 0, np.nan, np.nan, 2, -np.inf, 5], TYPES[kind]), 4)
    b = np.tile(np.array([2, 0, -0.0, 1, np.nan, np.nan, 3, 5], TYPES[kind]), 4)
    low = compute(f"min.{kind} {{d}}, {{a}}, {{b}};", a, b, out=a.dtype)[:8]
    high = compute(f"max.{kind} {{d}}, {{a}}, {{b}};", a, b, out=a.dtype)[:8]
    np.testing.assert_array_equal(low, [1, 0, 0, 1, np.nan, 2, -np.inf, 5])
    np.testing.assert_array_equal(high, [2, 0, 0, 1, np.nan, 2, 3, 5])
    assert np.signbit(low[1:3]).all()
    assert not np.signbit(high[1:3]).any()
    if kind == "f32":
        strict = compute("max.NaN.f32 {d}, {a}, {b};", a, b, out=a.dtype)[:8]
        np.testing.assert_array_equal(strict, [2, 0, 0, np.nan, np.nan, np.nan, 3, 5])


@pytest.mark.parametrize("kind", ["f32", "f64"])
@pytest.mark.parametrize("name", ["eq", "ne", "lt", "le", "gt", "ge"])
def test_comparisons_of_floats(name: str, kind: str) -> None:
    a = np.tile(np.array([1, 2, 1, np.nan, np.nan, 0, -0.0, -1], TYPES[kind]), 4)
    b = np.tile(np.array([2, 1, 1, np.nan, 1, -0.0, np.inf, np.nan], TYPES[kind]), 4)
    nan = np.isnan(a) | np.isnan(b)
    plain = getattr(np, {"eq": "equal", "ne": "not_equal", "lt": "less", "le": "less_equal"}.get(name, "")
                    or {"gt": "greater", "ge": "greater_equal"}[name])(a, b)  # fmt: skip
    for suffix, expected in (("", plain & ~nan), ("u", plain | nan)):
        code = f"setp.{name}{suffix}.{kind} %p1, {{a}}, {{b}};\nselp.b32 {{d}}, 1, 0, %p1;"
        assert compute(code, a, b, out="u4").tolist() == expected.tolist()


def test_numbers_are_told_from_nan() -> None:
    a = np.tile(np.array([1, np.nan], "f4"), 16)
    for name, expected in (("num", [1, 0]), ("nan", [0, 1])):
        code = f"setp.{name}.f32 %p1, {{a}}, {{a}};\nselp.b32 {{d}}, 1, 0, %p1;"
        assert compute(code, a, out="u4").tolist() == expected * 16


def test_comparisons_of_integers_know_the_sign() -> None:
    a, b = np.full(32, -1, "i4"), np.ones(32, "i4")
    for kind, expected in (("s32", 1), ("u32", 0)):
        code = f"setp.lt.{kind} %p1, {{a}}, {{b}};\nselp.b32 {{d}}, 1, 0, %p1;"
        assert compute(code, a, b, out="u4").tolist() == [expected] * 32


# ---------------------------------------------------------------------------------------------------------------------
# Conversions and moves


@pytest.mark.parametrize(
    ("rounding", "function"), [("rni", round), ("rzi", math.trunc), ("rmi", math.floor), ("rpi", math.ceil)]
)
@pytest.mark.parametrize("kind", ["s32", "u32", "s64", "u64"])
def test_floats_to_integers(rounding: str, function: Callable[[float], int], kind: str) -> None:
    x = np.array(
        [0.5, 1.5, 2.5, -0.5, -1.5, 1e6 + 0.5, 3e9, -3e9, 1e20, -1e20, np.inf, -np.inf, np.nan, 2**63] * 3, "f8"
    )
    x = x[:32]
    limits = np.iinfo(TYPES[kind])
    result = compute(f"cvt.{rounding}.{kind}.f64 {{d}}, {{a}};", x, out=TYPES[kind]).tolist()
    for value, whole in zip(x.tolist(), result, strict=True):
        if math.isnan(value):
            assert whole == 0
        else:
            exact = value if math.isinf(value) else function(value)
            assert whole == min(max(exact, limits.min), limits.max)


def test_integers_to_floats_and_between_floats() -> None:
    a = integers("s32", 0)
    assert compute("cvt.rn.f32.s32 {d}, {a};", a, out="f4").tolist() == [
        nearest_single(Fraction(x)) for x in a.tolist()
    ]
    b = integers("u64", 0)
    assert compute("cvt.rn.f32.u64 {d}, {a};", b, out="f4").tolist() == [
        nearest_single(Fraction(x)) for x in b.tolist()
    ]
    x = np.random.default_rng(0).standard_normal(32)
    assert compute("cvt.rn.f32.f64 {d}, {a};", x, out="f4").tolist() == [nearest_single(Fraction(y)) for y in x]
    y = floats("f32", 0)
    np.testing.assert_array_equal(compute("cvt.f64.f32 {d}, {a};", y, out="f8"), y)
    np.testing.assert_array_equal(compute("cvt.rmi.f32.f32 {d}, {a};", y, out="f4"), np.floor(y))
    np.testing.assert_array_equal(compute("cvt.sat.f32.f32 {d}, {a};", y, out="f4"), np.nan_to_num(y).clip(0, 1))


def test_integers_are_extended_cut_or_saturated() -> None:
    a = integers("s32", 0)
    assert compute("cvt.s64.s32 {d}, {a};", a, out="i8").tolist() == a.tolist()
    assert compute("cvt.u64.u32 {d}, {a};", a, out="u8").tolist() == [x % 2**32 for x in a.tolist()]
    assert compute("cvt.u16.u32 {d}, {a};", a, out="u2").tolist() == [x % 2**16 for x in a.tolist()]
    assert compute("cvt.s8.s32 {d}, {a};", a, out="i4").tolist() == [(x + 128) % 256 - 128 for x in a.tolist()]
    assert compute("cvt.sat.s8.s32 {d}, {a};", a, out="i4").tolist() == [min(max(x, -128), 127) for x in a.tolist()]
    assert compute("cvt.sat.u32.s32 {d}, {a};", a, out="u4").tolist() == [max(x, 0) for x in a.tolist()]


def test_bfloat16() -> None:
    torch = pytest.importorskip("torch")
    x = floats("f32", 0)
    x[10:14] = [1 + 2.0**-8, 1 + 3 * 2.0**-8, 3.4e38, -(1 + 2.0**-8 + 2.0**-20)]
    bits = compute("cvt.rn.bf16.f32 {d}, {a};", x, out="u2")
    expected = torch.from_numpy(x).to(torch.bfloat16)
    back = torch.from_numpy(bits.view("i2").copy()).view(torch.bfloat16)
    np.testing.assert_array_equal(back.float().numpy(), expected.float().numpy())
    np.testing.assert_array_equal(compute("cvt.f32.bf16 {d}, {a};", bits, out="f4"), expected.float().numpy())


def test_registers_are_split_and_joined() -> None:
    a = integers("u64", 0)
    code = "mov.b64 {{%r20, %r21}}, {a};\nmov.b64 {{_, %r22}}, {a};\n"
    code += "xor.b32 %r20, %r20, %r22;\nmov.b64 {d}, {{%r21, %r20}};"
    expected = [x >> 32 | (x % 2**32 ^ x >> 32) << 32 for x in a.tolist()]
    assert compute(code, a, out="u8").tolist() == expected
    scoped = "{{ .reg .b32 tmp; mov.b64 {{tmp, {d}}}, {a}; }}"
    assert compute(scoped, a, out="u4").tolist() == [x >> 32 for x in a.tolist()]


# ---------------------------------------------------------------------------------------------------------------------
# Lanes, memory, control flow


def test_shuffles() -> None:
    a, lane = np.arange(100, 132, dtype="u4"), np.arange(32)
    for mode, b, c, source in (
        ("bfly", 5, 31, lane ^ 5),
        ("idx", 7, 31, np.full(32, 7)),
        ("idx", 2, 31 | 24 << 8, lane // 8 * 8 + 2),  # segments of 8 lanes
        ("up", 3, 0, np.where(lane >= 3, lane - 3, lane)),
        ("down", 4, 31, np.where(lane < 28, lane + 4, lane)),
    ):
        result = compute(f"shfl.sync.{mode}.b32 {{d}}, {{a}}, {b}, {c}, -1;", a, out="u4")
        assert result.tolist() == a[source].tolist()
    order = np.random.default_rng(0).permutation(32).astype("u4")
    assert compute("shfl.sync.idx.b32 {d}, {a}, {b}, 31, -1;", a, order, out="u4").tolist() == a[order].tolist()


def test_reductions_of_a_warp() -> None:
    a = integers("s32", 0)
    for name, expected in (("add", wrap(int(a.sum(dtype=object)), "s32")), ("min", a.min()), ("max", a.max())):
        assert compute(f"redux.sync.{name}.s32 {{d}}, {{a}}, -1;", a, out="i4").tolist() == [expected] * 32
    bits = np.bitwise_or.reduce(a)
    assert compute("redux.sync.or.b32 {d}, {a}, -1;", a, out="i4").tolist() == [bits] * 32


def test_matrices() -> None:
    """stmatrix writes 8 rows of 16 bytes, four of the lanes of each; ldmatrix reads them back, two at a time."""
    a = integers("u32", 0)
    code = """
and.b32 %r20, %r0, 7;
mul.lo.s32 %r20, %r20, 48;
mul.lo.s32 %r21, %r0, 16;
bar.warp.sync -1;
stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r20], {{{a}}};
bar.sync 0;
ldmatrix.sync.aligned.m8n8.x1.shared.b16 {{{d}}}, [%r20];
"""
    source, result = a, np.zeros(32, "u4")
    body = "mad.wide.u32 %rd20, %r0, 4, %rd1;\nmad.wide.u32 %rd21, %r0, 4, %rd2;\nld.global.b32 %r10, [%rd20];"
    body += code.format(a="%r10", d="%r11") + "\nst.global.b32 [%rd21], %r11;\n"
    row = "shr.u32 %r22, %r0, 2;\nmul.lo.s32 %r22, %r22, 48;\nand.b32 %r23, %r0, 3;\nshl.b32 %r23, %r23, 2;\n"
    body += row + "add.s32 %r22, %r22, %r23;\nld.shared.b32 %r24, [%r22];\nst.global.b32 [%rd21+128], %r24;"
    result = np.zeros(64, "u4")
    run_ptx(body, source, result, shared=400)
    assert result.tolist() == source.tolist() * 2


def test_asynchronous_copies_fill_up_with_zeros() -> None:
    a, result = (aligned(np.zeros(64, "u4")) for _ in range(2))
    a[:] = range(1, 65)
    body = """
shl.b32 %r10, %r0, 3;
mad.wide.u32 %rd10, %r0, 8, %rd1;
mad.wide.u32 %rd11, %r0, 8, %rd2;
setp.lt.u32 %p1, %r0, 30;
selp.b32 %r11, 8, 4, %p1;
setp.ne.b32 %p2, %r0, 31;
selp.b32 %r11, %r11, 0, %p2;
cp.async.ca.shared.global [ %r10 + 0 ], [ %rd10 + 0 ], 0x8, %r11;
cp.async.commit_group;
cp.async.wait_group 0;
ld.shared.v2.b32 {%r12, %r13}, [%r10];
st.global.v2.b32 [%rd11], {%r12, %r13};
"""
    statistics = run_ptx(body, a, result, shared=256)
    assert result.tolist() == [*a[:60].tolist(), 61, 0, 0, 0]
    assert (statistics.sectors_read, statistics.bytes_read) == (8, 30 * 8 + 4)
    assert (statistics.sectors_written, statistics.bytes_written) == (8, 256)


def test_atomic_additions() -> None:
    counters, found = aligned(np.zeros(8, "u4")), aligned(np.zeros(64, "u4")).reshape(2, 32)
    body = """
and.b32 %r10, %r0, 1;
mad.wide.u32 %rd10, %r10, 4, %rd1;
atom.global.gpu.relaxed.add.u32 %r11, [ %rd10 + 0 ], 3;
red.global.gpu.relaxed.add.u32 [ %rd1 + 8 ], %r0;
mad.lo.u32 %r12, %r1, 32, %r0;
mad.wide.u32 %rd11, %r12, 4, %rd2;
st.global.b32 [%rd11], %r11;
"""
    statistics = run_ptx(body, counters, found, programs=2)
    assert counters.tolist() == [96, 96, 2 * sum(range(32)), 0, 0, 0, 0, 0]
    for parity in (0, 1):  # each lane finds another value, in an order that is not that of the lanes
        values = found[:, parity::2].ravel().tolist()
        assert sorted(values) == list(range(0, 96, 3))
        assert values != sorted(values)
    assert statistics.sectors_written == 2 * (1 + 1 + 4)


def test_registers_begin_with_a_pattern_in_every_program() -> None:
    found = aligned(np.zeros(96, "u4")).reshape(3, 32)
    body = """
mad.lo.u32 %r12, %r1, 32, %r0;
mad.wide.u32 %rd11, %r12, 4, %rd1;
@%p1 mov.b32 %r20, 1;
st.global.b32 [%rd11], %r20;
mov.b32 %r20, 7;
setp.eq.u32 %p1, %r20, 7;
"""
    run_ptx(body, found, programs=3)
    assert (found == 0xAAAAAAAA).all()


def test_narrow_loads_and_stores() -> None:
    source, result = np.arange(200, 232).astype("u1"), np.zeros(32, "u4")
    body = (
        "cvt.u64.u32 %rd10, %r0;\nadd.s64 %rd11, %rd1, %rd10;\nld.global.b8 %rs1, [%rd11];\ncvt.u32.u16 %r10, %rs1;\n"
    )
    body += "ld.global.s8 %r11, [%rd11];\nadd.s32 %r10, %r10, %r11;\nmad.wide.u32 %rd12, %r0, 4, %rd2;\n"
    body += "st.global.b32 [%rd12], %r10;"
    run_ptx(body, source, result)
    assert result.tolist() == [(x + x - 256) % 2**32 for x in range(200, 232)]


def test_lanes_diverge_and_meet_again() -> None:
    """Each lane counts its number of iterations; odd lanes take another branch; all add up what they counted."""
    result = np.zeros(32, "u4")
    body = """
mov.b32 %r10, 0;
$L_loop:
setp.ge.u32 %p1, %r10, %r0;
@%p1 bra $L_done;
add.s32 %r10, %r10, 1;
bra.uni $L_loop;
$L_done:
and.b32 %r11, %r0, 1;
setp.eq.b32 %p2, %r11, 0;
@!%p2 bra $L_odd;
add.s32 %r10, %r10, 100;
bra $L_join;
$L_odd:
add.s32 %r10, %r10, 1000;
$L_join:
redux.sync.add.s32 %r12, %r10, -1;
mad.wide.u32 %rd10, %r0, 4, %rd1;
@%p2 st.global.b32 [%rd10], %r12;
@!%p2 st.global.b32 [%rd10], %r10;
"""
    statistics = run_ptx(body, result)
    total = sum(range(32)) + 16 * 100 + 16 * 1000
    assert result.tolist() == [total if lane % 2 == 0 else lane + 1000 for lane in range(32)]
    assert statistics.instructions["branch"] > 32


def test_warps_meet_at_a_barrier_and_statistics_count_them() -> None:
    result = np.zeros(128, "u4")
    body = """
shl.b32 %r10, %r0, 2;
st.shared.b32 [%r10], %r0;
bar.sync 0;
xor.b32 %r11, %r10, 508;
ld.shared.b32 %r12, [%r11];
mad.wide.u32 %rd10, %r0, 4, %rd1;
st.global.b32 [%rd10], %r12;
"""
    for seed in range(5):
        statistics = run_ptx(body, result, warps=4, shared=512, seed=seed)
        assert result.tolist() == list(range(127, -1, -1))
    assert (statistics.launches, statistics.programs) == (1, 1)
    kinds = {"integer": 12, "shared": 8, "barrier": 4, "store": 4, "branch": 4, "move": 12}
    assert dict(statistics.instructions) == kinds


@pytest.mark.parametrize(
    "text",
    [
        "tanh.approx.f32 %r1, %r2",
        "add.rz.f32 %r1, %r2, %r3",
        "setp.lt.and.s32 %p1, %r1, %r2, %p2",
        "cvt.rz.f32.f64 %r1, %rd1",
        "ld.volatile.global.b32 %r1, [%rd1]",
        "bar.sync 1",
        "add.s32 %rd1, %r1, %r2",
        "bfe.u64 %rd1, %rd2, 1, 2",
        "atom.global.exch.u32 %r1, [%rd1], %r2",
    ],
)
def test_an_unknown_instruction_raises_with_its_text(text: str) -> None:
    with pytest.raises(EmulatorError, match="unknown") as caught:
        run_ptx(f"{text};")
    assert text in str(caught.value)
