"""What the backends share: the arguments and results of the operations, validated once.

Every backend (`reference`, `cpu`, `gpu`) offers the same functions on torch tensors:

    sample_lists(plan, epoch, start, stop)                          -> users [B], items [B, n]
    list_gradients(U, V, users, items, objective)                   -> ListGradients
    update_rows(table, state, rows, coef, X, source, lr, score)     in place
    pack_items(V, score)                                            -> what top_k takes in place of V, for many calls
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
FLOATS, INT32, INT64 = (torch.float32, torch.float64), (torch.int32,), (torch.int64,)


def check_choice(function: str, name: str, value: str, choices: object) -> None:
    """Raise unless `value` is one of a Literal's values."""
    if value not in get_args(choices):
        raise InputError(f"{function}: {name} must be one of {', '.join(get_args(choices))}, got {value!r}")


def check_tensor(
    function: str, name: str, tensor: Tensor, shape: tuple[int | None, ...], dtypes: tuple[torch.dtype, ...]
) -> None:
    """Raise unless a tensor has this shape (None leaves a size free) and one of these types."""
    if tensor.dtype not in dtypes:
        allowed = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise InputError(f"{function}: {name} must be {allowed}, got {str(tensor.dtype).removeprefix('torch.')}")
    matches = tensor.ndim == len(shape) and all(
        want is None or want == size for want, size in zip(shape, tensor.shape, strict=True)
    )
    if not matches:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise InputError(f"{function}: {name} must have shape [{wanted}], got {list(tensor.shape)}")


def check_devices(function: str, **tensors: Tensor) -> None:
    """Raise unless all tensors are on one device."""
    (first, tensor), *others = tensors.items()
    for name, other in others:
        if other.device != tensor.device:
            raise InputError(f"{function}: {name} must be on {tensor.device} as {first} is, got {other.device}")


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


# What every backend checks of its arguments. Nothing here reads values, so a GPU is not waited for.


def check_sample(plan: ListPlan, epoch: int, start: int, stop: int) -> None:
    """Check the arguments of `sample_lists`."""
    if not (epoch >= 0 and 0 <= start <= stop):
        raise InputError(
            f"sample_lists: epoch must be at least 0 and 0 <= start <= stop, got {epoch}, {start} and {stop}"
        )
    if plan.user_sampling == "proportional" and stop > plan.n_lists:
        raise InputError(f"sample_lists: an epoch holds {plan.n_lists} lists, asked for number {stop - 1}")


def check_lists(U: Tensor, V: Tensor, users: Tensor, items: Tensor, objective: Objective) -> None:
    """Check the arguments of `list_gradients`."""
    name = "list_gradients"
    check_tensor(name, "U", U, (None, None), FLOATS)
    check_tensor(name, "V", V, (None, U.shape[1]), (U.dtype,))
    check_tensor(name, "users", users, (None,), INT32)
    check_tensor(name, "items", items, (len(users), None), INT32)
    check_devices(name, U=U, V=V, users=users, items=items)
    n = items.shape[1]
    if not objective.rho < n:
        raise InputError(f"{name}: a list needs more than rho = {objective.rho} items, the negatives, got {n}")
    if objective.drm and n < objective.K:
        raise InputError(f"{name}: k must be at most the list length {n}, got {objective.K}")


def check_update(
    table: Tensor, state: Tensor, rows: Tensor, coef: Tensor, X: Tensor, source: Tensor, lr: float, score: Score
) -> None:
    """Check the arguments of `update_rows`."""
    name = "update_rows"
    check_choice(name, "score", score, Score)
    if not 0 <= lr < float("inf"):
        raise InputError(f"{name}: lr must be finite and at least 0, got {lr}")
    check_tensor(name, "table", table, (None, None), FLOATS)
    check_tensor(name, "state", state, tuple(table.shape), (table.dtype,))
    check_tensor(name, "rows", rows, (None,), INT32)
    check_tensor(name, "coef", coef, (len(rows),), (table.dtype,))
    check_tensor(name, "X", X, (None, table.shape[1]), (table.dtype,))
    check_tensor(name, "source", source, (None,), INT32)
    check_devices(name, table=table, state=state, rows=rows, coef=coef, X=X, source=source)
    for label, tensor in (("table", table), ("state", state)):
        if not tensor.is_contiguous():
            raise InputError(
                f"{name}: {label} is changed in place and must be contiguous, got strides {tensor.stride()}"
            )
    if X.data_ptr() == table.data_ptr() and X.numel():
        raise InputError(f"{name}: X must not be the table that is updated; pass a copy")
    if len(rows) and (len(source) == 0 or len(rows) % len(source)):
        raise InputError(f"{name}: the length of source must divide that of rows, got {len(source)} and {len(rows)}")


def check_top_k(queries: Tensor, V: Tensor, k: int, score: Score, seen: tuple[Tensor, Tensor] | None) -> None:
    """Check the arguments of `top_k`."""
    name = "top_k"
    check_choice(name, "score", score, Score)
    check_tensor(name, "queries", queries, (None, None), FLOATS)
    check_tensor(name, "V", V, (None, queries.shape[1]), (queries.dtype,))
    check_devices(name, queries=queries, V=V)
    if k < 1:
        raise InputError(f"{name}: k must be at least 1, got {k}")
    if seen is not None:
        check_tensor(name, "the indptr of seen", seen[0], (len(queries) + 1,), INT64)
        check_tensor(name, "the indices of seen", seen[1], (None,), INT32)
        check_devices(name, queries=queries, indptr=seen[0], indices=seen[1])
