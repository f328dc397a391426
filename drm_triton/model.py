"""`DRM`: the recommender. Fit it to a data set, ask it for recommendations, save it and load it."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray
from torch import Tensor

from drm_triton import checkpoint
from drm_triton.config import TrainConfig
from drm_triton.data.dataset import CSR, Dataset
from drm_triton.data.store import atomic_directory
from drm_triton.errors import DrmError, InputError
from drm_triton.evaluate import BLOCK, Evaluation, csr_tensors, evaluate, factor_ranker
from drm_triton.kernels import get_backend
from drm_triton.run import Run, checkpoint_directory, interactions_only
from drm_triton.trainer import (
    BatchCallback,
    EpochCallback,
    EpochEnd,
    initial_state,
    interactions_to_fit,
    train,
    warm_up,
)


class NotFittedError(DrmError):
    """The model has no factors yet."""


class DRM:
    """Factor model for top-K recommendation, trained on the differentiable ranking metric.

    Parameters
    ----------
    config : TrainConfig, optional
    **options : fields of TrainConfig, instead of `config`

    Examples
    --------
    >>> frame = pl.DataFrame({"user": ["ann", "ann", "bob", "bob", "cy"], "item": ["x", "y", "x", "y", "x"]})
    >>> data = Dataset.from_frame(frame, ratios=(1, 0, 0))
    >>> model = DRM(factors=4, epochs=3).fit(data)
    >>> model.recommend(["cy"], k=1)["item"].to_list()
    ['y']
    """

    def __init__(self, config: TrainConfig | None = None, **options: Any) -> None:
        if config is not None and options:
            raise InputError("DRM: give a TrainConfig or its fields as keywords, not both")
        self.config = config if config is not None else TrainConfig.from_mapping(options)
        self._factors: tuple[Tensor, Tensor] | None = None
        self._interactions: Dataset | None = None

    # -- training ------------------------------------------------------------------------------------------------

    def fit(
        self,
        dataset: Dataset,
        callbacks: Iterable[EpochCallback] = (),
        run: str | Path | None = None,
        resume: bool = False,
        on_batch: BatchCallback | None = None,
    ) -> "DRM":
        """Train on a data set.

        Parameters
        ----------
        dataset : Dataset
        callbacks : each called with an `EpochEnd` after each epoch; one that returns True ends the training
        run : directory to keep configuration, metrics and checkpoints in; None keeps nothing
        resume : take up the training in `run` where its last checkpoint left it
        on_batch : called with (state, lists in an epoch) after each step; returning True ends the training

        Returns
        -------
        DRM, fitted: the factors of the best epoch where there is a validation part, else of the last.
        """
        ops, device = self.backend()
        fit = interactions_to_fit(dataset, self.config)
        keeper: Run | _Best
        state = None
        if run is None:
            keeper = _Best()
        elif resume:
            keeper, state = Run.open(run, dataset)
            keeper.config = self.config
        else:
            keeper = Run.create(run, self.config, dataset, fit)
        warm_up(self.config, ops, device)
        if state is None:
            state = initial_state(self.config, fit, device)
        state = train(state.to(device), self.config, dataset, fit, ops, [*callbacks, keeper], on_batch)
        if isinstance(keeper, Run):
            if state.position:  # stopped within an epoch
                keeper.save(state)
            keeper.draw_curves()
            return self._become(DRM.load(keeper.path))
        self._factors = keeper.factors or (state.U, state.V)
        self._interactions = interactions_only(dataset, fit)
        return self

    def backend(self) -> tuple[ModuleType, torch.device]:
        """The operations and the device that the configuration asks for, with its number of threads set."""
        ops = get_backend(None if self.config.backend == "auto" else self.config.backend)
        if self.config.threads is not None:
            torch.set_num_threads(self.config.threads)
            if ops.__name__.endswith(".cpu"):
                from drm_triton.kernels.cpu.threads import set_threads

                set_threads(self.config.threads)
        on_gpu = ops.__name__.endswith(".gpu") and torch.cuda.is_available()
        return ops, torch.device("cuda" if on_gpu else "cpu")

    # -- what was learnt -----------------------------------------------------------------------------------------

    @property
    def user_factors(self) -> Tensor:
        """float32 [M, d]"""
        return self._fitted()[0]

    @property
    def item_factors(self) -> Tensor:
        """float32 [N, d]"""
        return self._fitted()[1]

    @property
    def interactions(self) -> Dataset:
        """What the model was fit on (as `train`), and the external ids."""
        self._fitted()
        assert self._interactions is not None
        return self._interactions

    def recommend(
        self, users: Sequence[Any] | pl.Series | None = None, k: int = 10, exclude_seen: bool = True
    ) -> pl.DataFrame:
        """The k best items of each user.

        Parameters
        ----------
        users : external ids; None for all users
        k : items for each
        exclude_seen : leave out the items of the user's own interactions

        Returns
        -------
        frame with columns user, rank (1 is best), item, score; fewer than k rows where fewer items remain
        """
        if k < 1:
            raise InputError(f"recommend: k must be at least 1, got {k}")
        data = self.interactions
        rows = np.arange(data.n_users) if users is None else data.encode_users(users).astype(np.int64)
        frames = []
        for start in range(0, len(rows), BLOCK):
            block = rows[start : start + BLOCK]
            items, scores = self._top_k(block, k, exclude_seen)
            kept = items >= 0
            frames.append(
                pl.DataFrame(
                    {
                        "user": data.user_ids[np.repeat(block, kept.sum(1))],
                        "rank": np.broadcast_to(np.arange(1, k + 1, dtype=np.int32), kept.shape)[kept],
                        "item": data.item_ids[items[kept]],
                        "score": scores[kept],
                    }
                )
            )
        return pl.concat(frames)

    def evaluate(self, held_out: CSR, seen: CSR | None = None, ks: Sequence[int] = (10, 50)) -> Evaluation:
        """Compare rankings with held-out interactions; `seen` (by default those it was fit on) are excluded."""
        ops, _ = self.backend()
        ranker = factor_ranker(ops, *self._fitted(), self.config.score)
        return evaluate(ranker, self.interactions.train if seen is None else seen, held_out, ks)

    # -- files ---------------------------------------------------------------------------------------------------

    def save(self, path: str | Path, overwrite: bool = False) -> None:
        """Write the model to a directory (safetensors and Parquet, see `checkpoint`), atomically."""
        U, V = self._fitted()
        with atomic_directory(Path(path), overwrite, marker=checkpoint.FILE) as folder:
            # a copy, so that this model does not take the temporary folder for the home of its data
            interactions_only(self.interactions, self.interactions.train).save(folder / "data")
            tensors = {"user_factors": U, "item_factors": V}
            checkpoint.write_tensors(folder / checkpoint.FILE, tensors, {"config": self.config.to_dict()})

    @classmethod
    def load(cls, path: str | Path) -> "DRM":
        """Read a saved model, or the best checkpoint of a run."""
        place = checkpoint_directory(path)
        tensors, metadata = checkpoint.read_tensors(place / checkpoint.FILE)
        model = cls(TrainConfig.from_mapping(metadata["config"], where=f"{place}: "))
        model._interactions = Dataset.load(place / "data")
        U, V = tensors["user_factors"], tensors["item_factors"]
        sizes = (len(U), len(V)), (model._interactions.n_users, model._interactions.n_items)
        if sizes[0] != sizes[1]:
            raise InputError(f"{place}: factors of {sizes[0]} users and items do not fit its ids {sizes[1]}")
        if not (torch.isfinite(U).all() and torch.isfinite(V).all()):
            raise InputError(f"{place}: the factors are not finite; train again with a lower lr or a higher tau")
        _, device = model.backend()
        model._factors = U.to(device), V.to(device)
        return model

    # -- inside --------------------------------------------------------------------------------------------------

    def _fitted(self) -> tuple[Tensor, Tensor]:
        if self._factors is None:
            raise NotFittedError("this DRM has no factors yet: call fit or load first")
        return self._factors

    def _become(self, other: "DRM") -> "DRM":
        self._factors, self._interactions = other._factors, other._interactions
        return self

    def _top_k(self, rows: NDArray[np.int64], k: int, exclude_seen: bool) -> tuple[NDArray[np.int32], NDArray[Any]]:
        U, V = self._fitted()
        ops, device = self.backend()
        seen = None
        if exclude_seen:
            seen = csr_tensors(self.interactions.train.take(rows), device)
        items, scores = ops.top_k(U[torch.from_numpy(rows).to(device)], V, k, self.config.score, seen)
        return items.cpu().numpy(), scores.cpu().numpy()


class _Best:
    """Keeps the factors of the best epoch in memory, for a training without a run directory."""

    factors: tuple[Tensor, Tensor] | None = None

    def __call__(self, end: EpochEnd) -> None:
        if end.state.best is not None and end.improved:
            self.factors = end.state.U.clone(), end.state.V.clone()
