"""What the backends share: the arguments and results of the operations, validated once.

Every backend (`reference`, `cpu`, `gpu`) offers the same functions on torch tensors:

    sample_lists(plan, epoch, start, stop)                          -> users [B], items [B, n]
    list_gradients(U, V, users, items, objective, share)            -> ListGradients
    update_rows(table, state, rows, coef, X, source, lr, score, share)    in place
    pack_items(V, score)                                            -> what top_k takes in place of V, for many calls
    top_k(queries, V, k, score, seen)                               -> items [m, k], scores [m, k]
    soft_topk_forward / soft_topk_backward / drm_lists              behind drm_triton.drm_loss

`share` tells that lists come in groups of so many, in which most lists have the same item at the same position (see
`ListPlan`). It may change the speed and the rounding, never the meaning: the items of each list are those in `items`.
Only where factors are not finite may it spoil other lists of the group too.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral, Real
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from drm_triton.errors import InputError

Score = Literal["dot", "l2"]
Weight = Literal["uniform", "precision", "recall", "ndcg", "ap"]
UserSampling = Literal["proportional", "uniform"]

ADAGRAD_EPS = 1e-10
TAU_RANGE = (1e-32, 1e32)  # beyond it, rank / tau or its inverse is no number in float32
CSR_BLOCK = 1 << 24  # indices looked at together
FLOATS, INT32, INT64 = (torch.float32, torch.float64), (torch.int32,), (torch.int64,)


def check_choice(function: str, name: str, value: str, choices: object) -> None:
    """Raise unless `value` is one of a Literal's values."""
    if value not in get_args(choices):
        raise InputError(f"{function}: {name} must be one of {', '.join(get_args(choices))}, got {value!r}")


def check_integer(function: str, name: str, value: object, least: int, most: float = math.inf) -> None:
    """Raise unless `value` is an integer in least .. most."""
    if not (isinstance(value, Integral) and least <= int(value) <= most):
        rule = f"of at least {least}" if most == math.inf else f"from {least} to {most}"
        raise InputError(f"{function}: {name} must be an integer {rule}, got {value!r}")


def check_number(function: str, name: str, value: object, least: float = -math.inf, most: float = math.inf) -> None:
    """Raise unless `value` is a finite number in least .. most."""
    if not (isinstance(value, Real) and least <= float(value) <= most and math.isfinite(value)):
        rule = "" if least == -math.inf else f" and at least {least}" + (f", at most {most}" if most < math.inf else "")
        raise InputError(f"{function}: {name} must be finite{rule}, got {value!r}")


def check_tau(function: str, tau: object) -> None:
    """Raise unless `tau` is a temperature that float32 can divide by."""
    check_number(function, "tau", tau, *TAU_RANGE)


def check_dense(function: str, name: str, tensor: object) -> None:
    """Raise unless given a dense torch tensor."""
    if not isinstance(tensor, Tensor):
        raise InputError(f"{function}: {name} must be a torch tensor, got {type(tensor).__name__}")
    if tensor.layout != torch.strided:
        raise InputError(f"{function}: {name} must be dense, got layout {tensor.layout}")


def check_not_meta(function: str, name: str, tensor: Tensor) -> None:
    """Raise unless the tensor has values."""
    if tensor.device.type == "meta":
        raise InputError(f"{function}: {name} must hold values, got a tensor on the meta device")


def check_tensor(
    function: str, name: str, tensor: Tensor, shape: tuple[int | None, ...], dtypes: tuple[torch.dtype, ...]
) -> None:
    """Raise unless a tensor has this shape (None leaves a size free) and one of these types."""
    check_dense(function, name, tensor)
    check_not_meta(function, name, tensor)
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


def values_of(tensor: Tensor) -> Any:
    """A tensor on the CPU as a NumPy array: torch's threads would spin beside the kernels' own; another as it is."""
    return tensor.detach().numpy() if tensor.device.type == "cpu" else tensor


def check_index(function: str, name: str, index: Tensor, size: int) -> None:
    """Raise unless every element of `index` is in 0 .. size - 1; reads them, so it waits for a GPU."""
    values = values_of(index)
    if index.numel() and (values.min() < 0 or values.max() >= size):
        raise InputError(f"{function}: {name} must be in [0, {size}), got values {values.min()} to {values.max()}")


