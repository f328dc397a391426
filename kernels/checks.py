"""Checks of the operations' arguments, one set for all backends.

Reading the values of a tensor waits for a GPU. Checks that do so say it.
"""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import torch
from torch import Tensor

from drm_triton.errors import InputError
from drm_triton.kernels import devices
from drm_triton.kernels.precision import arithmetic
from drm_triton.kernels.streams import ITEM_TABLE, USER_TABLE
from drm_triton.names import MAX_SEED, TAU_RANGE, Score

if TYPE_CHECKING:
    from drm_triton.kernels.batches import ListBatch, SharedNegatives
    from drm_triton.kernels.protocol import CatalogueBatch, GradientTerms, ListPlan, Objective, PackedItems, Rounding

CSR_CHUNK = 1 << 24  # indices checked at a time
FLOATS, INT32, INT64, BOOL = (torch.float32, torch.float64), (torch.int32,), (torch.int64,), (torch.bool,)
TABLES = (*FLOATS, torch.bfloat16)


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
    matches = tensor.ndim == len(shape)
    for want, size in zip(shape, tensor.shape, strict=False):  # a training step checks forty tensors
        matches = matches and (want is None or want == size)
    if not matches:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise InputError(f"{function}: {name} must have shape [{wanted}], got {list(tensor.shape)}")


def check_devices(function: str, **tensors: Tensor) -> None:
    """Raise unless all tensors are on one device."""
    (reference, tensor), *others = tensors.items()
    for name, other in others:
        if other.device != tensor.device:
            raise InputError(f"{function}: {name} must be on {tensor.device} as {reference} is, got {other.device}")


def values_of(tensor: Tensor) -> Any:
    """Return a CPU tensor as a NumPy array, so that torch's threads do not compete with those of the kernels."""
    return tensor.detach().numpy() if devices.on_host(tensor) else tensor


def check_index(function: str, name: str, index: Tensor, size: int) -> None:
    """Raise unless every element of `index` is in 0 .. size - 1. Reads the values."""
    values = values_of(index)
    if index.numel() == 0:
        return
    if devices.on_host(index):  # as unsigned numbers, negative ones are the largest: one pass is enough
        outside = values.view(f"u{values.itemsize}").max() >= size
    else:
        outside = values.min() < 0 or values.max() >= size
    if outside:
        raise InputError(f"{function}: {name} must be in [0, {size}), got values {values.min()} to {values.max()}")


def check_rows(function: str, of: str, indptr: Tensor, indices: Tensor, n_items: int) -> None:
    """Raise unless each row indices[indptr[i] : indptr[i + 1]] contains items below n_items, strictly ascending."""
    library, ends = (np, values_of(indptr)) if devices.on_host(indptr) else (torch, indptr)
    first, last = int(ends[0]), int(ends[-1])
    if not (first >= 0 and last <= len(indices) and bool((ends[1:] >= ends[:-1]).all())):
        raise InputError(f"{function}: the indptr{of} must ascend within [0, {len(indices)}], the length of indices")
    for start in range(first, last, CSR_CHUNK):
        chunk = indices[start : min(start + CSR_CHUNK + 1, last)]
        check_index(function, f"the indices{of}", chunk, n_items)
        items = values_of(chunk)
        falls = library.where(items[1:] <= items[:-1])[0] + (start + 1)
        if bool((ends[library.searchsorted(ends, falls)] != falls).any()):  # only a new row may start lower
            raise InputError(f"{function}: the indices{of} must ascend within each row, without repeats")


def check_sample(plan: ListPlan, epoch: int, start: int, stop: int) -> None:
    """Check the arguments of `sample_lists`."""
    check_integer("sample_lists", "epoch", epoch, 0, 2**60)
    check_integer("sample_lists", "start", start, 0, 2**60)
    check_integer("sample_lists", "stop", stop, start, 2**60)
    if start % plan.share:
        raise InputError(
            f"sample_lists: start must be a multiple of share = {plan.share}, so that groups stay whole, got {start}"
        )
    if plan.user_sampling == "proportional" and stop > plan.n_lists:
        raise InputError(f"sample_lists: an epoch has {plan.n_lists} lists, cannot draw number {stop - 1}")


