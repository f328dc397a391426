"""Which items of a panel may be among the best of a query: products of matrices, compared without leaving registers.

A panel is WIDTH items, packed so that one factor of all of them fills whole vector registers. Where the processor
multiplies bytes, four times as many a cycle as floats (AVX-512 VNNI), factors are rounded to bytes, and the comparison
allows for the largest error that this can make, so that no item is missed:

    |u.v - u'.v'| <= |u| |v - v'| + |u - u'| |v'|

The few items that pass are then scored exactly. Elsewhere panels hold floats, and the allowance is for rounding alone.
"""

from typing import NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from drm_triton.kernels.cpu.runtime.simd import AVX512, FEATURES, FUSED, LANES, VectorBuilder
from drm_triton.names import Score

BYTES = {"avx512f", "avx512vnni"} <= FEATURES
MOST_FACTORS = 2**16  # beyond which sums of products of bytes would not fit an int32

# Queries x vectors of accumulators that fill the register file: 24 of 32 registers with AVX-512, 12 of 16 without.
QUERIES, VECTORS = (8, 3) if AVX512 else (4, 3)
WIDTH = LANES * VECTORS  # items of a panel
BLOCK = 32 * QUERIES  # queries that share a panel while it is in the first-level cache
PART = 64 * WIDTH  # items packed at a time
f32 = np.float32
EPS, TINY = 2.0**-23, 1e-37  # rounding, and what vanishes in products of bytes


class Items(NamedTuple):
    """Items as the compiled functions take them: score_j = rows_j . query + bias_j."""

    rows: np.ndarray  # float32 [N, d], of which the scores are made
    panels: np.ndarray  # float32 [*, d, WIDTH], or int32 [*, words, WIDTH], each of four bytes
    bias: np.ndarray  # float32 [N filled up], -inf in the filling
    scale: np.ndarray  # float32 [N filled up], what a byte counts; 1 with panels of floats
    offset: np.ndarray  # int32 [N filled up], -128 times the sum of a row's bytes, since queries have 128 added
    error: float  # largest |v - v'|
    norm: float  # largest |v'|
    largest_bias: float


class Queries(NamedTuple):
    """Queries as the compiled functions take them, filled up to whole blocks."""

    rows: np.ndarray  # float32 [m filled up, d]
    words: np.ndarray  # int32 [m filled up, words] of four bytes, or the rows
    scale: np.ndarray  # float32 [m filled up]
    slack: np.ndarray  # float32 [m filled up], by how much a score may be above its estimate


