"""Interactions that the tests of the item-item models share."""

from typing import Any

import numpy as np

from drm_triton.data.csr import CSR

# Four users and five items.
CASE = CSR.from_pairs(np.array([0, 0, 0, 1, 1, 2, 2, 3, 3, 3]), np.array([0, 1, 3, 1, 2, 0, 4, 2, 3, 4]), (4, 5))


def random_interactions(n_users: int, n_items: int, density: float = 0.1) -> CSR:
    """Return interactions without structure. The last user and the last item have none."""
    chosen = np.random.default_rng(0).random((n_users, n_items)) < density
    chosen[-1], chosen[:, -1] = False, False
    rows, columns = np.nonzero(chosen)
    return CSR.from_pairs(rows, columns, (n_users, n_items))


def dense(interactions: CSR) -> Any:
    """Return X: float64 [M, N]."""
    return interactions.to_scipy(np.float64).toarray()


def keep_largest(W: Any, k: int) -> Any:
    """Return W with the k largest entries of each row, ties to the lower column."""
    kept = W.copy()
    np.put_along_axis(kept, np.argsort(-W, 1, kind="stable")[:, k:], 0, 1)
    return kept
