"""A run with its data: what is seen, what is relevant, and what it must not be measured on."""

from pathlib import Path

import numpy as np
import pytest

from drm_triton import DRM, Dataset
from drm_triton.errors import InputError
from drm_triton.ranking.held_out import HeldOut

pytestmark = pytest.mark.usefixtures("no_curves")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Train a run on three users with two, one and one items in the three parts."""
    data = Dataset.from_csr(
        ([0, 2, 4, 6], [0, 1, 1, 2, 2, 3]), ([0, 1, 2, 3], [2, 3, 4]), ([0, 1, 2, 3], [3, 4, 5]), n_items=8
    )
    data.save(tmp_path / "data")
    DRM(factors=2, epochs=1, eval_every=0).fit(data, run=tmp_path / "run")
    return tmp_path / "run"


def test_what_is_seen_and_what_is_relevant(run: Path) -> None:
    test, valid = HeldOut.of_run(run), HeldOut.of_run(run, "valid")
    assert [list(test.seen.row(u)) for u in range(3)] == [[0, 1, 2], [1, 2, 3], [2, 3, 4]]
    assert [list(test.relevant.row(u)) for u in range(3)] == [[3], [4], [5]]
    assert [list(valid.seen.row(u)) for u in range(3)] == [[0, 1], [1, 2], [2, 3]]
    assert [list(valid.relevant.row(u)) for u in range(3)] == [[2], [3], [4]]


def test_the_evaluation_is_that_of_the_model(run: Path) -> None:
    measured = HeldOut.of_run(run)
    expected = measured.model.evaluate(measured.relevant, measured.seen, [2], min_train=1)
    result = measured.evaluate([2], min_train=1)
    assert result.means == expected.means
    assert np.array_equal(result.per_user.to_numpy(), expected.per_user.to_numpy())


def test_a_part_that_the_model_was_trained_on(run: Path) -> None:
    data = Dataset.load(run.parent / "data")
    for fit_on, part in (("train+valid", "valid"), ("all", "test")):
        DRM(factors=2, epochs=1, fit_on=fit_on).fit(data, run=run.parent / part)
        with pytest.raises(InputError, match=f"cannot be measured on {part}"):
            HeldOut.of_run(run.parent / part, part)
    with pytest.raises(InputError, match="`on` must be valid or test, got 'train'"):
        HeldOut.of_run(run, "train")


def test_other_data(run: Path, tmp_path: Path) -> None:
    Dataset.from_csr(([0, 2, 4, 6], [0, 1, 1, 2, 2, 4]), n_items=8).save(tmp_path / "other")
    with pytest.raises(InputError, match=r"was not trained on .*other; give the data set of the training$"):
        HeldOut.of_run(run, "test", tmp_path / "other")
