"""Many rows are sorted in files. The result is that in memory, bit for bit."""

import tempfile
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drm_triton import Dataset
from drm_triton.data.prepare import spill
from drm_triton.names import SplitName

SPLITS: list[SplitName] = ["random", "per-user", "users"]


def random_rows(seed: int, rows: int, n_users: int, n_items: int) -> pl.DataFrame:
    """Return rows with repeated pairs, skewed, with gaps between the ids, in no order."""
    rng = np.random.default_rng(seed)
    users, items = ((n * rng.random(rows) ** 2).astype(np.int64) for n in (n_users, n_items))
    return pl.DataFrame(
        {"user": 7 * users - 100, "item": [f"i{item}" for item in items], "rating": rng.integers(1, 6, rows)}
    )


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 99),
    st.integers(1, 400),
    st.sampled_from([(1, 1), (2, 3)]),
    st.sampled_from(SPLITS),
    st.sampled_from([(0.7, 0.1, 0.2), (1, 0, 0), (0.5, 0.5, 0), (0.5, 0, 0.5)]),
    st.sampled_from([None, 3]),
)
def test_the_same_data_set(
    seed: int,
    rows: int,
    core: tuple[int, int],
    split: SplitName,
    ratios: tuple[float, float, float],
    min_rating: float | None,
) -> None:
    many = pl.DataFrame({"user": [0, 1, 2] * 3, "item": ["x"] * 3 + ["y"] * 3 + ["z"] * 3, "rating": [5] * 9})
    frame = pl.concat([random_rows(seed, rows, 40, 30), many])
    options = {"min_user": core[0], "min_item": core[1], "split": split, "ratios": ratios, "min_rating": min_rating}
    expected = Dataset.from_frame(frame, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("drm_triton.data.prepare.build.MANY", 0)
        patch.setattr(spill, "ROWS", 37)
        patch.setattr(spill, "LEADING", 3)
        found = Dataset.from_frame(frame, **options)
    assert found.checksum == expected.checksum
    assert found.meta == expected.meta
    assert found.user_ids.equals(expected.user_ids)


def test_files_are_removed_with_the_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr("drm_triton.data.prepare.build.MANY", 0)
    data = Dataset.from_frame(random_rows(0, 500, 40, 30))
    assert sorted(file.name for file in tmp_path.rglob("*.indices")) == [
        "test.indices",
        "train.indices",
        "valid.indices",
    ]
    assert data.train.nnz > 100
    del data
    assert not list(tmp_path.iterdir())


def test_weights_and_times_stay_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    frame = random_rows(0, 300, 20, 20).with_columns(timestamp=pl.int_range(300))
    expected = [Dataset.from_frame(frame, split="time").checksum, Dataset.from_frame(frame, weight="rating").checksum]
    monkeypatch.setattr("drm_triton.data.prepare.build.MANY", 0)
    found = [Dataset.from_frame(frame, split="time").checksum, Dataset.from_frame(frame, weight="rating").checksum]
    assert found == expected
