"""RP3beta: random walks from item to user to item."""

import numpy as np
import scipy.sparse

from drm_triton.data.csr import CSR
from drm_triton.kernels.cpu.gram import Similarity, largest, similarities
from drm_triton.models.base import ItemModel, Progress
from drm_triton.models.configs import RP3betaConfig
from drm_triton.ranking.item_index import ItemWeights


class RP3beta(ItemModel[RP3betaConfig]):
    """RP3beta (Paudel et al., 2017): random walks item, user, item, with less weight on popular items.

    W_ij = sum_u (X_ui / n_i)^alpha (X_uj / n_u)^alpha / n_j^beta for i != j, where n counts the interactions of an item
    or user. The largest weights of each row remain; they are divided by their sum with `normalize_rows`. Then the
    largest weights of each column remain. `beta` 0 is P3alpha (Cooper et al., 2014).
    """

    Config = RP3betaConfig

    def memory(self, n_users: int, n_items: int, nnz: int, pairs: int) -> dict[str, int]:
        """Return the bytes of the weights, in float64 with three copies while they are made."""
        return {"weights": 3 * 12 * n_items * min(self.config.neighbors or n_items, n_items)}

    def fit_weights(self, fit: CSR, progress: Progress) -> ItemWeights:
        """Return W."""
        config = self.config
        W = rp3beta_weights(fit, config.alpha, config.beta, config.neighbors, config.normalize_rows)
        return ItemWeights(sparse=W)


def rp3beta_weights(
    fit: CSR, alpha: float, beta: float, neighbors: int | None, normalize_rows: bool
) -> scipy.sparse.csr_matrix:
    """Return W, float32 [N, N]. The largest weights are chosen in float64."""
    n_u, n_i = np.maximum(fit.degrees(), 1), np.maximum(fit.popularity(), 1)
    W = similarities(fit, Similarity.of(fit, weight=n_u**-alpha, left=n_i**alpha, right=n_i**beta), neighbors)
    if normalize_rows:
        W.data /= np.repeat(np.asarray(W.sum(1)).ravel(), np.diff(W.indptr))
    if neighbors is not None:
        W = largest(W.T.tocsr(), neighbors).T.tocsr()
    return W.astype(np.float32)
