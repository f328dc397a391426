"""Two small fitted models that the tests of recommending and of fold-in share."""

from collections.abc import Callable

import polars as pl
import pytest

from drm_triton import DRM, Dataset
from drm_triton.data.prepare.synthetic import Shape, generate

LikedItems = Callable[[DRM, str], list[int]]


@pytest.fixture(scope="session")
def models() -> dict[str, DRM]:
    """A model for each score, fitted on 120 users (u0, u1, ...) and 90 items (0, 10, ...)."""
    users, items = generate(Shape(users=120, items=90, interactions=1800), 3)
    frame = pl.DataFrame({"user": [f"u{u}" for u in users], "item": [10 * i for i in items]})
    data = Dataset.from_frame(frame, ratios=(1, 0, 0))
    return {score: DRM(score=score, factors=8, epochs=4).fit(data) for score in ("dot", "l2")}


@pytest.fixture(params=["dot", "l2"])
def model(request: pytest.FixtureRequest, models: dict[str, DRM]) -> DRM:
    return models[request.param]


@pytest.fixture(scope="session")
def liked_items() -> LikedItems:
    """Return the ids of the items that a user has in the training data."""

    def find(model: DRM, user: str) -> list[int]:
        data = model.interactions
        return data.item_ids[data.train.row(int(data.encode_users([user])[0]))].to_list()

    return find
