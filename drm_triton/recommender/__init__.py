"""What all models have in common: fit, recommend, measure, save and load.

There are two kinds of fitted models. A `FactorRecommender` has a vector for each user and each item. An
`ItemRecommender` has weights between items, and its users are their interactions. Both answer through an index
(`ranking.topk`, `ranking.item_index`), which finds the best items for the queries of users. Their classes build on each
other: `Model`, `TrainableModel`, `Recommender`, and then the two kinds.
"""

from drm_triton.recommender.factors import FactorRecommender
from drm_triton.recommender.items import ItemRecommender
from drm_triton.recommender.model import NotFittedError, Tensors, all_finite
from drm_triton.recommender.recommender import Recommender

__all__ = ["FactorRecommender", "ItemRecommender", "NotFittedError", "Recommender", "Tensors", "all_finite"]