def pack(V: np.ndarray, score: Score) -> Items:
    """Pack items for many queries."""
    N, d = V.shape
    panels, words, with_bytes = -(-N // WIDTH), -(-d // 4), BYTES and d <= MOST_FACTORS
    rows = 2 * V if score == "l2" else V.copy()
    bias = np.full(panels * WIDTH, -np.inf, f32)
    bias[:N] = -np.einsum("ij,ij->i", V, V) if score == "l2" else 0
    packed = np.zeros((panels, words, WIDTH, 4), np.int8) if with_bytes else np.zeros((panels, d, WIDTH), f32)
    scale, offset = np.ones(panels * WIDTH, f32), np.zeros(panels * WIDTH, np.int32)
    error = norm = 0.0
    for start in range(0, N, PART):
        part = rows[start : start + PART]
        here, first, count = slice(start, start + len(part)), start // WIDTH, -(-len(part) // WIDTH)
        filled = np.zeros((count * WIDTH, 4 * words if with_bytes else d), np.int8 if with_bytes else f32)
        if with_bytes:
            scale[here], codes = as_bytes(part)
            offset[here] = -128 * codes.sum(1)
            filled[: len(part), :d] = codes
            packed[first : first + count] = filled.reshape(count, WIDTH, words, 4).swapaxes(1, 2)
            rounded = scale[here, None] * codes
            error, norm = max(error, norms(part - rounded).max()), max(norm, norms(rounded).max())
        else:
            filled[: len(part)] = part
            packed[first : first + count] = filled.reshape(count, WIDTH, d).swapaxes(1, 2)
            norm = max(norm, norms(part).max())
    flat = packed.reshape(-1).view(np.int32) if with_bytes else packed.reshape(-1)
    return Items(rows, flat, bias, scale, offset, float(error), float(norm), float(np.abs(bias[:N]).max(initial=0)))


def as_bytes(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows rounded to scale [n] times codes [n, d], whole numbers from -127 to 127; both float32."""
    scale = np.abs(rows).max(1) / f32(127)
    scale[scale == 0] = 1
    return scale, np.clip(np.rint(rows / scale[:, None]), -127, 127)


def norms(rows: np.ndarray) -> np.ndarray:
    """Length of each row, in float64: the square of a float32 may vanish, or pass its range."""
    return np.sqrt(np.einsum("ij,ij->i", rows, rows, dtype=np.float64))


def pack_queries(queries: np.ndarray, items: Items) -> Queries:
    """Pack queries for these items."""
    m, d = queries.shape
    rows = np.zeros((-(-m // BLOCK) * BLOCK, d), f32)
    rows[:m] = queries
    size = norms(rows)
    slack = (d + 16) * 4 * EPS * (size * (items.norm + items.error) + items.largest_bias) + TINY
    if items.panels.dtype != np.int32:
        return Queries(rows, rows.reshape(-1), np.ones(len(rows), f32), slack.astype(f32))
    scale, codes = as_bytes(rows)
    slack += size * items.error + norms(rows - scale[:, None] * codes) * items.norm
    words = np.full((len(rows), -(-d // 4) * 4), 128, np.uint8)
    words[:, :d] = codes + 128
    return Queries(rows, words.reshape(-1).view(np.int32), scale, slack.astype(f32))


@intrinsic
def filter_panel(context, queries, row, depth, panels, panel, bias, scale, offset, query_scale, limits, hits):
    """Estimate the scores of QUERIES queries for one panel: bit j of hits[q] tells whether item j's is above q's limit.

    queries : [*, depth], from `row`; panels : [*, depth, WIDTH], both of floats or of words; bias, scale, offset : of
    all items; query_scale : of all queries; limits, hits : [QUERIES]. All arrays flat. Returns whether there is a hit.
    """
    with_bytes = panels.dtype == types.int32

    def build(context, builder, signature, args):
        at = VectorBuilder(context, builder, signature, args, ir.IntType(32) if with_bytes else ir.FloatType())
        real, i64, depth, first_item = ir.FloatType(), at.i64, args[2], builder.mul(args[4], at.i64(WIDTH))
        floats = ir.VectorType(real, LANES)
        first = builder.mul(args[1], depth)
        rows = [builder.add(first, builder.mul(depth, i64(q))) for q in range(QUERIES)]
        base = builder.mul(first_item, depth)

        def per_item(argument, v, kind):
            return at.load(argument, builder.add(first_item, i64(v * LANES)), kind)

        def step(k, sums):
            column = builder.add(base, builder.mul(k, i64(WIDTH)))
            items = [at.load(3, builder.add(column, i64(v * LANES)), at.vector) for v in range(VECTORS)]
            totals = []
            for q in range(QUERIES):
                query = at.splat(at.load(0, builder.add(rows[q], k)))
                for v, item in enumerate(items):
                    total = sums[q * VECTORS + v]
                    if with_bytes:
                        totals.append(multiply_bytes(builder, total, query, item))
                    else:
                        totals.append(builder.fadd(total, builder.fmul(query, item, flags=FUSED), flags=FUSED))
            return totals

        starts = [per_item(7, v, at.vector) if with_bytes else at.zero for v in range(VECTORS)]
        totals = at.loop(depth, 1, QUERIES * starts, step)
        anything = i64(0)
        for q in range(QUERIES):
            limit = at.splat(at.load(9, i64(q), real))
            of_query = at.splat(at.load(8, builder.add(args[1], i64(q)), real))
            found = i64(0)
            for v in range(VECTORS):
                estimate = totals[q * VECTORS + v]
                if with_bytes:
                    factor = builder.fmul(of_query, per_item(6, v, floats))
                    estimate = builder.fmul(builder.sitofp(estimate, floats), factor)
                above = builder.fcmp_ordered(">", builder.fadd(estimate, per_item(5, v, floats)), limit)
                bits = builder.zext(builder.bitcast(above, ir.IntType(LANES)), i64)
                found = builder.or_(found, builder.shl(bits, i64(v * LANES)))
            builder.store(found, at.element(10, i64(q), i64))
            anything = builder.or_(anything, found)
        return builder.icmp_unsigned("!=", anything, i64(0))

    i64, array = types.int64, types.Array(types.float32, 1, "C")
    masks, integers = types.Array(types.int64, 1, "C"), types.Array(types.int32, 1, "C")
    return types.boolean(queries, i64, i64, panels, i64, array, array, integers, array, array, masks), build


def multiply_bytes(builder, total, unsigned, signed):
    """Add to each int32 of total the products of four unsigned and four signed bytes."""
    kind = ir.FunctionType(total.type, [total.type] * 3)
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512.vpdpbusd.512")
    return builder.call(function, [total, unsigned, signed])
