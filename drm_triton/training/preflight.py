"""What happens before training: an estimate of memory, a warning about validation, and compiling the kernels."""

import dataclasses

import numpy as np
import torch

from drm_triton.base_config import Config
from drm_triton.config import TrainConfig
from drm_triton.data.csr import CSR
from drm_triton.data.dataset import Dataset
from drm_triton.errors import InputError, warn
from drm_triton.kernels import get_backend
from drm_triton.kernels.catalogue import needs_pool, user_blocks
from drm_triton.kernels.precision import table_type
from drm_triton.kernels.protocol import Backend
from drm_triton.machine import memory
from drm_triton.names import MIN_TRAIN, BackendName
from drm_triton.training.loop import can_validate, initial_state
from drm_triton.training.step import objective_of, take_step, training_plan

FREE_SHARE = 0.8  # of the free memory that a training may need


def memory_estimate(dataset: Dataset, config: TrainConfig) -> dict[str, int]:
    """Return the bytes that training holds: factors, Adagrad's state, interactions, and one batch of lists."""
    rows, n = dataset.n_users + dataset.n_items, config.rho + config.eta_for(dataset.n_items)
    factor_bytes = 4
    if config.precision == "bfloat16":  # the only option whose memory depends on the backend
        factor_bytes = table_type(config.precision, backend_name(config)).itemsize
    interactions = count_interactions(dataset, config)
    if config.negatives_in_force == "all":
        n_lists = min(config.batch_in_force, dataset.n_users)
        n_items = dataset.n_items
        if needs_pool(n_items, config.pool):  # the pool, and positives that are not in it
            n_items = min(config.pool + n_lists * interactions // dataset.n_users, n_items)
        scores = user_blocks(n_lists, n_items)[0].stop * n_items
        item_tables = 3 if factor_bytes == 4 else 4  # and the items of the step in float32
        batch = 4 * (scores + item_tables * n_items * config.factors + 3 * n_lists * config.factors)
        per_weight = 4
    else:
        n_lists = min(config.batch_in_force, interactions)
        shared_sums = n * config.factors // config.share if config.share > 1 else 0  # gradients summed over a group
        batch = 4 * n_lists * (4 * n + 2 * config.factors + shared_sums)
        per_weight = 4 + 8  # with a key
    per_interaction = 4 + (0 if config.interaction_weights == "off" else per_weight)
    return {
        "factors": factor_bytes * rows * config.factors,
        "adagrad state": 4 * rows * config.factors,
        "interactions": per_interaction * interactions + 8 * (dataset.n_users + 1),
        "batch": batch,
    }


def backend_name(config: TrainConfig) -> BackendName:
    """Return the backend of a training, also if the options leave it to the machine."""
    return get_backend().name if config.backend == "auto" else config.backend


def count_interactions(dataset: Dataset, config: TrainConfig) -> int:
    """Return the number of interactions to train on."""
    return sum(getattr(dataset, part).nnz for part in config.fit_parts)


def check_memory(config: Config, dataset: Dataset, estimate: dict[str, int]) -> None:
    """Raise if a training needs more memory than is free: the sum of an estimate."""
    needed, free = sum(estimate.values()), memory()["free"]
    if free is not None and needed > FREE_SHARE * free:
        fewer = "choose fewer `factors`, " if hasattr(config, "factors") else ""
        raise InputError(
            f"{config.model} needs {gibibytes(needed)} of memory for {dataset.n_users:,} users and "
            f"{dataset.n_items:,} items, but only {gibibytes(free)} are free; {fewer}keep fewer users or items, or use "
            "another `model`"
        )


def gibibytes(n_bytes: float) -> str:
    """Return a size in words.

    Examples
    --------
    >>> gibibytes(3 * 2**30), gibibytes(5 * 2**20)
    ('3.0 GiB', '5.0 MiB')
    """
    return f"{n_bytes / 2**30:,.1f} GiB" if n_bytes >= 2**30 else f"{n_bytes / 2**20:,.1f} MiB"


def warn_if_unvalidated(config: Config, dataset: Dataset) -> None:
    """Warn if validation is enabled and the data set has a validation part, but no user can be measured on it."""
    enabled = config.fit_on == "train" and config.eval_every > 0
    if enabled and dataset.valid.nnz and not can_validate(config, dataset):
        warn(
            f"training without validation: no user has both validation items and at least {MIN_TRAIN} training "
            "interactions (a split by users has none); the best epoch will be the last"
        )


def warn_of_idle_options(config: TrainConfig) -> None:
    """Warn of options that were set and do not change the training."""
    for name in config.without_effect():
        if name in ("rho", "eta", "share", "user_sampling", "pool"):
            cause = f"`negatives` {config.negatives_in_force}"
        elif name == "weight" and "drm" in config.objective:
            cause = f"`k` {config.k_in_force}: there is only one rank"
        elif name.startswith("cov"):
            cause = "`cov` 0"
        elif name == "interaction_weight_cap":
            cause = "`interaction_weights` off"
        else:
            cause = f"`objective` {config.objective}"
        warn(f"`{name}` has no effect with {cause}")


def warm_up(config: TrainConfig, backend: Backend, device: torch.device) -> None:
    """Take a step of each kind on toy data, so that the time to compile the kernels does not count as training."""
    toy = CSR.from_pairs(np.array([0, 1]), np.array([0, 1]), (2, 3), np.ones(2, dtype=np.float32))
    state = initial_state(dataclasses.replace(config, init="normal"), toy, device)
    state = state.to(device, table_type(config.precision, backend.name))
    plan = training_plan(config, toy, device)
    # A small rate whatever the configuration says: a rate that diverges must be reported by training, not here.
    # With covariance regularisation, step 0 has dense gradients and step 1 (mostly) none.
    for step in (0, 1) if config.cov else (0,):
        state.position, state.step = 0, step
        take_step(state, plan, plan.n_lists, config, objective_of(config, toy.shape[1]), backend, lr=1e-3)
    backend.top_k(state.U, backend.pack_items(state.V, config.score_in_force), 1, toy.tensors(device))
