"""Sparse matrices with an entry for all pairs of items that share users, and their memory."""

import numpy as np
import scipy.sparse

from drm_triton.data.csr import CSR
from drm_triton.kernels.cpu.gram import Similarity, similarities

BYTES = 16  # of an entry: a column and a value, twice while the rows are joined


def most_memory(n_items: int, pairs: int) -> int:
    """Return the bytes that `cooccurrences` needs at most; `pairs` is the sum of users' squared numbers of items."""
    return BYTES * min(n_items**2, pairs)


def cooccurrences(fit: CSR, measure: Similarity) -> scipy.sparse.csr_matrix:
    """Return the similarities of all items that share users, and of each item to itself: float32 [N, N]."""
    return similarities(fit, measure, diagonal=True, dtype=np.float32)
