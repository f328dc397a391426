"""Item-item matrices from the users that two items share: the Gram matrix X^T X and similarities made of it.

A row is the sum of the rows of X of the item's users, so that all rows together cost sum_u n_u^2 additions. The entries
of a row are held in a dense array and in bits that say which of them are not 0. Only the k largest are kept, if k is
given: memory is then N k entries, not those of the whole matrix. The order of all sums is fixed.

On one thread it is as fast as SciPy's sparse product, which uses only one and stores the whole matrix.
"""

from functools import partial
from typing import NamedTuple

import numpy as np
import scipy.sparse
from numpy.typing import DTypeLike, NDArray

from drm_triton.data.csr import CSR
from drm_triton.kernels.cpu.runtime import threads
from drm_triton.kernels.cpu.runtime.bits import BITS, write_ones
from drm_triton.kernels.cpu.runtime.jit import allocating, kernel

ROWS_PER_TASK = 64


class Incidence(NamedTuple):
    """Interactions by item and by user. The users of item i are users[of_item[i] : of_item[i + 1]], ascending."""

    of_item: NDArray[np.int64]  # [N + 1]
    users: NDArray[np.int32]  # [nnz]
    of_user: NDArray[np.int64]  # [M + 1]
    items: NDArray[np.int32]  # [nnz]


class Similarity(NamedTuple):
    """Similarity of items i and j with c = sum of `weight` over their common users.

    It is c / (left_i right_j + half_i + half_j - common c + shrink).
    """

    weight: NDArray[np.float64]  # [M]
    left: NDArray[np.float64]  # [N]
    right: NDArray[np.float64]  # [N]
    half: NDArray[np.float64]  # [N]
    common: float
    shrink: float

    @classmethod
    def of(
        cls,
        interactions: CSR,
        weight: NDArray[np.float64] | None = None,
        left: NDArray[np.float64] | None = None,
        right: NDArray[np.float64] | None = None,
        half: NDArray[np.float64] | None = None,
        common: float = 0.0,
        shrink: float = 0.0,
    ) -> "Similarity":
        """Fill in what is not given: users weigh 1, and so do the products of `left` and `right` without `half`."""
        M, N = interactions.shape
        product = np.ones(N) if half is None else np.zeros(N)
        return cls(
            np.ones(M) if weight is None else weight,
            product if left is None else left,
            product if right is None else right,
            np.zeros(N) if half is None else half,
            common,
            shrink,
        )


@allocating
def limit_of_largest(values, k):
    """Return the k-th largest value, and how many of the values that equal it are among the k largest."""
    if values.size <= k:
        return -np.inf, values.size
    limit, ties = np.partition(values, values.size - k)[values.size - k], k
    for p in range(values.size):
        ties -= values[p] > limit
    return limit, ties


@kernel
def largest_of_rows(start, stop, indptr, values, k):
    """Return which entries of rows start .. stop - 1 are among the k largest of their row. Ties go to the first.

    Entry p of the result is that of values[indptr[start] + p].
    """
    first = indptr[start]
    kept = np.empty(indptr[stop] - first, np.bool_)
    for row in range(start, stop):
        limit, ties = limit_of_largest(values[indptr[row] : indptr[row + 1]], k)
        for p in range(indptr[row], indptr[row + 1]):
            equal = values[p] == limit
            kept[p - first] = values[p] > limit or (equal and ties > 0)
            ties -= equal
    return kept