def check_sample_users(plan: ListPlan, seeds: Tensor, epoch: int, most: int) -> None:
    """Check the arguments of `sample_users`."""
    check_integer("sample_users", "epoch", epoch, 0, 2**60)
    check_integer("sample_users", "most", most, 1)
    check_tensor("sample_users", "seeds", seeds, (len(plan.indptr) - 1,), INT64)
    check_devices("sample_users", indptr=plan.indptr, seeds=seeds)
    if plan.share != 1 or plan.user_sampling != "proportional":
        raise InputError(
            "sample_users: the plan must have share 1 and proportional sampling, "
            f"got share {plan.share} and {plan.user_sampling}"
        )


def check_lists(U: Tensor, V: Tensor, batch: ListBatch, objective: Objective, values: bool = True) -> None:
    """Check the arguments of `list_gradients`; the values of the batch only if `values`."""
    name, users = "list_gradients", batch.users
    check_tensor(name, "U", U, (None, None), TABLES)
    check_tensor(name, "V", V, (None, U.shape[1]), (U.dtype,))
    check_tensor(name, "users", users, (None,), INT32)
    n = batch.check_shapes(name, objective.rho)
    check_devices(name, U=U, V=V, users=users)
    if not objective.rho < n:
        raise InputError(f"{name}: a list needs more than rho = {objective.rho} items, the negatives, got {n}")
    if objective.at_k:
        raise InputError(f"{name}: at_k needs lists that are the whole catalogue")
    if objective.drm and n < objective.K:
        raise InputError(f"{name}: k must be at most the list length {n}, got {objective.K}")
    for label, table in (("U", U), ("V", V)):
        if 0 in table.shape:
            raise InputError(f"{name}: {label} must have at least one row and one column, got {list(table.shape)}")
    if values:
        check_index(name, "users", users, len(U))
        batch.check_values(name, len(V))


def check_catalogue(U: Tensor, V: Tensor, batch: CatalogueBatch, objective: Objective) -> None:
    """Check the arguments of `catalogue_gradients`."""
    name = "catalogue_gradients"
    if objective.parts != ("softmax",):
        raise InputError(f"{name}: the objective must be softmax alone")
    if batch.pool is not None and not 1 <= batch.pool.n_negatives <= len(batch.pool.items) == len(V):
        raise InputError(f"{name}: V must hold the {len(batch.pool.items)} items of the pool, got {len(V)} rows")
    check_tensor(name, "U", U, (None, None), TABLES)
    check_tensor(name, "V", V, (None, U.shape[1]), (U.dtype,))
    if 0 in V.shape:
        raise InputError(f"{name}: V must have at least one row and one column, got {list(V.shape)}")
    check_tensor(name, "users", batch.users, (None,), INT32)
    check_tensor(name, "the indptr of batch", batch.indptr, (len(batch.users) + 1,), INT64)
    check_tensor(name, "the indices of batch", batch.indices, (None,), INT32)
    check_devices(name, U=U, V=V, users=batch.users, indptr=batch.indptr, indices=batch.indices)
    if batch.weights is not None:
        check_tensor(name, "the weights of batch", batch.weights, (len(batch.indices),), (arithmetic(U.dtype),))
        check_devices(name, U=U, weights=batch.weights)
    if batch.prior is not None:
        check_tensor(name, "the prior of batch", batch.prior, (len(V),), (arithmetic(U.dtype),))
        check_devices(name, U=U, prior=batch.prior)
    if devices.on_host(U):
        check_index(name, "users", batch.users, len(U))
        check_rows(name, " of batch", batch.indptr, batch.indices, len(V))


