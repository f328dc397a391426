"""Alternating least squares for implicit feedback: what WMF and iALS have in common.

Both minimise, over user factors U [M, d] and item factors V [N, d] with the scores s = U V^T,

    every * sum_{all u,i} s_ui^2 + sum_{(u,i) in X} (observed * s_ui^2 - 2 target * s_ui + target)
        + sum_u L_u ||U_u||^2 + sum_i L_i ||V_i||^2.

For fixed items it is a ridge regression for each user, and for fixed users one for each item. A half step solves all of
them exactly. In the basis of the eigenvectors of V^T V the part of all pairs is diagonal, which leaves the systems of
`drm_triton.kernels.least_squares`.

A block step (iALS++, Rendle et al. 2021) does the same for a block of the d columns, with the others fixed. A sweep
over blocks of b columns costs b / d of the multiply-adds of a half step.
"""

from abc import abstractmethod
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from drm_triton.data.csr import CSR
from drm_triton.kernels import least_squares as in_torch
from drm_triton.kernels.cpu import least_squares as on_cpu
from drm_triton.kernels.cpu.gram import transposed
from drm_triton.kernels.least_squares import PADDING, Systems
from drm_triton.kernels.torch_threads import one_torch_thread
from drm_triton.models.base import FactorModel, ModelState, Progress
from drm_triton.models.configs import ALSConfig
from drm_triton.recommender import Tensors
from drm_triton.training.initialize import BLOCK_ROWS, NORMAL_SCALE, for_blocks, inner_products
from drm_triton.training.warm_start import Known, carry, in_old_codes, unknown_rows, users_of

C = TypeVar("C", bound=ALSConfig)


class Weights(NamedTuple):
    """Weights of the objective."""

    every: float
    observed: float
    target: float


class Cells(NamedTuple):
    """The interactions by rows, and the ridge L of each row."""

    indptr: Tensor  # int64 [M + 1]
    indices: Tensor  # int32 [nnz]
    ridge: Tensor  # [M]


class Rotated(NamedTuple):
    """A table in the basis of the eigenvectors Q of its Gram matrix. Columns are padded with 0 up to `width`."""

    table: Tensor  # [N, width], V Q
    eigenvalues: Tensor  # [width]
    basis: Tensor  # [width, width], Q^T


def rotate(V: Tensor, gram: Tensor) -> Rotated:
    """Return V [N, b] in the basis of the eigenvectors of its Gram matrix, float64 [b, b]."""
    padding = (0, -V.shape[1] % PADDING)
    # So small a matrix is faster on the CPU.
    eigenvalues, Q = (part.to(V.device) for part in torch.linalg.eigh(gram.cpu()))
    Q = torch.nn.functional.pad(Q, padding).to(V.dtype)
    table = V.new_empty(len(V), Q.shape[1])
    for_blocks(lambda rows: torch.mm(V[rows], Q, out=table[rows]), range(0, len(V), BLOCK_ROWS), table)
    eigenvalues = torch.nn.functional.pad(eigenvalues.clamp(min=0), padding).to(V.dtype)
    return Rotated(table, eigenvalues, torch.nn.functional.pad(Q.T, padding).contiguous())


def _solve(systems: Systems, backend: str) -> tuple[Tensor, Tensor]:
    return on_cpu.solve_rows(systems) if backend == "cpu" else in_torch.solve_rows(systems)


def half_step(items: Rotated, d: int, cells: Cells, weights: Weights, backend: str) -> tuple[Tensor, float]:
    """Return the user factors that minimise the objective for fixed items. For items, exchange the two.

    Parameters
    ----------
    items : item factors [N, d]
    cells : interactions of the users
    backend : name of the backend

    Returns
    -------
    U [M, d], and by how much the objective is below its value at U = 0
    """
    residual = items.table.new_full((len(cells.indices),), weights.target)
    diagonal = weights.every * items.eigenvalues
    systems = Systems(
        cells.indptr, cells.indices, residual, items.table, diagonal, cells.ridge, weights.observed, items.basis
    )
    U, gain = _solve(systems, backend)
    return U[:, :d].contiguous(), float(gain.double().sum())


