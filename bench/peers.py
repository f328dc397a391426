"""Models of other libraries with one signature: fit(train, seed, threads, **options) -> factors.

All of them rank by an inner product, so a trained model is a pair (U, V). The item biases of LightFM become a column of
V, with a constant column of U.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from drm_triton.data.dataset import CSR

Factors = tuple[Tensor, Tensor]


def als(train: CSR, seed: int, threads: int, iterations: int, **options: Any) -> Factors:
    """Train weighted matrix factorisation by alternating least squares (implicit)."""
    from implicit.cpu.als import AlternatingLeastSquares
    from threadpoolctl import threadpool_limits

    model = AlternatingLeastSquares(iterations=iterations, random_state=seed, num_threads=threads, **options)
    with threadpool_limits(1, "blas"):  # as implicit recommends
        model.fit(train.to_scipy().copy(), show_progress=False)  # memory-mapped arrays are read-only
    return _factors(model.user_factors, model.item_factors)


def bpr(train: CSR, seed: int, threads: int, iterations: int, **options: Any) -> Factors:
    """Train Bayesian personalised ranking (implicit)."""
    from implicit.cpu.bpr import BayesianPersonalizedRanking

    model = BayesianPersonalizedRanking(iterations=iterations, random_state=seed, num_threads=threads, **options)
    model.fit(train.to_scipy().copy(), show_progress=False)  # memory-mapped arrays are read-only
    return _factors(model.user_factors, model.item_factors)


def warp(
    train: CSR,
    seed: int,
    threads: int,
    epochs: int,
    after_epoch: Callable[[Factors], None] | None = None,
    **options: Any,
) -> Factors:
    """Train WARP with Adagrad (LightFM). `after_epoch` is called with the factors after each epoch."""
    from lightfm import LightFM

    model = LightFM(loss="warp", random_state=seed, **options)
    interactions = train.to_scipy().copy().tocoo()
    for _ in range(epochs):
        model.fit_partial(interactions, epochs=1, num_threads=threads)
        if after_epoch is not None:
            after_epoch(_lightfm_factors(model))
    return _lightfm_factors(model)


def _lightfm_factors(model: Any) -> Factors:
    U = np.column_stack([model.user_embeddings, np.ones(len(model.user_embeddings), np.float32)])
    return _factors(U, np.column_stack([model.item_embeddings, model.item_biases]))


def _factors(U: Any, V: Any) -> Factors:
    user_factors, item_factors = (torch.from_numpy(np.ascontiguousarray(table, dtype=np.float32)) for table in (U, V))
    return user_factors, item_factors
