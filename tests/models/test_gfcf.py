"""GF-CF: both filters, against the formula with NumPy's singular vectors."""

import numpy as np
import pytest
import torch

from drm_triton import Dataset
from drm_triton.data.csr import CSR
from drm_triton.errors import InputError
from drm_triton.kernels.cpu.runtime.threads import set_threads
from drm_triton.models import GFCF
from drm_triton.ranking.item_index import ItemWeights
from drm_triton.training import preflight
from drm_triton.training.initialize import right_singular_vectors
from tests.models.items import CASE, dense, random_interactions


def weights(train: CSR, **options: float) -> ItemWeights:
    return GFCF(**options).fit_weights(train, lambda done, total: None)


def test_linear_filter_of_the_case() -> None:
    scores = weights(CASE, low_pass_weight=0).scores(CASE)
    np.testing.assert_allclose(scores[0], [0.75, 0.75, 0.416667, 0.666667, 0.416667], atol=1e-6)


def normalised(train: CSR) -> np.ndarray:
    """Return R: float64 [M, N]."""
    X = dense(train)
    R: np.ndarray = X / np.sqrt(np.maximum(X.sum(1), 1))[:, None] / np.sqrt(np.maximum(X.sum(0), 1))
    return R


@pytest.mark.parametrize("factors", [3, 12, 256])
def test_scores_are_those_of_the_formula(factors: int) -> None:
    train = random_interactions(60, 18, 0.3)  # so few items that the subspace is all of their space
    X, R = dense(train), normalised(train)
    root = np.sqrt(np.maximum(X.sum(0), 1))
    Q = np.linalg.svd(R)[2][: min(factors, 17)].T  # the last item has no users
    expected = X @ R.T @ R + 0.3 * (X / root) @ Q @ Q.T * root
    found = weights(train, factors=factors, low_pass_weight=0.3)
    assert found.low_rank is not None
    assert found.low_rank[0].shape == (18, min(factors, 17))
    np.testing.assert_allclose(found.scores(train), expected, atol=1e-5)


def test_singular_vectors_hold_almost_all_that_they_can() -> None:
    train = random_interactions(400, 300, 0.05)  # without structure: the hardest case
    Q = right_singular_vectors(train, 30, seed=0).double().numpy()
    np.testing.assert_allclose(Q.T @ Q, np.eye(30), atol=1e-5)
    best = (np.linalg.svd(normalised(train))[1][:30] ** 2).sum()
    assert 0.999 * best < ((normalised(train) @ Q) ** 2).sum() <= best


@pytest.mark.usefixtures("threads")
def test_threads_do_not_change_the_bits() -> None:
    train, found = random_interactions(300, 200), []
    for threads in (1, 2):
        set_threads(threads)
        found.append(weights(train, factors=20).tensors())
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_memory_is_checked_before_the_matrix_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "memory", lambda: {"free": 50})
    with pytest.raises(InputError, match=r"gfcf needs .* of memory for 4 users and 5 items"):
        GFCF().fit(Dataset.from_csr(CASE.to_scipy()))
