"""CDAE: the hidden layer, visits with sampled outputs, steps with all outputs, new users."""

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import softplus

from drm_triton import Dataset
from drm_triton.data.csr import CSR
from drm_triton.errors import DrmError, InputError
from drm_triton.kernels.cpu.cdae import encode
from drm_triton.kernels.cpu.runtime.threads import set_threads
from drm_triton.kernels.reference import below, philox
from drm_triton.kernels.streams import NEGATIVES, POSITIVES
from drm_triton.models import CDAE, load
from drm_triton.models import cdae as module
from drm_triton.recommender import Tensors
from tests.conftest import call

# Four users and five items, in numbers that floats hold exactly.
ROWS = [[0, 1, 3], [1, 2], [0, 4], [2, 3, 4]]
U = torch.tensor([[-0.5, 0.25], [0, -0.5], [0.5, 0], [-0.25, 0.5]], dtype=torch.float64)
V = torch.tensor([[-0.75, -0.25], [0.5, -0.75], [0, 0.5], [-0.5, 0], [0.75, -0.5]], dtype=torch.float64)
LOSS = 3.1389737  # of user 0, from the input 0 and 3, with the positives 0, 1, 3 and the negative 2
SCORES = [-0.145025, -0.304655, 0.218912, -0.023713, -0.183342]


def matrix(rows: list[list[int]], n_items: int) -> CSR:
    users = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
    return CSR.from_pairs(users, np.array(list(itertools.chain(*rows)), np.int64), (len(rows), n_items))


