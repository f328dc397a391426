"""SQL-Rank: list-wise matrix factorisation with stochastic queuing."""

import numpy as np
import torch
from torch import Tensor

from drm_triton.data.csr import CSR
from drm_triton.kernels.cpu.runtime import threads
from drm_triton.kernels.cpu.sqlrank import add_item_gradients, queue_lengths, queue_lists, step_users
from drm_triton.models.base import FactorModel, Progress
from drm_triton.models.configs import SQLRankConfig
from drm_triton.recommender import Tensors

INITIAL_SCALE = 0.1  # standard deviation of the initial factors
ENTRIES = 1 << 20  # positions of lists held at a time; a longer list is held alone
FOLD_IN_STEPS = 20
FOLD_IN_USERS = 1024  # users fitted at once: bounds the memory of their lists


class SQLRank(FactorModel[SQLRankConfig]):
    """SQL-Rank (Wu, Hsieh and Sharpnack, ICML 2018), for interactions without ratings.

    The list of a user is queued anew in each epoch: the user's items in random order, then `ratio` times as many other
    items, drawn without replacement. The Plackett-Luce model gives the probability of such an order. Over the queues,
    its mean bounds the likelihood of what is observed, that the user's items come first. With m_t = sigmoid(u . v_t) at
    position t, the objective is

        sum_u sum_t ( log sum_{r >= t} exp(m_r) - m_t ) + regularization / 2 (||U||^2 + ||V||^2)

    An epoch is one step of gradient descent for all users, one for all items, and new queues. Its learning rate is
    `lr` * `lr_decay`^epoch. Items are ranked by u . v.

    The authors use `lr` 0.2, `lr_decay` 0.9, `regularization` 4, `ratio` 3 and 121 epochs. With these, the command
    `drm-triton train --model sqlrank --eval-every 0` reaches an NDCG@10 of 0.076 and 0.142 on the validation parts of
    Last.fm and MovieLens 100k (ratings from 4). With the defaults it reaches 0.122 and 0.177; they were chosen on these
    parts, from some twenty settings.

    A user with so many items that fewer than `ratio` times as many others remain gets all of these.

    Examples
    --------
    >>> import polars as pl
    >>> from drm_triton import Dataset
    >>> frame = pl.DataFrame({"user": ["ann", "ann", "bob", "bob", "cy"], "item": ["x", "y", "x", "y", "z"]})
    >>> data = Dataset.from_frame(frame, ratios=(1, 0, 0))
    >>> model = SQLRank(factors=4, regularization=0.01, epochs=100).fit(data)
    >>> model.recommend_from({"dora": ["x"]}, k=1)["item"].to_list()
    ['y']
    """

    Config = SQLRankConfig

    def memory(self, n_users: int, n_items: int, nnz: int, pairs: int) -> dict[str, int]:
        """Return the bytes that training needs by purpose, besides the interactions."""
        row = 4 * self.config.factors
        return {
            "factors": row * (n_users + n_items),
            "gradient": 2 * row * n_items,  # and a buffer of its size
            "lists": 8 * max(ENTRIES, min(n_items, nnz * (1 + self.config.ratio))),
            "shuffles": 5 * n_items * threads.n_threads(),
        }

    def start(self, fit: CSR) -> Tensors:
        """Return random factors."""
        rng = np.random.Generator(np.random.Philox(self.config.seed))
        tables = [rng.standard_normal((n, self.config.factors), dtype=np.float32) for n in fit.shape]
        U, V = (torch.from_numpy(table).mul_(INITIAL_SCALE) for table in tables)
        return {"user_factors": U, "item_factors": V}

    def epoch(self, tensors: Tensors, fit: CSR, number: int, progress: Progress) -> dict[str, float]:
        """Take one step of gradient descent for all users, then one for all items."""
        config, (n_users, n_items) = self.config, fit.shape
        U, V = tensors["user_factors"].numpy(), tensors["item_factors"].numpy()
        lr, ridge = config.lr * config.lr_decay**number, config.regularization
        loss = ridge / 2 * float(sum(np.square(table, dtype=np.float64).sum() for table in (U, V)))
        gradient = np.zeros_like(V)
        ends = np.cumsum(queue_lengths(fit.degrees(), config.ratio, n_items))
        start = 0
        while start < n_users:
            done = ends[start - 1] if start else 0
            stop = max(start + 1, int(np.searchsorted(ends, done + ENTRIES, side="right")))
            users = np.arange(start, stop)
            lists = queue_lists(fit.take(users), config.ratio, config.seed, number, users.astype(np.uint64))
            losses, coefficients = step_users(U[start:stop], V, lists, lr, ridge)
            add_item_gradients(U[start:stop], lists, coefficients, gradient)
            loss += float(losses.sum())
            progress(stop, n_users)
            start = stop
        gradient += ridge * V
        gradient *= lr
        V -= gradient
        return {"loss": loss / max(1, int(np.count_nonzero(fit.degrees())))}

    def remedy(self) -> str:
        """Return what to change if the training diverges."""
        return "a lower `lr` or a lower `regularization`"

    def factors(self, tensors: Tensors) -> tuple[Tensor, Tensor]:
        """Return user and item factors."""
        return tensors["user_factors"], tensors["item_factors"]

    def fold_in_items(self, liked: CSR) -> Tensor:
        """Fit the vectors of new users: gradient descent from 0, with new queues in each step.

        The learning rate falls to 0, so that the last queues do not count more than the others.
        All new users have the same random numbers, so that a vector depends only on the user's items.
        """
        config, V = self.config, self.item_factors.cpu().numpy()
        U = np.zeros((liked.shape[0], config.factors), np.float32)
        for start in range(0, len(U), FOLD_IN_USERS):
            u = U[start : start + FOLD_IN_USERS]
            items, idents = liked.take(np.arange(start, start + len(u))), np.zeros(len(u), np.uint64)
            for step in range(FOLD_IN_STEPS):
                lists = queue_lists(items, config.ratio, config.seed, step, idents)
                step_users(u, V, lists, config.lr * (1 - step / FOLD_IN_STEPS), config.regularization)
        return torch.from_numpy(U).to(self.item_factors.device)
