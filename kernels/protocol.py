"""The contract of the kernels: the operations of a backend, and what they take and return.

Symbols follow the mathematics: U [M, d] user factors, V [N, d] item factors, B lists of n = rho + eta items, s [B, n]
their scores. Every argument is checked once, by `checks`, in the same way on every backend.
"""

import copy
import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from drm_triton.errors import InputError
from drm_triton.kernels.batches import ListBatch, SharedNegatives
from drm_triton.kernels.checks import (
    INT32,
    INT64,
    check_choice,
    check_devices,
    check_integer,
    check_number,
    check_rows,
    check_tau,
    check_tensor,
)
from drm_triton.kernels.devices import to_device
from drm_triton.kernels.precision import arithmetic
from drm_triton.names import LOSSES, MAX_INT32, MAX_SEED, BackendName, Score, UserSampling, Weight

NOTHING_TO_TRAIN_ON = (
    "there is nothing to train on: no user has both a positive and a negative item; give interactions of more users "
    "and items"
)

ADAGRAD_EPS = 1e-10
# T - log n of the active items of a list (docs/objective.md); n exp(-T) is below the rounding of one operation.
FLOAT32_MARGIN, FLOAT64_MARGIN = 20.0, 40.0
SeenItems = tuple[Tensor, Tensor]  # (indptr int64 [m + 1], indices int32): rows of a sparse matrix, see `Backend.top_k`


