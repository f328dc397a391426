"""SLIM: sparse linear weights between items."""

import numpy as np

from drm_triton.data.csr import CSR
from drm_triton.kernels.cpu.gram import Similarity
from drm_triton.kernels.cpu.slim import slim_weights
from drm_triton.models.base import ItemModel, Progress
from drm_triton.models.configs import SLIMConfig
from drm_triton.models.cooccurrence import cooccurrences, most_memory
from drm_triton.ranking.item_index import ItemWeights


class SLIM(ItemModel[SLIMConfig]):
    """SLIM (Ning and Karypis, 2011): a sparse W >= 0 with diag W = 0. A user's scores are X_u W.

    Column j minimises 1/2 ||x_j - X w||^2 + l2/2 ||w||^2 + l1 ||w||_1. The penalties are not divided by the number of
    users. With `neighbors`, only the items nearest to j by cosine can have a weight (fsSLIM).

    The solver keeps X^T X as a sparse matrix, see `drm_triton.kernels.cpu.slim`.
    """

    Config = SLIMConfig

    def memory(self, n_users: int, n_items: int, nnz: int, pairs: int) -> dict[str, int]:
        """Return the bytes of X^T X. The weights are fewer than its entries, usually far fewer, and not counted."""
        return {"gram": most_memory(n_items, pairs)}

    def fit_weights(self, fit: CSR, progress: Progress) -> ItemWeights:
        """Return W."""
        config = self.config
        G = cooccurrences(fit, Similarity.of(fit))
        W = slim_weights(G, config.l1, config.l2, config.neighbors, progress=progress)
        return ItemWeights(sparse=W.astype(np.float32))
