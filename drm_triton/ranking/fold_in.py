"""Fold-in: the vector of a new user, who is not in the training data, from the items the user liked.

The item factors stay fixed. The vector is fitted with the training objective: lists of the user's items and sampled
negatives, or the whole catalogue if the model was trained on that, Adagrad steps, projection as in training. It starts
in the direction of the mean of the liked items' factors, so a few steps are enough. Each step uses the mean gradient of
one epoch of the user's lists.

A vector depends only on the history, to the bit: not on other users folded in with it, on the order of the items, or on
the number of threads. For that, each user's lists are sampled as if the user were alone. Users share only the calls of
the kernels, which process every list and every row independently. A list costs the same as in training with `share` 1.
"""

import zlib
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from drm_triton.config import TrainConfig
from drm_triton.data.csr import CSR
from drm_triton.kernels.catalogue import USERS_PER_TASK
from drm_triton.kernels.devices import to_device
from drm_triton.kernels.protocol import Backend, CatalogueBatch, GradientTerms, ListPlan, Objective, row_score
from drm_triton.training.initialize import SPECTRAL_NORM
from drm_triton.training.step import objective_of

# Two or four times the steps, or half or twice the learning rate, do not improve the ranking.
STEPS = 4
LR = 0.3  # learning rate of the first step; it falls to 0 as in training
MAX_LISTS = 128  # lists of a user per step: a sample of a long history gives about the same gradient
USERS_PER_BATCH = 512  # users fitted at once: bounds the memory of their lists


def fold_in(V: Tensor, histories: CSR, config: TrainConfig, backend: Backend, prior: Tensor | None = None) -> Tensor:
    """Fit the vectors of new users to fixed item factors.

    Parameters
    ----------
    V : float32 [N, d] item factors
    histories : CSR [B, N] items of each user; a user without items gets the zero vector
    config : configuration of the training
    backend : backend of `drm_triton.kernels`
    prior : float32 [N], added to the scores of the items if the model has a popularity prior

    Returns
    -------
    float32 [B, d]
    """
    U = mean_direction(V, histories)
    if config.score_in_force == "cosine":
        U = normalize(U)
    degrees = histories.degrees()
    # A user without items has no positives, and a user with all items no negatives.
    eligible = np.flatnonzero((degrees > 0) & (degrees < len(V)))
    for start in range(0, len(eligible), USERS_PER_BATCH):
        users = eligible[start : start + USERS_PER_BATCH]
        rows = to_device(torch.from_numpy(users), V.device)
        U[rows] = _fit(U[rows], V, histories.take(users), config, backend, prior)
    return U


def mean_direction(V: Tensor, histories: CSR) -> Tensor:
    """Return the mean of each user's item factors, scaled to the length of spectral initialisation: [B, d]."""
    indptr, indices = histories.tensors(V.device)
    total = torch.nn.functional.embedding_bag(indices, V, indptr, mode="sum", include_last_offset=True)
    lengths: Tensor = total.norm(dim=1, keepdim=True).clamp(min=1e-30)
    return SPECTRAL_NORM * total / lengths


def _fit(U: Tensor, V: Tensor, histories: CSR, config: TrainConfig, backend: Backend, prior: Tensor | None) -> Tensor:
    """Fit the vectors U [B, d] to the items of each user, in place; return them."""
    # As after spectral initialisation, Adagrad starts at 1: the first step is then proportional to the gradient, and
    # does not overwrite the initial direction.
    state, score, objective = torch.ones_like(U), row_score(config.score_in_force), objective_of(config, len(V))
    if config.negatives_in_force == "all":
        steps = _catalogue_terms(U, V, histories, objective, backend, prior)
    else:
        steps = _list_terms(U, V, histories, config, objective, backend)
    for step, terms in enumerate(steps):
        backend.update_rows(U, state, terms, LR * (1 - step / STEPS), score)
    return U


def _catalogue_terms(
    U: Tensor, V: Tensor, histories: CSR, objective: Objective, backend: Backend, prior: Tensor | None
) -> Iterator[GradientTerms]:
    """Yield the gradient of each step, at the vectors as they are then. All other items are the negatives."""
    batch = _catalogue(histories, V.device)._replace(prior=prior)
    users, weights = batch.users[: len(U)], batch.indptr.diff()[: len(U)].to(U.dtype).rsqrt()
    for _ in range(STEPS):
        gradients = backend.catalogue_gradients(U, V, batch, objective, fixed_items=True).user_grad
        yield GradientTerms.of_rows(users, gradients[: len(U)], weights)


def _list_terms(
    U: Tensor, V: Tensor, histories: CSR, config: TrainConfig, objective: Objective, backend: Backend
) -> Iterator[GradientTerms]:
    """Yield the gradient of each step, at the vectors as they are then: the mean over lists with sampled negatives."""
    plan, seeds = _plan(histories, config, V.device)
    for step in range(STEPS):
        batch = backend.sample_users(plan, seeds, step, MAX_LISTS)
        gradients = backend.list_gradients(U, V, batch, objective).user_grad
        users = batch.users.long()
        lists = torch.zeros(len(U), dtype=torch.int64, device=U.device).index_add_(0, users, torch.ones_like(users))
        yield GradientTerms.of_rows(batch.users, gradients, (1 / lists)[users])


def _catalogue(histories: CSR, device: torch.device) -> CatalogueBatch:
    """Return users whose negatives are all other items.

    Users without items follow up to a multiple of USERS_PER_TASK. All products then have the same shape, and the
    rounding of one user does not depend on the number of the others.
    """
    indptr, indices = histories.tensors(device)
    padding = -histories.shape[0] % USERS_PER_TASK
    users = torch.arange(histories.shape[0], dtype=torch.int32, device=device)
    return CatalogueBatch(
        torch.cat([users, users.new_zeros(padding)]), torch.cat([indptr, indptr[-1:].expand(padding)]), indices
    )


def _plan(histories: CSR, config: TrainConfig, device: torch.device) -> tuple[ListPlan, Tensor]:
    """Return the plan of the users' lists, and a seed for each user that is derived from the user's items.

    With the same seed for all users, all would get the same few negatives, and the error of that sample would not
    average out over users.
    """
    rows = (histories.row(user).astype("<i4") for user in range(histories.shape[0]))
    seeds = torch.tensor([config.seed ^ zlib.crc32(row.tobytes()) for row in rows])
    indptr, indices = histories.tensors(device)
    n_items = histories.shape[1]
    return ListPlan(indptr, indices, n_items, config.rho, config.eta_for(n_items)), to_device(seeds, device)