@dataclass(frozen=True)
class Objective:
    """Loss of one list: the sum of the parts that are on, DRM times lam. LOSSES names the parts.

    Parameters
    ----------
    rho : number of positives. They are the first `rho` items of a list.
    k : cut-off K of the relaxed metric, at most the list length. None means rho.
    tau : temperature of the NeuralSort relaxation.
    lam : weight of the DRM part.
    weight : rank weights w_k.
    margin : hinge margin.
    temperature : temperature of the softmax, psl and bpr parts.
    at_k : weight each positive of the softmax part by its place in the top K, as `top_k_weights` says. Only for lists
        that are the whole catalogue.
    """

    rho: int
    score: Score = "dot"
    k: int | None = None
    tau: float = 1.0
    lam: float = 1.0
    weight: Weight = "uniform"
    margin: float = 1.0
    hinge: bool = True
    drm: bool = True
    mse: bool = False
    softmax: bool = False
    psl: bool = False
    bpr: bool = False
    temperature: float = 0.15
    at_k: bool = False

    def __post_init__(self) -> None:
        check_choice("Objective", "score", self.score, Score)
        check_choice("Objective", "weight", self.weight, Weight)
        check_integer("Objective", "rho", self.rho, 1)
        if self.k is not None:
            check_integer("Objective", "k", self.k, 1)
        check_tau("Objective", self.tau)
        check_number("Objective", "lam", self.lam, 0)
        check_number("Objective", "margin", self.margin)
        if not self.parts:
            raise InputError(f"Objective: at least one of {', '.join(LOSSES)} must be on")
        if not 0 < self.temperature < math.inf:
            raise InputError(f"Objective: temperature must be positive and finite, got {self.temperature}")

    def total(self, hinge: Tensor, drm: Tensor, *others: Tensor) -> Tensor:
        """Return the loss of each list [B] from its parts, in the order of LOSSES."""
        return hinge + self.lam * drm + torch.stack(others).sum(0)

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts that are on, in the order of LOSSES."""
        return tuple(part for part in LOSSES if getattr(self, part))

    @property
    def psl_scale(self) -> float:
        """Factor that brings differences of scores into [-1, 1], for rows in the unit ball."""
        return 0.25 if self.score == "l2" else 0.5

    @property
    def K(self) -> int:  # noqa: N802
        """Cut-off in use."""
        return self.rho if self.k is None else self.k


@dataclass(frozen=True)
class ListPlan:
    """Which lists an epoch consists of.

    With `proportional` sampling, user u has ceil(degree(u) / rho) lists. Together they contain each positive of u at
    least once. The lists of all users are shuffled. With `uniform` sampling, an epoch has the same number of lists, and
    the user of each list is drawn uniformly. Users without a positive or without a negative have no list.

    Negatives are drawn uniformly from the items that the user has not interacted with. With `share` > 1, groups of
    `share` consecutive lists use the same draws. A list replaces a shared draw that is one of its user's items by a
    separate draw. In both cases the negatives of one list are independent and uniform. Sharing avoids most of the
    gathers of item rows.

    Parameters
    ----------
    indptr : int64 [M + 1]
    indices : int32 [nnz], strictly ascending within a row
        The training interactions. They are validated here, once, and copied unless contiguous.
    weights : float32 [nnz], optional
        Weight of each interaction in the loss, see `list_weights`. The kernels do not use it.
    begin : int64 [M], optional
        Where the items of each user begin in `indices`, if that is not where `indptr` says: `indices` then has only
        those of some users, see `holding`. For the CPU kernels.
    """

    indptr: Tensor
    indices: Tensor
    n_items: int
    rho: int
    eta: int
    seed: int = 0
    user_sampling: UserSampling = "proportional"
    share: int = 1
    weights: Tensor | None = None
    begin: Tensor | None = None

    def __post_init__(self) -> None:
        check_choice("ListPlan", "user_sampling", self.user_sampling, UserSampling)
        for name in ("rho", "eta", "share", "n_items"):
            check_integer("ListPlan", name, getattr(self, name), 1, MAX_INT32)
        check_integer("ListPlan", "seed", self.seed, 0, MAX_SEED)
        check_tensor("ListPlan", "indptr", self.indptr, (None,), INT64)
        check_tensor("ListPlan", "indices", self.indices, (None,), INT32)
        check_devices("ListPlan", indptr=self.indptr, indices=self.indices)
        if self.begin is None:
            ends = self.indptr[[0, -1]].tolist() if len(self.indptr) else []
            if ends != [0, len(self.indices)]:
                raise InputError(
                    f"ListPlan: indptr must go from 0 to {len(self.indices)}, the length of indices, got ends {ends}"
                )
            check_rows("ListPlan", "", self.indptr, self.indices, self.n_items)
        if self.weights is not None:
            check_tensor("ListPlan", "weights", self.weights, (len(self.indices),), (torch.float32,))
            check_devices("ListPlan", indices=self.indices, weights=self.weights)
        for name in ("indptr", "indices"):  # kernels address them by position
            object.__setattr__(self, name, getattr(self, name).contiguous())
        if self.n_lists == 0:
            raise InputError(NOTHING_TO_TRAIN_ON)

    def holding(self, indices: Tensor, begin: Tensor) -> "ListPlan":
        """Return the same plan with the items of some users only: what follows from `indptr` is not computed again."""
        plan = copy.copy(self)
        for name, value in (("indices", indices), ("begin", begin)):
            object.__setattr__(plan, name, value)
        return plan

    @cached_property
    def first_list(self) -> Tensor:
        """int64 [M + 1]: before shuffling, the lists of user u are first_list[u] .. first_list[u + 1] - 1."""
        degree = self.indptr.diff()
        lists = (degree + self.rho - 1) // self.rho
        lists[degree >= self.n_items] = 0
        return torch.cat([lists.new_zeros(1), lists.cumsum(0)])

    @cached_property
    def eligible_users(self) -> Tensor:
        """int32: users with at least one list, ascending."""
        return self.first_list.diff().nonzero().squeeze(1).to(torch.int32)

    @cached_property
    def n_lists(self) -> int:
        """Lists in an epoch."""
        return int(self.first_list[-1])

    @property
    def n(self) -> int:
        """Items in a list."""
        return self.rho + self.eta

    @cached_property
    def keys(self) -> Tensor:
        """int64 [nnz]: user * n_items + item of each interaction, ascending."""
        users = torch.arange(len(self.indptr) - 1, device=self.indptr.device).repeat_interleave(self.indptr.diff())
        return users * self.n_items + self.indices

    def list_weights(self, batch: ListBatch) -> Tensor | None:
        """Return the weight of each list, the mean weight of its positives: [B]. None if there are no weights."""
        if self.weights is None:
            return None
        wanted = batch.users.long()[:, None] * self.n_items + batch.positives(self.rho)
        return self.weights[torch.searchsorted(self.keys, wanted)].sum(1) / self.rho


class ListGradients(NamedTuple):
    """Losses of B lists and their gradients."""

    scores: Tensor  # [B, n]
    hinge: Tensor  # [B]; the parts, in the order of LOSSES: 0 if switched off, all without lam
    drm: Tensor  # [B]
    mse: Tensor  # [B]
    softmax: Tensor  # [B]
    psl: Tensor  # [B]
    bpr: Tensor  # [B]
    loss: Tensor  # [B], the sum of the parts, DRM times lam
    g: Tensor  # [B, n], dloss/dscores
    user_grad: Tensor  # [B, d], dloss/dU[user]

    def weighted(self, weights: Tensor) -> "ListGradients":
        """Multiply the loss of each list, and with it the gradients, by a weight [B]."""
        column, parts = weights[:, None], self._asdict()
        scores = parts.pop("scores")
        return ListGradients(scores, **{name: (weights if x.dim() == 1 else column) * x for name, x in parts.items()})

    def terms(self, U: Tensor, batch: ListBatch, weights: Tensor | None) -> "ListTerms":
        """Return what `Backend.list_terms` does, from these gradients of the batch."""
        if weights is not None:
            check_tensor("list_terms", "weights", weights, (len(self.loss),), (self.loss.dtype,))
        lists = self if weights is None else self.weighted(weights)
        losses = {name: getattr(lists, name) for name in ("loss", *LOSSES)}
        return ListTerms(losses, lists.user_grad, GradientTerms.of_items(batch, lists.g, U))


class Pool(NamedTuple):
    """A random part of a large catalogue that stands for the whole of it in one step.

    The items of the step are the negatives, drawn uniformly without replacement, and then the positives of its users
    that are not among them. A positive of one user is no negative of another unless it was drawn.
    """

    items: Tensor  # int32 [n]
    n_negatives: int  # the first n_negatives of `items`
    ratio: float  # number of items of the catalogue that each negative stands for


class CatalogueBatch(NamedTuple):
    """B lists that are the whole catalogue: users and their items, which are the positives."""

    users: Tensor  # int32 [B]
    indptr: Tensor  # int64 [B + 1]; the items of users[b] are indices[indptr[b] : indptr[b + 1]]
    indices: Tensor  # int32 [indptr[-1]], ascending within a user; rows of V, which holds the items of a pool
    weights: Tensor | None = None  # of the term of each positive in the loss, shaped like indices; None for all 1
    pool: Pool | None = None
    prior: Tensor | None = None  # [rows of V], added to the score of each item for every user; None for all 0

    def to(self, device: torch.device) -> "CatalogueBatch":
        """Copy the batch to a device. The host does not wait for a GPU."""
        users, indptr, indices, weights, pool, prior = self
        return CatalogueBatch(
            to_device(users, device),
            to_device(indptr, device),
            to_device(indices, device),
            None if weights is None else to_device(weights, device),
            None if pool is None else pool._replace(items=to_device(pool.items, device)),
            None if prior is None else to_device(prior, device),
        )


class CatalogueGradients(NamedTuple):
    """Losses of B users over the whole catalogue, and their gradients."""

    softmax: Tensor  # [B]
    user_grad: Tensor  # [B, d], dloss/dU[user]
    item_grad: Tensor  # [N, d], dloss/dV summed over the users; [0, d] if the items are fixed


class GradientTerms(NamedTuple):
    """The gradient of some rows of a table, as a sum of terms.

    With x_b = vectors[sources[b]], term (b, j) adds coefficients[b, j] * x_b to the gradient of row rows[b, j] under
    `dot` and `cosine`, and 2 * coefficients[b, j] * (x_b - row) under `l2`. With `totals`, if terms were summed, it
    is 2 * (coefficients[b, j] * x_b - totals[b, j] * row): a term then stands for several, and x_b is their sum.

    `vectors` may be a table that is updated next, so that a batch has no copy of its rows.
    """

    rows: Tensor  # int32 [B, m]
    coefficients: Tensor  # [B, m]
    vectors: Tensor  # [*, d]
    sources: Tensor  # int32 [B]
    shared: SharedNegatives | None = None  # of the last eta columns of rows
    totals: Tensor | None = None  # [B, m]; None for the coefficients
    sums: Tensor | None = None  # [*, d], further vectors: sources from len(vectors) on are their rows

    @classmethod
    def of_items(cls, batch: ListBatch, g: Tensor, U: Tensor) -> "GradientTerms":
        """Gradient of the items of a batch: row j of list b receives g[b, j] times its user's factors."""
        return cls(batch.items, g, U, batch.users, batch.shared)

    @classmethod
    def none(cls, table: Tensor) -> "GradientTerms":
        """No terms: a dense gradient is all that the rows of `table` [R, d] receive."""
        rows = torch.empty(0, 1, dtype=torch.int32, device=table.device)
        return cls(rows, table.new_empty(0, 1, dtype=arithmetic(table.dtype)), table[:0], rows[:, 0])

    @classmethod
    def of_rows(cls, rows: Tensor, gradients: Tensor, coefficients: Tensor | None = None) -> "GradientTerms":
        """Gradient of rows [B] from gradients [B, d], times coefficients [B] if given."""
        if coefficients is None:
            coefficients = torch.ones_like(gradients[:, 0])
        every = torch.arange(len(rows), dtype=torch.int32, device=rows.device)
        return cls(rows[:, None], coefficients[:, None], gradients, every)

    def one_by_one(self) -> "GradientTerms":
        """Return terms without totals and sums as terms without `shared`, with rows [E, 1]."""
        sources = self.sources.repeat_interleave(self.rows.shape[1])
        return GradientTerms(self.rows.reshape(-1, 1), self.coefficients.reshape(-1, 1), self.vectors, sources)

    def joined(self) -> "GradientTerms":
        """Return the same terms with all vectors in one tensor."""
        if self.sums is None:
            return self
        return self._replace(vectors=torch.cat([self.vectors, self.sums]), sums=None)


