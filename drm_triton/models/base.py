"""How the models besides DRM are trained: epoch by epoch, with the run directory and validation of all models.

A model keeps what it learns in a dictionary of tensors. `start` makes it, and each `epoch` changes it in place. All
random numbers of an epoch are a function of the seed and the number of the epoch, so a resumed run has the same bits. A
model with a closed form has a single epoch.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from drm_triton.data.attributes import attributes
from drm_triton.data.csr import CSR
from drm_triton.data.dataset import Dataset
from drm_triton.errors import DrmError, InputError, warn
from drm_triton.models.configs import ModelConfig
from drm_triton.progress import SILENT, Reporter
from drm_triton.ranking.evaluate import Ranker, evaluate, factor_ranker
from drm_triton.ranking.item_index import ItemWeights, item_ranker
from drm_triton.recommender import FactorRecommender, ItemRecommender, Recommender, Tensors, all_finite
from drm_triton.training.loop import finish_epoch
from drm_triton.training.preflight import gibibytes, warn_if_unvalidated
from drm_triton.training.run import Stored
from drm_triton.training.state import BatchCallback, EpochCallback
from drm_triton.training.state import Progress as Counters

Progress = Callable[[int, int], None]  # called with (done, total) within an epoch
C = TypeVar("C", bound=ModelConfig)


@dataclass
class ModelState(Counters):
    """Everything that the training of a model changes."""

    values: Tensors = field(default_factory=dict)

    def tensors(self) -> Tensors:
        """Return what the model has learned."""
        return self.values


class EpochModel(Recommender[C]):
    """A model that is trained epoch by epoch. Options are keywords, or a configuration."""

    def __init__(self, config: C | None = None, **options: Any) -> None:
        if config is not None and options:
            raise InputError(f"{type(self).__name__}: give a configuration or options as keywords, not both")
        super().__init__(self.Config.from_mapping(options) if config is None else config)  # type: ignore[arg-type]

    # -- what a model defines ------------------------------------------------------------------------------------

    def memory(self, n_users: int, n_items: int, nnz: int, pairs: int) -> dict[str, int]:
        """Return the bytes that training needs at most by purpose, besides the interactions.

        `nnz` is the sum of the numbers of items of the users, and `pairs` the sum of their squares.
        """
        return {}

    @abstractmethod
    def start(self, fit: CSR) -> Tensors:
        """Return the tensors before the first epoch."""

    @abstractmethod
    def epoch(self, tensors: Tensors, fit: CSR, number: int, progress: Progress) -> dict[str, float]:
        """Run epoch `number` (0, 1, ...) in place. Return what to record, for example {"loss": ...}."""

    @abstractmethod
    def ranker_of(self, tensors: Tensors, fit: CSR) -> Ranker:
        """Return the ranker of a model in training."""

    # -- training ------------------------------------------------------------------------------------------------

    def check_fit(self, dataset: Dataset, fit: CSR) -> None:
        """Warn if there is nothing to validate on."""
        warn_if_unvalidated(self.config, dataset)

    def memory_estimate(self, dataset: Dataset) -> dict[str, int]:
        """Return the bytes that training holds, by purpose."""
        nnz, pairs = _counts(sum(getattr(dataset, part).degrees() for part in self.config.fit_parts))
        interactions = {"interactions": 4 * nnz + 8 * (dataset.n_users + 1)}
        return interactions | self.memory(dataset.n_users, dataset.n_items, nnz, pairs)

    def train(
        self,
        stored: Stored | None,
        dataset: Dataset,
        fit: CSR,
        callbacks: Sequence[EpochCallback],
        on_batch: BatchCallback | None = None,
        reporter: Reporter = SILENT,
    ) -> ModelState:
        """Train, from the beginning or from a stored checkpoint, and return the final state."""
        config = self.config
        self.backend()  # sets the number of threads
        reporter.line(f"{config.model} needs up to {gibibytes(sum(self.memory_estimate(dataset).values()))} of memory")
        state = ModelState(values=self.start(fit)) if stored is None else ModelState(stored[0], **stored[1])

        def advance(done: int, total: int) -> None:
            state.position = done
            if on_batch is not None:
                on_batch(state, total)  # a request to stop is honoured after the epoch

        def measure(ks: Sequence[int]) -> dict[str, float]:
            return evaluate(self.ranker_of(state.values, fit), fit, dataset.valid, ks).means

        while state.epoch < config.last_epoch and not 0 < config.patience <= state.stale:
            began = time.perf_counter()
            measured = self.epoch(state.values, fit, state.epoch, advance)
            self._check_epoch(state, measured)
            state.seconds = time.perf_counter() - began
            advance(1, 1)
            end = finish_epoch(state, config, dataset, measure, measured)
            stops = [callback(end) for callback in callbacks]  # all of them, before any can end the training
            if any(stops):
                break
        return state

    def _check_epoch(self, state: ModelState, measured: dict[str, float]) -> None:
        """Raise if the training has diverged. Called before anything is saved."""
        if not all_finite(state.values) or not np.isfinite(list(measured.values())).all():
            raise DrmError(
                f"{self.config.model} diverged in epoch {state.epoch + 1}: its values are not finite; train again with "
                f"{self.remedy()}"
            )


class FactorModel(EpochModel[C], FactorRecommender[C]):
    """A model of user and item vectors that is trained epoch by epoch.

    What it has learned stays on the CPU, where it is trained. The vectors that rank are on the device of the backend.
    """

    def new_queries(self, liked: CSR) -> Tensor:
        """Return the vectors of new users from the items they liked, CSR [m, N]: float32 [m, d]."""
        return self.fold_in_items(liked).to(self.backend()[1])

    def ranker_of(self, tensors: Tensors, fit: CSR) -> Ranker:
        """Return the ranker of a model in training."""
        backend, device = self.backend()
        U, V = (table.to(device) for table in self.factors(tensors))
        return factor_ranker(backend, U, V, self.score_name, fit)


class ItemModel(EpochModel[C], ItemRecommender[C]):
    """An item-item model with a closed form, or with a solver of its own."""

    deterministic = True

    def check_fit(self, dataset: Dataset, fit: CSR) -> None:
        """Warn of items that only a model with vectors can recommend."""
        super().check_fit(dataset, fit)
        n_cold = int((fit.popularity() == 0).sum())
        if n_cold and attributes(dataset.items):
            warn(
                f"{self.config.model} has weights between items, so it cannot recommend the {n_cold:,} items without "
                "interactions; models with vectors, such as drm, predict theirs from attributes"
            )

    @abstractmethod
    def fit_weights(self, fit: CSR, progress: Progress) -> ItemWeights:
        """Return the weights between items."""

    def start(self, fit: CSR) -> Tensors:
        """Return no tensors: the only epoch makes them."""
        return {}

    def epoch(self, tensors: Tensors, fit: CSR, number: int, progress: Progress) -> dict[str, float]:
        """Fit the weights."""
        tensors.update(self.fit_weights(fit, progress).tensors())
        return {}

    def ranker_of(self, tensors: Tensors, fit: CSR) -> Ranker:
        """Return the ranker of a model in training."""
        return item_ranker(ItemWeights.of_tensors(tensors, fit.shape[1]), fit)


def _counts(degrees: NDArray[np.int64]) -> tuple[int, int]:
    """Return the sum of the numbers of items of users, and of their squares."""
    return int(degrees.sum()), int((degrees.astype(np.int64) ** 2).sum())
