"""SRRMF: matrix factorisation with a square ranking loss and a ranking-based regulariser."""

from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from drm_triton.data.csr import CSR
from drm_triton.kernels.cpu.runtime import threads
from drm_triton.kernels.cpu.runtime.simd import LANES
from drm_triton.kernels.cpu.srrmf import Common, ItemState, Rows, factorise_items, fit_items, fit_users
from drm_triton.kernels.least_squares import PADDING
from drm_triton.kernels.torch_threads import one_torch_thread
from drm_triton.models.base import FactorModel, Progress
from drm_triton.models.configs import SRRMFConfig
from drm_triton.recommender import Tensors
from drm_triton.training.initialize import inner_products

BLOCK_BYTES = 1 << 26  # of the factors of items that are in memory at once, twice
ROWS_PER_TASK = 64  # users or items that a thread takes at once
DEVIATION = 0.1  # standard deviation of the initial factors
CPU = torch.device("cpu")


class SRRMF(FactorModel[SRRMFConfig]):
    """Matrix factorisation with a square ranking loss (Chen, Lian and Zheng, AAAI 2019).

    With the scores s_ui = u . v_i and the items P_u of user u, it minimises

        sum_u sum_{i in P_u} sum_{j not in P_u} (1 - s_ui + s_uj)^2
            + lambda / 2 sum_u sum_{j not in P_u} sum_{k not in P_u} (s_uj - s_uk)^2
            + regularization (||U||^2 + ||V||^2),    lambda = 1 / confidence.

    The second term pulls the other items of a user towards each other, where WMF pulls them towards 0. The authors have
    lambda, but neither a regularisation nor a confidence. The experiments with DRM name these two and not
    lambda; that the confidence is 1 / lambda is an inference.

    An epoch fits the items one after the other, then all users exactly, all in float64. A user whose items are none, or
    all, has no pairs and the vector 0. A new user is fitted exactly. The model is trained on the CPU.

    Parameters
    ----------
    config : SRRMFConfig, optional
        All options at once, instead of keywords.
    **options
        The fields of `SRRMFConfig`, among them factors, confidence, regularization and epochs.

    Examples
    --------
    >>> import polars as pl
    >>> from drm_triton import Dataset
    >>> frame = pl.DataFrame({"user": ["ann", "ann", "bob", "bob", "cy"], "item": ["x", "y", "x", "z", "y"]})
    >>> model = SRRMF(factors=4, epochs=3).fit(Dataset.from_frame(frame, ratios=(1, 0, 0)))
    >>> model.recommend(["cy"], k=1)["item"].to_list()
    ['x']
    """

    Config = SRRMFConfig

    _by_item: CSR
    _cells_of: CSR | None = None  # the interactions that `_by_item` holds
    _fold_in: tuple[Tensor, "Items"] | None = None  # item factors, and the same as new users need them

    def memory(self, n_users: int, n_items: int, nnz: int, pairs: int) -> dict[str, int]:
        """Return the bytes that training needs by purpose, besides the interactions."""
        d = self.config.factors
        return {
            "factors": 16 * (n_users + n_items) * d,
            "interactions by item": 4 * nnz + 8 * n_items,
            "matrices of items": 2 * max(BLOCK_BYTES, 8 * d * (d + LANES)),
        }

    def start(self, fit: CSR) -> Tensors:
        """Return normal random factors in float64."""
        rng = np.random.Generator(np.random.Philox(self.config.seed))
        U, V = (torch.from_numpy(rng.standard_normal((n, self.config.factors))) * DEVIATION for n in fit.shape)
        return {"user_factors": U, "item_factors": V}

    def epoch(self, tensors: Tensors, fit: CSR, number: int, progress: Progress) -> dict[str, float]:
        """Fit the items one after the other, then all users."""
        lam, rho = 1 / self.config.confidence, self.config.regularization
        if self._cells_of is not fit:
            self._by_item = CSR.from_any(fit.to_scipy(np.bool_).T.tocsr(), fit.shape[0])
            self._cells_of = fit
        with one_torch_thread():
            V = item_step(tensors["user_factors"], tensors["item_factors"], fit, self._by_item, lam, rho)
            progress(1, 2)
            U, loss = user_step(items_of(V), fit, lam, rho)
        tensors.update(user_factors=U, item_factors=V)
        return {"loss": loss + rho * float(V.square().sum())}

    def layout(self, n_users: int, n_items: int) -> Tensors:
        """Return the factors in float64 without content."""
        return {name: table.double() for name, table in super().layout(n_users, n_items).items()}

    def learned(self, tensors: Tensors) -> Tensors:
        """Return the factors in float32."""
        return {name: table.float() for name, table in tensors.items()}

    def factors(self, tensors: Tensors) -> tuple[Tensor, Tensor]:
        """Return user and item factors."""
        return tensors["user_factors"].float(), tensors["item_factors"].float()

    def fold_in_items(self, liked: CSR) -> Tensor:
        """Return the vectors of new users: those that minimise the objective for the fixed item factors."""
        V = self.item_factors
        with one_torch_thread():
            if self._fold_in is None or self._fold_in[0] is not V:
                self._fold_in = V, items_of(V.cpu().double())
            U, _ = user_step(self._fold_in[1], liked, 1 / self.config.confidence, self.config.regularization)
        return U.float().to(V.device)

    def remedy(self) -> str:
        """Return what to change if the training diverges."""
        return "a larger `regularization`"


