"""Every operation of a backend on random inputs of given sizes: what `doctor` compares with the reference.

Factors are multiples of 2^-7 in the unit ball, and under `cosine` on the unit sphere. So scores are exact in float32 in
any order of summation. A backend then ranks as the reference does, ties included, and all values can be compared. They
are numbers of bfloat16 too, and the steps of `update_rows` are what rounds tables of that type.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from drm_triton.kernels import reference
from drm_triton.kernels.batches import ListBatch
from drm_triton.kernels.precision import arithmetic, table_type
from drm_triton.kernels.protocol import Backend, CatalogueBatch, GradientTerms, ListPlan, Objective, Rounding, row_score
from drm_triton.kernels.streams import ITEM_TABLE, USER_TABLE
from drm_triton.names import LOSSES, Score

SIDE = 128  # factors are multiples of 1 / SIDE
DEGREE = 8  # items of a user, on average
# Of the largest entry, or of 1 if that is larger. With tables of bfloat16, everything else is float32.
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-12, torch.bfloat16: 1e-4}
ROUNDINGS = {  # of the tables that operations return
    "V": Rounding(seed=3, step=5, table=ITEM_TABLE),
    "U": Rounding(seed=3, step=5, table=USER_TABLE),
    "V with terms": Rounding(seed=3, step=2**33, table=ITEM_TABLE),
}
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
    top: int = 10  # items that `top_k` finds

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
        """Copy the inputs to a device, the tables to a type, and other floats to that in which these are computed."""
        computed = arithmetic(dtype)

        def moved(x: Any) -> Any:
            if isinstance(x, Tensor):
                return x.to(device, computed if x.is_floating_point() else x.dtype, copy=True)
            return x._make(map(moved, x)) if hasattr(x, "_make") else x

        values = {field.name: moved(getattr(self, field.name)) for field in dataclasses.fields(self)}
        values |= {"U": moved(self.U).to(dtype), "V": moved(self.V).to(dtype)}
        moved_rows = {"indptr": moved(self.plan.indptr), "indices": moved(self.plan.indices)}
        return Inputs(**values | {"plan": dataclasses.replace(self.plan, **moved_rows)})

    def rounding(self, output: str) -> Rounding | None:
        """Return how an operation rounds a table that it returns. Values in float64 are those before the rounding."""
        rounds = self.case.dtype == torch.bfloat16 and self.U.dtype != torch.float64
        return ROUNDINGS[output] if rounds else None


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
    score, users = x.case.score, GradientTerms.of_rows(x.batch.users, x.user_grad)
    items = GradientTerms.of_items(x.batch, x.g, x.U)
    backend.update_rows(x.V, x.V_state, items, LR, score, rounding=x.rounding("V"))
    backend.update_rows(x.U, x.U_state, users, LR, row_score(score), rounding=x.rounding("U"))
    return {"V": x.V, "V_state": x.V_state, "U": x.U, "U_state": x.U_state}


def dense_rows(backend: Backend, x: Inputs) -> Outputs:
    """Take a step of all items with a dense gradient, without terms and beside them."""
    score, dense, terms = x.case.score, x.V_state - x.V, GradientTerms.of_items(x.batch, x.g, x.U)
    V, V_state = x.V.clone(), x.V_state.clone()
    backend.update_rows(x.V, x.V_state, GradientTerms.none(x.V), LR, score, dense, x.rounding("V"))
    backend.update_rows(V, V_state, terms, LR, score, dense, x.rounding("V with terms"))
    return {"V": x.V, "V_state": x.V_state, "V with terms": V, "V_state with terms": V_state}


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
    items, scores = backend.top_k(x.U, backend.pack_items(x.V, x.case.score), x.case.top, seen)
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
    "top_k": ("d", "score", "dtype"),
}
UPDATES = {"update_rows", "dense_rows"}
GRADIENTS = {"list_gradients", "all_losses", "catalogue_gradients"}
# Operations of each backend with types other than float32. Tables of the Numba kernels are always float32.
OTHER_TYPES = {
    torch.float64: {
        "reference": {*GRADIENTS, *UPDATES, "soft_topk", "top_k"},
        "triton": {*GRADIENTS, *UPDATES, "soft_topk"},
        "cpu": {"soft_topk"},
    },
    torch.bfloat16: {
        "reference": {*GRADIENTS, *UPDATES, "top_k"},
        "triton": {*GRADIENTS, *UPDATES, "top_k"},
        "cpu": UPDATES,
    },
}


@dataclass(frozen=True)
class Finding:
    """How an operation did in a case.

    Attributes
    ----------
    difference : the largest from the reference in float64, relative to the largest entry of an output, or to 1; that
        of a factor of bfloat16 is by how much it must have differed before it was rounded
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
            if key not in done and (case.dtype == torch.float32 or name in OTHER_TYPES[case.dtype][backend.name]):
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
        tables = table_type("bfloat16", backend.name) if case.dtype == torch.bfloat16 else case.dtype
        first, second = (operation(backend, inputs.to(device, tables)) for _ in range(2))
        repeatable = all(same_bits(first[key], second[key]) for key in first)
        if case.dtype == torch.bfloat16 and name in UPDATES:
            for table in ROUNDINGS.keys() & first:
                first[table] = before_rounding(first[table].cpu(), known[same][table], ROUNDINGS[table])
        worst, difference = max(differences(first, known[same]), key=lambda pair: pair[1])
        yield Finding(name, case, difference, worst, repeatable)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have the same bits."""
    return a.cpu().view(torch.uint8).numpy().tobytes() == b.cpu().view(torch.uint8).numpy().tobytes()


def before_rounding(table: Tensor, exact: Tensor, rounding: Rounding) -> Tensor:
    """Return the numbers nearest to `exact` [R, d] that are rounded to `table`, NaN where it is not of bfloat16.

    With random bits r, a number whose bits are x is rounded to y if y - r <= x <= y - r + 2^16 - 1.
    """
    bits = table.float().view(torch.int32).long()
    size = (bits & 0x7FFFFFFF) - reference.rounding_bits(rounding, torch.arange(len(table)), table.shape[1])
    low, high = ((size + step).clamp(min=0).int().view(torch.float32).double() for step in (0, 0xFFFF))
    sign = torch.where(bits < 0, -1.0, 1.0)
    nearest = sign * (sign * exact).clamp(low, high)
    return torch.where(bits & 0xFFFF == 0, nearest, math.nan)


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
