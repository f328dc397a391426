"""Exact top-K search over a table of vectors. Evaluation, recommendations, similarity and serving all use it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from drm_triton.data.csr import CSR
from drm_triton.kernels import devices
from drm_triton.kernels.checks import check_top_k
from drm_triton.kernels.protocol import Backend
from drm_triton.names import Score

QUERIES_PER_BLOCK = 4096  # queries per search when there are many: bounds the memory of the results


class TopKIndex:
    """Finds the rows of a table that score best with a query.

    The table is packed once, so keep an index for many searches. `vectors` must not change while it is in use.

    Parameters
    ----------
    backend : backend of `drm_triton.kernels`
    vectors : float32 [N, d], one row per item, or per user when users are compared
    score : score of a query and a row
    candidates : ascending row numbers that a search may return; None for all rows
    """

    def __init__(
        self, backend: Backend, vectors: Tensor, score: Score, candidates: NDArray[np.int64] | None = None
    ) -> None:
        self.n_items = len(vectors)
        if candidates is not None:
            vectors = vectors[devices.to_device(torch.from_numpy(candidates), vectors.device)]
        self.candidates = candidates
        self._size = len(vectors)
        self._backend = backend
        self._packed = backend.pack_items(vectors, score)

    def __len__(self) -> int:
        return self._size

    def stack(self, queries: Sequence[Tensor]) -> Tensor:
        """Return the queries of a search from single vectors [d]: [m, d]."""
        return torch.stack(list(queries))

    def search(
        self, queries: Tensor, k: int, excluded: CSR | None = None
    ) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Return the k best rows for each query and their scores, best first, ties to the lower row number.

        Parameters
        ----------
        queries : float32 [m, d]
        k : number of rows per query
        excluded : CSR [m, N], rows to leave out of each query's result

        Returns
        -------
        rows : int32 [m, k], scores : float32 [m, k]; where fewer than k rows remain, row -1 with score -inf.
        """
        seen = None if excluded is None else self._among_candidates(excluded).tensors(queries.device)
        rows, scores = _to_host(*self._backend.top_k(queries, self._packed, k, seen))
        if np.isnan(scores).any():
            check_top_k(queries, self._packed, k, seen)  # says what is wrong
        if self.candidates is not None:
            rows = np.where(rows >= 0, self.candidates.astype(np.int32)[rows], np.int32(-1))
        return rows, scores

    def _among_candidates(self, excluded: CSR) -> CSR:
        """Replace row numbers of the table by positions among the candidates, and drop all others."""
        if self.candidates is None:
            return excluded
        position = np.full(excluded.shape[1], -1, dtype=np.int32)
        position[self.candidates] = np.arange(len(self), dtype=np.int32)
        kept = position[excluded.indices] >= 0
        queries = np.repeat(np.arange(excluded.shape[0]), excluded.degrees())
        return CSR.from_pairs(queries[kept], position[excluded.indices[kept]], (excluded.shape[0], len(self)))


def _to_host(rows: Tensor, scores: Tensor) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Return the results of `top_k` as arrays. From a GPU they come in one copy: the host waits for each."""
    if devices.on_host(rows):
        return rows.numpy(), scores.numpy()
    both = torch.stack([rows, scores.view(torch.int32)]).cpu().numpy()
    return both[0], both[1].view(np.float32)


def with_bias(U: Tensor, V: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return factors whose dot product is U V^T + bias: U [M, d] with a column of ones, and V [N, d] with bias [N]."""
    return torch.cat([U, U.new_ones(len(U), 1)], 1), torch.cat([V, bias[:, None]], 1)


def similarity_vectors(factors: Tensor, score: Score) -> Tensor:
    """Return the table whose rows are compared with each other to find similar items or users: [N, d].

    Under `dot` and `cosine` the rows are scaled to length 1, so that their score is the cosine: the length of a factor
    reflects popularity under `dot`, and the rounding to bfloat16 under `cosine`. Under `l2` they are the factors
    themselves, and the score is -||v - w||^2.
    """
    return factors if score == "l2" else torch.nn.functional.normalize(factors)
