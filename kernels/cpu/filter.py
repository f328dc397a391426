"""Filter of `top_k`: which items of a panel may be among the best of a query.

A panel is WIDTH items, packed so that one factor of all of them fills whole vector registers. The estimates of their
scores are a matrix product that is compared with thresholds without leaving the registers.

On a processor that multiplies bytes (AVX-512 VNNI), which does four times as many products a cycle as with floats,
factors are rounded to bytes. The comparison allows for the largest error that this can make, so that no item is missed:

    |u.v - u'.v'| <= |u| |v - v'| + |u - u'| |v'|

The few items that pass are scored exactly. On other processors panels hold floats, and the allowance is for rounding
alone. The processor of `bench/results` does not multiply bytes, so the gain of bytes is not on record.
"""

from typing import NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numpy.typing import NDArray

from drm_triton.kernels.cpu.runtime.jit import intrinsic
from drm_triton.kernels.cpu.runtime.numba_private import llvm_function
from drm_triton.kernels.cpu.runtime.simd import AVX512, FEATURES, FUSED, LANES, VectorBuilder
from drm_triton.names import Score

BYTES = {"avx512f", "avx512vnni"} <= FEATURES
MAX_FACTORS = 2**16  # with more, sums of products of bytes would not fit into an int32

# Queries x vectors of accumulators that fill the register file: 24 of 32 registers with AVX-512, 12 of 16 without.
QUERIES, VECTORS = (8, 3) if AVX512 else (4, 3)
WIDTH = LANES * VECTORS  # items in a panel
QUERY_BLOCK = 32 * QUERIES  # queries that are compared with a panel while it is in the first-level cache
PACK_CHUNK = 64 * WIDTH  # items packed at a time
f32 = np.float32
ROUNDING, TINY = 2.0**-23, 1e-37  # relative rounding error of float32, and what products of bytes may lose to underflow


class ItemLayout(NamedTuple):
    """Items for compiled functions: score_j = rows_j . query + bias_j. N' is N rounded up to a multiple of WIDTH."""

    rows: NDArray[np.float32]  # [N, d], for exact scores
    panels: NDArray[np.float32] | NDArray[np.int32]  # [N' / WIDTH, d, WIDTH], or words of four bytes [.., d / 4, WIDTH]
    bias: NDArray[np.float32]  # [N'], -inf in the padding
    scale: NDArray[np.float32]  # [N'], value of a byte's unit; 1 with panels of floats
    offset: NDArray[np.int32]  # [N'], -128 times the sum of a row's bytes, because queries have 128 added
    error: float  # largest |v - v'|
    norm: float  # largest |v'|
    largest_bias: float


class QueryLayout(NamedTuple):
    """Queries for compiled functions. m' is m rounded up to a multiple of QUERY_BLOCK."""

    rows: NDArray[np.float32]  # [m', d]
    words: NDArray[np.float32] | NDArray[np.int32]  # [m', d / 4] words of four bytes, or the rows
    scale: NDArray[np.float32]  # [m']
    slack: NDArray[np.float32]  # [m'], by how much a score can exceed its estimate