def check_shared(function: str, shared: SharedNegatives, items: Tensor, rho: int | None = None) -> None:
    """Check the shapes of shared negatives against the items [B, n] of their lists, rho of them positives if given."""
    check_integer(function, "the size of shared", shared.size, 1)
    B, n = items.shape
    check_tensor(function, "the items of shared", shared.items, (-(-B // shared.size), None), INT32)
    eta = shared.items.shape[1]
    check_tensor(function, "replaced of shared", shared.replaced, (B, eta), BOOL)
    check_devices(function, items=items, shared=shared.items, replaced=shared.replaced)
    if eta > n or (rho is not None and eta != n - rho):
        wanted = f"at most {n}" if rho is None else f"{n - rho}"
        raise InputError(f"{function}: the items of shared must have {wanted} columns, the negatives, got {eta}")


def check_update(
    table: Tensor,
    state: Tensor,
    terms: GradientTerms,
    lr: float | Tensor,
    score: Score,
    dense: Tensor | None,
    rounding: Rounding | None,
    values: bool = True,
) -> None:
    """Check the arguments of `update_rows`; the values of rows and sources only if `values`."""
    name = "update_rows"
    rows, coefficients, vectors, sources, shared, totals, sums = terms
    check_choice(name, "score", score, Score)
    check_tensor(name, "table", table, (None, None), TABLES)
    dtype = arithmetic(table.dtype)
    if isinstance(lr, Tensor):
        check_tensor(name, "lr", lr, (), (torch.float64,))
        check_devices(name, table=table, lr=lr)
    else:
        check_number(name, "lr", lr, 0)
    check_tensor(name, "state", state, tuple(table.shape), (dtype,))
    check_tensor(name, "rows", rows, (None, None), INT32)
    check_tensor(name, "coefficients", coefficients, tuple(rows.shape), (dtype,))
    check_tensor(name, "vectors", vectors, (None, table.shape[1]), tuple({dtype: None, table.dtype: None}))
    check_tensor(name, "sources", sources, (len(rows),), INT32)
    tensors = {"table": table, "state": state, "rows": rows, "coefficients": coefficients, "vectors": vectors}
    check_devices(name, **tensors, sources=sources)
    if dense is not None:
        check_tensor(name, "dense", dense, tuple(table.shape), (dtype,))
        check_devices(name, table=table, dense=dense)
    if rounding is not None:
        _check_rounding(name, rounding, table)
    elif table.dtype == torch.bfloat16:
        raise InputError(f"{name}: a table of bfloat16 needs rounding, or small steps would be lost")
    for label, tensor in (("table", table), ("state", state)):
        if not tensor.is_contiguous():
            raise InputError(
                f"{name}: {label} is changed in place and must be contiguous, got strides {tensor.stride()}"
            )
    if shared is not None and (totals is not None or sums is not None):
        raise InputError(f"{name}: terms with totals or sums are summed already, and cannot have shared ones")
    if sums is not None:
        check_tensor(name, "sums", sums, (None, table.shape[1]), (dtype,))
        check_devices(name, table=table, sums=sums)
    for label, other in (("vectors", vectors), ("sums", sums), ("dense", dense)):
        if other is not None and _overlap(table, other):
            raise InputError(f"{name}: {label} must not be, or overlap, the table that is updated; pass a copy")
    if rows.numel() and 0 in vectors.shape:
        raise InputError(f"{name}: vectors must have at least one row and one column, got {list(vectors.shape)}")
    if shared is not None:
        check_shared(name, shared, rows)
    if totals is not None:
        check_tensor(name, "totals", totals, tuple(rows.shape), (dtype,))
        check_devices(name, table=table, totals=totals)
    if values and rows.numel():
        check_index(name, "rows", rows, len(table))
        check_index(name, "sources", sources, len(vectors) + (0 if sums is None else len(sums)))
        if shared is not None:
            check_index(name, "the items of shared", shared.items, len(table))


def _check_rounding(function: str, rounding: Rounding, table: Tensor) -> None:
    """Check what keys the bits that round a table."""
    check_integer(function, "the seed of rounding", rounding.seed, 0, MAX_SEED)
    check_integer(function, "the table of rounding", rounding.table, ITEM_TABLE, USER_TABLE)
    if isinstance(rounding.step, Tensor):
        check_tensor(function, "the step of rounding", rounding.step, (), INT64)
        check_devices(function, table=table, step=rounding.step)
    else:
        check_integer(function, "the step of rounding", rounding.step, 0)
    check_integer(function, "the first row of rounding", rounding.first_row, 0)


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Return whether the memory of two tensors overlaps."""
    (a_start, a_end), (b_start, b_end) = _span(a), _span(b)
    return b_start < a_end and a_start < b_end


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return the addresses of a tensor's first element and of the end of its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size() if tensor.numel() else start


def largest_norm(function: str, label: str, factors: Tensor) -> float:
    """Return the norm of the longest row. Values that are not finite are an error."""
    if devices.on_host(factors) and factors.numel() and factors.dtype == torch.float32:
        rows = values_of(factors)
        norm = math.sqrt(np.einsum("ij,ij->i", rows, rows).max())
    else:
        norm = 0.0 if len(factors) == 0 else math.nan
    if not math.isfinite(norm):  # or the square overflows float32
        norm = torch.linalg.vector_norm(factors.detach(), dim=1, dtype=arithmetic(factors.dtype)).max().item()
    if not math.isfinite(norm) and not factors.isfinite().all():
        raise InputError(f"{function}: {label} holds values that are not finite (NaN or infinity)")
    return norm


def check_items(V: Tensor, score: Score) -> float:
    """Check the arguments of `pack_items`, values too; return the norm of the longest row."""
    check_choice("pack_items", "score", score, Score)
    check_tensor("pack_items", "V", V, (None, None), TABLES)
    if V.shape[1] == 0:
        raise InputError(f"pack_items: V must have at least one column, got {list(V.shape)}")
    return largest_norm("pack_items", "V", V)


def check_top_k(
    queries: Tensor, items: PackedItems, k: int, seen: tuple[Tensor, Tensor] | None, values: bool = True
) -> None:
    """Check the arguments of `top_k`; the values of queries and seen items only if `values`."""
    name, V = "top_k", items.V
    check_tensor(name, "queries", queries, (None, V.shape[1]), (V.dtype,))
    check_devices(name, queries=queries, items=V)
    check_integer(name, "k", k, 1)
    if seen is not None:
        check_tensor(name, "the indptr of seen", seen[0], (len(queries) + 1,), INT64)
        check_tensor(name, "the indices of seen", seen[1], (None,), INT32)
        check_devices(name, queries=queries, indptr=seen[0], indices=seen[1])
    if not values:
        return
    norm = largest_norm(name, "queries", queries)
    # No score, dot or l2, is larger than (|q| + |v|)^2.
    if not (norm + items.norm) ** 2 < torch.finfo(torch.float32).max:
        raise InputError(
            f"{name}: scores overflow: the rows of queries and V have norms up to {norm:.2g} and {items.norm:.2g}; "
            "scale them down"
        )
    if seen is not None:
        check_rows(name, " of seen", *seen, len(V))


def can_rank(queries: Tensor, items: PackedItems, seen: tuple[Tensor, Tensor] | None) -> Tensor:
    """Return which queries pass the checks of values in `check_top_k`, without reading them: bool [m]."""
    norm = torch.linalg.vector_norm(queries, dim=1, dtype=arithmetic(queries.dtype)).double()
    valid: Tensor = (norm + items.norm).square() < torch.finfo(torch.float32).max  # not if NaN
    return valid if seen is None else valid & rows_ascend(*seen, len(items.V))


def rows_ascend(indptr: Tensor, indices: Tensor, n_items: int) -> Tensor:
    """Return whether `check_rows` would pass, as a tensor: a bool that the host has not read."""
    n = len(indices)
    place = torch.arange(n, device=indices.device)
    begins = torch.zeros(n + 1, dtype=torch.bool, device=indices.device)  # whether a row begins here
    begins.index_fill_(0, indptr.clamp(0, n), True)
    right = (indices >= 0) & (indices < n_items)
    right[1:] &= (indices[1:] > indices[:-1]) | begins[1:n]
    unused = (place < indptr[0]) | (place >= indptr[-1])
    return (right | unused).all() & (indptr[1:] >= indptr[:-1]).all() & (indptr[0] >= 0) & (indptr[-1] <= n)


def check_softsort(function: str, s: Tensor, w: Tensor, tau: float, mask: Tensor, **others: Tensor) -> None:
    """Check the arguments of `soft_topk_forward`, `soft_topk_backward` and `drm_lists`; `others` are [B, n] like s."""
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
