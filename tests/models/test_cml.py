"""CML: its loss and gradients in terms of the kernels, its initial values and its optimiser."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from drm_triton import Dataset
from drm_triton.errors import InputError
from drm_triton.kernels import reference
from drm_triton.kernels.batches import ListBatch
from drm_triton.models import CML, load
from drm_triton.ranking.evaluate import evaluate, factor_ranker
from drm_triton.training.covariance import covariance, covariance_loss
from drm_triton.training.state import State
from drm_triton.training.step import objective_of, train_step
from tests.models.clusters import GROUPS, U, V, clusters

BATCH = ListBatch(torch.tensor([0], dtype=torch.int32), torch.tensor([[1, 2, 4]], dtype=torch.int32))  # i = 1, J = 2, 4


def test_the_loss_and_its_gradients_have_the_known_values() -> None:
    users, items = torch.from_numpy(U).double(), torch.from_numpy(V).double()
    objective = objective_of(CML(eta=2, margin=1.0).list_config, len(V))
    gradients = reference.list_gradients(users, items, BATCH, objective)
    assert float(gradients.loss) == pytest.approx(4.8153536, abs=1e-6)
    np.testing.assert_allclose(gradients.user_grad[0], [-1.791759, 4.479399], atol=1e-6)
    # The gradient to an item is that to its score, g, times -2 (v - u).
    item_grad = -2 * gradients.g[0][:, None] * (items[[1, 2, 4]] - users[0])
    np.testing.assert_allclose(item_grad, [[3.583519, -3.583519], [-1.791759, -0.89588], [0, 0]], atol=1e-6)


def test_the_loss_is_that_of_the_method() -> None:
    generator = torch.Generator().manual_seed(0)
    users, items = (torch.randn(n, 3, generator=generator, dtype=torch.float64) / 2 for n in (4, 9))
    batch = ListBatch(torch.arange(4, dtype=torch.int32), torch.stack([torch.randperm(9)[:6] for _ in range(4)]).int())
    found = reference.list_gradients(users, items, batch, objective_of(CML(eta=5, margin=0.7).list_config, 9)).loss
    for u in range(4):
        distance = (users[u] - items[batch.items[u].long()]).square().sum(1)
        impostors = int((0.7 + distance[0] - distance[1:] > 0).sum())
        hinge = max(0.0, 0.7 + float(distance[0] - distance[1:].min()))
        assert float(found[u]) == pytest.approx(math.log(1 + 9 / 5 * impostors) * hinge)


def test_the_covariance_has_the_known_values() -> None:
    users, items = torch.from_numpy(U).double(), torch.from_numpy(V).double()
    _, C = covariance(users, items)
    np.testing.assert_allclose(C, [[0.242284, -0.092593], [-0.092593, 0.180556]], atol=1e-6)
    assert float(covariance_loss(users, items, "printed")) == pytest.approx(0.02644595, abs=1e-8)
    assert float(covariance_loss(users, items, "decorrelate")) == pytest.approx(0.00857339, abs=1e-8)


def test_a_step_is_that_of_the_authors_optimiser() -> None:
    model = CML(eta=2, margin=1.0, lr=0.1)
    users, items = torch.from_numpy(U.copy()), torch.from_numpy(V.copy())
    state = State(users, items, torch.full_like(users, 0.1), torch.full_like(items, 0.1))
    train_step(state, BATCH, model.list_config, objective_of(model.list_config, 5), reference, 0.1)
    gradient = np.array([-1.791759, 4.479399])
    row = U[0] - 0.1 * gradient / np.sqrt(0.1 + gradient**2)
    np.testing.assert_allclose(state.U[0], row / max(1, np.linalg.norm(row)), atol=1e-6)
    np.testing.assert_allclose(state.U_state[0], 0.1 + gradient**2, atol=1e-5)


def test_the_initial_values_are_those_of_the_method() -> None:
    state = CML(factors=25).initial_state(clusters().train)
    for table, sums in ((state.U, state.U_state), (state.V, state.V_state)):
        norms = table.norm(dim=1)
        assert float(norms.max()) <= 1 + 1e-6
        assert 0.3 < float((norms < 0.999).float().mean()) < 0.7  # half of the rows are clipped
        assert float(table[norms < 0.999].std()) == pytest.approx(0.2 * 0.88, rel=0.05)
        assert (sums == 0.1).all()


def test_the_options_are_those_of_the_lists() -> None:
    config = CML(factors=8, eta=7, margin=1.5, cov=2.0, cov_form="printed", lr=0.3, batch_size=100, seed=4).list_config
    assert (config.objective, config.score, config.rho, config.share, config.schedule) == (
        "hinge", "l2", 1, 1, "constant",
    )  # fmt: skip
    assert (config.factors, config.eta, config.margin, config.cov, config.cov_form) == (8, 7, 1.5, 2.0, "printed")
    assert (config.lr, config.batch_size, config.seed) == (0.3, 100, 4)
    assert CML().list_config.batch_in_force == 2048
    with pytest.raises(InputError, match="unknown option `tau` of the model cml"):
        CML(tau=1.0)


def test_users_rank_by_their_groups_also_new_ones() -> None:
    data = clusters(n_users=800)
    known, new = np.arange(400), np.arange(400, 800)
    model = CML(factors=16, epochs=10, batch_size=256).fit(Dataset.from_csr(data.train.take(known).to_scipy()))
    assert float(model.user_factors.norm(dim=1).max()) <= 1 + 1e-5

    def ndcg(users: NDArray[np.int64], vectors: Tensor, V: Tensor) -> float:
        rank = factor_ranker(reference, vectors, V, "l2")
        return evaluate(rank, data.train.take(users), data.test.take(users)).means["ndcg@10"]

    groups = torch.eye(GROUPS)
    best = ndcg(new, groups[new % GROUPS], groups[np.arange(300) % GROUPS])
    vectors = model.fold_in_items(data.train.take(new))
    trained = ndcg(known, model.user_factors, model.item_factors)
    assert trained > 0.8 * best
    assert ndcg(new, vectors, model.item_factors) > 0.9 * trained
    assert ndcg(new, vectors.roll(1, 0), model.item_factors) < 0.3 * best


def test_bits_do_not_depend_on_threads_or_on_a_break(tmp_path: Path, threads: None, no_curves: None) -> None:
    data, options = clusters(), {"factors": 5, "epochs": 3, "cov": 1.0, "batch_size": 512}
    one, two = (CML(threads=number, **options).fit(data) for number in (1, 2))
    CML(**options).fit(data, callbacks=[lambda end: end.state.epoch == 1], run=tmp_path / "run")
    CML(**options).fit(data, run=tmp_path / "run", resume=True)
    resumed = load(tmp_path / "run")
    assert isinstance(resumed, CML)
    for name, tensor in one.tensors.items():
        assert torch.equal(tensor, two.tensors[name])
        assert torch.equal(tensor, resumed.tensors[name])


def test_users_and_items_without_interactions() -> None:
    # User 0 has nothing, user 3 the whole catalogue; nobody else has item 2.
    data = Dataset.from_csr(([0, 0, 2, 3, 6], [0, 1, 1, 0, 1, 2]), n_items=3)
    model = CML(factors=3, epochs=3).fit(data)
    assert torch.isfinite(model.user_factors).all()
    assert torch.isfinite(model.fold_in_items(data.train)).all()
