"""The models that bench.quality implements itself: hand-checked values, invariants and equal forms."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from drm_triton.bench import rivals
from drm_triton.data.csr import CSR
from drm_triton.models.ease import ease_weights
from drm_triton.models.rp3beta import rp3beta_weights

# A case of four users and five items.
CASE = CSR.from_pairs(np.array([0, 0, 0, 1, 1, 2, 2, 3, 3, 3]), np.array([0, 1, 3, 1, 2, 0, 4, 2, 3, 4]), (4, 5))


def random_interactions(n_users: int, n_items: int, density: float = 0.1) -> CSR:
    rows, columns = np.nonzero(np.random.default_rng(0).random((n_users, n_items)) < density)
    return CSR.from_pairs(rows, columns, (n_users, n_items))


def dense(train: CSR) -> Any:
    return train.to_scipy(np.float64).toarray()


def test_ease_and_rp3beta_are_those_of_the_library() -> None:
    train = random_interactions(60, 40)
    ease = rivals.ease(train, 0, 1, lam=5.0).scores(train)
    assert (ease == ease_weights(train, 5.0).scores(train)).all()
    rp3beta = rivals.rp3beta(train, 0, 1, alpha=0.7, beta=0.4, k=5, normalize=True).scores(train)
    np.testing.assert_allclose(rp3beta, dense(train) @ rp3beta_weights(train, 0.7, 0.4, 5, True).toarray(), atol=1e-6)


def ials_loss(U: Tensor, V: Tensor, train: CSR, alpha0: float, lam: float) -> Tensor:
    s, X = U @ V.T, torch.from_numpy(dense(train))
    user_ridge, item_ridge = (X.sum(axis) + alpha0 * X.shape[axis] for axis in (1, 0))
    ridge = (user_ridge @ U.square()).sum() + (item_ridge @ V.square()).sum()
    return (X * (s - 1) ** 2).sum() + alpha0 * s.square().sum() + lam * ridge


def test_ials_lowers_the_loss_with_each_epoch_and_repeats() -> None:
    train = random_interactions(50, 70)
    factors = [rivals.ials(train, 0, 1, factors=8, alpha0=0.2, lam=0.05, epochs=epochs) for epochs in (1, 2, 3, 3)]
    losses = [ials_loss(U.double(), V.double(), train, 0.2, 0.05).item() for U, V in factors]
    assert losses[0] > losses[1] > losses[2] == losses[3]
