"""The training loop: sample lists, take their gradients, update the rows they touch."""

import dataclasses
import math
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from drm_triton.config import TrainConfig
from drm_triton.data.dataset import CSR, Dataset
from drm_triton.errors import DrmError
from drm_triton.kernels.interface import ListPlan, Objective
from drm_triton.ranking.evaluate import MIN_TRAIN, csr_tensors, evaluate, factor_ranker, measurable
from drm_triton.training.covariance import covariance_gradient
from drm_triton.training.initialize import initial_factors

PARTS = ("loss", "hinge", "drm", "mse")
MOST_SHARING = 64  # lists treated as one group: more would gain little, and leave threads without work


@dataclass
class State:
    """All that training changes: saved and loaded, it continues as if never interrupted."""

    U: Tensor  # [M, d] user factors, and below item factors [N, d] and Adagrad's sums of squares
    V: Tensor
    U_state: Tensor
    V_state: Tensor
    epoch: int = 0  # epochs completed
    position: int = 0  # lists done of the epoch under way
    step: int = 0
    seconds: float = 0.0  # spent on the epoch under way, validation not counted
    sums: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))  # of the epoch under way
    best: float | None = None  # best value of the monitored metric so far
    best_epoch: int | None = None
    stale: int = 0  # validations since then

    def to(self, device: torch.device) -> "State":
        """Move the tensors to a device."""
        for name in ("U", "V", "U_state", "V_state"):
            setattr(self, name, getattr(self, name).to(device))
        return self


@dataclass(frozen=True)
class EpochEnd:
    """What a callback is told after each epoch; returning True from it ends the training."""

    record: dict[str, Any]  # one line of metrics.jsonl
    state: State
    improved: bool  # the monitored metric is the best so far (always, where nothing is monitored)


EpochCallback = Callable[[EpochEnd], bool | None]
BatchCallback = Callable[[State, int], bool | None]  # (state, lists in an epoch) -> True to stop here


def interactions_to_fit(dataset: Dataset, config: TrainConfig) -> CSR:
    """The interactions that `fit_on` names."""
    first, *others = (getattr(dataset, part) for part in config.fit_parts)
    fit: CSR = first
    for other in others:
        fit = fit.union(other)
    return fit


def objective_of(config: TrainConfig) -> Objective:
    """The kernels' view of a configuration."""
    parts = config.objective.split("+")
    return Objective(
        rho=config.rho,
        score=config.score,
        k=config.k,
        tau=config.tau,
        lam=config.lam,
        weight=config.weight,
        margin=config.margin,
        hinge="hinge" in parts,
        drm="drm" in parts,
        mse="mse" in parts,
    )


def list_plan(config: TrainConfig, fit: CSR, device: torch.device) -> ListPlan:
    """Which lists to train on."""
    return ListPlan(
        *csr_tensors(fit, device),
        n_items=fit.shape[1],
        rho=config.rho,
        eta=config.eta_in_force,
        seed=config.seed,
        user_sampling=config.user_sampling,
        share=config.share,
    )


def sharing(config: TrainConfig) -> int:
    """Lists that share their draws wherever a batch begins, which is what the kernels are told: 64 at most."""
    share = math.gcd(config.share, config.batch_size)
    return share if share <= MOST_SHARING else math.gcd(share, MOST_SHARING)


def initial_state(config: TrainConfig, fit: CSR, device: torch.device) -> State:
    """Untrained factors on their device."""
    U, V, accumulator = initial_factors(config, fit)
    U, V = U.to(device), V.to(device)
    return State(U, V, torch.full_like(U, accumulator), torch.full_like(V, accumulator))