@kernel
def similarity_rows(start, stop, incidence, similarity, k, diagonal):
    """Return the k largest similarities of items start .. stop - 1, by row: lengths, columns and values.

    Columns ascend. Ties go to the lower column. An item's similarity to itself is left out unless `diagonal`.
    """
    of_item, users, of_user, items = incidence.of_item, incidence.users, incidence.of_user, incidence.items
    N = of_item.size - 1
    bound = 0  # of the number of results
    for i in range(start, stop):
        pairs = 0
        for p in range(of_item[i], of_item[i + 1]):
            pairs += of_user[users[p] + 1] - of_user[users[p]]
        bound += min(pairs, N, k)
    lengths, columns, values = np.zeros(stop - start, np.int64), np.empty(bound, np.int32), np.empty(bound)
    sums, words = np.zeros(N), np.zeros(-(-N // BITS), np.int64)
    found, entries = np.empty(N, np.int64), np.empty(N)
    total = 0
    for i in range(start, stop):
        for p in range(of_item[i], of_item[i + 1]):
            u = users[p]
            weight = similarity.weight[u]
            for q in range(of_user[u], of_user[u + 1]):
                j = items[q]
                sums[j] += weight
                words[j // BITS] |= np.int64(1) << (j % BITS)
        if not diagonal:
            words[i // BITS] &= ~(np.int64(1) << (i % BITS))
            sums[i] = 0
        n = 0
        for word in range(words.size):
            if words[word] != 0:
                n = write_ones(words[word], word * BITS, found, n)
                words[word] = 0
        for p in range(n):
            j = found[p]
            shared = sums[j]
            sums[j] = 0
            entries[p] = shared / (
                similarity.left[i] * similarity.right[j] + similarity.half[i] + similarity.half[j]
                - similarity.common * shared + similarity.shrink
            )  # fmt: skip
        limit, ties = limit_of_largest(entries[:n], k)
        for p in range(n):
            equal = entries[p] == limit
            if entries[p] > limit or (equal and ties > 0):
                columns[total], values[total] = found[p], entries[p]
                total += 1
                lengths[i - start] += 1
            ties -= equal
    return lengths, columns[:total].copy(), values[:total].copy()


def incidence_of(interactions: CSR) -> Incidence:
    """Return interactions by item and by user."""
    by_item = interactions.to_scipy(np.bool_).T.tocsr()
    by_item.sort_indices()
    return Incidence(
        by_item.indptr.astype(np.int64),
        by_item.indices.astype(np.int32, copy=False),
        # Copies: the arrays of a stored data set are read-only, for which the kernels would be compiled once more.
        np.array(interactions.indptr, np.int64),
        np.array(interactions.indices, np.int32),
    )


def transposed(interactions: CSR) -> CSR:
    """Return the interactions with users and items exchanged."""
    incidence = incidence_of(interactions)
    return CSR(incidence.of_item, incidence.users, (interactions.shape[1], interactions.shape[0]))


def similarities(
    interactions: CSR,
    measure: Similarity,
    k: int | None = None,
    diagonal: bool = False,
    dtype: DTypeLike = np.float64,
) -> scipy.sparse.csr_matrix:
    """Return the similarities of all items that share users, or the k largest of each row: [N, N].

    Ties go to the lower column. An item's similarity to itself is left out unless `diagonal`.
    """
    N = interactions.shape[1]
    incidence, k = incidence_of(interactions), N if k is None else min(k, N)
    blocks = dict[int, tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.floating]]]()

    def rows(start: int) -> None:
        lengths, columns, values = similarity_rows(
            start, min(start + ROWS_PER_TASK, N), incidence, measure, k, diagonal
        )
        blocks[start] = lengths, columns, values.astype(dtype, copy=False)

    starts = range(0, N, ROWS_PER_TASK)
    threads.run(partial(rows, start) for start in starts)
    lengths, columns, values = (np.concatenate([blocks[start][part] for start in starts]) for part in range(3))
    return matrix(lengths, columns, values, (N, N))


def largest(W: scipy.sparse.csr_matrix, k: int) -> scipy.sparse.csr_matrix:
    """Return W with the k largest entries of each row. Ties go to the lower column."""
    W.sort_indices()
    kept = np.empty(W.nnz, np.bool_)
    indptr = W.indptr.astype(np.int64)

    def rows(start: int, stop: int) -> None:
        kept[indptr[start] : indptr[stop]] = largest_of_rows(start, stop, indptr, W.data, k)

    threads.split(rows, W.shape[0], ROWS_PER_TASK)
    lengths = np.diff(np.concatenate([[0], np.cumsum(kept)])[indptr])
    return matrix(lengths, W.indices[kept], W.data[kept], W.shape)


def matrix(
    lengths: NDArray[np.int64], columns: NDArray[np.int32], values: NDArray[np.floating], shape: tuple[int, int]
) -> scipy.sparse.csr_matrix:
    """Return a sparse matrix by the number of entries of each row, their columns and their values."""
    indptr = np.concatenate([[0], np.cumsum(lengths)])
    if len(columns) <= np.iinfo(np.int32).max:  # SciPy wants row pointers and columns of one type
        indptr = indptr.astype(np.int32)
    return scipy.sparse.csr_matrix((values, columns, indptr), shape=shape)
