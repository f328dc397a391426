"""Full-ranking evaluation: every user, every item, through the top-K kernel.

Items of `seen` are excluded, ties go to the lower item index, and the means are over users with a non-empty held-out
set and at least `min_train` interactions in `seen`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray
from torch import Tensor

from drm_triton.data.csr import CSR, by_popularity
from drm_triton.errors import InputError
from drm_triton.kernels.protocol import Backend
from drm_triton.names import Score
from drm_triton.ranking.metrics import ranking_metrics

MIN_TRAIN = 5  # as in the paper
BLOCK = 4096  # users ranked per call: bounds memory, and is what a progress bar moves by

Ranker = Callable[[NDArray[np.int64], CSR, int], NDArray[np.int32]]  # (users [m], seen rows, k) -> items [m, k]


@dataclass(frozen=True)
class Evaluation:
    """Means over users, and the values behind them.

    `means` has keys such as `ndcg@10`; `per_user` one row per evaluated user: its row number `user`, `n_train`,
    `n_held_out` and the same keys.
    """

    means: dict[str, float]
    per_user: pl.DataFrame


def evaluate(
    rank: Ranker,
    seen: CSR,
    held_out: CSR,
    ks: Sequence[int] = (10, 50),
    min_train: int = MIN_TRAIN,
    progress: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Rank all unseen items for each user and compare with what was held out.

    Parameters
    ----------
    rank : gives the k best unseen items of some users, see `factor_ranker` and `popularity_ranker`
    seen : interactions to exclude; its row lengths are the users' training interactions
    held_out : the relevant items T of each user
    ks : cut-offs
    progress : called with (users done, users in all)
    """
    if not ks or min(ks) < 1:
        raise InputError(f"evaluate: the cut-offs must be at least 1, got {list(ks)}")
    ks = list(dict.fromkeys(ks))
    n_train, n_held_out = seen.degrees(), held_out.degrees()
    users = measurable(seen, held_out, min_train)
    if len(users) == 0:
        raise InputError(
            f"evaluate: no user has both held-out items and at least {min_train} training interactions; "
            "prepare the data with a split that holds some out"
        )
    n_items = held_out.shape[1]
    recommended = {k: np.zeros(n_items, dtype=bool) for k in ks}
    columns: dict[str, list[NDArray[np.float64]]] = {}
    for start in range(0, len(users), BLOCK):
        block = users[start : start + BLOCK]
        items = rank(block, seen.take(block), max(ks))
        hits = membership(items, held_out.take(block))
        for k in ks:
            top = items[:, :k]
            recommended[k][top[top >= 0]] = True
            for name, values in ranking_metrics(hits, n_held_out[block], k).items():
                columns.setdefault(f"{name}@{k}", []).append(values)
        if progress is not None:
            progress(min(start + BLOCK, len(users)), len(users))
    per_user = {name: np.concatenate(blocks) for name, blocks in columns.items()}
    means = {name: float(values.mean()) for name, values in per_user.items()}
    means.update({f"coverage@{k}": float(recommended[k].mean()) for k in ks})
    frame = pl.DataFrame({"user": users, "n_train": n_train[users], "n_held_out": n_held_out[users], **per_user})
    return Evaluation(means, frame)


def measurable(seen: CSR, held_out: CSR, min_train: int = MIN_TRAIN) -> NDArray[np.int64]:
    """Users over whom the means are: those with held-out items and at least `min_train` training interactions."""
    return np.flatnonzero((held_out.degrees() > 0) & (seen.degrees() >= min_train))


def membership(items: NDArray[np.int32], sets: CSR) -> NDArray[np.bool_]:
    """Whether items[r, c] is in row r of `sets`: [m, k]."""
    n_rows, n_items = sets.shape
    keys = sets.keys()
    wanted = np.arange(n_rows)[:, None] * n_items + items
    found = np.minimum(np.searchsorted(keys, wanted), max(len(keys) - 1, 0))
    return (items >= 0) & (keys[found] == wanted) if len(keys) else np.zeros(items.shape, dtype=bool)


def factor_ranker(backend: Backend, U: Tensor, V: Tensor, score: Score) -> Ranker:
    """Rank by the factors of a model through a backend's top-K kernel."""
    items = backend.pack_items(V, score)

    def rank(users: NDArray[np.int64], seen: CSR, k: int) -> NDArray[np.int32]:
        queries = U[torch.from_numpy(users).to(U.device)]
        best, _ = backend.top_k(queries, items, k, seen.tensors(U.device))
        return best.cpu().numpy()

    return rank


def popularity_ranker(train: CSR) -> Ranker:
    """Rank by the number of training interactions: the baseline that every model has to beat."""
    order = by_popularity(train.popularity()).astype(np.int32)

    def rank(users: NDArray[np.int64], seen: CSR, k: int) -> NDArray[np.int32]:
        top = np.full((len(users), k), -1, dtype=np.int32)
        for r in range(len(users)):
            liked = seen.row(r)
            candidates = order[: k + len(liked)]
            candidates = candidates[~np.isin(candidates, liked)][:k]
            top[r, : len(candidates)] = candidates
        return top

    return rank


def by_activity(evaluation: Evaluation, metric: str | None = None, groups: int = 5) -> pl.DataFrame:
    """Mean of a metric for groups of users of about equal size, from the least to the most active in training.

    Parameters
    ----------
    metric : such as ndcg@10; None for every one that was measured

    Returns
    -------
    frame with columns group, users, min_train, max_train and the metric
    """
    frame = evaluation.per_user
    known = [name for name in frame.columns if "@" in name]
    if metric is not None and metric not in known:
        raise InputError(f"by_activity: no metric {metric!r}; there are {', '.join(known)}")
    rank = pl.col("n_train").rank("min") - 1  # equal activity, equal group
    return (
        frame.with_columns(group=(rank * groups / len(frame)).floor().cast(pl.Int32))
        .group_by("group")
        .agg(
            users=pl.len(),
            min_train=pl.col("n_train").min(),
            max_train=pl.col("n_train").max(),
            **{name: pl.col(name).mean() for name in (known if metric is None else [metric])},
        )
        .sort("group")
    )
