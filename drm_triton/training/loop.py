"""The training loop: epochs of steps, with validation after each epoch."""

import functools
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn.functional import normalize

from drm_triton.base_config import Config
from drm_triton.config import TrainConfig
from drm_triton.data.csr import CSR
from drm_triton.data.dataset import Dataset
from drm_triton.kernels.protocol import Backend
from drm_triton.names import CUT_OFFS
from drm_triton.ranking.evaluate import Ranker, evaluate, factor_ranker, measurable
from drm_triton.training.capture import captured_step
from drm_triton.training.initialize import initial_factors
from drm_triton.training.prior import ranking_factors
from drm_triton.training.state import BatchCallback, EpochCallback, EpochEnd, Progress, State
from drm_triton.training.step import (
    READ_EVERY,
    check_losses,
    diverged,
    learning_rate,
    objective_of,
    take_step,
    training_plan,
)


def train(
    state: State,
    config: TrainConfig,
    dataset: Dataset,
    fit: CSR,
    backend: Backend,
    callbacks: Iterable[EpochCallback] = (),
    on_batch: BatchCallback | None = None,
) -> State:
    """Train until `config.last_epoch` is complete, a callback ends it, or patience runs out.

    Parameters
    ----------
    state : where to start; changed in place
    fit : the interactions to train on, see `interactions_to_fit`
    callbacks : called after each epoch
    on_batch : called after each step
    """
    plan = training_plan(config, fit, state.U.device)
    objective = objective_of(config, fit.shape[1])
    captured = captured_step(state, plan, config, objective, backend)
    while state.epoch < config.last_epoch and not 0 < config.patience <= state.stale:
        began = time.perf_counter() - state.seconds
        while state.position < plan.n_lists:
            stop = min(state.position + config.batch_in_force, plan.n_lists)
            if captured is not None and stop - state.position == config.batch_in_force:
                captured()
            else:
                take_step(state, plan, stop, config, objective, backend, learning_rate(state, config, plan.n_lists))
            if state.step % READ_EVERY == 0:
                check_losses(state, config)
            state.seconds = time.perf_counter() - began
            if on_batch is not None and on_batch(state, plan.n_lists):
                check_losses(state, config)
                return state
        check_losses(state, config)
        state.seconds = time.perf_counter() - began  # a GPU is done only now
        check_factors(state, config)
        losses = {name: total / plan.n_lists for name, total in state.sums.items()}
        speed = {"lists": plan.n_lists, "lists_per_second": plan.n_lists / max(state.seconds, 1e-9)}
        rank = functools.partial(ranker_of, state, config, fit, backend)
        end = finish_epoch(state, config, dataset, fit, rank, {**losses, **speed})
        stops = [callback(end) for callback in callbacks]  # all of them, before any can end the training
        if any(stops):
            break
    return state


def ranker_of(state: State, config: TrainConfig, fit: CSR, backend: Backend) -> Ranker:
    """Return the ranker of a model in training."""
    return factor_ranker(
        backend, *ranking_factors(state.U, state.V, config, fit.popularity()), config.score_in_force, fit
    )


def finish_epoch(
    state: Progress,
    config: Config,
    dataset: Dataset,
    fit: CSR,
    rank: Callable[[], Ranker],
    measured: dict[str, float],
) -> EpochEnd:
    """Validate if it is due, and move the state to the next epoch.

    Parameters
    ----------
    state : changed in place
    fit : the interactions that were trained on
    rank : makes the ranker of the model as it is now
    measured : what else to record of the epoch
    """
    state.epoch += 1
    record: dict[str, Any] = {"epoch": state.epoch, **measured, "seconds": state.seconds}
    monitored = can_validate(config, dataset)
    improved = not monitored
    if monitored and (state.epoch % config.eval_every == 0 or state.epoch == config.last_epoch):
        cut_offs = sorted({*CUT_OFFS, int(config.monitor.rpartition("@")[2])})
        means = evaluate(rank(), fit, dataset.valid, cut_offs).means
        record.update({f"valid/{name}": value for name, value in means.items()})
        value = means[config.monitor]
        improved = state.best is None or value > state.best
        state.stale = 0 if improved else state.stale + 1
        if improved:
            state.best, state.best_epoch = value, state.epoch
    state.start_epoch()
    return EpochEnd(record, state, improved)


def initial_state(config: TrainConfig, fit: CSR, device: torch.device) -> State:
    """Return the state before the first step, on a device."""
    U, V, accumulator = initial_factors(config, fit, device)
    if config.score_in_force == "cosine":  # rows without interactions stay zero
        U, V = normalize(U), normalize(V)
    if config.precision == "bfloat16":  # to nearest; the type of the tables is up to the backend
        U, V = U.bfloat16().float(), V.bfloat16().float()
    return State(U, V, torch.full_like(U, accumulator), torch.full_like(V, accumulator))


def interactions_to_fit(dataset: Dataset, config: Config) -> CSR:
    """Return the interactions that `fit_on` names."""
    train, *others = (getattr(dataset, part) for part in config.fit_parts)
    fit: CSR = train
    for other in others:
        fit = fit.union(other)
    return fit


def can_validate(config: Config, dataset: Dataset) -> bool:
    """Return whether validation is enabled, on a part not trained on, and there are users to measure."""
    enabled = config.fit_on == "train" and config.eval_every > 0
    return enabled and len(measurable(dataset.train, dataset.valid)) > 0


def check_factors(state: State, config: TrainConfig) -> None:
    """Raise if factors or Adagrad's sums are not finite. Called before they are saved."""
    for name, table in (("user", state.U), ("item", state.V)):
        if not torch.isfinite(table.sum()):  # rows lie in the unit ball: the sum is finite only if all values are
            raise diverged(f"{name} factors are not finite in epoch {state.epoch + 1}", config)
    for name, sums in (("user", state.U_state), ("item", state.V_state)):
        # Gradients whose squares overflow: a row with an infinite sum would never move again.
        if sums.numel() and not torch.isfinite(sums.max()):
            raise diverged(f"Adagrad's sums of the {name} gradients overflow in epoch {state.epoch + 1}", config)