def check_rows(function: str, of: str, indptr: Tensor, indices: Tensor, n_items: int) -> None:
    """Raise unless each row, indices[indptr[i] : indptr[i + 1]], holds items 0 .. n_items - 1, strictly ascending."""
    library, ends = (np, values_of(indptr)) if indptr.device.type == "cpu" else (torch, indptr)
    first, last = int(ends[0]), int(ends[-1])
    if not (first >= 0 and last <= len(indices) and bool((ends[1:] >= ends[:-1]).all())):
        raise InputError(f"{function}: the indptr{of} must ascend within [0, {len(indices)}], the length of indices")
    for start in range(first, last, CSR_BLOCK):
        part = indices[start : min(start + CSR_BLOCK + 1, last)]
        check_index(function, f"the indices{of}", part, n_items)
        items = values_of(part)
        falls = library.where(items[1:] <= items[:-1])[0] + (start + 1)
        if bool((ends[library.searchsorted(ends, falls)] != falls).any()):  # only a new row may start over
            raise InputError(f"{function}: the indices{of} must ascend within each row, without repeats")


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
        check_integer("Objective", "rho", self.rho, 1)
        if self.k is not None:
            check_integer("Objective", "k", self.k, 1)
        check_tau("Objective", self.tau)
        check_number("Objective", "lam", self.lam, 0)
        check_number("Objective", "margin", self.margin)
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

    Negatives are uniform over the items a user has not, drawn for each list, or once for every `share` lists that
    follow each other: then a list takes the draws it shares, and one of its own in place of each that is an item of its
    user. Either way those of one list are independent and uniform; sharing spares most of the gathers.

    Parameters
    ----------
    indptr : int64 [M + 1], indices : int32 [nnz], strictly ascending within a row: the training interactions. They
        are looked through once, here, so that no sampler has to; a copy is kept unless they are contiguous.
    """

    indptr: Tensor
    indices: Tensor
    n_items: int
    rho: int
    eta: int
    seed: int = 0
    user_sampling: UserSampling = "proportional"
    share: int = 1

    def __post_init__(self) -> None:
        check_choice("ListPlan", "user_sampling", self.user_sampling, UserSampling)
        for name in ("rho", "eta", "share"):
            check_integer("ListPlan", name, getattr(self, name), 1, 2**31 - 1)
        check_integer("ListPlan", "n_items", self.n_items, 1, 2**31 - 1)
        check_integer("ListPlan", "seed", self.seed, 0, 2**63 - 1)
        check_tensor("ListPlan", "indptr", self.indptr, (None,), INT64)
        check_tensor("ListPlan", "indices", self.indices, (None,), INT32)
        check_devices("ListPlan", indptr=self.indptr, indices=self.indices)
        ends = self.indptr[[0, -1]].tolist() if len(self.indptr) else []
        if ends != [0, len(self.indices)]:
            raise InputError(
                f"ListPlan: indptr must go from 0 to {len(self.indices)}, the length of indices, got ends {ends}"
            )
        check_rows("ListPlan", "", self.indptr, self.indices, self.n_items)
        for name in ("indptr", "indices"):  # kernels address them by position
            object.__setattr__(self, name, getattr(self, name).contiguous())
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


# What every backend checks of its arguments. Values are read, which waits for a GPU, where that is said.


def check_sample(plan: ListPlan, epoch: int, start: int, stop: int) -> None:
    """Check the arguments of `sample_lists`."""
    check_integer("sample_lists", "epoch", epoch, 0, 2**60)
    check_integer("sample_lists", "start", start, 0, 2**60)
    check_integer("sample_lists", "stop", stop, start, 2**60)
    if plan.user_sampling == "proportional" and stop > plan.n_lists:
        raise InputError(f"sample_lists: an epoch holds {plan.n_lists} lists, asked for number {stop - 1}")


def check_lists(
    U: Tensor, V: Tensor, users: Tensor, items: Tensor, objective: Objective, share: int, values: bool = True
) -> None:
    """Check the arguments of `list_gradients`; the values of users and items only if `values`."""
    name = "list_gradients"
    check_integer(name, "share", share, 1)
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
    for label, table in (("U", U), ("V", V)):
        if 0 in table.shape:
            raise InputError(f"{name}: {label} must have at least one row and one column, got {list(table.shape)}")
    if values:
        check_index(name, "users", users, len(U))
        check_index(name, "items", items, len(V))


def check_update(
    table: Tensor,
    state: Tensor,
    rows: Tensor,
    coef: Tensor,
    X: Tensor,
    source: Tensor,
    lr: float,
    score: Score,
    share: int,
    values: bool = True,
) -> None:
    """Check the arguments of `update_rows`; the values of rows and source only if `values`."""
    name = "update_rows"
    check_integer(name, "share", share, 1)
    check_choice(name, "score", score, Score)
    check_number(name, "lr", lr, 0)
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
    (table_start, table_end), (start, end) = _span(table), _span(X)
    if start < table_end and table_start < end:
        raise InputError(f"{name}: X must not be, or overlap, the table that is updated; pass a copy")
    if len(rows) and (len(source) == 0 or len(rows) % len(source)):
        raise InputError(f"{name}: the length of source must divide that of rows, got {len(source)} and {len(rows)}")
    if len(rows) and 0 in X.shape:
        raise InputError(f"{name}: X must have at least one row and one column, got {list(X.shape)}")
    if values and len(rows):
        check_index(name, "rows", rows, len(table))
        check_index(name, "source", source, len(X))


def _span(tensor: Tensor) -> tuple[int, int]:
    """First address of a tensor's elements, and the one past the last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size() if tensor.numel() else start