def block_step(
    U: Tensor, V: Tensor, block: slice, cells: Cells, residual: Tensor, weights: Weights, backend: str
) -> float:
    """Minimise the objective over a block of the columns of U, in place. For items, exchange the two.

    `residual` [nnz] is target - observed * s of each cell, and is kept so. Returns by how much the objective falls.
    """
    cross = inner_products(V, V[:, block])
    items = rotate(V[:, block].contiguous(), cross[block])
    Q, size = items.basis.T, cross.shape[1]
    to_block = (-weights.every * cross).to(U.dtype) @ Q[:size]
    linear = U.new_empty(len(U), Q.shape[1])

    def of_rows(rows: slice) -> None:
        ridge = cells.ridge[rows, None] * U[rows, block]
        torch.sub(U[rows] @ to_block, ridge @ Q[:size], out=linear[rows])

    for_blocks(of_rows, range(0, len(U), BLOCK_ROWS), U)
    diagonal = weights.every * items.eigenvalues
    systems = Systems(
        cells.indptr, cells.indices, residual, items.table, diagonal, cells.ridge, weights.observed, items.basis, linear
    )
    change, gain = _solve(systems, backend)
    U[:, block] += change[:, :size]
    return float(gain.double().sum())


def ridge_of(cells: Cells, U: Tensor) -> float:
    """Return sum_u L_u ||U_u||^2."""
    return float(cells.ridge.double() @ torch.linalg.vector_norm(U, dim=1).double().square())


