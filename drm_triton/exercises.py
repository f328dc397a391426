"""Every operation of a backend on random inputs of given sizes: what `doctor` compares with the reference.

Factors are multiples of 2^-7 in the unit ball, and under `cosine` on the unit sphere. So scores are exact in float32 in
any order of summation. A backend then ranks as the reference does, ties included, and all values can be compared.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from drm_triton.kernels import reference
from drm_triton.kernels.protocol import (
    Backend,
    CatalogueBatch,
    GradientTerms,
    ListBatch,
    ListPlan,
    Objective,
    row_score,
)
from drm_triton.names import LOSSES, Score

SIDE = 128  # factors are multiples of 1 / SIDE
TOP = 10  # items that `top_k` finds
DEGREE = 8  # items of a user, on average
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-12}  # of the largest entry, or of 1 if that is larger
LR, TAU = 0.1, 1.0

Outputs = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """Sizes of the inputs: B lists of n items, d factors."""

    n: int
    d: int
    score: Score = "dot"
    share: int = 1  # lists that share negatives
    dtype: torch.dtype = torch.float32
    B: int = 9  # with share 4, the last group has one list
    n_users: int = 30
    n_items: int = 200
    rho: int = 0  # positives, and ranks of the relaxed sort; 0 means one, and more for more than 46 items

    def __post_init__(self) -> None:
        if self.rho == 0:
            object.__setattr__(self, "rho", min(8, max(1, self.n // 24)))

    def __str__(self) -> str:
        shared = f", groups of {self.share}" if self.share > 1 else ""
        return f"n {self.n}, d {self.d}, {self.score}{shared}, {str(self.dtype).removeprefix('torch.')}"


# Every kernel for which a GPU can use several warps has several here (tests/test_doctor.py).
SEVERAL_WARPS = [Case(80, 128, "l2", 4), Case(140, 64, "dot")]
# For backends without warps, above all Triton's interpreter, which takes seconds for a list.
SMALL = [Case(18, 12, "l2", 2, B=3, n_users=4, n_items=20)]


@dataclass
class Inputs:
    """Arguments of the operations. `update_rows` changes the tables in place."""

    case: Case
    plan: ListPlan
    U: Tensor
    V: Tensor
    U_state: Tensor
    V_state: Tensor
    batch: ListBatch
    g: Tensor  # [B, n], dL/ds
    user_grad: Tensor  # [B, d]
    s: Tensor  # [B, n] scores of lists without a model
    y: Tensor  # [B, n] relevance
    q: Tensor  # [B, n], dL/dQ
    w: Tensor  # [B, K] rank weights
    mask: Tensor  # bool [B, n]

    @classmethod
    def of(cls, case: Case, seed: int = 0) -> "Inputs":
        """Draw inputs, in float32 on the CPU."""
        random = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=random, dtype=torch.float64)

        B, n, d, K = case.B, case.n, case.d, case.rho
        x = normal(case.n_users + case.n_items, d)
        x = (x * 0.9 * SIDE / x.norm(dim=1, keepdim=True)).trunc()  # shorter than SIDE
        if case.score == "cosine":
            rest = (SIDE**2 - x[:, 4:].square().sum(1)).int().tolist()
            signs = torch.where(x[:, :4] < 0, -1, 1)
            x[:, :4] = signs * torch.tensor([four_squares(total) for total in rest])
        U, V = (x / SIDE).split([case.n_users, case.n_items])
        dense = torch.rand(case.n_users, case.n_items, generator=random) < DEGREE / case.n_items
        dense[:, 0] |= ~dense.any(1)
        indptr = torch.cat([torch.zeros(1, dtype=torch.int64), dense.sum(1).cumsum(0)])
        indices = dense.nonzero()[:, 1].to(torch.int32)
        plan = ListPlan(indptr, indices, case.n_items, K, n - K, seed, "uniform", case.share)
        g = normal(B, n) * (torch.rand(B, n, generator=random) < 0.5)  # of a hinge, most are 0
        s, q = normal(B, n), normal(B, n)
        y, w = (s > 1).double(), torch.rand(B, K, generator=random, dtype=torch.float64)
        mask = torch.rand(B, n, generator=random) < 0.9
        made = cls(
            case, plan, U, V, torch.full_like(U, 0.1), torch.full_like(V, 0.1),
            reference.sample_lists(plan, 1, 0, B), g, normal(B, d), s, y, q, w, mask,
        )  # fmt: skip
        return made.to(torch.device("cpu"), torch.float32)

    def to(self, device: torch.device, dtype: torch.dtype) -> "Inputs":
        """Copy the inputs to a device, and the floats to a type."""

        def moved(x: Any) -> Any:
            if isinstance(x, Tensor):
                return x.to(device, dtype if x.is_floating_point() else x.dtype, copy=True)
            return x._make(map(moved, x)) if hasattr(x, "_make") else x

        values = {field.name: moved(getattr(self, field.name)) for field in dataclasses.fields(self)}
        moved_rows = {"indptr": moved(self.plan.indptr), "indices": moved(self.plan.indices)}
        return Inputs(**values | {"plan": dataclasses.replace(self.plan, **moved_rows)})


def four_squares(total: int) -> list[int]:
    """Return four numbers whose squares add up to `total`. Lagrange showed that there always are some."""

    def squares(total: int, count: int) -> list[int] | None:
        root = math.isqrt(total)
        if count == 1:
            return [root] if root * root == total else None
        tails = ((first, squares(total - first * first, count - 1)) for first in range(root, -1, -1))
        return next(([first, *tail] for first, tail in tails if tail is not None), None)

    found = squares(total, 4)
    assert found is not None
    return found


def sample_lists(backend: Backend, x: Inputs) -> Outputs:
    """Draw the lists of the batch; the same on every backend, to the bit."""
    batch = backend.sample_lists(x.plan, 1, 0, x.case.B)
    shared = {} if batch.shared is None else {"shared": batch.shared.items, "replaced": batch.shared.replaced}
    return {"users": batch.users, "items": batch.items, **shared}


def sample_users(backend: Backend, x: Inputs) -> Outputs:
    """Draw lists of each user as if the user were alone, as fold-in does."""
    plan = dataclasses.replace(x.plan, share=1, user_sampling="proportional")
    seeds = torch.arange(x.case.n_users, device=x.U.device) * 7919
    batch = backend.sample_users(plan, seeds, 1, 2)
    return {"users": batch.users, "items": batch.items}


def list_gradients(backend: Backend, x: Inputs) -> Outputs:
    """Compute hinge and drm, the objective of the paper."""
    return backend.list_gradients(x.U, x.V, x.batch, Objective(x.case.rho, x.case.score))._asdict()


def all_losses(backend: Backend, x: Inputs) -> Outputs:
    """Compute all losses at once, with rank weights."""
    on: dict[str, Any] = dict.fromkeys(LOSSES, True)
    return backend.list_gradients(
        x.U, x.V, x.batch, Objective(x.case.rho, x.case.score, weight="ndcg", lam=0.5, **on)
    )._asdict()


def update_rows(backend: Backend, x: Inputs) -> Outputs:
    """Take a step of items and users, as training does."""
    score = x.case.score
    backend.update_rows(x.V, x.V_state, GradientTerms.of_items(x.batch, x.g, x.U), LR, score)
    backend.update_rows(x.U, x.U_state, GradientTerms.of_rows(x.batch.users, x.user_grad), LR, row_score(score))
    return {"V": x.V, "V_state": x.V_state, "U": x.U, "U_state": x.U_state}


def dense_rows(backend: Backend, x: Inputs) -> Outputs:
    """Take a step of all items with a dense gradient, without terms and beside them."""
    score = x.case.score
    backend.update_rows(x.V, x.V_state, GradientTerms.none(x.V), LR, score, x.V_state - x.V)
    terms = GradientTerms.of_items(x.batch, x.g, x.U)
    backend.update_rows(x.V, x.V_state, terms, LR, score, x.V_state - x.V)
    return {"V": x.V, "V_state": x.V_state}


def catalogue_gradients(backend: Backend, x: Inputs) -> Outputs:
    """Compute the softmax over the whole catalogue, the default objective."""
    objective = Objective(1, x.case.score, hinge=False, drm=False, softmax=True)
    users = torch.arange(x.case.n_users, dtype=torch.int32, device=x.U.device)
    batch = CatalogueBatch(users, x.plan.indptr, x.plan.indices)
    return backend.catalogue_gradients(x.U, x.V, batch, objective)._asdict()


def soft_topk(backend: Backend, x: Inputs) -> Outputs:
    """Compute the relaxed top K, its gradient, and the DRM loss, for the torch functions."""
    loss, ds = backend.drm_lists(x.s, x.y, x.w, TAU, x.mask)
    return {
        "Q": backend.soft_topk_forward(x.s, x.w, TAU, x.mask),
        "gradient": backend.soft_topk_backward(x.s, x.w, TAU, x.mask, x.q),
        "drm": loss,
        "ds": ds,
    }


def top_k(backend: Backend, x: Inputs) -> Outputs:
    """Rank the items that a user does not have."""
    seen = (x.plan.indptr, x.plan.indices)
    items, scores = backend.top_k(x.U, backend.pack_items(x.V, x.case.score), TOP, seen)
    return {"items": items, "scores": scores}


OPERATIONS: dict[str, Callable[[Backend, Inputs], Outputs]] = {
    function.__name__: function
    for function in (
        sample_lists, sample_users, list_gradients, all_losses, catalogue_gradients, update_rows, dense_rows, soft_topk,
        top_k,
    )
}  # fmt: skip
# The sizes that an operation depends on, if not on all of them.
SIZES = {
    "sample_lists": ("n", "share"),
    "sample_users": ("n",),
    "dense_rows": ("d", "score", "share", "dtype"),
    "catalogue_gradients": ("d", "score", "dtype"),
    "soft_topk": ("n", "dtype"),
    "top_k": ("d", "score"),
}
# Operations with float64, in which the Numba kernels compute less than the Triton kernels.
DOUBLE = {
    "reference": set(OPERATIONS) - {"sample_lists", "sample_users"},
    "triton": {"list_gradients", "all_losses", "update_rows", "dense_rows", "catalogue_gradients", "soft_topk"},
    "cpu": {"soft_topk"},
}


@dataclass(frozen=True)
class Finding:
    """How an operation did in a case.

    Attributes
    ----------
    difference : the largest from the reference in float64, relative to the largest entry of an output, or to 1
    worst : the output with this difference
    repeatable : whether a second run gave the same bits
    """

    operation: str
    case: Case
    difference: float
    worst: str
    repeatable: bool

    @property
    def problem(self) -> str | None:
        """What is wrong, None if nothing is."""
        if not self.difference <= TOLERANCE[self.case.dtype]:
            return f"{self.operation} ({self.case}): {self.worst} differs from the reference by {self.difference:.1e}"
        return None if self.repeatable else f"{self.operation} ({self.case}): two runs differ in their bits"


def distinct(backend: Backend, cases: Iterable[Case]) -> Iterator[tuple[str, Case]]:
    """Yield each operation with the cases that differ for it, in a precision that the backend has."""
    done = set()
    for case in cases:
        for name in OPERATIONS:
            key = (name, *(getattr(case, size) for size in SIZES.get(name, ("n", "d", "score", "share", "dtype"))))
            if key not in done and (case.dtype == torch.float32 or name in DOUBLE[backend.name]):
                done.add(key)
                yield name, case


def exercise(backend: Backend, device: torch.device, cases: Iterable[Case]) -> Iterator[Finding]:
    """Run all operations twice in each case, and compare with the reference in float64."""
    known: dict[tuple[str, Case], Outputs] = {}  # the reference does not depend on the precision of the backend
    for name, case in distinct(backend, cases):
        inputs, operation = Inputs.of(case), OPERATIONS[name]
        same = (name, dataclasses.replace(case, dtype=torch.float64))
        if same not in known:
            known[same] = operation(reference, inputs.to(torch.device("cpu"), torch.float64))
        first, second = (operation(backend, inputs.to(device, case.dtype)) for _ in range(2))
        worst, difference = max(differences(first, known[same]), key=lambda pair: pair[1])
        yield Finding(name, case, difference, worst, all(same_bits(first[key], second[key]) for key in first))


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have the same bits."""
    return a.cpu().numpy().tobytes() == b.cpu().numpy().tobytes()


def differences(outputs: Outputs, expected: Outputs) -> Iterator[tuple[str, float]]:
    """Yield each output and its difference from the reference (see `Finding`). Integers differ by 0 or infinity."""
    for name, right in expected.items():
        ours, there = outputs[name].cpu(), right.isfinite()
        if not right.is_floating_point() or not there.any():
            yield name, 0.0 if torch.equal(ours, right) else math.inf
            continue
        largest = (ours.double() - right)[there].abs().max().item() / max(1.0, right[there].abs().max().item())
        finite = torch.equal(ours.isfinite(), there) and math.isfinite(largest)
        yield name, largest if finite else math.inf
