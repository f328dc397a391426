"""CML: collaborative metric learning."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from drm_triton.config import TrainConfig
from drm_triton.data.csr import CSR
from drm_triton.data.dataset import Dataset
from drm_triton.errors import InputError
from drm_triton.models.configs import CMLConfig
from drm_triton.names import Score
from drm_triton.progress import SILENT, Reporter
from drm_triton.ranking.fold_in import fold_in
from drm_triton.recommender import FactorRecommender, Tensors
from drm_triton.training.display import loading_kernels
from drm_triton.training.engine import SingleProcess
from drm_triton.training.loop import check_factors, train
from drm_triton.training.preflight import memory_estimate, warm_up, warn_if_unvalidated
from drm_triton.training.run import Stored
from drm_triton.training.state import BatchCallback, EpochCallback, State
from drm_triton.training.step import smaller_steps
from drm_triton.training.warm_start import Known, list_state

INITIAL_STATE = 0.1  # of Adagrad


class CML(FactorRecommender[CMLConfig]):
    """Vectors in the unit ball whose distance ranks (Hsieh et al., WWW 2017).

    An interaction (u, i) and `eta` items j that the user does not have make a list. With d(u, i) = ||u - v_i||^2, and k
    the closest of the items j, the loss of a list is

        log(1 + N / eta * |{j : margin + d(u, i) > d(u, j)}|) * max(0, margin + d(u, i) - d(u, k))

    where the logarithm counts as a constant, plus `cov` times a covariance regularisation. This is the hinge part of
    `DRM` with `score` l2 and one positive, and it is trained by the same kernels. As in the authors' code, the vectors
    begin as N(0, 1/d), gradients are summed over the lists of a batch, and Adagrad's sums begin at 0.1. Every vector is
    clipped to the unit ball. Unlike there, the last batch of an epoch may be smaller, and is not left out.

    Parameters
    ----------
    config : CMLConfig, optional
        All options at once, instead of keywords.
    **options
        The fields of `CMLConfig`, among them factors, eta, margin, cov, lr, batch_size and epochs.

    Examples
    --------
    >>> import polars as pl
    >>> from drm_triton import Dataset
    >>> frame = pl.DataFrame({"user": ["ann", "ann", "bob", "bob", "cy"], "item": ["x", "y", "x", "y", "x"]})
    >>> model = CML(factors=4, epochs=3).fit(Dataset.from_frame(frame, ratios=(1, 0, 0)))
    >>> model.recommend(["cy"], k=1)["item"].to_list()
    ['y']
    """

    Config = CMLConfig
    optimiser_state = True

    def __init__(self, config: CMLConfig | None = None, **options: object) -> None:
        if config is not None and options:
            raise InputError("CML: give a configuration or options as keywords, not both")
        super().__init__(CMLConfig.from_mapping(options) if config is None else config)

    @property
    def list_config(self) -> TrainConfig:
        """The same training in the options of `DRM`."""
        fixed = {"objective": "hinge", "score": "l2", "rho": 1, "share": 1, "schedule": "constant", "init": "normal"}
        return TrainConfig.from_mapping({**fixed, **self.config.to_dict()})

    @property
    def score_name(self) -> Score:
        """The score of the vectors."""
        return "l2"

    def check_fit(self, dataset: Dataset, fit: CSR) -> None:
        """Warn if there is nothing to validate on."""
        warn_if_unvalidated(self.config, dataset)

    def memory_estimate(self, dataset: Dataset) -> dict[str, int]:
        """Return the bytes that training holds, by purpose."""
        return memory_estimate(dataset, self.list_config)

    def warm_up(self) -> None:
        """Compile the kernels that training uses."""
        warm_up(self.list_config, *self.backend())

    def train(
        self,
        stored: Stored | None,
        dataset: Dataset,
        fit: CSR,
        callbacks: Sequence[EpochCallback],
        on_batch: BatchCallback | None = None,
        reporter: Reporter = SILENT,
    ) -> State:
        """Train, from the beginning or from a stored checkpoint, and return the final state."""
        config, (backend, device) = self.list_config, self.backend()
        with loading_kernels(reporter):
            self.warm_up()
        state = self.initial_state(fit) if stored is None else State.of_checkpoint(*stored)
        engine = SingleProcess(state.to(device), config, dataset, fit, backend)
        state = train(state, config, dataset, engine, callbacks, on_batch)
        if state.position:  # stopped within an epoch
            check_factors(state, config)
        return state

    def initial_state(self, fit: CSR) -> State:
        """Return the state before the first step.

        All rows are in the unit ball from here on, so it is enough to clip those that a step changes.
        """
        d, rng = self.config.factors, np.random.Generator(np.random.Philox(self.config.seed))
        U, V = (torch.from_numpy(rng.standard_normal((n, d), np.float32)) / d**0.5 for n in fit.shape)
        for X in (U, V):
            X /= X.norm(dim=1, keepdim=True).clamp(min=1)
        return State(U, V, torch.full_like(U, INITIAL_STATE), torch.full_like(V, INITIAL_STATE))

    def updated_state(self, old: Tensors, known: Known, fit: CSR) -> State:
        """Return the state before the first epoch of an update."""
        return list_state(old, known, fit, self.list_config, *self.backend())

    def layout(self, n_users: int, n_items: int) -> Tensors:
        """Return the factors and Adagrad's sums without content."""
        return State.layout(n_users, n_items, self.config.factors)

    def learned(self, tensors: Tensors) -> Tensors:
        """Return the factors, without Adagrad's sums."""
        return {name: tensors[name] for name in ("user_factors", "item_factors")}

    def factors(self, tensors: Tensors) -> tuple[Tensor, Tensor]:
        """Return user factors [M, d] and item factors [N, d]."""
        return tensors["user_factors"], tensors["item_factors"]

    def fold_in_items(self, liked: CSR) -> Tensor:
        """Return the vectors of new users from the codes of the items they liked, CSR [B, N]: float32 [B, d]."""
        return fold_in(self.item_factors, liked, self.list_config, self.backend()[0])

    def remedy(self) -> str:
        """Return what to change if the training diverges."""
        return smaller_steps(self.list_config)
