"""Sorting of the columns of a matrix, one column in each lane of a vector register, with what belongs to each number.

The network is a bitonic sort. After its blocks of BLOCK rows have been sorted, it merges neighbours: the first level
compares row i from the top with row i from the bottom, the others compare rows at half the distance of the level
before. All levels put the larger number above, so a row that is not there, which counts as -inf, need not be compared.

LEVELS levels at a time are computed in registers, on groups of rows that no other row of these levels touches. Each
number is then read and written once for them. The columns of one register are copied, sorted, and copied back before
those of the next one: 165 rows of both fill a first-level cache, and those of one, with the others between them, would
use only half of its sets. On a processor with 32 KB, sorting without copies took twice as long.
"""

from typing import NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numpy.typing import NDArray

from drm_triton.kernels.cpu.runtime.jit import allocating, inline, intrinsic
from drm_triton.kernels.cpu.runtime.numba_private import nothing
from drm_triton.kernels.cpu.runtime.simd import AVX512, LANES, WIDTH, VectorBuilder

LEVELS = 3 if AVX512 else 2  # two registers for each row of a group are half of all that there are
BLOCK = 1 << LEVELS


class SortBuffers(NamedTuple):
    """The columns of one register. There are as many rows as a network of whole blocks has."""

    s: NDArray[np.float32]  # [rows, LANES]
    order: NDArray[np.int32]  # [rows, LANES]


def _merge_exchanges(rows):
    """Return the pairs (i, j), i < j, of Batcher's odd-even merge sort of some rows, a power of two."""
    pairs, merged = [], 1
    while merged < rows:
        distance = merged
        while distance >= 1:
            for start in range(distance % merged, rows - distance, 2 * distance):
                for i in range(start, min(start + distance, rows - distance)):
                    if i // (2 * merged) == (i + distance) // (2 * merged):
                        pairs.append((i, i + distance))
            distance //= 2
        merged *= 2
    return pairs


def _halving(first, size):
    """Return the pairs of the levels at distances size / 2, size / 4, ..., 1 of `size` rows from `first` on."""
    pairs, distance = [], size // 2
    while distance >= 1:
        pairs += [(first + i, first + i + distance) for i in range(size) if not i & distance]
        distance //= 2
    return pairs


def _group(rows_above, rows_below, pairs):
    """Return an intrinsic that exchanges numbers between the rows of a group.

    The group consists of `rows_above` rows from row `above` on, each `stride` below the one before, and of `rows_below`
    rows that end at row `below`, with the same distances.
    """

    @intrinsic
    def group(context, s, order, above, below, stride):
        def build(context, builder, signature, args):
            at = VectorBuilder(context, builder, signature, args, ("s", "order", "above", "below", "stride"))
            steps = [builder.mul(at["stride"], at.i64(i)) for i in range(max(rows_above, rows_below))]
            rows = [builder.add(at["above"], steps[i]) for i in range(rows_above)]
            rows += [builder.sub(at["below"], steps[i]) for i in reversed(range(rows_below))]
            places = [builder.mul(row, at.i64(at.lanes)) for row in rows]
            integers = ir.VectorType(ir.IntType(32), at.lanes)
            scores = [at.load("s", place, at.vector) for place in places]
            items = [at.load("order", place, integers) for place in places]
            for i, j in pairs:
                (x, y), (a, b) = (scores[i], scores[j]), (items[i], items[j])
                swap = builder.fcmp_ordered(">", y, x)
                scores[i], scores[j] = builder.select(swap, y, x), builder.select(swap, x, y)
                items[i], items[j] = builder.select(swap, b, a), builder.select(swap, a, b)
            for place, score, item in zip(places, scores, items, strict=True):
                at.store(score, "s", place)
                at.store(item, "order", place)
            return nothing(context)

        i64 = types.int64
        return types.none(s, order, i64, i64, i64), build

    return group


def _halve(levels):
    """Return a function for `levels` levels at distances stride << (levels - 1), ..., stride."""
    return _group(1 << levels, 0, _halving(0, 1 << levels))


def _fold(levels):
    """Return a function for the first level of a merge, and `levels` more in each of its two halves."""
    half = 1 << levels
    ends = [(i, 2 * half - 1 - i) for i in range(half)]
    return _group(half, half, ends + _halving(0, half) + _halving(half, half))


