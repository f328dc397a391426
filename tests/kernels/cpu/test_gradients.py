"""List gradients on the CPU against the float64 reference, for lists with their own negatives."""

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from drm_triton.errors import InputError
from drm_triton.kernels import cpu, reference
from drm_triton.kernels.batches import ListBatch
from drm_triton.kernels.cpu.runtime.threads import set_threads
from drm_triton.kernels.cpu.softsort import COUNTING_MAX
from drm_triton.kernels.protocol import Objective
from drm_triton.names import LOSSES, Score, Weight
from tests.kernels.cpu.conftest import EPS, THREAD_COUNTS, random_lists

pytestmark = pytest.mark.usefixtures("poison")


def assert_gradients(U: Tensor, V: Tensor, batch: ListBatch, objective: Objective) -> None:
    """Compare with the reference in float64, and check that the arguments do not change."""
    arguments = (U, V, batch.users, batch.items)
    before = [x.clone() for x in arguments]
    got = cpu.list_gradients(U, V, batch, objective)
    assert all(torch.equal(x, y) for x, y in zip(arguments, before, strict=True))
    want = reference.list_gradients(U.double(), V.double(), batch, objective)
    # Sums of n terms are off by about EPS sqrt(n). A score is off by EPS times its size, and the softmax multiplies
    # that by up to 4 K / tau: nothing of size n is left in the logits of the first K ranks.
    n, size = batch.items.shape[1], want.scores.abs().max().item()
    logits = 4 * objective.K * size / objective.tau if objective.drm else 0
    logits += size / objective.temperature if objective.softmax or objective.psl or objective.bpr else 0
    error = 4 * EPS * (n**0.5 + logits)
    for name, x, y in zip(got._fields, got, want, strict=True):
        bound = (8 * EPS if name == "scores" else error) * max(y.abs().max().item(), EPS)
        torch.testing.assert_close(x.double(), y, rtol=0, atol=bound, msg=partial("{}: {}".format, name))


@pytest.mark.parametrize("n", [*range(2, 71), 100, 256, 1000])
def test_every_length(n: int) -> None:
    rho = min(3, n - 1)
    U, V, batch = random_lists(n, 4 if n < 256 else 1, n, 16)
    for k in sorted({1, rho, n}):
        assert_gradients(U, V, batch, Objective(rho, k=k, score="l2" if n % 2 else "dot"))


@pytest.mark.parametrize("d", [1, 3, 16, 50, 64, 100, 128])
@pytest.mark.parametrize("score", get_args(Score))
def test_every_dimension(d: int, score: Score) -> None:
    assert_gradients(*random_lists(d, 40, 48, d, scale=0.3), Objective(3, score=score))


@pytest.mark.parametrize("weight", get_args(Weight))
@pytest.mark.parametrize("score", get_args(Score))
@pytest.mark.parametrize("k", [1, 2, 5, 11])
def test_every_weight(weight: Weight, score: Score, k: int) -> None:
    assert_gradients(*random_lists(3, 50, 11, 8), Objective(3, score=score, weight=weight, k=k, lam=0.7))


@pytest.mark.parametrize("weight", get_args(Weight))
def test_every_weight_of_long_lists(weight: Weight) -> None:
    """Some positives are not among the items that take part in DRM."""
    assert_gradients(*random_lists(6, 10, 300, 8), Objective(5, weight=weight, k=3, tau=0.05))


@pytest.mark.parametrize("tau", [0.1, 0.3, 1.0, 3.0, 10.0])
@pytest.mark.parametrize("scale", [1e-6, 0.1, 1.0, 100.0])
def test_every_temperature_and_size(tau: float, scale: float) -> None:
    assert_gradients(*random_lists(4, 30, 32, 16, scale), Objective(2, tau=tau))


@pytest.mark.parametrize("parts", [parts for parts in product((False, True), repeat=len(LOSSES)) if any(parts)])
def test_each_loss_can_be_switched_off(parts: tuple[bool, ...]) -> None:
    U, V, batch = random_lists(5, 20, 20, 8)
    on = dict(zip(LOSSES, parts, strict=True))
    objective = Objective(4, lam=2.5, margin=0.5, temperature=0.5, **on)
    assert_gradients(U, V, batch, objective)
    got = cpu.list_gradients(U, V, batch, objective)
    assert {part: bool(getattr(got, part).any()) for part in LOSSES} == on


@pytest.mark.parametrize("temperature", [0.01, 0.15, 1.0, 100.0])
@pytest.mark.parametrize("rho", [1, 7])
@pytest.mark.parametrize("part", ["softmax", "bpr"])
def test_pair_losses_at_every_temperature(part: str, temperature: float, rho: int) -> None:
    objective = Objective(rho, temperature=temperature, **{name: name == part for name in LOSSES})
    assert_gradients(*random_lists(5, 20, 48, 16), objective)


@pytest.mark.parametrize("temperature", [0.02, 0.1, 1.0])
@pytest.mark.parametrize("score", get_args(Score))
def test_psl(score: Score, temperature: float) -> None:
    """Scores of rows in the unit ball, and larger ones: the best negative of some lists is then below the relu."""
    objective = Objective(3, score, hinge=False, drm=False, psl=True, temperature=temperature)
    for scale in (0.1, 1.0):
        assert_gradients(*random_lists(5, 20, 48, 16, scale), objective)


