"""WMF: weighted matrix factorisation."""

import numpy as np
from numpy.typing import NDArray

from drm_triton.models.als import ALSModel, Weights
from drm_triton.models.configs import WMFConfig


class WMF(ALSModel[WMFConfig]):
    """Matrix factorisation that trusts interactions more than their absence (Hu, Koren and Volinsky 2008; Pan 2008).

    The objective is a square loss over all pairs of a user u and an item i, with the scores s_ui = u . v_i,

        sum_{u,i} c_ui (x_ui - s_ui)^2 + regularization (||U||^2 + ||V||^2),

    where x_ui = 1 and c_ui = `confidence` if the user has the item, and x_ui = 0 and c_ui = 1 otherwise. It is the one
    of the library implicit, whose `alpha` is the confidence. Alternating least squares minimise it: an epoch fits all
    users exactly, then all items. A new user is fitted in the same way.

    Parameters
    ----------
    config : WMFConfig, optional
        All options at once, instead of keywords.
    **options
        The fields of `WMFConfig`, among them factors, confidence, regularization and epochs.

    Examples
    --------
    >>> import polars as pl
    >>> from drm_triton import Dataset
    >>> frame = pl.DataFrame({"user": ["ann", "ann", "bob", "bob", "cy"], "item": ["x", "y", "x", "y", "x"]})
    >>> model = WMF(factors=4, epochs=3).fit(Dataset.from_frame(frame, ratios=(1, 0, 0)))
    >>> model.recommend(["cy"], k=1)["item"].to_list()
    ['y']
    """

    Config = WMFConfig

    @property
    def weights(self) -> Weights:
        """Weights of the objective."""
        c = self.config.confidence
        return Weights(every=1.0, observed=c - 1, target=c)

    def ridge(self, degrees: NDArray[np.int64], others: int) -> NDArray[np.float64]:
        """Return the same ridge for all rows."""
        return np.full(len(degrees), self.config.regularization)
