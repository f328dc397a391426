"""One training step on a batch of lists: compute the gradients, then update the rows that they touch."""

import math
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from drm_triton.config import TrainConfig
from drm_triton.data.csr import CSR
from drm_triton.errors import DrmError
from drm_triton.kernels.batches import ListBatch
from drm_triton.kernels.catalogue import CataloguePlan
from drm_triton.kernels.protocol import Backend, CatalogueBatch, GradientTerms, ListPlan, Objective, Rounding, row_score
from drm_triton.kernels.streams import ITEM_TABLE, USER_TABLE
from drm_triton.kernels.torch_threads import one_torch_thread
from drm_triton.names import LOSSES
from drm_triton.training.covariance import covariance_gradient
from drm_triton.training.prior import popularity_prior
from drm_triton.training.state import LOSS_SUMS, State
from drm_triton.training.weights import training_weights

LARGE_WEIGHT = 1e3  # of a part of the loss; a larger one may be why a training diverges
READ_EVERY = 64  # steps between two looks at the losses on a GPU


def take_step(
    state: State,
    plan: ListPlan | CataloguePlan,
    stop: int,
    config: TrainConfig,
    objective: Objective,
    backend: Backend,
    lr: float,
) -> None:
    """Train on the lists of the current epoch from `state.position` to `stop` - 1."""
    with one_torch_thread() if backend.name == "cpu" else nullcontext():  # the CPU kernels have threads of their own
        if isinstance(plan, CataloguePlan):
            users = plan.batch(state.epoch, state.position, stop)
            catalogue_step(state, users, config, objective, backend, lr)
        else:
            lists = backend.sample_lists(plan, state.epoch, state.position, stop)
            train_step(state, lists, config, objective, backend, lr, plan.list_weights(lists))
    state.position = stop


def catalogue_step(
    state: State,
    batch: CatalogueBatch,
    config: TrainConfig,
    objective: Objective,
    backend: Backend,
    lr: float | Tensor,
) -> None:
    """Compute all gradients of a batch at the current factors, then take one Adagrad step for each row touched.

    The list of a user is the whole catalogue: every item takes a step, or every item of the pool.
    """
    U, V = state.U, state.V
    pool = batch.pool
    gradients = backend.catalogue_gradients(U, V if pool is None else V[pool.items.long()], batch, objective)
    nothing = torch.zeros_like(gradients.softmax)
    losses = dict.fromkeys(LOSS_SUMS, nothing) | {"loss": gradients.softmax, "softmax": gradients.softmax}
    lr = add_losses(state, config, losses, lr)
    dU, dV = dense_gradients(state, config)
    if pool is None:
        item_terms, dV = GradientTerms.none(V), gradients.item_grad if dV is None else gradients.item_grad + dV
    else:
        item_terms = GradientTerms.of_rows(pool.items, gradients.item_grad)
    user_terms = GradientTerms.of_rows(batch.users, gradients.user_grad)
    score = row_score(config.score_in_force)  # the gradients of items are complete too
    backend.update_rows(V, state.V_state, item_terms, lr, score, dV, rounding(config, state.step, ITEM_TABLE))
    backend.update_rows(U, state.U_state, user_terms, lr, score, dU, rounding(config, state.step, USER_TABLE))
    state.step += 1


def train_step(
    state: State,
    batch: ListBatch,
    config: TrainConfig,
    objective: Objective,
    backend: Backend,
    lr: float | Tensor,
    weights: Tensor | None = None,
    number: Tensor | None = None,
) -> None:
    """Like `catalogue_step`, for lists with sampled negatives: the items of the lists take a step.

    The loss of each list is multiplied by its weight, if `weights` [B] are given. `number` is that of the step on the
    device, in place of `state.step`.
    """
    U, V = state.U, state.V
    losses, user_grad, item_terms = backend.list_terms(U, V, batch, objective, weights)
    lr = add_losses(state, config, losses, lr)
    dU, dV = dense_gradients(state, config)
    user_terms = GradientTerms.of_rows(batch.users, user_grad)
    step, score = state.step if number is None else number, config.score_in_force
    # V before U, which the item terms refer to.
    backend.update_rows(V, state.V_state, item_terms, lr, score, dV, rounding(config, step, ITEM_TABLE))
    backend.update_rows(U, state.U_state, user_terms, lr, row_score(score), dU, rounding(config, step, USER_TABLE))
    state.step += 1


def rounding(config: TrainConfig, step: int | Tensor, table: int) -> Rounding | None:
    """Return how the rows of a table are rounded in a step, None if they are float32."""
    return Rounding(config.seed, step, table) if config.precision == "bfloat16" else None


