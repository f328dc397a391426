"""One training step of the reference: losses and gradients by autograd and by loops, updates by torch.optim.Adagrad."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from drm_triton.kernels import reference
from drm_triton.kernels.batches import ListBatch
from drm_triton.kernels.protocol import GradientTerms, Objective
from drm_triton.names import LOSSES, Score, Weight

EXACT = {"rtol": 1e-10, "atol": 1e-12}
TEN_STEPS = {"rtol": 1e-8, "atol": 1e-10}  # rounding grows from step to step
SCORES = ("dot", "l2")


def random_step(B: int = 6, rho: int = 2, eta: int = 7, d: int = 5, M: int = 4, N: int = 30, seed: int = 0) -> Any:
    """Factors inside the unit ball and a batch in which users and items repeat; float64."""
    random = torch.Generator().manual_seed(seed)
    U, V = (torch.randn(rows, d, generator=random, dtype=torch.float64) / math.sqrt(2 * d) for rows in (M, N))
    users = torch.randint(M, (B,), generator=random, dtype=torch.int32)
    items = torch.stack([torch.randperm(N, generator=random)[: rho + eta] for _ in range(B)]).to(torch.int32)
    return U, V, users, items


def losses_of_one_list(s: Any, rho: int, n_items: int, objective: Objective) -> Any:
    """Hinge, DRM and MSE by their definitions, with math and lists alone."""
    n, mu = len(s), objective.margin
    positive, negatives = min(s[:rho]), s[rho:]
    violations = sum(mu - positive + negative >= 0 for negative in negatives)
    hinge = math.log(1 + n_items / (n - rho) * violations) * max(0, mu - positive + max(negatives))

    y = [1.0] * rho + [0.0] * (n - rho)
    K, Q = objective.K, [0.0] * n
    ranking = sorted(range(n), key=lambda j: -s[j])
    ideal = sum(1 / math.log2(k + 1) for k in range(1, min(K, rho) + 1))
    for k in range(1, K + 1):
        z = [((n + 1 - 2 * k) * s_j - sum(abs(s_j - s_l) for s_l in s)) / objective.tau for s_j in s]
        P = [math.exp(z_j - max(z)) for z_j in z]
        precision = sum(y[j] for j in ranking[:k]) / k
        w = {
            "uniform": 1,
            "precision": 1 / K,
            "recall": 1 / rho,
            "ndcg": 1 / math.log2(k + 1) / ideal,
            "ap": precision / min(K, rho),
        }[objective.weight]
        Q = [Q_j + w * P_j / sum(P) for Q_j, P_j in zip(Q, P, strict=True)]
    drm = sum((y_j - Q_j) ** 2 for y_j, Q_j in zip(y, Q, strict=True))
    mse = sum((s_j - y_j) ** 2 for s_j, y_j in zip(s, y, strict=True)) / n
    return hinge, drm, mse


@pytest.mark.parametrize("weight", ["uniform", "precision", "recall", "ndcg", "ap"])
@pytest.mark.parametrize("k", [None, 1, 4])
def test_losses_follow_their_definitions(weight: Weight, k: int | None) -> None:
    objective = Objective(rho=2, k=k, tau=0.4, lam=3.0, weight=weight, mse=True)
    U, V, users, items = random_step()
    result = reference.list_gradients(U, V, ListBatch(users, items), objective)
    for b in range(len(users)):
        hinge, drm, mse = losses_of_one_list(result.scores[b].tolist(), 2, len(V), objective)
        assert result.hinge[b].item() == pytest.approx(hinge, rel=1e-12)
        assert result.drm[b].item() == pytest.approx(drm, rel=1e-12)
        assert result.mse[b].item() == pytest.approx(mse, rel=1e-12)
        assert result.loss[b].item() == pytest.approx(hinge + 3 * drm + mse, rel=1e-12)


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("weight", ["uniform", "precision", "recall", "ndcg", "ap"])
@pytest.mark.parametrize(
    "parts", [LOSSES, ("hinge", "drm"), ("mse", "drm"), *((part,) for part in LOSSES)], ids="+".join
)
def test_gradients_equal_autograd(score: Score, weight: Weight, parts: tuple[str, ...]) -> None:
    on = {part: part in parts for part in LOSSES}
    objective = Objective(rho=2, score=score, k=3, tau=0.5, lam=0.7, weight=weight, margin=0.8, temperature=0.3, **on)
    U, V, users, items = random_step()
    result = reference.list_gradients(U, V, ListBatch(users, items), objective)

    rows = U[users.long()].requires_grad_()  # one row per list, so that each list's gradient stands alone
    s = reference.list_scores(rows, V, torch.arange(len(users)), items, score)
    s.retain_grad()
    loss = objective.total(*reference.list_losses(s, len(V), objective))
    loss.sum().backward()
    torch.testing.assert_close(result.loss, loss.detach(), **EXACT)
    torch.testing.assert_close(result.g, s.grad, **EXACT)
    torch.testing.assert_close(result.user_grad, rows.grad, **EXACT)
    for part in LOSSES:
        assert (getattr(result, part) != 0).any() == on[part]


def test_pair_losses_follow_their_definitions() -> None:
    objective = Objective(2, hinge=False, drm=False, psl=True, bpr=True, temperature=0.4)
    U, V, users, items = random_step()
    result = reference.list_gradients(U, V, ListBatch(users, items), objective)
    for s, psl, bpr in zip(result.scores.tolist(), result.psl.tolist(), result.bpr.tolist(), strict=True):
        pairs = [[(negative - positive) for negative in s[2:]] for positive in s[:2]]
        powers = [sum(max(0, 1 + d / 2) ** (1 / 0.4) for d in row) for row in pairs]
        assert psl == pytest.approx(sum(math.log(1 + power) for power in powers), rel=1e-12)
        means = [sum(math.log(1 + math.exp(d / 0.4)) for d in row) / len(row) for row in pairs]
        assert bpr == pytest.approx(sum(means), rel=1e-12)


@pytest.mark.parametrize("score", SCORES)
def test_scores_follow_their_definitions(score: Score) -> None:
    U, V, users, items = random_step()
    s = reference.list_scores(U, V, users, items, score)
    for b, j in ((0, 0), (3, 5), (5, 8)):
        u, v = U[users[b]].numpy(), V[items[b, j]].numpy()
        expected = u @ v if score == "dot" else -(np.linalg.norm(u - v) ** 2)
        assert s[b, j].item() == pytest.approx(expected, rel=1e-12)


def int32(*values: Any) -> list[Tensor]:
    return [torch.tensor(value, dtype=torch.int32) for value in values]


def test_first_of_tied_entries_bears_the_hinge() -> None:
    U, V = torch.ones(1, 1, dtype=torch.float64), torch.tensor([[0.1], [0.1], [0.5], [0.5]], dtype=torch.float64)
    objective = Objective(rho=2, drm=False)
    g = reference.list_gradients(U, V, ListBatch(*int32([0], [[0, 1, 2, 3]])), objective).g
    phi = math.log(1 + 4 / 2 * 2)
    np.testing.assert_allclose(g, [[-phi, 0, phi, 0]])


@pytest.mark.parametrize(
    ("negative", "gap", "violations"), [(0.5, 0.25, 2), (0.25 + 2**-20, 2**-20, 2), (0.25, 0.0, 2), (0.2, -0.05, 0)]
)
def test_hinge_ends_at_the_margin(negative: float, gap: float, violations: int) -> None:
    """A negative at the margin exactly counts as a violation in Phi, but bears no loss and no gradient."""
    U = torch.ones(1, 1, dtype=torch.float64)
    V = torch.tensor([[0.75], [negative], [0.25 if violations else 0.0]], dtype=torch.float64)
    objective = Objective(rho=1, margin=0.5, drm=False)
    result = reference.list_gradients(U, V, ListBatch(*int32([0], [[0, 1, 2]])), objective)
    phi = math.log(1 + 3 / 2 * violations) if gap > 0 else 0
    assert result.hinge.item() == pytest.approx(phi * max(0, gap), rel=1e-12)
    np.testing.assert_allclose(result.g, [[-phi, phi, 0]])


def apply_step(
    U: Tensor,
    V: Tensor,
    state_U: Tensor,
    state_V: Tensor,
    users: Tensor,
    items: Tensor,
    objective: Objective,
    lr: float,
) -> None:
    """A whole step as a trainer makes it: both tables are updated from the factors at its start."""
    batch = ListBatch(users, items)
    gradients = reference.list_gradients(U, V, batch, objective)
    item_terms = GradientTerms.of_items(batch, gradients.g, U.clone())
    reference.update_rows(U, state_U, GradientTerms.of_rows(users, gradients.user_grad), lr, "dot")
    reference.update_rows(V, state_V, item_terms, lr, objective.score)


@pytest.mark.parametrize("score", SCORES)
def test_steps_equal_autograd_with_torch_adagrad_and_projection(score: Score) -> None:
    objective = Objective(rho=2, score=score, tau=0.5, lam=2.0)
    U, V, _, _ = random_step()
    dense = [torch.nn.Parameter(U.clone()), torch.nn.Parameter(V.clone())]
    # From state 0 a first gradient near eps, such as a softmax tail, has its rounding error magnified lr / eps times.
    optimizer = torch.optim.Adagrad(dense, lr=0.3, eps=1e-10, initial_accumulator_value=0.01)
    state_U, state_V = torch.full_like(U, 0.01), torch.full_like(V, 0.01)
    projected = 0
    for step in range(10):
        _, _, users, items = random_step(seed=step)
        assert len(users.unique()) < len(users)
        assert len(items.unique()) < items.numel()
        apply_step(U, V, state_U, state_V, users, items, objective, lr=0.3)

        optimizer.zero_grad()
        hinge, drm, *_ = reference.list_losses(
            reference.list_scores(dense[0], dense[1], users, items, score), len(dense[1]), objective
        )
        (hinge + objective.lam * drm).sum().backward()
        optimizer.step()
        with torch.no_grad():
            for table in dense:
                norm = table.norm(dim=1, keepdim=True)
                projected += int((norm > 1).sum())
                table.div_(norm.clamp(min=1))
        torch.testing.assert_close(U, dense[0].detach(), **TEN_STEPS)
        torch.testing.assert_close(V, dense[1].detach(), **TEN_STEPS)
    assert projected > 0  # or the projection was not tested
    for table, state in ((dense[0], state_U), (dense[1], state_V)):
        torch.testing.assert_close(state, optimizer.state[table]["sum"], **TEN_STEPS)


@pytest.mark.parametrize("score", SCORES)
def test_batch_of_one_is_the_printed_algorithm(score: Score) -> None:
    """One list, one user, rho + eta items: gradients by the chain rule in NumPy, each row stepped and projected."""
    objective = Objective(rho=2, score=score, lam=0.5)
    U, V, users, items = random_step(B=1)
    g = reference.list_gradients(U, V, ListBatch(users, items), objective).g[0].numpy()
    u, v = U[users[0]].numpy().copy(), V[items[0].long()].numpy().copy()
    if score == "dot":
        du, dv = g @ v, g[:, None] * u
    else:
        du, dv = -2 * (g[:, None] * (u - v)).sum(0), 2 * g[:, None] * (u - v)

    def step(row: Any, gradient: Any) -> Any:
        row = row - 0.2 * gradient / (np.sqrt(gradient**2) + 1e-10)
        return row / np.maximum(1, np.linalg.norm(row, axis=-1, keepdims=True))

    before = V.clone()
    apply_step(U, V, torch.zeros_like(U), torch.zeros_like(V), users, items, objective, lr=0.2)
    np.testing.assert_allclose(U[users[0]], step(u, du), **EXACT)
    np.testing.assert_allclose(V[items[0].long()], step(v, dv), **EXACT)
    untouched = torch.ones(len(V), dtype=torch.bool)
    untouched[items[0].long()] = False
    assert torch.equal(V[untouched], before[untouched])


def test_rows_inside_the_ball_are_not_pushed_to_the_sphere() -> None:
    table, state = torch.full((1, 2), 0.1), torch.zeros(1, 2)
    terms = GradientTerms.of_rows(torch.zeros(1, dtype=torch.int32), torch.tensor([[1.0, -2.0]]))
    reference.update_rows(table, state, terms, 0.01, "dot")
    torch.testing.assert_close(table, torch.tensor([[0.09, 0.11]]))
    assert state.tolist() == [[1.0, 4.0]]
