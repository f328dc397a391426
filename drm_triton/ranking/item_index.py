"""Exact top-K search with item-item weights: a user's scores are the user's row of interactions times the weights.

`ItemIndex` has the methods of `topk.TopKIndex`. Its queries are items of users, CSR [m, N], in place of vectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import scipy.sparse
import torch
from numpy.typing import NDArray
from torch import Tensor

from drm_triton.data.csr import CSR
from drm_triton.kernels.cpu.runtime import threads
from drm_triton.kernels.torch_threads import one_torch_thread
from drm_triton.ranking.evaluate import Ranker
from drm_triton.ranking.known_first import known_first

ROWS = 512  # users whose scores of all items are dense at the same time
WHOLE_ROWS = 16  # a product is computed for a multiple of so many users
ITEMS = 2048  # items in one product


@dataclass(frozen=True)
class ItemWeights:
    """Weights between items, W [N, N]. The score of item j for a user with items P is sum_{i in P} W_ij.

    W is the sum of the parts that are given.

    Attributes
    ----------
    sparse : SciPy CSR, float32 [N, N]
    dense : float32 [N, N]
    low_rank : A, B, both float32 [N, r]; the part is A B^T
    """

    sparse: scipy.sparse.csr_matrix | None = None
    dense: Tensor | None = None
    low_rank: tuple[Tensor, Tensor] | None = None

    def tensors(self) -> dict[str, Tensor]:
        """Return the parts as tensors, by their names in a model file."""
        found = {}
        if self.sparse is not None:
            found["weights_indptr"] = torch.from_numpy(self.sparse.indptr.astype(np.int64))
            found["weights_indices"] = torch.from_numpy(self.sparse.indices.astype(np.int32))
            found["weights_values"] = torch.from_numpy(self.sparse.data.astype(np.float32))
        if self.dense is not None:
            found["weights"] = self.dense
        if self.low_rank is not None:
            found["weights_left"], found["weights_right"] = self.low_rank
        return found

    @classmethod
    def of_tensors(cls, tensors: dict[str, Tensor], n_items: int) -> ItemWeights:
        """Return the weights that `tensors` returned."""
        sparse = low_rank = None
        if "weights_indptr" in tensors:
            parts = (tensors[f"weights_{name}"].numpy() for name in ("values", "indices", "indptr"))
            sparse = scipy.sparse.csr_matrix(tuple(parts), shape=(n_items, n_items))
        if "weights_left" in tensors:
            low_rank = tensors["weights_left"], tensors["weights_right"]
        return cls(sparse, tensors.get("weights"), low_rank)

    def check(self, n_items: int) -> None:
        """Raise ValueError if the parts are not matrices between so many items, as compiled code expects."""
        if self.sparse is not None:
            self.sparse.check_format(full_check=True)
        tables = [table for table in (self.dense, *(self.low_rank or ())) if table is not None]
        if self.sparse is None and not tables:
            raise ValueError("there are none")
        if self.dense is not None and self.dense.shape != (n_items, n_items):
            raise ValueError(f"they have the shape {list(self.dense.shape)}")
        if self.low_rank is not None and not self.low_rank[0].shape == self.low_rank[1].shape == (
            n_items,
            self.low_rank[0].shape[-1],
        ):
            raise ValueError("their two factors differ in shape")
        values = [] if self.sparse is None else [torch.from_numpy(self.sparse.data)]
        if any(table.dtype != torch.float32 for table in (*tables, *values)):
            raise ValueError("they are not float32")

    def scores(self, items: CSR) -> NDArray[np.float32]:
        """Return the scores of all items for users with these items, CSR [m, N]: float32 [m, N]."""
        rows = items.to_scipy(np.float32)
        found = np.zeros(items.shape, np.float32)
        if self.sparse is not None:
            found += (rows @ self.sparse).toarray()
        if self.dense is not None:
            found += rows @ self.dense.numpy()
        if self.low_rank is not None:
            left, right = self.low_rank
            _add_product(torch.from_numpy(found), torch.from_numpy(rows @ left.numpy()), right)
        return found


class ItemIndex:
    """Finds the items that score best for users, given by their items.

    Parameters
    ----------
    weights : the weights between items
    n_items : number of items, N
    candidates : ascending item codes that a search may return; None for all items
    """

    def __init__(self, weights: ItemWeights, n_items: int, candidates: NDArray[np.int64] | None = None) -> None:
        self.weights, self.n_items, self.candidates = weights, n_items, candidates

    def __len__(self) -> int:
        return self.n_items if self.candidates is None else len(self.candidates)

    def stack(self, queries: Sequence[NDArray[np.int32]]) -> CSR:
        """Return the queries of a search from those of single users: the codes of their items, ascending."""
        return CSR.from_rows(queries, self.n_items)

    def search(
        self, queries: CSR, k: int, excluded: CSR | None = None
    ) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Return the k best items for each user and their scores, best first, ties to the lower item code.

        Parameters
        ----------
        queries : CSR [m, N], the items of each user
        k : number of items per user
        excluded : CSR [m, N], items to leave out of each user's result

        Returns
        -------
        items : int32 [m, k], scores : float32 [m, k]; where fewer than k items remain, item -1 with score -inf.
        """
        items = np.full((queries.shape[0], k), -1, np.int32)
        found = np.full((queries.shape[0], k), -np.inf, np.float32)
        for start in range(0, queries.shape[0], ROWS):
            block = np.arange(start, min(start + ROWS, queries.shape[0]))
            scores = self.weights.scores(queries.take(block))
            if self.candidates is not None:
                allowed = np.full_like(scores, -np.inf)
                allowed[:, self.candidates] = scores[:, self.candidates]
                scores = allowed
            if excluded is not None:
                left_out = excluded.take(block)
                scores[np.repeat(np.arange(len(block)), left_out.degrees()), left_out.indices] = -np.inf
            items[block], found[block] = top_of_scores(torch.from_numpy(scores), k)
        return items, found


