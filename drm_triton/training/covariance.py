"""Covariance regularisation of all M + N factors, for the l2 score.

With X the factors stacked, T = M + N rows, m their mean and C = (X - m)^T (X - m) / T:

    printed:      L = (||C||_F - ||diag C||^2) / T         dL/dC = (C / ||C||_F - 2 diag C) / T
    decorrelate:  L = (||C||_F^2 - ||diag C||^2) / 2       dL/dC = C - diag C

    dL/dX = 2 / T (X - m) dL/dC       (the term through m is zero, because the rows of X - m sum to 0)
"""

import torch
from torch import Tensor

from drm_triton.kernels.precision import widened
from drm_triton.kernels.torch_threads import one_torch_thread
from drm_triton.names import CovForm


def covariance(U: Tensor, V: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean [d] and the covariance [d, d] of all factors."""
    T = len(U) + len(V)
    mean = (U.sum(0) + V.sum(0)) / T
    U, V = U - mean, V - mean
    return mean, (U.T @ U + V.T @ V) / T


def covariance_loss(U: Tensor, V: Tensor, form: CovForm) -> Tensor:
    """Return the loss L, a scalar."""
    _, C = covariance(U, V)
    if form == "printed":
        norm: Tensor = torch.linalg.norm(C)
        return (norm - C.diagonal().square().sum()) / (len(U) + len(V))
    return (C.square().sum() - C.diagonal().square().sum()) / 2


def covariance_gradient(U: Tensor, V: Tensor, form: CovForm) -> tuple[Tensor, Tensor]:
    """Return the gradient of L to U [M, d] and to V [N, d]."""
    T, U, V = len(U) + len(V), widened(U), widened(V)
    with one_torch_thread():  # the bits must not depend on the number of threads
        mean, C = covariance(U, V)
        dC = gradient_of_covariance(C, T, form)
        return (U - mean) @ dC * (2 / T), (V - mean) @ dC * (2 / T)


def gradient_of_covariance(C: Tensor, T: int, form: CovForm) -> Tensor:
    """Return dL/dC [d, d] of the covariance of T rows."""
    diagonal, length = torch.diag(C.diagonal()), torch.linalg.norm(C).clamp(min=1e-30)
    return (C / length - 2 * diagonal) / T if form == "printed" else C - diagonal
