"""One training step on a batch of lists: compute the gradients, then update the rows that they touch."""

import math

import torch

from drm_triton.config import TrainConfig
from drm_triton.data.csr import CSR
from drm_triton.errors import DrmError
from drm_triton.kernels.protocol import Backend, GradientTerms, ListBatch, ListPlan, Objective
from drm_triton.training.covariance import covariance_gradient
from drm_triton.training.state import LOSS_PARTS, State


def train_step(
    state: State, batch: ListBatch, config: TrainConfig, objective: Objective, backend: Backend, lr: float
) -> None:
    """Compute all gradients of a batch at the current factors, then take one Adagrad step for each row touched."""
    U, V = state.U, state.V
    gradients = backend.list_gradients(U, V, batch, objective)
    parts = torch.stack([gradients.loss, gradients.hinge, gradients.drm, gradients.mse])
    losses = parts.sum(1, dtype=torch.float64).tolist()
    if not math.isfinite(losses[0]):
        raise DrmError(
            f"the loss became {losses[0]} in epoch {state.epoch + 1}, step {state.step + 1} "
            f"(`lr` {config.lr}, `tau` {config.tau}); lower `lr` or raise `tau` and start again"
        )
    dU = dV = None
    if config.cov > 0 and state.step % config.cov_every == 0:
        weight = config.cov * config.cov_every  # one gradient stands for those of the steps between
        dU, dV = (weight * gradient for gradient in covariance_gradient(U, V, config.cov_form))
    item_terms = GradientTerms.of_items(batch, gradients.g, U)
    user_terms = GradientTerms.of_users(batch.users, gradients.user_grad)
    backend.update_rows(V, state.V_state, item_terms, lr, config.score, dV)  # before U, which the item terms refer to
    backend.update_rows(U, state.U_state, user_terms, lr, "dot", dU)
    state.step += 1
    for name, value in zip(LOSS_PARTS, losses, strict=True):
        state.sums[name] += value


def learning_rate(state: State, config: TrainConfig, n_lists: int) -> float:
    """Return the learning rate of the next step."""
    if config.schedule == "constant":
        return config.lr
    return config.lr * (1 - (state.epoch + state.position / n_lists) / config.epochs)


def objective_of(config: TrainConfig) -> Objective:
    """Return the objective that a configuration describes."""
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
    """Return the plan of the lists that a configuration trains on."""
    return ListPlan(
        *fit.tensors(device),
        n_items=fit.shape[1],
        rho=config.rho,
        eta=config.eta_in_force,
        seed=config.seed,
        user_sampling=config.user_sampling,
        share=config.share,
    )