def dense_gradients(state: State, config: TrainConfig) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of the covariance regularisation to U and V, or None if there is none in this step."""
    if config.cov == 0 or state.step % config.cov_every:
        return None, None
    weight = config.cov * config.cov_every  # one gradient stands for those of the steps between
    dU, dV = covariance_gradient(state.U, state.V, config.cov_form)
    return weight * dU, weight * dV


def add_losses(state: State, config: TrainConfig, losses: dict[str, Tensor], lr: float | Tensor) -> float | Tensor:
    """Add the losses of lists, each [B], to the sums of the epoch; return the rate of the step.

    On the CPU, a loss that is not finite raises in the step in which it appears. On a GPU, the host would have to wait
    for it in every step. There the losses are added up on the GPU and read once in READ_EVERY steps, and from the step
    on in which one is not finite, the rate is NaN, which makes every update change nothing.
    """
    sums = torch.stack([losses[name] for name in LOSS_SUMS]).sum(1, dtype=torch.float64)
    if state.unread is None:
        state.unread = torch.zeros_like(sums)
    state.unread += sums
    if reads_at_once(state.U.device):
        check_losses(state, config)
        return lr
    return lr + 0 * state.unread[0]


def reads_at_once(device: torch.device) -> bool:
    """Return whether the host reads numbers on a device without waiting: it is not a GPU."""
    return device.type == "cpu"


def check_losses(state: State, config: TrainConfig) -> None:
    """Read the losses of the steps so far, and raise if one was not finite."""
    state.read_losses()
    if not math.isfinite(state.sums["loss"]):
        when = f"in epoch {state.epoch + 1}, step {state.step + 1}"
        if not reads_at_once(state.U.device):
            when = f"in epoch {state.epoch + 1}, at most {READ_EVERY} steps before step {state.step + 1}"
        raise diverged(f"the loss became {state.sums['loss']} {when}", config)


def diverged(what: str, config: TrainConfig) -> DrmError:
    """Return the error for a training that cannot go on."""
    return DrmError(f"{what} (`lr` {config.lr}); start again with {smaller_steps(config)}")


def smaller_steps(config: TrainConfig) -> str:
    """Return which options make steps smaller, for messages."""
    raised = [name for name in ("temperature", "tau") if name not in config.idle()]
    lowered = [name for name in ("lam", "cov") if name not in config.idle() and getattr(config, name) > LARGE_WEIGHT]
    options = [
        "a lower `lr`",
        *(f"a lower `{name}`" for name in lowered),
        *(f"a higher `{name}`" for name in raised[:1]),
    ]
    return " or ".join(options)


def learning_rate(state: State, config: TrainConfig, n_lists: int) -> float:
    """Return the learning rate of the next step."""
    return float(rate_at(config, state.epoch, state.position, n_lists, state.first_epoch))


def rate_at(config: TrainConfig, epoch: Any, position: Any, n_lists: int, first_epoch: int = 0) -> Any:
    """Return the learning rate at a position in an epoch: a number, or a tensor if they are numbers on a device.

    An update takes the epochs after `first_epoch`, and its rate falls from `lr` to 0 over them.
    """
    if config.schedule == "constant":
        return config.lr
    last = config.last_epoch if first_epoch else config.epochs
    passed = epoch - first_epoch if first_epoch else epoch  # on a GPU, each operation is a launch
    return config.lr * (1 - (passed + position / n_lists) / (last - first_epoch))


def objective_of(config: TrainConfig, n_items: int) -> Objective:
    """Return the objective that a configuration describes, for a catalogue of `n_items`."""
    on: dict[str, Any] = {**dict.fromkeys(LOSSES, False), **dict.fromkeys(config.parts, True)}
    return Objective(
        rho=config.rho,
        score=config.score_in_force,
        k=config.k_in_force,
        tau=config.tau,
        lam=config.lam,
        weight=config.weight,
        margin=config.margin,
        temperature=config.temperature_for(n_items),
        at_k=config.objective == "softmax@k",
        **on,
    )


def training_plan(config: TrainConfig, fit: CSR, device: torch.device) -> ListPlan | CataloguePlan:
    """Return the plan of the lists that a configuration trains on."""
    if config.negatives_in_force == "all":
        host = torch.device("cpu")
        weights, prior = training_weights(config, fit, host), popularity_prior(config, fit.popularity())
        return CataloguePlan(*fit.tensors(host), fit.shape[1], config.seed, config.pool, weights, prior, device)
    return list_plan(config, fit, device)


def list_plan(config: TrainConfig, fit: CSR, device: torch.device, begin: Tensor | None = None) -> ListPlan:
    """Return the plan of lists with sampled negatives. With `begin`, it has no interactions, see `ListPlan.holding`."""
    indptr, indices = fit.tensors(device)
    return ListPlan(
        indptr,
        indices if begin is None else indices[:0],
        begin=begin,
        n_items=fit.shape[1],
        rho=config.rho,
        eta=config.eta_for(fit.shape[1]),
        seed=config.seed,
        user_sampling=config.user_sampling,
        share=config.share,
        weights=training_weights(config, fit, device),
    )
