"""Ridge regressions on rows of one table, a system for each user (or item): the half step of alternating least squares.

Row u has cells j, each with a row w_j of the table and a residual e_j, and perhaps a linear term g. Its system is

    (diag(D_u) + c sum_j w_j w_j^T) x = sum_j e_j w_j + g,    D_u = E + L_u.

With the rows W_j = D_u^-1/2 w_j, h = D_u^-1/2 g and x = D_u^-1/2 z, this is (I + c W^T W) z = W^T e + h. If the row has
n < d cells, the smaller system (I + c W W^T) y = e - c W h gives z = h + W^T y. Neither matrix has an eigenvalue below
1, so that the Cholesky factor exists and rounding errors stay small.

Multiply-adds of a row: n d^2 / 2 + d^3 / 6, or n^2 d / 2 + n^3 / 6 if n < d.

This module holds what the backends share, and the operation in torch for `reference` and `triton`.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

PADDING = 16  # the width of the table is a multiple of this: whole vectors of the processor
NEGLIGIBLE = 1e-10  # times the largest entry of D_u: smaller ones are rounding errors of 0, and x is 0 there
LIST_ENTRIES = 1 << 22  # entries of rows that torch gathers at the same time


class Systems(NamedTuple):
    """The systems of all rows. `width` is d, rounded up to a multiple of PADDING; the further columns hold 0."""

    indptr: Tensor  # int64 [M + 1]
    indices: Tensor  # int32 [nnz], rows of the table
    residual: Tensor  # [nnz], e
    table: Tensor  # [N, width]
    diagonal: Tensor  # [width], E
    ridge: Tensor  # [M], L
    weight: float  # c
    basis: Tensor  # [width, width]; the result is x times this
    linear: Tensor | None = None  # [M, width], g; with it, the residuals become e_j - c w_j . x


def solve_rows(systems: Systems) -> tuple[Tensor, Tensor]:
    """Solve all systems.

    Returns
    -------
    x basis [M, width], and x . (right-hand side) [M], by which the quadratic form falls from x = 0
    """
    table, width, weight = systems.table, systems.table.shape[1], systems.weight
    rows = torch.cat([table, table.new_zeros(1, width)])  # the last row fills up lists
    x, gain = table.new_zeros(len(systems.ridge), width), table.new_zeros(len(systems.ridge))
    for batch, items, e, places in _batches(systems):
        D = systems.diagonal + systems.ridge[batch, None]
        scale = torch.where(NEGLIGIBLE * D.amax(1, keepdim=True) < D, D.rsqrt(), 0)
        W = rows[items] * scale[:, None]
        h = torch.zeros_like(D) if systems.linear is None else scale * systems.linear[batch]
        b = (W.mT @ e[:, :, None]).squeeze(2) + h
        short = W.shape[1] < width
        K = torch.eye(min(W.shape[1:]), dtype=W.dtype, device=W.device) + weight * (W @ W.mT if short else W.mT @ W)
        right = e - weight * (W @ h[:, :, None]).squeeze(2) if short else b
        z = torch.cholesky_solve(right[:, :, None], torch.linalg.cholesky(K))
        z = h + (W.mT @ z).squeeze(2) if short else z.squeeze(2)
        x[batch], gain[batch] = scale * z, (z * b).sum(1)
        if systems.linear is not None:
            cells, filled = places
            systems.residual[cells] -= weight * (W @ z[:, :, None]).squeeze(2)[filled]
    return x @ systems.basis, gain


def _batches(systems: Systems) -> Iterator[tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor]]]:
    """Yield rows [m] of similar length, their items and residuals [m, n], and where the residuals are.

    Items are filled up with N, and residuals with 0.
    """
    indptr, width, n_rows = systems.indptr, systems.table.shape[1], len(systems.table)
    degrees = indptr.diff().cpu().numpy()
    order = np.argsort(degrees, kind="stable")
    if systems.linear is None:  # the solutions of rows without cells are 0
        order = order[degrees[order] > 0]
    start = 0
    while start < len(order):
        longest = int(degrees[order[start]]) * 5 // 4 + 1
        end = int(np.searchsorted(degrees[order], longest))
        chosen = order[start : min(end, start + max(1, LIST_ENTRIES // (longest * width)))]
        start += len(chosen)
        batch = torch.from_numpy(chosen).to(indptr.device)
        columns = torch.arange(max(1, int(degrees[chosen[-1]])), device=indptr.device)
        filled = columns < indptr.diff()[batch, None]
        cells = (indptr[batch, None] + columns)[filled]
        items = torch.full(filled.shape, n_rows, device=indptr.device)
        e = systems.residual.new_zeros(filled.shape)
        items[filled], e[filled] = systems.indices[cells].long(), systems.residual[cells]
        yield batch, items, e, (cells, filled)


def cell_scores(indptr: Tensor, indices: Tensor, U: Tensor, V: Tensor) -> Tensor:
    """Return the score u . v of each cell, [nnz]."""
    users = torch.arange(len(U), device=U.device).repeat_interleave(indptr.diff())
    size = max(1, LIST_ENTRIES // U.shape[1])
    blocks = [
        (U[users[start : start + size]] * V[indices[start : start + size].long()]).sum(1)
        for start in range(0, len(users), size)
    ]
    return torch.cat(blocks) if blocks else U.new_zeros(0)