def largest_norm(function: str, label: str, factors: Tensor) -> float:
    """Norm of the longest row; an error if there are values that are not finite."""
    if factors.device.type == "cpu" and factors.numel() and factors.dtype == torch.float32:
        rows = values_of(factors)
        norm = math.sqrt(np.einsum("ij,ij->i", rows, rows).max())
    else:
        norm = 0.0 if len(factors) == 0 else math.nan
    if not math.isfinite(norm):  # or beyond what a square in float32 can be
        norm = torch.linalg.vector_norm(factors.detach(), dim=1).max().item()
    if not math.isfinite(norm) and not factors.isfinite().all():
        raise InputError(f"{function}: {label} holds values that are not finite (NaN or infinity)")
    return norm


def check_top_k(
    queries: Tensor,
    V: Tensor,
    k: int,
    score: Score,
    seen: tuple[Tensor, Tensor] | None,
    norm_of_V: float | None = None,
) -> None:
    """Check the arguments of `top_k`, their values too; those of V are known if its largest norm is given."""
    name = "top_k"
    check_choice(name, "score", score, Score)
    check_tensor(name, "queries", queries, (None, None), FLOATS)
    check_tensor(name, "V", V, (None, queries.shape[1]), (queries.dtype,))
    check_devices(name, queries=queries, V=V)
    check_integer(name, "k", k, 1)
    if queries.shape[1] == 0:
        raise InputError(f"{name}: queries must have at least one column, got {list(queries.shape)}")
    of_queries = largest_norm(name, "queries", queries)
    of_V = largest_norm(name, "V", V) if norm_of_V is None else norm_of_V
    # No score, dot or l2, is larger than (|q| + |v|)^2.
    if not (of_queries + of_V) ** 2 < torch.finfo(torch.float32).max:
        raise InputError(
            f"{name}: scores overflow: the rows of queries and V have norms up to {of_queries:.2g} and {of_V:.2g}; "
            "scale them down"
        )
    if seen is not None:
        check_tensor(name, "the indptr of seen", seen[0], (len(queries) + 1,), INT64)
        check_tensor(name, "the indices of seen", seen[1], (None,), INT32)
        check_devices(name, queries=queries, indptr=seen[0], indices=seen[1])
        check_rows(name, " of seen", *seen, len(V))


def check_softsort(function: str, s: Tensor, w: Tensor, tau: float, mask: Tensor, **others: Tensor) -> None:
    """Check what `soft_topk_forward`, `soft_topk_backward` and `drm_lists` share; `others` are [B, n] like s."""
    check_tau(function, tau)
    check_tensor(function, "s", s, (None, None), FLOATS)
    B, n = s.shape
    check_tensor(function, "w", w, (B, None), (s.dtype,))
    if not 1 <= w.shape[1] <= n:
        raise InputError(f"{function}: k must be from 1 to n, got {w.shape[1]} rank weights for lists of {n} entries")
    check_tensor(function, "mask", mask, (B, n), (torch.bool,))
    for name, x in others.items():
        check_tensor(function, name, x, (B, n), (s.dtype,))
    check_devices(function, s=s, w=w, mask=mask, **others)
