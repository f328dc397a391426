"""BPR: Bayesian personalised ranking."""

from typing import Any

import numpy as np
import torch

from drm_triton.data.csr import CSR
from drm_triton.kernels.cpu.pairs import bpr_task
from drm_triton.models.configs import BPRConfig
from drm_triton.models.pairs import PairModel
from drm_triton.recommender import Tensors


class BPR(PairModel[BPRConfig]):
    """Vectors that rank an item of the user above one that is not (Rendle et al., UAI 2009).

    The loss of a user u, an item i of the user and another item j is, with s_ui = u . v_i + b_i,

        log(1 + exp(-(s_ui - s_uj))) + regularization / 2 (||u||^2 + ||v_i||^2 + ||v_j||^2 + b_i^2 + b_j^2)

    An epoch draws as many interactions (u, i) as there are, with replacement, and an item j for each. If the user has
    j, the draw is left out. Each one is a step of plain gradient descent. With `negative_sampling="popularity"`, j is
    the item of another interaction, as in the library implicit. `drm_triton.models.pairs` says how threads share an
    epoch.

    Parameters
    ----------
    config : BPRConfig, optional
        All options at once, instead of keywords.
    **options
        The fields of `BPRConfig`, among them factors, negative_sampling, regularization, lr and epochs.

    Examples
    --------
    >>> import polars as pl
    >>> from drm_triton import Dataset
    >>> frame = pl.DataFrame({"user": ["ann", "ann", "bob", "bob", "cy"], "item": ["x", "y", "x", "y", "x"]})
    >>> model = BPR(factors=4, epochs=3).fit(Dataset.from_frame(frame, ratios=(1, 0, 0)))
    >>> model.recommend(["cy"], k=1)["item"].to_list()
    ['y']
    """

    Config = BPRConfig
    kernel = bpr_task

    @property
    def popularity(self) -> bool:
        """Whether popular items are drawn more often as negatives."""
        return self.config.negative_sampling == "popularity"

    def kernel_options(self, n_items: int) -> tuple[Any, ...]:
        """Return the learning rate and the regularisation."""
        return np.float32(self.config.lr), np.float32(self.config.regularization)

    def start(self, fit: CSR) -> Tensors:
        """Return vectors and biases that are uniform in (-1/2, 1/2) / d, and 0 where there are no interactions."""
        tensors = super().start(fit)
        rng = np.random.Generator(np.random.Philox(self.config.seed).jumped())
        bias = (rng.random(fit.shape[1], np.float32) - np.float32(0.5)) / self.config.factors
        tensors["item_bias"] = torch.from_numpy(bias)
        without = torch.from_numpy(fit.popularity() == 0)
        tensors["item_factors"][without] = 0
        tensors["item_bias"][without] = 0
        return tensors