class ALSModel(FactorModel[C]):
    """A model that is fitted by alternating least squares. Subclasses define the weights of the objective."""

    _by_user: Cells
    _by_item: Cells
    _order: Tensor  # position of the cells by item among those by user, for blocks
    _cells_of: CSR | None = None  # the interactions that the cells are of
    _fold_in: tuple[Tensor, Rotated] | None = None  # item factors, and the same rotated

    @property
    @abstractmethod
    def weights(self) -> Weights:
        """Weights of the objective."""

    @abstractmethod
    def ridge(self, degrees: NDArray[np.int64], others: int) -> NDArray[np.float64]:
        """Return the ridge of rows with these numbers of interactions, out of `others`."""

    @property
    def block(self) -> int:
        """Number of columns that are fitted at once."""
        return self.config.factors

    def memory(self, n_users: int, n_items: int, nnz: int, pairs: int) -> dict[str, int]:
        """Return the bytes that training needs by purpose, besides the interactions."""
        d, block = self.config.factors, min(self.block, self.config.factors)
        in_blocks = block < d
        return {
            "factors": 4 * (n_users + n_items) * d * (1 if in_blocks else 2),
            "rotated factors": 4 * max(n_users, n_items) * block * (3 if in_blocks else 1),
            "interactions by item": 4 * nnz + 8 * n_items,
            "residuals": (16 if in_blocks else 4) * nnz,
        }

    def start(self, fit: CSR) -> Tensors:
        """Return normal random factors, with rows of a norm of about 0.1."""
        rng, d = np.random.Generator(np.random.Philox(self.config.seed)), self.config.factors
        _, device = self.backend()
        U, V = (torch.from_numpy(rng.standard_normal((n, d), dtype=np.float32)) for n in fit.shape)
        return {
            name: (table * (NORMAL_SCALE / d**0.5)).to(device)
            for name, table in (("user_factors", U), ("item_factors", V))
        }

    def updated_state(self, old: Tensors, known: Known, fit: CSR) -> ModelState:
        """Return the state before the first epoch of an update: new users, then new items are fitted exactly."""
        users, items = unknown_rows(known.users, fit.degrees()), unknown_rows(known.items, fit.popularity())
        old = {name: table.cpu() for name, table in old.items()}
        old_V, d, device = old["item_factors"], self.config.factors, self.backend()[1]
        U = carry(torch.zeros(fit.shape[0], d), old["user_factors"], known.users)
        V = carry(torch.zeros(fit.shape[1], d), old_V, known.items)
        U[users] = self._fitted(old_V, in_old_codes(fit.take(users), known.items, len(old_V)))
        V[items] = self._fitted(U, users_of(items, fit))
        values = {"user_factors": U.to(device), "item_factors": V.to(device)}
        return ModelState(values)

    def epoch(self, tensors: Tensors, fit: CSR, number: int, progress: Progress) -> dict[str, float]:
        """Fit the users to the items, then the items to the users: at once, or one block of columns after another."""
        self._prepare(fit)
        with one_torch_thread():
            if self.block < self.config.factors:
                return {"loss": self._block_epoch(tensors, progress)}
            return {"loss": self._exact_epoch(tensors, progress)}

    def factors(self, tensors: Tensors) -> tuple[Tensor, Tensor]:
        """Return user and item factors."""
        return tensors["user_factors"], tensors["item_factors"]

    def fold_in_items(self, liked: CSR) -> Tensor:
        """Return the vectors of new users: those that minimise the objective for the fixed item factors."""
        V = self.item_factors
        with one_torch_thread():
            if self._fold_in is None or self._fold_in[0] is not V:
                table = V.cpu()
                self._fold_in = V, rotate(table, inner_products(table))
            cells = self._cells(liked, torch.device("cpu"))
            return half_step(self._fold_in[1], V.shape[1], cells, self.weights, "cpu")[0].to(V.device)

    def remedy(self) -> str:
        """Return what to change if the training diverges."""
        return "a larger `regularization`"

    # -- internal ------------------------------------------------------------------------------------------------

    def _fitted(self, table: Tensor, rows: CSR) -> Tensor:
        """Return the vectors that minimise the objective for a fixed table of the other side."""
        with one_torch_thread():
            rotated = rotate(table, inner_products(table))
            return half_step(rotated, table.shape[1], self._cells(rows, table.device), self.weights, "cpu")[0]

    def _cells(self, rows: CSR, device: torch.device) -> Cells:
        ridge = self.ridge(rows.degrees(), rows.shape[1])
        return Cells(*rows.tensors(device), torch.from_numpy(ridge).float().to(device))

    def _prepare(self, fit: CSR) -> None:
        """Bring the interactions into the form that the steps take, once."""
        if self._cells_of is fit:
            return
        _, device = self.backend()
        self._by_user, self._by_item = self._cells(fit, device), self._cells(transposed(fit), device)
        if self.block < self.config.factors:
            self._order = torch.from_numpy(np.argsort(fit.indices, kind="stable")).to(device)
        self._cells_of = fit

    def _exact_epoch(self, tensors: Tensors, progress: Progress) -> float:
        """Run two half steps. Return the objective."""
        backend, (_, V) = self.backend()[0].name, self.factors(tensors)
        U, _ = half_step(rotate(V, inner_products(V)), V.shape[1], self._by_user, self.weights, backend)
        progress(1, 2)
        V, gain = half_step(rotate(U, inner_products(U)), V.shape[1], self._by_item, self.weights, backend)
        tensors.update(user_factors=U, item_factors=V)
        return self.weights.target * len(self._by_user.indices) - gain + ridge_of(self._by_user, U)

    def _block_epoch(self, tensors: Tensors, progress: Progress) -> float:
        """Run block steps over all columns. Return the objective."""
        backend, (U, V), weights = self.backend()[0].name, self.factors(tensors), self.weights
        scores_of = on_cpu.cell_scores if backend == "cpu" else in_torch.cell_scores
        scores = scores_of(self._by_user.indptr, self._by_user.indices, U, V)
        loss = self._objective(U, V, scores)
        residual = weights.target - weights.observed * scores
        starts = range(0, self.config.factors, self.block)
        for number, start in enumerate(starts):
            block = slice(start, min(start + self.block, self.config.factors))
            loss -= block_step(U, V, block, self._by_user, residual, weights, backend)
            by_item = residual[self._order]
            loss -= block_step(V, U, block, self._by_item, by_item, weights, backend)
            residual[self._order] = by_item
            progress(number + 1, len(starts))
        return loss

    def _objective(self, U: Tensor, V: Tensor, scores: Tensor) -> float:
        """Return the objective, given the scores of all interactions."""
        weights, s = self.weights, scores.double()
        every = weights.every * float((inner_products(U) * inner_products(V)).sum())
        observed = float((weights.observed * s.square() - 2 * weights.target * s + weights.target).sum())
        return every + observed + ridge_of(self._by_user, U) + ridge_of(self._by_item, V)
