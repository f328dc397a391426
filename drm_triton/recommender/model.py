"""`Model`: options, what was learned, files, and what each kind of model defines."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray
from torch import Tensor

from drm_triton import atomic
from drm_triton.base_config import Config
from drm_triton.data.csr import CSR
from drm_triton.data.dataset import Dataset
from drm_triton.data.frames import is_pandas, to_pandas
from drm_triton.errors import DrmError, InputError
from drm_triton.kernels import use_backend
from drm_triton.kernels.protocol import Backend
from drm_triton.options import ALIASES
from drm_triton.progress import Reporter
from drm_triton.ranking.known_first import Index
from drm_triton.ranking.recommend import Queries
from drm_triton.training import checkpoint
from drm_triton.training.loop import interactions_to_fit
from drm_triton.training.run import Stored, checkpoint_directory, interactions_only
from drm_triton.training.state import BatchCallback, EpochCallback, Progress
from drm_triton.training.warm_start import Known

Tensors = dict[str, Tensor]

FINITE_BLOCK = 1 << 20  # numbers that are checked at once

C = TypeVar("C", bound=Config)
R = TypeVar("R", bound="Model[Any]")


class NotFittedError(DrmError):
    """The model has learned nothing yet."""


class Model(ABC, Generic[C]):
    """A model with its options, what it has learned, and its files. Subclasses define the abstract methods."""

    Config: ClassVar[type[Config]]
    deterministic: ClassVar[bool] = False  # whether the seed has no effect
    optimiser_state: ClassVar[bool] = False  # whether training keeps Adagrad's sums
    user_tensors: ClassVar[frozenset[str]] = frozenset({"user_factors", "user_state"})  # those with a row for each user

    def __init__(self, config: C) -> None:
        self.config = config
        self._tensors: Tensors | None = None  # what was learned
        self._fitted_config: C | None = None
        self._interactions: Dataset | None = None
        self._epoch: int | None = None
        self._place: Path | None = None  # the directory that the model was loaded from

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self.config.changed().items())
        return f"{type(self).__name__}({options})"

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Return the options by name, as estimators of scikit-learn do. `deep` has no effect."""
        return {name: getattr(self.config, name) for name in self.config.fields()}

    def set_params(self: R, **options: Any) -> R:
        """Change the options of the next training, as estimators of scikit-learn do.

        What was learned stays until then, and `save` and `refit` use the options with which it was.
        """
        self.config.check_names(options)
        by_name = {ALIASES.get(name, name): value for name, value in options.items()}
        self.config = dataclasses.replace(self.config, **by_name)
        return self

    # -- what a kind of model defines ----------------------------------------------------------------------------

    @abstractmethod
    def train(
        self,
        stored: Stored | None,
        dataset: Dataset,
        fit: CSR,
        callbacks: Sequence[EpochCallback],
        on_batch: BatchCallback | None,
        reporter: Reporter,
    ) -> Progress:
        """Train, from the beginning or from a stored checkpoint, and return the final state."""

    @abstractmethod
    def index(self, candidates: NDArray[np.int64] | None = None) -> Index:
        """Return an index of all items, or of some candidates, given by ascending codes."""

    @abstractmethod
    def queries(self, users: NDArray[np.int64]) -> Queries:
        """Return the queries of users of the training data, given by their codes [m]."""

    @abstractmethod
    def dataset_queries(self, users: NDArray[np.int64]) -> Queries:
        """Return the queries of users of the data set, given by their codes [m].

        It differs from `queries` for users all of whose interactions were held out of the training. The model has
        learned nothing about them, so they are treated as new users who liked these items.
        """

    @abstractmethod
    def new_queries(self, liked: CSR) -> Queries:
        """Return the queries of new users from the items they liked, CSR [m, N]."""

    @abstractmethod
    def pair_scores(self, queries: Queries, items: NDArray[np.int32]) -> NDArray[np.float32]:
        """Return the score of items[r] for query r: float32 [m]."""

    @abstractmethod
    def similarity(self, items: NDArray[np.int32]) -> tuple[Index, Queries]:
        """Return an index of all items whose scores are similarities, and its queries for some items."""

    def diversity_factors(self) -> NDArray[np.float32]:
        """Return the item factors whose cosine is the similarity of items in a list: float32 [N, d]."""
        raise InputError(
            f"`diversity` compares the factors of items, which {type(self).__name__} does not have; use `at_most` with "
            "an attribute of the items, or a model with factors"
        )

    @abstractmethod
    def memory_estimate(self, dataset: Dataset) -> dict[str, int]:
        """Return the bytes that training holds, by purpose."""

    def updated_state(self, old: Tensors, known: Known, fit: CSR) -> Progress | None:
        """Return the state before the first epoch of an update, or None if the model has to be trained anew.

        Parameters
        ----------
        old : what this model has learned, with the state of the optimiser if it is known
        known : which users and items this model knows
        fit : the interactions to train on
        """
        return None

    def layout(self, n_users: int, n_items: int) -> Tensors | None:
        """Return the tensors of a training state without content (device "meta"), None if the data decides them."""
        return None

    def learned(self, tensors: Tensors) -> Tensors:
        """Return what a fitted model needs of the tensors of a training state."""
        return tensors

    def placed(self, tensors: Tensors) -> Tensors:
        """Return what was learned on the device where the model needs it."""
        return tensors

    def warm_up(self) -> None:
        """Compile the kernels that training uses."""

    def check_fit(self, dataset: Dataset, fit: CSR) -> None:
        """Raise or warn before training if options and data do not go together."""

    def backend(self) -> tuple[Backend, torch.device]:
        """Return the backend and the device of the configuration, with its number of threads set."""
        return use_backend(self.config.backend, self.config.threads)

    # -- the fitted model ----------------------------------------------------------------------------------------

    @property
    def tensors(self) -> Tensors:
        """What the model has learned, by the names in its file."""
        if self._tensors is None:
            raise NotFittedError(f"this {type(self).__name__} has learned nothing yet: call fit or load first")
        return self._tensors

    @property
    def fitted_config(self) -> C:
        """The options with which the model was fitted. Those of the next training may differ, see `set_params`."""
        assert self.tensors is not None
        assert self._fitted_config is not None
        return self._fitted_config

    @property
    def interactions(self) -> Dataset:
        """The interactions that the model was fitted on, as the `train` part, those held out, and the external ids."""
        assert self.tensors is not None
        assert self._interactions is not None
        return self._interactions

    @property
    def cold_items(self) -> NDArray[np.bool_]:
        """Which items have no training interactions, but a vector predicted from their attributes: bool [N]."""
        return np.zeros(self.interactions.n_items, dtype=bool)

    @property
    def cold_users(self) -> NDArray[np.bool_]:
        """Which users have no training interactions, but a vector predicted from their attributes: bool [M]."""
        return np.zeros(self.interactions.n_users, dtype=bool)

    def known_items(self) -> NDArray[np.bool_]:
        """Return which items have training interactions or are cold items. Others come last in all rankings."""
        return (self.interactions.popularity > 0) | self.cold_items

    def was_fit_on(self, dataset: Dataset) -> bool:
        """Return whether a data set has the ids and the interactions that the model was fitted on."""
        mine, fit = self.interactions, interactions_to_fit(dataset, self.fitted_config)
        return (
            fit.shape == mine.train.shape
            and np.array_equal(fit.indptr, mine.train.indptr)
            and np.array_equal(fit.indices, mine.train.indices)
            and dataset.user_ids.equals(mine.user_ids)
            and dataset.item_ids.equals(mine.item_ids)
        )

    # -- files ---------------------------------------------------------------------------------------------------

    def save(self, path: str | Path, overwrite: bool = False) -> None:
        """Write the model to a directory, atomically. docs/formats.md describes the files.

        Parameters
        ----------
        path : the directory
        overwrite : replace a saved model
        """
        self._check_finite(f"this {type(self).__name__}")
        with atomic.directory(Path(path), overwrite, marker=checkpoint.FILE) as folder:
            # Save a copy: `Dataset.save` records where a data set is stored, and this folder is temporary.
            interactions_only(self.interactions, self.interactions.train).save(folder / "data")
            metadata = {"model": self.config.model, "config": self.fitted_config.resolved().to_dict()}
            if self._epoch is not None:
                metadata["training"] = {"epoch": self._epoch}
            checkpoint.write_tensors(folder / checkpoint.FILE, self.tensors, metadata)

    @classmethod
    def load(cls: type[R], path: str | Path, mapped: bool = True, verify: bool = False) -> R:
        """Load a saved model, or the best checkpoint of a run.

        Parameters
        ----------
        path : directory of the model or the run
        mapped : map its interactions into memory; see `Dataset.load`
        verify : verify its interactions even if they were verified before; see `Dataset.load`. The model file always
            is verified, but one of version 0.2, which has no checksum, is then refused
        """
        place = checkpoint_directory(path)
        file = place / checkpoint.FILE
        if verify:
            checkpoint.check_recorded(file)
        tensors, metadata = checkpoint.read_tensors(file)
        return cls.restored(place, tensors, metadata, Dataset.load(place / "data", mapped, verify))

    @classmethod
    def restored(cls: type[R], place: Path, tensors: Tensors, metadata: dict[str, Any], data: Dataset) -> R:
        """Return the model that was read from a directory, checked.

        Parameters
        ----------
        place : the directory
        tensors, metadata : of its model file, see `checkpoint.read_tensors`
        data : the interactions of the model
        """
        stored = metadata.get("model", "drm")
        if stored != cls.Config.model:
            raise InputError(f"{place} holds a model of the kind {stored}; load it with drm_triton.models.load")
        model = cls(cls.stored_config(metadata["config"], str(place)))
        model._interactions, model._fitted_config = data, model.config
        model._epoch, model._place = metadata.get("training", {}).get("epoch") or None, place
        try:
            model._tensors = model.placed(model.learned(tensors))
            model._check_sizes(str(place))
        except (KeyError, IndexError, TypeError, AttributeError, RuntimeError) as error:
            raise InputError(f"{place}: the tensors are not those of the model {stored} ({error})") from error
        model._check_finite(str(place))
        return model

    @classmethod
    def stored_config(cls, values: dict[str, Any], where: str) -> Any:
        """Return the configuration that a model file holds."""
        return cls.Config.from_mapping(values, where=where)

    # -- internal ------------------------------------------------------------------------------------------------

    def _as_given(self, frame: pl.DataFrame, argument: object) -> pl.DataFrame:
        """Return a result as a pandas frame if the model last learned from one, or if the caller gives one."""
        if self.interactions.is_pandas or is_pandas(argument):
            converted: Any = to_pandas(frame)
            return converted  # type: ignore[no-any-return]  # the annotation serves those who use polars
        return frame

    def _check_sizes(self, where: str) -> None:
        """Raise if the tensors are not those of the options, and of the users and items of the interactions."""

    def _check_finite(self, where: str) -> None:
        if not all_finite(self.tensors):
            raise InputError(f"{where}: the factors are not finite; train again with {self.remedy()}")

    def remedy(self) -> str:
        """Return what to change if the training diverges."""
        return "other options"

    def _become(self: R, other: R) -> R:
        self._tensors, self._interactions = other._tensors, other._interactions
        self._epoch, self._place, self._fitted_config = other._epoch, other._place, other._fitted_config
        return self


def all_finite(tensors: Tensors) -> bool:
    """Return whether all numbers are finite. It needs little memory besides the tensors."""
    parts = (part for tensor in tensors.values() for part in tensor.reshape(-1).split(FINITE_BLOCK))
    return all(bool(torch.isfinite(part).all()) for part in parts)
