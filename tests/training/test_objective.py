"""From the name of an objective to the losses that the kernels add up, and to the options that matter for them."""

import dataclasses
from typing import get_args
from unittest import mock

import pytest
import torch
from torch import Tensor

from drm_triton.config import TrainConfig
from drm_triton.kernels import reference
from drm_triton.kernels.batches import ListBatch
from drm_triton.kernels.protocol import CatalogueBatch
from drm_triton.names import LOSSES, ObjectiveName
from drm_triton.training.step import objective_of

N_ITEMS = 12
OTHER_VALUES = {"k": 1, "tau": 0.9, "lam": 3.0, "weight": "precision", "margin": 0.3, "temperature": 0.7}


def loss_of(config: TrainConfig) -> Tensor:
    """The losses of some random lists, or users."""
    draw = torch.Generator().manual_seed(0)
    U, V = torch.randn(3, 4, generator=draw), torch.randn(N_ITEMS, 4, generator=draw)
    objective, users = objective_of(config, N_ITEMS), torch.arange(3, dtype=torch.int32)
    items = torch.stack([torch.randperm(N_ITEMS, generator=draw) for _ in users]).int()
    if config.negatives_in_force == "all":
        indices = items[:, :2].sort(1).values.flatten()
        return reference.catalogue_gradients(U, V, CatalogueBatch(users, torch.arange(0, 7, 2), indices), objective)[0]
    return reference.list_gradients(U, V, ListBatch(users, items), objective).loss


def test_every_loss_is_part_of_an_objective_and_every_part_is_a_loss() -> None:
    parts = [TrainConfig(objective=name).parts for name in get_args(ObjectiveName)]
    assert frozenset().union(*parts) == set(LOSSES)


@pytest.mark.parametrize("name", get_args(ObjectiveName))
def test_an_objective_has_the_parts_of_its_name(name: ObjectiveName) -> None:
    config = TrainConfig(objective=name)
    assert set(objective_of(config, N_ITEMS).parts) == config.parts
    assert objective_of(config, N_ITEMS).at_k == (name == "softmax@k")


def test_a_part_that_the_kernels_do_not_know_is_an_error() -> None:
    """It must not be left out in silence."""
    with mock.patch.object(TrainConfig, "parts", {"drm", "unheard"}), pytest.raises(TypeError, match="unheard"):
        objective_of(TrainConfig(objective="drm"), N_ITEMS)


@pytest.mark.parametrize("name", get_args(ObjectiveName))
def test_idle_options_are_those_that_do_not_change_the_loss(name: ObjectiveName) -> None:
    config = TrainConfig(objective=name, rho=2, eta=N_ITEMS - 2, k=3)
    unchanged = loss_of(config)
    idle = {
        option
        for option, value in OTHER_VALUES.items()
        if torch.equal(loss_of(dataclasses.replace(config, **{option: value})), unchanged)
    }
    assert idle == config.idle() & OTHER_VALUES.keys()