class ListTerms(NamedTuple):
    """What a training step on B lists needs: their losses, and the gradients of users and items."""

    losses: dict[str, Tensor]  # each [B]: "loss" and its parts, LOSSES
    user_grad: Tensor  # [B, d], dloss/dU[user]
    items: GradientTerms


class Rounding(NamedTuple):
    """Which random bits round the rows of a table to bfloat16 (see `streams`)."""

    seed: int
    step: int | Tensor  # number of the training step, or int64 on the device of the table, not read by the host there
    table: int  # ITEM_TABLE or USER_TABLE of `streams`
    first_row: int = 0  # row of the whole table that row 0 is, where only some rows of it are held


def row_score(score: Score) -> Score:
    """Return the score to update rows with whose terms are complete gradients, as those of users are."""
    return "dot" if score == "l2" else score


@dataclass(frozen=True)
class PackedItems:
    """Items prepared for many calls of `top_k`. V must not change while they are in use."""

    V: Tensor  # [N, d]
    score: Score
    norm: float  # of the longest row
    layout: object = None  # V in the order in which the backend reads it


class Backend(Protocol):
    """The operations, on torch tensors. `reference`, `cpu` and `gpu` are modules that implement them."""

    @property
    def name(self) -> BackendName:
        """Name of the backend, as `get_backend` takes it."""

    def sample_lists(self, plan: ListPlan, epoch: int, start: int, stop: int) -> ListBatch:
        """Draw lists number start .. stop - 1 of an epoch; `start` must be a multiple of `plan.share`."""

    def sample_users(self, plan: ListPlan, seeds: Tensor, epoch: int, most: int) -> ListBatch:
        """Draw up to `most` lists of each user as if the user were alone, with a separate seed for each user.

        The lists of user u are the first ones that `sample_lists` draws from a plan with the items of u alone and seed
        seeds[u]. They follow those of user u - 1. `seeds` is int64 [M], not negative. The plan has `share` 1 and
        `proportional` sampling; its own seed is not used.
        """

    def list_gradients(
        self, U: Tensor, V: Tensor, batch: ListBatch, objective: Objective, n_items: int | None = None
    ) -> ListGradients:
        """Compute losses of lists, and their gradients to the scores and to the user's row.

        A list with a score that is not finite has loss and gradient NaN. `n_items` is the number of items of the
        catalogue if V holds only some of them.
        """

    def list_terms(
        self,
        U: Tensor,
        V: Tensor,
        batch: ListBatch,
        objective: Objective,
        weights: Tensor | None = None,
        n_items: int | None = None,
    ) -> ListTerms:
        """Compute losses of lists, and the gradients of users and items, as `list_gradients` does.

        The loss of each list is multiplied by its weight, if `weights` [B] are given. A backend may leave out terms of
        items whose coefficient is 0, and may sum those of shared negatives.
        """

    def catalogue_gradients(
        self, U: Tensor, V: Tensor, batch: CatalogueBatch, objective: Objective, fixed_items: bool = False
    ) -> CatalogueGradients:
        """Compute losses of users over the whole catalogue, and their gradients to the users' rows and to all items.

        With `fixed_items`, the gradient to the items, a third of the work, is left out.
        A user with a score that is not finite has loss and gradient NaN, and so has every item then.
        """

    def merge_shared(self, terms: GradientTerms) -> GradientTerms:
        """Return the terms without `shared`, each with rows [E, 1], such that the step is the same.

        A backend may sum the terms of a shared negative over the lists of a group first, as its `update_rows` does, so
        that fewer are left to be sent to where their rows are.
        """

    def update_rows(
        self,
        table: Tensor,
        state: Tensor,
        terms: GradientTerms,
        lr: float | Tensor,
        score: Score,
        dense: Tensor | None = None,
        rounding: Rounding | None = None,
    ) -> None:
        """Take one Adagrad step and project onto the unit ball, in place.

        Under `cosine`, rows have length 1: the step is along the gradient's component orthogonal to the row, and the
        row is scaled back to length 1.

        Without `dense`, the rows that appear in `terms` take the step. With `dense` [R, d], a gradient that is added to
        that of the terms, every row does. A row whose coefficients are all 0 may be left as it is: the step does not
        move it if it is in the unit ball or, under `cosine`, on the unit sphere.

        With `rounding`, each row that took the step is rounded to numbers of bfloat16, up or down at random with
        probabilities that make the mean exact. Its length may then differ from 1, or exceed it, by the rounding.

        Parameters
        ----------
        table, state : [R, d] factors and Adagrad's sums of squared gradients. If the table is bfloat16, which needs
            `rounding` and which `cpu` does not take, all other numbers are float32, but `terms.vectors` may be either.
        lr : a number, or a float64 tensor of one number on the device of the table, which the host does not read if
            this is a GPU. A tensor that is NaN leaves table and state as they are.
        """

    def pack_items(self, V: Tensor, score: Score) -> PackedItems:
        """Prepare items for `top_k`."""

    def top_k(
        self, queries: Tensor, items: PackedItems, k: int, seen: SeenItems | None = None
    ) -> tuple[Tensor, Tensor]:
        """Find the k best items of each query, best first. Ties go to the lower item index.

        Parameters
        ----------
        queries : [m, d]
        seen : (indptr int64 [m + 1], indices int32 ascending within a row), the items to leave out. Row i is
            indices[indptr[i] : indptr[i + 1]], so a slice of a larger indptr can be passed as it is.

        Returns
        -------
        items : int32 [m, k]
        scores : [m, k]
            Where fewer than k items remain, the item is -1 and the score -inf. The values of tensors on a GPU are not
            checked, because the host would wait for them: the scores are NaN where a check would have failed.
        """

    def soft_topk_forward(self, s: Tensor, w: Tensor, tau: float, mask: Tensor) -> Tensor:
        """Compute Q = sum_k w_k P_k: [B, n], from scores s [B, n], rank weights w [B, K] and a mask bool [B, n]."""

    def soft_topk_backward(self, s: Tensor, w: Tensor, tau: float, mask: Tensor, q: Tensor) -> Tensor:
        """Compute the gradient to s for an upstream gradient q = dL/dQ: [B, n]."""

    def drm_lists(self, s: Tensor, y: Tensor, w: Tensor, tau: float, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the DRM loss ||y - Q||^2 of each list [B] and its gradient to the scores [B, n]."""