_sort_block = _group(BLOCK, 0, _merge_exchanges(BLOCK))
_halve_one, _halve_two, _halve_block = _halve(1), _halve(2), _halve(LEVELS)
_fold_none, _fold_one, _fold_most = _fold(0), _fold(1), _fold(LEVELS - 1)


@inline
def _fold_blocks(s, order, n, merged, levels):
    """Compute the first level of the merge of sorted blocks of `merged` rows, and `levels` more."""
    stride = merged >> levels
    for start in range(0, n - merged, 2 * merged):
        for i in range(stride):
            above, below = start + i, start + 2 * merged - 1 - i
            if below - merged + stride >= n:  # none of the rows below is there
                continue
            if levels == 0:
                _fold_none(s, order, above, below, stride)
            elif levels == 1:
                _fold_one(s, order, above, below, stride)
            else:
                _fold_most(s, order, above, below, stride)


@inline
def _halve_blocks(s, order, n, size, levels):
    """Compute `levels` levels of blocks of `size` rows, the first at half that distance."""
    stride = size >> levels
    for start in range(0, n, size):
        for above in range(start, min(start + stride, n - stride)):
            if levels == 1:
                _halve_one(s, order, above, 0, stride)
            elif levels == 2:
                _halve_two(s, order, above, 0, stride)
            else:
                _halve_block(s, order, above, 0, stride)


@allocating
def sort_buffers(n):
    """Allocate the buffers for up to n rows."""
    rows = BLOCK
    while rows < n:
        rows *= 2
    return SortBuffers(np.empty((rows, LANES), np.float32), np.zeros((rows, LANES), np.int32))


@intrinsic
def _copy_register(context, source, start, source_stride, target, first, target_stride, n):
    """Copy LANES columns of n rows of `source`, one or more, from element `start` on, to `target` from `first` on."""

    def build(context, builder, signature, args):
        names = ("source", "start", "source_stride", "target", "first", "target_stride", "n")
        at = VectorBuilder(context, builder, signature, args, names, ir.IntType(32))

        def step(i, _):
            value = at.load("source", builder.add(at["start"], builder.mul(i, at["source_stride"])), at.vector)
            at.store(value, "target", builder.add(at["first"], builder.mul(i, at["target_stride"])))
            return []

        at.loop(at["n"], 1, [], step)
        return nothing(context)

    i64 = types.int64
    return types.none(source, i64, i64, target, i64, i64, i64), build


@inline
def _sort_register(s, order, n):
    """Sort the first n rows of LANES columns."""
    rows = BLOCK
    while rows < n:
        rows *= 2
    s[n:rows] = -np.inf
    for first in range(0, n, BLOCK):
        _sort_block(s, order, first, 0, 1)
    merged = BLOCK
    while merged < n:
        levels, halvings = 0, merged
        while halvings > BLOCK and levels < LEVELS - 1:
            levels, halvings = levels + 1, halvings >> 1
        _fold_blocks(s, order, n, merged, levels)
        while halvings > BLOCK:
            levels, size = 0, halvings
            while halvings > BLOCK and levels < LEVELS:
                levels, halvings = levels + 1, halvings >> 1
            _halve_blocks(s, order, n, size, levels)
        _halve_blocks(s, order, n, BLOCK, LEVELS)
        merged *= 2


@inline
def sort_columns(size, s, order, buffers):
    """Sort the first size[t] numbers of each column t of s [*, WIDTH] by descending number, and `order` with them.

    In rows below the largest size, a column has -inf after its last number. Equal numbers come in any order.
    """
    for lane in range(0, WIDTH, LANES):
        n = np.int64(0)
        for t in range(lane, lane + LANES):
            n = max(n, np.int64(size[t]))
        if n == 0:
            continue
        _copy_register(s, lane, WIDTH, buffers.s, 0, LANES, n)
        _copy_register(order, lane, WIDTH, buffers.order, 0, LANES, n)
        _sort_register(buffers.s, buffers.order, n)
        _copy_register(buffers.s, 0, LANES, s, lane, WIDTH, n)
        _copy_register(buffers.order, 0, LANES, order, lane, WIDTH, n)
