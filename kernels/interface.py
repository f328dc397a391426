"""What the backends share: the arguments and results of the operations, validated once.

Every backend (`reference`, `cpu`, `gpu`) offers the same functions on torch tensors:

    sample_lists(plan, epoch, start, stop)                          -> users [B], items [B, n]
    list_gradients(U, V, users, items, objective)                   -> ListGradients
    update_rows(table, state, rows, coef, X, source, lr, score)     in place
    top_k(queries, V, k, score, seen)                               -> items [m, k], scores [m, k]
    soft_topk_forward / soft_topk_backward / drm_lists              behind drm_triton.drm_loss
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from drm_triton.errors import InputError

Score = Literal["dot", "l2"]
Weight = Literal["uniform", "precision", "recall", "ndcg", "ap"]
UserSampling = Literal["proportional", "uniform"]

ADAGRAD_EPS = 1e-10


def check_choice(function: str, name: str, value: str, choices: object) -> None:
    """Raise unless `value` is one of a Literal's values."""
    if value not in get_args(choices):
        raise InputError(f"{function}: {name} must be one of {', '.join(get_args(choices))}, got {value!r}")


@dataclass(frozen=True)
class Objective:
    """Loss of one list: hinge + lam * drm + mse, each part only if switched on.

    Parameters
    ----------
    rho : number of positives; they are the first `rho` entries of a list.
    k : cut-off K of the relaxed metric, at most the list length; None means rho.
    tau : temperature of the NeuralSort relaxation.
    lam : weight of the DRM part.
    weight : rank weights w_k.
    margin : hinge margin mu.
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

    def __post_init__(self) -> None:
        check_choice("Objective", "score", self.score, Score)
        check_choice("Objective", "weight", self.weight, Weight)
        if self.rho < 1:
            raise InputError(f"Objective: rho must be at least 1, got {self.rho}")
        if self.k is not None and self.k < 1:
            raise InputError(f"Objective: k must be at least 1, got {self.k}")
        if not (0 < self.tau < float("inf")):
            raise InputError(f"Objective: tau must be positive and finite, got {self.tau}")
        if not (0 <= self.lam < float("inf")):
            raise InputError(f"Objective: lam must be finite and at least 0, got {self.lam}")
        if not (self.hinge or self.drm or self.mse):
            raise InputError("Objective: at least one of hinge, drm and mse must be on")

    @property
    def K(self) -> int:  # noqa: N802
        """The cut-off in force."""
        return self.rho if self.k is None else self.k


class ListGradients(NamedTuple):
    """Result of `list_gradients` for B lists of n items."""

    scores: Tensor  # [B, n]
    hinge: Tensor  # [B], 0 if switched off; likewise drm and mse, all without lam
    drm: Tensor  # [B]
    mse: Tensor  # [B]
    loss: Tensor  # [B], hinge + lam * drm + mse
    g: Tensor  # [B, n], dloss/dscores
    user_grad: Tensor  # [B, d], dloss/dU[user]


@dataclass(frozen=True)
class ListPlan:
    """Which lists an epoch holds.

    `proportional`: user u has ceil(|V_u| / rho) lists, shuffled; together they hold each of its positives at least
    once. `uniform`: as many lists in all, each of a user drawn uniformly.
    Users without a positive or without a negative have no list.

    Parameters
    ----------
    indptr : int64 [M + 1], indices : int32 [nnz], ascending within a row: the training interactions.
    """

    indptr: Tensor
    indices: Tensor
    n_items: int
    rho: int
    eta: int
    seed: int = 0
    user_sampling: UserSampling = "proportional"

    def __post_init__(self) -> None:
        check_choice("ListPlan", "user_sampling", self.user_sampling, UserSampling)
        if self.rho < 1 or self.eta < 1:
            raise InputError(f"ListPlan: rho and eta must be at least 1, got {self.rho} and {self.eta}")
        if not 0 <= self.seed < 2**63:
            raise InputError(f"ListPlan: seed must be in [0, 2^63), got {self.seed}")
        if self.indptr.dtype != torch.int64 or self.indices.dtype != torch.int32:
            raise InputError(
                f"ListPlan: indptr must be int64 and indices int32, got {self.indptr.dtype} and {self.indices.dtype}"
            )
        if self.n_lists == 0:
            raise InputError("ListPlan: no user has both a positive and a negative item, nothing to train on")

    @cached_property
    def first(self) -> Tensor:
        """int64 [M + 1]: the lists of user u are first[u] .. first[u + 1] - 1, before shuffling."""
        degree = self.indptr.diff()
        lists = (degree + self.rho - 1) // self.rho
        lists[degree >= self.n_items] = 0
        return torch.cat([lists.new_zeros(1), lists.cumsum(0)])

    @cached_property
    def eligible(self) -> Tensor:
        """int32: users with at least one list, ascending."""
        return self.first.diff().nonzero().squeeze(1).to(torch.int32)

    @cached_property
    def n_lists(self) -> int:
        """Lists in an epoch."""
        return int(self.first[-1])

    @property
    def n(self) -> int:
        """Items in a list."""
        return self.rho + self.eta
