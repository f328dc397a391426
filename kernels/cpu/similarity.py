"""`cosines_above`: similarity of the items within lists, by the columns of a sparse binary matrix.

It is no operation of a backend: lists and matrix are on the host, whatever device ranked the items. For each distinct
item of the lists, the items of its users are counted, which gives its products with all columns. All lists with this
item then read them. So the work is at most the sum of the squares of the users' numbers of items, plus m k^2 / 2. It
does not grow with the popularity of the items in a list, and no pair of columns is intersected.
"""

import numpy as np
from numpy.typing import NDArray

from drm_triton.kernels.cpu.runtime import threads
from drm_triton.kernels.cpu.runtime.jit import kernel

ITEMS_PER_CHUNK = 16  # least number of distinct items that a thread takes at a time


def cosines_above(
    lists: NDArray[np.int32], indptr: NDArray[np.int64], indices: NDArray[np.int32], n_items: int
) -> NDArray[np.float64]:
    """Return, for each item of each list, the sum of its cosines with the items above it: float64 [m, k].

    Parameters
    ----------
    lists : int32 [m, k], item codes, padded at the end with -1, where the result is 0
    indptr : int64 [M + 1], row pointers of the matrix
    indices : int32 [nnz], its columns; user u has the items indices[indptr[u] : indptr[u + 1]]
    n_items : number N of columns; the cosine of two items is that of their columns, 0 if one is empty
    """
    items = np.ascontiguousarray(lists, dtype=np.int32)
    places = np.argsort(items, axis=None, kind="stable")
    places = places[np.count_nonzero(items < 0) :]  # positions in the lists, grouped by item
    distinct, first = np.unique(items.ravel()[places], return_index=True)
    # Copies, because the arrays of a stored data set are read-only, for which the kernel would be compiled once more.
    rows = np.array(indptr, np.int64), np.array(indices, np.int32)
    sizes = np.bincount(indices, minlength=n_items)
    users = np.repeat(np.arange(len(indptr) - 1, dtype=np.int32), np.diff(indptr))
    columns = np.concatenate([[0], np.cumsum(sizes)]), users[np.argsort(indices, kind="stable")]
    scale = 1 / np.sqrt(np.maximum(sizes, 1))
    found = np.zeros(items.shape)
    threads.split(
        sum_cosines,
        len(distinct),
        ITEMS_PER_CHUNK,
        (distinct, np.append(first, len(places)), places, items),
        rows,
        columns,
        scale,
        found,
    )
    return found


@kernel
def sum_cosines(start, stop, lists, rows, columns, scale, found):
    """Fill the entries of `found` [m, k] that belong to the distinct items start .. stop - 1."""
    distinct, first, places, items = lists
    k = items.shape[1]
    common = np.zeros(scale.size, np.int32)  # number of users that an item has in common with each item
    for number in range(start, stop):
        item = distinct[number]
        users = columns[1][columns[0][item] : columns[0][item + 1]]
        for user in users:
            for other in rows[1][rows[0][user] : rows[0][user + 1]]:
                common[other] += 1
        for place in places[first[number] : first[number + 1]]:
            row, rank = place // k, place % k
            total = 0.0
            for other in items[row, :rank]:
                total += common[other] * scale[other]
            found[row, rank] = total * scale[item]
        for user in users:
            for other in rows[1][rows[0][user] : rows[0][user + 1]]:
                common[other] = 0
