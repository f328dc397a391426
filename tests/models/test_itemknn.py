"""ItemKNN: the formulas of the similarities, the neighbours of each column, another library."""

import numpy as np
import pytest

from drm_triton.data.csr import CSR
from drm_triton.models.itemknn import TINY, itemknn_weights
from tests.models.items import CASE, dense, keep_largest, random_interactions


def formula(train: CSR, similarity: str, shrink: float) -> np.ndarray:
    """Return the similarities of all pairs."""
    X = dense(train)
    c, n = X.T @ X, X.sum(0)
    either = n[:, None] + n
    S: np.ndarray = {
        "cosine": lambda: c / (np.sqrt(np.outer(n, n)) + shrink + TINY),
        "jaccard": lambda: c / np.maximum(either - c + shrink, 1e-300),
        "dice": lambda: 2 * c / np.maximum(either + shrink, 1e-300),
    }[similarity]()
    np.fill_diagonal(S, 0)
    return S


@pytest.mark.parametrize("similarity", ["cosine", "jaccard", "dice"])
@pytest.mark.parametrize("shrink", [0.0, 3.5])
def test_similarities_are_those_of_the_formula(similarity: str, shrink: float) -> None:
    train = random_interactions(60, 40)
    S = formula(train, similarity, shrink)
    np.testing.assert_allclose(itemknn_weights(train, similarity, None, shrink).toarray(), S, atol=1e-12)
    few = itemknn_weights(train, similarity, 4, shrink).toarray()
    np.testing.assert_allclose(few, keep_largest(S.T.round(12), 4).T, atol=1e-11)  # equal ones differ by rounding
    assert (few > 0).sum(0).max() == 4


def test_values_by_hand() -> None:
    # Items 0 and 1 have two users each and share one.
    values = [itemknn_weights(CASE, name, 5, 0.0)[0, 1] for name in ("cosine", "jaccard", "dice")]
    assert values == pytest.approx([1 / 2, 1 / 3, 1 / 2], abs=1e-6)


@pytest.mark.parametrize(
    ("similarity", "other", "options"), [("cosine", "Cosine", {"normalize": True}), ("jaccard", "Jaccard", {})]
)
def test_the_same_as_irspack(similarity: str, other: str, options: dict[str, bool]) -> None:
    recommenders = pytest.importorskip("irspack.recommenders")
    train = random_interactions(60, 40)
    kind = getattr(recommenders, f"{other}KNNRecommender")
    expected = kind(train.to_scipy(np.float64), shrinkage=2.0, top_k=40, **options).learn().W.toarray()
    np.fill_diagonal(expected, 0)
    np.testing.assert_allclose(itemknn_weights(train, similarity, None, 2.0).toarray(), expected, atol=1e-6)


def test_users_and_items_without_interactions() -> None:
    train = CSR.from_pairs(np.array([0, 0]), np.array([0, 2]), (2, 4))
    for similarity in ("cosine", "jaccard", "dice"):
        S = itemknn_weights(train, similarity, 3, 0.0).toarray()
        assert S[0, 2] == S[2, 0] == pytest.approx(1, abs=1e-5)
        assert (S > 0).sum() == 2
