"""GF-CF: collaborative filtering by filters of a graph signal."""

import numpy as np
import torch

from drm_triton.data.csr import CSR
from drm_triton.kernels.cpu.gram import Similarity
from drm_triton.models.base import ItemModel, Progress
from drm_triton.models.configs import GFCFConfig
from drm_triton.models.cooccurrence import cooccurrences, most_memory
from drm_triton.ranking.item_index import ItemWeights
from drm_triton.training.initialize import OVERSAMPLING, right_singular_vectors


class GFCF(ItemModel[GFCFConfig]):
    """GF-CF (Shen et al., 2021): a linear filter, and an ideal low-pass filter. Nothing is trained.

    With the degrees D_u of users and D_i of items, and R = D_u^-1/2 X D_i^-1/2, a user's scores are
    X_u R^T R + low_pass_weight X_u D_i^-1/2 Q Q^T D_i^1/2. Q holds the leading right singular vectors of R, which are
    found by subspace iteration from a start that `seed` defines.
    """

    Config = GFCFConfig

    def memory(self, n_users: int, n_items: int, nnz: int, pairs: int) -> dict[str, int]:
        """Return the bytes of R^T R and of the factors."""
        rank = min(self.config.factors + OVERSAMPLING, n_users, n_items) if self.config.low_pass_weight > 0 else 0
        return {
            "linear filter": most_memory(n_items, pairs),
            "low-pass filter": 4 * rank * (n_users + 2 * n_items),
        }

    def fit_weights(self, fit: CSR, progress: Progress) -> ItemWeights:
        """Return both filters."""
        config = self.config
        n_i = fit.popularity()
        root = np.sqrt(n_i, dtype=np.float64)
        linear = Similarity.of(fit, weight=1 / np.maximum(fit.degrees(), 1), left=root, right=root)
        sparse = cooccurrences(fit, linear)
        if config.low_pass_weight == 0:
            return ItemWeights(sparse=sparse)
        Q = right_singular_vectors(fit, config.factors, config.seed)
        scale = torch.from_numpy(np.sqrt(np.maximum(n_i, 1), dtype=np.float32))[:, None]
        return ItemWeights(sparse=sparse, low_rank=(Q * (config.low_pass_weight / scale), Q * scale))