def test_psl_of_a_list_without_a_pair_above_the_relu() -> None:
    U, V = torch.ones(1, 1), torch.tensor([[3.0], [-3.0], [-4.0]])
    batch = ListBatch(torch.zeros(1, dtype=torch.int32), torch.tensor([[0, 1, 2]], dtype=torch.int32))
    got = cpu.list_gradients(U, V, batch, Objective(1, hinge=False, drm=False, psl=True))
    assert (got.psl.item(), got.g.tolist()) == (0.0, [[0.0, 0.0, 0.0]])


@pytest.mark.parametrize("weight", get_args(Weight))
@pytest.mark.parametrize("n", [12, COUNTING_MAX + 60])
def test_ties(weight: Weight, n: int) -> None:
    # Integer factors make exact ties, among the positives, the negatives and across.
    g = torch.Generator().manual_seed(6)
    U, V = torch.randint(-1, 2, (5, 4), generator=g).float(), torch.randint(-1, 2, (40, 4), generator=g).float()
    batch = ListBatch(torch.arange(5).int(), torch.randint(0, 40, (5, n), generator=g, dtype=torch.int32))
    assert_gradients(U, V, batch, Objective(3, weight=weight, tau=2.0))
    assert_gradients(0 * U, V, batch, Objective(3, weight=weight, mse=True))  # all scores equal


def test_one_list_and_none() -> None:
    U, V, batch = random_lists(7, 1, 48, 64)
    assert_gradients(U, V, batch, Objective(3))
    got = cpu.list_gradients(U, V, ListBatch(batch.users[:0], batch.items[:0]), Objective(3))
    assert [tuple(x.shape) for x in got] == [(0, 48), *(len(LOSSES) + 1) * [(0,)], (0, 48), (0, 64)]


def test_arguments_need_not_be_contiguous() -> None:
    U, V, batch = random_lists(8, 6, 10, 8)
    U2, V2, users, items = (torch.stack([x, x], dim=-1)[..., 0] for x in (U, V, batch.users, batch.items))
    got = cpu.list_gradients(U2, V2, ListBatch(users, items), Objective(2))
    want = cpu.list_gradients(U, V, batch, Objective(2))
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("n", [8, COUNTING_MAX + 60])
def test_a_bad_score_shows_in_the_loss(bad: float, n: int) -> None:
    U, V, batch = random_lists(9, 3, n, 4)
    item = batch.items[1, n // 2]
    V[item.long(), 2] = bad
    got = cpu.list_gradients(U, V, batch, Objective(2, mse=True))
    hit = (batch.items == item).any(1)
    for x in (got.hinge, got.drm, got.mse, got.loss, got.g, got.user_grad):
        assert x[hit].isnan().all()
        assert x[~hit].isfinite().all()


def test_results_do_not_depend_on_threads_or_batches() -> None:
    U, V, batch = random_lists(10, 300, 48, 64)
    objective, runs = Objective(3, score="l2"), []
    for count in THREAD_COUNTS:
        set_threads(count)
        runs.append(cpu.list_gradients(U, V, batch, objective))
    parts = [ListBatch(batch.users[i:j], batch.items[i:j]) for i, j in [(0, 77), (77, 300)]]
    halves = [cpu.list_gradients(U, V, part, objective) for part in parts]
    for x, y, start, end in zip(*runs, *halves, strict=True):
        assert torch.equal(x, y)
        assert torch.equal(x, torch.cat([start, end]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda U, V, u, i: (U.double(), V, u, i), "list_gradients: U must be float32, got float64"),
        (lambda U, V, u, i: (U, V[:, :3], u, i), r"list_gradients: V must have shape \[any, 4\], got \[20, 3\]"),
        (lambda U, V, u, i: (U, V, u.long(), i), "list_gradients: users must be int32, got int64"),
        (lambda U, V, u, i: (U, V, u, i[:2]), r"list_gradients: items must have shape \[3, any\], got \[2, 10\]"),
        (lambda U, V, u, i: (U, V, u + 7, i), r"list_gradients: users must be in \[0, 7\)"),
        (lambda U, V, u, i: (U, V, u, i - 20), r"list_gradients: items must be in \[0, 20\)"),
        (lambda U, V, u, i: (U, V, u, i[:, :2]), "list_gradients: a list needs more than rho = 2 items"),
        (lambda U, V, u, i: (U, V, u, i[:, :4]), "list_gradients: k must be at most the list length 4, got 5"),
        (lambda U, V, u, i: (U.to("meta"), V, u, i), "list_gradients: U must be on the CPU, got device meta"),
    ],
)
def test_bad_arguments(change: Callable[..., tuple[Any, ...]], message: str) -> None:
    U, V, batch = random_lists(11, 3, 10, 4)
    U, V, users, items = change(U, V, batch.users, batch.items)
    with pytest.raises(InputError, match=message):
        cpu.list_gradients(U, V, ListBatch(users, items), Objective(2, k=5))
