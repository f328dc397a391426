"""Evaluation and fold-in on a GPU: how often the host waits, and how many kernels it launches.

A driver that launches nothing takes the place of a GPU, in a process of its own (`tests/fake_driver.py`).
"""

import pytest

pytest.importorskip("triton", reason="Triton is available on Linux only")

from drm_triton.ranking.fold_in import STEPS
from tests.fake_driver import observe

READS = {"aten._local_scalar_dense.default", "aten.nonzero.default", "aten.equal.default"}


def test_evaluation_waits_once_for_each_block_of_users() -> None:
    for found in observe("evaluation", ("dot", 200, 70), ("l2", 200, 70)):
        assert found["waits"] == ["cpu"] * 3
        assert READS & set(found["operations"]) == set()
        assert len(found["packing"]) <= 2  # norms of the items: once, not for each block
        assert found["launches"] % 3 == 0
        assert found["launches"] > 0


def test_launches_of_fold_in_do_not_depend_on_the_number_of_people() -> None:
    calls = [({"objective": objective}, people) for objective in ("hinge+drm", "softmax") for people in (3, 300)]
    found = observe("folding", *calls)
    for few, many in zip(found[::2], found[1::2], strict=True):
        assert 0 < few["launches"] == many["launches"] <= 9 * STEPS  # a step: lists 1, gradients 3, update 5
        assert few["waits"] == many["waits"]