def train(
    state: State,
    config: TrainConfig,
    dataset: Dataset,
    fit: CSR,
    ops: ModuleType,
    callbacks: Iterable[EpochCallback] = (),
    on_batch: BatchCallback | None = None,
) -> State:
    """Train until `config.epochs` epochs are complete, a callback stops it, or patience runs out.

    Parameters
    ----------
    state : where to start; changed in place
    fit : the interactions to train on, see `interactions_to_fit`
    ops : a backend of `drm_triton.kernels`
    callbacks : called after each epoch
    on_batch : called after each step
    """
    device = state.U.device
    plan = list_plan(config, fit, device)
    objective = objective_of(config)
    while state.epoch < config.epochs and not 0 < config.patience <= state.stale:
        began = time.perf_counter() - state.seconds
        while state.position < plan.n_lists:
            stop = min(state.position + config.batch_size, plan.n_lists)
            users, items = ops.sample_lists(plan, state.epoch, state.position, stop)
            one_step(state, users, items, config, objective, ops, learning_rate(state, config, plan.n_lists))
            state.position = stop
            state.seconds = time.perf_counter() - began
            if on_batch is not None and on_batch(state, plan.n_lists):
                return state
        end = finish_epoch(state, config, dataset, fit, ops, plan.n_lists)
        stops = [callback(end) for callback in callbacks]
        if any(stops):
            break
    return state


def warm_up(config: TrainConfig, ops: ModuleType, device: torch.device) -> None:
    """Take one step on toy data, so that compiling the kernels is not counted as training."""
    toy = CSR.from_pairs(np.array([0, 1]), np.array([0, 1]), (2, 3))
    state = initial_state(dataclasses.replace(config, init="normal"), toy, device)
    plan = list_plan(config, toy, device)
    users, items = ops.sample_lists(plan, 0, 0, plan.n_lists)
    # A small rate whatever the configuration says: one that diverges is to be told of in training, not here.
    one_step(state, users, items, config, objective_of(config), ops, lr=1e-3)
    ops.top_k(state.U, state.V, 1, config.score, csr_tensors(toy, device))


def learning_rate(state: State, config: TrainConfig, n_lists: int) -> float:
    """The rate of the step that comes next."""
    if config.schedule == "constant":
        return config.lr
    return config.lr * (1 - (state.epoch + state.position / n_lists) / config.epochs)


def one_step(
    state: State,
    users: Tensor,
    items: Tensor,
    config: TrainConfig,
    objective: Objective,
    ops: ModuleType,
    lr: float,
) -> None:
    """One batch of lists: all gradients at the factors as they stand, then one Adagrad step for each row touched."""
    U, V = state.U, state.V
    share = sharing(config)
    lists = ops.list_gradients(U, V, users, items, objective, share)
    parts = torch.stack([lists.loss, lists.hinge, lists.drm, lists.mse]).sum(1, dtype=torch.float64).tolist()
    if not math.isfinite(parts[0]):
        raise DrmError(
            f"the loss became {parts[0]} in epoch {state.epoch + 1}, step {state.step + 1} "
            f"(lr {config.lr}, tau {config.tau}); lower lr or raise tau and start again"
        )
    batch = torch.arange(len(users), dtype=torch.int32, device=U.device)
    item_entries = (items.flatten(), lists.g.flatten(), U, users)
    user_entries = (users, torch.ones_like(lists.loss), lists.user_grad, batch)
    if config.cov > 0 and state.step % config.cov_every == 0:
        (user_entries, item_entries), share = with_covariance(state, config, user_entries, item_entries), 1
    rows, coef, X, source = item_entries
    ops.update_rows(V, state.V_state, rows, coef, X, source, lr, config.score, share)
    rows, coef, X, source = user_entries
    ops.update_rows(U, state.U_state, rows, coef, X, source, lr, "dot")
    state.step += 1
    for name, value in zip(PARTS, parts, strict=True):
        state.sums[name] += value


CARRY = 2.0**-20  # coef of the covariance entries
Entries = tuple[Tensor, Tensor, Tensor, Tensor]  # rows, coef, X, source of update_rows


