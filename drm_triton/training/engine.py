"""Who takes the steps of a training: this process alone, or several together (see `drm_triton.distributed`)."""

from collections.abc import Sequence
from typing import Protocol

from drm_triton.config import TrainConfig
from drm_triton.data.csr import CSR
from drm_triton.data.dataset import Dataset
from drm_triton.kernels.protocol import Backend
from drm_triton.ranking.evaluate import evaluate, factor_ranker
from drm_triton.training.capture import captured_step
from drm_triton.training.prior import ranking_factors
from drm_triton.training.state import State
from drm_triton.training.step import objective_of, take_step, training_plan


class Engine(Protocol):
    """What the training loop asks for."""

    @property
    def n_lists(self) -> int:
        """Lists in an epoch."""

    def step(self, stop: int, lr: float) -> None:
        """Train on the lists of the current epoch from `state.position` to `stop` - 1."""

    def measure(self, ks: Sequence[int]) -> dict[str, float]:
        """Return the metrics of the state as it is now on the validation part."""

    def agreed(self, stop: bool, now: bool = False) -> bool:
        """Return whether the training is to end, if this process wants it to.

        Processes that train together agree on it. Without `now`, this may take one more step.
        """


class SingleProcess:
    """Trains in this process, on one device."""

    def __init__(self, state: State, config: TrainConfig, dataset: Dataset, fit: CSR, backend: Backend) -> None:
        self.state, self.config, self.dataset, self.fit, self.backend = state, config, dataset, fit, backend
        self.plan = training_plan(config, fit, state.U.device)
        self.objective = objective_of(config, fit.shape[1])
        self.captured = captured_step(state, self.plan, config, self.objective, backend)

    @property
    def n_lists(self) -> int:
        """Lists in an epoch."""
        return self.plan.n_lists

    def step(self, stop: int, lr: float) -> None:
        """Take a step. On a GPU, one with a full batch is replayed if it could be captured."""
        if self.captured is not None and stop - self.state.position == self.config.batch_in_force:
            self.captured()
        else:
            take_step(self.state, self.plan, stop, self.config, self.objective, self.backend, lr)

    def measure(self, ks: Sequence[int]) -> dict[str, float]:
        """Rank all items for all users."""
        U, V = ranking_factors(self.state.U, self.state.V, self.config, self.fit.popularity())
        rank = factor_ranker(self.backend, U, V, self.config.score_in_force, self.fit)
        return evaluate(rank, self.fit, self.dataset.valid, ks).means

    def agreed(self, stop: bool, now: bool = False) -> bool:
        """Return the wish of this process."""
        return stop