def pack(V: NDArray[np.float32], score: Score) -> ItemLayout:
    """Pack items for many queries. `l2` becomes a product: rows 2 v, bias -|v|^2, and -|u|^2 is added at the end."""
    N, d = V.shape
    panels, words, with_bytes = -(-N // WIDTH), -(-d // 4), BYTES and d <= MAX_FACTORS
    rows = 2 * V if score == "l2" else V.copy()
    bias = np.full(panels * WIDTH, -np.inf, f32)
    bias[:N] = -np.einsum("ij,ij->i", V, V) if score == "l2" else 0
    packed = np.zeros((panels, words, WIDTH, 4), np.int8) if with_bytes else np.zeros((panels, d, WIDTH), f32)
    scale, offset = np.ones(panels * WIDTH, f32), np.zeros(panels * WIDTH, np.int32)
    error = norm = 0.0
    for start in range(0, N, PACK_CHUNK):
        chunk = rows[start : start + PACK_CHUNK]
        here, panel, count = slice(start, start + len(chunk)), start // WIDTH, -(-len(chunk) // WIDTH)
        filled = np.zeros((count * WIDTH, 4 * words if with_bytes else d), np.int8 if with_bytes else f32)
        if with_bytes:
            scale[here], codes = as_bytes(chunk)
            offset[here] = -128 * codes.sum(1)
            filled[: len(chunk), :d] = codes
            packed[panel : panel + count] = filled.reshape(count, WIDTH, words, 4).swapaxes(1, 2)
            rounded = scale[here, None] * codes
            error, norm = max(error, norms(chunk - rounded).max()), max(norm, norms(rounded).max())
        else:
            filled[: len(chunk)] = chunk
            packed[panel : panel + count] = filled.reshape(count, WIDTH, d).swapaxes(1, 2)
            norm = max(norm, norms(chunk).max())
    flat = packed.reshape(-1).view(np.int32) if with_bytes else packed.reshape(-1)
    largest_bias = float(np.abs(bias[:N]).max(initial=0))
    return ItemLayout(rows, flat, bias, scale, offset, float(error), float(norm), largest_bias)


def as_bytes(rows: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Round rows [m, d] to scale [m] times codes [m, d], integers from -127 to 127; both float32."""
    scale = np.abs(rows).max(1) / f32(127)
    scale[scale == 0] = 1
    return scale, np.clip(np.rint(rows / scale[:, None]), -127, 127)


def norms(rows: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the norm of each row in float64: the square of a float32 may underflow or overflow."""
    squares: NDArray[np.float64] = np.einsum("ij,ij->i", rows, rows, dtype=np.float64)
    return np.sqrt(squares)


def pack_queries(queries: NDArray[np.float32], items: ItemLayout) -> QueryLayout:
    """Pack queries [m, d] for these items."""
    m, d = queries.shape
    rows = np.zeros((-(-m // QUERY_BLOCK) * QUERY_BLOCK, d), f32)
    rows[:m] = queries
    size = norms(rows)
    slack = (d + 16) * 4 * ROUNDING * (size * (items.norm + items.error) + items.largest_bias) + TINY
    if items.panels.dtype != np.int32:
        return QueryLayout(rows, rows.reshape(-1), np.ones(len(rows), f32), slack.astype(f32))
    scale, codes = as_bytes(rows)
    slack += size * items.error + norms(rows - scale[:, None] * codes) * items.norm
    words = np.full((len(rows), -(-d // 4) * 4), 128, np.uint8)
    words[:, :d] = codes + 128
    return QueryLayout(rows, words.reshape(-1).view(np.int32), scale, slack.astype(f32))


@intrinsic
def filter_panel(context, queries, row, depth, panels, panel, bias, scale, offset, query_scale, limits, hits):
    """Estimate the scores of QUERIES queries for one panel. Bit j of hits[q] says whether item j's is above q's limit.

    Returns whether any bit is set. All arrays are flat.

    queries : [*, depth] floats or words; those from `row` on are used
    panels : [*, depth, WIDTH], of the same type as queries; number `panel` is used
    bias, scale, offset : of all items
    query_scale : of all queries
    limits, hits : [QUERIES]
    """
    with_bytes = panels.dtype == types.int32
    names = (
        "queries", "row", "depth", "panels", "panel", "bias", "scale", "offset", "query_scale", "limits", "hits",
    )  # fmt: skip

    def build(context, builder, signature, args):
        element, real = ir.IntType(32) if with_bytes else ir.FloatType(), ir.FloatType()
        at = VectorBuilder(context, builder, signature, args, names, element)
        i64, depth, first_item = at.i64, at["depth"], builder.mul(at["panel"], at.i64(WIDTH))
        floats = ir.VectorType(real, LANES)
        first_query = builder.mul(at["row"], depth)
        rows = [builder.add(first_query, builder.mul(depth, i64(q))) for q in range(QUERIES)]
        base = builder.mul(first_item, depth)

        def per_item(array, v, kind):
            return at.load(array, builder.add(first_item, i64(v * LANES)), kind)

        def step(k, sums):
            column = builder.add(base, builder.mul(k, i64(WIDTH)))
            items = [at.load("panels", builder.add(column, i64(v * LANES)), at.vector) for v in range(VECTORS)]
            totals = []
            for q in range(QUERIES):
                query = at.splat(at.load("queries", builder.add(rows[q], k)))
                for v, item in enumerate(items):
                    total = sums[q * VECTORS + v]
                    if with_bytes:
                        totals.append(multiply_bytes(builder, total, query, item))
                    else:
                        totals.append(builder.fadd(total, builder.fmul(query, item, flags=FUSED), flags=FUSED))
            return totals

        starts = [per_item("offset", v, at.vector) if with_bytes else at.zero for v in range(VECTORS)]
        totals = at.loop(depth, 1, QUERIES * starts, step)
        any_hit = i64(0)
        for q in range(QUERIES):
            limit = at.splat(at.load("limits", i64(q), real))
            of_query = at.splat(at.load("query_scale", builder.add(at["row"], i64(q)), real))
            found = i64(0)
            for v in range(VECTORS):
                estimate = totals[q * VECTORS + v]
                if with_bytes:
                    factor = builder.fmul(of_query, per_item("scale", v, floats))
                    estimate = builder.fmul(builder.sitofp(estimate, floats), factor)
                above = builder.fcmp_ordered(">", builder.fadd(estimate, per_item("bias", v, floats)), limit)
                bits = builder.zext(builder.bitcast(above, ir.IntType(LANES)), i64)
                found = builder.or_(found, builder.shl(bits, i64(v * LANES)))
            builder.store(found, at.pointer("hits", i64(q), i64))
            any_hit = builder.or_(any_hit, found)
        return builder.icmp_unsigned("!=", any_hit, i64(0))

    i64, array = types.int64, types.Array(types.float32, 1, "C")
    masks, integers = types.Array(types.int64, 1, "C"), types.Array(types.int32, 1, "C")
    return types.boolean(queries, i64, i64, panels, i64, array, array, integers, array, array, masks), build


def multiply_bytes(builder, total, unsigned, signed):
    """Add to each int32 of `total` the products of four unsigned and four signed bytes."""
    kind = ir.FunctionType(total.type, [total.type] * 3)
    return builder.call(llvm_function(builder, kind, "llvm.x86.avx512.vpdpbusd.512"), [total, unsigned, signed])
