"""The rivals at their own good settings, behind one signature: fit(train, seed, threads, **options) -> factors.

Every model of these libraries ranks by an inner product, so a trained rival is a pair (U, V); LightFM's biases become
a constant column of U and a column of V.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from drm_triton.data.dataset import CSR

Factors = tuple[Tensor, Tensor]


def als(train: CSR, seed: int, threads: int, iterations: int, **options: Any) -> Factors:
    """Weighted matrix factorisation by alternating least squares (implicit)."""
    from implicit.cpu.als import AlternatingLeastSquares
    from threadpoolctl import threadpool_limits

    model = AlternatingLeastSquares(iterations=iterations, random_state=seed, num_threads=threads, **options)
    with threadpool_limits(1, "blas"):  # as the library itself recommends
        model.fit(train.to_scipy().copy(), show_progress=False)  # memory-mapped arrays are read-only
    return _factors(model.user_factors, model.item_factors)


def bpr(train: CSR, seed: int, threads: int, iterations: int, **options: Any) -> Factors:
    """Bayesian personalised ranking (implicit)."""
    from implicit.cpu.bpr import BayesianPersonalizedRanking

    model = BayesianPersonalizedRanking(iterations=iterations, random_state=seed, num_threads=threads, **options)
    model.fit(train.to_scipy().copy(), show_progress=False)  # memory-mapped arrays are read-only
    return _factors(model.user_factors, model.item_factors)


def warp(
    train: CSR, seed: int, threads: int, epochs: int, each: Callable[[Factors], None] | None = None, **options: Any
) -> Factors:
    """WARP with Adagrad (LightFM); `each` sees the factors after each epoch."""
    from lightfm import LightFM

    model = LightFM(loss="warp", random_state=seed, **options)
    interactions = train.to_scipy().copy().tocoo()
    for _ in range(epochs):
        model.fit_partial(interactions, epochs=1, num_threads=threads)
        if each is not None:
            each(_lightfm_factors(model))
    return _lightfm_factors(model)


def _lightfm_factors(model: Any) -> Factors:
    U = np.column_stack([model.user_embeddings, np.ones(len(model.user_embeddings), np.float32)])
    return _factors(U, np.column_stack([model.item_embeddings, model.item_biases]))


def _factors(U: Any, V: Any) -> Factors:
    return tuple(torch.from_numpy(np.ascontiguousarray(X, dtype=np.float32)) for X in (U, V))  # type: ignore[return-value]
