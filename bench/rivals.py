"""Strong simple models to compare with: EASE, RP3beta and iALS.

They have the signature of the models in `peers`: fit(train, seed, threads, **options). The item-item models EASE and
RP3beta are those of the library. They return weights and have no randomness. iALS returns factors.

n_u and n_i are the numbers of interactions of user u and of item i.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from drm_triton.bench.peers import Factors
from drm_triton.data.csr import CSR
from drm_triton.kernels.cpu.runtime.threads import set_threads
from drm_triton.models.ease import ease_weights
from drm_triton.models.rp3beta import rp3beta_weights
from drm_triton.ranking.item_index import ItemWeights

LIST_ENTRIES = 1 << 22  # entries of the item rows that iALS gathers at the same time


def ease(train: CSR, seed: int, threads: int, lam: float) -> ItemWeights:
    """Fit EASE."""
    set_threads(threads)
    return ease_weights(train, lam)


def rp3beta(train: CSR, seed: int, threads: int, alpha: float, beta: float, k: int, normalize: bool) -> ItemWeights:
    """Fit RP3beta."""
    set_threads(threads)
    return ItemWeights(sparse=rp3beta_weights(train, alpha, beta, k, normalize))


def ials(train: CSR, seed: int, threads: int, factors: int, alpha0: float, lam: float, epochs: int = 16) -> Factors:
    """Fit iALS with a ridge that grows with the row's weight (Rendle et al. 2022), by exact alternating steps.

    The loss is sum_{(u,i) in X} (s_ui - 1)^2 + alpha0 sum_{u,i} s_ui^2 + sum_u L_u ||U_u||^2 + sum_i L_i ||V_i||^2,
    with s = U V^T, L_u = lam (n_u + alpha0 N) and L_i = lam (n_i + alpha0 M).
    """
    users, items = train, CSR.from_any(train.to_scipy().T.tocsr(), train.shape[0])
    generator = torch.Generator().manual_seed(seed)
    deviation = 0.1 / factors**0.5
    V = torch.randn(train.shape[1], factors, generator=generator) * deviation
    for _ in range(epochs):
        U = ials_half_step(V, users, alpha0, lam)
        V = ials_half_step(U, items, alpha0, lam)
    return U, V


def ials_half_step(V: Tensor, users: CSR, alpha0: float, lam: float) -> Tensor:
    """Return the user factors that minimise the loss of iALS for the item factors V. For items, exchange the two.

    U_u solves (alpha0 V^T V + L_u I + V_u^T V_u) U_u = V_u^T 1, where V_u [n_u, d] holds the rows of the user's items.
    In the basis of the eigenvectors of V^T V, the first two terms are a diagonal matrix D. If n_u < d, the identity
    (D + V_u^T V_u)^-1 V_u^T = D^-1 V_u^T (I + V_u D^-1 V_u^T)^-1 leaves a smaller system.

    Parameters
    ----------
    V : float [N, d]
    users : CSR [M, N], interactions
    alpha0 : weight of all pairs
    lam : weight of the ridge

    Returns
    -------
    float [M, d]
    """
    d = V.shape[1]
    eigenvalues, basis = torch.linalg.eigh(V.T @ V)
    rows = torch.cat([V @ basis, V.new_zeros(1, d)])  # the last row fills up lists
    degrees = users.degrees()
    ridge = torch.from_numpy(lam * (degrees + alpha0 * users.shape[1])).to(V.dtype)
    U = V.new_zeros(len(degrees), d)
    order = np.argsort(degrees, kind="stable")
    order = order[degrees[order] > 0]
    start = 0
    while start < len(order):
        # Lists of similar length share a batch, whose entries are bounded.
        longest = int(degrees[order[start]]) * 5 // 4 + 1
        end = int(np.searchsorted(degrees[order], longest))
        batch = order[start : min(end, start + max(1, LIST_ENTRIES // (longest * d)))]
        start += len(batch)
        items = _padded(users.take(batch))
        V_u = rows[torch.from_numpy(items)]  # [m, n, d]
        D = alpha0 * eigenvalues.clamp(min=0) + ridge[batch][:, None]  # [m, d]
        if items.shape[1] < d:
            scaled = V_u / D[:, None, :]
            A = torch.baddbmm(torch.eye(items.shape[1], dtype=V.dtype), scaled, V_u.mT)
            ones = V.new_ones(len(batch), items.shape[1], 1)
            U[batch] = (scaled.mT @ torch.cholesky_solve(ones, torch.linalg.cholesky(A))).squeeze(2)
        else:
            A = torch.baddbmm(torch.diag_embed(D), V_u.mT, V_u)
            U[batch] = torch.cholesky_solve(V_u.sum(1)[:, :, None], torch.linalg.cholesky(A)).squeeze(2)
    return torch.mm(U, basis.T)


def _padded(rows: CSR) -> NDArray[np.int64]:
    """Return the columns of each row, filled up with the number of columns: [rows, longest row]."""
    degrees = rows.degrees()
    padded = np.full((len(degrees), degrees.max()), rows.shape[1], dtype=np.int64)
    padded[np.arange(padded.shape[1]) < degrees[:, None]] = rows.indices
    return padded
