"""iALS: matrix factorisation with a ridge that grows with the number of interactions."""

import numpy as np
from numpy.typing import NDArray

from drm_triton.models.als import ALSModel, Weights
from drm_triton.models.configs import IALSConfig


class IALS(ALSModel[IALSConfig]):
    """Implicit alternating least squares with a scaled ridge, in blocks (Rendle, Krichene, Zhang and Koren 2022).

    The objective is, with the scores s_ui = u . v_i, n_u items of user u and n_i users of item i,

        sum_{(u,i) in X} (s_ui - 1)^2 + a sum_{all u,i} s_ui^2 + sum_u L_u ||u||^2 + sum_i L_i ||v_i||^2,
        L_u = regularization (n_u + a N)^ridge_power,  L_i = regularization (n_i + a M)^ridge_power,

    with a = `unobserved_weight`. With `ridge_power=0` it is the objective of `WMF` with the confidence 1 + 1/a, the
    regularisation times (1 + a) / a, and factors times (1 + a)^1/2.

    An epoch fits all users exactly, then all items, as long as `factors` is at most `block`. With more factors, it does
    so for one block of the columns after another (iALS++), which takes less time. A new user is fitted exactly.

    Parameters
    ----------
    config : IALSConfig, optional
        All options at once, instead of keywords.
    **options
        The fields of `IALSConfig`, among them factors, unobserved_weight, regularization, block and epochs.

    Examples
    --------
    >>> import polars as pl
    >>> from drm_triton import Dataset
    >>> frame = pl.DataFrame({"user": ["ann", "ann", "bob", "bob", "cy"], "item": ["x", "y", "x", "y", "x"]})
    >>> model = IALS(factors=4, epochs=3).fit(Dataset.from_frame(frame, ratios=(1, 0, 0)))
    >>> model.recommend(["cy"], k=1)["item"].to_list()
    ['y']
    """

    Config = IALSConfig

    @property
    def weights(self) -> Weights:
        """Weights of the objective."""
        return Weights(every=self.config.unobserved_weight, observed=1.0, target=1.0)

    def ridge(self, degrees: NDArray[np.int64], others: int) -> NDArray[np.float64]:
        """Return the ridge of rows with these numbers of interactions, out of `others`."""
        scale: NDArray[np.float64] = degrees + self.config.unobserved_weight * others
        return self.config.regularization * scale**self.config.ridge_power

    @property
    def block(self) -> int:
        """Number of columns that are fitted at once."""
        return self.config.block
