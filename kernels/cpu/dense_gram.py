"""The dense Gram matrix X^T X, on and below the diagonal.

Entry (i, j) is the number of users that items i and j share. Row i is the sum of the rows of X of the item's users, up
to column i. Where users have many items, the rows of X are bits, and a row of sums is kept as binary numbers: plane b
holds bit b of 64 sums in a word. Eight rows are added at the same time, by full adders that work on all bits of a word.
That takes about 8 operations for 64 additions.
"""

from functools import partial

import numpy as np
import scipy.sparse
from numpy.typing import NDArray

from drm_triton.data.csr import CSR
from drm_triton.kernels.cpu.runtime import threads
from drm_triton.kernels.cpu.runtime.bits import BITS
from drm_triton.kernels.cpu.runtime.jit import inline, kernel
from drm_triton.names import MAX_INT32

ROWS_PER_TASK = 64
GROUP = 8  # rows that are added at the same time
PLANES = 24  # bits of a sum: float32 is exact up to there
MOST_USERS_PER_ITEM = 4  # with more, the bits would take more than an eighth of the Gram matrix
# The bits that `transpose` exchanges at distances of 1, 2, 4, .. 32.
MASKS = np.array([(2**64 - 1) // ((1 << (1 << k)) + 1) for k in range(6)], np.uint64)


def bitmap_bytes(n_users: int, n_items: int) -> int:
    """Return the most memory that `lower_gram` needs besides its result."""
    return 8 * (n_users + 1) * -(-n_items // BITS) if n_users <= MOST_USERS_PER_ITEM * n_items else 0


def lower_gram(interactions: CSR, G: NDArray[np.floating]) -> None:
    """Write X^T X to G [N, N], on and below the diagonal."""
    (n_users, n_items), nnz = interactions.shape, interactions.nnz
    # Copies: the arrays of a stored data set are read-only, for which the kernels would be compiled once more.
    of_user, items = np.array(interactions.indptr, np.int64), np.array(interactions.indices, np.int32)
    places = np.arange(nnz, dtype=np.int32 if nnz < MAX_INT32 else np.int64)
    by_item = scipy.sparse.csr_matrix((places, items, of_user), interactions.shape).T.tocsr()
    of_item, users = by_item.indptr.astype(np.int64), by_item.indices.astype(np.int32, copy=False)
    starts = range(0, n_items, ROWS_PER_TASK)
    parts = [(start, min(start + ROWS_PER_TASK, n_items)) for start in reversed(starts)]  # the longest rows first
    additions, words = int((interactions.degrees() ** 2).sum()), -(-n_items // BITS)
    if bitmap_bytes(n_users, n_items) and (nnz + BITS * n_items) * words < additions:
        bits = np.zeros((n_users + 1, words), np.int64)  # the last row is that of no user
        threads.split(set_bits, n_users, ROWS_PER_TASK, of_user, items, bits)
        threads.run(partial(add_bits, *part, of_item, users, bits, MASKS, G) for part in parts)
    else:
        threads.run(partial(add_ones, *part, of_item, users, of_user, items, by_item.data, G) for part in parts)


@kernel
def set_bits(start, stop, of_user, items, bits):
    """Set the bits of the items of users start .. stop - 1."""
    for u in range(start, stop):
        for p in range(of_user[u], of_user[u + 1]):
            bits[u, items[p] // BITS] |= np.int64(1) << (items[p] % BITS)


@kernel
def add_ones(start, stop, of_item, users, of_user, items, places, G):
    """Write rows start .. stop - 1. places[p] is the position in `items` of cell p by item."""
    sums = np.zeros(stop, np.float32)
    for i in range(start, stop):
        for p in range(of_item[i], of_item[i + 1]):
            for q in range(of_user[users[p]], places[p] + 1):
                sums[np.uint64(items[q])] += np.float32(1)
        for j in range(i + 1):
            G[i, j] = sums[j]
            sums[j] = 0


@inline
def add_three(a, b, c):
    """Return the sum of three bits, and the carry."""
    either = a ^ b
    return either ^ c, (a & b) | (either & c)


@kernel
def add_bits(start, stop, of_item, users, bits, masks, G):
    """Write rows start .. stop - 1 by adding rows of bits."""
    planes, carry = np.zeros((PLANES, bits.shape[1]), np.int64), np.empty(bits.shape[1], np.int64)
    group, eights = np.empty(GROUP, np.int64), np.empty((PLANES // 8, BITS // 8 * bits.shape[1]), np.uint64)
    for i in range(start, stop):
        words, used = i // BITS + 1, 0
        while (of_item[i + 1] - of_item[i]) >> used > 0:
            used += 1
        for p in range(of_item[i], of_item[i + 1], GROUP):
            for k in range(GROUP):
                group[k] = users[p + k] if p + k < of_item[i + 1] else bits.shape[0] - 1
            a, b, c, d = bits[group[0]], bits[group[1]], bits[group[2]], bits[group[3]]
            e, f, g, h = bits[group[4]], bits[group[5]], bits[group[6]], bits[group[7]]
            for w in range(words):
                one, two_1 = add_three(planes[0, w], a[w], b[w])
                one, two_2 = add_three(one, c[w], d[w])
                two, four_1 = add_three(planes[1, w], two_1, two_2)
                one, two_1 = add_three(one, e[w], f[w])
                planes[0, w], two_2 = add_three(one, g[w], h[w])
                planes[1, w], four_2 = add_three(two, two_1, two_2)
                planes[2, w], carry[w] = add_three(planes[2, w], four_1, four_2)
            for plane in range(3, used):
                for w in range(words):
                    old = planes[plane, w]
                    planes[plane, w] = old ^ carry[w]
                    carry[w] &= old
        write_sums(planes, used, masks, eights, eights.view(np.uint8), G[i, : i + 1])
        planes[:] = 0


@inline
def transpose(x, masks):
    """Turn 8 words, of bit b of 64 numbers each, into the 64 numbers of 8 bits.

    Each step exchanges the upper right and the lower left quarter of squares of bits, then of bytes.
    """
    for step in range(6):
        distance, shift, mask = 1 << step % 3, np.uint64(1 << step), masks[step]
        for i in range(8):
            if i & distance == 0:
                exchanged = ((x[i] >> shift) ^ x[i + distance]) & mask
                x[i] ^= exchanged << shift
                x[i + distance] ^= exchanged


@inline
def write_sums(planes, used, masks, eights, parts, row):
    """Write the sums to a row. Only the first planes, as many as `used`, are not 0.

    parts[p, j] is a buffer for bits 8 p .. 8 p + 7 of sum j, and `eights` the same memory, eight sums in a word.
    """
    row[:] = 0
    for p in range((used + 7) // 8):
        for w in range((row.size + BITS - 1) // BITS):
            words = eights[p, 8 * w : 8 * w + 8]
            for b in range(8):
                words[b] = planes[8 * p + b, w]
            transpose(words, masks)
        for j in range(row.size):
            row[j] += np.int32(parts[p, j]) << np.int32(8 * p)
