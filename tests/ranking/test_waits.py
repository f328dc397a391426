"""Evaluation and fold-in on a GPU: how often the host waits, and how many kernels it launches.

A driver that launches nothing takes the place of a GPU, in a process of its own (`tests/fake_driver.py`).
"""

import json
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is available on Linux only")

from drm_triton.ranking.fold_in import STEPS
from tests.conftest import ROOT, run_python

FAKE_DRIVER = """
import json, sys
sys.path.insert(0, sys.argv[1])
from tests import fake_driver
print(json.dumps(getattr(fake_driver, sys.argv[2])(*json.loads(sys.argv[3]))))
"""
READS = {"aten._local_scalar_dense.default", "aten.nonzero.default", "aten.equal.default"}


def observe(function: str, *arguments: object) -> dict[str, Any]:
    """Return what a function of `tests/fake_driver.py` returns."""
    done = run_python("-c", FAKE_DRIVER, str(ROOT), function, json.dumps(arguments), TRITON_INTERPRET=None)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("score", ["dot", "l2"])
def test_evaluation_waits_once_for_each_block_of_users(score: str) -> None:
    found = observe("evaluation", score, 200, 70)
    assert found["waits"] == ["cpu"] * 3
    assert READS & set(found["operations"]) == set()
    assert len(found["packing"]) <= 2  # norms of the items: once, not for each block
    assert found["launches"] % 3 == 0
    assert found["launches"] > 0


@pytest.mark.parametrize("options", [{"objective": "hinge+drm"}, {"objective": "softmax"}], ids=str)
def test_launches_of_fold_in_do_not_depend_on_the_number_of_people(options: dict[str, Any]) -> None:
    few, many = (observe("folding", options, people) for people in (3, 300))
    assert 0 < few["launches"] == many["launches"] <= 9 * STEPS  # a step: lists 1, gradients 3, update 5
    assert few["waits"] == many["waits"]
