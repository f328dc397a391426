"""Ranking metrics. docs/metrics.md explains them; this is their definition.

T is the set of a user's held-out items, and hit(k) = 1 if the item at rank k is in T, else 0.

    precision@K = sum_k hit(k) / K
    recall@K    = sum_k hit(k) / |T|
    ndcg@K      = DCG / ideal DCG, where DCG = sum_k hit(k) / log2(k + 1)
                  and the ideal ranking has hits at its first min(K, |T|) ranks
    map@K       = sum_k precision@k hit(k) / min(K, |T|)
    map_k@K     = sum_k precision@k hit(k) / K                       (the form used in some publications)
    hit@K       = 1 if there is a hit, else 0
    mrr@K       = 1 / (rank of the first hit), 0 if there is no hit

All sums are over k = 1 .. K.
"""

import numpy as np
from numpy.typing import NDArray


def ranking_metrics(hits: NDArray[np.bool_], n_relevant: NDArray[np.int64], k: int) -> dict[str, NDArray[np.float64]]:
    """Compute the metrics of each user.

    Parameters
    ----------
    hits : bool [m, >= k], hit(1), hit(2), ... of each user
    n_relevant : int64 [m], |T| of each user, at least 1
    k : cut-off K

    Returns
    -------
    dict from metric name to float64 [m]

    Examples
    --------
    >>> m = ranking_metrics(np.array([[True, False, True]]), np.array([2]), 3)
    >>> float(m["map"][0])  # (1/1 + 2/3) / 2
    0.8333333333333333
    """
    hits = hits[:, :k]
    rank = np.arange(1, hits.shape[1] + 1)
    discount = 1 / np.log2(rank + 1)
    ideal = np.concatenate([[0.0], np.cumsum(1 / np.log2(np.arange(2, k + 2)))])
    n_hits = hits.sum(1)
    summed_precision = (hits.cumsum(1) / rank * hits).sum(1)
    attainable = np.minimum(k, n_relevant)
    return {
        "precision": n_hits / k,
        "recall": n_hits / n_relevant,
        # no matrix product: BLAS would round a user's sum by the number of users
        "ndcg": np.where(hits, discount, 0.0).sum(1) / ideal[attainable],
        "map": summed_precision / attainable,
        "map_k": summed_precision / k,
        "hit": (n_hits > 0).astype(np.float64),
        "mrr": (hits / rank).max(1, initial=0.0),
    }
