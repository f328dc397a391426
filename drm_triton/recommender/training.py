"""`TrainableModel`: train a model from the beginning, resume, update with new interactions, refit on all."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch

from drm_triton.base_config import Config
from drm_triton.data.csr import CSR
from drm_triton.data.dataset import Dataset
from drm_triton.data.new_rows import filters_of, new_rows
from drm_triton.data.unite import has_all, united
from drm_triton.errors import InputError
from drm_triton.progress import SILENT, Reporter, counted
from drm_triton.recommender.model import Model, Tensors
from drm_triton.training import checkpoint
from drm_triton.training.display import Display, announced_compilation
from drm_triton.training.loop import can_validate, interactions_to_fit
from drm_triton.training.preflight import check_memory
from drm_triton.training.run import Run, continuing, interactions_only
from drm_triton.training.state import BatchCallback, EpochCallback, EpochEnd
from drm_triton.training.warm_start import Known, WarmStart, check_related, update_epochs, warn_of_leaks

Interactions = Any  # a Dataset, a polars or pandas frame, or a scipy sparse matrix

C = TypeVar("C", bound=Config)
R = TypeVar("R", bound="TrainableModel[Any]")


class TrainableModel(Model[C]):
    """A model with the methods that train it."""

    def fit(
        self: R,
        dataset: Interactions,
        callbacks: Iterable[EpochCallback] = (),
        run: str | Path | None = None,
        resume: bool = False,
        on_batch: BatchCallback | None = None,
        reporter: Reporter | None = None,
        progress: bool | None = None,
        overwrite: bool = False,
    ) -> R:
        """Train on a data set, or on all interactions of a table or a matrix.

        Parameters
        ----------
        dataset : Dataset, polars or pandas DataFrame, or scipy sparse matrix
            Of a `Dataset`, the model learns from the part that the option `fit_on` names. Of a table, it learns from
            all rows; `Dataset.from_frame` recognises the columns. Of a matrix [users, items], it learns from all stored
            entries, and ids are row and column numbers.
        callbacks : called with an `EpochEnd` after each epoch; a callback that returns True ends the training
        run : directory for the configuration, metrics and checkpoints; None writes nothing
        resume : continue the training in `run` from its last checkpoint
        on_batch : called with (state, lists in an epoch) after each step; returning True ends the training
        reporter : shows the progress, in place of the one that `progress` chooses
        progress : show the epochs in a table; None shows them on a terminal and in a notebook
        overwrite : replace the run that is in `run`

        Returns
        -------
        this model, as after the best epoch on the validation part, or after the last epoch without validation
        """
        if resume and run is None:
            raise InputError(f"{type(self).__name__}.fit: `resume` needs `run`, the directory of the run to continue")
        dataset = Dataset.of(dataset, weighted=self.config.weighted)
        return self._fit(dataset, None, callbacks, run, resume, on_batch, reporter, progress, overwrite)

    def partial_fit(
        self: R,
        interactions: Interactions,
        epochs: int | None = None,
        callbacks: Iterable[EpochCallback] = (),
        run: str | Path | None = None,
        on_batch: BatchCallback | None = None,
        reporter: Reporter | None = None,
        progress: bool | None = None,
        overwrite: bool = False,
    ) -> R:
        """Update this model with new interactions, users and items: train on from what it has learned.

        Known users and items start from their vectors, new ones are folded in, and a few epochs on all interactions
        follow; docs/updating.md has the details. A model without vectors of users and items is trained anew. A model
        that has learned nothing yet is fitted, with all its epochs.

        Parameters
        ----------
        interactions : Dataset, polars or pandas DataFrame, or scipy sparse matrix
            New interactions, with or without the old ones. They join those that the model keeps, of every part. What a
            `Dataset` holds out stays held out, even if the model has learned from it. A table or a matrix holds nothing
            out. `min_rating` and `event_weight` of the training also hold for the rows of a table.
        epochs : int, optional
            Number of epochs, at most those of the training. They count as the last ones of the training. Default: 15 %
            of the training.
        callbacks, run, on_batch, reporter, progress, overwrite : see `fit`
            `fit` with `resume` also resumes the run of an update.

        Examples
        --------
        >>> import polars as pl
        >>> from drm_triton import DRM, Dataset
        >>> frame = pl.DataFrame({"user": ["ann", "ann", "bob", "bob", "cy"], "item": ["x", "y", "x", "y", "x"]})
        >>> model = DRM(factors=4, epochs=3).fit(frame)
        >>> model = model.partial_fit(pl.DataFrame({"user": ["dora", "ann"], "item": ["x", "z"]}))
        >>> sorted(model.recommend(["dora"])["item"])
        ['y', 'z']
        """
        if self._tensors is None:
            return self.fit(interactions, callbacks, run, False, on_batch, reporter, progress, overwrite)
        reporter = reporter or Reporter.wanted(progress)
        dataset = self.with_kept(interactions, reporter)
        n_epochs = update_epochs(self.config, epochs)
        return self._fit(dataset, n_epochs, callbacks, run, False, on_batch, reporter, progress, overwrite)

    def with_kept(self, interactions: Interactions, reporter: Reporter = SILENT) -> Dataset:
        """Return the data set that `partial_fit` trains on: new interactions, and those that the model keeps.

        A data set that has all of these is returned as it is.

        Parameters
        ----------
        interactions : see `partial_fit`
        reporter : is told what was joined
        """
        whole, new = isinstance(interactions, Dataset), new_rows(interactions, filters_of(self.interactions.meta))
        if whole:
            check_related(self.interactions, new)
        both = united(self.interactions, new)
        if whole and has_all(new, both):
            return new
        if self.config.weighted:
            raise InputError(
                f"{type(self).__name__}.partial_fit: a model keeps no weights of interactions; give a Dataset with "
                "the old and the new interactions"
            )
        users, kept = both.n_users - new.n_users, both.n_interactions - new.n_interactions
        reporter.line(f"{counted(users, 'user')} and {counted(kept, 'interaction')} of the old model are kept")
        # In the form in which a run stores it, so that the run has its data set.
        return interactions_only(both, interactions_to_fit(both, self.config), self.config.fit_parts)

    def _fit(
        self: R,
        dataset: Dataset,
        update: int | None,
        callbacks: Iterable[EpochCallback],
        run: str | Path | None,
        resume: bool,
        on_batch: BatchCallback | None,
        reporter: Reporter | None,
        progress: bool | None,
        overwrite: bool,
    ) -> R:
        """Train; `update` is the number of epochs if the training starts from what this model has learned."""
        if run is not None and resume:
            self.config = continuing(run, self.config)
        _, device = self.backend()  # first: a backend that cannot be used leaves no run directory behind
        fit = interactions_to_fit(dataset, self.config)
        self.check_fit(dataset, fit)
        if device.type == "cpu":
            check_memory(self.config, dataset, self.memory_estimate(dataset))
        reporter = reporter or Reporter.wanted(progress)
        keeper: Run | _Best
        start = None if update is None else self._warm_start(dataset, fit, update, reporter)
        stored = None if start is None or start.state is None else (start.state.tensors(), start.state.counters())
        if run is None:
            keeper = _Best(self.learned)
        elif resume:
            keeper, stored = Run.open(run, dataset, self.config, self.layout(dataset.n_users, dataset.n_items))
        else:
            keeper = Run.create(run, self.config, dataset, fit, overwrite, start)
        display = Display(reporter, self.config, can_validate(self.config, dataset))
        with keeper.lock if isinstance(keeper, Run) else nullcontext():
            with display, announced_compilation(reporter):
                followers = [display.epoch_end, *callbacks, keeper]
                state = self.train(stored, dataset, fit, followers, display.batches(on_batch), reporter)
            if isinstance(keeper, Run):
                if state.position:  # stopped within an epoch
                    keeper.save(state)
                keeper.draw_curves()
                self._become(type(self).load(keeper.path))
                self.interactions.is_pandas = dataset.is_pandas  # which files do not say
                return self
        self._tensors = self.placed(keeper.tensors or self.learned(state.tensors()))
        self._epoch, self._place, self._fitted_config = keeper.epoch or state.epoch, None, self.config
        self._interactions = interactions_only(dataset, fit, self.config.fit_parts)
        return self

    def _warm_start(self, dataset: Dataset, fit: CSR, epochs: int, reporter: Reporter) -> WarmStart:
        """Return where an update of this model begins."""
        width, factors = getattr(self.config, "factors", None), self.tensors.get("user_factors")
        if width is not None and factors is not None and factors.shape[1] != width:
            raise InputError(
                f"an update cannot change `factors`: the model has {factors.shape[1]}, not {width}; fit a new model"
            )
        tensors = self._training_tensors()
        known = Known.of(self.interactions, dataset)
        warn_of_leaks(self.interactions, dataset, known, self.config.fit_parts)
        kept = tensors.keys() > self.tensors.keys()
        origin = {"path": None if self._place is None else str(self._place.absolute()), **known.described()}
        state = self.updated_state(tensors, known, fit)
        if state is None:
            reporter.line(f"{self.config.model} has no vectors to start from: it is trained anew")
            return WarmStart(None, {**origin, "start": "anew"})
        state.first_epoch = state.epoch = self.config.last_epoch - epochs
        if not kept and self.optimiser_state:
            reporter.line("the model has no Adagrad sums (a saved model has none): they start as in a new training")
        return WarmStart(state, {**origin, "start": "factors and Adagrad sums" if kept else "factors"})

    def _training_tensors(self) -> Tensors:
        """Return what was learned, with the state of the optimiser if the checkpoint of this model is still there."""
        if self._place is not None and (self._place / checkpoint.FILE).exists():
            stored, _ = checkpoint.read_tensors(self._place / checkpoint.FILE)
            if all(name in stored and torch.equal(stored[name], own.cpu()) for name, own in self.tensors.items()):
                layout = self.layout(self.interactions.n_users, self.interactions.n_items)
                if layout is not None and stored.keys() > self.tensors.keys():
                    checkpoint.check_layout(stored, layout, self._place)
                return stored
        return self.tensors

    def refit(
        self: R,
        dataset: Dataset | None = None,
        callbacks: Iterable[EpochCallback] = (),
        run: str | Path | None = None,
        on_batch: BatchCallback | None = None,
        reporter: Reporter | None = None,
        progress: bool | None = None,
        overwrite: bool = False,
    ) -> R:
        """Return the final model: the same options and the same number of epochs, trained on all interactions.

        The options are those with which this model was fitted, even if `set_params` has changed them. The number of
        epochs is that after which this model was the best on the validation part.

        Parameters
        ----------
        dataset : Dataset, optional
            The data set that this model was trained on. Default: the interactions that the model keeps, which have no
            weights.
        callbacks, run, on_batch, reporter, progress, overwrite : see `fit`

        Examples
        --------
        >>> import polars as pl
        >>> from drm_triton import DRM, Dataset
        >>> frame = pl.DataFrame([(u, u + n) for u in range(6) for n in range(9)], ["user", "item"], orient="row")
        >>> data = Dataset.from_frame(frame)
        >>> final = DRM(factors=4, epochs=3).fit(data).refit()
        >>> data.train.nnz, final.interactions.train.nnz
        (38, 54)
        """
        kept = self.interactions
        if dataset is None:
            if self.fitted_config.weighted:
                raise InputError(
                    f"{type(self).__name__}.refit: a model keeps no weights of interactions; give the data set that it "
                    "was trained on as `dataset`"
                )
            dataset = interactions_only(kept, kept.train)  # a copy: it has no path
        elif not self.was_fit_on(dataset):
            raise InputError(f"{type(self).__name__}.refit: the model was not trained on this `dataset`")
        return self.untrained_final().fit(dataset, callbacks, run, False, on_batch, reporter, progress, overwrite)

    def untrained_final(self: R) -> R:
        """Return the model that `refit` trains, untrained."""
        if self.fitted_config.fit_on == "all":
            raise InputError("refit: the model has learned from all interactions already")
        return type(self)(self.fitted_config.on_all_interactions(self._epoch))


class _Best:
    """Callback that keeps what was learned until the best epoch, for a training without a run directory."""

    def __init__(self, learned: Callable[[Tensors], Tensors]) -> None:
        self.learned, self.tensors, self.epoch = learned, None, None

    tensors: Tensors | None
    epoch: int | None

    def __call__(self, end: EpochEnd) -> None:
        if end.state.best is not None and end.improved:
            self.tensors = {name: tensor.clone() for name, tensor in self.learned(end.state.tensors()).items()}
            self.epoch = end.state.epoch
