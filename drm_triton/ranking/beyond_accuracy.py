"""Metrics beyond accuracy: how novel, diverse and evenly spread recommendations are. docs/metrics.md has examples.

R is the list of a user: the items of the top K, without padding. n_i is the number of training interactions of item i,
M the number of users, N the number of items, x_i [M] the column of item i in the binary training matrix. c_i is the
number of lists that contain item i, and p_i = c_i / sum_j c_j.

Of each list (0 for an empty one):

    novelty@K        = mean over i in R of -log2(max(n_i, 1) / M)
    diversity@K      = 1 - mean over pairs of R of cos(x_i, x_j); 0 for a list of one item
    avg_popularity@K = mean over i in R of n_i
    tail_share@K     = share of R outside the ceil(N / 5) most popular items
    user_coverage@K  = 1 if R has K items, else 0

Of all lists together:

    gini@K           = sum_i (2 i - N - 1) c_(i) / (N sum_i c_i), where c_(1) <= ... <= c_(N)
    entropy@K        = -sum_i p_i log2 p_i

The cosine with an item without training interactions is 0.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from drm_triton.data.csr import CSR, by_popularity
from drm_triton.kernels.cpu.similarity import cosines_above

HEAD = 5  # the most popular items, one in this many, are the head of the catalogue; all others are its tail


def list_metrics(top: NDArray[np.int32], train: CSR, ks: Sequence[int]) -> dict[str, NDArray[np.float64]]:
    """Compute the metrics of each list.

    Parameters
    ----------
    top : int32 [m, >= max(ks)], items of each user, best first, padded at the end with -1
    train : CSR [M, N], training matrix
    ks : cut-offs

    Returns
    -------
    dict from names such as novelty@10 to float64 [m]

    Examples
    --------
    >>> train = CSR.from_pairs(np.array([0, 0, 1, 1]), np.array([0, 1, 0, 2]), shape=(2, 3))
    >>> found = list_metrics(np.array([[0, 2]], dtype=np.int32), train, [2])
    >>> {name: round(float(values[0]), 4) for name, values in found.items()}
    {'novelty@2': 0.5, 'diversity@2': 0.2929, 'avg_popularity@2': 1.5, 'tail_share@2': 0.5, 'user_coverage@2': 1.0}
    """
    n_users, n_items = train.shape
    popularity = train.popularity()
    information = np.log2(n_users) - np.log2(np.maximum(popularity, 1))
    in_tail = np.ones(n_items)
    in_tail[by_popularity(popularity)[: -(-n_items // HEAD)]] = 0
    exists = top >= 0
    similarity = cosines_above(top, train.indptr, train.indices, n_items)
    found: dict[str, NDArray[np.float64]] = {}
    for k in ks:
        items, present = top[:, :k], exists[:, :k]
        length = present.sum(1)
        pairs = length * (length - 1) / 2
        divisor = np.maximum(length, 1)
        found[f"novelty@{k}"] = np.where(present, information[items], 0).sum(1) / divisor
        mean_similarity = similarity[:, :k].sum(1) / np.maximum(pairs, 1)
        found[f"diversity@{k}"] = np.where(pairs > 0, 1 - mean_similarity, 0.0)
        found[f"avg_popularity@{k}"] = np.where(present, popularity[items], 0).sum(1) / divisor
        found[f"tail_share@{k}"] = np.where(present, in_tail[items], 0).sum(1) / divisor
        found[f"user_coverage@{k}"] = (length == k).astype(np.float64)
    return found


def exposure_metrics(exposure: Mapping[int, NDArray[np.int64]]) -> dict[str, float]:
    """Compute the metrics of all lists together, from the counts c [N] at each cut-off.

    Examples
    --------
    >>> exposure_metrics({2: np.array([2, 1, 1, 0])})
    {'gini@2': 0.375, 'entropy@2': 1.5}
    """
    found = {}
    for k, counts in exposure.items():
        found[f"gini@{k}"] = gini(counts)
        found[f"entropy@{k}"] = entropy(counts)
    return found


def gini(exposure: NDArray[np.int64]) -> float:
    """Return the Gini coefficient of counts [N]: 0 if all are equal, 1 - 1/N if all but one are 0; 0 without counts."""
    n = len(exposure)
    weights = 2 * np.arange(1, n + 1) - n - 1
    return float(weights @ np.sort(exposure) / max(n * int(exposure.sum()), 1))


def entropy(exposure: NDArray[np.int64]) -> float:
    """Return the entropy of counts [N] in bits: log2 N if all are equal, 0 if all but one are 0, or all."""
    shares = exposure[exposure > 0] / max(int(exposure.sum()), 1)
    return float(shares @ np.log2(1 / shares))
