"""The gradients that `bench.catalogue_drm` trains with, and its tables."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.sparse import csr_matrix
from torch import Tensor

from drm_triton import Dataset, drm_loss, soft_topk
from drm_triton.bench import catalogue_drm, quality
from drm_triton.bench.catalogue_drm import COSINE, SAMPLED, SETTINGS, top, with_top
from drm_triton.kernels import reference
from drm_triton.kernels.batches import ListBatch
from drm_triton.kernels.protocol import CatalogueBatch, Objective

USERS = torch.tensor([2, 0, 3], dtype=torch.int32)
ITEMS = torch.tensor([1, 0, 4, 2, 5, 6], dtype=torch.int32)  # of the three users: one, two and three
BATCH = CatalogueBatch(USERS, torch.tensor([0, 1, 3, 6]), ITEMS)
SOFTMAX = Objective(1, softmax=True, hinge=False, drm=False)


def factors() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return torch.randn(5, 3, generator=draw), torch.randn(8, 3, generator=draw)


@pytest.mark.parametrize(("relaxation", "log"), [("neuralsort", False), ("lapsum", False), ("lapsum", True)])
def test_gradients_over_the_catalogue_are_those_of_the_loss(relaxation: str, log: bool) -> None:
    U, V = (table.requires_grad_() for table in factors())
    s, y = U[USERS.long()] @ V.T, torch.zeros(3, 8)
    y[[0, 1, 1, 2, 2, 2], ITEMS.long()] = 1
    n = torch.tensor([1.0, 2, 3])
    if relaxation == "neuralsort":
        loss = drm_loss(s, y, 2, 0.5, reduction="none") / n.sqrt()
        setting = top("neuralsort", 2, 0.5)["top"]
    else:
        Q = soft_topk(s, 2, 0.5, method="lapsum")
        loss = (-(y * Q.log()) if log else (y - Q) ** 2).sum(1) / n.sqrt()
        setting = top("lapsum", 2, 0.5, log=log)["top"]
    dU, dV = torch.autograd.grad(loss.sum(), (U, V))
    found = with_top(reference, setting).catalogue_gradients(U.detach(), V.detach(), BATCH, SOFTMAX)
    torch.testing.assert_close(found.softmax, loss.detach())
    torch.testing.assert_close(found.user_grad, dU[USERS.long()])
    torch.testing.assert_close(found.item_grad, dV)


def test_a_part_with_a_weight_is_added_to_the_softmax() -> None:
    U, V = factors()
    softmax = reference.catalogue_gradients(U, V, BATCH, SOFTMAX)
    alone = with_top(reference, top("lapsum", 2, 0.5)["top"]).catalogue_gradients(U, V, BATCH, SOFTMAX)
    both = with_top(reference, top("lapsum", 2, 0.5, 3.0)["top"]).catalogue_gradients(U, V, BATCH, SOFTMAX)
    for x, a, b in zip(softmax, alone, both, strict=True):
        torch.testing.assert_close(b, x + 3 * a)


def test_neuralsort_on_sampled_lists_is_the_objective_drm() -> None:
    U, V = factors()
    batch = ListBatch(USERS, torch.tensor([[1, 0, 2], [4, 7, 6], [5, 1, 0]], dtype=torch.int32))
    objective = Objective(1, tau=0.5, hinge=False)
    expected = reference.list_terms(U, V, batch, objective)
    found = with_top(reference, top("neuralsort", 1, 0.5)["top"]).list_terms(U, V, batch, objective)
    torch.testing.assert_close(found.losses["loss"], expected.losses["loss"])
    torch.testing.assert_close(found.user_grad, expected.user_grad)
    torch.testing.assert_close(found.items.coefficients, expected.items.coefficients)


def test_a_positive_far_below_the_top_is_not_reached_by_neuralsort() -> None:
    """The second positive is at rank 50 of 100, and the first at rank 2."""
    s = torch.linspace(1, -1, 100)[None]
    y = torch.zeros(1, 100)
    y[0, [1, 49]] = 1
    assert catalogue_drm.share_reached(s, y, top("neuralsort", 1, 0.05)["top"]) == 0.5
    assert catalogue_drm.share_reached(s, y, top("lapsum", 1, 0.2)["top"]) == 1


@pytest.mark.parametrize("options", [{**COSINE, **top("neuralsort", 2, 0.5)}, {**SAMPLED, **top("lapsum", 1, 0.2)}])
def test_a_training_of_each_kind(options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)  # tests share this process
    liked = np.random.default_rng(0).random((30, 40)) < 0.5  # half of the items; a tenth of them is held out
    place = np.cumsum(liked, 1) % 10
    train, valid = (csr_matrix(liked & part) for part in (place > 0, place == 0))
    Dataset.from_csr(train, valid, csr_matrix(liked.shape)).save(tmp_path / "data")
    task = catalogue_drm.task("x", {**options, "epochs": 1, "factors": 4}, 0)
    result = catalogue_drm.train_and_measure({**task, "data": str(tmp_path / "data")})
    assert result["recall@50"] == 1  # all unseen items are in the first 50
    assert 0 < result["reached"] <= 1


def test_report_leaves_out_what_is_not_finished() -> None:
    options = SETTINGS["NeuralSort over the catalogue"][0]
    values = {"ndcg@10": 0.2, "recall@50": 0.5, "seconds": 3.0}
    results = [
        {**catalogue_drm.task(name, setting, 0), **values, "reached": reached}
        for name in catalogue_drm.SETS
        for setting, reached in ((COSINE, None), (options, 0.25))
    ]
    text = catalogue_drm.report(results, 1)
    cell = "0.2000 / 0.5000 (3.0)"
    assert f"| cosine | {cell} | {cell} | {cell} | 1.000 |  |" in text
    assert f"| cosine, NeuralSort, K 1, tau 0.5 | {cell} | {cell} | {cell} | 1.000 | 25% / 25% / 25% |" in text
    assert "| the whole catalogue |  |" in text
    assert f"| cosine |  | {cell} | {cell} |  |  |" in catalogue_drm.report(results[1:], 1)


def test_stored_trainings_are_in_the_tables() -> None:
    known = [*(options for group in SETTINGS.values() for options in group), *catalogue_drm.EPINION]
    assert all(result["options"] in known for result in quality.finished(catalogue_drm.TRIALS))