def interactions(n_users: int = 20, n_items: int = 30) -> CSR:
    """Return random interactions; the first users have no item, one, all but one, and all."""
    rng = np.random.default_rng(3)
    sizes = [0, 1, n_items - 1, n_items, *rng.integers(2, n_items // 3, n_users - 4)]
    return matrix([sorted(rng.choice(n_items, size, replace=False).tolist()) for size in sizes], n_items)


def dataset(fit: CSR) -> Dataset:
    return Dataset.from_csr((fit.indptr, fit.indices), n_items=fit.shape[1])


def quiet(done: int, total: int) -> None: ...


def words(seed: int, epoch: int, stream: int, user: int, count: int) -> Tensor:
    block = torch.arange((count + 3) // 4)
    return torch.stack(philox(seed, epoch, stream, torch.tensor(user), block), 1).flatten()[:count]


def draws(model: CDAE, fit: CSR, user: int, epoch: int) -> tuple[list[int], list[int]]:
    """Return the items that are kept in a visit, and its negatives, drawn without the kernels."""
    config, row = model.config, fit.row(user).tolist()
    kept = words(config.seed, epoch, POSITIVES, user, len(row)) >= config.corruption * 2**32
    others = sorted(set(range(fit.shape[1])) - set(row))
    ranks = below(words(config.seed, epoch, NEGATIVES, user, config.ratio * len(row)), len(others)).tolist()
    return [i for i, keep in zip(row, kept.tolist(), strict=True) if keep], [others[r] for r in ranks] if others else []


def user_loss(values: Tensors, user: int, row: list[int], kept: list[int], negatives: list[int], q: float) -> Tensor:
    """Return the loss of a visit by its definition."""
    V = values.get("output", values["input"])
    z = values["input"][kept].sum(0) / (1 - q) + values["user"][user] + values["hidden_bias"]
    y = V @ torch.sigmoid(z) + values["item_bias"]
    return softplus(-y[row]).sum() + softplus(y[negatives]).sum()


def step(tensors: Tensors, loss: Tensor, values: Tensors, touched: dict[str, Any], beta: float) -> None:
    """Take one step of Adagrad on the touched rows with the gradients of autograd, `lr` 0.3, `regularization` 0.2."""
    gradients = torch.autograd.grad(loss, list(values.values()), allow_unused=True, materialize_grads=True)
    for (name, value), gradient in zip(values.items(), gradients, strict=True):
        rows = touched[name]
        g = gradient[rows] + 0.2 * value.detach()[rows]
        assert gradient.count_nonzero() == gradient[rows].count_nonzero()  # the other rows have none
        tensors[f"{name}_state"][rows] += g * g
        tensors[name][rows] -= 0.3 * g / (beta + tensors[f"{name}_state"][rows].sqrt())


def leaves(tensors: Tensors) -> Tensors:
    names = [name for name in tensors if f"{name}_state" in tensors]
    return {name: tensors[name].detach().clone().requires_grad_() for name in names}


def started(model: CDAE, fit: CSR) -> tuple[Tensors, Tensors]:
    """Return the initial tensors in float64, larger so that nothing is close to linear, twice."""
    tensors = {name: x.double() for name, x in model.start(fit).items()}
    rng = np.random.default_rng(0)
    for name in leaves(tensors):
        tensors[name] = torch.from_numpy(rng.normal(scale=0.7, size=tensors[name].shape))
    return tensors, {name: x.clone() for name, x in tensors.items()}


def assert_close(got: Tensors, expected: Tensors) -> None:
    for name in leaves(expected):
        for part in (name, f"{name}_state"):
            torch.testing.assert_close(got[part], expected[part], rtol=1e-9, atol=1e-12, msg=part)


def seed_with(kept: list[int], negatives: list[int] | None) -> int:
    """Return the first seed for which user 0 of the shared case draws these items."""
    for seed in range(1000):
        drawn = draws(CDAE(factors=2, ratio=1, tied=True, seed=seed), matrix(ROWS, 5), 0, 0)
        if drawn[0] == kept and negatives in (None, drawn[1]):
            return seed
    raise AssertionError("no seed draws this")


def shared_case(**options: Any) -> tuple[CDAE, CSR, Tensors]:
    model, fit = CDAE(factors=2, ratio=1, tied=True, **options), matrix(ROWS, 5)
    tensors = {name: x.double() for name, x in model.start(fit).items()}
    tensors["input"], tensors["user"] = V.clone(), U.clone()
    return model, fit, tensors


def test_hidden_layer_and_scores_of_the_shared_case() -> None:
    kept = matrix([[0, 3]], 5)
    h = torch.from_numpy(encode(kept, 2 * V.numpy(), U[:1].numpy(), np.zeros(2)))  # delta = 2
    torch.testing.assert_close(h[0], torch.tensor([0.047426, 0.437823], dtype=torch.float64), rtol=0, atol=5e-7)
    torch.testing.assert_close(V @ h[0], torch.tensor(SCORES, dtype=torch.float64), rtol=0, atol=5e-7)


def test_loss_of_a_visit_in_the_shared_case() -> None:
    # A user with three items has three negatives: the seed draws item 2 three times.
    model, fit, tensors = shared_case(seed=seed_with([0, 3], [2, 2, 2]))
    only = CSR(np.array([0, 3, 3, 3, 3]), fit.indices[:3], fit.shape)  # the other users have no items
    loss = model._sampled(tensors, only, 0, quiet)
    assert loss == pytest.approx(LOSS + 2 * math.log1p(math.exp(SCORES[2])), abs=2e-6)


def test_loss_with_all_outputs_in_the_shared_case() -> None:
    model, fit, tensors = shared_case(seed=seed_with([0, 3], None), output="full")
    loss = module.full_step(tensors, fit, range(1), 0, model.config)
    assert loss.item() == pytest.approx(LOSS + math.log1p(math.exp(SCORES[4])), abs=2e-6)


@pytest.mark.parametrize("tied", [True, False])
def test_visits_are_steps_along_the_gradients_of_autograd(tied: bool) -> None:
    fit, model = interactions(), CDAE(factors=3, tied=tied, regularization=0.2, lr=0.3, ratio=3, seed=2**40 + 1)
    got, expected = started(model, fit)
    for epoch in range(2):
        total = 0.0
        for user in range(1, fit.shape[0]):  # user 0 has no item
            values, row = leaves(expected), fit.row(user).tolist()
            kept, negatives = draws(model, fit, user, epoch)
            assert set(kept) <= set(row)
            outputs = sorted({*row, *negatives})
            touched = {"user": [user], "item_bias": outputs, "output": outputs, "hidden_bias": slice(None)}
            touched["input"] = outputs if tied else kept
            loss = user_loss(values, user, row, kept, negatives, 0.5)
            step(expected, loss, values, touched, beta=1)
            total += loss.item()
        assert model._sampled(got, fit, epoch, quiet) == pytest.approx(total, rel=1e-10)
        assert_close(got, expected)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("block", [7, 2048])
def test_full_steps_are_along_the_gradients_of_autograd(
    tied: bool, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ITEMS_PER_TASK", block)
    fit, model = interactions(), CDAE(factors=3, tied=tied, regularization=0.2, lr=0.3, output="full")
    got, expected = started(model, fit)
    for users in (range(0, 13), range(13, 20)):
        values, total, inputs = leaves(expected), torch.zeros((), dtype=torch.float64), set()
        for user in users:
            row, (kept, _) = fit.row(user).tolist(), draws(model, fit, user, 1)
            others = sorted(set(range(30)) - set(row))
            total = total + user_loss(values, user, row, kept, others, 0.5)
            inputs |= set(kept)
        all_rows = slice(None)
        touched = {"user": list(users), "item_bias": all_rows, "output": all_rows, "hidden_bias": all_rows}
        touched["input"] = all_rows if tied else sorted(inputs)
        step(expected, total, values, touched, beta=0)
        loss = module.full_step(got, fit, users, 1, model.config)
        assert loss.item() == pytest.approx(total.item(), rel=1e-10)
        assert_close(got, expected)


def test_corruption_leaves_out_its_share() -> None:
    fit = matrix([list(range(50))] * 100, 100)
    for q in (0.0, 0.2, 0.9):
        model = CDAE(corruption=q, ratio=1)
        kept = sum(len(draws(model, fit, user, 0)[0]) for user in range(100))
        assert kept == pytest.approx(5000 * (1 - q), abs=4 * math.sqrt(5000 * q * (1 - q)))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("output", ["sampled", "full"])
def test_bits_do_not_depend_on_threads(output: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ITEMS_PER_TASK", 16)
    fit, results = interactions(150, 100), []
    for threads in (1, 2):
        set_threads(threads)
        torch.set_num_threads(threads)
        model = CDAE(factors=33, output=output, threads=threads)
        tensors = model.start(fit)
        losses = [model.epoch(tensors, fit, epoch, quiet)["loss"] for epoch in range(3)]
        results.append((tensors, losses))
    assert results[0][1] == results[1][1]
    for name, x in results[0][0].items():
        assert torch.equal(x, results[1][0][name]), name


@pytest.mark.parametrize("output", ["sampled", "full"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_fitted_model_is_the_formula(output: str, tied: bool) -> None:
    fit = interactions()
    model = CDAE(factors=5, output=output, tied=tied)
    tensors = model.start(fit)
    losses = [model.epoch(tensors, fit, epoch, quiet)["loss"] for epoch in range(30)]
    assert losses[-1] < losses[0]
    x = torch.from_numpy(fit.to_scipy().toarray())
    h = torch.sigmoid(x @ tensors["input"] + tensors["user"] + tensors["hidden_bias"])
    y = h @ (tensors["input"] if tied else tensors["output"]).T + tensors["item_bias"]
    users, items = model.factors(tensors)
    torch.testing.assert_close(users @ items.T, y, rtol=1e-5, atol=1e-5)


def test_new_users_have_no_node_and_depend_only_on_their_items() -> None:
    fit = interactions()
    model = CDAE(factors=5, epochs=3).fit(dataset(fit))
    together, W, b = model.fold_in_items(fit), model.tensors["input"], model.tensors["hidden_bias"]
    x = torch.from_numpy(fit.to_scipy().toarray())
    expected = torch.cat([torch.sigmoid(x @ W + b), torch.ones(20, 1)], 1)
    torch.testing.assert_close(together, expected, rtol=1e-5, atol=1e-6)
    for user in (0, 1, 3, 19):
        assert torch.equal(model.fold_in_items(fit.take(np.array([user])))[0], together[user])


def test_new_users_get_the_items_of_users_like_them() -> None:
    rng = np.random.default_rng(0)
    rows = [sorted((10 * (user % 2) + rng.choice(10, 6, replace=False)).tolist()) for user in range(40)]
    model = CDAE(factors=4).fit(dataset(matrix(rows, 20)))
    found = model.recommend_from([[0, 1, 2], [17, 18, 19]], k=7)["item"].to_list()
    assert sorted(found[:7]) == list(range(3, 10))
    assert sorted(found[7:]) == list(range(10, 17))


@pytest.mark.parametrize("output", ["sampled", "full"])
@pytest.mark.parametrize("rows", [[[0], [0]], [[], [0]], [[0, 1], [0, 1]], [[1], []]])
def test_tiny_data(rows: list[list[int]], output: str) -> None:
    n_items = max(max(row, default=0) for row in rows) + 1
    model = CDAE(factors=2, epochs=2, output=output).fit(dataset(matrix(rows, n_items)))
    assert torch.isfinite(model.user_factors).all()
    assert torch.isfinite(model.item_factors).all()


def test_a_fitted_model_has_no_state_of_the_optimiser() -> None:
    model = CDAE(factors=2, epochs=1).fit(dataset(interactions()))
    assert set(model.tensors) == {"input", "output", "hidden_bias", "item_bias", "hidden"}


def test_divergence_is_reported() -> None:
    with pytest.raises(DrmError, match=r"cdae diverged in epoch .* a lower `lr`"):
        CDAE(factors=2, lr=3e38, epochs=3).fit(dataset(interactions()))


def test_tied_is_true_or_false() -> None:
    with pytest.raises(InputError, match="`tied` must be bool, got 1"):
        CDAE(tied=1)
    assert CDAE(tied=True).config.to_dict()["tied"] is True


def test_tied_is_a_flag_of_the_command_line(tmp_path: Path) -> None:
    dataset(interactions()).save(tmp_path / "data")
    for flag, tied in (("--tied", True), ("--no-tied", False)):
        run = tmp_path / flag
        code, _, err = call(
            "train", "--dataset", tmp_path / "data", "--model", "cdae", flag, "--epochs", 1, "--run", run
        )
        assert code == 0, err
        model = load(run)
        assert model.config == CDAE(tied=tied, epochs=1).config
