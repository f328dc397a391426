"""ItemKNN: the nearest items by the users that they share."""

import numpy as np
import scipy.sparse

from drm_triton.data.csr import CSR
from drm_triton.kernels.cpu.gram import Similarity, similarities
from drm_triton.models.base import ItemModel, Progress
from drm_triton.models.configs import ItemKNNConfig
from drm_triton.names import SimilarityName
from drm_triton.ranking.item_index import ItemWeights

TINY = 1e-6  # in the denominator of the cosine, as other libraries have it


class ItemKNN(ItemModel[ItemKNNConfig]):
    """Nearest neighbours between items: S_ij by the number c of users that two items share, of n_i and n_j users.

    cosine is c / (sqrt(n_i n_j) + shrink), jaccard c / (n_i + n_j - c + shrink), and dice 2 c / (n_i + n_j + shrink).
    The largest similarities of each column remain. A user's scores are X_u S.
    """

    Config = ItemKNNConfig

    def memory(self, n_users: int, n_items: int, nnz: int, pairs: int) -> dict[str, int]:
        """Return the bytes of the similarities, in float64 with three copies while they are made."""
        return {"weights": 3 * 12 * n_items * min(self.config.neighbors or n_items, n_items)}

    def fit_weights(self, fit: CSR, progress: Progress) -> ItemWeights:
        """Return S."""
        config = self.config
        S = itemknn_weights(fit, config.similarity, config.neighbors, config.shrink)
        return ItemWeights(sparse=S.astype(np.float32))


def itemknn_weights(
    fit: CSR, similarity: SimilarityName, neighbors: int | None, shrink: float
) -> scipy.sparse.csr_matrix:
    """Return S: float64 [N, N]."""
    n = fit.popularity().astype(np.float64)
    measure = {
        "cosine": Similarity.of(fit, left=np.sqrt(n), right=np.sqrt(n), shrink=shrink + TINY),
        "jaccard": Similarity.of(fit, half=n, common=1.0, shrink=shrink),
        "dice": Similarity.of(fit, half=n / 2, shrink=shrink / 2),
    }[similarity]
    return similarities(fit, measure, neighbors).T.tocsr()  # rows and columns are the same before some are left out