def with_covariance(state: State, config: TrainConfig, users: Entries, items: Entries) -> tuple[Entries, Entries]:
    """Add the covariance gradient of every row to the entries of a step, so that each row still gets one step.

    Under l2 an entry of the items means 2 coef (x - row): with x = row + gradient / (2 coef) it is the gradient. A
    small coef makes x large beside the row, so that the gradient survives the rounding of their sum.
    """
    weight = config.cov * config.cov_every
    dU, dV = (weight * dX for dX in covariance_gradient(state.U, state.V, config.cov_form))
    M, N, device = len(state.U), len(state.V), state.U.device
    every_user = torch.arange(M, dtype=torch.int32, device=device)
    every_item = torch.arange(N, dtype=torch.int32, device=device)

    rows, coef, X, source = users
    users = (
        torch.cat([rows, every_user]),
        torch.cat([coef, torch.ones_like(coef[:1]).expand(M)]),
        torch.cat([X, dU]),
        torch.cat([source, every_user + len(source)]),
    )
    rows, coef, X, source = items
    items = (
        torch.cat([rows, every_item]),
        torch.cat([coef, torch.full_like(coef[:1], CARRY).expand(N)]),
        torch.cat([X, state.V + dV / (2 * CARRY)]),
        torch.cat([source.repeat_interleave(len(rows) // len(source)), every_item + M]),
    )
    return users, items


def finish_epoch(
    state: State, config: TrainConfig, dataset: Dataset, fit: CSR, ops: ModuleType, n_lists: int
) -> EpochEnd:
    """Check the factors, validate if it is time, and move the state to the next epoch."""
    check_factors(state, config)
    state.epoch += 1
    record: dict[str, Any] = {"epoch": state.epoch}
    record.update({name: total / n_lists for name, total in state.sums.items()})
    record.update(lists=n_lists, seconds=state.seconds, lists_per_second=n_lists / max(state.seconds, 1e-9))
    monitored = validates(config, dataset)
    improved = not monitored
    if monitored and (state.epoch % config.eval_every == 0 or state.epoch == config.epochs):
        cut_offs = sorted({10, 50, int(config.monitor.rpartition("@")[2])})
        ranker = factor_ranker(ops, state.U, state.V, config.score)
        means = evaluate(ranker, fit, dataset.valid, cut_offs).means
        record.update({f"valid/{name}": value for name, value in means.items()})
        value = means[config.monitor]
        improved = state.best is None or value > state.best
        state.stale = 0 if improved else state.stale + 1
        if improved:
            state.best, state.best_epoch = value, state.epoch
    state.position, state.seconds, state.sums = 0, 0.0, dict.fromkeys(PARTS, 0.0)
    return EpochEnd(record, state, improved)


def check_factors(state: State, config: TrainConfig) -> None:
    """Raise if factors are not finite: to be asked before they are saved."""
    for name, table in (("user", state.U), ("item", state.V)):
        if not torch.isfinite(table.sum()):  # of rows in the unit ball: finite only if they all are, and no temporaries
            raise DrmError(
                f"{name} factors are not finite in epoch {state.epoch + 1} "
                f"(lr {config.lr}, tau {config.tau}); lower lr or raise tau and start again"
            )


def validates(config: TrainConfig, dataset: Dataset) -> bool:
    """Whether validation is asked for, on a part not trained on, and possible: there are users to measure."""
    asked = config.fit_on == "train" and config.eval_every > 0
    return asked and len(measurable(dataset.train, dataset.valid)) > 0


def warn_if_unvalidated(config: TrainConfig, dataset: Dataset) -> None:
    """Tell where validation is asked for and the data set has a part for it that does not serve."""
    if config.fit_on == "train" and config.eval_every > 0 and dataset.valid.nnz and not validates(config, dataset):
        warnings.warn(
            f"training without validation: no user has both validation items and at least {MIN_TRAIN} training "
            "interactions (a split by users has none); the best epoch will be the last",
            UserWarning,
            stacklevel=3,
        )


def memory_estimate(dataset: Dataset, config: TrainConfig) -> dict[str, int]:
    """Bytes that training will hold: factors, Adagrad's state, interactions, and one batch of lists."""
    rows, n = dataset.n_users + dataset.n_items, config.rho + config.eta_in_force
    table = 4 * rows * config.factors
    interactions = sum(getattr(dataset, part).nnz for part in config.fit_parts)
    lists, share = min(config.batch_size, interactions), sharing(config)
    sums = n * config.factors // share if share > 1 else 0  # of the entries that lists share
    return {
        "factors": table,
        "adagrad state": table,
        "interactions": 4 * interactions + 8 * (dataset.n_users + 1),
        "batch": 4 * lists * (4 * n + 2 * config.factors + sums),
    }
