"""Popularity: the same items for everyone, the baseline that every model should beat."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from drm_triton.data.csr import CSR
from drm_triton.errors import InputError
from drm_triton.models.base import FactorModel, Progress
from drm_triton.models.configs import PopularityConfig
from drm_triton.ranking.topk import TopKIndex
from drm_triton.recommender import Tensors


class Popularity(FactorModel[PopularityConfig]):
    """Ranks items by their number of interactions.

    Examples
    --------
    >>> import polars as pl
    >>> from drm_triton import Dataset
    >>> frame = pl.DataFrame({"user": ["ann", "bob", "bob", "cy"], "item": ["x", "x", "y", "z"]})
    >>> Popularity().fit(Dataset.from_frame(frame, ratios=(1, 0, 0))).recommend(["cy"], k=2)["item"].to_list()
    ['x', 'y']
    """

    Config = PopularityConfig
    deterministic = True

    def start(self, fit: CSR) -> Tensors:
        """Return the number of interactions of each item as its only factor. The factor of each user is 1."""
        counts = torch.from_numpy(fit.popularity()).float()
        return {"user_factors": torch.ones(fit.shape[0], 1), "item_factors": counts[:, None]}

    def epoch(self, tensors: Tensors, fit: CSR, number: int, progress: Progress) -> dict[str, float]:
        """There is nothing left to learn."""
        return {}

    def factors(self, tensors: Tensors) -> tuple[Tensor, Tensor]:
        """Return user and item factors."""
        return tensors["user_factors"], tensors["item_factors"]

    def similarity(self, items: NDArray[np.int32]) -> tuple[TopKIndex, Tensor]:
        """Refuse: popularity knows nothing about items that two of them could have in common."""
        raise InputError("popularity does not compare items; use another `model`")

    def fold_in_items(self, liked: CSR) -> Tensor:
        """Return the vectors of new users."""
        return self.item_factors.new_ones(liked.shape[0], 1)
