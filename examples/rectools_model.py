"""DRM as a RecTools model, with its fit, recommend, recommend_to_items, configs and cross-validation.

    pip install rectools
    python examples/rectools_model.py

RecTools encodes users and items and ranks by the factors that DRM learns. Tested with RecTools 0.19.
"""

from typing import Any

import numpy as np
import pandas as pd
from pydantic import Field
from rectools import Columns
from rectools.dataset import Dataset as Interactions
from rectools.metrics import MAP, NDCG
from rectools.model_selection import LastNSplitter, cross_validate
from rectools.models import PopularModel
from rectools.models.base import ModelConfig
from rectools.models.rank import Distance
from rectools.models.vector import Factors, VectorModel

from drm_triton import DRM, Dataset, TrainConfig
from drm_triton.data.prepare.synthetic import Shape, generate


class DRMModelConfig(ModelConfig):
    """What RecTools stores of a model: the options of TrainConfig that were given."""

    options: dict[str, Any] = Field(default_factory=dict)


class DRMModel(VectorModel[DRMModelConfig]):
    """DRM with the interface of RecTools. Keywords are the fields of `TrainConfig`."""

    config_class = DRMModelConfig

    def __init__(self, verbose: int = 0, **options: Any) -> None:
        super().__init__(verbose=verbose)
        self.options = options
        self.train_config = TrainConfig.from_mapping(options)  # raises for an unknown option
        l2 = self.train_config.score == "l2"
        self.u2i_dist = Distance.EUCLIDEAN if l2 else Distance.DOT
        self.i2i_dist = Distance.EUCLIDEAN if l2 else Distance.COSINE
        self.recommend_n_threads, self.recommend_use_gpu_ranking = 0, True

    def _fit(self, dataset: Interactions) -> None:
        matrix = dataset.get_user_item_matrix(include_weights=False)
        model = DRM(self.train_config).fit(Dataset.from_csr(matrix))
        self.user_factors, self.item_factors = (
            np.ascontiguousarray(table.cpu().numpy()) for table in (model.user_factors, model.item_factors)
        )

    def _get_users_factors(self, dataset: Interactions) -> Factors:
        return Factors(self.user_factors)

    def _get_items_factors(self, dataset: Interactions) -> Factors:
        return Factors(self.item_factors)

    def _get_config(self) -> DRMModelConfig:
        return DRMModelConfig(cls=type(self), verbose=self.verbose, options=self.options)

    @classmethod
    def _from_config(cls, config: DRMModelConfig) -> "DRMModel":
        return cls(verbose=config.verbose, **config.options)


def main(shape: Shape, epochs: int) -> pd.DataFrame:
    """Cross-validate DRM and popularity on synthetic interactions; return the mean metrics of each model."""
    users, items = generate(shape, seed=0)
    shuffled = np.random.default_rng(0).permutation(len(users))  # as time, by which RecTools splits
    frame = pd.DataFrame(
        {
            Columns.User: [f"user {u}" for u in users],
            Columns.Item: [f"item {i}" for i in items],
            Columns.Weight: 1.0,
            Columns.Datetime: pd.Timestamp("2026-01-01") + pd.to_timedelta(shuffled, unit="min"),
        }
    )
    found = cross_validate(
        dataset=Interactions.construct(frame),
        splitter=LastNSplitter(n=1, n_splits=2),
        metrics={"NDCG@10": NDCG(10, divide_by_achievable=True), "MAP@10": MAP(10)},
        models={
            "popularity": PopularModel(),
            "DRM dot": DRMModel(factors=32, epochs=epochs),
            "DRM L2": DRMModel(factors=32, epochs=epochs, score="l2"),
        },
        k=10,
        filter_viewed=True,
    )
    table = pd.DataFrame(found["metrics"]).groupby("model", sort=False)[["NDCG@10", "MAP@10"]].mean()
    print(table.round(4))
    return table


if __name__ == "__main__":
    main(Shape(users=1000, items=500, interactions=30_000), epochs=10)