def _add_product(scores: Tensor, queries: Tensor, right: Tensor) -> None:
    """Add queries [m, r] times right^T to scores [m, N], so that a row has the same bits whatever the other rows are.

    Products of few rows would add in another order, and so would several threads within a product.
    """
    m = len(queries)
    padded = torch.nn.functional.pad(queries, (0, 0, 0, -m % WHOLE_ROWS))

    def of_items(items: slice) -> None:
        scores[:, items] += (padded @ right[items].T)[:m]

    with one_torch_thread():
        threads.run(partial(of_items, slice(start, start + ITEMS)) for start in range(0, len(right), ITEMS))


def item_ranker(weights: ItemWeights, items: CSR) -> Ranker:
    """Return a ranker of the users with these items, CSR [M, N]."""
    index = known_first(partial(ItemIndex, weights, items.shape[1]), items.popularity() > 0)

    def rank(users: NDArray[np.int64], seen: CSR, k: int) -> NDArray[np.int32]:
        return index.search(items.take(users), k, seen)[0]

    return rank


def top_of_scores(scores: Tensor, k: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Return the k best columns of each row of scores [m, N] and their scores, best first, ties to the lower column.

    In place of columns with score -inf, and where N < k, the column is -1 and the score -inf.

    Examples
    --------
    >>> top_of_scores(torch.tensor([[0.5, 2.0, 2.0, -torch.inf]]), 4)[0]
    array([[ 1,  2,  0, -1]], dtype=int32)
    """
    n_columns = scores.shape[1]
    bits = (scores + 0.0).view(torch.int32)  # -0.0 + 0.0 is 0.0
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()  # integers in the order of the floats
    keys = (ordered << 32) + torch.arange(n_columns - 1, -1, -1)
    columns = keys.topk(min(k, n_columns), 1).indices
    best = scores.gather(1, columns)
    columns[best == -torch.inf] = -1
    missing = (0, max(0, k - n_columns))
    columns = torch.nn.functional.pad(columns, missing, value=-1)
    best = torch.nn.functional.pad(best, missing, value=-torch.inf)
    return columns.to(torch.int32).numpy(), best.numpy()
