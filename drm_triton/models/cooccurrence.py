"""Sparse matrices with an entry for all pairs of items that share users, and their memory."""

import numpy as np
import scipy.sparse

from drm_triton.data.csr import CSR
from drm_triton.errors import InputError
from drm_triton.kernels.cpu.gram import Similarity, similarities
from drm_triton.machine import memory
from drm_triton.models.base import FREE_SHARE, gibibytes

BYTES = 16  # of an entry: a column and a value, twice while the rows are joined


def least_memory(n_users: int, n_items: int, nnz: int) -> int:
    """Return the bytes for `cooccurrences` if all users have the same number of items; otherwise it may need more."""
    return BYTES * min(n_items**2, nnz**2 // max(n_users, 1))


def cooccurrences(fit: CSR, measure: Similarity, model: str) -> scipy.sparse.csr_matrix:
    """Return the similarities of all items that share users, and of each item to itself: float32 [N, N].

    There are at most sum_u n_u^2 of them. An InputError is raised if these do not fit into memory.
    """
    n_items, free = fit.shape[1], memory()["free"]
    needed = BYTES * min(n_items**2, int((fit.degrees() ** 2).sum()))
    if free is not None and needed > FREE_SHARE * free:
        raise InputError(
            f"{model} needs up to {gibibytes(needed)} of memory for the pairs of items that share users, but only "
            f"{gibibytes(free)} are free; leave out the users with the most items, or use another `model`"
        )
    return similarities(fit, measure, diagonal=True, dtype=np.float32)
