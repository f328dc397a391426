"""Full-ranking evaluation: every measurable user, every unseen item, through the top-K kernel.

Items in `seen` are excluded and ties go to the lower item index. Means are over the users that `measurable` returns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray
from torch import Tensor

from drm_triton.data.csr import CSR, by_popularity
from drm_triton.errors import InputError
from drm_triton.kernels.devices import to_device
from drm_triton.kernels.protocol import Backend
from drm_triton.names import CUT_OFFS, MIN_TRAIN, Score
from drm_triton.ranking.known_first import known_first
from drm_triton.ranking.metrics import ranking_metrics
from drm_triton.ranking.topk import QUERIES_PER_BLOCK, TopKIndex

Ranker = Callable[[NDArray[np.int64], CSR, int], NDArray[np.int32]]
"""Function (users [m], their seen items [m, N], k) -> best unseen items [m, k], padded with -1."""


@dataclass(frozen=True)
class Evaluation:
    """Metrics of a ranking.

    Attributes
    ----------
    means : mean of each metric over users, under keys such as `ndcg@10`; also `coverage@K`, the share of all items
        that appear in at least one top K, and, if asked for, `gini@K` and `entropy@K`
    per_user : frame with one row per evaluated user: `user`, `n_train`, `n_held_out` and each metric. `user` is the id
        in the result of a model, and the row number in that of `evaluate`
    left_out : number of users that were not evaluated, by reason
    """

    means: dict[str, float]
    per_user: pl.DataFrame
    left_out: dict[str, int]

    def __repr__(self) -> str:
        """Return the number of users and the means, without the frame of all users."""
        means = ", ".join(f"{name}={mean:.4f}" for name, mean in self.means.items())
        return f"Evaluation(users={len(self.per_user)}, left_out={sum(self.left_out.values())}, {means})"


@dataclass(frozen=True)
class Measured:
    """What was measured of some users: all that `average` needs of them.

    Attributes
    ----------
    per_user : frame of numbers, see `Evaluation`; it may have no rows
    exposure : from each cut-off K to int64 [N], the number of users with an item in their top K
    left_out : number of users that were not evaluated, by reason
    beyond_accuracy : whether the metrics beyond accuracy were asked for
    """

    per_user: pl.DataFrame
    exposure: dict[int, NDArray[np.int64]]
    left_out: dict[str, int]
    beyond_accuracy: bool = False


def evaluate(
    rank: Ranker,
    seen: CSR,
    held_out: CSR,
    ks: Sequence[int] = CUT_OFFS,
    min_train: int = MIN_TRAIN,
    progress: Callable[[int, int], None] | None = None,
    beyond_accuracy: bool = False,
) -> Evaluation:
    """Rank all unseen items for each measurable user and compare the ranking with the held-out items.

    Parameters
    ----------
    rank : returns the best unseen items of some users, see `factor_ranker` and `popularity_ranker`
    seen : CSR [M, N], items to exclude; the row lengths count each user's training interactions
    held_out : CSR [M, N], relevant items T of each user
    ks : cut-offs
    min_train : minimum number of training interactions of a user
    progress : called with (users done, users in total)
    beyond_accuracy : also compute the metrics of `drm_triton.ranking.beyond_accuracy`, with `seen` as training matrix

    Returns
    -------
    Evaluation
    """
    everyone = range(held_out.shape[0])
    return average([evaluate_users(rank, seen, held_out, everyone, ks, min_train, progress, beyond_accuracy)])


def evaluate_users(
    rank: Ranker,
    seen: CSR,
    held_out: CSR,
    users: range,
    ks: Sequence[int] = CUT_OFFS,
    min_train: int = MIN_TRAIN,
    progress: Callable[[int, int], None] | None = None,
    beyond_accuracy: bool = False,
) -> Measured:
    """Evaluate a range of consecutive users, a shard of an evaluation.

    Of `seen` and `held_out`, only the rows of these users are read, except for the metrics beyond accuracy. The metrics
    of a user do not depend on the other users of the range.

    Parameters
    ----------
    users : rows of `seen` and `held_out`, ascending by 1
    rank, seen, held_out, ks, min_train, progress, beyond_accuracy : see `evaluate`
    """
    if not ks or min(ks) < 1:
        raise InputError(f"evaluate: the cut-offs `ks` must be at least 1, got {list(ks)}")
    ks = list(dict.fromkeys(ks))
    own_seen, own_held_out = seen.between(users.start, users.stop), held_out.between(users.start, users.stop)
    n_train, n_held_out, n_items = own_seen.degrees(), own_held_out.degrees(), held_out.shape[1]
    chosen = measurable(own_seen, own_held_out, min_train)
    exposure = {k: np.zeros(n_items, dtype=np.int64) for k in ks}
    nobody = np.zeros((0, max(ks)), dtype=np.int32)  # a range without measurable users has all columns, too
    columns = {name: [values] for name, values in _accuracy(nobody >= 0, n_held_out[:0], ks).items()}
    lists = [nobody]
    for start in range(0, len(chosen), QUERIES_PER_BLOCK):
        block = chosen[start : start + QUERIES_PER_BLOCK]
        items = rank(users.start + block, own_seen.take(block), max(ks))
        hits = membership(items, own_held_out.take(block))
        if beyond_accuracy:
            lists.append(items)
        for k, counts in exposure.items():
            top = items[:, :k]
            counts += np.bincount(top[top >= 0], minlength=n_items)
        for name, values in _accuracy(hits, n_held_out[block], ks).items():
            columns[name].append(values)
        if progress is not None:
            progress(min(start + QUERIES_PER_BLOCK, len(chosen)), len(chosen))
    metrics = {name: np.concatenate(blocks) for name, blocks in columns.items()}
    if beyond_accuracy:
        from drm_triton.ranking.beyond_accuracy import list_metrics  # compiled code, rarely needed

        metrics |= list_metrics(np.concatenate(lists), seen, ks)
    facts = {"user": users.start + chosen, "n_train": n_train[chosen], "n_held_out": n_held_out[chosen]}
    without = n_held_out == 0
    left_out = {
        "without held-out items": int(without.sum()),
        f"with fewer than {min_train} training items": int((~without & (n_train < min_train)).sum()),
    }
    return Measured(pl.DataFrame(facts | metrics), exposure, left_out, beyond_accuracy)


def average(parts: Sequence[Measured]) -> Evaluation:
    """Join what was measured of consecutive ranges of users, in their order, and average over all users.

    The result is the same, bit for bit, for any number of ranges: means are taken of the values of all users at once,
    and the rest are whole numbers.

    Parameters
    ----------
    parts : results of `evaluate_users` with the same options; at least one
    """
    per_user = pl.concat([part.per_user for part in parts])
    left_out = {reason: sum(part.left_out[reason] for part in parts) for reason in parts[0].left_out}
    if not len(per_user):
        counts = ", ".join(f"{count:,} {reason}" for reason, count in left_out.items())
        _, with_little_training = left_out.values()
        advice = (
            "lower `min_train`" if with_little_training else "prepare the data with a split that holds out some items"
        )
        raise InputError(
            f"evaluate: no user has both held-out items and enough training interactions (users {counts}); {advice}"
        )
    exposure = {k: np.sum([part.exposure[k] for part in parts], axis=0) for k in parts[0].exposure}
    means = {name: float(per_user[name].to_numpy().mean()) for name in per_user.columns if "@" in name}
    means |= {f"coverage@{k}": float((counts > 0).mean()) for k, counts in exposure.items()}
    if parts[0].beyond_accuracy:
        from drm_triton.ranking.beyond_accuracy import exposure_metrics

        means |= exposure_metrics(exposure)
    return Evaluation(means, per_user, {reason: count for reason, count in left_out.items() if count})


def _accuracy(
    hits: NDArray[np.bool_], n_relevant: NDArray[np.int64], ks: Sequence[int]
) -> dict[str, NDArray[np.float64]]:
    """Return the ranking metrics of some users at each cut-off, under names such as ndcg@10."""
    return {f"{name}@{k}": values for k in ks for name, values in ranking_metrics(hits, n_relevant, k).items()}


def measurable(seen: CSR, held_out: CSR, min_train: int = MIN_TRAIN) -> NDArray[np.int64]:
    """Return the users with held-out items and at least `min_train` training interactions, ascending."""
    return np.flatnonzero((held_out.degrees() > 0) & (seen.degrees() >= min_train))


def membership(items: NDArray[np.int32], sets: CSR) -> NDArray[np.bool_]:
    """Return whether items[r, c] is in row r of `sets`: bool [m, k]."""
    n_rows, n_items = sets.shape
    keys = sets.keys()
    wanted = np.arange(n_rows)[:, None] * n_items + items
    found = np.minimum(np.searchsorted(keys, wanted), max(len(keys) - 1, 0))
    return (items >= 0) & (keys[found] == wanted) if len(keys) else np.zeros(items.shape, dtype=bool)


def factor_ranker(backend: Backend, U: Tensor, V: Tensor, score: Score, train: CSR | None = None) -> Ranker:
    """Return a ranker by the scores of user factors U [M, d] and item factors V [N, d].

    If `train` [M, N] is given, items without interactions in it come after all others: nothing is known about them.
    """
    index = known_first(partial(TopKIndex, backend, V, score), None if train is None else train.popularity() > 0)

    def rank(users: NDArray[np.int64], seen: CSR, k: int) -> NDArray[np.int32]:
        items, _ = index.search(U[to_device(torch.from_numpy(users), U.device)], k, seen)
        return items

    return rank


def popularity_ranker(train: CSR) -> Ranker:
    """Return a ranker by the number of training interactions, the baseline that every model should beat."""
    order = by_popularity(train.popularity()).astype(np.int32)

    def rank(users: NDArray[np.int64], seen: CSR, k: int) -> NDArray[np.int32]:
        top = np.full((len(users), k), -1, dtype=np.int32)
        for r in range(len(users)):
            items = order[: k + len(seen.row(r))]
            unseen = items[~np.isin(items, seen.row(r))][:k]
            top[r, : len(unseen)] = unseen
        return top

    return rank


def by_activity(evaluation: Evaluation, metric: str | None = None, groups: int = 5) -> pl.DataFrame:
    """Return the mean of a metric in groups of users, from the least to the most active in training.

    The groups have about equal size. Users with equally many training interactions are in the same group.

    Parameters
    ----------
    evaluation : result of `evaluate`
    metric : for example ndcg@10; None for all metrics
    groups : number of groups

    Returns
    -------
    frame with columns group, users, min_train, max_train and the metric
    """
    frame = evaluation.per_user
    known = [name for name in frame.columns if "@" in name]
    if metric is not None and metric not in known:
        raise InputError(f"by_activity: `metric` must be one of {', '.join(known)}, got {metric!r}")
    rank = pl.col("n_train").rank("min") - 1  # users with equal activity get equal ranks
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
