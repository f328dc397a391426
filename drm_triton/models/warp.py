"""WARP: weighted approximate-rank pairwise loss."""

import math
from typing import Any

import numpy as np

from drm_triton.kernels.cpu.pairs import warp_task
from drm_triton.models.configs import WARPConfig
from drm_triton.models.pairs import PairModel

MAX_LEVEL = 10.0  # largest weight of a step


class WARP(PairModel[WARPConfig]):
    """Vectors that are fitted where an item ranks too high (Weston et al., IJCAI 2011), with the rules of LightFM.

    The score is s_ui = u . v_i + b_i. In an epoch, each interaction (u, i) comes once. Items j are drawn uniformly, at
    most `max_sampled` times, until one violates the margin, s_uj > s_ui - 1, and is not an item of u. If draw s finds a
    violator, item i is estimated to have the rank (N - 1) / s in the catalogue of N items. The step reduces
    L (s_uj - s_ui) with L = log(max(1, floor((N - 1) / s))), at most 10, by Adagrad: each coordinate x with gradient g
    becomes x - lr g / sqrt(S), and then S, which begins at 1, becomes S + g^2.

    LightFM also has a bias of each user, which changes no ranking. `drm_triton.models.pairs` says how threads share an
    epoch.

    Parameters
    ----------
    config : WARPConfig, optional
        All options at once, instead of keywords.
    **options
        The fields of `WARPConfig`, among them factors, max_sampled, lr and epochs.

    Examples
    --------
    >>> import polars as pl
    >>> from drm_triton import Dataset
    >>> frame = pl.DataFrame({"user": ["ann", "ann", "bob", "bob", "cy"], "item": ["x", "y", "x", "y", "x"]})
    >>> model = WARP(factors=4, epochs=3).fit(Dataset.from_frame(frame, ratios=(1, 0, 0)))
    >>> model.recommend(["cy"], k=1)["item"].to_list()
    ['y']
    """

    Config = WARPConfig
    kernel = warp_task
    optimiser_state = True

    def kernel_options(self, n_items: int) -> tuple[Any, ...]:
        """Return the learning rate, and the weight of a violator by the draw that found it."""
        ranks = [max(1, (n_items - 1) // s) for s in range(1, self.config.max_sampled + 1)]
        levels = [0.0, *(min(MAX_LEVEL, math.log(rank)) for rank in ranks)]  # there is no draw 0
        return np.float32(self.config.lr), np.array(levels, np.float32)