class Items(NamedTuple):
    """What a step needs to know of the other side."""

    table: Tensor  # [N, width], columns from d on are 0
    gram: Tensor  # [width, width]
    total: Tensor  # [width], sum of the rows
    d: int


def _padded(table: Tensor) -> Tensor:
    return torch.nn.functional.pad(table, (0, -table.shape[1] % PADDING)).contiguous()


def items_of(V: Tensor) -> Items:
    """Return what the user step needs of the item factors, float64 [N, d]."""
    table = _padded(V)
    return Items(table, inner_products(table), table.sum(0), V.shape[1])


def _rows(cells: CSR, table: Tensor, d: int) -> Rows:
    indptr, indices = (tensor.numpy() for tensor in cells.tensors(CPU))
    return Rows(indptr, indices, table.numpy(), d)


def user_step(items: Items, users: CSR, lam: float, rho: float) -> tuple[Tensor, float]:
    """Fit all users to the items.

    With q_s = sum_i V_i, q_u = sum_{P_u} V_i, q = q_s - q_u, S = V^T V and S_u = sum_{P_u} V_i V_i^T, user u solves

        (n_u S + (N - 2 n_u) S_u - q_u q^T - q q_u^T + lam ((N - n_u)(S - S_u) - q q^T) + rho I) u = N q_u - n_u q_s.

    Returns
    -------
    U [M, d], and the objective without the ridge of the items
    """
    U, losses = items.table.new_empty(users.shape[0], items.table.shape[1]), items.table.new_empty(users.shape[0])
    common = Common(items.gram.numpy(), items.total.numpy(), lam, rho)
    rows = _rows(users, items.table, items.d)
    starts = [*range(0, users.shape[0], ROWS_PER_TASK), users.shape[0]]
    threads.run(partial(fit_users, *part, rows, common, U.numpy(), losses.numpy()) for part in pairwise(starts))
    return U[:, : items.d].contiguous(), float(losses.sum())


def item_step(U: Tensor, V: Tensor, users: CSR, by_item: CSR, lam: float, rho: float) -> Tensor:
    """Return the items V [N, d], fitted to the users U [M, d] one after the other.

    With r_u = sum_{P_u} s_ui, z = U^T r, q_s = sum_i V_i and the users S_l of item l, it solves

        (U^T diag(lam (N - n_u) + n_u) U + sum_{S_l} ((1 - lam) N - (2 - lam) n_u) U_u U_u^T + rho I) v_l
            = (1 - lam) z + lam U^T U q_s - U^T n + sum_{S_l} (N + (1 - lam) U_u . q_s - (2 - lam) r_u) U_u.

    q_s and z contain the old v_l, so this is not quite the minimiser for v_l, but that with the further (proximal) term
    lam sum_{u not in S_l} (U_u . (v_l - old v_l))^2. It has the same fixed points, and the objective falls.

    The matrices do not depend on other items. Threads factorise those of a block while the block before is fitted.
    """
    n_items, n = users.shape[1], torch.from_numpy(users.degrees()).double()
    table, V = _padded(U), _padded(V)
    width = table.shape[1]
    indptr, indices = users.tensors(CPU)
    sums = torch.nn.functional.embedding_bag(indices, V, indptr, mode="sum", include_last_offset=True)
    scores = (table * sums).sum(1)
    state = ItemState(V.numpy(), scores.numpy(), (scores @ table).numpy(), V.sum(0).numpy())
    common = Common(
        inner_products(table, (lam * (n_items - n) + n)[:, None] * table).numpy(), (n @ table).numpy(), lam, rho
    )
    weights, gram = ((1 - lam) * n_items - (2 - lam) * n).numpy(), inner_products(table).numpy()
    rows = _rows(by_item, table, U.shape[1])
    size = max(1, min(n_items, BLOCK_BYTES // (8 * width * (width + LANES))))
    shapes = (size, width, width + LANES), (size, width)
    buffers = [tuple(torch.empty(shape, dtype=torch.float64).numpy() for shape in shapes) for _ in range(2)]
    before = None
    for number, first in enumerate([*range(0, n_items, size), n_items]):
        last, buffer = min(first + size, n_items), buffers[number % 2]
        starts = [*range(first, last, ROWS_PER_TASK), last]
        tasks = [partial(factorise_items, *part, first, rows, common, weights, *buffer) for part in pairwise(starts)]
        if before is not None:
            tasks.insert(0, before)
        threads.run(tasks)
        before = partial(fit_items, first, last, rows, common, gram, *buffer, state)
    return V[:, : U.shape[1]].contiguous()
